//! Quantisation of one matrix on the device.

use std::borrow::Cow;

use checkpoint::{Checkpoint, Encoded, Plan, Weight};
use cubecl::server::Handle;
use kernels::quantized;
use quant::DType;

use super::{Peaks, QuantizeError, QuantizeOptions};

use crate::device::Device;

/// A matrix of a layer in the source, with its target format.
pub(super) struct Matrix {
    pub(super) name: String,
    /// `[out, in]`
    pub(super) shape: [usize; 2],
    pub(super) dtype: DType,
    target: quantized::Weight,
    /// True if the file stores `[in, out]`.
    transposed: bool,
}

impl Matrix {
    /// Reads the tensor `name`, which must have two axes.
    ///
    /// # Errors
    /// The tensor is already quantised, or larger than any kernel supports.
    pub(super) fn read(
        checkpoint: &Checkpoint,
        name: &str,
        transposed: bool,
        options: &QuantizeOptions,
    ) -> Result<Self, QuantizeError> {
        let Weight::Dense(tensor) = checkpoint.weight(name)? else {
            return Err(QuantizeError::Quantized { what: format!("tensor {name}") });
        };
        let &[rows, columns] = &tensor.shape[..] else {
            let reason = checkpoint::Reason::Axes { have: tensor.shape, need: 2 };
            return Err(checkpoint::Error::Tensor { tensor: name.into(), reason }.into());
        };
        let shape = if transposed { [columns, rows] } else { [rows, columns] };
        // A size past u32 is too large for any weight, so the check below refuses it.
        let [n, k] = shape.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        let refused = |why| QuantizeError::Weight { tensor: name.into(), why };
        let target = quantized::Weight::new([n, k], options.scheme()).map_err(refused)?;
        Ok(Self { name: name.into(), shape, dtype: tensor.dtype, target, transposed })
    }

    /// Returns the tensors that the file stores for it.
    pub(super) fn plan(&self) -> Result<Vec<Plan>, QuantizeError> {
        Ok(Weight::plan(&self.name, self.shape, self.target.scheme(), self.dtype)?)
    }

    /// Returns the number of values.
    pub(super) fn len(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product()
    }

