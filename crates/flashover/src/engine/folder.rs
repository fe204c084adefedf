use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use arch::ArchProfile;
use models::{Adapter, DecoderConfig, GenerationConfig, KvCache, Weights, Workload};
use text::{ChatTemplate, Message, Prompt, SpecialTokens, Tokenizer};

use super::error::GenerateError;
use super::request::Request;
use super::sampling::Sampling;
use crate::load_error::LoadError;
use crate::memory::Plan;
use crate::options::EngineOptions;
use crate::prepare::Prepared;

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
/// let engine = Engine::from_folder(&device, folder, &EngineOptions { workload, ..Default::default() }, |_| {})?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ModelFolder {
    pub(super) weights: Weights,
    pub(super) reader: Reader,
    pub(super) adapter: Option<Adapter>,
    /// The folder of that.
    adapter_folder: Option<PathBuf>,
}

impl ModelFolder {
    /// Maps the files of a folder, and reads the headers of its weights. Its chat template is read where a chat is
    /// first asked for: plain prompts need none.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for what is no model of ours, [`LoadError::Text`] for a tokenizer that cannot be read
    /// or is another model's.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, LoadError> {
        let folder = folder.as_ref();
        let weights = Weights::open(folder).map_err(LoadError::Folder)?;
        let config = weights.config().clone();
        let generation = GenerationConfig::open(folder).map_err(LoadError::Folder)?;
        let generation = generation.for_vocab(config.vocab);
        let tokenizer = Tokenizer::of_model(folder, config.vocab)?;
        // Vocabularies are padded by less.
        let mut absent = tokenizer.as_ref().map(Tokenizer::missing).unwrap_or_default();
        if absent.len() > config.vocab / 8 {
            let (missing, vocab) = (absent.len(), config.vocab);
            log::warn!(
                "the tokenizer lacks {missing} of the model's {vocab} tokens; it may be another model's"
            );
        }
        let (folder, template) = (folder.to_owned(), OnceLock::new());
        // A text ends with its EOS, whatever the tokenizer makes of it.
        absent.retain(|id| !generation.eos.contains(id));
        let reader = Reader { folder, config, generation, tokenizer, absent, template };
        Ok(Self { weights, reader, adapter: None, adapter_folder: None })
    }

    /// The same for sequences of up to `positions`, also past those that config.json says.
    ///
    /// # Errors
    /// [`LoadError::Folder`] where the model has learned a vector for each position, and fewer.
    pub fn with_max_context(mut self, positions: usize) -> Result<Self, LoadError> {
        self.weights = self.weights.with_context(positions).map_err(LoadError::Folder)?;
        self.reader.config = self.weights.config().clone();
        Ok(self)
    }

    /// The same with an adapter of PEFT's, which becomes part of dense matrices when they are loaded, and stays beside those
    /// of 4 or 8 bits.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for what is no adapter of this model.
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
    /// As [`Plan::of_folder`].
    pub fn plan(
        &self,
        profile: &ArchProfile,
        options: &EngineOptions,
        workload: Workload,
    ) -> Result<Plan, LoadError> {
        let planned = self.prepared(profile, options)?.planned;
        Ok(planned.checked(workload)?)
    }

    /// Reads an adapter of this model, and leaves the model as it is.
    ///
    /// # Errors
    /// [`LoadError::Folder`] for what is no adapter of this model.
    pub fn adapter(&self, folder: impl AsRef<Path>) -> Result<Adapter, LoadError> {
        Adapter::open(folder, &self.weights).map_err(LoadError::Folder)
    }

    /// What the model computes, as its config.json has it.
    pub fn config(&self) -> &DecoderConfig {
        self.weights.config()
    }

    /// The files that it is read from.
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

    /// As [`Engine::request`](super::Engine::request).
    pub fn request(&self) -> Request {
        self.reader.request()
    }

    /// As [`Engine::encode`](super::Engine::encode).
    ///
    /// # Errors
    /// [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, GenerateError> {
        self.reader.encode(prompt)
    }

    /// As [`Engine::encode_chat`](super::Engine::encode_chat).
    ///
    /// # Errors
    /// [`GenerateError::NoTemplate`], [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, GenerateError> {
        self.reader.encode_chat(messages)
    }

    /// The tokens of a text that goes on, without what the tokenizer puts around one.
    pub(crate) fn encode_more(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        Ok(self.reader.tokenizer()?.encode(text, false)?)
    }

    /// Returns id and name of the token that ends a text to learn: the tokenizer's EOS, or generation_config's first if
    /// it names none.
    pub(crate) fn eos(&self) -> Result<Option<(u32, String)>, GenerateError> {
        let tokenizer = self.reader.tokenizer()?;
        let named =
            SpecialTokens::open(&self.reader.folder)?.eos.and_then(|eos| tokenizer.id(&eos));
        let named = named.filter(|id| (*id as usize) < self.reader.config.vocab);
        let id = named.or_else(|| self.reader.generation.eos.first().copied());
        Ok(id.map(|id| (id, tokenizer.token(id).unwrap_or_default())))
    }

    /// What the model's chat template makes of messages.
    pub(crate) fn render(&self, prompt: &Prompt) -> Result<String, GenerateError> {
        self.reader.render(prompt)
    }

    /// Refuses a prompt that the model will refuse.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`]; [`GenerateError::Model`] for a token that the vocabulary does not have.
    pub fn check(&self, prompt: &[u32]) -> Result<(), GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        Ok(self.reader.config.check_tokens(prompt)?)
    }

    /// As [`Engine::context_length`](super::Engine::context_length).
    pub fn context_length(&self, prompt: usize, request: &Request) -> usize {
        self.reader.context_length(prompt, request)
    }

    /// As [`Engine::workload`](super::Engine::workload).
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

