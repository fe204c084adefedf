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
//! | `Nothing` | x, m, y, y': 4 hidden; q, k, v; a; z and u: ffn; lse |
//! | `Norms` | the same without y and y', which are normalised again |
//! | `Layers` | x; the layer runs forward again |

use burn::tensor::Tensor;
use ops::training::{
    activate, activation_backward, add_column_sums, add_product, attention_backward, norm_backward,
    rotate,
};
use ops::{
    AttentionOptions, Epilogue, NormWeights, attention_with_lse, columns, matmul, shared_columns,
};

use super::{Gradients, Pass};
use crate::decoder::Layer;
use crate::decoder::projection::{Ffn, Matrix, Projection};
use crate::names::{Part, Side, Slot};
use crate::{DecoderConfig, Error, Recompute};

/// Tensors of a layer that its gradients need.
#[derive(Debug)]
pub(super) struct Kept {
    x: Tensor<2>,
    /// None if the layer runs forward again.
    inner: Option<Inner>,
}

/// Intermediates of a layer.
#[derive(Debug)]
struct Inner {
    /// norm(x); none if it is computed again.
    y: Option<Tensor<2>>,
    /// The projection before QK norms, if the model has them.
    raw: Option<Tensor<2>>,
    /// Queries, keys and values, `[batch, heads, seq, head_dim]`.
    heads: [Tensor<4>; 3],
    attended: Tensor<4>,
    lse: Tensor<3>,
    /// Input of the norm after attention, if any.
    projected: Option<Tensor<2>>,
    middle: Tensor<2>,
    /// norm'(m); none if it is computed again.
    ffn_y: Option<Tensor<2>>,
    /// Gate, or up without a gate, before the activation.
    z: Tensor<2>,
    up: Option<Tensor<2>>,
    /// Input of the norm after the feed-forward block, if any.
    down: Option<Tensor<2>>,
}

