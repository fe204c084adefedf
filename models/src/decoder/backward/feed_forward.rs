//! The feed-forward block of a layer, forward and backward. See [`layer`](super::layer).

use burn::tensor::Tensor;
use ops::training::{activate, activation_backward, linear_activated, linear_activated_backward};
use ops::{columns, shared_columns};

use super::layer::Place;
use super::{Learns, Pass};
use crate::Error;
use crate::decoder::projection::{Ffn, Projection};
use crate::names::{Part, Slot};

/// Tensors of the block that its gradients need, besides its input.
#[derive(Debug)]
pub(super) struct FeedForward {
    /// norm'(m); none if it is computed again.
    pub(super) y: Option<Tensor<2>>,
    /// Gate, or up without a gate, before the activation.
    z: Tensor<2>,
    up: Option<Tensor<2>>,
    /// activation(z), if it is kept. Otherwise the backward pass computes it again.
    h: Option<Tensor<2>>,
    /// z and up as one matrix, if they share its memory.
    joint: Option<Tensor<2>>,
    /// Input of the norm after the block, if any.
    down: Option<Tensor<2>>,
}

impl Pass<'_> {
    /// Runs the block for m `[rows, hidden]`. Without a `last` place its output is left out, unless the gradients need it.
    pub(super) fn feed_forward(
        &self,
        index: usize,
        m: &Tensor<2>,
        place: Place<'_>,
        last: Option<Place<'_>>,
    ) -> Result<(Option<Tensor<2>>, FeedForward), Error> {
        let (layer, config) = (self.weights(index), &self.decoder.config);
        let y = place.keep_norm(|| self.norm(&layer.ffn_norm, m.clone(), None))?;
        let inner = layer.ffn.inner_projections();
        let (made, kept) = match self.fuses_activation() {
            false => (place.keep(|| self.apply(&inner[0], y.clone(), None))?, None),
            true => {
                let [z, h] = place.keep(|| self.activated(&inner[0], y.clone()))?;
                (z, Some(h))
            }
        };
        let (z, up, joint) = match (&layer.ffn, &inner[..]) {
            (Ffn::Joint { .. }, _) => {
                let half = config.ffn_hidden;
                let halves = [0..half, half..2 * half];
                let [z, up] = halves.clone().map(|half| shared_columns(&made, half));
                match (z?, up?) {
                    (Some(z), Some(up)) => (z, Some(up), Some(made)),
                    _ => {
                        let [z, up] = halves.map(|half| columns(made.clone(), half));
                        (z?, Some(up?), None)
                    }
                }
            }
            (_, [_, up]) => (made, Some(place.keep(|| self.apply(up, y.clone(), None))?), None),
            _ => (made, None, None),
        };
        let (mut out, mut input) = (None, None);
        if last.is_some() || layer.ffn_post_norm.is_some() {
            let made = || activate(&self.decoder.ctx, z.clone(), up.clone(), config.activation);
            let h = kept.clone().map_or_else(made, Ok)?;
            let (h, down) = (self.decoder.paced(h)?, layer.ffn.down());
            match &layer.ffn_post_norm {
                None => {
                    let last = last.unwrap_or_default();
                    out = Some(last.keep(|| self.apply(down, h, Some(m.clone())))?);
                }
                Some(norm) => {
                    let down = place.keep(|| self.apply(down, h, None))?;
                    if let Some(last) = last {
                        let normal = || self.norm(norm, down.clone(), Some(m.clone()));
                        out = Some(last.keep(normal)?);
                    }
                    input = Some(down);
                }
            }
        }
        Ok((out, FeedForward { y: Some(y), z, up, h: kept, joint, down: input }))
    }

    /// Returns true if matmuls apply the activation and its derivative: in blocks without a gate, if all weights are trained.
    fn fuses_activation(&self) -> bool {
        self.decoder.config.ffn == crate::Ffn::Plain && matches!(self.learns, Learns::Weights(_))
    }

    /// Returns z = y · Wᵀ + b and activation(z).
    fn activated(&self, inner: &Projection, y: Tensor<2>) -> Result<[Tensor<2>; 2], Error> {
        let (ctx, activation) = (&self.decoder.ctx, self.decoder.config.activation);
        let (weight, bias) = (inner.dense()?.transpose(), inner.bias.clone());
        Ok(linear_activated(ctx, y, weight, bias, activation, inner.tf32)?)
    }

    /// Returns the gradient of the block's input m, given that of its output, and adds those of what is trained.
    pub(super) fn feed_forward_backward(
        &self,
        index: usize,
        m: Tensor<2>,
        FeedForward { y, z, up, h, joint, down }: FeedForward,
        dout: Tensor<2>,
    ) -> Result<Tensor<2>, Error> {
        let layer = self.weights(index);
        let at = |part| Slot::Layer(index, part);
        let given = match (&layer.ffn_post_norm, down) {
            (Some(norm), Some(down)) => {
                self.norm_backward(norm, down, dout.clone(), None, at(Part::FfnPostNorm))?
            }
            _ => dout.clone(),
        };
        let y = match y {
            Some(y) => y,
            None => self.norm(&layer.ffn_norm, m.clone(), None)?,
        };
        let (inner, down) = (layer.ffn.inner_projections(), layer.ffn.down());
        let given = self.upstream(down, given)?;
        let (ctx, activation) = (&self.decoder.ctx, self.decoder.config.activation);
        let (z, h) = match h {
            Some(h) => {
                let (dout, weight) = (given.dout.clone(), down.dense()?);
                let dz = linear_activated_backward(ctx, dout, weight, z, activation, down.tf32)?;
                (self.decoder.paced(dz)?, h)
            }
            None => {
                let dh = self.input_gradient(down, &given, None)?;
                activation_backward(ctx, &dh, &z, up.as_ref(), activation)?;
                (z, dh)
            }
        };
        // Now z and up hold their gradients.
        self.add_gradient(given, h, at(Part::Down))?;
        let through = |own: &Projection, dout, residual, slot| {
            let dout = self.upstream(own, dout)?;
            let dy = self.input_gradient(own, &dout, residual)?;
            self.add_gradient(dout, y.clone(), at(slot))?;
            Ok::<_, Error>(dy)
        };
        let dy = match (&layer.ffn, up) {
            (Ffn::Joint { .. }, Some(up)) => {
                let both = joint.unwrap_or_else(|| Tensor::cat(vec![z, up], 1));
                through(&inner[0], both, None, Part::Gate)?
            }
            (_, Some(up)) => {
                let dy = through(&inner[0], z, None, Part::Gate)?;
                through(&inner[1], up, Some(dy), Part::Up)?
            }
            (_, None) => through(&inner[0], z, None, Part::Up)?,
        };
        self.norm_backward(&layer.ffn_norm, m, dy, Some(dout), at(Part::FfnNorm))
    }
}
