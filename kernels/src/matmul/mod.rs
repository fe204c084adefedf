//! C = residual + gate · activation(A·B + bias)    A: `[batch, m, k]`   B: `[batch, k, n]`
//! bias: `[n]`   C, gate, residual: `[batch, m, n]`
//!
//! ```text
//!   for each (tile_m x tile_n) block of C             // one cube (CPU: one unit)
//!     for k0 in (0..k).step_by(tile_k)                // one stage: global -> shared
//!       acc += A[.., k0..] · B[k0.., ..]              // one plane: shared -> registers, multiply
//!     C = round(epilogue(acc))
//! ```
//!
//! Operands are stored in the problem's type; products are summed in f32, and so is the epilogue
//! ([`Epilogue`], every part of it optional); the result is rounded once, to a type of its own.
//! [`Precision::F32`] multiplies in f32; [`Precision::Tf32`] rounds f32 operands to 10 mantissa bits
//! on the tensor cores; [`Precision::F16Acc16`] sums in f16, where asked to. Either operand may have
//! its rows or its columns contiguous, with any leading dimension, and either may repeat over batches
//! (stride 0). Or batches are groups, each with rows of its own of one A, as many as a buffer on the
//! device says ([`MatmulProblem::grouped`]). Rows of A may be normalised as they are multiplied
//! ([`MatmulProblem::norm`]): by `Lanes` alone, whose groups of units read whole rows.
//!
//! Cost: `2·batch·m·n·k` flop; every operand element read once, every result written once.
//!
//! One source, nine ways through it, chosen by [`MatmulConfig`]:
//!
//! | path    | multiplies with            | feeds it by                        | where                   |
//! |---------|----------------------------|------------------------------------|-------------------------|
//! | `Mma`   | `mma.sync`                 | `cp.async` ring, swizzled `ldmatrix` | CUDA                  |
//! | `Tma`   | `mma.sync`                 | the same ring, by the tensor memory accelerator | CUDA from Hopper on |
//! | `Cube`  | cube-scope matrices        | the driver, through tensor layouts | Vulkan, NVIDIA          |
//! | `Plane` | plane-scope matrices       | shared memory                      | CUDA without `mma.sync`, Vulkan's groups |
//! | `Ahead` | plane-scope matrices       | shared memory, a tile ahead        | Vulkan                  |
//! | `Fma`   | multiply-add, shared tiles | shared memory, f32                 | any GPU                 |
//! | `Cores` | vector multiply-add        | packed panels on the stack         | CPU                     |
//! | `Dots`  | vector multiply-add        | nothing: both lie along k          | CPU, few rows           |
//! | `Lanes` | multiply-add               | nothing: both lie along k          | any GPU, few rows       |
//!
//! Sources: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008) for the
//! blocking; NVIDIA PTX ISA, "Matrix multiply-accumulate" for fragment layouts.

mod ahead;
mod bulk;
pub(crate) mod bytes;
mod cmma;
mod config;
mod cores;
mod dims;
mod dots;
mod epilogue;
mod fma;
mod gain;
mod lanes;
mod mma;
pub(crate) mod parts;
mod problem;
mod ring;

use std::sync::Arc;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Cost, Infeasible, Kernel, Output};

pub use cmma::{CubeConfig, PlaneConfig};
pub use config::MatmulConfig;
pub use cores::CoresConfig;
pub use dots::DotsConfig;
pub use epilogue::{Activation, Epilogue, EpilogueBuffers};
pub use fma::FmaConfig;
pub use gain::NormBuffers;
pub use lanes::LanesConfig;
pub use mma::MmaConfig;
pub(crate) use mma::{Codes, store_quad};
pub use problem::{Batches, InvalidMatmul, Layout, MatmulProblem, Operand, Precision};

use config::Plan;
pub(crate) use config::{IN_FLIGHT, MOST_NORMED_ROWS, check_coded, plane_inst, spread};
use dims::Dims;
pub(crate) use dims::block_of;
pub(crate) use epilogue::{Columns, Finish, FinishCompilationArg, FinishLaunch};
pub(crate) use gain::{Gain, GainCompilationArg, GainLaunch, weigh_pair};
use lanes::LanesPlan;

/// The matmul kernel family.
pub struct Matmul;

impl Matmul {
    /// Whether the problem has a norm, and this device a path that is worth it: without one it is a launch of its own.
    pub fn takes_norm(arch: &ArchProfile, problem: &MatmulProblem) -> bool {
        config::takes_norm(arch, problem)
    }
}

/// Device buffers of one matmul, each dense from its first element on.
#[derive(Debug, Clone)]
pub struct MatmulOperands {
    pub lhs: Handle,
    pub rhs: Handle,
    pub out: Handle,
    /// Those of the problem's epilogue.
    pub epilogue: EpilogueBuffers,
    /// Offsets of a grouped problem, `[groups + 1]` of u32.
    pub rows: Option<Handle>,
    /// Of the problem's norm.
    pub norm: Option<NormBuffers>,
}

