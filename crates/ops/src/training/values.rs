//! Values of flat buffers.

use burn::tensor::Tensor;
use cubecl::bytes::Bytes;

use crate::cube::{cube, written};
use crate::{Ctx, OpError};

/// Overwrites elements of a flat buffer from `from` on with values from the host, **in place**.
///
/// # Shapes
/// buffer `[len]`, dense; bytes in its dtype, little-endian.
///
/// # Errors
/// [`OpError::Shape`] for more values than the buffer has elements there; [`OpError::Device`], [`OpError::NoGradient`].
pub fn overwrite(buffer: &Tensor<1>, from: usize, bytes: Vec<u8>) -> Result<(), OpError> {
    let whole = written("the buffer", buffer, &buffer.dims(), buffer.dtype())?;
    let view: Tensor<1> = crate::view(buffer, from, [bytes.len() / whole.dtype.size()])?;
    let view = cube(view)?;
    view.client.write(&view.handle, Bytes::from_bytes_vec(bytes));
    Ok(())
}

/// Sets all elements of a buffer to 0, **in place**.
///
/// # Shapes
/// buffer `[len]`, dense, with whole words of 4 bytes.
///
/// # Errors
/// [`OpError::Apart`], [`OpError::Device`], [`OpError::NoGradient`].
pub fn clear(ctx: &Ctx, buffer: &Tensor<1>) -> Result<(), OpError> {
    let whole = written("the buffer", buffer, &buffer.dims(), buffer.dtype())?;
    let words = buffer.dims()[0] * whole.dtype.size() / 4;
    tune::fill(&ctx.device(&whole.device)?, &whole.handle, words, 0);
    Ok(())
}
