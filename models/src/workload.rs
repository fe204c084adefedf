//! The largest request that a model must serve, for generation and for training.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use ops::training::Moments;

use crate::{LoraOptions, Recompute};

/// The largest request that a model must serve at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Number of sequences that decode or train together.
    pub batch: usize,
    /// Number of positions of each sequence: prompt and completion, or training tokens.
    pub context: usize,
    /// Number of positions, over all sequences, without memory of their own: sequences share whole pages of a
    /// prompt.
    pub shared: usize,
    /// Training; none for generation.
    pub training: Option<Training>,
}

/// Training of a model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Training {
    /// Values that training changes.
    pub trains: Trains,
    /// Activations that the backward pass recomputes.
    pub recompute: Recompute,
}

/// Values that training changes.
#[derive(Debug, Clone, PartialEq)]
pub enum Trains {
    /// An adapter of a frozen model.
    Adapter(LoraOptions),
    /// All weights.
    Weights {
        /// True to keep exact weights in f32 next to weights in 16 bits.
        master: bool,
        /// Storage of the moments.
        moments: Moments,
    },
}

impl Default for Trains {
    fn default() -> Self {
        Self::Adapter(LoraOptions::default())
    }
}

impl Workload {
    /// Returns a generation workload of sequences that share no positions.
    pub const fn new(batch: usize, context: usize) -> Self {
        Self { batch, context, shared: 0, training: None }
    }
}

impl Serialize for Workload {
    /// Writes `shared` for generation, or the training options.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("batch", &self.batch)?;
        map.serialize_entry("context", &self.context)?;
        match &self.training {
            None => map.serialize_entry("shared", &self.shared)?,
            Some(training) => {
                map.serialize_entry("recompute", training.recompute.name())?;
            }
        }
        map.end()
    }
}
