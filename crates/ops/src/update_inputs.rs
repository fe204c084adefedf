//! Writes to existing buffers: they change the inputs of a captured graph between replays.

use arch::DType;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::IntTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, DispatchTensor, backend_extension,
};
use burn::tensor::{Int, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::bytes::Bytes;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::OpError;
use crate::call::{float_of, on_cubecl, same_dtype, same_shape};
use crate::cube::{cube_of_any, written};

/// Overwrites the words of `tensor` **in place**. Every clone of it sees the new words; work that this thread
/// enqueued before does not.
///
/// # Shapes
/// `tensor` I32 or U32 of any shape, dense; `words` row-major, one per element.
///
/// # Errors
/// [`OpError::DType`], [`OpError::Shape`]; [`OpError::Device`] for a device without kernels.
pub fn update_inputs<const D: usize>(
    tensor: &Tensor<D, Int>,
    words: &[u32],
) -> Result<(), OpError> {
    on_cubecl(&tensor.device())?;
    let (have, dims) = (tensor.dtype(), tensor.dims());
    if !matches!(have, burn::tensor::DType::I32 | burn::tensor::DType::U32) {
        let need = burn::tensor::DType::I32;
        return Err(OpError::DType { what: "the tensor", have, need });
    }
    if dims.iter().product::<usize>() != words.len() {
        let (have, need) = (dims.to_vec(), vec![words.len()]);
        return Err(OpError::Shape { what: "the tensor", have, need });
    }
    let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    <Dispatch as UpdateInputsOps>::update_inputs(tensor.clone().into_dispatch(), bytes);
    Ok(())
}

/// Overwrites the values of `tensor` **in place**, rounded to its dtype. Every clone of it sees the new values; work that this
/// thread enqueued before does not.
///
/// # Shapes
/// `tensor` of any shape, dense; `values` row-major, one per element.
///
/// # Errors
/// [`OpError::NotFloat`], [`OpError::Shape`]; [`OpError::Device`] for a device without kernels; [`OpError::Apart`] for a tensor
/// that is not dense.
pub fn update_floats<const D: usize>(tensor: &Tensor<D>, values: &[f32]) -> Result<(), OpError> {
    let dims = tensor.dims();
    same_shape("values", &[values.len()], &[dims.iter().product()])?;
    let bytes = match float_of(tensor.dtype())? {
        DType::F16 => {
            let mut halves = vec![f16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            Bytes::from_elems(halves)
        }
        DType::Bf16 => {
            let mut halves = vec![bf16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            Bytes::from_elems(halves)
        }
        _ => Bytes::from_elems(values.to_vec()),
    };
    let tensor = written("the tensor", tensor, &dims, tensor.dtype())?;
    tensor.client.write(&tensor.handle, bytes);
    Ok(())
}

/// Overwrites the elements of a tensor of any type and rank **in place**. Every clone of it sees the new ones; work that this thread
/// enqueued before does not.
///
/// # Shapes
/// `tensor` of any shape, dense; `data` with its type and as many elements.
///
/// # Errors
/// [`OpError::DType`], [`OpError::Shape`]; [`OpError::Device`] for a device without kernels; [`OpError::Apart`] for a tensor
/// that is not dense.
pub fn overwrite(tensor: &DispatchTensor, data: TensorData) -> Result<(), OpError> {
    let tensor = cube_of_any(tensor)?;
    same_dtype("data", data.dtype(), tensor.dtype)?;
    let (have, need) = (data.num_elements(), tensor.meta.shape().num_elements());
    same_shape("data", &[have], &[need])?;
    if !tensor.is_contiguous() {
        return Err(OpError::Apart("the tensor"));
    }
    tensor.client.write(&tensor.handle, data.into_bytes());
    Ok(())
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait UpdateInputsOps: Backend {
    /// Writes the bytes of a dense tensor.
    fn update_inputs(tensor: IntTensor<Self>, bytes: Vec<u8>) -> IntTensor<Self>;
}

impl UpdateInputsOps for CubeBackend {
    fn update_inputs(tensor: CubeTensor, bytes: Vec<u8>) -> CubeTensor {
        tensor.client.write(&tensor.handle, Bytes::from_bytes_vec(bytes));
        tensor
    }
}

impl<B: UpdateInputsOps, C: CheckpointStrategy> UpdateInputsOps for Autodiff<B, C> {
    fn update_inputs(tensor: IntTensor<Self>, bytes: Vec<u8>) -> IntTensor<Self> {
        Self::int_from_inner(B::update_inputs(Self::int_inner(tensor), bytes))
    }
}
