//! Path without tensor cores: neighbouring units share a position, groups of units take positions
//! round robin, and a separate launch merges the splits of a sequence.
//!
//! ```text
//!   for each cache head, split of its sequence, `rows` queries that share it           // one cube
//!     for each `keys` positions                                // `lanes` units; then the next group
//!       s[row, key] = rules(q[row] · k[key])                   // one vector of head_dim per unit
//!       m' = max(m, s); acc[row] = acc[row]·exp(m - m') + Σ exp(s - m')·v[key]
//!     merge the groups' m, l, acc                              // through shared memory
//!   out = merge of the splits                                  // one cube per query
//! ```
//!
//! All arithmetic is f32. Loads of k and v for `keys` positions are in flight at once. All units of
//! a cube run the same number of iterations, because planes exchange registers. Positions past the
//! end repeat the last one with weight 0.
//!
//! Cost: the cache once per `rows` queries; about `12·rows` instructions per vector of k and v.
//!
//! Time of a step on an H200 through Vulkan, over 8192 positions, 32 heads sharing 8 cache heads of
//! 128 elements, bf16: 23.8 us for one sequence, 195 us for 16 (2750 GB/s). `Rows`, with one unit per
//! query, took 31.8 ms for one sequence.
//!
//! Source: Dao et al., "Flash-Decoding" (2023).

use arch::ArchProfile;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::DecodeProblem;
use super::cache::{Cache, CachePlan, Dims};
use super::merge::COUNTERS;
use super::scores::Scores;
use crate::fits::{lacks, limits, shape};

/// Tile sizes and splits of the path without tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemvConfig {
    /// Units per cube.
    pub units: u32,
    /// Positions that a group of neighbouring units loads at once.
    pub keys: u32,
    /// Splits per sequence.
    pub splits: u32,
}

/// Maximum queries per cube.
const ROWS: u32 = 4;

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GemvPlan {
    units: u32,
    keys: u32,
    /// True if there are splits to merge.
    has_splits: bool,
    /// Units that share a position, and vectors per unit of a row.
    lanes: u32,
    own: u32,
    rows: u32,
    pub(super) chunks: u32,
    head_dim: u32,
    seq_q: u32,
    cache: CachePlan,
}

impl GemvPlan {
    pub(super) fn new(arch: &ArchProfile, c: GemvConfig, p: &DecodeProblem) -> Self {
        let vectors = p.head_dim / width(arch, p) as u32;
        // The largest power of two that divides `vectors`, at most a plane.
        let lanes = (1 << vectors.trailing_zeros()).min(arch.plane_size.0.max(1));
        let rows = p.shared_rows().min(ROWS);
        Self {
            units: c.units,
            keys: c.keys,
            has_splits: c.splits > 1,
            lanes,
            own: vectors / lanes,
            rows,
            chunks: p.shared_rows().div_ceil(rows),
            head_dim: p.head_dim,
            seq_q: p.seq_q,
            cache: CachePlan::new(p),
        }
    }

    const fn groups(self) -> u32 {
        self.units / self.lanes
    }

    /// m and l of every group and row, then the groups' accumulators.
    const fn shared_bytes(self) -> u32 {
        4 * self.groups() * self.rows * (2 + self.head_dim)
    }

    /// Registers for queries, accumulators and positions in flight.
    const fn registers(self, width: u32) -> u32 {
        self.own * width * (2 * self.rows + self.keys)
    }
}

/// Vector width of q, k and v in elements.
pub(super) fn width(arch: &ArchProfile, p: &DecodeProblem) -> usize {
    let size = p.dtype.size().max(p.cache.size()) as u32;
    p.width(u64::from((arch.load_bytes.min(16) / size).max(1)))
}

/// Units per cube, and positions per group at once.
pub(super) const GEOMETRIES: [[u32; 2]; 4] = [[128, 4], [256, 4], [256, 2], [128, 8]];

/// Positions that a cube processes at once.
pub(super) fn reach(arch: &ArchProfile, p: &DecodeProblem, units: u32, keys: u32) -> u32 {
    let plan = GemvPlan::new(arch, GemvConfig { units, keys, splits: 1 }, p);
    plan.groups().max(1) * keys
}

