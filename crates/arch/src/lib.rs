//! What the GPU is: opening devices, and the facts that decide what can run on them.
//!
//! A kernel of ours runs on a [`Device`] of this crate, an open handle. [`ArchProfile`] holds the plain
//! facts that a kernel's feasibility depends on, [`ArchId`] is the name under which tuned results are
//! kept. `--profile rtx4090` is [`Device::restrict`]: a real card limited to what another one has.

mod bf16;
mod capabilities;
mod device;
mod facts;
mod host;
pub mod monitor;
mod profile;
pub mod report;

pub use device::{Device, OpenError};
pub use facts::energy_millijoules;
pub use host::HostMemory;
pub use profile::{ArchId, ArchProfile, CubeMma, MmaShape, UnknownProfile, recorded};
pub use quant::DType;
pub use record::{Backend, UnknownChoice as UnknownBackend};
