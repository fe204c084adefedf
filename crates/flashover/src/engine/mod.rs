//! A model that answers: loaded once, shared by the sessions that generate with it.
//!
//! ```text
//! ModelFolder  tokenizer, what the model's makers would have, weights in files               on no device
//! Engine       the same, its weights on a device                                            does not change
//! Session      keys and values so far, of one sequence                                      yields tokens
//! ```

mod batch;
mod folder;
mod ledger;
mod measure;
mod profile;
mod sampling;
mod session;
mod text;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::text::{Message, Tokenizer};
use arch::{ArchProfile, Backend, DType, Device};
use burn::tensor::FloatDType;
use kernels::nf4::Nf4Matmul;
use models::{
    Adapter, Decoder, DecoderConfig, Footprint, GenerationConfig, Held, KvCache, KvFormat,
    LoadOptions, Loading, LoraOptions, Matrices, OnDevice, Steps, Weights,
};
use ops::{Ctx, Nf4Options};

use crate::context::{context, log_warnings, on_burn};
use crate::memory::{MemoryUsage, free_bytes, there_is};
use crate::plan::{MemoryBudget, Plan, Planned, Workload, computes_in, shown};
use crate::train::{TrainPlan, TrainWorkload};

use folder::Reader;
pub(crate) use ledger::{Grant, Others};
use ledger::{Ledger, Need};

pub use batch::{BatchStep, Completion};
pub use folder::ModelFolder;
pub use measure::{Ceilings, Speed, SpeedTest};
pub use profile::{LayerProfile, Profile};
pub use sampling::{Sampling, Token};
pub use session::{End, Session, Tokens};
pub use text::Text;

/// How [`Engine::load`] puts a model on a device.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EngineOptions {
    /// What is computed in. When none, f32 on a CPU and where the device lacks the files' dtype, and that
    /// elsewhere.
    pub dtype: Option<Compute>,
    /// Quantises the matrices of the layers that are dense in the files; 4 bits also those of 8, and 8 bits none of 4:
    /// [`EngineError::FourBits`].
    pub quant: Option<Quant>,
    /// How keys and values are held.
    pub kv: KvFormat,
    /// Whether prompts multiply bytes by bytes where matrices are in 8 bits, on CUDA, from 128 rows on: what a product
    /// reads is rounded to a byte an element and a scale a row, but for columns that reach the threshold of the files or
    /// 6 (`LLM.int8()`). Faster where few columns do, and less exact; each of them costs a multiply-add a result, and a
    /// model in which thousands do is slower with it.
    pub int8_activations: bool,
    /// What a shape whose config is not known gets.
    pub policy: Option<tune::Policy>,
    /// How much of the device's memory the model and its sequences may take.
    pub budget: MemoryBudget,
    /// What must fit into it for the model to be loaded at all; one position of one sequence when none.
    pub workload: Option<Workload>,
}

/// What a model computes in; logits are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// 32 bits, IEEE 754.
    F32,
    /// f32 but for products with dense matrices, whose operands tensor cores round to 10 bits of mantissa where more than
    /// 8 rows meet one: CUDA alone.
    Tf32,
    /// 16 bits, IEEE 754: 10 of mantissa, numbers up to 65504.
    F16,
    /// 16 bits: the exponents of f32 and 7 bits of mantissa.
    Bf16,
}

/// How weights are quantised at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// NF4 in nested blocks of 64, as bitsandbytes' double quantization: 4.13 bits a weight.
    Nf4,
    /// 8 bits and an absmax a row.
    Int8,
}

impl Quant {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Nf4, Self::Int8];

    /// As the command line has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Int8 => "int8",
        }
    }
}

/// What one generation is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Tokens at most; as many as there is room for when none.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end it. They are not given out.
    pub eos: Vec<u32>,
    /// Strings that end it, of a text: [`Session::write`] and [`Completion::text`] do not give them out, and
    /// [`Session::generate`] does not look for them.
    pub stops: Vec<String>,
}

