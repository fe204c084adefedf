//! Memory of models on a device: plans, budgets and current use.
//!
//! ```text
//! Workload      sequences, positions, and training of an adapter            from `models`
//! Footprint     parts of a model's memory for a workload, from shapes       from `models`, with op sizes from `ops`
//! Plan          footprint on one device, next to current use                refused if it exceeds a MemoryBudget
//! Ledger        sessions, batches and trainers that share a model's weights
//! MemoryUsage   bytes in the device's pools
//! ```
//!
//! A plan needs no device, only its profile. Engine and trainer build on this module.

mod budget;
mod error;
mod ledger;
mod plan;
mod planned;
mod usage;

pub use budget::MemoryBudget;
pub use error::PlanError;
pub(crate) use error::check_host;
pub(crate) use ledger::{Grant, Ledger, Need};
pub use plan::Plan;
pub(crate) use plan::compute_name;
pub(crate) use planned::PlannedModel;
pub use usage::{MemoryUsage, free_bytes};

pub use crate::batch_size::{BatchSize, BatchTry, find_batch_size, optimal_batch_size};
pub use crate::preset::{Chosen, Preset, UnknownPreset};
pub use models::Workload;
