use std::collections::BTreeMap;
use std::path::Path;

use crate::Error;

/// A `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Ids from here on are no tokens of the model.
    vocab: usize,
}

impl Tokenizer {
    /// Opens the `tokenizer.json` of a folder, or a file.
    ///
    /// What such a file says about cutting and padding is of its training and not applied.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Tokenizer`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let bytes = std::fs::read(&path).map_err(|why| Error::Read { path: path.clone(), why })?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|why| Error::Tokenizer { path: path.clone(), why: why.to_string() })?;
        inner
            .with_padding(None)
            .with_truncation(None)
            .map_err(|why| Error::Tokenizer { path, why: why.to_string() })?;
        Ok(Self { inner, vocab: usize::MAX })
    }

    /// Binds it to a model of `vocab` tokens.
    ///
    /// A model may have more, because vocabularies are padded, but not twice as many. Tokens that were added
    /// to the tokenizer beyond the model's are refused where a text has them.
    ///
    /// # Errors
    /// [`Error::Vocab`] for a tokenizer of another model.
    pub fn for_vocab(self, vocab: usize) -> Result<Self, Error> {
        let tokens = self.tokens();
        let own = self.inner.get_vocab(false);
        let largest = own.values().copied().max().unwrap_or_default();
        if largest as usize >= vocab || tokens.saturating_mul(2) < vocab {
            return Err(Error::Vocab { tokens, largest, vocab });
        }
        Ok(Self { vocab, ..self })
    }

    /// How many tokens there are, those added included.
    pub fn tokens(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The ids of a text. `special` adds what the tokenizer puts around one, such as a first token; a prompt
    /// from a chat template has these already.
    ///
    /// # Errors
    /// [`Error::Encode`]; [`Error::OutsideVocab`] for a token that the model does not have.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, special);
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

    /// The text of ids; bytes that are no UTF-8 become U+FFFD, ids of no token nothing. `special` keeps special
    /// tokens as their names.
    ///
    /// # Errors
    /// [`Error::Decode`].
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String, Error> {
        let text = self.inner.decode(ids, !special);
        text.map_err(|why| Error::Decode { ids: ids.to_vec(), why: why.to_string() })
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
