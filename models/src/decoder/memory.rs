//! What lies on the device for the positions so far: keys and values, pages of them, and angles.

use burn::tensor::{Device, Int, Tensor, TensorData};
use ops::Cached;

use crate::{DecoderConfig, Rope};

/// What lies on the device. Keys and values are written where they lie: all clones see it.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    /// Of keys and of values `[batch, kv_heads, capacity, head_dim]`, or in pages `[pages, PAGE, kv_heads, head_dim]`.
    pub(super) layers: Vec<(Cached, Cached)>,
    /// Where sequences share some.
    pub(super) pages: Option<Pages>,
    /// Of each rope `[capacity, dim]`: half cosines, half sines.
    pub(super) tables: Vec<Tensor<2>>,
}

/// The pages of each sequence, in order.
#[derive(Debug, Clone)]
pub(super) struct Pages {
    pub(super) rows: Vec<Vec<i32>>,
    /// The same on the device, `[batch, pages of a sequence]`.
    pub(super) table: Tensor<2, Int>,
}

impl Pages {
    pub(super) fn new(rows: Vec<Vec<i32>>, device: &Device) -> Self {
        let (batch, words) = (rows.len(), rows.concat());
        let len = words.len();
        // In one run: Burn pads the rows of a tensor that has some.
        let words = TensorData::new(words, [len]);
        let words = Tensor::<1, Int>::from_data(words, (device, burn::tensor::DType::I32));
        Self { rows, table: words.reshape([batch, len / batch]) }
    }
}

/// Of each rope `[positions, dim]`: for each position half cosines, half sines, as a sequence of `length` has them.
pub(super) fn tables(
    config: &DecoderConfig,
    length: usize,
    positions: usize,
    device: &Device,
) -> Vec<Tensor<2>> {
    let table = |rope: &Rope| {
        let frequencies = rope.frequencies(length);
        let angles = |position: usize| {
            let turn = move |f: &f64| (position as f64 * f).sin_cos();
            let (sines, cosines): (Vec<_>, Vec<_>) = frequencies.iter().map(turn).unzip();
            let factor = rope.attention_factor;
            cosines.into_iter().chain(sines).map(move |value| (value * factor) as f32)
        };
        let table: Vec<f32> = (0..positions).flat_map(angles).collect();
        let data = TensorData::new(table, [positions, rope.dim]);
        Tensor::from_data(data, (device, burn::tensor::DType::F32))
    };
    config.ropes.iter().map(table).collect()
}
