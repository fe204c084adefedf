//! Gradients of attention, into given tensors.

use burn::tensor::Tensor;

use crate::attention::{Asked, Launch, along_head_dim};
use crate::call::{same_dtype, same_shape};
use crate::cube::{cube, dense};
use crate::{AttentionOptions, Ctx, OpError, Packing};

/// Writes the gradients of q, k and v **in place** into `gradients`, which may be views of the gradient of one projection.
/// `forward` is the result of [`attention_with_lse`](crate::attention_with_lse), or of
/// [`attention_packed_with_lse`](crate::attention_packed_with_lse) with its packing; `dout` is the gradient of that result. The
/// scores are recomputed.
///
/// # Shapes
/// q, k, v, result and log-sum-exp as in these functions; dout like q; gradients like q, k and v, any strides with a contiguous
/// head dimension.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`], [`OpError::Attention`] for invalid operands;
/// [`OpError::Device`], [`OpError::NoGradient`], [`OpError::Tune`].
pub fn attention_backward(
    ctx: &Ctx,
    [q, k, v]: [Tensor<4>; 3],
    packing: Option<&Packing>,
    (out, lse): (Tensor<4>, Tensor<3>),
    dout: Tensor<4>,
    gradients: &[Tensor<4>; 3],
    options: AttentionOptions,
) -> Result<(), OpError> {
    let dtype = q.dtype();
    for (what, tensor, like) in [
        ("the result", &out, &q),
        ("dout", &dout, &q),
        ("dq", &gradients[0], &q),
        ("dk", &gradients[1], &k),
        ("dv", &gradients[2], &v),
    ] {
        same_dtype(what, tensor.dtype(), dtype)?;
        same_shape(what, &tensor.dims(), &like.dims())?;
    }
    same_shape("the log-sum-exp", &lse.dims(), &q.dims()[..3])?;
    let [q, k, v] = [cube(q)?, cube(k)?, cube(v)?].map(along_head_dim);
    let [out, dout] = [cube(out)?, cube(dout)?].map(along_head_dim);
    let mut written = Vec::new();
    for gradient in gradients {
        let gradient = cube(gradient.clone())?;
        let (shape, strides) = (gradient.meta.shape(), gradient.meta.strides());
        if strides[3] != 1 && shape[3] != 1 {
            return Err(OpError::Apart("gradients"));
        }
        written.push(gradient);
    }
    let asked = Asked { options, packing: packing.cloned(), lse: true };
    let forward = Launch::new(&[q, k, v], [None, None], &out, Some(&dense(lse)?), &asked)?;
    let [dq, dk, dv] = &written[..] else { unreachable!("three gradients") };
    forward.gradients(ctx, dout, [dq, dk, dv], &asked)
}
