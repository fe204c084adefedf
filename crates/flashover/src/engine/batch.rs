use std::ops::ControlFlow;

use burn::tensor::Tensor;
use models::{Decoder, KvCache, PagedCache};

use super::Engine;
use super::error::GenerateError;
use super::request::{FinishReason, Request};
use super::sampler::Sampler;
use super::sampling::{Place, Sampling, Token};
use super::text::Writing;

/// A completion of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Generated tokens, with those of a stop sequence and without a stop token.
    pub tokens: Vec<Token>,
    /// The stop token that ended it, if one did.
    pub stop: Option<Token>,
    /// Text that the tokens add to the prompt's, up to a stop sequence; none for a model without a tokenizer.
    pub text: Option<String>,
    /// Reason for the end.
    pub finish_reason: FinishReason,
}

/// One step of one completion of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchStep<'a> {
    /// Index of the prompt, from 0.
    pub prompt: usize,
    /// Index of the completion of that prompt, from 0.
    pub completion: usize,
    /// The new token; none if the completion ended without one, for example at a stop token.
    pub token: Option<Token>,
    /// Text that the step adds. It is empty while a character or a possible stop sequence is incomplete.
    pub piece: &'a str,
    /// Reason for the end, at the last step of a completion.
    pub finish_reason: Option<FinishReason>,
}

/// A sequence of a batch during generation.
struct Growing<'a> {
    request: &'a Request,
    prompt: usize,
    completion: usize,
    seen: Vec<u32>,
    tokens: Vec<Token>,
    stop: Option<Token>,
    writing: Option<Writing>,
    text: Option<String>,
    end: Option<FinishReason>,
}

