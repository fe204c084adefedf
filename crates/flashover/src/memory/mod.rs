//! Memory of models on a device: what is planned, what a budget allows, and what lives there.
//!
//! ```text
//! Workload      sequences, positions, and whether an adapter is trained            `models`
//! Footprint     parts of a model's memory for a workload, from shapes alone        `models`, by what `ops` say of each op
//! Plan          the same on one device, next to all that lives there               refused if a MemoryBudget does not hold it
//! Ledger        sessions, batches and trainers that live on the weights of a model
//! MemoryUsage   bytes that the device's pools hold
//! ```
//!
//! A plan is pure, so that it serves cards that are not there. Engine and trainer build on this module.

mod budget;
mod error;
mod ledger;
mod plan;
mod planned;
mod usage;

pub use budget::MemoryBudget;
pub use error::PlanError;
pub(crate) use ledger::{Grant, Ledger};
pub use plan::Plan;
pub(crate) use plan::compute_name;
pub(crate) use planned::PlannedModel;
pub use usage::{MemoryUsage, free_bytes};

pub use crate::batch_size::{BatchSize, BatchTry, find_batch_size, optimal_batch_size};
pub use crate::preset::{Chosen, Preset, UnknownPreset};
pub use models::Workload;
