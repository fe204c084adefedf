//! Samples a token from logits: token[r], ln softmax(logits[r])[token[r]], ln(w[token] / Σ w)    logits: `[rows, vocab]`, f32
//!
//! ```text
//!   s = logits; for seen tokens, divided by the penalty if above 0, else multiplied by it
//!   temperature 0: the token with the largest s, the first of equals
//!   else w = exp((s - max s) / temperature), set to 0 except for
//!     the top_k largest (and ties with the last of them), of these
//!     the largest that together reach top_p of the sum (and ties with the last), of these
//!     those of at least min_p
//!   token = the first at which the running sum of w, in the order below, exceeds uniform · Σ w
//! ```
//!
//! One cube processes a row; its units walk the row in groups of four. A threshold takes several passes, two
//! bits each, because the bits of a positive number grow with it. Weights are summed in columns of every
//! 1024th group, so that neighbouring units read neighbouring groups and no unit reads another's writes. The
//! sum always runs column by column: the token for a random number does not depend on the config. Sums are
//! f32.
//!
//! Absent tokens count as -inf; a tokenizer may lack ids that its model has.
//!
//! The host passes the parameters of each row with the launch, so that a batch may mix sampling settings.
//! Seen tokens are one bit each; the kernel sets the bit of the token that it samples.
//!
//! Cost: two passes over a row for the likeliest token; otherwise three more, and a search of 15 passes for
//! each threshold. With four rows of 128256 logits, each with other settings, a row took 135 us on average on
//! an H200 (190 us through Vulkan). Wider loads did not help: with two or four groups in flight it took 150
//! us.
//!
//! Sources: the logits processors of Hugging Face transformers; Holtzman et al., "The Curious Case of Neural
//! Text Degeneration" (2019) for top_p.

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

/// The sampling kernel.
pub struct Sample;

/// Rows of logits to sample tokens from. Build it with [`SampleProblem::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleProblem {
    pub rows: u32,
    pub vocab: u32,
    /// True if some tokens are absent and never sampled.
    #[serde(default)]
    pub masked: bool,
}

/// An invalid sampling problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidSample {
    #[error("expected {axis} of at least 1, got 0\nhint: skip sampling without logits")]
    Empty { axis: &'static str },
    #[error(
        "expected at most 65535 rows, at most 2^24 logits per row and fewer than 2^31 logits in \
         total, got {rows} rows of {vocab} logits\nhint: split the rows over several calls"
    )]
    TooLarge { rows: u32, vocab: u32 },
}

impl SampleProblem {
    /// Creates a problem without absent tokens.
    ///
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

    /// Words of one row of seen tokens.
    pub const fn seen_words(&self) -> usize {
        self.vocab.div_ceil(32) as usize
    }

    /// Words of all rows of seen tokens, plus those of absent tokens.
    pub const fn all_words(&self) -> usize {
        (self.rows as usize + self.masked as usize) * self.seen_words()
    }

    const fn logits(&self) -> usize {
        self.rows as usize * self.vocab as usize
    }

    /// Groups of four logits in a row; the last may be partial.
    const fn groups(&self) -> u32 {
        self.vocab.div_ceil(4)
    }

    /// Vector width of loads from the logits, in elements.
    const fn vector(&self) -> usize {
        if self.vocab.is_multiple_of(4) { 4 } else { 1 }
    }
}

/// Sampling settings of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Number of likeliest tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Probability mass to keep; 1 keeps all.
    pub top_p: f32,
    /// Smallest weight to keep, relative to the largest; 0 keeps all.
    pub min_p: f32,
    /// Repetition penalty of seen tokens; 1 has no effect.
    pub penalty: f32,
    /// Random number in [0, 1).
    pub uniform: f32,
}

/// Words of an encoded [`Choice`].
const CHOICE: usize = 6;

impl Choice {
    /// Encodes the choice for the kernel.
    pub const fn words(self) -> [u32; CHOICE] {
        [
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            // Turns -0.0 into 0.0, whose bits are 0.
            (self.min_p + 0.0).to_bits(),
            self.penalty.to_bits(),
            self.uniform.to_bits(),
        ]
    }
}

/// f32 a row in the result: the token, ln softmax(logits)\[token\], its log-probability in the distribution that it was drawn
/// from, and 1 if the row has no token.
pub const RESULT: usize = 4;

/// Launch shape of a sampler.
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
    /// Encoded [`Choice`] of each row.
    pub choices: Handle,
    /// One bit a token: `[rows, seen_words]`, then `[seen_words]` of absent tokens if there are any.
    pub seen: Handle,
    /// f32 `[rows, RESULT]`; f32 represents every id exactly.
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
        RowPlan::new(arch, c.units, c.units).check(arch)?;
        if c.units > COLUMNS {
            return Err(shape("units", c.units, "expected at most 1024"));
        }
        if arch.cores().is_some() && c.units > 1 {
            return Err(shape("units", c.units, "expected one unit on a CPU"));
        }
        limits(arch, c.units, 4 * (PIVOTS * c.units + COLUMNS + 32))
    }

    fn cost(p: &SampleProblem) -> Cost {
        let all = p.logits() as u64;
        Cost { flops: 4 * all, bytes: 4 * all }
    }

    fn baseline(arch: &ArchProfile, p: &SampleProblem) -> Result<SampleConfig, Infeasible> {
        let units = if arch.cores().is_some() { 1 } else { 64 };
        let config = SampleConfig { units };
        Self::check(arch, p, &config).map(|()| config)
    }

    /// Mixes the settings over rows: likeliest token, whole distribution, and each filter.
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

    /// The tolerance is below the distance of neighbouring ids at the largest id.
    fn outputs(p: &SampleProblem, operands: &SampleOperands) -> Vec<Output> {
        let len = RESULT * p.rows as usize;
        vec![Output { handle: operands.out.clone(), dtype: DType::F32, len, tolerance: 1e-6 }]
    }

    /// The weights, one f32 a token.
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
        // SAFETY: the lengths follow from the problem, and a cube accesses only its own row.
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
                RowPlan::new(queue.profile(), c.units, c.units),
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
                Sample::baseline(&arch, &p).expect("it is feasible");
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
