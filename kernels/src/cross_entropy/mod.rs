//! loss[r] = -weight[r] · ln p[r, target[r]] - entropy_weight[r] · H[r]    logits, gradient: `[rows, stride]`, p: `[rows, vocab]`
//!
//! ```text
//!   for each row r                                      // one group of units, one or several a cube
//!     z = softcap · tanh(logits / softcap), or logits
//!     y = z / temperature
//!     m = max y, l = Σ exp(y - m), s = Σ exp(y - m) · (y - m)           // one pass, online
//!     lse = m + ln l, log_probability = y[target] - lse, entropy = ln l - s / l
//!     p = exp(y - m) / l
//!     gradient = (weight · (p - (v == target)) + entropy_weight · p · (ln p + entropy)) / temperature · (1 - (z / softcap)²)
//! ```
//!
//! A row with target [`IGNORED`] has loss 0, log-probability 0 and gradient 0; its entropy and lse are still
//! computed. The result is NaN for a target past the vocabulary, and for a row that has NaN or +inf or only
//! -inf. Columns from `vocab` to `stride` are padding: they are not read, and their gradient is 0. The
//! gradient may overwrite the logits. Arithmetic is f32, rounded once. The config alone determines the order
//! of a row's sums, so that two launches give the same bits.
//!
//! Exponents are in units of log₂. The running sums are rescaled when a vector raises the maximum, as in
//! online softmax. The units of a row then merge their sums. They carry their rounding errors (Kahan): of 4096
//! tokens most are less than the last bit of the sum, and without them ln p was 1.5e-5 too large on a CPU, where
//! one unit sums many; with them it is at most 3e-7 off.
//!
//! | loop | hardware |
//! |---|---|
//! | rows | cubes, and groups of units if rows are short |
//! | vectors of a row | units of a group, neighbours next to each other |
//! | elements of a vector | one load of 16 bytes |
//!
//! Cost: logits once, gradient once, 2 exponentials an element. The gradient needs a second pass over the
//! row. Of each unit's vectors, the first `held` are still in registers and the next `staged` in shared
//! memory. The others are read again from device memory. Only 7% of these reads hit the second-level cache,
//! even with 13 MB of rows in flight and a cache of 50 MB (H100).
//!
//! | version (H100 as an RTX 4090, 4096 rows of 128256 in bf16) | us | of copy |
//! |---|---|---|
//! | three trips: two reads, one write | 1063 | 68% |
//! | 8 vectors a unit in registers | 883 | 81% |
//! | 5 more in shared memory | 790 | 91% |
//! | `torch.compile` of torch's loss, same call | 2004 | 36% |
//!
//! Records: `benches/baselines/cuda-sm90-132@rtx4090/{cross_entropy,tune}.jsonl`.
//!
//! Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Hsu et al., "Liger
//! Kernel: Efficient Triton Kernels for LLM Training" (2024) for the in-place gradient.

mod kernel;

use arch::{ArchProfile, DType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::{elem, rounding};
use crate::fits::{iterations, limits, rtx, shape, stores};
use crate::launch::{index_width, launch, vector};
use crate::round::by_hand;
use crate::rows::RowPlan;
use kernel::{ScalarsLaunch, SizesLaunch, cross_entropy};

/// The cross-entropy kernel.
pub struct CrossEntropy;

/// Target of a row without loss and gradient.
pub const IGNORED: u32 = u32::MAX;

/// f32 per row in the result: loss, log-probability of the target, entropy, log-sum-exp.
pub const STATS: usize = 4;

/// Destination of the gradient of the logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gradient {
    /// No gradient, forward only.
    None,
    /// A separate buffer.
    Separate,
    /// The buffer of the logits, which is overwritten.
    InPlace,
}

/// Rows of logits, each with a target. Build it with [`CrossEntropyProblem::new`], change fields, end with
/// [`CrossEntropyProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CrossEntropyProblem {
    pub rows: u32,
    pub vocab: u32,
    /// Elements from one row to the next.
    pub stride: u32,
    /// Type of logits and gradient.
    pub dtype: DType,
    /// Soft cap: logits become `softcap · tanh(logits / softcap)`.
    pub softcap: Option<f32>,
    /// Divides the logits, after the soft cap.
    pub temperature: f32,
    pub gradient: Gradient,
    /// True if the loss has the rows' entropies, too: an entropy bonus.
    #[serde(default)]
    pub entropy: bool,
}

