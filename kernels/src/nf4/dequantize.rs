//! Dequantises 4-bit weights: out = round(book[code] · absmax)    out: `[n, k]` in f16, bf16 or f32
//!
//! ```text
//!   for each word of eight codes                        // one unit, several words in flight
//!     a = absmax of its block
//!     out[8 · word ..] = round(book[code] · a)          // one vector store
//! ```
//!
//! Cost: half a byte and a part of an absmax read, one element written: 2.5 bytes an element in bf16. The
//! codebook lies in shared memory, one value a bank, so that any mix of codes is read at once. Products are
//! f32 and rounded once, bit for bit as in bitsandbytes.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{QuantizedValues, QuantizedValuesLaunch, Weight, WeightBuffers, code_shift};
use crate::elem::elem;
use crate::fits::{limits, shape, stores};
use crate::launch::{index_width, launch};
use crate::round::{by_hand, round_to_bf16};

/// The kernel that dequantises 4-bit weights.
pub struct Nf4Dequantize;

/// A weight to dequantise into a dense matrix `[n, k]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DequantizeProblem {
    pub weight: Weight,
    /// Type of the result.
    pub out: DType,
}

/// Launch shape of a dequantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DequantizeConfig {
    /// Units of a cube.
    pub units: u32,
    /// Words that a unit decodes in one iteration.
    pub words: u32,
}

/// Device buffers of one dequantisation.
#[derive(Debug, Clone)]
pub struct DequantizeOperands {
    pub weight: WeightBuffers,
    pub out: Handle,
}

impl Kernel for Nf4Dequantize {
    type Problem = DequantizeProblem;
    type Config = DequantizeConfig;
    type Operands = DequantizeOperands;

    const NAME: &'static str = "nf4_dequantize";
    const VERSION: u32 = 1;

    fn bucket(p: &DequantizeProblem) -> String {
        let Weight { nested, order, .. } = p.weight;
        let nested = if nested { " nested" } else { "" };
        format!("{} {}{nested} {}", p.out, order.name(), p.weight.len().next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &DequantizeProblem) -> Vec<DequantizeConfig> {
        let gpu = [[256, 2], [256, 4], [128, 4], [512, 2], [256, 1], [256, 8]];
        let cores = arch.cores().map(|cores| [[cores, 1]]);
        let all = cores.as_ref().map_or(&gpu[..], |cores| &cores[..]);
        let configs =
            all.iter().map(|[units, words]| DequantizeConfig { units: *units, words: *words });
        configs.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &DequantizeProblem,
        c: &DequantizeConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.out])?;
        if !(1..=16).contains(&c.words) {
            return Err(shape("words", c.words, "expected 1 to 16 words per unit"));
        }
        limits(arch, c.units, 16 * 4)
    }

    fn cost(p: &DequantizeProblem) -> Cost {
        let bytes = p.weight.bytes() + p.weight.len() * p.out.size() as u64;
        Cost { flops: p.weight.len(), bytes }
    }

    fn baseline(arch: &ArchProfile, p: &DequantizeProblem) -> Result<DequantizeConfig, Infeasible> {
        let units = arch.cores().unwrap_or(64);
        let config = DequantizeConfig { units, words: 1 };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &DequantizeProblem, seed: u64) -> DequantizeOperands {
        DequantizeOperands {
            weight: super::noise(queue, p.weight, 3 * seed),
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
        launch(queue, p, c, &operands.weight, &operands.out);
    }
}

/// Enqueues the kernel, which writes the result to the start of `out`.
pub(super) fn launch(
    queue: &Queue,
    p: &DequantizeProblem,
    c: &DequantizeConfig,
    weight: &WeightBuffers,
    out: &Handle,
) {
    let cubes = crate::cubes(queue.profile(), p.weight.words(), c.units * c.words);
    let (len, width) = (p.weight.len() as usize, width(p));
    // SAFETY: the result has as many elements as the weight, and the kernel checks its index.
    unsafe {
        launch!(
            queue,
            dequantize,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(c.units),
            address(p),
            1,
            width,
            QuantizedValuesLaunch::from_buffers(&p.weight, weight, 1),
            BufferArg::from_raw_parts(out.clone(), len / width),
            p.weight.k,
            plan(queue.profile(), p, c),
            elem(p.out),
        );
    }
}

