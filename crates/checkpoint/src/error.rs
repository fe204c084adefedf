use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use quant::{DType, WeightFormat};

use crate::dtype::to_file;

/// Returns the beginning of a text from a file, with control characters escaped, for one line of a message.
pub fn short(text: impl fmt::Display) -> String {
    const MAX_CHARS: usize = 200;
    let text = text.to_string();
    let mut out = String::new();
    for (at, char) in text.chars().enumerate() {
        match char {
            _ if at == MAX_CHARS => return out + "...",
            control if control.is_control() => out.extend(control.escape_debug()),
            plain => out.push(plain),
        }
    }
    out
}

/// Adds a line for each item of a list; of a long list, only the first and the number of the others.
pub fn list<T: fmt::Display>(text: &mut String, kind: &str, all: impl ExactSizeIterator<Item = T>) {
    const MAX_LINES: usize = 1000;
    let more = all.len().saturating_sub(MAX_LINES);
    for one in all.take(MAX_LINES) {
        text.push_str(&format!("\n{kind}: {}", short(one)));
    }
    if more > 0 {
        text.push_str(&format!("\n{kind}: {more} more"));
    }
}

fn sizes(shape: &[usize]) -> String {
    short(format!("{shape:?}"))
}

/// The reason that a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot read {}: {why}", .path.display())]
    Read { path: PathBuf, why: io::Error },
    /// The folder has neither of the two files.
    #[error(
        "{} has neither {stem}.safetensors nor {stem}.safetensors.index.json{}", .folder.display(),
        found.map_or_else(String::new, |found| format!("\nhint: {}", found.hint()))
    )]
    NoWeights { folder: PathBuf, stem: &'static str, found: Option<Found> },
    #[error("cannot write {}: {why}\nhint: {}", .path.display(), writable(.why))]
    Write { path: PathBuf, why: io::Error },
    /// The header is truncated, not JSON, or inconsistent with itself or the length of the file.
    #[error("{} is not a safetensors file: {}", .path.display(), short(.why))]
    Header { path: PathBuf, why: String },
    #[error("{} is not a valid shard index: {}", .path.display(), short(.why))]
    Index { path: PathBuf, why: String },
    #[error("{} names {}, which does not exist\nhint: download all shards", .index.display(), short(.shard))]
    MissingShard { index: PathBuf, shard: String },
    /// All tensors that are missing from the shard in the index, each with that shard.
    #[error("{}", misplaced(.index, .tensors))]
    Misplaced { index: PathBuf, tensors: Vec<(String, String)> },
    /// All tensors that are in two shards, each with both files.
    #[error("{}", twice(.index, .tensors))]
    Twice { index: PathBuf, tensors: Vec<(String, [PathBuf; 2])> },
    #[error("tensor {}: {reason}", short(.tensor))]
    Tensor { tensor: String, reason: Reason },
}

/// Returns a hint for a file or folder that cannot be written.
pub fn writable(why: &io::Error) -> &'static str {
    match why.kind() {
        ErrorKind::ResourceBusy => "wait until the other process ends, or choose another folder",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "free some space, raise the limit, or choose another folder"
        }
        ErrorKind::UnexpectedEof => "do not change the files of a model while they are read",
        _ => "choose a writable folder",
    }
}

/// Unreadable weights that a folder contains instead of readable ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Shards without an index.
    Shards,
    /// Weights that PyTorch pickled.
    Pickles,
    /// Weights for llama.cpp.
    Gguf,
}

impl Found {
    /// Detects such weights by the names of the files.
    pub(crate) fn in_folder(folder: &Path) -> Option<Self> {
        let names: Vec<String> = folder
            .read_dir()
            .ok()?
            .flatten()
            .filter_map(|e| e.file_name().into_string().ok())
            .collect();
        let any =
            |ends: &[&str]| names.iter().any(|name| ends.iter().any(|end| name.ends_with(end)));
        let found = [
            (names.iter().any(|name| is_shard(name)), Self::Shards),
            (any(&[".bin", ".pt", ".pth"]), Self::Pickles),
            (any(&[".gguf"]), Self::Gguf),
        ];
        found.into_iter().find(|(is, _)| *is).map(|(_, found)| found)
    }

    const fn hint(self) -> &'static str {
        match self {
            Self::Shards => "download model.safetensors.index.json, which the shards need",
            Self::Pickles => {
                "convert the PyTorch pickles in the folder to safetensors with `save_pretrained` \
                 of transformers or diffusers"
            }
            Self::Gguf => {
                "download the original safetensors; the folder has GGUF weights for llama.cpp"
            }
        }
    }
}

