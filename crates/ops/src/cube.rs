//! Burn tensors without gradients as CubeCL tensors, and views of their memory.

use std::ops::Range;

use burn::backend::{
    BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, TensorMetadata,
};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::zspace::metadata::Metadata;
use tune::Kernel;

use crate::call::{same_dtype, same_shape};
use crate::layout::{row_stride, rows_of};
use crate::{Ctx, OpError};

/// Returns the CubeCL tensor behind a tensor without autodiff.
pub(crate) fn cube<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<CubeTensor, OpError> {
    let device = tensor.device();
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor) | BackendTensor::Int(tensor)) => {
            Ok(tensor)
        }
        DispatchTensorKind::Autodiff(_) => Err(OpError::NoGradient),
        _ => Err(OpError::Device(format!("{device:?}"))),
    }
}

/// Returns the CubeCL tensor behind a tensor of any type and rank.
pub(crate) fn cube_of_any(tensor: &DispatchTensor) -> Result<CubeTensor, OpError> {
    match &tensor.kind {
        DispatchTensorKind::Cube(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => Ok(tensor.clone()),
        DispatchTensorKind::Autodiff(_) => Err(OpError::NoGradient),
        _ => Err(OpError::Device(format!("{:?}", tensor.device()))),
    }
}

/// Returns a dense CubeCL tensor that is written in place; an error if its elements are not contiguous.
pub(crate) fn written<const D: usize>(
    what: &'static str,
    tensor: &Tensor<D>,
    shape: &[usize],
    dtype: DType,
) -> Result<CubeTensor, OpError> {
    same_dtype(what, tensor.dtype(), dtype)?;
    same_shape(what, &tensor.dims(), shape)?;
    let tensor = cube(tensor.clone())?;
    match tensor.is_contiguous() {
        true => Ok(tensor),
        false => Err(OpError::Apart(what)),
    }
}

/// Returns a CubeCL matrix that is written in place, and the elements from one row to the next; an error if the elements of a
/// row are not contiguous. Burn pads rows on CUDA.
pub(crate) fn written_rows(
    what: &'static str,
    matrix: &Tensor<2>,
    shape: [usize; 2],
    dtype: DType,
) -> Result<(CubeTensor, usize), OpError> {
    same_dtype(what, matrix.dtype(), dtype)?;
    same_shape(what, &matrix.dims(), &shape)?;
    let matrix = cube(matrix.clone())?;
    match row_stride(&matrix) {
        Some(stride) => Ok((matrix, stride)),
        None => Err(OpError::Apart(what)),
    }
}

/// Returns a dense CubeCL tensor that is only read.
pub(crate) fn dense<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<CubeTensor, OpError> {
    Ok(into_contiguous(cube(tensor)?))
}

/// Returns a tensor whose elements lie in order; as a copy if they do not yet.
///
/// # Errors
/// [`OpError::Device`] for a device without kernels; [`OpError::NoGradient`].
pub fn contiguous<const D: usize>(tensor: Tensor<D>) -> Result<Tensor<D>, OpError> {
    Ok(float(into_contiguous(cube(tensor)?)))
}

/// Returns the tensor of a CubeCL tensor of floats.
pub(crate) fn float<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    let kind = DispatchTensorKind::Cube(BackendTensor::Float(tensor));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff: DispatchAutodiffContext::Disabled })
}

