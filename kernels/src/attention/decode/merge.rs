//! Merges partial softmax states: those of a cube's planes, then those of a sequence's splits.
//!
//! ```text
//!   m = max m_i;  l = Σ l_i·2^(m_i - m);  acc = Σ acc_i·2^(m_i - m);  out = acc / l
//! ```
//!
//! For a split sequence, each cube writes m, l and acc in f32 and increments a counter. The last
//! cube to finish sees the data of all cubes. It merges in split order, so that the result does not
//! depend on which cube was last. A counter runs from 0 to `splits - 1` and wraps to 0 for the next
//! launch. The data is small: 4·head_dim bytes per query and split, from L2. A second kernel would
//! cost another launch and another drain of the GPU; one step over 8192 positions takes only ten
//! times as long.
//!
//! For one sequence over 8192 positions, the merge takes 1.1 of 13.0 to 13.7 us (12.1 without
//! merging; H200 as rtx4090). Tried and dropped: words that are their own flag in place of the
//! counter, like NCCL's "LL" protocol. The last split reads them until none is 0: 13.0 to 13.6 us.
//! Twice the splits, which fill 132 processors instead of 128: 12.1 us without the merge, 14.2 with
//! it.
//!
//! Source of the counter: NVIDIA, "threadFenceReduction" (CUDA samples).

use cubecl::prelude::*;

use super::cache::Dims;
use super::plan::SplitPlan;
use super::scores::Scores;
use crate::tile::{
    exp2, global_address_mut, load_chunk, load_pair, load_shared, store_pair, store_shared,
};

/// Number of u32 counters at the start of scratch; a launch uses only the first ones.
pub(crate) const COUNTERS: u32 = 4096;

/// Work tile of a cube.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct WorkTile {
    pub(crate) batch: u32,
    pub(crate) kv_head: u32,
    /// Index of the split of the sequence.
    pub(crate) part: u32,
    /// First row among the queries that share a cache head, and number of rows.
    pub(crate) first: u32,
    rows: u32,
    /// Index of the counter that its splits increment.
    counter: u32,
}

#[cube]
impl WorkTile {
    pub(crate) fn new(dims: &Dims, #[comptime] plan: SplitPlan) -> WorkTile {
        let (tile, chunks) = comptime!((plan.rows(), plan.chunks));
        let all = dims.group * comptime!(plan.seq_q);
        // Cubes that read the same keys are neighbours, so that all except one read from L2.
        let (chunk, part) = (CUBE_POS_X % chunks, CUBE_POS_X / chunks);
        let first = chunk * tile;
        WorkTile {
            batch: CUBE_POS_Z,
            kv_head: CUBE_POS_Y,
            part,
            first,
            rows: min(all - first, tile),
            counter: (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * chunks + chunk,
        }
    }

    /// Query and head of row `row` of the cube; rows past the end get the last query.
    pub(crate) fn query(&self, dims: &Dims, row: u32, #[comptime] plan: SplitPlan) -> (u32, u32) {
        let row = self.first + min(row, self.rows - 1);
        let seq_q = comptime!(plan.seq_q);
        (row % seq_q, self.kv_head * dims.group + row / seq_q)
    }
}

/// Writes m, l and the accumulators of every plane to shared memory.
#[cube]
pub(crate) fn write_partials<NC: Size>(
    acc: &Sequence<Array<Vector<f32, NC>>>,
    row_max: &Array<f32>,
    sum: &Array<f32>,
    shared: u32,
    #[comptime] plan: SplitPlan,
) {
    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let (column, octet) = (lane % 4 * 2, lane / 4);
    let fragments = comptime!(plan.rows() as usize / 8);
    let states = shared + plane * comptime!(8 * plan.rows());
    let sums = shared + comptime!(8 * plan.planes * plan.rows());
    #[unroll]
    for r in 0..comptime!(2 * fragments) {
        let mut l = sum[r] + plane_shuffle_xor(sum[r], 4);
        l = l + plane_shuffle_xor(l, 8);
        l = l + plane_shuffle_xor(l, 16);
        let row = comptime!((8 * (r / 2) + r % 2) as u32) + column;
        // One of the eight units that share a query.
        if octet == 0 {
            store_shared(states + row * 8, row_max[r], 0u32);
            store_shared(states + row * 8, l, 4u32);
        }
        let line = plane * comptime!(plan.rows()) + row;
        let to = sums + line * comptime!(4 * plan.sums_pitch());
        #[unroll]
        for d in 0..comptime!(plan.head_dim as usize / 16) {
            let fragment = acc.index(comptime!(d * fragments + r / 2));
            #[unroll]
            for half in 0..2usize {
                // i8 values come in pairs along the head dimension.
                let (apart, far) = comptime!(if plan.cache.quantized {
                    (8u32, 64 * d as u32 + 4 * half as u32)
                } else {
                    (4u32, 64 * d as u32 + 32 * half as u32)
                });
                store_shared(to + octet * apart, fragment[half].extract(comptime!(r % 2)), far);
            }
        }
    }
}

/// Merges the planes' states into the cube's result, or into its split. The last split to finish
/// stores the result.
#[cube]
#[expect(clippy::too_many_arguments, reason = "results, what they are made of, comptime facts")]
pub(crate) fn merge_planes<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    partials: &mut [Vector<f32, Const<4>>],
    scores: &Scores,
    dims: &Dims,
    work: &WorkTile,
    shared: u32,
    #[comptime] plan: SplitPlan,
) {
    let unit = UNIT_POS_Y * 32 + UNIT_POS_X;
    let (planes, rows) = comptime!((plan.planes, plan.rows()));
    let vectors = comptime!(plan.head_dim / 4);
    let sums = shared + comptime!(8 * planes * rows);
    let scratch = global_address_mut(partials);
    sync_cube();
    let mut task = unit;
    while task < work.rows * vectors {
        let (row, vector) = (task / vectors, task % vectors);
        let state = shared + row * 8;
        let mut grown = load_shared(state, 0u32);
        #[unroll]
        for plane in 1..planes {
            grown = max(grown, load_shared(state, comptime!(8 * plane * rows)));
        }
        let mut l = 0.0f32.runtime();
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for plane in 0..planes {
            let row_max = load_shared(state, comptime!(8 * plane * rows));
            let factor = weight_of(row_max, grown);
            l += load_shared(state, comptime!(8 * plane * rows + 4)) * factor;
            let line = row + comptime!(plane * rows);
            let from = sums + line * comptime!(4 * plan.sums_pitch()) + vector * 16;
            sum += load_chunk(from, 0u32) * Vector::new(factor);
        }
        if comptime!(plan.has_splits) {
            let part = Part::new(dims, work, row, plan);
            partials[part.sums(work.part, vector, plan)] = sum;
            // One of the units that share the row.
            if vector == 0 {
                store_pair(scratch + part.state(work.part), grown, l);
            }
        } else {
            store::<F, NO>(out, lse, sum, grown, l, row, vector, scores, dims, work, plan);
        }
        task += comptime!(32 * planes);
    }
    if comptime!(plan.has_splits) {
        // The barrier and the counter's release publish the writes of all units. Its acquire and
        // the next barrier make those of other cubes visible.
        sync_cube();
        if unit == 0 {
            let before = count(scratch + u64::cast_from(work.counter) * 4, dims.splits - 1);
            store_shared(shared, f32::reinterpret(before), 0u32);
        }
        sync_cube();
        if u32::reinterpret(load_shared(shared, 0u32)) == dims.splits - 1 {
            merge_splits::<F, NO>(out, lse, partials, scratch, scores, dims, work, plan);
        }
    }
}

