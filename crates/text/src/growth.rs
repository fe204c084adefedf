//! Limits on the growth of a text in a `tokenizer.json`.
//!
//! The normalizer and the other parts are chains of stages. Each stage may replace one letter or token by many:
//! fourteen stages with a factor of ten exhaust memory. That would happen already on open, when the file's own tokens
//! are normalised. So strings must be short. Each stage is also tried before the file is opened, on a text with all
//! strings that the stages look for.

use std::borrow::Cow;
use std::{fmt, mem};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::{
    Decoder, DecoderWrapper, Encoding, NormalizedString, Normalizer, NormalizerWrapper,
    OffsetReferential, OffsetType, PostProcessor, PostProcessorWrapper, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper, Token,
};

use crate::panics::caught;

/// Most bytes of a string in these parts, and of a pattern. The longest pattern seen in published files has 600 bytes.
const MAX_STRING: usize = 256;
const MAX_PATTERN: usize = 16 << 10;

/// Most values in one of these parts.
const MAX_VALUES: usize = 4096;

/// Most bytes of the probe text, largest growth factor of a chain of stages, and most bytes of all stages together.
const MAX_PROBE: usize = 16 << 10;
const MAX_GROWTH: usize = 32;
const MAX_SEEN: usize = 32 << 20;

/// Most characters of a WordPiece word, whose time is quadratic in its length; published models have 100.
const MAX_WORD: u64 = 1 << 10;

/// Most bytes of a piece of a Unigram model. The time for a text is its length times the number of pieces that begin at
/// one place, so at most times this. SentencePiece trains pieces of 16 characters unless told otherwise.
const MAX_PIECE: usize = 256;

/// Number of tokens for the trial of a post-processor.
const TOKENS: u32 = 256;

/// Most bytes of an added token, and largest sum of their squares. The sum measures the time to build the automaton
/// that finds the tokens in a text. A token of 1 KiB takes some 10 ms. A vocabulary of 200 thousand has half of the
/// sum.
const MAX_TOKEN: usize = 1 << 10;
const MAX_SQUARES: usize = 1 << 27;

/// Parts of a `tokenizer.json`, without the vocabulary.
#[derive(Deserialize)]
pub(crate) struct Parts {
    #[serde(default)]
    added_tokens: Value,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    model: Option<Model>,
}

/// Affixes that a model adds to pieces of a word, and the length limit of words that it splits.
#[derive(Deserialize)]
struct Model {
    byte_fallback: Option<bool>,
    continuing_subword_prefix: Option<Value>,
    end_of_word_suffix: Option<Value>,
    max_input_chars_per_word: Option<Value>,
    #[serde(default, rename = "vocab")]
    pieces: Pieces,
}

/// Largest number of bytes of a piece in the vocabulary of a Unigram model; 0 for the vocabularies of other models.
#[derive(Default)]
struct Pieces(usize);

impl<'de> Deserialize<'de> for Pieces {
    fn deserialize<D: Deserializer<'de>>(vocab: D) -> Result<Self, D::Error> {
        vocab.deserialize_any(Self(0))
    }
}

impl<'de> Visitor<'de> for Pieces {
    type Value = Self;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a vocabulary")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Self, A::Error> {
        while let Some((piece, _)) = list.next_element::<(Cow<'_, str>, IgnoredAny)>()? {
            self.0 = self.0.max(piece.len());
        }
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }
}

impl Parts {
    /// Returns true for a SentencePiece model with bytes, such as Llama 2's, but not for a byte-level one.
    pub(crate) fn has_byte_fallback(&self) -> bool {
        self.model.as_ref().and_then(|model| model.byte_fallback).unwrap_or(false)
    }

    /// Refuses parts that multiply a text. Invalid parts pass; the `tokenizers` crate reports them.
    pub(crate) fn check(&self, probe: &str) -> Result<(), String> {
        let added = self.added_tokens.as_array().into_iter().flatten();
        check_tokens(added.filter_map(|token| {
            let strips =
                ["lstrip", "rstrip"].iter().any(|own| token.get(own) == Some(&true.into()));
            Some((token.get("content")?.as_str()?, strips))
        }))?;
        self.model.as_ref().map_or(Ok(()), Model::check)?;
        let parts = [&self.normalizer, &self.pre_tokenizer, &self.post_processor, &self.decoder];
        let names = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];
        for (part, name) in parts.into_iter().zip(names) {
            let Some(part) = part else { continue };
            let mut strings = Vec::new();
            let mut values = 0;
            measure(part, "", &mut values, &mut strings)
                .map_err(|why| format!("its {name} {why}"))?;
            let mut text = probe.to_owned();
            text.extend((' '..='~').chain(strings.iter().flat_map(|string| string.chars())));
            text.truncate(text.floor_char_boundary(MAX_PROBE));
            let tried = match name {
                "normalizer" => normalize(part, text),
                "pre_tokenizer" => pre_tokenize(part, text),
                "post_processor" => post_process(part),
                _ => decode(part, &text),
            };
            tried.map_err(|why| format!("its {name} {why}"))?;
        }
        Ok(())
    }
}

fn normalize(part: &Value, text: String) -> Result<(), String> {
    let mut text = NormalizedString::from(text);
    grow(part, "normalizers", text.get().len(), |stage| {
        let stage: NormalizerWrapper = stage?;
        stage.normalize(&mut text).ok()?;
        Some(text.get().len())
    })
}

