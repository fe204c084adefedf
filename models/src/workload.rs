//! The most that a model is asked for at once, for generating and for training.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::{LoraOptions, Recompute};

/// The most that a model is asked for at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Number of sequences that decode or train together.
    pub batch: usize,
    /// Number of positions of each sequence: prompt and answer, or tokens to learn.
    pub context: usize,
    /// Number of positions in all that take no memory of their own, because sequences share the whole pages of a prompt.
    pub shared: usize,
    /// The training of an adapter; none for generating.
    pub training: Option<Training>,
}

/// The training of an adapter.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Training {
    /// Modules and rank of the adapter.
    pub lora: LoraOptions,
    /// True if gradients of several batches make up a step.
    pub accumulates: bool,
    /// Activations that the backward pass computes again.
    pub recompute: Recompute,
}

impl Workload {
    /// Returns the workload of sequences that share nothing and are not trained on.
    pub const fn new(batch: usize, context: usize) -> Self {
        Self { batch, context, shared: 0, training: None }
    }
}

impl Serialize for Workload {
    /// Writes what the workload has: positions are shared or trained on.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("batch", &self.batch)?;
        map.serialize_entry("context", &self.context)?;
        match &self.training {
            None => map.serialize_entry("shared", &self.shared)?,
            Some(training) => {
                let recompute = match training.recompute {
                    Recompute::Layers => "layers",
                    Recompute::Nothing => "nothing",
                };
                map.serialize_entry("accumulates", &training.accumulates)?;
                map.serialize_entry("recompute", recompute)?;
            }
        }
        map.end()
    }
}
