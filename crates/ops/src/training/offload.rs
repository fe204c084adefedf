//! Copies of tensors to and from host memory beside kernels.

use arch::transfer::{HostBuffer, Link, Transfer};
use burn::tensor::{Device, Tensor};

use crate::call::cube_of;
use crate::cube::written;
use crate::{Ctx, OpError};

/// Opens streams for copies to and from host memory.
///
/// # Errors
/// [`OpError::Device`] for a device without kernels; [`OpError::Transfer`].
pub fn link(ctx: &Ctx, device: &Device) -> Result<Link, OpError> {
    Ok(Link::new(&ctx.device(&cube_of(device)?)?)?)
}

/// Begins to copy a dense tensor into bytes `at..` of host memory, after all earlier launches of this thread. Neither may change
/// before [`Transfer::wait`].
///
/// # Errors
/// [`OpError::Apart`] for a tensor that is not dense; [`OpError::NoGradient`], [`OpError::Transfer`].
///
/// # Panics
/// If the host buffer ends before the tensor does.
pub fn save<const D: usize>(
    link: &Link,
    tensor: &Tensor<D>,
    to: &mut HostBuffer,
    at: usize,
) -> Result<Transfer, OpError> {
    let tensor = written("the tensor", tensor, &tensor.dims(), tensor.dtype())?;
    Ok(link.save(&tensor.handle, to, at)?)
}

/// Begins to copy bytes `at..` of host memory into a dense tensor, after all earlier launches of this thread. Neither may be used
/// before [`Transfer::wait`].
///
/// # Errors
/// The errors of [`save`].
///
/// # Panics
/// If the host buffer ends before the tensor does.
pub fn load<const D: usize>(
    link: &Link,
    from: &mut HostBuffer,
    at: usize,
    tensor: &Tensor<D>,
) -> Result<Transfer, OpError> {
    let tensor = written("the tensor", tensor, &tensor.dims(), tensor.dtype())?;
    Ok(link.load(from, at, &tensor.handle)?)
}
