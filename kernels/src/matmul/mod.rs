//! C = factor · (residual + gate · activation(A·B + bias))    A: `[batch, m, k]`   B: `[batch, k, n]`
//! bias: `[n]`   C, gate, residual: `[batch, m, n]`
//!
//! ```text
//!   for each (tile_m x tile_n) block of C             // one cube (CPU: one unit)
//!     for k0 in (0..k).step_by(tile_k)                // one stage: global -> shared
//!       acc += A[.., k0..] · B[k0.., ..]              // one plane: shared -> registers, multiply
//!     C = round(epilogue(acc))
//! ```
//!
//! Operands are stored in the problem's type. Accumulators and the epilogue ([`Epilogue`], every
//! part of it optional) are f32; the result is rounded once, to a type of its own.
//! [`Precision::F32`] multiplies in f32. [`Precision::Tf32`] rounds f32 operands to 10 mantissa
//! bits on the tensor cores. [`Precision::F16Acc16`] uses f16 accumulation. Either operand may have
//! contiguous rows or columns, with any leading dimension, and stride 0 broadcasts it over batches.
//! Alternatively, batches are groups: a buffer on the device assigns the rows of one A to them
//! ([`MatmulProblem::grouped`]). `Gemv` alone can normalise the rows of A while it multiplies them
//! ([`MatmulProblem::norm`]), because its groups of units read whole rows.
//!
//! Rows of A may be windows of an image, which makes the matmul a convolution ([`Window`]; `Mma`, `Pipelined`, `Fma` and `Packed`).
//!
//! Cost: `2·batch·m·n·k` flop; reads every operand element once, writes every result once.
//!
//! Nine paths; [`MatmulConfig`] selects one. The file of a path holds its config, candidates,
//! limits, plan and loop:
//!
//! | path        | multiplies with      | operands arrive by                   | runs on                             |
//! |-------------|----------------------|--------------------------------------|-------------------------------------|
//! | `Mma`       | `mma.sync`           | `cp.async` ring, swizzled `ldmatrix` | CUDA                                |
//! | `Tma`       | `mma.sync`           | the same ring, filled by TMA         | CUDA, Hopper or newer               |
//! | `Workgroup` | cube-scope matrices  | the driver, through tensor layouts   | Vulkan, NVIDIA                      |
//! | `Subgroup`  | plane-scope matrices | shared memory                        | CUDA (no `mma.sync`), Vulkan groups |
//! | `Pipelined` | plane-scope matrices | shared memory, double-buffered       | Vulkan                              |
//! | `Fma`       | multiply-add         | shared memory, f32                   | any GPU                             |
//! | `Packed`    | vector multiply-add  | packed panels on the stack           | CPU                                 |
//! | `CpuGemv`   | vector multiply-add  | direct loads, contiguous along k     | CPU, few rows                       |
//! | `Gemv`      | multiply-add         | direct loads, contiguous along k     | any GPU, few rows                   |
//!
//! Sources: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008) for
//! the blocking; NVIDIA PTX ISA, "Matrix multiply-accumulate" for fragment layouts.

mod config;
mod cpu_gemv;
mod dims;
mod epilogue;
mod fma;
mod gemv;
mod kernel;
pub(crate) mod mma;
mod nonlinearity;
mod norm_weight;
mod packed;
mod path;
mod pipelined;
mod problem;
pub(crate) mod split_k;
mod subgroup;
mod tma;
mod window;
mod workgroup;

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use config::MatmulConfig;
pub use cpu_gemv::CpuGemvConfig;
pub use epilogue::{Epilogue, EpilogueBuffers};
pub use fma::FmaConfig;
pub use gemv::GemvConfig;
pub use mma::MmaConfig;
pub use nonlinearity::{Activation, Constant};
pub(crate) use nonlinearity::{Arithmetic, activation, slope};
pub use norm_weight::NormBuffers;
pub use packed::PackedConfig;
pub use pipelined::PipelinedConfig;
pub use problem::{Batches, InvalidMatmul, Layout, MatmulProblem, Operand, Precision};
pub use subgroup::SubgroupConfig;
pub use tma::TmaConfig;
pub use window::{Reading, Window};
pub use workgroup::WorkgroupConfig;

pub(crate) use config::spread;
pub(crate) use dims::{Dims, block_of};
pub(crate) use epilogue::{Columns, Finish, FinishLaunch};
pub(crate) use gemv::MAX_NORMED_ROWS;
pub(crate) use norm_weight::{NormWeight, NormWeightLaunch, weight_pair};
pub(crate) use path::{IN_FLIGHT, Path, plane_inst};
pub(crate) use window::{Corner, Gather, GatherLaunch, Tap};

use crate::elem::elem;
use crate::launch::launch;
use kernel::Loop;
use mma::Maps;

/// The matmul kernel family.
pub struct Matmul;

impl Matmul {
    /// Returns true if the problem has a norm and a path of the device applies it. Otherwise the
    /// norm needs a launch of its own.
    pub fn takes_norm(arch: &ArchProfile, problem: &MatmulProblem) -> bool {
        config::takes_norm(arch, problem)
    }
}

