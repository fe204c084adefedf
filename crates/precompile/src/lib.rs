//! Compilation of CUDA kernels before their first launch, with NVRTC on many cores.
//!
//! Kernels are compiled as in CubeCL's CUDA backend: CubeCL generates CUDA C++, and NVRTC compiles it to machine code.
//! [`compile`] puts the machine code into the store that CubeCL checks before it compiles. A [`Toolkit`] needs no card:
//! it compiles for an architecture by name, and caches the registers, spills and shared memory that `ptxas` reports.

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
pub use properties::properties;
#[cfg(feature = "cuda")]
pub use properties::target_properties;
pub use store::{Missing, compile};
pub use toolkit::{Toolkit, ToolkitError, Usage};
