//! Q8_0 weights: blocks of 32 neighbours in a row, `w = code · d`, with codes from -127 to 127 and one f16
//! scale d a block.
//!
//! ```text
//!   quantise      d = max |w| of the block / 127;  code = round(w · (1 / d))       // d in f32; ties away from 0
//!   store         d rounded to f16, ties to even                                   // w ≈ code · f16(d)
//!   dequantise    w = code · d                                                     // exact in f32, rounded once
//!   multiply      y = epilogue(x · wᵀ)                                             // x: [m, k], y: [m, n]
//! ```
//!
//! The values are those of GGUF's `block_q8_0`, 8.5 bits an element. On a device codes and scales are in
//! separate buffers, so that codes are read as vectors. A word holds four codes `[n, k / 4]`, or two scales,
//! the first in the low half. Integer arithmetic converts the scales, because WGSL does not always have f16.
//!
//! | kernel             | purpose              | bound by                      |
//! |--------------------|----------------------|-------------------------------|
//! | [`Q8_0Matmul`]     | matmuls              | bytes of codes; for many rows arithmetic |
//! | [`Q8_0Quantize`]   | codes and scales     | bytes of the dense weight     |
//! | [`Q8_0Dequantize`] | a dense weight       | bytes of the dense weight     |
//!
//! In quantisation a unit takes two blocks, whose scales share a word. Cost: two reads of the dense weight,
//! the second from cache. Devices without exact division may round a scale, or a code next to a tie, to its
//! neighbour.
//!
//! Source: ggml, `quantize_row_q8_0_ref` and `dequantize_row_q8_0` (`ggml-quants.c`).

mod matmul;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use quant::WeightFormat;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub(crate) use matmul::MAX_FUSED_ROWS;
pub use matmul::{
    DenseConfig, Q8_0Matmul, Q8_0MatmulConfig, Q8_0MatmulOperands, Q8_0MatmulProblem,
};

use crate::cooperative::U32x4;
pub use crate::dequant::DequantizeConfig;
use crate::dequant::dequantize::{DequantizePlan, decode, widths};
use crate::dequant::{Dequantize, DequantizeBytes, code_of, lifted};
use crate::elem::elem;
use crate::fits::{limits, stores};
use crate::launch::{index_width, launch};
use crate::round::pack_bf16;
use crate::weight::{InvalidWeight, QuantizeError};

/// Elements of a block.
pub const BLOCK: u32 = 32;

/// A weight `[n, k]` in Q8_0. Build it with [`Weight::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    pub n: u32,
    pub k: u32,
}

/// Device buffers of a weight.
#[derive(Debug, Clone)]
pub struct WeightBuffers {
    /// Bytes `[n, k]`.
    pub codes: Handle,
    /// f16 `[n, k / 32]`, padded to whole words.
    pub scales: Handle,
}

