//! A model that answers: loaded once, shared by the sessions that generate with it.
//!
//! ```text
//! Engine    weights on a device, tokenizer, what the model's makers would have        does not change
//! Session   keys and values so far, of one sequence                                   yields tokens
//! ```

mod batch;
mod measure;
mod sampling;
mod session;
mod text;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::text::{ChatTemplate, Message, Prompt, Tokenizer};
use arch::{Backend, DType, Device};
use burn::tensor::FloatDType;
use cubecl::MemoryScope;
use models::{Decoder, DecoderConfig, GenerationConfig, KvCache, LoadOptions, Weights};
use ops::{Ctx, Nf4Options};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

pub use batch::Completion;
pub use measure::{Ceilings, Speed, SpeedTest};
pub use sampling::{Sampling, Token};
pub use session::{End, Session, Tokens};
pub use text::Text;

/// How [`Engine::load`] puts a model on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineOptions {
    /// What is computed in. When none, f32 on a CPU and where the device lacks the files' dtype, and that
    /// elsewhere.
    pub dtype: Option<Compute>,
    /// Quantises the matrices of the layers that are dense in the files.
    pub quant: Option<Quant>,
    /// What a shape whose config is not known gets.
    pub policy: Option<tune::Policy>,
}

/// What a model computes in; logits are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    F32,
    F16,
    Bf16,
}

/// How weights are quantised at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// NF4 in nested blocks of 64, as bitsandbytes' double quantization: 4.13 bits a weight.
    Nf4,
}

/// What one generation is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub sampling: Sampling,
    /// Tokens at most; as many as there is room for when none.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end it. They are not given out.
    pub eos: Vec<u32>,
    /// Strings that end it, in [`Session::write`]. They are not given out.
    pub stops: Vec<String>,
}

/// Why a model does not answer.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(
        "{0}\nhint: a model is a folder with config.json and all its safetensors, as Hugging Face has it"
    )]
    Folder(models::Error),
    #[error(transparent)]
    Model(#[from] models::Error),
    #[error(transparent)]
    Text(#[from] ::text::Error),
    #[error(
        "{what} take {need} bytes on {device}, which has {have}\nhint: 4 bits take about a quarter of what bf16 \
         does, and a shorter context less for keys and values"
    )]
    Memory { what: &'static str, need: u128, have: u64, device: String },
    #[error("{} has no tokenizer.json\nhint: give tokens in place of text", .0.display())]
    NoTokenizer(PathBuf),
    #[error("{} has no chat template\nhint: generate from a plain prompt", .0.display())]
    NoTemplate(PathBuf),
    #[error("a prompt has no tokens\nhint: at least one, such as the model's first token")]
    EmptyPrompt,
    #[error("{name} is {value}\nhint: a number {range}")]
    Sampling { name: &'static str, value: f32, range: &'static str },
    #[error(
        "after {position} tokens the logits hold NaN, or no finite largest\nhint: f32 and bf16 reach further than f16, \
         which ends at 65504; penalties far from 1 reach far, too"
    )]
    NotFinite { position: usize },
    #[error("the {backend} device has no {need}\nhint: f32 runs everywhere")]
    DType { need: DType, backend: Backend },
    #[error("no published shape is called {shape}\nhint: one of {known}")]
    Shape { shape: String, known: String },
    #[error("the tune cache cannot be read: {0}")]
    Cache(#[from] tune::CacheError),
    #[error("the device failed: {0}")]
    Failed(String),
}

