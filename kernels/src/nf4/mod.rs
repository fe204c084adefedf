//! 4-bit weights: `w[n, k] = codebook[code] · absmax[block]`, with blocks of 32 to 4096 neighbours.
//!
//! ```text
//!   quantise      absmax = max |w| of the block;  code = nearest codebook entry to w / absmax
//!   dequantise    w = book[code] · absmax                            // f32, rounded once
//!   multiply      y = epilogue(x · wᵀ)                               // x: [m, k], y: [m, n]
//!   nested        absmax = book256[byte] · scale[block / 256] + offset
//! ```
//!
//! The codebook of NF4 holds quantiles of the normal distribution, that of FP4 the values of a float with two
//! bits of exponent. A kernel reads the codebook from a buffer and depends on neither. The format is that of
//! bitsandbytes, whose checkpoints load unchanged. absmax equals bitsandbytes' to the bit. Nested absmax and
//! their scales do so for an equal offset: torch's mean of all absmax, whose last bit depends on the order of
//! its sum. For codes next to a threshold see `quantize`.
//!
//! | kernel           | purpose                                       | bound by                      |
//! |------------------|-----------------------------------------------|-------------------------------|
//! | [`Nf4Matmul`]    | matmuls that decode codes in registers        | bytes of codes; for many rows arithmetic |
//! | [`Nf4Quantize`]  | codes and absmax                              | bytes of the dense weight     |
//! | [`Nf4Dequantize`] | a dense weight                                | bytes of the dense weight     |
//!
//! Sources: Dettmers et al., "QLoRA" (2023); bitsandbytes, `functional.py` and `csrc/kernels.cu`.

mod dequantize;
mod matmul;
mod quantize;
mod weight;

pub use dequantize::{DequantizeConfig, DequantizeOperands, DequantizeProblem, Nf4Dequantize};
pub use matmul::{
    DenseConfig, FusedConfig, GemvConfig, Nf4Matmul, Nf4MatmulConfig, Nf4MatmulOperands,
    Nf4MatmulProblem, SharedConfig, StreamConfig, SubgroupConfig,
};
pub(crate) use quantize::dynamic_map;
pub use quantize::{
    Codebook, Nf4Quantize, QuantizeConfig, QuantizeOperands, QuantizeProblem, nest, nested_values,
    quantize,
};
pub use weight::{
    NESTED_BLOCK, NestedBuffers, Order, Weight, WeightBuffers, join, reorder, reorder_absmax,
    reorder_codes, split,
};

use arch::DType;
use cubecl::prelude::*;
use tune::Queue;

/// Random codes with plausible scales, for benchmarks.
pub(crate) fn noise(queue: &Queue, weight: Weight, seed: u64) -> WeightBuffers {
    let floats = |values: &[f32]| queue.upload(f32::as_bytes(values));
    let codes = crate::noise(queue, weight.words() as usize * 4, DType::U8, seed);
    let absmax_len = weight.absmax_bytes() as usize;
    let (absmax, nested) = if weight.nested {
        let codebook: Vec<f32> = (0..256).map(|i| (i as f32 - 127.5) / 127.5).collect();
        let scales = vec![[0.01f32, 0.04]; weight.groups() as usize].concat();
        let nested = NestedBuffers { codebook: floats(&codebook), scales: floats(&scales) };
        (crate::noise(queue, absmax_len, DType::U8, seed + 1), Some(nested))
    } else {
        let value = |i: u64| 0.03 + 0.02 * ((i * 7 + seed) % 64) as f32 / 64.0;
        let bytes = (0..weight.absmax_len()).flat_map(|i| value(i).to_le_bytes());
        (queue.made(absmax_len, bytes), None)
    };
    WeightBuffers { codes, absmax, codebook: floats(&Codebook::Nf4.values()), nested }
}

