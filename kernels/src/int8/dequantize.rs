//! Dequantises int8: out = round(code · scb / 127). Launches [`dequant::dequantize`](crate::dequant::dequantize)
//! with an 8-bit weight.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::{QuantizedValues, QuantizedValuesLaunch, Weight, WeightBuffers};
use crate::dequant::DequantizeConfig;
use crate::dequant::dequantize::{DequantizePlan, decode, widths};
use crate::elem::elem;
use crate::launch::{index_width, launch};

/// The kernel that dequantises int8 weights.
pub struct Int8Dequantize;

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

impl Kernel for Int8Dequantize {
    type Problem = DequantizeProblem;
    type Config = DequantizeConfig;
    type Operands = DequantizeOperands;

    const NAME: &'static str = "int8_dequantize";
    const VERSION: u32 = 1;

    fn bucket(p: &DequantizeProblem) -> String {
        format!(
            "{} w{} {}",
            p.out,
            widths(p.weight.k, p.out)[1],
            p.weight.len().next_power_of_two()
        )
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
        Cost { flops: 2 * p.weight.len(), bytes }
    }

    fn baseline(arch: &ArchProfile, p: &DequantizeProblem) -> Result<DequantizeConfig, Infeasible> {
        let config = DequantizeConfig::baseline(arch);
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
    let ([words, width], len) = (widths(p.weight.k, p.out), p.weight.len() as usize);
    let vectors = p.weight.words() as usize / words;
    // SAFETY: the lengths follow from the weight, and the kernel checks its indices.
    unsafe {
        launch!(
            queue,
            dequantize,
            c.cubes(queue.profile(), vectors),
            CubeDim::new_1d(c.units),
            address(p),
            words,
            width,
            QuantizedValuesLaunch::from_buffers(&p.weight, weight, words),
            BufferArg::from_raw_parts(out.clone(), len / width),
            p.weight.k,
            c.plan(queue.profile(), p.out),
            elem(p.out),
        );
    }
}

/// Bytes of the result, padded to whole words.
pub(super) fn out_bytes(p: &DequantizeProblem) -> usize {
    (p.weight.len() as usize * p.out.size()).next_multiple_of(4)
}

fn address(p: &DequantizeProblem) -> AddressType {
    index_width(p.weight.len())
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
                let baseline = Int8Dequantize::baseline(&arch, &p).expect("there is one");
                Int8Dequantize::check(&arch, &p, &baseline).expect("it is feasible");
            }
        }
    }
}
