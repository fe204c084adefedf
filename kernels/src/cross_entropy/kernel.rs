//! The kernel: sums over a row in one pass, and its gradient in a second.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Gradient, IGNORED, Plan};
use crate::round::rounded;
use crate::rows::{Fold, row_fold, row_sum};
use crate::softcap::{capped, capped_slope};
use crate::tile::exp2;

/// Sizes of the logits.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) rows: u32,
    /// Elements of a row without padding.
    pub(super) vocab: u32,
    /// Vectors from one row to the next.
    pub(super) stride: u32,
}

/// Parameters shared by all rows. The last two are arguments because WGSL has no literals for them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Scalars {
    pub(super) softcap: f32,
    pub(super) inverse_temperature: f32,
    pub(super) minus_infinity: f32,
    pub(super) nan: f32,
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn cross_entropy<F: Float, N: Size>(
    logits: &[Vector<F, N>],       // [rows, stride]
    targets: &[u32],               // [rows]
    weights: &[f32],               // [rows]
    entropy_weights: &[f32],       // [rows]
    gradient: &mut [Vector<F, N>], // [rows, stride]
    stats: &mut [f32],             // [STATS, rows]
    sizes: Sizes,
    scalars: Scalars,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (lanes, width) = (comptime!(plan.rows.lanes), N::value());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.rows.shared_len()));
    let staged = comptime!((plan.rows.units * plan.staged) as usize);
    let mut stage =
        Shared::<[Vector<F, N>]>::new_slice(comptime!(if staged > 0 { staged } else { 1 }));
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let vectors = sizes.vocab.div_ceil(comptime!(width as u32));
    let unit = scalars.inverse_temperature * std::f32::consts::LOG2_E;
    let mut first = CUBE_POS_X * comptime!(plan.rows.rows());
    while first < sizes.rows {
        // A group past the end repeats the last row without storing: all units must reach the barriers.
        let row = min(first + group, sizes.rows - 1);
        let inside = first + group < sizes.rows;
        let from = row as usize * sizes.stride as usize;
        let target = targets[row as usize];
        let ignored = target == IGNORED;
        // Vector with the target, and the unit that reads and overwrites it. An invalid target uses vector 0.
        let wanted = select(target < sizes.vocab, target, 0) / comptime!(width as u32);
        let owner = wanted % lanes == lane;

        let mut held = Array::<Vector<F, N>>::new(comptime!(plan.held as usize));
        #[unroll]
        for h in 0..comptime!(plan.held as usize) {
            let at = min(lane + comptime!(h as u32 * lanes), vectors - 1);
            held[h] = load(logits, &*gradient, from + at as usize, plan);
        }
        let mut sums = SoftmaxStats {
            row_max: f32::MIN.runtime(),
            weight: 0.0f32.runtime(),
            moment: 0.0f32.runtime(),
            weight_error: 0.0f32.runtime(),
            moment_error: 0.0f32.runtime(),
        };
        #[unroll]
        for h in 0..comptime!(plan.held as usize) {
            let at = lane + comptime!(h as u32 * lanes);
            if at < vectors {
                let z = bent(held[h], at, vectors, &sizes, &scalars, plan);
                absorb(&mut sums, &z, unit, width, plan.ptx);
            }
        }
        let mut at = lane + comptime!(plan.held * lanes);
        let mut slot = UNIT_POS as usize;
        while at < vectors {
            let vector = load(logits, &*gradient, from + at as usize, plan);
            if comptime!(staged > 0) {
                let own = slot < staged;
                if own {
                    stage[slot] = vector;
                }
            }
            let z = bent(vector, at, vectors, &sizes, &scalars, plan);
            absorb(&mut sums, &z, unit, width, plan.ptx);
            at += lanes;
            slot += comptime!(plan.rows.units as usize);
        }

        // Merge the sums of a row's units.
        let row_max = row_fold(sums.row_max, &mut shared, Fold::Max, plan.rows);
        let lower = lowered(sums.row_max, row_max, unit);
        let factor = power(lower, plan.ptx);
        let moment = factor * (sums.moment + sums.weight * lower);
        let weight = row_sum(factor * sums.weight, &mut shared, plan.rows);
        let moment = row_sum(moment, &mut shared, plan.rows);

        let scale = select(target < sizes.vocab, weights[row as usize], scalars.nan);
        let log = log_of(weight);
        let entropy = log - moment / weight * std::f32::consts::LN_2;
        let mut entropy_scale = 0.0f32.runtime();
        if comptime!(plan.entropy) {
            entropy_scale = entropy_weights[row as usize];
        }
        if owner && inside {
            let vector = load(logits, &*gradient, from + wanted as usize, plan);
            let z = bent(vector, wanted, vectors, &sizes, &scalars, plan);
            let mut of_target = z[0];
            #[unroll]
            for e in 1..width {
                of_target = select(target % comptime!(width as u32) == e as u32, z[e], of_target);
            }
            let log_probability = (of_target - row_max) * scalars.inverse_temperature - log;
            let (at, rows) = (row as usize, sizes.rows as usize);
            let loss = -scale * log_probability;
            let loss = if comptime!(plan.entropy) { loss - entropy_scale * entropy } else { loss };
            stats[at] = select(ignored, 0.0, loss);
            let log_probability = select(target < sizes.vocab, log_probability, scalars.nan);
            stats[at + rows] = select(ignored, 0.0, log_probability);
            stats[at + 2 * rows] = entropy;
            stats[at + 3 * rows] = row_max * scalars.inverse_temperature + log;
        }

        if comptime!(!matches!(plan.gradient, Gradient::None)) {
            let slope = scale * scalars.inverse_temperature;
            let softmax = Softmax {
                row_max,
                unit,
                weight,
                inverse: slope / weight,
                entropy_inverse: entropy_scale * scalars.inverse_temperature / weight,
                surprise: entropy - log,
                target,
                ignored,
            };
            #[unroll]
            for h in 0..comptime!(plan.held as usize) {
                let at = lane + comptime!(h as u32 * lanes);
                if at < vectors && inside {
                    let z = bent(held[h], at, vectors, &sizes, &scalars, plan);
                    let slopes = slopes(&z, held[h], at, &softmax, &sizes, &scalars, plan);
                    gradient[from + at as usize] = slopes;
                }
            }
            let mut at = lane + comptime!(plan.held * lanes);
            let mut slot = UNIT_POS as usize;
            while at < vectors {
                let vector = if slot < staged {
                    stage[slot]
                } else {
                    load(logits, &*gradient, from + at as usize, plan)
                };
                let z = bent(vector, at, vectors, &sizes, &scalars, plan);
                if inside {
                    let slopes = slopes(&z, vector, at, &softmax, &sizes, &scalars, plan);
                    gradient[from + at as usize] = slopes;
                }
                at += lanes;
                slot += comptime!(plan.rows.units as usize);
            }
            let mut at = vectors + lane;
            while at < sizes.stride {
                if inside {
                    gradient[from + at as usize] = Vector::new(F::from_int(0));
                }
                at += lanes;
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.rows.rows());
    }
}

