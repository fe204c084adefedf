//! The kernel: finds thresholds by searches over the bits of weights, then draws a token.

use cubecl::prelude::*;

use super::{CHOICE, RESULT};
use crate::rows::{Fold, RowPlan, row_fold};

/// Columns: groups of four that are this far apart share a column.
pub(super) const COLUMNS: u32 = 1024;
/// Thresholds that one pass of a search tests, which settles two bits.
pub(super) const PIVOTS: u32 = 3;
/// Bits of 1.0, the largest weight.
const ONE: u32 = 0x3f80_0000;

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn sample_rows<N: Size>(
    logits: &[Vector<f32, N>],             // [rows, vocab]
    choices: &[u32],                       // [rows, CHOICE]
    seen: &mut [u32],                      // [rows, seen_words], then [seen_words] of absent tokens
    weights: &mut [Vector<f32, Const<4>>], // [rows, groups]
    out: &mut [f32],                       // [rows, RESULT]
    vocab: u32,
    hidden: f32,
    #[comptime] masked: bool,
    #[comptime] plan: RowPlan,
) {
    let units = comptime!(plan.units);
    let row = CUBE_POS_X;
    let groups = vocab.div_ceil(4);
    let choice = row as usize * comptime!(CHOICE);
    let temperature = f32::reinterpret(choices[choice]);
    let penalty = f32::reinterpret(choices[choice + 4]);
    let row_seen = row * vocab.div_ceil(32);
    let row_weights = (row * groups) as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!((PIVOTS * units) as usize));
    // Of the drawn token: its id, its weight and the sum of weights. The likeliest token has the share 1.
    let mut found = Shared::<[u32]>::new_slice(3usize);
    if UNIT_POS == 0 {
        found[1] = ONE;
        found[2] = ONE;
    }

    // Find the largest logit, and the first of the largest scores.
    let mut top_logit = hidden;
    let mut top = hidden;
    let mut likeliest = 0u32.runtime();
    let mut nan = 0.0f32.runtime();
    let mut g = UNIT_POS;
    while g < groups {
        let four = logits_of(logits, &*seen, row, g, vocab, hidden, masked);
        let bits = seen_of(&*seen, row_seen, g, penalty);
        #[unroll]
        for e in 0..4u32 {
            let logit = four[comptime!(e as usize)];
            let score = punished(logit, (bits >> e) & 1, penalty);
            if logit.is_nan() {
                nan = 1.0f32.runtime();
            }
            top_logit = max(top_logit, logit);
            if score > top {
                top = score;
                likeliest = 4 * g + e;
            }
        }
        g += units;
    }
    let nan = row_fold(nan, &mut shared, Fold::Max, plan);
    let top_logit = row_fold(top_logit, &mut shared, Fold::Max, plan);
    let own_top = top;
    let top = row_fold(own_top, &mut shared, Fold::Max, plan);
    // Ids of the largest score, negated so that the maximum is the first id. f32 holds ids below 2^24
    // exactly, and both halves of larger ids.
    let there = own_top == top;
    let high = row_fold(
        select(there, -f32::cast_from(likeliest >> 16), hidden),
        &mut shared,
        Fold::Max,
        plan,
    );
    let there = there && -f32::cast_from(likeliest >> 16) == high;
    let low = row_fold(
        select(there, -f32::cast_from(likeliest & 0xffff), hidden),
        &mut shared,
        Fold::Max,
        plan,
    );
    let mut token = 0u32.runtime();

    // A row is invalid if it has NaN, or an infinity instead of a finite maximum.
    let finite = nan == 0.0 && top > hidden && top < -hidden && top_logit < -hidden;
    let mut total_exp = 0.0f32.runtime();
    if finite {
        token = u32::cast_from(-high) * 65536 + u32::cast_from(-low);
        let mut sum = 0.0f32.runtime();
        let mut g = UNIT_POS;
        if comptime!(plan.units == 1) {
            // A unit that sums a whole vocabulary uses compensated summation (Kahan, "Further remarks on
            // reducing truncation errors", 1965).
            let mut lost = 0.0f32.runtime();
            while g < groups {
                let four = logits_of(logits, &*seen, row, g, vocab, hidden, masked);
                let pair = (four[0] - top_logit).exp() + (four[1] - top_logit).exp();
                let other = (four[2] - top_logit).exp() + (four[3] - top_logit).exp();
                let more = pair + other - lost;
                let next = sum + more;
                lost = (next - sum) - more;
                sum = next;
                g += units;
            }
        } else {
            while g < groups {
                let four = logits_of(logits, &*seen, row, g, vocab, hidden, masked);
                #[unroll]
                for e in 0..4usize {
                    sum += (four[e] - top_logit).exp();
                }
                g += units;
            }
        }
        let mut sums = Array::<f32>::new(1usize);
        sums[0] = sum;
        add_units(&mut sums, &mut shared, 1u32, plan);
        total_exp = sums[0];
        if temperature > 0.0 {
            let mut g = UNIT_POS;
            while g < groups {
                let four = logits_of(logits, &*seen, row, g, vocab, hidden, masked);
                let bits = seen_of(&*seen, row_seen, g, penalty);
                let mut made = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for e in 0..4u32 {
                    let score = punished(four[comptime!(e as usize)], (bits >> e) & 1, penalty);
                    // The weight of the largest score is exactly 1; -inf - x is -inf.
                    let weight = min(((score - top) / temperature).exp(), 1.0f32.runtime());
                    made.insert(comptime!(e as usize), select(score == top, 1.0, weight));
                }
                weights[row_weights + g as usize] = made;
                g += units;
            }
            // Choices are read only when needed: a cube of 1024 units has 64 registers a unit.
            let top_k = choices[choice + 1];
            let mut least = 0u32.runtime();
            if top_k > 0 && top_k < vocab {
                let need = f32::cast_from(top_k);
                least =
                    search(&*weights, row_weights, groups, least, need, false, &mut shared, plan);
            }
            let top_p = f32::reinterpret(choices[choice + 2]);
            if top_p < 1.0 {
                let mut sum = Array::<f32>::new(1usize);
                sum[0] = own_sum(&*weights, row_weights, groups, least, plan);
                add_units(&mut sum, &mut shared, 1u32, plan);
                let need = top_p * sum[0];
                let found =
                    search(&*weights, row_weights, groups, least, need, true, &mut shared, plan);
                least = max(least, found);
            }
            // For weights, the order of their bits is the order of their values. The likeliest token is
            // always kept.
            least = min(max(least, choices[choice + 3]), ONE);
            let uniform = f32::reinterpret(choices[choice + 5]);
            token = draw(&*weights, row_weights, groups, least, uniform, &mut found, plan);
        }
    }
    if UNIT_POS == 0 {
        let to = row as usize * comptime!(RESULT);
        let mut logprob = 0.0f32.runtime();
        if finite {
            let four = logits_of(logits, &*seen, row, token / 4, vocab, hidden, masked);
            let mut logit = four[0];
            #[unroll]
            for e in 1..4u32 {
                logit = select(token % 4 == e, four[comptime!(e as usize)], logit);
            }
            logprob = logit - top_logit - total_exp.ln();
            let word = (row_seen + token / 32) as usize;
            seen[word] |= 1u32 << (token % 32);
        }
        out[to] = f32::cast_from(token);
        out[to + 1] = logprob;
        let share = f32::reinterpret(found[1]) / f32::reinterpret(found[2]);
        out[to + 2] = share.ln();
        out[to + 3] = select(finite, 0.0f32, 1.0f32);
    }
}

