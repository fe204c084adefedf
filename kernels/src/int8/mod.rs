//! Weights in 8 bits: `w[n, k] = code · scb[n] / 127`, a code from -127 to 127, an absmax a row.
//!
//! ```text
//!   quantise      scb[n] = max |w[n, ..]|;  code = round(w · (127 / scb[n]))       // ties to even
//!   dequantise    w = code · scb[n] · (1 / 127)                                    // f32, rounded once more
//!   multiply      y = epilogue((x · codeᵀ) · scb / 127)                            // x: [m, k], y: [m, n]
//! ```
//!
//! The format is that of bitsandbytes (`SCB`), whose checkpoints load as they are. Its own product also rounds x to
//! 8 bits, but for columns with outliers. Here x stays what it is, which is nearer to the dense product and needs no
//! second pass over x, unless a product asks for [`Activations`]: bytes multiply faster, 512 rows of a layer of 14336 x 4096
//! in 108 us of an H200 where decoded codes take 194.
//!
//! | family             | what it does                          | bound by                      |
//! |--------------------|---------------------------------------|-------------------------------|
//! | [`Int8Matmul`]     | products, decoding codes in registers | bytes of codes; for many rows products |
//! | [`Int8Quantize`]   | codes and absmax                      | bytes of the dense weight     |
//! | [`Int8Dequantize`] | a dense weight                        | bytes of the dense weight     |
//!
//! Sources: Dettmers et al., "LLM.int8()" (2022); bitsandbytes, `kInt8VectorQuant` and `int8_vectorwise_dequant`.

mod activations;
mod dequantize;
mod gemv;
mod mma;
mod plane;
mod problem;
mod product;
mod quantize;

pub use activations::Activations;
pub use dequantize::{DequantizeConfig, DequantizeOperands, DequantizeProblem, Int8Dequantize};
pub use gemv::GemvConfig;
pub use problem::{Int8MatmulOperands, Int8MatmulProblem};
pub use product::{DenseConfig, Int8Matmul, Int8MatmulConfig};
pub use quantize::{Int8Quantize, QuantizeConfig, QuantizeOperands, QuantizeProblem, quantize};

use arch::{DType, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};

use crate::nf4::{InvalidWeight, copy_words};

/// A weight `[n, k]` in 8 bits an element. Build it with [`Weight::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    pub n: u32,
    pub k: u32,
}

/// Device buffers of a weight.
#[derive(Debug, Clone)]
pub struct WeightBuffers {
    /// Bytes `[n, k]`, in whole words.
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
        // Words are counted in 32 bits, with steps past the last; the last bit of k is nobody's.
        if weight.len() > 1 << 33 || k >> 31 != 0 {
            return Err(InvalidWeight::TooLarge(weight.len()));
        }
        Ok(weight)
    }

    /// Weights of one k as one, their rows one after the other.
    ///
    /// # Errors
    /// [`InvalidWeight::Join`] where k differs, or where a word would hold elements of two.
    pub fn joined(parts: &[Self]) -> Result<Self, InvalidWeight> {
        let refused = |why| Err(InvalidWeight::Join { why });
        let k = parts.first().map_or(0, |part| part.k);
        if parts.iter().any(|part| part.k != k) {
            return refused("their k differ");
        }
        if parts.iter().any(|part| part.len() % 4 != 0) {
            return refused("a word would hold elements of two");
        }
        match parts.iter().try_fold(0u32, |n, part| n.checked_add(part.n)) {
            Some(n) => Self::new(n, k),
            None => refused("more rows than are counted"),
        }
    }

    /// Elements.
    pub const fn len(&self) -> u64 {
        self.n as u64 * self.k as u64
    }

    /// Never: [`Weight::new`] refuses it.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// 4-byte words of codes.
    pub const fn words(&self) -> u64 {
        self.len().div_ceil(4)
    }

    /// Bytes of both buffers.
    pub const fn bytes(&self) -> u64 {
        self.words() * 4 + self.n as u64 * 4
    }

    /// Words of a vector that lies in one row, at most `widest` of them.
    fn together(&self, widest: u32) -> Option<u32> {
        [4, 2, 1].into_iter().find(|words| *words <= widest && self.k % (4 * words) == 0)
    }
}

impl WeightBuffers {
    /// The buffers in the order of [`quantized`](crate::quantized).
    pub(crate) fn from_handles(handles: &[Handle]) -> Self {
        let [codes, scb] = handles else { unreachable!("an 8-bit weight has codes and scales") };
        Self { codes: codes.clone(), scb: scb.clone() }
    }
}

/// Weights of one k as one, their rows one after the other.
///
/// Cost: every byte read and written once.
///
/// # Errors
/// As [`Weight::joined`].
pub fn join(
    device: &Device,
    parts: &[(Weight, &WeightBuffers)],
) -> Result<WeightBuffers, InvalidWeight> {
    let weights: Vec<Weight> = parts.iter().map(|(weight, _)| *weight).collect();
    let joined = Weight::joined(&weights)?;
    let Weight { n, k } = joined;
    let empty = |words: u64| device.client().empty(words as usize * 4);
    let made = WeightBuffers { codes: empty(joined.words()), scb: empty(n.into()) };
    let mut row = 0;
    for (weight, buffers) in parts {
        let before = Weight { n: row, k };
        for (from, to, start, len) in [
            (&buffers.codes, (&made.codes, joined.words()), before.words(), weight.words()),
            (&buffers.scb, (&made.scb, n.into()), row.into(), weight.n.into()),
        ] {
            let [all, start, len] = [to.1, start, len].map(|words| words as usize);
            copy_words(device, (from, len), 0, (to.0, all), start, len);
        }
        row += weight.n;
    }
    Ok(made)
}

/// Random codes with scales of 1 to 3 by √k, so that results are of size 1: for measuring.
fn noise(device: &Device, weight: Weight, seed: u64) -> WeightBuffers {
    let scale = 1.0 / (weight.k as f32).sqrt();
    let scb = (0..u64::from(weight.n)).map(|i| (1.0 + 0.5 * ((i + seed) % 5) as f32) * scale);
    let scb: Vec<f32> = scb.collect();
    WeightBuffers {
        codes: crate::noise(device, weight.words() as usize * 4, DType::U8, seed),
        scb: device.client().create_from_slice(f32::as_bytes(&scb)),
    }
}

/// A word whose codes count from 0 on, as [`code_of`] takes it.
#[cube]
fn lifted<N: Size>(word: Vector<u32, N>) -> Vector<u32, N> {
    word ^ Vector::new(0x8080_8080u32)
}

/// Code `e` of a lifted word's four: the mantissa of 2^23 + 128 + code. A conversion would take a fourth of the rate.
#[cube]
fn code_of(lifted: u32, #[comptime] e: u32) -> f32 {
    let byte = (lifted >> comptime!(8 * e)) & 255u32;
    f32::reinterpret(byte | 0x4b00_0000u32) - 8_388_736.0f32
}

/// Dequantises a code, or a sum of codes, of a row with this absmax: two products, rounded one after the other as
/// bitsandbytes does. A bit that is 0 in every k, which no compiler knows, keeps them in this order.
#[cube]
fn scaled(code: f32, scb: f32, k: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(code * scb) ^ (k >> 31)) * comptime!(1.0f32 / 127.0)
}
