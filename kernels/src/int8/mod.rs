//! Int8 weights: `w[n, k] = code · scb[n] / 127`, with codes from -127 to 127 and one absmax a row.
//!
//! ```text
//!   quantise      scb[n] = max |w[n, ..]|;  code = round(w · (127 / scb[n]))       // ties to even
//!   dequantise    w = code · scb[n] · (1 / 127)                                    // f32, rounded once more
//!   multiply      y = epilogue((x · codeᵀ) · scb / 127)                            // x: [m, k], y: [m, n]
//! ```
//!
//! The format is that of bitsandbytes (`SCB`), whose checkpoints load unchanged. Its own matmul also rounds x
//! to 8 bits, except for columns with outliers. Here x stays exact by default, which is nearer to the dense
//! matmul and needs no second pass over x. A matmul rounds x only with [`Activations`]. Bytes multiply
//! faster: 512 rows of a layer of 14336 x 4096 take 108 us on an H200, decoded codes 194 us.
//!
//! | kernel             | purpose                               | bound by                      |
//! |--------------------|---------------------------------------|-------------------------------|
//! | [`Int8Matmul`]     | matmuls that decode codes in registers | bytes of codes; for many rows arithmetic |
//! | [`Int8Quantize`]   | codes and absmax                      | bytes of the dense weight     |
//! | [`Int8Dequantize`] | a dense weight                        | bytes of the dense weight     |
//!
//! Sources: Dettmers et al., "LLM.int8()" (2022); bitsandbytes, `kInt8VectorQuant` and `int8_vectorwise_dequant`.

mod activations;
mod dequantize;
mod gemv;
mod matmul;
mod mma;
mod problem;
mod quantize;
mod subgroup;

pub use activations::Activations;
pub use dequantize::{DequantizeOperands, DequantizeProblem, Int8Dequantize};
pub use matmul::{DenseConfig, Int8Matmul, Int8MatmulConfig};
pub use problem::{Int8MatmulOperands, Int8MatmulProblem};
pub use quantize::{Int8Quantize, QuantizeConfig, QuantizeOperands, QuantizeProblem, quantize};

use arch::DType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::Queue;

use crate::cooperative::U32x4;
use crate::dequant::{Dequantize, DequantizeBytes, code_of, lifted};
pub use crate::dequant::{DequantizeConfig, GemvConfig};
use crate::weight::InvalidWeight;

/// An int8 weight `[n, k]`. Build it with [`Weight::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    pub n: u32,
    pub k: u32,
}

/// Device buffers of a weight.
#[derive(Debug, Clone)]
pub struct WeightBuffers {
    /// i8 `[n, k]`, padded to whole words.
    pub codes: Handle,
    /// f32 `[n]`.
    pub scb: Handle,
}

impl Weight {
    /// # Errors
    /// [`InvalidWeight::Empty`], [`InvalidWeight::TooLarge`].
    pub fn new(n: u32, k: u32) -> Result<Self, InvalidWeight> {
        let weight = Self { n, k };
        for (axis, size) in [("n", n), ("k", k)] {
            if size == 0 {
                return Err(InvalidWeight::Empty { axis });
            }
        }
        // Word indices are u32 and may step past the end; the top bit of k must be 0.
        if weight.len() > 1 << 33 || k >> 31 != 0 {
            return Err(InvalidWeight::TooLarge(weight.len()));
        }
        Ok(weight)
    }

    /// Joins weights of one k into one, with their rows one after the other.
    ///
    /// # Errors
    /// [`InvalidWeight::Join`] if k differs, or if a word would span two weights.
    pub fn joined(parts: &[Self]) -> Result<Self, InvalidWeight> {
        let refused = |why| Err(InvalidWeight::Join { why });
        let k = parts.first().map_or(0, |part| part.k);
        if parts.iter().any(|part| part.k != k) {
            return refused("their k differ");
        }
        if parts.iter().any(|part| part.len() % 4 != 0) {
            return refused("a 4-byte word would hold elements of two weights");
        }
        match parts.iter().try_fold(0u32, |n, part| n.checked_add(part.n)) {
            Some(n) => Self::new(n, k),
            None => refused("the total number of rows exceeds u32"),
        }
    }

    /// Number of elements.
    pub const fn len(&self) -> u64 {
        self.n as u64 * self.k as u64
    }

    /// Always false, because [`Weight::new`] rejects empty weights.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of 4-byte words of codes.
    pub const fn words(&self) -> u64 {
        self.len().div_ceil(4)
    }

    /// Total bytes of both buffers.
    pub const fn bytes(&self) -> u64 {
        self.words() * 4 + self.n as u64 * 4
    }
}

