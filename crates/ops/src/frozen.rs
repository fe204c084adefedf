//! What products with frozen weights have in common: arguments that fit, as matrices, and gradients.

use std::fmt;
use std::marker::PhantomData;

use arch::DType;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch};
use burn::tensor::{FloatDType, Tensor};
use kernels::matmul::Activation;
use kernels::norm::NormProblem;

use crate::call::{Call, Optional, Parts, float_of, on_cubecl, summed_over_rows};
use crate::matmul::{MatmulOps, linear_memory, product_of};
use crate::memory::bytes_of;
use crate::{Ctx, Epilogue, MemoryProfile, OpError, OpMemory};

/// Arguments as matrices: x `[m, k]`, bias `[n]`, gate and residual of the result.
pub(crate) struct Flat {
    pub(crate) x: FloatTensor<Dispatch>,
    pub(crate) parts: Parts<Dispatch>,
    pub(crate) activation: Option<Activation>,
    pub(crate) norm: Option<NormProblem>,
    pub(crate) dtype: DType,
}

/// `multiply` by a weight `[n, k]` whose result has so many columns, for arguments that fit.
///
/// # Errors
/// Shapes or dtypes that do not, another result dtype than x's or `tf32`, which these kernels have not, a device without
/// our kernels; those of `multiply`.
pub(crate) fn product<const D: usize>(
    x: Tensor<D>,
    [n, k]: [usize; 2],
    columns: usize,
    epilogue: Epilogue<D>,
    multiply: impl FnOnce(Flat) -> Result<FloatTensor<Dispatch>, OpError>,
) -> Result<Tensor<D>, OpError> {
    on_cubecl(&x.device())?;
    let need = x.dtype();
    let dtype = float_of(need)?;
    let have = x.dims();
    if have[D - 1] != k {
        return Err(OpError::Depth {
            lhs: have.to_vec(),
            lhs_k: have[D - 1],
            rhs: vec![n, k],
            rhs_k: k,
        });
    }
    let mut shape = have;
    shape[D - 1] = columns;
    epilogue.check_dtypes(need, need)?;
    epilogue.check_shapes(n, shape)?;
    let problem = epilogue.norm_of(&x)?;
    let Epilogue { bias, activation, gate, residual, out, tf32, half_sums, norm } = epilogue;
    if let Some(out) = out.filter(|out| burn::tensor::DType::from(*out) != need) {
        return Err(OpError::DType { what: "the result", have: out.into(), need });
    }
    if half_sums {
        return Err(OpError::HalfSums(x.dtype()));
    }
    if tf32 {
        return Err(OpError::NoTf32);
    }
    if shape.contains(&0) {
        return Ok(Tensor::<D>::zeros(shape, &x.device()).cast(need));
    }
    let rows: usize = have[..D - 1].iter().product();
    let flat =
        |t: Option<Tensor<D>>| Optional::of(t.map(|t| t.reshape([rows, columns]).into_dispatch()));
    let flat = Flat {
        x: x.reshape([rows, k]).into_dispatch(),
        parts: Parts {
            bias: Optional::of(bias.map(Tensor::into_dispatch)),
            gate: flat(gate),
            residual: flat(residual),
            norm: Optional::of(norm.map(|norm| norm.weight.into_dispatch())),
        },
        activation,
        norm: problem,
        dtype,
    };
    let made = multiply(flat)?;
    Ok(Tensor::<2>::from_dispatch(made).reshape(shape))
}

/// Bytes of a linear layer with a quantised weight `[n, k]`: more rows than its codes serve make a dense copy, as any
/// backward pass does. Gradients read no operand.
pub fn quantized_linear_memory(
    profile: MemoryProfile,
    rows: u128,
    [n, k]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let dense_weight = if rows > profile.coded_rows.into() { bytes_of(n * k, dtype) } else { 0 };
    OpMemory { dense_weight, saved: 0, ..linear_memory(profile, rows, [n, k], dtype) }
}

/// Bytes of a gated feed-forward's first half, [`nf4_glu`](crate::nf4_glu), with a weight `[2n, k]`: next to a dense copy
/// the matmul that gates has a result of its own.
pub fn nf4_glu_memory(
    profile: MemoryProfile,
    rows: u128,
    [both, k]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let joint = quantized_linear_memory(profile, rows, [both, k], dtype);
    let result = joint.result / 2;
    let temporary = if joint.dense_weight > 0 { result } else { 0 };
    OpMemory { result, temporary, ..joint }
}

/// A weight on a backend, of which a backward pass makes the dense one.
pub(crate) trait Frozen<B: Backend>: Clone + Send + 'static {
    /// Of x, and of the dense weight.
    fn dtype(&self) -> DType;

    /// The dense weight `[n, k]`.
    fn dense(self, call: Call) -> FloatTensor<B>;
}

/// A product with `weight`, by `multiply`, which has gradients by x `[m, k]` and by bias `[n]`. Nothing of the weight's
/// dense shape is kept for them.
pub(crate) fn tracked<B: MatmulOps, C: CheckpointStrategy, W: Frozen<B>>(
    x: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    weight: W,
    ctx: &Ctx,
    multiply: impl FnOnce(FloatTensor<B>, Parts<B>) -> FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let saved = Saved { weight, biased: bias.is_some(), ctx: ctx.clone() };
    let nodes = [x.node(), bias.as_ref().unwrap_or(&x).node()];
    let parts = Parts::bias(bias.map(|b| b.into_primitive()));
    match Product(PhantomData).prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(saved, multiply(x.into_primitive(), parts)),
        OpsKind::UnTracked(prep) => prep.finish(multiply(x.into_primitive(), parts)),
    }
}

/// Parents of a product's node: x, and bias or once more x where there is none.
struct Product<W>(PhantomData<W>);

/// What the gradients need.
#[derive(Clone)]
struct Saved<W> {
    weight: W,
    biased: bool,
    ctx: Ctx,
}

impl<W> fmt::Debug for Product<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Product")
    }
}

impl<W> fmt::Debug for Saved<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saved").field("biased", &self.biased).finish_non_exhaustive()
    }
}

impl<B: MatmulOps, W: Frozen<B>> Backward<B, 2> for Product<W> {
    type State = Saved<W>;

    fn backward(
        self,
        ops: Ops<Saved<W>, 2>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [to_x, to_bias] = ops.parents;
        let Saved { weight, biased, ctx } = ops.state;
        let dout = gradients.consume::<B>(&ops.node);
        if let Some(node) = to_x {
            let (call, dtype) = (Call::of(&ctx), weight.dtype());
            let dense = weight.dense(call.clone());
            // Burn's backward pass has no way to return an error.
            if let Some(e) = call.failed() {
                panic!("the gradient of a product failed: {e}");
            }
            let gradient = product_of::<B>(dout.clone(), dense, dtype, &ctx);
            gradients.register::<B>(node.id, gradient);
        }
        if let (Some(node), true) = (to_bias, biased) {
            gradients.register::<B>(node.id, summed_over_rows::<B>(dout));
        }
    }
}
