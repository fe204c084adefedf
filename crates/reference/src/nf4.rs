//! ```text
//! values: [len], a weight flattened row by row; blocks run over the flat index and may straddle rows
//! codes: [ceil(len/2)] bytes, element 2j in the high half   absmax: [ceil(len/block_size)]
//!   for each block b of block_size values, the last may be short:
//!     absmax[b] = max|values[i]|
//!     for each i in b: code[i] = nearest(code_book, values[i]·(1/absmax[b]))
//!   values[i] ≈ code_book[code[i]]·absmax[b]
//! nested: the absmax themselves, in blocks of 256, as bytes of a dynamic map
//!   d = absmax - offset;  nested_absmax[c] = max|d|;  code[b] = nearest(map, d[b]·(1/nested_absmax[c]))
//!   absmax[b] ≈ map[code[b]]·nested_absmax[b/256] + offset
//! ```
//!
//! Everything is f32 and rounded as IEEE 754 says, one operation at a time. bitsandbytes 0.50 computes
//! the same, with these exceptions:
//!
//! - Its CUDA kernels are built with `--use_fast_math`: `1/absmax` is the approximate reciprocal, so that a
//!   scaled value within two ulps of a threshold may get the neighbouring code. What differs by no more is
//!   told by [`FourBit::disagreement`] and [`nested_disagreement`].
//! - Subnormals count as zero here, as they do in those kernels; torch on the CPU keeps them.
//! - A block of zeros gets the code of zero here and from torch on the CPU. CUDA multiplies by infinity:
//!   its codes are all 0 then, in NF4 the code of -1, and decode to -0. Torch's absmax of a short last
//!   block of zeros is 1e-38.
//! - Torch on the CPU divides in a short last block where it multiplies elsewhere; its thresholds of FP4
//!   are the exact midpoints, up to 14 ulps from CUDA's, which are used here; and it gives FP4's two zeros
//!   the other sign. Its code book has 0 at 8, as here, but its kernels decode 8 to -0.
//! - On the CPU it finds nested codes in a table of 65536 places: the code of the neighbour, near a
//!   midpoint. Here they are found as on CUDA.
//! - `offset` is torch's f32 mean, whose last bits depend on the order of summation, and so on the device
//!   and its version: it is given by the caller, or by [`mean`].
//!
//! Sources: Dettmers et al., "QLoRA" (2023); Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization" (2021); bitsandbytes 95f9af3, `csrc/kernels.cu`, `functional.py`, `backends/default/ops.py`.

use rayon::prelude::*;

use crate::Error;

/// A code of 16 numbers in -1..=1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FourBit {
    /// Quantiles of the normal distribution, ascending; 7 is zero.
    Nf4,
    /// A sign, and eight magnitudes in the order of their bits; 0 and 8 are zero.
    Fp4,
}

/// Quantized values.
#[derive(Debug, Clone, PartialEq)]
pub struct Blocks {
    /// Two values a byte from [`FourBit::quantize`], one from [`nest`].
    pub codes: Vec<u8>,
    /// One value a block.
    pub absmax: Vec<f32>,
}

/// Values that share a nested absmax.
pub const NESTED_BLOCK_SIZE: usize = 256;

/// NF4's values, as `get_4bit_type` has them.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Above the threshold of index c lies code c + 1: the midpoints of [`NF4`].
const NF4_THRESHOLDS: [f32; 15] = [
    -0.848_096_4,
    -0.610_632_9,
    -0.459_995_27,
    -0.339_679_42,
    -0.234_607_4,
    -0.137_911_74,
    -0.045_525_018,
    0.039_790_15,
    0.120_255_25,
    0.203_521_25,
    0.292_013_76,
    0.389_312_54,
    0.501_663_45,
    0.642_786_9,
    0.861_478_45,
];

/// FP4's magnitudes in twelfths, by the three low bits.
const FP4_TWELFTHS: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];

/// From the largest magnitude down: what lies above the threshold has the code beside it.
const FP4_THRESHOLDS: [(f32, u8); 7] = [
    (0.833_333_3, 3),
    (0.583_333, 2),
    (0.416_666_7, 5),
    (0.291_666_67, 4),
    (0.208_333_33, 7),
    (0.085_937_5, 6),
    (0.002_604_17, 1),
];

