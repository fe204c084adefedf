//! Fine-tuning: trains an adapter of a frozen model.
//!
//! ```text
//! for each step:  gradient = Σ over micro-batches of dloss / tokens of the step      equals one large batch
//!                 clip its norm, AdamW                                               all in f32
//! ```

mod data;
mod error;
mod full;
mod measure;
mod schedule;

use std::path::Path;

use burn::optim::{AdamW, AdamWConfig, AdamWState, Optimizer};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use checkpoint::Staged;
use models::{Adaptation, Workload};
use serde::Serialize;

use crate::device_error::{DeviceError, check_free};
use crate::engine::Engine;
use crate::memory::{Grant, Plan, PlanError};

pub use crate::engine::Start;
pub use data::{Dataset, DatasetError};
pub use error::TrainError;
pub use full::{FullOptions, FullTrainer};
pub use measure::{TrainSpeed, TrainTest};
pub use models::{AdamWOptions, Adapter, Example, LoraOptions, Recompute, Training};
pub use ops::training::Moments;
use schedule::LossScale;
pub use schedule::Schedule;

/// Options of training an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// Rank, alpha and modules of the adapter.
    pub lora: LoraOptions,
    /// Learning rate of each step.
    pub schedule: Schedule,
    /// Weight decay of AdamW: each step multiplies the values by 1 - learning rate · weight decay.
    pub weight_decay: f64,
    /// Maximum norm of the gradient; a larger one is scaled down to it. None for no limit.
    pub max_grad_norm: Option<f64>,
    /// Seed of the initial values of A.
    pub seed: u64,
    /// Activations that are recomputed in the backward pass.
    pub recompute: Recompute,
}

impl Default for TrainOptions {
    /// Returns the options with which QLoRA's authors trained models of 7 to 13 billion parameters, at a constant rate.
    fn default() -> Self {
        Self {
            lora: LoraOptions::default(),
            schedule: Schedule::constant(2e-4),
            weight_decay: 0.0,
            max_grad_norm: Some(1.0),
            seed: 0,
            recompute: Recompute::Layers,
        }
    }
}

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Step number, from 1.
    pub step: usize,
    /// Mean of -ln p over the trained tokens, before the step.
    pub loss: f64,
    /// Number of trained tokens.
    pub tokens: usize,
    /// Norm of the gradient of the mean loss, before clipping.
    pub gradient: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// True if the gradient left the range of f16, and the step changed nothing.
    pub skipped: bool,
}

/// Trains an adapter.
pub struct Trainer {
    options: TrainOptions,
    /// The adapter at the start.
    adapter: Adapter,
    /// Current values, once they are on the device.
    values: Option<Tensor<1>>,
    optimizer: AdamW,
    state: Option<AdamWState<1>>,
    scale: LossScale,
    done: usize,
    /// Workload with reserved memory.
    reserved: Option<Workload>,
    grant: Option<Grant>,
    /// Dropped last, because the last user of a model frees its memory pages.
    engine: Engine,
}

impl Trainer {
    /// Starts from a new adapter, which does not change the model yet.
    ///
    /// # Errors
    /// [`TrainError::Model`] for unknown modules or an invalid rank; [`TrainError::Option`] for options out of range.
    pub fn new(engine: Engine, options: TrainOptions) -> Result<Self, TrainError> {
        let adapter = Adapter::new(engine.config(), options.lora.clone(), options.seed)?;
        Self::from_adapter(engine, adapter, options)
    }

    /// Continues from an adapter, whose own options replace those given. The moments of AdamW start from 0.
    ///
    /// # Errors
    /// [`TrainError::Option`] for options out of range.
    pub fn from_adapter(
        engine: Engine,
        adapter: Adapter,
        options: TrainOptions,
    ) -> Result<Self, TrainError> {
        options.check()?;
        if adapter.dropout() > 0.0 {
            log::warn!("lora_dropout {} of the adapter is ignored", adapter.dropout());
        }
        let optimizer = AdamWConfig::new()
            .with_epsilon(1e-8)
            .with_weight_decay(options.weight_decay as f32)
            .build();
        let scale = match engine.decoder().dtype() {
            FloatDType::F16 => LossScale::adaptive(),
            _ => LossScale::none(),
        };
        Ok(Self {
            engine,
            options,
            adapter,
            values: None,
            optimizer,
            state: None,
            scale,
            done: 0,
            reserved: None,
            grant: None,
        })
    }

