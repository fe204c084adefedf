//! What every op shares: who calls, where errors go, what may be absent.

use std::sync::{Arc, Mutex, PoisonError};

use arch::DType;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DispatchDevice, ExtensionType};
use burn::tensor::{Device, Int, IntDType, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use tune::Kernel;

use crate::{Ctx, OpError};

/// Whether `device` runs our kernels.
pub(crate) fn on_cubecl(device: &Device) -> Result<(), OpError> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(_) => Ok(()),
        other => Err(OpError::Device(format!("{other:?}"))),
    }
}

/// The dtype of a tensor that is multiplied.
pub(crate) const fn float_of(dtype: burn::tensor::DType) -> Result<DType, OpError> {
    match dtype {
        burn::tensor::DType::F32 => Ok(DType::F32),
        burn::tensor::DType::F16 => Ok(DType::F16),
        burn::tensor::DType::BF16 => Ok(DType::Bf16),
        other => Err(OpError::NotFloat(other)),
    }
}

/// Fails unless a tensor has the shape that the others ask for.
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

/// Fails unless a tensor has the dtype that the others ask for.
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

/// The length of an axis as kernels have it.
pub(crate) fn size_of(axis: usize) -> Result<u32, OpError> {
    u32::try_from(axis).map_err(|_| OpError::TooLarge(axis))
}

/// 32-bit words as kernels read them: the tensor itself where it has such.
pub(crate) fn words_of<const D: usize>(tensor: Tensor<D, Int>) -> Tensor<D, Int> {
    match tensor.dtype() {
        burn::tensor::DType::I32 | burn::tensor::DType::U32 => tensor,
        _ => tensor.cast(IntDType::I32),
    }
}

/// An empty dense tensor on the device of `like`.
pub(crate) fn empty_like<const D: usize>(
    like: &CubeTensor,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let dtype = crate::matmul::float_dtype(dtype).into();
    empty_device_contiguous_dtype(client, device, Shape::new(shape), dtype)
}

/// Who calls: the context, and where an op that cannot return an error leaves it.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) ctx: Ctx,
    failure: Arc<Mutex<Option<OpError>>>,
}

impl Call {
    pub(crate) fn of(ctx: &Ctx) -> Self {
        Self { ctx: ctx.clone(), failure: Arc::default() }
    }

    pub(crate) fn fail(&self, error: OpError) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    pub(crate) fn failed(&self) -> Option<OpError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Launches a kernel, as an operator of whoever records.
pub(crate) fn launch<K: Kernel>(
    device: &arch::Device,
    problem: &K::Problem,
    config: &K::Config,
    operands: &K::Operands,
    scratch: Option<&Handle>,
) {
    let name = || format!("{} {}", K::NAME, K::bucket(problem));
    let _operator = trace::operator(name, || K::cost(problem));
    K::launch(device, problem, config, operands, scratch);
}

/// `Option`, which does not cross Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) enum Optional<B: Backend> {
    Absent,
    Present(FloatTensor<B>),
}

impl<B: Backend> Optional<B> {
    pub(crate) fn of(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }

    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}
