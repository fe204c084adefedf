use std::io;
use std::path::PathBuf;

use checkpoint::{list, short};
use serde_json::Value;

/// File with the sampling defaults of a model.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";

/// An error of this crate: a folder that is not a supported model, an invalid request, or a failed device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that does not exist or cannot be read.
    #[error("cannot read {}: {why}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// A file that is not JSON.
    #[error("{file} is not JSON: {}", short(.why))]
    Json {
        /// File name within the folder.
        file: &'static str,
        /// Error of the parser.
        why: serde_json::Error,
    },
    /// A JSON file whose root is not an object.
    #[error("{file} is not an object")]
    NotAnObject {
        /// File name within the folder.
        file: &'static str,
    },
    /// An invalid field; named `section.field` inside a section.
    #[error("{file}: `{field}` {fault}")]
    Field {
        /// File name within the folder.
        file: &'static str,
        /// Full name of the field.
        field: String,
        /// Fault of the field.
        fault: Box<Fault>,
    },
    /// A family that this crate does not support.
    #[error("{file}: `model_type` is \"{}\", which is none of {known}", short(.value))]
    UnknownModelType {
        /// Name of the file.
        file: &'static str,
        /// Its `model_type`.
        value: String,
        /// Every supported `model_type`, separated by commas.
        known: String,
    },
    /// Weight files that cannot be read or written, or an invalid tensor.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// All problems with the tensors of a checkpoint at once.
    #[error("{}", tensors("tensors are damaged, or not those of config.json", .missing, .unused, .wrong))]
    Tensors {
        /// Tensors that the configuration needs and no file has.
        missing: Vec<String>,
        /// Tensors of the files that the configuration does not need.
        unused: Vec<String>,
        /// Tensors of another shape or dtype than the configuration needs, or unreadable.
        wrong: Vec<checkpoint::Error>,
    },
    /// All problems with the tensors of an adapter at once.
    #[error(
        "{}\nhint: an adapter of this very model, whose tensors are lora_A and lora_B of its matrices",
        tensors("the tensors are not those of an adapter of this model", .missing, .unused, .wrong)
    )]
    AdapterTensors {
        /// Missing lora_A and lora_B tensors; the common prefix of all names if the file has no factors.
        missing: Vec<String>,
        /// Tensors of the file that belong to no module.
        unused: Vec<String>,
        /// Tensors of another shape or dtype than the factors, or unreadable.
        wrong: Vec<checkpoint::Error>,
    },
    /// A target that is no module of the layers.
    #[error("no matrix of a layer is called {target}\nhint: one of {known}")]
    Target {
        /// The requested target.
        target: String,
        /// Valid names, separated by commas.
        known: String,
    },
    /// A rank of 0 or above the limit, or an alpha that is not a finite number above 0.
    #[error(
        "rank {rank} and alpha {alpha:?} make no adapter\nhint: a rank from 1 to {max}, and an alpha above 0"
    )]
    Rank {
        /// The requested rank.
        rank: usize,
        /// The requested alpha.
        alpha: f64,
        /// The largest valid rank.
        max: usize,
    },
    /// A batch without tokens to learn, or with an empty sequence.
    #[error(
        "there is nothing to learn in a batch\nhint: sequences of two tokens or more, and something after what they \
         begin with"
    )]
    NothingToLearn,
    /// A file or folder that cannot be written.
    #[error("cannot write {}: {why}\nhint: {}", .path.display(), checkpoint::writable(.why))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// More positions than the context length of the model.
    #[error(
        "{need} positions, but the model has {max_seq}\nhint: fewer tokens, or --max-context for a longer context"
    )]
    Context {
        /// Number of positions requested.
        need: usize,
        /// Context length of the model.
        max_seq: usize,
    },
    /// A context longer than the learned positions of a model.
    #[error(
        "expected a context of at most {max_seq} positions, got {need}\nhint: the model learned a vector for each position"
    )]
    LearnedPositions {
        /// Number of positions requested.
        need: usize,
        /// Number of learned positions.
        max_seq: usize,
    },
    /// More positions than the capacity of a KV cache.
    #[error(
        "{need} positions, but the cache holds {capacity}\nhint: a shorter prompt, or a larger session"
    )]
    Full {
        /// Number of positions requested.
        need: usize,
        /// Capacity of each sequence, in positions.
        capacity: usize,
    },
    /// A token past the vocabulary.
    #[error(
        "token {id} is past the vocabulary, which has {vocab}\nhint: tokens of this model's own tokenizer"
    )]
    Token {
        /// The token id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Step tokens that the sequences of a KV cache cannot take together.
    #[error(
        "{tokens:?} tokens for the {batch} sequences of a cache\nhint: as many of each, and not more than 16 \
         where their lengths differ"
    )]
    Step {
        /// Number of sequences of the cache.
        batch: usize,
        /// Number of tokens given for each sequence.
        tokens: Vec<usize>,
    },
    /// Several sequences past the length at which RoPE scaling changes all frequencies. The re-prefill that
    /// this needs supports one sequence only.
    #[error(
        "sequences of {length} positions turn all of them anew, and a batch cannot\nhint: one sequence at a time"
    )]
    Stretched {
        /// Length that the longest sequence would have, in positions.
        length: usize,
    },
    /// A weight that could not be quantised.
    #[error("tensor {tensor}: {why}")]
    Quantize {
        /// Name of the tensor.
        tensor: String,
        /// Error of the op.
        why: Box<ops::OpError>,
    },
    /// A failure of the device, in its own words.
    #[error("the device failed: {0}")]
    Failed(String),
    /// An op that the device cannot run, or invalid operands of an op.
    #[error(transparent)]
    Op(#[from] ops::OpError),
}

impl Error {
    /// True if the error concerns a file of an adapter.
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

    /// Returns a hint for a folder that is not a supported model, as a line of its own; empty if the message
    /// has one.
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
                // The model itself is supported, and the caller may choose other sampling options.
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

/// Fault of a field.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A required field that the file lacks.
    #[error("is missing")]
    Missing,
    /// A value of the wrong type, or out of range.
    #[error("is {}, which is not {expected}", short(.value))]
    Malformed {
        /// Value in the file.
        value: Value,
        /// Description of a valid value.
        expected: String,
    },
    /// A valid value that this crate does not support.
    #[error("is {}, which is not supported; known: {known}", short(.value))]
    Unsupported {
        /// Value in the file.
        value: Value,
        /// Supported values, separated by commas.
        known: String,
    },
    /// A value that contradicts another field.
    #[error("is {}, but `{other}` is {}", short(.value), short(.other_value))]
    Contradiction {
        /// Value in the file.
        value: Value,
        /// Full name of the other field.
        other: String,
        /// Value of the other field.
        other_value: Value,
    },
    /// A size that is not a multiple of another one.
    #[error("is {}, which is not a multiple of `{divisor_field}`, {divisor}", short(.value))]
    NotMultiple {
        /// Value in the file.
        value: usize,
        /// Name of the field with the divisor.
        divisor_field: &'static str,
        /// Value of that field.
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
