//! Compiling for CUDA cards that are not there.
//!
//! A kernel goes the way that the CUDA back end takes it, CUDA C++ by CubeCL and PTX by NVRTC, and
//! then through `ptxas` for the card: registers, spills, shared memory and occupancy are facts of the
//! binary, and no card is needed to read them. What they were for the same operations before is kept.

mod compile;
mod known;
mod occupancy;
mod sweep;

pub use compile::{CompileError, Toolkit, Usage};
pub use known::Known;
pub use occupancy::{Limits, occupancy};
pub use sweep::{Finding, Row, TARGETS, sweep};
