//! What every op shares: who calls, where errors go, what may be absent.

use std::sync::{Arc, Mutex, PoisonError};

use arch::DType;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DispatchDevice, ExtensionType};
use burn::tensor::Device;

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