    /// Plans the memory of a step over these micro-batches.
    ///
    /// # Errors
    /// [`PlanError::Model`] for sequences longer than the model's context.
    pub fn plan(&self, micro_batches: &[Vec<Example>]) -> Result<Plan, PlanError> {
        let mut size = StepSize::default();
        micro_batches.iter().for_each(|batch| size.add(batch));
        self.engine.plan_without(self.grant.as_ref(), self.workload(&size))
    }

    fn workload(&self, size: &StepSize) -> Workload {
        self.trained(size.batch.max(1), size.context.max(1), size.micro_batches > 1)
    }

    fn trained(&self, batch: usize, context: usize, accumulates: bool) -> Workload {
        let (lora, recompute) = (self.adapter.options().clone(), self.options.recompute);
        let training = Some(Training { lora, accumulates, recompute });
        Workload { training, ..Workload::new(batch, context) }
    }

    /// Reserves memory for steps of this workload and of those of earlier calls. A step that needs more reserves it
    /// itself; reserving the largest workload first avoids moves of the adapter.
    ///
    /// # Errors
    /// [`TrainError::Plan`] if the workload exceeds the device, the budget, or the model's context.
    pub fn reserve(&mut self, need: Workload) -> Result<(), TrainError> {
        let accumulates = |own: &Workload| own.training.as_ref().is_some_and(|t| t.accumulates);
        let reserved = self.reserved.as_ref();
        let all = || reserved.into_iter().chain([&need]);
        let max = |of: fn(&Workload) -> usize| all().map(of).max().unwrap_or(0);
        let need = self.trained(max(|w| w.batch), max(|w| w.context), all().any(accumulates));
        if reserved == Some(&need) {
            return Ok(());
        }
        self.engine.check(&need)?;
        let parts = self.engine.admit_as(&mut self.grant, &need)?;
        // A single live buffer keeps its whole page.
        self.move_to(&Device::flex());
        let made = self.reserve_page(parts.kept() + parts.transient());
        self.move_to(self.engine.clone().decoder().device());
        self.reserved = made.is_ok().then_some(need);
        if made.is_err() {
            self.grant = None;
        }
        Ok(made?)
    }

    /// Allocates a page for a step. It also holds the adapter and its moments, which each step rewrites.
    fn reserve_page(&self, bytes: u128) -> Result<(), DeviceError> {
        self.engine.clear_cache()?;
        check_free(self.engine.device(), bytes)?;
        self.engine.reserve_page(bytes)
    }

    /// Moves the tensors that each step rewrites.
    fn move_to(&mut self, device: &Device) {
        let _stream_guard = ops::stream_guard();
        self.values = self.values.take().map(|values| values.to_device(device));
        self.state = self.state.take().map(|state| AdamW::to_device(state, device));
    }

    /// Returns the values, and keeps them on the device from now on.
    fn values(&mut self) -> Tensor<1> {
        let _stream_guard = ops::stream_guard();
        let place = || {
            let values = self.adapter.values();
            let data = TensorData::new(values.to_vec(), [values.len()]);
            Tensor::from_data(data, self.engine.decoder().device())
        };
        self.values.get_or_insert_with(place).clone()
    }

    /// Returns the frozen model.
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Takes one step on the mean loss of all tokens of all micro-batches. They run one after the other: the step equals
    /// that of one large batch, and the memory is that of the largest micro-batch.
    ///
    /// # Errors
    /// [`TrainError::Model`] for invalid examples; [`TrainError::Plan`], before anything is computed, for batches that
    /// exceed the device or the budget; [`TrainError::Diverged`] for a loss or a gradient that is not finite, and the
    /// step changed nothing; [`TrainError::Device`].
    ///
    /// # Panics
    /// Panics if the backward pass of an op fails.
    pub fn step(&mut self, micro_batches: &[Vec<Example>]) -> Result<StepMetrics, TrainError> {
        let all = micro_batches.iter().map(|batch| batch.iter().collect());
        Ok(self.step_while(all, || true)?.expect("nothing stops it"))
    }

