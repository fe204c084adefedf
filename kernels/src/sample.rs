//! From logits to a token: token[r], ln softmax(logits[r])[token[r]]    logits: `[rows, vocab]`, f32
//!
//! ```text
//!   s = logits, those of seen tokens divided by the penalty where above 0, else multiplied
//!   temperature 0: the largest, the first of equals
//!   else w = exp((s - max s) / temperature), and 0 but for
//!     the top_k largest (and what equals the last of them), of these
//!     the largest that reach top_p of the sum together (and what equals the last), of these
//!     those of at least min_p
//!   and the token where the sum of w, in the order below, first exceeds uniform · Σ w
//! ```
//!
//! One cube a row, whose units walk it in groups of four: several times for a threshold, two bits of it a time, for
//! a positive number's bits grow with it. Weights are summed in columns, of every 1024th group, so that neighbouring
//! units read neighbouring groups and no unit reads what another wrote; the order that the sum is taken in, and so
//! the token of a number, is column by column, whatever the config. Sums are f32.
//!
//! Numbers of each row come from the host with the launch: a batch may mix ways to choose. What is seen is a bit a
//! token, which the kernel sets for the one that it picks.
//!
//! Cost: two passes over a row for the likeliest token; three more and for each threshold a search of 15 otherwise.
//! A row of 128256 of four rows, each with other rules, took 135 us on average on an H200 (190 through Vulkan), which
//! no wider load made shorter: with two or four groups under way at once it took 150.
//!
//! Sources: the logits processors of Hugging Face transformers; Holtzman et al., "The Curious Case of Neural Text
//! Degeneration" (2019) for top_p.

use std::sync::Arc;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output};

use crate::fits::{limits, shape, stores};

/// The family of samplers.
pub struct Sample;

/// Rows of logits that become tokens. Build it with [`SampleProblem::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleProblem {
    pub rows: u32,
    pub vocab: u32,
}

/// A row that has no token.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidSample {
    #[error("{axis} is 0\nhint: without logits there is no token")]
    Empty { axis: &'static str },
    #[error(
        "{rows} rows of {vocab} logits\nhint: 65535 rows, of 2^24 logits, and below 2^31 of them at most"
    )]
    TooLarge { rows: u32, vocab: u32 },
}

impl SampleProblem {
    /// # Errors
    /// See [`InvalidSample`].
    pub fn new(rows: u32, vocab: u32) -> Result<Self, InvalidSample> {
        for (axis, size) in [("rows", rows), ("vocab", vocab)] {
            if size == 0 {
                return Err(InvalidSample::Empty { axis });
            }
        }
        if rows > 65_535 || vocab > 1 << 24 || u64::from(rows) * u64::from(vocab) >= 1 << 31 {
            return Err(InvalidSample::TooLarge { rows, vocab });
        }
        Ok(Self { rows, vocab })
    }

    /// Words of a row of seen tokens.
    pub const fn seen_words(&self) -> usize {
        self.vocab.div_ceil(32) as usize
    }

    const fn logits(&self) -> usize {
        self.rows as usize * self.vocab as usize
    }

    /// Groups of four of a row; the last may be cut.
    const fn groups(&self) -> u32 {
        self.vocab.div_ceil(4)
    }

    /// Elements of a vector of logits.
    const fn vector(&self) -> usize {
        if self.vocab.is_multiple_of(4) { 4 } else { 1 }
    }
}

/// How a token of a row is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// 0 is all.
    pub top_k: u32,
    /// 1 is all.
    pub top_p: f32,
    /// 0 is all.
    pub min_p: f32,
    /// 1 is none.
    pub penalty: f32,
    /// From 0 up to, not including, 1.
    pub uniform: f32,
}

/// Words of a [`Choice`].
const CHOICE: usize = 6;

