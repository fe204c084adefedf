//! Examples from files.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use models::Example;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Map, Value};
use text::{Message, Prompt};
use time::OffsetDateTime;

use super::sequences::Sequences;
use super::shards::{Shards, is_bin};
use crate::engine::{GenerateError, ModelFolder};
use crate::fnv::Fnv1a;

/// Examples to train on, as tokens.
#[derive(Debug)]
pub struct Dataset {
    source: Source,
    /// Number of examples that were longer than the context, and are cut to it.
    pub cut: usize,
    /// Number of examples that have no target token within the context, and are dropped.
    pub left_out: usize,
    /// Number of examples whose prompt by itself ends in other tokens than in front of its completion.
    pub diverged: usize,
}

#[derive(Debug)]
enum Source {
    /// Examples of a text, in its order, and its path.
    Text(Sequences, PathBuf),
    Files(Shards),
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
    /// A file of tokens is damaged, or belongs to another vocabulary.
    #[error("{}: {why}\nhint: {hint}", .path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
        /// Advice.
        hint: &'static str,
    },
    /// A model without a tokenizer trains on tokens alone.
    #[error("{} is not a .bin\nhint: tokenise the text into a .bin, as `data/*/prepare.py` of nanoGPT does", .0.display())]
    NoTokens(PathBuf),
    /// A folder has no file of tokens.
    #[error("{} has no .bin\nhint: name a folder with .bin files, or one file", .0.display())]
    Empty(PathBuf),
    /// No file of tokens has a window.
    #[error(
        "{} has {}, expected at least {}\nhint: use a shorter context (--context) or more tokens",
        .path.display(), counted(*.tokens), .context + 1
    )]
    Short {
        /// The file, or the folder of files.
        path: PathBuf,
        /// Tokens of the longest file.
        tokens: usize,
        /// Inputs of a window.
        context: usize,
    },
    /// A text or a chat cannot be encoded.
    #[error(transparent)]
    Encode(#[from] GenerateError),
}

/// Returns a hint for a file that cannot be read.
fn readable(why: &io::Error) -> &'static str {
    match why.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::Unsupported => "fetch the file with `git lfs pull`",
        io::ErrorKind::InvalidData => "use a text or a .jsonl in UTF-8",
        io::ErrorKind::StorageFull => "free space in the folder for temporary files (TMPDIR)",
        _ => "use a text, or a .jsonl with one example per line",
    }
}

