//! out = round(code · scb / 127)    out: `[n, k]` in f16, bf16 or f32
//!
//! ```text
//!   for each vector of words                            // one unit, several vectors on their way
//!     s = scb of its row
//!     out[4 · word ..] = round(code · s · (1 / 127))    // one vector store
//! ```
//!
//! Cost: a byte read and an element written: 3 bytes an element of bf16. Where k is no multiple of 4 a word straddles
//! rows, and elements are decoded one by one.

use std::sync::Arc;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output};

use super::{Weight, WeightBuffers, code_of, lifted, scaled};
use crate::elem::elem;
use crate::fits::{limits, shape, stores};
use crate::round::{by_hand, round_to_bf16};

/// The family of dequantisation kernels.
pub struct Int8Dequantize;

/// A weight to make dense, `[n, k]` row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DequantizeProblem {
    pub weight: Weight,
    /// Type of the result.
    pub out: DType,
}

/// How dequantisation is spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DequantizeConfig {
    /// Units of a cube.
    pub units: u32,
    /// Vectors that a unit decodes before it looks for more.
    pub vectors: u32,
}

/// Device buffers of one dequantisation.
#[derive(Debug, Clone)]
pub struct DequantizeOperands {
    pub weight: WeightBuffers,
    pub out: Handle,
}

impl Kernel for Int8Dequantize {
    type Problem = DequantizeProblem;
    type Config = DequantizeConfig;
    type Operands = DequantizeOperands;

    const NAME: &'static str = "int8_dequantize";
    const VERSION: u32 = 1;

    fn bucket(p: &DequantizeProblem) -> String {
        format!("{} w{} {}", p.out, widths(p)[1], p.weight.len().next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &DequantizeProblem) -> Vec<DequantizeConfig> {
        let gpu = [[256, 2], [256, 4], [128, 4], [512, 2], [256, 1], [256, 8]];
        let cores = arch.cores().map(|cores| [[cores, 1]]);
        let all = cores.as_ref().map_or(&gpu[..], |cores| &cores[..]);
        let configs = all
            .iter()
            .map(|[units, vectors]| DequantizeConfig { units: *units, vectors: *vectors });
        configs.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &DequantizeProblem,
        c: &DequantizeConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.out])?;
        if !(1..=16).contains(&c.vectors) {
            return Err(shape("vectors", c.vectors, "a unit decodes 1 to 16 vectors at a time"));
        }
        limits(arch, c.units, 0)
    }

    fn cost(p: &DequantizeProblem) -> Cost {
        let bytes = p.weight.bytes() + p.weight.len() * p.out.size() as u64;
        Cost { flops: 2 * p.weight.len(), bytes }
    }

    fn simplest(arch: &ArchProfile, p: &DequantizeProblem) -> Result<DequantizeConfig, Infeasible> {
        let units = arch.cores().unwrap_or(64);
        let config = DequantizeConfig { units, vectors: 1 };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(device: &Device, p: &DequantizeProblem, seed: u64) -> DequantizeOperands {
        DequantizeOperands {
            weight: super::noise(device, p.weight, 3 * seed),
            out: device.client().empty(out_bytes(p)),
        }
    }

    fn outputs(p: &DequantizeProblem, operands: &DequantizeOperands) -> Vec<Output> {
        let len = p.weight.len() as usize;
        vec![Output { handle: operands.out.clone(), dtype: p.out, len, tolerance: 0.0 }]
    }

    fn programs(
        arch: &ArchProfile,
        p: &DequantizeProblem,
        c: &DequantizeConfig,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Box<dyn CubeKernel>> {
        let dim = CubeDim::new_1d(c.units).into();
        let settings = KernelSettings::new(dim, ExecutionMode::Unchecked, address(p));
        let buffer = || BufferCompilationArg { inplace: None };
        let [words, width] = widths(p);
        vec![Box::new(dequantize::Dequantize::new(
            settings,
            properties.clone(),
            target.clone(),
            buffer(),
            buffer(),
            buffer(),
            (),
            words,
            width,
            plan(arch, p, c),
            elem(p.out),
        ))]
    }

    fn launch(
        device: &Device,
        p: &DequantizeProblem,
        c: &DequantizeConfig,
        operands: &DequantizeOperands,
        _scratch: Option<&Handle>,
    ) {
        launch(device, p, c, &operands.weight, &operands.out);
    }
}

/// Enqueues the kernel with the result at the start of `out`.
pub(super) fn launch(
    device: &Device,
    p: &DequantizeProblem,
    c: &DequantizeConfig,
    weight: &WeightBuffers,
    out: &Handle,
) {
    let ([words, width], len) = (widths(p), p.weight.len() as usize);
    let vectors = p.weight.words() as usize / words;
    let cubes = crate::cubes(device, vectors as u64, c.units * c.vectors);
    // SAFETY: the lengths are the weight's, and the kernel checks its indices.
    unsafe {
        dequantize::launch_unchecked(
            device.client(),
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(c.units),
            address(p),
            words,
            width,
            BufferArg::from_raw_parts(weight.codes.clone(), vectors),
            BufferArg::from_raw_parts(weight.scb.clone(), p.weight.n as usize),
            BufferArg::from_raw_parts(out.clone(), len / width),
            p.weight.k,
            plan(device.profile(), p, c),
            elem(p.out),
        );
    }
}

/// Bytes of the result, in whole words.
pub(super) fn out_bytes(p: &DequantizeProblem) -> usize {
    (p.weight.len() as usize * p.out.size()).next_multiple_of(4)
}

/// Words of a vector of codes, elements of one of the result: 16 bytes of it where they lie in one row.
fn widths(p: &DequantizeProblem) -> [usize; 2] {
    match p.weight.together(4 / p.out.size() as u32) {
        Some(words) => [words as usize, 4 * words as usize],
        None => [1, 1],
    }
}

fn address(p: &DequantizeProblem) -> AddressType {
    if p.weight.len() > u64::from(u32::MAX) { AddressType::U64 } else { AddressType::U32 }
}

/// Comptime facts of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DequantizePlan {
    units: u32,
    vectors: u32,
    /// True if numbers are rounded to bf16 before they are stored as such.
    rounds: bool,
}

