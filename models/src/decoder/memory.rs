//! Device memory of the cached positions: keys and values, page tables, and RoPE tables.

use burn::tensor::{Device, Int, Tensor, TensorData};
use ops::Cached;

use super::cells;
use crate::{DecoderConfig, Error, Rope};

/// Device memory of the cached positions. Keys and values are written in place: all clones see the writes.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    /// Keys and values per layer, `[batch, kv_heads, capacity, head_dim]`, or in pages `[pages, PAGE,
    /// kv_heads, head_dim]`.
    pub(super) layers: Vec<(Cached, Cached)>,
    /// Page table `[batch, pages per sequence]` of a cache in pages.
    pub(super) pages: Option<Tensor<2, Int>>,
    /// One table `[capacity, dim]` per rope: dim / 2 cosines, then dim / 2 sines.
    pub(super) tables: Vec<Tensor<2>>,
}

impl Memory {
    /// Checks that the device allocated the memory of keys and values, without waiting for kernels.
    pub(super) fn check_allocation(&self) -> Result<(), Error> {
        for (keys, values) in &self.layers {
            for cached in [keys, values] {
                ops::check_allocation(cached).map_err(Error::Failed)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of keys and values on the device.
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|(k, v)| cells::bytes(k) + cells::bytes(v)).sum()
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
