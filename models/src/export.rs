//! Flat buffers in files: weights under their names in a checkpoint, and the state of training.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use burn::tensor::{DType as Burn, Tensor as Device};
use checkpoint::{Checkpoint, DType, Plan, Reason, Tensor, Writer};
use ops::training::HostBuffer;

use crate::weights::full_name;
use crate::{Buffer, DecoderConfig, Error, FlatWeights, Param};

impl FlatWeights {
    /// Writes all weights in their dtype into one safetensors file. `prefix` is that of the names, without which the family's
    /// usual one is taken.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that cannot be written; [`Error::Failed`], [`Error::Op`] if the device failed.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        config: &DecoderConfig,
        prefix: Option<&str>,
    ) -> Result<(), Error> {
        let usual = config.family.prefixes().first().copied().unwrap_or_default();
        let dtype = dtype_of(self.values().dtype());
        let params = config.params();
        let mut tensors: BTreeMap<String, Vec<&Param>> = BTreeMap::new();
        for param in &params {
            tensors.entry(full_name(prefix.unwrap_or(usual), param)).or_default().push(param);
        }
        let plans = tensors.iter().map(|(name, own)| Plan::new(name, dtype, &own[0].stored));
        let mut writer = Writer::create(path, plans.collect::<Vec<_>>())?;
        // Queries, keys and values are one tensor of the buffer, and several of most files.
        let mut last = (usize::MAX, Vec::new());
        for (name, own) in &tensors {
            let stored = &own[0].stored;
            let mut bytes = vec![0; stored.iter().product::<usize>() * dtype.size()];
            for param in own {
                let all = self.parameters().tensors();
                let holds = |tensor: &&crate::FlatTensor| tensor.params.contains(param);
                let tensor = all.iter().find(holds).expect("all parameters are laid out");
                if last.0 != tensor.at {
                    last = (tensor.at, downloaded(self.values(), tensor.at, tensor.len())?);
                }
                let (_, range) = tensor.parts().find(|(part, _)| part == param).expect("a part");
                let range = range.start - tensor.at..range.end - tensor.at;
                let values = &last.1[range.start * dtype.size()..range.end * dtype.size()];
                place(&mut bytes, values, param, dtype.size());
            }
            writer.write(name, &Tensor::new(dtype, stored, bytes))?;
        }
        Ok(writer.finish()?)
    }
}

/// Copies a parameter's values into its tensor of the file.
fn place(bytes: &mut [u8], values: &[u8], param: &Param, size: usize) {
    let width = param.shape.get(1).copied().unwrap_or(1);
    if !param.transposed || param.shape.len() == 1 {
        let from = param.row * width * size;
        bytes[from..from + values.len()].copy_from_slice(values);
        return;
    }
    let columns = param.stored[1];
    for (row, own) in values.chunks(width * size).enumerate() {
        for (column, value) in own.chunks(size).enumerate() {
            let at = (column * columns + param.row + row) * size;
            bytes[at..at + size].copy_from_slice(value);
        }
    }
}

/// Elements of a buffer that are on the host at once.
const CHUNK: usize = 1 << 26;

