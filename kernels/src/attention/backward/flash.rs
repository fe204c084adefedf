//! Tensor-core path of both sides: FlashAttention-2's backward pass without atomics.
//!
//! A cube owns a block of rows, whose two operands stay in shared memory, and iterates once over
//! the tiles of the other side. `*` is the dot product over the head dimension:
//!
//! | side    | own 1, 2 | other 1, 2 | results                           |
//! |---------|----------|------------|-----------------------------------|
//! | queries | q, dout  | k, v       | dq = scale · ds·k                 |
//! | keys    | k, v     | q, dout    | dk = scale · dsᵀ·q, dv = pᵀ·dout  |
//!
//! ```text
//!   for each tile of others                     // of every head that shares the keys
//!     s = own 1 * other 1;  g = own 2 * other 2 - delta  // delta = out·dout of the query
//!     p = exp(rules(s) - lse);  ds = p·g·rules'(s)
//!     sum 1 += ds · other 1;  sum 2 += p · other 2        // p and ds stay in registers
//! ```
//!
//! Each result therefore has one writer and one order of summation. Runs are bit-identical, and no
//! accumulator needs extra memory. The price is that both sides compute s and g.
//!
//! Cost: `6·head_dim` flop per visible pair on the query side, `8·head_dim` on the key side; the
//! literature counts 5/7 of the sum. At head dimension 128, two accumulators leave room for planes
//! of 16 rows only. Such planes read 144 fragments per 256 instructions; planes of 32 rows read 80
//! per 192. By that count shared memory bounds the former on an H200. Above head dimension 128, dk
//! and dv are computed one after the other.
//!
//! Ladder, ms at batch 4, 16 heads, 4096 x 4096, head dimension 128, bf16, full / causal, on an
//! H200. torch's FlashAttention-2 took 4.77 / 2.70 in the run of the last row but one, 4.75 / 2.67
//! in that of the last. All rows except those two are CUDA C++ prototypes. The one-pass prototype
//! adds four numbers at once, which only sm_90 supports. Its rows are the best of several orders of
//! heads and include preparing and finishing dq:
//!
//! | version                                                                | full | causal |
//! |------------------------------------------------------------------------|------|--------|
//! | one pass over tiles of 64, p and ds through shared memory, dq summed by atomics | 4.78 | |
//! | the same, atomics in key order: deterministic                          | 5.86 | 3.38   |
//! | the same, the owner loads and stores dq                                | 8.98 | 6.06   |
//! | two sides: queries 1.98 / 1.14, keys 3.34 / 1.78                       | 5.32 | 2.92   |
//! | the same in CubeCL, this file, including the statistics                | 5.30 | 2.91   |
//! | key tiles of 48 on RTX cards, where 64 spill 24 bytes (sm_89) and 56 (sm_120) | 5.40 | 3.01 |
//!
//! Slower variants: key side with eight planes of 16 rows, 3.63 / 1.97, or with tiles of 32, 3.49 /
//! 1.86. Query side with planes of 16 rows: 2.37 / 1.27.
//!
//! Source: Dao, "FlashAttention-2" (2023), algorithm 2.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::Roles;
use crate::attention::flash::FlashConfig;
use crate::attention::scores::{Place, Region, Scores};
use crate::attention::tiles::{TileMatmul, accumulate, bytes, copies_of, multiply, pitch, zeros};
use crate::attention::{Dims, Sequences};
use crate::tile::{
    CopyLane, CopyPlan, TileShape, commit_copies, copy_vector, exp2, global_address, lhs_lane,
    load_chunk, next_stage, rhs_lane, shared_address, wait_copies,
};

/// Comptime role of a launch: the rows that it owns and the results that it sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Side {
    /// True if it owns keys, false if it owns queries.
    pub(super) keys: bool,
    /// Computes ds · other 1: dq or dk.
    pub(super) first: bool,
    /// Computes p · other 2: dv.
    pub(super) second: bool,
}

impl Side {
    pub(super) const QUERIES: Self = Self { keys: false, first: true, second: false };
    const KEYS: Self = Self { keys: true, first: true, second: true };
    const DK: Self = Self { second: false, ..Self::KEYS };
    const DV: Self = Self { first: false, ..Self::KEYS };
    /// dk and dv in separate launches.
    pub(super) const APART: &'static [Self] = &[Self::DK, Self::DV];