/// Returns four logits of a row; past its end and for absent tokens they are -inf.
#[cube]
fn logits_of<N: Size>(
    logits: &[Vector<f32, N>],
    seen: &[u32],
    row: u32,
    group: u32,
    vocab: u32,
    hidden: f32,
    #[comptime] masked: bool,
) -> Array<f32> {
    let mut four = Array::<f32>::new(4usize);
    let width = N::value();
    if comptime!(width == 4) {
        let vector = logits[(row * (vocab / 4) + group) as usize];
        #[unroll]
        for e in 0..4usize {
            four[e] = vector.extract(e);
        }
    } else {
        #[unroll]
        for e in 0..4u32 {
            let id = 4 * group + e;
            let value = logits[(row * vocab + min(id, vocab - 1)) as usize].extract(0usize);
            four[comptime!(e as usize)] = select(id < vocab, value, hidden);
        }
    }
    if comptime!(masked) {
        // The bits of absent tokens follow those of the rows, one row a cube.
        let absent = seen[(CUBE_COUNT_X * vocab.div_ceil(32) + group / 8) as usize];
        #[unroll]
        for e in 0..4u32 {
            let there = (absent >> (group % 8 * 4 + e)) & 1 == 0;
            four[comptime!(e as usize)] = select(there, four[comptime!(e as usize)], hidden);
        }
    }
    four
}

