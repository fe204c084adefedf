//! Kernels of optimizer steps, over plain moments and over codes.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::adamw::{AdamWConfig, AdamWProblem, Moments, Rule};
use super::codes::BLOCK;
use crate::round::{by_hand, rounded};
use crate::rows::{Fold, RowPlan, row_fold};

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    rows: RowPlan,
    master: bool,
    /// Moments in bf16, which are rounded stochastically.
    narrow: bool,
    /// Weights in bf16 without a master, which are rounded stochastically.
    stochastic: bool,
    /// True if the kernel rounds weights itself before it stores them.
    rounds: bool,
    rule: Rule,
}

impl Plan {
    pub(super) fn new(arch: &ArchProfile, p: &AdamWProblem, c: &AdamWConfig) -> Self {
        Self {
            rows: RowPlan::new(arch, c.units, c.lanes),
            master: p.master,
            narrow: p.moments == Moments::Bf16,
            stochastic: p.weights == DType::Bf16 && !p.master && p.rule != Rule::Momentum,
            rule: p.rule,
            rounds: by_hand(arch, p.weights),
        }
    }
}

/// The numbers of one step; `keep` is 1 - learning rate · weight decay.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Numbers {
    learning_rate: f32,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
    seed: u32,
    first: u32,
}

/// Numbers that one step reads of the control.
#[derive(CubeType, Clone, Copy)]
struct Correction {
    factor: f32,
    /// Learning rate / c₁
    rate: f32,
    /// 1 / √c₂
    root: f32,
    /// Seed of this step.
    seed: u32,
}

#[cube]
fn correction(control: &[f32], numbers: &Numbers) -> Correction {
    Correction {
        factor: control[0],
        rate: numbers.learning_rate / control[2],
        root: 1.0f32 / control[3].sqrt(),
        seed: random(u32::cast_from(control[4]), numbers.seed),
    }
}

/// A parameter and its moments.
#[derive(CubeType, Clone, Copy)]
struct Parameter {
    p: f32,
    m: f32,
    v: f32,
}

/// Steps one parameter.
#[cube]
fn stepped(of: Parameter, gradient: f32, numbers: &Numbers, by: &Correction) -> Parameter {
    let g = gradient * by.factor;
    let m = fma(numbers.rest1, g, numbers.beta1 * of.m);
    let v = fma(numbers.rest2 * g, g, numbers.beta2 * of.v);
    let size = v.sqrt() * by.root + numbers.eps;
    Parameter { p: numbers.keep * of.p - by.rate * m / size, m, v }
}

/// Returns m and the direction of Nesterov's momentum, as m and p.
#[cube]
fn momentum(m: f32, gradient: f32, numbers: &Numbers, by: &Correction) -> Parameter {
    let g = gradient * by.factor;
    let m = fma(numbers.rest1, g, numbers.beta1 * m);
    Parameter { p: fma(numbers.rest1, g, numbers.beta1 * m), m, v: 0.0f32 }
}

/// Returns 32 random bits of an index and a seed: Wellons' hash `lowbias32`.
#[cube]
fn random(index: u32, seed: u32) -> u32 {
    let mut h = index ^ seed;
    h = (h ^ (h >> 16)) * 0x7feb_352du32;
    h = (h ^ (h >> 15)) * 0x846c_a68bu32;
    h ^ (h >> 16)
}

