//! Tensor-core path for CUDA: FlashAttention-2's loop with `mma.sync`, `ldmatrix` and `cp.async`.
//!
//! | loop                               | level                                                   |
//! |------------------------------------|---------------------------------------------------------|
//! | blocks of `planes · rows` queries  | cubes; within a head, blocks with the most keys first   |
//! | tiles of `tile_kv` keys            | ring of `stages` K and V tiles, `stages - 1` in flight  |
//! | `rows` queries                     | planes; scores, weights and accumulators in registers   |
//! | head dimension, then keys, by 16   | fragments in registers, prefetched one step ahead       |
//!
//! Tiles that the causal mask or a window hides completely are skipped; only tiles that they cut
//! are masked. Scores are in units of log₂, so that a softmax weight costs one multiply-add and one
//! `ex2`. The running row max m only moves when a score exceeds it by 2⁸. Until then weights grow
//! to at most 256, which is safe for f32 accumulators and f16 weights. This skips most shuffles and
//! rescales; the final quotient is the same.
//!
//! Cost: `4·head_dim` flop per visible pair. Each block of queries reads K and V once, from L2
//! except for the first block.
//!
//! Ladder, TFLOP/s at batch 4, 16 heads, 4096 x 4096, head dimension 128, bf16, full / causal, on
//! an H200. Its limit with operands in registers is 634. torch's FlashAttention-2 reached 344 / 306
//! in the run of the last row. All rows except the last are CUDA C++ prototypes:
//!
//! | version                                                                  | full | causal |
//! |--------------------------------------------------------------------------|------|--------|
//! | v1 four planes of 32 rows, two tiles of 64 keys                          | 341  | 293    |
//! | v2 v1, rescaled only when a row max grows by 2⁸                          | 355  | 301    |
//! | v3 v2, three tiles of 32 keys: nothing spills                            | 364  | 308    |
//! | v4 v3, one vote for all rows, fragments one step ahead, two tiles        | 371  | 327    |
//! | v4 in CubeCL, this file: 232 registers where the prototype spilled       | 375  | 324    |
//!
//! Slower variants: eight planes of 32 rows per cube, 346 / 284. Planes of 16 rows read their
//! fragments from shared memory twice as often: 323 / 301 with four planes, 306 / 276 with eight.
//! Computing the next tile's scores before this tile's weights leaves no registers: 301 / 254.
//!
//! Sources: Dao, "FlashAttention-2" (2023), algorithm 1; Milakov and Gimelshein, "Online normalizer
//! calculation for softmax" (2018); the rescale threshold is FlashAttention-4's.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::scores::{Place, Region, Scores};
use super::tiles::{TileMatmul, accumulate, bytes, copies_of, multiply, pitch, zeros};
use super::{Dims, Sequences, Span};
use crate::tile::{
    CopyLane, CopyPlan, Start, commit_copies, exp2, global_address, lhs_lane, next_stage, rhs_lane,
    shared_address, wait_copies,
};

/// Tile sizes of the tensor-core path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlashConfig {
    /// Planes per cube.
    pub planes: u32,
    /// Queries per plane: 16 or 32.
    pub rows: u32,
    /// Keys per tile.
    pub tile_kv: u32,
    /// K and V tiles in the ring.
    pub stages: u32,
}

impl FlashConfig {
    /// Queries per cube.
    pub(crate) const fn tile_q(self) -> u32 {
        self.planes * self.rows
    }

    pub(crate) const fn units(self) -> u32 {
        32 * self.planes
    }

    pub(crate) const fn shared_bytes(self, head_dim: u32) -> u32 {
        (self.tile_q() + 2 * self.stages * self.tile_kv) * pitch(head_dim) * 2
    }

