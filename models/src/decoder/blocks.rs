//! What a decoder does between its products.

use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::{Decoder, KvCache};
use crate::{DecoderConfig, NormKind};
use ops::{NormWeights, OpError};

/// A norm over the last axis.
pub(super) type Norm = NormWeights;

/// residual + norm(x), rows `[rows, width]`.
pub(super) fn normed(
    of: &Decoder,
    norm: &Norm,
    x: Tensor<2>,
    residual: Option<Tensor<2>>,
) -> Result<Tensor<2>, OpError> {
    let kind = match of.config.norm.kind {
        NormKind::Rms => ops::NormKind::Rms,
        NormKind::RmsPlusOne => ops::NormKind::RmsPlusOne,
        NormKind::Layer => ops::NormKind::Layer,
    };
    let eps = of.config.norm.eps as f32;
    ops::norm(&of.ctx, x, norm.clone(), residual, kind, eps)
}

trait OfHeads {
    fn of<const D: usize>(&self, config: &DecoderConfig, x: Tensor<D>) -> Tensor<D>;
}

impl OfHeads for Norm {
    /// In f32, rounded once.
    fn of<const D: usize>(&self, config: &DecoderConfig, x: Tensor<D>) -> Tensor<D> {
        let dtype = x.dtype();
        let wide = |t: &Tensor<1>| t.clone().cast(FloatDType::F32).unsqueeze::<D>();
        let mut x = x.cast(FloatDType::F32);
        if config.norm.kind == NormKind::Layer {
            x = x.clone() - x.mean_dim(D - 1);
        }
        let square = (x.clone() * x.clone()).mean_dim(D - 1);
        let weight = match config.norm.kind {
            NormKind::RmsPlusOne => wide(&self.weight) + 1.0,
            NormKind::Rms | NormKind::Layer => wide(&self.weight),
        };
        let mut y = x / (square + config.norm.eps).sqrt() * weight;
        if let Some(bias) = &self.bias {
            y = y + wide(bias);
        }
        y.cast(dtype)
    }
}

/// The rows of `ids`, `[batch · seq]`, and of their positions.
pub(super) fn embed(of: &Decoder, cache: &KvCache, ids: Tensor<1, Int>, seq: usize) -> Tensor<2> {
    let mut x = of.embedding.clone().select(0, ids);
    if let Some(scale) = of.config.embedding_scale {
        x = x * rounded(scale, of.dtype);
    }
    let Some(positions) = &of.positions else { return x };
    let own = cache.lengths().iter().map(|start| positions.clone().slice([*start..start + seq]));
    x + Tensor::cat(own.collect(), 0)
}

/// A factor as the model's dtype has it.
fn rounded(scale: f64, dtype: FloatDType) -> f64 {
    match DType::from(dtype) {
        DType::BF16 => half::bf16::from_f64(scale).to_f64(),
        DType::F16 => half::f16::from_f64(scale).to_f64(),
        _ => f64::from(scale as f32),
    }
}

/// What becomes of queries, keys and values before attention.
pub(super) struct Turn<'a> {
    pub(super) config: &'a DecoderConfig,
    pub(super) rope: Option<usize>,
    pub(super) norms: Option<&'a [Norm; 2]>,
    pub(super) seq: usize,
}

impl Turn<'_> {
    /// Writes the keys and values of `qkv`, `[batch · seq, (heads + 2 kv_heads) · head_dim]`, behind those of
    /// the cache, and gives the queries `[batch, heads, seq, head_dim]`.
    pub(super) fn of(&self, qkv: Tensor<2>, cache: &mut KvCache, layer: usize) -> Tensor<4> {
        let DecoderConfig { heads, kv_heads, head_dim, .. } = *self.config;
        let (batch, seq) = (cache.batch(), self.seq);
        let part = |from: usize, heads: usize| {
            let columns = from * head_dim..(from + heads) * head_dim;
            let part = qkv.clone().slice([0..batch * seq, columns]);
            part.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2)
        };
        let [q, k] = [(0, heads), (heads, kv_heads)].map(|(from, heads)| part(from, heads));
        let v = part(heads + kv_heads, kv_heads);
        let [q, k] = match self.norms {
            Some([of_q, of_k]) => [of_q.of(self.config, q), of_k.of(self.config, k)],
            None => [q, k],
        };
        let [q, k] = match self.rope {
            Some(rope) => {
                let table = cache.table(rope);
                let own = |start: &usize| table.clone().slice([*start..start + seq]);
                let angles: Tensor<2> = Tensor::cat(cache.lengths().iter().map(own).collect(), 0);
                let dim = table.dims()[1];
                let angles = angles.reshape([batch, 1, seq, dim]);
                [turned(q, &angles), turned(k, &angles)]
            }
            None => [q, k],
        };
        cache.write(layer, |(mut keys, mut values), starts| {
            for (sequence, start) in starts.iter().enumerate() {
                let all = 0..kv_heads;
                let to = [sequence..sequence + 1, all.clone(), *start..start + seq, 0..head_dim];
                let from = [sequence..sequence + 1, all, 0..seq, 0..head_dim];
                keys = keys.slice_assign(to.clone(), k.clone().slice(from.clone()));
                values = values.slice_assign(to, v.clone().slice(from));
            }
            (keys, values)
        });
        q
    }
}

/// Heads `[batch, heads, seq, head_dim]`, of whose first dimensions pairs `(i, i + dim / 2)` turn by `angles`
/// `[batch, 1, seq, dim]`.
fn turned(x: Tensor<4>, angles: &Tensor<4>) -> Tensor<4> {
    let dtype = x.dtype();
    let dim = angles.dims()[3];
    let half = dim / 2;
    let [.., head_dim] = x.dims();
    let along = |t: &Tensor<4>, columns: std::ops::Range<usize>| t.clone().slice_dim(3, columns);
    let (cos, sin) = (along(angles, 0..half), along(angles, half..dim));
    let x = x.cast(FloatDType::F32);
    let (a, b) = (along(&x, 0..half), along(&x, half..dim));
    let mut parts = vec![a.clone() * cos.clone() - b.clone() * sin.clone(), b * cos + a * sin];
    if dim < head_dim {
        parts.push(along(&x, dim..head_dim));
    }
    Tensor::cat(parts, 3).cast(dtype)
}
