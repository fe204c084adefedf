use text::{Stops, Stream};

use super::{End, Engine, EngineError, Request, Session, Tokens};

/// The text of a generation, as it becomes certain.
#[derive(Debug)]
pub struct Text<'a> {
    engine: Engine,
    tokens: Tokens<'a>,
    /// None when the end was given.
    left: Option<(Stream, Stops)>,
    count: usize,
    end: Option<End>,
}

impl Session {
    /// Lets `prompt` pass and generates text.
    ///
    /// # Errors
    /// As [`Session::generate`]; [`EngineError::NoTokenizer`]; [`EngineError::Text`] for an empty stop.
    pub fn write(&mut self, prompt: &[u32], request: &Request) -> Result<Text<'_>, EngineError> {
        let engine = self.engine().clone();
        engine.tokenizer()?;
        let left = Some((Stream::new(prompt, false), Stops::new(request.stops.clone())?));
        let tokens = self.generate(prompt, request)?;
        Ok(Text { engine, tokens, left, count: 0, end: None })
    }
}

impl Engine {
    /// The text that `tokens` add to that of a prompt. By themselves tokenizers may drop a space at their beginning.
    ///
    /// # Errors
    /// [`EngineError::NoTokenizer`], [`EngineError::Text`].
    pub fn decode_after(&self, prompt: &[u32], tokens: &[u32]) -> Result<String, EngineError> {
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
    fn piece(&mut self) -> Result<Option<String>, EngineError> {
        let Some((mut stream, mut stops)) = self.left.take() else { return Ok(None) };
        let engine = self.engine.clone();
        let tokenizer = engine.tokenizer()?;
        for token in self.tokens.by_ref() {
            self.count += 1;
            let piece = stops.push(&stream.push(tokenizer, token?.id)?);
            if piece.stop.is_some() {
                self.end = Some(End::Stop);
                return Ok(Some(piece.text));
            }
            if !piece.text.is_empty() {
                self.left = Some((stream, stops));
                return Ok(Some(piece.text));
            }
        }
        let last = stops.push(&stream.finish(tokenizer)?);
        self.end = if last.stop.is_some() { Some(End::Stop) } else { self.tokens.end() };
        Ok(Some(last.text + &if last.stop.is_some() { String::new() } else { stops.finish() }))
    }
}

impl Iterator for Text<'_> {
    type Item = Result<String, EngineError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.piece().transpose()
    }
}
