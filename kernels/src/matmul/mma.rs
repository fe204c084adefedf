//! The tensor-core path of CUDA: `mma.sync` fed by `ldmatrix` from a ring of `cp.async` stages.
//!
//! | loop                              | level                                             |
//! |-----------------------------------|---------------------------------------------------|
//! | `(tile_m, tile_n)` blocks of C    | cubes, grouped so that a wave reuses L2           |
//! | `k0` in steps of `tile_k`         | ring of `stages` shared tiles, `stages - 1` ahead |
//! | `(plane_m, plane_n)` parts        | planes, accumulators in registers                 |
//! | `kk` in steps of the instruction  | fragments in registers                            |
//!
//! Ladder, TFLOP/s at 4096^3 bf16, B column-major / row-major, on an H200 restricted to an RTX 4090's
//! features (620 from registers alone; Burn 0.22.1 in the same run 268 / 214):
//!
//! | version                                                          | col | row |
//! |------------------------------------------------------------------|-----|-----|
//! | v1 ring of 3 stages, 128 x 128 x 32, four planes of 64 x 64      | 381 | 376 |
//! | v2 v1, fragments loaded one step ahead of the multiply (dropped) | 370 | 336 |
//! | v3 v1, addresses in vectors, fragments at constant distances     | 369 | 390 |
//!
//! v2 was predicted at 450: latency of `ldmatrix` is not what v1 waits for. v3 has 173 instructions a
//! tile where v1 has 276 (64 of them HMMA) and 168 registers a unit instead of 235. With B column-major
//! three cubes fit a processor instead of two, 1024 tiles then take three waves of 396, and the last is
//! half empty: what it gains a wave it loses at the end.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Dims, Layout, bias_at, tile_of_cube};
use crate::tile::{
    TileShape, commit_copies, copy_tile, gather_lhs, gather_rhs, lhs_lane, load_lhs, load_rhs,
    rhs_lane, wait_copies,
};

/// Tile sizes of the tensor-core path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MmaConfig {
    /// Rows, columns and depth of a cube's tile.
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Grid of planes that share the tile.
    pub planes_m: u32,
    pub planes_n: u32,
    /// Shared tiles in the ring.
    pub stages: u32,
}

impl MmaConfig {
    pub(crate) const fn units(self) -> u32 {
        32 * self.planes_m * self.planes_n
    }

    /// Rows and columns of one plane's part.
    pub(crate) const fn plane_tile(self) -> (u32, u32) {
        (self.tile_m / self.planes_m, self.tile_n / self.planes_n)
    }

    /// The shared tile of the left operand, elements of `elem` bytes.
    pub(crate) const fn lhs_tile(self, layout: Layout, elem: usize) -> TileShape {
        shared_tile(self.tile_m, self.tile_k, matches!(layout, Layout::Col), elem)
    }

    /// The shared tile of the right operand.
    pub(crate) const fn rhs_tile(self, layout: Layout, elem: usize) -> TileShape {
        shared_tile(self.tile_n, self.tile_k, matches!(layout, Layout::Row), elem)
    }

    pub(crate) const fn shared_bytes(self, elem: usize) -> u32 {
        self.stages * (self.tile_m + self.tile_n) * self.tile_k * elem as u32
    }
}

/// `[outer, k]`, or `[k, outer]` when the outer axis is the contiguous one.
const fn shared_tile(outer: u32, k: u32, transposed: bool, elem: usize) -> TileShape {
    let (rows, cols) = if transposed { (k, outer) } else { (outer, k) };
    TileShape { rows: rows as usize, cols: cols as usize, elem, transposed }
}

/// Comptime facts of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MmaPlan {
    pub(crate) config: MmaConfig,
    pub(crate) lhs: TileShape,
    pub(crate) rhs: TileShape,
    /// Depth of the instruction.
    pub(crate) inst_k: u32,
    /// Every tile is full: no edge is checked.
    pub(crate) exact: bool,
}

