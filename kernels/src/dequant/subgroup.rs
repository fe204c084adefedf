//! y = x · wᵀ for a few rows of x and a quantised weight, through Vulkan. Codes are decoded into a tile in
//! shared memory, from which plane matrices are loaded ([`cooperative`](crate::cooperative)).
//!
//! | loop                                              | level                                        |
//! |---------------------------------------------------|----------------------------------------------|
//! | `(tile_m, columns·planes)` blocks of y, split-k   | cubes                                        |
//! | 64 of k                                           | a tile of x and one of the weight, in shared memory |
//! | `columns` of y                                    | planes, accumulators in registers            |
//! | `kk` in steps of the instruction                  | matrices of 16 x 16                          |
//!
//! A unit decodes 16 bytes of a row at a time. The next tile is read while the current one is multiplied.
//!
//! With a gated pair of matrices, a plane has equally many columns of each, so that a column and its gate lie
//! in the same plane.
//!
//! Cost: the codes of the weight once for every `tile_m` rows of x, decoding, and matmul.
//!
//! The weight's [`Dequantize`] implementation decodes. The ladders are in `nf4/matmul/subgroup.rs` and
//! `int8/subgroup.rs`.

use arch::ArchProfile;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::Dequantize;
use crate::cooperative::{self, Corner, Tile, U32x4, put, read, zeros};
use crate::fits::{lacks, limits, shape};
use crate::matmul::{Columns, Finish, IN_FLIGHT, Precision, plane_inst};
use crate::round::rounded;

/// Tile sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SubgroupConfig {
    /// Rows of x that a cube processes.
    pub tile_m: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Rows of the weight that a plane processes.
    pub columns: u32,
    /// Number of split-k parts; each part has its own cubes.
    pub parts: u32,
}

/// Size of a tile along k.
pub(crate) const STEP: u32 = 64;
/// Words of a 16 x 16 result.
const RESULT: u32 = 16 * 16 / 4;

impl SubgroupConfig {
    /// Rows of the weight that a cube processes.
    pub(crate) const fn tile_n(self) -> u32 {
        self.planes * self.columns
    }

    /// Steps of each part except the last.
    pub(crate) const fn part_steps(self, k: u32) -> u32 {
        (k / STEP).div_ceil(self.parts)
    }

    const fn tiles(self, units: u32, exact: bool) -> [Tile; 2] {
        [
            Tile { lines: self.tile_m, line: STEP, units, exact },
            Tile { lines: self.tile_n(), line: STEP, units, exact: true },
        ]
    }

