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
//! Tokens that are absent, as a tokenizer may lack ids of its model, count as -inf.
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

mod kernel;

use arch::{ArchProfile, DType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::fits::{limits, shape, stores};
use crate::launch::launch;
use crate::rows::RowPlan;
use kernel::{COLUMNS, PIVOTS, sample_rows};

/// The family of samplers.
pub struct Sample;

/// Rows of logits that become tokens. Build it with [`SampleProblem::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleProblem {
    pub rows: u32,
    pub vocab: u32,
    /// True if some tokens are absent and never sampled.
    #[serde(default)]
    pub masked: bool,
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
        Ok(Self { rows, vocab, masked: false })
    }

    /// Words of a row of seen tokens.
    pub const fn seen_words(&self) -> usize {
        self.vocab.div_ceil(32) as usize
    }

    /// Words of all rows of seen tokens, and of the absent ones.
    pub const fn all_words(&self) -> usize {
        (self.rows as usize + self.masked as usize) * self.seen_words()
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
    /// A bit a token, `[rows, seen_words]`, and after them `[seen_words]` of absent tokens where some are.
    pub seen: Handle,
    /// f32 `[rows, RESULT]`; f32 holds every id.
    pub out: Handle,
}

impl Kernel for Sample {
    type Problem = SampleProblem;
    type Config = SampleConfig;
    type Operands = SampleOperands;

    const NAME: &'static str = "sample";
    const VERSION: u32 = 2;

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
        RowPlan::of(arch, c.units, c.units).check(arch)?;
        if c.units > COLUMNS {
            return Err(shape("units", c.units, "1024 at most"));
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
    fn operands(queue: &Queue, p: &SampleProblem, seed: u64) -> SampleOperands {
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
        let none = vec![0u32; p.all_words()];
        SampleOperands {
            logits: crate::noise(queue, p.logits(), DType::F32, seed),
            choices: queue.upload(u32::as_bytes(&choices)),
            seen: queue.upload(u32::as_bytes(&none)),
            out: queue.empty(4 * RESULT * p.rows as usize),
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

    fn launch(
        queue: &Queue,
        p: &SampleProblem,
        c: &SampleConfig,
        operands: &SampleOperands,
        scratch: Option<&Handle>,
    ) {
        let scratch = scratch.expect("weights have scratch");
        let rows = p.rows as usize;
        // SAFETY: the lengths are the problem's, and a cube keeps to its row.
        unsafe {
            launch!(
                queue,
                sample_rows,
                CubeCount::Static(p.rows, 1, 1),
                CubeDim::new_1d(c.units),
                AddressType::U32,
                p.vector(),
                BufferArg::from_raw_parts(operands.logits.clone(), p.logits() / p.vector()),
                BufferArg::from_raw_parts(operands.choices.clone(), CHOICE * rows),
                BufferArg::from_raw_parts(operands.seen.clone(), p.all_words()),
                BufferArg::from_raw_parts(scratch.clone(), p.groups() as usize * rows),
                BufferArg::from_raw_parts(operands.out.clone(), RESULT * rows),
                p.vocab,
                f32::NEG_INFINITY,
                p.masked,
                RowPlan::of(queue.profile(), c.units, c.units),
            );
        }
    }
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