impl FourBit {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Nf4, Self::Fp4];

    /// What each code stands for. A checkpoint brings its own: decode with that.
    pub fn code_book(self) -> [f32; 16] {
        match self {
            Self::Nf4 => NF4,
            Self::Fp4 => std::array::from_fn(|code| {
                let magnitude = FP4_TWELFTHS[code & 7] / 12.0;
                if code > 8 { -magnitude } else { magnitude }
            }),
        }
    }

    /// The code of a scaled value in -1..=1; at a threshold the lower one, in FP4 that of the lower
    /// magnitude.
    pub fn encode(self, x: f32) -> u8 {
        match self {
            Self::Nf4 => NF4_THRESHOLDS.iter().filter(|threshold| x > **threshold).count() as u8,
            Self::Fp4 => {
                let sign = if x < 0.0 { 8 } else { 0 };
                let above = FP4_THRESHOLDS.iter().find(|(threshold, _)| x.abs() > *threshold);
                sign + above.map_or(0, |(_, code)| *code)
            }
        }
    }

    /// Quantizes values, which were widened to f32.
    ///
    /// # Shapes
    /// values `[len]`; codes `[ceil(len/2)]`, after an odd number the code of zero; absmax
    /// `[ceil(len/block_size)]`.
    ///
    /// # Errors
    /// [`Error::BlockSize`]; [`Error::NotFinite`] with the first infinity or NaN.
    pub fn quantize(self, values: &[f32], block_size: usize) -> Result<Blocks, Error> {
        let absmax = absmax(values, block_size)?;
        let code = |i: usize| self.encode(scaled(values, &absmax, block_size, i));
        let bytes = (0..values.len().div_ceil(2)).into_par_iter();
        let codes = bytes.map(|j| code(2 * j) << 4 | code(2 * j + 1)).collect();
        Ok(Blocks { codes, absmax })
    }

    /// The first element whose code is wrong by more than a reciprocal of `ulps` excuses: 0 asks for the
    /// codes of [`FourBit::quantize`], 2 allows CUDA's approximate reciprocal. Blocks of zeros may have
    /// any code.
    ///
    /// # Errors
    /// As [`FourBit::quantize`]; [`Error::Length`] when `codes` are not those of so many values.
    pub fn disagreement(
        self,
        values: &[f32],
        block_size: usize,
        codes: &[u8],
        ulps: u32,
    ) -> Result<Option<usize>, Error> {
        let absmax = absmax(values, block_size)?;
        length("codes", codes.len(), values.len().div_ceil(2))?;
        Ok((0..values.len()).into_par_iter().find_first(|&i| {
            let x = scaled(values, &absmax, block_size, i);
            let excused = around(x, ulps).iter().any(|x| self.encode(*x) == nibble(codes, i));
            absmax[i / block_size] > 0.0 && !excused
        }))
    }
}

/// The values that codes stand for; what a 16-bit format makes of them is [`crate::DType::round`].
///
/// # Shapes
/// codes `[ceil(len/2)]`, absmax `[ceil(len/block_size)]`; the result `[len]`.
///
/// # Errors
/// [`Error::BlockSize`]; [`Error::Length`] when the shapes disagree.
pub fn dequantize(
    code_book: &[f32; 16],
    codes: &[u8],
    absmax: &[f32],
    block_size: usize,
    len: usize,
) -> Result<Vec<f32>, Error> {
    check(block_size)?;
    length("codes", codes.len(), len.div_ceil(2))?;
    length("absmax", absmax.len(), len.div_ceil(block_size))?;
    let value = |i| code_book[usize::from(nibble(codes, i))] * absmax[i / block_size];
    Ok((0..len).into_par_iter().map(value).collect())
}

/// The mean in f32 of a sum in f64, first to last: within an ulp or two of torch's. 0 for nothing.
pub fn mean(absmax: &[f32]) -> f32 {
    let sum: f64 = absmax.iter().map(|a| f64::from(*a)).sum();
    if absmax.is_empty() { 0.0 } else { (sum / absmax.len() as f64) as f32 }
}

/// The signed dynamic map of 8 bits, ascending: each decade from 1e-6 to 1 cut linearly, twice as fine as
/// the one below it; 0 at 127, 1 at 255, and no -1.
///
/// This is what torch computes with FMA, as it does on x86 with AVX2; without, 42 of the 256 differ by an
/// ulp. A checkpoint brings its own: decode with that.
///
/// Source: `create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8)`.
pub fn dynamic_map() -> [f32; 256] {
    let mut map = [0.0; 256];
    map[255] = 1.0;
    for decade in 0..7 {
        let parts = 1usize << decade;
        let step = (1.0 - 0.1f32) / parts as f32;
        // torch.linspace(0.1, 1, parts + 1), which counts from the nearer end.
        let boundary = |i: usize| {
            if i < parts.div_ceil(2) {
                step.mul_add(i as f32, 0.1)
            } else {
                (-step).mul_add((parts - i) as f32, 1.0)
            }
        };
        let scale = 10f64.powi(decade - 6) as f32;
        for i in 0..parts {
            let value = scale * ((boundary(i) + boundary(i + 1)) / 2.0);
            map[127 + parts + i] = value;
            map[127 - parts - i] = -value;
        }
    }
    map
}

/// The code of a scaled value in -1..=1. The search halves an ascending map of 256; in the middle between
/// two values it takes the one it met last, the even index.
///
/// Source: `csrc/kernels.cu`, `dQuantize<0>`.
pub fn encode_nested(map: &[f32; 256], x: f32) -> u8 {
    let (mut pivot, mut lower, mut upper) = (127, 0, 255);
    for step in [64, 32, 16, 8, 4, 2, 1] {
        if x > map[pivot] {
            lower = pivot;
            pivot += step;
        } else {
            upper = pivot;
            pivot -= step;
        }
    }
    let middle = |end: usize| (map[end] + map[pivot]) * 0.5;
    let nearest = if x > map[pivot] {
        if x > middle(upper) { upper } else { pivot }
    } else if x < middle(lower) {
        lower
    } else {
        pivot
    };
    nearest as u8
}

