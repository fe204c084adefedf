//! A model on a device, loaded once and shared by its sessions.
//!
//! ```text
//! ModelFolder  tokenizer, generation settings and mapped weights      on no device
//! Engine       the same, with weights on a device                    changed by a trainer alone
//! Session      KV cache of one sequence                              yields tokens
//! ```

mod batch;
mod builder;
mod conversation;
mod error;
mod folder;
mod generation;
mod load;
mod measure;
mod memory;
mod pages;
mod precompile;
mod profile;
mod request;
mod sampler;
mod sampling;
mod session;
mod text;
mod trainable;
mod version;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ::text::{Message, Tokenizer};
use models::{Decoder, DecoderConfig, GenerationConfig, KvFormat, Workload};

use crate::device::Device;
use crate::memory::{Ledger, PlannedModel, compute_name};
use folder::Reader;
use pages::Pages;
use precompile::Precompiled;
use version::Version;

pub use batch::{BatchStep, Completion};
pub use builder::{BuildProgress, EngineBuilder};
pub use conversation::{Answer, Conversation};
pub use error::GenerateError;
pub use folder::ModelFolder;
pub use generation::Generation;
pub use load::LoadProgress;
pub use measure::{Ceilings, Speed, SpeedTest};
pub use profile::{LayerProfile, Profile};
pub use request::{FinishReason, Request};
pub use sampling::{Sampling, Token};
pub use session::{Session, Tokens};
pub use text::TextStream;
pub use trainable::Start;
pub(crate) use trainable::{Exact, SourceFiles, Trainable, host_link};
pub(crate) use version::Exclusive;

/// A model on a device. Clones share it.
///
/// The weights change only if a [`Trainer`](crate::train::Trainer) of all weights owns them: its steps write them in place, and
/// sessions from before a step are refused.
///
/// Several threads may generate at the same time, each on its own stream. Under compute-sanitizer, two threads are not
/// clean while one captures a graph: a capture is sometimes invalidated (CUDA error 901), while results are right.
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    reader: Reader,
    device: Device,
    decoder: Decoder,
    planned: PlannedModel,
    ledger: Arc<Ledger>,
    /// Shapes whose kernels are compiled.
    precompiled: Precompiled,
    version: Version,
    /// Last field, so that it is dropped last.
    pages: Pages,
}

impl Engine {
    /// Returns the device of the model.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns the model's config.
    pub fn config(&self) -> &DecoderConfig {
        self.0.decoder.config()
    }

    /// Returns the name of the compute dtype, and the name of the weight format if weights have 4 or 8 bits.
    pub fn precision(&self) -> (String, Option<String>) {
        let precision = self.0.decoder.precision();
        let quant = precision.weight_format.map(|format| format.info().precision_name.to_owned());
        (compute_name(precision), quant)
    }

    /// Returns the format of the KV cache.
    pub fn kv_format(&self) -> KvFormat {
        self.0.decoder.precision().kv
    }

    /// Returns the bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.0.decoder.weight_bytes()
    }

    /// Returns the settings in generation_config.json.
    pub fn generation(&self) -> &GenerationConfig {
        &self.0.reader.generation
    }

    /// Returns a request with the model's sampling, maximum length and stops.
    pub fn request(&self) -> Request {
        self.0.reader.request()
    }

    /// Returns the tokenizer.
    ///
    /// # Errors
    /// [`GenerateError::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, GenerateError> {
        self.0.reader.tokenizer()
    }

    /// Returns the ids that the tokenizer lacks and that are never sampled.
    fn absent(&self) -> &[u32] {
        &self.0.reader.absent
    }

    /// Returns the tokens of a plain prompt, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, GenerateError> {
        self.0.reader.encode(prompt)
    }

    /// Returns the tokens of messages, rendered through the chat template, up to the start of the answer.
    ///
    /// # Errors
    /// [`GenerateError::NoTemplate`], [`GenerateError::NoTokenizer`]; [`GenerateError::Text`], also for a template that
    /// is broken or refuses the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, GenerateError> {
        self.0.reader.encode_chat(messages)
    }

    /// Returns the context length that a request needs in tokens: prompt plus `max_new_tokens`. Without a limit, it is
    /// the model's context capped at 8192, or at 1024 more than a longer prompt.
    pub fn context_length(&self, prompt: usize, request: &Request) -> usize {
        self.0.reader.context_length(prompt, request)
    }

    /// Returns the workload of [`Engine::generate_batch`].
    pub fn workload(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Workload {
        let each: Vec<_> = prompts.iter().map(|prompt| (prompt.as_ref(), request)).collect();
        self.0.reader.workload(&each, completions)
    }

    /// Returns the folder of the model, or the name of its shape.
    pub fn folder(&self) -> &Path {
        &self.0.reader.folder
    }

    pub(crate) fn decoder(&self) -> &Decoder {
        &self.0.decoder
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("folder", &self.0.reader.folder).finish_non_exhaustive()
    }
}
