//! How fast an adapter is learned.

use models::{Example, LoraOptions, Param, Recompute, Slot};
use serde::Serialize;
use tune::timing::Stopwatch;

use super::error::TrainError;
use super::{TrainOptions, Trainer};
use crate::engine::Engine;

/// Steps that are measured: of sequences of one length, all of whose tokens are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainTest {
    /// Sequences that pass together.
    pub batch: usize,
    /// Tokens of each.
    pub context: usize,
    /// Of the factors, which every matrix has.
    pub rank: usize,
    /// What is kept of a layer for its gradients.
    pub recompute: Recompute,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainSpeed {
    /// Nanoseconds of each step, by the host's clock, from tokens on the host to the loss on the host and the new values
    /// on their way.
    pub samples_ns: Vec<f64>,
    /// Operations of the products with frozen matrices of a step, forward and backward, each once: what is computed
    /// again is not counted, nor are the factors. A multiply-add counts two.
    pub flops: u64,
}

impl Engine {
    /// Takes two steps to warm up and then as many as `repetitions` says, of an adapter that is thrown away.
    ///
    /// # Errors
    /// As [`Trainer::new`] and [`Trainer::step`].
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
