use std::io;
use std::path::PathBuf;

/// The reason that text cannot be encoded, decoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot read {}: {why}\nhint: {}", .path.display(), readable(.why))]
    Read { path: PathBuf, why: io::Error },
    #[error(
        "{} is not a valid tokenizer: {}\nhint: use a tokenizer.json written by the tokenizers \
         library", .path.display(), quoted(.why)
    )]
    Tokenizer { path: PathBuf, why: String },
    /// A `tokenizer_config.json`, or another file with tokens or templates, is malformed.
    #[error(
        "{} is malformed: {}\nhint: download the unchanged file from the source of the model",
        .path.display(), quoted(.why)
    )]
    Config { path: PathBuf, why: String },
    #[error(
        "the tokenizer has {tokens} tokens with ids up to {largest}, but the model has a \
         vocabulary of {vocab}\nhint: use the tokenizer.json from the folder of the weights"
    )]
    Vocab { tokens: usize, largest: u32, vocab: usize },
    /// The text has a token that was added to the tokenizer but not to the model.
    #[error(
        "the text has token {id}, \"{}\", which is outside the model's vocabulary of \
         {vocab}\nhint: remove it from the text, or use the tokenizer.json from the folder of the \
         weights",
        quoted(.token)
    )]
    OutsideVocab { token: String, id: u32, vocab: usize },
    #[error(
        "the text cannot be encoded: {}\nhint: use the model's own tokenizer, which can encode \
         any text", quoted(.0)
    )]
    Encode(String),
    #[error(
        "tokens {ids:?} cannot be decoded: {}\nhint: pass tokens of this tokenizer", quoted(.why)
    )]
    Decode { ids: Vec<u32>, why: String },
    /// The chat template cannot be parsed.
    #[error(
        "chat template `{}` is invalid: {}\nhint: download its unchanged file from the source of \
         the model",
        quoted(.name), quoted(.why)
    )]
    Template { name: String, why: String },
    #[error(
        "unknown chat template `{}`\nhint: use one of {}", quoted(.name), quoted(&.known.join(", "))
    )]
    NoTemplate { name: String, known: Vec<String> },
    /// The template fails on these messages.
    #[error(
        "chat template `{}` fails on these messages: {}\nhint: use other messages or a plain prompt; \
         if a feature is not supported, use a template without it",
        quoted(.name), quoted(.why)
    )]
    Render { name: String, why: String },
    /// The template itself raises an error, such as that roles must alternate.
    #[error(
        "chat template `{}` refuses these messages: {}\nhint: change the messages as it says, or \
         use a plain prompt",
        quoted(.name), quoted(.why)
    )]
    Refused { name: String, why: String },
    #[error(
        "expected a non-empty stop string, got an empty one\nhint: remove it from the stop strings"
    )]
    EmptyStop,
}

/// Maximum number of characters that a message quotes from a model's files.
const QUOTED: usize = 500;

/// Quotes a text from a model's file on one line: truncated, and with control characters and direction marks escaped,
/// so that it cannot imitate a line of our own.
pub fn quoted(text: &str) -> String {
    let hidden = |c: char| {
        let marks = ['\u{2028}', '\u{2029}', '\u{200e}', '\u{200f}', '\u{61c}'];
        let turns =
            ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c);
        c.is_control() || turns || marks.contains(&c)
    };
    let mut out = String::new();
    for c in text.chars().take(QUOTED) {
        match hidden(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    let left = text.chars().skip(QUOTED).count();
    match left {
        0 => out,
        _ => format!("{out}... ({left} characters more)"),
    }
}

/// Returns a hint for a file that cannot be read.
fn readable(why: &io::Error) -> &'static str {
    match why.kind() {
        io::ErrorKind::NotFound => {
            "download the model's folder again, with the targets of its links"
        }
        io::ErrorKind::Unsupported => "fetch it with `git lfs pull`",
        io::ErrorKind::InvalidData => {
            "download the file again from the source of the model; it must be UTF-8 text"
        }
        _ => "pass a file that you can read",
    }
}