/// Device buffers of one matmul; lhs, rhs and out hold [`MatmulProblem::extents`] elements.
#[derive(Debug, Clone)]
pub struct MatmulOperands {
    pub lhs: Handle,
    pub rhs: Handle,
    pub out: Handle,
    /// Buffers of the problem's epilogue.
    pub epilogue: EpilogueBuffers,
    /// Row offsets of a grouped problem, u32 `[groups + 1]`.
    pub rows: Option<Handle>,
    /// Buffers of the problem's norm.
    pub norm: Option<NormBuffers>,
    /// Second image of a window, whose channels follow those of lhs.
    pub second: Option<Handle>,
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

    fn baseline(arch: &ArchProfile, problem: &MatmulProblem) -> Result<MatmulConfig, Infeasible> {
        config::baseline(arch, problem)
    }

    fn operands(queue: &Queue, problem: &MatmulProblem, seed: u64) -> MatmulOperands {
        let [lhs, rhs, out] = problem.extents();
        let storage = problem.precision.storage();
        let make = |len, salt| crate::noise(queue, len, storage, 5 * seed + salt);
        MatmulOperands {
            lhs: make(lhs, 0),
            rhs: make(rhs, 1),
            out: queue.empty((out * problem.out.size()).next_multiple_of(4)),
            epilogue: EpilogueBuffers::noise(
                queue,
                problem.epilogue,
                (problem.bias_len(), storage),
                (out, problem.out),
                5 * seed + 2,
            ),
            rows: problem.grouped.then(|| queue.upload(u32::as_bytes(&problem.uneven_rows()))),
            norm: NormBuffers::noise(queue, problem.norm, (problem.k, storage), 5 * seed + 7919),
            second: problem
                .window
                .filter(|own| own.channels[1] > 0)
                .map(|own| make(own.len(problem.images(), 1) as usize, 4)),
        }
    }

    fn outputs(problem: &MatmulProblem, operands: &MatmulOperands) -> Vec<Output> {
        // Allows for two roundings of the result and two orders of summation of k terms.
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
        split_k::scratch_bytes(problem, config.splits())
    }

    fn launch(
        queue: &Queue,
        problem: &MatmulProblem,
        config: &MatmulConfig,
        operands: &MatmulOperands,
        scratch: Option<&Handle>,
    ) {
        let (arch, splits) = (queue.profile(), config.splits());
        let (plan, grid) = (config.plan(arch, problem), config.path().grid(arch, problem));
        let [lhs_len, rhs_len, out_len] = problem.extents();
        let [width_lhs, width_rhs, width_out, width_partials] = grid.widths;
        // A kernel without partial sums still binds a buffer in their place and never writes it.
        let (partials, partials_len) = match scratch {
            Some(scratch) => (scratch, out_len * splits as usize),
            None => (&operands.out, 2),
        };
        let (bias, vectors) = (problem.bias_len(), out_len / width_out);
        for slice in problem.batch_slices(arch) {
            // SAFETY: the plan matches the problem, and the handles have its extents. Every path
            // checks the edges that its tiles do not divide.
            unsafe {
                let maps = match &plan {
                    Loop::Tma(plan) => Some(tma::maps(problem, plan, &operands.lhs, &operands.rhs)),
                    _ => None,
                };
                launch!(
                    queue,
                    kernel::matmul,
                    grid.cubes(arch, problem, slice.count, splits),
                    grid.cube_dim(),
                    grid.address(problem),
                    width_lhs,
                    width_rhs,
                    width_out,
                    width_partials,
                    BufferArg::from_raw_parts(operands.lhs.clone(), lhs_len / width_lhs),
                    BufferArg::from_raw_parts(operands.rhs.clone(), rhs_len / width_rhs),
                    BufferArg::from_raw_parts(operands.out.clone(), out_len / width_out),
                    BufferArg::from_raw_parts(partials.clone(), partials_len / width_partials),
                    ComptimeOptionArgs::<Maps>::from(maps),
                    match splits {
                        1 => FinishLaunch::from_buffers(
                            problem.epilogue,
                            &operands.epilogue,
                            bias,
                            vectors
                        ),
                        // The reduction launch applies the epilogue to the sums.
                        _ => FinishLaunch::nothing(),
                    },
                    NormWeightLaunch::from_buffers(
                        problem.norm,
                        operands.norm.as_ref(),
                        problem.k,
                        width_lhs,
                    ),
                    ComptimeOptionArgs::from(problem.window.as_ref().map(|own| {
                        let second = operands.second.as_ref();
                        GatherLaunch::of(own, second, problem.images(), width_lhs)
                    })),
                    slice.dims(problem, splits, grid.part_tiles, operands.rows.as_ref()),
                    plan,
                    types(problem),
                );
            }
        }
        if let (Some(partials), true) = (scratch, splits > 1) {
            let (out, epilogue) = (&operands.out, &operands.epilogue);
            split_k::add(queue, problem, partials, splits, false, out, epilogue);
        }
    }
}

/// Element types of operands, instruction and result.
fn types(problem: &MatmulProblem) -> [ElemType; 3] {
    let precision = problem.precision;
    [elem(precision.storage()), elem(precision.instruction()), elem(problem.out)]
}
