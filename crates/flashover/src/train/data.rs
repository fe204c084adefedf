//! Examples from files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use models::Example;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::Value;
use text::{Message, Prompt};
use time::OffsetDateTime;

use crate::engine::{GenerateError, ModelFolder};

/// What is learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dataset {
    /// What passes, one after the other.
    pub examples: Vec<Example>,
    /// Of these so many were longer than the context, and are cut.
    pub cut: usize,
    /// So many had nothing to learn within the context, and are left out.
    pub left_out: usize,
    /// Number of examples whose prompt by itself ends in other tokens than in front of its completion.
    pub diverged: usize,
}

/// Why a file has no examples.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The file cannot be read, or is none.
    #[error("cannot read {}: {why}\nhint: a text, or a .jsonl with an example a line", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// As the system says.
        why: io::Error,
    },
    /// A table or a JSON document, where a text or one example a line was expected.
    #[error(
        "{} is no .jsonl\nhint: one example a line, as JSON, in a file whose name ends in .jsonl or .ndjson; \
         a text has another ending, such as .txt",
        .0.display()
    )]
    Format(PathBuf),
    /// A line that is no example.
    #[error(
        "{}: line {line} {why}\nhint: {{\"text\": ..}}, {{\"prompt\": .., \"completion\": ..}} or {{\"messages\": [..]}}",
        .path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it, such as "is no object".
        why: String,
    },
    /// No example has a token to learn within the context.
    #[error(
        "{} has nothing to learn within {context} positions\nhint: a longer context, or more text",
        .path.display()
    )]
    Nothing {
        /// The file.
        path: PathBuf,
        /// Positions that an example may have.
        context: usize,
    },
    /// A text or a chat that does not become tokens.
    #[error(transparent)]
    Encode(#[from] GenerateError),
}

/// A line of a `.jsonl`.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Line {
    Text { text: String },
    Pair { prompt: String, completion: String },
    Chat { messages: Vec<Turn> },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: String,
    content: String,
}

impl Line {
    /// Says what is wrong as JSON is, or names the fields that are there.
    fn read(line: &str) -> Result<Self, String> {
        let value: Value =
            serde_json::from_str(line).map_err(|why| format!("is no JSON: {why}"))?;
        let Value::Object(fields) = &value else { return Err("is no object".to_owned()) };
        let names: Vec<String> = fields.keys().cloned().collect();
        serde_json::from_value(value)
            .map_err(|_| format!("has fields ({}) or values that are no example", names.join(", ")))
    }
}

/// Extensions of files with one example a line.
const LINES: [&str; 2] = ["jsonl", "ndjson"];
/// Extensions of files with examples that are not read, and would make no sense as a text.
const REFUSED: [&str; 5] = ["json", "csv", "tsv", "parquet", "arrow"];

