//! Operators of our own, which passes make, and those of ONNX that have kernels of ours: convolutions, products, norms, attention.
//!
//! On a device without our kernels the same results come from Burn's operations, one after the other.

use burn::backend::Dispatch;
use burn::backend::ops::ActivationOps;
use burn::tensor::DType;
use ops::{
    Activation, AttentionOptions, ConvOptions, Epilogue, GroupNormOptions, NormKind, NormWeights,
    OpError,
};

use super::linear::product;
use super::norm::{grouped, normed, scaled};
use super::windows::{Windows, convolved};
use super::{Call, Inputs, Read, axis};
use crate::array::{Array, Order};
use crate::passes::place;

pub(super) fn read(call: &Call<'_>) -> Read {
    let ours = call.has_kernels();
    Some(match call.op() {
        "flashover::Conv" | "Conv" if ours || call.op() != "Conv" => conv(call),
        "flashover::Linear" => Ok(linear(call)),
        "flashover::GroupNorm" | "GroupNormalization"
            if ours || call.op() != "GroupNormalization" =>
        {
            Ok(group_norm(call))
        }
        "LayerNormalization" | "RMSNormalization" if ours && call.outputs() == 1 => Ok(norm(call)),
        "flashover::Attention" => Ok(attention(call)),
        _ => return None,
    })
}