    /// Takes a step like [`Trainer::step`], with micro-batches that are made one at a time, so that memory does not
    /// depend on their number. Calls `goes_on` before each; if it returns false, the step is abandoned: nothing changes,
    /// and the result is None.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    ///
    /// # Panics
    /// Panics if the backward pass of an op fails.
    pub fn step_while<'a>(
        &mut self,
        micro_batches: impl Iterator<Item = Vec<&'a Example>> + Clone,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<StepMetrics>, TrainError> {
        let _first = trace::first(|| "train step");
        let _step = trace::span(|| format!("train step {}", self.done + 1));
        self.engine.note_memory();
        let mut size = StepSize::default();
        for batch in micro_batches.clone() {
            if !goes_on() {
                return Ok(None);
            }
            size.add(batch);
        }
        self.reserve(self.workload(&size))?;
        let values = self.values();
        let tokens = size.tokens;
        let scale = self.scale.now();
        let weight = scale / tokens.max(1) as f64;
        let (mut loss, mut gradient) = (None, None);
        for batch in micro_batches {
            if !goes_on() {
                return Ok(None);
            }
            let batch: Vec<Example> = batch.into_iter().cloned().collect();
            let learned = {
                let (options, factors) = (self.adapter.options(), self.adapter.factors());
                let adaptation = Adaptation { options, factors, values: &values };
                let decoder = self.engine.decoder();
                decoder.learn(adaptation, &batch, weight, self.options.recompute)?
            };
            let _stream_guard = ops::stream_guard();
            loss = Some(plus(loss, learned.loss));
            gradient = Some(plus(gradient, learned.gradient));
            self.engine.note_memory();
        }
        let (Some(loss), Some(gradient)) = (loss, gradient) else {
            return Err(models::Error::NothingToLearn.into());
        };
        let gradient = {
            let _stream_guard = ops::stream_guard();
            if scale == 1.0 { gradient } else { gradient / scale }
        };
        let [loss, length] = self.read(loss, gradient.clone())?;
        let loss = loss / tokens as f64;
        let learning_rate = self.options.schedule.rate(self.done);
        let step = self.done + 1;
        let metrics =
            |skipped| StepMetrics { step, loss, tokens, gradient: length, learning_rate, skipped };
        if !self.scale.took(length.is_finite()) {
            return Ok(Some(metrics(true)));
        }
        if !loss.is_finite() || !length.is_finite() {
            return Err(TrainError::Diverged { step });
        }
        self.take(values, gradient, length, learning_rate);
        self.done = step;
        self.engine.note_memory();
        Ok(Some(metrics(false)))
    }

    /// Applies AdamW to a gradient of this norm.
    fn take(&mut self, values: Tensor<1>, gradient: Tensor<1>, length: f64, learning_rate: f64) {
        let _optimizer = trace::span(|| "optimizer");
        let _stream_guard = ops::stream_guard();
        let gradient = match self.options.max_grad_norm {
            Some(max_grad_norm) if length > max_grad_norm => gradient * (max_grad_norm / length),
            _ => gradient,
        };
        self.values = None;
        let state = self.state.take();
        let (values, state) = self.optimizer.step(learning_rate, values, gradient, state);
        (self.values, self.state) = (Some(values), state);
    }

    /// Returns the sum of the losses and the norm of the gradient.
    fn read(&self, loss: Tensor<1>, gradient: Tensor<1>) -> Result<[f64; 2], TrainError> {
        let both = {
            let _stream_guard = ops::stream_guard();
            let length = square_sum(gradient).sqrt();
            Tensor::cat(vec![loss, length], 0).reshape([1, 2])
        };
        let both = self.engine.on_host(both)?;
        Ok([both[0].into(), both[1].into()])
    }

    /// Returns the mean of -ln p over the trained tokens of a batch, and their number. Changes nothing.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn loss(&mut self, batch: &[Example]) -> Result<(f64, usize), TrainError> {
        let mut size = StepSize::default();
        size.add(batch);
        self.reserve(self.workload(&size))?;
        let values = self.values();
        let (options, factors) = (self.adapter.options(), self.adapter.factors());
        let adaptation = Adaptation { options, factors, values: &values };
        let (loss, tokens) = self.engine.decoder().loss_of(adaptation, batch)?;
        let loss = self.engine.on_host(loss.reshape([1, 1]))?;
        Ok((f64::from(loss[0]) / tokens as f64, tokens))
    }

    /// Returns the number of steps taken.
    pub const fn done(&self) -> usize {
        self.done
    }

    /// Returns the adapter with its current values.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] for values that are not finite; [`TrainError::Device`].
    pub fn adapter(&self) -> Result<Adapter, TrainError> {
        let Some(values) = self.values.clone() else { return Ok(self.adapter.clone()) };
        let all = self.adapter.values().len();
        let values = self.engine.on_host(values.reshape([1, all]))?;
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(self.adapter.clone().with_values(values)),
            false => Err(TrainError::Diverged { step: self.done }),
        }
    }

    /// Saves the adapter into a folder, in PEFT's format.
    ///
    /// # Errors
    /// The errors of [`Trainer::adapter`]; [`TrainError::Model`] for a folder that cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<(), TrainError> {
        self.save_into(&mut Adapter::begin(folder)?)
    }

    /// Saves like [`Trainer::save`], into a folder that [`Adapter::begin`] has locked for this process.
    ///
    /// # Errors
    /// The errors of [`Trainer::save`].
    pub fn save_into(&self, folder: &mut Staged) -> Result<(), TrainError> {
        let model = self.engine.folder().display().to_string();
        Ok(self.adapter()?.write(folder, self.engine.config(), &model)?)
    }
}

