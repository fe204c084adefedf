//! The attention block of a layer, forward and backward. See [`layer`](super::layer).

use std::ops::Range;

use burn::tensor::Tensor;
use ops::training::{attention_backward, rotate};
use ops::{
    AttentionOptions, NormWeights, attention_packed_with_lse, attention_with_lse, columns,
    shared_columns,
};

use super::Pass;
use super::layer::Place;
use crate::names::{Part, Slot};
use crate::{DecoderConfig, Error};

/// Tensors of the block that its gradients need, besides its input.
#[derive(Debug)]
pub(super) struct Attention {
    /// norm(x); none if it is computed again.
    pub(super) y: Option<Tensor<2>>,
    /// The projection before QK norms, if the model has them.
    raw: Option<Tensor<2>>,
    /// Queries, keys and values, `[batch, heads, seq, head_dim]`.
    heads: [Tensor<4>; 3],
    attended: Tensor<4>,
    lse: Tensor<3>,
    /// Input of the norm after the block, if any.
    projected: Option<Tensor<2>>,
    /// Output of the block.
    pub(super) middle: Tensor<2>,
}

impl Pass<'_> {
    /// Runs the block for x `[rows, hidden]`.
    pub(super) fn attention(
        &self,
        index: usize,
        x: Tensor<2>,
        place: Place<'_>,
    ) -> Result<Attention, Error> {
        let layer = self.weights(index);
        let y = place.keep_norm(|| self.norm(&layer.attention_norm, x.clone(), None))?;
        let qkv = place.keep(|| self.apply(&layer.qkv, y.clone(), None))?;
        let raw = layer.qk_norm.is_some().then(|| qkv.clone());
        let heads = place.keep(|| self.heads(index, qkv.clone()))?;
        if let Some(places) = self.places {
            places.write(self.decoder, index, self.cached(index, qkv, &heads)?)?;
        }
        let ([q, k, v], options) = (heads.clone(), self.attention_options(index));
        let ctx = &self.decoder.ctx;
        let (attended, lse) = place.keep(|| {
            Ok(match &self.batch.packing {
                None => attention_with_lse(ctx, q, k, v, None, None, options)?,
                Some(packing) => attention_packed_with_lse(ctx, q, k, v, packing, options)?,
            })
        })?;
        let attended = self.decoder.paced(attended)?;
        let a = self.flat(attended.clone());
        let (middle, projected) = match &layer.attention_post_norm {
            None => (place.keep(|| self.apply(&layer.out, a, Some(x)))?, None),
            Some(norm) => {
                let projected = place.keep(|| self.apply(&layer.out, a, None))?;
                let middle = place.keep(|| self.norm(norm, projected.clone(), Some(x)))?;
                (middle, Some(projected))
            }
        };
        Ok(Attention { y: Some(y), raw, heads, attended, lse, projected, middle })
    }

    /// Returns the gradient of the block's input x, given that of its output, and adds those of what is trained. None unless
    /// something `below` needs it.
    pub(super) fn attention_backward(
        &self,
        index: usize,
        x: Tensor<2>,
        Attention { y, raw, heads, attended, lse, projected, .. }: Attention,
        dout: Tensor<2>,
        below: bool,
    ) -> Result<Option<Tensor<2>>, Error> {
        let layer = self.weights(index);
        let at = |part| Slot::Layer(index, part);
        let given = match (&layer.attention_post_norm, projected) {
            (Some(norm), Some(projected)) => {
                let slot = at(Part::AttentionPostNorm);
                self.norm_backward(norm, projected, dout.clone(), None, slot)?
            }
            _ => dout.clone(),
        };
        let given = self.upstream(&layer.out, given)?;
        let da = self.input_gradient(&layer.out, &given, None)?;
        self.add_gradient(given, self.flat(attended.clone()), at(Part::Out))?;
        let da = self.apart(da, self.decoder.config.heads)?;
        let dqkv = self.projection_gradient(index, raw, heads, (attended, lse), da)?;
        let y = match y {
            Some(y) => y,
            None => self.norm(&layer.attention_norm, x.clone(), None)?,
        };
        let dqkv = self.upstream(&layer.qkv, dqkv)?;
        let dy = below.then(|| self.input_gradient(&layer.qkv, &dqkv, None)).transpose()?;
        self.add_gradient(dqkv, y, at(Part::Query))?;
        let Some(dy) = dy else { return Ok(None) };
        let slot = at(Part::AttentionNorm);
        self.norm_backward(&layer.attention_norm, x, dy, Some(dout), slot).map(Some)
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

    /// Returns anything, then keys and then values, each as wide as the keys: `[rows, 3 · kv_heads · head_dim]`. `qkv` is the
    /// projection of `heads`.
    fn cached(
        &self,
        index: usize,
        qkv: Tensor<2>,
        [_, k, _]: &[Tensor<4>; 3],
    ) -> Result<Tensor<2>, Error> {
        let [_, keys, values] = self.ranges();
        match self.weights(index).qk_norm {
            None => Ok(columns(qkv, keys.start - keys.len()..values.end)?),
            Some(_) => {
                let k = self.flat(k.clone());
                Ok(Tensor::cat(vec![k.clone(), k, columns(qkv, values)?], 1))
            }
        }
    }

    /// Returns the columns of queries, keys and values in the projection.
    fn ranges(&self) -> [Range<usize>; 3] {
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

    /// Returns the gradient of the projection of queries, keys and values, given that of the attention's result.
    fn projection_gradient(
        &self,
        index: usize,
        raw: Option<Tensor<2>>,
        heads: [Tensor<4>; 3],
        forward: (Tensor<4>, Tensor<3>),
        da: Tensor<4>,
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
        attention_backward(
            ctx,
            heads,
            self.batch.packing.as_ref(),
            forward,
            da.clone(),
            &into,
            options,
        )?;
        let dqkv = if joined { dqkv } else { Tensor::cat(parts, 1) };
        self.decoder.paced(dqkv.clone())?;
        self.rotate(index, &dqkv, own + kv_heads, true)?;
        let (Some(norms), Some(raw)) = (&self.decoder.layers[index].qk_norm, raw) else {
            return Ok(dqkv);
        };
        let [q, k, v] = ranges;
        let through = |range: Range<usize>, own: usize, norm: usize, part| {
            let shape = [rows * own, head_dim];
            let of = |all: &Tensor<2>| columns(all.clone(), range.clone());
            let (x, dout) = (of(&raw)?.reshape(shape), of(&dqkv)?.reshape(shape));
            let dx = self.norm_backward(&norms[norm], x, dout, None, Slot::Layer(index, part))?;
            Ok::<_, Error>(dx.reshape([rows, own * head_dim]))
        };
        let dq = through(q, own, 0, Part::QueryNorm)?;
        let dk = through(k, kv_heads, 1, Part::KeyNorm)?;
        Ok(Tensor::cat(vec![dq, dk, columns(dqkv, v)?], 1))
    }
}
