//! A model that answers: loaded once, shared by the sessions that generate with it.
//!
//! ```text
//! ModelFolder  tokenizer, what the model's makers would have, weights in files               on no device
//! Engine       the same, its weights on a device                                            does not change
//! Session      keys and values so far, of one sequence                                      yields tokens
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
    planned: PlannedModel,
    ledger: Arc<Ledger>,
    /// Shapes whose kernels are compiled.
    precompiled: Precompiled,
    /// The last to go.
    pages: Pages,
}

impl Engine {
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
        let precision = self.0.decoder.precision();
        let quant = precision.matrices.map(|format| format.info().held_as.to_owned());
        (compute_name(precision), quant)
    }

    /// How keys and values are held.
    pub fn kv_format(&self) -> KvFormat {
        self.0.decoder.precision().kv
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.0.decoder.weight_bytes()
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
    /// [`GenerateError::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, GenerateError> {
        self.0.reader.tokenizer()
    }

    /// Ids that the tokenizer lacks, which are never sampled.
    fn absent(&self) -> &[u32] {
        &self.0.reader.absent
    }

    /// The tokens of a plain prompt, with what the tokenizer puts before a text.
    ///
    /// # Errors
    /// [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, GenerateError> {
        self.0.reader.encode(prompt)
    }

    /// The tokens of a conversation that waits for its answer.
    ///
    /// # Errors
    /// [`GenerateError::NoTemplate`], [`GenerateError::NoTokenizer`]; [`GenerateError::Text`], also for a template that is
    /// broken or refuses the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, GenerateError> {
        self.0.reader.encode_chat(messages)
    }

    /// Positions that a request needs: those of the prompt and as many as are to come, or else as many as the model
    /// has, of more than 8192 so many, or 1024 past a prompt that is as long.
    pub fn context_length(&self, prompt: usize, request: &Request) -> usize {
        self.0.reader.context_length(prompt, request)
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

    /// The folder that it was loaded from, or the name of its shape.
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
