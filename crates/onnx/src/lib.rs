//! Reads ONNX graphs and runs them, node by node, on Burn's tensors.
//!
//! In progress: it is no part of `flashover` yet. Nothing is fused, captured or planned, and kernels are Burn's.

mod array;
pub mod conformance;
mod devices;
mod error;
mod fold;
mod frames;
mod graph;
mod model;
mod ops;
mod plan;
pub mod passes;
mod precision;
mod prepare;
mod proto;
mod rules;
mod run;
mod source;
mod tensor;
#[cfg(test)]
mod tests;
mod types;

pub use error::{Fault, OnnxError};
pub use model::{Model, Options, Speed};
pub use plan::Plan;
