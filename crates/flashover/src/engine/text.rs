use std::borrow::BorrowMut;

use text::{Stops, Stream, Tokenizer};

use super::Engine;
use super::error::GenerateError;
use super::request::{FinishReason, Request};
use super::session::{Session, Tokens};

/// Iterator over the text of a generation, in pieces that no later token changes. `S` is a session, or a reference to
/// one.
#[derive(Debug)]
pub struct TextStream<S = Session> {
    engine: Engine,
    tokens: Tokens<S>,
    /// None after the last piece.
    left: Option<Writing>,
    count: usize,
    end: Option<FinishReason>,
}

/// Detokenisation of a generation, up to a stop sequence.
#[derive(Debug)]
pub(super) struct Writing {
    stream: Stream,
    stops: Stops,
}

impl Writing {
    /// Returns the state after a prompt.
    ///
    /// # Errors
    /// [`GenerateError::Text`] for an empty stop sequence.
    pub(super) fn new(prompt: &[u32], request: &Request) -> Result<Self, GenerateError> {
        let stops = Stops::new(request.stop_sequences.clone())?;
        Ok(Self { stream: Stream::new(prompt, false), stops })
    }

    /// Returns the text that becomes final with this token, and true if a stop sequence ends it.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
    ) -> Result<(String, bool), GenerateError> {
        let piece = self.stops.push(&self.stream.push(tokenizer, id)?);
        Ok((piece.text, piece.stop.is_some()))
    }

    /// Returns the remaining text at the end of the tokens, and true if a stop sequence ends it.
    pub(super) fn finish(mut self, tokenizer: &Tokenizer) -> Result<(String, bool), GenerateError> {
        let last = self.stops.push(&self.stream.finish(tokenizer)?);
        Ok(match last.stop {
            Some(_) => (last.text, true),
            None => (last.text + &self.stops.finish(), false),
        })
    }
}

impl Session {
    /// Prefills `prompt` and generates text.
    ///
    /// # Errors
    /// The errors of [`Session::generate`]; [`GenerateError::NoTokenizer`]; [`GenerateError::Text`] for an empty stop
    /// sequence.
    pub fn generate_text(
        &mut self,
        prompt: &[u32],
        request: &Request,
    ) -> Result<TextStream<&mut Self>, GenerateError> {
        TextStream::start(self, prompt, request)
    }
}

impl Engine {
    /// Returns the text that `tokens` add to the text of a prompt. Decoded alone, they may lose a leading space.
    ///
    /// # Errors
    /// [`GenerateError::NoTokenizer`], [`GenerateError::Text`].
    pub fn decode_after(&self, prompt: &[u32], tokens: &[u32]) -> Result<String, GenerateError> {
        let (tokenizer, mut stream) = (self.tokenizer()?, Stream::new(prompt, false));
        let mut text = String::new();
        for id in tokens {
            text += &stream.push(tokenizer, *id)?;
        }
        Ok(text + &stream.finish(tokenizer)?)
    }
}

impl<S: BorrowMut<Session>> TextStream<S> {
    pub(super) fn start(
        session: S,
        prompt: &[u32],
        request: &Request,
    ) -> Result<Self, GenerateError> {
        let engine = session.borrow().engine().clone();
        engine.tokenizer()?;
        let left = Some(Writing::new(prompt, request)?);
        let tokens = Tokens::start(session, prompt, request)?;
        Ok(Self { engine, tokens, left, count: 0, end: None })
    }

    /// Returns the reason for the end of the generation; none before the end.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.end
    }

    /// Returns the number of tokens so far, including those whose text is not final yet.
    pub fn tokens(&self) -> usize {
        self.count
    }

    /// Returns the next piece; none at the end.
    fn piece(&mut self) -> Result<Option<String>, GenerateError> {
        let Some(mut writing) = self.left.take() else { return Ok(None) };
        let engine = self.engine.clone();
        let tokenizer = engine.tokenizer()?;
        for token in self.tokens.by_ref() {
            self.count += 1;
            let (piece, stopped) = writing.push(tokenizer, token?.id)?;
            if stopped {
                self.end = Some(FinishReason::Stop);
                return Ok(Some(piece));
            }
            if !piece.is_empty() {
                self.left = Some(writing);
                return Ok(Some(piece));
            }
        }
        let (last, stopped) = writing.finish(tokenizer)?;
        self.end = if stopped { Some(FinishReason::Stop) } else { self.tokens.finish_reason() };
        Ok(Some(last))
    }
}

impl<S: BorrowMut<Session>> Iterator for TextStream<S> {
    type Item = Result<String, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.piece().transpose()
    }
}
