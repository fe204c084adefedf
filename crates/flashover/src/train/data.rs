//! Examples from files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use models::Example;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Map, Value};
use text::{Message, Prompt};
use time::OffsetDateTime;

use crate::engine::{GenerateError, ModelFolder};

/// Examples to train on, as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dataset {
    /// Examples in the order of the file.
    pub examples: Vec<Example>,
    /// Number of examples that were longer than the context, and are cut to it.
    pub cut: usize,
    /// Number of examples that have no target token within the context, and are dropped.
    pub left_out: usize,
    /// Number of examples whose prompt by itself ends in other tokens than in front of its completion.
    pub diverged: usize,
}

/// The reason that a file has no examples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    /// The file cannot be read.
    #[error("cannot read {}: {why}\nhint: {}", .path.display(), readable(.why))]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        why: io::Error,
    },
    /// The file is a table or a JSON document.
    #[error(
        "expected a text or a .jsonl, got {}\nhint: write one JSON object per line into a file whose name ends in .jsonl",
        .0.display()
    )]
    Format(PathBuf),
    /// A line is not an example.
    #[error(
        "{}: line {line}: {why}\nhint: write {{\"text\": ..}}, {{\"prompt\": .., \"completion\": ..}} or {{\"messages\": \
         [..]}}",
        .path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The problem, such as "expected a JSON object".
        why: String,
    },
    /// No example has a target token within the context.
    #[error(
        "no example of {} has a target token within {context} tokens\nhint: use a longer context (--context) or more text",
        .path.display()
    )]
    Nothing {
        /// The file.
        path: PathBuf,
        /// Maximum number of tokens of an example.
        context: usize,
    },
    /// A text or a chat cannot be encoded.
    #[error(transparent)]
    Encode(#[from] GenerateError),
}

/// Returns a hint for a file that cannot be read.
fn readable(why: &io::Error) -> &'static str {
    match why.kind() {
        io::ErrorKind::Unsupported => "fetch the file with `git lfs pull`",
        io::ErrorKind::InvalidData => "use a text or a .jsonl in UTF-8",
        _ => "use a text, or a .jsonl with one example per line",
    }
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
    /// Parses a line. The error is the problem of the JSON, or names the fields that are there.
    fn read(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|why| {
            let text = why.to_string();
            // serde counts lines within this one.
            let text = text.split(" at line ").next().unwrap_or(&text);
            format!("not JSON: {text}, at character {}", why.column())
        })?;
        let Value::Object(fields) = &value else { return Err("expected a JSON object".to_owned()) };
        let mut names: Vec<&str> = fields.keys().map(String::as_str).collect();
        names.sort_unstable();
        let wrong = match names[..] {
            ["messages"] => {
                "`messages` is not a list of objects with the strings `role` and `content` alone"
                    .to_owned()
            }
            ["text"] | ["completion", "prompt"] => {
                let other = names.iter().find(|name| !fields[**name].is_string());
                format!("`{}` is not a string", other.unwrap_or(&names[0]))
            }
            _ => format!("unexpected fields ({})", text::quoted(&names.join(", "))),
        };
        serde_json::from_value(value).map_err(|_| wrong)
    }
}

/// Extensions of files with one example per line.
const LINES: [&str; 4] = ["jsonl", "jsonlines", "jl", "ndjson"];
/// Extensions of files whose examples are not read, and that make no sense as a text.
const REFUSED: [&str; 6] = ["json", "csv", "tsv", "parquet", "arrow", "xlsx"];

/// Returns true for white space, and for the mark at the start of some files.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || c == '\u{feff}'
}