/// Returns true for element types that our kernels have.
pub(super) const fn is_ours(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

fn told(why: OpError) -> String {
    why.to_string()
}

fn conv(call: &Call<'_>) -> Result<super::Run, String> {
    let windows = Windows::of(call)?;
    let (activation, last) = (call.activation(), call.flag("activation_last"));
    let (doubled, ours) = (call.flag("doubled"), call.has_kernels());
    Ok(Box::new(move |inputs| {
        let (x, weight) = (inputs.get(0)?, inputs.get(1)?);
        let [bias, residual] = [place::BIAS, place::RESIDUAL].map(|at| inputs.maybe(at));
        let [each, second] = [place::IMAGE_BIAS, place::SECOND].map(|at| inputs.maybe(at));
        let rank = x.rank();
        if !(ours && is_ours(x.dtype()) && (3..=4).contains(&rank)) {
            let x = match second {
                Some(second) => Array::concat(vec![x, second], 1),
                None => x,
            };
            let x = if doubled { twice(x) } else { x };
            let mut out = convolved(x, weight, bias, &windows)?;
            if let Some(each) = each {
                out = out.plus(each);
            }
            return Ok(vec![finished(out, activation, last, None, residual)?]);
        }
        let factor = if doubled { 2 } else { 1 };
        let image: Vec<usize> = x.shape()[2..].iter().map(|own| own * factor).collect();
        let sizes = windows.sizes(&image, &weight.shape()[2..])?;
        let point = rank == 4 && image == [1, 1] && weight.shape()[2..] == [1, 1];
        if point && windows.groups == 1 && second.is_none() && each.is_none() && !last {
            // A product of a row.
            let [rows, columns, filters] = [x.shape()[0], x.shape()[1], weight.shape()[0]];
            let row = |own: Array| own.reshape(&[rows, filters]).tensor::<2>();
            let epilogue = Epilogue {
                bias: bias.map(vector),
                activation,
                residual: residual.map(row),
                ..Epilogue::default()
            };
            let weight = weight.reshape(&[filters, columns]).permute(&[1, 0]).tensor::<2>();
            let x = x.reshape(&[rows, columns]).tensor::<2>();
            let out = ops::matmul(inputs.ctx, x, weight, epilogue).map_err(told)?;
            return Ok(vec![Array::of_tensor(out).reshape(&[rows, filters, 1, 1])]);
        }
        // In one dimension the height is 1.
        let pair = |own: &[usize], usual: usize| match own {
            [one] => [usual, *one],
            _ => [own[0], own[1]],
        };
        let (before, after) = (pair(&sizes.before, 0), pair(&sizes.after, 0));
        let high = |own: Array| {
            let mut shape = own.shape();
            if rank == 3 {
                shape.insert(2, 1);
            }
            own.reshape(&shape).tensor::<4>()
        };
        let x = high(x);
        let batch = x.dims()[0];
        let padding = [0, 1].map(|at| [before[at] as i32, after[at] as i32]);
        let options = ConvOptions {
            stride: pair(&sizes.strides, 1),
            padding,
            dilation: pair(&sizes.dilations, 1),
            groups: windows.groups,
            doubled,
            second: second.map(high),
            residual: residual.map(high),
            activation,
            activation_last: last,
            ..ConvOptions::default()
        };
        let filters = weight.shape()[0];
        let options = match (bias, each) {
            (bias, None) => ConvOptions { bias: bias.map(vector), ..options },
            (None, Some(each)) => ConvOptions {
                image_bias: Some(each.reshape(&[batch, filters]).tensor()),
                ..options
            },
            (Some(bias), Some(each)) => {
                let each = each.reshape(&[batch, filters]).plus(bias.reshape(&[1, filters]));
                ConvOptions { image_bias: Some(each.tensor()), ..options }
            }
        };
        let out =
            Array::of_tensor(ops::conv2d(inputs.ctx, x, high(weight), options).map_err(told)?);
        let shape = out.shape();
        Ok(vec![if rank == 3 { out.reshape(&[shape[0], shape[1], shape[3]]) } else { out }])
    }))
}

fn vector(own: Array) -> burn::tensor::Tensor<1> {
    let count = own.count();
    own.reshape(&[count]).tensor()
}

/// Repeats each pixel in both directions.
fn twice(x: Array) -> Array {
    let own = x.shape();
    let [batch, channels, height, width] = [own[0], own[1], own[2], own[3]];
    x.reshape(&[batch, channels, height, 1, width, 1])
        .expand(&[batch, channels, height, 2, width, 2])
        .reshape(&[batch, channels, 2 * height, 2 * width])
}

/// Applies an epilogue by Burn's operations.
fn finished(
    sum: Array,
    activation: Option<Activation>,
    last: bool,
    gate: Option<Array>,
    residual: Option<Array>,
) -> Result<Array, String> {
    let mut out = activated(sum, activation.filter(|_| !last))?;
    if let Some(gate) = gate {
        out = out.times(gate);
    }
    if let Some(residual) = residual {
        out = out.plus(residual);
    }
    activated(out, activation.filter(|_| last))
}

pub(super) fn activated(x: Array, activation: Option<Activation>) -> Result<Array, String> {
    let Some(activation) = activation else { return Ok(x) };
    let shape = x.shape();
    let out = ops::activate(vector(x), activation, None).map_err(told)?;
    Ok(Array::of_tensor(out).reshape(&shape))
}

fn linear(call: &Call<'_>) -> super::Run {
    let (activation, turned, ours) = (call.activation(), call.flag("transB"), call.has_kernels());
    Box::new(move |inputs| {
        let (x, weight) = (inputs.get(0)?, inputs.get(1)?);
        let weight = if turned { weight.permute(&[1, 0]) } else { weight };
        let [bias, residual, gate] =
            [place::BIAS, place::RESIDUAL, place::GATE].map(|at| inputs.maybe(at));
        let (mut shape, width) = (x.shape(), weight.shape()[1]);
        let k = shape.pop().ok_or("x has no dimensions")?;
        let rows: usize = shape.iter().product();
        shape.push(width);
        if !ours || !is_ours(x.dtype()) {
            let mut out = product(inputs.ctx, x, weight)?;
            if let Some(bias) = bias {
                out = out.plus(bias.reshape(&[width]));
            }
            return Ok(vec![finished(out, activation, false, gate, residual)?]);
        }
        // Rows in the order in which they lie: a transposed x is not copied, and the result is transposed as it is.
        let order = x.order();
        let lies = order.last() == Some(&(shape.len() - 1));
        let order = if lies { order } else { (0..shape.len()).collect() };
        let x = x.permute(&order);
        let out_shape: Vec<usize> = order.iter().map(|at| shape[*at]).collect();
        let matrix = |own: Array| own.permute(&order).reshape(&[rows, width]).tensor::<2>();
        let epilogue = Epilogue {
            bias: bias.map(vector),
            activation,
            gate: gate.map(matrix),
            residual: residual.map(matrix),
            ..Epilogue::default()
        };
        let x = x.reshape(&[rows, k]).tensor::<2>();
        let out = ops::matmul(inputs.ctx, x, weight.tensor::<2>(), epilogue).map_err(told)?;
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(to, from)| back[*from] = to);
        Ok(vec![Array::of_tensor(out).reshape(&out_shape).permute(&back)])
    })
}

