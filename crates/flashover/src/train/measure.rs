//! Speed of training.

use models::{DecoderConfig, Example, LoraOptions, Param, Part, Recompute, Slot};
use serde::Serialize;
use tune::timing::Stopwatch;

use super::error::TrainError;
use super::{TrainOptions, Trainer, Trains};
use crate::engine::Engine;

/// Training steps to measure, on sequences of one length whose tokens all are targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainTest {
    /// Number of sequences per step.
    pub batch: usize,
    /// Number of tokens per sequence.
    pub context: usize,
    /// Rank of the adapter, which covers all matrices of the layers.
    pub rank: usize,
    /// Activations that the backward pass recomputes.
    pub recompute: Recompute,
}

/// Size of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// Number of sequences of a micro-batch.
    pub batch: usize,
    /// Number of tokens per sequence, all of them targets.
    pub context: usize,
}

impl StepShape {
    /// Returns the number of tokens.
    pub const fn tokens(self) -> usize {
        self.micro_batches * self.batch * self.context
    }
}

/// Measured speed of training.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainSpeed {
    /// Nanoseconds of each step on the host's clock: from tokens on the host to the loss on the host, with the update
    /// of the values launched.
    pub samples_ns: Vec<f64>,
    /// Operations per step that the model needs, forward and backward. A multiply-add counts as two. Recomputed matmuls and
    /// those of an adapter do not count; for all weights, half of the scores count, as a causal model needs them.
    pub flops: u64,
}

impl Engine {
    /// Runs two steps as warm-up, then measures `repetitions` steps. The adapter is discarded.
    ///
    /// # Errors
    /// The errors of [`Trainer::new`] and [`Trainer::step`].
    pub fn measure_training(
        &self,
        test: TrainTest,
        repetitions: usize,
    ) -> Result<TrainSpeed, TrainError> {
        let TrainTest { batch, context, rank, recompute } = test;
        let lora = LoraOptions { rank, alpha: 2.0 * rank as f64, ..LoraOptions::default() };
        let options = TrainOptions { lora, recompute, ..TrainOptions::default() };
        let shape = StepShape { micro_batches: 1, batch, context };
        Trainer::new(self.clone(), options)?.measure(shape, repetitions)
    }
}

impl Trainer {
    /// Runs one step of random tokens, and returns its nanoseconds on the host's clock.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn measure_one(&mut self, shape: StepShape) -> Result<f64, TrainError> {
        let StepShape { micro_batches, batch, context } = shape;
        // Refuses a shape that does not fit before its tokens are made.
        self.reserve(&self.trained(batch, context, micro_batches))?;
        let engine = self.engine().clone();
        let first = self.done() * micro_batches * batch;
        let example = |seed| Example { tokens: engine.some_tokens(seed, context + 1), from: 0 };
        let batches = (0..micro_batches).map(|own| first + own * batch);
        let batches = batches.map(|first| (first..first + batch).map(example).collect());
        let batches: Vec<Vec<Example>> = batches.collect();
        let begin = Stopwatch::start();
        self.step(&batches)?;
        Ok(begin.elapsed().as_nanos() as f64)
    }

    /// Runs two steps of random tokens as warm-up, then measures `repetitions` steps.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn measure(
        &mut self,
        shape: StepShape,
        repetitions: usize,
    ) -> Result<TrainSpeed, TrainError> {
        self.measure_one(shape)?;
        self.measure_one(shape)?;
        let samples_ns = (0..repetitions).map(|_| self.measure_one(shape));
        let samples_ns = samples_ns.collect::<Result<Vec<_>, _>>()?;
        let StepShape { micro_batches, batch, context } = shape;
        let sequences = micro_batches * batch;
        let [flops, _] = self.flops(sequences * context, sequences * context * context);
        Ok(TrainSpeed { samples_ns, flops })
    }

    /// Returns the operations of a forward pass. `scores` is as in [`Trainer::flops`].
    pub(crate) fn forward_flops(&self, rows: usize, scores: usize) -> u64 {
        let config = self.engine().config();
        let head = (config.vocab * config.hidden) as u64;
        let attention = (2 * config.layers.len() * config.heads * config.head_dim * scores) as u64;
        2 * (matrices(config, |_| true) + head) * rows as u64 + attention
    }

    /// Returns the operations of a step that the model needs, and those with what the backward pass repeats. `scores` is the sum
    /// of the squares of the sequences' rows.
    pub(super) fn flops(&self, rows: usize, scores: usize) -> [u64; 2] {
        let config = self.engine().config();
        let (rows, layers) = (rows as u64, matrices(config, |_| true));
        let head = (config.vocab * config.hidden) as u64;
        // A causal model needs half of the scores, for scores and for their sums over values.
        let attention = (2 * config.layers.len() * config.heads * config.head_dim * scores) as u64;
        let (model, forward) = match self.training.trains {
            Trains::Adapter(_) => (4 * (layers + head) * rows, attention),
            Trains::Weights { .. } => (6 * (layers + head) * rows + 3 * attention, attention),
        };
        // The last matrix of a layer does not run again.
        let again = match self.training.recompute {
            Recompute::Layers => 2 * matrices(config, |part| part != Part::Down) * rows + forward,
            Recompute::FeedForward => {
                2 * matrices(config, |part| matches!(part, Part::Gate | Part::Up)) * rows
            }
            Recompute::Norms | Recompute::Nothing => 0,
        };
        [model, model + again]
    }
}

/// Returns the elements of some of the layers' matrices.
fn matrices(config: &DecoderConfig, of: impl Fn(Part) -> bool) -> u64 {
    let own = |param: &Param| match param.slot {
        Slot::Layer(_, part) => param.shape.len() == 2 && of(part),
        _ => false,
    };
    let values = |param: &Param| param.shape.iter().product::<usize>() as u64;
    config.params().iter().filter(|param| own(param)).map(values).sum()
}
