//! Convolutions of Burn tensors, and their gradients.
//!
//! Tensors have torch's axes: x `[batch, channels, height, width]`, weight `[filters, channels / groups, rows, cols]`. Kernels
//! read channels last. A tensor whose strides put channels last is read where it lies; any other is copied. Results are
//! channels last.
//!
//! Without gradients the epilogue is fused. With gradients only the bias is fused, and the rest is ordinary differentiable ops.

mod backward;
mod batch_norm;
mod transposed;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Dispatch, backend_extension};
use burn::tensor::{Scalar, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::conv::{Conv, ConvOperands, ConvProblem};
use kernels::matmul::{Activation, Constant, Precision, Reading};

use crate::activate::finish;
use crate::call::{Call, Optional, Parts, on_cubecl, result_like, same_dtype, same_shape, size_of};
use crate::layout::pitched;
use crate::matmul::MatmulOps;
use crate::{Ctx, OpError};

use backward::{ConvBackward, Saved};
pub use batch_norm::{BatchNorm, fold_batch_norm};
pub use transposed::conv_transpose2d;

/// Geometry of a convolution, and ops that are fused into it. Pairs are height, then width.
#[derive(Debug, Clone)]
pub struct ConvOptions {
    /// Step of the filters.
    pub stride: [usize; 2],
    /// Zeros before and after the image, of both axes; negative ones leave pixels out.
    pub padding: [[i32; 2]; 2],
    /// Distance of neighbouring taps.
    pub dilation: [usize; 2],
    /// Parts of the channels; a filter sees one.
    pub groups: usize,
    /// True to read each pixel of x as a square of four: nearest-neighbour resizing by two.
    pub doubled: bool,
    /// Second input `[batch, more channels, height, width]`, whose channels follow those of x. It needs one group.
    pub second: Option<Tensor<4>>,
    /// Bias `[filters]`.
    pub bias: Option<Tensor<1>>,
    /// Bias of each image `[batch, filters]`, in place of `bias`. It needs one group.
    pub image_bias: Option<Tensor<2>>,
    /// Activation, applied after the bias.
    pub activation: Option<Activation>,
    /// True to apply the activation after the residual.
    pub activation_last: bool,
    /// Addend with the result's shape.
    pub residual: Option<Tensor<4>>,
    /// Factor of the whole result.
    pub factor: Option<f32>,
    /// True to let tensor cores round f32 operands to tf32.
    pub tf32: bool,
    /// True to let tensor cores accumulate in f16; see [`Epilogue`](crate::Epilogue).
    pub f16_accumulation: bool,
}

impl Default for ConvOptions {
    fn default() -> Self {
        Self {
            stride: [1, 1],
            padding: [[0, 0]; 2],
            dilation: [1, 1],
            groups: 1,
            doubled: false,
            second: None,
            bias: None,
            image_bias: None,
            activation: None,
            activation_last: false,
            residual: None,
            factor: None,
            tf32: false,
            f16_accumulation: false,
        }
    }
}

impl ConvOptions {
    /// Options with the same padding on both sides of an axis.
    pub fn padded([down, across]: [usize; 2]) -> Self {
        let side = |size: usize| [i32::try_from(size).unwrap_or(i32::MAX); 2];
        Self { padding: [side(down), side(across)], ..Self::default() }
    }
}

/// Computes `factor · (residual + activation(x ∗ weight + bias))`, or `factor · activation(residual + x ∗ weight + bias)`.
///
/// # Shapes
/// x `[batch, channels, height, width]`, weight `[filters, channels / groups, rows, cols]`, result
/// `[batch, filters, out height, out width]`, with channels last in memory. Gradients flow to every tensor.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Conv`] and the like for invalid operands; [`OpError::Device`] for a device
/// without kernels; [`OpError::Tune`] if the policy allows no config for the shape.
pub fn conv2d(
    ctx: &Ctx,
    x: Tensor<4>,
    weight: Tensor<4>,
    options: ConvOptions,
) -> Result<Tensor<4>, OpError> {
    let reading = if options.doubled { Reading::Doubled } else { Reading::Plain };
    convolved(ctx, x, weight, options, reading)
}

/// Computes [`conv2d`] in one dimension. The options for the height must be neutral: no padding, not doubled.
///
/// # Shapes
/// x `[batch, channels, length]`, weight `[filters, channels / groups, taps]`, result `[batch, filters, out length]`.
///
/// # Errors
/// The errors of [`conv2d`].
pub fn conv1d(
    ctx: &Ctx,
    x: Tensor<3>,
    weight: Tensor<3>,
    options: ConvOptions,
) -> Result<Tensor<3>, OpError> {
    let out = conv2d(ctx, x.unsqueeze_dim(2), weight.unsqueeze_dim(2), options)?;
    same_shape("the height", &[out.dims()[2]], &[1])?;
    Ok(out.squeeze_dim(2))
}

/// Runs a convolution with a weight `[filters, channels / groups, rows, cols]` in the kernels' order of taps.
fn convolved(
    ctx: &Ctx,
    x: Tensor<4>,
    weight: Tensor<4>,
    options: ConvOptions,
    reading: Reading,
) -> Result<Tensor<4>, OpError> {
    on_cubecl(&x.device())?;
    let ConvOptions { second, bias, image_bias, residual, .. } = &options;
    let (dtype, [batch, channels, height, width]) = (x.dtype(), x.dims());
    let [filters, depth, rows, cols] = weight.dims();
    let precision = match dtype {
        burn::tensor::DType::F32 if options.tf32 => Precision::Tf32,
        burn::tensor::DType::F32 => Precision::F32,
        burn::tensor::DType::F16 if options.f16_accumulation => Precision::F16Acc16,
        burn::tensor::DType::F16 => Precision::F16,
        burn::tensor::DType::BF16 => Precision::Bf16,
        other => return Err(OpError::NotFloat(other)),
    };
    if options.tf32 && precision != Precision::Tf32 {
        return Err(OpError::Tf32(dtype));
    }
    if options.f16_accumulation && precision != Precision::F16Acc16 {
        return Err(OpError::F16Accumulation(dtype));
    }
    let more = second.as_ref().map_or(0, |second| second.dims()[1]);
    let all = channels + more;
    // Channels that groups do not divide are an error of the problem.
    let groups = options.groups.max(1);
    let need = if all.is_multiple_of(groups) { all / groups } else { depth };
    same_shape("weight", &[filters, depth, rows, cols], &[filters, need, rows, cols])?;
    if bias.is_some() && image_bias.is_some() {
        return Err(OpError::TwoBiases);
    }
    let size = |pair: [usize; 2]| -> Result<[u32; 2], OpError> {
        Ok([size_of(pair[0])?, size_of(pair[1])?])
    };
    let problem = ConvProblem {
        batch: size_of(batch)?,
        image: size([height, width])?,
        channels: size([channels, more])?,
        filters: size_of(filters)?,
        taps: size([rows, cols])?,
        stride: size(options.stride)?,
        dilation: size(options.dilation)?,
        padding: options.padding,
        groups: size_of(options.groups)?,
        reading,
        precision,
        out: precision.storage(),
        epilogue: kernels::matmul::Epilogue {
            bias: bias.is_some() || image_bias.is_some(),
            activation: options.activation,
            activation_last: options.activation_last,
            residual: residual.is_some(),
            factor: options.factor.map(Constant::new),
            ..kernels::matmul::Epilogue::default()
        },
        bias_pitch: if image_bias.is_some() { size_of(filters)? } else { 0 },
    };
    let problem = problem.checked()?;
    let [down, across] = problem.output().map(|size| size as usize);
    let result = [batch, filters, down, across];
    let shapes = [
        ("second input", second.as_ref().map(Tensor::dims), [batch, more, height, width]),
        ("residual", residual.as_ref().map(Tensor::dims), result),
    ];
    for (what, have, need) in shapes {
        if let Some(have) = have {
            same_shape(what, &have, &need)?;
        }
    }
    if let Some(bias) = bias {
        same_shape("bias", &bias.dims(), &[filters])?;
    }
    if let Some(bias) = image_bias {
        same_shape("image bias", &bias.dims(), &[batch, filters])?;
    }
    let dtypes = [
        ("weight", Some(weight.dtype())),
        ("second input", second.as_ref().map(Tensor::dtype)),
        ("bias", bias.as_ref().map(Tensor::dtype)),
        ("image bias", image_bias.as_ref().map(Tensor::dtype)),
        ("residual", residual.as_ref().map(Tensor::dtype)),
    ];
    for (what, have) in dtypes {
        if let Some(have) = have {
            same_dtype(what, have, dtype)?;
        }
    }
    let call = Call::new(ctx);
    let last = |t: Tensor<4>| t.permute([0, 2, 3, 1]).into_dispatch();
    let ConvOptions { second, bias, image_bias, residual, .. } = options;
    let bias = bias.map(Tensor::into_dispatch).or(image_bias.map(Tensor::into_dispatch));
    let out = <Dispatch as ConvOps>::convolve(
        last(x),
        last(weight),
        Optional::from_tensor(second.map(last)),
        Optional::from_tensor(bias),
        Optional::from_tensor(residual.map(last)),
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out).permute([0, 3, 1, 2])),
        Some(e) => Err(e),
    }
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait ConvOps: MatmulOps {
    /// Convolves with a `problem` of these tensors, which have their channels last.
    fn convolve(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] second: Optional<Self>,
        #[extension_type] bias: Optional<Self>,
        #[extension_type] residual: Optional<Self>,
        problem: ConvProblem,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl ConvOps for CubeBackend {
    fn convolve(
        x: CubeTensor,
        weight: CubeTensor,
        second: Optional<Self>,
        bias: Optional<Self>,
        residual: Optional<Self>,
        mut problem: ConvProblem,
        call: Call,
    ) -> CubeTensor {
        let [height, width] = problem.output().map(|size| size as usize);
        let shape = [problem.batch as usize, height, width, problem.filters as usize];
        let out = result_like(&x, shape, problem.out);
        let dense = |tensor| into_contiguous(tensor).handle;
        let (bias, image_bias) = match problem.bias_pitch {
            0 => (bias, None),
            _ => (Optional::Absent, bias.into_option()),
        };
        let parts = Parts { bias, gate: Optional::Absent, residual, norm: Optional::Absent };
        let mut epilogue = parts.buffers();
        if let Some(bias) = image_bias {
            let (bias, pitch) = pitched(bias);
            (epilogue.bias, problem.bias_pitch) = (Some(bias), pitch);
        }
        let operands = ConvOperands {
            x: dense(x),
            second: second.into_option().map(dense),
            filters: dense(weight),
            out: out.handle.clone(),
            epilogue,
        };
        if let Err(e) = call.ctx.run::<Conv>(&out, &problem, &operands) {
            call.fail(e);
        }
        out
    }
}

impl<B: ConvOps, C: CheckpointStrategy> ConvOps for Autodiff<B, C> {
    fn convolve(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        second: Optional<Self>,
        bias: Optional<Self>,
        residual: Optional<Self>,
        problem: ConvProblem,
        call: Call,
    ) -> FloatTensor<Self> {
        let [second, bias, residual] = [second, bias, residual].map(Optional::into_option);
        let rest = [&second, &bias, &residual].into_iter().flatten();
        if ![&x, &weight].into_iter().chain(rest).any(|tensor| tensor.is_tracked()) {
            let inner = |part: Option<_>| Optional::from_tensor(part.map(Self::inner));
            let (x, weight) = (Self::inner(x), Self::inner(weight));
            let [second, bias, residual] = [second, bias, residual].map(inner);
            return Self::from_inner(B::convolve(x, weight, second, bias, residual, problem, call));
        }
        if let Some(second) = second {
            let [first, more] = problem.channels;
            let problem = ConvProblem { channels: [first + more, 0], ..problem };
            let x = Self::float_cat(vec![x, second], 3);
            let [bias, residual] = [bias, residual].map(Optional::from_tensor);
            return Self::convolve(x, weight, Optional::Absent, bias, residual, problem, call);
        }
        let kernels::matmul::Epilogue { activation, activation_last, factor, .. } =
            problem.epilogue;
        let per_image = problem.bias_pitch > 0;
        if per_image || activation.is_some() || residual.is_some() || factor.is_some() {
            let (fused, each) = if per_image { (None, bias) } else { (bias, None) };
            let epilogue = kernels::matmul::Epilogue {
                bias: fused.is_some(),
                ..kernels::matmul::Epilogue::default()
            };
            let bare = ConvProblem { epilogue, bias_pitch: 0, ..problem };
            let absent = || Optional::Absent;
            let fused = Optional::from_tensor(fused);
            let mut sum = Self::convolve(x, weight, absent(), fused, absent(), bare, call);
            if let Some(each) = each {
                let [batch, filters] = [problem.batch as usize, problem.filters as usize];
                let each = Self::float_reshape(each, Shape::new([batch, 1, 1, filters]));
                sum = Self::float_add(sum, each);
            }
            let [early, last] =
                [!activation_last, activation_last].map(|now| activation.filter(|_| now));
            let sum = finish::<Self>(sum, early, None, residual);
            let out = finish::<Self>(sum, last, None, None);
            return match factor {
                None => out,
                Some(factor) => Self::float_mul_scalar(out, Scalar::from(factor.value())),
            };
        }
        let third = bias.as_ref().unwrap_or(&x).node();
        let nodes = [x.node(), weight.node(), third];
        let needs = [x.is_tracked(), weight.is_tracked()];
        let biased = bias.is_some();
        let convolve = |x: FloatTensor<Self>, weight: FloatTensor<Self>, call| {
            let (x, weight) = (x.into_primitive(), weight.into_primitive());
            let bias = Optional::from_tensor(bias.map(|bias| bias.into_primitive()));
            B::convolve(x, weight, Optional::Absent, bias, Optional::Absent, problem, call)
        };
        match Backward::<B, 3>::prepare::<C>(ConvBackward, nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                // Each gradient needs the other operand.
                let saved = Saved {
                    x: needs[1].then(|| prep.checkpoint(&x)),
                    weight: needs[0].then(|| prep.checkpoint(&weight)),
                    biased,
                    problem,
                    ctx: call.ctx.clone(),
                };
                prep.finish(saved, convolve(x, weight, call))
            }
            OpsKind::UnTracked(prep) => prep.finish(convolve(x, weight, call)),
        }
    }
}