    pub(crate) const fn shared_bytes(self) -> u32 {
        let [x, weight] = self.tiles(1, true);
        x.bytes() + weight.bytes() + 16 * 4
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SubgroupPlan {
    /// Bits of a code.
    pub(crate) bits: u32,
    /// Config with one part, so that instances of different parts differ only in `partial`.
    pub(crate) config: SubgroupConfig,
    /// Units of a plane.
    pub(crate) plane: u32,
    /// Depth of the instruction, whose result is 16 x 16.
    pub(crate) inst_k: u32,
    /// True if the kernel rounds weights and results to bf16 itself: conversion through Vulkan truncates.
    pub(crate) bf16: bool,
    /// True if every tile of x is full.
    pub(crate) exact: bool,
    /// True if the first half of a plane's columns gates the second half.
    pub(crate) glu: bool,
    /// True if sums go to the workspace.
    pub(crate) partial: bool,
}

impl SubgroupPlan {
    pub(crate) const fn units(self) -> u32 {
        self.config.planes * self.plane
    }

    /// Vectors of codes in a line of a tile.
    const fn per_line(self) -> u32 {
        STEP * self.bits / 128
    }

    /// Vectors of codes in a tile.
    const fn vectors(self) -> u32 {
        self.config.tile_n() * self.per_line()
    }

    /// Vectors of codes that a unit decodes.
    const fn copies(self) -> usize {
        self.vectors().div_ceil(self.units()) as usize
    }

    /// Columns of y that a plane computes.
    const fn wide(self) -> u32 {
        if self.glu { self.config.columns / 2 } else { self.config.columns }
    }
}

/// Sizes of one launch.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Dims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    /// Steps of each part of k except the last.
    pub(crate) part_steps: u32,
}

#[cube]
pub(crate) fn subgroup_matmul<W: Dequantize, F: Float, NX: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &W,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] plan: SubgroupPlan,
) {
    let SubgroupConfig { tile_m, planes, columns, .. } = comptime!(plan.config);
    let (frags_m, frags_n) = comptime!((tile_m as usize / 16, columns as usize / 16));
    let depth = comptime!(plan.inst_k as usize);
    let tiles = comptime!(plan.config.tiles(plan.units(), plan.exact));
    let (tile_x, tile_w) = comptime!((tiles[0], tiles[1]));
    let mut shared_x =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile_x.vectors() as usize), 128usize);
    // The tile is reused for the results, which are smaller.
    let mut shared_w =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile_w.vectors() as usize), 128usize);
    let mut codebook = Shared::<[f32]>::new_slice(16usize);

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * plan.plane + lane;
    W::fill(weight, &mut codebook, unit);
    // Neighbouring cubes share columns of y, and so read the same codes.
    let rows = dims.m.div_ceil(tile_m);
    let (block_m, block_n) = (CUBE_POS_X % rows, CUBE_POS_X / rows);
    let (row0, first_col) = (block_m * tile_m, block_n * comptime!(planes * plan.wide()));

    let mut acc = Sequence::<Matrix<f32>>::new(); // [tile_m / 16, columns / 16]
    #[unroll]
    for _ in 0..comptime!(frags_m * frags_n) {
        acc.push(zeros(depth));
    }

    let first = CUBE_POS_Y * dims.part_steps;
    let end = min(dims.k / STEP, first + dims.part_steps);
    let mut at = Corner {
        start: 0usize.runtime(),
        stride: dims.k as usize,
        line: row0,
        lines: dims.m,
        element: first * STEP,
        elements: dims.k,
    };
    let mut next_x = Array::<U32x4>::new(comptime!(tile_x.copies()));
    let mut codes = Array::<u32>::new(comptime!(4 * plan.copies()));
    let mut scales = Array::<f32>::new(comptime!(plan.copies()));
    read::<F, NX>(x, &mut next_x, &at, unit, tile_x);
    read_codes::<W>(weight, &mut codes, &mut scales, first, first_col, unit, dims, plan);

    let mut step = first;
    while step < end {
        sync_cube();
        put(&mut shared_x, &next_x, unit, tile_x);
        decode::<W, F>(&mut shared_w, &codes, &scales, &codebook, unit, tile_w, plan);
        sync_cube();
        step += 1;
        // The read after the last tile is unused.
        let ahead = min(step, end - 1);
        at.element = ahead * STEP;
        read::<F, NX>(x, &mut next_x, &at, unit, tile_x);
        read_codes::<W>(weight, &mut codes, &mut scales, ahead, first_col, unit, dims, plan);
        #[unroll]
        for iteration in 0..comptime!(STEP / plan.inst_k) {
            let kk = comptime!(iteration * plan.inst_k).runtime();
            let mut a = Sequence::<Matrix<F>>::new();
            #[unroll]
            for i in 0..frags_m {
                let row = comptime!(16 * i as u32).runtime();
                a.push(cooperative::load::<F>(
                    &shared_x,
                    row,
                    kk,
                    MatrixIdent::A,
                    MatrixLayout::RowMajor,
                    depth,
                    tile_x,
                ));
            }
            #[unroll]
            for j in 0..frags_n {
                let col = plane * columns + comptime!(16 * j as u32);
                let b = cooperative::load::<F>(
                    &shared_w,
                    col,
                    kk,
                    MatrixIdent::B,
                    MatrixLayout::ColMajor,
                    depth,
                    tile_w,
                );
                #[unroll]
                for i in 0..frags_m {
                    let c = acc.index(comptime!(i * frags_n + j));
                    cmma::execute(a.index(i), &b, c, c);
                }
            }
        }
    }

    // All planes have multiplied their last tile.
    sync_cube();
    let own = plane * comptime!(RESULT * frags_n as u32);
    let col0 = first_col + plane * comptime!(plan.wide());
    #[unroll]
    for i in 0..frags_m {
        #[unroll]
        for j in 0..frags_n {
            let from = own + comptime!(RESULT * j as u32);
            cmma::store(
                &mut shared_w[from as usize..(from + RESULT) as usize],
                acc.index(comptime!(i * frags_n + j)),
                16,
                MatrixLayout::RowMajor,
            );
        }
        sync_plane();
        let row0 = row0 + comptime!(16 * i as u32);
        #[unroll]
        for j in 0..comptime!(plan.wide() as usize / 16) {
            let col0 = col0 + comptime!(16 * j as u32);
            let from = own + comptime!(RESULT * j as u32);
            let mut word = lane;
            while word < RESULT {
                let (row, col) = (row0 + word / 4, col0 + word % 4 * 4);
                if row < dims.m {
                    let sums = shared_w[(from + word) as usize];
                    let far = from + word + comptime!(RESULT * plan.wide() / 16);
                    #[unroll]
                    for e in 0..4usize {
                        let sum = f32::reinterpret(sums.extract(e));
                        let col = col + comptime!(e as u32);
                        if comptime!(plan.glu) {
                            let other = f32::reinterpret(shared_w[far as usize].extract(e));
                            let half = dims.n / 2;
                            let sums = (
                                W::dequantize(weight, sum, min(col, half - 1), dims.k),
                                W::dequantize(weight, other, min(half + col, dims.n - 1), dims.k),
                            );
                            store_both(out, partials, finish, sums, row, col, dims, plan);
                        } else {
                            let sum = W::dequantize(weight, sum, min(col, dims.n - 1), dims.k);
                            store_one(out, partials, finish, sum, row, col, dims, plan);
                        }
                    }
                }
                word += plan.plane;
            }
        }
        sync_plane();
    }
}

