//! Values of flat buffers.

use burn::tensor::{DType, Tensor};
use cubecl::bytes::Bytes;
use kernels::scaled_copy::{ScaledCopy, scaled_copy};

use crate::call::{float_of, same_dtype, size_of};
use crate::cube::{cube, dense, written, written_rows};
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

/// Writes factor · x, rounded, into a matrix **in place**, from row and column `at` on.
///
/// # Shapes
/// x `[rows, columns]` in f32; out of at least `at` more rows and columns, with contiguous rows, of any float.
///
/// # Errors
/// [`OpError::Shape`] for a matrix without these rows and columns; [`OpError::DType`], [`OpError::Apart`], [`OpError::Device`],
/// [`OpError::NoGradient`].
pub fn copy_scaled(
    ctx: &Ctx,
    x: &Tensor<2>,
    out: &Tensor<2>,
    [row, column]: [usize; 2],
    factor: f32,
) -> Result<(), OpError> {
    same_dtype("x", x.dtype(), DType::F32)?;
    let ([rows, columns], have) = (x.dims(), out.dims());
    let need = [row + rows, column + columns];
    if need[0] > have[0] || need[1] > have[1] {
        let (have, need) = (have.to_vec(), need.to_vec());
        return Err(OpError::Shape { what: "the matrix", have, need });
    }
    let (out, stride) = written_rows("the matrix", out, have, out.dtype())?;
    let copy = ScaledCopy {
        rows: size_of(rows)?,
        columns: size_of(columns)?,
        len: have[0].saturating_sub(1) * stride + have[1],
        first: size_of(row * stride + column)?,
        stride: size_of(stride)?,
        factor,
        dtype: float_of(out.dtype)?,
    };
    let x = dense(x.clone())?;
    scaled_copy(&ctx.device(&out.device)?, &x.handle, &out.handle, &copy);
    Ok(())
}
