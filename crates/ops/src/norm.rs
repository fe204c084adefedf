//! Norms of rows on Burn tensors.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::norm::{Norm, NormKind, NormOperands, NormProblem};

use crate::attention::like;
use crate::call::{
    Call, Optional, Parts, float_of, launch, on_cubecl, same_dtype, same_shape, size_of,
};
use crate::{Ctx, OpError};

/// What rows are multiplied by, and what is added.
///
/// # Shapes
/// Both `[width]`, in the dtype of the rows.
#[derive(Debug, Clone)]
pub struct NormWeights {
    pub weight: Tensor<1>,
    pub bias: Option<Tensor<1>>,
}

/// `residual + norm(x)·w + bias` of each row, f32 throughout and rounded once: see [`NormKind`] for what
/// becomes of w. `eps` is added to the mean of the squares.
///
/// # Shapes
/// x, residual and the result `[rows, width]`, any strides.
///
/// # Errors
/// Shapes or dtypes that do not fit, an eps that is negative or not finite, a device without our kernels, a
/// gradient asked for.
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
    let call = Call::of(ctx);
    let out = <Dispatch as NormOps>::normalise(
        x.into_dispatch(),
        weight.into_dispatch(),
        Optional::of(bias.map(Tensor::into_dispatch)),
        Optional::of(residual.map(Tensor::into_dispatch)),
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(e) => Err(e),
    }
}

/// Rows that a product does not normalise itself, normalised, and what else it is given.
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
    /// `problem` is of these tensors.
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
            launch::<Norm>(&device, &problem, &config, &operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
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
        let all = [Some(&x), Some(&weight), bias.as_ref(), residual.as_ref()];
        let gradient = all.into_iter().flatten().any(|tensor| tensor.is_tracked());
        let x = Self::inner(x);
        if gradient {
            call.fail(OpError::NoGradient);
            return Self::from_inner(x);
        }
        let [bias, residual] = [bias, residual].map(|t| Optional::of(t.map(Self::inner)));
        Self::from_inner(B::normalise(x, Self::inner(weight), bias, residual, problem, call))
    }
}
