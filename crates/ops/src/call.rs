//! Helpers that every op shares: validation, optional operands, and the channel of errors.

use std::sync::{Arc, Mutex, PoisonError};

use arch::DType;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, TensorMetadata};
use burn::tensor::{Device, FloatDType, Int, IntDType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use kernels::matmul::{EpilogueBuffers, NormBuffers};
use kernels::norm::NormProblem;

use crate::arena::result;
pub(crate) use crate::ctx::cube_of;
use crate::{Ctx, OpError};

/// Checks whether `device` runs our kernels.
pub(crate) fn on_cubecl(device: &Device) -> Result<(), OpError> {
    cube_of(device).map(drop)
}

/// Returns the dtype of an operand; an error unless it is f32, f16 or bf16.
pub(crate) const fn float_of(dtype: burn::tensor::DType) -> Result<DType, OpError> {
    match dtype {
        burn::tensor::DType::F32 => Ok(DType::F32),
        burn::tensor::DType::F16 => Ok(DType::F16),
        burn::tensor::DType::BF16 => Ok(DType::Bf16),
        other => Err(OpError::NotFloat(other)),
    }
}

/// Converts to Burn's float dtype.
pub(crate) const fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F16 => FloatDType::F16,
        DType::Bf16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

/// Converts from Burn's float dtype: the inverse of [`float_dtype`].
pub(crate) const fn dtype_of(dtype: FloatDType) -> DType {
    match dtype {
        FloatDType::F16 => DType::F16,
        FloatDType::BF16 => DType::Bf16,
        _ => DType::F32,
    }
}

/// Returns an error unless a tensor has the expected shape.
pub(crate) fn same_shape(
    what: &'static str,
    have: &[usize],
    need: &[usize],
) -> Result<(), OpError> {
    match have == need {
        true => Ok(()),
        false => Err(OpError::Shape { what, have: have.to_vec(), need: need.to_vec() }),
    }
}

/// Returns an error unless a tensor has the expected dtype.
pub(crate) fn same_dtype(
    what: &'static str,
    have: burn::tensor::DType,
    need: burn::tensor::DType,
) -> Result<(), OpError> {
    match have == need {
        true => Ok(()),
        false => Err(OpError::DType { what, have, need }),
    }
}

/// Returns the length of an axis in the kernels' type.
pub(crate) fn size_of(axis: usize) -> Result<u32, OpError> {
    u32::try_from(axis).map_err(|_| OpError::TooLarge(axis))
}

/// Returns a tensor of 32-bit words; without a copy if it is I32 or U32 already.
pub(crate) fn as_int32<const D: usize>(tensor: Tensor<D, Int>) -> Tensor<D, Int> {
    match tensor.dtype() {
        burn::tensor::DType::I32 | burn::tensor::DType::U32 => tensor,
        _ => tensor.cast(IntDType::I32),
    }
}

/// Allocates a dense tensor on the device of `like`.
pub(crate) fn empty_like<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let dtype = float_dtype(dtype).into();
    empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype)
}

/// Allocates a dense result on the device of `like`; in the open [`Arena`](crate::Arena), if any.
pub(crate) fn result_like<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    result(client, device, Shape::new(shape), float_dtype(dtype).into())
}

/// Allocates a dense result with the shape, dtype and device of `tensor`; in the open [`Arena`](crate::Arena), if any.
pub(crate) fn like(tensor: &CubeTensor) -> CubeTensor {
    let (client, device) = (tensor.client.clone(), tensor.device.clone());
    result(client, device, tensor.meta.shape().clone(), tensor.dtype)
}

/// Returns the sum over all axes except the last: the gradient of a bias.
pub(crate) fn summed_over_rows<B: Backend>(dout: FloatTensor<B>) -> FloatTensor<B> {
    let n = dout.shape()[dout.rank() - 1];
    let rows = dout.shape().num_elements() / n;
    let flat = B::float_reshape(dout, Shape::new([rows, n]));
    B::float_reshape(B::float_sum_dim(flat, 0), Shape::new([n]))
}

/// The context of a call, and a slot for the error of an op behind Burn's dispatch, which cannot return one.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) ctx: Ctx,
    failure: Arc<Mutex<Option<OpError>>>,
}

impl Call {
    pub(crate) fn new(ctx: &Ctx) -> Self {
        Self { ctx: ctx.clone(), failure: Arc::default() }
    }

    pub(crate) fn fail(&self, error: OpError) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    pub(crate) fn failed(&self) -> Option<OpError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Optional operands of a matmul.
#[derive(Clone, ExtensionType)]
pub(crate) struct Parts<B: Backend> {
    #[extension_type]
    pub(crate) bias: Optional<B>,
    #[extension_type]
    pub(crate) gate: Optional<B>,
    #[extension_type]
    pub(crate) residual: Optional<B>,
    /// Weight of a norm of the lhs rows.
    #[extension_type]
    pub(crate) norm: Optional<B>,
}

impl<B: Backend> Parts<B> {
    pub(crate) fn bias(bias: Option<FloatTensor<B>>) -> Self {
        let absent = || Optional::Absent;
        Self {
            bias: Optional::from_tensor(bias),
            gate: absent(),
            residual: absent(),
            norm: absent(),
        }
    }

    /// Returns the same operands on another backend.
    pub(crate) fn map<C: Backend>(self, of: impl Fn(FloatTensor<B>) -> FloatTensor<C>) -> Parts<C> {
        let Self { bias, gate, residual, norm } = self;
        let [bias, gate, residual, norm] = [bias, gate, residual, norm].map(|part| part.map(&of));
        Parts { bias, gate, residual, norm }
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = &FloatTensor<B>> {
        [&self.bias, &self.gate, &self.residual, &self.norm].into_iter().filter_map(|part| {
            match part {
                Optional::Absent => None,
                Optional::Present(tensor) => Some(tensor),
            }
        })
    }
}

impl Parts<CubeBackend> {
    /// Returns the operands of a fused norm, dense.
    pub(crate) fn norm_buffers(&self, norm: Option<NormProblem>) -> Option<NormBuffers> {
        let (norm, weight) = norm.zip(self.norm.clone().into_option())?;
        Some(NormBuffers { weight: into_contiguous(weight).handle, eps: norm.eps })
    }

    /// Returns the operands of the epilogue, dense.
    pub(crate) fn buffers(self) -> EpilogueBuffers {
        let Self { bias, gate, residual, .. } = self;
        let dense = |part: Optional<CubeBackend>| {
            part.into_option().map(|tensor| into_contiguous(tensor).handle)
        };
        EpilogueBuffers {
            bias: dense(bias),
            pre_activation: None,
            gate: dense(gate),
            residual: dense(residual),
        }
    }
}

/// `Option`, which does not cross Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) enum Optional<B: Backend> {
    Absent,
    Present(FloatTensor<B>),
}

impl<B: Backend> Optional<B> {
    pub(crate) fn from_tensor(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }

    /// Returns the same operand on another backend.
    pub(crate) fn map<C: Backend>(
        self,
        of: impl Fn(FloatTensor<B>) -> FloatTensor<C>,
    ) -> Optional<C> {
        Optional::from_tensor(self.into_option().map(of))
    }

    pub(crate) const fn is_present(&self) -> bool {
        matches!(self, Self::Present(_))
    }

    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}
