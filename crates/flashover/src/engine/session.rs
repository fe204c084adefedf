use std::borrow::BorrowMut;

use burn::tensor::Tensor;
use models::KvCache;

use super::Engine;
use super::error::GenerateError;
use super::request::{FinishReason, Request};
use super::sampler::Sampler;
use super::sampling::{Place, Token};
use crate::memory::Grant;

/// One sequence: the tokens so far, with their keys and values.
#[derive(Debug)]
pub struct Session {
    cache: KvCache,
    /// None where it is part of what has one.
    grant: Option<Grant>,
    /// The last to go: the last of a model gives its pages back.
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
    /// Room for one sequence of `context` positions.
    ///
    /// # Errors
    /// [`GenerateError::Model`] for more than the model has, [`PlanError::Memory`](crate::memory::PlanError::Memory) for more than the device.
    pub fn session(&self, context: usize) -> Result<Session, GenerateError> {
        Session::new(self.clone(), context)
    }
}

impl Session {
    pub(super) fn new(engine: Engine, context: usize) -> Result<Self, GenerateError> {
        let (cache, grant) = engine.cache(1, context)?;
        Ok(Self { engine, cache, grant })
    }

    /// One of a batch that was found to fit.
    pub(super) fn within(engine: Engine, context: usize) -> Result<Self, GenerateError> {
        let cache = engine.cache_within(1, context)?;
        Ok(Self { engine, cache, grant: None })
    }

    pub(super) fn into_parts(self) -> (KvCache, Option<Grant>) {
        (self.cache, self.grant)
    }

    /// The model that it is a sequence of.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokens that passed so far. The last one that a generation gave out has not: what goes on after it begins
    /// with it.
    pub fn tokens(&self) -> &[u32] {
        self.cache.tokens(0)
    }

    /// Positions that it has room for.
    pub fn context(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets what passed.
    pub fn clear(&mut self) {
        self.cache.clear();
    }

    /// Lets tokens pass, and gives the logits after each of them, `[tokens, vocab]`. They leave the device as they come,
    /// and take no more of it than was planned.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`]; [`GenerateError::Model`] for tokens that the model does not have or that the
    /// session has no room for.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, GenerateError> {
        if tokens.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let Self { engine, cache, .. } = self;
        let mut logits = Vec::new();
        engine.decoder().prefill_each(cache, tokens, |made| {
            logits.extend(engine.on_host(made)?);
            Ok::<_, GenerateError>(())
        })?;
        Ok(logits)
    }

    /// Lets `prompt` pass, after [`Session::tokens`], and generates.
    ///
    /// # Errors
    /// As [`Session::logits`]; [`GenerateError::Sampling`]. Those of later tokens come from the iterator.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        request: &Request,
    ) -> Result<Tokens<&mut Self>, GenerateError> {
        Tokens::start(self, prompt, request)
    }

    /// Logits after the last of the tokens, on the device, to be used before the next step. With `decodes` the session
    /// goes on with steps of its own.
    pub(super) fn prefill(
        &mut self,
        tokens: &[u32],
        decodes: bool,
    ) -> Result<Tensor<2>, GenerateError> {
        if tokens.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
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

    /// Reason for the end of the generation; none before.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.end
    }

    /// Decodes the last token and samples the next one.
    fn sample(&mut self) -> Result<Token, GenerateError> {
        let last = self.last.take().expect("a token was returned, or one is next");
        let Session { engine, cache, .. } = self.session.borrow_mut();
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
