//! Gradients of all weights, by an explicit backward pass.
//!
//! ```text
//! x₀ = embed(tokens)
//! for each layer l: x_{l+1} = layer_l(x_l), and keep what its gradients need          see layer
//! loss, dx = cross entropy of head(norm(x_L)), some rows at a time                    see loss
//! for each layer l, the last first: dx = gradient of x_l, given that of x_{l+1}
//! table gradients += rows of dx, sorted by token and by position
//! ```
//!
//! Gradients of weights are added to one flat buffer in f32, so that micro-batches accumulate without a further pass. No node
//! of an autodiff graph exists: each formula is written once, for all families, and calls the same kernels as the forward
//! pass. All sums have a fixed order, so that two calls give the same bits.

mod layer;
mod loss;

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use ops::Ctx;
use ops::training::{NormGradients, embed_backward};

use super::batch::TrainBatch;
use super::flat::FlatWeights;
use super::{Decoder, rounded};
use crate::names::{Side, Slot};
use crate::{Error, Example, Parameters, Recompute};

/// Gradients of all parameters in one buffer in f32, laid out by [`Parameters`]. Clones share the buffer.
#[derive(Debug, Clone)]
pub struct Gradients {
    parameters: Arc<Parameters>,
    sums: Tensor<1>,
}

impl Gradients {
    /// Creates a buffer of zeros.
    pub fn zeros(parameters: Arc<Parameters>, device: &Device) -> Self {
        let len = parameters.len();
        let sums = device.memory_persistent_allocations((), move |()| {
            Tensor::<1>::zeros([len], (device, DType::F32))
        });
        Self { parameters, sums }
    }

    /// Returns the buffer.
    pub const fn sums(&self) -> &Tensor<1> {
        &self.sums
    }

    /// Sets all gradients to 0.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn clear(&self, ctx: &Ctx) -> Result<(), Error> {
        Ok(ops::training::clear(ctx, &self.sums)?)
    }

    fn matrix(&self, slot: Slot) -> Result<Tensor<2>, Error> {
        let tensor = self.parameters.tensor(slot, Side::Weight).expect("the decoder has it");
        Ok(ops::view(&self.sums, tensor.at, [tensor.rows(), tensor.shape[1]])?)
    }

    /// Returns the gradient of a vector, if the decoder has it.
    fn vector(&self, slot: Slot, side: Side) -> Result<Option<Tensor<1>>, Error> {
        let Some(tensor) = self.parameters.tensor(slot, side) else { return Ok(None) };
        Ok(Some(ops::view(&self.sums, tensor.at, [tensor.len()])?))
    }

    fn norm(&self, slot: Slot) -> Result<NormGradients, Error> {
        let weight = self.vector(slot, Side::Weight)?.expect("a norm has a weight");
        Ok(NormGradients { weight, bias: self.vector(slot, Side::Bias)?, accumulate: true })
    }
}

/// One pass over a batch.
#[derive(Clone, Copy)]
struct Pass<'a> {
    decoder: &'a Decoder,
    batch: &'a TrainBatch,
}

impl Decoder {
    /// Adds the gradient of `weight` · loss to `gradients`, where the loss is the sum of -ln p over the learned tokens of the
    /// batch. Returns the loss `[1]` in f32, and the number of learned tokens.
    ///
    /// `flat` holds this decoder's weights ([`Decoder::of_flat`]). `scale` `[1]` is a further factor, on the device.
    ///
    /// # Errors
    /// [`Error::NothingToLearn`] for a batch without target tokens or with an empty sequence. [`Error::Token`].
    /// [`Error::Context`] for a sequence longer than the context length of the model. [`Error::Op`].
    pub fn add_gradients(
        &self,
        flat: &FlatWeights,
        gradients: &Gradients,
        batch: &[Example],
        (weight, scale): (f64, Tensor<1>),
        recompute: Recompute,
    ) -> Result<(Tensor<1>, usize), Error> {
        let _stream_guard = ops::stream_guard();
        let batch = TrainBatch::new(self, batch)?;
        let pass = Pass { decoder: self, batch: &batch };
        let layers = self.layers.len();
        let mut x = batch.embedded(self)?;
        let mut kept = Vec::with_capacity(layers);
        for index in 0..layers {
            let _layer = trace::span(|| format!("layer {index}"));
            let (out, own) = pass.forward(index, x, recompute)?;
            kept.push(own);
            x = out;
        }
        let (loss, mut dx) = pass.loss(flat, gradients, x, (weight, scale))?;
        for index in (0..layers).rev() {
            let _layer = trace::span(|| format!("backward {index}"));
            self.note_memory();
            let own = kept.pop().expect("one per layer");
            dx = pass.backward(index, own, dx, gradients)?;
        }
        let _part = trace::span(|| "embedding");
        let scale = self.config.embedding_scale.map_or(1.0, |scale| rounded(scale, self.dtype));
        let (ctx, looked_up) = (&self.ctx, &batch.looked_up);
        if self.positions.is_some() {
            let table = gradients.matrix(Slot::Positions)?;
            embed_backward(ctx, dx.clone(), &looked_up.positions(&self.device), &table, 1.0)?;
        }
        let table = gradients.matrix(Slot::Embedding)?;
        embed_backward(ctx, dx, &looked_up.tokens(&self.device), &table, scale)?;
        Ok((loss, batch.count))
    }
}
