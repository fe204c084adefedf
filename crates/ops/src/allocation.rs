//! Check of an allocation.
//!
//! CubeCL enqueues allocations like launches. The first reader of the buffer, or of results from it, gets the
//! failure. By then its reason may be lost among those of later launches (CubeCL 0.11.3 keeps the last 16).

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::Cached;
use crate::call::on_cubecl;

/// Checks that a cache is allocated, and that earlier writes to it were enqueued. It does not wait for
/// kernels.
///
/// # Errors
/// Returns the device's message, or the reason if the device has no kernels.
pub fn check_allocation(cached: &Cached) -> Result<(), String> {
    let seen = Seen::default();
    let look =
        |floats: FloatTensor<Dispatch>| drop(<Dispatch as Look>::float(floats, seen.clone()));
    match cached {
        Cached::Float(values) => {
            on_cubecl(&values.device()).map_err(|why| why.to_string())?;
            look(values.clone().into_dispatch());
        }
        Cached::Bytes { values, scales } => {
            on_cubecl(&values.device()).map_err(|why| why.to_string())?;
            drop(<Dispatch as Look>::int(values.clone().into_dispatch(), seen.clone()));
            look(Tensor::into_dispatch(scales.clone()));
        }
    }
    let why = seen.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    why.map_or(Ok(()), Err)
}

/// The first failure found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Option<String>>>);

#[backend_extension(Cube, Autodiff)]
pub(crate) trait Look: Backend {
    fn float(tensor: FloatTensor<Self>, seen: Seen) -> FloatTensor<Self>;
    fn int(tensor: IntTensor<Self>, seen: Seen) -> IntTensor<Self>;
}

fn looked(tensor: CubeTensor, seen: &Seen) -> CubeTensor {
    if let Err(why) = tensor.client.check([&tensor.handle]) {
        let mut first = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| format!("{why:?}"));
    }
    tensor
}

impl Look for CubeBackend {
    fn float(tensor: CubeTensor, seen: Seen) -> CubeTensor {
        looked(tensor, &seen)
    }

    fn int(tensor: CubeTensor, seen: Seen) -> CubeTensor {
        looked(tensor, &seen)
    }
}

impl<B: Look, C: CheckpointStrategy> Look for Autodiff<B, C> {
    fn float(tensor: FloatTensor<Self>, seen: Seen) -> FloatTensor<Self> {
        Self::from_inner(B::float(Self::inner(tensor), seen))
    }

    fn int(tensor: IntTensor<Self>, seen: Seen) -> IntTensor<Self> {
        Self::int_from_inner(B::int(Self::int_inner(tensor), seen))
    }
}
