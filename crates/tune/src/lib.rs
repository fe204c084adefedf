//! How fast a config is, remembered.
//!
//! A [`Kernel`] ties a problem (what to compute) to configs (how). The [`Tuner`] takes its feasible
//! candidates, verifies each against the kernel's simplest config, measures it with [`timing`], and
//! keeps the winner in a [`TuneCache`]: a text file keyed by kernel, version, architecture and bucket.
//! Nothing is tuned by surprise: the caller says with a [`Policy`] what a miss means.

mod cache;
mod fill;
mod kernel;
mod queue;
pub mod timing;
mod tuner;

pub use cache::{
    CacheError, Entry, Key, Measured, Merged, Source, TuneCache, Warning, default_cache_path,
};
pub use fill::fill;
pub use kernel::{Cost, Infeasible, InvalidConfig, Kernel, Output, config_of};
pub use queue::{Compiler, Queue};
pub use record::{Policy, UnknownChoice as UnknownPolicy};
pub use tuner::{Choice, TuneError, Tuner, operand_sets, poison};