/// Rounds to bf16, up with the probability of the distance to the value below, by 16 random bits.
#[cube]
fn stochastic(x: f32, random: u32) -> f32 {
    let bits = u32::reinterpret(x);
    // Infinity and NaN stay what they are.
    let special = (bits & 0x7f80_0000u32) == 0x7f80_0000u32;
    let moved = (bits + (random & 0xffffu32)) & 0xffff_0000u32;
    f32::reinterpret(select(special, bits, moved))
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn step<W: Float, S: Float>(
    gradient: &[Vector<f32, Const<4>>],
    weights: &mut [Vector<W, Const<4>>],
    master: &mut [Vector<f32, Const<4>>],
    m: &mut [Vector<S, Const<4>>],
    v: &mut [Vector<S, Const<4>>],
    control: &[f32], // [CONTROL]
    numbers: Numbers,
    vectors: u32,
    #[comptime] plan: Plan,
    #[define(W)] _stored: ElemType,
    #[define(S)] _state: ElemType,
) {
    let by = correction(control, &numbers);
    let mut at = CUBE_POS_X * comptime!(plan.rows.units) + UNIT_POS;
    while at < vectors && control[1] > 0.0f32 {
        let index = at as usize;
        let number = numbers.first + 4 * at;
        let g = gradient[index];
        let mut old_m = Vector::<S, Const<4>>::new(S::cast_from(0.0f32));
        let mut old_v = Vector::<S, Const<4>>::new(S::cast_from(0.0f32));
        if comptime!(plan.rule != Rule::Descent) {
            old_m = m[index];
        }
        if comptime!(plan.rule == Rule::AdamW) {
            old_v = v[index];
        }
        let mut new_w = weights[index];
        let mut new_p = Vector::<f32, Const<4>>::new(0.0f32);
        if comptime!(plan.master) {
            new_p = master[index];
        }
        let (mut new_m, mut new_v) = (old_m, old_v);
        #[unroll]
        for e in 0..4usize {
            let mut p = f32::cast_from(new_w.extract(e));
            if comptime!(plan.master) {
                p = new_p.extract(e);
            }
            let of = Parameter {
                p,
                m: f32::cast_from(old_m.extract(e)),
                v: f32::cast_from(old_v.extract(e)),
            };
            let now = match comptime!(plan.rule) {
                Rule::AdamW => stepped(of, g.extract(e), &numbers, &by),
                Rule::Momentum => momentum(of.m, g.extract(e), &numbers, &by),
                Rule::Descent => {
                    let p = numbers.keep * of.p - numbers.learning_rate * g.extract(e);
                    Parameter { p, m: of.m, v: of.v }
                }
            };
            let bits = random(number + comptime!(e as u32), by.seed);
            if comptime!(plan.master) {
                new_p.insert(e, now.p);
                new_w.insert(e, rounded::<W>(now.p, plan.rounds));
            } else if comptime!(plan.stochastic) {
                new_w.insert(e, W::cast_from(stochastic(now.p, bits)));
            } else {
                new_w.insert(e, rounded::<W>(now.p, plan.rounds));
            }
            if comptime!(plan.narrow) {
                let other = random(number + comptime!(e as u32), by.seed ^ 0x2545_f491u32);
                new_m.insert(e, S::cast_from(stochastic(now.m, other)));
                new_v.insert(e, S::cast_from(stochastic(now.v, other >> 16)));
            } else {
                new_m.insert(e, S::cast_from(now.m));
                new_v.insert(e, S::cast_from(now.v));
            }
        }
        weights[index] = new_w;
        if comptime!(plan.rule != Rule::Descent) {
            m[index] = new_m;
        }
        if comptime!(plan.rule == Rule::AdamW) {
            v[index] = new_v;
        }
        if comptime!(plan.master) {
            master[index] = new_p;
        }
        at += CUBE_COUNT_X * comptime!(plan.rows.units);
    }
}

/// Returns the code of the nearest value of a dynamic map, for x from -1 to 1. The map begins at `first`: the signed one at 0, the
/// unsigned one at 256.
///
/// Decade i of seven has n values at equal distances, from 0.1 + 0.45 / n to 1 - 0.45 / n times 10^(i - 6), with n = 2^i in the
/// signed map and 2^(i + 1) in the unsigned one. So the code follows from x but for rounding, and for the border of two decades,
/// where a neighbour may be nearer.
#[cube]
fn dynamic_code(x: f32, map: &[f32], #[comptime] first: u32) -> u32 {
    let signed = comptime!(first == 0);
    let size = f32::abs(x);
    let mut scale = f32::new(comptime!(1e6));
    let mut count = comptime!(if signed { 1u32 } else { 2u32 }).runtime();
    #[unroll]
    for i in 1..7u32 {
        let inside = size >= comptime!(10f32.powi(i as i32 - 7));
        scale = select(inside, f32::new(comptime!(10f32.powi(6 - i as i32))), scale);
        count = select(inside, comptime!(if signed { 1u32 << i } else { 2u32 << i }), count);
    }
    let cell = (size * scale - 0.1f32) * (f32::cast_from(count) * f32::new(comptime!(1.0 / 0.9)));
    let cell = min(u32::cast_from(max(cell, 0.0f32)), count - 1);
    let mut code = count + cell;
    if comptime!(signed) {
        // Codes of negative values descend from 126, those of positive ones ascend from 128.
        code = select(x < 0.0f32, 127 - code, 127 + code);
    } else {
        code -= 1;
    }
    let here = map[(comptime!(first) + code) as usize];
    let above = x > here;
    let next = select(above, min(code + 1, 255), max(code, 1) - 1);
    let middle = (map[(comptime!(first) + next) as usize] + here) * 0.5f32;
    let nearer = select(above, x > middle, x < middle);
    select(nearer, next, code)
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn step_of_codes<W: Float>(
    gradient: &[Vector<f32, Const<4>>],
    weights: &mut [Vector<W, Const<4>>],
    master: &mut [Vector<f32, Const<4>>],
    m: &mut [u32],
    v: &mut [u32],
    absmax: &mut [f32], // [2, blocks]
    maps: &[f32],       // [2, 256]
    control: &[f32],    // [CONTROL]
    numbers: Numbers,
    blocks: u32,
    #[comptime] plan: Plan,
    #[define(W)] _stored: ElemType,
) {
    let (units, lanes) = comptime!((plan.rows.units, plan.rows.lanes));
    let held = comptime!(BLOCK / 4 / lanes);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.rows.shared_len()));
    let mut map = Shared::<[f32]>::new_slice(512usize);
    let mut at = UNIT_POS;
    while at < 512 {
        map[at as usize] = maps[at as usize];
        at += units;
    }
    sync_cube();
    let by = correction(control, &numbers);
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let mut first = CUBE_POS_X * comptime!(units / lanes);
    // The control is the same for all units, so that all reach the barriers.
    while first < blocks && control[1] > 0.0f32 {
        let block = min(first + group, blocks - 1);
        let inside = first + group < blocks;
        let (old_m, old_v) = (absmax[block as usize], absmax[(blocks + block) as usize]);
        let mut new_m = Array::<f32>::new(comptime!(4 * held as usize));
        let mut new_v = Array::<f32>::new(comptime!(4 * held as usize));
        let (mut top_m, mut top_v) = (0.0f32.runtime(), 0.0f32.runtime());
        #[unroll(held == 1)]
        for h in 0..held {
            let vector = block * comptime!(BLOCK / 4) + lane + h * lanes;
            let (index, number) = (vector as usize, numbers.first + 4 * vector);
            let g = gradient[index];
            let (code_m, code_v) = (m[index], v[index]);
            let mut new_w = weights[index];
            let mut new_p = Vector::<f32, Const<4>>::new(0.0f32);
            if comptime!(plan.master) {
                new_p = master[index];
            }
            #[unroll]
            for e in 0..4usize {
                let mut p = f32::cast_from(new_w.extract(e));
                if comptime!(plan.master) {
                    p = new_p.extract(e);
                }
                let shift = comptime!(8 * e as u32);
                let of = Parameter {
                    p,
                    m: map[((code_m >> shift) & 0xff) as usize] * old_m,
                    v: map[(256 + ((code_v >> shift) & 0xff)) as usize] * old_v,
                };
                let now = stepped(of, g.extract(e), &numbers, &by);
                let bits = random(number + comptime!(e as u32), by.seed);
                if comptime!(plan.master) {
                    new_p.insert(e, now.p);
                    new_w.insert(e, rounded::<W>(now.p, plan.rounds));
                } else if comptime!(plan.stochastic) {
                    new_w.insert(e, W::cast_from(stochastic(now.p, bits)));
                } else {
                    new_w.insert(e, W::cast_from(now.p));
                }
                let place = (4 * h) as usize + comptime!(e);
                new_m[place] = now.m;
                new_v[place] = now.v;
                top_m = max(top_m, f32::abs(now.m));
                top_v = max(top_v, now.v);
            }
            if inside {
                weights[index] = new_w;
                if comptime!(plan.master) {
                    master[index] = new_p;
                }
            }
        }
        let top_m = row_fold(top_m, &mut shared, Fold::Max, plan.rows);
        let top_v = row_fold(top_v, &mut shared, Fold::Max, plan.rows);
        // In a block of zeros every code is that of 0.
        let inverse_m = select(top_m > 0.0f32, 1.0f32 / top_m, 0.0f32);
        let inverse_v = select(top_v > 0.0f32, 1.0f32 / top_v, 0.0f32);
        #[unroll(held == 1)]
        for h in 0..held {
            let index = (block * comptime!(BLOCK / 4) + lane + h * lanes) as usize;
            let (mut word_m, mut word_v) = (0u32.runtime(), 0u32.runtime());
            #[unroll]
            for e in 0..4usize {
                let place = (4 * h) as usize + comptime!(e);
                let own = new_m[place];
                let mut code = dynamic_code(own * inverse_m, &map, 0u32);
                // m keeps its sign, as in bitsandbytes.
                if map[code as usize] < 0.0f32 && own > 0.0f32 {
                    code += 1;
                }
                if map[code as usize] >= 0.0f32 && own < 0.0f32 {
                    code -= 1;
                }
                word_m |= code << comptime!(8 * e as u32);
                let code = dynamic_code(new_v[place] * inverse_v, &map, 256u32);
                word_v |= code << comptime!(8 * e as u32);
            }
            if inside {
                m[index] = word_m;
                v[index] = word_v;
            }
        }
        if inside && lane == 0 {
            absmax[block as usize] = top_m;
            absmax[(blocks + block) as usize] = top_v;
        }
        first += CUBE_COUNT_X * comptime!(units / lanes);
    }
}
