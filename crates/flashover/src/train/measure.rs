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
        Trainer::new(self.clone(), options)?.measure([batch, context], repetitions)
    }

    fn timed(
        &self,
        [batch, context]: [usize; 2],
        repetitions: usize,
        mut step: impl FnMut(Vec<Example>) -> Result<(), TrainError>,
    ) -> Result<Vec<f64>, TrainError> {
        let example = |seed| Example { tokens: self.some_tokens(seed, context + 1), from: 0 };
        let mut samples_ns = Vec::new();
        for at in 0..2 + repetitions {
            let examples = (0..batch).map(|own| example(at * batch + own)).collect();
            let begin = Stopwatch::start();
            step(examples)?;
            if at > 1 {
                samples_ns.push(begin.elapsed().as_nanos() as f64);
            }
        }
        Ok(samples_ns)
    }
}

impl Trainer {
    /// Runs one step of `batch` sequences of `context` random tokens, and returns its nanoseconds on the host's clock.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn measure_one(&mut self, [batch, context]: [usize; 2]) -> Result<f64, TrainError> {
        let engine = self.engine().clone();
        let example = |seed| Example { tokens: engine.some_tokens(seed, context + 1), from: 0 };
        let examples = (0..batch).map(example).collect();
        let begin = Stopwatch::start();
        self.step(&[examples])?;
        Ok(begin.elapsed().as_nanos() as f64)
    }

    /// Runs two steps of `batch` sequences of `context` random tokens as warm-up, then measures `repetitions` steps.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn measure(
        &mut self,
        [batch, context]: [usize; 2],
        repetitions: usize,
    ) -> Result<TrainSpeed, TrainError> {
        let engine = self.engine().clone();
        let samples_ns = engine
            .timed([batch, context], repetitions, |examples| self.step(&[examples]).map(drop))?;
        let config = engine.config();
        let (layers, head) = matrices(config);
        let attention = config.layers.len() * config.heads * config.head_dim * context;
        let token = match self.training.trains {
            Trains::Adapter(_) => 4 * (layers + head),
            Trains::Weights { .. } => 6 * (layers + head) + 6 * attention as u64,
        };
        Ok(TrainSpeed { samples_ns, flops: token * (batch * context) as u64 })
    }
}

/// Returns the elements of the layers' matrices, and those of the head.
fn matrices(config: &DecoderConfig) -> (u64, u64) {
    let matrix = |param: &Param| matches!(param.slot, Slot::Layer(..)) && param.shape.len() == 2;
    let values = |param: &Param| param.shape.iter().product::<usize>() as u64;
    let layers = config.params().iter().filter(|own| matrix(own)).map(values).sum();
    (layers, (config.vocab * config.hidden) as u64)
}