/// Running sums over a unit's part of a row, in units of log₂.
#[derive(CubeType)]
struct SoftmaxStats {
    /// Largest z.
    row_max: f32,
    /// Σ 2^((z - row_max) · unit)
    weight: f32,
    /// Σ 2^((z - row_max) · unit) · (z - row_max) · unit
    moment: f32,
    /// Rounding errors of both, which are too large by them: most terms of a vocabulary are less than the last bit of the sum,
    /// and are much together.
    weight_error: f32,
    moment_error: f32,
}

/// Values of a row that its gradient needs.
#[derive(CubeType)]
struct Softmax {
    row_max: f32,
    unit: f32,
    /// Σ 2^((z - row_max) · unit)
    weight: f32,
    /// Weight of the row, divided by the temperature and by the sum.
    inverse: f32,
    /// Weight of the row's entropy, divided by the temperature and by the sum.
    entropy_inverse: f32,
    /// Entropy - ln Σ: what to add to (z - row_max) / temperature, for ln p + entropy.
    surprise: f32,
    target: u32,
    ignored: bool,
}

#[cube]
fn load<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    gradient: &[Vector<F, N>],
    at: usize,
    #[comptime] plan: Plan,
) -> Vector<F, N> {
    if comptime!(matches!(plan.gradient, Gradient::InPlace)) { gradient[at] } else { logits[at] }
}

/// Returns logits of vector `at` of a row after the soft cap; past the end of the row they are -inf.
#[cube]
fn bent<F: Float, N: Size>(
    vector: Vector<F, N>,
    at: u32,
    vectors: u32,
    sizes: &Sizes,
    scalars: &Scalars,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let width = N::value();
    let mut z = Array::<f32>::new(width);
    #[unroll]
    for e in 0..width {
        z[e] = f32::cast_from(vector.extract(e));
        if comptime!(plan.softcap) {
            z[e] = capped(z[e], scalars.softcap);
        }
    }
    if comptime!(plan.ragged) {
        let last = at + 1 == vectors;
        if last {
            #[unroll]
            for e in 1..width {
                let there = at * comptime!(width as u32) + comptime!(e as u32) < sizes.vocab;
                z[e] = select(there, z[e], scalars.minus_infinity);
            }
        }
    }
    z
}

