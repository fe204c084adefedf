use crate::{Error, Tokenizer};

/// The replacement character: stands for invalid or incomplete characters.
const NO_TEXT: char = '\u{FFFD}';

/// Most bytes of an incomplete character; some tokenizers decode each to a replacement character.
const INCOMPLETE: usize = 3;

/// Number of prompt tokens that are decoded together with the first new tokens. It covers a run of 16
/// characters in byte tokens at the end of the prompt.
const CONTEXT: usize = 64;

/// Incremental detokeniser: converts ids to text one at a time.
///
/// Only complete characters are returned, even if several tokens make up one. Spaces between words are kept,
/// although tokenizers drop a leading space when they decode. Joined, the pieces are the text that the ids add
/// to the text of the prompt. An id without a token is U+FFFD, as in [`Tokenizer::decode`]. Like an incomplete
/// character, it is held back until the text after it is known.
///
/// ```text
/// window = given | pending             // given: already decoded, kept as context
/// push:  pending text = text(window) without text(given)
///        piece = pending text without incomplete characters and without the part already shown
///        given = pending               // if no character is incomplete
/// ```
#[derive(Debug, Clone)]
pub struct Stream {
    window: Vec<u32>,
    /// Number of given ids in the window.
    given: usize,
    /// Part of the pending text that was shown.
    shown: String,
    /// True if special tokens appear by name in the text.
    special: bool,
}

impl Stream {
    /// Makes a stream for ids that follow `prompt`. Special tokens are omitted from the text unless `special`.
    pub fn new(prompt: &[u32], special: bool) -> Self {
        let window = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        Self { given: window.len(), window, shown: String::new(), special }
    }

    /// Adds an id and returns the text that is now complete. It is empty while a character is incomplete.
    ///
    /// # Errors
    /// [`Error::Decode`].
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, Error> {
        self.window.push(id);
        let text = self.pending(tokenizer)?;
        let whole = whole(&text);
        let piece = added(&self.shown, whole).to_owned();
        if whole.len() < text.len() {
            self.shown.push_str(&piece);
        } else if !text.is_empty() {
            self.shown.clear();
            self.window.drain(..self.given);
            self.given = self.window.len();
        }
        Ok(piece)
    }

    /// Returns the rest of the text at the end; an incomplete character is U+FFFD.
    ///
    /// # Errors
    /// [`Error::Decode`].
    pub fn finish(self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let pending = self.pending(tokenizer)?;
        Ok(added(&self.shown, &pending).to_owned())
    }

    /// Decodes the pending ids.
    fn pending(&self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let decode = |ids: &[u32]| tokenizer.decode(ids, self.special);
        let (given, pending) = self.window.split_at(self.given);
        let (given, text) = (decode(given)?, decode(&self.window)?);
        let rest = text.strip_prefix(given.as_str());
        if let Some(rest) = rest.filter(|rest| !rest.contains(NO_TEXT)) {
            return Ok(rest.to_owned());
        }
        // The prompt ended within a character, which is complete now.
        if rest.is_none()
            && given.ends_with(NO_TEXT)
            && let Some(rest) = text.strip_prefix(given.trim_end_matches(NO_TEXT))
        {
            return Ok(rest.to_owned());
        }
        // With one invalid byte, some tokenizers replace every character of a run of byte tokens.
        let alone = decode(pending)?;
        Ok(match rest {
            Some(rest) if alone.contains(NO_TEXT) => rest.to_owned(),
            _ => alone,
        })
    }
}

/// Returns a text without the incomplete character at its end.
fn whole(text: &str) -> &str {
    let mut whole = text;
    for _ in 0..INCOMPLETE {
        whole = whole.strip_suffix(NO_TEXT).unwrap_or(whole);
    }
    whole
}

/// Returns `text` after its common prefix with the shown text.
fn added<'a>(shown: &str, text: &'a str) -> &'a str {
    let same = shown.chars().zip(text.chars()).take_while(|(a, b)| a == b);
    &text[same.map(|(c, _)| c.len_utf8()).sum()..]
}
