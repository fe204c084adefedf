use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use arch::ArchProfile;
use models::{Adapter, DecoderConfig, GenerationConfig, PagedCache, Weights, Workload};
use text::{ChatTemplate, Message, Prompt, SpecialTokens, Tokenizer};

use super::error::GenerateError;
use super::request::Request;
use super::sampling::Sampling;
use crate::load_error::LoadError;
use crate::memory::Plan;
use crate::model_files::{CONFIG, INDEX, WEIGHTS, hash, others};
use crate::options::EngineOptions;
use crate::prepare::Prepared;

/// An open Hugging Face folder without a device. It tokenises prompts and plans memory before the weights load.
///
/// ```no_run
/// use flashover::{Backend, ModelFolder, Device, Engine, EngineOptions};
///
/// let folder = ModelFolder::open("models/demo")?;
/// let (prompt, request) = (folder.encode("One day")?, folder.request());
/// let workload = Some(folder.workload(&[&prompt], 1, &request));
/// let device = Device::open(Backend::Cpu)?;
/// // Fails here if the workload does not fit in memory.
/// let engine = Engine::from_folder(&device, folder, &EngineOptions { workload, ..Default::default() }, |_| {})?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ModelFolder {
    pub(super) weights: Weights,
    pub(super) reader: Reader,
    pub(super) adapter: Option<Adapter>,
    /// Folder of the adapter.
    adapter_folder: Option<PathBuf>,
}