/// Returns true for a name like `model-00001-of-00002.safetensors`.
fn is_shard(name: &str) -> bool {
    name.starts_with("model-") && name.contains("-of-") && name.ends_with(".safetensors")
}

/// The problem with a tensor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Reason {
    #[error("is missing")]
    Missing,
    /// The tensor is not part of its neighbours' format.
    #[error("does not belong to {0}")]
    Unexpected(&'static str),
    #[error("occurs or is written twice")]
    Twice,
    #[error("is {}, expected {}", file_name(*.have), names(.need))]
    DType { have: DType, need: Vec<DType> },
    #[error("has shape {}, expected {need:?}", sizes(.have))]
    Shape { have: Vec<usize>, need: Vec<usize> },
    #[error("has shape {}, expected {need} axes", sizes(.have))]
    Axes { have: Vec<usize>, need: usize },
    #[error("expected the name `weight` for an int8 weight")]
    Name,
    #[error("has {have} bytes, expected {need} for its shape")]
    Bytes { have: usize, need: usize },
    #[error("shape {} is too large to count its elements", sizes(.0))]
    Overflow(Vec<usize>),
    /// The JSON of a quantization state is invalid.
    #[error("is not a quantization state: {}", short(.0))]
    State(String),
    #[error("has more than one quantization state: {}", short(.0.join(", ")))]
    States(Vec<String>),
    #[error("expected quantization type nf4 or fp4, got {}", short(format!("{:?}", .0)))]
    QuantType(String),
    /// The type in a quantization state differs from the type in its name.
    #[error("has type {state}, but its name says {name}")]
    QuantTypes { state: WeightFormat, name: WeightFormat },
    /// The codebook has the wrong order: NF4's 16 values ascend, FP4's do not.
    #[error("is not the codebook of {0}, the type in the quantization state")]
    QuantMap(WeightFormat),
    /// The largest magnitude in the codebook is not 1. It must be, because a scale is the largest magnitude of a block.
    #[error("has {0} as its largest magnitude, expected 1")]
    QuantMapEnd(f32),
    /// The codebook of nested scales does not ascend to 1; bitsandbytes uses 256 ascending values.
    #[error("does not ascend to 1")]
    NestedQuantMap,
    #[error("has a block size of {0}, expected a power of two from 32 to 4096")]
    BlockSize(usize),
    #[error("has a nested block size of {0}, expected 256")]
    NestedBlockSize(usize),
    #[error("has shape {}, expected {need:?} for a block size of {block_size}", sizes(.have))]
    Blocks { have: Vec<usize>, need: Vec<usize>, block_size: usize },
    /// The shape of the codes is wrong: two codes per byte, stored as `[bytes/size, 1]` in the storage's dtype.
    #[error("has shape {}, expected {len} 4-bit values stored as {}", sizes(.have), file_name(*.storage))]
    Packing { have: Vec<usize>, len: usize, storage: DType },
    #[error("value {index} is infinite or NaN")]
    NotFinite { index: usize },
    #[error("value {index} is negative, expected a magnitude")]
    Negative { index: usize },
    #[error("has weight format {0}, expected 0 (rows)")]
    WeightFormat(u8),
}

impl Reason {
    pub(crate) fn in_tensor(self, tensor: impl Into<String>) -> Error {
        Error::Tensor { tensor: tensor.into(), reason: self }
    }
}

fn misplaced(index: &Path, tensors: &[(String, String)]) -> String {
    let (index, count) = (index.display(), tensors.len());
    let mut text = format!("{index} lists tensors that their shards lack: {count} missing");
    list(
        &mut text,
        "missing",
        tensors.iter().map(|(tensor, shard)| format!("{tensor} in {shard}")),
    );
    text
}

fn twice(index: &Path, tensors: &[(String, [PathBuf; 2])]) -> String {
    let (index, count) = (index.display(), tensors.len());
    let mut text = format!("the shards of {index} contain tensors twice: {count}");
    let both = |(tensor, [one, other]): &(String, [PathBuf; 2])| {
        format!("{tensor} in {} and {}", one.display(), other.display())
    };
    list(&mut text, "twice", tensors.iter().map(both));
    text + "\nhint: download all shards again from one source; the copies are ambiguous"
}

fn names(dtypes: &[DType]) -> String {
    let names: Vec<_> = dtypes.iter().copied().map(file_name).collect();
    names.join(" or ")
}

/// Returns the name of an element type in file headers.
fn file_name(dtype: DType) -> String {
    format!("{:?}", to_file(dtype))
}
