//! Keys or values of a layer: in the compute dtype, or in bytes with a scale per position and head.

use std::ops::Range;

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use ops::Cached;

use crate::KvFormat;

/// A rearrangement of positions and heads, for either cache format.
pub(super) trait Rearrange {
    /// Rearranges tensors `[.., width]`, and leaves their width as it is.
    fn run<K: Basic>(&self, parts: Vec<Tensor<4, K>>) -> Tensor<4, K>;
}

/// Applies `how` to `parts`, all of one cache format. Scales are rearranged like values of width 1.
pub(super) fn rearranged(parts: impl IntoIterator<Item = Cached>, how: &impl Rearrange) -> Cached {
    let (mut floats, mut bytes, mut units) = (Vec::new(), Vec::new(), Vec::new());
    for part in parts {
        match part {
            Cached::Float(values) => floats.push(values),
            Cached::Bytes { values, scales } => {
                bytes.push(values);
                units.push(scales.unsqueeze_dim(3));
            }
        }
    }
    match bytes.is_empty() {
        true => Cached::Float(how.run(floats)),
        false => {
            Cached::Bytes { values: how.run(bytes), scales: how.run(units).squeeze_dim::<3>(3) }
        }
    }
}

/// Creates an empty cache: zeros, or without values for a rehearsal.
pub(super) fn empty(
    format: KvFormat,
    dtype: FloatDType,
    shape: [usize; 4],
    device: &Device,
    zeros: bool,
) -> Cached {
    fn made<const D: usize, K: Basic>(
        shape: [usize; D],
        of: (&Device, DType),
        zeros: bool,
    ) -> Tensor<D, K> {
        if zeros { Tensor::zeros(shape, of) } else { Tensor::empty(shape, of) }
    }
    let [first, second, third, _] = shape;
    match format {
        KvFormat::Float => Cached::Float(made(shape, (device, DType::from(dtype)), zeros)),
        KvFormat::Int8 => Cached::Bytes {
            values: made(shape, (device, DType::I8), zeros),
            scales: made([first, second, third], (device, DType::F32), zeros),
        },
    }
}

/// Returns the peak bytes while [`dequantized`] converts keys and values of one sequence, each `kv` wide: two
/// f32 copies of the values, next to the keys.
pub(crate) fn dequantized_bytes(kv: u128, positions: u128, dtype: FloatDType) -> u128 {
    kv * positions * (DType::from(dtype).size() as u128 + 8)
}

/// Returns the values of a cache in `dtype`.
pub(super) fn dequantized(cached: Cached, dtype: FloatDType) -> Tensor<4> {
    match cached {
        Cached::Float(values) => values,
        Cached::Bytes { values, scales } => {
            let values: Tensor<4> = values.cast(FloatDType::F32);
            (values * scales.unsqueeze_dim(3)).cast(dtype)
        }
    }
}

/// Returns the bytes on the device.
pub(super) fn bytes(cached: &Cached) -> u64 {
    fn tensor_bytes<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> u64 {
        (tensor.shape().num_elements() * tensor.dtype().size()) as u64
    }
    match cached {
        Cached::Float(values) => tensor_bytes(values),
        Cached::Bytes { values, scales } => tensor_bytes(values) + tensor_bytes(scales),
    }
}

/// Selects positions of some sequences, up to the longest of all, `[sequences, kv_heads, longest, width]`,
/// from a contiguous or paged cache.
pub(super) struct SoFar<'a> {
    pub(super) sequences: Range<usize>,
    pub(super) longest: usize,
    /// Page table `[batch, pages per sequence]`
    pub(super) pages: Option<&'a Tensor<2, Int>>,
}

impl Rearrange for SoFar<'_> {
    fn run<K: Basic>(&self, mut parts: Vec<Tensor<4, K>>) -> Tensor<4, K> {
        let (cache, sequences) = (parts.remove(0), self.sequences.clone());
        let heads = cache.dims()[1];
        match self.pages {
            None => cache.slice([sequences, 0..heads, 0..self.longest]),
            Some(pages) => {
                let own = in_runs(cache, &pages.clone().slice_dim(0, sequences));
                own.slice_dim(2, 0..self.longest)
            }
        }
    }
}

/// Copies pages `[_, page, kv_heads, width]` to a contiguous cache `[batch, kv_heads, capacity, width]`.
fn in_runs<K: Basic>(cache: Tensor<4, K>, pages: &Tensor<2, Int>) -> Tensor<4, K> {
    let [batch, own] = pages.dims();
    let [_, page, kv_heads, width] = cache.dims();
    let all = cache.select(0, pages.clone().reshape([batch * own]));
    all.reshape([batch, own * page, kv_heads, width]).swap_dims(1, 2)
}
