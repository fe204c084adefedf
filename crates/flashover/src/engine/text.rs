use text::{Stops, Stream, Tokenizer};

use super::Engine;
use super::error::GenerateError;
use super::request::{End, Request};
use super::session::{Session, Tokens};

/// The text of a generation, as it becomes certain.
#[derive(Debug)]
pub struct Text<'a> {
    engine: Engine,
    tokens: Tokens<'a>,
    /// None when the end was given.
    left: Option<Writing>,
    count: usize,
    end: Option<End>,
}

/// What tokens become, up to a string that ends them.
#[derive(Debug)]
pub(super) struct Writing {
    stream: Stream,
    stops: Stops,
}

impl Writing {
    /// After a prompt.
    ///
    /// # Errors
    /// [`GenerateError::Text`] for an empty stop.
    pub(super) fn new(prompt: &[u32], request: &Request) -> Result<Self, GenerateError> {
        let stops = Stops::new(request.stops.clone())?;
        Ok(Self { stream: Stream::new(prompt, false), stops })
    }

    /// The text that is certain with this token, and whether it ends there.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
    ) -> Result<(String, bool), GenerateError> {
        let piece = self.stops.push(&self.stream.push(tokenizer, id)?);
        Ok((piece.text, piece.stop.is_some()))
    }

    /// The text that is left where no token follows, and whether a stop ends it.
    pub(super) fn finish(mut self, tokenizer: &Tokenizer) -> Result<(String, bool), GenerateError> {
        let last = self.stops.push(&self.stream.finish(tokenizer)?);
        Ok(match last.stop {
            Some(_) => (last.text, true),
            None => (last.text + &self.stops.finish(), false),
        })
    }
}

impl Session {
    /// Lets `prompt` pass and generates text.
    ///
    /// # Errors
    /// As [`Session::generate`]; [`GenerateError::NoTokenizer`]; [`GenerateError::Text`] for an empty stop.
    pub fn write(&mut self, prompt: &[u32], request: &Request) -> Result<Text<'_>, GenerateError> {
        let engine = self.engine().clone();
        engine.tokenizer()?;
        let left = Some(Writing::new(prompt, request)?);
        let tokens = self.generate(prompt, request)?;
        Ok(Text { engine, tokens, left, count: 0, end: None })
    }
}

impl Engine {
    /// The text that `tokens` add to that of a prompt. By themselves tokenizers may drop a space at their beginning.
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

impl Text<'_> {
    /// Why it ended, when it did.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Tokens so far, those held back included.
    pub fn tokens(&self) -> usize {
        self.count
    }

    /// The next piece; none at the end.
    fn piece(&mut self) -> Result<Option<String>, GenerateError> {
        let Some(mut writing) = self.left.take() else { return Ok(None) };
        let engine = self.engine.clone();
        let tokenizer = engine.tokenizer()?;
        for token in self.tokens.by_ref() {
            self.count += 1;
            let (piece, stopped) = writing.push(tokenizer, token?.id)?;
            if stopped {
                self.end = Some(End::Stop);
                return Ok(Some(piece));
            }
            if !piece.is_empty() {
                self.left = Some(writing);
                return Ok(Some(piece));
            }
        }
        let (last, stopped) = writing.finish(tokenizer)?;
        self.end = if stopped { Some(End::Stop) } else { self.tokens.end() };
        Ok(Some(last))
    }
}

impl Iterator for Text<'_> {
    type Item = Result<String, GenerateError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.piece().transpose()
    }
}
