//! One layer, forward and backward.
//!
//! ```text
//!   y = norm(x)             q, k, v = heads of y · Wᵀ + b, normalised and rotated          a = attention(q, k, v)
//!   m = x + post(a · Woᵀ + bo)
//!   y' = norm'(m)           h = activation(y' · Wgᵀ) · (y' · Wuᵀ), or activation(y' · Wuᵀ)
//!   out = m + post'(h · Wdᵀ + bd)
//!
//!   given dout:             dWd += doutᵀ · h, dbd += Σ dout, dh = dout · Wd                dout through post' first
//!   dz, du of dh            dWu += duᵀ · y', dWg += dzᵀ · y', dy' = dz · Wg + du · Wu
//!   dm = dout + norm'ᵀ(dy') dWo += dmᵀ · a, da = dm · Wo                                   dm through post first
//!   dq, dk, dv of da        rotated back and through their norms: dW += dqkvᵀ · y, dy = dqkv · W
//!   dx = dm + normᵀ(dy)
//! ```
//!
//! | [`Recompute`] | kept of a layer, in elements per token |
//! |---|---|
//! | `Nothing` | x, m, y, y': 4 hidden; q, k, v; a; z, with u or h: 2 ffn; lse. An adapter without a gate keeps no h |
//! | `Norms` | the same without y and y', which are normalised again |
//! | `FeedForward` | the same without z, u and h: they are multiplied again |
//! | `Layers` | x; the layer runs forward again, without its last product |

use burn::tensor::{DType, Tensor};
use ops::training::{NormGradients, add_column_sums, add_product, norm_backward};
use ops::{Arena, Epilogue, NormWeights, columns, matmul};

use super::attention::Attention;
use super::feed_forward::FeedForward;
use super::{Learns, Pass, factors};
use crate::decoder::Layer;
use crate::decoder::projection::{Matrix, Projection};
use crate::decoder::unmerged_lora::UnmergedLora;
use crate::names::{Side, Slot};
use crate::{Error, Recompute};

/// Tensors of a layer that its gradients need.
#[derive(Debug)]
pub(super) struct Kept {
    x: Tensor<2>,
    /// None if the block runs forward again.
    attention: Option<Attention>,
    /// None if the block runs forward again.
    feed_forward: Option<FeedForward>,
}

impl Kept {
    /// Keeps the input alone: both blocks run forward again.
    pub(super) const fn input(x: Tensor<2>) -> Self {
        Self { x, attention: None, feed_forward: None }
    }
}

/// Memory for results of a block.
#[derive(Clone, Copy, Default)]
pub(super) struct Place<'a> {
    /// None for the pools.
    pub(super) arena: Option<&'a Arena>,
    /// True if results of norms are kept too.
    norms: bool,
}

impl Place<'_> {
    /// Runs ops whose results are kept.
    pub(super) fn keep<T>(self, run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        match self.arena {
            Some(arena) => arena.keep(run)?,
            None => run(),
        }
    }

    /// Runs a norm whose result is kept if all norms are.
    pub(super) fn keep_norm<T>(self, run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        if self.norms { self.keep(run) } else { run() }
    }
}

/// Gradients of a projection's output.
pub(super) struct Upstream {
    pub(super) dout: Tensor<2>,
    /// dout · sB; none without factors.
    low: Option<Tensor<2>>,
}