impl Weight {
    /// # Errors
    /// [`InvalidWeight::Empty`], [`InvalidWeight::Rows`], [`InvalidWeight::TooLarge`].
    pub fn new(n: u32, k: u32) -> Result<Self, InvalidWeight> {
        let weight = Self { n, k };
        for (axis, size) in [("n", n), ("k", k)] {
            if size == 0 {
                return Err(InvalidWeight::Empty { axis });
            }
        }
        if k % BLOCK != 0 {
            return Err(InvalidWeight::Rows { format: WeightFormat::Q8_0, k, block: BLOCK });
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
    /// [`InvalidWeight::Join`] if k differs, or if a word would hold scales of two weights.
    pub fn joined(parts: &[Self]) -> Result<Self, InvalidWeight> {
        let refused = |why| Err(InvalidWeight::Join { why });
        let k = parts.first().map_or(0, |part| part.k);
        if parts.iter().any(|part| part.k != k) {
            return refused("their k differ");
        }
        if parts.iter().any(|part| part.blocks() % 2 != 0) {
            return refused("a 4-byte word would hold scales of two weights");
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

    /// Number of blocks, each with one scale.
    pub const fn blocks(&self) -> u64 {
        self.len() / BLOCK as u64
    }

    /// Number of 4-byte words of codes.
    pub const fn words(&self) -> u64 {
        self.len() / 4
    }

    /// Number of 4-byte words of scales.
    pub const fn scale_words(&self) -> u64 {
        self.blocks().div_ceil(2)
    }

    /// Total bytes of both buffers.
    pub const fn bytes(&self) -> u64 {
        4 * (self.words() + self.scale_words())
    }

    const fn address(&self) -> AddressType {
        index_width(self.len())
    }
}

impl WeightBuffers {
    /// Takes buffers in the order of [`quantized`](crate::quantized).
    pub(crate) fn from_handles(handles: &[Handle]) -> Self {
        let [codes, scales] = handles else { unreachable!("a weight has codes and scales") };
        Self { codes: codes.clone(), scales: scales.clone() }
    }

    /// Allocates buffers without filling them.
    pub fn empty(queue: &Queue, weight: &Weight) -> Self {
        let empty = |words: u64| queue.empty(words as usize * 4);
        Self { codes: empty(weight.words()), scales: empty(weight.scale_words()) }
    }

    /// Random codes for benchmarks. Scales are 1 to 2 divided by 127·√k, so that results are of magnitude 1.
    fn noise(queue: &Queue, weight: &Weight, seed: u64) -> Self {
        let scale = 1.0 / (127.0 * (weight.k as f32).sqrt());
        let sizes = (0..2 * weight.scale_words()).map(|i| (1 + (i + seed) % 5) as f32 / 5.0);
        let bytes = sizes.flat_map(|size| half::f16::from_f32(scale * (1.0 + size)).to_le_bytes());
        Self {
            codes: crate::noise(queue, weight.len() as usize, DType::U8, seed),
            scales: queue.made(weight.scale_words() as usize * 4, bytes),
        }
    }
}

/// Buffers of a weight as a kernel sees them, with codes in vectors of `NW` words.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QuantizedValues<NW: Size> {
    codes: Box<[Vector<u32, NW>]>,
    /// Words of two scales each.
    scales: Box<[u32]>,
}

impl<NW: Size> QuantizedValuesLaunch<NW> {
    fn from_buffers(weight: &Weight, buffers: &WeightBuffers, words: usize) -> Self {
        let WeightBuffers { codes, scales } = buffers;
        // SAFETY: the lengths follow from the weight.
        unsafe {
            Self::new(
                BufferArg::from_raw_parts(codes.clone(), weight.words() as usize / words),
                BufferArg::from_raw_parts(scales.clone(), weight.scale_words() as usize),
            )
        }
    }
}

#[cube]
impl<NW: Size> QuantizedValues<NW> {
    /// Returns the scale of a block.
    fn scale(&self, block: usize) -> f32 {
        let word = self.scales[block / 2];
        half_of((word >> ((block % 2) as u32 * 16)) & 0xffffu32)
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

    fn block(this: &Self, at: usize) -> f32 {
        let words = NW::value();
        this.scale(at / comptime!(BLOCK as usize / (4 * words)))
    }

    fn row(_this: &Self, _row: usize) -> f32 {
        1.0f32
    }

    fn scale_by_block(code: f32, block: f32) -> f32 {
        code * block
    }

    fn scale_by_row(sum: f32, _row: f32, _k: u32) -> f32 {
        sum
    }
}

#[cube]
impl<NW: Size> Dequantize for QuantizedValues<NW> {
    fn fill(_this: &Self, _codebook: &mut [f32], _unit: u32) {}

    fn read(
        this: &Self,
        words: &mut Array<u32>,
        shared: &mut Array<f32>,
        row: u32,
        vector: u32,
        k: u32,
        #[comptime] i: usize,
    ) {
        let at = row as usize * (k / 16) as usize + vector as usize;
        let four = lifted(this.codes[at]);
        #[unroll]
        for w in 0..4usize {
            words[comptime!(4 * i + w)] = four.extract(w);
        }
        shared[i] = this.scale(at / 2);
    }

    fn decode<F: Float>(
        into: &mut [U32x4],
        to: u32,
        words: &Array<u32>,
        shared: &Array<f32>,
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
                let (low, high) = (low * shared[i], high * shared[i]);
                if comptime!(bf16) {
                    word.insert(part, pack_bf16(low, high));
                } else {
                    let mut pair = Vector::<F, Const<2>>::new(F::cast_from(low));
                    pair.insert(1usize, F::cast_from(high));
                    word.insert(part, u32::reinterpret(pair));
                }
            }
            into[(to + comptime!(half as u32)) as usize] = word;
        }
    }

    fn dequantize(_this: &Self, sum: f32, _row: u32, _k: u32) -> f32 {
        sum
    }
}

/// Converts the bits of a finite f16 that is not negative to f32.
#[cube]
fn half_of(bits: u32) -> f32 {
    let normal = f32::reinterpret((bits << 13) + 0x3800_0000u32);
    // A subnormal is a multiple of 2^-24; devices may flush subnormals to 0.
    select(bits < 0x400u32, f32::cast_from(bits) * comptime!(1.0f32 / 16_777_216.0), normal)
}

/// Rounds to f16, ties to even, and returns the bits; `x` is not negative. Results from 0x7c00 on mean
/// overflow.
#[cube]
fn half_bits(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let normal = ((bits + 0xfffu32 + ((bits >> 13) & 1)) >> 13) - 0x1_c000u32;
    // A subnormal as a multiple of 2^-24: the mantissa of 2^23 + x · 2^24.
    let small = u32::reinterpret(x * 16_777_216.0f32 + 8_388_608.0f32) - 0x4b00_0000u32;
    select(x < comptime!(1.0f32 / 16_384.0), small, normal)
}

/// The kernel that quantises to Q8_0.
pub struct Q8_0Quantize;

/// Values to quantise, `[n, k]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizeProblem {
    pub weight: Weight,
    /// Type of the values.
    pub dtype: DType,
}

/// Launch shape of a quantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuantizeConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Device buffers of one quantisation.
#[derive(Debug, Clone)]
pub struct QuantizeOperands {
    pub values: Handle,
    pub weight: WeightBuffers,
    /// One word, not 0 after the launch if a value is infinite or NaN, or if a scale is too large for f16.
    pub flag: Handle,
}

impl Kernel for Q8_0Quantize {
    type Problem = QuantizeProblem;
    type Config = QuantizeConfig;
    type Operands = QuantizeOperands;

