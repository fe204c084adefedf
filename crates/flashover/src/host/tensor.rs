//! Tensors in host memory.

use arch::DType;
use half::{bf16, f16};

/// A dense row-major tensor in host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Error of a tensor whose bytes do not match its shape, or whose values are not floats.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The number of bytes does not match the shape.
    #[error(
        "expected {} bytes for shape {shape:?} of {dtype}, got {have}\nhint: give dense, row-major, \
         little-endian bytes", need.map_or("2^128 or more".to_owned(), |need| need.to_string())
    )]
    Length {
        /// Sizes of the axes.
        shape: Vec<usize>,
        /// Type of the elements.
        dtype: DType,
        /// Bytes that the shape takes; none for 2^128 or more.
        need: Option<u128>,
        /// Bytes that were given.
        have: usize,
    },
    /// A tensor of this dtype has no values as f32.
    #[error("expected a tensor of f32, f16 or bf16, got {0}\nhint: use `HostTensor::bytes`")]
    NotFloat(DType),
}

impl HostTensor {
    /// Returns a tensor of `bytes`: little-endian, row-major, without padding.
    ///
    /// # Errors
    /// [`TensorError::Length`] if the number of bytes does not match the shape.
    pub fn new(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Result<Self, TensorError> {
        let need = shape.iter().try_fold(dtype.size() as u128, |n, s| n.checked_mul(*s as u128));
        if need != Some(bytes.len() as u128) {
            return Err(TensorError::Length {
                shape: shape.to_vec(),
                dtype,
                need,
                have: bytes.len(),
            });
        }
        Ok(Self { dtype, shape: shape.to_vec(), bytes })
    }

    /// Returns an f32 tensor of row-major `values`.
    ///
    /// # Errors
    /// [`TensorError::Length`] if the number of values does not match the shape.
    pub fn from_f32(shape: &[usize], values: &[f32]) -> Result<Self, TensorError> {
        Self::new(DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Returns the dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the sizes of the axes; the last axis is contiguous.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the bytes: little-endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the values, widened to f32.
    ///
    /// # Errors
    /// [`TensorError::NotFloat`] unless the dtype is f32, tf32, f16 or bf16.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        let halves = || self.bytes.as_chunks::<2>().0.iter().copied();
        match self.dtype {
            DType::F32 | DType::Tf32 => {
                Ok(self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            DType::F16 => Ok(halves().map(|b| f16::from_le_bytes(b).to_f32()).collect()),
            DType::Bf16 => Ok(halves().map(|b| bf16::from_le_bytes(b).to_f32()).collect()),
            other => Err(TensorError::NotFloat(other)),
        }
    }
}
