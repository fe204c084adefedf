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
    /// prompt. None for a cache that is not in pages.
    pub shared: Option<usize>,
    /// Training; none for generation.
    pub training: Option<Training>,
}

/// Training of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Training {
    /// Values that training changes.
    pub trains: Trains,
    /// Activations that the backward pass recomputes.
    pub recompute: Recompute,
    /// Parts in host memory.
    pub offload: Offload,
    /// Number of micro-batches of a step. Only gradients in host memory make the memory depend on it.
    pub micro_batches: usize,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            trains: Trains::default(),
            recompute: Recompute::default(),
            offload: Offload::default(),
            micro_batches: 1,
        }
    }
}

/// Parts of training in host memory, which are copied while the device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Offload {
    /// Moments, and master weights next to weights in 16 bits.
    pub optimizer: bool,
    /// Gradients of weights. All micro-batches of a step pass a layer before any passes the next one.
    pub gradients: bool,
    /// Inputs of layers, between the forward and the backward pass.
    pub inputs: bool,
}

impl Offload {
    /// Returns true if a step goes layer by layer, and recomputes each.
    pub const fn by_layer(self) -> bool {
        self.gradients || self.inputs
    }

    /// Returns the names of the parts on the command line.
    pub fn names(self) -> Vec<&'static str> {
        let all =
            [(self.optimizer, "optimizer"), (self.gradients, "gradients"), (self.inputs, "inputs")];
        all.into_iter().filter_map(|(own, name)| own.then_some(name)).collect()
    }
}

/// Values that training changes.
#[derive(Debug, Clone, PartialEq)]
pub enum Trains {
    /// An adapter of a frozen model.
    Adapter(LoraOptions),
    /// All weights.
    Weights {
        /// True to keep master weights in f32 next to weights in 16 bits.
        master: bool,
        /// Storage of the moments.
        moments: Moments,
        /// True if Muon trains the matrices of layers.
        muon: bool,
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
        Self { batch, context, shared: None, training: None }
    }
}

impl Serialize for Workload {
    /// Writes `shared` for generation, or the training options.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("batch", &self.batch)?;
        map.serialize_entry("context", &self.context)?;
        match &self.training {
            None => map.serialize_entry("shared", &self.shared.unwrap_or(0))?,
            Some(training) => {
                map.serialize_entry("recompute", training.recompute.name())?;
                if training.offload != Offload::default() {
                    map.serialize_entry("offload", &training.offload.names())?;
                    map.serialize_entry("micro_batches", &training.micro_batches)?;
                }
            }
        }
        map.end()
    }
}
