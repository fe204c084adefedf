//! Numbers of a batch.

use serde::{Serialize, Serializer};
use tune::timing::Stopwatch;

use super::rewards::{RewardError, Scored};
use super::{Advantages, Learned};
use crate::train::StepMetrics;

/// Time of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Phase {
    /// Seconds.
    pub seconds: f64,
    /// Tokens of completions; for rewards, completions.
    pub tokens: usize,
    /// Operations that the model needs, with those for prompts.
    pub model_flops: u64,
    /// Operations with what the backward pass repeats.
    pub device_flops: u64,
}

impl Phase {
    pub(super) fn new(begin: &Stopwatch, tokens: usize, flops: [u64; 2]) -> Self {
        let [model_flops, device_flops] = flops;
        Self { seconds: begin.elapsed().as_secs_f64(), tokens, model_flops, device_flops }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.tokens += other.tokens;
        self.model_flops += other.model_flops;
        self.device_flops += other.device_flops;
    }

    /// Returns the tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// Time of each phase of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Phases {
    /// Draws completions.
    pub sample: Phase,
    /// Scores them.
    pub reward: Phase,
    /// Log-probabilities of the reference.
    pub reference: Phase,
    /// Log-probabilities before the first update.
    pub old: Phase,
    /// Gradients and optimizer, of all updates.
    pub learn: Phase,
}

impl Phases {
    /// Returns the phases with their names.
    pub fn named(&self) -> [(&'static str, Phase); 5] {
        [
            ("sample", self.sample),
            ("reward", self.reward),
            ("reference", self.reference),
            ("old", self.old),
            ("learn", self.learn),
        ]
    }
}

/// Scores of a reward function.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RewardReport {
    /// Its name.
    pub name: String,
    /// Mean of the scores; none without a score.
    pub mean: Option<f64>,
    /// Standard deviation of the scores.
    pub deviation: Option<f64>,
    /// Completions with a score.
    pub scored: usize,
}

impl RewardReport {
    pub(super) fn new(name: String, values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / count);
        let deviation = mean.map(|mean| {
            let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
            (squares / (count - 1.0).max(1.0)).sqrt()
        });
        Self { name, mean, deviation, scored: values.len() }
    }
}

/// A completion without a score of a function.
#[derive(Debug, Serialize)]
pub struct RewardFault {
    /// Name of the function.
    pub function: String,
    /// Line of the prompt.
    pub line: usize,
    /// Text of the prompt.
    pub prompt: String,
    /// The fault.
    #[serde(serialize_with = "shown")]
    pub why: RewardError,
}

fn shown<S: Serializer>(why: &RewardError, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(why)
}

/// A completion to look at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// Text of the prompt.
    pub prompt: String,
    /// Text of the completion.
    pub completion: String,
    /// Its reward, if it has one.
    pub reward: Option<f64>,
}

/// Difference of ln p between trainer and sampler, over the drawn tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LogRatio {
    /// Mean.
    pub mean: f64,
    /// Root of the mean square.
    pub rms: f64,
    /// Largest magnitude.
    pub largest: f64,
}

/// Numbers of a batch. Those of a part that did not happen are absent.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Number of the batch, from 1.
    pub batch: u64,
    /// Completions and their rewards; none for a batch that was sampled before the run was resumed.
    #[serde(flatten)]
    pub drawing: Option<DrawingReport>,
    /// Updates; none if there was none.
    #[serde(flatten)]
    pub learning: Option<LearningReport>,
    /// Time by phase.
    pub phases: Phases,
    /// Completions without a score.
    pub faults: Vec<RewardFault>,
    /// The completion with the highest reward, and that with the lowest.
    pub samples: Vec<Sample>,
}

/// Completions of a batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DrawingReport {
    /// Mean of the completions' rewards: sums of weighted scores. None if no completion has a score.
    pub reward: Option<f64>,
    /// Their standard deviation.
    pub reward_deviation: Option<f64>,
    /// Scores by function.
    pub rewards: Vec<RewardReport>,
    /// Groups whose rewards are all equal, which have no gradient.
    pub equal_groups: usize,
    /// Mean tokens of a completion.
    pub length: f64,
    /// Fewest tokens of a completion.
    pub shortest: usize,
    /// Most tokens of a completion.
    pub longest: usize,
    /// Share of the completions that are truncated.
    pub truncated: f64,
    /// Completions that are learned from.
    pub learned: usize,
}

