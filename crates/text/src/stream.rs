use crate::{Error, Tokenizer};

/// The replacement character: where bytes are no text, or not yet.
const NO_TEXT: char = '\u{FFFD}';

/// Bytes that a character may have and still not be whole; some tokenizers show each of them.
const INCOMPLETE: usize = 3;

/// Tokens of a prompt that the first tokens after it are decoded with: enough to begin before a run of
/// characters in bytes that the prompt ends within, 16 in a row.
const CONTEXT: usize = 64;

/// Text of ids that come one at a time.
///
/// Characters are given whole, however many tokens they are cut into, and spaces between words are kept,
/// though tokenizers drop the first one of what they decode: joined, the pieces are what the ids add to the
/// text of the prompt. An id of no token is U+FFFD, as in [`Tokenizer::decode`]; like bytes that may become a
/// character it is given with what follows it.
///
/// ```text
/// window = given | pending             // given: decoded before, here for what comes after it
/// push:  pending text = text(window) without text(given)
///        piece = pending text, without what may become whole, without what was shown of it
///        given = pending               // where nothing may become whole
/// ```
#[derive(Debug, Clone)]
pub struct Stream {
    window: Vec<u32>,
    /// How many of the window's ids are given.
    given: usize,
    /// What was shown of the pending text.
    shown: String,
    /// Special tokens have their names in the text.
    special: bool,
}

impl Stream {
    /// A stream of what follows a prompt. Special tokens are nothing in the text, unless `special`.
    pub fn new(prompt: &[u32], special: bool) -> Self {
        let window = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        Self { given: window.len(), window, shown: String::new(), special }
    }

    /// The text that is whole with this id; often none, where a character has more bytes to come.
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

    /// What is left when no ids follow: a character that stays cut is U+FFFD.
    ///
    /// # Errors
    /// [`Error::Decode`].
    pub fn finish(self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let pending = self.pending(tokenizer)?;
        Ok(added(&self.shown, &pending).to_owned())
    }

    /// The text of pending ids.
    fn pending(&self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let decode = |ids: &[u32]| tokenizer.decode(ids, self.special);
        let (given, pending) = self.window.split_at(self.given);
        let (given, text) = (decode(given)?, decode(&self.window)?);
        let rest = text.strip_prefix(given.as_str());
        if let Some(rest) = rest.filter(|rest| !rest.contains(NO_TEXT)) {
            return Ok(rest.to_owned());
        }
        // A prompt that ends within a character, which is whole now.
        if rest.is_none()
            && given.ends_with(NO_TEXT)
            && let Some(rest) = text.strip_prefix(given.trim_end_matches(NO_TEXT))
        {
            return Ok(rest.to_owned());
        }
        // Some tokenizers show a run of bytes as none of its characters where one is broken.
        let alone = decode(pending)?;
        Ok(match rest {
            Some(rest) if alone.contains(NO_TEXT) => rest.to_owned(),
            _ => alone,
        })
    }
}

/// A text without what its end may become.
fn whole(text: &str) -> &str {
    let mut whole = text;
    for _ in 0..INCOMPLETE {
        whole = whole.strip_suffix(NO_TEXT).unwrap_or(whole);
    }
    whole
}

/// What `text` has beyond what was shown; where it takes that back, from there on.
fn added<'a>(shown: &str, text: &'a str) -> &'a str {
    let same = shown.chars().zip(text.chars()).take_while(|(a, b)| a == b);
    &text[same.map(|(c, _)| c.len_utf8()).sum()..]
}