pub(super) fn check(
    arch: &ArchProfile,
    p: &DecodeProblem,
    c: &GemvConfig,
) -> Result<(), Infeasible> {
    // The path needs a fixed plane size and shuffles.
    let fixed = arch.plane_size.0 == arch.plane_size.1;
    if !arch.plane_shuffles() || !fixed {
        return Err(lacks("plane shuffles and a fixed plane size"));
    }
    for (name, value) in [("units", c.units), ("keys", c.keys)] {
        if !value.is_power_of_two() || value > 1024 {
            return Err(shape(name, value, "expected a power of two up to 1024"));
        }
    }
    if !c.units.is_multiple_of(arch.plane_size.0) {
        return Err(shape("units", c.units, "expected a multiple of the plane size"));
    }
    if !(1..=MAX_SPLITS).contains(&c.splits) {
        return Err(shape("splits", c.splits, &format!("expected 1 to {MAX_SPLITS}")));
    }
    let width = width(arch, p) as u32;
    if !width.is_multiple_of(4) {
        return Err(shape("head_dim", p.head_dim, "expected rows of whole vectors"));
    }
    // Each is one dimension of the grid.
    if p.batch > 65_535 || p.kv_heads > 65_535 {
        return Err(shape("batch", p.batch, "expected at most 65535"));
    }
    let plan = GemvPlan::new(arch, *c, p);
    if plan.registers(width) > 192 {
        return Err(shape(
            "keys",
            c.keys,
            "accumulators and loaded positions would spill registers",
        ));
    }
    limits(arch, c.units, plan.shared_bytes())
}

pub(super) const MAX_SPLITS: u32 = 64;

/// Bytes of scratch: the counters of the tensor-core path, which may share it, then per query and
/// split one vector with m and l, then its accumulators.
pub(super) fn scratch_bytes(p: &DecodeProblem, c: &GemvConfig) -> u64 {
    match c.splits {
        1 => 0,
        splits => {
            4 * u64::from(COUNTERS)
                + p.rows() * u64::from(splits) * (16 + 4 * u64::from(p.head_dim))
        }
    }
}