/// Why a model does not answer.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A folder that holds no model of ours, or no adapter of this model.
    #[error("{0}{hint}", hint = .0.hint())]
    Folder(models::Error),
    /// Tokens, positions or options that do not fit the model, files that cannot be read or written, or an op that the
    /// device does not run.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// A tokenizer or chat template that cannot be read, or text, tokens or stops that they do not take.
    #[error(transparent)]
    Text(#[from] ::text::Error),
    /// The model and its sequences take more than the device or the budget has.
    #[error("{0}\nhint: {advice}", advice = .0.advice())]
    Memory(Box<Plan>),
    /// The device had less than was planned, for others have some of it. CubeCL does not tell the largest block.
    #[error(
        "the device could not give {need} bytes{}; this process has {} of it, {} of them in use\nhint: \
         fewer sequences or a shorter context; Engine::clear_cache gives back what is kept for later; a budget \
         leaves others their share",
        free.map_or_else(String::new, |free| format!(", of {free} that are free")), have.reserved_bytes, have.used_bytes
    )]
    OutOfMemory {
        /// Bytes that were asked for.
        need: u64,
        /// What nobody has, where that is known.
        free: Option<u64>,
        /// What this process has there.
        have: MemoryUsage,
    },
    /// A limit, a fraction, a batch or a context that means nothing.
    #[error("{name} is {value}\nhint: a number {range}")]
    Budget {
        /// Which number.
        name: &'static str,
        /// As it was given.
        value: String,
        /// What it may be, after "a number".
        range: &'static str,
    },
    /// A fraction or a reserve of a total that the device does not tell.
    #[error(
        "the device does not tell how much memory it has, of which a fraction or a reserve would be a part\nhint: a \
         limit in bytes, as --memory-limit"
    )]
    BudgetOfUnknown,
    /// One buffer is larger than any that the device gives.
    #[error(
        "it needs a buffer of {}, and the device has none above {}\nhint: a shorter context or fewer sequences, where keys \
         are the largest; else another model, or --backend vulkan, cuda or cpu", shown(*need), shown(*most)
    )]
    Buffer {
        /// Of a weight, of the keys of a layer, or of what passes, in bytes.
        need: u64,
        /// What the device has at most.
        most: u64,
    },
    /// Text needs a tokenizer, which this folder does not have.
    #[error("{} has no tokenizer.json\nhint: give tokens in place of text", .0.display())]
    NoTokenizer(PathBuf),
    /// A chat needs a template, which this folder does not have.
    #[error("{} has no chat template\nhint: generate from a plain prompt", .0.display())]
    NoTemplate(PathBuf),
    /// There is no token to go on from.
    #[error("a prompt has no tokens\nhint: at least one, such as the model's first token")]
    EmptyPrompt,
    /// A setting of sampling out of its range.
    #[error("{name} is {value}\nhint: a number {range}")]
    Sampling {
        /// Which setting.
        name: &'static str,
        /// As it was given.
        value: f32,
        /// What it may be, after "a number".
        range: &'static str,
    },
    /// Logits that no token can be picked from.
    #[error(
        "after {position} tokens the logits hold NaN, or no finite largest\nhint: f32 and bf16 reach further than f16, \
         which ends at 65504; penalties far from 1 reach far, too; where neither is so, the weights hold NaN"
    )]
    NotFinite {
        /// Tokens before them.
        position: usize,
    },
    /// The dtype that was asked for is none of the device's.
    #[error("the {backend} device has no {need}\nhint: f32 runs everywhere")]
    DType {
        /// What was asked for.
        need: DType,
        /// The device's.
        backend: Backend,
    },
    /// Keys and values were to be in 8 bits, which the device does not store.
    #[error(
        "the {backend} device has no i8, for keys and values in 8 bits\nhint: KvFormat::Float or \
         --kv-cache float holds them as they are computed"
    )]
    KvFormat {
        /// The device's.
        backend: Backend,
    },
    /// A shape that is none of [`Engine::shapes`].
    #[error("no published shape is called {shape}\nhint: one of {known}")]
    Shape {
        /// The name that was asked for.
        shape: String,
        /// Names that there are, separated by commas.
        known: String,
    },
    /// [`Quant::Int8`] was asked for, and matrices of this folder are in 4 bits.
    #[error(
        "{} has matrices in 4 bits, which do not become 8\nhint: load it as it is, or what it was made of",
        .0.display()
    )]
    FourBits(PathBuf),
    /// [`EngineOptions::int8_activations`] without matrices in 8 bits, or not on CUDA.
    #[error(
        "what products read is rounded to 8 bits on CUDA alone, and where matrices are in 8 bits\nhint: leave \
         int8_activations or --int8-activations out, or take --backend cuda and --quant int8"
    )]
    Int8Activations,
    /// [`Compute::Tf32`] was asked for with matrices in 4 or 8 bits.
    #[error("weights of 4 and 8 bits are not multiplied in tf32\nhint: f32 or bf16 beside them")]
    Tf32,
    /// Training takes more than the device or the budget has.
    #[error("{0}\nhint: {advice}", advice = .0.advice())]
    TrainMemory(Box<TrainPlan>),
    /// Burn's ops element by element are no valid SPIR-V in bf16 (CubeCL 0.11.3): NaN at the first step on an H200, where
    /// f16 and f32 learn as on CUDA.
    #[error("gradients in bf16 are not right through Vulkan\nhint: --dtype f16 or f32, or CUDA")]
    TrainDType,
    /// An option of training out of its range.
    #[error("{name} is {value}\nhint: a number {range}")]
    Training {
        /// Which option.
        name: &'static str,
        /// As it was given.
        value: f64,
        /// What it may be, after "a number".
        range: &'static str,
    },
    /// The loss, its gradient or what was learned is not finite.
    #[error(
        "the loss or its gradient is not finite at step {step}\nhint: a smaller learning rate; what was learned before is \
         kept"
    )]
    Diverged {
        /// Counted from 1.
        step: usize,
    },
    /// A profile was asked for while something else records.
    #[error(transparent)]
    Recording(#[from] trace::AlreadyRecording),
    /// The tune cache cannot be read or written.
    #[error(transparent)]
    Cache(#[from] tune::CacheError),
    /// The device failed for another reason than a lack of memory; its own words.
    #[error("the device failed: {0}")]
    Failed(String),
}

impl EngineError {
    /// Whether less would have fitted: a smaller batch, or a shorter context.
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::OutOfMemory { .. } | Self::Buffer { .. })
    }

    /// How many positions the model has, where more were asked for.
    pub const fn context(&self) -> Option<usize> {
        match self {
            Self::Model(models::Error::Context { max_seq, .. }) => Some(*max_seq),
            _ => None,
        }
    }
}