/// Updates on a batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LearningReport {
    /// Steps of the optimizer so far.
    pub step: usize,
    /// Loss of the last update.
    pub loss: f64,
    /// Norm of its gradient, before clipping.
    pub gradient: f64,
    /// Learning rate of the last update.
    pub learning_rate: f64,
    /// Mean of the estimates of the KL divergence from the reference, before the first update; none without a reference.
    pub kl: Option<f64>,
    /// Mean entropy of the learned tokens' distributions before the first update, in nats.
    pub entropy: Option<f64>,
    /// Difference between trainer and sampler before the first update.
    pub log_ratio: Option<LogRatio>,
}

impl Report {
    pub(super) fn new(
        batch: u64,
        completions: &[Scored<'_>],
        advantages: &Advantages,
        rewards: Vec<RewardReport>,
        faults: Vec<RewardFault>,
    ) -> Self {
        let scored: Vec<f64> = advantages.rewards.iter().flatten().copied().collect();
        let RewardReport { mean, deviation, .. } = RewardReport::new(String::new(), &scored);
        let lengths = || completions.iter().map(|own| own.tokens.len());
        let count = completions.len().max(1) as f64;
        let reward = |at: &usize| advantages.rewards[*at].unwrap_or(f64::NAN);
        let mut order: Vec<usize> =
            (0..completions.len()).filter(|at| advantages.rewards[*at].is_some()).collect();
        order.sort_by(|one, other| reward(other).total_cmp(&reward(one)));
        let ends = order.first().into_iter().chain(order.last().filter(|_| order.len() > 1));
        let sample = |at: &usize| Sample {
            prompt: completions[*at].prompt.to_owned(),
            completion: completions[*at].completion.to_owned(),
            reward: advantages.rewards[*at],
        };
        let drawing = DrawingReport {
            reward: mean,
            reward_deviation: deviation,
            rewards,
            equal_groups: advantages.equal_groups,
            length: lengths().sum::<usize>() as f64 / count,
            shortest: lengths().min().unwrap_or(0),
            longest: lengths().max().unwrap_or(0),
            truncated: completions.iter().filter(|own| own.truncated).count() as f64 / count,
            learned: 0,
        };
        let samples = ends.map(sample).collect();
        Self { drawing: Some(drawing), faults, samples, ..Self::resumed(batch) }
    }

    /// Returns the report of a batch that was sampled before the run was resumed.
    pub fn resumed(batch: u64) -> Self {
        Self {
            batch,
            drawing: None,
            learning: None,
            phases: Phases::default(),
            faults: Vec::new(),
            samples: Vec::new(),
        }
    }

    /// Takes the numbers of an update.
    pub(super) fn take(&mut self, sums: &Sums, metrics: StepMetrics, update: usize) {
        let StepMetrics { step, loss, gradient, learning_rate, .. } = metrics;
        let before = self.learning.take();
        let (kl, entropy, log_ratio) = match (update, before) {
            (1, _) => (sums.kl(), Some(sums.entropy()), Some(sums.log_ratio())),
            (_, Some(before)) => (before.kl, before.entropy, before.log_ratio),
            (_, None) => (None, None, None),
        };
        self.learning =
            Some(LearningReport { step, loss, gradient, learning_rate, kl, entropy, log_ratio });
    }
}

/// Sums over learned tokens.
#[derive(Debug, Default)]
pub(super) struct Sums {
    tokens: usize,
    entropy: f64,
    kl: f64,
    with_reference: usize,
    gap: f64,
    squared_gap: f64,
    largest_gap: f64,
}

impl Sums {
    /// Adds the tokens of a completion, with their ln p and entropy in the trainer.
    pub(super) fn add(&mut self, own: &Learned, log_probability: &[f32], entropy: &[f32]) {
        self.tokens += log_probability.len();
        self.entropy += entropy.iter().map(|own| f64::from(*own)).sum::<f64>();
        for (trained, drawn) in log_probability.iter().zip(&own.drawn) {
            let gap = f64::from(*trained) - f64::from(*drawn);
            self.gap += gap;
            self.squared_gap += gap * gap;
            self.largest_gap = self.largest_gap.max(gap.abs());
        }
        for (trained, reference) in log_probability.iter().zip(own.reference.iter().flatten()) {
            let far = f64::from(*reference) - f64::from(*trained);
            self.kl += far.exp() - far - 1.0;
            self.with_reference += 1;
        }
    }

    pub(super) const fn tokens(&self) -> usize {
        self.tokens
    }

    fn count(&self) -> f64 {
        self.tokens.max(1) as f64
    }

    fn entropy(&self) -> f64 {
        self.entropy / self.count()
    }

    fn kl(&self) -> Option<f64> {
        (self.with_reference > 0).then(|| self.kl / self.with_reference as f64)
    }

    fn log_ratio(&self) -> LogRatio {
        let count = self.count();
        LogRatio {
            mean: self.gap / count,
            rms: (self.squared_gap / count).sqrt(),
            largest: self.largest_gap,
        }
    }
}
