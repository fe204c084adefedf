//! Kernel entry point for all paths.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::cpu_gemv::{self, CpuGemvConfig};
use super::dims::Dims;
use super::epilogue::Finish;
use super::fma::{self, FmaPlan};
use super::gemv::{self, GemvPlan};
use super::mma::{CopyFeed, Maps, MmaPlan, WindowFeed, multiply_dense};
use super::norm_weight::NormWeight;
use super::packed::{self, PackedPlan};
use super::pipelined::{self, PipelinedPlan};
use super::subgroup::{self, SubgroupPlan};
use super::tma::TmaFeed;
use super::window::Gather;
use super::workgroup::{self, WorkgroupPlan};

/// Loop of a launch with its comptime parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Loop {
    Mma(MmaPlan),
    Tma(MmaPlan),
    Workgroup(WorkgroupPlan),
    Subgroup(SubgroupPlan),
    Pipelined(PipelinedPlan),
    Fma(FmaPlan),
    Packed(PackedPlan),
    CpuGemv(CpuGemvConfig),
    Gemv(GemvPlan),
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(crate) fn matmul<F: Float, I: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    maps: ComptimeOption<Maps>,
    finish: Finish<F, E, NO>,
    norm: ComptimeOption<NormWeight<F, NL>>,
    window: ComptimeOption<Gather<F, NL>>,
    dims: &Dims,
    #[comptime] plan: Loop,
    #[define(F, I, E)] _dtypes: [ElemType; 3],
) {
    match plan {
        Loop::Mma(plan) =>
        {
            #[comptime]
            match &window {
                ComptimeOption::Some(window) => {
                    multiply_dense::<F, I, E, Gather<F, NL>, WindowFeed, NL, NR, NO, NP>(
                        lhs, rhs, out, partials, window, &finish, dims, plan,
                    )
                }
                ComptimeOption::None => {
                    multiply_dense::<F, I, E, ComptimeOption<Maps>, CopyFeed, NL, NR, NO, NP>(
                        lhs, rhs, out, partials, &maps, &finish, dims, plan,
                    )
                }
            }
        }
        Loop::Tma(plan) => {
            multiply_dense::<F, I, E, ComptimeOption<Maps>, TmaFeed, NL, NR, NO, NP>(
                lhs, rhs, out, partials, &maps, &finish, dims, plan,
            )
        }
        Loop::Workgroup(plan) => {
            workgroup::multiply::<F, E, NL, NR, NO, NP>(lhs, rhs, out, partials, dims, plan)
        }
        Loop::Subgroup(plan) => {
            subgroup::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, plan)
        }
        Loop::Pipelined(plan) => pipelined::multiply::<F, E, NL, NR, NO, NP>(
            lhs, rhs, out, partials, &finish, &window, dims, plan,
        ),
        Loop::Fma(plan) => fma::multiply::<F, E, NL, NR, NO, NP>(
            lhs, rhs, out, partials, &finish, &window, dims, plan,
        ),
        Loop::Packed(plan) => {
            packed::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, &window, dims, plan)
        }
        Loop::CpuGemv(config) => {
            cpu_gemv::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, config)
        }
        Loop::Gemv(plan) => {
            gemv::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, &norm, dims, plan)
        }
    }
}