/// Index in vectors of the first split's state.
const FIRST: usize = COUNTERS as usize / 4;

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(crate) fn gemv<F: Float, C: Numeric, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<C, NI>],
    v: &[Vector<C, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    partials: &mut [Vector<f32, Const<4>>],
    cache: &Cache,
    scores: &Scores,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) {
    let width = NI::value();
    let (rows, keys, own) = comptime!((plan.rows as usize, plan.keys as usize, plan.own as usize));
    let (lanes, head_dim, groups) = comptime!((plan.lanes, plan.head_dim, plan.groups()));
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let chunks = comptime!(plan.chunks);
    let (chunk, part) = (CUBE_POS_X % chunks, CUBE_POS_X / chunks);
    let (kv_head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let length = cache.length(dims, batch);
    let log2 = std::f32::consts::LN_2;

    let mut query = Array::<Vector<f32, NI>>::new(comptime!(rows * own)); // [rows, own]
    let mut acc = Array::<Vector<f32, NI>>::new(comptime!(rows * own));
    let mut position = Array::<i32>::new(rows);
    let mut row_max = Array::<f32>::new(rows);
    let mut sum = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        let (i, head) = query_of(dims, chunk, comptime!(r as u32), kv_head, plan);
        let from = dims.q.at(i, batch, head) / NI::value() + lane as usize;
        #[unroll]
        for x in 0..own {
            query[comptime!(r * own + x)] =
                Vector::cast_from(q[from + comptime!(x * lanes as usize)]);
            acc[comptime!(r * own + x)] = Vector::new(0.0f32);
        }
        position[r] = (length + i) as i32 - comptime!(plan.seq_q as i32);
        row_max[r] = scores.hidden;
        sum[r] = 0.0f32.runtime();
    }

    // Positions that some query sees, then those of this split.
    let first = scores.first(length as i32 - comptime!(plan.seq_q as i32)) as u32;
    let step = comptime!(groups * plan.keys);
    let share = (length - min(first, length)).div_ceil(dims.splits).div_ceil(step) * step;
    let from = first + part * share;
    let end = min(from + share, length);
    let mut base = from;
    while base < end {
        let own_key = base + group * comptime!(plan.keys);
        let mut k_now = Array::<Vector<C, NI>>::new(comptime!(keys * own));
        let mut v_now = Array::<Vector<C, NI>>::new(comptime!(keys * own));
        let mut k_scales = Array::<f32>::new(keys);
        let mut v_scales = Array::<f32>::new(keys);
        #[unroll]
        for j in 0..keys {
            let key = min(own_key + comptime!(j as u32), end - 1);
            let (page, row) = cache.place(dims, batch, key, plan.cache);
            let from_k = dims.k.at(page, kv_head, row) / NI::value() + lane as usize;
            let from_v = dims.v.at(page, kv_head, row) / NI::value() + lane as usize;
            #[unroll]
            for x in 0..own {
                let apart = comptime!(x * lanes as usize);
                k_now[comptime!(j * own + x)] = k[from_k + apart];
                v_now[comptime!(j * own + x)] = v[from_v + apart];
            }
            let (k_scale, v_scale) = cache.scales(dims, page, kv_head, row);
            k_scales[j] = k_scale;
            v_scales[j] = v_scale;
        }
        #[unroll]
        for r in 0..rows {
            let mut s = Array::<f32>::new(keys);
            let mut grown = row_max[r];
            #[unroll]
            for j in 0..keys {
                let mut products = Vector::<f32, NI>::new(0.0f32);
                #[unroll]
                for x in 0..own {
                    let key = Vector::<f32, NI>::cast_from(k_now[comptime!(j * own + x)]);
                    products = fma(query[comptime!(r * own + x)], key, products);
                }
                let mut dot = 0.0f32.runtime();
                #[unroll]
                for e in 0..width {
                    dot += products.extract(e);
                }
                #[unroll]
                for level in 0..comptime!(lanes.ilog2()) {
                    dot += plane_shuffle_xor(dot, comptime!(1u32 << level));
                }
                let key = own_key + comptime!(j as u32);
                let place = key as i32;
                let seen = key < end && place <= position[r] && place >= scores.first(position[r]);
                let score = scores.score(dot * k_scales[j]) * scores.unit();
                s[j] = select(seen, score, scores.hidden);
                grown = max(grown, s[j]);
            }
            // -inf - -inf is NaN: leave a query without keys so far as it is.
            let shift = select(grown == scores.hidden, 0.0, grown);
            let factor = ((row_max[r] - shift) * log2).exp();
            row_max[r] = grown;
            sum[r] *= factor;
            #[unroll]
            for x in 0..own {
                acc[comptime!(r * own + x)] *= Vector::new(factor);
            }
            #[unroll]
            for j in 0..keys {
                let weight = ((s[j] - shift) * log2).exp();
                sum[r] += weight;
                #[unroll]
                for x in 0..own {
                    let at = comptime!(r * own + x);
                    let value = Vector::<f32, NI>::cast_from(v_now[comptime!(j * own + x)]);
                    acc[at] = fma(Vector::new(weight * v_scales[j]), value, acc[at]);
                }
            }
        }
        base += step;
    }

    // [groups, rows] of m, the same of l, [groups, rows, head_dim] of accumulators
    let states = comptime!((groups * plan.rows) as usize);
    let mut tops = Shared::<[f32]>::new_slice(states);
    let mut parts = Shared::<[f32]>::new_slice(states);
    let mut sums = Shared::<[f32]>::new_slice(comptime!(states * head_dim as usize));
    #[unroll]
    for r in 0..rows {
        let line = (group * comptime!(plan.rows) + comptime!(r as u32)) as usize;
        if lane == 0 {
            tops[line] = row_max[r];
            parts[line] = sum[r];
        }
        #[unroll]
        for x in 0..own {
            let column = (lane as usize + comptime!(x * lanes as usize)) * NI::value();
            #[unroll]
            for e in 0..width {
                sums[line * comptime!(head_dim as usize) + column + e] =
                    acc[comptime!(r * own + x)].extract(e);
            }
        }
    }
    sync_cube();
    let fours = comptime!(head_dim / 4);
    let there = min(dims.group * comptime!(plan.seq_q) - chunk * comptime!(plan.rows), plan.rows);
    let mut task = UNIT_POS;
    while task < there * fours {
        let (row, four) = (task / fours, task % fours);
        let mut grown = scores.hidden;
        for g in 0..groups {
            grown = max(grown, tops[(g * comptime!(plan.rows) + row) as usize]);
        }
        let shift = select(grown == scores.hidden, 0.0, grown);
        let mut l = 0.0f32.runtime();
        let mut value = Vector::<f32, Const<4>>::new(0.0f32);
        for g in 0..groups {
            let line = (g * comptime!(plan.rows) + row) as usize;
            let factor = ((tops[line] - shift) * log2).exp();
            l += parts[line] * factor;
            let mut four_sums = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for e in 0..4usize {
                let at = line * comptime!(head_dim as usize) + four as usize * 4 + e;
                four_sums.insert(e, sums[at]);
            }
            value = fma(four_sums, Vector::new(factor), value);
        }
        let (i, head) = query_of(dims, chunk, row, kv_head, plan);
        let id = (batch * dims.heads + head) * dims.seq_q + i;
        if comptime!(plan.has_splits) {
            let place = id as usize * dims.splits as usize + part as usize;
            let all = (dims.batch * dims.heads * dims.seq_q) as usize * dims.splits as usize;
            let to = FIRST + all + place * comptime!(fours as usize) + four as usize;
            partials[to] = value;
            // One of the units that share the row.
            if four == 0 {
                let mut state = Vector::<f32, Const<4>>::new(0.0f32);
                state.insert(0usize, grown);
                state.insert(1usize, l);
                partials[FIRST + place] = state;
            }
        } else {
            let to = dims.out.at(i, batch, head) + four as usize * 4;
            store::<F, NO>(out, lse, value, grown, l, to, id, four, scores);
        }
        task += comptime!(plan.units);
    }
}

