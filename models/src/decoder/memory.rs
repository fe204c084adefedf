//! Device memory of the cached positions: keys and values, page tables, and RoPE tables.

use burn::tensor::{Device, Int, Tensor, TensorData};
use ops::Cached;

use crate::{DecoderConfig, Rope};

/// Device memory of the cached positions. Keys and values are written in place: all clones see the writes.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    /// Keys and values per layer, `[batch, kv_heads, capacity, head_dim]`, or in pages `[pages, PAGE,
    /// kv_heads, head_dim]`.
    pub(super) layers: Vec<(Cached, Cached)>,
    /// Page table, if sequences share pages.
    pub(super) pages: Option<Pages>,
    /// One table `[capacity, dim]` per rope: dim / 2 cosines, then dim / 2 sines.
    pub(super) tables: Vec<Tensor<2>>,
}

/// The pages of each sequence, in order.
#[derive(Debug, Clone)]
pub(super) struct Pages {
    pub(super) rows: Vec<Vec<i32>>,
    /// The same on the device, `[batch, pages per sequence]`.
    pub(super) table: Tensor<2, Int>,
}

impl Pages {
    pub(super) fn new(rows: Vec<Vec<i32>>, device: &Device) -> Self {
        let (batch, words) = (rows.len(), rows.concat());
        let len = words.len();
        // Uploaded as one dimension, because Burn pads the rows of a 2-D tensor.
        let words = TensorData::new(words, [len]);
        let words = Tensor::<1, Int>::from_data(words, (device, burn::tensor::DType::I32));
        Self { rows, table: words.reshape([batch, len / batch]) }
    }
}

/// Returns one table `[positions, dim]` per rope, for a sequence of `length`: dim / 2 cosines, then dim / 2
/// sines.
pub(super) fn tables(
    config: &DecoderConfig,
    length: usize,
    positions: usize,
    device: &Device,
) -> Vec<Tensor<2>> {
    let table = |rope: &Rope| {
        let frequencies = rope.frequencies(length);
        let angles = |position: usize| {
            let sin_cos = move |f: &f64| (position as f64 * f).sin_cos();
            let (sines, cosines): (Vec<_>, Vec<_>) = frequencies.iter().map(sin_cos).unzip();
            let factor = rope.attention_factor;
            cosines.into_iter().chain(sines).map(move |value| (value * factor) as f32)
        };
        let table: Vec<f32> = (0..positions).flat_map(angles).collect();
        let data = TensorData::new(table, [positions, rope.dim]);
        Tensor::from_data(data, (device, burn::tensor::DType::F32))
    };
    config.ropes.iter().map(table).collect()
}
