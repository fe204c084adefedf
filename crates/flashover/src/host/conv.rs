//! Convolutions on host tensors.

use burn::tensor::Tensor;
use ops::{ConvOptions, OpError};
use tune::Policy;

use super::call::{Call, check_dtypes};
use super::error::HostOpError;
use super::tensor::HostTensor;

use crate::device::Device;

/// Geometry of [`conv`] and precision of its multiplications. Pairs are height, then width; one dimension uses the second number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvSettings {
    /// Step of the filters.
    pub stride: [usize; 2],
    /// Zeros before and after the image, of both axes.
    pub padding: [[i32; 2]; 2],
    /// Distance of neighbouring taps.
    pub dilation: [usize; 2],
    /// Parts of the channels; a filter sees one.
    pub groups: usize,
    /// True for a transposed convolution, whose weight is `[channels, filters / groups, ..]`.
    pub transposed: bool,
    /// True to round f32 operands to tf32 for the tensor cores.
    pub tf32: bool,
}

impl Default for ConvSettings {
    fn default() -> Self {
        let padding = [[0; 2]; 2];
        Self {
            stride: [1; 2],
            padding,
            dilation: [1; 2],
            groups: 1,
            transposed: false,
            tf32: false,
        }
    }
}

/// Computes a convolution `x ∗ weight + bias`.
///
/// # Shapes
/// - x: `[batch, channels, height, width]`, or `[batch, channels, length]`
/// - weight: `[filters, channels / groups, rows, cols]`, or without `rows`
/// - bias: `[filters]`
/// - result: `[batch, filters, out height, out width]`, or `[batch, filters, out length]`, in the operands' dtype
///
/// # Errors
/// See [`HostOpError`].
pub fn conv(
    device: &Device,
    x: &HostTensor,
    weight: &HostTensor,
    bias: Option<&HostTensor>,
    settings: &ConvSettings,
    policy: Policy,
) -> Result<HostTensor, HostOpError> {
    check_dtypes(x, &[("weight", Some(weight)), ("bias", bias)])?;
    let flat = x.shape().len() == 3;
    let (image, taps) = (axes("x", x, flat)?, axes("weight", weight, flat)?);
    let ConvSettings { mut stride, mut padding, mut dilation, groups, transposed, tf32 } =
        *settings;
    if flat {
        (stride[0], padding[0], dilation[0]) = (1, [0; 2], 1);
    }
    let biases = bias.map(|bias| match bias.shape() {
        [len] => Ok([*len]),
        other => Err(HostOpError::Rank { what: "bias", rank: other.len(), takes: TAKES }),
    });
    let biases = biases.transpose()?;
    if image.contains(&0) || taps.contains(&0) {
        return Err(OpError::Conv(kernels::conv::InvalidConv::Empty { what: "a tensor" }).into());
    }
    let filters = if transposed { taps[1].saturating_mul(groups) } else { taps[0] };
    let result = [0, 1].map(|axis| {
        let (size, taps) = (image[2 + axis] as i128, taps[2 + axis] as i128);
        let more = padding[axis].iter().map(|side| i128::from(*side)).sum::<i128>();
        let (step, reach) = (stride[axis] as i128, dilation[axis] as i128 * (taps - 1));
        match transposed {
            true => (size - 1) * step + reach + 1 - more,
            false => (size + more - reach - 1) / step.max(1) + 1,
        }
        .max(0) as u128
    });
    let bytes = (image[0] as u128)
        .saturating_mul(filters as u128)
        .saturating_mul(result[0].saturating_mul(result[1]))
        .saturating_mul(x.dtype().size() as u128);
    let needs = [
        ("x", x.bytes().len() as u128),
        ("weight", weight.bytes().len() as u128),
        ("the result", bytes),
    ];
    let call = Call::new(device, policy, x.dtype(), &needs)?;
    let on = |tensor: &HostTensor, shape| call.upload(tensor.bytes().to_vec(), shape);
    let bias: Option<Tensor<1>> =
        bias.zip(biases).map(|(bias, shape)| call.upload(bias.bytes().to_vec(), shape));
    let options =
        ConvOptions { stride, padding, dilation, groups, bias, tf32, ..ConvOptions::default() };
    let (x_on, weight) = (on(x, image), on(weight, taps));
    let out = match transposed {
        true => ops::conv_transpose2d(&call.ctx, x_on, weight, [0; 2], options)?,
        false => ops::conv2d(&call.ctx, x_on, weight, options)?,
    };
    let mut shape = out.dims().to_vec();
    if flat {
        shape.remove(2);
    }
    call.download(out, x.dtype(), &shape)
}

const TAKES: &str = "conv takes x [batch, channels, height, width], weight [filters, channels / groups, rows, cols] \
                     and bias [filters]; without height and rows in one dimension";

/// Returns the four axes of a tensor. In one dimension, the height is 1.
fn axes(what: &'static str, tensor: &HostTensor, flat: bool) -> Result<[usize; 4], HostOpError> {
    match *tensor.shape() {
        [first, second, length] if flat => Ok([first, second, 1, length]),
        [first, second, height, width] if !flat => Ok([first, second, height, width]),
        ref other => Err(HostOpError::Rank { what, rank: other.len(), takes: TAKES }),
    }
}