/// Returns a dense tensor that shares memory with the elements of `buffer` from `from` on: what one writes in place, the
/// other sees.
///
/// # Errors
/// [`OpError::Shape`] if the buffer has too few elements; [`OpError::Device`], [`OpError::NoGradient`].
///
/// # Panics
/// On WebGPU, launches panic unless `from` is at a multiple of 256 bytes.
pub fn view<const D: usize>(
    buffer: &Tensor<1>,
    from: usize,
    shape: [usize; D],
) -> Result<Tensor<D>, OpError> {
    let (have, len) = (buffer.dims()[0], shape.iter().product::<usize>());
    if from + len > have {
        return Err(OpError::Shape {
            what: "the buffer",
            have: vec![have],
            need: vec![from + len],
        });
    }
    let whole = cube(buffer.clone())?;
    let size = whole.dtype.size() as u64;
    let handle = whole.handle.offset_start(from as u64 * size);
    let handle = handle.offset_end((have - from - len) as u64 * size);
    let mut strides = [1; D];
    for axis in (1..D).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let meta = Box::new(Metadata::new(shape, strides));
    Ok(float(CubeTensor { handle, meta, ..whole }))
}

/// Returns columns of a dense matrix as a matrix that shares its memory; as a copy if kernels cannot read buffers that begin
/// there.
///
/// # Errors
/// [`OpError::Device`], [`OpError::NoGradient`].
pub fn columns(matrix: Tensor<2>, columns: Range<usize>) -> Result<Tensor<2>, OpError> {
    let matrix: Tensor<2> = float(dense(matrix)?);
    Ok(match shared_columns(&matrix, columns.clone())? {
        Some(shared) => shared,
        None => matrix.slice_dim(1, columns),
    })
}

/// Returns columns of a dense matrix as a matrix that shares its memory, for writing; none if kernels cannot access buffers that
/// begin there.
///
/// # Errors
/// [`OpError::Device`], [`OpError::NoGradient`].
pub fn shared_columns(
    matrix: &Tensor<2>,
    columns: Range<usize>,
) -> Result<Option<Tensor<2>>, OpError> {
    let [rows, width] = matrix.dims();
    let whole = cube(matrix.clone())?;
    let size = whole.dtype.size();
    // Buffers of WebGPU begin at multiples of 256 bytes; kernels load up to 16 bytes at once.
    let alignment = if whole.client.name().starts_with("wgpu") { 256 } else { 16 };
    let aligned = (columns.start * size).is_multiple_of(alignment);
    if !aligned || rows == 0 || !whole.is_contiguous() {
        return Ok(None);
    }
    let own = columns.len();
    let handle = whole.handle.offset_start((columns.start * size) as u64);
    let handle = handle.offset_end(((width - columns.end) * size) as u64);
    let meta = Box::new(Metadata::new([rows, own], [width, 1]));
    Ok(Some(float(CubeTensor { handle, meta, ..whole })))
}

/// Returns rows of heads as `[batch, heads, seq, head_dim]`, which shares their memory.
///
/// # Shapes
/// x `[batch · seq, heads · head_dim]`, any stride between rows.
///
/// # Errors
/// [`OpError::Shape`] if the rows or columns do not divide; [`OpError::Device`], [`OpError::NoGradient`].
pub fn split_heads(x: Tensor<2>, [batch, seq, heads]: [usize; 3]) -> Result<Tensor<4>, OpError> {
    let [rows, width] = x.dims();
    let head_dim = width / heads.max(1);
    same_shape("the rows", &[rows, width], &[batch * seq, heads * head_dim])?;
    let (x, stride) = rows_of(cube(x)?);
    let strides = [seq * stride, head_dim, stride, 1];
    let meta = Box::new(Metadata::new([batch, heads, seq, head_dim], strides));
    Ok(float(CubeTensor { meta, ..x }))
}

impl Ctx {
    /// Launches a kernel with its config and its scratch memory on the device of `on`.
    pub(crate) fn run<K: Kernel>(
        &self,
        on: &CubeTensor,
        problem: &K::Problem,
        operands: &K::Operands,
    ) -> Result<(), OpError> {
        let device = self.device(&on.device)?;
        let config = self.config::<K>(&device, problem)?;
        let scratch = self.scratch_of::<K>(&device, problem, &config);
        self.launch::<K>(&device, problem, &config, operands, scratch.as_ref());
        Ok(())
    }
}