/// Returns the bits of four tokens that were seen, or 0 without a penalty.
#[cube]
fn seen_of(seen: &[u32], first: u32, group: u32, penalty: f32) -> u32 {
    let mut bits = 0u32.runtime();
    if penalty != 1.0 {
        bits = seen[(first + group / 8) as usize] >> (group % 8 * 4);
    }
    bits
}

/// Applies the repetition penalty to the logit of a seen token.
#[cube]
fn punished(logit: f32, seen: u32, penalty: f32) -> f32 {
    let mut score = logit;
    if seen == 1 {
        score = select(logit > 0.0, logit / penalty, logit * penalty);
    }
    score
}

/// Sums `count` values over all units; each unit gets the sums.
#[cube]
fn add_units(
    values: &mut Array<f32>,
    shared: &mut [f32],
    #[comptime] count: u32,
    #[comptime] plan: RowPlan,
) {
    let units = comptime!(plan.units);
    if comptime!(units > 1) {
        sync_cube();
        #[unroll]
        for i in 0..count {
            shared[(i * units + UNIT_POS) as usize] = values[comptime!(i as usize)];
        }
        #[unroll]
        for level in 0..comptime!(units.ilog2()) {
            sync_cube();
            let apart = comptime!(units >> (level + 1));
            if UNIT_POS < apart {
                #[unroll]
                for i in 0..count {
                    let other = shared[(i * units + UNIT_POS + apart) as usize];
                    shared[(i * units + UNIT_POS) as usize] += other;
                }
            }
        }
        sync_cube();
        #[unroll]
        for i in 0..count {
            values[comptime!(i as usize)] = shared[comptime!((i * units) as usize)];
        }
    }
}

/// Returns this unit's part of the sum of weights whose bits are at least `least`.
#[cube]
fn own_sum(
    weights: &[Vector<f32, Const<4>>],
    first: usize,
    groups: u32,
    least: u32,
    #[comptime] plan: RowPlan,
) -> f32 {
    let mut sum = 0.0f32.runtime();
    let mut g = UNIT_POS;
    while g < groups {
        let four = weights[first + g as usize];
        #[unroll]
        for e in 0..4usize {
            let weight = four.extract(e);
            sum += select(u32::reinterpret(weight) >= least, weight, 0.0);
        }
        g += comptime!(plan.units);
    }
    sum
}

/// Returns the largest threshold such that the weights with bits of at least the threshold and `floor` sum to
/// `need` (if `mass`) or number `need`. The threshold is at most the bits of 1.0.
#[cube]
#[expect(
    clippy::too_many_arguments,
    reason = "weights, what is looked for, and where it is added up"
)]
fn search(
    weights: &[Vector<f32, Const<4>>],
    first: usize,
    groups: u32,
    floor: u32,
    need: f32,
    #[comptime] mass: bool,
    shared: &mut [f32],
    #[comptime] plan: RowPlan,
) -> u32 {
    let mut found = 0u32.runtime();
    let mut shift = 28u32.runtime();
    let mut more = true.runtime();
    while more {
        let mut sums = Array::<f32>::new(3usize);
        #[unroll]
        for i in 0..PIVOTS {
            sums[comptime!(i as usize)] = 0.0f32;
        }
        let mut g = UNIT_POS;
        while g < groups {
            let four = weights[first + g as usize];
            #[unroll]
            for e in 0..4usize {
                let weight = four.extract(e);
                let bits = u32::reinterpret(weight);
                let counts = if comptime!(mass) { weight } else { 1.0f32.runtime() };
                #[unroll]
                for i in 0..PIVOTS {
                    let pivot = max(found + (comptime!(i + 1) << shift), floor);
                    sums[comptime!(i as usize)] += select(bits >= pivot, counts, 0.0);
                }
            }
            g += comptime!(plan.units);
        }
        add_units(&mut sums, shared, PIVOTS, plan);
        // Sums decrease as pivots grow.
        let mut steps = 0u32.runtime();
        #[unroll]
        for i in 0..PIVOTS {
            steps += select(sums[comptime!(i as usize)] >= need, 1u32, 0u32);
        }
        found += steps << shift;
        more = shift > 0;
        shift = select(more, shift - 2, 0);
    }
    min(found, ONE)
}

