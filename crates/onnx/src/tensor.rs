//! Tensors in ONNX files.

use burn::tensor::{AllocationProperty, BoolStore, DType, TensorData};
use bytes::Bytes;
use prost::Message;

use crate::OnnxError;
use crate::proto::{DataType, TensorProto};
use crate::source::Files;

/// The dtype of bools on the host.
pub(crate) const BOOL: DType = DType::Bool(BoolStore::Native);

/// Converts ONNX's number of an element type to a dtype; an error if it is not supported.
pub(crate) fn dtype(number: i32) -> Result<DType, String> {
    use DataType as T;
    let data_type = T::try_from(number)
        .map_err(|_| format!("expected an element type from 1 to 26, got {number}"))?;
    Ok(match data_type {
        T::Float => DType::F32,
        T::Double => DType::F64,
        T::Float16 => DType::F16,
        T::Bfloat16 => DType::BF16,
        T::Int8 => DType::I8,
        T::Int16 => DType::I16,
        T::Int32 => DType::I32,
        T::Int64 => DType::I64,
        T::Uint8 => DType::U8,
        T::Uint16 => DType::U16,
        T::Uint32 => DType::U32,
        T::Uint64 => DType::U64,
        T::Bool => BOOL,
        other => return Err(format!("dtype {other:?} is not supported")),
    })
}

/// Converts a dtype to ONNX's number: the inverse of [`dtype`].
pub(crate) fn number(element: DType) -> Option<i32> {
    let element = if matches!(element, DType::Bool(_)) { BOOL } else { element };
    (1..=16).find(|number| dtype(*number) == Ok(element))
}

/// Reads a tensor. External data stay in the mapped file.
pub(crate) fn read(tensor: &TensorProto, files: &mut Files) -> Result<Constant, OnnxError> {
    let failed = |why: String| OnnxError::Tensor { name: tensor.name.clone(), why };
    let dtype = dtype(tensor.data_type).map_err(failed)?;
    let shape = tensor
        .dims
        .iter()
        .map(|own| {
            usize::try_from(*own)
                .map_err(|_| failed(format!("expected dimensions of 0 or more, got {own}")))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let need = shape
        .iter()
        .try_fold(dtype.size(), |all, own| all.checked_mul(*own))
        .ok_or_else(|| failed(format!("shape {shape:?} is too large")))?;
    let bytes = match tensor.data_location {
        0 => listed(tensor, dtype),
        1 => files.bytes(tensor)?,
        other => return Err(failed(format!("expected data_location 0 or 1, got {other}"))),
    };
    if bytes.len() != need {
        return Err(failed(format!("expected {need} bytes of data, got {}", bytes.len())));
    }
    if matches!(dtype, DType::Bool(_)) && bytes.iter().any(|byte| *byte > 1) {
        return Err(failed("expected bytes 0 or 1 as bools".to_owned()));
    }
    Ok(Constant { bytes, shape, dtype })
}

/// Decodes a `TensorProto`, the format of ONNX's test data. Returns its name and data.
///
/// # Errors
/// [`OnnxError::Tensor`] for bytes that are not a tensor, or for an unsupported dtype.
pub fn decode_tensor(bytes: &[u8]) -> Result<(String, TensorData), OnnxError> {
    let failed = |why: String| OnnxError::Tensor { name: String::new(), why };
    let tensor = TensorProto::decode(bytes).map_err(|why| failed(why.to_string()))?;
    Ok((tensor.name.clone(), read(&tensor, &mut Files::none())?.data()))
}

/// Encodes a tensor as a `TensorProto`.
///
/// # Errors
/// [`OnnxError::Tensor`] for a dtype that ONNX lacks.
pub fn encode_tensor(name: &str, data: &TensorData) -> Result<Vec<u8>, OnnxError> {
    let why = || OnnxError::Tensor {
        name: name.to_owned(),
        why: format!("ONNX has no dtype {:?}", data.dtype()),
    };
    let tensor = TensorProto {
        dims: data.shape().iter().map(|own| *own as i64).collect(),
        data_type: number(data.dtype()).ok_or_else(why)?,
        name: name.to_owned(),
        raw_data: data.as_bytes().to_vec().into(),
        ..TensorProto::default()
    };
    Ok(tensor.encode_to_vec())
}

/// A tensor in host memory or in a mapped file. Clones share the bytes.
#[derive(Debug, Clone)]
pub(crate) struct Constant {
    bytes: Bytes,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

/// Bytes of Burn that own the data of a [`Bytes`].
struct Owned(burn::tensor::Bytes);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Constant {
    pub(crate) fn new(data: TensorData) -> Self {
        let (shape, dtype) = (data.shape().to_vec(), data.dtype());
        Self { bytes: Bytes::from_owner(Owned(data.into_bytes())), shape, dtype }
    }

    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the elements; copied if they are not aligned in the file.
    pub(crate) fn data(&self) -> TensorData {
        let bytes = match self.bytes.as_ptr().addr().is_multiple_of(self.dtype.size()) {
            true => burn::tensor::Bytes::from_shared(self.bytes.clone(), AllocationProperty::File),
            false => burn::tensor::Bytes::from_bytes_vec(self.bytes.to_vec()),
        };
        TensorData::from_bytes(bytes, self.shape.clone(), self.dtype)
    }
}

/// Returns the data of a message as bytes, from any of its lists.
fn listed(tensor: &TensorProto, dtype: DType) -> Bytes {
    fn packed<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Bytes {
        values.iter().flat_map(|own| bytes(*own)).collect::<Vec<u8>>().into()
    }
    if !tensor.raw_data.is_empty() {
        return tensor.raw_data.clone();
    }
    match dtype {
        DType::F32 => packed(&tensor.float_data, f32::to_le_bytes),
        DType::F64 => packed(&tensor.double_data, f64::to_le_bytes),
        DType::I64 => packed(&tensor.int64_data, i64::to_le_bytes),
        DType::U64 => packed(&tensor.uint64_data, u64::to_le_bytes),
        DType::U32 => packed(&tensor.uint64_data, |own| (own as u32).to_le_bytes()),
        DType::I32 => packed(&tensor.int32_data, i32::to_le_bytes),
        _ if dtype.size() == 2 => packed(&tensor.int32_data, |own| (own as u16).to_le_bytes()),
        _ => packed(&tensor.int32_data, |own| [own as u8]),
    }
}