/// Bytes of the result, padded to whole words.
pub(super) fn out_bytes(p: &DequantizeProblem) -> usize {
    (p.weight.len() as usize * p.out.size()).next_multiple_of(4)
}

/// Vector width of the result in elements.
fn width(p: &DequantizeProblem) -> usize {
    let widest = 16 / p.out.size() as u64;
    if p.weight.len() % 8 == 0 { widest as usize } else { 1 }
}

fn address(p: &DequantizeProblem) -> AddressType {
    index_width(p.weight.len())
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DequantizePlan {
    units: u32,
    words: u32,
    /// True if all units of a cube share a copy of the codebook in shared memory.
    shared: bool,
    /// True if the kernel rounds to bf16 itself before it stores.
    rounds: bool,
}

fn plan(arch: &ArchProfile, p: &DequantizeProblem, c: &DequantizeConfig) -> DequantizePlan {
    DequantizePlan {
        units: c.units,
        words: c.words,
        shared: arch.cores().is_none(),
        rounds: by_hand(arch, p.out),
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn dequantize<E: Float, NW: Size, NO: Size>(
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<E, NO>],
    k: u32,
    #[comptime] plan: DequantizePlan,
    #[define(E)] _dtype: ElemType,
) {
    if comptime!(plan.shared) {
        let mut codebook = Shared::<[f32]>::new_slice(16usize);
        if UNIT_POS < 16 {
            codebook[UNIT_POS as usize] = weight.codebook[UNIT_POS as usize];
        }
        sync_cube();
        decode::<E, NW, NO>(weight, &codebook, out, k, plan);
    } else {
        decode::<E, NW, NO>(weight, &weight.codebook, out, k, plan);
    }
}

#[cube]
fn decode<E: Float, NW: Size, NO: Size>(
    weight: &QuantizedValues<NW>,
    codebook: &[f32],
    out: &mut [Vector<E, NO>],
    k: u32,
    #[comptime] plan: DequantizePlan,
) {
    let words = weight.codes.len() as u32;
    let width = NO::value();
    let all = out.len() * width;
    let mut first = CUBE_POS_X * comptime!(plan.units * plan.words) + UNIT_POS;
    while first < words {
        #[unroll]
        for i in 0..plan.words {
            let word = first + comptime!(i * plan.units);
            if word < words {
                let mut row = 0u32.runtime();
                let mut chunk = 0u32.runtime();
                if comptime!(weight.plan.tiles) {
                    row = word / (k / 8);
                    chunk = word % (k / 8);
                }
                let absmax = weight.absmax_of_word(word, row, chunk, k);
                let codes = weight.word(word, row, chunk, k);
                let start = word as usize * 8;
                #[unroll]
                for v in 0..comptime!(8 / width) {
                    let mut values = Vector::<E, NO>::new(E::from_int(0));
                    #[unroll]
                    for e in 0..width {
                        let shift = comptime!(code_shift((v * width + e) as u32));
                        let value = codebook[((codes >> shift) & 15) as usize] * absmax;
                        let value =
                            if comptime!(plan.rounds) { round_to_bf16(value) } else { value };
                        values.insert(e, E::cast_from(value));
                    }
                    // With single-element vectors the last word may have fewer than eight elements.
                    if comptime!(width > 1) || start + comptime!(v * width) < all {
                        out[start / NO::value() + v] = values;
                    }
                }
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.units * plan.words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_a_candidate() {
        let weight = Weight::new(4096, 4096, 64, true).expect("valid");
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for out in [DType::F32, DType::F16, DType::Bf16] {
                let p = DequantizeProblem { weight, out };
                assert!(!Nf4Dequantize::candidates(&arch, &p).is_empty(), "{name} {out}");
                let baseline = Nf4Dequantize::baseline(&arch, &p).expect("there is one");
                Nf4Dequantize::check(&arch, &p, &baseline).expect("it is feasible");
            }
        }
    }
}
