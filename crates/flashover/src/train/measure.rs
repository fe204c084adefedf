//! Speed of training.

use models::{Example, LoraOptions, Param, Recompute, Slot};
use serde::Serialize;
use tune::timing::Stopwatch;

use super::error::TrainError;
use super::{TrainOptions, Trainer};
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
    /// Operations per step in matmuls with frozen matrices, forward and backward. A multiply-add counts as two.
    /// Recomputed matmuls and those of the adapter do not count.
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
        let mut trainer = Trainer::new(self.clone(), options)?;
        let example = |seed| Example { tokens: self.some_tokens(seed, context), from: 0 };
        let mut samples_ns = Vec::new();
        for step in 0..2 + repetitions {
            let examples = (0..batch).map(|at| example(step * batch + at)).collect();
            let begin = Stopwatch::start();
            trainer.step(&[examples])?;
            if step > 1 {
                samples_ns.push(begin.elapsed().as_nanos() as f64);
            }
        }
        let config = self.config();
        let matrix =
            |param: &Param| matches!(param.slot, Slot::Layer(..)) && param.shape.len() == 2;
        let values = |param: &Param| param.shape.iter().product::<usize>() as u64;
        let layers: u64 = config.params().iter().filter(|own| matrix(own)).map(values).sum();
        let head = (config.vocab * config.hidden) as u64;
        Ok(TrainSpeed { samples_ns, flops: 4 * (layers + head) * (batch * context) as u64 })
    }
}