fn group_norm(call: &Call<'_>) -> super::Run {
    let epsilon = call.float("epsilon").unwrap_or(1e-5);
    let groups = call.int("num_groups").unwrap_or(1) as usize;
    let (activation, ours) = (call.activation(), call.has_kernels());
    Box::new(move |inputs| {
        let (x, second) = (inputs.get(0)?, inputs.maybe(3));
        let channels = x.shape()[1] + second.as_ref().map_or(0, |own| own.shape()[1]);
        let whole = |at: usize| inputs.maybe(at).filter(|own| own.count() == channels);
        let weights = whole(1).zip(whole(2));
        let (true, 4, Some((weight, bias)), true) = (ours, x.rank(), weights, is_ours(x.dtype()))
        else {
            let x = match second {
                Some(second) => Array::concat(vec![x, second], 1),
                None => x,
            };
            let out = grouped(x, inputs.maybe(1), inputs.maybe(2), groups, epsilon)?;
            return Ok(vec![activated(out, activation)?]);
        };
        let options = GroupNormOptions {
            groups,
            eps: epsilon as f32,
            weight: vector(weight.cast(x.dtype())),
            bias: vector(bias.cast(x.dtype())),
            second: second.map(Array::tensor),
            modulation: None,
            activation,
        };
        let out = ops::group_norm(inputs.ctx, x.tensor(), options).map_err(told)?;
        Ok(vec![Array::of_tensor(out)])
    })
}

fn norm(call: &Call<'_>) -> super::Run {
    let epsilon = call.float("epsilon").unwrap_or(1e-5);
    let (first, centred) = (call.int("axis").unwrap_or(-1), call.op() == "LayerNormalization");
    Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let (shape, dtype) = (x.shape(), x.dtype());
        let first = axis(first, shape.len())?;
        let (rows, width) = (shape[..first].iter().product(), shape[first..].iter().product());
        let whole = |own: &Array| own.count() == width && own.dtype() == dtype;
        let (weight, bias) = (inputs.maybe(1).filter(whole), inputs.maybe(2));
        let fits = is_ours(dtype) && (bias.is_none() || bias.as_ref().is_some_and(whole));
        let (true, Some(weight)) = (fits, weight) else {
            let axes: Vec<usize> = (first..shape.len()).collect();
            let (normed, ..) = normed(x, &axes, epsilon, centred);
            return Ok(vec![scaled(normed, inputs.maybe(1), bias).cast(dtype)]);
        };
        let weights = NormWeights { weight: vector(weight), bias: bias.map(vector) };
        let kind = if centred { NormKind::Layer } else { NormKind::Rms };
        let x = x.reshape(&[rows, width]).tensor::<2>();
        let out = ops::norm(inputs.ctx, x, weights, None, kind, epsilon as f32).map_err(told)?;
        Ok(vec![Array::of_tensor(out).reshape(&shape)])
    })
}

/// Attention over `[batch, heads, rows, width]`, or over `[heads, rows, width]`.
fn attention(call: &Call<'_>) -> super::Run {
    let (scale, ours) = (call.float("scale").unwrap_or(1.0), call.has_kernels());
    Box::new(move |inputs: &Inputs<'_>| {
        let [q, k, v] = [inputs.get(0)?, inputs.get(1)?, inputs.get(2)?];
        let (dtype, mask) = (q.dtype(), inputs.maybe(3));
        let shape = [&q.shape()[..q.rank() - 1], &v.shape()[v.rank() - 1..]].concat();
        // One width for keys and values.
        let plain = q.shape().last() == v.shape().last();
        if !(ours && is_ours(dtype) && plain) {
            let turned: Vec<usize> =
                (0..k.rank() - 2).chain([k.rank() - 1, k.rank() - 2]).collect();
            let mut scores = product(inputs.ctx, q, k.permute(&turned))?.times_number(scale);
            if let Some(mask) = mask {
                scores = scores.plus(mask.cast(dtype));
            }
            let last = scores.rank() - 1;
            let shares = Array::of(Dispatch::softmax(scores.cast(DType::F32).into_inner(), last));
            // As our kernel: a row that the mask hides gives 0.
            let zero = Array::full(&[], 0f64.into(), DType::F32, &shares.device());
            let shown = shares.clone().compared(shares.clone(), Order::Equal);
            let shares = shown.choose(shares, zero)?.cast(dtype);
            return Ok(vec![product(inputs.ctx, shares, v)?]);
        }
        // Masks of `[heads, rows, columns]` belong to tensors of rank 3.
        let mask = mask.map(|own| own.cast(dtype).tensor::<4>());
        let options = AttentionOptions { scale: Some(scale as f32), ..AttentionOptions::default() };
        let [q, k, v] = [q, k, v].map(Array::tensor::<4>);
        let out = ops::attention(inputs.ctx, q, k, v, None, mask, options).map_err(told)?;
        Ok(vec![Array::of_tensor(out).reshape(&shape)])
    })
}
