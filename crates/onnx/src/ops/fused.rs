//! Fused operators that passes create, and ONNX operators with kernels of ours: convolutions,
//! matmuls, norms, attention.
//!
//! On a device without our kernels, Burn's operations compute the same results one after the other.

use burn::tensor::{DType, FloatDType, Slice, TensorData};
use ops::{
    Activation, ConvOptions, Ctx, Epilogue, Function, GroupNormOptions, NormKind, NormWeights,
    OpError, Operation, Program, Step,
};

use super::attention::{Heads, Scoring, attend};
use super::linear::matmul;
use super::norm::{grouped, normed, scaled};
use super::windows::{Padding, Windows, convolved};
use super::{Call, Inputs, Read, axis, chain};
use crate::array::{Array, scalar_of};
use crate::passes::operand;

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

/// Channels of a padded image: 16 bytes in f16, one vector load.
pub(crate) const PADDED_CHANNELS: usize = 8;

/// Returns true for dtypes that our kernels support.
pub(crate) const fn is_ours(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

fn text(why: OpError) -> String {
    why.to_string()
}

fn conv(call: &Call<'_>) -> Result<super::Run, String> {
    let own = Convolution {
        windows: Windows::from_call(call)?,
        activation: call.activation(),
        last: call.flag("activation_last"),
        doubled: call.flag("doubled"),
        ours: call.has_kernels(),
        channels: call.int("channels").map(|own| own as usize),
    };
    Ok(Box::new(move |inputs| {
        let operands = Operands {
            x: inputs.get(0)?,
            weight: inputs.get(1)?,
            bias: inputs.maybe(operand::BIAS),
            residual: inputs.maybe(operand::RESIDUAL),
            each: inputs.maybe(operand::IMAGE_BIAS),
            second: inputs.maybe(operand::SECOND),
        };
        Ok(vec![own.run(inputs.ctx, operands)?])
    }))
}

/// A convolution with its epilogue.
pub(crate) struct Convolution {
    pub(crate) windows: Windows,
    pub(crate) activation: Option<Activation>,
    /// True to apply the activation after the residual.
    pub(crate) last: bool,
    /// True to read x as if upsampled by two with nearest neighbours.
    pub(crate) doubled: bool,
    /// True if our kernels run on the device.
    pub(crate) ours: bool,
    /// Channels of x, if the filters are padded to [`PADDED_CHANNELS`].
    pub(crate) channels: Option<usize>,
}

/// Operands of a [`Convolution`].
pub(crate) struct Operands {
    pub(crate) x: Array,
    pub(crate) weight: Array,
    pub(crate) bias: Option<Array>,
    pub(crate) residual: Option<Array>,
    /// Bias `[batch, filters, 1, 1]` per image.
    pub(crate) each: Option<Array>,
    /// Second image, whose channels follow those of x.
    pub(crate) second: Option<Array>,
}

impl Convolution {
    /// Computes the convolution. Returns `[batch, filters, …]`.
    ///
    /// # Errors
    /// Shapes that do not match; the device failed.
    pub(crate) fn run(&self, ctx: &Ctx, operands: Operands) -> Result<Array, String> {
        let rank = operands.x.rank();
        if self.ours && is_ours(operands.x.dtype()) && rank == 5 {
            return self.conv3d(ctx, operands);
        }
        let Operands { x, weight, bias, residual, each, second } = operands;
        let Self { windows, activation, last, doubled, ours, channels } = self;
        let (activation, last) = (*activation, *last);
        if !(*ours && is_ours(x.dtype()) && (3..=4).contains(&rank)) {
            let x = match second {
                Some(second) => Array::concat(vec![x, second], 1),
                None => x,
            };
            let x = if *doubled { upsample(x) } else { x };
            let out = convolved(x, weight, bias, windows)?;
            return apply_epilogue(out, each, activation, last, None, residual);
        }
        let factor = if *doubled { 2 } else { 1 };
        let image: Vec<usize> = x.shape()[2..].iter().map(|own| own * factor).collect();
        let sizes = windows.sizes(&image, &weight.shape()[2..])?;
        let x = match channels {
            Some(channels) if *channels != x.shape()[1] => {
                return Err(format!("expected x with {channels} channels, got {}", x.shape()[1]));
            }
            Some(_) => pad_channels(ctx, &x)?,
            None => x,
        };
        let few = x.shape()[1] < PADDED_CHANNELS && weight.shape()[1] == x.shape()[1];
        if few
            && windows.groups == 1
            && second.is_none()
            && each.is_none()
            && !last
            && sizes.are_patches(&image)
        {
            let epilogue =
                LinearEpilogue { bias, activation, residual, ..LinearEpilogue::default() };
            return patches(ctx, &x, weight, epilogue);
        }
        let point = rank == 4 && image == [1, 1] && weight.shape()[2..] == [1, 1];
        if point && windows.groups == 1 && second.is_none() && each.is_none() && !last {
            // A convolution of single pixels is a matmul.
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
            let out = ops::matmul(ctx, x, weight, epilogue).map_err(text)?;
            return Ok(Array::from_tensor(out).reshape(&[rows, filters, 1, 1]));
        }
        // A 1-D image has height 1.
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
        let options = ConvOptions {
            stride: pair(&sizes.strides, 1),
            padding: [0, 1].map(|at| [before[at] as i32, after[at] as i32]),
            dilation: pair(&sizes.dilations, 1),
            groups: windows.groups,
            doubled: *doubled,
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
        let out = Array::from_tensor(ops::conv2d(ctx, x, high(weight), options).map_err(text)?);
        let shape = out.shape();
        Ok(if rank == 3 { out.reshape(&[shape[0], shape[1], shape[3]]) } else { out })
    }

    /// Computes a 3-D convolution of `[batch, channels, depth, height, width]`: the sum over the
    /// taps of the depth, each a 2-D convolution. In 16 bits the sum is rounded after each tap.
    fn conv3d(&self, ctx: &Ctx, operands: Operands) -> Result<Array, String> {
        let Operands { x, weight, mut bias, .. } = operands;
        let (own, filter) = (x.shape(), weight.shape());
        let sizes = self.windows.sizes(&own[2..], &filter[2..])?;
        let (stride, dilation) = (sizes.strides[0], sizes.dilations[0]);
        let zeros = |depth: usize| {
            let shape = [own[0], own[1], depth, own[3], own[4]];
            Array::full(&shape, scalar_of(0.0, x.dtype()), x.dtype(), &x.device())
        };
        let parts = vec![zeros(sizes.before[0]), x.clone(), zeros(sizes.after[0])];
        let parts: Vec<Array> = parts.into_iter().filter(|own| own.shape()[2] > 0).collect();
        let x = if parts.len() == 1 { x } else { Array::concat(parts, 2) };
        let (depth, taps) = (x.shape()[2], filter[2]);
        let reach = (taps - 1) * dilation + 1;
        let room = depth
            .checked_sub(reach)
            .ok_or_else(|| format!("expected an image of depth {reach} or more, got {depth}"))?;
        let count = room / stride + 1;
        let flat = |own: &[usize]| own[1..].to_vec();
        let pads = [flat(&sizes.before), flat(&sizes.after)].concat();
        let windows = Windows::new(
            &sizes.strides[1..],
            Padding::Pads(&pads),
            &sizes.dilations[1..],
            self.windows.groups,
        );
        let mut sum = None;
        for tap in 0..taps {
            let is_last = tap + 1 == taps;
            let plane = Self {
                windows: windows.clone(),
                activation: self.activation.filter(|_| is_last),
                last: sum.is_some(),
                doubled: false,
                ours: true,
                channels: None,
            };
            let from = (tap * dilation) as isize;
            let to = from + ((count - 1) * stride) as isize + 1;
            let all = Slice::full();
            let some = Slice::new(from, Some(to), stride as isize);
            let part = x.clone().slice(&[all, all, some, all, all]).permute(&[0, 2, 1, 3, 4]);
            let operands = Operands {
                x: part.reshape(&[own[0] * count, own[1], own[3], own[4]]),
                weight: weight
                    .clone()
                    .narrow(2, tap, tap + 1)
                    .reshape(&[filter[0], filter[1], filter[3], filter[4]]),
                bias: bias.take(),
                residual: sum,
                each: None,
                second: None,
            };
            sum = Some(plane.run(ctx, operands)?);
        }
        let sum = sum.ok_or("expected filters of depth 1 or more")?;
        let flat = sum.shape();
        let out = sum.reshape(&[own[0], count, flat[1], flat[2], flat[3]]);
        Ok(out.permute(&[0, 2, 1, 3, 4]))
    }
}

/// Pads an image `[batch, channels, …]` with zeros to [`PADDED_CHANNELS`] channels, stored NHWC.
///
/// # Errors
/// The device failed.
fn pad_channels(ctx: &Ctx, x: &Array) -> Result<Array, String> {
    let rank = x.rank();
    let last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    let back: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    let x = x.clone().permute(&last);
    let mut shape = x.shape();
    let channels = std::mem::replace(&mut shape[rank - 1], PADDED_CHANNELS);
    let wide = Array::full(&shape, scalar_of(0.0, x.dtype()), x.dtype(), &x.device());
    let part = wide.clone().narrow(rank - 1, 0, channels).into_inner();
    let same = Program { inputs: 1, steps: Vec::new() };
    ops::pointwise_into(ctx, &same, &[x.into_inner()], &part).map_err(text)?;
    Ok(wide.permute(&back))
}

/// Computes a convolution whose windows do not overlap and cover the image `[batch, channels,
/// height, width]`: a matmul of the patches with the filters.
///
/// # Errors
/// The device failed.
fn patches(ctx: &Ctx, x: &Array, weight: Array, epilogue: LinearEpilogue) -> Result<Array, String> {
    let (own, filter) = (x.shape(), weight.shape());
    let (kernel, filters) = (&filter[2..], filter[0]);
    let counts: Vec<usize> = own[2..].iter().zip(kernel).map(|(own, by)| own / by).collect();
    let split = counts.iter().zip(kernel).flat_map(|(count, by)| [*count, *by]);
    let split: Vec<usize> = own[..2].iter().copied().chain(split).collect();
    let rank = counts.len();
    // Order: batch, windows …, pixels of a window …, channels, like channels-last filters.
    let order = (0..rank).map(|at| 2 + 2 * at).chain((0..rank).map(|at| 3 + 2 * at));
    let order: Vec<usize> = [0].into_iter().chain(order).chain([1]).collect();
    let k = filter[1..].iter().product();
    let rows = x
        .clone()
        .reshape(&split)
        .permute(&order)
        .reshape(&[own[0] * counts.iter().product::<usize>(), k]);
    let last: Vec<usize> = [0].into_iter().chain(2..rank + 2).chain([1]).collect();
    let weight = weight.permute(&last).reshape(&[filters, k]).permute(&[1, 0]);
    let flat = |own: Array| {
        let shape = own.shape();
        own.permute(&last).reshape(&[shape.iter().product::<usize>() / filters, filters])
    };
    let epilogue = LinearEpilogue { residual: epilogue.residual.map(flat), ..epilogue };
    let out = project(ctx, true, rows, weight, epilogue)?;
    let shape: Vec<usize> = [own[0]].into_iter().chain(counts).chain([filters]).collect();
    let back: Vec<usize> = [0, rank + 1].into_iter().chain(1..=rank).collect();
    Ok(out.reshape(&shape).permute(&back))
}

/// Computes the mean over the pixels of an image `[batch, channels, …]` as a matmul with ones.
/// Returns `[batch, channels]`; None if the image is not channels-last, or without our kernels.
///
/// # Errors
/// The device failed.
pub(super) fn mean_of_pixels(ctx: &Ctx, ours: bool, x: &Array) -> Result<Option<Array>, String> {
    let (shape, dtype, rank) = (x.shape(), x.dtype(), x.rank());
    let last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    if !ours || !is_ours(dtype) || !(3..=4).contains(&rank) || x.order() != last {
        return Ok(None);
    }
    let (batch, channels, pixels) = (shape[0], shape[1], shape[2..].iter().product::<usize>());
    let rows = x.clone().permute(&last).reshape(&[batch, 1, pixels, channels]);
    let ones = TensorData::full([1, 1, 1, pixels], 1f32).convert_dtype(dtype);
    let ones = Array::from_data(ones, &x.device());
    // The sum may overflow f16.
    let epilogue = Epilogue { out: Some(FloatDType::F32), ..Epilogue::default() };
    let sum = ops::matmul(ctx, ones.tensor::<4>(), rows.tensor::<4>(), epilogue).map_err(text)?;
    let mean = Array::from_tensor(sum).times_number(1.0 / pixels as f64).cast(dtype);
    Ok(Some(mean.reshape(&[batch, channels])))
}

pub(super) fn vector(own: Array) -> burn::tensor::Tensor<1> {
    let count = own.count();
    own.reshape(&[count]).tensor()
}

/// Upsamples an image by two with nearest neighbours.
fn upsample(x: Array) -> Array {
    let own = x.shape();
    let [batch, channels, height, width] = [own[0], own[1], own[2], own[3]];
    x.reshape(&[batch, channels, height, 1, width, 1])
        .expand(&[batch, channels, height, 2, width, 2])
        .reshape(&[batch, channels, 2 * height, 2 * width])
}

/// Applies an epilogue with Burn's operations.
fn apply_epilogue(
    sum: Array,
    bias: Option<Array>,
    activation: Option<Activation>,
    last: bool,
    gate: Option<Array>,
    residual: Option<Array>,
) -> Result<Array, String> {
    let operands = [bias, gate, residual];
    let program = epilogue_program(activation, last, operands.each_ref().map(Option::is_some));
    if program.steps.is_empty() {
        return Ok(sum);
    }
    let own: Vec<_> = [Some(sum)].into_iter().chain(operands).flatten().collect();
    super::pointwise::without_kernels(&program, own)
}

/// Returns the program of an epilogue: its inputs are the sum, and those of bias, gate and residual
/// that are given.
fn epilogue_program(
    activation: Option<Activation>,
    last: bool,
    [bias, gate, residual]: [bool; 3],
) -> Program {
    let inputs = 1 + [bias, gate, residual].map(u8::from).iter().sum::<u8>();
    // The activation has no operation.
    let stages = [
        (bias, Some(Operation::Add)),
        (!last, None),
        (gate, Some(Operation::Multiply)),
        (residual, Some(Operation::Add)),
        (last, None),
    ];
    let (mut steps, mut value, mut operands) = (Vec::new(), 0, 1..);
    for (_, operation) in stages.into_iter().filter(|(given, _)| *given) {
        let step = match operation {
            Some(operation) => operands.next().map(|own| Step::Binary(operation, value, own)),
            None => activation.map(|own| Step::Unary(Function::Activation(own), value)),
        };
        if let Some(step) = step {
            steps.push(step);
            value = inputs + steps.len() as u8 - 1;
        }
    }
    Program { inputs, steps }
}

pub(super) fn activated(x: Array, activation: Option<Activation>) -> Result<Array, String> {
    let Some(activation) = activation else { return Ok(x) };
    if chain::supports(std::slice::from_ref(&x)) {
        return chain::run(&epilogue_program(Some(activation), false, [false; 3]), vec![x]);
    }
    let shape = x.shape();
    let out = ops::activate(vector(x), activation, None).map_err(text)?;
    Ok(Array::from_tensor(out).reshape(&shape))
}

fn linear(call: &Call<'_>) -> super::Run {
    let (activation, transposed, ours) =
        (call.activation(), call.flag("transB"), call.has_kernels());
    Box::new(move |inputs| {
        let (x, weight) = (inputs.get(0)?, inputs.get(1)?);
        let weight = if transposed { weight.permute(&[1, 0]) } else { weight };
        let [bias, residual, gate] =
            [operand::BIAS, operand::RESIDUAL, operand::GATE].map(|at| inputs.maybe(at));
        let epilogue = LinearEpilogue { bias, activation, gate, residual };
        Ok(vec![project(inputs.ctx, ours, x, weight, epilogue)?])
    })
}

/// Epilogue of a matmul: `activation(sum + bias) · gate + residual`.
#[derive(Default)]
pub(crate) struct LinearEpilogue {
    pub(crate) bias: Option<Array>,
    pub(crate) activation: Option<Activation>,
    pub(crate) gate: Option<Array>,
    pub(crate) residual: Option<Array>,
}

/// Computes the matmul of x `[.., k]` with a weight `[k, width]`, and its epilogue.
///
/// # Errors
/// The device failed.
pub(crate) fn project(
    ctx: &Ctx,
    ours: bool,
    x: Array,
    weight: Array,
    epilogue: LinearEpilogue,
) -> Result<Array, String> {
    let LinearEpilogue { bias, activation, gate, residual } = epilogue;
    let (mut shape, width) = (x.shape(), weight.shape()[1]);
    let k = shape.pop().ok_or("expected x of rank 1 or more, got a scalar")?;
    let rows: usize = shape.iter().product();
    shape.push(width);
    if !ours || !is_ours(x.dtype()) {
        let out = matmul(ctx, x, weight)?;
        let bias = bias.map(|own| own.reshape(&[width]));
        return apply_epilogue(out, bias, activation, false, gate, residual);
    }
    // Rows in memory order: a transposed x is not copied, and the output has the same layout.
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
    let out = ops::matmul(ctx, x, weight.tensor::<2>(), epilogue).map_err(text)?;
    let mut back = vec![0; order.len()];
    order.iter().enumerate().for_each(|(to, from)| back[*from] = to);
    Ok(Array::from_tensor(out).reshape(&out_shape).permute(&back))
}

fn group_norm(call: &Call<'_>) -> super::Run {
    let own = GroupNorm {
        groups: call.int("num_groups").unwrap_or(1) as usize,
        epsilon: call.float("epsilon").unwrap_or(1e-5),
        activation: call.activation(),
        ours: call.has_kernels(),
    };
    Box::new(move |inputs| {
        let weights = [inputs.maybe(1), inputs.maybe(2)];
        Ok(vec![own.run(inputs.ctx, inputs.get(0)?, weights, inputs.maybe(3))?])
    })
}

/// A group norm.
pub(crate) struct GroupNorm {
    pub(crate) groups: usize,
    pub(crate) epsilon: f64,
    pub(crate) activation: Option<Activation>,
    /// True if our kernels run on the device.
    pub(crate) ours: bool,
}

impl GroupNorm {
    /// Computes the norm of x, with the channels of `second` appended. `weights` are weight and
    /// bias.
    ///
    /// # Errors
    /// Groups that do not divide the channels; the device failed.
    pub(crate) fn run(
        &self,
        ctx: &Ctx,
        x: Array,
        weights: [Option<Array>; 2],
        second: Option<Array>,
    ) -> Result<Array, String> {
        let channels = x.shape()[1] + second.as_ref().map_or(0, |own| own.shape()[1]);
        let [factor, bias] = weights;
        let whole = |own: &Option<Array>| own.clone().filter(|own| own.count() == channels);
        let both = whole(&factor).zip(whole(&bias));
        let (true, 3 | 4, Some((weight, of_bias)), true) =
            (self.ours, x.rank(), both, is_ours(x.dtype()))
        else {
            let x = match second {
                Some(second) => Array::concat(vec![x, second], 1),
                None => x,
            };
            let out = grouped(x, factor, bias, self.groups, self.epsilon)?;
            return activated(out, self.activation);
        };
        let options = GroupNormOptions {
            groups: self.groups,
            eps: self.epsilon as f32,
            weight: vector(weight.cast(x.dtype())),
            bias: vector(of_bias.cast(x.dtype())),
            second: second.map(Array::tensor),
            modulation: None,
            activation: self.activation,
        };
        // A 1-D image has width 1.
        let mut shape = x.shape();
        shape.resize(4, 1);
        let out = ops::group_norm(ctx, x.clone().reshape(&shape).tensor(), options);
        Ok(Array::from_tensor(out.map_err(text)?)
            .reshape(&[&shape[..1], &[channels], &x.shape()[2..]].concat()))
    }
}

fn norm(call: &Call<'_>) -> super::Run {
    let first = call.int("axis").unwrap_or(-1);
    let own = Norm {
        centred: call.op() == "LayerNormalization",
        epsilon: call.float("epsilon").unwrap_or(1e-5),
        ours: call.has_kernels(),
    };
    Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let first = axis(first, x.rank())?;
        Ok(vec![own.run(inputs.ctx, x, first, inputs.maybe(1), inputs.maybe(2))?])
    })
}