impl WeightBuffers {
    /// Takes buffers in the order of [`quantized`](crate::quantized).
    pub(crate) fn from_handles(handles: &[Handle]) -> Self {
        let [codes, scb] = handles else { unreachable!("an 8-bit weight has codes and scales") };
        Self { codes: codes.clone(), scb: scb.clone() }
    }
}

/// Random codes for benchmarks. Scales are 1 to 3 divided by √k, so that results are of magnitude 1.
fn noise(queue: &Queue, weight: Weight, seed: u64) -> WeightBuffers {
    let scale = 1.0 / (weight.k as f32).sqrt();
    let scb = (0..u64::from(weight.n)).map(|i| (1.0 + 0.5 * ((i + seed) % 5) as f32) * scale);
    let scb: Vec<f32> = scb.collect();
    WeightBuffers {
        codes: crate::noise(queue, weight.words() as usize * 4, DType::U8, seed),
        scb: queue.upload(f32::as_bytes(&scb)),
    }
}

/// Dequantises a code, or a sum of codes, of a row with this absmax. The two products are rounded one after
/// the other, as in bitsandbytes. XOR with the top bit of k, which is always 0, keeps the compiler from
/// reordering them.
#[cube]
fn scale_by_row(code: f32, scb: f32, k: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(code * scb) ^ (k >> 31)) * comptime!(1.0f32 / 127.0)
}

/// Buffers of a weight as a kernel sees them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QuantizedValues<NW: Size> {
    codes: Box<[Vector<u32, NW>]>,
    scb: Box<[f32]>,
}

#[cube]
impl<NW: Size> Dequantize for QuantizedValues<NW> {
    fn fill(_this: &Self, _codebook: &mut [f32], _unit: u32) {}

    fn read(
        this: &Self,
        words: &mut Array<u32>,
        _shared: &mut Array<f32>,
        row: u32,
        vector: u32,
        k: u32,
        #[comptime] i: usize,
    ) {
        let four = lifted(this.codes[row as usize * (k / 16) as usize + vector as usize]);
        #[unroll]
        for w in 0..4usize {
            words[comptime!(4 * i + w)] = four.extract(w);
        }
    }

    fn decode<F: Float>(
        into: &mut [U32x4],
        to: u32,
        words: &Array<u32>,
        _shared: &Array<f32>,
        _codebook: &[f32],
        #[comptime] i: usize,
        #[comptime] bf16: bool,
    ) {
        #[unroll]
        for half in 0..2usize {
            let mut word = U32x4::new(0u32);
            #[unroll]
            for part in 0..4usize {
                let four = words[comptime!(4 * i + 2 * half + part / 2)];
                let first = comptime!(2 * (part as u32 % 2));
                let (low, high) = (code_of(four, first), code_of(four, comptime!(first + 1)));
                if comptime!(bf16) {
                    // The lower half of an f32 that holds an integer below 256 is zero.
                    let high = u32::reinterpret(high);
                    word.insert(part, (u32::reinterpret(low) >> 16) | high);
                } else {
                    let mut pair = Vector::<F, Const<2>>::new(F::cast_from(low));
                    pair.insert(1usize, F::cast_from(high));
                    word.insert(part, u32::reinterpret(pair));
                }
            }
            into[(to + comptime!(half as u32)) as usize] = word;
        }
    }

    fn dequantize(this: &Self, sum: f32, row: u32, k: u32) -> f32 {
        scale_by_row(sum, this.scb[row as usize], k)
    }
}

#[cube]
impl<NW: Size> DequantizeBytes<NW> for QuantizedValues<NW> {
    fn vectors(this: &Self) -> u32 {
        this.codes.len() as u32
    }

    fn codes(this: &Self, at: usize) -> Vector<u32, NW> {
        lifted(this.codes[at])
    }

    fn block(_this: &Self, _at: usize) -> f32 {
        1.0f32
    }

    fn row(this: &Self, row: usize) -> f32 {
        this.scb[row]
    }

    fn scale_by_block(code: f32, _block: f32) -> f32 {
        code
    }

    fn scale_by_row(sum: f32, row: f32, k: u32) -> f32 {
        scale_by_row(sum, row, k)
    }
}

impl<N: Size> QuantizedValuesLaunch<N> {
    fn from_buffers(weight: &Weight, buffers: &WeightBuffers, words: usize) -> Self {
        let WeightBuffers { codes, scb } = buffers;
        // SAFETY: the lengths follow from the weight.
        unsafe {
            Self::new(
                BufferArg::from_raw_parts(codes.clone(), weight.words() as usize / words),
                BufferArg::from_raw_parts(scb.clone(), weight.n as usize),
            )
        }
    }
}
