use std::borrow::BorrowMut;

use burn::tensor::Tensor;
use models::KvCache;

use super::Engine;
use super::error::GenerateError;
use super::request::{FinishReason, Request};
use super::sampler::Sampler;
use super::sampling::{Place, Token};
use crate::memory::Grant;

/// A sequence with its KV cache.
#[derive(Debug)]
pub struct Session {
    cache: KvCache,
    /// None for a context longer than the model's, which its decoder refuses.
    grant: Option<Grant>,
    /// Version of the weights at the start.
    version: u64,
    /// Last field, so that it is dropped last: the last engine of a model returns its pages.
    engine: Engine,
}

/// Iterator over the tokens of a generation. `S` is a session, or a reference to one.
#[derive(Debug)]
pub struct Tokens<S = Session> {
    session: S,
    request: Request,
    sampler: Sampler,
    /// Sampled and not yet returned.
    next: Option<Token>,
    given: usize,
    /// Returned, and not yet in the KV cache.
    last: Option<u32>,
    end: Option<FinishReason>,
    failed: bool,
}

impl Engine {
    /// Starts an empty session with a KV cache of `context` tokens.
    ///
    /// # Errors
    /// [`GenerateError::Model`] for a context longer than the model's;
    /// [`PlanError::Memory`](crate::memory::PlanError::Memory) if it does not fit in memory.
    pub fn session(&self, context: usize) -> Result<Session, GenerateError> {
        Session::new(self.clone(), context)
    }
}

impl Session {
    pub(super) fn new(engine: Engine, context: usize) -> Result<Self, GenerateError> {
        let (cache, grant) = engine.cache(1, context)?;
        let version = engine.version();
        Ok(Self { engine, cache, grant, version })
    }

    pub(super) fn into_parts(self) -> (KvCache, Option<Grant>) {
        (self.cache, self.grant)
    }

    /// Returns the engine of the session.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the tokens in the KV cache. The last token that a generation returned is not in it yet, so a prompt that
    /// continues the text starts with that token.
    pub fn tokens(&self) -> &[u32] {
        self.cache.tokens(0)
    }

    /// Returns the context length in tokens.
    pub fn context(&self) -> usize {
        self.cache.capacity()
    }

    /// Clears the KV cache. A stale session is then of the engine's present weights.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.version = self.engine.version();
    }

    /// Appends tokens to the KV cache and returns the logits after each of them, `[tokens, vocab]` row by row. Logits
    /// are downloaded in pieces, so they take no more device memory than planned.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`]; [`GenerateError::Stale`]; [`GenerateError::Model`] for tokens outside of the vocabulary or more than the
    /// session has room for.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, GenerateError> {
        if tokens.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let Self { engine, cache, version, .. } = self;
        let _weights = engine.reading_as(*version)?;
        let mut logits = Vec::new();
        engine.decoder().prefill_each(cache, tokens, |made| {
            logits.extend(engine.on_host(made)?);
            Ok::<_, GenerateError>(())
        })?;
        Ok(logits)
    }

    /// Prefills `prompt` after [`Session::tokens`] and generates tokens.
    ///
    /// # Errors
    /// The errors of [`Session::logits`]; [`GenerateError::Sampling`]. The iterator returns the errors of later tokens.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        request: &Request,
    ) -> Result<Tokens<&mut Self>, GenerateError> {
        Tokens::start(self, prompt, request)
    }

    /// Prefills tokens and returns the logits after the last one, on the device. They must be used before the next
    /// step. `decodes` is true if the session then decodes on its own.
    pub(super) fn prefill(
        &mut self,
        tokens: &[u32],
        decodes: bool,
    ) -> Result<Tensor<2>, GenerateError> {
        if tokens.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let _weights = self.engine.reading_as(self.version)?;
        self.engine.precompile(&self.cache, tokens.len(), decodes)?;
        Ok(self.engine.decoder().prefill(&mut self.cache, &[tokens])?)
    }
}

impl<S: BorrowMut<Session>> Tokens<S> {
    pub(super) fn start(
        mut session: S,
        prompt: &[u32],
        request: &Request,
    ) -> Result<Self, GenerateError> {
        request.sampling.check()?;
        let own = session.borrow_mut();
        let logits = own.prefill(prompt, true)?;
        let (request, tokens) = (request.clone(), own.cache.tokens(0));
        let sampler = Sampler::new(&own.engine, &[(request.sampling, tokens)]);
        let place = Place { position: tokens.len(), completion: 0 };
        let next = sampler.sample(&own.engine, logits, &[place])?.pop();
        Ok(Self { session, request, sampler, next, given: 0, last: None, end: None, failed: false })
    }

    fn session(&self) -> &Session {
        self.session.borrow()
    }

    /// Returns the reason for the end of the generation; none before the end.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.end
    }

    /// Decodes the last token and samples the next one.
    fn sample(&mut self) -> Result<Token, GenerateError> {
        let last = self.last.take().expect("a token was returned, or one is next");
        let Session { engine, cache, version, .. } = self.session.borrow_mut();
        let _weights = engine.reading_as(*version)?;
        let logits = engine.decoder().decode(cache, &[last])?;
        let place = Place { position: cache.tokens(0).len(), completion: 0 };
        let mut sampled = self.sampler.sample(engine, logits, &[place])?;
        Ok(sampled.pop().expect("a token a row"))
    }

    fn step(&mut self) -> Result<Option<Token>, GenerateError> {
        let seen = self.session().tokens().len() + usize::from(self.last.is_some());
        self.end = self.request.end(self.given, seen, self.session().context());
        if self.end.is_some() {
            return Ok(None);
        }
        let token = match self.next.take() {
            Some(token) => token,
            None => self.sample()?,
        };
        if self.request.stop_tokens.contains(&token.id) {
            self.end = Some(FinishReason::Eos);
            return Ok(None);
        }
        self.given += 1;
        self.last = Some(token.id);
        Ok(Some(token))
    }
}

impl<S: BorrowMut<Session>> Iterator for Tokens<S> {
    type Item = Result<Token, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.end.is_some() || self.failed {
            return None;
        }
        let step = self.step();
        self.failed = step.is_err();
        step.transpose()
    }
}
