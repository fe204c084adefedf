//! Tensors on the host.

use arch::DType;
use half::{bf16, f16};

/// A dense row-major tensor in host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A tensor that contradicts itself, or cannot be read as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// Bytes that do not fill the shape exactly.
    #[error(
        "shape {shape:?} of {dtype} takes {} bytes, {have} were given\nhint: a tensor is dense, \
         row-major and little-endian", need.map_or("2^128 or more".to_owned(), |need| need.to_string())
    )]
    Length {
        /// Sizes of the axes.
        shape: Vec<usize>,
        /// Type of the elements.
        dtype: DType,
        /// Bytes that the shape takes; none where they are 2^128 or more.
        need: Option<u128>,
        /// Bytes that were given.
        have: usize,
    },
    /// Values were asked for of a tensor of this dtype, which has none as f32.
    #[error("a {0} tensor has no f32 values\nhint: read its bytes; f32, f16 and bf16 have values")]
    NotFloat(DType),
}

impl HostTensor {
    /// A tensor of little-endian `bytes`.
    ///
    /// # Errors
    /// The bytes do not fill the shape exactly.
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

    /// An f32 tensor.
    ///
    /// # Errors
    /// The values do not fill the shape exactly.
    pub fn from_f32(shape: &[usize], values: &[f32]) -> Result<Self, TensorError> {
        Self::new(DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes of its axes, the last one contiguous.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Little-endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The values, widened to f32.
    ///
    /// # Errors
    /// The tensor holds integers.
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