    /// Estimated registers per unit: accumulators, scores, two steps of fragments, addresses.
    pub(crate) const fn registers(self, head_dim: u32) -> u32 {
        let (fragments, head_dim) = (self.rows / 16, head_dim.next_multiple_of(16));
        fragments * (head_dim + self.tile_kv) / 2 + 2 * (4 * fragments + self.tile_kv / 4) + 52
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FlashPlan {
    pub(crate) config: FlashConfig,
    pub(crate) head_dim: u32,
    pub(crate) bf16: bool,
    pub(crate) q: CopyPlan,
    /// Copies of a K tile; V uses the same layout.
    pub(crate) kv: CopyPlan,
    /// True if no tile of keys reaches past the end.
    pub(crate) exact: bool,
}

impl FlashPlan {
    pub(crate) const fn new(
        config: FlashConfig,
        head_dim: u32,
        bf16: bool,
        width: usize,
        exact_q: bool,
        exact_kv: bool,
    ) -> Self {
        let units = config.units() as usize;
        let whole = pitch(head_dim) == head_dim;
        Self {
            config,
            head_dim,
            bf16,
            q: copies_of(config.tile_q(), head_dim, width, units, exact_q && whole),
            kv: copies_of(config.tile_kv, head_dim, width, units, exact_kv && whole),
            exact: exact_kv,
        }
    }

    pub(crate) const fn stage_bytes(self) -> u32 {
        2 * self.kv.shape.bytes()
    }

    /// Matmul geometry of one K or V tile.
    const fn tile_matmul(self) -> TileMatmul {
        TileMatmul {
            frags: self.config.rows as usize / 16,
            pairs: self.config.tile_kv as usize / 16,
            // Tiles have zeros past the head dimension.
            steps: self.head_dim.div_ceil(16) as usize,
            own: self.q.shape,
            other: self.kv.shape,
            bf16: self.bf16,
            pipelined: true,
        }
    }

    /// Returns true if the addresses of K and V stay in registers.
    const fn holds(self) -> bool {
        self.config.rows > 16 || self.config.tile_kv > 32
    }

    /// Region of a plane's scores, to which masks and ends apply.
    const fn region(self) -> Region {
        Region {
            queries: self.config.rows,
            keys: self.config.tile_kv,
            transposed: false,
            exact: self.exact,
        }
    }
}

/// Softmax weights stay at or below 2 to this power.
const HEADROOM: f32 = 8.0;

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(crate) fn flash<F: Float, M: Int, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<F, NI>],
    v: &[Vector<F, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    scores: &Scores<F, M>,
    sequences: &Sequences,
    dims: &Dims,
    #[comptime] plan: FlashPlan,
) {
    let config = comptime!(plan.config);
    let (tile_q, tile_kv, stages) = comptime!((config.tile_q(), config.tile_kv, config.stages));
    let frags_m = comptime!(config.rows as usize / 16);
    let pairs_kv = comptime!(tile_kv as usize / 16);
    let pairs_d = comptime!(plan.head_dim.div_ceil(16) as usize);
    let tile_matmul = comptime!(plan.tile_matmul());

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * 32 + lane;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let here = sequences.span(dims, batch);
    // Under the causal mask later queries have more keys. Start them first, so that no long block
    // runs last.
    let last_block = dims.seq_q.div_ceil(tile_q) - 1;
    let block = if comptime!(scores.rules.causal) { last_block - CUBE_POS_X } else { CUBE_POS_X };
    let first_row = block * tile_q;
    if first_row >= here.seq_q {
        terminate!();
    }

    // [tile_q, pitch], then [stages, K then V]
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!(((plan.q.shape.bytes() + stages * plan.stage_bytes()) / 16) as usize),
        128usize,
    );
    let shared = shared_address(&mut shared);
    let ring = shared + comptime!(plan.q.shape.bytes());
    let end = ring + comptime!(stages * plan.stage_bytes());

    let kv_head = head / dims.group;
    let at_q = dims.q.at(here.from_q + first_row, batch, head);
    let at_k = dims.k.at(here.from_kv, batch, kv_head);
    let at_v = dims.v.at(here.from_kv, batch, kv_head);
    let line_q = bytes(dims.q.seq);
    let (lane_q, lane_kv) = (CopyLane::new(unit, plan.q), CopyLane::new(unit, plan.kv));
    let from_q = global_address(q) + bytes(at_q) + lane_q.start(line_q, plan.q);
    let keys = Source::new(k, at_k, dims.k.seq, &lane_kv, plan);
    let values = Source::new(v, at_v, dims.v.seq, &lane_kv, plan);

    let (first_key, last_key) = scores.range(&here, first_row, comptime!(tile_q));
    let (first_tile, last_tile) = (first_key / tile_kv, last_key.div_ceil(tile_kv));