#[cube]
pub(crate) fn multiply<F: Float, I: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<F, NO>],
    bias: &[F],
    dims: &Dims,
    #[comptime] plan: MmaPlan,
    #[comptime] biased: bool,
) {
    let config = comptime!(plan.config);
    let (tile_m, tile_n, tile_k) = comptime!((config.tile_m, config.tile_n, config.tile_k));
    let stages = comptime!(config.stages);
    let units = comptime!(config.units() as usize);
    let (wm, wn) = comptime!(config.plane_tile());
    let (frags_m, frags_n) = comptime!((wm as usize / 16, wn as usize / 16));
    let steps = comptime!(tile_k / plan.inst_k);
    let (lhs_len, rhs_len) = comptime!((plan.lhs.len(), plan.rhs.len()));

    let (width_lhs, width_rhs) = (NL::value(), NR::value());
    let mut shared_lhs = Shared::<[Vector<F, NL>]>::new_aligned_slice(
        comptime!(lhs_len * stages as usize / width_lhs),
        128usize,
    ); // [stages, tile_m, tile_k]
    let mut shared_rhs = Shared::<[Vector<F, NR>]>::new_aligned_slice(
        comptime!(rhs_len * stages as usize / width_rhs),
        128usize,
    ); // [stages, tile_n, tile_k]

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * 32 + lane;
    let (block_m, block_n) = tile_of_cube(dims, tile_m, tile_n);
    let (row0, col0) = (block_m * tile_m, block_n * tile_n);
    let (rows_left, cols_left) = (dims.m - row0, dims.n - col0);
    let part_m = plane / config.planes_n * wm;
    let part_n = plane % config.planes_n * wn;
    let (batch_lhs, batch_rhs, batch_out) = dims.batch(CUBE_POS_Y as usize);

    let lhs_col = comptime!(plan.lhs.transposed);
    let rhs_row = comptime!(plan.rhs.transposed);
    // Cursors and lines count vectors: what a division by the width would hide from the compiler.
    let lhs_line = dims.lhs_stride / width_lhs;
    let rhs_line = dims.rhs_stride / width_rhs;
    let step = comptime!(tile_k as usize);
    let (mut lhs_at, lhs_step) = if comptime!(lhs_col) {
        ((batch_lhs + row0 as usize) / width_lhs, lhs_line * step)
    } else {
        (batch_lhs / width_lhs + row0 as usize * lhs_line, comptime!(step / width_lhs).runtime())
    };
    let (mut rhs_at, rhs_step) = if comptime!(rhs_row) {
        ((batch_rhs + col0 as usize) / width_rhs, rhs_line * step)
    } else {
        (batch_rhs / width_rhs + col0 as usize * rhs_line, comptime!(step / width_rhs).runtime())
    };

    // Where this unit's fragments start: one place a step of k, or one a fragment where k is the
    // tile's row; the other direction is a constant distance.
    let mut lhs_lanes = Sequence::<u32>::new();
    #[unroll]
    for x in 0..comptime!(if lhs_col { frags_m as u32 } else { steps }) {
        let (row, k) = comptime!(if lhs_col { (16 * x, 0) } else { (0, x * plan.inst_k) });
        lhs_lanes.push(lhs_lane::<NL>(part_m + row, k.runtime(), lane, plan.lhs));
    }
    let mut rhs_lanes = Sequence::<u32>::new();
    #[unroll]
    for x in 0..comptime!(if rhs_row { frags_n as u32 } else { steps }) {
        let (col, k) = comptime!(if rhs_row { (16 * x, 0) } else { (0, x * plan.inst_k) });
        rhs_lanes.push(rhs_lane::<NR>(part_n + col, k.runtime(), lane, plan.rhs));
    }

    let def = MmaDefinition::<I, I, f32>::new(16usize, 8usize, plan.inst_k as usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = Sequence::<Array<Vector<f32, NC>>>::new(); // [wm / 16, wn / 8] fragments
    #[unroll]
    for _ in 0..comptime!(frags_m * frags_n * 2) {
        let mut fragment = Array::<Vector<f32, NC>>::new(2usize);
        fragment[0] = Vector::new(0.0f32);
        fragment[1] = Vector::new(0.0f32);
        acc.push(fragment);
    }

    let tiles = dims.k.div_ceil(tile_k);
    let mut k_left = dims.k;

    // Fill all stages but one.
    #[unroll]
    for s in 0..comptime!(stages - 1) {
        if s < tiles {
            fill_stage::<F, NL, NR>(
                lhs,
                rhs,
                &mut shared_lhs,
                &mut shared_rhs,
                dims,
                lhs_at,
                rhs_at,
                s,
                rows_left,
                cols_left,
                k_left,
                unit,
                plan,
                units,
            );
            lhs_at += lhs_step;
            rhs_at += rhs_step;
            k_left -= min(k_left, tile_k);
        }
        commit_copies();
    }
    let mut read = 0u32;
    let mut write = comptime!(stages - 1).runtime();

    for tile in 0..tiles {
        wait_copies(comptime!(stages - 2));
        sync_cube();
        if tile + comptime!(stages - 1) < tiles {
            fill_stage::<F, NL, NR>(
                lhs,
                rhs,
                &mut shared_lhs,
                &mut shared_rhs,
                dims,
                lhs_at,
                rhs_at,
                write,
                rows_left,
                cols_left,
                k_left,
                unit,
                plan,
                units,
            );
            lhs_at += lhs_step;
            rhs_at += rhs_step;
            k_left -= min(k_left, tile_k);
        }
        commit_copies();

        let lhs_slot = read * comptime!((lhs_len / width_lhs) as u32);
        let rhs_slot = read * comptime!((rhs_len / width_rhs) as u32);
        #[unroll]
        for step in 0..steps {
            let k = comptime!(step * plan.inst_k);
            let mut a = Sequence::<Array<Vector<I, NF>>>::new();
            #[unroll]
            for i in 0..frags_m {
                let row = comptime!(16 * i as u32);
                if comptime!(plan.lhs.elem == 4 && lhs_col) {
                    let slot = lhs_slot * comptime!(width_lhs as u32);
                    a.push(gather_lhs::<F, I, NL, NF>(
                        &shared_lhs,
                        slot,
                        part_m + row,
                        k.runtime(),
                        lane,
                        plan.lhs,
                    ));
                } else {
                    let far = comptime!((if lhs_col { k } else { row }) * plan.lhs.cols as u32);
                    let at = *lhs_lanes.index(comptime!(if lhs_col { i } else { step as usize }));
                    a.push(load_lhs::<F, I, NL, NF>(
                        &shared_lhs,
                        lhs_slot + at + comptime!(far / width_lhs as u32),
                        &def,
                        plan.lhs,
                    ));
                }
            }
            #[unroll]
            for j in 0..frags_n {
                let col = comptime!(16 * j as u32);
                let pair = if comptime!(plan.rhs.elem == 4 && rhs_row) {
                    let slot = rhs_slot * comptime!(width_rhs as u32);
                    gather_rhs::<F, I, NR, NF>(
                        &shared_rhs,
                        slot,
                        part_n + col,
                        k.runtime(),
                        lane,
                        plan.rhs,
                    )
                } else {
                    let far = comptime!((if rhs_row { k } else { col }) * plan.rhs.cols as u32);
                    let at = *rhs_lanes.index(comptime!(if rhs_row { j } else { step as usize }));
                    load_rhs::<F, I, NR, NF>(
                        &shared_rhs,
                        rhs_slot + at + comptime!(far / width_rhs as u32),
                        &def,
                        plan.rhs,
                    )
                };
                #[unroll]
                for i in 0..frags_m {
                    let at = comptime!((i * frags_n + j) * 2);
                    def.execute_inplace(a.index(i), &pair.left, acc.index_mut(at));
                    def.execute_inplace(a.index(i), &pair.right, acc.index_mut(comptime!(at + 1)));
                }
            }
        }
        read = select(read == comptime!(stages - 1), 0, read + 1);
        write = select(write == comptime!(stages - 1), 0, write + 1);
    }

    // C fragment: rows lane / 4 and + 8, columns 2 * (lane % 4) and + 1.
    #[unroll]
    for i in 0..frags_m {
        #[unroll]
        for j in 0..comptime!(frags_n * 2) {
            let fragment = acc.index(comptime!(i * frags_n * 2 + j));
            #[unroll]
            for half in 0..2usize {
                let row = row0 + part_m + comptime!((16 * i + 8 * half) as u32) + lane / 4;
                let col = col0 + part_n + comptime!(8 * j as u32) + lane % 4 * 2;
                if comptime!(plan.exact) || row < dims.m {
                    let at = batch_out + row as usize * dims.out_stride + col as usize;
                    store_pair::<F, NC, NO>(
                        out,
                        bias,
                        fragment[half],
                        at,
                        col,
                        dims.n,
                        plan.exact,
                        biased,
                    );
                }
            }
        }
    }
}

/// Issues the copies of both operands' next tiles into stage `stage`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "the two operands' cursors")]
fn fill_stage<F: Float, NL: Size, NR: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    shared_lhs: &mut [Vector<F, NL>],
    shared_rhs: &mut [Vector<F, NR>],
    dims: &Dims,
    lhs_at: usize,
    rhs_at: usize,
    stage: u32,
    rows_left: u32,
    cols_left: u32,
    k_left: u32,
    unit: u32,
    #[comptime] plan: MmaPlan,
    #[comptime] units: usize,
) {
    let (width_lhs, width_rhs) = (NL::value(), NR::value());
    let (lhs_rows, lhs_cols) =
        if comptime!(plan.lhs.transposed) { (k_left, rows_left) } else { (rows_left, k_left) };
    let (rhs_rows, rhs_cols) =
        if comptime!(plan.rhs.transposed) { (k_left, cols_left) } else { (cols_left, k_left) };
    copy_tile::<F, NL>(
        lhs,
        shared_lhs,
        lhs_at,
        dims.lhs_stride / width_lhs,
        stage * comptime!((plan.lhs.len() / width_lhs) as u32),
        lhs_rows,
        lhs_cols,
        unit,
        units,
        plan.lhs,
        plan.exact,
    );
    copy_tile::<F, NR>(
        rhs,
        shared_rhs,
        rhs_at,
        dims.rhs_stride / width_rhs,
        stage * comptime!((plan.rhs.len() / width_rhs) as u32),
        rhs_rows,
        rhs_cols,
        unit,
        units,
        plan.rhs,
        plan.exact,
    );
}

/// Stores two neighbouring results as one vector, or one by one where rows are not pair-aligned.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one pair, one place, one edge")]
fn store_pair<F: Float, NC: Size, NO: Size>(
    out: &mut [Vector<F, NO>],
    bias: &[F],
    pair: Vector<f32, NC>,
    at: usize,
    col: u32,
    n: u32,
    #[comptime] exact: bool,
    #[comptime] biased: bool,
) {
    let width = NO::value();
    if comptime!(width == 2) {
        if comptime!(exact) || col < n {
            let mut sum = pair;
            if comptime!(biased) {
                sum.insert(0usize, pair.extract(0usize) + bias_at(bias, col, biased));
                sum.insert(1usize, pair.extract(1usize) + bias_at(bias, col + 1, biased));
            }
            out[at / 2] = Vector::cast_from(sum);
        }
    } else {
        #[unroll]
        for e in 0..2usize {
            let col = col + comptime!(e as u32);
            if comptime!(exact) || col < n {
                let sum = pair.extract(e) + bias_at(bias, col, biased);
                out[at + e] = Vector::new(F::cast_from(sum));
            }
        }
    }
}
