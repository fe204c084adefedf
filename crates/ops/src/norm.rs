//! Norms of rows of Burn tensors, and their gradients.
//!
//! ```text
//! n = (x - mean)·factor     out = residual + n·w + bias          mean = 0 except for a layer norm
//! g = dout·w                dx = factor·(g - n·mean(g·n) - mean(g))    the last mean only for a layer norm
//!                           dw = Σ dout·n     dbias = Σ dout     dresidual = dout
//! ```
//!
//! The gradients are ordinary ops in f32. They read x about ten times; a kernel would read it once.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension};
use burn::tensor::{FloatDType, Scalar, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::norm::{Norm, NormKind, NormOperands, NormProblem};

use crate::call::{
    Call, Optional, Parts, float_dtype, float_of, like, on_cubecl, same_dtype, same_shape, size_of,
    summed_over_rows,
};
use crate::memory::bytes_of;
use crate::{Ctx, OpError, OpMemory};

/// Weight and bias of a norm.
///
/// # Shapes
/// Both `[width]`, in the dtype of the rows.
#[derive(Debug, Clone)]
pub struct NormWeights {
    /// Norm weight w: one factor per column.
    pub weight: Tensor<1>,
    /// Bias, added after the weight is applied.
    pub bias: Option<Tensor<1>>,
}

/// Computes `residual + norm(x)·w + bias` for each row, in f32 with one rounding. [`NormKind`] defines the
/// use of w; `eps` is added to the mean of squares.
///
/// # Shapes
/// x, residual and the result `[rows, width]`, any strides. Gradients flow to every tensor.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`] or [`OpError::Norm`] for invalid operands or an eps that is
/// negative or not finite; [`OpError::Device`] for a device without kernels; [`OpError::Tune`].
pub fn norm(
    ctx: &Ctx,
    x: Tensor<2>,
    weights: NormWeights,
    residual: Option<Tensor<2>>,
    kind: NormKind,
    eps: f32,
) -> Result<Tensor<2>, OpError> {
    on_cubecl(&x.device())?;
    let NormWeights { weight, bias } = weights;
    let ([rows, width], dtype) = (x.dims(), x.dtype());
    for (what, part) in [("weight", Some(&weight)), ("bias", bias.as_ref())] {
        let Some(part) = part else { continue };
        same_shape(what, &part.dims(), &[width])?;
        same_dtype(what, part.dtype(), dtype)?;
    }
    if let Some(residual) = &residual {
        same_shape("residual", &residual.dims(), &[rows, width])?;
        same_dtype("residual", residual.dtype(), dtype)?;
    }
    let float = float_of(dtype)?;
    if rows == 0 || width == 0 {
        return Ok(x);
    }
    let problem = NormProblem {
        bias: bias.is_some(),
        residual: residual.is_some(),
        ..NormProblem::new(size_of(rows)?, size_of(width)?, float, kind, eps)?
    };
    let call = Call::new(ctx);
    let out = <Dispatch as NormOps>::normalise(
        x.into_dispatch(),
        weight.into_dispatch(),
        Optional::from_tensor(bias.map(Tensor::into_dispatch)),
        Optional::from_tensor(residual.map(Tensor::into_dispatch)),
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(e) => Err(e),
    }
}

/// Returns the bytes of a [`norm()`] of x `[rows, width]`.
pub fn norm_memory(rows: u128, width: u128, dtype: FloatDType) -> OpMemory {
    let x = bytes_of(rows * width, dtype);
    OpMemory { result: x, saved: x, ..OpMemory::default() }
}

/// Normalises rows for a matmul that cannot fuse the norm, and returns them with the other operands.
pub(crate) fn normalised<B: NormOps>(
    x: FloatTensor<B>,
    parts: Parts<B>,
    norm: Option<NormProblem>,
    call: &Call,
) -> (FloatTensor<B>, Parts<B>) {
    let weight = parts.norm.into_option();
    let parts = Parts { norm: Optional::Absent, ..parts };
    match norm.zip(weight) {
        None => (x, parts),
        Some((norm, weight)) => {
            let absent = || Optional::Absent;
            (B::normalise(x, weight, absent(), absent(), norm, call.clone()), parts)
        }
    }
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait NormOps: Backend {
    /// Normalises with a `problem` of these tensors.
    fn normalise(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Optional<Self>,
        #[extension_type] residual: Optional<Self>,
        problem: NormProblem,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl NormOps for CubeBackend {
    fn normalise(
        x: CubeTensor,
        weight: CubeTensor,
        bias: Optional<Self>,
        residual: Optional<Self>,
        problem: NormProblem,
        call: Call,
    ) -> CubeTensor {
        let x = into_contiguous(x);
        let out = like(&x);
        let part = |part: Optional<Self>| part.into_option().map(|t| into_contiguous(t).handle);
        let operands = NormOperands {
            x: x.handle,
            weight: into_contiguous(weight).handle,
            bias: part(bias),
            residual: part(residual),
            out: out.handle.clone(),
        };
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let config = call.ctx.config::<Norm>(&device, &problem)?;
            call.ctx.launch::<Norm>(&device, &problem, &config, &operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }
}

/// Parents of a norm's node: x, weight, bias and residual; x stands in for each absent one.
#[derive(Debug)]
struct Normalise;

/// State that the gradients need.
#[derive(Debug, Clone)]
struct Saved<B: Backend> {
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    problem: NormProblem,
}

impl<B: NormOps> Backward<B, 4> for Normalise {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Saved<B>, 4>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_weight, to_bias, to_residual] = ops.parents;
        let Saved { x, weight, problem } = ops.state;
        let dtype = float_dtype(problem.dtype);
        let narrow = |t| B::float_cast(t, dtype);
        let given = gradients.consume::<B>(&ops.node);
        let dout = B::float_cast(given.clone(), FloatDType::F32);
        if let (Some(node), true) = (to_residual, problem.residual) {
            gradients.register::<B>(node.id, given);
        }
        if let (Some(node), true) = (to_bias, problem.bias) {
            gradients.register::<B>(node.id, narrow(summed_over_rows::<B>(dout.clone())));
        }
        let (n, factor) = normal::<B>(x, &problem);
        if let Some(node) = to_weight {
            let each = B::float_mul(dout.clone(), n.clone());
            gradients.register::<B>(node.id, narrow(summed_over_rows::<B>(each)));
        }
        if let Some(node) = to_x {
            let g = B::float_mul(dout, multiplier::<B>(weight, &problem));
            let along = B::float_mean_dim(B::float_mul(g.clone(), n.clone()), 1);
            let mut dx = B::float_sub(g.clone(), B::float_mul(n, along));
            if problem.kind == NormKind::Layer {
                dx = B::float_sub(dx, B::float_mean_dim(g, 1));
            }
            gradients.register::<B>(node.id, narrow(B::float_mul(dx, factor)));
        }
    }
}

/// Returns `(x - mean)·factor` and the factor of each row `[rows, 1]`, in f32.
fn normal<B: Backend>(
    x: FloatTensor<B>,
    problem: &NormProblem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let mut x = B::float_cast(x, FloatDType::F32);
    if problem.kind == NormKind::Layer {
        x = B::float_sub(x.clone(), B::float_mean_dim(x, 1));
    }
    let squares = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let factor = B::float_recip(B::float_sqrt(B::float_add_scalar(squares, problem.eps.into())));
    (B::float_mul(x, factor.clone()), factor)
}

/// Returns the factor of normalised rows, `[1, width]` in f32.
fn multiplier<B: Backend>(weight: FloatTensor<B>, problem: &NormProblem) -> FloatTensor<B> {
    let width = problem.width as usize;
    let weight = B::float_cast(B::float_reshape(weight, [1, width].into()), FloatDType::F32);
    match problem.kind {
        NormKind::RmsPlusOne => B::float_add_scalar(weight, Scalar::from(1.0)),
        NormKind::Rms | NormKind::Layer => weight,
    }
}

impl<B: NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn normalise(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Optional<Self>,
        residual: Optional<Self>,
        problem: NormProblem,
        call: Call,
    ) -> FloatTensor<Self> {
        let [bias, residual] = [bias, residual].map(Optional::into_option);
        let node = |part: &Option<FloatTensor<Self>>| part.as_ref().unwrap_or(&x).node();
        let parents = [x.node(), weight.node(), node(&bias), node(&residual)];
        let (x, weight) = (x.into_primitive(), weight.into_primitive());
        let inner = |part: Option<FloatTensor<Self>>| {
            Optional::from_tensor(part.map(|part| part.into_primitive()))
        };
        let saved = Saved { x: x.clone(), weight: weight.clone(), problem };
        let out = B::normalise(x, weight, inner(bias), inner(residual), problem, call);
        match Normalise.prepare::<C>(parents).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(saved, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}