/// Adds a vector to the running sums.
#[cube]
fn absorb(
    sums: &mut SoftmaxStats,
    z: &Array<f32>,
    unit: f32,
    #[comptime] width: usize,
    #[comptime] ptx: bool,
) {
    let mut row_max = sums.row_max;
    #[unroll]
    for e in 0..width {
        row_max = max(row_max, z[e]);
    }
    let lower = lowered(sums.row_max, row_max, unit);
    let factor = power(lower, ptx);
    let mut weight = 0.0f32.runtime();
    let mut moment = 0.0f32.runtime();
    #[unroll]
    for e in 0..width {
        let exponent = (z[e] - row_max) * unit;
        let own = power(exponent, ptx);
        weight += own;
        // The bound avoids 0 · -inf, which is NaN.
        moment = fma(own, max(exponent, -1e4f32), moment);
    }
    let moment_error = sums.moment_error + sums.weight_error * lower;
    let before = factor * (sums.moment + sums.weight * lower);
    (sums.moment, sums.moment_error) = sum_of(before, moment - factor * moment_error);
    (sums.weight, sums.weight_error) =
        sum_of(factor * sums.weight, weight - factor * sums.weight_error);
    sums.row_max = row_max;
}

/// Returns a sum and its rounding error (Kahan).
#[cube]
fn sum_of(before: f32, added: f32) -> (f32, f32) {
    let sum = before + added;
    (sum, (sum - before) - added)
}

/// Returns the exponent that rescales sums when the largest z rises. Its power of 2 is 0 while they are
/// empty.
#[cube]
fn lowered(from: f32, to: f32, unit: f32) -> f32 {
    max((from - to) * unit, -1e4f32)
}

/// Returns ln x. From 1 to 2 it uses the series of 2 · atanh((x - 1) / (x + 1)). SPIR-V allows a driver's own
/// logarithm an error of 2^-21 there, and the losses of likely tokens lie in this range.
#[cube]
fn log_of(x: f32) -> f32 {
    let y = (x - 1.0) / (x + 1.0);
    let z = y * y;
    let tail = 1.0f32 / 7.0 + z * (1.0f32 / 9.0 + z * (1.0f32 / 11.0 + z / 13.0));
    let series = 2.0 * y * (1.0 + z * (1.0f32 / 3.0 + z * (1.0f32 / 5.0 + z * tail)));
    select(x < 1.0, x.ln(), select(x < 2.0, series, x.ln()))
}

/// Returns 2 to the power x.
#[cube]
fn power(x: f32, #[comptime] ptx: bool) -> f32 {
    if comptime!(ptx) { exp2(x) } else { (x * std::f32::consts::LN_2).exp() }
}

/// Computes the gradient of vector `at` of a row.
#[cube]
fn slopes<F: Float, N: Size>(
    z: &Array<f32>,
    vector: Vector<F, N>,
    at: u32,
    softmax: &Softmax,
    sizes: &Sizes,
    scalars: &Scalars,
    #[comptime] plan: Plan,
) -> Vector<F, N> {
    let width = N::value();
    let mut slopes = Array::<f32>::new(width);
    let mut bonus = Array::<f32>::new(width);
    #[unroll]
    for e in 0..width {
        slopes[e] = power((z[e] - softmax.row_max) * softmax.unit, plan.ptx);
        if comptime!(plan.entropy) {
            // The bound avoids 0 · -inf, which is NaN.
            let log = max((z[e] - softmax.row_max) * scalars.inverse_temperature, -1e4f32);
            bonus[e] = slopes[e] * softmax.entropy_inverse * (log + softmax.surprise);
        }
    }
    let column = at * comptime!(width as u32);
    if softmax.target >= column && softmax.target < column + comptime!(width as u32) {
        #[unroll]
        for e in 0..width {
            let hit = softmax.target == column + comptime!(e as u32);
            slopes[e] -= select(hit, softmax.weight, 0.0);
        }
    }
    let mut out = Vector::<F, N>::new(F::from_int(0));
    #[unroll]
    for e in 0..width {
        let mut slope = slopes[e] * softmax.inverse;
        if comptime!(plan.entropy) {
            slope += bonus[e];
        }
        if comptime!(plan.softcap) {
            slope *= capped_slope(f32::cast_from(vector.extract(e)), scalars.softcap);
        }
        let mut none = softmax.ignored;
        if comptime!(plan.ragged) {
            none = none || column + comptime!(e as u32) >= sizes.vocab;
        }
        out.insert(e, rounded::<F>(select(none, 0.0, slope), plan.rounds));
    }
    out
}
