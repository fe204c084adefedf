//! Training of all weights of a model.
//!
//! ```text
//! for each step:  gradient = Σ over micro-batches of dloss / tokens of the step      f32, added in place
//!                 norm, clip factor, AdamW                                           on the device
//! ```
//!
//! The weights of the engine are those that train: it generates with them between steps.

use burn::tensor::{FloatDType, Tensor};
use models::{AdamWOptions, Example, FlatWeights, Gradients, LossScale, Optimizer, Recompute};
use ops::training::Control;

use super::error::TrainError;
use super::{Schedule, StepMetrics, Trainer};
use crate::device::Device;
use crate::engine::{Engine, Start, Trainable};
use crate::options::EngineOptions;

/// Options of training all weights.
#[derive(Debug, Clone, PartialEq)]
pub struct FullOptions {
    /// Learning rate of each step.
    pub schedule: Schedule,
    /// Hyperparameters of AdamW.
    pub optimizer: AdamWOptions,
    /// True to keep exact weights in f32 next to weights in 16 bits. Without them, weights in bf16 are rounded
    /// stochastically, which takes 4 bytes less per weight.
    pub master: bool,
    /// Activations that are recomputed in the backward pass.
    pub recompute: Recompute,
}

impl Default for FullOptions {
    /// Returns the options of GPT-2's training in llm.c and nanoGPT, at a constant rate.
    fn default() -> Self {
        Self {
            schedule: Schedule::constant(6e-4),
            optimizer: AdamWOptions::default(),
            master: true,
            recompute: Recompute::Nothing,
        }
    }
}

/// Trains all weights of a model.
pub struct FullTrainer {
    options: FullOptions,
    weights: FlatWeights,
    gradients: Gradients,
    optimizer: Optimizer,
    done: usize,
    /// Dropped last, because the last user of a model frees its memory pages.
    engine: Engine,
}

impl Trainer {
    /// Loads a model to train all of its weights.
    ///
    /// # Errors
    /// [`TrainError::Load`] for a model that cannot be loaded; [`TrainError::Model`] for quantised weights.
    pub fn full(
        device: &Device,
        start: Start,
        engine: &EngineOptions,
        options: FullOptions,
    ) -> Result<FullTrainer, TrainError> {
        let Trainable { engine, weights, master } =
            Engine::trainable(device, start, engine, options.master)?;
        let scale = match weights.dtype() {
            FloatDType::F16 => LossScale::Adaptive,
            _ => LossScale::One,
        };
        let optimizer = Optimizer::new(&weights, master.as_ref(), options.optimizer, scale)?;
        let on = weights.values().device();
        let gradients = Gradients::zeros(weights.parameters().clone(), &on);
        Ok(FullTrainer { options, weights, gradients, optimizer, done: 0, engine })
    }
}

impl FullTrainer {
    /// Returns the model with its current weights.
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the number of steps taken.
    pub const fn done(&self) -> usize {
        self.done
    }

    /// Takes one step on the mean loss of all tokens of all micro-batches. They run one after the other: the step equals
    /// that of one large batch, and the memory is that of the largest micro-batch.
    ///
    /// # Errors
    /// [`TrainError::Model`] for invalid examples; [`TrainError::Diverged`] for a loss or a gradient that is not finite, unless
    /// the loss scale adapts: then the step changes nothing but the scale. [`TrainError::Device`].
    pub fn step(&mut self, micro_batches: &[Vec<Example>]) -> Result<StepMetrics, TrainError> {
        let _step = trace::span(|| format!("train step {}", self.done + 1));
        let tokens = micro_batches.iter().flatten().map(Example::learned).sum::<usize>();
        let decoder = self.engine.decoder();
        self.gradients.clear(decoder.ctx())?;
        let scale = self.optimizer.scale();
        let weight = 1.0 / tokens.max(1) as f64;
        let mut sum: Option<Tensor<1>> = None;
        for batch in micro_batches {
            let scale = (weight, scale.clone());
            let (loss, _) = decoder.add_gradients(
                &self.weights,
                &self.gradients,
                batch,
                scale,
                self.options.recompute,
            )?;
            let _stream_guard = ops::stream_guard();
            sum = Some(match sum {
                None => loss,
                Some(sum) => sum + loss,
            });
            self.engine.note_memory();
        }
        let Some(loss) = sum else { return Err(models::Error::NothingToLearn.into()) };
        let learning_rate = self.options.schedule.rate(self.done);
        self.optimizer.step(decoder.ctx(), &self.gradients, learning_rate)?;
        let (loss, control) = self.read(loss)?;
        let (loss, gradient, step) = (loss / tokens as f64, f64::from(control.norm), self.done + 1);
        let skipped = control.finite == 0.0;
        let metrics = StepMetrics { step, loss, tokens, gradient, learning_rate, skipped };
        if skipped && decoder.dtype() == FloatDType::F16 {
            return Ok(metrics);
        }
        if skipped || !loss.is_finite() {
            return Err(TrainError::Diverged { step });
        }
        self.done = step;
        Ok(metrics)
    }

    /// Returns the loss and the state of the optimizer.
    fn read(&self, loss: Tensor<1>) -> Result<(f64, Control), TrainError> {
        let both = {
            let _stream_guard = ops::stream_guard();
            Tensor::cat(vec![self.optimizer.control().clone(), loss], 0)
        };
        let all = both.dims()[0];
        let values = self.engine.on_host(both.reshape([1, all]))?;
        let (control, loss) = values.split_at(all - 1);
        let control = Control::from_array(control.try_into().expect("its fields"));
        Ok((f64::from(loss[0]), control))
    }
}
