//! C = epilogue(scale[m] · (A·Bᵀ) · scb[n] / 127 + Σ over outlying columns o of x[m, o] · B[n, o] · scb[n] / 127)
//! A: `[m, k]` and B: `[n, k]` in bytes with signs; x: `[m, k]`, what A was rounded from
//!
//! `mma.sync` of bytes, with the loop, copies and tiles of [`super::mma`]: its fragments of 16 x 32 bytes lie as those
//! of 16 x 16 halves do, so that two bytes pass for an element and only the instruction is another. Sums are i32, exact
//! up to k = 133 000, and become f32 when an item is done.
//!
//! Cost: `2·m·n·k` operations, by NVIDIA's figures at twice the rate of halves (four times that of halves with f32 sums
//! on GeForce; not measured yet), half their bytes; an outlying column costs a multiply-add a result.
//!
//! Source: Dettmers et al., "LLM.int8()" (2022).

use std::sync::Arc;

use arch::{ArchProfile, Device};
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::config::Plan;
use super::epilogue::{EpilogueBuffers, FinishCompilationArg, FinishLaunch};
use super::mma::{self, MmaPlan};
use super::{Dims, Epilogue, Finish, MatmulConfig, MatmulProblem, MmaConfig, Path};
use super::{elem, parts};

/// What sums of bytes are worth.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Worth<F: Float> {
    /// `[m]`
    pub(crate) scales: Box<[f32]>,
    /// `[n]`
    pub(crate) scb: Box<[f32]>,
    /// How many columns were left out, and which.
    pub(crate) outliers: Box<[u32]>,
    /// `[m, k]`
    pub(crate) x: Box<[F]>,
    /// Words of B.
    pub(crate) words: Box<[u32]>,
    /// Whether any column may be left out.
    #[cube(comptime)]
    pub(crate) outlying: bool,
}

/// Device buffers of one product.
pub(crate) struct BytesOperands<'a> {
    /// Bytes `[m, k]`.
    pub(crate) rounded: Handle,
    pub(crate) scales: Handle,
    pub(crate) outliers: Handle,
    pub(crate) x: &'a Handle,
    /// Bytes `[n, k]`.
    pub(crate) codes: &'a Handle,
    pub(crate) scb: &'a Handle,
    pub(crate) out: &'a Handle,
    pub(crate) epilogue: &'a EpilogueBuffers,
    /// Room for the sums of several parts.
    pub(crate) partials: Option<&'a Handle>,
}

/// The plan of a product whose problem counts two bytes as an element.
fn plan(arch: &ArchProfile, pairs: &MatmulProblem, c: MmaConfig) -> (Plan, MmaPlan) {
    let plan = Plan::new(arch, pairs, &MatmulConfig::Mma(c));
    let Path::Mma(mma) = plan.path else { unreachable!("the path is the config's") };
    (plan, MmaPlan { bytes: true, ..mma })
}

/// Epilogue of the product's own launch.
fn own(pairs: &MatmulProblem, parts: u32) -> Epilogue {
    if parts == 1 { pairs.epilogue } else { Epilogue::default() }
}

pub(crate) fn programs(
    arch: &ArchProfile,
    pairs: &MatmulProblem,
    c: MmaConfig,
    outlying: bool,
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
) -> Vec<Box<dyn CubeKernel>> {
    let (plan, mma) = plan(arch, pairs, c);
    let address = plan.address(pairs);
    let settings = KernelSettings::new(plan.cube_dim().into(), ExecutionMode::Unchecked, address);
    let buffer = || BufferCompilationArg { inplace: None };
    let [width_lhs, width_rhs, width_out, width_partials] = plan.widths;
    let mut all: Vec<Box<dyn CubeKernel>> = vec![Box::new(multiply_bytes::MultiplyBytes::new(
        settings,
        properties.clone(),
        target.clone(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        FinishCompilationArg::of(own(pairs, c.parts)),
        WorthCompilationArg {
            scales: buffer(),
            scb: buffer(),
            outliers: buffer(),
            x: buffer(),
            words: buffer(),
            outlying,
        },
        Dims::compiled(false),
        width_lhs,
        width_rhs,
        width_out,
        width_partials,
        mma,
        elem(pairs.out),
    ))];
    if c.parts > 1 {
        all.push(parts::program(pairs, c.parts, false, properties, target));
    }
    all
}

pub(crate) fn launch(
    device: &Device,
    pairs: &MatmulProblem,
    c: MmaConfig,
    outlying: bool,
    operands: &BytesOperands<'_>,
) {
    let (plan, mma) = plan(device.profile(), pairs, c);
    let [lhs_len, rhs_len, out_len] = pairs.extents();
    let [width_lhs, width_rhs, width_out, width_partials] = plan.widths;
    // A kernel without partial sums still binds a buffer in their place, and never writes it.
    let (partials, partials_len) = match operands.partials {
        Some(partials) if c.parts > 1 => (partials, out_len * c.parts as usize),
        _ => (operands.out, 2),
    };
    let epilogue = operands.epilogue;
    let finish = match c.parts {
        1 => FinishLaunch::of(pairs.epilogue, epilogue, pairs.bias_len(), out_len / width_out),
        _ => FinishLaunch::nothing(),
    };
    let (m, n, k) = (pairs.m as usize, pairs.n as usize, pairs.k as usize * 2);
    let outliers = if outlying { k + 1 } else { 1 };
    let slices = pairs.batch_slices(device.profile().backend);
    let [slice] = &slices[..] else { unreachable!("one batch is one launch") };
    // SAFETY: the extents are the problem's, whose elements are two bytes; the kernel checks the edges that
    // `plan.exact` does not rule out.
    unsafe {
        multiply_bytes::launch_unchecked(
            device.client(),
            plan.cubes(pairs, slice.count, c.parts),
            plan.cube_dim(),
            plan.address(pairs),
            width_lhs,
            width_rhs,
            width_out,
            width_partials,
            BufferArg::from_raw_parts(operands.rounded.clone(), lhs_len / width_lhs),
            BufferArg::from_raw_parts(operands.codes.clone(), rhs_len / width_rhs),
            BufferArg::from_raw_parts(operands.out.clone(), out_len / width_out),
            BufferArg::from_raw_parts(partials.clone(), partials_len / width_partials),
            finish,
            WorthLaunch::new(
                BufferArg::from_raw_parts(operands.scales.clone(), m),
                BufferArg::from_raw_parts(operands.scb.clone(), n),
                BufferArg::from_raw_parts(operands.outliers.clone(), outliers),
                BufferArg::from_raw_parts(operands.x.clone(), m * k),
                BufferArg::from_raw_parts(operands.codes.clone(), n * k / 4),
                outlying,
            ),
            slice.dims(pairs, c.parts, plan.part_tiles, None),
            mma,
            elem(pairs.out),
        );
    }
    if let (Some(partials), true) = (operands.partials, c.parts > 1) {
        parts::add(device, pairs, partials, c.parts, false, operands.out, epilogue);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
fn multiply_bytes<F: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<F, NO>],
    partials: &mut [Vector<f32, NP>],
    finish: Finish<F, F, NO>,
    worth: Worth<F>,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
    #[define(F)] _dtype: ElemType,
) {
    let worth = ComptimeOption::<Worth<F>>::new_Some(worth);
    mma::multiply::<F, F, F, NL, NR, NO, NP>(lhs, rhs, out, partials, &finish, &worth, dims, plan);
}
