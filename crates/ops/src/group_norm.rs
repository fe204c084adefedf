//! Group norms of Burn tensors, and their gradients.
//!
//! ```text
//! n = (x - mean)·factor     out = act((1 + scale)·(n·w + bias) + shift)
//! g = dout·w                dx = factor·(g - n·mean(g·n) - mean(g))     means over the pixels and channels of a group
//!                           dw = Σ dout·n     dbias = Σ dout
//! ```
//!
//! The gradients are ordinary ops in f32.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, TensorMetadata, backend_extension,
};
use burn::tensor::{FloatDType, Scalar, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::group_norm::{GroupNorm, GroupNormOperands, GroupNormProblem};
use kernels::matmul::Activation;

use crate::activate::finish;
use crate::call::{
    Call, Optional, float_dtype, float_of, on_cubecl, result_like, same_dtype, same_shape, size_of,
};
use crate::layout::pitched;
use crate::{Ctx, OpError};

/// A group norm apart from its image.
#[derive(Debug, Clone)]
pub struct GroupNormOptions {
    /// Number of groups; it divides the channels.
    pub groups: usize,
    /// Constant added to the variance.
    pub eps: f32,
    /// Weight `[channels]`.
    pub weight: Tensor<1>,
    /// Bias `[channels]`.
    pub bias: Tensor<1>,
    /// Second input `[batch, more channels, height, width]`, whose channels follow those of x.
    pub second: Option<Tensor<4>>,
    /// Scale, then shift of each image: `[batch, 2 · channels]`.
    pub modulation: Option<Tensor<2>>,
    /// Activation, applied last.
    pub activation: Option<Activation>,
}

/// Normalises groups of channels: `act((1 + scale) · (normalised · weight + bias) + shift)`, in f32 with one rounding.
///
/// # Shapes
/// x `[batch, channels, height, width]`; the result has the channels of both inputs, last in memory. Channels-last inputs are
/// read where they lie. Gradients flow to every tensor.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`] or [`OpError::GroupNorm`] for invalid operands; [`OpError::Device`] for a device without
/// kernels; [`OpError::Tune`].
pub fn group_norm(
    ctx: &Ctx,
    x: Tensor<4>,
    options: GroupNormOptions,
) -> Result<Tensor<4>, OpError> {
    on_cubecl(&x.device())?;
    let GroupNormOptions { groups, eps, weight, bias, second, modulation, activation } = options;
    let (dtype, [batch, channels, height, width]) = (x.dtype(), x.dims());
    let more = second.as_ref().map_or(0, |second| second.dims()[1]);
    let all = channels + more;
    for (what, part) in [("weight", &weight), ("bias", &bias)] {
        same_shape(what, &part.dims(), &[all])?;
        same_dtype(what, part.dtype(), dtype)?;
    }
    if let Some(second) = &second {
        same_shape("second input", &second.dims(), &[batch, more, height, width])?;
        same_dtype("second input", second.dtype(), dtype)?;
    }
    if let Some(modulation) = &modulation {
        same_shape("modulation", &modulation.dims(), &[batch, 2 * all])?;
        same_dtype("modulation", modulation.dtype(), dtype)?;
    }
    let problem = GroupNormProblem {
        batch: size_of(batch)?,
        pixels: size_of(height * width)?,
        channels: [size_of(channels)?, size_of(more)?],
        groups: size_of(groups)?,
        dtype: float_of(dtype)?,
        eps,
        activation,
        modulation_pitch: if modulation.is_some() { size_of(2 * all)? } else { 0 },
    };
    let problem = problem.checked()?;
    let call = Call::new(ctx);
    let last = |t: Tensor<4>| t.permute([0, 2, 3, 1]).into_dispatch();
    let out = <Dispatch as GroupNormOps>::normalise_groups(
        last(x),
        weight.into_dispatch(),
        bias.into_dispatch(),
        Optional::from_tensor(second.map(last)),
        Optional::from_tensor(modulation.map(Tensor::into_dispatch)),
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out).permute([0, 3, 1, 2])),
        Some(e) => Err(e),
    }
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait GroupNormOps: Backend {
    /// Normalises with a `problem` of these tensors, which have their channels last.
    fn normalise_groups(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        #[extension_type] second: Optional<Self>,
        #[extension_type] modulation: Optional<Self>,
        problem: GroupNormProblem,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl GroupNormOps for CubeBackend {
    fn normalise_groups(
        x: CubeTensor,
        weight: CubeTensor,
        bias: CubeTensor,
        second: Optional<Self>,
        modulation: Optional<Self>,
        mut problem: GroupNormProblem,
        call: Call,
    ) -> CubeTensor {
        let [batch, height, width, _] = x.meta.shape().dims();
        let out = result_like(&x, [batch, height, width, problem.width() as usize], problem.dtype);
        let dense = |tensor| into_contiguous(tensor).handle;
        let modulation = modulation.into_option().map(|modulation| {
            let (modulation, pitch) = pitched(modulation);
            problem.modulation_pitch = pitch;
            modulation
        });
        let operands = GroupNormOperands {
            x: dense(x),
            second: second.into_option().map(dense),
            weight: dense(weight),
            bias: dense(bias),
            modulation,
            out: out.handle.clone(),
        };
        if let Err(e) = call.ctx.run::<GroupNorm>(&out, &problem, &operands) {
            call.fail(e);
        }
        out
    }
}

/// Parents of a group norm's node: x, weight and bias.
#[derive(Debug)]
struct Normalise;

/// State that the gradients need.
#[derive(Debug, Clone)]
struct Saved<B: Backend> {
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    problem: GroupNormProblem,
}

impl<B: GroupNormOps> Backward<B, 3> for Normalise {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, 3>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_weight, to_bias] = ops.parents;
        let Saved { x, weight, problem } = ops.state;
        let (dtype, channels) = (float_dtype(problem.dtype), problem.width() as usize);
        let (groups, pixels) = (problem.groups as usize, problem.pixels as usize);
        let grouped = [problem.batch as usize, pixels, groups, channels / groups];
        let wide = |t: FloatTensor<B>| B::float_cast(t, FloatDType::F32);
        let narrow = |t, shape: Shape| B::float_reshape(B::float_cast(t, dtype), shape);
        let image = x.shape();
        let flat = |t| B::float_reshape(t, Shape::new(grouped));
        let mean = |t| B::float_mean_dim(B::float_mean_dim(t, 1), 3);
        let of_channel = |t| {
            let sum = B::float_sum_dim(B::float_sum_dim(t, 0), 1);
            narrow(sum, Shape::new([channels]))
        };
        let dout = flat(wide(gradients.consume::<B>(&ops.node)));
        if let Some(node) = to_bias {
            gradients.register::<B>(node.id, of_channel(dout.clone()));
        }
        let x = flat(wide(x));
        let far = B::float_sub(x.clone(), mean(x));
        let variance = mean(B::float_mul(far.clone(), far.clone()));
        let size = B::float_sqrt(B::float_add_scalar(variance, Scalar::from(problem.eps)));
        let factor = B::float_recip(size);
        let n = B::float_mul(far, factor.clone());
        if let Some(node) = to_weight {
            gradients.register::<B>(node.id, of_channel(B::float_mul(dout.clone(), n.clone())));
        }
        if let Some(node) = to_x {
            let of_pixel = Shape::new([1, 1, groups, channels / groups]);
            let g = B::float_mul(dout, B::float_reshape(wide(weight), of_pixel));
            let along = mean(B::float_mul(g.clone(), n.clone()));
            let dx = B::float_sub(B::float_sub(g.clone(), B::float_mul(n, along)), mean(g));
            gradients.register::<B>(node.id, narrow(B::float_mul(dx, factor), image));
        }
    }
}