impl Engine {
    /// Generates `completions` completions of each prompt in one batch. Each prompt is prefilled once. If RoPE scaling
    /// changes the frequencies within the context that is needed, sequences run one by one, each with its own prefill.
    ///
    /// The result is `[prompts][completions]`. Random numbers are those of each sequence alone, so tokens do not depend
    /// on the batch. Device memory is that of [`Engine::workload`].
    ///
    /// # Errors
    /// The errors of [`Session::generate`]; the errors of [`Session::generate_text`] if the request has stop sequences.
    pub fn generate_batch(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Result<Vec<Vec<Completion>>, GenerateError> {
        let each: Vec<_> = prompts.iter().map(|prompt| (prompt.as_ref(), request)).collect();
        self.generate_each(&each, completions)
    }

    /// Runs [`Engine::generate_batch`] with a request for each prompt: sampling, seed, maximum length and stops.
    ///
    /// # Errors
    /// The errors of [`Engine::generate_batch`].
    pub fn generate_each(
        &self,
        asked: &[(&[u32], &Request)],
        completions: usize,
    ) -> Result<Vec<Vec<Completion>>, GenerateError> {
        self.generate_each_with(asked, completions, |_| ControlFlow::Continue(()))
    }

    /// Runs [`Engine::generate_each`] and calls `seen` after each step of each completion. If `seen` breaks, generation
    /// is cancelled: unfinished completions keep their tokens and end with [`FinishReason::Cancelled`].
    ///
    /// # Errors
    /// The errors of [`Engine::generate_batch`].
    pub fn generate_each_with(
        &self,
        asked: &[(&[u32], &Request)],
        completions: usize,
        mut seen: impl FnMut(BatchStep<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<Completion>>, GenerateError> {
        for (_, request) in asked {
            request.sampling.check()?;
            if !request.stop_sequences.is_empty() {
                self.tokenizer()?;
            }
        }
        let _weights = self.reading();
        let all = self.0.reader.workload(asked, completions);
        let context = all.context;
        if all.batch == 1 || !self.0.reader.decodes_together(context) {
            return self.one_by_one(asked, completions, context, &mut seen);
        }
        let _grant = self.admit(all.clone())?;
        let lengths = || asked.iter().map(|(tokens, _)| tokens.len());
        let pages = lengths().map(|len| PagedCache::pages(len, completions, context)).sum();
        let mut cache = self.paged_within(pages, &all, lengths().sum())?;
        let size = (completions, usize::MAX);
        self.generate_in(self.decoder(), &mut cache, asked, size, &mut seen)
    }

    /// Generates completions in `cache`, which has pages for them, with the weights of a decoder like the engine's. `size` is
    /// the number of completions of each prompt, and the most tokens of each.
    pub(crate) fn generate_with(
        &self,
        decoder: &Decoder,
        cache: &mut PagedCache,
        asked: &[(&[u32], &Request)],
        size: (usize, usize),
    ) -> Result<Vec<Vec<Completion>>, GenerateError> {
        let _weights = self.reading();
        self.generate_in(decoder, cache, asked, size, &mut |_| ControlFlow::Continue(()))
    }

    fn generate_in(
        &self,
        decoder: &Decoder,
        cache: &mut PagedCache,
        asked: &[(&[u32], &Request)],
        (completions, room): (usize, usize),
        seen: &mut impl FnMut(BatchStep<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<Completion>>, GenerateError> {
        cache.clear();
        let prompts: Vec<&[u32]> = asked.iter().map(|(tokens, _)| *tokens).collect();
        if prompts.iter().any(|own| own.is_empty()) {
            return Err(GenerateError::EmptyPrompt);
        }
        let mut answers: Vec<Vec<Completion>> = asked.iter().map(|_| Vec::new()).collect();
        if prompts.is_empty() || completions == 0 {
            return Ok(answers);
        }
        self.precompile_groups(decoder, cache, &prompts, (completions, room))?;
        let (groups, after) = decoder.prefill_groups(cache, &prompts, completions, room)?;
        let mut growing = Vec::new();
        for (prompt, (tokens, request)) in asked.iter().enumerate() {
            for completion in 0..completions {
                growing.push(self.growing(tokens, request, [prompt, completion])?);
            }
        }
        let logits = {
            let _stream_guard = ops::stream_guard();
            let [rows, vocab] = after.dims();
            let each = after.reshape([rows, 1, vocab]).repeat_dim(1, completions);
            each.reshape([rows * completions, vocab])
        };
        let capacity = cache.capacity();
        let mut sequences =
            InPages { decoder, cache, rows: groups.concat().into_iter().map(Some).collect() };
        self.grow(&mut growing, &mut sequences, capacity, logits, seen)?;
        for own in growing {
            answers[own.prompt].push(own.completion());
        }
        Ok(answers)
    }

    fn one_by_one(
        &self,
        asked: &[(&[u32], &Request)],
        completions: usize,
        context: usize,
        seen: &mut impl FnMut(BatchStep<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<Completion>>, GenerateError> {
        let mut cancelled = false;
        let mut one = |tokens: &[u32], request: &Request, place| {
            if cancelled {
                let mut own = self.growing(tokens, request, place)?;
                own.cancel(self)?;
                return Ok(own.completion());
            }
            let mut session = self.session(context)?;
            let logits = session.prefill(tokens, true)?;
            let mut own = [self.growing(tokens, request, place)?];
            let (mut cache, _grant) = session.into_parts();
            let capacity = cache.capacity();
            let mut alone = Alone { decoder: self.decoder(), cache: &mut cache };
            cancelled = self.grow(&mut own, &mut alone, capacity, logits, seen)?;
            let [own] = own;
            Ok(own.completion())
        };
        let answers = |(prompt, (tokens, request)): (usize, &(&[u32], &Request))| {
            (0..completions).map(|at| one(tokens, request, [prompt, at])).collect()
        };
        asked.iter().enumerate().map(answers).collect()
    }

    fn growing<'a>(
        &self,
        tokens: &[u32],
        request: &'a Request,
        [prompt, completion]: [usize; 2],
    ) -> Result<Growing<'a>, GenerateError> {
        let writing = match self.0.reader.tokenizer {
            Some(_) => Some(Writing::new(tokens, request)?),
            None => None,
        };
        Ok(Growing {
            request,
            prompt,
            completion,
            seen: tokens.to_vec(),
            tokens: Vec::new(),
            stop: None,
            writing,
            text: None,
            end: None,
        })
    }

    /// Decodes a batch until all sequences end, and calls `seen` after each step of each sequence. Returns true if
    /// `seen` cancelled it.
    fn grow(
        &self,
        batch: &mut [Growing<'_>],
        sequences: &mut impl Decodes,
        capacity: usize,
        mut logits: Tensor<2>,
        seen: &mut impl FnMut(BatchStep<'_>) -> ControlFlow<()>,
    ) -> Result<bool, GenerateError> {
        let mut rows: Vec<usize> = (0..batch.len()).collect();
        let sampler = |batch: &[Growing<'_>], rows: &[usize]| {
            let row = |at: &usize| (batch[*at].request.sampling, &batch[*at].seen[..]);
            let sequences: Vec<(Sampling, &[u32])> = rows.iter().map(row).collect();
            Sampler::new(self, &sequences)
        };
        let mut own = sampler(batch, &rows);
        loop {
            let mut cancelled = false;
            let places: Vec<Place> = rows.iter().map(|at| batch[*at].place()).collect();
            for (row, token) in own.sample(self, logits, &places)?.into_iter().enumerate() {
                let own = &mut batch[rows[row]];
                if own.end.is_none() {
                    cancelled |= seen(own.step(self, token, capacity)?).is_break();
                    if own.end.is_some() {
                        sequences.end(row);
                    }
                }
            }
            if cancelled {
                let mut open = batch.iter_mut().filter(|own| own.end.is_none());
                return open.try_for_each(|own| own.cancel(self)).map(|()| true);
            }
            let open: Vec<usize> =
                (0..rows.len()).filter(|row| batch[rows[*row]].end.is_none()).collect();
            if open.is_empty() {
                return Ok(false);
            }
            // Rows of ended sequences go when a step of fewer rows serves the others.
            if PagedCache::rows(open.len()) < PagedCache::rows(rows.len()) {
                sequences.keep(&open);
                rows = open.into_iter().map(|row| rows[row]).collect();
                own = sampler(batch, &rows);
            }
            let last = |at: &usize| *batch[*at].seen.last().expect("a prompt has tokens");
            let next: Vec<u32> = rows.iter().map(last).collect();
            logits = sequences.decode(&next)?;
        }
    }
}

/// Sequences of a batch that decode together, one per row.
trait Decodes {
    /// Runs one more token of each row, and returns the logits after it.
    fn decode(&mut self, tokens: &[u32]) -> Result<Tensor<2>, models::Error>;

    /// Ends the sequence of a row. The row stays, and its logits are ignored.
    fn end(&mut self, row: usize);

    /// Keeps only some of the rows, in this order.
    fn keep(&mut self, rows: &[usize]);
}

/// One sequence.
struct Alone<'a> {
    decoder: &'a Decoder,
    cache: &'a mut KvCache,
}

impl Decodes for Alone<'_> {
    fn decode(&mut self, tokens: &[u32]) -> Result<Tensor<2>, models::Error> {
        self.decoder.decode(self.cache, tokens)
    }

    fn end(&mut self, _row: usize) {}

    fn keep(&mut self, _rows: &[usize]) {}
}

/// Sequences in pages; none for a row whose sequence has ended.
struct InPages<'a> {
    decoder: &'a Decoder,
    cache: &'a mut PagedCache,
    rows: Vec<Option<usize>>,
}

impl Decodes for InPages<'_> {
    fn decode(&mut self, tokens: &[u32]) -> Result<Tensor<2>, models::Error> {
        self.decoder.decode_paged(self.cache, &self.rows, tokens)
    }

    fn end(&mut self, row: usize) {
        if let Some(sequence) = self.rows[row].take() {
            self.cache.leave(sequence);
        }
    }

    fn keep(&mut self, rows: &[usize]) {
        self.rows = rows.iter().map(|row| self.rows[*row]).collect();
    }
}

impl Growing<'_> {
    /// Returns the place of the next token.
    fn place(&self) -> Place {
        Place { position: self.seen.len(), completion: self.completion }
    }

    /// Takes a sampled token and returns the step: one more token, or the end.
    fn step(
        &mut self,
        engine: &Engine,
        token: Token,
        capacity: usize,
    ) -> Result<BatchStep<'_>, GenerateError> {
        let (tokens, written) = (self.tokens.len(), self.text.as_deref().map_or(0, str::len));
        self.take(engine, token, capacity)?;
        let Self { prompt, completion, end, .. } = *self;
        let piece = self.text.as_deref().map_or("", |text| &text[written..]);
        Ok(BatchStep {
            prompt,
            completion,
            token: self.tokens.get(tokens).copied(),
            piece,
            finish_reason: end,
        })
    }

    fn take(
        &mut self,
        engine: &Engine,
        token: Token,
        capacity: usize,
    ) -> Result<(), GenerateError> {
        let end = |own: &Self| own.request.end(own.tokens.len(), own.seen.len(), capacity);
        self.end = end(self);
        if self.end.is_none() && self.request.stop_tokens.contains(&token.id) {
            self.end = Some(FinishReason::Eos);
            self.stop = Some(token);
        }
        if self.end.is_none() {
            self.seen.push(token.id);
            self.tokens.push(token);
            self.write(engine, token.id)?;
            self.end = self.end.or_else(|| end(self));
        }
        match self.end {
            Some(_) => self.finish(engine),
            None => Ok(()),
        }
    }

    /// Appends the text of a token, which may complete a stop sequence.
    fn write(&mut self, engine: &Engine, id: u32) -> Result<(), GenerateError> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let (piece, stopped) = writing.push(engine.tokenizer()?, id)?;
        self.text.get_or_insert_default().push_str(&piece);
        if stopped {
            self.end = Some(FinishReason::Stop);
            self.writing = None;
        }
        Ok(())
    }

    /// Ends the sequence with the tokens so far.
    fn cancel(&mut self, engine: &Engine) -> Result<(), GenerateError> {
        self.end = Some(FinishReason::Cancelled);
        self.finish(engine)
    }

    /// Appends the remaining text, which may hold a stop sequence.
    fn finish(&mut self, engine: &Engine) -> Result<(), GenerateError> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let (piece, stopped) = writing.finish(engine.tokenizer()?)?;
        self.text.get_or_insert_default().push_str(&piece);
        if stopped {
            self.end = Some(FinishReason::Stop);
        }
        Ok(())
    }

    fn completion(self) -> Completion {
        let finish_reason = self.end.expect("a batch decodes until all have ended");
        Completion { tokens: self.tokens, stop: self.stop, text: self.text, finish_reason }
    }
}