    /// Launches that compute dk and dv: one, or two if both accumulators do not fit in registers.
    pub(super) const fn of_keys(head_dim: u32) -> &'static [Self] {
        if head_dim <= 128 { &[Self::KEYS] } else { Self::APART }
    }

    const fn sums(self) -> u32 {
        self.first as u32 + self.second as u32
    }

    /// Bytes of shared memory of `config`; `tile_kv` counts rows of the other side.
    pub(super) const fn shared_bytes(self, config: FlashConfig, head_dim: u32) -> u32 {
        let plan = FlashPlan::new(config, self, head_dim, true, 8, false, false);
        2 * plan.own.shape.bytes() + config.stages * plan.stage_bytes()
    }

    /// Estimated registers per unit: accumulators, s and g, one step of fragments, addresses.
    pub(super) const fn registers(self, config: FlashConfig, head_dim: u32) -> u32 {
        let frags = config.rows / 16;
        frags * (self.sums() * head_dim / 2 + config.tile_kv) + 4 * frags + config.tile_kv / 4 + 40
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FlashPlan {
    config: FlashConfig,
    side: Side,
    head_dim: u32,
    bf16: bool,
    pub(super) own: CopyPlan,
    pub(super) other: CopyPlan,
    /// True if no tile of others reaches past the end.
    exact: bool,
}

impl FlashPlan {
    pub(super) const fn new(
        config: FlashConfig,
        side: Side,
        head_dim: u32,
        bf16: bool,
        width: usize,
        exact_own: bool,
        exact_other: bool,
    ) -> Self {
        let units = config.units() as usize;
        let whole = pitch(head_dim) == head_dim;
        Self {
            config,
            side,
            head_dim,
            bf16,
            own: copies_of(config.tile_q(), head_dim, width, units, exact_own && whole),
            other: copies_of(config.tile_kv, head_dim, width, units, exact_other && whole),
            exact: exact_other,
        }
    }

    /// Bytes per stage: both tiles, plus their statistics if they are queries.
    const fn stage_bytes(self) -> u32 {
        2 * self.other.shape.bytes() + if self.side.keys { 8 * self.config.tile_kv } else { 0 }
    }

    /// Copy plan for the statistics of one query.
    const fn stats(self) -> CopyPlan {
        let shape = TileShape::new(self.config.tile_kv, 2, false, 4);
        let units = self.config.units() as usize;
        CopyPlan { shape, width: 2, units, exact: false }
    }

    const fn tile_matmul(self) -> TileMatmul {
        TileMatmul {
            frags: self.config.rows as usize / 16,
            pairs: self.config.tile_kv as usize / 16,
            steps: self.head_dim as usize / 16,
            own: self.own.shape,
            other: self.other.shape,
            bf16: self.bf16,
            pipelined: false,
        }
    }

    const fn region(self) -> Region {
        let (rows, others) = (self.config.rows, self.config.tile_kv);
        let (queries, keys) = if self.side.keys { (others, rows) } else { (rows, others) };
        Region { queries, keys, transposed: self.side.keys, exact: self.exact }
    }
}

/// Tiles that a cube iterates over, head after head.
#[derive(CubeType)]
struct Others {
    /// Address of this unit's first copy in the first head.
    from_1: u64,
    from_2: u64,
    at_stats: u32,
    /// Per head: first tile, number of tiles, number of positions.
    first: u32,
    tiles: u32,
    len: u32,
    /// Number of tiles over all heads.
    total: u32,
}

#[cube]
impl Others {
    /// Head (relative to the cube's first) and tile of step `step`.
    fn at(&self, step: u32, #[comptime] side: Side) -> (u32, u32) {
        if comptime!(side.keys) {
            (step / self.tiles, self.first + step % self.tiles)
        } else {
            (0u32.runtime(), self.first + step)
        }
    }

    /// Issues the copies of step `step`, if it exists, and commits their group.
    #[expect(clippy::too_many_arguments, reason = "what to copy, from where, to where, by whom")]
    fn copy(
        &self,
        step: u32,
        stats: &[Vector<f32, Const<2>>],
        dims: &Dims,
        roles: &Roles,
        to: u32,
        unit: u32,
        lane: &CopyLane,
        #[comptime] plan: FlashPlan,
    ) {
        if step < self.total {
            let (head_at, tile) = self.at(step, plan.side);
            let down_at = tile * comptime!(plan.config.tile_kv);
            let left = self.len - down_at;
            let (head, down) = (u64::cast_from(head_at), u64::cast_from(down_at));
            let tile_bytes = comptime!(plan.other.shape.bytes());
            let (line_1, line_2) = (bytes(roles.other_1.seq), bytes(roles.other_2.seq));
            let from = self.from_1 + head * bytes(roles.other_1.head) + down * line_1;
            lane.copy(from, line_1, to, left, plan.head_dim, plan.other);
            let from = self.from_2 + head * bytes(roles.other_2.head) + down * line_2;
            lane.copy(from, line_2, to + tile_bytes, left, plan.head_dim, plan.other);
            #[expect(clippy::collapsible_if, reason = "one is comptime")]
            if comptime!(plan.side.keys) {
                if unit < comptime!(plan.config.tile_kv) {
                    let at = self.at_stats + head_at * dims.lse_head + down_at + unit;
                    let from = global_address(stats) + u64::cast_from(at) * 8;
                    let to = to + 2 * tile_bytes + unit * 8;
                    copy_vector(from, to, 0u32, unit < left, comptime!(plan.stats()));
                }
            }
        }
        commit_copies();
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(super) fn flash<F: Float, M: Int, NI: Size, NO: Size>(
    own_1: &[Vector<F, NI>],
    own_2: &[Vector<F, NI>],
    other_1: &[Vector<F, NI>],
    other_2: &[Vector<F, NI>],
    stats: &[Vector<f32, Const<2>>],
    out_1: &mut [Vector<F, NO>],
    out_2: &mut [Vector<F, NO>],
    scores: &Scores<F, M>,
    sequences: &Sequences,
    dims: &Dims,
    roles: &Roles,
    #[comptime] plan: FlashPlan,
) {
    let (config, side) = comptime!((plan.config, plan.side));
    let tile_matmul = comptime!(plan.tile_matmul());
    let (tile_own, tile, stages) = comptime!((config.tile_q(), config.tile_kv, config.stages));

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * 32 + lane;
    let (own_head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let here = sequences.span(dims, batch);
    let (from_own, own_len, from_other, other_len) = if comptime!(side.keys) {
        (here.from_kv, here.seq_kv, here.from_q, here.seq_q)
    } else {
        (here.from_q, here.seq_q, here.from_kv, here.seq_kv)
    };
    // Under the causal mask, start blocks with the most tiles first: early keys, late queries.
    let mut block = CUBE_POS_X;
    if comptime!(scores.rules.causal && !side.keys) {
        block = dims.seq_q.div_ceil(tile_own) - 1 - CUBE_POS_X;
    }
    let first_row = block * tile_own;
    if first_row >= own_len {
        terminate!();
    }
    let (other_head, heads, first_query_head) = if comptime!(side.keys) {
        (own_head * dims.group, dims.group, own_head * dims.group)
    } else {
        (own_head / dims.group, 1u32.runtime(), own_head)
    };

    // [tile_own, pitch] twice, then [stages, other 1, other 2, statistics]
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!(((2 * plan.own.shape.bytes() + stages * plan.stage_bytes()) / 16) as usize),
        128usize,
    );
    let shared = shared_address(&mut shared);
    let ring = shared + comptime!(2 * plan.own.shape.bytes());
    let end = ring + comptime!(stages * plan.stage_bytes());

    let (lane_own, lane_other) = (CopyLane::new(unit, plan.own), CopyLane::new(unit, plan.other));
    let (from, end_row) = if comptime!(side.keys) {
        scores.seers(&here, first_row, comptime!(tile_own))
    } else {
        scores.range(&here, first_row, comptime!(tile_own))
    };
    let first = from / tile;
    let tiles = end_row.div_ceil(tile) - first;
    let (line_1, line_2) = (bytes(roles.other_1.seq), bytes(roles.other_2.seq));
    let others = Others {
        from_1: global_address(other_1)
            + bytes(roles.other_1.at(from_other, batch, other_head))
            + lane_other.start(line_1, plan.other),
        from_2: global_address(other_2)
            + bytes(roles.other_2.at(from_other, batch, other_head))
            + lane_other.start(line_2, plan.other),
        at_stats: dims.lse_at(here.from_q, batch, first_query_head) as u32,
        first,
        tiles,
        len: other_len,
        total: tiles * heads,
    };

    let left = own_len - first_row;
    let line = bytes(roles.own_1.seq);
    let from = global_address(own_1) + bytes(roles.own_1.at(from_own + first_row, batch, own_head));
    let from = from + lane_own.start(line, plan.own);
    lane_own.copy(from, line, shared, left, plan.head_dim, plan.own);
    let line = bytes(roles.own_2.seq);
    let from = global_address(own_2) + bytes(roles.own_2.at(from_own + first_row, batch, own_head));
    let from = from + lane_own.start(line, plan.own);
    let second = shared + comptime!(plan.own.shape.bytes());
    lane_own.copy(from, line, second, left, plan.head_dim, plan.own);
    let mut write = ring;
    #[unroll]
    for ahead in 0..comptime!(stages - 1) {
        others.copy(ahead.runtime(), stats, dims, roles, write, unit, &lane_other, plan);
        write = next_stage(write, ring, end, comptime!(plan.stage_bytes()));
    }

    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut sum_1 = zeros::<NC>(comptime!(if side.first { tile_matmul.sums() } else { 0 }));
    let mut sum_2 = zeros::<NC>(comptime!(if side.second { tile_matmul.sums() } else { 0 }));

    let plane_row = plane * config.rows;
    let lane_a = shared + lhs_lane(plane_row, lane, plan.own.shape);
    let lane_b = rhs_lane(0u32.runtime(), lane, plan.other.shape);
    let lane_c = rhs_lane(0u32.runtime(), lane, comptime!(tile_matmul.summed()));
    let row = first_row + plane_row;

    // Statistics of rows lane / 4 and + 8 of each fragment, if rows are queries.
    let mut own_stats = Sequence::<Vector<f32, Const<2>>>::new();
    if comptime!(!side.keys) {
        #[unroll]
        for r in 0..comptime!(2 * tile_matmul.frags) {
            let query = min(row + comptime!(8 * r as u32) + lane / 4, own_len - 1);
            own_stats.push(stats[dims.lse_at(here.from_q + query, batch, own_head)]);
        }
    }

    let mut read = ring;
    for step in 0..others.total {
        wait_copies(comptime!(stages - 2));
        sync_cube();
        others.copy(
            step + comptime!(stages - 1),
            stats,
            dims,
            roles,
            write,
            unit,
            &lane_other,
            plan,
        );
        write = next_stage(write, ring, end, comptime!(plan.stage_bytes()));
        let (head, tile_at) = others.at(step, side);
        let tile_2 = read + comptime!(plan.other.shape.bytes());
        // 16 bytes hold the statistics of two queries.
        let at_stats = read + comptime!(2 * plan.other.shape.bytes()) + lane % 4 * 16;

        let mut s = zeros::<NC>(comptime!(tile_matmul.scores()));
        multiply::<F, NF, NC>(&mut s, lane_a, read + lane_b, tile_matmul);
        // Compute g late, after the weights of this tile are summed. With a soft cap it comes
        // earlier, because the slope needs the dot products that the cap overwrites.
        let mut g = zeros::<NC>(comptime!(if side.first { tile_matmul.scores() } else { 0 }));
        let (own_2, tile_b) = (lane_a + comptime!(plan.own.shape.bytes()), tile_2 + lane_b);
        let bends = comptime!(scores.rules.softcap);
        if comptime!(side.first && bends) {
            minus_deltas::<NC>(&mut g, &own_stats, at_stats, plan);
            multiply::<F, NF, NC>(&mut g, own_2, tile_b, tile_matmul);
            scores.slope::<NC>(&s, &mut g, comptime!(tile_matmul.scores()));
        }

        let other = tile_at * tile;
        let (query, key) = if comptime!(side.keys) { (other, row) } else { (row, other) };
        let corner = Place { batch, head: first_query_head + head, row: query, col: key };
        scores.finish::<NC>(&mut s, &corner, &here, dims, comptime!(plan.region()));

        // s = exp2(s - lse)
        #[unroll]
        for j in 0..comptime!(2 * tile_matmul.pairs) {
            let quad = quad_of(at_stats, j, side);
            #[unroll]
            for r in 0..comptime!(2 * tile_matmul.frags) {
                let fragment = s.index_mut(comptime!(r / 2 * 2 * tile_matmul.pairs + j));
                let mut pair = fragment[comptime!(r % 2)];
                #[unroll]
                for e in 0..2usize {
                    let lse = if comptime!(side.keys) {
                        quad.extract(comptime!(2 * e))
                    } else {
                        own_stats.index(r).extract(0usize)
                    };
                    pair.insert(e, exp2(fma(pair.extract(e), scores.unit(), -lse)));
                }
                fragment[comptime!(r % 2)] = pair;
            }
        }
        if comptime!(side.second) {
            accumulate::<F, NF, NC>(&mut sum_2, &s, tile_2 + lane_c, tile_matmul);
        }

        // g = s·g
        if comptime!(side.first && !bends) {
            minus_deltas::<NC>(&mut g, &own_stats, at_stats, plan);
            multiply::<F, NF, NC>(&mut g, own_2, tile_b, tile_matmul);
        }
        if comptime!(side.first) {
            #[unroll]
            for at in 0..comptime!(tile_matmul.scores()) {
                #[unroll]
                for half in 0..2usize {
                    let weights = s.index(at)[half];
                    g.index_mut(at)[half] *= weights;
                }
            }
            accumulate::<F, NF, NC>(&mut sum_1, &g, read + lane_c, tile_matmul);
        }
        read = next_stage(read, ring, end, comptime!(plan.stage_bytes()));
    }

    #[unroll]
    for r in 0..comptime!(2 * tile_matmul.frags) {
        let row = row + comptime!(8 * r as u32) + lane / 4;
        if row < own_len {
            let col = lane % 4 * 2;
            if comptime!(side.first) {
                let at = roles.out_1.at(from_own + row, batch, own_head) + col as usize;
                store::<F, NC, NO>(out_1, &sum_1, at, scores.scale, r, tile_matmul);
            }
            if comptime!(side.second) {
                let at = roles.out_2.at(from_own + row, batch, own_head) + col as usize;
                store::<F, NC, NO>(out_2, &sum_2, at, 1.0f32.runtime(), r, tile_matmul);
            }
        }
    }
}

/// Initialises the accumulators of g with -delta of each query.
#[cube]
fn minus_deltas<NC: Size>(
    g: &mut Sequence<Array<Vector<f32, NC>>>,
    own_stats: &Sequence<Vector<f32, Const<2>>>,
    at_stats: u32,
    #[comptime] plan: FlashPlan,
) {
    let (side, tile_matmul) = comptime!((plan.side, plan.tile_matmul()));
    #[unroll]
    for j in 0..comptime!(2 * tile_matmul.pairs) {
        let quad = quad_of(at_stats, j, side);
        #[unroll]
        for r in 0..comptime!(2 * tile_matmul.frags) {
            let fragment = g.index_mut(comptime!(r / 2 * 2 * tile_matmul.pairs + j));
            let mut pair = fragment[comptime!(r % 2)];
            #[unroll]
            for e in 0..2usize {
                let delta = if comptime!(side.keys) {
                    quad.extract(comptime!(2 * e + 1))
                } else {
                    own_stats.index(r).extract(1usize)
                };
                pair.insert(e, -delta);
            }
            fragment[comptime!(r % 2)] = pair;
        }
    }
}

/// Stores half `r` of the row fragments of `sum`, times `scale`, from element `at` on.
#[cube]
fn store<F: Float, NC: Size, NO: Size>(
    out: &mut [Vector<F, NO>],
    sum: &Sequence<Array<Vector<f32, NC>>>,
    at: usize,
    scale: f32,
    #[comptime] r: usize,
    #[comptime] tile_matmul: TileMatmul,
) {
    let cols = comptime!(2 * tile_matmul.steps);
    #[unroll]
    for j in 0..cols {
        let pair = sum.index(comptime!(r / 2 * cols + j))[comptime!(r % 2)];
        out[at / 2 + comptime!(4 * j)] = Vector::cast_from(pair * Vector::new(scale));
    }
}

/// Statistics of the two queries in columns `2 · lane` of fragments `j`, if columns are queries.
#[cube]
fn quad_of(at: u32, #[comptime] j: usize, #[comptime] side: Side) -> Vector<f32, Const<4>> {
    if comptime!(side.keys) {
        load_chunk(at, comptime!(64 * j as u32))
    } else {
        Vector::new(0.0f32)
    }
}
