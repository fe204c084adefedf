//! The files of a model's folder next to its weights.

use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use models::Error;

use crate::fnv::Fnv1a;

/// Configuration of the model.
pub(crate) const CONFIG: &str = "config.json";
/// All weights of a saved model.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// Files of a model with several files of weights.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Buffers of a training run.
pub(crate) const STATE: &str = "flashover_run.safetensors";
/// Options and position of a training run.
pub(crate) const RUN: &str = "flashover_run.json";
/// Batch of a GRPO run between its updates.
pub(crate) const BATCH: &str = "flashover_grpo.json";
/// Weights of the reference of a GRPO run.
pub(crate) const REFERENCE: &str = "flashover_reference.bin";

/// Returns a hash of names and shapes of all tensors, and of their first and last values.
pub(crate) fn hash(checkpoint: &Checkpoint) -> Result<u64, Error> {
    const ENDS: usize = 256;
    let mut hash = Fnv1a::new();
    for name in checkpoint.names() {
        let own = checkpoint.tensor(name)?;
        let last = &own.bytes[own.bytes.len().saturating_sub(ENDS)..];
        let first = &own.bytes[..own.bytes.len().min(ENDS)];
        let bytes = name.bytes().chain(first.iter().copied()).chain(last.iter().copied());
        bytes.for_each(|byte| hash.add(byte));
        own.shape.iter().for_each(|size| hash.add(*size as u64));
    }
    Ok(hash.value())
}

/// Returns the paths of the files to copy, relative to the folder: all except weights of any format, hidden files, the state of
/// a training run, and subfolders with weights, which are models of their own.
pub(crate) fn others(model: &Path, checkpoint: &Checkpoint) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let at = model.join(&folder);
        let read = |why| Error::Read { path: at.clone(), why };
        let entries = fs::read_dir(&at).map_err(read)?;
        let entries = entries.collect::<Result<Vec<_>, _>>().map_err(read)?;
        let has_weights = |entry: &DirEntry| is_weights(&entry.file_name().to_string_lossy());
        if at != model && entries.iter().any(has_weights) {
            continue;
        }
        for entry in entries {
            let name = entry.file_name();
            let path = folder.join(&name);
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if entry.file_type().map_err(read)?.is_dir() {
                folders.push(path);
            } else if entry.path().is_file()
                && ![CONFIG, STATE, RUN, BATCH, REFERENCE].iter().any(|own| path == Path::new(own))
                && !is_weights(&name.to_string_lossy())
                && !checkpoint.files().any(|file| file == entry.path())
            {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns true if a file holds the quantised weights, or the same weights in another format.
fn is_weights(name: &str) -> bool {
    const ENDS: [&str; 9] =
        [".pth", ".pt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot", ".index.json"];
    let named = |starts: &str, ends: &str| name.starts_with(starts) && name.ends_with(ends);
    named("model", ".safetensors")
        || named("adapter_model", ".safetensors")
        || named("consolidated", ".safetensors")
        || named("pytorch_model", ".bin")
        || ENDS.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_known_by_their_names() {
        for name in [
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "pytorch_model-00001-of-00002.bin",
            "consolidated.00.pth",
            "consolidated.safetensors",
            "x-q4_0.gguf",
        ] {
            assert!(is_weights(name), "{name}");
        }
        for name in ["tokenizer.json", "tokenizer.model", "training_args.bin", "README.md"] {
            assert!(!is_weights(name), "{name}");
        }
    }
}
