//! Gradients of all weights, or of an adapter, by an explicit backward pass.
//!
//! ```text
//! x₀ = embed(tokens)
//! for each layer l: x_{l+1} = layer_l(x_l), and keep what its gradients need          see layer
//! loss, dx = cross entropy of head(norm(x_L)), some rows at a time                    see loss
//! for each layer l, the last first: dx = gradient of x_l, given that of x_{l+1}
//! table gradients += rows of dx, sorted by token and by position
//! ```
//!
//! Gradients of weights are added to one flat buffer in f32, so that micro-batches accumulate without a further pass. An
//! adapter's factors are part of their projections, as in [`UnmergedLora`](super::unmerged_lora::UnmergedLora); layers below the
//! lowest adapted one have no backward pass. No node of an autodiff graph exists: each formula is written once, for all families
//! and both uses, and calls the same kernels as the forward pass. All sums have a fixed order, so that two calls give the same
//! bits.
//!
//! [`Recompute`] selects the activations that a layer keeps for its gradients (Chen et al., 2016, arXiv:1604.06174). Sequences of
//! different lengths are packed one after the other, and do not attend to each other.

mod attention;
mod by_layer;
mod factors;
mod feed_forward;
mod gradients;
mod layer;
mod loss;
mod parking;
mod policy;
mod prefill;

use std::ops::Range;

use burn::tensor::{Device, Tensor};
use ops::Arena;
use ops::training::embed_backward;

use super::batch::{Batch, TrainBatch};
use super::flat::FlatWeights;
use super::flat_adapter::FlatAdapter;
use super::paged::Places;
use super::{Decoder, rounded};
use crate::names::Slot;
use crate::parameters::Group;
use crate::{Error, Footprint, Parameters};
use factors::Factors;
pub(super) use factors::{adapted_layer, members};
use layer::Kept;

pub use gradients::Gradients;
pub use loss::{Loss, TokenStats};
pub use parking::Parking;
pub(super) use policy::{Objective, OnDevice};
pub(super) use prefill::PackedPrefill;

/// Activations that the backward pass recomputes instead of keeping them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Recompute {
    /// All activations of a layer except its input.
    #[default]
    Layers,
    /// Activations inside of feed-forward blocks, which are the most, and results of norms.
    FeedForward,
    /// Results of norms.
    Norms,
    /// None: all activations are kept, which takes more memory and saves a forward pass.
    Nothing,
}

impl Recompute {
    /// All levels, the one with the least memory first.
    pub const ALL: [Self; 4] = [Self::Layers, Self::FeedForward, Self::Norms, Self::Nothing];

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Layers => "layers",
            Self::FeedForward => "feed-forward",
            Self::Norms => "norms",
            Self::Nothing => "nothing",
        }
    }
}

/// Activations that layers keep for their gradients, and memory for them.
#[derive(Debug)]
pub struct Activations {
    recompute: Recompute,
    /// One for each layer that has gradients; none for the pools.
    arenas: Vec<Arena>,
}

impl From<Recompute> for Activations {
    /// Keeps them in pools.
    fn from(recompute: Recompute) -> Self {
        Self { recompute, arenas: Vec::new() }
    }
}

impl Activations {
    /// Allocates the memory of a footprint: a batch of more rows takes the rest from pools.
    pub fn new(recompute: Recompute, parts: &Footprint, device: &Device) -> Self {
        let layers = parts.saved_layers as u128;
        let bytes = parts.saved.checked_div(layers).unwrap_or(0);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let layers = if bytes == 0 { 0 } else { parts.saved_layers };
        Self { recompute, arenas: (0..layers).map(|_| Arena::new(bytes, device)).collect() }
    }

    /// Returns the bytes that the last batch kept of the layer that kept the most.
    pub fn needed(&self) -> u64 {
        self.arenas.iter().map(Arena::needed).max().unwrap_or(0)
    }
}

/// Values that training changes.
#[derive(Debug, Clone, Copy)]
pub enum Trained<'a> {
    /// All weights of a decoder that reads them from this buffer ([`Decoder::of_flat`]).
    Weights(&'a FlatWeights),
    /// An adapter of a decoder.
    Adapter(&'a FlatAdapter),
}

impl Trained<'_> {
    /// Returns the buffer of all values.
    pub const fn values(&self) -> &Tensor<1> {
        match self {
            Self::Weights(flat) => flat.values(),
            Self::Adapter(flat) => flat.values(),
        }
    }

    /// Returns the groups of the buffer.
    pub fn groups(&self) -> Vec<(Group, Range<usize>)> {
        match self {
            Self::Weights(flat) => flat.parameters().groups().to_vec(),
            Self::Adapter(flat) => flat.groups(),
        }
    }
}

/// Values whose gradients a pass adds.
enum Learns<'a> {
    /// All weights.
    Weights(&'a FlatWeights),
    /// The factors of an adapter.
    Factors(Box<Factors<'a>>),
    /// None: the loss alone is computed, of the decoder as it is.
    Nothing,
}

impl<'a> Learns<'a> {
    fn new(decoder: &'a Decoder, trained: Trained<'a>) -> Result<Self, Error> {
        Ok(match trained {
            Trained::Weights(flat) => Self::Weights(flat),
            Trained::Adapter(flat) => Self::Factors(Box::new(Factors::new(decoder, flat)?)),
        })
    }

    /// Returns the lowest layer that needs gradients.
    fn lowest(&self) -> usize {
        match self {
            Self::Weights(_) => 0,
            Self::Factors(factors) => factors.lowest(),
            Self::Nothing => usize::MAX,
        }
    }
}

/// One pass over a batch.
#[derive(Clone, Copy)]
struct Pass<'a> {
    decoder: &'a Decoder,
    batch: &'a TrainBatch,
    learns: &'a Learns<'a>,
    /// None to compute the loss alone.
    gradients: Option<&'a Gradients>,
    /// Places in a cache for keys and values, if they are kept.
    places: Option<&'a Places<'a>>,
}

