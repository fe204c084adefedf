//! Builder of one generation.

use text::Message;

use super::{Completion, Engine, GenerateError, Request, Sampling, TextStream};

/// Text, messages or tokens to continue.
#[derive(Debug, Clone)]
enum Prompt {
    Text(String),
    Chat(Vec<Message>),
    Tokens(Vec<u32>),
}

/// Settings of one generation: see [`Engine::generate`]. Defaults come from the model's `generation_config.json`.
#[derive(Debug, Clone)]
#[must_use = "nothing is generated before `text`, `stream` or `completions`"]
pub struct Generation<'e> {
    engine: &'e Engine,
    prompt: Prompt,
    request: Request,
}

impl Engine {
    /// Starts a generation that continues a text.
    ///
    /// ```no_run
    /// # let engine = flashover::Engine::builder("models/demo").build()?;
    /// for piece in engine.generate("Once upon a time").max_new_tokens(64).temperature(0.8).stream()? {
    ///     print!("{}", piece?);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn generate(&self, prompt: impl Into<String>) -> Generation<'_> {
        self.continued(Prompt::Text(prompt.into()))
    }

    /// Starts a generation that answers messages through the model's chat template.
    pub fn chat(&self, messages: &[Message]) -> Generation<'_> {
        self.continued(Prompt::Chat(messages.to_vec()))
    }

    /// Starts a generation that continues tokens.
    pub fn generate_tokens(&self, tokens: impl Into<Vec<u32>>) -> Generation<'_> {
        self.continued(Prompt::Tokens(tokens.into()))
    }

    fn continued(&self, prompt: Prompt) -> Generation<'_> {
        Generation { engine: self, prompt, request: self.request() }
    }
}

impl Generation<'_> {
    /// Sets the maximum number of new tokens.
    pub fn max_new_tokens(mut self, tokens: usize) -> Self {
        self.request.max_new_tokens = Some(tokens);
        self
    }

    /// Sets the temperature, which divides the logits; 0 takes the most likely token.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.request.sampling.temperature = temperature;
        self
    }

    /// Takes the most likely token at each step, without a repetition penalty. The seed stays.
    pub fn greedy(mut self) -> Self {
        self.request.sampling =
            Sampling { seed: self.request.sampling.seed, ..Sampling::default() };
        self
    }

    /// Samples among the `tokens` most likely tokens; 0 for all.
    pub fn top_k(mut self, tokens: usize) -> Self {
        self.request.sampling.top_k = tokens;
        self
    }

    /// Samples among the most likely tokens that together reach this probability.
    pub fn top_p(mut self, probability: f32) -> Self {
        self.request.sampling.top_p = probability;
        self
    }

    /// Excludes tokens with less than this share of the most likely token's probability.
    pub fn min_p(mut self, share: f32) -> Self {
        self.request.sampling.min_p = share;
        self
    }

    /// Sets the penalty for tokens that already occurred; 1 for none.
    pub fn repetition_penalty(mut self, penalty: f32) -> Self {
        self.request.sampling.repetition_penalty = penalty;
        self
    }

    /// Sets the random seed. One seed gives the same tokens, independent of other sequences.
    pub fn seed(mut self, seed: u64) -> Self {
        self.request.sampling.seed = seed;
        self
    }

    /// Adds a stop sequence: the text ends before it. Several calls add several.
    pub fn stop(mut self, text: impl Into<String>) -> Self {
        self.request.stop_sequences.push(text.into());
        self
    }

    /// Replaces all settings.
    pub fn request(mut self, request: Request) -> Self {
        self.request = request;
        self
    }

    /// Starts the generation and returns a stream of text. The session is as long as [`Engine::context_length`].
    ///
    /// # Errors
    /// The errors of [`Session::generate_text`](super::Session::generate_text) and [`Engine::encode`]. The stream
    /// returns the errors of later tokens.
    pub fn stream(self) -> Result<TextStream, GenerateError> {
        let prompt = self.encoded()?;
        let context = self.engine.context_length(prompt.len(), &self.request);
        TextStream::start(self.engine.session(context)?, &prompt, &self.request)
    }

    /// Returns the whole text, without the prompt.
    ///
    /// # Errors
    /// The errors of [`Generation::stream`].
    pub fn text(self) -> Result<String, GenerateError> {
        self.stream()?.collect()
    }

    /// Returns `count` completions, which decode together and share the KV cache of the prompt.
    ///
    /// # Errors
    /// The errors of [`Engine::generate_batch`] and [`Engine::encode`].
    pub fn completions(self, count: usize) -> Result<Vec<Completion>, GenerateError> {
        let prompt = self.encoded()?;
        let mut each = self.engine.generate_batch(&[prompt], count, &self.request)?;
        Ok(each.pop().expect("one prompt"))
    }

    fn encoded(&self) -> Result<Vec<u32>, GenerateError> {
        match &self.prompt {
            Prompt::Text(text) => self.engine.encode(text),
            Prompt::Chat(messages) => self.engine.encode_chat(messages),
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
        }
    }
}
