//! Convolutions of a few filters per group: multiply-adds in f32. Each unit works alone.
//!
//! | loop | depthwise | other |
//! |---|---|---|
//! | units | 16 bytes of channels of some neighbouring pixels | some results, all units apart |
//! | of a unit | taps, pixels | taps, channels of the group |
//!
//! Neighbouring units read neighbouring channels. The caches serve the taps that windows share. A depthwise unit reads a filter
//! once for all of its pixels.
//!
//! | 64 x 64 pixels of 320 channels, 3 x 3 taps, f16 (H200 as RTX 4090; a copy takes 1.3 us) | us |
//! |---|---|
//! | a unit for each result | 32.9 |
//! | 16 bytes of channels of four pixels a unit | 10.6 |
//! | cuDNN, same call | 6.6 |

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::{Infeasible, Queue};

use super::{ConvOperands, ConvProblem};
use crate::elem::elem;
use crate::fits::{lacks, limits, shape};
use crate::launch::{index_width, launch};
use crate::matmul::{Columns, Corner, Finish, FinishLaunch, Gather, GatherLaunch, Precision, Tap};

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DirectConfig {
    /// Units of a cube.
    pub units: u32,
    /// Results of a unit; neighbouring pixels of a depthwise convolution, else as far apart as there are units.
    pub results: u32,
}

impl DirectConfig {
    pub(super) const BASELINE: Self = Self { units: 64, results: 1 };

