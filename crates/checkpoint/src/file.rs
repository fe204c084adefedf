use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use quant::DType;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use crate::dtype::from_file;
use crate::{Error, Found, Reason};

/// Largest accepted header in bytes, as in the safetensors crate: its JSON is held in memory.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// Tensors by name, in one file or in the shards of a folder. Files are memory-mapped: only requested
/// tensors are read, without a copy.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Arc<Mmap>,
}

#[derive(Debug)]
struct Place {
    shard: usize,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// A part of a file; the file stays mapped while this exists.
#[derive(Debug, Clone)]
pub struct Mapped {
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }
}

/// A dense row-major tensor with little-endian bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

/// Contents of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a safetensors file, an index of shards, or a folder.
    ///
    /// In a folder it opens `model.safetensors`, else `model.safetensors.index.json`, as transformers does: an index
    /// next to a whole file is left from an older save. Tensors of a shard that the index does not list are included.
    /// The files must not be shortened while they are open.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Header`], [`Error::Index`]; [`Error::NoWeights`] for a folder without either file;
    /// [`Error::MissingShard`] for a missing shard, before any is opened; [`Error::Misplaced`] for tensors that are
    /// not in their shards; [`Error::Twice`] for tensors in two shards.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        match path.extension() {
            _ if path.is_dir() => Self::open_stem(path, "model"),
            Some(extension) if extension == "json" => Self::open_index(path),
            _ => Self::open_file(path),
        }
    }

    /// Opens the weights of a folder whose file names begin with `stem`: one file, else an index of shards; else the same of
    /// diffusers' variant `fp16`.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::open`].
    pub fn open_stem(folder: &Path, stem: &'static str) -> Result<Self, Error> {
        // A dangling link counts as an unreadable file, not as a missing one.
        let there = |file: &Path| {
            !file.symlink_metadata().is_err_and(|why| why.kind() == io::ErrorKind::NotFound)
        };
        for variant in ["", ".fp16"] {
            let whole = folder.join(format!("{stem}{variant}.safetensors"));
            if there(&whole) {
                return Self::open_file(&whole);
            }
            let index = folder.join(format!("{stem}.safetensors.index{variant}.json"));
            if there(&index) {
                return Self::open_index(&index);
            }
        }
        let found = Found::in_folder(folder);
        Err(Error::NoWeights { folder: folder.to_owned(), stem, found })
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns true if a tensor of this name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns a tensor with its bytes in the file.
    ///
    /// # Errors
    /// [`Reason::Missing`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, Error> {
        let place = self.tensors.get(name).ok_or_else(|| Reason::Missing.in_tensor(name))?;
        let bytes = &self.shards[place.shard].map[place.bytes.clone()];
        Ok(Tensor { dtype: place.dtype, shape: place.shape.clone(), bytes: bytes.into() })
    }

    /// Returns a handle to bytes from [`Checkpoint::tensor`] that keeps their file mapped, for asynchronous uploads.
    /// `None` if the bytes do not belong to a file of this checkpoint.
    pub fn mapped(&self, bytes: &[u8]) -> Option<Mapped> {
        self.shards.iter().find_map(|shard| {
            let start = bytes.as_ptr().addr().checked_sub(shard.map.as_ptr().addr())?;
            let range = start..start.checked_add(bytes.len())?;
            (range.end <= shard.map.len()).then(|| Mapped { map: shard.map.clone(), range })
        })
    }

    /// Returns the files of the checkpoint.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Releases the memory pages of a tensor. The system no longer counts them as memory of this process, and
    /// reads them again from the file on the next access. Without this call every tensor that was ever read
    /// counts. Does nothing if the tensor does not exist or the system lacks such a call.
    pub fn release(&self, name: &str) {
        #[cfg(unix)]
        if let Some(Place { shard, bytes, .. }) = self.tensors.get(name) {
            let (map, advice) = (&self.shards[*shard].map, UncheckedAdvice::DontNeed);
            // SAFETY: the map is never written, so dropped pages are read again unchanged.
            let released = unsafe { map.unchecked_advise_range(advice, bytes.start, bytes.len()) };
            // On an error the pages stay in memory.
            released.ok();
        }
    }

    /// Returns the names that start with `{name}.`, without that prefix.
    pub(crate) fn below(&self, name: &str) -> impl Iterator<Item = &str> {
        let prefix = format!("{name}.");
        let from = self.tensors.range(prefix.clone()..);
        from.map_while(move |(name, _)| name.strip_prefix(prefix.as_str()))
    }

    fn open_file(path: &Path) -> Result<Self, Error> {
        let mut checkpoint = Self { shards: Vec::new(), tensors: BTreeMap::new() };
        checkpoint.tensors = checkpoint.map(path)?;
        Ok(checkpoint)
    }

    fn open_index(path: &Path) -> Result<Self, Error> {
        let bad = |why: String| Error::Index { path: path.to_owned(), why };
        let read = ends(path).and_then(|()| fs::read(path));
        let text = read.map_err(|why| Error::Read { path: path.to_owned(), why })?;
        let index: Index = serde_json::from_slice(&text).map_err(|why| bad(why.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut shards: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
        for (name, shard) in &index.weight_map {
            if Path::new(shard).file_name() != Some(shard.as_ref()) {
                return Err(bad(format!("expected a file name in the same folder, got {shard:?}")));
            }
            shards.entry(shard).or_default().push(name);
        }
        if let Some(shard) = shards.keys().find(|shard| !folder.join(shard).is_file()) {
            return Err(Error::MissingShard { index: path.to_owned(), shard: (*shard).into() });
        }
        let mut checkpoint = Self { shards: Vec::new(), tensors: BTreeMap::new() };
        let mut tensors = Vec::new();
        let mut unlisted = Vec::new();
        for (shard, names) in shards {
            let mut places = checkpoint.map(&folder.join(shard))?;
            for name in names {
                match places.remove(name) {
                    Some(place) => drop(checkpoint.tensors.insert(name.clone(), place)),
                    None => tensors.push((name.clone(), shard.to_owned())),
                }
            }
            unlisted.extend(places);
        }
        if !tensors.is_empty() {
            return Err(Error::Misplaced { index: path.to_owned(), tensors });
        }
        let twice = checkpoint.take_unlisted(unlisted);
        match twice.is_empty() {
            true => Ok(checkpoint),
            false => Err(Error::Twice { index: path.to_owned(), tensors: twice }),
        }
    }

    /// Adds tensors that no index lists, so that a caller can report those that it does not expect. Returns the
    /// duplicates, with both files.
    fn take_unlisted(&mut self, unlisted: Vec<(String, Place)>) -> Vec<(String, [PathBuf; 2])> {
        let mut twice = Vec::new();
        for (name, place) in unlisted {
            match self.tensors.entry(name) {
                Entry::Vacant(free) => drop(free.insert(place)),
                Entry::Occupied(first) => {
                    let files = [first.get(), &place].map(|p| self.shards[p.shard].path.clone());
                    twice.push((first.key().clone(), files));
                }
            }
        }
        twice
    }

    /// Maps a file as the next shard, and returns its tensors.
    fn map(&mut self, path: &Path) -> Result<BTreeMap<String, Place>, Error> {
        let read = |why| Error::Read { path: path.to_owned(), why };
        ends(path).map_err(read)?;
        let file = File::open(path).map_err(read)?;
        if !file.metadata().map_err(read)?.is_file() {
            return Err(read(io::Error::other("not a file")));
        }
        // SAFETY: the map is only read. `open` requires that files are not shortened meanwhile, and any
        // changed bytes are still valid bytes.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        let places = places(&map, self.shards.len())
            .map_err(|why| Error::Header { path: path.to_owned(), why })?;
        self.shards.push(Shard { path: path.to_owned(), map: Arc::new(map) });
        Ok(places)
    }
}

impl<'a> Tensor<'a> {
    /// Makes a tensor. The number of bytes is checked against the shape where the tensor is used.
    pub fn new(dtype: DType, shape: &[usize], bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        Self { dtype, shape: shape.to_vec(), bytes: bytes.into() }
    }

    /// Returns the values of an F32 tensor, borrowed if the bytes are aligned to four.
    ///
    /// # Errors
    /// [`Reason::DType`], [`Reason::Bytes`].
    pub fn f32s(self) -> Result<Cow<'a, [f32]>, Reason> {
        if self.dtype != DType::F32 {
            return Err(Reason::DType { have: self.dtype, need: vec![DType::F32] });
        }
        let (have, need) = (self.bytes.len(), bytes_of(self.dtype, &self.shape)?);
        if have != need {
            return Err(Reason::Bytes { have, need });
        }
        Ok(match self.bytes {
            Cow::Borrowed(bytes) if cfg!(target_endian = "little") => {
                match bytemuck::try_cast_slice(bytes) {
                    Ok(values) => Cow::Borrowed(values),
                    Err(_) => Cow::Owned(values(bytes)),
                }
            }
            bytes => Cow::Owned(values(&bytes)),
        })
    }

    /// Returns the values of an F16, BF16 or F32 tensor as f32.
    ///
    /// # Errors
    /// [`Reason::DType`], [`Reason::Bytes`].
    pub fn widened(self) -> Result<Cow<'a, [f32]>, Reason> {
        let (have, need) = (self.bytes.len(), bytes_of(self.dtype, &self.shape)?);
        let halves = self.bytes.as_chunks::<2>().0.iter();
        match self.dtype {
            DType::F32 => self.f32s(),
            _ if have != need => Err(Reason::Bytes { have, need }),
            DType::F16 => Ok(halves.map(|two| f16::from_le_bytes(*two).to_f32()).collect()),
            DType::Bf16 => Ok(halves.map(|two| bf16::from_le_bytes(*two).to_f32()).collect()),
            have => Err(Reason::DType { have, need: DType::FLOATS.to_vec() }),
        }
    }

    /// Makes a 1-D F32 tensor.
    pub(crate) fn of_f32s(values: &'a [f32]) -> Self {
        let bytes = if cfg!(target_endian = "little") {
            Cow::Borrowed(bytemuck::cast_slice(values))
        } else {
            Cow::Owned(values.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        Self { dtype: DType::F32, shape: vec![values.len()], bytes }
    }
}

/// Returns the bytes of a tensor; an error on overflow.
pub(crate) fn bytes_of(dtype: DType, shape: &[usize]) -> Result<usize, Reason> {
    // Counted in bits, as in the safetensors crate.
    let bits = shape.iter().try_fold(8 * dtype.size(), |n, axis| n.checked_mul(*axis));
    bits.map(|bits| bits / 8).ok_or_else(|| Reason::Overflow(shape.to_vec()))
}

fn values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Returns the places of the tensors in a file. The safetensors crate adds lengths from the file, which may
/// overflow; here they are checked before.
fn places(file: &[u8], shard: usize) -> Result<BTreeMap<String, Place>, String> {
    let (len, rest) = file.split_first_chunk::<8>().ok_or("it is shorter than 8 bytes")?;
    let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
    let header = rest.get(..len).ok_or("its header is longer than the file")?;
    if len > MAX_HEADER_BYTES {
        return Err(format!("its header has {len} bytes, expected at most {MAX_HEADER_BYTES}"));
    }
    let metadata: Metadata = serde_json::from_slice(header).map_err(|why| why.to_string())?;
    let (need, have) = (metadata.data_len(), rest.len() - len);
    if need != have {
        return Err(format!("expected {need} bytes of tensors, got {have}"));
    }
    let place = |(name, info): (String, &TensorInfo)| {
        let (start, end) = info.data_offsets;
        let bytes = 8 + len + start..8 + len + end;
        let unread = || format!("tensor {name} has the unsupported dtype {:?}", info.dtype);
        let dtype = from_file(info.dtype).ok_or_else(unread)?;
        Ok((name, Place { shard, dtype, shape: info.shape.clone(), bytes }))
    };
    metadata.tensors().into_iter().map(place).collect()
}

/// Start of a git-lfs pointer, which stands for a file that was not fetched.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Checks that `path` is a folder or a regular file, and not a git-lfs pointer. A read from a pipe might
/// never end.
///
/// # Errors
/// The path does not exist, or is neither file nor folder; [`io::ErrorKind::Unsupported`] for a pointer.
pub fn ends(path: &Path) -> io::Result<()> {
    let meta = fs::metadata(path)?;
    if meta.is_dir() {
        return Ok(());
    }
    if !meta.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let mut start = Vec::new();
    File::open(path)?.take(POINTER.len() as u64).read_to_end(&mut start)?;
    if start == POINTER {
        let why = "it is a git-lfs pointer instead of the file";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    Ok(())
}
