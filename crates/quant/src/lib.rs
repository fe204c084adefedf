//! Element types, and the formats of quantised weights: one table that every other crate reads.
//!
//! A new format is a variant of [`WeightFormat`] and a row of its table here, and a module of `kernels`. Files, plans,
//! ops, records and command lines take its name, its bits and its blocks from the row.

mod dtype;
mod format;

pub use dtype::DType;
pub use format::{Block, FormatInfo, Scales, Scheme, WeightFormat};