/// A model on a device. Clones share it.
///
/// Threads may generate with it beside each other, each on a stream of its own. Under compute-sanitizer two are not
/// clean while one captures a graph: now and then a capture is invalidated (CUDA error 901), and results are right.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    reader: Reader,
    device: Device,
    decoder: Decoder,
    planned: Planned,
    budget: MemoryBudget,
    ledger: Arc<Ledger>,
    /// The last to go.
    pages: Pages,
}

/// The pages of a model, which go back to the device after it.
struct Pages(Device);

/// A model that is known, and not yet on a device.
pub(crate) struct Prepared {
    pub(crate) planned: Planned,
    load: LoadOptions,
}

impl Prepared {
    pub(crate) fn of_files(
        profile: &ArchProfile,
        folder: &Path,
        weights: &Weights,
        adapter: Option<&Adapter>,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let load = load_options(profile, options, models::file_dtype(weights)?)?;
        let OnDevice { matrices, bytes, beside } = models::on_device(weights, adapter, &load)?;
        if options.quant == Some(Quant::Int8) && matrices == Matrices::FourBit {
            return Err(EngineError::FourBits(folder.to_owned()));
        }
        let held = Held { beside, ..held(profile, &load, matrices)? };
        let planned = Planned {
            model: folder.display().to_string(),
            config: weights.config().clone(),
            held,
            steps: steps(profile, held),
            weights: bytes,
        };
        Ok(Self { planned, load })
    }

    pub(crate) fn of_shape(
        profile: &ArchProfile,
        shape: &str,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let Some(config) = models::shapes::named(shape) else {
            let known = Engine::shapes().collect::<Vec<_>>().join(", ");
            return Err(EngineError::Shape { shape: shape.to_owned(), known });
        };
        let load = load_options(profile, options, FloatDType::BF16)?;
        let matrices = match options.quant {
            None => Matrices::Dense,
            Some(Quant::Nf4) => Matrices::FourBit,
            Some(Quant::Int8) => Matrices::Int8,
        };
        let held = held(profile, &load, matrices)?;
        let weights = config.held_bytes(held);
        let steps = steps(profile, held);
        let planned = Planned { model: shape.to_owned(), config, held, steps, weights };
        Ok(Self { planned, load })
    }

    /// Refuses what does not fit.
    fn fits(&self, device: &Device, options: &EngineOptions) -> Result<(), EngineError> {
        let workload = options.workload.unwrap_or(Workload::new(1, 1));
        fits(self.planned.checked(device.profile(), options, workload)?)?;
        there_is(device, self.planned.footprint(workload).total())
    }
}