impl Kernel for Matmul {
    type Problem = MatmulProblem;
    type Config = MatmulConfig;
    type Operands = MatmulOperands;

    const NAME: &'static str = "matmul";
    const VERSION: u32 = 5;

    fn bucket(problem: &MatmulProblem) -> String {
        problem.bucket()
    }

    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<MatmulConfig> {
        config::candidates(arch, problem)
    }

    fn check(
        arch: &ArchProfile,
        problem: &MatmulProblem,
        config: &MatmulConfig,
    ) -> Result<(), Infeasible> {
        config::check(arch, problem, config)
    }

    fn cost(problem: &MatmulProblem) -> Cost {
        problem.cost()
    }

    fn simplest(arch: &ArchProfile, problem: &MatmulProblem) -> Result<MatmulConfig, Infeasible> {
        config::simplest(arch, problem)
    }

    fn operands(device: &Device, problem: &MatmulProblem, seed: u64) -> MatmulOperands {
        let client = device.client();
        let [lhs, rhs, out] = problem.extents();
        let storage = problem.precision.storage();
        let make = |len, salt| crate::noise(device, len, storage, 5 * seed + salt);
        MatmulOperands {
            lhs: make(lhs, 0),
            rhs: make(rhs, 1),
            out: client.empty((out * problem.out.size()).next_multiple_of(4)),
            epilogue: EpilogueBuffers::noise(
                device,
                problem.epilogue,
                (problem.bias_len(), storage),
                (out, problem.out),
                5 * seed + 2,
            ),
            rows: problem
                .grouped
                .then(|| client.create_from_slice(u32::as_bytes(&problem.uneven_rows()))),
            norm: NormBuffers::noise(device, problem.norm, (problem.k, storage), 5 * seed + 7919),
        }
    }

    fn outputs(problem: &MatmulProblem, operands: &MatmulOperands) -> Vec<Output> {
        // Two roundings of the result, and two orders of summation of k products.
        let epsilon = match problem.out {
            DType::F16 => 2f64.powi(-10),
            DType::Bf16 => 2f64.powi(-7),
            _ if problem.precision == Precision::Tf32 => 2f64.powi(-10),
            _ => 0.0,
        };
        let sums = if problem.precision == Precision::F16Acc16 { -9 } else { -22 };
        let tolerance = epsilon + f64::from(problem.k).sqrt() * 2f64.powi(sums);
        let len = problem.extents()[2];
        vec![Output { handle: operands.out.clone(), dtype: problem.out, len, tolerance }]
    }

    fn scratch_bytes(problem: &MatmulProblem, config: &MatmulConfig) -> u64 {
        match config.parts() {
            1 => 0,
            parts => 4 * u64::from(parts) * problem.extents()[2] as u64,
        }
    }