impl Choice {
    /// As the kernel reads it.
    pub const fn words(self) -> [u32; CHOICE] {
        [
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            // Of either zero those of 0.
            (self.min_p + 0.0).to_bits(),
            self.penalty.to_bits(),
            self.uniform.to_bits(),
        ]
    }
}

/// Numbers of a result: the token, its log-probability, and 1 where there is none.
pub const RESULT: usize = 3;

/// How a row is spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SampleConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Device buffers of one launch.
#[derive(Debug, Clone)]
pub struct SampleOperands {
    /// `[rows, vocab]`
    pub logits: Handle,
    /// Words of a [`Choice`] a row.
    pub choices: Handle,
    /// A bit a token, `[rows, seen_words]`.
    pub seen: Handle,
    /// f32 `[rows, RESULT]`; f32 holds every id.
    pub out: Handle,
}

impl Kernel for Sample {
    type Problem = SampleProblem;
    type Config = SampleConfig;
    type Operands = SampleOperands;

    const NAME: &'static str = "sample";
    const VERSION: u32 = 1;

    fn bucket(p: &SampleProblem) -> String {
        format!("w{} vocab {}", p.vector(), p.vocab.next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &SampleProblem) -> Vec<SampleConfig> {
        let all: &[u32] = match arch.cores() {
            Some(_) => &[1],
            None => &[1024, 512, 256, 128],
        };
        let configs = all.iter().map(|units| SampleConfig { units: *units });
        configs.filter(|c| Self::check(arch, p, c).is_ok()).collect()
    }

    fn check(arch: &ArchProfile, _: &SampleProblem, c: &SampleConfig) -> Result<(), Infeasible> {
        stores(arch, [DType::F32])?;
        if !c.units.is_power_of_two() || c.units > COLUMNS {
            return Err(shape("units", c.units, "a power of two, 1024 at most"));
        }
        if arch.cores().is_some() && c.units > 1 {
            return Err(shape("units", c.units, "one where barriers are not cheap"));
        }
        limits(arch, c.units, 4 * (PIVOTS * c.units + COLUMNS + 32))
    }

    fn cost(p: &SampleProblem) -> Cost {
        let all = p.logits() as u64;
        Cost { flops: 4 * all, bytes: 4 * all }
    }

    fn simplest(arch: &ArchProfile, p: &SampleProblem) -> Result<SampleConfig, Infeasible> {
        let units = if arch.cores().is_some() { 1 } else { 64 };
        let config = SampleConfig { units };
        Self::check(arch, p, &config).map(|()| config)
    }

    /// Rows of every kind: the likeliest token, the whole distribution, and with each of the rules.
    fn operands(device: &Device, p: &SampleProblem, seed: u64) -> SampleOperands {
        let client = device.client();
        let choice = |row: u32| {
            let kind = row.wrapping_add(seed as u32) % 4;
            Choice {
                temperature: if kind == 0 { 0.0 } else { 0.8 },
                top_k: if kind == 3 { 50 } else { 0 },
                top_p: if kind >= 2 { 0.9 } else { 1.0 },
                min_p: 0.0,
                penalty: 1.0,
                uniform: (row.wrapping_mul(0x9e37_79b1) >> 8) as f32 / (1 << 24) as f32,
            }
        };
        let choices: Vec<u32> = (0..p.rows).flat_map(|row| choice(row).words()).collect();
        let none = vec![0u32; p.rows as usize * p.seen_words()];
        SampleOperands {
            logits: crate::noise(device, p.logits(), DType::F32, seed),
            choices: client.create_from_slice(u32::as_bytes(&choices)),
            seen: client.create_from_slice(u32::as_bytes(&none)),
            out: client.empty(4 * RESULT * p.rows as usize),
        }
    }

    /// Of the largest id no more than a neighbour's distance.
    fn outputs(p: &SampleProblem, operands: &SampleOperands) -> Vec<Output> {
        let len = RESULT * p.rows as usize;
        vec![Output { handle: operands.out.clone(), dtype: DType::F32, len, tolerance: 1e-6 }]
    }

    /// Weights.
    fn scratch_bytes(p: &SampleProblem, _: &SampleConfig) -> u64 {
        16 * u64::from(p.groups()) * u64::from(p.rows)
    }

    fn programs(
        _: &ArchProfile,
        p: &SampleProblem,
        c: &SampleConfig,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Box<dyn CubeKernel>> {
        let dim = CubeDim::new_1d(c.units).into();
        let settings = KernelSettings::new(dim, ExecutionMode::Unchecked, AddressType::U32);
        let buffer = || BufferCompilationArg { inplace: None };
        vec![Box::new(sample_rows::SampleRows::new(
            settings,
            properties.clone(),
            target.clone(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            p.vector(),
            *c,
        ))]
    }

    fn launch(
        device: &Device,
        p: &SampleProblem,
        c: &SampleConfig,
        operands: &SampleOperands,
        scratch: Option<&Handle>,
    ) {
        let scratch = scratch.expect("weights have scratch");
        let rows = p.rows as usize;
        // SAFETY: the lengths are the problem's, and a cube keeps to its row.
        unsafe {
            sample_rows::launch_unchecked(
                device.client(),
                CubeCount::Static(p.rows, 1, 1),
                CubeDim::new_1d(c.units),
                AddressType::U32,
                p.vector(),
                BufferArg::from_raw_parts(operands.logits.clone(), p.logits() / p.vector()),
                BufferArg::from_raw_parts(operands.choices.clone(), CHOICE * rows),
                BufferArg::from_raw_parts(operands.seen.clone(), p.seen_words() * rows),
                BufferArg::from_raw_parts(scratch.clone(), p.groups() as usize * rows),
                BufferArg::from_raw_parts(operands.out.clone(), RESULT * rows),
                p.vocab,
                f32::NEG_INFINITY,
                *c,
            );
        }
    }
}

/// Every so many groups of four are one column.
const COLUMNS: u32 = 1024;
/// Thresholds that a pass of a search tries: two bits.
const PIVOTS: u32 = 3;
/// Bits of 1, which no weight exceeds.
const ONE: u32 = 0x3f80_0000;

#[cube(launch_unchecked, address_type = "dynamic")]
fn sample_rows<N: Size>(
    logits: &[Vector<f32, N>],             // [rows, vocab]
    choices: &[u32],                       // [rows, CHOICE]
    seen: &mut [u32],                      // [rows, seen_words]
    weights: &mut [Vector<f32, Const<4>>], // [rows, groups]
    out: &mut [f32],                       // [rows, RESULT]
    vocab: u32,
    hidden: f32,
    #[comptime] config: SampleConfig,
) {
    let units = comptime!(config.units);
    let row = CUBE_POS_X;
    let groups = vocab.div_ceil(4);
    let choice = row as usize * comptime!(CHOICE);
    let temperature = f32::reinterpret(choices[choice]);
    let penalty = f32::reinterpret(choices[choice + 4]);
    let row_seen = row * vocab.div_ceil(32);
    let row_weights = (row * groups) as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!((PIVOTS * units) as usize));

    // The largest logit, and the first of the largest scores.
    let mut top_logit = hidden;
    let mut top = hidden;
    let mut likeliest = 0u32.runtime();
    let mut nan = 0.0f32.runtime();
    let mut g = UNIT_POS;
    while g < groups {
        let four = logits_of(logits, row, g, vocab, hidden);
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
    let nan = most(nan, &mut shared, config);
    let top_logit = most(top_logit, &mut shared, config);
    let own_top = top;
    let top = most(own_top, &mut shared, config);
    // Ids of the largest, negative so that the most is the first; below 2^24 they are exact, as are the two halves
    // of a larger one.
    let there = own_top == top;
    let high = most(select(there, -f32::cast_from(likeliest >> 16), hidden), &mut shared, config);
    let there = there && -f32::cast_from(likeliest >> 16) == high;
    let low = most(select(there, -f32::cast_from(likeliest & 0xffff), hidden), &mut shared, config);
    let mut token = 0u32.runtime();

    // NaN, or infinite where something must be finite.
    let finite = nan == 0.0 && top > hidden && top < -hidden && top_logit < -hidden;
    let mut total_exp = 0.0f32.runtime();
    if finite {
        token = u32::cast_from(-high) * 65536 + u32::cast_from(-low);
        let mut sum = 0.0f32.runtime();
        let mut g = UNIT_POS;
        if comptime!(config.units == 1) {
            // A unit that adds up a whole vocabulary gives to each addition what the one before rounded off (Kahan,
            // "Further remarks on reducing truncation errors", 1965).
            let mut lost = 0.0f32.runtime();
            while g < groups {
                let four = logits_of(logits, row, g, vocab, hidden);
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
                let four = logits_of(logits, row, g, vocab, hidden);
                #[unroll]
                for e in 0..4usize {
                    sum += (four[e] - top_logit).exp();
                }
                g += units;
            }
        }
        let mut sums = Array::<f32>::new(1usize);
        sums[0] = sum;
        add_units(&mut sums, &mut shared, 1u32, config);
        total_exp = sums[0];
        if temperature > 0.0 {
            let mut g = UNIT_POS;
            while g < groups {
                let four = logits_of(logits, row, g, vocab, hidden);
                let bits = seen_of(&*seen, row_seen, g, penalty);
                let mut made = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for e in 0..4u32 {
                    let score = punished(four[comptime!(e as usize)], (bits >> e) & 1, penalty);
                    // 1 for the largest, to the bit; -inf - x is -inf.
                    let weight = min(((score - top) / temperature).exp(), 1.0f32.runtime());
                    made.insert(comptime!(e as usize), select(score == top, 1.0, weight));
                }
                weights[row_weights + g as usize] = made;
                g += units;
            }
            // Read where they are needed: a cube of 1024 has 64 registers a unit.
            let top_k = choices[choice + 1];
            let mut least = 0u32.runtime();
            if top_k > 0 && top_k < vocab {
                let need = f32::cast_from(top_k);
                least =
                    search(&*weights, row_weights, groups, least, need, false, &mut shared, config);
            }
            let top_p = f32::reinterpret(choices[choice + 2]);
            if top_p < 1.0 {
                let mut sum = Array::<f32>::new(1usize);
                sum[0] = own_sum(&*weights, row_weights, groups, least, config);
                add_units(&mut sum, &mut shared, 1u32, config);
                let need = top_p * sum[0];
                let found =
                    search(&*weights, row_weights, groups, least, need, true, &mut shared, config);
                least = max(least, found);
            }
            // The bits of min_p are its order among weights; the likeliest is always kept.
            least = min(max(least, choices[choice + 3]), ONE);
            let uniform = f32::reinterpret(choices[choice + 5]);
            token = draw(&*weights, row_weights, groups, least, uniform, config);
        }
    }
    if UNIT_POS == 0 {
        let to = row as usize * comptime!(RESULT);
        let mut logprob = 0.0f32.runtime();
        if finite {
            let four = logits_of(logits, row, token / 4, vocab, hidden);
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
        out[to + 2] = select(finite, 0.0f32, 1.0f32);
    }
}

/// Four logits of a row, -inf past its end.
#[cube]
fn logits_of<N: Size>(
    logits: &[Vector<f32, N>],
    row: u32,
    group: u32,
    vocab: u32,
    hidden: f32,
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
    four
}

/// Which of four tokens were seen, where that counts.
#[cube]
fn seen_of(seen: &[u32], first: u32, group: u32, penalty: f32) -> u32 {
    let mut bits = 0u32.runtime();
    if penalty != 1.0 {
        bits = seen[(first + group / 8) as usize] >> (group % 8 * 4);
    }
    bits
}

/// A logit, less likely where its token was seen.
#[cube]
fn punished(logit: f32, seen: u32, penalty: f32) -> f32 {
    let mut score = logit;
    if seen == 1 {
        score = select(logit > 0.0, logit / penalty, logit * penalty);
    }
    score
}

/// The largest of what units have; each of them gets it.
#[cube]
fn most(value: f32, shared: &mut [f32], #[comptime] config: SampleConfig) -> f32 {
    let units = comptime!(config.units);
    let mut found = value;
    if comptime!(units > 1) {
        sync_cube();
        shared[UNIT_POS as usize] = value;
        #[unroll]
        for level in 0..comptime!(units.ilog2()) {
            sync_cube();
            let apart = comptime!(units >> (level + 1));
            if UNIT_POS < apart {
                let other = shared[(UNIT_POS + apart) as usize];
                let own = shared[UNIT_POS as usize];
                shared[UNIT_POS as usize] = max(own, other);
            }
        }
        sync_cube();
        found = shared[0];
    }
    found
}

/// The sums of what units have, `count` of them; each unit gets them.
#[cube]
fn add_units(
    values: &mut Array<f32>,
    shared: &mut [f32],
    #[comptime] count: u32,
    #[comptime] config: SampleConfig,
) {
    let units = comptime!(config.units);
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

/// This unit's part of the sum of weights whose bits reach `least`.
#[cube]
fn own_sum(
    weights: &[Vector<f32, Const<4>>],
    first: usize,
    groups: u32,
    least: u32,
    #[comptime] config: SampleConfig,
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
        g += comptime!(config.units);
    }
    sum
}

/// The largest number such that the weights whose bits reach it and `floor` are `need` together, or so many; at
/// most the bits of 1.
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
    #[comptime] config: SampleConfig,
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
            g += comptime!(config.units);
        }
        add_units(&mut sums, shared, PIVOTS, config);
        // Sums fall as pivots grow.
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

/// The token where the sum of the weights whose bits reach `least`, column by column, first exceeds `uniform` of all.
#[cube]
fn draw(
    weights: &[Vector<f32, Const<4>>],
    first: usize,
    groups: u32,
    least: u32,
    uniform: f32,
    #[comptime] config: SampleConfig,
) -> u32 {
    let units = comptime!(config.units);
    let mut columns = Shared::<[f32]>::new_slice(comptime!(COLUMNS as usize));
    let mut blocks = Shared::<[f32]>::new_slice(32usize);
    let mut found = Shared::<[u32]>::new_slice(2usize);
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
        // The last block, and column, that has a weight stands where rounding leaves the sum below the mark.
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
    }
    sync_cube();
    let column = found[0];
    let rest = f32::reinterpret(found[1]);
    sync_cube();
    // Its owner walks it: no unit reads what another wrote.
    if UNIT_POS == column % units {
        let mut token = 0u32.runtime();
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
                    sum += weight;
                    open = sum <= rest;
                }
            }
            g += COLUMNS;
        }
        found[0] = token;
    }
    sync_cube();
    found[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_candidates_that_fit() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for vocab in [1, 50_257, 128_256] {
                let p = SampleProblem::new(3, vocab).expect("valid");
                assert!(!Sample::candidates(&arch, &p).is_empty(), "{name} {vocab}");
                Sample::simplest(&arch, &p).expect("it is feasible");
            }
        }
    }

    #[test]
    fn what_has_no_token_is_refused() {
        assert_eq!(SampleProblem::new(0, 5), Err(InvalidSample::Empty { axis: "rows" }));
        assert_eq!(SampleProblem::new(1, 0), Err(InvalidSample::Empty { axis: "vocab" }));
        let large = InvalidSample::TooLarge { rows: 1 << 10, vocab: 1 << 21 };
        assert_eq!(SampleProblem::new(1 << 10, 1 << 21), Err(large));
    }
}