impl Pages {
    /// Gives back those that nothing alive is in.
    fn give_back(&self) -> Result<(), String> {
        let _at_work = ops::at_work();
        // What still runs holds what it reads.
        on_burn(&self.0).sync().map_err(|why| format!("{why:?}"))?;
        // Looks, for the sake of the peak.
        MemoryUsage::of(&self.0);
        self.0.client().memory_cleanup().map_err(|why| format!("{why:?}"))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Of a device that failed nobody asks for more.
        if !std::thread::panicking() {
            let _failed = self.give_back();
        }
    }
}

impl Request {
    /// Whether a generation that gave out `given` tokens is at its end: `seen` are those with the prompt's, and
    /// `room` is how many may pass.
    fn end(&self, given: usize, seen: usize, room: usize) -> Option<End> {
        match self.max_new_tokens {
            Some(most) if given >= most => Some(End::Length),
            // The last one is given out though nothing can follow it.
            _ => (seen > room).then_some(End::Context),
        }
    }
}

impl Engine {
    /// Loads a Hugging Face folder: config.json and safetensors, and generation_config.json and tokenizer.json where it
    /// has them. Files are mapped and go to the device one tensor at a time. A chat template is read where a chat is
    /// first asked for.
    ///
    /// # Errors
    /// [`EngineError::Folder`] for what is no model of ours; [`EngineError::Memory`] before anything is loaded,
    /// [`EngineError::OutOfMemory`] where the device has less left than it should;
    /// [`EngineError::Text`] for a tokenizer that cannot be read or is another model's.
    pub fn load(
        device: &Device,
        folder: impl AsRef<Path>,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::load_with(device, folder, options, |_, _| {})
    }

    /// The same, which tells `progress` how many of how many parts are loaded.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_with(
        device: &Device,
        folder: impl AsRef<Path>,
        options: &EngineOptions,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, EngineError> {
        Self::of_with(device, ModelFolder::open(folder)?, options, progress)
    }

    /// Loads a folder that is open.
    ///
    /// # Errors
    /// As [`Engine::load`], but for those of files.
    pub fn of(
        device: &Device,
        folder: ModelFolder,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::of_with(device, folder, options, |_, _| {})
    }

    /// The same, which tells `progress` how many of how many parts are loaded.
    ///
    /// # Errors
    /// As [`Engine::of`].
    pub fn of_with(
        device: &Device,
        folder: ModelFolder,
        options: &EngineOptions,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, EngineError> {
        let ModelFolder { weights, reader, adapter, .. } = folder;
        let adapter = adapter.as_ref();
        let (profile, own) = (device.profile(), &reader.folder);
        let prepared = Prepared::of_files(profile, own, &weights, adapter, options)?;
        prepared.fits(device, options)?;
        let (ctx, on) = (known_configs(device, options)?, on_burn(device));
        let progress = |loading: Loading| progress(loading.done, loading.parts);
        let decoder = Decoder::load_adapted(&weights, adapter, &on, ctx, &prepared.load, progress)?;
        Self::settled(Inner {
            reader,
            device: device.clone(),
            decoder,
            planned: prepared.planned,
            budget: options.budget,
            ledger: Arc::default(),
            pages: Pages(device.clone()),
        })
    }

    /// The published shapes that [`Engine::random`] knows, such as `llama-3-8b`.
    pub fn shapes() -> impl Iterator<Item = &'static str> {
        models::shapes::names()
    }

    /// A model of random weights of a published shape, for measuring: one of [`Engine::shapes`]. It has no
    /// tokenizer.
    ///
    /// # Errors
    /// [`EngineError::Shape`]; [`EngineError::Model`] for what the device cannot hold or run.
    pub fn random(
        device: &Device,
        shape: &str,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let prepared = Prepared::of_shape(device.profile(), shape, options)?;
        prepared.fits(device, options)?;
        let (ctx, on) = (known_configs(device, options)?, on_burn(device));
        let Prepared { planned, load } = prepared;
        let decoder = Decoder::random(&planned.config, &on, ctx, &load, |_| {})?;
        Self::settled(Inner {
            reader: Reader::of_shape(shape, planned.config.clone()),
            device: device.clone(),
            decoder,
            planned,
            budget: options.budget,
            ledger: Arc::default(),
            pages: Pages(device.clone()),
        })
    }