    const NAME: &'static str = "q8_0_quantize";
    const VERSION: u32 = 1;

    fn bucket(p: &QuantizeProblem) -> String {
        format!("{} {}", p.dtype, p.weight.len().next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &QuantizeProblem) -> Vec<QuantizeConfig> {
        let all = arch.cores().map_or_else(|| vec![64, 128, 256], |cores| vec![cores]);
        let configs = all.into_iter().map(|units| QuantizeConfig { units });
        configs.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &QuantizeProblem,
        c: &QuantizeConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        limits(arch, c.units, 0)
    }

    fn cost(p: &QuantizeProblem) -> Cost {
        // One product an element; comparisons do not count.
        let len = p.weight.len();
        Cost { flops: len, bytes: p.weight.bytes() + len * p.dtype.size() as u64 }
    }

    fn baseline(arch: &ArchProfile, p: &QuantizeProblem) -> Result<QuantizeConfig, Infeasible> {
        let config = QuantizeConfig { units: arch.cores().unwrap_or(64) };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &QuantizeProblem, seed: u64) -> QuantizeOperands {
        QuantizeOperands {
            values: crate::noise(queue, p.weight.len() as usize, p.dtype, seed),
            weight: WeightBuffers::empty(queue, &p.weight),
            flag: queue.upload(&[0; 4]),
        }
    }

    fn outputs(p: &QuantizeProblem, operands: &QuantizeOperands) -> Vec<Output> {
        let output = |handle: &Handle, dtype, len| Output {
            handle: handle.clone(),
            dtype,
            len: len as usize,
            tolerance: 0.0,
        };
        vec![
            output(&operands.weight.codes, DType::U8, p.weight.len()),
            output(&operands.weight.scales, DType::F16, p.weight.blocks()),
        ]
    }

    fn launch(
        queue: &Queue,
        p: &QuantizeProblem,
        c: &QuantizeConfig,
        operands: &QuantizeOperands,
        _scratch: Option<&Handle>,
    ) {
        let (weight, WeightBuffers { codes, scales }) = (p.weight, &operands.weight);
        let words = weight.words() as usize;
        let cubes = crate::cubes(queue.profile(), weight.scale_words(), c.units);
        // SAFETY: the lengths follow from the weight, and the kernel checks its indices.
        unsafe {
            launch!(
                queue,
                quantize_blocks,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                weight.address(),
                4,
                BufferArg::from_raw_parts(operands.values.clone(), words),
                BufferArg::from_raw_parts(codes.clone(), words),
                BufferArg::from_raw_parts(scales.clone(), weight.scale_words() as usize),
                BufferArg::from_raw_parts(operands.flag.clone(), 1),
                weight.k,
                elem(p.dtype),
            );
        }
    }
}

/// Quantises `values`, `[n, k]` of `dtype`, with the first candidate config.
///
/// # Errors
/// Infinities or NaN, or a block whose scale overflows f16; an unsupported device.
pub fn quantize(
    device: &Device,
    values: &Handle,
    weight: Weight,
    dtype: DType,
) -> Result<WeightBuffers, QuantizeError> {
    let problem = QuantizeProblem { weight, dtype };
    let config = Q8_0Quantize::baseline(device.profile(), &problem)?;
    let queue = &Queue::Device(device);
    let flag = queue.upload(&[0; 4]);
    let weight = WeightBuffers::empty(queue, &weight);
    let operands = QuantizeOperands { values: values.clone(), weight, flag };
    Q8_0Quantize::launch(queue, &problem, &config, &operands, None);
    let found = device.client().read_one(operands.flag);
    let found = found.map_err(|why| QuantizeError::Device(format!("{why:?}")))?;
    match found[..4] == [0; 4] {
        true => Ok(operands.weight),
        false => Err(QuantizeError::NotFinite),
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn quantize_blocks<F: Float, NI: Size>(
    values: &[Vector<F, NI>],
    codes: &mut [u32],
    scales: &mut [u32],
    flag: &mut [u32],
    k: u32,
    #[define(F)] _dtype: ElemType,
) {
    let words = comptime!(BLOCK as usize / 4);
    let blocks = codes.len() / words;
    let mut pair = (CUBE_POS_X * CUBE_DIM + UNIT_POS) as usize;
    while pair < scales.len() {
        let mut halves = 0u32;
        #[unroll]
        for side in 0..2usize {
            let block = 2 * pair + side;
            if block < blocks {
                let mut absmax = 0.0f32.runtime();
                for w in 0..words {
                    let vector = values[block * words + w];
                    #[unroll]
                    for e in 0..4usize {
                        let size = f32::abs(f32::cast_from(vector.extract(e)));
                        absmax = select(size > absmax, size, absmax);
                        // The comparison fails for infinity and NaN.
                        let finite = size <= f32::MAX;
                        if !finite {
                            flag[0] = 1u32;
                        }
                    }
                }
                let d = absmax / 127.0f32;
                // A smaller scale would have an infinite inverse.
                let inverse = select(d >= f32::MIN_POSITIVE, 1.0f32 / d, 0.0f32.runtime());
                for w in 0..words {
                    let vector = values[block * words + w];
                    let mut made = 0u32;
                    #[unroll]
                    for e in 0..4usize {
                        let value = f32::cast_from(vector.extract(e));
                        made |= encode(value, inverse, k) << comptime!(8 * e as u32);
                    }
                    codes[block * words + w] = made;
                }
                let half = half_bits(d);
                if half >= 0x7c00u32 {
                    flag[0] = 1u32;
                }
                halves |= half << comptime!(16 * side as u32);
            }
        }
        scales[pair] = halves;
        pair += (CUBE_COUNT_X * CUBE_DIM) as usize;
    }
}

/// Returns the byte of a code, ties away from 0. Product and difference must round separately. XOR with the
/// top bit of k, which is always 0, keeps the compiler from fusing them.
#[cube]
fn encode(value: f32, inverse: f32, k: u32) -> u32 {
    let x = f32::reinterpret(u32::reinterpret(value * inverse) ^ (k >> 31));
    let size = f32::abs(x);
    let whole = f32::floor(size);
    let code = u32::cast_from(whole + select(size - whole >= 0.5f32, 1.0f32, 0.0f32));
    select(x < 0.0f32, 256u32 - code, code) & 255u32
}

/// The kernel that dequantises Q8_0 weights.
pub struct Q8_0Dequantize;

/// A weight to dequantise into a dense matrix `[n, k]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DequantizeProblem {
    pub weight: Weight,
    /// Type of the result.
    pub out: DType,
}

/// Device buffers of one dequantisation.
#[derive(Debug, Clone)]
pub struct DequantizeOperands {
    pub weight: WeightBuffers,
    pub out: Handle,
}

impl Kernel for Q8_0Dequantize {
    type Problem = DequantizeProblem;
    type Config = DequantizeConfig;
    type Operands = DequantizeOperands;

    const NAME: &'static str = "q8_0_dequantize";
    const VERSION: u32 = 1;

    fn bucket(p: &DequantizeProblem) -> String {
        format!("{} {}", p.out, p.weight.len().next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &DequantizeProblem) -> Vec<DequantizeConfig> {
        let all = DequantizeConfig::candidates(arch).into_iter();
        all.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &DequantizeProblem,
        c: &DequantizeConfig,
    ) -> Result<(), Infeasible> {
        c.check(arch, p.out)
    }

    fn cost(p: &DequantizeProblem) -> Cost {
        let bytes = p.weight.bytes() + p.weight.len() * p.out.size() as u64;
        Cost { flops: p.weight.len(), bytes }
    }

    fn baseline(arch: &ArchProfile, p: &DequantizeProblem) -> Result<DequantizeConfig, Infeasible> {
        let config = DequantizeConfig::baseline(arch);
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &DequantizeProblem, seed: u64) -> DequantizeOperands {
        DequantizeOperands {
            weight: WeightBuffers::noise(queue, &p.weight, 3 * seed),
            out: queue.empty(out_bytes(p)),
        }
    }

    fn outputs(p: &DequantizeProblem, operands: &DequantizeOperands) -> Vec<Output> {
        let len = p.weight.len() as usize;
        vec![Output { handle: operands.out.clone(), dtype: p.out, len, tolerance: 0.0 }]
    }

    fn launch(
        queue: &Queue,
        p: &DequantizeProblem,
        c: &DequantizeConfig,
        operands: &DequantizeOperands,
        _scratch: Option<&Handle>,
    ) {
        let ([words, width], len) = (widths(p.weight.k, p.out), p.weight.len() as usize);
        // SAFETY: the lengths follow from the weight, and the kernel checks its indices.
        unsafe {
            launch!(
                queue,
                dequantize,
                c.cubes(queue.profile(), p.weight.words() as usize / words),
                CubeDim::new_1d(c.units),
                p.weight.address(),
                words,
                width,
                QuantizedValuesLaunch::from_buffers(&p.weight, &operands.weight, words),
                BufferArg::from_raw_parts(operands.out.clone(), len / width),
                p.weight.k,
                c.plan(queue.profile(), p.out),
                elem(p.out),
            );
        }
    }
}

/// Bytes of the dense weight.
fn out_bytes(p: &DequantizeProblem) -> usize {
    p.weight.len() as usize * p.out.size()
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn dequantize<E: Float, NW: Size, NO: Size>(
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<E, NO>],
    k: u32,
    #[comptime] plan: DequantizePlan,
    #[define(E)] _dtype: ElemType,
) {
    decode::<QuantizedValues<NW>, E, NW, NO>(weight, out, k, plan);
}