    lane_q.copy(from_q, line_q, shared, here.seq_q - first_row, plan.head_dim, plan.q);
    let mut ahead = first_tile;
    let mut write = ring;
    #[unroll]
    for _ in 0..comptime!(stages - 1) {
        copy_tile(k, v, &keys, &values, ahead, last_tile, &here, write, &lane_kv, plan);
        ahead += 1;
        write = next_stage(write, ring, end, comptime!(plan.stage_bytes()));
    }

    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = zeros::<NC>(comptime!(tile_matmul.sums())); //        [rows / 16, head_dim / 8]
    let mut row_max = Array::<f32>::new(comptime!(2 * frags_m)); //     m of rows lane / 4 and + 8
    let mut sum = Array::<f32>::new(comptime!(2 * frags_m)); //      this unit's part of l
    #[unroll]
    for r in 0..comptime!(2 * frags_m) {
        row_max[r] = f32::NEG_INFINITY.runtime();
        sum[r] = 0.0f32.runtime();
    }

    let plane_row = plane * config.rows;
    let lane_a = shared + lhs_lane(plane_row, lane, plan.q.shape);
    let lane_b = rhs_lane(0u32.runtime(), lane, plan.kv.shape);
    let lane_v = rhs_lane(0u32.runtime(), lane, comptime!(tile_matmul.summed()));
    let row = first_row + plane_row;

    let mut read = ring;
    for tile in first_tile..last_tile {
        wait_copies(comptime!(stages - 2));
        sync_cube();
        copy_tile(k, v, &keys, &values, ahead, last_tile, &here, write, &lane_kv, plan);
        ahead += 1;
        write = next_stage(write, ring, end, comptime!(plan.stage_bytes()));

        // s = q · kᵀ
        let mut s = zeros::<NC>(comptime!(tile_matmul.scores()));
        multiply::<F, NF, NC>(&mut s, lane_a, read + lane_b, tile_matmul);

        // s = log₂e · (scale · s ..), or -inf where hidden
        let corner = Place { batch, head, row, col: tile * tile_kv };
        scores.finish::<NC>(&mut s, &corner, &here, dims, comptime!(plan.region()));

        // Update m and rescale everything that is a multiple of exp(-m).
        let mut grows = false;
        let mut tops = Array::<f32>::new(comptime!(2 * frags_m));
        #[unroll]
        for i in 0..frags_m {
            #[unroll]
            for half in 0..2usize {
                let at = comptime!(2 * i + half);
                tops[at] = top::<NC>(&s, i, half, comptime!(2 * pairs_kv)) * scores.unit();
                grows = grows || tops[at] > row_max[at] + HEADROOM;
            }
        }
        if plane_any(grows) {
            #[unroll]
            for r in 0..comptime!(2 * frags_m) {
                let mut reached = max(tops[r], plane_shuffle_xor(tops[r], 1));
                reached = max(reached, plane_shuffle_xor(reached, 2));
                let grown = max(row_max[r], reached);
                // -inf - -inf is NaN: leave a row without keys so far as it is.
                let factor = select(grown == f32::NEG_INFINITY, 1.0, exp2(row_max[r] - grown));
                row_max[r] = grown;
                sum[r] *= factor;
                #[unroll]
                for j in 0..comptime!(2 * pairs_d) {
                    let fragment = acc.index_mut(comptime!(r / 2 * 2 * pairs_d + j));
                    fragment[comptime!(r % 2)] *= Vector::new(factor);
                }
            }
        }

        // s = exp2(s - m), l
        #[unroll]
        for r in 0..comptime!(2 * frags_m) {
            let shift = select(row_max[r] == f32::NEG_INFINITY, 0.0, -row_max[r]);
            let mut part = Array::<f32>::new(2usize);
            part[0] = 0.0f32.runtime();
            part[1] = 0.0f32.runtime();
            #[unroll]
            for j in 0..comptime!(2 * pairs_kv) {
                let fragment = s.index_mut(comptime!(r / 2 * 2 * pairs_kv + j));
                let mut pair = fragment[comptime!(r % 2)];
                #[unroll]
                for e in 0..2usize {
                    let weight = exp2(fma(pair.extract(e), scores.unit(), shift));
                    pair.insert(e, weight);
                    part[e] += weight;
                }
                fragment[comptime!(r % 2)] = pair;
            }
            sum[r] += part[0] + part[1];
        }

        // acc += s · v
        let tile_v = read + comptime!(plan.kv.shape.bytes()) + lane_v;
        accumulate::<F, NF, NC>(&mut acc, &s, tile_v, tile_matmul);
        read = next_stage(read, ring, end, comptime!(plan.stage_bytes()));
    }

