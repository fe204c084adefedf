//! absmax = max |w| of a block; code = nearest codebook entry to w / absmax    w: `[n, k]` in f16, bf16 or f32
//!
//! ```text
//!   for each block                                       // neighbouring units, a word of codes each
//!     absmax[block] = max |w|                            // through shared memory
//!     code[i] = nearest(book, w[i] · (1 / absmax))       // number of thresholds below
//! ```
//!
//! Nested absmax are quantised in the same way: blocks of 256 numbers, relative to the mean of all, with
//! codes from a codebook of 256 values. The host reads back one absmax per block and sums the mean in f64: no
//! order of f32 sums gives the same bits on all devices.
//!
//! Codes equal those of bitsandbytes' CUDA kernels, except next to a threshold, where its approximate
//! reciprocal can differ. A block of zeros has the code of zero, as on bitsandbytes' CPU path. A weight with
//! infinities or NaN is rejected.
//!
//! Cost: one element read; half a byte and a part of an absmax written.
//!
//! On a CPU a unit processes whole blocks, with vectors of eight values.

mod nested;
mod thresholds;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use quant::WeightFormat;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{Order, Weight, WeightBuffers};
use crate::elem::elem;
use crate::fits::{lacks, limits, shape, stores};
use crate::launch::{index_width, launch};
use crate::nf4::code_shift;
use crate::weight::QuantizeError;
use thresholds::{encode, encode_vector};

pub(crate) use nested::dynamic_map;
pub use nested::{nest, nested_values};

/// The kernel that quantises to 4 bits.
pub struct Nf4Quantize;

/// A codebook of 16 values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codebook {
    /// Quantiles of the normal distribution.
    Nf4,
    /// FP4: one sign bit, two bits of exponent and one of mantissa, in bitsandbytes' order.
    Fp4,
}

impl Codebook {
    /// Returns the codebook of a 4-bit format, or None for other formats.
    pub const fn from_format(format: WeightFormat) -> Option<Self> {
        match format {
            WeightFormat::Nf4 => Some(Self::Nf4),
            WeightFormat::Fp4 => Some(Self::Fp4),
            _ => None,
        }
    }

    pub const fn format(self) -> WeightFormat {
        match self {
            Self::Nf4 => WeightFormat::Nf4,
            Self::Fp4 => WeightFormat::Fp4,
        }
    }

    pub fn name(self) -> &'static str {
        self.format().name()
    }

    /// Returns the value of each code.
    pub fn values(self) -> [f32; 16] {
        self.format().info().codebook.expect("4-bit formats have one")
    }
}

/// Values to quantise, `[n, k]`, row-major. Codes and f32 absmax are written in [`Order::Rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizeProblem {
    pub weight: Weight,
    /// Type of the values.
    pub dtype: DType,
    #[serde(rename = "book")]
    pub codebook: Codebook,
}

/// Launch shape of a quantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QuantizeConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share a block.
    pub lanes: u32,
}

/// Device buffers of one quantisation.
#[derive(Debug, Clone)]
pub struct QuantizeOperands {
    pub values: Handle,
    /// Padded to whole words.
    pub codes: Handle,
    pub absmax: Handle,
    /// One word, not 0 after the launch if a value is infinite or NaN.
    pub flag: Handle,
}

impl Kernel for Nf4Quantize {
    type Problem = QuantizeProblem;
    type Config = QuantizeConfig;
    type Operands = QuantizeOperands;

    const NAME: &'static str = "nf4_quantize";
    const VERSION: u32 = 1;

    fn bucket(p: &QuantizeProblem) -> String {
        let len = p.weight.len().next_power_of_two();
        format!("{} {} b{} {len}", p.codebook.name(), p.dtype, p.weight.block_size)
    }

    fn candidates(arch: &ArchProfile, p: &QuantizeProblem) -> Vec<QuantizeConfig> {
        if arch.cores().is_some() {
            return Self::baseline(arch, p).into_iter().collect();
        }
        let words = p.weight.block_size / 8;
        let all = [[256, 32], [256, 8], [128, 8], [512, 32], [256, 64]];
        let mut found: Vec<_> = all
            .into_iter()
            .map(|[units, lanes]| QuantizeConfig { units, lanes: lanes.min(words) })
            .filter(|c| Self::check(arch, p, c).is_ok())
            .collect();
        found.dedup();
        found
    }

