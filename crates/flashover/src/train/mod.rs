//! Training: of an adapter of a frozen model, or of all weights.
//!
//! ```text
//! for each step:  gradient = Σ over micro-batches of dloss / tokens of the step      f32, added in place; equals one large batch
//!                 norm, clip factor, AdamW                                           on the device
//! ```

mod data;
mod error;
mod measure;
mod policy;
mod save;
mod schedule;
mod sequences;
mod shards;

use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use models::{
    Activations, FlatAdapter, FlatWeights, Footprint, Gradients, Loss, LossScale, Master,
    MicroBatch, Optimizer, Parking, TokenStats, Trained, Workload,
};
use ops::training::{Control, Link};
use serde::Serialize;

use crate::device::Device;
use crate::device_error::{DeviceError, check_free};
use crate::engine::{Engine, Exact, Exclusive, SourceFiles, Trainable, host_link};
use crate::memory::{Grant, Plan, PlanError, check_host};
use crate::model_files::CONFIG;
use crate::options::EngineOptions;

pub use crate::engine::Start;
pub use data::{Dataset, DatasetError};
pub use error::TrainError;
pub use measure::{StepShape, TrainSpeed, TrainTest};
pub use models::{
    AdamWOptions, Adapter, Example, LoraOptions, MuonOptions, Offload, Recompute, Training, Trains,
};
pub use ops::training::Moments;
pub use save::SavedRun;
pub use schedule::{Decay, Schedule};

/// Options of training an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// Rank, alpha and modules of the adapter.
    pub lora: LoraOptions,
    /// Learning rate of each step.
    pub schedule: Schedule,
    /// Hyperparameters of AdamW.
    pub optimizer: AdamWOptions,
    /// Seed of the initial values of A.
    pub seed: u64,
    /// Activations that are recomputed in the backward pass.
    pub recompute: Recompute,
    /// Parts in host memory; of an adapter, inputs of layers alone.
    pub offload: Offload,
}

impl Default for TrainOptions {
    /// Returns the options with which QLoRA's authors trained models of 7 to 13 billion parameters, at a constant rate.
    fn default() -> Self {
        Self {
            lora: LoraOptions::default(),
            schedule: Schedule::constant(2e-4),
            optimizer: AdamWOptions { beta2: 0.999, weight_decay: 0.0, ..AdamWOptions::default() },
            seed: 0,
            recompute: Recompute::Layers,
            offload: Offload::default(),
        }
    }
}

/// Options of training all weights.
#[derive(Debug, Clone, PartialEq)]
pub struct FullOptions {
    /// Learning rate of each step.
    pub schedule: Schedule,
    /// Hyperparameters of AdamW.
    pub optimizer: AdamWOptions,
    /// True to keep master weights in f32 next to weights in 16 bits. Without them, weights in bf16 are rounded
    /// stochastically, which takes 4 bytes less per weight.
    pub master: bool,
    /// Activations that are recomputed in the backward pass.
    pub recompute: Recompute,
    /// Parts in host memory.
    pub offload: Offload,
}

