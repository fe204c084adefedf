//! Int8 for [`dequant`](crate::dequant): codes become halves, which hold them exactly. The absmax of a row scales
//! the sum.
//!
//! Cost: 3 instructions a code in bf16, which is the upper half of the code in f32.
//!
//! Time in us for 14336 x 4096 in bf16 (H200 through Vulkan), next to the previous path for these rows,
//! `Dense` or `Gemv`:
//!
//! | m  | `Subgroup` | before       |
//! |----|------------|--------------|
//! | 8  | 46.2       | 55.1 `Gemv`  |
//! | 16 | 46.5       | 98.1 `Dense` |
//! | 64 | 65.7       | 178 `Dense`  |

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::Queue;

use super::problem::{Int8MatmulOperands, Int8MatmulProblem};
use super::{QuantizedValues, QuantizedValuesLaunch};
use crate::dequant::{self, Dims, SubgroupConfig, SubgroupPlan, SubgroupProblem};
use crate::elem::elem;
use crate::launch::launch;
use crate::matmul::{Finish, FinishLaunch, split_k};

/// Describes the matmul to [`dequant`](crate::dequant).
pub(super) fn subgroup_problem(p: &Int8MatmulProblem) -> SubgroupProblem {
    let (weight, precision) = (p.weight, p.dense().precision);
    SubgroupProblem { m: p.m, n: weight.n, k: weight.k, precision, bits: 8, glu: false }
}

fn plan(arch: &ArchProfile, p: &Int8MatmulProblem, c: &SubgroupConfig) -> SubgroupPlan {
    dequant::plan(arch, &subgroup_problem(p), c).expect("it was checked")
}

/// Multiplies `x`, halves `[m, k]`. `partials` is the workspace for split-k.
pub(super) fn launch(
    queue: &Queue,
    p: &Int8MatmulProblem,
    c: &SubgroupConfig,
    x: Handle,
    operands: &Int8MatmulOperands,
    partials: Option<&Handle>,
) {
    let (dense, weight, plan) = (p.dense(), p.weight, plan(queue.profile(), p, c));
    let (cubes, dim) = subgroup_problem(p).grid(&plan, c);
    let [x_len, _, out_len] = dense.extents();
    let (epilogue, out) = (&operands.epilogue, &operands.out);
    // A kernel without partial sums binds another buffer in their place and never writes it.
    let (sums, sums_len) = match partials {
        Some(partials) if c.parts > 1 => (partials, out_len * c.parts as usize),
        _ => (out, 1),
    };
    let finish = match c.parts {
        1 => FinishLaunch::from_buffers(p.epilogue, epilogue, weight.n as usize, out_len),
        _ => FinishLaunch::nothing(),
    };
    // SAFETY: the extents follow from the problem, and the kernel checks its edges.
    unsafe {
        launch!(
            queue,
            multiply,
            cubes,
            dim,
            p.address(),
            4,
            4,
            1,
            BufferArg::from_raw_parts(x, x_len / 4),
            QuantizedValuesLaunch::from_buffers(&weight, &operands.weight, 4),
            BufferArg::from_raw_parts(out.clone(), out_len),
            BufferArg::from_raw_parts(sums.clone(), sums_len),
            finish,
            p.m,
            weight.n,
            weight.k,
            c.part_steps(weight.k),
            plan,
            elem(p.dtype),
        );
    }
    if c.parts > 1 {
        split_k::add(queue, &dense, sums, c.parts, false, out, epilogue);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, sizes")]
fn multiply<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: Finish<F, F, NO>,
    m: u32,
    n: u32,
    k: u32,
    part_steps: u32,
    #[comptime] plan: SubgroupPlan,
    #[define(F)] _dtype: ElemType,
) {
    let dims = Dims { m, n, k, part_steps };
    dequant::subgroup_matmul::<QuantizedValues<NW>, F, NX, NO>(
        x, weight, out, partials, &finish, &dims, plan,
    );
}