/// Size of a step.
#[derive(Default)]
struct StepSize {
    micro_batches: usize,
    /// Number of examples of the largest micro-batch.
    batch: usize,
    /// Number of tokens of the longest example.
    context: usize,
    /// Number of trained tokens.
    tokens: usize,
}

impl StepSize {
    fn add<'a>(&mut self, batch: impl IntoIterator<Item = &'a Example>) {
        self.micro_batches += 1;
        let mut examples = 0;
        for example in batch {
            examples += 1;
            self.context = self.context.max(example.tokens.len());
            self.tokens += example.learned();
        }
        self.batch = self.batch.max(examples);
    }
}

/// Returns Σ x², in two stages: some devices bound the iterations of a loop.
fn square_sum(x: Tensor<1>) -> Tensor<1> {
    const ROW: usize = 1024;
    let [len] = x.dims();
    let padding = Tensor::zeros([len.next_multiple_of(ROW) - len], &x.device());
    let squares = x.clone() * x;
    let squares =
        if len.is_multiple_of(ROW) { squares } else { Tensor::cat(vec![squares, padding], 0) };
    squares.reshape([len.div_ceil(ROW), ROW]).sum_dim(1).sum()
}

fn plus(sum: Option<Tensor<1>>, more: Tensor<1>) -> Tensor<1> {
    match sum {
        Some(sum) => sum + more,
        None => more,
    }
}

impl TrainOptions {
    /// # Errors
    /// [`TrainError::Option`] for a number out of range.
    pub fn check(&self) -> Result<(), TrainError> {
        // Training computes in f32.
        let positive = |value: f64| (value as f32).is_finite() && value > 0.0;
        let rules = [
            ("learning rate", self.schedule.learning_rate, true),
            ("weight decay", self.weight_decay, false),
            ("clip", self.max_grad_norm.unwrap_or(1.0), true),
        ];
        for (name, value, above) in rules {
            if !(positive(value) || (!above && value == 0.0)) {
                let range =
                    if above { "above 0 and within f32" } else { "of 0 or more, within f32" };
                return Err(TrainError::Option { name, value, range });
            }
        }
        Ok(())
    }
}
