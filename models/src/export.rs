//! Flat buffers in files: weights under their names in a checkpoint, and the state of training.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{DType as Burn, Tensor as Device};
use checkpoint::{Checkpoint, DType, Plan, Reason, Tensor, Writer};

use crate::weights::full_name;
use crate::{DecoderConfig, Error, FlatWeights, Param};

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
pub fn write_buffers(path: impl AsRef<Path>, buffers: &[(String, Device<1>)]) -> Result<(), Error> {
    let plans = chunks(buffers)
        .map(|(name, buffer, at)| Plan::new(name, dtype_of(buffer.dtype()), &[length(buffer, at)]));
    let mut writer = Writer::create(path, plans.collect::<Vec<_>>())?;
    for (name, buffer, at) in chunks(buffers) {
        let len = length(buffer, at);
        let bytes = downloaded(buffer, at, len)?;
        writer.write(&name, &Tensor::new(dtype_of(buffer.dtype()), &[len], bytes))?;
    }
    Ok(writer.finish()?)
}

/// Overwrites buffers with those of a file that [`write_buffers`] wrote.
///
/// # Errors
/// [`Error::Checkpoint`] for a file that cannot be read, or whose buffers have other names, lengths or dtypes;
/// [`Error::Op`].
pub fn read_buffers(path: impl AsRef<Path>, buffers: &[(String, Device<1>)]) -> Result<(), Error> {
    let file = Checkpoint::open(path)?;
    let wrong = |name: &str, reason| checkpoint::Error::Tensor { tensor: name.into(), reason };
    for (name, buffer, at) in chunks(buffers) {
        let (tensor, need) = (file.tensor(&name)?, dtype_of(buffer.dtype()));
        if tensor.dtype != need {
            return Err(wrong(&name, Reason::DType { have: tensor.dtype, need: vec![need] }).into());
        }
        if tensor.shape != [length(buffer, at)] {
            let (have, need) = (tensor.shape, vec![length(buffer, at)]);
            return Err(wrong(&name, Reason::Shape { have, need }).into());
        }
        let _stream_guard = ops::stream_guard();
        ops::training::overwrite(buffer, at, tensor.bytes.into_owned())?;
        file.release(&name);
    }
    Ok(())
}

/// Returns the name, the buffer and the first element of each chunk.
fn chunks(buffers: &[(String, Device<1>)]) -> impl Iterator<Item = (String, &Device<1>, usize)> {
    buffers.iter().flat_map(|(name, buffer)| {
        let starts = (0..buffer.dims()[0]).step_by(CHUNK).enumerate();
        starts.map(move |(index, at)| (format!("{name}.{index}"), buffer, at))
    })
}

fn length(buffer: &Device<1>, at: usize) -> usize {
    (buffer.dims()[0] - at).min(CHUNK)
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