impl Dataset {
    /// Reads a file: a `.jsonl` or `.ndjson` has one example a line, of which a prompt, or all messages but the last, are
    /// read and not learned; a text has any other ending and is learned in pieces of `context` tokens.
    ///
    /// A line is encoded as a whole, and learned from its first token that differs from those of its prompt alone, as
    /// trl does. A text or a completion ends with the tokenizer's EOS, or generation_config's if it names none. BOS and
    /// EOS that the line already has are not repeated.
    ///
    /// # Errors
    /// [`DatasetError`].
    pub fn open(
        file: impl AsRef<Path>,
        folder: &ModelFolder,
        context: usize,
    ) -> Result<Self, DatasetError> {
        let path = file.as_ref();
        let read = |why| DatasetError::Read { path: path.to_owned(), why };
        // What does not end is never a file.
        if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
            return Err(read(io::Error::other("it is no file")));
        }
        let is = |names: &[&str]| {
            let own = path.extension().unwrap_or_default();
            names.iter().any(|name| own.eq_ignore_ascii_case(name))
        };
        if is(&REFUSED) && path.exists() {
            return Err(DatasetError::Format(path.to_owned()));
        }
        let text = fs::read_to_string(path).map_err(read)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let mut all = Self { examples: Vec::new(), cut: 0, left_out: 0, diverged: 0 };
        let encoder = Encoder::new(folder)?;
        if is(&LINES) {
            for (index, line) in
                text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty())
            {
                let bad = |why: String| DatasetError::Line {
                    path: path.to_owned(),
                    line: index + 1,
                    why,
                };
                let line = Line::read(line).map_err(bad)?;
                let (example, diverged) = line.example(&encoder)?.ok_or_else(|| {
                    bad("has messages whose template does not put the answer last".to_owned())
                })?;
                all.add(example, diverged, context);
            }
        } else {
            let tokens = encoder.whole(text)?;
            for piece in tokens.chunks(context.max(1)) {
                all.add(Example { tokens: piece.to_vec(), from: 0 }, false, context);
            }
        }
        match all.examples.is_empty() {
            true => Err(DatasetError::Nothing { path: path.to_owned(), context }),
            false => Ok(all),
        }
    }

    fn add(&mut self, mut example: Example, diverged: bool, context: usize) {
        let long = example.tokens.len() > context;
        example.tokens.truncate(context);
        example.tokens.shrink_to_fit();
        if example.learned() == 0 {
            self.left_out += 1;
            return;
        }
        self.cut += usize::from(long);
        self.diverged += usize::from(diverged);
        self.examples.push(example);
    }

    /// Returns the micro-batches of a step, made one at a time. Each epoch has all examples once, in an order of its own.
    pub fn micro_batches(
        &self,
        step: usize,
        batch: usize,
        accumulate: usize,
        seed: u64,
    ) -> impl Iterator<Item = Vec<&Example>> + Clone {
        let all = self.examples.len();
        // Three numbers of 32 bits are past 64.
        let begin = step as u128 * batch as u128 * accumulate as u128;
        let (mut epoch, mut at) = ((begin / all as u128) as u64, (begin % all as u128) as usize);
        let mut order = shuffled(all, seed, epoch);
        let mut next = move || {
            if at == all {
                (epoch, at) = (epoch + 1, 0);
                order = shuffled(all, seed, epoch);
            }
            at += 1;
            &self.examples[order[at - 1]]
        };
        (0..accumulate).map(move |_| (0..batch).map(|_| next()).collect())
    }
}

/// 0 to `len`, by Fisher and Yates.
fn shuffled(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(epoch);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        // As even as 64 bits over the count are.
        order.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
    }
    order
}

impl Line {
    /// Returns an example, and whether its prompt diverges. None for messages that do not end with an answer.
    fn example(self, encoder: &Encoder) -> Result<Option<(Example, bool)>, GenerateError> {
        Ok(Some(match self {
            Self::Text { text } => (Example { tokens: encoder.ended(&text)?, from: 0 }, false),
            Self::Pair { prompt, completion } => {
                let whole = encoder.ended(&format!("{prompt}{completion}"))?;
                after(&encoder.begun(&prompt)?, whole)
            }
            Self::Chat { messages } => {
                let messages: Vec<Message> =
                    messages.iter().map(|own| Message::new(&own.role, &own.content)).collect();
                let Some((answer, asked)) = messages.split_last() else { return Ok(None) };
                let folder = encoder.folder;
                // One time for both, which may show it.
                let now = Some(OffsetDateTime::now_utc());
                let asked = folder.render(&Prompt { now, ..Prompt::of(asked) })?;
                let whole = Prompt { add_generation_prompt: false, now, ..Prompt::of(&messages) };
                let whole = folder.render(&whole)?;
                let answers = answer.role == "assistant" || whole.starts_with(&asked);
                let (asked, whole) = (folder.encode_more(&asked)?, folder.encode_more(&whole)?);
                let (example, diverged) = after(&asked, whole);
                if !answers || (diverged && example.from == example.tokens.len()) {
                    return Ok(None);
                }
                (example, diverged)
            }
        }))
    }
}

