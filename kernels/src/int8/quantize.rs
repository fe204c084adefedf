//! scb[n] = max |w[n, ..]|;  code = round(w · (127 / scb[n]))    w: `[n, k]` in f16, bf16 or f32
//!
//! ```text
//!   for each row                       // `lanes` units, tree reduction through shared memory
//!     scb = max |w|
//!   for each word of four codes        // second launch: if 4 does not divide k, a word spans two rows
//!     code = round(w · (127 / scb))
//! ```
//!
//! Cost: two reads of the dense weight, one byte written per element. Subnormals count as zero, ties go to
//! even. The codes differ from those of bitsandbytes where its approximate division crosses a tie.

use arch::{ArchProfile, DType, Device};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{Weight, WeightBuffers};
use crate::elem::elem;
use crate::fits::{lacks, limits, shape, stores};
use crate::launch::{index_width, launch};
use crate::round::LEAST;
use crate::weight::QuantizeError;

/// The kernel that quantises to int8.
pub struct Int8Quantize;

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
    /// Units that share a row.
    pub lanes: u32,
}

/// Device buffers of one quantisation.
#[derive(Debug, Clone)]
pub struct QuantizeOperands {
    pub values: Handle,
    pub weight: WeightBuffers,
    /// One word, not 0 after the launch if a value is infinite or NaN.
    pub flag: Handle,
}

impl Kernel for Int8Quantize {
    type Problem = QuantizeProblem;
    type Config = QuantizeConfig;
    type Operands = QuantizeOperands;

    const NAME: &'static str = "int8_quantize";
    const VERSION: u32 = 1;

    fn bucket(p: &QuantizeProblem) -> String {
        let [n, k] = [p.weight.n, p.weight.k].map(u32::next_power_of_two);
        format!("{} w{} n{n} k{k}", p.dtype, width(p))
    }

    fn candidates(arch: &ArchProfile, p: &QuantizeProblem) -> Vec<QuantizeConfig> {
        if arch.cores().is_some() {
            return Self::baseline(arch, p).into_iter().collect();
        }
        let all = [[256, 256], [128, 128], [256, 64], [256, 32], [512, 512]];
        let configs = all.into_iter().map(|[units, lanes]| QuantizeConfig { units, lanes });
        configs.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &QuantizeProblem,
        c: &QuantizeConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        if !c.lanes.is_power_of_two() || c.units % c.lanes != 0 {
            return Err(shape("lanes", c.lanes, "expected a power of two that divides the units"));
        }
        if arch.cores().is_some() && c.lanes != 1 {
            return Err(lacks("cheap barriers (a GPU)"));
        }
        limits(arch, c.units, if c.lanes > 1 { c.units * 4 } else { 0 })
    }

    fn cost(p: &QuantizeProblem) -> Cost {
        // One product an element; comparisons do not count.
        let (len, size) = (p.weight.len(), p.dtype.size() as u64);
        Cost { flops: len, bytes: p.weight.bytes() + len * size }
    }

    fn baseline(arch: &ArchProfile, p: &QuantizeProblem) -> Result<QuantizeConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => QuantizeConfig { units, lanes: 1 },
            None => QuantizeConfig { units: 64, lanes: 8 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &QuantizeProblem, seed: u64) -> QuantizeOperands {
        QuantizeOperands {
            values: crate::noise(queue, p.weight.len() as usize, p.dtype, seed),
            weight: WeightBuffers {
                codes: queue.empty(p.weight.words() as usize * 4),
                scb: queue.empty(p.weight.n as usize * 4),
            },
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
            output(&operands.weight.scb, DType::F32, u64::from(p.weight.n)),
        ]
    }

    fn launch(
        queue: &Queue,
        p: &QuantizeProblem,
        c: &QuantizeConfig,
        operands: &QuantizeOperands,
        _scratch: Option<&Handle>,
    ) {
        let (width, weight) = (width(p), p.weight);
        let (len, n) = (weight.len() as usize, weight.n as usize);
        let cubes = |parts: u64, each: u32| {
            CubeCount::Static(crate::cubes(queue.profile(), parts, each), 1, 1)
        };
        let (rows, words) = (u64::from(weight.n), weight.words());
        let WeightBuffers { codes, scb } = &operands.weight;
        // SAFETY: the lengths follow from the weight, and the kernels check their indices.
        unsafe {
            launch!(
                queue,
                scales_of_rows,
                cubes(rows, c.units / c.lanes),
                CubeDim::new_1d(c.units),
                address(p),
                width,
                BufferArg::from_raw_parts(operands.values.clone(), len / width),
                BufferArg::from_raw_parts(scb.clone(), n),
                BufferArg::from_raw_parts(operands.flag.clone(), 1),
                weight.k,
                *c,
                elem(p.dtype),
            );
            launch!(
                queue,
                encode_words,
                cubes(words, c.units),
                CubeDim::new_1d(c.units),
                address(p),
                width,
                BufferArg::from_raw_parts(operands.values.clone(), len / width),
                BufferArg::from_raw_parts(scb.clone(), n),
                BufferArg::from_raw_parts(codes.clone(), words as usize),
                weight.k,
                elem(p.dtype),
            );
        }
    }
}