    fn programs(
        arch: &ArchProfile,
        problem: &MatmulProblem,
        config: &MatmulConfig,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Box<dyn CubeKernel>> {
        let plan = Plan::new(arch, problem, config);
        let settings = KernelSettings::new(
            plan.cube_dim().into(),
            ExecutionMode::Unchecked,
            plan.address(problem),
        );
        let buffer = || BufferCompilationArg { inplace: None };
        let [width_lhs, width_rhs, width_out, width_partials] = plan.widths;
        let epilogue = match config.parts() {
            1 => problem.epilogue,
            _ => Epilogue::default(),
        };
        let dims = Dims::compiled(problem.grouped);
        let matmul: Box<dyn CubeKernel> = match plan.path {
            Path::Mma(mma) if mma.bulk => Box::new(bulk::matmul_tma::MatmulTma::new(
                settings,
                properties.clone(),
                target.clone(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                FinishCompilationArg::of(epilogue),
                dims,
                width_lhs,
                width_rhs,
                width_out,
                width_partials,
                mma,
                Plan::types(problem),
            )),
            path => Box::new(matmul::Matmul::new(
                settings,
                properties.clone(),
                target.clone(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                FinishCompilationArg::of(epilogue),
                GainCompilationArg::of(problem.norm),
                dims,
                width_lhs,
                width_rhs,
                width_out,
                width_partials,
                path,
                Plan::types(problem),
            )),
        };
        let mut programs = vec![matmul];
        if config.parts() > 1 {
            programs.push(parts::program(problem, config.parts(), false, properties, target));
        }
        programs
    }

    fn launch(
        device: &Device,
        problem: &MatmulProblem,
        config: &MatmulConfig,
        operands: &MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        let plan = Plan::new(device.profile(), problem, config);
        let (client, [lhs_len, rhs_len, out_len]) = (device.client(), problem.extents());
        let address = plan.address(problem);
        let parts = config.parts();
        // A kernel without partial sums still binds a buffer in their place, and never writes it.
        let (partials, partials_len) = match scratch {
            Some(scratch) => (scratch, out_len * parts as usize),
            None => (&operands.out, 2),
        };
        let nothing = EpilogueBuffers::default();
        let (epilogue, buffers) = match parts {
            1 => (problem.epilogue, &operands.epilogue),
            // The sums of the parts are finished where they are added.
            _ => (Epilogue::default(), &nothing),
        };
        let (bias, vectors) = (problem.bias_len(), out_len / plan.widths[2]);
        for slice in problem.batch_slices(device.profile()) {
            let [width_lhs, width_rhs, width_out, width_partials] = plan.widths;
            let dims = slice.dims(problem, parts, plan.part_tiles, operands.rows.as_ref());
            // SAFETY: `plan` was derived from the problem whose extents the handles have; every
            // path checks the edges that `plan.exact` does not rule out.
            unsafe {
                let lhs = BufferArg::from_raw_parts(operands.lhs.clone(), lhs_len / width_lhs);
                let rhs = BufferArg::from_raw_parts(operands.rhs.clone(), rhs_len / width_rhs);
                let out = BufferArg::from_raw_parts(operands.out.clone(), out_len / width_out);
                let partials =
                    BufferArg::from_raw_parts(partials.clone(), partials_len / width_partials);
                match plan.path {
                    Path::Mma(mma) if mma.bulk => bulk::matmul_tma::launch_unchecked(
                        client,
                        plan.cubes(problem, slice.count, parts),
                        plan.cube_dim(),
                        address,
                        width_lhs,
                        width_rhs,
                        width_out,
                        width_partials,
                        lhs,
                        rhs,
                        out,
                        partials,
                        bulk::map(
                            &operands.lhs,
                            problem.lhs,
                            [problem.m, problem.k],
                            mma.lhs.shape,
                        ),
                        bulk::map(
                            &operands.rhs,
                            problem.rhs,
                            [problem.n, problem.k],
                            mma.rhs.shape,
                        ),
                        FinishLaunch::of(epilogue, buffers, bias, vectors),
                        dims,
                        mma,
                        Plan::types(problem),
                    ),
                    path => matmul::launch_unchecked(
                        client,
                        plan.cubes(problem, slice.count, parts),
                        plan.cube_dim(),
                        address,
                        width_lhs,
                        width_rhs,
                        width_out,
                        width_partials,
                        lhs,
                        rhs,
                        out,
                        partials,
                        FinishLaunch::of(epilogue, buffers, bias, vectors),
                        GainLaunch::of(problem.norm, operands.norm.as_ref(), problem.k, width_lhs),
                        dims,
                        path,
                        Plan::types(problem),
                    ),
                }
            }
        }
        if let (Some(partials), true) = (scratch, parts > 1) {
            parts::add(device, problem, partials, parts, false, &operands.out, &operands.epilogue);
        }
    }
}

/// Comptime facts of a launch: which path, with what geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Path {
    Mma(mma::MmaPlan),
    Cube(cmma::CubePlan),
    Plane(cmma::PlanePlan),
    Ahead(ahead::AheadPlan),
    Fma(fma::FmaPlan),
    Cores(cores::CoresPlan),
    Dots(DotsConfig),
    Lanes(LanesPlan),
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn matmul<F: Float, I: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    finish: Finish<F, E, NO>,
    norm: ComptimeOption<Gain<F, NL>>,
    dims: &Dims,
    #[comptime] path: Path,
    #[define(F, I, E)] _dtypes: [ElemType; 3],
) {
    match path {
        Path::Mma(plan) => {
            let worth = ComptimeOption::<bytes::Worth<F>>::new_None();
            let bulk = ComptimeOption::<bulk::Bulk>::new_None();
            mma::multiply::<F, I, E, NL, NR, NO, NP>(
                lhs, rhs, out, partials, bulk, &finish, &worth, dims, plan,
            )
        }
        Path::Cube(plan) => {
            cmma::multiply_cube::<F, E, NL, NR, NO, NP>(lhs, rhs, out, partials, dims, plan)
        }
        Path::Plane(plan) => {
            cmma::multiply_planes::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, plan)
        }
        Path::Ahead(plan) => {
            ahead::multiply_ahead::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, plan)
        }
        Path::Fma(plan) => fma::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, plan),
        Path::Cores(plan) => {
            cores::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, plan)
        }
        Path::Dots(config) => {
            dots::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, dims, config)
        }
        Path::Lanes(plan) => {
            lanes::multiply::<F, E, NL, NR, NO>(lhs, rhs, out, &finish, &norm, dims, plan)
        }
    }
}