impl ModelFolder {
    /// Maps the files of a folder and reads the headers of its weights. The chat template is read on first use, since
    /// plain prompts do not need it.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for a folder without a supported model; [`LoadError::Text`] for a tokenizer that cannot be
    /// read or belongs to another model.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, LoadError> {
        let folder = folder.as_ref();
        let weights = Weights::open(folder).map_err(LoadError::Folder)?;
        let config = weights.config().clone();
        let generation = GenerationConfig::open(folder).map_err(LoadError::Folder)?;
        let generation = generation.for_vocab(config.vocab);
        let tokenizer = Tokenizer::of_model(folder, config.vocab)?;
        // Padding of vocabularies is smaller than this.
        let mut absent = tokenizer.as_ref().map(Tokenizer::missing).unwrap_or_default();
        if absent.len() > config.vocab / 8 {
            let (missing, vocab) = (absent.len(), config.vocab);
            log::warn!(
                "the tokenizer lacks {missing} of the model's {vocab} tokens; it may be another model's"
            );
        }
        let (folder, template) = (folder.to_owned(), OnceLock::new());
        // The EOS ends a text even if the tokenizer lacks it.
        absent.retain(|id| !generation.eos.contains(id));
        let reader = Reader { folder, config, generation, tokenizer, absent, template };
        Ok(Self { weights, reader, adapter: None, adapter_folder: None })
    }

    /// Sets the maximum context length in tokens, which may exceed the length in config.json.
    ///
    /// # Errors
    /// [`LoadError::Folder`] if the model has a learned vector for each position, and fewer of them.
    pub fn with_max_context(mut self, positions: usize) -> Result<Self, LoadError> {
        self.weights = self.weights.with_context(positions).map_err(LoadError::Folder)?;
        self.reader.config = self.weights.config().clone();
        Ok(self)
    }

    /// Adds a LoRA adapter in PEFT's format. Loading merges it into dense matrices; it stays unmerged next to quantised
    /// ones.
    ///
    /// # Errors
    /// [`LoadError::Folder`] if the folder has no adapter of this model.
    pub fn with_adapter(self, folder: impl AsRef<Path>) -> Result<Self, LoadError> {
        let adapter = self.adapter(&folder)?;
        let adapter_folder = Some(folder.as_ref().to_owned());
        Ok(Self { adapter: Some(adapter), adapter_folder, ..self })
    }

    pub(crate) fn prepared(
        &self,
        profile: &ArchProfile,
        options: &EngineOptions,
    ) -> Result<Prepared, LoadError> {
        let (folder, adapter) = (&self.reader.folder, self.adapter.as_ref());
        Prepared::of_files(profile, folder, &self.weights, adapter, options)
    }

    /// Plans the memory of the model for a workload.
    ///
    /// # Errors
    /// The errors of [`Plan::of_folder`].
    pub fn plan(
        &self,
        profile: &ArchProfile,
        options: &EngineOptions,
        workload: Workload,
    ) -> Result<Plan, LoadError> {
        let planned = self.prepared(profile, options)?.planned;
        Ok(planned.checked(workload)?)
    }

    /// Reads an adapter of this model without adding it.
    ///
    /// # Errors
    /// [`LoadError::Folder`] if the folder has no adapter of this model.
    pub fn adapter(&self, folder: impl AsRef<Path>) -> Result<Adapter, LoadError> {
        Adapter::open(folder, &self.weights).map_err(LoadError::Folder)
    }

    /// Returns the model's config.
    pub fn config(&self) -> &DecoderConfig {
        self.weights.config()
    }

    /// Returns the files that the model, its tokenizer and its adapter are read from.
    pub fn files(&self) -> Vec<PathBuf> {
        const BESIDE: [&str; 9] = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.jinja",
            "chat_template.json",
            "model.safetensors.index.json",
        ];
        let beside = BESIDE.iter().map(|name| self.reader.folder.join(name));
        let weights = self.weights.checkpoint().files().map(Path::to_owned);
        let adapter = self.adapter_folder.iter().flat_map(Adapter::files);
        beside.filter(|file| file.exists()).chain(weights).chain(adapter).collect()
    }

    /// Returns the files that a training of all weights writes or removes: relative paths in the output folder.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for a folder that cannot be listed.
    pub fn trained_files(&self) -> Result<Vec<PathBuf>, LoadError> {
        let others = others(&self.reader.folder, self.weights.checkpoint());
        let own = [CONFIG, WEIGHTS, INDEX].map(PathBuf::from);
        Ok(others.map_err(LoadError::Folder)?.into_iter().chain(own).collect())
    }

    /// Returns the family, the number of parameters, and a hash of names and shapes of all tensors and of their first and last
    /// values.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for a tensor that is not there.
    pub fn fingerprint(&self) -> Result<String, LoadError> {
        let config = self.config();
        let hash = hash(self.weights.checkpoint()).map_err(LoadError::Folder)?;
        let family = config.family.model_type();
        Ok(format!("{family} with {} parameters, {hash:016x}", config.parameters()))
    }

    /// See [`Engine::request`](super::Engine::request).
    pub fn request(&self) -> Request {
        self.reader.request()
    }

    /// See [`Engine::encode`](super::Engine::encode).
    ///
    /// # Errors
    /// [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, GenerateError> {
        self.reader.encode(prompt)
    }

    /// See [`Engine::encode_chat`](super::Engine::encode_chat).
    ///
    /// # Errors
    /// [`GenerateError::NoTemplate`], [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, GenerateError> {
        self.reader.encode_chat(messages)
    }

    /// Returns the tokens of a text that continues another, without the tokenizer's special tokens.
    pub(crate) fn encode_more(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        Ok(self.reader.tokenizer()?.encode(text, false)?)
    }

    /// Returns id and name of the token that ends training texts: the tokenizer's EOS, or generation_config's first EOS.
    pub(crate) fn eos(&self) -> Result<Option<(u32, String)>, GenerateError> {
        let tokenizer = self.reader.tokenizer()?;
        let named =
            SpecialTokens::open(&self.reader.folder)?.eos.and_then(|eos| tokenizer.id(&eos));
        let named = named.filter(|id| (*id as usize) < self.reader.config.vocab);
        let id = named.or_else(|| self.reader.generation.eos.first().copied());
        Ok(id.map(|id| (id, tokenizer.token(id).unwrap_or_default())))
    }

    /// Renders messages through the model's chat template.
    pub(crate) fn render(&self, prompt: &Prompt) -> Result<String, GenerateError> {
        self.reader.render(prompt)
    }

    /// Checks a prompt against the model.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`]; [`GenerateError::Model`] for a token outside of the vocabulary.
    pub fn check(&self, prompt: &[u32]) -> Result<(), GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        Ok(self.reader.config.check_tokens(prompt)?)
    }

    /// See [`Engine::context_length`](super::Engine::context_length).
    pub fn context_length(&self, prompt: usize, request: &Request) -> usize {
        self.reader.context_length(prompt, request)
    }

    /// See [`Engine::workload`](super::Engine::workload).
    pub fn workload(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Workload {
        let each: Vec<_> = prompts.iter().map(|prompt| (prompt.as_ref(), request)).collect();
        self.reader.workload(&each, completions)
    }
}

