use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::normalizers::{NormalizerWrapper, Replace};
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{Decoder, PreTokenizerWrapper};

use crate::Error;
use crate::folder::check;
use crate::growth::Parts;
use crate::panics::caught;
use crate::special::FolderTokens;

/// Text that every tokenizer must encode and decode when it is opened: both cases, digits, spaces, a letter
/// that normalizers decompose, and characters of three and four bytes.
const PROBE: &str = "Hello, world! 123\n  \u{e9} \u{65e5} \u{1f980}";

/// Text of an id without a token: the replacement character.
const NO_TOKEN: &str = "\u{FFFD}";

/// Sets the prefix "▁" of texts, as transformers' `LlamaTokenizer` does.
fn set_prefix(
    inner: &mut tokenizers::Tokenizer,
    prepend: PrependScheme,
) -> Result<(), tokenizers::Error> {
    let replace = Replace::new("▁", " ")?;
    let mut decoders = vec![replace.into(), ByteFallback::new().into(), Fuse::new().into()];
    if prepend != PrependScheme::Never {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    inner.with_normalizer(None::<NormalizerWrapper>);
    inner.with_pre_tokenizer(Some(Metaspace::new('▁', prepend, false)));
    inner.with_decoder(Some(Sequence::new(decoders)));
    Ok(())
}

/// Sets whether byte-level parts of a pre-tokenizer begin texts with a space.
fn set_prefix_space(part: &mut PreTokenizerWrapper, prefix: bool) {
    match part {
        PreTokenizerWrapper::ByteLevel(own) => own.add_prefix_space = prefix,
        PreTokenizerWrapper::Sequence(all) => {
            all.as_mut().iter_mut().for_each(|own| set_prefix_space(own, prefix));
        }
        _ => {}
    }
}

/// A tokenizer from a `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Vocabulary size of the model; larger ids are not tokens of the model.
    vocab: usize,
}

impl Tokenizer {
    /// Opens a file, or the `tokenizer.json` of a folder with the tokens that its other files add.
    ///
    /// Encodes and decodes a short text, so that a file that panics on it is refused here. Truncation and padding in
    /// the file are ignored, because they belong to training.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Tokenizer`]; [`Error::Config`] for an invalid file that adds tokens.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let folder = path.is_dir().then_some(path);
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let read = check(&path).and_then(|()| std::fs::read(&path));
        let bytes = read.map_err(|why| Error::Read { path: path.clone(), why })?;
        let bad = |why: String| Error::Tokenizer { path: path.clone(), why };
        // Errors for invalid or too deeply nested JSON contain the line.
        let parts: Parts = serde_json::from_slice(&bytes).map_err(|why| bad(why.to_string()))?;
        parts.check(PROBE).map_err(bad)?;
        let mut inner = caught(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(bad)?
            .map_err(|why| bad(why.to_string()))?;
        inner.with_padding(None).with_truncation(None).map_err(|why| bad(why.to_string()))?;
        if let Some(folder) = folder {
            let added = inner.get_added_tokens_decoder();
            let tokens = FolderTokens::open(folder)?;
            let missing = tokens.missing(added.values());
            caught(|| inner.add_tokens(&missing)).map_err(bad)?;
            if let Some(prepend) = tokens.prepend.filter(|_| parts.has_byte_fallback()) {
                set_prefix(&mut inner, prepend).map_err(|why| bad(why.to_string()))?;
            }
            if let (Some(prefix), Some(part)) = (tokens.prefix_space, inner.get_pre_tokenizer()) {
                let mut part = part.clone();
                set_prefix_space(&mut part, prefix);
                inner.with_pre_tokenizer(Some(part));
            }
            inner.set_encode_special_tokens(tokens.split_special);
        }
        // Only panics are refused: a tokenizer may lack a token for a letter and return an error.
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

    /// Binds the tokenizer to a model with a vocabulary of `vocab` ids.
    ///
    /// A model may have more ids than the tokenizer, because vocabularies are padded: [`Tokenizer::missing`] lists
    /// them. Added tokens outside of the model's vocabulary are refused when a text contains them.
    ///
    /// # Errors
    /// [`Error::Vocab`] if other tokens are outside of the vocabulary, as in a tokenizer of another model.
    pub fn for_vocab(self, vocab: usize) -> Result<Self, Error> {
        let largest = self.inner.get_vocab(false).into_values().max().unwrap_or_default();
        if largest as usize >= vocab {
            return Err(Error::Vocab { tokens: self.tokens(), largest, vocab });
        }
        Ok(Self { vocab, ..self })
    }

    /// Opens the tokenizer of a model's folder and binds it to the vocabulary; `None` if the folder has none.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::open`] and [`Tokenizer::for_vocab`].
    pub fn of_model(folder: &Path, vocab: usize) -> Result<Option<Self>, Error> {
        match folder.join("tokenizer.json").symlink_metadata() {
            Ok(_) => Self::open(folder)?.for_vocab(vocab).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Returns the number of tokens, including added ones.
    pub fn tokens(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the largest token id in the model's vocabulary plus one. A model may also sample larger ids, or smaller
    /// ones without a token: check with [`Tokenizer::has`].
    pub fn ids(&self) -> usize {
        self.known().last().map_or(0, |id| *id as usize + 1)
    }

    /// Returns the model's ids without a token, in order; empty before [`Tokenizer::for_vocab`].
    pub fn missing(&self) -> Vec<u32> {
        let known = self.known();
        let ids = if self.vocab == usize::MAX { 0..0 } else { 0..self.vocab as u32 };
        ids.filter(|id| !known.contains(id)).collect()
    }

    /// Returns the ids of all tokens in the model's vocabulary, in order.
    fn known(&self) -> BTreeSet<u32> {
        let ids = self.inner.get_vocab(true).into_values();
        ids.filter(|id| (*id as usize) < self.vocab).collect()
    }

    /// Encodes a text to ids. `special` adds the tokenizer's special tokens around the text, such as a BOS
    /// token. A prompt from a chat template already has them.
    ///
    /// # Errors
    /// [`Error::Encode`]; [`Error::OutsideVocab`] for a token outside of the model's vocabulary.
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

    /// Decodes ids to text. Invalid UTF-8 and ids without a token become U+FFFD. A model with a padded vocabulary may
    /// sample such ids; the generation goes on and shows them. `special` keeps special tokens as their names.
    ///
    /// # Errors
    /// [`Error::Decode`].
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String, Error> {
        let bad = |why| Error::Decode { ids: ids.to_vec(), why };
        // Like `tokenizers::Tokenizer::decode`, which however drops ids without a token.
        let added = self.inner.get_added_vocabulary();
        let tokens = ids.iter().map(|id| self.token(*id).unwrap_or_else(|| NO_TOKEN.to_owned()));
        let tokens = tokens.filter(|token| special || !added.is_special_token(token)).collect();
        let text = caught(|| match self.inner.get_decoder() {
            Some(decoder) => decoder.decode(tokens),
            None => Ok(tokens.join(" ")),
        });
        text.map_err(bad)?.map_err(|why| bad(why.to_string()))
    }

    /// Returns the id of a token by its name, such as `</s>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns true if an id has a token.
    pub fn has(&self, id: u32) -> bool {
        self.token(id).is_some()
    }

    /// Returns the name of a token in the tokenizer's own spelling.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the ids of special tokens by name.
    pub fn special(&self) -> BTreeMap<String, u32> {
        let added = self.inner.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special);
        special.map(|(id, token)| (token.content, id)).collect()
    }
}
