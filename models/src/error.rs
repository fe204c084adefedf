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
    #[error("{file} is not a JSON object")]
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
    #[error("{file}: `model_type` is \"{}\", expected one of {known}", short(.value))]
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
    #[error("{}", tensors("tensors are damaged or do not match config.json", .missing, .unused, .wrong))]
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
        "{}\nhint: pass an adapter of this model, with tensors lora_A and lora_B of its matrices",
        tensors("the tensors do not match an adapter of this model", .missing, .unused, .wrong)
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
    #[error("no layer matrix is named {target}\nhint: use one of {known}")]
    Target {
        /// The requested target.
        target: String,
        /// Valid names, separated by commas.
        known: String,
    },
    /// A rank of 0 or above the limit, or an alpha that is not a finite number above 0.
    #[error(
        "rank {rank} and alpha {alpha:?} are not supported\nhint: use a rank from 1 to {max} and an alpha \
         above 0 (--lora-rank, --lora-alpha)"
    )]
    Rank {
        /// The requested rank.
        rank: usize,
        /// The requested alpha.
        alpha: f64,
        /// The largest valid rank.
        max: usize,
    },
    /// A quantised model whose own weights are to be trained.
    #[error(
        "the weights are quantised, and only dense ones can be trained\nhint: train an adapter \
         instead (--lora-rank without --full), or use the model's dense weights"
    )]
    QuantizedWeights,
    /// A batch without target tokens, or with an empty sequence.
    #[error(
        "a batch has no target tokens\nhint: pass sequences of at least two tokens, and at \
         least one token after the prompt"
    )]
    NothingToLearn,
    /// Numbers of a policy for another number of tokens, or of sequences, than a batch has.
    #[error("expected {need} {what} of a policy, got {have}\nhint: pass one per learned token")]
    PolicyLength {
        /// Name of the numbers.
        what: &'static str,
        /// Number that was passed.
        have: usize,
        /// Number that the batch needs.
        need: usize,
    },
    /// A file or folder that cannot be written.
    #[error("cannot write {}: {why}\nhint: {}", .path.display(), checkpoint::writable(.why))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// More tokens than the context length of the model.
    #[error(
        "expected at most {max_seq} tokens, got {need}\nhint: use fewer tokens, or raise the context (--max-context)"
    )]
    Context {
        /// Number of tokens requested.
        need: usize,
        /// Context length of the model.
        max_seq: usize,
    },
    /// A context longer than the learned position embeddings of a model.
    #[error(
        "expected a context of at most {max_seq} tokens, got {need}\nhint: shorten the context; \
         the model has {max_seq} learned position embeddings"
    )]
    LearnedPositions {
        /// Context length requested, in tokens.
        need: usize,
        /// Number of learned position embeddings.
        max_seq: usize,
    },
    /// More tokens than the capacity of a KV cache.
    #[error(
        "expected at most {capacity} tokens in the cache, got {need}\nhint: use a shorter prompt or \
         a larger session"
    )]
    Full {
        /// Number of tokens requested.
        need: usize,
        /// Capacity of each sequence, in tokens.
        capacity: usize,
    },
    /// Sequences that need more pages of a cache than are free.
    #[error(
        "expected sequences of at most {have} pages of the cache, got {need}\nhint: use fewer sequences or a larger cache"
    )]
    Pages {
        /// Number of pages that are needed.
        need: usize,
        /// Number of free pages.
        have: usize,
    },
    /// A sequence that is not in the cache.
    #[error("sequence {sequence} is not in the cache: it left, or never joined")]
    Left {
        /// Number of the sequence.
        sequence: usize,
    },
    /// A token past the vocabulary.
    #[error(
        "token {id} is outside the vocabulary of {vocab} tokens\nhint: use the tokenizer of this \
         model"
    )]
    Token {
        /// The token id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Step tokens that the sequences of a KV cache cannot take together.
    #[error(
        "got {tokens:?} tokens for a cache of {batch} sequences\nhint: pass the same number for \
         each sequence, and at most 16 where their lengths differ"
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
        "sequences of {length} tokens need a re-prefill for RoPE scaling, which a batch does \
         not support\nhint: run one sequence at a time"
    )]
    Stretched {
        /// Length that the longest sequence would have, in tokens.
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
    /// A weight with values that are infinite or NaN in the compute dtype.
    #[error(
        "tensor {tensor} has values that are infinite or NaN in {dtype}\nhint: {}",
        if *.stored { "download the weights again" } else { "compute in f32 or bf16" }
    )]
    NotFinite {
        /// Name of the tensor.
        tensor: String,
        /// The compute dtype.
        dtype: &'static str,
        /// True if the file has such values too.
        stored: bool,
    },
    /// A sample whose size the levels of a U-Net do not divide.
    #[error(
        "expected height and width that are multiples of {multiple}, got {size:?}\nhint: resize or pad the sample"
    )]
    SampleSize {
        /// Height and width.
        size: [usize; 2],
        /// Their divisor.
        multiple: usize,
    },
    /// A frame of a U-Net without samples, or with more pixels or tokens than 32 bits count.
    #[error(
        "expected a frame of 1 to 4294967295 {what}, got {have}\nhint: pass other sizes, or fewer samples at a time"
    )]
    FrameSize {
        /// Name of what is counted.
        what: &'static str,
        /// Number in the frame.
        have: u64,
    },
    /// An input of a U-Net with the wrong number of values.
    #[error("expected {need} {what}, got {have}\nhint: pass the values of each sample")]
    UnetInput {
        /// Name of the input.
        what: &'static str,
        /// Values given.
        have: usize,
        /// Values expected.
        need: usize,
    },
    /// An input that a U-Net reads, and that is missing.
    #[error("the model reads {0}, but none is given\nhint: pass it with each frame")]
    NoInput(&'static str),
    /// An input that a U-Net does not read.
    #[error("the model does not read {0}\nhint: leave it out")]
    Unread(&'static str),
    /// A frame whose result has values that are infinite or NaN.
    #[error(
        "the result of a frame has values that are infinite or NaN\nhint: check the inputs, or compute in f32 or bf16"
    )]
    NotFiniteResult,
    /// More steps of a sampler than its training had, or none.
    #[error("expected 1 to {most} steps, got {have}\nhint: choose a number in this range")]
    Steps {
        /// Steps given.
        have: usize,
        /// Steps of the training.
        most: usize,
    },
    /// A timestep that `steps_offset` moves past the last of the training.
    #[error(
        "the first step would be at timestep {have}, but the last one of the training is {last}\nhint: choose fewer steps, or \
         another `timestep_spacing`"
    )]
    Timestep {
        /// The timestep.
        have: usize,
        /// The last timestep of the training.
        last: usize,
    },
    /// A U-Net whose result cannot be a sample.
    #[error(
        "sampling needs as many result channels as sample channels, but the model has {out} and {own}\nhint: use a model that \
         predicts samples of its own shape"
    )]
    SampleChannels {
        /// Channels of a sample.
        own: usize,
        /// Channels of a result.
        out: usize,
    },
    /// A class that a U-Net does not have.
    #[error("expected a class from 0 to {}, got {class}\nhint: pass the index of a class", count - 1)]
    Class {
        /// The class given.
        class: f32,
        /// Number of classes.
        count: usize,
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
                    "\nhint: pass a PEFT folder with adapter_config.json and \
                     adapter_model.safetensors"
                }
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                    "\nhint: pass a Hugging Face folder with config.json and all its safetensors"
                }
                io::ErrorKind::Unsupported => {
                    "\nhint: fetch the file with `git lfs pull` in its folder"
                }
                _ => "\nhint: pass a file that you can read",
            },
            Self::Checkpoint(File::NoWeights { found: None, .. }) => {
                "\nhint: pass a Hugging Face folder with config.json and all its safetensors"
            }
            Self::Json { .. }
            | Self::NotAnObject { .. }
            | Self::Checkpoint(File::Header { .. } | File::Index { .. }) => {
                "\nhint: download the file again; it is truncated or damaged"
            }
            Self::Checkpoint(File::Misplaced { .. }) => {
                "\nhint: download the index and all its shards again, from one model"
            }
            Self::Field { file, fault, .. } => match **fault {
                // The model itself is supported, and the caller may choose other sampling options.
                Fault::Unsupported { .. } if *file == GENERATION_CONFIG => {
                    "\nhint: remove the field from the file; the model then samples without this \
                     setting of its makers"
                }
                Fault::Unsupported { .. } => "\nhint: use a model with a supported value",
                Fault::OtherKind(_) => "\nhint: use the command for this kind of model",
                _ => "\nhint: download the unchanged file from the source of the weights",
            },
            Self::UnknownModelType { .. } => "\nhint: use a model of one of these families",
            Self::Tensors { .. } | Self::Checkpoint(File::Tensor { .. }) => {
                "\nhint: download config.json and all weights again, from one model"
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
    /// A field that the file lacks because it is of another kind of model.
    #[error("is missing: this is {0}")]
    OtherKind(&'static str),
    /// A value of the wrong type, or out of range.
    #[error("is {}, expected {expected}", short(.value))]
    Malformed {
        /// Value in the file.
        value: Value,
        /// Description of a valid value.
        expected: String,
    },
    /// A valid value that this crate does not support.
    #[error("is {}, which is not supported; expected {known}", short(.value))]
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
    #[error("is {}, expected a multiple of `{divisor_field}`, {divisor}", short(.value))]
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
