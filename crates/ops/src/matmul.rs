//! `residual + gate · activation(lhs·rhs + bias)` and its gradients.
//!
//! ```text
//! dlhs = dout · rhsᵀ     drhs = lhsᵀ · dout     dbias = Σ dout over all axes except the last
//! ```
//!
//! With [`grouped_matmul`], each group of lhs rows has its own matrix and bias, in one launch. Then drhs and
//! dbias are one matmul and one sum per group, over its rows only.
//!
//! The gradients use the same kernels: a transpose is another layout, never a copy. Without gradients the
//! epilogue is fused. With gradients only the bias is fused. The rest is ordinary differentiable ops, because
//! their gradients need the intermediates.

use std::ops::Range;

use arch::DType;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, TensorMetadata, backend_extension,
};
use burn::tensor::{FloatDType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::matmul::{
    Activation, Batches, Layout, Matmul, MatmulOperands, MatmulProblem, Operand, Precision,
};
use kernels::norm::{NormKind, NormProblem};

use crate::arena::result;
use crate::call::{
    Call, Optional, Parts, cube_of, dtype_of, float_dtype, float_of, on_cubecl, same_dtype,
    same_shape, size_of, summed_over_rows,
};
use crate::epilogue::Epilogue;
use crate::layout::{Matrices, broadcast, fold};
use crate::memory::bytes_of;
use crate::norm::{NormOps, normalised};
use crate::offsets::{Groups, u32_buffer};
use crate::{Ctx, MemoryProfile, OpError, OpMemory};

pub(crate) use crate::activate::finish;

/// Computes `residual + gate · activation(lhs·rhs + bias)`; batch axes broadcast.
///
/// # Shapes
/// lhs `[.., m, k]`, rhs `[.., k, n]`, result `[.., m, n]`; any strides. A transposed view is not copied.
/// Gradients flow to every tensor.
///
/// # Errors
/// [`OpError::Depth`], [`OpError::Broadcast`], [`OpError::Shape`], [`OpError::DType`] and the like for
/// invalid operands; [`OpError::Device`] for a device without kernels; [`OpError::Tune`] if the policy allows
/// no config for the shape.
pub fn matmul<const D: usize>(
    ctx: &Ctx,
    lhs: Tensor<D>,
    rhs: Tensor<D>,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    on_cubecl(&lhs.device())?;
    let (spec, shape) = validate(&lhs, &rhs, &epilogue)?;
    multiplied(ctx, lhs, rhs, epilogue, spec, shape)
}

/// Computes `residual + gate · activation(lhs·rhs[g] + bias[g])` for the rows of each group g, in one launch.
/// Groups may be the adapters of a batch's sequences, or the experts of a mixture.
///
/// # Shapes
/// lhs `[m, k]`, rhs `[groups, k, n]`, any strides; bias `[groups · n]`, concatenated by group; result, gate
/// and residual `[m, n]`. Gradients flow to every tensor.
///
/// # Errors
/// The errors of [`matmul`]; [`OpError::Offsets`] for groups with another number of rows.
pub fn grouped_matmul(
    ctx: &Ctx,
    lhs: Tensor<2>,
    rhs: Tensor<3>,
    groups: &Groups,
    epilogue: Epilogue<2>,
) -> Result<Tensor<2>, OpError> {
    let device = lhs.device();
    on_cubecl(&device)?;
    let ([m, k], [count, depth, n]) = (lhs.dims(), rhs.dims());
    let last = groups.offsets().last().map_or(0, |last| *last as usize);
    if last != m {
        let why = format!("got {last} as the last offset, expected {m}");
        return Err(OpError::Offsets { what: "rows", why });
    }
    same_shape("rhs", &[count, depth, n], &[groups.count(), k, n])?;
    for axis in [m, k, n] {
        size_of(axis)?;
    }
    let mut spec = spec_of(lhs.dtype(), rhs.dtype(), &epilogue)?;
    epilogue.check_shapes(count * n, [m, n])?;
    spec.groups = Some(groups.clone());
    if k == 0 && m != 0 {
        // An empty sum equals one product with 0.
        let zeros = |rows: usize| Tensor::<2>::zeros([rows, 1], &device).cast(lhs.dtype());
        let (none, rhs) = (zeros(m), zeros(count * n).reshape([count, 1, n]));
        epilogue.norm_of(&lhs)?;
        return multiplied(ctx, none, rhs, Epilogue { norm: None, ..epilogue }, spec, [m, n]);
    }
    multiplied(ctx, lhs, rhs, epilogue, spec, [m, n])
}

/// Runs a validated matmul with a result of `shape`.
fn multiplied<const D: usize, const R: usize>(
    ctx: &Ctx,
    lhs: Tensor<D>,
    rhs: Tensor<R>,
    epilogue: Epilogue<D>,
    mut spec: Spec,
    shape: [usize; D],
) -> Result<Tensor<D>, OpError> {
    spec.norm = epilogue.norm_of(&lhs)?;
    if shape.contains(&0) {
        return Ok(Tensor::<D>::zeros(shape, &lhs.device()).cast(spec.out));
    }
    let Epilogue { bias, gate, residual, norm, .. } = epilogue;
    let call = Call::new(ctx);
    let out = <Dispatch as MatmulOps>::product(
        lhs.into_dispatch(),
        rhs.into_dispatch(),
        Parts {
            bias: Optional::from_tensor(bias.map(Tensor::into_dispatch)),
            gate: Optional::from_tensor(gate.map(Tensor::into_dispatch)),
            residual: Optional::from_tensor(residual.map(Tensor::into_dispatch)),
            norm: Optional::from_tensor(norm.map(|norm| norm.weight.into_dispatch())),
        },
        spec,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(e) => Err(e),
    }
}

/// Computes a linear layer: [`matmul`] with one weight for all rows of `x`.
///
/// # Shapes
/// x `[.., k]`, weight `[k, n]` (Burn's layout; a transposed `[n, k]` is as fast), result `[.., n]`.
///
/// # Errors
/// The errors of [`matmul`].
pub fn linear<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: Tensor<2>,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    let mut shape = x.dims();
    let (k, n) = (shape[D - 1], weight.dims()[1]);
    let rows: usize = shape[..D - 1].iter().product();
    shape[D - 1] = n;
    epilogue.check_shapes(n, shape)?;
    let Epilogue { bias, activation, gate, residual, out, tf32, f16_accumulation, norm } = epilogue;
    let flat = |t: Tensor<D>| t.reshape([rows, n]);
    let (gate, residual) = (gate.map(flat), residual.map(flat));
    let epilogue = Epilogue { bias, activation, gate, residual, out, tf32, f16_accumulation, norm };
    Ok(matmul(ctx, x.reshape([rows, k]), weight, epilogue)?.reshape(shape))
}