fn counted(tokens: usize) -> String {
    if tokens == 1 { "1 token".to_owned() } else { format!("{tokens} tokens") }
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
    /// A `.bin`, or a folder of them, has tokens: see [`Dataset::of_tokens`].
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
        if path.is_dir() || is_bin(path) {
            return Self::of_tokens(path, folder.config().vocab, context);
        }
        checkpoint::ends(path).map_err(read)?;
        if is(&REFUSED) {
            return Err(DatasetError::Format(path.to_owned()));
        }
        let mut all = Texts::default();
        let encoder = Encoder::new(folder)?;
        if is(&LINES) {
            // One line is in memory at a time.
            for (index, line) in BufReader::new(File::open(path).map_err(read)?).lines().enumerate()
            {
                let line = line.map_err(read)?;
                if line.trim_matches(is_blank).is_empty() {
                    continue;
                }
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
                all.add(example, diverged, context).map_err(read)?;
            }
        } else {
            let text = fs::read_to_string(path).map_err(read)?;
            if text.contains('\0') {
                let why = "it has bytes of 0, which no text has";
                return Err(read(io::Error::new(io::ErrorKind::InvalidData, why)));
            }
            let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
            let first = text.lines().find(|line| !line.trim_matches(is_blank).is_empty());
            let is_object = |line: &str| serde_json::from_str::<Map<String, Value>>(line).is_ok();
            if first.is_some_and(is_object) {
                log::warn!(
                    "{} looks like JSON lines but is read as plain text\nhint: rename it to .jsonl",
                    path.display()
                );
            }
            let tokens = encoder.whole(text)?;
            for piece in tokens.chunks(context.max(1)) {
                let piece = Example { tokens: piece.to_vec(), from: 0 };
                all.add(piece, false, context).map_err(read)?;
            }
        }
        let Texts { examples, cut, left_out, diverged } = all;
        match examples.len() {
            0 => Err(DatasetError::Nothing { path: path.to_owned(), context }),
            _ => {
                let source = Source::Text(examples, path.to_owned());
                Ok(Self { source, cut, left_out, diverged })
            }
        }
    }

    /// Opens tokens: a `.bin` of nanoGPT or llm.c, or a folder of them. Each example has `context` inputs, and the token after
    /// each as its target. They are read when they are needed.
    ///
    /// # Errors
    /// [`DatasetError`].
    pub fn of_tokens(
        path: impl AsRef<Path>,
        vocab: usize,
        context: usize,
    ) -> Result<Self, DatasetError> {
        let source = Source::Files(Shards::open(path.as_ref(), context, vocab)?);
        Ok(Self { source, cut: 0, left_out: 0, diverged: 0 })
    }

    /// Returns the files of tokens, or the text.
    pub fn files(&self) -> Vec<&Path> {
        match &self.source {
            Source::Text(_, path) => vec![path],
            Source::Files(shards) => shards.paths(),
        }
    }

    /// Returns the number of examples.
    pub fn len(&self) -> usize {
        match &self.source {
            Source::Text(examples, _) => examples.len(),
            Source::Files(shards) => shards.len(),
        }
    }

    /// Returns true if there are no examples, which no open data set has.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an example, in the order of the files.
    ///
    /// # Errors
    /// [`DatasetError::Read`] for tokens that can no longer be read.
    ///
    /// # Panics
    /// Panics past the last example.
    pub fn get(&self, index: usize) -> Result<Example, DatasetError> {
        match &self.source {
            Source::Text(examples, path) => {
                examples.get(index).map_err(|why| DatasetError::Read { path: path.clone(), why })
            }
            Source::Files(shards) => shards.get(index, 0),
        }
    }

    /// Returns an example of an epoch in a random order.
    fn shuffled(&self, index: u64, epoch: u64, seed: u64) -> Result<Example, DatasetError> {
        let index = permuted(index, self.len() as u64, [seed, epoch]) as usize;
        match &self.source {
            Source::Files(shards) if epoch > 0 => {
                let context = shards.context() as u64;
                let shift = permuted(epoch % context, context, [seed, u64::MAX]);
                shards.get(index, shift as usize)
            }
            _ => self.get(index),
        }
    }

    /// Returns the number of examples, and a hash of all tokens.
    ///
    /// # Errors
    /// [`DatasetError::Read`].
    pub fn fingerprint(&self) -> Result<String, DatasetError> {
        let all = self.len();
        let hash = match &self.source {
            Source::Files(shards) => shards.hash(),
            Source::Text(..) => {
                let mut hash = Fnv1a::new();
                for index in 0..all {
                    let Example { tokens, from } = self.get(index)?;
                    let words = tokens.iter().copied().chain([from as u32, u32::MAX]);
                    words.for_each(|word| hash.add(word));
                }
                hash.value()
            }
        };
        Ok(format!("{all} examples, {hash:016x}"))
    }

    /// Returns the number of rows of the longest example.
    pub fn longest(&self) -> usize {
        match &self.source {
            Source::Text(examples, _) => examples.longest(),
            Source::Files(shards) => shards.context(),
        }
    }

    /// Returns the micro-batches of a step, made one at a time. Each epoch has all examples once: with a seed in a random order of
    /// its own, else in that of the file. With a seed, windows of tokens begin at other tokens in each epoch.
    pub fn micro_batches(
        &self,
        step: usize,
        batch: usize,
        accumulate: usize,
        seed: Option<u64>,
    ) -> impl Iterator<Item = Result<Vec<Example>, DatasetError>> + Clone {
        let all = self.len() as u128;
        // The product of three 32-bit numbers may not fit 64 bits.
        let begin = step as u128 * batch as u128 * accumulate as u128;
        let own = move |micro: usize, at: usize| {
            let at = begin + micro as u128 * batch as u128 + at as u128;
            let (epoch, at) = ((at / all) as u64, (at % all) as u64);
            match seed {
                Some(seed) => self.shuffled(at, epoch, seed),
                None => self.get(at as usize),
            }
        };
        (0..accumulate).map(move |micro| (0..batch).map(|at| own(micro, at)).collect())
    }
}

/// Examples of a file, while it is read.
#[derive(Default)]
struct Texts {
    examples: Sequences,
    cut: usize,
    left_out: usize,
    diverged: usize,
}