fn pre_tokenize(part: &Value, text: String) -> Result<(), String> {
    let length = text.len();
    let mut text = PreTokenizedString::from(text);
    grow(part, "pretokenizers", length, |stage| {
        let stage: PreTokenizerWrapper = stage?;
        stage.pre_tokenize(&mut text).ok()?;
        let pieces = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
        Some(pieces.iter().map(|(piece, ..)| piece.len()).sum())
    })
}

fn post_process(part: &Value) -> Result<(), String> {
    let tokens = (0..TOKENS).map(|id| Token::new(id, "x".to_owned(), (0, 1)));
    let mut encodings = vec![Encoding::from_tokens(tokens.collect(), 0)];
    grow(part, "processors", TOKENS as usize, |stage| {
        let stage: PostProcessorWrapper = stage?;
        encodings = stage.process_encodings(mem::take(&mut encodings), true).ok()?;
        Some(encodings.iter().map(Encoding::len).sum())
    })
}

fn decode(part: &Value, text: &str) -> Result<(), String> {
    let mut tokens: Vec<_> = text.chars().map(String::from).collect();
    grow(part, "decoders", text.len(), |stage| {
        let stage: DecoderWrapper = stage?;
        tokens = stage.decode_chain(mem::take(&mut tokens)).ok()?;
        Some(tokens.iter().map(String::len).sum())
    })
}

impl Model {
    fn check(&self) -> Result<(), String> {
        let around = [&self.continuing_subword_prefix, &self.end_of_word_suffix];
        for around in around.into_iter().flatten() {
            let (mut values, mut strings) = (0, Vec::new());
            measure(around, "", &mut values, &mut strings)
                .map_err(|why| format!("its model {why}"))?;
        }
        if self.pieces.0 > MAX_PIECE {
            return Err(format!(
                "its model has a piece of {} bytes, expected at most {MAX_PIECE}",
                self.pieces.0
            ));
        }
        match self.max_input_chars_per_word.as_ref().and_then(Value::as_u64) {
            Some(chars) if chars > MAX_WORD => Err(format!(
                "its model reads words of {chars} characters, expected at most {MAX_WORD}"
            )),
            _ => Ok(()),
        }
    }
}

/// Refuses tokens that would take long to add, or to find in a text. Each comes with whether it takes the spaces
/// around it.
pub(crate) fn check_tokens<'a>(
    tokens: impl Iterator<Item = (&'a str, bool)>,
) -> Result<(), String> {
    let mut squares = 0;
    for (token, strips) in tokens {
        // The time for a text of spaces would be quadratic.
        if strips && token.trim().is_empty() {
            return Err("an added token of spaces has lstrip or rstrip".to_owned());
        }
        let bytes = token.len();
        if bytes > MAX_TOKEN {
            return Err(format!("a token has {bytes} bytes, expected at most {MAX_TOKEN}"));
        }
        squares += bytes * bytes;
    }
    match squares <= MAX_SQUARES {
        true => Ok(()),
        false => Err("its added tokens are too many or too long".to_owned()),
    }
}

/// Counts values, and collects the strings that stages search for or insert.
fn measure<'a>(
    part: &'a Value,
    key: &str,
    values: &mut usize,
    strings: &mut Vec<&'a str>,
) -> Result<(), String> {
    *values += 1;
    if *values > MAX_VALUES {
        return Err(format!("has more than {MAX_VALUES} values"));
    }
    match part {
        Value::Array(parts) => {
            parts.iter().try_for_each(|part| measure(part, key, values, strings))
        }
        Value::Object(parts) => {
            parts.iter().try_for_each(|(key, part)| measure(part, key, values, strings))
        }
        // A table; its size is limited by that of the file.
        Value::String(_) if key == "precompiled_charsmap" => Ok(()),
        Value::String(string) => {
            let max = if key == "Regex" { MAX_PATTERN } else { MAX_STRING };
            if string.len() > max {
                return Err(format!(
                    "has a string of {} bytes, expected at most {max}",
                    string.len()
                ));
            }
            strings.push(string);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Runs the stages in order until one is invalid or fails; each returns the size of its output. Refuses large growth.
fn grow<T: for<'a> Deserialize<'a>>(
    part: &Value,
    list: &str,
    length: usize,
    mut run: impl FnMut(Option<T>) -> Option<usize>,
) -> Result<(), String> {
    let mut stages = Vec::new();
    flatten(part, list, &mut stages);
    let mut seen = 0;
    for stage in stages {
        let left = caught(|| run(serde_json::from_value(stage.clone()).ok()));
        let Ok(Some(left)) = left else { return Ok(()) };
        seen += left;
        if left > length * MAX_GROWTH || seen > MAX_SEEN {
            return Err(format!(
                "makes {left} bytes or tokens of {length}, expected at most {MAX_GROWTH} times as many"
            ));
        }
    }
    Ok(())
}

/// Collects the stages of a sequence, including nested sequences.
fn flatten<'a>(part: &'a Value, list: &str, stages: &mut Vec<&'a Value>) {
    match part.get(list).and_then(Value::as_array) {
        Some(parts) => parts.iter().for_each(|part| flatten(part, list, stages)),
        None => stages.push(part),
    }
}