/// A layer norm or RMS norm over the last dimensions.
pub(crate) struct Norm {
    /// True for a layer norm, which subtracts the mean; false for an RMS norm.
    pub(crate) centred: bool,
    pub(crate) epsilon: f64,
    /// True if our kernels run on the device.
    pub(crate) ours: bool,
}

impl Norm {
    /// Computes the norm of x over the dimensions from `first` on.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn run(
        &self,
        ctx: &Ctx,
        x: Array,
        first: usize,
        weight: Option<Array>,
        bias: Option<Array>,
    ) -> Result<Array, String> {
        let (shape, dtype) = (x.shape(), x.dtype());
        let (rows, width) = (shape[..first].iter().product(), shape[first..].iter().product());
        let whole = |own: &Array| own.count() == width && own.dtype() == dtype;
        let fits = self.ours && is_ours(dtype) && bias.as_ref().is_none_or(whole);
        let Some(factor) = weight.clone().filter(whole).filter(|_| fits) else {
            let axes: Vec<usize> = (first..shape.len()).collect();
            let (normed, ..) = normed(x, &axes, self.epsilon, self.centred);
            return Ok(scaled(normed, weight, bias).cast(dtype));
        };
        let weights = NormWeights { weight: vector(factor), bias: bias.map(vector) };
        let kind = if self.centred { NormKind::Layer } else { NormKind::Rms };
        let x = x.reshape(&[rows, width]).tensor::<2>();
        let out = ops::norm(ctx, x, weights, None, kind, self.epsilon as f32).map_err(text)?;
        Ok(Array::from_tensor(out).reshape(&shape))
    }
}

/// Returns an attention of `[batch, heads, rows, size]` or `[heads, rows, size]`.
fn attention(call: &Call<'_>) -> super::Run {
    let scoring = Scoring { scale: call.float("scale"), ..Scoring::new(call) };
    Box::new(move |inputs: &Inputs<'_>| {
        let [q, k, v] = [inputs.get(0)?, inputs.get(1)?, inputs.get(2)?];
        let shape = [&q.shape()[..q.rank() - 1], &v.shape()[v.rank() - 1..]].concat();
        let [q, k, v] = [q, k, v].map(|own| {
            let shape = own.shape();
            let ones = std::iter::repeat_n(1, 4 - shape.len());
            own.reshape(&ones.chain(shape).collect::<Vec<_>>())
        });
        let masks = inputs.maybe(3).into_iter().collect();
        let (out, _) = attend(inputs.ctx, Heads { q, k, v }, Scoring { masks, ..scoring.clone() })?;
        Ok(vec![out.reshape(&shape)])
    })
}