impl Texts {
    fn add(&mut self, mut example: Example, diverged: bool, context: usize) -> io::Result<()> {
        let long = example.tokens.len() > context;
        example.tokens.truncate(context);
        if example.learned() == 0 {
            self.left_out += 1;
            return Ok(());
        }
        self.cut += usize::from(long);
        self.diverged += usize::from(diverged);
        self.examples.add(&example)
    }
}

/// Returns the place of `index` in a random order of the numbers below `len`: a Feistel network over the next power of four,
/// repeated until the result is below `len` (Black and Rogaway, 2002). It needs no memory for the order.
fn permuted(index: u64, len: u64, key: [u64; 2]) -> u64 {
    let half = (u64::BITS - len.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let round = |right: u64, round: u64| {
        let mut random = ChaCha8Rng::seed_from_u64(key[0]);
        random.set_stream(key[1]);
        random.set_word_pos(u128::from((round << half | right) * 2));
        random.next_u64() & mask
    };
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for number in 0..4 {
            (left, right) = (right, left ^ round(right, number));
        }
        at = left << half | right;
        if at < len {
            return at;
        }
    }
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

    fn of(len: u32) -> Dataset {
        let mut all = Sequences::default();
        for id in 0..len {
            all.add(&Example { tokens: vec![id, id], from: 0 }).expect("in memory");
        }
        let source = Source::Text(all, PathBuf::new());
        Dataset { source, cut: 0, left_out: 0, diverged: 0 }
    }

    #[test]
    fn an_epoch_has_every_example_once() {
        let data = of(10);
        let ids = |step| -> Vec<u32> {
            let batches: Vec<_> = data.micro_batches(step, 2, 3, Some(7)).collect();
            assert_eq!(batches.len(), 3);
            let examples = batches.into_iter().flat_map(|batch| batch.expect("in memory"));
            examples.map(|example| example.tokens[0]).collect()
        };
        let all: Vec<u32> = (0..5).flat_map(ids).collect();
        for epoch in all.chunks(10) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert!(all[..10] != all[10..20], "{all:?}");
        assert_eq!(ids(1), ids(1));
        let plain = data.micro_batches(1, 6, 1, None).flat_map(|batch| batch.expect("in memory"));
        let plain: Vec<u32> = plain.map(|example| example.tokens[0]).collect();
        assert_eq!(plain, [6, 7, 8, 9, 0, 1]);
    }

    #[test]
    fn windows_of_later_epochs_begin_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens.bin");
        let bytes: Vec<u8> = (0..801u16).flat_map(u16::to_le_bytes).collect();
        fs::write(&path, bytes).expect("written");
        let data = Dataset::of_tokens(&path, 1000, 8).expect("tokens");
        let starts = |epoch, seed| -> Vec<u32> {
            let all =
                data.micro_batches(epoch, 100, 1, seed).flat_map(|batch| batch.expect("read"));
            let mut all: Vec<u32> = all.map(|example| example.tokens[0]).collect();
            all.sort_unstable();
            all
        };
        let first: Vec<u32> = (0..100).map(|at| 8 * at).collect();
        assert_eq!(starts(0, Some(7)), first);
        let shifts: Vec<u32> = (1..8).map(|epoch| starts(epoch, Some(7))[0]).collect();
        let mut distinct = shifts.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() == 7 && shifts.iter().all(|shift| *shift < 8), "{shifts:?}");
        let moved: Vec<u32> = first.iter().map(|at| (at + shifts[0]).min(801 - 9)).collect();
        assert_eq!(starts(1, Some(7)), moved);
        assert_eq!(starts(3, None), first, "in the order of the file");
    }

    #[test]
    fn orders_are_permutations_and_differ() {
        for len in (1..70).chain([255, 256, 257, 1000]) {
            let order = |key| (0..len).map(|at| permuted(at, len, key)).collect::<Vec<_>>();
            let one = order([1, 0]);
            let mut sorted = one.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..len).collect::<Vec<_>>());
            if len > 20 {
                assert!(one != order([1, 1]) && one != order([2, 0]) && one != sorted, "{len}");
            }
        }
    }

    #[test]
    fn a_step_of_many_micro_batches_is_made_as_it_goes() {
        let (data, max) = (of(10), u32::MAX as usize);
        let mut batches = data.micro_batches(max, 4, max, Some(7));
        assert!(batches.next().is_some_and(|batch| batch.expect("in memory").len() == 4));
        assert_eq!(batches.size_hint().0, max - 1);
    }
}