fn plan(arch: &ArchProfile, p: &DequantizeProblem, c: &DequantizeConfig) -> DequantizePlan {
    DequantizePlan { units: c.units, vectors: c.vectors, rounds: by_hand(arch, p.out) }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn dequantize<E: Float, NW: Size, NO: Size>(
    codes: &[Vector<u32, NW>],
    scb: &[f32],
    out: &mut [Vector<E, NO>],
    k: u32,
    #[comptime] plan: DequantizePlan,
    #[define(E)] _dtype: ElemType,
) {
    let (words, width) = (NW::value(), NO::value());
    let vectors = codes.len() as u32;
    let mut first = CUBE_POS_X * comptime!(plan.units * plan.vectors) + UNIT_POS;
    while first < vectors {
        #[unroll]
        for i in 0..plan.vectors {
            let at = first + comptime!(i * plan.units);
            if at < vectors {
                let vector = lifted(codes[at as usize]);
                if comptime!(width > 1) {
                    let scb = scb[(at / (k / comptime!(4 * words as u32))) as usize];
                    let mut values = Vector::<E, NO>::new(E::from_int(0));
                    #[unroll]
                    for e in 0..width {
                        let word = vector.extract(comptime!(e / 4));
                        let value = scaled(code_of(word, comptime!(e as u32 % 4)), scb, k);
                        values.insert(e, E::cast_from(rounded(value, plan)));
                    }
                    out[at as usize] = values;
                } else {
                    #[unroll]
                    for e in 0..4u32 {
                        let i = at as usize * 4 + comptime!(e as usize);
                        if i < out.len() {
                            let scb = scb[i / k as usize];
                            let value = scaled(code_of(vector.extract(0usize), e), scb, k);
                            out[i] = Vector::new(E::cast_from(rounded(value, plan)));
                        }
                    }
                }
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.units * plan.vectors);
    }
}

#[cube]
fn rounded(value: f32, #[comptime] plan: DequantizePlan) -> f32 {
    if comptime!(plan.rounds) { round_to_bf16(value) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_a_candidate() {
        let weight = Weight::new(4096, 4096).expect("valid");
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for out in [DType::F32, DType::F16, DType::Bf16] {
                let p = DequantizeProblem { weight, out };
                assert!(!Int8Dequantize::candidates(&arch, &p).is_empty(), "{name} {out}");
                let simplest = Int8Dequantize::simplest(&arch, &p).expect("there is one");
                Int8Dequantize::check(&arch, &p, &simplest).expect("it is feasible");
            }
        }
    }

    #[test]
    fn vectors_lie_in_one_row() {
        let widths = |k, out| widths(&DequantizeProblem { weight: Weight { n: 8, k }, out });
        assert_eq!(widths(4096, DType::Bf16), [2, 8]);
        assert_eq!(widths(4096, DType::F32), [1, 4]);
        assert_eq!(widths(12, DType::F16), [1, 4]);
        assert_eq!(widths(41, DType::F16), [1, 1]);
    }
}