/// A model on a device. Clones share it.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    folder: PathBuf,
    device: Device,
    decoder: Decoder,
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    generation: GenerationConfig,
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
    /// Loads a Hugging Face folder: config.json and safetensors, and generation_config.json, tokenizer.json and a
    /// chat template where it has them. Files are mapped and go to the device one tensor at a time.
    ///
    /// # Errors
    /// [`EngineError::Folder`] for what is no model of ours; [`EngineError::Memory`] before anything is loaded;
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
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, EngineError> {
        let folder = folder.as_ref().to_owned();
        let weights = Weights::open(&folder).map_err(EngineError::Folder)?;
        let vocab = weights.config().vocab;
        let generation = GenerationConfig::open(&folder).map_err(EngineError::Folder)?;
        let tokenizer = match folder.join("tokenizer.json").exists() {
            true => Some(Tokenizer::open(&folder)?.for_vocab(vocab)?),
            false => None,
        };
        let template = ChatTemplate::open(&folder)?;
        let load = load_options(device, options, models::file_dtype(&weights)?)?;
        fits(device, "the weights", models::device_bytes(&weights, &load)?.into())?;
        let (ctx, on) = (context(device, options)?, on_burn(device));
        let decoder = Decoder::load(&weights, &on, ctx, &load, |loading| {
            progress(loading.done, loading.parts)
        })?;
        let device = device.clone();
        Ok(Self(Arc::new(Inner { folder, device, decoder, tokenizer, template, generation })))
    }

    /// A model of random weights of a published shape, for measuring: one of [`models::shapes::names`]. It has
    /// no tokenizer.
    ///
    /// # Errors
    /// [`EngineError::Shape`]; [`EngineError::Model`] for what the device cannot hold or run.
    pub fn random(
        device: &Device,
        shape: &str,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let Some(config) = models::shapes::named(shape) else {
            let known = models::shapes::names().collect::<Vec<_>>().join(", ");
            return Err(EngineError::Shape { shape: shape.to_owned(), known });
        };
        let (ctx, on) = (context(device, options)?, on_burn(device));
        let load = load_options(device, options, FloatDType::BF16)?;
        let bits = match (load.quant, load.dtype) {
            (Some(_), _) => 4.5,
            (None, Some(FloatDType::F32)) => 32.0,
            (None, _) => 16.0,
        };
        fits(device, "the weights", config.weight_bytes(bits).into())?;
        let decoder = Decoder::random(&config, &on, ctx, &load, |_| {})?;
        Ok(Self(Arc::new(Inner {
            folder: PathBuf::from(shape),
            device: device.clone(),
            decoder,
            tokenizer: None,
            template: None,
            generation: GenerationConfig::default(),
        })))
    }

    pub fn config(&self) -> &DecoderConfig {
        self.0.decoder.config()
    }

    /// What it computes in, and what weights of 4 bits are called where there are such.
    pub fn precision(&self) -> (String, Option<String>) {
        let compute = format!("{:?}", self.0.decoder.dtype()).to_lowercase();
        (compute, self.0.decoder.in_4_bits().then(|| "4-bit".to_owned()))
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.0.decoder.weight_bytes()
    }

    /// Bytes that the pools of the device hold, used or kept for later.
    pub fn reserved_bytes(&self) -> u64 {
        self.0.device.client().memory_report(MemoryScope::Device).usage().bytes_reserved
    }

    /// What the model's makers would have.
    pub fn generation(&self) -> &GenerationConfig {
        &self.0.generation
    }

    /// Sampling and ends as the model's makers would have them.
    pub fn request(&self) -> Request {
        let GenerationConfig { eos, max_new_tokens, .. } = self.generation();
        Request {
            sampling: Sampling::of(self.generation()),
            max_new_tokens: *max_new_tokens,
            eos: eos.clone(),
            stops: Vec::new(),
        }
    }

    /// # Errors
    /// [`EngineError::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.0.tokenizer.as_ref().ok_or_else(|| EngineError::NoTokenizer(self.0.folder.clone()))
    }

    /// The tokens of a plain prompt, with what the tokenizer puts before a text.
    ///
    /// # Errors
    /// [`EngineError::NoTokenizer`], [`EngineError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        Ok(self.tokenizer()?.encode(prompt, true)?)
    }

    /// The tokens of a conversation that waits for its answer.
    ///
    /// # Errors
    /// [`EngineError::NoTemplate`], [`EngineError::NoTokenizer`], [`EngineError::Text`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, EngineError> {
        let template = self.0.template.as_ref();
        let template = template.ok_or_else(|| EngineError::NoTemplate(self.0.folder.clone()))?;
        Ok(self.tokenizer()?.encode(&template.render(&Prompt::of(messages))?, false)?)
    }

    /// Positions that a request needs: those of the prompt and as many as are to come, or else as many as the model
    /// has, at most 8192 where it has more.
    pub fn room(&self, prompt: usize, request: &Request) -> usize {
        const USUAL: usize = 8192;
        let most = self.config().context().unwrap_or(usize::MAX);
        let wanted = match request.max_new_tokens {
            Some(more) => prompt.saturating_add(more),
            None => self.config().max_seq.min(USUAL),
        };
        // A prompt that is too long is left to the error that says so.
        wanted.min(most).max(prompt)
    }

    /// Room for one sequence of `context` positions.
    ///
    /// # Errors
    /// [`EngineError::Model`] for more than the model has, [`EngineError::Memory`] for more than the device.
    pub fn session(&self, context: usize) -> Result<Session, EngineError> {
        Session::new(self.clone(), context)
    }

    /// A cache that the device has room for.
    fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache, EngineError> {
        let decoder = &self.0.decoder;
        if self.config().context().is_none_or(|most| capacity <= most) {
            let both =
                decoder.cache_bytes(batch, capacity, false) + u128::from(decoder.weight_bytes());
            fits(&self.0.device, "weights, keys and values", both)?;
        }
        Ok(decoder.cache(batch, capacity)?)
    }

    pub(crate) fn decoder(&self) -> &Decoder {
        &self.0.decoder
    }
}

