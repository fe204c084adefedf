//! Speed of training.

use models::{DecoderConfig, Example, LoraOptions, Param, Recompute, Slot};
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
        let flops = self.flops_of_token(shape.context) * shape.tokens() as u64;
        Ok(TrainSpeed { samples_ns, flops })
    }

    /// Returns the operations that the model needs for a token of a sequence of `context` tokens: see [`TrainSpeed::flops`].
    pub fn flops_of_token(&self, context: usize) -> u64 {
        let config = self.engine().config();
        let (layers, head) = matrices(config);
        let attention = config.layers.len() * config.heads * config.head_dim * context;
        match self.training.trains {
            Trains::Adapter(_) => 4 * (layers + head),
            Trains::Weights { .. } => 6 * (layers + head) + 6 * attention as u64,
        }
    }
}

/// Returns the elements of the layers' matrices, and those of the head.
fn matrices(config: &DecoderConfig) -> (u64, u64) {
    let matrix = |param: &Param| matches!(param.slot, Slot::Layer(..)) && param.shape.len() == 2;
    let values = |param: &Param| param.shape.iter().product::<usize>() as u64;
    let layers = config.params().iter().filter(|own| matrix(own)).map(values).sum();
    (layers, (config.vocab * config.hidden) as u64)
}