/// Returns the bytes of a [`linear`] of x `[rows, k]` with a weight of `shape` `[n, k]`. Matmuls with fewer
/// tiles than multiprocessors use split-k. Counted are the largest tiles, 128 by 256, and splits of at least
/// 128.
pub fn linear_memory(
    profile: MemoryProfile,
    rows: u128,
    [n, k]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let tiles = (rows.div_ceil(128) * n.div_ceil(256)).max(1);
    let splits = (u128::from(profile.processors) / tiles).min(k / 128);
    OpMemory {
        result: bytes_of(rows * n, dtype),
        partial_sums: if splits > 1 { 4 * rows * n } else { 0 },
        splits,
        saved: bytes_of(rows * k, dtype),
        ..OpMemory::default()
    }
}

/// Returns true if [`linear`] fuses the norm of rows `x`. Assumes a dense weight `[k, n]` in the dtype of x,
/// stored as `[n, k]`. A matmul with tf32 never fuses it. If this returns false, several matmuls of the same
/// rows can share one [`norm`](crate::norm()).
///
/// # Errors
/// [`OpError::NotFloat`]; [`OpError::Device`] for a device without kernels.
pub fn takes_norm(
    ctx: &Ctx,
    x: &Tensor<2>,
    weight: &Tensor<2>,
    kind: NormKind,
) -> Result<bool, OpError> {
    let device = ctx.device(&cube_of(&x.device())?)?;
    let ([m, k], [_, n]) = (x.dims(), weight.dims());
    if [m, k, n].contains(&0) {
        return Ok(false);
    }
    let sizes = [size_of(m)?, size_of(n)?, size_of(k)?];
    let precision = precision_of(float_of(x.dtype())?);
    let plain = MatmulProblem::dense(1, sizes, [Layout::Row, Layout::Col], precision)?;
    Ok(Matmul::takes_norm(device.profile(), &MatmulProblem { norm: Some(kind), ..plain }))
}

