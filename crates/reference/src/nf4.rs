//! Weights in 4 bits, NF4 and FP4, and nested absmax.
//!
//! ```text
//! values: [len], a weight flattened row by row; blocks run over the flat index and may span rows
//! codes: [ceil(len/2)] bytes, element 2j in the high half   absmax: [ceil(len/block_size)]
//!   for each block b of block_size values, the last may be short:
//!     absmax[b] = max|values[i]|
//!     for each i in b: code[i] = nearest(codebook, values[i]·(1/absmax[b]))
//!   values[i] ≈ codebook[code[i]]·absmax[b]
//! nested: the absmax themselves, in blocks of 256, as bytes of a dynamic map
//!   d = absmax - offset;  nested_absmax[c] = max|d|;  code[b] = nearest(map, d[b]·(1/nested_absmax[c]))
//!   absmax[b] ≈ map[code[b]]·nested_absmax[b/256] + offset
//! ```
//!
//! Arithmetic is f32 and rounded as IEEE 754 says, one operation at a time. bitsandbytes 0.50 computes the
//! same, with these exceptions:
//!
//! - Its CUDA kernels are built with `--use_fast_math`: `1/absmax` is the approximate reciprocal, so that a
//!   scaled value within two ulps of a threshold may get the neighbouring code. [`FourBit::disagreement`] and
//!   [`nested_disagreement`] can excuse such differences.
//! - Subnormals count as zero here, as in those kernels; torch on the CPU keeps them.
//! - A block of zeros gets the code of zero here and from torch on the CPU. CUDA multiplies by infinity: its
//!   codes are then all 0, in NF4 the code of -1, and decode to -0. Torch's absmax of a short last block of
//!   zeros is 1e-38.
//! - Torch on the CPU divides in a short last block and multiplies elsewhere. Its thresholds of FP4 are the
//!   exact midpoints, up to 14 ulps from CUDA's, which are used here. It gives FP4's two zeros the other
//!   sign. Its codebook has 0 at 8, as here, but its kernels decode 8 to -0.
//! - On the CPU it finds nested codes in a table of 65536 entries, which gives the neighbour's code near a
//!   midpoint. Here they are found as on CUDA.
//! - `offset` is torch's f32 mean. Its last bits depend on the order of summation, and thus on the device and
//!   the version. The caller passes it, or uses [`mean`].
//!
//! Sources: Dettmers et al., "QLoRA" (2023); Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization" (2021); bitsandbytes 95f9af3, `csrc/kernels.cu`, `functional.py`, `backends/default/ops.py`.

use rayon::prelude::*;

use crate::Error;

/// A codebook of 16 numbers in -1..=1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FourBit {
    /// Quantiles of the normal distribution, ascending; 7 is zero.
    Nf4,
    /// A sign, and eight magnitudes in the order of their bits; 0 and 8 are zero.
    Fp4,
}

/// Quantised values.
#[derive(Debug, Clone, PartialEq)]
pub struct Blocks {
    /// Two codes a byte from [`FourBit::quantize`], one from [`nest`].
    pub codes: Vec<u8>,
    /// One value a block.
    pub absmax: Vec<f32>,
}

/// Number of values that share a nested absmax.
pub const NESTED_BLOCK_SIZE: usize = 256;

/// Values of NF4, as in `get_4bit_type`.
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

/// Midpoints of [`NF4`]: above the threshold of index c lies code c + 1.
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

/// Magnitudes of FP4 in twelfths, by the three low bits.
const FP4_TWELFTHS: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];