/// Quantizes absmax to bytes of [`dynamic_map`].
///
/// # Shapes
/// absmax `[len]`; codes `[len]`, 0 in a block without differences; nested absmax `[ceil(len/256)]`.
///
/// # Errors
/// [`Error::NotFinite`] with the first infinity or NaN of absmax - offset.
pub fn nest(values: &[f32], offset: f32) -> Result<Blocks, Error> {
    let differences: Vec<f32> = values.iter().map(|a| a - offset).collect();
    let absmax = absmax(&differences, NESTED_BLOCK_SIZE)?;
    let map = dynamic_map();
    let code = |i: usize| match absmax[i / NESTED_BLOCK_SIZE] {
        0.0 => 0,
        _ => encode_nested(&map, scaled(&differences, &absmax, NESTED_BLOCK_SIZE, i)),
    };
    let codes = (0..values.len()).into_par_iter().map(code).collect();
    Ok(Blocks { codes, absmax })
}

/// As [`FourBit::disagreement`], of the codes of [`nest`].
///
/// # Errors
/// As [`nest`]; [`Error::Length`] when there is not one code for each value.
pub fn nested_disagreement(
    values: &[f32],
    offset: f32,
    codes: &[u8],
    ulps: u32,
) -> Result<Option<usize>, Error> {
    length("codes", codes.len(), values.len())?;
    let differences: Vec<f32> = values.iter().map(|a| a - offset).collect();
    let absmax = absmax(&differences, NESTED_BLOCK_SIZE)?;
    let map = dynamic_map();
    Ok((0..values.len()).into_par_iter().find_first(|&i| {
        let x = scaled(&differences, &absmax, NESTED_BLOCK_SIZE, i);
        let excused = around(x, ulps).iter().any(|x| encode_nested(&map, *x) == codes[i]);
        absmax[i / NESTED_BLOCK_SIZE] > 0.0 && !excused
    }))
}

/// The absmax that bytes stand for: product and sum are rounded, each of them.
///
/// # Shapes
/// codes `[len]`, nested_absmax `[ceil(len/256)]`; the result `[len]`.
///
/// # Errors
/// [`Error::Length`] when the shapes disagree.
pub fn unnest(
    map: &[f32; 256],
    codes: &[u8],
    nested_absmax: &[f32],
    offset: f32,
) -> Result<Vec<f32>, Error> {
    length("nested_absmax", nested_absmax.len(), codes.len().div_ceil(NESTED_BLOCK_SIZE))?;
    let value = |(i, code): (usize, &u8)| {
        map[usize::from(*code)] * nested_absmax[i / NESTED_BLOCK_SIZE] + offset
    };
    Ok(codes.iter().enumerate().map(value).collect())
}

fn check(block_size: usize) -> Result<(), Error> {
    let legal = block_size.is_power_of_two() && (32..=4096).contains(&block_size);
    legal.then_some(()).ok_or(Error::BlockSize(block_size))
}

pub(crate) fn length(what: &'static str, have: usize, need: usize) -> Result<(), Error> {
    (have == need).then_some(()).ok_or(Error::Length { what, need, have })
}

/// The largest magnitude of each block.
fn absmax(values: &[f32], block_size: usize) -> Result<Vec<f32>, Error> {
    check(block_size)?;
    finite(values)?;
    Ok(values.par_chunks(block_size).map(largest).collect())
}

pub(crate) fn finite(values: &[f32]) -> Result<(), Error> {
    match values.par_iter().position_first(|v| !v.is_finite()) {
        Some(index) => Err(Error::NotFinite { what: "value", index }),
        None => Ok(()),
    }
}

pub(crate) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, v| most.max(normal(*v).abs()))
}

/// A subnormal is zero.
pub(crate) fn normal(v: f32) -> f32 {
    if v.is_subnormal() { 0.0 } else { v }
}

/// Value i over its block's absmax; 0 in a block of zeros, and past the end.
fn scaled(values: &[f32], absmax: &[f32], block_size: usize, i: usize) -> f32 {
    match values.get(i) {
        Some(v) if absmax[i / block_size] > 0.0 => normal(*v) * (1.0 / absmax[i / block_size]),
        _ => 0.0,
    }
}

/// x, and what it is when it is off by as many ulps at most.
pub(crate) fn around(x: f32, ulps: u32) -> [f32; 3] {
    let off = x * (ulps as f32 * f32::EPSILON);
    [x, x - off, x + off]
}

fn nibble(codes: &[u8], i: usize) -> u8 {
    if i % 2 == 0 { codes[i / 2] >> 4 } else { codes[i / 2] & 15 }
}