impl Pass<'_> {
    fn weights(&self, index: usize) -> &Layer {
        &self.decoder.layers[index]
    }

    fn norm(
        &self,
        weights: &NormWeights,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        self.decoder.norm(weights, x, residual)
    }

    /// Returns x · Wᵀ + b + residual.
    fn apply(
        &self,
        projection: &Projection,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        let epilogue = Epilogue { residual, ..Epilogue::default() };
        self.decoder.paced(projection.apply(&self.decoder.ctx, x, epilogue)?)
    }

    /// Returns the output of a layer for x `[rows, hidden]`, and what its gradients need.
    pub(super) fn forward(
        &self,
        index: usize,
        x: Tensor<2>,
        recompute: Recompute,
    ) -> Result<(Tensor<2>, Kept), Error> {
        let (out, inner) = self.run(index, x.clone())?;
        let inner = match recompute {
            Recompute::Layers => None,
            Recompute::Norms => Some(Inner { y: None, ffn_y: None, ..inner }),
            Recompute::Nothing => Some(inner),
        };
        Ok((out, Kept { x, inner }))
    }

    fn run(&self, index: usize, x: Tensor<2>) -> Result<(Tensor<2>, Inner), Error> {
        let layer = self.weights(index);
        let y = self.norm(&layer.attention_norm, x.clone(), None)?;
        let qkv = self.apply(&layer.qkv, y.clone(), None)?;
        let raw = layer.qk_norm.is_some().then(|| qkv.clone());
        let heads = self.heads(index, qkv)?;
        let [q, k, v] = heads.clone();
        let (attended, lse) = attention_with_lse(
            &self.decoder.ctx,
            q,
            k,
            v,
            None,
            None,
            self.attention_options(index),
        )?;
        let attended = self.decoder.paced(attended)?;
        let a = self.flat(attended.clone());
        let (middle, projected) = match &layer.attention_post_norm {
            None => (self.apply(&layer.out, a, Some(x))?, None),
            Some(norm) => {
                let projected = self.apply(&layer.out, a, None)?;
                (self.norm(norm, projected.clone(), Some(x))?, Some(projected))
            }
        };
        let ffn_y = self.norm(&layer.ffn_norm, middle.clone(), None)?;
        let (z, up, down) = match &layer.ffn {
            Ffn::Plain { up, down } => (self.apply(up, ffn_y.clone(), None)?, None, down),
            Ffn::Gated { gate, up, down } => {
                let up = self.apply(up, ffn_y.clone(), None)?;
                (self.apply(gate, ffn_y.clone(), None)?, Some(up), down)
            }
            Ffn::Joint { .. } => return Err(Error::QuantizedWeights),
        };
        let activation = self.decoder.config.activation;
        let h =
            self.decoder.paced(activate(&self.decoder.ctx, z.clone(), up.clone(), activation)?)?;
        let (out, down) = match &layer.ffn_post_norm {
            None => (self.apply(down, h, Some(middle.clone()))?, None),
            Some(norm) => {
                let down = self.apply(down, h, None)?;
                (self.norm(norm, down.clone(), Some(middle.clone()))?, Some(down))
            }
        };
        let (y, ffn_y) = (Some(y), Some(ffn_y));
        let inner = Inner { y, raw, heads, attended, lse, projected, middle, ffn_y, z, up, down };
        Ok((out, inner))
    }

    /// Returns queries, keys and values for attention. Without QK norms they share memory with `qkv`, which is rotated in
    /// place.
    fn heads(&self, index: usize, qkv: Tensor<2>) -> Result<[Tensor<4>; 3], Error> {
        let layer = self.weights(index);
        let DecoderConfig { heads, kv_heads, head_dim, .. } = self.decoder.config;
        let [q, k, v] = self.ranges();
        let (q, k) = match &layer.qk_norm {
            None => {
                self.rotate(index, &qkv, heads + kv_heads, false)?;
                (columns(qkv.clone(), q)?, columns(qkv.clone(), k)?)
            }
            Some(norms) => {
                let normal = |range, own: usize, norm: &NormWeights| {
                    let rows = qkv.dims()[0];
                    let x = columns(qkv.clone(), range)?.reshape([rows * own, head_dim]);
                    let x = self.norm(norm, x, None)?.reshape([rows, own * head_dim]);
                    self.rotate(index, &x, own, false)?;
                    Ok::<_, Error>(x)
                };
                (normal(q, heads, &norms[0])?, normal(k, kv_heads, &norms[1])?)
            }
        };
        let v = columns(qkv, v)?;
        Ok([self.apart(q, heads)?, self.apart(k, kv_heads)?, self.apart(v, kv_heads)?])
    }

    /// Returns the columns of queries, keys and values in the projection.
    fn ranges(&self) -> [std::ops::Range<usize>; 3] {
        let [q, kv] = self.decoder.config.qkv_rows();
        [0..q, q..q + kv, q + kv..q + 2 * kv]
    }

    fn rotate(&self, index: usize, x: &Tensor<2>, heads: usize, back: bool) -> Result<(), Error> {
        let decoder = self.decoder;
        let Some(rope) = decoder.config.layers[index].rope else { return Ok(()) };
        let table = self.batch.tables[rope].clone();
        let shape = [heads, decoder.config.head_dim];
        Ok(rotate(&decoder.ctx, x, shape, self.batch.positions.clone(), table, back)?)
    }

    /// Returns x `[batch · seq, heads · head_dim]` as a view `[batch, heads, seq, head_dim]`.
    fn apart(&self, x: Tensor<2>, heads: usize) -> Result<Tensor<4>, Error> {
        let [batch, seq] = self.batch.shape();
        Ok(ops::split_heads(x, [batch, seq, heads])?)
    }

    /// Returns x `[batch, heads, seq, head_dim]` as `[batch · seq, heads · head_dim]`.
    fn flat(&self, x: Tensor<4>) -> Tensor<2> {
        let [batch, heads, seq, head_dim] = x.dims();
        x.swap_dims(1, 2).reshape([batch * seq, heads * head_dim])
    }

    fn attention_options(&self, index: usize) -> AttentionOptions {
        let config = &self.decoder.config;
        let rules = &config.layers[index];
        AttentionOptions {
            scale: Some(rules.scale as f32),
            softcap: config.softcap.map(|cap| cap as f32),
            causal: true,
            window: rules.window.map(|window| u32::try_from(window).unwrap_or(u32::MAX)),
            implementation: None,
        }
    }

    /// Returns the gradient of a layer's input, given that of its output, and adds those of its weights.
    pub(super) fn backward(
        &self,
        index: usize,
        kept: Kept,
        dout: Tensor<2>,
        gradients: &Gradients,
    ) -> Result<Tensor<2>, Error> {
        let layer = self.weights(index);
        let at = |part| Slot::Layer(index, part);
        let Kept { x, inner } = kept;
        let Inner { y, raw, heads, attended, lse, projected, middle, ffn_y, z, up, down } =
            match inner {
                Some(inner) => inner,
                None => self.run(index, x.clone())?.1,
            };
        // The feed-forward block.
        let given = match (&layer.ffn_post_norm, down) {
            (Some(norm), Some(down)) => self.norm_backward(
                norm,
                down,
                dout.clone(),
                None,
                at(Part::FfnPostNorm),
                gradients,
            )?,
            _ => dout.clone(),
        };
        let ffn_y = match ffn_y {
            Some(ffn_y) => ffn_y,
            None => self.norm(&layer.ffn_norm, middle.clone(), None)?,
        };
        let (first, second, down) = match &layer.ffn {
            Ffn::Plain { up, down } => (up, None, down),
            Ffn::Gated { gate, up, down } => (gate, Some(up), down),
            Ffn::Joint { .. } => return Err(Error::QuantizedWeights),
        };
        let dh = self.input_gradient(down, given.clone(), None)?;
        activation_backward(
            &self.decoder.ctx,
            &dh,
            &z,
            up.as_ref(),
            self.decoder.config.activation,
        )?;
        // Now dh holds h, and z and up hold their gradients.
        self.add_weight(given, dh, at(Part::Down), gradients)?;
        let gated = second.is_some();
        let first_slot = at(if gated { Part::Gate } else { Part::Up });
        self.add_weight(z.clone(), ffn_y.clone(), first_slot, gradients)?;
        let mut dy = self.input_gradient(first, z, None)?;
        if let (Some(second), Some(up)) = (second, up) {
            self.add_weight(up.clone(), ffn_y, at(Part::Up), gradients)?;
            dy = self.input_gradient(second, up, Some(dy))?;
        }
        let dm = self.norm_backward(
            &layer.ffn_norm,
            middle,
            dy,
            Some(dout),
            at(Part::FfnNorm),
            gradients,
        )?;
        // Attention.
        let given = match (&layer.attention_post_norm, projected) {
            (Some(norm), Some(projected)) => {
                let slot = at(Part::AttentionPostNorm);
                self.norm_backward(norm, projected, dm.clone(), None, slot, gradients)?
            }
            _ => dm.clone(),
        };
        let da = self.input_gradient(&layer.out, given.clone(), None)?;
        self.add_weight(given, self.flat(attended.clone()), at(Part::Out), gradients)?;
        let da = self.apart(da, self.decoder.config.heads)?;
        let dqkv = self.projection_gradient(index, raw, heads, (attended, lse), da, gradients)?;
        let y = match y {
            Some(y) => y,
            None => self.norm(&layer.attention_norm, x.clone(), None)?,
        };
        self.add_weight(dqkv.clone(), y, at(Part::Query), gradients)?;
        let dy = self.input_gradient(&layer.qkv, dqkv, None)?;
        let slot = at(Part::AttentionNorm);
        self.norm_backward(&layer.attention_norm, x, dy, Some(dm), slot, gradients)
    }

    /// Returns the gradient of the projection of queries, keys and values, given that of the attention's result.
    fn projection_gradient(
        &self,
        index: usize,
        raw: Option<Tensor<2>>,
        heads: [Tensor<4>; 3],
        forward: (Tensor<4>, Tensor<3>),
        da: Tensor<4>,
        gradients: &Gradients,
    ) -> Result<Tensor<2>, Error> {
        let ctx = &self.decoder.ctx;
        let DecoderConfig { heads: own, kv_heads, head_dim, .. } = self.decoder.config;
        let rows = da.dims()[0] * da.dims()[2];
        let empty = |width: usize| Tensor::<2>::empty([rows, width], (&da.device(), da.dtype()));
        let ranges = self.ranges();
        let dqkv = empty(ranges[2].end);
        let shared = ranges.iter().map(|range| shared_columns(&dqkv, range.clone()));
        let shared: Option<Vec<_>> = shared.collect::<Result<_, _>>()?;
        let joined = shared.is_some();
        let parts = shared
            .unwrap_or_else(|| ranges.iter().map(|range| empty(range.len())).collect::<Vec<_>>());
        let [dq, dk, dv] = [(0, own), (1, kv_heads), (2, kv_heads)]
            .map(|(at, heads): (usize, usize)| self.apart(parts[at].clone(), heads));
        let into = [dq?, dk?, dv?];
        let options = self.attention_options(index);
        attention_backward(ctx, heads, None, forward, da.clone(), &into, options)?;
        let dqkv = if joined { dqkv } else { Tensor::cat(parts, 1) };
        self.decoder.paced(dqkv.clone())?;
        self.rotate(index, &dqkv, own + kv_heads, true)?;
        let (Some(norms), Some(raw)) = (&self.weights(index).qk_norm, raw) else {
            return Ok(dqkv);
        };
        let [q, k, v] = ranges;
        let through = |range: std::ops::Range<usize>, own: usize, norm: usize, part| {
            let shape = [rows * own, head_dim];
            let of = |all: &Tensor<2>| columns(all.clone(), range.clone());
            let (x, dout) = (of(&raw)?.reshape(shape), of(&dqkv)?.reshape(shape));
            let slot = Slot::Layer(index, part);
            let dx = self.norm_backward(&norms[norm], x, dout, None, slot, gradients)?;
            Ok::<_, Error>(dx.reshape([rows, own * head_dim]))
        };
        let dq = through(q, own, 0, Part::QueryNorm)?;
        let dk = through(k, kv_heads, 1, Part::KeyNorm)?;
        Ok(Tensor::cat(vec![dq, dk, columns(dqkv, v)?], 1))
    }

    /// Returns residual + dout · W.
    pub(super) fn input_gradient(
        &self,
        projection: &Projection,
        dout: Tensor<2>,
        mut residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        let ctx = &self.decoder.ctx;
        let mut from = 0;
        for matrix in &projection.matrices {
            let weight = match matrix {
                Matrix::Dense(weight) => weight.clone(),
                Matrix::Quantized(weight) => weight.dequantize(ctx, self.decoder.dtype)?,
            };
            let to = from + weight.dims()[0];
            let own = columns(dout.clone(), from..to)?;
            let epilogue = Epilogue { residual, ..Epilogue::default() };
            residual = Some(self.decoder.paced(matmul(ctx, own, weight, epilogue)?)?);
            from = to;
        }
        Ok(residual.expect("a projection has a matrix"))
    }

    /// Adds the gradients of a weight and its bias, given the input and the gradient of the output.
    fn add_weight(
        &self,
        dout: Tensor<2>,
        x: Tensor<2>,
        slot: Slot,
        gradients: &Gradients,
    ) -> Result<(), Error> {
        let ctx = &self.decoder.ctx;
        let bias = gradients.vector(slot, Side::Bias)?;
        if let Some(bias) = bias {
            add_column_sums(ctx, dout.clone(), &bias, true)?;
        }
        Ok(add_product(ctx, dout.transpose(), x, &gradients.matrix(slot)?, true)?)
    }

    /// Returns residual + the gradient of a norm's input, and adds those of its weight and bias.
    pub(super) fn norm_backward(
        &self,
        weights: &NormWeights,
        x: Tensor<2>,
        dout: Tensor<2>,
        residual: Option<Tensor<2>>,
        slot: Slot,
        gradients: &Gradients,
    ) -> Result<Tensor<2>, Error> {
        let crate::Norm { kind, eps } = self.decoder.config.norm;
        let (weight, sums) = (weights.weight.clone(), gradients.norm(slot)?);
        let rules = (kind, eps as f32);
        let dx = norm_backward(&self.decoder.ctx, x, weight, dout, residual, &sums, rules)?;
        self.decoder.paced(dx)
    }
}