/// Thresholds from the largest magnitude down, each with the code above it.
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
    /// Both formats.
    pub const ALL: [Self; 2] = [Self::Nf4, Self::Fp4];

    /// Returns the value of each code. Checkpoints contain their own codebook; decode them with that.
    pub fn codebook(self) -> [f32; 16] {
        match self {
            Self::Nf4 => NF4,
            Self::Fp4 => std::array::from_fn(|code| {
                let magnitude = FP4_TWELFTHS[code & 7] / 12.0;
                if code > 8 { -magnitude } else { magnitude }
            }),
        }
    }

    /// Returns the code of a scaled value in -1..=1. At a threshold it is the lower code, in FP4 that of the
    /// lower magnitude.
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

    /// Quantises values, already widened to f32.
    ///
    /// # Shapes
    /// values `[len]`; codes `[ceil(len/2)]`, padded with the code of zero if `len` is odd; absmax
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

    /// Returns the first element whose code differs by more than an error of `ulps` in the reciprocal
    /// explains. 0 requires the codes of [`FourBit::quantize`], 2 allows CUDA's approximate reciprocal.
    /// Blocks of zeros may have any code.
    ///
    /// # Errors
    /// As [`FourBit::quantize`]; [`Error::Length`] if there is not one code for each value.
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

/// Dequantises codes to f32; [`crate::DType::round`] rounds to a 16-bit format.
///
/// # Shapes
/// codes `[ceil(len/2)]`, absmax `[ceil(len/block_size)]`; the result `[len]`.
///
/// # Errors
/// [`Error::BlockSize`]; [`Error::Length`] if the shapes disagree.
pub fn dequantize(
    codebook: &[f32; 16],
    codes: &[u8],
    absmax: &[f32],
    block_size: usize,
    len: usize,
) -> Result<Vec<f32>, Error> {
    check(block_size)?;
    length("codes", codes.len(), len.div_ceil(2))?;
    length("absmax", absmax.len(), len.div_ceil(block_size))?;
    let value = |i| codebook[usize::from(nibble(codes, i))] * absmax[i / block_size];
    Ok((0..len).into_par_iter().map(value).collect())
}

/// Returns the mean in f32 of a sequential sum in f64, within an ulp or two of torch's. The mean of nothing
/// is 0.
pub fn mean(absmax: &[f32]) -> f32 {
    let sum: f64 = absmax.iter().map(|a| f64::from(*a)).sum();
    if absmax.is_empty() { 0.0 } else { (sum / absmax.len() as f64) as f32 }
}

/// Returns the signed dynamic map of 8 bits, ascending. Each decade from 1e-6 to 1 is divided linearly, with
/// twice as many steps as the one below it. Code 127 is 0, 255 is 1, and no code is -1.
///
/// The values are those that torch computes with FMA, as on x86 with AVX2; without FMA, 42 of the 256 differ
/// by an ulp. Checkpoints contain their own map; decode them with that.
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

/// Returns the code of a scaled value in -1..=1, by bisection of an ascending map of 256. Half-way between
/// two values it takes the one tested last, which has the even index.
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

/// Quantises absmax to bytes of [`dynamic_map`].
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

/// Like [`FourBit::disagreement`], for the codes of [`nest`].
///
/// # Errors
/// As [`nest`]; [`Error::Length`] if there is not one code for each value.
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

/// Dequantises absmax from bytes; the product and the sum are each rounded.
///
/// # Shapes
/// codes `[len]`, nested_absmax `[ceil(len/256)]`; the result `[len]`.
///
/// # Errors
/// [`Error::Length`] if the shapes disagree.
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

/// Returns the largest magnitude of each block.
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
    values.iter().fold(0.0, |max, v| max.max(normal(*v).abs()))
}

/// Flushes a subnormal to zero.
pub(crate) fn normal(v: f32) -> f32 {
    if v.is_subnormal() { 0.0 } else { v }
}

/// Returns value i divided by its block's absmax; 0 in a block of zeros and past the end.
fn scaled(values: &[f32], absmax: &[f32], block_size: usize, i: usize) -> f32 {
    match values.get(i) {
        Some(v) if absmax[i / block_size] > 0.0 => normal(*v) * (1.0 / absmax[i / block_size]),
        _ => 0.0,
    }
}

/// Returns x, and x off by `ulps` ulps in each direction.
pub(crate) fn around(x: f32, ulps: u32) -> [f32; 3] {
    let off = x * (ulps as f32 * f32::EPSILON);
    [x, x - off, x + off]
}

fn nibble(codes: &[u8], i: usize) -> u8 {
    if i % 2 == 0 { codes[i / 2] >> 4 } else { codes[i / 2] & 15 }
}