/// Attributes of a call apart from its tensors.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    precision: Precision,
    activation: Option<Activation>,
    out: FloatDType,
    norm: Option<NormProblem>,
    groups: Option<Groups>,
}

fn validate<const D: usize>(
    lhs: &Tensor<D>,
    rhs: &Tensor<D>,
    epilogue: &Epilogue<D>,
) -> Result<(Spec, [usize; D]), OpError> {
    let (l, r) = (lhs.dims(), rhs.dims());
    let (m, k, n) = (l[D - 2], l[D - 1], r[D - 1]);
    if k != r[D - 2] {
        let (lhs_k, rhs_k) = (k, r[D - 2]);
        return Err(OpError::Depth { lhs: l.to_vec(), lhs_k, rhs: r.to_vec(), rhs_k });
    }
    let batch = broadcast(&l[..D - 2], &r[..D - 2])
        .ok_or_else(|| OpError::Broadcast { lhs: l.to_vec(), rhs: r.to_vec() })?;
    let mut shape = [0; D];
    shape[..D - 2].copy_from_slice(&batch);
    (shape[D - 2], shape[D - 1]) = (m, n);
    let batches = batch.iter().fold(1usize, |product, axis| product.saturating_mul(*axis));
    let mut counted = shape.iter().chain([&k, &batches]);
    if let Some(long) = counted.find(|s| u32::try_from(**s).is_err()) {
        return Err(OpError::TooLarge(*long));
    }
    let spec = spec_of(lhs.dtype(), rhs.dtype(), epilogue)?;
    epilogue.check_shapes(n, shape)?;
    Ok((spec, shape))
}