    #[unroll]
    for r in 0..comptime!(2 * frags_m) {
        let row = row + comptime!(8 * r as u32) + lane / 4;
        let mut l = sum[r] + plane_shuffle_xor(sum[r], 1);
        l = l + plane_shuffle_xor(l, 2);
        if row < here.seq_q {
            // A row without keys is 0.
            let quotient = select(l == 0.0, 0.0, 1.0 / l);
            let start = dims.out.at(here.from_q + row, batch, head);
            #[unroll]
            for j in 0..comptime!(plan.head_dim as usize / 8) {
                let pair = acc.index(comptime!(r / 2 * 2 * pairs_d + j))[comptime!(r % 2)];
                let col = comptime!(8 * j as u32) + lane % 4 * 2;
                out[(start + col as usize) / 2] = Vector::cast_from(pair * Vector::new(quotient));
            }
            if comptime!(scores.rules.lse) {
                // One unit of the four that share the row.
                if lane % 4 == 0 {
                    let at = dims.lse_at(here.from_q + row, batch, head);
                    // m and log₂(l) are base-2 logarithms.
                    lse[at] = select(
                        l == 0.0,
                        f32::NEG_INFINITY,
                        (row_max[r] + l.ln() * std::f32::consts::LOG2_E) * std::f32::consts::LN_2,
                    );
                }
            }
        }
    }
}

/// Maximum of this unit's scores in half `half` of row fragment `i`.
#[cube]
fn top<NC: Size>(
    s: &Sequence<Array<Vector<f32, NC>>>,
    #[comptime] i: usize,
    #[comptime] half: usize,
    #[comptime] fragments: usize,
) -> f32 {
    // Two independent chains for instruction-level parallelism.
    let first = s.index(comptime!(i * fragments))[half];
    let mut even = first.extract(0usize);
    let mut odd = first.extract(1usize);
    #[unroll]
    for j in 1..fragments {
        let pair = s.index(comptime!(i * fragments + j))[half];
        even = max(even, pair.extract(0usize));
        odd = max(odd, pair.extract(1usize));
    }
    max(even, odd)
}

/// K or V rows that a cube reads.
#[derive(CubeType)]
struct Source {
    /// Start of this unit's first copy.
    start: Start,
    /// Bytes between rows.
    line: u64,
}

#[cube]
impl Source {
    /// Source whose first row is at element `at` and whose rows are `line` elements apart.
    fn new<F: Float, NI: Size>(
        matrix: &[Vector<F, NI>],
        at: usize,
        line: usize,
        lane: &CopyLane,
        #[comptime] plan: FlashPlan,
    ) -> Source {
        let line = bytes(line);
        let first = bytes(at) + lane.start(line, plan.kv);
        Source { start: Start::new(matrix, first, comptime!(plan.holds())), line }
    }
}

/// Issues the copies of K and V tile `tile` if it is before `last`, and commits their group.
#[cube]
#[expect(clippy::too_many_arguments, reason = "two matrices, one tile")]
fn copy_tile<F: Float, NI: Size>(
    k: &[Vector<F, NI>],
    v: &[Vector<F, NI>],
    keys: &Source,
    values: &Source,
    tile: u32,
    last: u32,
    here: &Span,
    to: u32,
    lane: &CopyLane,
    #[comptime] plan: FlashPlan,
) {
    let rows = comptime!(plan.config.tile_kv);
    if tile < last {
        let left = here.seq_kv - tile * rows;
        let down = u64::cast_from(tile * rows);
        let to_v = to + comptime!(plan.kv.shape.bytes());
        let from_k = keys.start.address(k) + down * keys.line;
        lane.copy(from_k, keys.line, to, left, plan.head_dim, plan.kv);
        let from_v = values.start.address(v) + down * values.line;
        lane.copy(from_v, values.line, to_v, left, plan.head_dim, plan.kv);
    }
    commit_copies();
}
