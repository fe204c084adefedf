//! Cooperative-matrix path of both sides: the forward loop ([`subgroup`](crate::attention::subgroup))
//! with the operand roles of the tensor-core path ([`flash`](super::flash)).
//!
//! | loop                               | level                                                                 |
//! |------------------------------------|-----------------------------------------------------------------------|
//! | blocks of `planes · rows` own rows | cubes                                                                 |
//! | tiles of `tile_kv` others          | both operands in shared memory, the next tile prefetched in registers |
//! | `rows` own rows                    | planes; both operands and the accumulator are matrices, in registers  |
//!
//! ```text
//!   s = own 1 · other 1ᵀ                  // matrices -> shared memory -> the units of a row
//!   p = exp(rules(s) - lse)
//!   g = own 2 · other 2ᵀ                  // through the same shared memory;  not for dv
//!   p, or ds = p · (g - delta) · rules'   // -> shared memory -> matrices
//!   sum += ds · other 1, or p · other 2
//! ```
//!
//! A launch has one accumulator. dk and dv are two launches, and both compute q·kᵀ. One launch for
//! both would need 64 registers of own rows and 128 of accumulators at head dimension 128.
//!
//! Cost: `6·head_dim` flop per visible pair for dq, the same for dk, `4·head_dim` for dv; the
//! literature counts `10·head_dim`. 20 bytes per score pass through shared memory.
//!
//! Time in ms at 4 x 16 heads, 4096 positions, head dimension 128, bf16, full / causal. The tuner
//! measured it on an H200 through Vulkan. The plain path takes 1075 / 695, the `mma.sync` path on
//! the same card 5.3 / 2.9. One side changes at a time:
//!
//! | query side: planes, rows, tile | key side   | full | causal |
//! |--------------------------------|------------|------|--------|
//! | 8, 16, 32                      | 8, 16, 32  | 12.3 | 6.8    |
//! | 8, 16, 16                      | 8, 16, 32  | 12.4 | 6.9    |
//! | 4, 16, 16                      | 8, 16, 32  | 12.5 | 6.9    |
//! | 8, 16, 32                      | 4, 16, 16  | 13.6 | 7.3    |
//!
//! At head dimension 64 the order is the same with larger gaps: 1.36 ms (2048 positions, causal),
//! and 6.7 ms with tiles of 16.

use cubecl::cmma::Matrix;
use cubecl::prelude::*;

use super::Roles;
use super::flash::Side;
use crate::attention::scores::{Place, Region, Scores};
use crate::attention::subgroup::{
    Rows, SubgroupConfig, SubgroupPlan, accumulate, corner_of, fragments_of, multiply, store_rows,
};
use crate::attention::{Dims, Sequences};
use crate::cooperative::{Corner, U32x4, put, read, zeros};
use crate::round::rounded;

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SidePlan {
    pub(super) side: Side,
    /// `tile_kv` is the tile of the other side; `exact` is true if none of its tiles reaches past
    /// the end.
    pub(super) subgroup: SubgroupPlan,
}

impl SidePlan {
    /// Bytes of shared memory of `config`: those of the forward pass, plus the statistics of a tile
    /// of queries.
    pub(super) const fn shared_bytes(config: SubgroupConfig, head_dim: u32) -> u32 {
        config.shared_bytes(head_dim) + 8 * config.tile_kv
    }

    /// Estimated registers per unit: own rows, accumulators, weights, prefetched tiles, addresses.
    pub(super) const fn registers(
        config: SubgroupConfig,
        side: Side,
        head_dim: u32,
        plane: u32,
    ) -> u32 {
        let matrices = config.rows / 16 * 256 / plane;
        let operands = if side.first { 2 } else { 1 };
        let own = matrices * (head_dim / 16 * (2 + operands) / 2 + 1 + config.tile_kv / 16);
        own + config.tile_kv * head_dim / (config.planes * plane) + 40
    }