/// Returns the attributes for operands of these dtypes, without norm and groups.
fn spec_of<const D: usize>(
    need: burn::tensor::DType,
    rhs: burn::tensor::DType,
    epilogue: &Epilogue<D>,
) -> Result<Spec, OpError> {
    let Epilogue { activation, out, tf32, f16_accumulation, .. } = epilogue;
    let precision = match need {
        burn::tensor::DType::F32 if *tf32 => Precision::Tf32,
        burn::tensor::DType::F32 => Precision::F32,
        burn::tensor::DType::F16 if *f16_accumulation => Precision::F16Acc16,
        burn::tensor::DType::F16 => Precision::F16,
        burn::tensor::DType::BF16 => Precision::Bf16,
        other => return Err(OpError::NotFloat(other)),
    };
    if *tf32 && precision != Precision::Tf32 {
        return Err(OpError::Tf32(need));
    }
    if *f16_accumulation && precision != Precision::F16Acc16 {
        return Err(OpError::F16Accumulation(need));
    }
    let out = out.unwrap_or_else(|| FloatDType::from(need));
    if !matches!(out, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16) {
        return Err(OpError::NotFloat(out.into()));
    }
    same_dtype("rhs", rhs, need)?;
    epilogue.check_dtypes(need, out.into())?;
    Ok(Spec { precision, activation: *activation, out, norm: None, groups: None })
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait MatmulOps: NormOps {
    /// Runs a validated matmul; only k may be 0.
    fn product(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        #[extension_type] parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl MatmulOps for CubeBackend {
    fn product(
        lhs: CubeTensor,
        rhs: CubeTensor,
        parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> CubeTensor {
        let operands = [lhs.clone(), rhs.clone()];
        let (l, r) = (lhs.meta.shape().clone(), rhs.meta.shape().clone());
        let rank = l.num_dims();
        let batch = match spec.groups {
            None => broadcast(&l[..rank - 2], &r[..rank - 2]).expect("validated"),
            Some(_) => Vec::new(),
        };
        let (m, k, n) = (l[rank - 2], l[rank - 1], r[r.num_dims() - 1]);
        let shape = Shape::from(batch.iter().copied().chain([m, n]).collect::<Vec<_>>());
        if k == 0 {
            let Parts { bias, gate, residual, .. } = parts;
            let [bias, gate, residual] = [bias, gate, residual].map(Optional::into_option);
            let zeros = Self::float_zeros(shape, &lhs.device, spec.out);
            let sum = match bias {
                Some(bias) => {
                    let bias = Self::float_cast(bias, spec.out);
                    Self::float_add(zeros, leading_ones::<Self>(bias, rank))
                }
                None => zeros,
            };
            return finish::<Self>(sum, spec.activation, gate, residual);
        }
        let Laid { lhs, rhs, left, right, batches } = match &spec.groups {
            None => Laid::batched(lhs, rhs, &batch),
            Some(groups) => Laid::grouped(lhs, rhs, groups),
        };
        let problem = MatmulProblem {
            m: m as u32,
            n: n as u32,
            k: k as u32,
            lhs: left,
            rhs: right,
            batches,
            precision: spec.precision,
            out: dtype_of(spec.out),
            epilogue: kernels::matmul::Epilogue {
                bias: parts.bias.is_present(),
                activation: spec.activation,
                gate: parts.gate.is_present(),
                residual: parts.residual.is_present(),
                ..kernels::matmul::Epilogue::default()
            },
            grouped: spec.groups.is_some(),
            norm: spec.norm.map(|norm| norm.kind),
            window: None,
            interleaved: false,
            period: 0,
            bias_pitch: 0,
        };
        let device = call.ctx.device(&lhs.device);
        let takes = |d: &arch::Device| Matmul::takes_norm(d.profile(), &problem);
        if spec.norm.is_some() && (problem.grouped || !device.as_ref().is_ok_and(takes)) {
            let [lhs, rhs] = operands;
            let (lhs, parts) = normalised(lhs, parts, spec.norm, &call);
            return Self::product(lhs, rhs, parts, Spec { norm: None, ..spec }, call);
        }
        let out = result(lhs.client.clone(), lhs.device.clone(), shape, spec.out.into());
        let operands = MatmulOperands {
            lhs: lhs.handle.clone(),
            rhs: rhs.handle,
            out: out.handle.clone(),
            norm: parts.norm_buffers(spec.norm),
            epilogue: parts.buffers(),
            second: None,
            rows: spec.groups.as_ref().map(|groups| u32_buffer(&lhs.client, groups.offsets())),
        };
        let launched = device.and_then(|device| {
            let config = call.ctx.config::<Matmul>(&device, &problem)?;
            let scratch = call.ctx.scratch_of::<Matmul>(&device, &problem, &config);
            call.ctx.launch::<Matmul>(&device, &problem, &config, &operands, scratch.as_ref());
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }
}

/// Operands in layouts that the kernel reads.
struct Laid {
    lhs: CubeTensor,
    rhs: CubeTensor,
    left: Operand,
    right: Operand,
    batches: Batches,
}

impl Laid {
    fn batched(lhs: CubeTensor, rhs: CubeTensor, batch: &[usize]) -> Self {
        let (lhs, left) = Matrices::of_any(lhs, batch);
        let (rhs, right) = Matrices::of_any(rhs, batch);
        if let Some(batches) = fold(batch, &left.steps, &right.steps) {
            return Self { lhs, rhs, left: left.operand, right: right.operand, batches };
        }
        // More than two axes have uneven strides: copy both operands to dense batches.
        let spread = |t: CubeTensor| {
            let own = t.meta.shape().clone();
            let matrix = &own[own.num_dims() - 2..];
            let shape = batch.iter().chain(matrix).copied().collect::<Vec<_>>();
            let dense = into_contiguous(CubeBackend::float_expand(t, Shape::from(shape)));
            Matrices::of_any(dense, batch)
        };
        let ((lhs, left), (rhs, right)) = (spread(lhs), spread(rhs));
        let batches = fold(batch, &left.steps, &right.steps);
        let batches = batches.expect("dense batches fold into one axis");
        Self { lhs, rhs, left: left.operand, right: right.operand, batches }
    }

    /// Groups are ranges of rows of lhs, which must be row-contiguous.
    fn grouped(lhs: CubeTensor, rhs: CubeTensor, groups: &Groups) -> Self {
        let (lhs, left) = match Matrices::of_any(lhs, &[]) {
            (lhs, Matrices { operand, .. }) if operand.layout == Layout::Row => (lhs, operand),
            (lhs, _) => {
                let (lhs, left) = Matrices::of_any(into_contiguous(lhs), &[]);
                (lhs, left.operand)
            }
        };
        let (rhs, right) = Matrices::of_any(rhs, &[groups.count()]);
        let inner = groups.count() as u32;
        let batches = Batches { outer: 1, inner, lhs: (0, 0), rhs: (0, right.steps[0]) };
        Self { lhs, rhs, left, right: right.operand, batches }
    }
}

/// Parents of a matmul's node: lhs, rhs and bias; lhs stands in for an absent bias.
#[derive(Debug)]
struct MatmulBackward;

/// State that the gradients need.
#[derive(Clone)]
struct Saved {
    lhs: Option<NodeId>,
    rhs: Option<NodeId>,
    shapes: [Shape; 2],
    biased: bool,
    spec: Spec,
    ctx: Ctx,
}

impl std::fmt::Debug for Saved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saved").field("shapes", &self.shapes).finish_non_exhaustive()
    }
}

impl<B: MatmulOps> Backward<B, 3> for MatmulBackward {
    type State = Saved;

    fn backward(
        self,
        ops: Ops<Saved, 3>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [to_lhs, to_rhs, to_bias] = ops.parents;
        let saved = ops.state;
        // Gradients arrive in the result's dtype and are computed in the operands' dtype.
        let own = saved.spec.precision.storage();
        let dout = B::float_cast(gradients.consume::<B>(&ops.node), float_dtype(own));
        let precision = match saved.spec.precision {
            Precision::F16Acc16 => Precision::F16,
            other => other,
        };
        let groups = saved.spec.groups.clone();
        let spec = Spec { activation: None, out: float_dtype(own), precision, ..saved.spec };
        let product = |a, b, spec: &Spec| bare_matmul::<B>(a, b, spec.clone(), &saved.ctx);
        let [lhs_shape, rhs_shape] = saved.shapes;
        if let (Some(node), Some(rhs)) = (to_lhs, saved.rhs) {
            let rhs = B::float_transpose(checkpointer.retrieve_node_output(rhs));
            let gradient =
                summed_to::<B>(&lhs_shape, &dout, &spec, |spec| product(dout.clone(), rhs, spec));
            gradients.register::<B>(node.id, gradient);
        }
        let alone = Spec { groups: None, ..spec.clone() };
        if let (Some(node), Some(lhs)) = (to_rhs, saved.lhs) {
            let lhs = checkpointer.retrieve_node_output(lhs);
            let gradient = match &groups {
                None => summed_to::<B>(&rhs_shape, &dout, &spec, |spec| {
                    product(B::float_transpose(lhs), dout.clone(), spec)
                }),
                Some(groups) => {
                    let of_group = |rows: Range<usize>| {
                        let of = |t: &FloatTensor<B>| some_rows::<B>(t, rows.clone());
                        product(B::float_transpose(of(&lhs)), of(&dout), &alone)
                    };
                    each_group::<B>(groups, &rhs_shape, float_dtype(own), &dout, of_group)
                }
            };
            gradients.register::<B>(node.id, gradient);
        }
        if let (Some(node), true) = (to_bias, saved.biased) {
            let gradient = match &groups {
                None => summed_over_rows::<B>(dout),
                Some(groups) => {
                    let n = dout.shape()[1];
                    let of_group = |rows| summed_over_rows::<B>(some_rows::<B>(&dout, rows));
                    let shape = Shape::new([groups.count() * n]);
                    each_group::<B>(groups, &shape, float_dtype(own), &dout, of_group)
                }
            };
            gradients.register::<B>(node.id, gradient);
        }
    }
}

/// Returns some rows of a matrix.
fn some_rows<B: Backend>(matrix: &FloatTensor<B>, rows: Range<usize>) -> FloatTensor<B> {
    let cols = matrix.shape()[1];
    B::float_slice(matrix.clone(), &[rows.into(), (0..cols).into()])
}

/// Concatenates the results of `of_group` along the first axis of `shape`; zeros for an empty group.
fn each_group<B: Backend>(
    groups: &Groups,
    shape: &Shape,
    dtype: FloatDType,
    like: &FloatTensor<B>,
    of_group: impl Fn(Range<usize>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let mut own = shape.iter().copied().collect::<Vec<_>>();
    own[0] /= groups.count();
    let device = like.device();
    let part = |rows: Range<usize>| match rows.is_empty() {
        true => B::float_zeros(Shape::from(own.clone()), &device, dtype),
        false => B::float_reshape(of_group(rows), Shape::from(own.clone())),
    };
    B::float_cat(groups.rows().map(part).collect(), 0)
}

impl<B: MatmulOps, C: CheckpointStrategy> MatmulOps for Autodiff<B, C> {
    fn product(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        parts: Parts<Self>,
        spec: Spec,
        call: Call,
    ) -> FloatTensor<Self> {
        if ![&lhs, &rhs].into_iter().chain(parts.tensors()).any(|t| t.is_tracked()) {
            let (lhs, rhs) = (Self::inner(lhs), Self::inner(rhs));
            return Self::from_inner(B::product(lhs, rhs, parts.map(Self::inner), spec, call));
        }
        let (lhs, parts) = normalised(lhs, parts, spec.norm, &call);
        let spec = Spec { norm: None, ..spec };
        let Parts { bias, gate, residual, .. } = parts;
        let [bias, gate, residual] = [bias, gate, residual].map(Optional::into_option);
        if gate.is_some() || residual.is_some() || spec.activation.is_some() {
            let activation = spec.activation;
            let bare = Spec { activation: None, ..spec };
            let sum = Self::product(lhs, rhs, Parts::bias(bias), bare, call);
            return finish::<Self>(sum, activation, gate, residual);
        }
        let biased = bias.is_some();
        let shapes = [lhs.shape(), rhs.shape()];
        let third = bias.as_ref().unwrap_or(&lhs).node();
        let needs = [lhs.is_tracked(), rhs.is_tracked()];
        let prepared =
            MatmulBackward.prepare::<C>([lhs.node(), rhs.node(), third]).compute_bound().stateful();
        let bias = bias.map(|b| b.into_primitive());
        let multiply = |lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, call| {
            let (lhs, rhs) = (lhs.into_primitive(), rhs.into_primitive());
            B::product(lhs, rhs, Parts::bias(bias), spec.clone(), call)
        };
        match prepared {
            OpsKind::Tracked(mut prep) => {
                // Each gradient needs the other operand.
                let saved = Saved {
                    lhs: needs[1].then(|| prep.checkpoint(&lhs)),
                    rhs: needs[0].then(|| prep.checkpoint(&rhs)),
                    shapes,
                    biased,
                    spec: spec.clone(),
                    ctx: call.ctx.clone(),
                };
                prep.finish(saved, multiply(lhs, rhs, call))
            }
            OpsKind::UnTracked(prep) => prep.finish(multiply(lhs, rhs, call)),
        }
    }
}

/// Runs a matmul of a backward pass, which cannot return an error.
fn bare_matmul<B: MatmulOps>(
    lhs: FloatTensor<B>,
    rhs: FloatTensor<B>,
    spec: Spec,
    ctx: &Ctx,
) -> FloatTensor<B> {
    let call = Call::new(ctx);
    let out = B::product(lhs, rhs, Parts::bias(None), spec, call.clone());
    match call.failed() {
        None => out,
        Some(e) => panic!("the backward pass of a matmul failed: {e}"),
    }
}

pub(crate) const fn precision_of(dtype: DType) -> Precision {
    match dtype {
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
        _ => Precision::F32,
    }
}

/// Computes lhs · rhs for tensors of `dtype`, in a backward pass.
pub(crate) fn product_of<B: MatmulOps>(
    lhs: FloatTensor<B>,
    rhs: FloatTensor<B>,
    dtype: DType,
    ctx: &Ctx,
) -> FloatTensor<B> {
    let precision = precision_of(dtype);
    let spec =
        Spec { precision, activation: None, out: float_dtype(dtype), norm: None, groups: None };
    bare_matmul::<B>(lhs, rhs, spec, ctx)
}

/// Prepends axes of length 1, up to `rank`.
fn leading_ones<B: Backend>(tensor: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let own = tensor.shape();
    let ones = std::iter::repeat_n(1, rank - own.num_dims());
    let shape = ones.chain(own.iter().copied()).collect::<Vec<_>>();
    B::float_reshape(tensor, Shape::from(shape))
}

/// Computes the gradient of an operand of this shape, summed over the batches along which it was broadcast.
/// The sum is in f32, because 16-bit sums lose most digits.
fn summed_to<B: Backend>(
    shape: &Shape,
    dout: &FloatTensor<B>,
    spec: &Spec,
    product: impl FnOnce(&Spec) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let batches = dout.shape();
    let repeated: Vec<usize> =
        (0..shape.num_dims() - 2).filter(|axis| shape[*axis] == 1 && batches[*axis] != 1).collect();
    if repeated.is_empty() {
        return product(spec);
    }
    let each = product(&Spec { out: FloatDType::F32, ..spec.clone() });
    B::float_cast(repeated.into_iter().fold(each, B::float_sum_dim), spec.out)
}