/// Query and head of row `row` of a cube; rows past the end get the last query.
#[cube]
fn query_of(
    dims: &Dims,
    chunk: u32,
    row: u32,
    kv_head: u32,
    #[comptime] plan: GemvPlan,
) -> (u32, u32) {
    let seq_q = comptime!(plan.seq_q);
    let row = min(chunk * comptime!(plan.rows) + row, dims.group * seq_q - 1);
    (row % seq_q, kv_head * dims.group + row / seq_q)
}

/// Stores four elements of a result row from element `to` on; with the first four also its
/// log-sum-exp.
#[cube]
#[expect(clippy::too_many_arguments, reason = "results, what they are made of, where they go")]
fn store<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    sum: Vector<f32, Const<4>>,
    row_max: f32,
    l: f32,
    to: usize,
    id: u32,
    four: u32,
    scores: &Scores,
) {
    // A row without keys is 0.
    let quotient = select(l == 0.0, 0.0, 1.0 / l);
    #[unroll]
    for e in 0..4usize {
        out[to + e] = Vector::new(F::cast_from(sum.extract(e) * quotient));
    }
    if comptime!(scores.rules.lse) {
        // One of the units that share the row.
        if four == 0 {
            let log = row_max * std::f32::consts::LN_2 + l.ln();
            lse[id as usize] = select(l == 0.0, scores.hidden, log);
        }
    }
}

/// Merges the splits of every query, one cube per query.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn merge_parts<F: Float>(
    out: &mut [Vector<F, Const<1>>],
    lse: &mut [f32],
    partials: &[Vector<f32, Const<4>>],
    scores: Scores,
    dims: &Dims,
    #[comptime] head_dim: u32,
    #[define(F)] _dtype: ElemType,
) {
    let fours = comptime!(head_dim / 4);
    let log2 = std::f32::consts::LN_2;
    let id = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    let queries = dims.batch * dims.heads * dims.seq_q;
    if id < queries {
        let (i, head) = (id % dims.seq_q, id / dims.seq_q % dims.heads);
        let batch = id / dims.seq_q / dims.heads;
        let before = id as usize * dims.splits as usize;
        let all = FIRST + queries as usize * dims.splits as usize;
        let mut grown = scores.hidden;
        for part in 0..dims.splits {
            grown = max(grown, partials[FIRST + before + part as usize].extract(0usize));
        }
        let shift = select(grown == scores.hidden, 0.0, grown);
        let mut four = UNIT_POS;
        while four < fours {
            let mut l = 0.0f32.runtime();
            let mut value = Vector::<f32, Const<4>>::new(0.0f32);
            for part in 0..dims.splits {
                let place = before + part as usize;
                let state = partials[FIRST + place];
                let factor = ((state.extract(0usize) - shift) * log2).exp();
                l += state.extract(1usize) * factor;
                let sums = partials[all + place * comptime!(fours as usize) + four as usize];
                value = fma(sums, Vector::new(factor), value);
            }
            let to = dims.out.at(i, batch, head) + four as usize * 4;
            store::<F, Const<1>>(out, lse, value, grown, l, to, id, four, &scores);
            four += CUBE_DIM;
        }
    }
}
