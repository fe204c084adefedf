//! An ONNX file, and its external data files.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use memmap2::Mmap;
use prost::Message;

use crate::OnnxError;
use crate::proto::{ModelProto, TensorProto};

/// An opened file. Tensor data stay in mapped memory until they are used.
pub(crate) struct Source {
    pub(crate) model: ModelProto,
    pub(crate) files: Files,
}

/// External data files, mapped at first use.
pub(crate) struct Files {
    /// Folder of the model; None for a model in memory.
    folder: Option<PathBuf>,
    mapped: HashMap<String, Bytes>,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, OnnxError> {
        let model = decode(map(path)?, path)?;
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Self { model, files: Files { folder: Some(folder), mapped: HashMap::new() } })
    }
}

fn decode(bytes: Bytes, path: &Path) -> Result<ModelProto, OnnxError> {
    let failed = |why: String| OnnxError::Decode { path: path.to_owned(), why };
    let model = ModelProto::decode(bytes).map_err(|why| failed(why.to_string()))?;
    match model.graph {
        Some(_) => Ok(model),
        None => Err(failed("the file has no graph".to_owned())),
    }
}

fn map(path: &Path) -> Result<Bytes, OnnxError> {
    let failed = |why| OnnxError::Read { path: path.to_owned(), why };
    let file = File::open(path).map_err(failed)?;
    // SAFETY: as for other checkpoints, the file must not change while it is in use.
    let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
    Ok(Bytes::from_owner(map))
}

impl Files {
    /// Returns no files: external data are an error.
    pub(crate) fn none() -> Self {
        Self { folder: None, mapped: HashMap::new() }
    }

    /// Returns the external data of a tensor.
    pub(crate) fn bytes(&mut self, tensor: &TensorProto) -> Result<Bytes, OnnxError> {
        let failed = |why: String| OnnxError::Tensor { name: tensor.name.clone(), why };
        let entry = |key: &str| {
            tensor.external_data.iter().find(|own| own.key == key).map(|own| own.value.as_str())
        };
        let number = |key: &str| match entry(key) {
            None => Ok(None),
            Some(text) => text.parse::<usize>().map(Some).map_err(|_| {
                failed(format!("expected a number as {key} of external data, got `{text}`"))
            }),
        };
        let (offset, length) = (number("offset")?.unwrap_or(0), number("length")?);
        let location = entry("location")
            .ok_or_else(|| failed("its external data have no location".to_owned()))?;
        let Some(folder) = &self.folder else {
            return Err(failed(format!(
                "expected data in the tensor, got external data in {location}"
            )));
        };
        if !self.mapped.contains_key(location) {
            let path = inside(folder, location).map_err(failed)?;
            self.mapped.insert(location.to_owned(), map(&path)?);
        }
        let all = &self.mapped[location];
        let end = length.map_or(Some(all.len()), |length| offset.checked_add(length));
        match end.filter(|end| offset <= *end && *end <= all.len()) {
            Some(end) => Ok(all.slice(offset..end)),
            None => {
                let have = all.len();
                Err(failed(format!(
                    "{location} has {have} bytes and ends before the tensor's data"
                )))
            }
        }
    }
}

/// Returns the path of a file in `folder`; an error for a path outside of it.
fn inside(folder: &Path, location: &str) -> Result<PathBuf, String> {
    let relative = Path::new(location);
    let down =
        relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    let hint = "hint: move external data into the model's folder";
    let out = || format!("{location} is outside the model's folder\n{hint}");
    if !down {
        return Err(out());
    }
    let path = folder.join(relative);
    // A symbolic link may also lead outside.
    let real =
        |path: &Path| path.canonicalize().map_err(|why| format!("cannot read {location}: {why}"));
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let (own, folder) = (real(&path)?, real(folder)?);
    if own.starts_with(&folder) { Ok(own) } else { Err(out()) }
}