/// Returns the token at which the running sum, column by column, first exceeds `uniform` of the total. Only
/// weights whose bits are at least `least` count. Leaves the token, its weight and the total in `found`.
#[cube]
fn draw(
    weights: &[Vector<f32, Const<4>>],
    first: usize,
    groups: u32,
    least: u32,
    uniform: f32,
    found: &mut [u32],
    #[comptime] plan: RowPlan,
) -> u32 {
    let units = comptime!(plan.units);
    let mut columns = Shared::<[f32]>::new_slice(comptime!(COLUMNS as usize));
    let mut blocks = Shared::<[f32]>::new_slice(32usize);
    let mut column = UNIT_POS;
    while column < COLUMNS {
        let mut sum = 0.0f32.runtime();
        let mut g = u32::cast_from(column);
        while g < groups {
            let four = weights[first + g as usize];
            #[unroll]
            for e in 0..4usize {
                let weight = four.extract(e);
                sum += select(u32::reinterpret(weight) >= least, weight, 0.0);
            }
            g += COLUMNS;
        }
        columns[column as usize] = sum;
        column += units;
    }
    sync_cube();
    let mut block = UNIT_POS;
    while block < 32 {
        let mut sum = 0.0f32.runtime();
        for i in 0..32u32 {
            sum += columns[(32 * block + i) as usize];
        }
        blocks[block as usize] = sum;
        block += units;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut total = 0.0f32.runtime();
        for i in 0..32u32 {
            total += blocks[i as usize];
        }
        let mark = uniform * total;
        // If rounding keeps the sum below the mark, the last block and column with a weight are used.
        let mut before = 0.0f32.runtime();
        let mut block = 0u32.runtime();
        let mut block_before = 0.0f32.runtime();
        let mut open = true.runtime();
        for i in 0..32u32 {
            let own = blocks[i as usize];
            if open && own > 0.0 {
                block = i;
                block_before = before;
                open = before + own <= mark;
            }
            before += own;
        }
        let mut before = block_before;
        let mut column = 0u32.runtime();
        let mut column_before = 0.0f32.runtime();
        let mut open = true.runtime();
        for i in 0..32u32 {
            let own = columns[(32 * block + i) as usize];
            if open && own > 0.0 {
                column = 32 * block + i;
                column_before = before;
                open = before + own <= mark;
            }
            before += own;
        }
        found[0] = column;
        found[1] = u32::reinterpret(mark - column_before);
        found[2] = u32::reinterpret(total);
    }
    sync_cube();
    let column = found[0];
    let rest = f32::reinterpret(found[1]);
    sync_cube();
    // The unit that owns the column walks it, so that no unit reads another's writes.
    if UNIT_POS == column % units {
        let mut token = 0u32.runtime();
        let mut own = 0.0f32.runtime();
        let mut sum = 0.0f32.runtime();
        let mut open = true.runtime();
        let mut g = u32::cast_from(column);
        while g < groups {
            let four = weights[first + g as usize];
            #[unroll]
            for e in 0..4u32 {
                let weight = four.extract(comptime!(e as usize));
                if open && weight > 0.0 && u32::reinterpret(weight) >= least {
                    token = 4 * g + e;
                    own = weight;
                    sum += weight;
                    open = sum <= rest;
                }
            }
            g += COLUMNS;
        }
        found[0] = token;
        found[1] = u32::reinterpret(own);
    }
    sync_cube();
    found[0]
}