/// Buffers of a weight as a kernel sees them, with codes in vectors of `N` words.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QuantizedValues<N: Size> {
    /// Words of eight codes.
    pub(crate) codes: Box<[Vector<u32, N>]>,
    /// Words: one f32 each, or four bytes each if nested.
    pub(crate) absmax: Box<[u32]>,
    pub(crate) codebook: Box<[f32]>,
    /// Codebook of nested absmax; if not nested, bound to `codebook`.
    pub(crate) nested_codebook: Box<[f32]>,
    /// Scales of nested absmax; if not nested, bound to `codebook`.
    pub(crate) scales: Box<[f32]>,
    #[cube(comptime)]
    pub(crate) plan: QuantizedPlan,
}

/// Compile-time parameters of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct QuantizedPlan {
    pub(crate) block_size: u32,
    pub(crate) nested: bool,
    pub(crate) tiles: bool,
}

impl QuantizedPlan {
    const fn new(weight: &Weight) -> Self {
        Self {
            block_size: weight.block_size,
            nested: weight.nested,
            tiles: matches!(weight.order, Order::Tiles),
        }
    }
}

impl<N: Size> QuantizedValuesLaunch<N> {
    fn from_buffers(weight: &Weight, buffers: &WeightBuffers, width: usize) -> Self {
        let WeightBuffers { codes, absmax, codebook, nested } = buffers;
        let (nested_codebook, scales) = match nested {
            Some(nested) => {
                ((&nested.codebook, 256), (&nested.scales, 2 * weight.groups() as usize))
            }
            None => ((codebook, 16), (codebook, 16)),
        };
        // SAFETY: the lengths follow from the weight.
        let buffer = |(handle, len): (&cubecl::server::Handle, usize)| unsafe {
            BufferArg::from_raw_parts(handle.clone(), len)
        };
        Self::new(
            buffer((codes, weight.words() as usize / width)),
            buffer((absmax, weight.absmax_bytes() as usize / 4)),
            buffer((codebook, 16)),
            buffer(nested_codebook),
            buffer(scales),
            QuantizedPlan::new(weight),
        )
    }
}

#[cube]
impl<N: Size> QuantizedValues<N> {
    /// Returns eight codes from column `8·chunk` of a row on, in the order of [`Order::Rows`], where they
    /// form word `word`. Needs `N` = 1.
    pub(crate) fn word(&self, word: u32, row: u32, chunk: u32, k: u32) -> u32 {
        if comptime!(self.plan.tiles) {
            let mut made = 0u32;
            #[unroll]
            for q in 0..4u32 {
                let at = weight::word_in_tiles(row, chunk, q.runtime(), k);
                let found = self.codes[at as usize].extract(0usize);
                made |= ((found >> (chunk % 4 * 8)) & 255) << comptime!(8 * q);
            }
            made
        } else {
            self.codes[word as usize].extract(0usize)
        }
    }

    /// Returns the absmax of the codes of `word`.
    pub(crate) fn absmax_of_word(&self, word: u32, row: u32, chunk: u32, k: u32) -> f32 {
        let block = word / comptime!(self.plan.block_size / 8);
        let mut at = block;
        if comptime!(self.plan.tiles) {
            at = weight::absmax_in_tiles(row, chunk / 8, k);
        }
        self.absmax_at(at, block, k)
    }

    /// Returns the absmax of block `block`, which lies at index `at`. The product and the sum of a nested
    /// absmax are rounded one after the other, as in bitsandbytes. XOR with the top bit of k, which is always
    /// 0, keeps the compiler from fusing them.
    pub(crate) fn absmax_at(&self, at: u32, block: u32, k: u32) -> f32 {
        if comptime!(self.plan.nested) {
            let word = self.absmax[(at / 4) as usize];
            let byte = (word >> (at % 4 * 8)) & 255;
            let group = 2 * (block / comptime!(NESTED_BLOCK)) as usize;
            let (scale, offset) = (self.scales[group], self.scales[group + 1]);
            let scaled = self.nested_codebook[byte as usize] * scale;
            f32::reinterpret(u32::reinterpret(scaled) ^ (k >> 31)) + offset
        } else {
            f32::reinterpret(self.absmax[at as usize])
        }
    }
}

/// Returns the first bit of code `i` of eight in a word: bytes in order, the high half of each byte first.
pub(crate) const fn code_shift(i: u32) -> u32 {
    i / 2 * 8 + (1 - i % 2) * 4
}
