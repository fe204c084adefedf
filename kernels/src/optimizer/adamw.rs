//! The AdamW step, and the elementwise steps of Muon.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::codes::{BLOCK, signed_map, unsigned_map};
use super::control::{CONTROL, Control};
use crate::elem::elem;
use crate::fits::stores;
use crate::launch::{index_width, launch};
use crate::round::{by_hand, rounded};
use crate::rows::{Fold, RowPlan, row_fold};

/// The AdamW kernel.
pub struct AdamW;

/// Formulas of a step.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    #[default]
    AdamW,
    /// m = β₁ m + (1 - β₁) g, and weights = β₁ m + (1 - β₁) g, Nesterov's direction. v is left as it is.
    Momentum,
    /// p = (1 - rate · decay) p - rate · gradient, without the factor of clipping. m and v are left as they are.
    Descent,
}

impl Rule {
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Momentum => "momentum",
            Self::Descent => "descent",
        }
    }
}

/// Storage of the moments m and v.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moments {
    F32,
    /// Rounded stochastically.
    Bf16,
    /// Codes of 8 bits with one absmax per [`BLOCK`].
    Int8,
}

impl Moments {
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of m and v for `len` parameters.
    pub const fn bytes(self, len: u64) -> u64 {
        match self {
            Self::F32 => 8 * len,
            Self::Bf16 => 4 * len,
            Self::Int8 => 2 * len + 8 * (len / BLOCK as u64),
        }
    }
}

/// Numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Scalars {
    pub learning_rate: f32,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f32,
    /// Share of a weight that a step takes away, times the learning rate.
    pub weight_decay: f32,
    /// Seed of stochastic rounding.
    pub seed: u32,
    /// Index of the first parameter among those that share the seed.
    #[serde(default)]
    pub first: u32,
}

/// Flat parameters of one group. End with [`AdamWProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamWProblem {
    /// Number of parameters, a multiple of [`BLOCK`].
    pub len: u64,
    /// Type of the weights.
    pub weights: DType,
    /// True if a master in f32 is updated and the weights are its rounded copy. Without one, the weights themselves are
    /// updated; in bf16 they are rounded stochastically.
    pub master: bool,
    pub moments: Moments,
    pub scalars: Scalars,
    #[serde(default)]
    pub rule: Rule,
}

/// An invalid AdamW problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidAdamW {
    #[error("expected a positive multiple of 256 parameters, got {0}\nhint: pad the buffers")]
    Length(u64),
    #[error("expected weights in f32, f16 or bf16, got {0}\nhint: cast them")]
    DType(DType),
    #[error("expected a master for f16 weights\nhint: add one, or train in bf16")]
    NoMaster,
    #[error("expected moments in f32 and no master for momentum\nhint: use AdamW")]
    Momentum,
    #[error("expected {name} {range}, got {value}")]
    Scalar { name: &'static str, range: &'static str, value: f64 },
}