impl Pass<'_> {
    /// Returns the output of the last layer, and what the gradients of the layers from `lowest` on need.
    fn through_layers(
        &self,
        lowest: usize,
        activations: &Activations,
    ) -> Result<(Tensor<2>, Vec<Kept>), Error> {
        let arena = |index: usize| activations.arenas.get(index.checked_sub(lowest)?);
        let embedded = || self.batch.embedded(self.decoder);
        let mut x = arena(0).map_or_else(embedded, |arena| arena.keep(embedded)?)?;
        let mut kept = Vec::new();
        for index in 0..self.decoder.layers.len() {
            let _layer = trace::span(|| format!("layer {index}"));
            let memory = [arena(index), arena(index + 1)];
            let (out, own) = self.forward(index, x, activations.recompute, memory)?;
            if index >= lowest {
                kept.push(own);
            }
            x = out;
        }
        Ok((x, kept))
    }

    /// Returns the gradient of the embedding if `lowest` is 0 and all weights are trained.
    fn back_through_layers(
        &self,
        mut kept: Vec<Kept>,
        mut dx: Tensor<2>,
        lowest: usize,
    ) -> Result<Option<Tensor<2>>, Error> {
        let whole = matches!(self.learns, Learns::Weights(_));
        for index in (lowest..self.decoder.layers.len()).rev() {
            let _layer = trace::span(|| format!("backward {index}"));
            self.decoder.note_memory();
            let own = kept.pop().expect("one per layer");
            match self.backward(index, own, dx, index > lowest || whole)? {
                Some(below) => dx = below,
                None => return Ok(None),
            }
        }
        Ok(Some(dx))
    }
}

impl Decoder {
    /// Adds the gradient of `weight` · loss to `gradients`, where the loss is the sum of -ln p over the learned tokens of the
    /// batch, or that of its policy. `scale` `[1]` is a further factor, on the device.
    ///
    /// # Errors
    /// [`Error::NothingToLearn`] for a batch without target tokens or with an empty sequence. [`Error::Token`].
    /// [`Error::Context`] for a sequence longer than the context length of the model. [`Error::PolicyLength`]. [`Error::Op`].
    pub fn add_gradients<'a>(
        &self,
        trained: Trained<'_>,
        gradients: &Gradients,
        batch: impl Into<Batch<'a>>,
        (weight, scale): (f64, Tensor<1>),
        activations: &Activations,
    ) -> Result<Loss, Error> {
        let _stream_guard = ops::stream_guard();
        activations.arenas.iter().for_each(Arena::clear);
        let batch = &TrainBatch::new(self, batch.into())?;
        let learns = Learns::new(self, trained)?;
        let lowest = learns.lowest();
        let pass = Pass {
            decoder: self,
            batch,
            learns: &learns,
            gradients: Some(gradients),
            places: None,
        };
        let (x, kept) = pass.through_layers(lowest, activations)?;
        let (loss, dx) = pass.loss(x, Some((weight, scale)))?;
        let dx = pass.back_through_layers(kept, dx.expect("it is asked for"), lowest)?;
        if let (Trained::Weights(flat), Some(dx)) = (trained, dx) {
            self.add_tables(flat.parameters(), gradients, batch, dx)?;
        }
        Ok(loss)
    }

    /// Adds the gradients of the embedding, and of positions, given that of the first layer's input.
    fn add_tables(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        batch: &TrainBatch,
        dx: Tensor<2>,
    ) -> Result<(), Error> {
        let _part = trace::span(|| "embedding");
        let scale = self.config.embedding_scale.map_or(1.0, |scale| rounded(scale, self.dtype));
        let (ctx, looked_up) = (&self.ctx, &batch.looked_up);
        if self.positions.is_some() {
            let table = gradients.matrix(parameters, Slot::Positions)?;
            embed_backward(ctx, dx.clone(), &looked_up.positions(&self.device), &table, 1.0)?;
        }
        let table = gradients.matrix(parameters, Slot::Embedding)?;
        Ok(embed_backward(ctx, dx, &looked_up.tokens(&self.device), &table, scale)?)
    }

    /// Computes the loss of a batch. Without `trained`, it is that of the decoder itself, as it was loaded.
    ///
    /// # Errors
    /// The errors of [`Decoder::add_gradients`].
    pub fn loss_of<'a>(
        &self,
        trained: Option<Trained<'_>>,
        batch: impl Into<Batch<'a>>,
    ) -> Result<Loss, Error> {
        let _stream_guard = ops::stream_guard();
        let batch = &TrainBatch::new(self, batch.into())?;
        let learns = trained.map_or(Ok(Learns::Nothing), |own| Learns::new(self, own))?;
        let pass = Pass { decoder: self, batch, learns: &learns, gradients: None, places: None };
        let (x, _) = pass.through_layers(self.layers.len(), &Recompute::Layers.into())?;
        Ok(pass.loss(x, None)?.0)
    }

    /// Records memory use in a trace.
    fn note_memory(&self) {
        trace::memory(|| {
            let usage = self.device.memory_pool_usage();
            usage.map_or((0, 0), |usage| (usage.bytes_in_use, usage.bytes_reserved))
        });
    }
}
