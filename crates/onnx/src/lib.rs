//! Reads ONNX graphs and runs them on Burn's tensors, with our kernels where they are hot.
//!
//! A file becomes a [graph](graph::Graph): functions inlined, nodes sorted, dimensions numbers where they are known. Types are inferred
//! and constants folded, passes rewrite it, and a program runs it: node by node, then captured as a graph of the device.

mod array;
pub mod conformance;
mod devices;
mod error;
mod fold;
mod frames;
mod graph;
pub mod layers;
mod limits;
mod memo;
mod model;
mod ops;
pub mod passes;
mod pieces;
mod plan;
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
pub use graph::ValueType;
pub use model::{Counts, Inspection, Model, Options, Speed, inspect, random};
pub use plan::Plan;
pub use tensor::{decode_tensor, encode_tensor};
