use burn::tensor::Tensor;
use models::{KvCache, Rows};

use super::sampling::{Picker, Place};
use super::{End, Engine, EngineError, Request, Token};

/// What one prompt became.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    pub tokens: Vec<Token>,
    pub end: End,
}

/// A sequence of a batch while it grows.
struct Growing {
    prompt: usize,
    completion: usize,
    seen: Vec<u32>,
    tokens: Vec<Token>,
    end: Option<End>,
}

impl Engine {
    /// `completions` answers to each of several prompts, which decode together; each prompt passes once. Of a model
    /// whose rope stretches within the room that they need, answers go one by one, and the prompt passes for each. The
    /// result is `[prompts][completions]`, each drawn with the random numbers that it would have alone.
    ///
    /// # Errors
    /// As [`super::Session::generate`]; [`EngineError::Stops`] where the request has such.
    pub fn generate_batch(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
    ) -> Result<Vec<Vec<Completion>>, EngineError> {
        if !request.stops.is_empty() {
            return Err(EngineError::Stops);
        }
        request.sampling.check()?;
        let all = self.workload(prompts, completions, request);
        let room = all.context;
        if !self.0.reader.decodes_together(room) {
            return self.one_by_one(prompts, completions, request, room);
        }
        super::fits(self.plan(all))?;
        let (mut caches, mut growing, mut logits) = (Vec::new(), Vec::new(), Vec::new());
        for (prompt, tokens) in prompts.iter().enumerate() {
            let _at_work = ops::at_work();
            let mut session = self.session(room)?;
            let after = session.pass(tokens.as_ref())?;
            let seen = tokens.as_ref().to_vec();
            growing.extend((0..completions).map(|completion| Growing {
                prompt,
                completion,
                seen: seen.clone(),
                tokens: Vec::new(),
                end: None,
            }));
            logits.push(after.repeat_dim(0, completions));
            caches.push((session.into_cache(), completions));
        }
        if completions > 0 && !prompts.is_empty() {
            let at_work = ops::at_work();
            let (cache, logits) = (KvCache::stack(caches), Tensor::cat(logits, 0));
            drop(at_work);
            self.grow(&mut growing, cache, logits, request)?;
        }
        let mut answers: Vec<Vec<Completion>> = prompts.iter().map(|_| Vec::new()).collect();
        for Growing { prompt, tokens, end, .. } in growing {
            let end = end.expect("a batch decodes until all have ended");
            answers[prompt].push(Completion { tokens, end });
        }
        Ok(answers)
    }

    fn one_by_one(
        &self,
        prompts: &[impl AsRef<[u32]>],
        completions: usize,
        request: &Request,
        room: usize,
    ) -> Result<Vec<Vec<Completion>>, EngineError> {
        let one = |tokens: &[u32], completion| {
            let mut session = self.session(room)?;
            let logits = session.pass(tokens)?;
            let seen = tokens.to_vec();
            let mut own = [Growing { prompt: 0, completion, seen, tokens: Vec::new(), end: None }];
            self.grow(&mut own, session.into_cache(), logits, request)?;
            let [Growing { tokens, end, .. }] = own;
            Ok(Completion { tokens, end: end.expect("it decodes until it ended") })
        };
        let answers = |tokens: &[u32]| (0..completions).map(|at| one(tokens, at)).collect();
        prompts.iter().map(|prompt| answers(prompt.as_ref())).collect()
    }

    /// Decodes a batch until all its sequences ended.
    fn grow(
        &self,
        batch: &mut [Growing],
        mut cache: KvCache,
        mut logits: Tensor<2>,
        request: &Request,
    ) -> Result<(), EngineError> {
        let mut rows: Vec<usize> = (0..batch.len()).collect();
        let picker = |batch: &[Growing], rows: &[usize]| {
            let seen: Vec<&[u32]> = rows.iter().map(|at| &batch[*at].seen[..]).collect();
            Picker::new(self, request.sampling, &seen)
        };
        let mut own = picker(batch, &rows);
        loop {
            let places: Vec<Place> = rows.iter().map(|at| batch[*at].place()).collect();
            for (at, token) in rows.iter().zip(own.pick(self, logits, &places)?) {
                batch[*at].take(token, cache.capacity(), request);
            }
            let open: Vec<usize> =
                (0..rows.len()).filter(|row| batch[rows[*row]].end.is_none()).collect();
            if open.is_empty() {
                return Ok(());
            }
            // Those that ended go along with a token of theirs, whose logits nobody looks at, as long as
            // there is room for it.
            if cache.lengths().iter().any(|length| *length == cache.capacity()) {
                cache = cache.keep(&open);
                rows = open.into_iter().map(|row| rows[row]).collect();
                own = picker(batch, &rows);
            }
            let last = |at: &usize| [*batch[*at].seen.last().expect("a prompt has tokens")];
            let next: Vec<[u32; 1]> = rows.iter().map(last).collect();
            logits = self.decoder().forward(&mut cache, &next, Rows::Last)?;
        }
    }
}

impl Growing {
    /// Of its next token.
    fn place(&self) -> Place {
        Place { position: self.seen.len(), completion: self.completion }
    }

    /// One more token, or the end.
    fn take(&mut self, token: Token, capacity: usize, request: &Request) {
        let end = |own: &Self| request.end(own.tokens.len(), own.seen.len(), capacity);
        self.end = self.end.or_else(|| end(self));
        if self.end.is_some() {
            return;
        }
        if request.eos.contains(&token.id) {
            self.end = Some(End::Eos);
            return;
        }
        self.seen.push(token.id);
        self.tokens.push(token);
        self.end = end(self);
    }
}