impl Default for FullOptions {
    /// Returns the options of GPT-2's training in llm.c and nanoGPT, at a constant rate.
    fn default() -> Self {
        Self {
            schedule: Schedule::constant(6e-4),
            optimizer: AdamWOptions::default(),
            master: true,
            recompute: Recompute::Nothing,
            offload: Offload::default(),
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
    /// True if the gradient left the range of f16, and the step changed nothing but the loss scale.
    pub skipped: bool,
    /// Operations that the model needs for the step: see [`TrainSpeed::flops`].
    pub model_flops: u64,
    /// Operations with those that the backward pass repeats.
    pub device_flops: u64,
}

/// Trains an adapter, or all weights.
pub struct Trainer {
    schedule: Schedule,
    optimizer: AdamWOptions,
    training: Training,
    subject: Subject,
    /// Present if a part is in host memory.
    link: Option<Arc<Link>>,
    /// None until memory for a step is reserved.
    state: Option<State>,
    done: usize,
    /// Workload with reserved memory.
    reserved: Option<Workload>,
    /// Memory for what layers keep.
    activations: Activations,
    grant: Option<Grant>,
    /// Dropped last, because the last user of a model frees its memory pages.
    engine: Engine,
}

/// Values that training changes.
enum Subject {
    /// The adapter at the start.
    Adapter(Adapter),
    Weights {
        files: SourceFiles,
        weights: Box<FlatWeights>,
        master: Exact,
    },
}

/// Buffers that live as long as a trainer.
struct State {
    /// None if the weights are trained.
    adapter: Option<FlatAdapter>,
    gradients: Gradients,
    optimizer: Optimizer,
    /// Inputs of layers between the passes, if a step goes layer by layer.
    parking: Parking,
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
        let TrainOptions { schedule, optimizer, recompute, offload, .. } = options;
        let trains = Trains::Adapter(adapter.options().clone());
        let training = Training { trains, recompute, offload, micro_batches: 1 };
        let decoder = engine.decoder();
        let link = host_link(offload, decoder.ctx(), decoder.device())?;
        let config = std::fs::read_to_string(engine.folder().join(CONFIG));
        warn_of_dropout(&config.unwrap_or_default());
        Ok(Self::of(engine, Subject::Adapter(adapter), training, (schedule, optimizer), link))
    }

    /// Loads a model to train all of its weights. The weights of [`Trainer::engine`] are those that train: it generates with
    /// them between steps.
    ///
    /// # Errors
    /// [`TrainError::Load`] for a model that cannot be loaded; [`TrainError::Model`] for quantised weights;
    /// [`TrainError::Option`] for options out of range.
    pub fn full(
        device: &Device,
        start: Start,
        engine: &EngineOptions,
        options: FullOptions,
    ) -> Result<Self, TrainError> {
        options.check()?;
        let FullOptions { schedule, optimizer, master, recompute, offload } = options;
        let muon = optimizer.muon.is_some();
        let trains = Trains::Weights { master, moments: optimizer.moments, muon };
        let training = Training { trains, recompute, offload, micro_batches: 1 };
        let Trainable { engine, weights, master, link, files } =
            Engine::trainable(device, start, engine, &training)?;
        warn_of_dropout(&files.config);
        let subject = Subject::Weights { files, weights: weights.into(), master };
        Ok(Self::of(engine, subject, training, (schedule, optimizer), link))
    }

    fn of(
        engine: Engine,
        subject: Subject,
        training: Training,
        (schedule, optimizer): (Schedule, AdamWOptions),
        link: Option<Arc<Link>>,
    ) -> Self {
        let activations = training.recompute.into();
        Self {
            schedule,
            optimizer,
            training,
            subject,
            link,
            state: None,
            done: 0,
            reserved: None,
            activations,
            grant: None,
            engine,
        }
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
        self.trained(size.batch.max(1), size.context.max(1), size.micro_batches.max(1))
    }

    fn trained(&self, batch: usize, context: usize, micro_batches: usize) -> Workload {
        let training = Training { micro_batches, ..self.training.clone() };
        Workload { training: Some(training), ..Workload::new(batch, context) }
    }

    /// Reserves memory for steps of this workload and of those of earlier calls. A step that needs more reserves it
    /// itself.
    ///
    /// # Errors
    /// [`TrainError::Plan`] if the workload exceeds the device, the budget, or the model's context.
    pub fn reserve(&mut self, need: &Workload) -> Result<(), TrainError> {
        let reserved = self.reserved.as_ref();
        let max = |of: fn(&Workload) -> usize| reserved.map_or(0, of).max(of(need));
        let micro_batches =
            |own: &Workload| own.training.as_ref().map_or(1, |own| own.micro_batches);
        let need = self.trained(max(|w| w.batch), max(|w| w.context), max(micro_batches));
        if reserved == Some(&need) {
            return Ok(());
        }
        self.engine.check(&need)?;
        let parts = self.engine.admit_as(&mut self.grant, &need)?;
        let made = self.allocate(&parts);
        self.reserved = made.is_ok().then_some(need);
        if made.is_err() {
            self.grant = None;
        }
        made
    }

    /// Allocates a page for a step, and the state if it is not there yet.
    fn allocate(&mut self, parts: &Footprint) -> Result<(), TrainError> {
        let recompute = self.training.recompute;
        self.activations = recompute.into();
        self.engine.clear_cache()?;
        let (kept, transient) = (parts.kept(), parts.transient());
        let new = if self.state.is_none() { kept } else { parts.saved };
        check_free(self.engine.device(), new + transient)?;
        if self.state.is_none() {
            // Master weights in host memory are loaded already.
            let held = match &self.subject {
                Subject::Weights { master: Exact::Host(master), .. } => master.bytes() as u128,
                _ => 0,
            };
            check_host(parts.host.saturating_sub(held))?;
            self.state = Some(self.first_state()?);
        }
        self.activations = Activations::new(recompute, parts, self.engine.decoder().device());
        Ok(self.engine.reserve_page(transient)?)
    }

    fn first_state(&mut self) -> Result<State, TrainError> {
        let decoder = self.engine.decoder();
        let (config, device) = (decoder.config(), decoder.device());
        let scale = match decoder.dtype() {
            FloatDType::F16 => LossScale::Adaptive,
            _ => LossScale::One,
        };
        let mut exact = Exact::Absent;
        let adapter = match &mut self.subject {
            Subject::Adapter(adapter) => Some(FlatAdapter::new(adapter, config, device)?),
            Subject::Weights { master, .. } => {
                exact = match master {
                    Exact::Host(_) => std::mem::replace(master, Exact::Taken),
                    Exact::Device(master) => Exact::Device(master.clone()),
                    Exact::Absent => Exact::Absent,
                    Exact::Taken => return Err(TrainError::Incomplete),
                };
                None
            }
        };
        let master = match exact {
            Exact::Host(master) => Master::Host(master),
            Exact::Device(ref master) => Master::Device(master),
            Exact::Absent | Exact::Taken => Master::Absent,
        };
        let trained = trained(&self.subject, adapter.as_ref());
        let offload = self.training.offload;
        let on_host = self.link.as_ref().map(|link| (link, offload));
        let optimizer = Optimizer::new(trained, master, self.optimizer, scale, on_host)?;
        let gradients = match (trained, on_host) {
            (Trained::Weights(flat), Some((link, offload))) if offload.gradients => {
                Gradients::offloaded(flat.parameters(), link, device)?
            }
            _ => Gradients::zeros(trained),
        };
        let parking = Parking::new(self.link.clone().filter(|_| offload.inputs), device);
        Ok(State { adapter, gradients, optimizer, parking })
    }

    /// Returns the model, with its current weights if they are trained, and without the adapter.
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Takes one step on the mean loss of all tokens of all micro-batches. They run one after the other: the step equals
    /// that of one large batch, and the memory is that of the largest micro-batch.
    ///
    /// # Errors
    /// [`TrainError::Model`] for invalid examples; [`TrainError::Plan`], before anything is computed, for batches that
    /// exceed the device or the budget; [`TrainError::Busy`] while others generate with weights that are trained;
    /// [`TrainError::Diverged`] for a gradient that is not finite, which changes no value, or
    /// for a loss that is not finite; [`TrainError::Device`].
    pub fn step(&mut self, micro_batches: &[Vec<Example>]) -> Result<StepMetrics, TrainError> {
        let all = micro_batches.iter().map(|batch| Ok(batch.clone()));
        Ok(self.step_while(all, || true)?.expect("nothing stops it"))
    }

    /// Takes a step like [`Trainer::step`], with micro-batches that are made one at a time, so that memory does not
    /// depend on their number. Calls `goes_on` before each; if it returns false, the step is abandoned: nothing changes,
    /// and the result is None.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn step_while(
        &mut self,
        micro_batches: impl Iterator<Item = Result<Vec<Example>, DatasetError>> + Clone,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<StepMetrics>, TrainError> {
        let micro_batches = micro_batches.map(|batch| batch.map(MicroBatch::from));
        let made = self.learn(micro_batches, goes_on)?;
        Ok(made.map(|(metrics, _)| metrics))
    }

    /// Takes a step on the sum of the losses of micro-batches that have policies, or on the mean loss of others. Also returns the
    /// numbers of the tokens of each micro-batch with a policy.
    pub(crate) fn learn(
        &mut self,
        micro_batches: impl Iterator<Item = Result<MicroBatch, DatasetError>> + Clone,
        goes_on: impl Fn() -> bool,
    ) -> Result<Option<(StepMetrics, Vec<TokenStats>)>, TrainError> {
        let _first = trace::first(|| "train step");
        let _step = trace::span(|| format!("train step {}", self.done + 1));
        self.engine.note_memory();
        let engine = self.engine.clone();
        let mut weights = match self.subject {
            Subject::Weights { .. } => Some(engine.exclusive().ok_or(TrainError::Busy)?),
            Subject::Adapter(_) => None,
        };
        let (mut size, mut weighted) = (StepSize::default(), false);
        for batch in micro_batches.clone() {
            if !goes_on() {
                return Ok(None);
            }
            let batch = batch?;
            weighted |= batch.policy.is_some();
            size.add(&batch.examples);
        }
        self.reserve(&self.workload(&size))?;
        let State { adapter, gradients, optimizer, parking } =
            self.state.as_mut().expect("just reserved");
        let (decoder, tokens) = (self.engine.decoder(), size.tokens);
        let trained = trained(&self.subject, adapter.as_ref());
        // Policies have the weights of their tokens.
        let mean = if weighted { 1.0 } else { 1.0 / tokens.max(1) as f64 };
        let scale = optimizer.scale();
        gradients.clear(decoder.ctx())?;
        let offload = self.training.offload;
        // Each group passes through the model together.
        let at_once = if offload.gradients { usize::MAX } else { 1 };
        let (mut rest, mut sum) = (micro_batches.peekable(), None::<Tensor<1>>);
        let mut stats = Vec::new();
        while rest.peek().is_some() {
            if !goes_on() {
                return Ok(None);
            }
            let weight = (mean, scale.clone());
            let losses = if offload.by_layer() {
                let group = rest.by_ref().take(at_once).collect::<Result<Vec<_>, _>>()?;
                let own = decoder.add_gradients_by_layer(
                    trained, gradients, &group, weight, parking, &goes_on,
                )?;
                let Some(losses) = own else { return Ok(None) };
                losses
            } else {
                let batch = rest.next().expect("just seen")?;
                let activations = &self.activations;
                vec![decoder.add_gradients(trained, gradients, &batch, weight, activations)?]
            };
            let _stream_guard = ops::stream_guard();
            for Loss { sum: loss, stats: own, .. } in losses {
                stats.extend(own);
                sum = Some(match sum {
                    None => loss,
                    Some(sum) => sum + loss,
                });
            }
            self.engine.note_memory();
        }
        let Some(loss) = sum else { return Err(models::Error::NothingToLearn.into()) };
        let (learning_rate, step) = (self.schedule.rate(self.done), self.done + 1);
        {
            let _optimizer = trace::span(|| "optimizer");
            weights.as_mut().map(Exclusive::change);
            optimizer.step(decoder.ctx(), gradients, learning_rate)?;
        }
        let control = optimizer.control().clone();
        let (loss, control) = self.read(control, loss)?;
        let (loss, gradient) = (loss * mean, f64::from(control.norm));
        let skipped = control.finite == 0.0;
        let [model_flops, device_flops] = self.flops(size.rows, size.scores);
        let metrics = StepMetrics {
            step,
            loss,
            tokens,
            gradient,
            learning_rate,
            skipped,
            model_flops,
            device_flops,
        };
        // Below a scale of 1 the gradients themselves are not finite.
        if skipped && decoder.dtype() == FloatDType::F16 && control.scale >= 1.0 {
            return Ok(Some((metrics, stats)));
        }
        if skipped {
            return Err(TrainError::Diverged { step });
        }
        self.done = step;
        if !loss.is_finite() {
            return Err(TrainError::Diverged { step });
        }
        self.engine.note_memory();
        Ok(Some((metrics, stats)))
    }

    /// Returns the loss and the state of the optimizer.
    fn read(&self, control: Tensor<1>, loss: Tensor<1>) -> Result<(f64, Control), DeviceError> {
        let both = {
            let _stream_guard = ops::stream_guard();
            Tensor::cat(vec![control, loss], 0)
        };
        let all = both.dims()[0];
        let values = self.engine.on_host(both.reshape([1, all]))?;
        let (control, loss) = values.split_at(all - 1);
        let control = Control::from_array(control.try_into().expect("its fields"));
        Ok((f64::from(loss[0]), control))
    }

    /// Returns the mean of -ln p over the trained tokens of a batch, and their number. Changes nothing.
    ///
    /// # Errors
    /// The errors of [`Trainer::step`].
    pub fn loss(&mut self, batch: &[Example]) -> Result<(f64, usize), TrainError> {
        let mut size = StepSize::default();
        size.add(batch);
        self.reserve(&self.workload(&size))?;
        let state = self.state.as_ref().expect("just reserved");
        let trained = trained(&self.subject, state.adapter.as_ref());
        let Loss { sum, tokens, .. } = self.engine.decoder().loss_of(Some(trained), batch)?;
        let loss = self.engine.on_host(sum.reshape([1, 1]))?;
        Ok((f64::from(loss[0]) / tokens as f64, tokens))
    }

    /// Returns the number of steps taken.
    pub const fn done(&self) -> usize {
        self.done
    }

    /// Returns the adapter with its current values; none if the weights are trained.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] for values that are not finite; [`TrainError::Device`].
    pub fn adapter(&self) -> Result<Option<Adapter>, TrainError> {
        let Subject::Adapter(adapter) = &self.subject else { return Ok(None) };
        let flat = self.state.as_ref().and_then(|state| state.adapter.as_ref());
        let Some(flat) = flat else { return Ok(Some(adapter.clone())) };
        let values = flat.values().clone();
        let all = values.dims()[0];
        let values = flat.unpadded(&self.engine.on_host(values.reshape([1, all]))?);
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(Some(adapter.clone().with_values(values))),
            false => Err(TrainError::Diverged { step: self.done }),
        }
    }
}

