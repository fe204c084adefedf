//! Autotuner: measures kernel configs and caches the fastest.
//!
//! A [`Kernel`] ties a problem (the computation) to its configs (the ways to run it). The [`Tuner`]
//! takes the feasible candidates, verifies each against the kernel's baseline config, and measures it
//! with [`timing`]. It keeps the winner in a [`TuneCache`]: a text file keyed by kernel, version,
//! architecture and bucket. The caller's [`Policy`] decides what happens on a cache miss, so nothing
//! is tuned unasked.

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
pub use kernel::{Cost, Infeasible, InvalidConfig, Kernel, Output, config_of, with_cores};
pub use queue::{Compiler, Queue};
pub use record::{Policy, UnknownChoice as UnknownPolicy};
pub use tuner::{Choice, TuneError, Tuner, operand_sets, poison};
