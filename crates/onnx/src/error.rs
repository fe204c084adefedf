//! Errors of ONNX files.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::graph::Node;

/// An error of reading or running an ONNX model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// A file that cannot be read.
    #[error("cannot read {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// A file that is not an ONNX model, or is truncated.
    #[error("cannot read {} as an ONNX model: {why}\nhint: check that the file is complete", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A model that contradicts itself or the specification.
    #[error("the model is invalid: {0}")]
    Invalid(String),
    /// An argument that does not fit the model: the name of a pass or node, or the number of inputs.
    #[error("{0}")]
    Argument(String),
    /// A device that failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// A tensor whose data do not match its type and shape.
    #[error("tensor `{name}`: {why}")]
    Tensor {
        /// Its name.
        name: String,
        /// The reason.
        why: String,
    },
    /// An opset that is not supported.
    #[error(
        "expected opset {least} to {most} of domain `{domain}`, got {version}\nhint: export the model with another opset"
    )]
    Opset {
        /// The domain.
        domain: String,
        /// The opset of the model.
        version: i64,
        /// Oldest supported opset.
        least: i64,
        /// Newest supported opset.
        most: i64,
    },
    /// A model that exceeds a limit of size.
    #[error("expected at most {most} {what}, got {have}")]
    Limit {
        /// The counted parts.
        what: &'static str,
        /// Their number.
        have: usize,
        /// The limit.
        most: usize,
    },
    /// Nodes that cannot run.
    #[error("{} of the model cannot run:\n{}", count(.0.len()), lines(.0))]
    Unserved(Vec<Fault>),
    /// A node that failed when it ran.
    #[error("{0}")]
    Node(Fault),
    /// An input with another dtype or shape than the model declares.
    #[error("input `{name}`: {why}")]
    Input {
        /// Its name.
        name: String,
        /// The reason.
        why: String,
    },
    /// A dimension name that no input has.
    #[error(
        "no input has a dimension named `{name}`\nhint: the named dimensions are {}",
        list(have)
    )]
    Dimension {
        /// The requested name.
        name: String,
        /// The dimension names of the inputs.
        have: Vec<String>,
    },
}

/// A node that cannot run.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Its name.
    pub node: String,
    /// Its operator.
    pub op: String,
    /// The reason.
    pub why: String,
}

impl Fault {
    pub(crate) fn new(node: &Node, why: String) -> Self {
        Self { node: node.name.clone(), op: node.op.clone(), why }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node.is_empty() {
            true => write!(f, "{}: {}", self.op, self.why),
            false => write!(f, "{} `{}`: {}", self.op, self.node, self.why),
        }
    }
}

fn count(nodes: usize) -> String {
    if nodes == 1 { "a node".to_owned() } else { format!("{nodes} nodes") }
}

/// Returns one line per operator and reason, with the number of nodes.
fn lines(faults: &[Fault]) -> String {
    let mut counts = BTreeMap::<(&str, &str), usize>::new();
    for own in faults {
        *counts.entry((&own.op, &own.why)).or_default() += 1;
    }
    let line = |((op, why), count): (&(&str, &str), &usize)| format!("{op} ({count}): {why}");
    counts.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none: all dimensions are numbers".to_owned(),
        _ => names.join(", "),
    }
}

/// Returns the error of an invalid model.
pub(crate) fn invalid(why: impl Into<String>) -> OnnxError {
    OnnxError::Invalid(why.into())
}

/// Returns the error of a device that failed.
pub(crate) fn device_failed(why: impl Into<String>) -> OnnxError {
    OnnxError::Device(why.into())
}