impl<B: GroupNormOps, C: CheckpointStrategy> GroupNormOps for Autodiff<B, C> {
    fn normalise_groups(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        second: Optional<Self>,
        modulation: Optional<Self>,
        problem: GroupNormProblem,
        call: Call,
    ) -> FloatTensor<Self> {
        let [second, modulation] = [second, modulation].map(Optional::into_option);
        let rest = [&second, &modulation].into_iter().flatten();
        if ![&x, &weight, &bias].into_iter().chain(rest).any(|tensor| tensor.is_tracked()) {
            let [x, weight, bias] = [x, weight, bias].map(Self::inner);
            let [second, modulation] =
                [second, modulation].map(|part| Optional::from_tensor(part.map(Self::inner)));
            let out = B::normalise_groups(x, weight, bias, second, modulation, problem, call);
            return Self::from_inner(out);
        }
        if let Some(second) = second {
            let absent = Optional::Absent;
            let problem = GroupNormProblem { channels: [problem.width(), 0], ..problem };
            let x = Self::float_cat(vec![x, second], 3);
            let modulation = Optional::from_tensor(modulation);
            return Self::normalise_groups(x, weight, bias, absent, modulation, problem, call);
        }
        if problem.modulation_pitch > 0 || problem.activation.is_some() {
            let bare = GroupNormProblem { modulation_pitch: 0, activation: None, ..problem };
            let absent = || Optional::Absent;
            let mut out = Self::normalise_groups(x, weight, bias, absent(), absent(), bare, call);
            if let Some(modulation) = modulation {
                let (batch, width) = (problem.batch as usize, problem.width() as usize);
                let part = |from: usize| {
                    let slices = [(0..batch).into(), (from..from + width).into()];
                    let part = Self::float_slice(modulation.clone(), &slices);
                    Self::float_reshape(part, Shape::new([batch, 1, 1, width]))
                };
                let scale = Self::float_add_scalar(part(0), Scalar::from(1.0));
                out = Self::float_add(Self::float_mul(out, scale), part(width));
            }
            return finish::<Self>(out, problem.activation, None, None);
        }
        let nodes = [x.node(), weight.node(), bias.node()];
        let [x, weight, bias] = [x, weight, bias].map(|t| t.into_primitive());
        let saved = Saved { x: x.clone(), weight: weight.clone(), problem };
        let absent = || Optional::Absent;
        let out = B::normalise_groups(x, weight, bias, absent(), absent(), problem, call);
        match Normalise.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(saved, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}