/// Warns that dropout of a model's config.json is ignored.
fn warn_of_dropout(config: &str) {
    let Ok(serde_json::Value::Object(fields)) = serde_json::from_str(config) else { return };
    let drops = |(name, value): &(&String, &serde_json::Value)| {
        (name.ends_with("_pdrop") || name.contains("dropout")) && value.as_f64() > Some(0.0)
    };
    let names: Vec<_> = fields.iter().filter(drops).map(|(name, _)| name.as_str()).collect();
    if !names.is_empty() {
        log::warn!("{} of {CONFIG} ignored: training has no dropout", names.join(", "));
    }
}

fn trained<'a>(subject: &'a Subject, adapter: Option<&'a FlatAdapter>) -> Trained<'a> {
    match subject {
        Subject::Adapter(_) => Trained::Adapter(adapter.expect("it is on the device")),
        Subject::Weights { weights, .. } => Trained::Weights(weights),
    }
}

/// Size of a step.
#[derive(Default)]
struct StepSize {
    /// Number of examples of the largest micro-batch.
    batch: usize,
    /// Number of rows of the longest example.
    context: usize,
    /// Number of trained tokens.
    tokens: usize,
    micro_batches: usize,
    /// Number of rows.
    rows: usize,
    /// Sum of the squares of the rows of each example.
    scores: usize,
}

