use std::io;
use std::path::PathBuf;

/// Why text cannot become ids or a prompt, or ids text.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {}: {why}\nhint: {}", .path.display(), readable(.why))]
    Read { path: PathBuf, why: io::Error },
    #[error(
        "{} is no tokenizer: {why}\nhint: a tokenizer.json as the tokenizers library writes it", .path.display()
    )]
    Tokenizer { path: PathBuf, why: String },
    /// A `tokenizer_config.json` or a file of templates that is not what it should be.
    #[error(
        "{} is malformed: {why}\nhint: take the file from where the model is from, as it is there", .path.display()
    )]
    Config { path: PathBuf, why: String },
    #[error(
        "the tokenizer has {tokens} tokens, the last of them {largest}, the model a vocabulary of {vocab}\n\
         hint: take tokenizer.json from the folder that the weights are from"
    )]
    Vocab { tokens: usize, largest: u32, vocab: usize },
    /// A token that was added to a tokenizer and not to the model.
    #[error(
        "the text has token {id}, {token:?}, which is outside of the model's vocabulary of {vocab}\n\
         hint: a text without it, or tokenizer.json from the folder that the weights are from"
    )]
    OutsideVocab { token: String, id: u32, vocab: usize },
    #[error(
        "the text cannot be encoded: {0}\nhint: the model's own tokenizer has tokens for any text"
    )]
    Encode(String),
    #[error("tokens {ids:?} cannot be decoded: {why}\nhint: tokens of this tokenizer")]
    Decode { ids: Vec<u32>, why: String },
    /// A chat template that is not one.
    #[error(
        "chat template `{name}` is broken: {why}\nhint: take its file from where the model is from, as it is there"
    )]
    Template { name: String, why: String },
    #[error("there is no chat template `{name}`\nhint: one of {}", .known.join(", "))]
    NoTemplate { name: String, known: Vec<String> },
    /// A template that meets what it cannot work with.
    #[error(
        "chat template `{name}` fails on these messages: {why}\nhint: other messages, or a plain prompt"
    )]
    Render { name: String, why: String },
    /// What a template says itself, such as that roles must take turns.
    #[error(
        "chat template `{name}` refuses these messages: {why}\nhint: messages as it says, or a plain prompt"
    )]
    Refused { name: String, why: String },
    #[error("an empty string stops every text before its beginning\nhint: leave it out")]
    EmptyStop,
}

/// What to do about a file that cannot be read.
fn readable(why: &io::Error) -> &'static str {
    match why.kind() {
        io::ErrorKind::NotFound => {
            "a model's folder has it, with what its links lead to; download it again"
        }
        io::ErrorKind::InvalidData => {
            "it must be text in UTF-8; take it from where the model is from"
        }
        _ => "it must be a file, and yours to read",
    }
}
