use std::io;
use std::path::PathBuf;

use checkpoint::{list, short};
use serde_json::Value;

/// The file of a model that says how it is sampled.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";

/// Why a folder is none of our models.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that is not there or cannot be read.
    #[error("cannot read {}: {why}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// As the system says.
        why: io::Error,
    },
    /// A file that is not JSON.
    #[error("{file} is not JSON: {}", short(.why))]
    Json {
        /// Its name within the folder.
        file: &'static str,
        /// What the parser says.
        why: serde_json::Error,
    },
    /// A file of JSON that is a list, a number or the like.
    #[error("{file} is not an object")]
    NotAnObject {
        /// Its name within the folder.
        file: &'static str,
    },
    /// The field is `section.field` within a section.
    #[error("{file}: `{field}` {fault}")]
    Field {
        /// Name of the file within the folder.
        file: &'static str,
        /// The field's full name.
        field: String,
        /// What is wrong with it.
        fault: Box<Fault>,
    },
    /// A family that this crate does not have.
    #[error("{file}: `model_type` is \"{}\", which is none of {known}", short(.value))]
    UnknownModelType {
        /// Name of the file that says it.
        file: &'static str,
        /// The `model_type` there.
        value: String,
        /// Every `model_type` of this crate.
        known: String,
    },
    /// Files of weights that cannot be read or written, or a tensor that is not as it should be.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// Everything that is wrong with the tensors of a checkpoint, at once.
    #[error("{}", tensors("tensors are damaged, or not those of config.json", .missing, .unused, .wrong))]
    Tensors {
        /// What the configuration asks for and no file has.
        missing: Vec<String>,
        /// What files have and the configuration does not explain.
        unused: Vec<String>,
        /// Of another shape or dtype than the configuration asks for, or not readable.
        wrong: Vec<checkpoint::Error>,
    },
    /// The same of an adapter.
    #[error(
        "{}\nhint: an adapter of this very model, whose tensors are lora_A and lora_B of its matrices",
        tensors("the tensors are not those of an adapter of this model", .missing, .unused, .wrong)
    )]
    AdapterTensors {
        /// A or B where the file has only the other; what all names begin with, where it has neither of any.
        missing: Vec<String>,
        /// What the file has and no module explains.
        unused: Vec<String>,
        /// Of another shape or dtype than the factors have, or not readable.
        wrong: Vec<checkpoint::Error>,
    },
    /// A target that is no module of the layers.
    #[error("no matrix of a layer is called {target}\nhint: one of {known}")]
    Target {
        /// As it was asked for.
        target: String,
        /// Names that there are, separated by commas.
        known: String,
    },
    /// A rank that is 0 or past what the matrices have, or an alpha that is not a finite number above 0.
    #[error(
        "rank {rank} and alpha {alpha} make no adapter\nhint: a rank from 1 to {most}, and an alpha above 0"
    )]
    Rank {
        /// As it was asked for.
        rank: usize,
        /// As it was asked for.
        alpha: f64,
        /// The largest rank there is.
        most: usize,
    },
    /// A batch in which no token is learned, or with an empty sequence.
    #[error(
        "there is nothing to learn in a batch\nhint: sequences of two tokens or more, and something after what they \
         begin with"
    )]
    Lesson,
    /// A file or folder that cannot be written.
    #[error("cannot write {}: {why}", .path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// As the system says.
        why: io::Error,
    },
    /// More positions than the model has.
    #[error(
        "{need} positions, but the model has {max_seq}\nhint: a shorter prompt, fewer tokens to come, or --max-context"
    )]
    Context {
        /// Positions that were asked for.
        need: usize,
        /// Positions of the model.
        max_seq: usize,
    },
    /// A context past the positions that a model has learned vectors for.
    #[error(
        "expected a context of at most {max_seq} positions, got {need}\nhint: the model learned a vector for each position"
    )]
    LearnedPositions {
        /// Positions that were asked for.
        need: usize,
        /// Positions of the model.
        max_seq: usize,
    },
    /// More positions than a cache has room for.
    #[error(
        "{need} positions, but the cache holds {capacity}\nhint: a shorter prompt, or a larger session"
    )]
    Full {
        /// Positions that were asked for.
        need: usize,
        /// Positions that each sequence may have.
        capacity: usize,
    },
    /// A token that the model does not have.
    #[error(
        "token {id} is past the vocabulary, which has {vocab}\nhint: tokens of this model's own tokenizer"
    )]
    Token {
        /// The token.
        id: u32,
        /// Tokens that there are.
        vocab: usize,
    },
    /// Tokens of a step that the sequences of a cache cannot take together.
    #[error(
        "{tokens:?} tokens for the {batch} sequences of a cache\nhint: as many of each, and not more than 16 \
         where their lengths differ"
    )]
    Step {
        /// Sequences of the cache.
        batch: usize,
        /// How many were given of each sequence.
        tokens: Vec<usize>,
    },
    /// Several sequences past the length at which all positions are turned anew, which is done for one alone.
    #[error(
        "sequences of {length} positions turn all of them anew, and a batch cannot\nhint: one sequence at a time"
    )]
    Stretched {
        /// Positions that the longest would have.
        length: usize,
    },
    /// A weight that was to be in 4 or 8 bits.
    #[error("tensor {tensor}: {why}")]
    Quantize {
        /// Its name.
        tensor: String,
        /// What the op says.
        why: Box<ops::OpError>,
    },
    /// The device failed while it computed or was read; its own words.
    #[error("the device failed: {0}")]
    Failed(String),
    /// An op that the device cannot run, or that does not take what it was given.
    #[error(transparent)]
    Op(#[from] ops::OpError),
}

