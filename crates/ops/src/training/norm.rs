//! Gradients of norms.

use burn::tensor::{DType, Tensor};
use kernels::norm::backward::{NormBackward, NormBackwardOperands, NormBackwardProblem};

use crate::call::{float_of, like, same_dtype, same_shape, size_of};
use crate::cube::{dense, float, written};
use crate::{Ctx, NormKind, OpError};

/// Sums of the gradients of a norm's weight and bias, `[width]` in f32, which are written in place.
#[derive(Debug, Clone)]
pub struct NormGradients {
    /// Gradient of the weight.
    pub weight: Tensor<1>,
    /// Gradient of the bias; none for a norm without one.
    pub bias: Option<Tensor<1>>,
    /// True to add to both instead of replacing them.
    pub accumulate: bool,
}

/// Returns the gradient of x for `out = norm(x)`, plus `residual`, and adds those of weight and bias to `sums` **in place**.
///
/// # Shapes
/// x, dout, residual and the result `[rows, width]`; weight `[width]`; all of one dtype.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`], [`OpError::Norm`] for invalid operands; [`OpError::Device`],
/// [`OpError::NoGradient`], [`OpError::Tune`].
pub fn norm_backward(
    ctx: &Ctx,
    x: Tensor<2>,
    weight: Tensor<1>,
    dout: Tensor<2>,
    residual: Option<Tensor<2>>,
    sums: &NormGradients,
    (kind, eps): (NormKind, f32),
) -> Result<Tensor<2>, OpError> {
    let ([rows, width], dtype) = (x.dims(), x.dtype());
    same_shape("the weight", &weight.dims(), &[width])?;
    same_dtype("the weight", weight.dtype(), dtype)?;
    for (what, tensor) in [("dout", Some(&dout)), ("the residual", residual.as_ref())] {
        if let Some(tensor) = tensor {
            same_shape(what, &tensor.dims(), &[rows, width])?;
            same_dtype(what, tensor.dtype(), dtype)?;
        }
    }
    let problem = NormBackwardProblem {
        rows: size_of(rows)?,
        width: size_of(width)?,
        dtype: float_of(dtype)?,
        kind,
        eps,
        bias: sums.bias.is_some(),
        residual: residual.is_some(),
        accumulate: sums.accumulate,
    }
    .checked()?;
    let sum = |tensor: &Tensor<1>| written("the sums", tensor, &[width], DType::F32);
    let x = dense(x)?;
    let dx = like(&x);
    let operands = NormBackwardOperands {
        x: x.handle.clone(),
        weight: dense(weight)?.handle,
        dout: dense(dout)?.handle,
        residual: residual.map(dense).transpose()?.map(|residual| residual.handle),
        dx: dx.handle.clone(),
        dw: sum(&sums.weight)?.handle,
        db: sums.bias.as_ref().map(sum).transpose()?.map(|bias| bias.handle),
    };
    ctx.run::<NormBackward>(&x, &problem, &operands)?;
    Ok(float(dx))
}