/// An invalid cross-entropy problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidCrossEntropy {
    #[error("expected {axis} of at least 1, got 0\nhint: skip a loss without logits")]
    Empty { axis: &'static str },
    #[error(
        "expected a vocabulary of at most 2^24 tokens, got {0}\nhint: use a smaller vocabulary"
    )]
    Vocab(u32),
    #[error(
        "expected a stride of at least the vocabulary {vocab}, got {stride}\nhint: pass rows that do \
         not overlap"
    )]
    Stride { vocab: u32, stride: u32 },
    #[error(
        "expected a finite {name} above 0, got {value}\nhint: to disable it, use a \
         temperature of 1 or no soft cap"
    )]
    Scalar { name: &'static str, value: f32 },
    #[error("expected logits in f32, f16 or bf16, got {0}\nhint: cast to one of these dtypes")]
    DType(DType),
}

impl CrossEntropyProblem {
    /// Creates a problem without padding, soft cap or temperature, whose gradient overwrites the logits.
    ///
    /// # Errors
    /// See [`InvalidCrossEntropy`].
    pub fn new(rows: u32, vocab: u32, dtype: DType) -> Result<Self, InvalidCrossEntropy> {
        let (softcap, temperature, gradient) = (None, 1.0, Gradient::InPlace);
        let (stride, entropy) = (vocab, false);
        Self { rows, vocab, stride, dtype, softcap, temperature, gradient, entropy }.checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidCrossEntropy`].
    pub fn checked(self) -> Result<Self, InvalidCrossEntropy> {
        for (axis, size) in [("rows", self.rows), ("vocab", self.vocab)] {
            if size == 0 {
                return Err(InvalidCrossEntropy::Empty { axis });
            }
        }
        let (vocab, stride) = (self.vocab, self.stride);
        if vocab > 1 << 24 {
            return Err(InvalidCrossEntropy::Vocab(vocab));
        }
        if stride < vocab {
            return Err(InvalidCrossEntropy::Stride { vocab, stride });
        }
        for (name, value) in [("softcap", self.softcap), ("temperature", Some(self.temperature))] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(InvalidCrossEntropy::Scalar { name, value });
            }
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidCrossEntropy::DType(other)),
        }
    }

    /// Elements of the logits, padding included.
    pub const fn elements(&self) -> usize {
        self.rows as usize * self.stride as usize
    }

    /// Vector width in elements: the widest load that divides the stride.
    fn vector(&self, arch: &ArchProfile) -> u32 {
        vector(arch, self.dtype, |v| self.stride % v == 0)
    }

    /// Vectors of a row that hold logits.
    fn vectors(&self, arch: &ArchProfile) -> u32 {
        self.vocab.div_ceil(self.vector(arch))
    }

    const fn address(&self) -> AddressType {
        index_width(self.elements() as u64)
    }
}

/// Launch shape of a loss, and the vectors of a row that each unit keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CrossEntropyConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share a row.
    pub lanes: u32,
    /// Vectors of a row that a unit keeps in registers.
    pub held: u32,
    /// Further vectors of a row that a unit keeps in shared memory.
    pub staged: u32,
}

/// Device buffers of one launch.
#[derive(Debug, Clone)]
pub struct CrossEntropyOperands {
    /// `[rows, stride]`
    pub logits: Handle,
    /// u32 `[rows]`: a token or [`IGNORED`].
    pub targets: Handle,
    /// f32 `[rows]`: factor of -ln p.
    pub weights: Handle,
    /// f32 `[rows]`: factor of -entropy, if the problem has it.
    pub entropy_weights: Option<Handle>,
    /// `[rows, stride]`, for [`Gradient::Separate`].
    pub gradient: Option<Handle>,
    /// f32 `[STATS, rows]`
    pub stats: Handle,
}

/// Returns whether ptxas 13.0 spills registers in the gradient kernel (32 to 488 bytes). sm_120 and a soft
/// cap each halve the registers left for vectors.
fn spills(arch: &ArchProfile, p: &CrossEntropyProblem, c: &CrossEntropyConfig) -> bool {
    let sm_120 = arch.compute_capability.is_some_and(|sm| sm >= 120);
    let halved = u32::from(sm_120) + u32::from(p.softcap.is_some());
    p.gradient != Gradient::None && c.held * c.units > HELD >> halved
}

/// Maximum vectors in the registers of a cube: 8 (32 of 64 registers) for each of 1024 units.
const HELD: u32 = 8 * 1024;

impl Kernel for CrossEntropy {
    type Problem = CrossEntropyProblem;
    type Config = CrossEntropyConfig;
    type Operands = CrossEntropyOperands;

    const NAME: &'static str = "cross_entropy";
    const VERSION: u32 = 1;

    /// An in-place gradient costs as much as a separate one, so they share a bucket.
    fn bucket(p: &CrossEntropyProblem) -> String {
        let what = if p.gradient == Gradient::None { "forward" } else { "gradient" };
        let cap = if p.softcap.is_some() { " softcap" } else { "" };
        let entropy = if p.entropy { " entropy" } else { "" };
        let (vocab, padded) = (p.vocab.next_power_of_two(), p.stride.trailing_zeros().min(3));
        let rows = p.rows.next_power_of_two().min(4096);
        format!(
            "{} {what}{cap}{entropy} vocab {vocab} aligned {} rows {rows}",
            p.dtype,
            1 << padded
        )
    }

    fn candidates(arch: &ArchProfile, p: &CrossEntropyProblem) -> Vec<CrossEntropyConfig> {
        let mut configs = Vec::new();
        if arch.cores().is_some() {
            configs.extend(Self::baseline(arch, p));
            return configs;
        }
        // Eight vectors a unit, or the maximum units of a cube.
        let vectors = p.vectors(arch);
        let middle = vectors.div_ceil(8).next_power_of_two().clamp(32, 1024);
        for lanes in [middle, middle / 2, middle * 2, middle / 4] {
            let share = vectors.div_ceil(lanes.max(1));
            for (held, staged) in [(8, 5), (8, 0), (4, 0), (16, 0), (0, 5), (0, 0), (16, 10)] {
                let config = CrossEntropyConfig { units: lanes.max(128), lanes, held, staged };
                // Space for more vectors than a row has is useless, and shared memory is without a second
                // pass.
                let useful = (32..=1024).contains(&lanes)
                    && held + staged < 2 * share
                    && (staged == 0 || p.gradient != Gradient::None);
                let fits = Self::check(arch, p, &config).is_ok();
                if useful && fits && !(rtx(arch) && spills(arch, p, &config)) {
                    configs.push(config);
                }
            }
        }
        configs
    }

    fn check(
        arch: &ArchProfile,
        p: &CrossEntropyProblem,
        c: &CrossEntropyConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype, DType::F32])?;
        if c.held * c.units > HELD {
            return Err(shape("held", c.held, "expected at most 8192 vectors per cube"));
        }
        let rows = RowPlan::new(arch, c.units, c.lanes);
        rows.check(arch)?;
        let vector = p.vector(arch) * p.dtype.size() as u32;
        limits(arch, c.units, 4 * rows.shared_len() as u32 + vector * c.units * c.staged.max(1))?;
        let rows = u64::from(p.rows.div_ceil(65_535));
        iterations(arch, rows * (2 * u64::from(p.stride.div_ceil(c.lanes)) + 3))
    }

    fn cost(p: &CrossEntropyProblem) -> Cost {
        let (rows, size) = (u64::from(p.rows), p.dtype.size() as u64);
        let read = rows * u64::from(p.vocab);
        let written = if p.gradient == Gradient::None { 0 } else { p.elements() as u64 };
        let row = (4 + 4 + 4 * STATS) as u64;
        Cost { flops: 8 * read + 4 * written, bytes: (read + written) * size + rows * row }
    }

    fn baseline(
        arch: &ArchProfile,
        p: &CrossEntropyProblem,
    ) -> Result<CrossEntropyConfig, Infeasible> {
        let (units, lanes) = arch.cores().map_or((64, 64), |cores| (cores, 1));
        let config = CrossEntropyConfig { units, lanes, held: 0, staged: 0 };
        Self::check(arch, p, &config).map(|()| config)
    }

    /// One row of eight is ignored.
    fn operands(queue: &Queue, p: &CrossEntropyProblem, seed: u64) -> CrossEntropyOperands {
        let target = |row: u32| match row % 8 {
            7 => IGNORED,
            _ => row.wrapping_add(seed as u32).wrapping_mul(0x9e37_79b1) % p.vocab,
        };
        let targets: Vec<u32> = (0..p.rows).map(target).collect();
        let bytes = (p.elements() * p.dtype.size()).next_multiple_of(4);
        CrossEntropyOperands {
            logits: crate::noise(queue, p.elements(), p.dtype, 2 * seed),
            targets: queue.upload(u32::as_bytes(&targets)),
            weights: crate::noise(queue, p.rows as usize, DType::F32, 2 * seed + 1),
            entropy_weights: (p.entropy)
                .then(|| crate::noise(queue, p.rows as usize, DType::F32, 2 * seed + 2)),
            gradient: (p.gradient == Gradient::Separate).then(|| queue.empty(bytes)),
            stats: queue.empty(4 * STATS * p.rows as usize),
        }
    }

    /// None if the gradient overwrites the logits: a launch reads what it writes.
    fn outputs(p: &CrossEntropyProblem, operands: &CrossEntropyOperands) -> Vec<Output> {
        if p.gradient == Gradient::InPlace {
            return Vec::new();
        }
        let (handle, len) = (operands.stats.clone(), STATS * p.rows as usize);
        let stats = Output { handle, dtype: DType::F32, len, tolerance: 1e-5 };
        // Configs sum in different orders, then round to the dtype.
        let tolerance = rounding(p.dtype).max(1e-5);
        let gradient = operands.gradient.clone();
        let gradient = gradient.map(|handle| {
            let (dtype, len) = (p.dtype, p.elements());
            Output { handle, dtype, len, tolerance }
        });
        [stats].into_iter().chain(gradient).collect()
    }

    fn launch(
        queue: &Queue,
        p: &CrossEntropyProblem,
        c: &CrossEntropyConfig,
        operands: &CrossEntropyOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let plan = Plan::new(arch, p, c);
        let cubes = crate::cubes(queue.profile(), p.rows.into(), plan.rows.rows());
        let (vector, rows) = (p.vector(arch) as usize, p.rows as usize);
        let matrix = p.elements() / vector;
        // Unused operands are bound to any other buffer.
        let (logits, gradient) = match p.gradient {
            Gradient::None => (&operands.logits, &operands.stats),
            Gradient::Separate => {
                (&operands.logits, operands.gradient.as_ref().expect("a separate gradient"))
            }
            Gradient::InPlace => (&operands.weights, &operands.logits),
        };
        let entropy_weights = operands.entropy_weights.as_ref().unwrap_or(&operands.weights);
        // SAFETY: the lengths follow from the problem, and the kernel accesses whole rows below `rows`.
        unsafe {
            launch!(
                queue,
                cross_entropy,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                p.address(),
                vector,
                BufferArg::from_raw_parts(logits.clone(), matrix),
                BufferArg::from_raw_parts(operands.targets.clone(), rows),
                BufferArg::from_raw_parts(operands.weights.clone(), rows),
                BufferArg::from_raw_parts(entropy_weights.clone(), rows),
                BufferArg::from_raw_parts(gradient.clone(), matrix),
                BufferArg::from_raw_parts(operands.stats.clone(), STATS * rows),
                SizesLaunch::new(p.rows, p.vocab, p.stride / vector as u32),
                ScalarsLaunch::new(
                    p.softcap.unwrap_or(1.0),
                    p.temperature.recip(),
                    f32::NEG_INFINITY,
                    f32::NAN,
                ),
                plan,
                elem(p.dtype),
            );
        }
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    rows: RowPlan,
    held: u32,
    staged: u32,
    gradient: Gradient,
    softcap: bool,
    entropy: bool,
    /// True if the last vector of a row has fewer logits than elements.
    ragged: bool,
    /// True if powers of 2 use the `ex2` instruction.
    ptx: bool,
    /// True if the kernel rounds gradients itself before it stores them.
    rounds: bool,
}

impl Plan {
    fn new(arch: &ArchProfile, p: &CrossEntropyProblem, c: &CrossEntropyConfig) -> Self {
        Self {
            rows: RowPlan::new(arch, c.units, c.lanes),
            held: c.held,
            staged: c.staged,
            gradient: p.gradient,
            softcap: p.softcap.is_some(),
            entropy: p.entropy,
            ragged: !p.vocab.is_multiple_of(p.vector(arch)),
            ptx: arch.inline_ptx(),
            rounds: by_hand(arch, p.dtype),
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
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for vocab in [1, 3, 256, 50_257, 128_256, 1 << 18] {
                    let p = CrossEntropyProblem::new(7, vocab, dtype).expect("valid");
                    let all = CrossEntropy::candidates(&arch, &p);
                    assert!(!all.is_empty(), "{name} {p:?}");
                    let baseline = CrossEntropy::baseline(&arch, &p).expect("there is one");
                    for config in all.into_iter().chain([baseline]) {
                        CrossEntropy::check(&arch, &p, &config).expect("it is feasible");
                    }
                }
            }
        }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        let good = CrossEntropyProblem::new(2, 10, DType::F32).expect("valid");
        let refused = |p: CrossEntropyProblem| p.checked().expect_err("refused").to_string();
        assert!(
            refused(CrossEntropyProblem { rows: 0, ..good }).contains("rows of at least 1, got 0")
        );
        assert!(
            refused(CrossEntropyProblem { vocab: 0, ..good })
                .contains("vocab of at least 1, got 0")
        );
        assert!(refused(CrossEntropyProblem { stride: 9, ..good }).contains("got 9"));
        assert!(refused(CrossEntropyProblem { dtype: DType::I8, ..good }).contains("got i8"));
        for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let softcap = refused(CrossEntropyProblem { softcap: Some(wrong), ..good });
            assert!(softcap.contains("finite softcap above 0"), "{softcap}");
            let temperature = refused(CrossEntropyProblem { temperature: wrong, ..good });
            assert!(temperature.contains("finite temperature above 0"), "{temperature}");
        }
        let large = CrossEntropyProblem { vocab: 1 << 25, stride: 1 << 25, ..good };
        assert!(refused(large).contains("2^24"));
    }
}
