//! Opens devices and describes them: the facts that decide which kernels can run.
//!
//! A [`Device`] is an open handle; kernels run on it. An [`ArchProfile`] holds the plain facts that
//! decide if a kernel is feasible. An [`ArchId`] is the key of tuned results. [`Device::restrict`]
//! (`--profile rtx4090`) limits a real card to the features of another one.

mod bf16;
mod capabilities;
mod cards;
mod cores;
mod device;
mod facts;
mod host;
pub mod monitor;
mod profile;
pub mod report;
pub mod transfer;

pub use cores::limit_cores;
pub use device::{Device, OpenError};
pub use facts::energy_millijoules;
pub use host::HostMemory;
pub use profile::{ArchId, ArchProfile, CubeMma, MmaShape, UnknownProfile, recorded};
pub use quant::DType;
pub use record::{Backend, UnknownChoice as UnknownBackend};