impl Pass<'_> {
    /// Returns the weights of a layer, with its factors if an adapter is trained.
    pub(super) fn weights(&self, index: usize) -> &Layer {
        match self.learns {
            Learns::Weights(_) | Learns::Nothing => &self.decoder.layers[index],
            Learns::Factors(factors) => factors.layer(index),
        }
    }

    pub(super) fn norm(
        &self,
        weights: &NormWeights,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        self.decoder.norm(weights, x, residual)
    }

    /// Returns x · Wᵀ + b + residual.
    pub(super) fn apply(
        &self,
        projection: &Projection,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        let epilogue = Epilogue { residual, ..Epilogue::default() };
        self.decoder.paced(projection.apply(&self.decoder.ctx, x, epilogue)?)
    }

    /// Returns the output of a layer for x `[rows, hidden]`, and what its gradients need. `memory` holds the latter, and `next` the
    /// output, if they are given.
    pub(super) fn forward(
        &self,
        index: usize,
        x: Tensor<2>,
        recompute: Recompute,
        [memory, next]: [Option<&Arena>; 2],
    ) -> Result<(Tensor<2>, Kept), Error> {
        let norms = recompute == Recompute::Nothing;
        let place = |keeps: bool| Place { arena: memory.filter(|_| keeps), norms };
        let attends = place(recompute != Recompute::Layers);
        let mut attention = self.attention(index, x.clone(), attends)?;
        let feeds = place(matches!(recompute, Recompute::Nothing | Recompute::Norms));
        let last = Some(Place { arena: next, norms });
        let (out, mut feed_forward) = self.feed_forward(index, &attention.middle, feeds, last)?;
        if recompute != Recompute::Nothing {
            (attention.y, feed_forward.y) = (None, None);
        }
        let attention = (recompute != Recompute::Layers).then_some(attention);
        let keeps = matches!(recompute, Recompute::Nothing | Recompute::Norms);
        let feed_forward = keeps.then_some(feed_forward);
        Ok((out.expect("it is asked for"), Kept { x, attention, feed_forward }))
    }

    /// Returns the gradient of a layer's input, given that of its output, and adds those of what is trained. None unless
    /// something `below` needs it.
    pub(super) fn backward(
        &self,
        index: usize,
        Kept { x, attention, feed_forward }: Kept,
        dout: Tensor<2>,
        below: bool,
    ) -> Result<Option<Tensor<2>>, Error> {
        let none = Place::default();
        let attention = attention.map_or_else(|| self.attention(index, x.clone(), none), Ok)?;
        let m = attention.middle.clone();
        let feed_forward = match feed_forward {
            Some(own) => own,
            None => self.feed_forward(index, &m, none, None)?.1,
        };
        let dm = self.feed_forward_backward(index, m, feed_forward, dout)?;
        self.attention_backward(index, x, attention, dm, below)
    }

    /// Returns the gradient of a projection's output, and that of the result of A if the projection has factors.
    pub(super) fn upstream(
        &self,
        projection: &Projection,
        dout: Tensor<2>,
    ) -> Result<Upstream, Error> {
        Ok(Upstream { low: factors::low(self.decoder, projection, &dout)?, dout })
    }

    /// Returns residual + dout · (W + s · B · A).
    pub(super) fn input_gradient(
        &self,
        projection: &Projection,
        Upstream { dout, low }: &Upstream,
        mut residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        let ctx = &self.decoder.ctx;
        if let (Some(low), Some(UnmergedLora { a, .. })) = (low, &projection.unmerged) {
            let epilogue = Epilogue { residual, ..Epilogue::default() };
            let dx = matmul(ctx, low.clone(), a.clone(), epilogue)?;
            residual = Some(self.decoder.paced(dx)?);
        }
        let mut from = 0;
        for matrix in &projection.matrices {
            let (weight, dense) = match matrix {
                Matrix::Dense(weight) => (weight.clone(), true),
                Matrix::Quantized(weight) => (weight.dequantize(ctx, self.decoder.dtype)?, false),
            };
            let to = from + weight.dims()[0];
            let own = columns(dout.clone(), from..to)?;
            let tf32 = projection.tf32 && dense;
            let epilogue = Epilogue { residual, tf32, ..Epilogue::default() };
            residual = Some(self.decoder.paced(matmul(ctx, own, weight, epilogue)?)?);
            from = to;
        }
        Ok(residual.expect("a projection has a matrix"))
    }

    /// Adds the gradients of a weight and its bias, or of the factors of a projection, given its input and the gradient of its
    /// output. `slot` is the first of the projection.
    pub(super) fn add_gradient(
        &self,
        Upstream { dout, low }: Upstream,
        x: Tensor<2>,
        slot: Slot,
    ) -> Result<(), Error> {
        let ctx = &self.decoder.ctx;
        let Some(gradients) = self.gradients else { return Ok(()) };
        match (self.learns, low) {
            (Learns::Weights(flat), _) => {
                let parameters = flat.parameters();
                if let Some(bias) = gradients.vector(parameters, slot, Side::Bias)? {
                    add_column_sums(ctx, dout.clone(), &bias, true)?;
                }
                let sums = gradients.matrix(parameters, slot)?;
                Ok(add_product(ctx, dout.transpose(), x, &sums, true)?)
            }
            (Learns::Factors(factors), Some(low)) => {
                factors.add((dout, low), x, slot, gradients.sums())
            }
            (Learns::Factors(_), None) | (Learns::Nothing, _) => Ok(()),
        }
    }

    /// Returns residual + the gradient of a norm's input, and adds those of its weight and bias if they are trained.
    pub(super) fn norm_backward(
        &self,
        weights: &NormWeights,
        x: Tensor<2>,
        dout: Tensor<2>,
        residual: Option<Tensor<2>>,
        slot: Slot,
    ) -> Result<Tensor<2>, Error> {
        let crate::Norm { kind, eps } = self.decoder.config.norm;
        let weight = weights.weight.clone();
        let sums = match (self.learns, self.gradients) {
            (Learns::Weights(flat), Some(gradients)) => gradients.norm(flat.parameters(), slot)?,
            _ => NormGradients {
                weight: Tensor::empty(weight.dims(), (&self.decoder.device, DType::F32)),
                bias: None,
                accumulate: false,
            },
        };
        let rules = (kind, eps as f32);
        let dx = norm_backward(&self.decoder.ctx, x, weight, dout, residual, &sums, rules)?;
        self.decoder.paced(dx)
    }
}