/// Writes buffers into one safetensors file. Each is cut into tensors of at most 2²⁶ elements.
///
/// # Errors
/// [`Error::Checkpoint`] for a file that cannot be written; [`Error::Failed`], [`Error::Op`] if the device failed.
pub fn write_buffers(
    path: impl AsRef<Path>,
    buffers: &mut [(String, Buffer<'_>)],
) -> Result<(), Error> {
    let plans = buffers.iter().flat_map(|(name, buffer)| {
        let (len, dtype) = (buffer.len(), dtype_of(buffer.dtype()));
        chunks(len)
            .map(move |(index, range)| Plan::new(chunk_name(name, index), dtype, &[range.len()]))
    });
    let mut writer = Writer::create(path, plans.collect::<Vec<_>>())?;
    for (name, buffer) in buffers {
        for (index, range) in chunks(buffer.len()) {
            let (len, dtype) = (range.len(), dtype_of(buffer.dtype()));
            let tensor = Tensor::new(dtype, &[len], buffer.read(range)?);
            writer.write(&chunk_name(name, index), &tensor)?;
        }
    }
    Ok(writer.finish()?)
}

/// Overwrites buffers with those of a file that [`write_buffers`] wrote.
///
/// # Errors
/// [`Error::Checkpoint`] for a file that cannot be read, or whose buffers have other names, lengths or dtypes;
/// [`Error::Op`].
pub fn read_buffers(
    path: impl AsRef<Path>,
    buffers: &mut [(String, Buffer<'_>)],
) -> Result<(), Error> {
    let file = Checkpoint::open(path)?;
    let wrong = |name: &str, reason| checkpoint::Error::Tensor { tensor: name.into(), reason };
    for (name, buffer) in buffers {
        for (index, range) in chunks(buffer.len()) {
            let name = chunk_name(name, index);
            let (tensor, need) = (file.tensor(&name)?, dtype_of(buffer.dtype()));
            if tensor.dtype != need {
                let reason = Reason::DType { have: tensor.dtype, need: vec![need] };
                return Err(wrong(&name, reason).into());
            }
            if tensor.shape != [range.len()] {
                let (have, need) = (tensor.shape, vec![range.len()]);
                return Err(wrong(&name, Reason::Shape { have, need }).into());
            }
            buffer.write(range.start, tensor.bytes.into_owned())?;
            file.release(&name);
        }
    }
    Ok(())
}

impl Buffer<'_> {
    /// Returns the number of elements.
    fn len(&self) -> usize {
        match self {
            Self::Device(tensor) => tensor.dims()[0],
            Self::Host(buffer, dtype) => buffer.len() / dtype.size(),
        }
    }

    fn dtype(&self) -> Burn {
        match self {
            Self::Device(tensor) => tensor.dtype(),
            Self::Host(_, dtype) => *dtype,
        }
    }

    /// Returns the bytes of some elements.
    fn read(&mut self, range: Range<usize>) -> Result<Vec<u8>, Error> {
        match self {
            Self::Device(tensor) => downloaded(tensor, range.start, range.len()),
            Self::Host(buffer, dtype) => {
                let size = dtype.size();
                Ok(settled(buffer)[size * range.start..size * range.end].to_vec())
            }
        }
    }

    /// Overwrites elements from `at` on.
    fn write(&mut self, at: usize, bytes: Vec<u8>) -> Result<(), Error> {
        match self {
            Self::Device(tensor) => {
                let _stream_guard = ops::stream_guard();
                ops::training::overwrite(tensor, at, bytes)?;
            }
            Self::Host(buffer, dtype) => {
                let at = at * dtype.size();
                settled(buffer)[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }
}

/// Returns the bytes of a buffer between two steps.
fn settled(buffer: &mut HostBuffer) -> &mut [u8] {
    buffer.bytes().expect("a step waits for its transfers")
}

/// Returns the index and the elements of each chunk of a buffer.
fn chunks(len: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..len).step_by(CHUNK).map(move |at| at..len.min(at + CHUNK)).enumerate()
}

fn chunk_name(buffer: &str, index: usize) -> String {
    format!("{buffer}.{index}")
}

/// Returns bytes of elements of a buffer.
fn downloaded(buffer: &Device<1>, at: usize, len: usize) -> Result<Vec<u8>, Error> {
    let _stream_guard = ops::stream_guard();
    let view: Device<1> = ops::view(buffer, at, [len])?;
    let data = view.try_into_data().map_err(|why| Error::Failed(format!("{why:?}")))?;
    Ok(data.into_bytes().to_vec())
}

fn dtype_of(dtype: Burn) -> DType {
    match dtype {
        Burn::BF16 => DType::Bf16,
        Burn::F16 => DType::F16,
        _ => DType::F32,
    }
}