impl StepSize {
    fn add<'a>(&mut self, batch: impl IntoIterator<Item = &'a Example>) {
        let mut examples = 0;
        for example in batch {
            examples += 1;
            self.context = self.context.max(example.rows());
            self.tokens += example.learned();
            self.rows += example.rows();
            self.scores += example.rows().pow(2);
        }
        self.batch = self.batch.max(examples);
        self.micro_batches += 1;
    }
}

impl TrainOptions {
    /// # Errors
    /// [`TrainError::Option`] for a number out of range.
    pub fn check(&self) -> Result<(), TrainError> {
        if self.optimizer.muon.is_some() {
            return Err(TrainError::Unsupported(
                "train an adapter by Muon, which is for whole matrices\nhint: use AdamW",
            ));
        }
        let (offload, recompute) = (self.offload, self.recompute);
        let trains = Trains::Adapter(self.lora.clone());
        check_training(&Training { trains, offload, recompute, micro_batches: 1 })?;
        check(&self.schedule, &self.optimizer)
    }
}

impl FullOptions {
    /// # Errors
    /// [`TrainError::Option`] for a number out of range.
    pub fn check(&self) -> Result<(), TrainError> {
        let AdamWOptions { moments, muon, .. } = self.optimizer;
        let (offload, recompute, muon) = (self.offload, self.recompute, muon.is_some());
        let trains = Trains::Weights { master: self.master, moments, muon };
        check_training(&Training { trains, offload, recompute, micro_batches: 1 })?;
        check(&self.schedule, &self.optimizer)
    }
}

