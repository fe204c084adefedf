//! Runs one process per backend for `bench`, `verify` and `compare`, and renders the results.
//!
//! This crate does not depend on Burn or CubeCL. It holds the command lines of these commands, so that `cargo xtask`
//! rejects a mistake in seconds, before it builds the programs.

mod args;
mod baseline;
mod bench;
mod compare_args;
mod devices;
pub mod fail;
mod process;
mod render;
mod sanitize;
mod stream;
mod verify;

pub use args::{BenchArgs, Format, VerifyArgs, policy, suite};
pub use bench::{bench, check_bench};
pub use compare_args::{CompareArgs, CompareFormat, KV_CACHES, List, PROMPT};
pub use devices::{Chosen, Device, Doctor, Selection};
pub use process::{cuda_roots, describe, end_of, own, tool};
pub use record::DTYPES;
pub use render::{Align, Style, Table, TrainingStep, digits, error, readme, speed, training};
pub use verify::{check_verify, verify};
