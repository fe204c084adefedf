//! A batch norm as part of the convolution before it.

use burn::tensor::{FloatDType, Tensor};

use crate::OpError;
use crate::call::same_shape;

/// A batch norm with the statistics of its training: `(x - mean) / √(variance + eps) · weight + bias`. All tensors are
/// `[channels]`.
#[derive(Debug, Clone)]
pub struct BatchNorm {
    /// Factor of each channel.
    pub weight: Tensor<1>,
    /// Addend of each channel.
    pub bias: Tensor<1>,
    /// Mean of each channel.
    pub mean: Tensor<1>,
    /// Variance of each channel.
    pub variance: Tensor<1>,
    /// Constant added to the variance.
    pub eps: f64,
}

/// Returns weight and bias of the convolution that computes `norm(x ∗ weight + bias)`. Computes in f32, and returns the dtype of
/// `weight`.
///
/// # Shapes
/// weight and its result `[filters, channels / groups, rows, cols]`, bias and its result `[filters]`.
///
/// # Errors
/// [`OpError::Shape`].
pub fn fold_batch_norm(
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    norm: BatchNorm,
) -> Result<(Tensor<4>, Tensor<1>), OpError> {
    let filters = weight.dims()[0];
    let BatchNorm { weight: factor, bias: addend, mean, variance, eps } = norm;
    let parts = [("norm weight", &factor), ("norm bias", &addend), ("mean", &mean)];
    let more = [Some(("variance", &variance)), bias.as_ref().map(|bias| ("bias", bias))];
    for (what, part) in parts.into_iter().chain(more.into_iter().flatten()) {
        same_shape(what, &part.dims(), &[filters])?;
    }
    let dtype = FloatDType::from(weight.dtype());
    let wide = |part: Tensor<1>| part.cast(FloatDType::F32);
    let scale = wide(factor) / (wide(variance) + eps).sqrt();
    let each = scale.clone().reshape([filters, 1, 1, 1]);
    let folded = (weight.cast(FloatDType::F32) * each).cast(dtype);
    let bias = bias.map_or_else(|| mean.zeros_like().cast(FloatDType::F32), wide);
    let bias = (bias - wide(mean)) * scale + wide(addend);
    Ok((folded, bias.cast(dtype)))
}