/// Refuses what the memory of a device cannot hold.
fn fits(device: &Device, what: &'static str, need: u128) -> Result<(), EngineError> {
    match device.profile().memory_bytes.filter(|have| need > (*have).into()) {
        None => Ok(()),
        Some(have) => {
            Err(EngineError::Memory { what, need, have, device: device.profile().name.clone() })
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("folder", &self.0.folder).finish_non_exhaustive()
    }
}

/// Known configs, of the user's cache and of those that ship.
fn context(device: &Device, options: &EngineOptions) -> Result<Ctx, EngineError> {
    let date = OffsetDateTime::now_utc().format(&Rfc3339).expect("a year has four digits");
    let ctx = Ctx::of_user(options.policy.unwrap_or(tune::Policy::Default), date)?;
    Ok(match &device.profile().restricted_to {
        Some(profile) => ctx.restricted_to(profile),
        None => ctx,
    })
}

fn on_burn(device: &Device) -> burn::tensor::Device {
    burn::tensor::Device::from(device.raw().clone())
}

fn load_options(
    device: &Device,
    options: &EngineOptions,
    file: FloatDType,
) -> Result<LoadOptions, EngineError> {
    let stored = &device.profile().dtypes;
    let dtype = match options.dtype {
        // A CPU computes in f32 whatever is stored; WGSL has no 16 bits here.
        None => {
            let own = match file {
                FloatDType::BF16 => DType::Bf16,
                FloatDType::F16 => DType::F16,
                _ => DType::F32,
            };
            let wide = device.backend() == Backend::Cpu || !stored.contains(&own);
            Some(if wide { FloatDType::F32 } else { file })
        }
        Some(compute) => {
            let (need, float) = match compute {
                Compute::F32 => (DType::F32, FloatDType::F32),
                Compute::F16 => (DType::F16, FloatDType::F16),
                Compute::Bf16 => (DType::Bf16, FloatDType::BF16),
            };
            if !stored.contains(&need) {
                return Err(EngineError::DType { need, backend: device.backend() });
            }
            Some(float)
        }
    };
    let quant = options.quant.map(|Quant::Nf4| Nf4Options::default());
    Ok(LoadOptions { dtype, quant })
}

/// Logits on the host.
fn on_host(logits: burn::tensor::Tensor<2>) -> Result<Vec<f32>, EngineError> {
    let failed = |e: &dyn fmt::Debug| EngineError::Failed(format!("{e:?}"));
    let data = logits.try_into_data().map_err(|e| failed(&e))?;
    data.try_to_vec::<f32>().map_err(|e| failed(&e))
}
