//! Errors of ONNX files.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::graph::Node;

/// An error of reading an ONNX file.
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
    /// A file that is no ONNX model, or that ends too early.
    #[error("{} is no ONNX model: {why}\nhint: check that the file is complete", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A model that contradicts itself or the specification.
    #[error("the model is invalid: {0}")]
    Invalid(String),
    /// A tensor whose data do not match its type and shape.
    #[error("tensor `{name}`: {why}")]
    Tensor {
        /// Its name.
        name: String,
        /// The reason.
        why: String,
    },
    /// A version of operators that is not known.
    #[error(
        "the model uses version {version} of the operators of `{domain}`, and versions {least} to {most} are known\nhint: export \
         it with another opset"
    )]
    Opset {
        /// The domain.
        domain: String,
        /// The version of the model.
        version: i64,
        /// Least version that is known.
        least: i64,
        /// Greatest version that is known.
        most: i64,
    },
    /// A size of a model beyond a limit.
    #[error("the model has {have} {what}, and at most {most} are read")]
    Limit {
        /// The parts that are counted.
        what: &'static str,
        /// Their number.
        have: usize,
        /// The limit.
        most: usize,
    },
    /// Nodes that cannot run.
    #[error("{} of the model cannot run:\n{}", count(.0.len()), lines(.0))]
    Unserved(Vec<Fault>),
    /// A node that failed in a run.
    #[error("{0}")]
    Node(Fault),
    /// An input that the model cannot take.
    #[error("input `{name}`: {why}")]
    Input {
        /// Its name.
        name: String,
        /// The reason.
        why: String,
    },
    /// A dimension that no input has.
    #[error("no input has a dimension named `{name}`\nhint: its names are {}", list(have))]
    Dimension {
        /// The name that was asked for.
        name: String,
        /// Names that inputs have.
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

/// Returns a line for each operator and reason, with the number of its nodes.
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

/// Returns an error of a model that is invalid.
pub(crate) fn invalid(why: impl Into<String>) -> OnnxError {
    OnnxError::Invalid(why.into())
}