/// Refuses options that exclude each other.
///
/// # Errors
/// [`TrainError::Unsupported`].
pub fn check_training(training: &Training) -> Result<(), TrainError> {
    let Offload { optimizer, gradients, .. } = training.offload;
    let state = optimizer || gradients;
    let why = match training.trains {
        Trains::Adapter(_) if state => {
            "offload optimizer or gradients of an adapter, which are small\nhint: use --offload inputs, or train all weights"
        }
        Trains::Weights { muon: true, .. } if state => {
            "offload Muon, which needs whole matrices\nhint: use AdamW (--optimizer adamw8), or leave out --offload"
        }
        _ if gradients && !optimizer => {
            "offload gradients without the optimizer\nhint: offload both (--offload optimizer,gradients)"
        }
        _ if training.offload.by_layer() && training.recompute != Recompute::Layers => {
            "offload gradients or inputs while less than whole layers is recomputed\nhint: recompute layers \
             (--recompute layers)"
        }
        _ => return Ok(()),
    };
    Err(TrainError::Unsupported(why))
}

/// Checks numbers; training computes in f32.
fn check(schedule: &Schedule, optimizer: &AdamWOptions) -> Result<(), TrainError> {
    const ABOVE: &str = "above 0 and within f32";
    let finite = |value: f64| (value as f32).is_finite();
    let above = |value: f64| finite(value) && value as f32 > 0.0;
    let rate = |value: f64| (0.0..1.0).contains(&value);
    let AdamWOptions { beta1, beta2, eps, weight_decay, max_grad_norm, muon, .. } = *optimizer;
    let momentum = muon.map_or(0.0, |muon| muon.momentum);
    let clip = max_grad_norm.unwrap_or(1.0);
    let learning_rate = schedule.learning_rate;
    let decays = finite(weight_decay) && weight_decay >= 0.0;
    let rules = [
        ("learning-rate", learning_rate, above(learning_rate), ABOVE),
        ("weight-decay", weight_decay, decays, "of 0 or more, within f32"),
        // A larger one turns the sign of a weight.
        (
            "weight-decay",
            weight_decay,
            learning_rate * weight_decay <= 1.0,
            "of at most 1 / --learning-rate",
        ),
        ("max-grad-norm", clip, above(clip), ABOVE),
        ("beta1", beta1, rate(beta1), "from 0 to below 1"),
        ("beta2", beta2, rate(beta2), "from 0 to below 1"),
        ("momentum", momentum, rate(momentum), "from 0 to below 1"),
        ("eps", eps, above(eps), ABOVE),
        ("floor", schedule.floor, (0.0..=1.0).contains(&schedule.floor), "from 0 to 1"),
    ];
    match rules.into_iter().find(|(_, _, valid, _)| !valid) {
        Some((name, value, _, range)) => Err(TrainError::Option { name, value, range }),
        None => Ok(()),
    }
}