impl Error {
    /// Whether it is of a file that an adapter has.
    fn is_adapters(&self) -> bool {
        let (Self::Read { path, .. } | Self::Checkpoint(checkpoint::Error::Read { path, .. })) =
            self
        else {
            return false;
        };
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("adapter_"))
    }

    /// What to do about a folder that is none of our models, as a line of its own; nothing where the message has it.
    pub fn hint(&self) -> &'static str {
        use checkpoint::Error as File;
        match self {
            Self::Read { why, .. } | Self::Checkpoint(File::Read { why, .. }) => match why.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory if self.is_adapters() => {
                    "\nhint: an adapter is a folder with adapter_config.json and adapter_model.safetensors, as PEFT has it"
                }
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                    "\nhint: a model is a folder with config.json and all its safetensors, as Hugging Face has it"
                }
                io::ErrorKind::Unsupported => {
                    "\nhint: `git lfs pull` in its folder fetches the file"
                }
                _ => "\nhint: it must be a file, and yours to read",
            },
            Self::Checkpoint(File::NoWeights { found: None, .. }) => {
                "\nhint: a model is a folder with config.json and all its safetensors, as Hugging Face has it"
            }
            Self::Json { .. }
            | Self::NotAnObject { .. }
            | Self::Checkpoint(File::Header { .. } | File::Index { .. }) => {
                "\nhint: the file is cut or damaged; download it again"
            }
            Self::Checkpoint(File::Misplaced { .. }) => {
                "\nhint: the index and all its shards must be of one model; download them again"
            }
            Self::Field { file, fault, .. } => match **fault {
                // The model is one of ours, and how it is sampled is for the caller to say.
                Fault::Unsupported { .. } if *file == GENERATION_CONFIG => {
                    "\nhint: take the field out of the file; answers are then not as the model's makers would have them"
                }
                Fault::Unsupported { .. } => "\nhint: a model that has what is known",
                _ => "\nhint: take the file from where the weights are from, as it is there",
            },
            Self::UnknownModelType { .. } => "\nhint: a model of one of these families",
            Self::Tensors { .. } | Self::Checkpoint(File::Tensor { .. }) => {
                "\nhint: config.json and all weights must be of one model, and as they were written"
            }
            _ => "",
        }
    }
}

/// What is wrong with a field.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The file does not have it, and nothing stands in for it.
    #[error("is missing")]
    Missing,
    /// A value of the wrong type, or out of range.
    #[error("is {}, which is not {expected}", short(.value))]
    Malformed {
        /// What the file says.
        value: Value,
        /// What it should be.
        expected: String,
    },
    /// A value that means something, but nothing that this crate computes.
    #[error("is {}, which is not supported; known: {known}", short(.value))]
    Unsupported {
        /// What the file says.
        value: Value,
        /// What is known, separated by commas.
        known: String,
    },
    /// Another field of the file says otherwise.
    #[error("is {}, but `{other}` is {}", short(.value), short(.other_value))]
    Contradiction {
        /// What the file says.
        value: Value,
        /// Full name of the other field.
        other: String,
        /// What that one says.
        other_value: Value,
    },
    /// A size that another one does not divide.
    #[error("is {}, which is not a multiple of `{divisor_field}`, {divisor}", short(.value))]
    NotMultiple {
        /// What the file says.
        value: usize,
        /// Name of the field that should divide it.
        divisor_field: &'static str,
        /// What that one says.
        divisor: usize,
    },
}

fn tensors(
    not: &str,
    missing: &[String],
    unused: &[String],
    wrong: &[checkpoint::Error],
) -> String {
    let mut text =
        format!("{not}: {} missing, {} unused, {} wrong", missing.len(), unused.len(), wrong.len());
    list(&mut text, "missing", missing.iter());
    list(&mut text, "unused", unused.iter());
    list(&mut text, "wrong", wrong.iter());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_without_number_are_counted() {
        let missing: Vec<String> = (0..1002).map(|at| at.to_string()).collect();
        let text = tensors("no", &missing, &["x".to_owned()], &[]);
        assert!(text.starts_with("no: 1002 missing, 1 unused, 0 wrong\nmissing: 0\n"), "{text}");
        assert!(text.ends_with("\nmissing: 999\nmissing: 2 more\nunused: x"), "{text}");
    }
}