/// Quantises `values`, `[n, k]` of `dtype`, with the first candidate config.
///
/// # Errors
/// Infinities or NaN; an unsupported device.
pub fn quantize(
    device: &Device,
    values: &Handle,
    weight: Weight,
    dtype: DType,
) -> Result<WeightBuffers, QuantizeError> {
    let problem = QuantizeProblem { weight, dtype };
    let arch = device.profile();
    let config = match Int8Quantize::candidates(arch, &problem).first() {
        Some(config) => *config,
        None => Int8Quantize::baseline(arch, &problem)?,
    };
    let client = device.client();
    let buffers = WeightBuffers {
        codes: client.empty(weight.words() as usize * 4),
        scb: client.empty(weight.n as usize * 4),
    };
    let flag = client.create_from_slice(&[0; 4]);
    let operands = QuantizeOperands { values: values.clone(), weight: buffers, flag };
    Int8Quantize::launch(&Queue::Device(device), &problem, &config, &operands, None);
    let found = client.read_one(operands.flag);
    let found = found.map_err(|why| QuantizeError::Device(format!("{why:?}")))?;
    match found[..4] == [0; 4] {
        true => Ok(operands.weight),
        false => Err(QuantizeError::NotFinite),
    }
}

/// Vector width of the values in elements; a vector lies in one row.
const fn width(p: &QuantizeProblem) -> usize {
    if p.weight.k % 4 == 0 { 4 } else { 1 }
}

fn address(p: &QuantizeProblem) -> AddressType {
    index_width(p.weight.len())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn scales_of_rows<F: Float, NI: Size>(
    values: &[Vector<F, NI>],
    scb: &mut [f32],
    flag: &mut [u32],
    k: u32,
    #[comptime] config: QuantizeConfig,
    #[define(F)] _dtype: ElemType,
) {
    let QuantizeConfig { units, lanes } = comptime!(config);
    let width = NI::value();
    let (per_cube, group, lane) = (comptime!(units / lanes), UNIT_POS / lanes, UNIT_POS % lanes);
    let mut shared =
        Shared::<[f32]>::new_slice(comptime!(if lanes > 1 { units as usize } else { 1 }));
    let n = scb.len() as u32;
    let vectors = k / comptime!(width as u32);
    let mut first = CUBE_POS_X * per_cube;
    while first < n {
        let row = first + group;
        let mut absmax = 0.0f32.runtime();
        if row < n {
            let mut at = u32::cast_from(lane);
            while at < vectors {
                let vector = values[row as usize * vectors as usize + at as usize];
                #[unroll]
                for e in 0..width {
                    let size = magnitude(f32::cast_from(vector.extract(e)));
                    absmax = select(size > absmax, size, absmax);
                    // The comparison fails for infinity and NaN.
                    let finite = size <= f32::MAX;
                    if !finite {
                        flag[0] = 1u32;
                    }
                }
                at += lanes;
            }
        }
        if comptime!(lanes > 1) {
            shared[UNIT_POS as usize] = absmax;
            #[unroll]
            for level in 0..comptime!(lanes.ilog2()) {
                sync_cube();
                let apart = comptime!(lanes >> (level + 1));
                if lane < apart {
                    let (mine, other) = (UNIT_POS as usize, (UNIT_POS + apart) as usize);
                    shared[mine] =
                        select(shared[other] > shared[mine], shared[other], shared[mine]);
                }
            }
            if lane == 0 && row < n {
                scb[row as usize] = shared[UNIT_POS as usize];
            }
            sync_cube();
        } else if row < n {
            scb[row as usize] = absmax;
        }
        first += CUBE_COUNT_X * per_cube;
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_words<F: Float, NI: Size>(
    values: &[Vector<F, NI>],
    scb: &[f32],
    codes: &mut [u32],
    k: u32,
    #[define(F)] _dtype: ElemType,
) {
    let width = NI::value();
    let words = codes.len() as u32;
    let mut word = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    while word < words {
        let mut made = 0u32;
        if comptime!(width > 1) {
            let vector = values[word as usize];
            let inverse = inverse_of(scb[(word / (k / 4)) as usize]);
            #[unroll]
            for e in 0..4usize {
                let value = f32::cast_from(vector.extract(e));
                made |= encode(value, inverse, k) << comptime!(8 * e as u32);
            }
        } else {
            #[unroll]
            for e in 0..4usize {
                let at = word as usize * 4 + e;
                if at < values.len() {
                    let value = f32::cast_from(values[at].extract(0usize));
                    let inverse = inverse_of(scb[at / k as usize]);
                    made |= encode(value, inverse, k) << comptime!(8 * e as u32);
                }
            }
        }
        codes[word as usize] = made;
        word += CUBE_COUNT_X * CUBE_DIM;
    }
}

#[cube]
fn magnitude(value: f32) -> f32 {
    let size = f32::abs(value);
    select(size < f32::MIN_POSITIVE, 0.0f32.runtime(), size)
}

#[cube]
fn inverse_of(scb: f32) -> f32 {
    // A smaller absmax would have an infinite inverse.
    select(scb > LEAST, 127.0 / scb, 0.0f32.runtime())
}

/// Returns the byte of a code: the low mantissa byte of 1.5 · 2^23 + x, which rounds to even. Product and sum
/// must round separately. XOR with the top bit of k, which is always 0, keeps the compiler from fusing them.
#[cube]
fn encode(value: f32, inverse: f32, k: u32) -> u32 {
    let value = select(f32::abs(value) < f32::MIN_POSITIVE, 0.0f32.runtime(), value);
    let x = f32::reinterpret(u32::reinterpret(value * inverse) ^ (k >> 31));
    u32::reinterpret(x + 12_582_912.0f32) & 255u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_a_candidate() {
        let weight = Weight::new(4096, 4096).expect("valid");
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let p = QuantizeProblem { weight, dtype };
                assert!(!Int8Quantize::candidates(&arch, &p).is_empty(), "{name} {dtype}");
                let baseline = Int8Quantize::baseline(&arch, &p).expect("there is one");
                Int8Quantize::check(&arch, &p, &baseline).expect("it is feasible");
            }
        }
    }
}
