//! Bounds of how a `tokenizer.json` may multiply a text.
//!
//! A normalizer or a decoder is a chain of stages, and each may put many letters in place of one: fourteen that make ten of
//! one take all memory, already where the file is opened, for it normalises its own tokens then. So strings are
//! short, and the stages are tried one by one, on a text of all that they look for, before the file is opened.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{Decoder, DecoderWrapper, NormalizedString, Normalizer, NormalizerWrapper};

use crate::panics::caught;

/// Bytes of a string in these parts. Of patterns the longest that were looked at have 600.
const MAX_STRING: usize = 256;
const MAX_PATTERN: usize = 16 << 10;

/// Values in one of these parts.
const MAX_VALUES: usize = 4096;

/// Bytes of the text that is tried, how often a chain of stages may multiply it, and bytes that all stages together see.
const MAX_PROBE: usize = 16 << 10;
const MAX_GROWTH: usize = 32;
const MAX_SEEN: usize = 32 << 20;

/// Parts of a `tokenizer.json` but its vocabulary.
#[derive(Deserialize)]
pub(crate) struct Parts {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
}

impl Parts {
    /// Refuses parts that multiply a text. What the `tokenizers` crate cannot read is left for it to tell.
    pub(crate) fn check(&self, probe: &str) -> Result<(), String> {
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
            match name {
                "normalizer" => {
                    let mut text = NormalizedString::from(text);
                    grow(part, "normalizers", text.get().len(), |stage| {
                        let stage: NormalizerWrapper = stage?;
                        stage.normalize(&mut text).ok()?;
                        Some(text.get().len())
                    })
                }
                "decoder" => {
                    let length = text.len();
                    let mut tokens: Vec<_> = text.chars().map(String::from).collect();
                    grow(part, "decoders", length, |stage| {
                        let stage: DecoderWrapper = stage?;
                        tokens = stage.decode_chain(std::mem::take(&mut tokens)).ok()?;
                        Some(tokens.iter().map(String::len).sum())
                    })
                }
                _ => Ok(()),
            }
            .map_err(|why| format!("its {name} {why}"))?;
        }
        Ok(())
    }
}

/// Counts values, and collects what the stages look for and put there.
fn measure<'a>(
    part: &'a Value,
    key: &str,
    values: &mut usize,
    strings: &mut Vec<&'a str>,
) -> Result<(), String> {
    *values += 1;
    if *values > MAX_VALUES {
        return Err(format!("has over {MAX_VALUES} values"));
    }
    match part {
        Value::Array(parts) => {
            parts.iter().try_for_each(|part| measure(part, key, values, strings))
        }
        Value::Object(parts) => {
            parts.iter().try_for_each(|(key, part)| measure(part, key, values, strings))
        }
        // A table, whose size is that of the file.
        Value::String(_) if key == "precompiled_charsmap" => Ok(()),
        Value::String(string) => {
            let most = if key == "Regex" { MAX_PATTERN } else { MAX_STRING };
            if string.len() > most {
                return Err(format!(
                    "has a string of {} bytes, expected at most {most}",
                    string.len()
                ));
            }
            strings.push(string);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Runs stage after stage, each of which returns the bytes that it leaves, until one cannot be read or fails.
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
                "makes {left} bytes of {length}, expected at most {MAX_GROWTH} times as many"
            ));
        }
    }
    Ok(())
}

/// The stages of a sequence, of those within it too.
fn flatten<'a>(part: &'a Value, list: &str, stages: &mut Vec<&'a Value>) {
    match part.get(list).and_then(Value::as_array) {
        Some(parts) => parts.iter().for_each(|part| flatten(part, list, stages)),
        None => stages.push(part),
    }
}
