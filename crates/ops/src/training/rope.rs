//! Rotation of heads in place.

use burn::tensor::{DType, Int, Tensor};
use kernels::rope::in_place::{RopeInPlace, RopeInPlaceOperands, RopeInPlaceProblem};

use crate::call::{as_int32, float_of, same_dtype, same_shape, size_of};
use crate::cube::{dense, written_rows};
use crate::{Ctx, OpError};

/// Rotates the first `heads` heads of each row by its position, **in place**. With `inverse`, it turns the gradient of rotated
/// heads into that of the heads. A position past the table gives NaN.
///
/// # Shapes
/// x `[rows, width]`, dense, with heads of `head_dim` from its first column on; positions `[rows]`, I32 or U32; table as in
/// [`RopeOptions`](crate::RopeOptions).
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`], [`OpError::RopeInPlace`] for invalid operands;
/// [`OpError::Device`], [`OpError::NoGradient`], [`OpError::Tune`].
pub fn rotate(
    ctx: &Ctx,
    x: &Tensor<2>,
    [heads, head_dim]: [usize; 2],
    positions: Tensor<1, Int>,
    table: Tensor<2>,
    inverse: bool,
) -> Result<(), OpError> {
    let ([rows, width], [places, dim]) = (x.dims(), table.dims());
    same_shape("positions", &positions.dims(), &[rows])?;
    same_dtype("the table", table.dtype(), DType::F32)?;
    let (x, stride) = written_rows("x", x, [rows, width], x.dtype())?;
    let problem = RopeInPlaceProblem {
        rows: size_of(rows)?,
        heads: size_of(heads)?,
        head_dim: size_of(head_dim)?,
        stride: size_of(stride)?,
        dim: size_of(dim)?,
        positions: size_of(places)?,
        dtype: float_of(x.dtype)?,
        inverse,
    }
    .checked()?;
    let operands = RopeInPlaceOperands {
        heads: x.handle.clone(),
        position: dense(as_int32(positions))?.handle,
        table: dense(table)?.handle,
    };
    ctx.run::<RopeInPlace>(&x, &problem, &operands)
}