    fn check(
        arch: &ArchProfile,
        p: &QuantizeProblem,
        c: &QuantizeConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        if c.lanes == 0 || c.units % c.lanes != 0 || (p.weight.block_size / 8) % c.lanes != 0 {
            let why = "expected a divisor of the units per cube and of the words per block";
            return Err(shape("lanes", c.lanes, why));
        }
        if arch.cores().is_some() && c.lanes != 1 {
            return Err(lacks("cheap barriers (a GPU)"));
        }
        limits(arch, c.units, if c.lanes > 1 { c.units * 4 } else { 0 })
    }

    fn cost(p: &QuantizeProblem) -> Cost {
        let Weight { n, k, block_size, .. } = p.weight;
        let plain = Weight { nested: false, order: Order::Rows, n, k, block_size };
        // One product an element; comparisons do not count.
        Cost { flops: plain.len(), bytes: plain.bytes() + plain.len() * p.dtype.size() as u64 }
    }

    fn baseline(arch: &ArchProfile, p: &QuantizeProblem) -> Result<QuantizeConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => QuantizeConfig { units, lanes: 1 },
            None => QuantizeConfig { units: 64, lanes: 4 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &QuantizeProblem, seed: u64) -> QuantizeOperands {
        QuantizeOperands {
            values: crate::noise(queue, p.weight.len() as usize, p.dtype, seed),
            codes: queue.empty(p.weight.words() as usize * 4),
            absmax: queue.empty(p.weight.blocks() as usize * 4),
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
            output(&operands.codes, DType::U8, p.weight.len().div_ceil(2)),
            output(&operands.absmax, DType::F32, p.weight.blocks()),
        ]
    }

    fn launch(
        queue: &Queue,
        p: &QuantizeProblem,
        c: &QuantizeConfig,
        operands: &QuantizeOperands,
        _scratch: Option<&Handle>,
    ) {
        let (len, width) = (p.weight.len() as usize, width(queue.profile(), p));
        let cubes = p.weight.blocks().div_ceil(u64::from(c.units / c.lanes)).min(65_535) as u32;
        // SAFETY: the lengths follow from the weight, and the kernel checks its indices.
        unsafe {
            launch!(
                queue,
                quantize_blocks,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                address(p),
                width,
                BufferArg::from_raw_parts(operands.values.clone(), len / width),
                BufferArg::from_raw_parts(operands.codes.clone(), p.weight.words() as usize),
                BufferArg::from_raw_parts(operands.absmax.clone(), p.weight.blocks() as usize),
                BufferArg::from_raw_parts(operands.flag.clone(), 1),
                plan(p, c, width),
                elem(p.dtype),
            );
        }
    }
}

/// Quantises `values`, dense `[n, k]` of type `dtype`, to `weight`, in its order and with nested absmax if it
/// has them.
///
/// Temporary memory on the device: absmax in f32, and the codes in [`Order::Rows`]. On the host: absmax in
/// f32, if nested.
///
/// # Errors
/// See [`QuantizeError`]; a weight with infinities or NaN fails.
pub fn quantize(
    device: &Device,
    values: &Handle,
    weight: Weight,
    dtype: DType,
    codebook: Codebook,
) -> Result<WeightBuffers, QuantizeError> {
    let rows = Weight { order: Order::Rows, ..weight };
    let problem = QuantizeProblem { weight: Weight { nested: false, ..rows }, dtype, codebook };
    let config = match Nf4Quantize::candidates(device.profile(), &problem).first() {
        Some(config) => *config,
        None => Nf4Quantize::baseline(device.profile(), &problem)?,
    };
    let blocks = weight.blocks() as usize;
    let (client, queue) = (device.client(), Queue::Device(device));
    let operands = QuantizeOperands {
        values: values.clone(),
        codes: client.empty(weight.words() as usize * 4),
        absmax: client.empty(blocks * 4),
        flag: client.create_from_slice(&[0; 4]),
    };
    Nf4Quantize::launch(&queue, &problem, &config, &operands, None);
    let read = |handle: &Handle| {
        client.read_one(handle.clone()).map_err(|e| QuantizeError::Device(format!("{e:?}")))
    };
    if read(&operands.flag)?[..4] != [0; 4] {
        return Err(QuantizeError::NotFinite);
    }
    let floats = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
    let (absmax, nested) = if weight.nested {
        let bytes = read(&operands.absmax)?;
        let sum: f64 = f32::from_bytes(&bytes)[..blocks].iter().map(|a| f64::from(*a)).sum();
        let (codes, nested) = nest(device, &operands.absmax, rows, (sum / blocks as f64) as f32);
        (codes, Some(nested))
    } else {
        (operands.absmax, None)
    };
    let quantized = WeightBuffers {
        codes: operands.codes,
        absmax,
        codebook: floats(&codebook.values()),
        nested,
    };
    Ok(super::reorder(device, rows, &quantized, weight.order))
}

