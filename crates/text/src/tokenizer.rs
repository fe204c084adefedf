use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tokenizers::Decoder;

use crate::Error;
use crate::folder::ends;
use crate::growth::Parts;
use crate::panics::caught;
use crate::special::FolderTokens;

/// What a tokenizer must encode and decode before it is taken for one: cases, digits, spaces, a letter that
/// normalizers take apart, one of three bytes and one of four.
const PROBE: &str = "Hello, world! 123\n  \u{e9} \u{65e5} \u{1f980}";

/// What stands for an id of no token: the replacement character.
const NO_TOKEN: &str = "\u{FFFD}";

/// A `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Ids from here on are no tokens of the model.
    vocab: usize,
}

impl Tokenizer {
    /// Opens the `tokenizer.json` of a folder, with the tokens that other files of it add, or a file. A short text is encoded and decoded, so that a file which
    /// can do neither is refused here.
    ///
    /// What such a file says about cutting and padding is of its training and not applied.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Tokenizer`]; [`Error::Config`] for a file that adds tokens.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let folder = path.is_dir().then_some(path);
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let read = ends(&path).and_then(|()| std::fs::read(&path));
        let bytes = read.map_err(|why| Error::Read { path: path.clone(), why })?;
        let bad = |why: String| Error::Tokenizer { path: path.clone(), why };
        // What is no JSON, or nested too deep, is told by its line.
        let parts: Parts = serde_json::from_slice(&bytes).map_err(|why| bad(why.to_string()))?;
        parts.check(PROBE).map_err(bad)?;
        let mut inner = caught(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(bad)?
            .map_err(|why| bad(why.to_string()))?;
        inner.with_padding(None).with_truncation(None).map_err(|why| bad(why.to_string()))?;
        if let Some(folder) = folder {
            let added = inner.get_added_tokens_decoder();
            let missing = FolderTokens::open(folder)?.missing(added.values());
            caught(|| inner.add_tokens(&missing)).map_err(bad)?;
        }
        // Only what panics is refused: a tokenizer may have no token for a letter, and say so.
        for special in [false, true] {
            caught(|| {
                inner
                    .encode_fast(PROBE, special)
                    .and_then(|e| inner.decode(e.get_ids(), false))
                    .ok()
            })
            .map_err(|why| bad(format!("it fails on {PROBE:?}: {why}")))?;
        }
        Ok(Self { inner, vocab: usize::MAX })
    }

    /// Binds it to a model of `vocab` tokens.
    ///
    /// A model may have more, because vocabularies are padded: [`Tokenizer::missing`] lists them. Tokens that were
    /// added to the tokenizer beyond the model's are refused where a text has them.
    ///
    /// # Errors
    /// [`Error::Vocab`] for a tokenizer of another model, which has tokens past the model's.
    pub fn for_vocab(self, vocab: usize) -> Result<Self, Error> {
        let largest = self.inner.get_vocab(false).into_values().max().unwrap_or_default();
        if largest as usize >= vocab {
            return Err(Error::Vocab { tokens: self.tokens(), largest, vocab });
        }
        Ok(Self { vocab, ..self })
    }

    /// That of a model's folder, bound to its vocabulary; none where the folder has none.
    ///
    /// # Errors
    /// As [`Tokenizer::open`] and [`Tokenizer::for_vocab`].
    pub fn of_model(folder: &Path, vocab: usize) -> Result<Option<Self>, Error> {
        match folder.join("tokenizer.json").symlink_metadata() {
            Ok(_) => Self::open(folder)?.for_vocab(vocab).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// How many tokens there are, those added included.
    pub fn tokens(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Number of ids up to the largest of a token that the model has. A model may sample ids past these, and others
    /// of no token: [`Tokenizer::has`] tells them apart.
    pub fn ids(&self) -> usize {
        self.known().last().map_or(0, |id| *id as usize + 1)
    }

    /// Ids of the model that are no token, in order; none before [`Tokenizer::for_vocab`].
    pub fn missing(&self) -> Vec<u32> {
        let known = self.known();
        let ids = if self.vocab == usize::MAX { 0..0 } else { 0..self.vocab as u32 };
        ids.filter(|id| !known.contains(id)).collect()
    }

    /// Ids of tokens that the model has, in order.
    fn known(&self) -> BTreeSet<u32> {
        let ids = self.inner.get_vocab(true).into_values();
        ids.filter(|id| (*id as usize) < self.vocab).collect()
    }

    /// The ids of a text. `special` adds what the tokenizer puts around one, such as a first token; a prompt
    /// from a chat template has these already.
    ///
    /// # Errors
    /// [`Error::Encode`]; [`Error::OutsideVocab`] for a token that the model does not have.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoding = caught(|| self.inner.encode_fast(text, special)).map_err(Error::Encode)?;
        let encoding = encoding.map_err(|why| Error::Encode(why.to_string()))?;
        let ids = encoding.get_ids();
        match ids.iter().find(|id| **id as usize >= self.vocab) {
            Some(&id) => {
                let token = self.token(id).unwrap_or_default();
                Err(Error::OutsideVocab { token, id, vocab: self.vocab })
            }
            None => Ok(ids.to_vec()),
        }
    }

    /// The text of ids; bytes that are no UTF-8 become U+FFFD, and so does an id of no token, which a model may choose
    /// where its vocabulary is padded: a generation goes on, and shows that there was one. `special` keeps special
    /// tokens as their names.
    ///
    /// # Errors
    /// [`Error::Decode`].
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String, Error> {
        let bad = |why| Error::Decode { ids: ids.to_vec(), why };
        // As `tokenizers::Tokenizer::decode`, which leaves out what is no token.
        let added = self.inner.get_added_vocabulary();
        let tokens = ids.iter().map(|id| self.token(*id).unwrap_or_else(|| NO_TOKEN.to_owned()));
        let tokens = tokens.filter(|token| special || !added.is_special_token(token)).collect();
        let text = caught(|| match self.inner.get_decoder() {
            Some(decoder) => decoder.decode(tokens),
            None => Ok(tokens.join(" ")),
        });
        text.map_err(bad)?.map_err(|why| bad(why.to_string()))
    }

    /// The id of a token by its name, such as `</s>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether an id is one of its tokens.
    pub fn has(&self, id: u32) -> bool {
        self.token(id).is_some()
    }

    /// The name of a token, in the tokenizer's own spelling.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Special tokens by their names.
    pub fn special(&self) -> BTreeMap<String, u32> {
        let added = self.inner.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special);
        special.map(|(id, token)| (token.content, id)).collect()
    }
}