/// Factor for a state with maximum `row_max` when the common maximum is `grown`, `grown >= row_max`.
#[cube]
fn weight_of(row_max: f32, grown: f32) -> f32 {
    // -inf - -inf is NaN: a state without keys gets factor 0.
    select(grown == f32::NEG_INFINITY, 0.0, exp2(row_max - grown))
}

/// Position of a query's splits in scratch: after the counters `[queries, splits]` of (m, l), then
/// `[queries, splits, head_dim]`.
#[derive(CubeType, Clone, Copy)]
struct Part {
    /// Number of splits of all queries before this one.
    before: usize,
    /// Index in vectors of the first accumulator.
    start: usize,
}

#[cube]
impl Part {
    fn new(dims: &Dims, work: &WorkTile, row: u32, #[comptime] plan: SplitPlan) -> Part {
        let (i, head) = work.query(dims, row, plan);
        let seq_q = comptime!(plan.seq_q);
        let query = (work.batch * dims.heads + head) * seq_q + i;
        let all = (dims.batch * dims.heads * seq_q) as usize * dims.splits as usize;
        Part {
            before: query as usize * dims.splits as usize,
            start: all.div_ceil(2usize) + comptime!(COUNTERS as usize / 4),
        }
    }

    /// Offset in bytes of m and l of split `part`.
    fn state(&self, part: u32) -> u64 {
        u64::cast_from(self.before + part as usize) * 8 + comptime!(4 * COUNTERS as u64)
    }

    /// Index of vector `vector` of the accumulators of split `part`.
    fn sums(&self, part: u32, vector: u32, #[comptime] plan: SplitPlan) -> usize {
        let line = (self.before + part as usize) * comptime!(plan.head_dim as usize / 4);
        self.start + line + vector as usize
    }
}