    /// Region of a plane's scores, to which masks and ends apply.
    const fn region(self) -> Region {
        let SubgroupConfig { rows, tile_kv, .. } = self.subgroup.config;
        let (queries, keys) = if self.side.keys { (tile_kv, rows) } else { (rows, tile_kv) };
        Region { queries, keys, transposed: self.side.keys, exact: self.subgroup.exact }
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(super) fn subgroup<F: Float, M: Int, NI: Size, NO: Size>(
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
    #[comptime] side_plan: SidePlan,
) {
    let (side, plan) = comptime!((side_plan.side, side_plan.subgroup));
    let SubgroupConfig { rows, tile_kv: tile_len, .. } = comptime!(plan.config);
    let tile_own = comptime!(plan.config.tile_q());
    let sharers = comptime!(plan.sharers());
    let (slots, pass) = comptime!(plan.slots());
    let (held, line) = comptime!((plan.held(), plan.line()));
    let tile = comptime!(plan.tile());

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * plan.plane + lane;
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
    let (other_head, heads, query_head) = if comptime!(side.keys) {
        (own_head * dims.group, dims.group, own_head * dims.group)
    } else {
        (own_head / dims.group, 1u32.runtime(), own_head)
    };

    let mut tile_1 =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile.vectors() as usize), 128usize);
    let mut tile_2 =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile.vectors() as usize), 128usize);
    // [planes, rows, line]
    let mut shared_s = Shared::<[Vector<f32, Const<4>>]>::new_aligned_slice(
        comptime!((tile_own * line / 4) as usize),
        32usize,
    );
    let mut shared_p = Shared::<[Vector<F, Const<4>>]>::new_aligned_slice(
        comptime!((tile_own * line / 4) as usize),
        32usize,
    );
    // Statistics of a tile of queries: lse, then delta.
    let fours = comptime!(tile_len / 4);
    let mut shared_stats = Shared::<[Vector<f32, Const<4>>]>::new_aligned_slice(
        comptime!(if side.keys { 2 * fours as usize } else { 1 }),
        32usize,
    );

    let corner = corner_of(plan);
    let (down, across) = (lane / sharers, lane % sharers);
    let row0 = first_row + plane * rows;
    let own = Rows { first: row0, end: own_len, before: from_own, batch, head: own_head };
    let a_1 = fragments_of::<F, NI>(own_1, &roles.own_1, &own, &mut shared_p, plan);
    let a_2 = if comptime!(side.first) {
        fragments_of::<F, NI>(own_2, &roles.own_2, &own, &mut shared_p, plan)
    } else {
        Sequence::<Matrix<F>>::new()
    };
    let mut acc = Sequence::<Matrix<f32>>::new(); // [rows / 16, head_dim / 16]
    #[unroll]
    for _ in 0..comptime!((rows * plan.head_dim / 256) as usize) {
        acc.push(zeros(16usize));
    }
    // Statistics of this unit's rows, if rows are queries.
    let mut own_lse = Array::<f32>::new(slots);
    let mut own_delta = Array::<f32>::new(slots);
    if comptime!(!side.keys) {
        #[unroll]
        for i in 0..slots {
            let query = min(row0 + comptime!(pass * i as u32) + down, own_len - 1);
            let pair = stats[dims.lse_at(here.from_q + query, batch, own_head)];
            own_lse[i] = pair.extract(0usize);
            own_delta[i] = pair.extract(1usize);
        }
    }
    // `Scores::unit` gives exponents of 2; this path computes powers of e.
    let power = scores.unit() * std::f32::consts::LN_2;

    let (from, end) = if comptime!(side.keys) {
        scores.seers(&here, first_row, comptime!(tile_own))
    } else {
        scores.range(&here, first_row, comptime!(tile_own))
    };
    let first = from / tile_len;
    let tiles = end.div_ceil(tile_len) - first;
    let total = tiles * heads;
    let mut at_1 = Corner {
        start: roles.other_1.at(from_other, batch, other_head),
        stride: roles.other_1.seq,
        line: first * tile_len,
        lines: other_len,
        element: 0u32.runtime(),
        elements: comptime!(plan.head_dim).runtime(),
    };
    let mut at_2 = Corner {
        start: roles.other_2.at(from_other, batch, other_head),
        stride: roles.other_2.seq,
        line: first * tile_len,
        lines: other_len,
        element: 0u32.runtime(),
        elements: comptime!(plan.head_dim).runtime(),
    };
    if comptime!(plan.exact) {
        // A block without visible tiles may start past the end; its prefetch must not.
        at_1.line = min(at_1.line, other_len - tile_len);
        at_2.line = at_1.line;
    }
    let copies = comptime!(tile.copies());
    let (mut next_1, mut next_2) = (Array::<U32x4>::new(copies), Array::<U32x4>::new(copies));
    read::<F, NI>(other_1, &mut next_1, &at_1, unit, tile);
    read::<F, NI>(other_2, &mut next_2, &at_2, unit, tile);

    for step in 0..total {
        let (head_at, col0) = (step / tiles, (first + step % tiles) * tile_len);
        sync_cube();
        put(&mut tile_1, &next_1, unit, tile);
        put(&mut tile_2, &next_2, unit, tile);
        #[expect(clippy::collapsible_if, reason = "one is comptime")]
        if comptime!(side.keys) {
            if unit < fours {
                let mut lse = Vector::<f32, Const<4>>::new(0.0f32);
                let mut delta = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for e in 0..4usize {
                    let query = min(col0 + 4 * unit + comptime!(e as u32), other_len - 1);
                    let pair = stats[dims.lse_at(here.from_q + query, batch, query_head + head_at)];
                    lse.insert(e, pair.extract(0usize));
                    delta.insert(e, pair.extract(1usize));
                }
                shared_stats[unit as usize] = lse;
                shared_stats[(fours + unit) as usize] = delta;
            }
        }
        sync_cube();
        // The read after the last tile is not used.
        let ahead = min(step + 1, total - 1);
        at_1.start = roles.other_1.at(from_other, batch, other_head + ahead / tiles);
        at_2.start = roles.other_2.at(from_other, batch, other_head + ahead / tiles);
        at_1.line = (first + ahead % tiles) * tile_len;
        at_2.line = at_1.line;
        read::<F, NI>(other_1, &mut next_1, &at_1, unit, tile);
        read::<F, NI>(other_2, &mut next_2, &at_2, unit, tile);

        // p = exp(rules(s) - lse) for this unit's scores: every `sharers`th vector of each row.
        multiply::<F>(&a_1, &tile_1, &mut shared_s, plan);
        sync_plane();
        let head = query_head + head_at;
        let corner_place = if comptime!(side.keys) {
            Place { batch, head, row: col0, col: row0 }
        } else {
            Place { batch, head, row: row0, col: col0 }
        };
        let mut cut = scores.cuts(&corner_place, &here, comptime!(side_plan.region()));
        if comptime!(scores.rules.every()) {
            cut = true;
        }
        let mut weights = Array::<Vector<f32, Const<4>>>::new(comptime!(slots * held));
        #[unroll]
        for i in 0..slots {
            let line_of = comptime!(pass * i as u32) + down;
            let row = row0 + line_of;
            #[unroll]
            for j in 0..held {
                let vector = across + comptime!(j as u32 * sharers);
                let products = shared_s[(corner + line_of * comptime!(line / 4) + vector) as usize];
                let mut lse = Vector::<f32, Const<4>>::new(own_lse[i]);
                if comptime!(side.keys) {
                    lse = shared_stats[vector as usize];
                }
                let mut four = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for e in 0..4usize {
                    let mut score = products.extract(e);
                    if cut {
                        let other = col0 + 4 * vector + comptime!(e as u32);
                        let (query, key) =
                            if comptime!(side.keys) { (other, row) } else { (row, other) };
                        let place = Place { batch, head, row: query, col: key };
                        let ruled = scores.score(score, &place, &here, dims);
                        score = select(query < here.seq_q, ruled, scores.hidden);
                    }
                    let shift = lse.extract(e) * comptime!(-std::f32::consts::LN_2);
                    let mut weight = fma(score, power, shift).exp();
                    if comptime!(side.first && scores.rules.softcap) {
                        weight *= scores.slope_at(products.extract(e));
                    }
                    four.insert(e, weight);
                }
                weights[comptime!(i * held + j)] = four;
            }
        }

        // ds = p · (g - delta) · rules'
        if comptime!(side.first) {
            // Wait until all scores are in registers; g reuses their place.
            sync_plane();
            multiply::<F>(&a_2, &tile_2, &mut shared_s, plan);
            sync_plane();
            #[unroll]
            for i in 0..slots {
                let line_of = comptime!(pass * i as u32) + down;
                #[unroll]
                for j in 0..held {
                    let vector = across + comptime!(j as u32 * sharers);
                    let g = shared_s[(corner + line_of * comptime!(line / 4) + vector) as usize];
                    let mut delta = Vector::<f32, Const<4>>::new(own_delta[i]);
                    if comptime!(side.keys) {
                        delta = shared_stats[(fours + vector) as usize];
                    }
                    weights[comptime!(i * held + j)] *= g - delta;
                }
            }
        }
        #[unroll]
        for i in 0..slots {
            let line_of = comptime!(pass * i as u32) + down;
            #[unroll]
            for j in 0..held {
                let vector = across + comptime!(j as u32 * sharers);
                let mut four = Vector::<F, Const<4>>::new(F::new(0.0));
                #[unroll]
                for e in 0..4usize {
                    let weight = weights[comptime!(i * held + j)].extract(e);
                    four.insert(e, rounded::<F>(weight, plan.by_hand));
                }
                shared_p[(corner + line_of * comptime!(line / 4) + vector) as usize] = four;
            }
        }
        sync_plane();
        if comptime!(side.first) {
            accumulate::<F>(&acc, &shared_p, &tile_1, plan);
        } else {
            accumulate::<F>(&acc, &shared_p, &tile_2, plan);
        }
    }

    let mut factors = Array::<f32>::new(slots);
    #[unroll]
    for i in 0..slots {
        factors[i] = if comptime!(side.first) { scores.scale } else { 1.0f32.runtime() };
    }
    if comptime!(side.first) {
        store_rows::<F, NO>(out_1, &roles.out_1, &own, &acc, &factors, &mut shared_s, plan);
    } else {
        store_rows::<F, NO>(out_2, &roles.out_2, &own, &acc, &factors, &mut shared_s, plan);
    }
}
