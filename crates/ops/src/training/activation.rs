//! Activations and their gradients.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use kernels::activation::{
    Activate, ActivateOperands, ActivationBackward, ActivationBackwardOperands, ActivationProblem,
};

use crate::call::{empty_like, float_of, same_dtype, same_shape, size_of};
use crate::cube::{cube, float, written, written_rows};
use crate::layout::rows_of;
use crate::{Activation, Ctx, OpError};

/// Computes `activation(z) · up`, or `activation(z)` without `up`.
///
/// # Shapes
/// All `[rows, width]`, of one dtype. z and up may be columns of one matrix.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`] for invalid operands; [`OpError::Device`], [`OpError::NoGradient`],
/// [`OpError::Tune`].
pub fn activate(
    ctx: &Ctx,
    z: Tensor<2>,
    up: Option<Tensor<2>>,
    activation: Activation,
) -> Result<Tensor<2>, OpError> {
    let ([rows, width], dtype) = (z.dims(), z.dtype());
    if let Some(up) = &up {
        same_shape("up", &up.dims(), &[rows, width])?;
        same_dtype("up", up.dtype(), dtype)?;
    }
    let (mut z, mut stride) = rows_of(cube(z)?);
    let mut up = up.map(|up| Ok::<_, OpError>(rows_of(cube(up)?))).transpose()?;
    if up.as_ref().is_some_and(|(_, own)| *own != stride) {
        (z, stride) = (into_contiguous(z), width);
        up = up.map(|(up, _)| (into_contiguous(up), width));
    }
    let problem = problem([rows, width], stride, dtype, activation, up.is_some())?;
    let h = empty_like(&z, [rows, width], float_of(dtype)?);
    let up = up.map(|(up, _)| up.handle);
    let operands = ActivateOperands { z: z.handle.clone(), up, h: h.handle.clone() };
    ctx.run::<Activate>(&z, &problem, &operands)?;
    Ok(float(h))
}

/// Computes the gradients of `h = activation(z) · up`, or of `h = activation(z)` without `up`, **in place**: dh becomes h, z
/// becomes its gradient, up becomes its gradient.
///
/// # Shapes
/// All `[rows, width]`, of one dtype. dh is dense; z and up have contiguous rows of one stride, so that they may be columns of one
/// matrix.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`] for invalid operands; [`OpError::Device`],
/// [`OpError::NoGradient`], [`OpError::Tune`].
pub fn activation_backward(
    ctx: &Ctx,
    dh: &Tensor<2>,
    z: &Tensor<2>,
    up: Option<&Tensor<2>>,
    activation: Activation,
) -> Result<(), OpError> {
    let ([rows, width], dtype) = (dh.dims(), dh.dtype());
    let dh = written("dh", dh, &[rows, width], dtype)?;
    let (z, stride) = written_rows("z", z, [rows, width], dtype)?;
    let up = up.map(|up| written_rows("up", up, [rows, width], dtype)).transpose()?;
    if up.as_ref().is_some_and(|(_, own)| *own != stride) {
        return Err(OpError::Apart("up"));
    }
    let problem = problem([rows, width], stride, dtype, activation, up.is_some())?;
    let operands = ActivationBackwardOperands {
        dh: dh.handle.clone(),
        z: z.handle,
        up: up.map(|(up, _)| up.handle),
    };
    ctx.run::<ActivationBackward>(&dh, &problem, &operands)
}

fn problem(
    [rows, width]: [usize; 2],
    stride: usize,
    dtype: DType,
    activation: Activation,
    gated: bool,
) -> Result<ActivationProblem, OpError> {
    let [rows, width, stride] = [size_of(rows)?, size_of(width)?, size_of(stride)?];
    let dtype = float_of(dtype)?;
    Ok(ActivationProblem { rows, width, stride, dtype, activation, gated }.checked()?)
}
