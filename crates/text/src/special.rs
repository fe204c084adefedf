//! Tokens in a folder's files next to its `tokenizer.json`, merged as in transformers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::Error;
use crate::folder::json;
use crate::growth::check_tokens;

/// Standard names of special tokens; other names ending in `_token` are specific to a model.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Tokens of `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`.
#[derive(Default)]
pub(crate) struct FolderTokens {
    /// Tokens by their names in templates, such as `bos_token`.
    pub(crate) named: BTreeMap<String, AddedToken>,
    /// Tokens with an id, in id order; `tokenizer.json` may lack some.
    pub(crate) added: Vec<AddedToken>,
    /// Special tokens without a name.
    pub(crate) extra: Vec<AddedToken>,
}

/// A token, as text or as an object with all fields.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object(Fields),
}

#[derive(Deserialize)]
struct Fields {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Extra {
    Named(BTreeMap<String, Token>),
    Unnamed(Vec<Token>),
}

impl FolderTokens {
    /// Reads the files of a folder; missing ones count as empty.
    pub(crate) fn open(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("tokenizer_config.json");
        let config: Map<String, Value> = json(&path)?.unwrap_or_default();
        let mut tokens = Self::default();
        let bad =
            |why: serde_json::Error| Error::Config { path: path.clone(), why: why.to_string() };
        tokens.name(&config).map_err(bad)?;
        let mut added: BTreeMap<u32, AddedToken> = BTreeMap::new();
        match config.get("added_tokens_decoder").filter(|added| !added.is_null()) {
            Some(decoder) => {
                let decoder: BTreeMap<u32, Fields> =
                    Deserialize::deserialize(decoder).map_err(bad)?;
                added.extend(decoder.into_iter().map(|(id, fields)| (id, fields.token(false))));
            }
            // Files from before 2023; in newer folders they only repeat the config.
            None => {
                let path = folder.join("special_tokens_map.json");
                let mut map: Map<String, Value> = json(&path)?.unwrap_or_default();
                // transformers reads these after added_tokens.json, so they do not make its tokens special.
                let late = map.remove_entry("additional_special_tokens").into_iter().collect();
                let bad = |why: serde_json::Error| Error::Config {
                    path: path.clone(),
                    why: why.to_string(),
                };
                tokens.name(&map).map_err(bad)?;
                let texts: BTreeMap<String, u32> =
                    json(&folder.join("added_tokens.json"))?.unwrap_or_default();
                let special = contents(tokens.named.values().chain(&tokens.extra));
                added.extend(texts.into_iter().map(|(text, id)| {
                    let special = special.contains(text.as_str());
                    (id, AddedToken::from(text, special))
                }));
                tokens.name(&late).map_err(bad)?;
            }
        }
        tokens.added = added.into_values().collect();
        let named = contents(tokens.named.values());
        for token in &mut tokens.added {
            token.special |= named.contains(token.content.as_str());
        }
        let all = tokens.named.values().chain(&tokens.added).chain(&tokens.extra);
        check_tokens(all.map(|token| token.content.as_str()))
            .map_err(|why| Error::Config { path: folder.to_owned(), why })?;
        Ok(tokens)
    }

    /// Adds the tokens that a file names; later entries override earlier ones.
    fn name(&mut self, file: &Map<String, Value>) -> Result<(), serde_json::Error> {
        for (key, value) in file.iter().filter(|(_, value)| !value.is_null()) {
            let own = key.ends_with("_token") && (value.is_string() || value.is_object());
            if NAMES.contains(&key.as_str()) || own {
                self.named.insert(key.clone(), Token::deserialize(value)?.token());
            } else if ["extra_special_tokens", "additional_special_tokens"].contains(&key.as_str())
            {
                match Extra::deserialize(value)? {
                    Extra::Named(named) => {
                        self.named
                            .extend(named.into_iter().map(|(name, token)| (name, token.token())));
                    }
                    Extra::Unnamed(unnamed) => {
                        self.extra.extend(unnamed.into_iter().map(Token::token));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the tokens to add to a tokenizer, in order: first those with an id, then others that it lacks.
    pub(crate) fn missing<'a>(
        self,
        known: impl Iterator<Item = &'a AddedToken>,
    ) -> Vec<AddedToken> {
        let known = contents(known);
        let with_ids = contents(self.added.iter());
        let mut seen = BTreeSet::new();
        let others = self.named.values().chain(&self.extra).filter(|token| {
            let text = token.content.as_str();
            !known.contains(text) && !with_ids.contains(text) && seen.insert(text)
        });
        self.added.iter().chain(others).cloned().collect()
    }
}

fn contents<'a>(tokens: impl Iterator<Item = &'a AddedToken>) -> BTreeSet<&'a str> {
    tokens.map(|token| token.content.as_str()).collect()
}

impl Token {
    fn token(self) -> AddedToken {
        match self {
            Self::Text(text) => AddedToken::from(text, true),
            Self::Object(fields) => fields.token(true),
        }
    }
}

impl Fields {
    fn token(self, special: bool) -> AddedToken {
        let Self { content, single_word, lstrip, rstrip, normalized, .. } = self;
        let special = special || self.special;
        let normalized = normalized.unwrap_or(!special);
        AddedToken { content, single_word, lstrip, rstrip, normalized, special }
    }
}