/// Returns the row of the weight for line `line` of a cube's tile. Past the end it is the last row.
#[cube]
fn row_of(line: u32, first_col: u32, dims: &Dims, #[comptime] plan: SubgroupPlan) -> u32 {
    if comptime!(plan.glu) {
        let (columns, wide) = comptime!((plan.config.columns, plan.wide()));
        let (plane, within) = (line / columns, line % columns);
        let half = dims.n / 2;
        min(first_col + plane * wide + within % wide, half - 1) + within / wide * half
    } else {
        min(first_col + line, dims.n - 1)
    }
}

/// Reads a unit's codes of step `step`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one weight, one place")]
fn read_codes<W: Dequantize>(
    weight: &W,
    codes: &mut Array<u32>,
    scales: &mut Array<f32>,
    step: u32,
    first_col: u32,
    unit: u32,
    dims: &Dims,
    #[comptime] plan: SubgroupPlan,
) {
    let per_line = comptime!(plan.per_line());
    #[unroll]
    for i in 0..comptime!(plan.copies()) {
        // Units without a vector repeat the last one and do not store it.
        let vector = min(unit + comptime!(i as u32 * plan.units()), comptime!(plan.vectors() - 1));
        let row = row_of(vector / per_line, first_col, dims, plan);
        W::read(weight, codes, scales, row, step * per_line + vector % per_line, dims.k, i);
    }
}

/// Dequantises a unit's codes into the tile.
#[cube]
fn decode<W: Dequantize, F: Float>(
    shared: &mut [U32x4],
    codes: &Array<u32>,
    scales: &Array<f32>,
    codebook: &[f32],
    unit: u32,
    #[comptime] tile: Tile,
    #[comptime] plan: SubgroupPlan,
) {
    let per_line = comptime!(plan.per_line());
    #[unroll]
    for i in 0..comptime!(plan.copies()) {
        let vector = unit + comptime!(i as u32 * plan.units());
        if comptime!(plan.vectors() % plan.units() == 0) || vector < comptime!(plan.vectors()) {
            // Words of 16-bit halves per vector of codes.
            let words = comptime!(16 / plan.bits);
            let to = vector / per_line * comptime!(tile.pitch()) + vector % per_line * words;
            W::decode::<F>(shared, to, codes, scales, codebook, i, plan.bf16);
        }
    }
}

/// Stores one sum to the workspace, or its result to `out`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a sum and its place")]
fn store_one<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    sum: f32,
    row: u32,
    col: u32,
    dims: &Dims,
    #[comptime] plan: SubgroupPlan,
) {
    if col < dims.n {
        let to = row as usize * dims.n as usize + col as usize;
        if comptime!(plan.partial) {
            partials[(CUBE_POS_Y * dims.m) as usize * dims.n as usize + to] = sum;
        } else {
            let columns = Columns { first: 0usize.runtime(), count: dims.n };
            let value = finish.one(sum, to, col, &columns);
            out[to] = Vector::new(rounded::<F>(value, plan.bf16));
        }
    }
}

/// Stores two sums to the workspace, or to `out` the result in which the first gates the second.
#[cube]
#[expect(clippy::too_many_arguments, reason = "two sums and their place")]
fn store_both<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    sums: (f32, f32),
    row: u32,
    col: u32,
    dims: &Dims,
    #[comptime] plan: SubgroupPlan,
) {
    let half = dims.n / 2;
    if col < half {
        if comptime!(plan.partial) {
            let line = (CUBE_POS_Y * dims.m + row) as usize * dims.n as usize;
            partials[line + col as usize] = sums.0;
            partials[line + (half + col) as usize] = sums.1;
        } else {
            let to = row as usize * half as usize + col as usize;
            let columns = Columns { first: 0usize.runtime(), count: dims.n };
            let value = finish.one_of_two(sums, to, (col, half + col), &columns);
            out[to] = Vector::new(rounded::<F>(value, plan.bf16));
        }
    }
}