/// What a model's folder says beside its weights.
#[derive(Debug)]
pub(super) struct Reader {
    /// Or the name of a shape.
    pub(super) folder: PathBuf,
    pub(super) config: DecoderConfig,
    pub(super) generation: GenerationConfig,
    pub(super) tokenizer: Option<Tokenizer>,
    /// Ids that the tokenizer lacks: no token is sampled of these.
    pub(super) absent: Vec<u32>,
    /// None where there is none, and unset until it was opened.
    pub(super) template: OnceLock<Option<ChatTemplate>>,
}

impl Reader {
    /// Of a shape, which reads nothing.
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
        // Of a model without a tokenizer there is no text in which one could come up.
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

    /// One that cannot be opened is tried again.
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
        let most = self.config.context().unwrap_or(usize::MAX);
        let wanted = match request.max_new_tokens {
            Some(more) => prompt.saturating_add(more),
            None => prompt.saturating_add(AT_LEAST).max(USUAL).min(self.config.max_seq),
        };
        // A prompt that is too long is left to the error that says so.
        wanted.min(most).max(prompt)
    }

    pub(super) fn workload(&self, asked: &[(&[u32], &Request)], completions: usize) -> Workload {
        let rooms =
            asked.iter().map(|(prompt, request)| self.context_length(prompt.len(), request));
        let context = rooms.max().unwrap_or(0);
        if !self.decodes_together(context) {
            return Workload::new(1, context);
        }
        let once: usize = asked.iter().map(|(prompt, _)| KvCache::shareable(prompt.len())).sum();
        let shared = once.saturating_mul(completions.saturating_sub(1));
        Workload { shared, ..Workload::new(asked.len().saturating_mul(completions), context) }
    }

    /// Whether sequences of so many positions decode together: where a longer one turns all its positions anew, each goes
    /// by itself.
    pub(super) fn decodes_together(&self, context: usize) -> bool {
        let ropes = &mut self.config.ropes.iter();
        ropes.all(|rope| rope.fixed_until().is_none_or(|fixed| context <= fixed))
    }
}
