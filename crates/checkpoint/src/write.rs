use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use quant::DType;
use safetensors::tensor::{Metadata, TensorInfo};
use tempfile::NamedTempFile;

use crate::dtype::to_file;
use crate::file::bytes_of;
use crate::state::MAX_BYTES;
use crate::{Error, Reason, Tensor};

/// Name, dtype and shape of a tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub name: String,
    pub dtype: DType,
    /// `None` for a text of at most 4096 bytes whose length is not known yet.
    pub shape: Option<Vec<usize>>,
}

/// Writes a safetensors file one tensor at a time, in any order. Until [`Writer::finish`] the target is
/// unchanged or absent.
///
/// Tensors are ordered by alignment and name, as in the safetensors crate, so each is aligned. Only texts
/// come last. Spaces at the end of the header fill the room that was reserved for texts.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: NamedTempFile,
    header_bytes: usize,
    /// Tensors in the order of the file.
    slots: Vec<Slot>,
    /// Indices into `slots` by name.
    names: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Slot {
    plan: Plan,
    /// Offset after the header; for a text, the largest possible one.
    start: usize,
    written: bool,
    /// Contents of a text, kept until the end.
    text: Vec<u8>,
}

impl Plan {
    /// Plans a tensor of known shape.
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: Some(shape.to_vec()) }
    }

    /// Plans a text, which is a U8 tensor of yet unknown length.
    pub fn text(name: impl Into<String>) -> Self {
        Self { name: name.into(), dtype: DType::U8, shape: None }
    }

    /// Checks that a tensor matches the plan.
    pub(crate) fn check(&self, tensor: &Tensor<'_>) -> Result<(), Reason> {
        if tensor.dtype != self.dtype {
            return Err(Reason::DType { have: tensor.dtype, need: vec![self.dtype] });
        }
        let need = self.shape.clone().unwrap_or_else(|| vec![tensor.bytes.len().min(MAX_BYTES)]);
        if tensor.shape != need {
            return Err(Reason::Shape { have: tensor.shape.clone(), need });
        }
        let (have, need) = (tensor.bytes.len(), bytes_of(self.dtype, &need)?);
        if have == need { Ok(()) } else { Err(Reason::Bytes { have, need }) }
    }

    /// Returns the bytes of the tensor; for a text, the maximum.
    fn bytes(&self) -> Result<usize, Reason> {
        self.shape.as_ref().map_or(Ok(MAX_BYTES), |shape| bytes_of(self.dtype, shape))
    }
}

impl Writer {
    /// Begins a file with these tensors.
    ///
    /// # Errors
    /// [`Error::Write`] if the file cannot be created; [`Error::Tensor`] for a duplicate name or a shape that
    /// overflows.
    pub fn create(
        path: impl AsRef<Path>,
        plan: impl IntoIterator<Item = Plan>,
    ) -> Result<Self, Error> {
        let path = path.as_ref().to_owned();
        let mut plan: Vec<Plan> = plan.into_iter().collect();
        plan.sort_by(|a, b| {
            let texts = a.shape.is_none().cmp(&b.shape.is_none());
            texts.then(to_file(b.dtype).cmp(&to_file(a.dtype))).then_with(|| a.name.cmp(&b.name))
        });
        let (mut slots, mut names, mut end) = (Vec::new(), BTreeMap::new(), 0usize);
        for plan in plan {
            if names.insert(plan.name.clone(), slots.len()).is_some() {
                return Err(Reason::Twice.in_tensor(plan.name));
            }
            let start = end;
            let next = plan.bytes().and_then(|bytes| {
                let shape = || plan.shape.clone().unwrap_or_default();
                start.checked_add(bytes).ok_or_else(|| Reason::Overflow(shape()))
            });
            end = next.map_err(|reason| reason.in_tensor(&plan.name))?;
            slots.push(Slot { plan, start, written: false, text: Vec::new() });
        }
        let refused = |why| Error::Write { path: path.clone(), why };
        // Texts never exceed their reserved room, so no number in the final header has more digits.
        let longest = header(&slots, |_| MAX_BYTES).map_err(refused)?;
        let header_bytes = longest.len().next_multiple_of(8);
        let file = beside(&path).map_err(refused)?;
        Ok(Self { path, file, header_bytes, slots, names })
    }

