//! Tokens and settings in a folder's files next to its `tokenizer.json`, merged as in transformers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;

use crate::Error;
use crate::folder::json;
use crate::growth::check_tokens;

/// Standard names of special tokens, in the order in which new ones get ids. Other names ending in `_token` are specific
/// to a model.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Tokens of `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`.
#[derive(Default)]
pub(crate) struct FolderTokens {
    /// Tokens by their names in templates, such as `bos_token`, with a rank: new ones get ids in its order.
    pub(crate) named: BTreeMap<String, (usize, AddedToken)>,
    /// Tokens with an id, in id order; `tokenizer.json` may lack some.
    pub(crate) added: Vec<AddedToken>,
    /// Special tokens without a name.
    pub(crate) extra: Vec<AddedToken>,
    /// Prefix of texts in place of that in `tokenizer.json`.
    pub(crate) prepend: Option<PrependScheme>,
    /// True if a byte-level tokenizer begins texts with a space; none leaves it to `tokenizer.json`.
    pub(crate) prefix_space: Option<bool>,
    /// Special tokens in a text are encoded like other text.
    pub(crate) split_special: bool,
}

/// Keys of `tokenizer_config.json` that change how a text is encoded. transformers ignores others, such as
/// `add_bos_token`, next to a `tokenizer.json`.
#[derive(Deserialize)]
struct Settings {
    tokenizer_class: Option<String>,
    legacy: Option<bool>,
    add_prefix_space: Option<bool>,
    split_special_tokens: Option<bool>,
}

/// Key of `config.json` that decides if transformers uses the tokenizer's class.
#[derive(Deserialize)]
struct Model {
    model_type: Option<String>,
}

impl Settings {
    fn class(&self) -> Option<&str> {
        let class = self.tokenizer_class.as_deref()?;
        Some(class.strip_suffix("Fast").unwrap_or(class))
    }

    /// Returns `add_prefix_space` for the byte-level classes of transformers that use it.
    fn prefix_space(&self) -> Option<bool> {
        let byte_level = ["GPT2Tokenizer", "Qwen2Tokenizer"].contains(&self.class()?);
        self.add_prefix_space.filter(|_| byte_level)
    }

    /// Returns the prefix of texts by transformers' `LlamaTokenizer`, which ignores that of `tokenizer.json`.
    /// transformers does not use that class for Mistral, Phi-3 and Qwen2.
    fn prepend(&self, model: Option<Model>) -> Option<PrependScheme> {
        let llama = self.class()? == "LlamaTokenizer";
        let model = model.and_then(|model| model.model_type);
        let used =
            model.is_none_or(|model| !["mistral", "phi3", "qwen2"].contains(&model.as_str()));
        (llama && used).then_some(
            match (self.add_prefix_space.unwrap_or(true), self.legacy.unwrap_or(false)) {
                (false, _) => PrependScheme::Never,
                (true, true) => PrependScheme::Always,
                (true, false) => PrependScheme::First,
            },
        )
    }
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
    Named(Map<String, Value>),
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
        let settings = Settings::deserialize(Value::Object(config.clone())).map_err(bad)?;
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
                let special = contents(tokens.named().chain(&tokens.extra));
                added.extend(texts.into_iter().map(|(text, id)| {
                    let special = special.contains(text.as_str());
                    (id, AddedToken::from(text, special))
                }));
                tokens.name(&late).map_err(bad)?;
            }
        }
        tokens.added = added.into_values().collect();
        let named: BTreeSet<String> = tokens.named().map(|token| token.content.clone()).collect();
        for token in &mut tokens.added {
            token.special |= named.contains(&token.content);
        }
        tokens.prefix_space = settings.prefix_space();
        tokens.split_special = settings.split_special_tokens.unwrap_or(false);
        tokens.prepend = settings.prepend(json(&folder.join("config.json"))?);
        let all = tokens.named().chain(&tokens.added).chain(&tokens.extra);
        check_tokens(all.map(|token| (token.content.as_str(), token.lstrip || token.rstrip)))
            .map_err(|why| Error::Config { path: folder.to_owned(), why })?;
        Ok(tokens)
    }

    /// Returns the tokens with a name, by rank.
    fn named(&self) -> impl Iterator<Item = &AddedToken> {
        let mut named: Vec<_> = self.named.values().collect();
        named.sort_by_key(|(rank, _)| *rank);
        named.into_iter().map(|(_, token)| token)
    }

    /// Adds the tokens that a file names; later entries override earlier ones.
    fn name(&mut self, file: &Map<String, Value>) -> Result<(), serde_json::Error> {
        const EXTRA: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];
        let given = || file.iter().filter(|(_, value)| !value.is_null());
        for (key, value) in given() {
            let own = key.ends_with("_token") && (value.is_string() || value.is_object());
            if NAMES.contains(&key.as_str()) || own {
                self.insert(key, Token::deserialize(value)?);
            }
        }
        for (_, value) in given().filter(|(key, _)| EXTRA.contains(&key.as_str())) {
            match Extra::deserialize(value)? {
                Extra::Named(named) => {
                    for (name, token) in named {
                        self.insert(&name, Token::deserialize(token)?);
                    }
                }
                Extra::Unnamed(unnamed) => self.extra.extend(unnamed.into_iter().map(Token::token)),
            }
        }
        Ok(())
    }

    /// Adds a token with a name, or replaces it in its rank.
    fn insert(&mut self, name: &str, token: Token) {
        let standard = NAMES.iter().position(|own| *own == name);
        let new = standard.unwrap_or(NAMES.len() + self.named.len());
        let rank = self.named.get(name).map_or(new, |(rank, _)| *rank);
        self.named.insert(name.to_owned(), (rank, token.token()));
    }

    /// Returns the tokens to add to a tokenizer, in order: first those with an id, then others that it lacks.
    pub(crate) fn missing<'a>(
        &self,
        known: impl Iterator<Item = &'a AddedToken>,
    ) -> Vec<AddedToken> {
        let known = contents(known);
        let with_ids = contents(self.added.iter());
        let mut seen = BTreeSet::new();
        let others = self.named().chain(&self.extra).filter(|token| {
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