/// Files of a model's folder other than its weights.
#[derive(Debug)]
pub(super) struct Reader {
    /// Path of the folder, or name of the published shape.
    pub(super) folder: PathBuf,
    pub(super) config: DecoderConfig,
    pub(super) generation: GenerationConfig,
    pub(super) tokenizer: Option<Tokenizer>,
    /// Ids that the tokenizer lacks and that are never sampled.
    pub(super) absent: Vec<u32>,
    /// The chat template; none if the folder has none, unset before first use.
    pub(super) template: OnceLock<Option<ChatTemplate>>,
}

impl Reader {
    /// Returns the reader of a published shape, without a tokenizer.
    pub(super) fn of_shape(shape: &str, config: DecoderConfig) -> Self {
        let generation = GenerationConfig::default();
        let template = OnceLock::from(None);
        Self {
            folder: shape.into(),
            config,
            generation,
            tokenizer: None,
            absent: Vec::new(),
            template,
        }
    }

    pub(super) fn request(&self) -> Request {
        let GenerationConfig { eos, max_new_tokens, stop_strings, .. } = &self.generation;
        // Without a tokenizer there is no text to search for stop sequences.
        let stop_sequences =
            self.tokenizer.as_ref().map(|_| stop_strings.clone()).unwrap_or_default();
        Request {
            sampling: Sampling::of(&self.generation),
            max_new_tokens: *max_new_tokens,
            stop_tokens: eos.clone(),
            stop_sequences,
        }
    }

    pub(super) fn tokenizer(&self) -> Result<&Tokenizer, GenerateError> {
        self.tokenizer.as_ref().ok_or_else(|| GenerateError::NoTokenizer(self.folder.clone()))
    }

    pub(super) fn encode(&self, prompt: &str) -> Result<Vec<u32>, GenerateError> {
        Ok(self.tokenizer()?.encode(prompt, true)?)
    }

    pub(super) fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, GenerateError> {
        let tokenizer = self.tokenizer()?;
        Ok(tokenizer.encode(&self.render(&Prompt::of(messages))?, false)?)
    }

    fn render(&self, prompt: &Prompt) -> Result<String, GenerateError> {
        Ok(self.template()?.render(prompt)?)
    }

    /// Reads the template on first use. An error is not kept, so the next call tries again.
    fn template(&self) -> Result<&ChatTemplate, GenerateError> {
        let template = match self.template.get() {
            Some(template) => template,
            None => {
                let opened = ChatTemplate::open(&self.folder)?;
                self.template.get_or_init(|| opened)
            }
        };
        template.as_ref().ok_or_else(|| GenerateError::NoTemplate(self.folder.clone()))
    }

    pub(super) fn context_length(&self, prompt: usize, request: &Request) -> usize {
        const USUAL: usize = 8192;
        const AT_LEAST: usize = 1024;
        let max_context = self.config.context().unwrap_or(usize::MAX);
        let wanted = match request.max_new_tokens {
            Some(more) => prompt.saturating_add(more),
            None => prompt.saturating_add(AT_LEAST).max(USUAL).min(self.config.max_seq),
        };
        // A prompt that is too long stays as it is, so that prefill reports the error.
        wanted.min(max_context).max(prompt)
    }

    pub(super) fn workload(&self, asked: &[(&[u32], &Request)], completions: usize) -> Workload {
        let contexts =
            asked.iter().map(|(prompt, request)| self.context_length(prompt.len(), request));
        let context = contexts.max().unwrap_or(0);
        // A sequence on its own shares nothing, and has no pages.
        if !self.decodes_together(context) || asked.len().saturating_mul(completions) == 1 {
            return Workload::new(1, context);
        }
        let once: usize = asked.iter().map(|(prompt, _)| PagedCache::shared(prompt.len())).sum();
        let shared = once.saturating_mul(completions.saturating_sub(1));
        let batch = asked.len().saturating_mul(completions);
        Workload { shared: Some(shared), ..Workload::new(batch, context) }
    }

    /// Returns true if sequences of this length can decode together. A longer sequence needs other RoPE frequencies for
    /// all of its positions, so it runs alone.
    pub(super) fn decodes_together(&self, context: usize) -> bool {
        let ropes = &mut self.config.ropes.iter();
        ropes.all(|rope| rope.fixed_until().is_none_or(|fixed| context <= fixed))
    }
}