    /// Returns the dtype's name in PyTorch.
    pub(super) fn dtype_name(&self) -> &'static str {
        match self.dtype {
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
            _ => "float32",
        }
    }

    /// Returns the bytes of `[out, in]`; copies them only if the file stores `[in, out]`.
    pub(super) fn values<'a>(
        &self,
        checkpoint: &'a Checkpoint,
    ) -> Result<Cow<'a, [u8]>, QuantizeError> {
        let bytes = checkpoint.tensor(&self.name)?.bytes;
        if !self.transposed {
            return Ok(bytes);
        }
        let transposed = match self.dtype {
            DType::F32 => transpose::<4>(&bytes, self.shape),
            _ => transpose::<2>(&bytes, self.shape),
        };
        Ok(transposed.into())
    }

    /// Quantises the matrix on the device.
    ///
    /// # Errors
    /// The matrix has infinities or NaN, or the device refuses it or fails.
    pub(super) fn quantize(
        &self,
        device: &Device,
        checkpoint: &Checkpoint,
        peaks: &mut Peaks,
    ) -> Result<Weight<'static>, QuantizeError> {
        let (values, dtype) = self.taken(device, self.values(checkpoint)?);
        self.check_memory(device, values.len())?;
        let on_device = upload(device, &values);
        drop(values);
        let tensor = || self.name.clone();
        let refused = |why| match why {
            quantized::QuantizeError::NotFinite => QuantizeError::NotFinite { tensor: tensor() },
            quantized::QuantizeError::Unsupported(why) => {
                QuantizeError::Unsupported { tensor: tensor(), why }
            }
            quantized::QuantizeError::Device(why) => {
                QuantizeError::Failed { tensor: tensor(), why }
            }
        };
        let made = self.target.quantize(device.arch(), &on_device, dtype).map_err(refused)?;
        peaks.see(device);
        drop(on_device);
        let lengths = self.target.buffer_bytes();
        let read = |(handle, len): (&Handle, u64)| Ok(self.bytes(device, handle, len)?.into());
        let buffers = made.iter().zip(lengths).map(read).collect::<Result<_, QuantizeError>>()?;
        drop(made);
        let (scheme, shape) = (self.target.scheme(), self.shape.to_vec());
        let encoded = Encoded { scheme, dtype: self.dtype, shape, buffers };
        let weight = Weight::try_from(encoded).map_err(QuantizeError::NotStored)?;
        // Without this, the pools would hold the last tensor's memory next to the next tensor's.
        device
            .client()
            .memory_cleanup()
            .map_err(|why| QuantizeError::Failed { tensor: tensor(), why: format!("{why:?}") })?;
        Ok(weight)
    }

    /// Returns the values in a dtype that the device stores: 16-bit values become f32 if it lacks their dtype.
    fn taken<'v>(&self, device: &Device, values: Cow<'v, [u8]>) -> (Cow<'v, [u8]>, DType) {
        let dtype = match self.dtype {
            DType::F16 => DType::F16,
            DType::Bf16 => DType::Bf16,
            _ => return (values, DType::F32),
        };
        if device.profile().dtypes.contains(&dtype) {
            return (values, dtype);
        }
        let tensor = checkpoint::Tensor::new(self.dtype, &[values.len() / 2], values);
        let wide = tensor.widened().expect("of this dtype, and as many");
        (wide.iter().flat_map(|value| value.to_le_bytes()).collect(), DType::F32)
    }

    fn check_memory(&self, device: &Device, bytes: usize) -> Result<(), QuantizeError> {
        let (need, have) = (bytes as u64, device.client().properties().memory.max_page_size);
        if need > have {
            return Err(QuantizeError::Memory { tensor: self.name.clone(), need, have });
        }
        Ok(())
    }

    fn bytes(&self, device: &Device, handle: &Handle, len: u64) -> Result<Vec<u8>, QuantizeError> {
        let read = device.client().read_one(handle.clone());
        let read = read.map_err(|why| QuantizeError::Failed {
            tensor: self.name.clone(),
            why: format!("{why:?}"),
        })?;
        Ok(read[..len as usize].to_vec())
    }
}

/// Uploads `bytes`, padded to whole words.
fn upload(device: &Device, bytes: &[u8]) -> Handle {
    if bytes.len() % 4 == 0 {
        return device.client().create_from_slice(bytes);
    }
    let mut words = bytes.to_vec();
    words.resize(bytes.len().next_multiple_of(4), 0);
    device.client().create_from_slice(&words)
}

/// Transposes values of `S` bytes from `[in, out]` to `[out, in]`.
fn transpose<const S: usize>(bytes: &[u8], [n, k]: [usize; 2]) -> Vec<u8> {
    // The cache lines of both sides fit in the L1 cache.
    const TILE: usize = 32;
    let from = bytes.as_chunks::<S>().0; // [k, n]
    let mut to = vec![[0; S]; from.len()]; // [n, k]
    for row in (0..n).step_by(TILE) {
        for column in (0..k).step_by(TILE) {
            for r in row..n.min(row + TILE) {
                for c in column..k.min(column + TILE) {
                    to[r * k + c] = from[c * n + r];
                }
            }
        }
    }
    to.into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_exchanges_rows_and_columns() {
        let [n, k] = [37, 70];
        let stored: Vec<u8> = (0..k * n).flat_map(|i| (i as u16).to_le_bytes()).collect();
        let transposed = transpose::<2>(&stored, [n, k]);
        let at = |row, column| u16::from_le_bytes(transposed.as_chunks::<2>().0[row * k + column]);
        for row in 0..n {
            for column in 0..k {
                assert_eq!(usize::from(at(row, column)), column * n + row);
            }
        }
    }
}
