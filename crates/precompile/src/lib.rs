//! Compilation of CUDA kernels before their first launch, with NVRTC on many cores.
//!
//! A kernel goes the way of CubeCL's CUDA back end: CubeCL makes CUDA C++ of it, NVRTC machine code. [`compile`] puts
//! the machine code where CubeCL looks before it compiles. A [`Toolkit`] needs no card: it compiles for an architecture
//! by name, asks `ptxas` for registers, spills and shared memory, and remembers the answers.

mod known;
mod nvrtc;
mod occupancy;
mod properties;
mod source;
mod store;
mod toolkit;

pub use known::Known;
pub use nvrtc::CompileError;
pub use occupancy::{Limits, occupancy};
pub use properties::{properties, target_properties};
pub use store::{Missing, compile};
pub use toolkit::{Toolkit, ToolkitError, Usage};