    /// One whose weights are there, and nothing that loading needed beside them.
    fn settled(loaded: Inner) -> Result<Self, EngineError> {
        let engine = Self(Arc::new(loaded));
        engine.decoder().settle().map_err(|why| engine.unsettled(why))?;
        engine.clear_cache()?;
        Ok(engine)
    }

    /// The device that the model is on.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// What the model computes.
    pub fn config(&self) -> &DecoderConfig {
        self.0.decoder.config()
    }

    /// What it computes in, and what weights of 4 or 8 bits are called where there are such.
    pub fn precision(&self) -> (String, Option<String>) {
        let held = self.0.decoder.held();
        let quant = match held.matrices {
            Matrices::Dense => None,
            Matrices::Int8 => Some("int8".to_owned()),
            Matrices::FourBit => Some("4-bit".to_owned()),
        };
        (computes_in(held), quant)
    }

    /// How keys and values are held.
    pub fn kv_format(&self) -> KvFormat {
        self.0.decoder.held().kv
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.0.decoder.weight_bytes()
    }

    /// What the pools of the device hold, for whomever in this process.
    pub fn memory(&self) -> MemoryUsage {
        MemoryUsage::of(&self.0.device)
    }

    /// Gives what the pools keep for later back to the device, as far as they do.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] and [`EngineError::Failed`] of what still ran.
    pub fn clear_cache(&self) -> Result<(), EngineError> {
        self.0.pages.give_back().map_err(|why| self.failed(why))
    }

    /// What the model's makers would have.
    pub fn generation(&self) -> &GenerationConfig {
        &self.0.reader.generation
    }

    /// Sampling and ends as the model's makers would have them.
    pub fn request(&self) -> Request {
        self.0.reader.request()
    }

