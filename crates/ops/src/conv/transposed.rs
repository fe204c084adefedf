//! Transposed convolutions.

use burn::tensor::Tensor;
use kernels::matmul::Reading;

use super::{ConvOptions, convolved};
use crate::call::same_shape;
use crate::{Ctx, OpError};

/// Computes a transposed convolution: the gradient of a [`conv2d`](super::conv2d) by its x, with the options' epilogue.
///
/// `stride` is the distance of x's pixels in the result, `padding` that of the convolution, and `output_padding` the rows and
/// columns that the result has more. The weight is copied, because kernels read its taps turned around.
///
/// # Shapes
/// x `[batch, channels, height, width]`, weight `[channels, filters / groups, rows, cols]`, result
/// `[batch, filters, (height - 1) · stride + dilation · (rows - 1) + 1 - padding + output_padding, ..]`. Gradients flow to every
/// tensor.
///
/// # Errors
/// The errors of [`conv2d`](super::conv2d).
pub fn conv_transpose2d(
    ctx: &Ctx,
    x: Tensor<4>,
    weight: Tensor<4>,
    output_padding: [usize; 2],
    options: ConvOptions,
) -> Result<Tensor<4>, OpError> {
    let [channels, each, rows, cols] = weight.dims();
    let groups = options.groups.max(1);
    same_shape("weight", &[channels, each, rows, cols], &[x.dims()[1], each, rows, cols])?;
    if channels % groups != 0 || options.doubled || options.second.is_some() {
        return Err(OpError::Transposed);
    }
    let turned = weight
        .reshape([groups, channels / groups, each, rows, cols])
        .swap_dims(1, 2)
        .reshape([groups * each, channels / groups, rows, cols])
        .flip([2, 3]);
    let mut padding = options.padding;
    for (sides, more) in padding.iter_mut().zip(output_padding) {
        sides[1] -= i32::try_from(more).unwrap_or(i32::MAX);
    }
    convolved(ctx, x, turned, ConvOptions { padding, ..options }, Reading::Spread)
}
