//! Element types, and the table of quantised weight formats that all other crates read.
//!
//! A new format needs a variant of [`WeightFormat`], a row of its table, and a module in `kernels`. Files, plans, ops,
//! records and command lines take its name, bits and blocks from the row.

mod dtype;
mod format;

pub use dtype::DType;
pub use format::{Block, FormatInfo, Scales, Scheme, WeightFormat};
