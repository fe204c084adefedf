use std::path::{Path, PathBuf};

use models::{DecoderConfig, GenerationConfig, KvCache, Weights};
use text::{ChatTemplate, Message, Prompt, Tokenizer};

use super::{EngineError, Request, Sampling};
use crate::plan::Workload;

/// A Hugging Face folder that is opened and on no device: what a text becomes and what a request needs is known before
/// the weights move.
///
/// ```no_run
/// use flashover::{Backend, ModelFolder, Device, Engine, EngineOptions};
///
/// let folder = ModelFolder::open("models/demo")?;
/// let (prompt, request) = (folder.encode("One day")?, folder.request());
/// let workload = Some(folder.workload(&[&prompt], 1, &request));
/// let device = Device::open(Backend::Cpu)?;
/// // Refused here where the card cannot hold it.
/// let engine = Engine::of(&device, folder, &EngineOptions { workload, ..Default::default() })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ModelFolder {
    pub(super) weights: Weights,
    pub(super) reader: Reader,
}

impl ModelFolder {
    /// Maps the files of a folder, and reads the headers of its weights.
    ///
    /// # Errors
    /// [`EngineError::Folder`] for what is no model of ours, [`EngineError::Text`] for a tokenizer or a template that
    /// cannot be read or is another model's.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, EngineError> {
        let folder = folder.as_ref();
        let weights = Weights::open(folder).map_err(EngineError::Folder)?;
        let config = weights.config().clone();
        let generation = GenerationConfig::open(folder)
            .and_then(|generation| generation.for_vocab(config.vocab));
        let generation = generation.map_err(EngineError::Folder)?;
        let tokenizer = match folder.join("tokenizer.json").symlink_metadata().is_ok() {
            true => Some(Tokenizer::open(folder)?.for_vocab(config.vocab)?),
            false => None,
        };
        let template = ChatTemplate::open(folder)?;
        let reader = Reader { folder: folder.to_owned(), config, generation, tokenizer, template };
        Ok(Self { weights, reader })
    }

    /// The files that it is read from.
    pub fn files(&self) -> Vec<PathBuf> {
        const BESIDE: [&str; 7] = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "chat_template.json",
            "model.safetensors.index.json",
        ];
        let beside = BESIDE.iter().map(|name| self.reader.folder.join(name));
        let weights = self.weights.checkpoint().files().map(Path::to_owned);
        beside.filter(|file| file.exists()).chain(weights).collect()
    }

    /// As [`Engine::request`](super::Engine::request).
    pub fn request(&self) -> Request {
        self.reader.request()
    }

    /// As [`Engine::encode`](super::Engine::encode).
    ///
    /// # Errors
    /// [`EngineError::NoTokenizer`], [`EngineError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        self.reader.encode(prompt)
    }

    /// As [`Engine::encode_chat`](super::Engine::encode_chat).
    ///
    /// # Errors
    /// [`EngineError::NoTemplate`], [`EngineError::NoTokenizer`], [`EngineError::Text`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, EngineError> {
        self.reader.encode_chat(messages)
    }

    /// Refuses a prompt that the model will refuse.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`]; [`EngineError::Model`] for a token that the vocabulary does not have.
    pub fn check(&self, prompt: &[u32]) -> Result<(), EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        Ok(self.reader.config.check_tokens(prompt)?)
    }

    /// As [`Engine::room`](super::Engine::room).
    pub fn room(&self, prompt: usize, request: &Request) -> usize {
        self.reader.room(prompt, request)
    }

    /// As [`Engine::workload`](super::Engine::workload).
    pub fn workload(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Workload {
        self.reader.workload(prompts, completions, request)
    }
}

/// What a model's folder says beside its weights.
#[derive(Debug)]
pub(super) struct Reader {
    /// Or the name of a shape.
    pub(super) folder: PathBuf,
    pub(super) config: DecoderConfig,
    pub(super) generation: GenerationConfig,
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) template: Option<ChatTemplate>,
}

impl Reader {
    /// Of a shape, which reads nothing.
    pub(super) fn of_shape(shape: &str, config: DecoderConfig) -> Self {
        let generation = GenerationConfig::default();
        Self { folder: shape.into(), config, generation, tokenizer: None, template: None }
    }

    pub(super) fn request(&self) -> Request {
        let GenerationConfig { eos, max_new_tokens, .. } = &self.generation;
        Request {
            sampling: Sampling::of(&self.generation),
            max_new_tokens: *max_new_tokens,
            eos: eos.clone(),
            stops: Vec::new(),
        }
    }

    pub(super) fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.tokenizer.as_ref().ok_or_else(|| EngineError::NoTokenizer(self.folder.clone()))
    }

    pub(super) fn encode(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        Ok(self.tokenizer()?.encode(prompt, true)?)
    }

    pub(super) fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, EngineError> {
        let tokenizer = self.tokenizer()?;
        let template = self.template.as_ref();
        let template = template.ok_or_else(|| EngineError::NoTemplate(self.folder.clone()))?;
        Ok(tokenizer.encode(&template.render(&Prompt::of(messages))?, false)?)
    }

    pub(super) fn room(&self, prompt: usize, request: &Request) -> usize {
        const USUAL: usize = 8192;
        let most = self.config.context().unwrap_or(usize::MAX);
        let wanted = match request.max_new_tokens {
            Some(more) => prompt.saturating_add(more),
            None => self.config.max_seq.min(USUAL),
        };
        // A prompt that is too long is left to the error that says so.
        wanted.min(most).max(prompt)
    }

    pub(super) fn workload(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Workload {
        let longest = prompts.iter().map(|prompt| prompt.as_ref().len()).max().unwrap_or(0);
        let context = self.room(longest, request);
        if !self.decodes_together(context) {
            return Workload::new(1, context);
        }
        let once = |prompt: &_| KvCache::shareable(AsRef::<[u32]>::as_ref(prompt).len());
        let once: usize = prompts.iter().map(once).sum();
        let shared = once.saturating_mul(completions.saturating_sub(1));
        Workload { batch: prompts.len().saturating_mul(completions), context, shared }
    }

    /// Whether sequences of so many positions decode together: where a longer one turns all its positions anew, each goes
    /// by itself.
    pub(super) fn decodes_together(&self, context: usize) -> bool {
        let ropes = &mut self.config.ropes.iter();
        ropes.all(|rope| rope.fixed_until().is_none_or(|fixed| context <= fixed))
    }
}