    /// # Errors
    /// [`EngineError::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.0.reader.tokenizer()
    }

    /// The tokens of a plain prompt, with what the tokenizer puts before a text.
    ///
    /// # Errors
    /// [`EngineError::NoTokenizer`], [`EngineError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        self.0.reader.encode(prompt)
    }

    /// The tokens of a conversation that waits for its answer.
    ///
    /// # Errors
    /// [`EngineError::NoTemplate`], [`EngineError::NoTokenizer`]; [`EngineError::Text`], also for a template that is
    /// broken or refuses the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, EngineError> {
        self.0.reader.encode_chat(messages)
    }

    /// Positions that a request needs: those of the prompt and as many as are to come, or else as many as the model
    /// has, of more than 8192 so many, or 1024 past a prompt that is as long.
    pub fn room(&self, prompt: usize, request: &Request) -> usize {
        self.0.reader.room(prompt, request)
    }

    /// What [`Engine::generate_batch`] asks of the device.
    pub fn workload(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Workload {
        let each: Vec<_> = prompts.iter().map(|prompt| (prompt.as_ref(), request)).collect();
        self.0.reader.workload(&each, completions)
    }

    /// Room for one sequence of `context` positions.
    ///
    /// # Errors
    /// [`EngineError::Model`] for more than the model has, [`EngineError::Memory`] for more than the device.
    pub fn session(&self, context: usize) -> Result<Session, EngineError> {
        Session::new(self.clone(), context)
    }

    /// What this model takes with such a workload, beside what lives of it by now.
    pub fn plan(&self, workload: Workload) -> Plan {
        self.plan_beside(workload, self.0.ledger.others(None))
    }

    fn plan_beside(&self, workload: Workload, others: Others) -> Plan {
        self.0.planned.plan(self.0.device.profile(), &self.0.budget, workload, others)
    }

    /// Enters a workload among what lives.
    fn admit(&self, workload: Workload) -> Result<Option<Grant>, EngineError> {
        self.0.planned.check_buffers(self.0.device.profile(), workload)?;
        let (mut grant, need) = (None, need_of(&self.0.planned.footprint(workload)));
        self.0.ledger.admit(&mut grant, need, |others| fits(self.plan_beside(workload, others)))?;
        there_is(&self.0.device, need.kept + need.passing)?;
        Ok(grant)
    }

    /// What training an adapter of this model takes, beside what lives of it by now.
    ///
    /// # Errors
    /// [`EngineError::Model`] of an adapter that the model cannot have, or of more positions than it has.
    pub fn train_plan(
        &self,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, EngineError> {
        self.train_plan_beside(None, lora, workload)
    }

    /// The same of a trainer that is among what lives as `own`.
    pub(crate) fn train_plan_beside(
        &self,
        own: Option<&Grant>,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, EngineError> {
        let (profile, budget) = (self.0.device.profile(), &self.0.budget);
        let others = self.0.ledger.others(own);
        TrainPlan::new(&self.0.planned, profile, budget, lora, workload, others)
    }

    /// Enters a trainer among what lives, in place of what it was.
    pub(crate) fn admit_trainer(
        &self,
        own: &mut Option<Grant>,
        lora: &LoraOptions,
        workload: TrainWorkload,
    ) -> Result<TrainPlan, EngineError> {
        let (profile, budget) = (self.0.device.profile(), &self.0.budget);
        let plan =
            |others| TrainPlan::new(&self.0.planned, profile, budget, lora, workload, others);
        let alone = plan(Others::default())?;
        let kept = u128::from(alone.adapter_bytes) + u128::from(alone.optimizer_bytes);
        let need = Need { kept, passing: alone.passing_bytes.into() };
        self.0.ledger.admit(own, need, |others| {
            let plan = plan(others)?;
            match plan.fits() {
                true => Ok(()),
                false => Err(EngineError::TrainMemory(Box::new(plan))),
            }
        })?;
        Ok(alone)
    }

    /// Room for what passes in a step of training that fits.
    ///
    /// # Errors
    /// Those of [`Engine::clear_cache`]; [`EngineError::OutOfMemory`].
    pub(crate) fn room_to_train(&self, plan: &TrainPlan) -> Result<(), EngineError> {
        self.clear_cache()?;
        // The adapter's values move with each step.
        let moving = u128::from(plan.adapter_bytes) + u128::from(plan.optimizer_bytes);
        let need = moving + u128::from(plan.passing_bytes);
        there_is(&self.0.device, need)?;
        self.make_room(need)
    }

    /// A cache that the device has room for, among what lives as long as the grant does.
    fn cache(&self, batch: usize, context: usize) -> Result<(KvCache, Option<Grant>), EngineError> {
        // One that is too long for the model is left to the error that says so.
        let grant = match self.config().context() {
            Some(most) if context > most => None,
            _ => self.admit(Workload::new(batch, context))?,
        };
        Ok((self.cache_within(batch, context)?, grant))
    }

    /// A cache of which somebody else found out that the device has room for it.
    fn cache_within(&self, batch: usize, context: usize) -> Result<KvCache, EngineError> {
        if self.config().context().is_none_or(|most| context <= most) {
            let parts = self.0.planned.footprint(Workload::new(batch, context));
            self.give_back_more_than(parts.total() - parts.weights)?;
            self.make_room(parts.passing())?;
        }
        let cache = self.decoder().cache(batch, context)?;
        self.settled_cache(cache)
    }

    /// A cache that the device had the memory for: what passes it could not say so.
    pub(crate) fn settled_cache(&self, cache: KvCache) -> Result<KvCache, EngineError> {
        cache.settle().map_err(|why| self.unsettled(why))?;
        Ok(cache)
    }

    /// Gives back what earlier sessions left, where it is more than one that takes `bytes` leaves, or where both together
    /// are more than the budget: memory of one cache serves no other of another length.
    fn give_back_more_than(&self, bytes: u128) -> Result<(), EngineError> {
        /// What pools round pages up to.
        const PAGES: u128 = 8 << 20;
        let MemoryUsage { used_bytes, reserved_bytes, .. } = self.memory();
        let left = u128::from(reserved_bytes.saturating_sub(used_bytes));
        let most = self.0.budget.of(self.0.device.profile().memory_bytes);
        let over = most.is_some_and(|most| u128::from(reserved_bytes) + bytes > most.into());
        match left > bytes + PAGES || (left > 0 && over) {
            true => self.clear_cache(),
            false => Ok(()),
        }
    }

    /// Lets the pool of this thread have a page that holds so much: one that grows with what passes leaves the
    /// smaller ones behind.
    fn make_room(&self, bytes: u128) -> Result<(), EngineError> {
        let _at_work = ops::at_work();
        let client = self.0.device.client();
        let most = client.properties().memory.max_page_size;
        let Ok(bytes) = usize::try_from(bytes.min(most.into())) else { return Ok(()) };
        let page = client.empty(bytes);
        client.check([&page]).map_err(|why| self.failed(format!("{why:?}")))
    }

    /// Numbers of the device.
    pub(crate) fn on_host(&self, made: burn::tensor::Tensor<2>) -> Result<Vec<f32>, EngineError> {
        let _at_work = ops::at_work();
        let data = made.try_into_data().map_err(|why| self.failed(format!("{why:?}")))?;
        data.try_to_vec::<f32>().map_err(|why| self.failed(format!("{why:?}")))
    }

    /// Why something is not on the device.
    fn unsettled(&self, why: models::Error) -> EngineError {
        match why {
            models::Error::Failed(why) => self.failed(why),
            other => other.into(),
        }
    }

    /// What a failure of the device is.
    fn failed(&self, why: String) -> EngineError {
        match bytes_lacked(&why) {
            None => EngineError::Failed(why),
            Some(need) => EngineError::OutOfMemory {
                need,
                free: free_bytes(&self.0.device),
                have: self.memory(),
            },
        }
    }

    /// The folder that it was loaded from, or the name of its shape.
    pub fn folder(&self) -> &Path {
        &self.0.reader.folder
    }

    pub(crate) fn decoder(&self) -> &Decoder {
        &self.0.decoder
    }
}

/// What lives beside a model's weights, of such parts.
fn need_of(parts: &Footprint) -> Need {
    Need { kept: parts.cache + parts.steps, passing: parts.passing() + parts.small }
}

/// Refuses what the memory of a device cannot hold.
fn fits(plan: Plan) -> Result<(), EngineError> {
    match plan.fits() {
        true => Ok(()),
        false => Err(EngineError::Memory(Box::new(plan))),
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("folder", &self.0.reader.folder).finish_non_exhaustive()
    }
}

/// Configs that are known for `device`.
fn known_configs(device: &Device, options: &EngineOptions) -> Result<Ctx, EngineError> {
    let ctx = context(device, options.policy.unwrap_or(tune::Policy::Default))?;
    log_warnings(&ctx);
    Ok(ctx)
}

/// How a model with such matrices is held; load options that are made here say what it computes in.
fn held(
    profile: &ArchProfile,
    load: &LoadOptions,
    matrices: Matrices,
) -> Result<Held, EngineError> {
    let bytes = profile.backend == Backend::Cuda && matrices == Matrices::Int8;
    if load.int8_activations && !bytes {
        return Err(EngineError::Int8Activations);
    }
    if load.tf32 && matrices != Matrices::Dense {
        return Err(EngineError::Tf32);
    }
    let dtype = load.dtype.unwrap_or(FloatDType::F32);
    Ok(Held { dtype, tf32: load.tf32, matrices, kv: load.kv, beside: 0 })
}

/// How a device of this profile goes about steps of such a model.
fn steps(profile: &ArchProfile, held: Held) -> Steps {
    // Through Vulkan nobody tells.
    const USUAL: u32 = 128;
    let captured = profile.backend != Backend::Cpu;
    Steps {
        captured,
        coded_rows: Nf4Matmul::coded_rows(profile, ours(held.dtype)),
        processors: if captured { profile.processors.unwrap_or(USUAL) } else { 0 },
    }
}

const fn ours(dtype: FloatDType) -> DType {
    match dtype {
        FloatDType::BF16 => DType::Bf16,
        FloatDType::F16 => DType::F16,
        _ => DType::F32,
    }
}

fn load_options(
    profile: &ArchProfile,
    options: &EngineOptions,
    file: FloatDType,
) -> Result<LoadOptions, EngineError> {
    let stored = &profile.dtypes;
    let dtype = match options.dtype {
        // A CPU computes in f32 whatever is stored; WGSL has no 16 bits here.
        None => {
            let wide = profile.backend == Backend::Cpu || !stored.contains(&ours(file));
            Some(if wide { FloatDType::F32 } else { file })
        }
        Some(compute) => {
            let (need, float) = match compute {
                Compute::F32 => (DType::F32, FloatDType::F32),
                Compute::Tf32 => (DType::Tf32, FloatDType::F32),
                Compute::F16 => (DType::F16, FloatDType::F16),
                Compute::Bf16 => (DType::Bf16, FloatDType::BF16),
            };
            if !stored.contains(&need) {
                return Err(EngineError::DType { need, backend: profile.backend });
            }
            Some(float)
        }
    };
    let quant = options.quant.map(|quant| match quant {
        Quant::Nf4 => models::Quant::Nf4(Nf4Options::default()),
        Quant::Int8 => models::Quant::Int8,
    });
    if options.kv == KvFormat::Int8 && !stored.contains(&DType::I8) {
        return Err(EngineError::KvFormat { backend: profile.backend });
    }
    let tf32 = options.dtype == Some(Compute::Tf32);
    let int8_activations = options.int8_activations;
    Ok(LoadOptions { dtype, tf32, quant, kv: options.kv, int8_activations })
}

/// Bytes that a device did not have, where CubeCL's error says that it is that.
fn bytes_lacked(why: &str) -> Option<u64> {
    let after = ["out of device memory allocating ", "can't allocate buffer of size: "]
        .into_iter()
        .find_map(|words| why.split_once(words))?
        .1;
    let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_in_8_bits_need_bytes() {
        let mut profile = ArchProfile::recorded("rtx4090").expect("recorded");
        let options = EngineOptions { kv: KvFormat::Int8, ..EngineOptions::default() };
        let load = load_options(&profile, &options, FloatDType::BF16).expect("it has them");
        assert_eq!(load.kv, KvFormat::Int8);
        profile.dtypes.retain(|dtype| *dtype != DType::I8);
        let refused = load_options(&profile, &options, FloatDType::BF16).expect_err("none");
        assert!(matches!(refused, EngineError::KvFormat { .. }), "{refused}");
    }

    #[test]
    fn activations_in_8_bits_are_for_cuda_and_matrices_in_8_bits() {
        let mut profile = ArchProfile::recorded("rtx4090").expect("recorded");
        let of = |profile: &ArchProfile, quant| {
            let int8_activations = true;
            let options = EngineOptions { quant, int8_activations, ..EngineOptions::default() };
            Prepared::of_shape(profile, "llama-3-8b", &options).map(drop)
        };
        of(&profile, Some(Quant::Int8)).expect("a card that has them");
        for quant in [None, Some(Quant::Nf4)] {
            assert!(matches!(of(&profile, quant), Err(EngineError::Int8Activations)));
        }
        profile.backend = Backend::Vulkan;
        let refused = of(&profile, Some(Quant::Int8));
        assert!(matches!(refused, Err(EngineError::Int8Activations)));
    }

    #[test]
    fn tf32_is_for_dense_matrices_of_devices_that_have_it() {
        let mut profile = ArchProfile::recorded("rtx4090").expect("recorded");
        let of = |profile: &ArchProfile, quant| {
            let options =
                EngineOptions { dtype: Some(Compute::Tf32), quant, ..EngineOptions::default() };
            Prepared::of_shape(profile, "llama-3-8b", &options).map(|own| own.planned)
        };
        let planned = of(&profile, None).expect("a card that has it");
        assert_eq!((computes_in(planned.held).as_str(), planned.weights), ("tf32", 32_121_044_992));
        for quant in Quant::ALL {
            assert!(matches!(of(&profile, Some(quant)), Err(EngineError::Tf32)));
        }
        profile.dtypes.retain(|dtype| *dtype != DType::Tf32);
        let refused = of(&profile, None);
        assert!(matches!(refused, Err(EngineError::DType { need: DType::Tf32, .. })));
    }

    #[test]
    fn shapes_are_known_by_their_names() {
        let profile = ArchProfile::recorded("rtx4090").expect("recorded");
        let of_shape = |name| Prepared::of_shape(&profile, name, &EngineOptions::default());
        assert!(
            Engine::shapes().count() > 0 && Engine::shapes().all(|name| of_shape(name).is_ok())
        );
        let refused = of_shape("llama-9").err().expect("no such shape").to_string();
        assert!(Engine::shapes().all(|name| refused.contains(name)), "{refused}");
    }

    #[test]
    fn memory_that_ran_out_is_told_from_other_failures() {
        let cuda = "Execution { reason: \"out of device memory allocating 1048576 bytes\\n..\" }";
        assert_eq!(bytes_lacked(cuda), Some(1 << 20));
        assert_eq!(bytes_lacked("can't allocate buffer of size: 77"), Some(77));
        // As a kernel that is timed has it.
        let timed = "An execution error happened\nCaused by:\n  out of device memory allocating 503316480 bytes\nNo";
        assert_eq!(bytes_lacked(timed), Some(503_316_480));
        assert_eq!(bytes_lacked("the device was poisoned"), None);
        assert_eq!(bytes_lacked("out of device memory allocating all bytes"), None);
    }
}
