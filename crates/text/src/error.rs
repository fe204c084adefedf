use std::io;
use std::path::PathBuf;

/// The reason that text cannot be encoded, decoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot read {}: {why}\nhint: {}", .path.display(), readable(.why))]
    Read { path: PathBuf, why: io::Error },
    #[error(
        "{} is no tokenizer: {}\nhint: a tokenizer.json as the tokenizers library writes it", .path.display(), quoted(.why)
    )]
    Tokenizer { path: PathBuf, why: String },
    /// A `tokenizer_config.json`, or another file with tokens or templates, is malformed.
    #[error(
        "{} is malformed: {}\nhint: take the file from where the model is from, as it is there", .path.display(), quoted(.why)
    )]
    Config { path: PathBuf, why: String },
    #[error(
        "the tokenizer has {tokens} tokens, the last of them {largest}, the model a vocabulary of {vocab}\n\
         hint: take tokenizer.json from the folder that the weights are from"
    )]
    Vocab { tokens: usize, largest: u32, vocab: usize },
    /// The text has a token that was added to the tokenizer but not to the model.
    #[error(
        "the text has token {id}, \"{}\", which is outside of the model's vocabulary of {vocab}\n\
         hint: a text without it, or tokenizer.json from the folder that the weights are from",
        quoted(.token)
    )]
    OutsideVocab { token: String, id: u32, vocab: usize },
    #[error(
        "the text cannot be encoded: {}\nhint: the model's own tokenizer has tokens for any text", quoted(.0)
    )]
    Encode(String),
    #[error("tokens {ids:?} cannot be decoded: {}\nhint: tokens of this tokenizer", quoted(.why))]
    Decode { ids: Vec<u32>, why: String },
    /// The chat template cannot be parsed.
    #[error(
        "chat template `{}` is broken: {}\nhint: take its file from where the model is from, as it is there",
        quoted(.name), quoted(.why)
    )]
    Template { name: String, why: String },
    #[error("there is no chat template `{}`\nhint: one of {}", quoted(.name), quoted(&.known.join(", ")))]
    NoTemplate { name: String, known: Vec<String> },
    /// The template fails on these messages.
    #[error(
        "chat template `{}` fails on these messages: {}\nhint: other messages, or a plain prompt",
        quoted(.name), quoted(.why)
    )]
    Render { name: String, why: String },
    /// The template itself raises an error, such as that roles must alternate.
    #[error(
        "chat template `{}` refuses these messages: {}\nhint: messages as it says, or a plain prompt",
        quoted(.name), quoted(.why)
    )]
    Refused { name: String, why: String },
    #[error("an empty string stops every text before its beginning\nhint: leave it out")]
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
            "a model's folder has it, with what its links lead to; download it again"
        }
        io::ErrorKind::Unsupported => "fetch it with `git lfs pull`",
        io::ErrorKind::InvalidData => {
            "it must be text in UTF-8; take it from where the model is from"
        }
        _ => "it must be a file, and yours to read",
    }
}