    pub(super) fn candidates(arch: &ArchProfile, problem: &ConvProblem) -> Vec<Self> {
        let all: &[_] = match arch.cores() {
            Some(_) => &[(1, 64), (1, 1024), (1, 16)],
            None if is_depthwise(problem) => {
                &[(128, 4), (128, 2), (128, 8), (256, 4), (64, 4), (128, 1)]
            }
            None => &[(256, 1), (128, 1), (64, 1)],
        };
        let all = all.iter().map(|(units, results)| Self { units: *units, results: *results });
        all.filter(|config| config.check(arch, problem).is_ok()).collect()
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

/// Returns true if each filter sees one channel, whose result is in its place.
fn is_depthwise(problem: &ConvProblem) -> bool {
    problem.groups == problem.channels[0] && problem.groups == problem.filters
}

/// Returns the channels of a vector of a depthwise convolution.
fn lanes(problem: &ConvProblem) -> u32 {
    let most = 16 / problem.precision.storage().size() as u32;
    let divides = |lanes: &u32| problem.channels[0] % lanes == 0;
    if is_depthwise(problem) { [most, 4, 2, 1].into_iter().find(divides).unwrap_or(1) } else { 1 }
}

pub(super) fn launch(
    queue: &Queue,
    problem: &ConvProblem,
    config: &DirectConfig,
    operands: &ConvOperands,
) {
    let [x, second, filters, out] = problem.lens().map(|len| len as usize);
    let window = problem.window();
    let (lanes, storage) = (lanes(problem) as usize, problem.precision.storage());
    let cubes = |units: usize| {
        let cubes = (units as u64).div_ceil(config.units.into());
        let [max, _] = queue.profile().max_cubes();
        let lines = cubes.div_ceil(max.into());
        CubeCount::Static(cubes.div_ceil(lines) as u32, lines as u32, 1)
    };
    if lanes > 1 {
        let strips = out / problem.filters as usize / window.output[1] as usize
            * window.output[1].div_ceil(config.results) as usize;
        let all = strips * (problem.filters as usize / lanes);
        // SAFETY: the handles have the lengths of the problem, and the kernel checks its index.
        unsafe {
            launch!(
                queue,
                depthwise,
                cubes(all),
                CubeDim::new_1d(config.units),
                index_width([x, filters, out].into_iter().max().unwrap_or(0) as u64),
                lanes,
                BufferArg::from_raw_parts(operands.x.clone(), x / lanes),
                BufferArg::from_raw_parts(operands.filters.clone(), filters),
                BufferArg::from_raw_parts(operands.out.clone(), out / lanes),
                FinishLaunch::from_buffers(
                    problem.epilogue,
                    &operands.epilogue,
                    problem.bias_len(),
                    out / lanes
                ),
                GatherLaunch::of(&window, None, problem.batch, lanes),
                all,
                problem.filters,
                window.output[1],
                config.results,
                [elem(storage), elem(problem.out)],
            );
        }
        return;
    }
    // SAFETY: the handles have the lengths of the problem, and the kernel checks its index.
    unsafe {
        launch!(
            queue,
            convolve,
            cubes(out.div_ceil(config.results as usize)),
            CubeDim::new_1d(config.units),
            index_width([x, second, filters, out].into_iter().max().unwrap_or(0) as u64),
            1,
            BufferArg::from_raw_parts(operands.x.clone(), x),
            BufferArg::from_raw_parts(operands.filters.clone(), filters),
            BufferArg::from_raw_parts(operands.out.clone(), out),
            FinishLaunch::from_buffers(
                problem.epilogue,
                &operands.epilogue,
                problem.bias_len(),
                out
            ),
            GatherLaunch::of(&window, operands.second.as_ref(), problem.batch, 1),
            out,
            problem.filters,
            problem.filters / problem.groups,
            window.taps[0] * window.taps[1],
            config.results,
            problem.bias_pitch,
            problem.bias_pitch > 0,
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
    bias_pitch: u32,
    #[comptime] bias_per_image: bool,
    #[define(F, E)] _dtypes: [ElemType; 2],
) {
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
                let found = gather.pixel(&corner, &tap);
                for channel in 0..depth {
                    let value = gather.vector(x, start, found, channel);
                    let weight = f32::cast_from(filters[from + channel as usize].extract(0usize));
                    sum = fma(f32::cast_from(value.extract(0usize)), weight, sum);
                }
                from += depth as usize;
                let next = gather.after(&tap, depth);
                tap.row = next.row;
                tap.col = next.col;
            }
            let mut first = 0usize.runtime();
            if comptime!(bias_per_image) {
                first = (pixel / gather.windows * bias_pitch) as usize;
            }
            let columns = Columns { first, count };
            let value = finish.one(sum, at, filter, &columns);
            out[at] = Vector::new(E::cast_from(value));
        }
        at += all;
    }
}

/// Computes vectors of channels at `pixels` neighbouring pixels of a row.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn depthwise<F: Float, E: Float, N: Size>(
    x: &[Vector<F, N>],
    filters: &[F],
    out: &mut [Vector<E, N>],
    finish: Finish<F, E, N>,
    gather: Gather<F, N>,
    len: usize,
    count: u32,
    across: u32,
    #[comptime] pixels: u32,
    #[define(F, E)] _dtypes: [ElemType; 2],
) {
    let at = CUBE_POS * CUBE_DIM as usize + UNIT_POS as usize;
    if at < len {
        let lanes = N::value();
        let vectors = count as usize / lanes;
        let (strip, vector) = (at / vectors, at % vectors);
        let strips = across.div_ceil(pixels) as usize;
        let channel = (vector * lanes) as u32;
        let first = (strip % strips) as u32 * pixels;
        let row = (strip / strips) as u32 * across + first;
        let end = row + min(pixels, across - first);
        let mut corners = Sequence::<Corner>::new();
        let mut sums = Array::<Vector<f32, N>>::new(comptime!(pixels as usize));
        #[unroll]
        for i in 0..pixels {
            corners.push(gather.corner(row + i, end));
            sums[comptime!(i as usize)] = Vector::new(0.0f32);
        }
        let taps = gather.rows * gather.cols;
        for place in 0..taps {
            let tap = Tap { row: place / gather.cols, col: place % gather.cols, channel };
            let mut weight = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for e in 0..lanes {
                let filter = (channel as usize + e) * taps as usize + place as usize;
                weight.insert(e, f32::cast_from(filters[filter]));
            }
            #[unroll]
            for i in 0..pixels {
                let pixel = gather.pixel(corners.index(comptime!(i as usize)), &tap);
                let value = Vector::cast_from(gather.vector(x, 0usize, pixel, channel));
                let at = comptime!(i as usize);
                sums[at] = fma(value, weight, sums[at]);
            }
        }
        #[unroll]
        for i in 0..pixels {
            let row = row + i;
            if row < end {
                let to = row as usize * vectors + vector;
                let columns = Columns { first: 0usize.runtime(), count };
                let value = finish.vector::<N>(sums[comptime!(i as usize)], to, channel, &columns);
                out[to] = Vector::cast_from(value);
            }
        }
    }
}