    /// Writes a tensor.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a tensor that was not planned, differs from its plan, or was written before;
    /// [`Error::Write`].
    pub fn write(&mut self, name: &str, tensor: &Tensor<'_>) -> Result<(), Error> {
        let index = self.names.get(name);
        let index =
            *index.ok_or_else(|| Reason::Unexpected("the planned tensors").in_tensor(name))?;
        let slot = &mut self.slots[index];
        slot.plan.check(tensor).map_err(|reason| reason.in_tensor(name))?;
        if slot.written {
            return Err(Reason::Twice.in_tensor(name));
        }
        if slot.plan.shape.is_none() {
            slot.text = tensor.bytes.to_vec();
        } else {
            let start = 8 + self.header_bytes + slot.start;
            self.put(start, &tensor.bytes)?;
        }
        self.slots[index].written = true;
        Ok(())
    }

    /// Writes the tensors of a weight.
    ///
    /// # Errors
    /// Errors of [`Writer::write`].
    pub fn write_all(&mut self, tensors: &[(String, Tensor<'_>)]) -> Result<(), Error> {
        tensors.iter().try_for_each(|(name, tensor)| self.write(name, tensor))
    }

    /// Completes the file and moves it to its path.
    ///
    /// # Errors
    /// [`Reason::Missing`] for a planned tensor that was not written; [`Error::Write`].
    pub fn finish(mut self) -> Result<(), Error> {
        if let Some(slot) = self.slots.iter().find(|slot| !slot.written) {
            return Err(Reason::Missing.in_tensor(&slot.plan.name));
        }
        let refused = |why| Error::Write { path: self.path.clone(), why };
        let mut bytes = header(&self.slots, |slot| slot.text.len()).map_err(refused)?;
        bytes.resize(self.header_bytes, b' ');
        let len = (self.header_bytes as u64).to_le_bytes();
        self.put(0, &[&len, &bytes[..]].concat())?;
        let texts = self.slots.iter().skip_while(|slot| slot.plan.shape.is_some());
        let start = texts.clone().next().map(|slot| 8 + self.header_bytes + slot.start);
        let texts: Vec<u8> = texts.flat_map(|slot| slot.text.iter().copied()).collect();
        if let Some(start) = start {
            self.put(start, &texts)?;
        }
        let refused = |why| Error::Write { path: self.path.clone(), why };
        self.file.as_file().sync_all().map_err(refused)?;
        self.file
            .persist(&self.path)
            .map_err(|fault| Error::Write { path: self.path.clone(), why: fault.error })?;
        Ok(())
    }

    fn put(&mut self, start: usize, bytes: &[u8]) -> Result<(), Error> {
        let seek = self.file.seek(SeekFrom::Start(start as u64));
        let put = seek.and_then(|_| self.file.write_all(bytes));
        put.map_err(|why| {
            // The system cannot read the bytes: they are those of a mapped file past its new end.
            let gone = why.raw_os_error() == Some(rustix::io::Errno::FAULT.raw_os_error());
            let text = "a source file became shorter during the copy";
            let why = if gone { io::Error::new(ErrorKind::UnexpectedEof, text) } else { why };
            Error::Write { path: self.path.clone(), why }
        })
    }
}

/// Formats the header; `text` returns the length of each text.
fn header(slots: &[Slot], text: impl Fn(&Slot) -> usize) -> io::Result<Vec<u8>> {
    let mut end = 0;
    let mut tensors = Vec::new();
    for slot in slots {
        let start = end;
        let shape = slot.plan.shape.clone().unwrap_or_else(|| vec![text(slot)]);
        end += bytes_of(slot.plan.dtype, &shape).map_err(io::Error::other)?;
        let info =
            TensorInfo { dtype: to_file(slot.plan.dtype), shape, data_offsets: (start, end) };
        tensors.push((slot.plan.name.clone(), info));
    }
    // transformers refuses a file without this entry.
    let pt = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(pt), tensors).map_err(io::Error::other)?;
    Ok(serde_json::to_vec(&metadata)?)
}

/// Creates a temporary file in the folder of `path`, with the permissions of the file that it replaces.
fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".flashover-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder)?;
    if let Ok(meta) = fs::metadata(path) {
        file.as_file().set_permissions(meta.permissions())?;
    }
    Ok(file)
}
