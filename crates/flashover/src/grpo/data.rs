//! Prompts from a file of JSON lines.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use text::Message;

use super::GrpoError;
use crate::engine::ModelFolder;
use crate::fnv::Fnv1a;

/// A prompt, with what rewards need to know.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GrpoPrompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its text.
    pub text: String,
    /// Its line in a file, from 1.
    pub line: usize,
    /// Other fields of the line.
    pub fields: Map<String, Value>,
}

/// Fields that a reward command gets from a completion.
const RESERVED: [&str; 5] = ["id", "completion", "tokens", "truncated", "line"];

/// Prompts of a file: one JSON object a line, with `prompt` (a text) or `messages`, and other fields for rewards.
#[derive(Debug, Clone)]
pub struct Prompts {
    path: PathBuf,
    fingerprint: String,
    all: Vec<GrpoPrompt>,
}

impl Prompts {
    /// Reads a file, and encodes each prompt as the folder's model reads it.
    ///
    /// # Errors
    /// [`GrpoError::File`] for a file that cannot be read or is empty; [`GrpoError::Data`] for a line without a prompt.
    pub fn open(path: impl AsRef<Path>, folder: &ModelFolder) -> Result<Self, GrpoError> {
        let path = path.as_ref().to_owned();
        let fault = |line: usize, why: String| GrpoError::Data { path: path.clone(), line, why };
        let file = |why: String| GrpoError::File { path: path.clone(), why };
        let text = fs::read_to_string(&path).map_err(|why| file(why.to_string()))?;
        let mut hash = Fnv1a::new();
        text.bytes().for_each(|byte| hash.add(byte));
        let mut all = Vec::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let line_of = at + 1;
            let value: Value =
                serde_json::from_str(line).map_err(|why| fault(line_of, why.to_string()))?;
            let Value::Object(mut fields) = value else {
                return Err(fault(line_of, "expected an object".to_owned()));
            };
            if let Some(name) = RESERVED.iter().find(|name| fields.contains_key(**name)) {
                return Err(fault(line_of, format!("the field `{name}` is that of a completion")));
            }
            // Rewards see the messages, too.
            let encoded = match (fields.remove("prompt"), fields.get("messages")) {
                (Some(Value::String(text)), None) => {
                    folder.encode(&text).map(|tokens| (tokens, text))
                }
                (None, Some(messages)) => {
                    let messages: Vec<Message> = serde_json::from_value(messages.clone())
                        .map_err(|why| fault(line_of, why.to_string()))?;
                    let text = messages.last().map_or_else(String::new, |own| own.content.clone());
                    folder.encode_chat(&messages).map(|tokens| (tokens, text))
                }
                (Some(_), Some(_)) => {
                    return Err(fault(line_of, "it has both `prompt` and `messages`".to_owned()));
                }
                (Some(_), None) => {
                    return Err(fault(line_of, "`prompt` is no text".to_owned()));
                }
                (None, None) => {
                    return Err(fault(line_of, "expected `prompt` or `messages`".to_owned()));
                }
            };
            let (tokens, text) = encoded.map_err(|why| fault(line_of, why.to_string()))?;
            if tokens.is_empty() {
                return Err(fault(line_of, "the prompt has no tokens".to_owned()));
            }
            all.push(GrpoPrompt { tokens, text, line: line_of, fields });
        }
        if all.is_empty() {
            return Err(file("it has no prompts".to_owned()));
        }
        Ok(Self { path, fingerprint: format!("{:016x}", hash.value()), all })
    }

    /// Returns the prompts, in the order of the file.
    pub fn all(&self) -> &[GrpoPrompt] {
        &self.all
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a word that names the contents.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Returns the prompts of a batch: those of the file in turn, from the beginning after the end.
    pub fn batch(&self, number: u64, count: usize) -> Vec<GrpoPrompt> {
        let first = (number as usize).wrapping_mul(count);
        (0..count).map(|at| self.all[first.wrapping_add(at) % self.all.len()].clone()).collect()
    }
}