/// Vector width of the values in elements.
fn width(arch: &ArchProfile, p: &QuantizeProblem) -> usize {
    let widest = (arch.load_bytes as usize / p.dtype.size()).clamp(1, 8);
    if p.weight.len() % 8 == 0 { widest } else { 1 }
}

fn address(p: &QuantizeProblem) -> AddressType {
    index_width(p.weight.len())
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct QuantizePlan {
    config: QuantizeConfig,
    block_size: u32,
    codebook: Codebook,
    /// True if a vector holds the eight values of a word, and a unit processes whole blocks.
    vectors: bool,
}

fn plan(p: &QuantizeProblem, c: &QuantizeConfig, width: usize) -> QuantizePlan {
    let vectors = c.lanes == 1 && width == 8;
    QuantizePlan { config: *c, block_size: p.weight.block_size, codebook: p.codebook, vectors }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn quantize_blocks<F: Float, NI: Size>(
    values: &[Vector<F, NI>],
    codes: &mut [u32],
    absmax: &mut [f32],
    flag: &mut [u32],
    #[comptime] plan: QuantizePlan,
    #[define(F)] _dtype: ElemType,
) {
    let QuantizeConfig { units, lanes } = comptime!(plan.config);
    let (words, per_cube) = comptime!((plan.block_size / 8, units / lanes));
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let mut shared =
        Shared::<[f32]>::new_slice(comptime!(if lanes > 1 { units as usize } else { 1 }));
    let blocks = absmax.len() as u32;
    let mut first = CUBE_POS_X * per_cube;
    while first < blocks {
        let block = first + group;
        let mut block_absmax = 0.0f32.runtime();
        if comptime!(plan.vectors) {
            block_absmax = largest(values, flag, block, words);
        } else {
            for i in 0..comptime!(words / lanes) {
                let word = block * words + lane + i * lanes;
                if word < codes.len() as u32 {
                    let eight = load_eight(values, word);
                    #[unroll]
                    for e in 0..8usize {
                        let size = f32::abs(eight[e]);
                        block_absmax = select(size > block_absmax, size, block_absmax);
                        // The comparison fails for infinity and NaN.
                        let finite = size <= f32::MAX;
                        if !finite {
                            flag[0] = 1u32;
                        }
                    }
                }
            }
        }
        if comptime!(lanes > 1) {
            shared[UNIT_POS as usize] = block_absmax;
            sync_cube();
            for l in 0..lanes {
                let other = shared[(group * lanes + l) as usize];
                block_absmax = select(other > block_absmax, other, block_absmax);
            }
            sync_cube();
        }
        let inverse = select(block_absmax > 0.0, 1.0 / block_absmax, 0.0f32.runtime());
        if lane == 0 && block < blocks {
            absmax[block as usize] = block_absmax;
        }
        for i in 0..comptime!(words / lanes) {
            let word = block * words + lane + i * lanes;
            if word < codes.len() as u32 {
                let mut made = 0u32;
                if comptime!(plan.vectors) {
                    let eight = Vector::<f32, NI>::cast_from(values[word as usize]);
                    let eight = encode_vector(eight * Vector::new(inverse), plan.codebook);
                    #[unroll]
                    for e in 0..8u32 {
                        let code = eight.extract(comptime!(e as usize));
                        made |= code << comptime!(code_shift(e));
                    }
                } else {
                    let eight = load_eight(values, word);
                    #[unroll]
                    for e in 0..8u32 {
                        let code = encode(eight[comptime!(e as usize)] * inverse, plan.codebook);
                        made |= code << comptime!(code_shift(e));
                    }
                }
                codes[word as usize] = made;
            }
        }
        first += CUBE_COUNT_X * per_cube;
    }
}

/// Loads eight values from element `8·word` on; values past the end are 0.
#[cube]
fn load_eight<F: Float, NI: Size>(values: &[Vector<F, NI>], word: u32) -> Array<f32> {
    let width = NI::value();
    let mut eight = Array::<f32>::new(8usize);
    #[unroll]
    for v in 0..comptime!(8 / width) {
        let at = word as usize * comptime!(8 / width) + v;
        let mut vector = Vector::<F, NI>::new(F::from_int(0));
        if comptime!(width > 1) || at < values.len() {
            vector = values[at];
        }
        #[unroll]
        for e in 0..width {
            eight[comptime!(v * width + e)] = f32::cast_from(vector.extract(e));
        }
    }
    eight
}

/// Returns the largest magnitude of a block of `words` vectors.
#[cube]
fn largest<F: Float, NI: Size>(
    values: &[Vector<F, NI>],
    flag: &mut [u32],
    block: u32,
    #[comptime] words: u32,
) -> f32 {
    let mut block_absmax = Vector::<f32, NI>::new(0.0f32);
    let mut odd = Vector::<u32, NI>::new(0u32);
    for i in 0..words {
        let word = (block * words + i) as usize;
        if word < values.len() {
            let size = Vector::<f32, NI>::cast_from(values[word]).abs();
            block_absmax = select_many(size.greater_than(&block_absmax), size, block_absmax);
            // The comparison fails for infinity and NaN.
            let finite = size.less_equal(&Vector::new(f32::MAX));
            odd = select_many(finite, odd, Vector::new(1u32));
        }
    }
    let mut one = 0.0f32.runtime();
    let mut any = 0u32.runtime();
    #[unroll]
    for e in 0..8usize {
        one = max(one, block_absmax.extract(e));
        any |= odd.extract(e);
    }
    if any != 0 {
        flag[0] = 1u32;
    }
    one
}

#[cfg(test)]
mod tests {
    use super::thresholds::{FP4_ABOVE, NF4_ABOVE};
    use super::*;

    #[test]
    fn codebooks_ascend_and_hold_zero_and_one() {
        let nested = nested_values();
        assert!(nested.windows(2).all(|w| w[0] < w[1]));
        assert_eq!((nested[127], nested[255]), (0.0, 1.0));
        let nf4 = Codebook::Nf4.values();
        assert!(nf4.windows(2).all(|w| w[0] < w[1]));
        for (i, above) in NF4_ABOVE.into_iter().enumerate() {
            assert!(nf4[i] < above && above < nf4[i + 1], "{i}");
        }
        let fp4 = Codebook::Fp4.values();
        let mut below = 0.0;
        for (above, code) in FP4_ABOVE {
            assert!(below < above && above < fp4[code as usize], "{code}");
            below = fp4[code as usize];
            assert_eq!(fp4[code as usize + 8], -below);
        }
    }

    #[test]
    fn every_profile_has_a_candidate() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for block_size in [32, 64, 4096] {
                let weight = Weight::new(37, 41, block_size, false).expect("valid");
                let p = QuantizeProblem { weight, dtype: DType::Bf16, codebook: Codebook::Nf4 };
                let found = Nf4Quantize::candidates(&arch, &p);
                assert!(!found.is_empty(), "{name} {block_size}");
                for c in found {
                    Nf4Quantize::check(&arch, &p, &c).expect("candidates are checked");
                }
            }
        }
    }
}
