//! C = round(epilogue(sum over parts of P[part]))    P: `[parts, batch, m, n]` in f32
//!
//! The end of a matmul whose k was cut into parts so that more cubes had work. Parts are added in
//! their order, so the result does not depend on which cube was first.
//!
//! Cost: every partial sum read once; for `parts` parts `4·parts` bytes a result.

use std::sync::Arc;

use arch::Device;
use cubecl::ir::{DeviceProperties, ElemType, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::epilogue::{Columns, Finish, FinishCompilationArg, FinishLaunch};
use super::{MatmulOperands, MatmulProblem, elem};

/// Units of a cube: small, because few results must still reach many processors.
const UNITS: u32 = 64;

/// The widest vector of results, and the width of indices.
fn shape(problem: &MatmulProblem, parts: u32) -> (usize, AddressType) {
    let width = [4, 2, 1].into_iter().find(|w| problem.n % w == 0).unwrap_or(1) as usize;
    let all = problem.extents()[2] * parts as usize;
    (width, if all > u32::MAX as usize { AddressType::U64 } else { AddressType::U32 })
}

/// The program of [`add`].
pub(crate) fn program(
    problem: &MatmulProblem,
    parts: u32,
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let (width, address) = shape(problem, parts);
    let dim = CubeDim::new_1d(UNITS);
    let settings = KernelSettings::new(dim.into(), ExecutionMode::Unchecked, address);
    let buffer = || BufferCompilationArg { inplace: None };
    Box::new(add_parts::AddParts::new(
        settings,
        properties.clone(),
        target.clone(),
        buffer(),
        buffer(),
        FinishCompilationArg::of(problem.epilogue),
        (),
        (),
        width,
        [elem(problem.precision.storage()), elem(problem.out)],
    ))
}

/// Enqueues the sum over `parts` of all results of `problem`.
pub(crate) fn add(
    device: &Device,
    problem: &MatmulProblem,
    operands: &MatmulOperands,
    partials: &Handle,
    parts: u32,
) {
    let len = problem.extents()[2];
    let (width, address) = shape(problem, parts);
    let vectors = len / width;
    let cubes = vectors.div_ceil(UNITS as usize);
    let cubes = CubeCount::Static(cubes.min(1 << 20) as u32, 1, 1);
    let all = len * parts as usize;
    // SAFETY: `partials` holds `parts` times the results, and the kernel checks its index.
    unsafe {
        add_parts::launch_unchecked(
            device.client(),
            cubes,
            CubeDim::new_1d(UNITS),
            address,
            width,
            BufferArg::from_raw_parts(partials.clone(), all / width),
            BufferArg::from_raw_parts(operands.out.clone(), vectors),
            FinishLaunch::of(problem, operands, width),
            problem.n,
            parts,
            [elem(problem.precision.storage()), elem(problem.out)],
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_parts<F: Float, E: Float, N: Size>(
    partials: &[Vector<f32, N>],
    out: &mut [Vector<E, N>],
    finish: Finish<F, E, N>,
    columns: u32,
    parts: u32,
    #[define(F, E)] _dtypes: [ElemType; 2],
) {
    let len = out.len();
    let mut i = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    while i < len {
        let mut sum = partials[i];
        for part in 1..parts {
            sum += partials[part as usize * len + i];
        }
        let col = (i * N::value() % columns as usize) as u32;
        let columns = Columns { first: 0usize.runtime(), count: columns };
        let value = finish.activate::<N>(sum, col, &columns);
        out[i] = Vector::cast_from(finish.join::<N>(value, i));
        i += stride;
    }
}