/// Merges all splits of the cube's rows, one plane per row. The loads of several splits are in
/// flight at once: one state per unit, and each unit's columns of the accumulators.
#[cube]
#[expect(clippy::too_many_arguments, reason = "results, what they are made of, comptime facts")]
fn merge_splits<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    partials: &mut [Vector<f32, Const<4>>],
    scratch: u64,
    scores: &Scores,
    dims: &Dims,
    work: &WorkTile,
    #[comptime] plan: SplitPlan,
) {
    let lane = UNIT_POS_X;
    let vectors = comptime!(plan.head_dim / 4);
    let own = comptime!(vectors.div_ceil(32) as usize);
    let at_once = comptime!(16 / own);
    let mut row = u32::cast_from(UNIT_POS_Y);
    while row < work.rows {
        let part = Part::new(dims, work, row, plan);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(own);
        #[unroll]
        for x in 0..own {
            sums[x] = Vector::new(0.0f32);
        }
        let mut row_max = f32::NEG_INFINITY.runtime();
        let mut l = 0.0f32.runtime();
        let mut first = 0u32.runtime();
        while first < dims.splits {
            let mine = first + lane % comptime!(at_once as u32);
            let state = load_pair(scratch + part.state(min(mine, dims.splits - 1)));
            let mut loaded = Array::<Vector<f32, Const<4>>>::new(comptime!(own * at_once));
            #[unroll]
            for e in 0..at_once {
                let from = min(first + comptime!(e as u32), dims.splits - 1);
                #[unroll]
                for x in 0..own {
                    let vector = min(lane + comptime!(32 * x as u32), vectors - 1);
                    loaded[comptime!(own * e + x)] = partials[part.sums(from, vector, plan)];
                }
            }
            let reached = select(mine < dims.splits, state.extract(0usize), f32::NEG_INFINITY);
            let there = select(mine < dims.splits, state.extract(1usize), 0.0);
            let grown = max(row_max, over_parts_max(reached, at_once));
            let weight = weight_of(reached, grown);
            let factor = weight_of(row_max, grown);
            l = l * factor + over_parts_sum(there * weight, at_once);
            #[unroll]
            for x in 0..own {
                sums[x] *= Vector::new(factor);
            }
            #[unroll]
            for e in 0..at_once {
                let weight = plane_shuffle(weight, comptime!(e as u32));
                if first + comptime!(e as u32) < dims.splits {
                    #[unroll]
                    for x in 0..own {
                        sums[x] += loaded[comptime!(own * e + x)] * Vector::new(weight);
                    }
                }
            }
            row_max = grown;
            first += comptime!(at_once as u32);
        }
        #[unroll]
        for x in 0..own {
            let vector = lane + comptime!(32 * x as u32);
            if vector < vectors {
                store::<F, NO>(
                    out, lse, sums[x], row_max, l, row, vector, scores, dims, work, plan,
                );
            }
        }
        row += comptime!(plan.planes);
    }
}

/// Maximum over `parts` neighbouring units.
#[cube]
fn over_parts_max(value: f32, #[comptime] parts: usize) -> f32 {
    let mut row_max = max(value, plane_shuffle_xor(value, 1));
    row_max = max(row_max, plane_shuffle_xor(row_max, 2));
    row_max = max(row_max, plane_shuffle_xor(row_max, 4));
    if comptime!(parts == 16) {
        row_max = max(row_max, plane_shuffle_xor(row_max, 8));
    }
    row_max
}

/// Sum over `parts` neighbouring units.
#[cube]
fn over_parts_sum(value: f32, #[comptime] parts: usize) -> f32 {
    let mut sum = value + plane_shuffle_xor(value, 1);
    sum += plane_shuffle_xor(sum, 2);
    sum += plane_shuffle_xor(sum, 4);
    if comptime!(parts == 16) {
        sum += plane_shuffle_xor(sum, 8);
    }
    sum
}

/// Stores four elements of a result row; with the first four also its log-sum-exp.
#[cube]
#[expect(clippy::too_many_arguments, reason = "results, what they are made of, where they go")]
fn store<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    sum: Vector<f32, Const<4>>,
    row_max: f32,
    l: f32,
    row: u32,
    vector: u32,
    scores: &Scores,
    dims: &Dims,
    work: &WorkTile,
    #[comptime] plan: SplitPlan,
) {
    let (i, head) = work.query(dims, row, plan);
    // A row without keys is 0.
    let quotient = select(l == 0.0, 0.0, 1.0 / l);
    let mut value = Vector::<f32, NO>::new(0.0f32);
    #[unroll]
    for e in 0..4usize {
        value.insert(e, sum.extract(e) * quotient);
    }
    out[dims.out.at(i, work.batch, head) / 4 + vector as usize] = Vector::cast_from(value);
    if comptime!(scores.rules.lse) {
        // One of the units that share the row.
        if vector == 0 {
            let at = (work.batch * dims.heads + head) * dims.seq_q + i;
            // m and log₂(l) are base-2 logarithms.
            lse[at as usize] = select(
                l == 0.0,
                f32::NEG_INFINITY,
                (row_max + l.ln() * std::f32::consts::LOG2_E) * std::f32::consts::LN_2,
            );
        }
    }
}

/// Increments `counter` and returns its previous value; the caller that finds `last` resets it to
/// 0.
#[cube]
fn count(counter: u64, last: u32) -> u32 {
    let before: u32;
    gpu_asm!(
        "atom.acq_rel.gpu.global.inc.u32 {before}, [{counter}], {last};",
        before = out(_) before,
        counter = in(_) u64::cast_from(counter),
        last = in(_) u32::cast_from(last)
    );
    before
}