impl AdamWProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidAdamW`].
    pub fn checked(self) -> Result<Self, InvalidAdamW> {
        if self.len == 0 || !self.len.is_multiple_of(BLOCK.into()) {
            return Err(InvalidAdamW::Length(self.len));
        }
        let plain = self.moments == Moments::F32 && (self.rule != Rule::Momentum || !self.master);
        if self.rule != Rule::AdamW && !plain {
            return Err(InvalidAdamW::Momentum);
        }
        match (self.weights, self.master) {
            (DType::F16, false) => return Err(InvalidAdamW::NoMaster),
            (DType::F32 | DType::Bf16 | DType::F16, _) => {}
            (other, _) => return Err(InvalidAdamW::DType(other)),
        }
        let Scalars { learning_rate, beta1, beta2, eps, weight_decay, .. } = self.scalars;
        let (wide, below) = ("of 0 or more", "from 0 to below 1");
        for (name, value, range, fits) in [
            ("a learning rate", f64::from(learning_rate), wide, learning_rate >= 0.0),
            ("beta1", beta1, below, (0.0..1.0).contains(&beta1)),
            ("beta2", beta2, below, (0.0..1.0).contains(&beta2)),
            ("eps", f64::from(eps), "above 0", eps > 0.0),
            ("a weight decay", f64::from(weight_decay), wide, weight_decay >= 0.0),
        ] {
            if !fits || !value.is_finite() {
                return Err(InvalidAdamW::Scalar { name, range, value });
            }
        }
        Ok(self)
    }

    const fn vectors(&self) -> u64 {
        self.len / 4
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units of a block of 8-bit moments.
    pub lanes: u32,
}

/// Device buffers of moments in 8 bits.
#[derive(Debug, Clone)]
pub struct BlockBuffers {
    /// f32 `[2, len / BLOCK]`: largest magnitudes of m, then of v.
    pub absmax: Handle,
    /// f32 `[512]`: [`signed_map`], then [`unsigned_map`].
    pub maps: Handle,
}

impl BlockBuffers {
    /// Returns the buffers of `len` moments that are 0.
    pub fn zeros(queue: &Queue, len: u64) -> Self {
        let absmax = vec![0.0f32; 2 * (len / u64::from(BLOCK)) as usize];
        let maps = [signed_map(), unsigned_map()].concat();
        Self {
            absmax: queue.upload(f32::as_bytes(&absmax)),
            maps: queue.upload(f32::as_bytes(&maps)),
        }
    }
}

/// Device buffers.
#[derive(Debug, Clone)]
pub struct AdamWOperands {
    /// f32 `[len]`
    pub gradient: Handle,
    /// `[len]`, written; also read without a master.
    pub weights: Handle,
    /// f32 `[len]`
    pub master: Option<Handle>,
    /// First moments `[len]`; not for descent.
    pub m: Option<Handle>,
    /// Second moments `[len]`; for AdamW alone.
    pub v: Option<Handle>,
    /// Buffers of moments in 8 bits.
    pub blocks: Option<BlockBuffers>,
    /// f32 `[CONTROL]`, read only.
    pub control: Handle,
}

impl Kernel for AdamW {
    type Problem = AdamWProblem;
    type Config = AdamWConfig;
    type Operands = AdamWOperands;

    const NAME: &'static str = "adamw";
    const VERSION: u32 = 1;

    fn bucket(p: &AdamWProblem) -> String {
        let master = if p.master { " master" } else { "" };
        let rule = match p.rule {
            Rule::AdamW => format!("moments {}", p.moments.name()),
            other => other.name().to_owned(),
        };
        format!("{}{master} {rule} {}", p.weights, p.len.next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &AdamWProblem) -> Vec<AdamWConfig> {
        Self::baseline(arch, p).into_iter().collect()
    }

    fn check(arch: &ArchProfile, p: &AdamWProblem, c: &AdamWConfig) -> Result<(), Infeasible> {
        let moments = if p.moments == Moments::Bf16 { DType::Bf16 } else { DType::F32 };
        stores(arch, [p.weights, moments])?;
        RowPlan::new(arch, c.units, c.lanes).check(arch)
    }

    fn cost(p: &AdamWProblem) -> Cost {
        let size = p.weights.size() as u64;
        let weights = if p.master { 8 + size } else { 2 * size };
        let (flops, moved) = match p.rule {
            Rule::AdamW => (12, weights * p.len + 2 * p.moments.bytes(p.len)),
            Rule::Momentum => (6, (size + 8) * p.len),
            Rule::Descent => (3, weights * p.len),
        };
        Cost { flops: flops * p.len, bytes: 4 * p.len + moved }
    }

    fn baseline(arch: &ArchProfile, p: &AdamWProblem) -> Result<AdamWConfig, Infeasible> {
        let config = match arch.cores() {
            Some(units) => AdamWConfig { units, lanes: 1 },
            None => AdamWConfig { units: 256, lanes: BLOCK / 4 },
        };
        Self::check(arch, p, &config).map(|()| config)
    }

    /// Moments of 0, as before the first step.
    fn operands(queue: &Queue, p: &AdamWProblem, seed: u64) -> AdamWOperands {
        let len = p.len as usize;
        let zeros = |bytes: usize| queue.upload(&vec![0; bytes]);
        let moment = match p.moments {
            Moments::F32 => 4 * len,
            Moments::Bf16 => 2 * len,
            Moments::Int8 => len,
        };
        let control = Control { factor: 1.0, c1: 0.1, c2: 0.001, steps: 1.0, ..Control::new(1.0) };
        AdamWOperands {
            gradient: crate::noise(queue, len, DType::F32, 3 * seed),
            weights: crate::noise(queue, len, p.weights, 3 * seed + 1),
            master: p.master.then(|| crate::noise(queue, len, DType::F32, 3 * seed + 1)),
            m: Some(zeros(moment)),
            v: Some(zeros(moment)),
            blocks: (p.moments == Moments::Int8).then(|| BlockBuffers::zeros(queue, p.len)),
            control: queue.upload(f32::as_bytes(&control.to_array())),
        }
    }

    /// None: a launch reads what it writes.
    fn outputs(_: &AdamWProblem, _: &AdamWOperands) -> Vec<Output> {
        Vec::new()
    }

    fn launch(
        queue: &Queue,
        p: &AdamWProblem,
        c: &AdamWConfig,
        operands: &AdamWOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let plan = Plan::new(arch, p, c);
        let vectors = p.vectors() as usize;
        let cubes = crate::cubes(arch, p.vectors(), c.units);
        let Scalars { learning_rate, beta1, beta2, eps, weight_decay, seed, first } = p.scalars;
        let scalars = NumbersLaunch::new(
            learning_rate,
            1.0 - learning_rate * weight_decay,
            beta1 as f32,
            (1.0 - beta1) as f32,
            beta2 as f32,
            (1.0 - beta2) as f32,
            eps,
            seed,
            first,
        );
        let master = operands.master.as_ref().unwrap_or(&operands.control);
        let masters = if p.master { vectors } else { CONTROL / 4 };
        // A kernel does not touch what its rule leaves alone.
        let moment = |own: &Option<Handle>| match own {
            Some(own) => (own.clone(), vectors),
            None => (operands.control.clone(), CONTROL / 4),
        };
        let (m, v) = (moment(&operands.m), moment(&operands.v));
        // SAFETY: the lengths follow from the problem, and the kernels access whole vectors below them.
        unsafe {
            let matrix = |handle: &Handle| BufferArg::from_raw_parts(handle.clone(), vectors);
            match &operands.blocks {
                None => launch!(
                    queue,
                    step,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(c.units),
                    index_width(p.len),
                    matrix(&operands.gradient),
                    matrix(&operands.weights),
                    BufferArg::from_raw_parts(master.clone(), masters),
                    BufferArg::from_raw_parts(m.0, m.1),
                    BufferArg::from_raw_parts(v.0, v.1),
                    BufferArg::from_raw_parts(operands.control.clone(), CONTROL),
                    scalars,
                    vectors as u32,
                    plan,
                    elem(p.weights),
                    elem(if p.moments == Moments::Bf16 { DType::Bf16 } else { DType::F32 }),
                ),
                Some(blocks) => launch!(
                    queue,
                    step_of_codes,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(c.units),
                    index_width(p.len),
                    matrix(&operands.gradient),
                    matrix(&operands.weights),
                    BufferArg::from_raw_parts(master.clone(), masters),
                    BufferArg::from_raw_parts(m.0, m.1),
                    BufferArg::from_raw_parts(v.0, v.1),
                    BufferArg::from_raw_parts(
                        blocks.absmax.clone(),
                        2 * p.len as usize / BLOCK as usize
                    ),
                    BufferArg::from_raw_parts(blocks.maps.clone(), 512),
                    BufferArg::from_raw_parts(operands.control.clone(), CONTROL),
                    scalars,
                    (p.len / u64::from(BLOCK)) as u32,
                    plan,
                    elem(p.weights),
                ),
            }
        }
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
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
    fn new(arch: &ArchProfile, p: &AdamWProblem, c: &AdamWConfig) -> Self {
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
struct Numbers {
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
fn step<W: Float, S: Float>(
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
fn step_of_codes<W: Float>(
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
