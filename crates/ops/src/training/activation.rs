//! Activations and their gradients.

use burn::tensor::Tensor;
use kernels::activate::{Activate, ActivateOperands, ActivateProblem};
use kernels::activation_backward::{
    ActivationBackward, ActivationBackwardOperands, ActivationBackwardProblem,
};

use crate::call::{float_of, like, same_dtype, same_shape, size_of};
use crate::cube::{dense, float, written};
use crate::{Activation, Ctx, OpError};

/// Computes `activation(z) · up`, or `activation(z)` without `up`.
///
/// # Shapes
/// All `[rows, width]`, of one dtype.
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
    if let Some(up) = &up {
        same_shape("up", &up.dims(), &z.dims())?;
        same_dtype("up", up.dtype(), z.dtype())?;
    }
    let problem = ActivateProblem {
        len: z.dims().iter().product::<usize>() as u64,
        dtype: float_of(z.dtype())?,
        activation,
        gated: up.is_some(),
    }
    .checked()?;
    let z = dense(z)?;
    let h = like(&z);
    let up = up.map(dense).transpose()?.map(|up| up.handle);
    let operands = ActivateOperands { z: z.handle.clone(), up, h: h.handle.clone() };
    ctx.run::<Activate>(&z, &problem, &operands)?;
    Ok(float(h))
}

/// Computes the gradients of `h = activation(z) · up`, or of `h = activation(z)` without `up`, **in place**: dh becomes h, z
/// becomes its gradient, up becomes its gradient.
///
/// # Shapes
/// All `[rows, width]`, dense, of one dtype.
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
    let (shape, dtype) = (dh.dims(), dh.dtype());
    let problem = ActivationBackwardProblem {
        rows: size_of(shape[0])?,
        width: size_of(shape[1])?,
        stride: size_of(shape[1])?,
        dtype: float_of(dtype)?,
        activation,
        gated: up.is_some(),
    }
    .checked()?;
    let dh = written("dh", dh, &shape, dtype)?;
    let z = written("z", z, &shape, dtype)?;
    let up = up.map(|up| written("up", up, &shape, dtype)).transpose()?;
    let operands = ActivationBackwardOperands {
        dh: dh.handle.clone(),
        z: z.handle,
        up: up.map(|up| up.handle),
    };
    ctx.run::<ActivationBackward>(&dh, &problem, &operands)
}