/// Returns the configs for this number of rows that pass [`check`]. Split-k fills the card with cubes once,
/// or twice.
pub(crate) fn candidates(arch: &ArchProfile, p: &SubgroupProblem) -> Vec<SubgroupConfig> {
    let tile_m = p.m.min(64).next_multiple_of(16);
    let steps = u64::from(p.k / STEP);
    let mut found = Vec::new();
    if !(MIN_ROWS..=MAX_ROWS).contains(&p.m) {
        return found;
    }
    for (planes, columns) in [(4, 16), (8, 16), (4, 32), (8, 32), (2, 32)] {
        let one = SubgroupConfig { tile_m, planes, columns, parts: 1 };
        for wish in [IN_FLIGHT / p.blocks(&one), 2 * IN_FLIGHT / p.blocks(&one), 1] {
            // Parts are equal, with at least four steps each.
            let wish = wish.clamp(1, (steps / 4).max(1));
            let parts = steps.div_ceil(steps.div_ceil(wish).max(1)).max(1) as u32;
            let config = SubgroupConfig { parts, ..one };
            if !found.contains(&config) && check(arch, p, &config).is_ok() {
                found.push(config);
            }
        }
    }
    found
}

/// Minimum and maximum rows of x for this path.
const MIN_ROWS: u32 = 3;
const MAX_ROWS: u32 = 256;

/// Parameters of a matmul that this path depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SubgroupProblem {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) precision: Precision,
    /// Bits of a code.
    pub(crate) bits: u32,
    pub(crate) glu: bool,
}

impl SubgroupProblem {
    fn blocks(&self, c: &SubgroupConfig) -> u64 {
        u64::from(self.m.div_ceil(c.tile_m)) * u64::from(self.n.div_ceil(c.tile_n()))
    }

    /// Cubes and units of a launch.
    pub(crate) fn grid(&self, plan: &SubgroupPlan, c: &SubgroupConfig) -> (CubeCount, CubeDim) {
        let cubes = CubeCount::Static(self.blocks(c) as u32, c.parts, 1);
        (cubes, CubeDim::new_2d(plan.plane, c.planes))
    }
}

pub(crate) fn check(
    arch: &ArchProfile,
    p: &SubgroupProblem,
    c: &SubgroupConfig,
) -> Result<(), Infeasible> {
    if !arch.matrices_from_words() {
        return Err(lacks("subgroup cooperative matrices that load from u32 shared memory"));
    }
    if arch.plane_size.0 != arch.plane_size.1 {
        return Err(lacks("a fixed plane size"));
    }
    if p.k % STEP != 0 || arch.load_bytes < 16 {
        return Err(shape("k", p.k, "expected a multiple of 64, and a device with 16-byte loads"));
    }
    if ![16, 32, 48, 64].contains(&c.tile_m) {
        return Err(shape("tile_m", c.tile_m, "expected 16, 32, 48 or 64"));
    }
    if !(1..=16).contains(&c.planes) {
        return Err(shape("planes", c.planes, "expected 1 to 16"));
    }
    // Each of two matrices has at least 16 columns.
    let columns: &[u32] = if p.glu { &[32, 64] } else { &[16, 32, 64] };
    if !columns.contains(&c.columns) {
        return Err(shape("columns", c.columns, &format!("expected one of {columns:?}")));
    }
    if !(1..=64).contains(&c.parts) || (c.parts - 1) * c.part_steps(p.k) >= p.k / STEP {
        return Err(shape(
            "parts",
            c.parts,
            "expected 1 to 64 splits with at least one k step each",
        ));
    }
    if p.blocks(c) > 65_535 {
        return Err(shape("n", p.n, "expected at most 65535 cubes in one grid dimension"));
    }
    limits(arch, plan(arch, p, c)?.units(), c.shared_bytes())
}

pub(crate) fn plan(
    arch: &ArchProfile,
    p: &SubgroupProblem,
    c: &SubgroupConfig,
) -> Result<SubgroupPlan, Infeasible> {
    let inst = plane_inst(arch, p.precision)
        .ok_or_else(|| lacks(format!("16 x 16 subgroup {} matrices", p.precision.name())))?;
    if STEP % inst.k != 0 {
        return Err(lacks("cooperative matrices whose k divides 64"));
    }
    Ok(SubgroupPlan {
        bits: p.bits,
        config: SubgroupConfig { parts: 1, ..*c },
        plane: arch.plane_size.0,
        inst_k: inst.k,
        bf16: p.precision == Precision::Bf16,
        exact: p.m % c.tile_m == 0,
        glu: p.glu,
        partial: c.parts > 1,
    })
}