impl Dataset {
    /// Reads a file. A `.jsonl` (or `.ndjson`, `.jsonlines`, `.jl`) has one example per line: the loss covers only
    /// the completion or the last message. A file with any other ending is plain text, split into chunks of `context`
    /// tokens.
    ///
    /// A line is encoded as a whole. Its target tokens begin with the first token that differs from those of its prompt
    /// alone, as in trl. A text or a completion ends with the tokenizer's EOS, or generation_config's if it names none.
    /// BOS and EOS that the line already has are not repeated.
    ///
    /// Logs a warning for a text that looks like JSON lines.
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
        let is = |names: &[&str]| {
            let own = path.extension().unwrap_or_default();
            names.iter().any(|name| own.eq_ignore_ascii_case(name))
        };
        checkpoint::ends(path).map_err(read)?;
        if is(&REFUSED) {
            return Err(DatasetError::Format(path.to_owned()));
        }
        let text = fs::read_to_string(path).map_err(read)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let mut all = Self { examples: Vec::new(), cut: 0, left_out: 0, diverged: 0 };
        let encoder = Encoder::new(folder)?;
        let mut lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim_matches(is_blank).is_empty())
            .peekable();
        if is(&LINES) {
            for (index, line) in lines {
                let bad = |why: String| DatasetError::Line {
                    path: path.to_owned(),
                    line: index + 1,
                    why,
                };
                // Files that were appended to another begin with a mark each.
                let line = Line::read(line.trim_start_matches('\u{feff}')).map_err(bad)?;
                let (example, diverged) = line.example(&encoder)?.ok_or_else(|| {
                    bad("expected the last message from the assistant, at the end of the rendered template".to_owned())
                })?;
                all.add(example, diverged, context);
            }
        } else {
            let is_object = |line| serde_json::from_str::<Map<String, Value>>(line).is_ok();
            if lines.peek().is_some_and(|(_, line)| is_object(line)) {
                log::warn!(
                    "{} looks like JSON lines but is read as plain text\nhint: rename it to .jsonl",
                    path.display()
                );
            }
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

    /// Returns the micro-batches of a step, made one at a time. Each epoch has all examples once, in its own order.
    pub fn micro_batches(
        &self,
        step: usize,
        batch: usize,
        accumulate: usize,
        seed: u64,
    ) -> impl Iterator<Item = Vec<&Example>> + Clone {
        let all = self.examples.len();
        // The product of three 32-bit numbers may not fit 64 bits.
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

/// Returns the numbers below `len` in random order (Fisher-Yates).
fn shuffled(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(epoch);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        // The bias of the remainder is below len / 2^64.
        order.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
    }
    order
}

impl Line {
    /// Returns an example, and true if its prompt diverges. None unless the last message is from the assistant and the
    /// rendered template ends with it.
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
                // A template may print the time: both get the same.
                let now = Some(OffsetDateTime::now_utc());
                let asked = folder.render(&Prompt { now, ..Prompt::of(asked) })?;
                let whole = Prompt { add_generation_prompt: false, now, ..Prompt::of(&messages) };
                let whole = folder.render(&whole)?;
                let answers = answer.role == "assistant";
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

/// Returns an example whose target tokens follow the common prefix with its prompt, and true if the prompt goes on.
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
    /// Last token of a text or a completion, and its name.
    eos: Option<(u32, String)>,
}

impl<'a> Encoder<'a> {
    fn new(folder: &'a ModelFolder) -> Result<Self, GenerateError> {
        const PROBE: &str = "Hello";
        // A tokenizer may lack these letters; all tokens around an empty text then count as the prefix.
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

    /// Encodes the begin of a text, with the prefix unless the text begins with it.
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
        let Some((eos, name)) = &self.eos else { return self.whole(text) };
        let ends = |tokens: &[u32]| {
            tokens.get(self.prefix.len()..).is_some_and(|own| own.last() == Some(eos))
        };
        // EOS may swallow spaces in front of it, so it is encoded with the text.
        let mut tokens = match text.ends_with(name.as_str()) {
            true => self.begun(text)?,
            false => self.begun(&format!("{text}{name}"))?,
        };
        // EOS that is not an added token is no token of a text.
        if !ends(&tokens) {
            tokens = self.begun(text)?;
            tokens.push(*eos);
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
        let max = u32::MAX as usize;
        let mut batches = data.micro_batches(max, 4, max, 7);
        assert!(batches.next().is_some_and(|batch| batch.len() == 4));
        assert_eq!(batches.size_hint().0, max - 1);
    }
}
