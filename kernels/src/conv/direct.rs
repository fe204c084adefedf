//! Convolutions of a few filters per group: a unit computes one result.
//!
//! | loop | hardware |
//! |---|---|
//! | results, filters fastest | units of all cubes |
//! | taps, channels of the group | multiply-adds of a unit, in f32 |
//!
//! Neighbouring units read neighbouring channels of a depthwise convolution. The caches serve the taps that windows share.

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::{Infeasible, Queue};

use super::{ConvOperands, ConvProblem};
use crate::elem::elem;
use crate::fits::{lacks, limits, shape};
use crate::launch::{index_width, launch};
use crate::matmul::{Columns, Finish, FinishLaunch, Gather, GatherLaunch, Precision};

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DirectConfig {
    /// Units of a cube.
    pub units: u32,
    /// Results of a unit, as far apart as there are units.
    pub results: u32,
}

impl DirectConfig {
    pub(super) const BASELINE: Self = Self { units: 64, results: 1 };

    pub(super) fn candidates(arch: &ArchProfile, problem: &ConvProblem) -> Vec<Self> {
        let all = match arch.cores() {
            Some(_) => [(1, 64), (1, 1024), (1, 16)],
            None => [(256, 1), (128, 1), (64, 1)],
        };
        let all = all.map(|(units, results)| Self { units, results });
        all.into_iter().filter(|config| config.check(arch, problem).is_ok()).collect()
    }

    pub(super) fn check(
        &self,
        arch: &ArchProfile,
        problem: &ConvProblem,
    ) -> Result<(), Infeasible> {
        let (Precision::F32 | Precision::F16 | Precision::Bf16) = problem.precision else {
            return Err(lacks("matrix instructions for a precision below f32"));
        };
        if let Some(dtype) = [problem.precision.storage(), problem.out]
            .into_iter()
            .find(|dtype| !arch.dtypes.contains(dtype))
        {
            return Err(lacks(format!("{dtype} buffers")));
        }
        if !(1..=1 << 20).contains(&self.results) || !(1..=1024).contains(&self.units) {
            return Err(shape("units", self.units, "expected 1 to 1024 units"));
        }
        if !problem.window().packs() {
            return Err(lacks("positions of this image in 16 bits"));
        }
        limits(arch, self.units, 0)
    }
}

pub(super) fn launch(
    queue: &Queue,
    problem: &ConvProblem,
    config: &DirectConfig,
    operands: &ConvOperands,
) {
    let [x, second, filters, out] = problem.lens().map(|len| len as usize);
    let window = problem.window();
    let cubes = (out as u64).div_ceil(u64::from(config.units) * u64::from(config.results));
    let [max, _] = queue.profile().max_cubes();
    let lines = cubes.div_ceil(max.into());
    let storage = problem.precision.storage();
    // SAFETY: the handles have the lengths of the problem, and the kernel checks its index.
    unsafe {
        launch!(
            queue,
            convolve,
            CubeCount::Static(cubes.div_ceil(lines) as u32, lines as u32, 1),
            CubeDim::new_1d(config.units),
            index_width([x, second, filters, out].into_iter().max().unwrap_or(0) as u64),
            1,
            BufferArg::from_raw_parts(operands.x.clone(), x),
            BufferArg::from_raw_parts(operands.filters.clone(), filters),
            BufferArg::from_raw_parts(operands.out.clone(), out),
            FinishLaunch::from_buffers(
                problem.epilogue,
                &operands.epilogue,
                problem.filters as usize,
                out
            ),
            GatherLaunch::of(&window, operands.second.as_ref(), problem.batch, 1),
            out,
            problem.filters,
            problem.filters / problem.groups,
            window.taps[0] * window.taps[1],
            config.results,
            [elem(storage), elem(problem.out)],
        );
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
fn convolve<F: Float, E: Float, N: Size>(
    x: &[Vector<F, N>],
    filters: &[Vector<F, N>],
    out: &mut [Vector<E, N>],
    finish: Finish<F, E, N>,
    gather: Gather<F, N>,
    len: usize,
    count: u32,
    per_group: u32,
    taps: u32,
    results: u32,
    #[define(F, E)] _dtypes: [ElemType; 2],
) {
    let columns = Columns { first: 0usize.runtime(), count };
    let (cube, all) = (CUBE_POS, CUBE_COUNT * CUBE_DIM as usize);
    let mut at = cube * CUBE_DIM as usize + UNIT_POS as usize;
    for _ in 0..results {
        if at < len {
            let (pixel, filter) = ((at / count as usize) as u32, (at % count as usize) as u32);
            let corner = gather.corner(pixel, pixel + 1);
            let start = (filter / per_group * gather.channels) as usize;
            let depth = gather.channels;
            let mut from = filter as usize * (taps * depth) as usize;
            let mut sum = 0.0f32;
            let mut tap = gather.tap(0u32);
            for _ in 0..taps {
                let pixel = gather.pixel(&corner, &tap);
                for channel in 0..depth {
                    let value = gather.vector(x, start, pixel, channel);
                    let weight = f32::cast_from(filters[from + channel as usize].extract(0usize));
                    sum = fma(f32::cast_from(value.extract(0usize)), weight, sum);
                }
                from += depth as usize;
                let next = gather.after(&tap, depth);
                tap.row = next.row;
                tap.col = next.col;
            }
            let value = finish.one(sum, at, filter, &columns);
            out[at] = Vector::new(E::cast_from(value));
        }
        at += all;
    }
}