/// Returns what follows a prompt as an example, and whether the whole has other tokens at the end of the prompt.
fn after(prompt: &[u32], tokens: Vec<u32>) -> (Example, bool) {
    let from = prompt.iter().zip(&tokens).take_while(|(own, other)| own == other).count();
    (Example { tokens, from }, from < prompt.len())
}

/// Encoder of training texts.
struct Encoder<'a> {
    folder: &'a ModelFolder,
    /// Tokens that the tokenizer puts in front of a text.
    prefix: Vec<u32>,
    /// Tokens that it puts after one.
    suffix: Vec<u32>,
    /// Last token of a text or a completion.
    eos: Option<u32>,
}

impl<'a> Encoder<'a> {
    fn new(folder: &'a ModelFolder) -> Result<Self, GenerateError> {
        const PROBE: &str = "Hello";
        // A tokenizer may lack these letters; what it puts around nothing then counts as the prefix.
        let plain = folder.encode_more(PROBE).unwrap_or_default();
        let mut prefix = folder.encode(if plain.is_empty() { "" } else { PROBE })?;
        let begin = prefix.windows(plain.len().max(1)).position(|own| own == plain);
        let suffix = match begin {
            Some(begin) => {
                let suffix = prefix.split_off(begin + plain.len());
                prefix.truncate(begin);
                suffix
            }
            None => Vec::new(),
        };
        Ok(Self { folder, prefix, suffix, eos: folder.eos()? })
    }

    /// Encodes a text that goes on, with the prefix unless the text begins with it.
    fn begun(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        let mut tokens = self.folder.encode(text)?;
        tokens.truncate(tokens.len().saturating_sub(self.suffix.len()));
        let prefix = self.prefix.len();
        if tokens.len() > 2 * prefix && tokens[prefix..].starts_with(&self.prefix) {
            tokens.drain(..prefix);
        }
        Ok(tokens)
    }

    /// Encodes a text with prefix and suffix, unless it has them.
    fn whole(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        Ok(self.closed(self.begun(text)?))
    }

    fn closed(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        if !tokens.ends_with(&self.suffix) {
            tokens.extend(&self.suffix);
        }
        tokens
    }

    /// Encodes a text that ends with EOS, unless the text has it.
    fn ended(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        let mut tokens = self.begun(text)?;
        let own = tokens.get(self.prefix.len()..).unwrap_or_default();
        if own.last() != self.eos.as_ref() {
            tokens.extend(self.eos);
        }
        Ok(self.closed(tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_has_every_example_once() {
        let examples: Vec<Example> =
            (0..10).map(|id| Example { tokens: vec![id, id], from: 0 }).collect();
        let data = Dataset { examples, cut: 0, left_out: 0, diverged: 0 };
        let ids = |step| -> Vec<u32> {
            let batches: Vec<_> = data.micro_batches(step, 2, 3, 7).collect();
            assert!(batches.len() == 3 && batches.iter().all(|batch| batch.len() == 2));
            batches.iter().flatten().map(|example| example.tokens[0]).collect()
        };
        let all: Vec<u32> = (0..5).flat_map(ids).collect();
        for epoch in all.chunks(10) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert!(all[..10] != all[10..20], "{all:?}");
        assert_eq!(ids(1), ids(1));
    }

    #[test]
    fn a_step_of_many_micro_batches_is_made_as_it_goes() {
        let examples = (0..10).map(|id| Example { tokens: vec![id, id], from: 0 }).collect();
        let data = Dataset { examples, cut: 0, left_out: 0, diverged: 0 };
        let most = u32::MAX as usize;
        let mut batches = data.micro_batches(most, 4, most, 7);
        assert!(batches.next().is_some_and(|batch| batch.len() == 4));
        assert_eq!(batches.size_hint().0, most - 1);
    }
}
