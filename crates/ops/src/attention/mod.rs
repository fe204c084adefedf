//! Attention `softmax(scores(q·kᵀ))·v` and its gradients, with the arguments of Burn's own attention and
//! more.
//!
//! One kernel computes the forward pass, and keeps the log-sum-exp if gradients are needed. The backward
//! kernels recompute the scores. Neither stores them: memory grows linearly with the sequence, not
//! quadratically. Only the gradient of a bias needs stored scores; it uses ordinary differentiable ops.

mod memory;
mod packing;
mod stored;

use arch::DType;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, ExtensionType, backend_extension,
};
use burn::tensor::{Bool, FloatDType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::attention::backward::{AttentionBackward, BackwardOperands, BackwardProblem};
use kernels::attention::{
    Attention, AttentionOperands, AttentionOptions, AttentionProblem, HeadStrides, Implementation,
    Offsets, ScoreStrides,
};
use tune::{Infeasible, Kernel};

use crate::arena::result;
use crate::call::{
    Call, Optional, float_of, like, on_cubecl, result_like, same_dtype, same_shape, size_of,
};
use crate::offsets::u32_buffer;
use crate::{Ctx, OpError};

pub use memory::attention_memory;
pub use packing::Packing;
use packing::longest;

/// Computes scaled dot-product attention. Groups of `heads / kv_heads` adjacent query heads share a head of k
/// and v.
///
/// # Shapes
/// q `[batch, heads, seq_q, head_dim]`, k and v `[batch, kv_heads, seq_kv, head_dim]`, any strides. mask
/// (true hides) and bias (added after the soft cap) `[batch, heads, seq_q, seq_kv]`; each axis may be 1. The
/// result has the shape of q. A query without visible keys gives zeros.
///
/// Memory grows linearly with the sequence. The exception is a bias with a gradient: the call stores the
/// scores, `batch·heads·seq_q·seq_kv` in f32.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Scores`], [`OpError::Heads`] or [`OpError::Attention`]
/// for invalid operands; [`OpError::Forced`] for an unsupported implementation; [`OpError::Device`] for a
/// device without kernels; [`OpError::Tune`].
pub fn attention(
    ctx: &Ctx,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    Ok(dense(ctx, [q, k, v], mask, bias, options, false)?.0)
}

/// Computes [`attention`] and also returns the log-sum-exp `ln Σ_j exp(s_j)` over the visible keys of each
/// query. It merges attentions over parts of the keys: `out = Σ exp(lse_i - lse) · out_i` with `lse = ln Σ
/// exp(lse_i)`.
///
/// # Shapes
/// As in [`attention`]; the log-sum-exp is `[batch, heads, seq_q]` in f32, -inf for a query without visible
/// keys. As in FlashAttention, it is a constant for gradients.
///
/// # Errors
/// The errors of [`attention`].
pub fn attention_with_lse(
    ctx: &Ctx,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let (out, lse) = dense(ctx, [q, k, v], mask, bias, options, true)?;
    Ok((out, lse.expect("asked for")))
}

/// Computes the gradients of [`attention_with_lse`] with respect to q, k and v. `forward` is its result and
/// log-sum-exp, `dout` the gradient of the result. The scores are recomputed. Unlike Burn's backward pass, it
/// returns errors. Its results are constants for further gradients.
///
/// # Shapes
/// q, k, v, mask, bias and the log-sum-exp as in [`attention_with_lse`]; result and dout like q; gradients
/// like q, k and v.
///
/// # Errors
/// The errors of [`attention`].
pub fn attention_backward(
    ctx: &Ctx,
    [q, k, v]: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    forward: (Tensor<4>, Tensor<3>),
    dout: Tensor<4>,
    options: AttentionOptions,
) -> Result<[Tensor<4>; 3], OpError> {
    on_cubecl(&q.device())?;
    validate(&q, &k, &v, mask.as_ref(), bias.as_ref())?;
    let (out, lse) = forward;
    for (what, tensor) in [("out", &out), ("dout", &dout)] {
        same_dtype(what, tensor.dtype(), q.dtype())?;
        same_shape(what, &tensor.dims(), &q.dims())?;
    }
    same_dtype("lse", lse.dtype(), burn::tensor::DType::F32)?;
    same_shape("lse", &lse.dims(), &q.dims()[..3])?;
    if q.dims().contains(&0) || k.dims().contains(&0) {
        return Ok([q, k, v].map(|tensor| tensor.zeros_like()));
    }
    let call = Call::new(ctx);
    let saved = Saved {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
        mask: Masking::from_tensor(mask.map(Tensor::into_dispatch)),
        bias: Optional::from_tensor(bias.map(Tensor::into_dispatch)),
        out: out.into_dispatch(),
        lse: lse.into_dispatch(),
    };
    let asked = Asked { options, packing: None, lse: true };
    let dout = dout.into_dispatch();
    let (dq, dk, dv) = <Dispatch as AttentionOps>::gradients(saved, dout, asked, call.clone());
    match call.failed() {
        None => Ok([dq, dk, dv].map(Tensor::from_dispatch)),
        Some(e) => Err(e),
    }
}

fn dense(
    ctx: &Ctx,
    [q, k, v]: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
    lse: bool,
) -> Result<(Tensor<4>, Option<Tensor<3>>), OpError> {
    on_cubecl(&q.device())?;
    validate(&q, &k, &v, mask.as_ref(), bias.as_ref())?;
    attend(ctx, [q, k, v], mask, bias, Asked { options, packing: None, lse })
}

/// Computes [`attention`] of packed sequences of different lengths, in one launch. Sequences are concatenated
/// and do not attend to each other. There is neither mask nor bias.
///
/// # Shapes
/// q `[1, heads, queries, head_dim]`, k and v `[1, kv_heads, keys, head_dim]`, any strides; `packing` holds
/// the offsets of the sequences. The result has the shape of q. To pass FlashAttention's `[queries, heads,
/// head_dim]` with `cu_seqlens`, apply `unsqueeze` and `swap_dims(1, 2)`.
///
/// # Errors
/// The errors of [`attention`]; [`OpError::Offsets`] for a packing with another number of queries or keys.
pub fn attention_packed(
    ctx: &Ctx,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    packing: &Packing,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    Ok(packed(ctx, [q, k, v], packing, options, false)?.0)
}

/// Computes [`attention_packed`] and also returns the log-sum-exp of each query, as [`attention_with_lse`]
/// does.
///
/// # Shapes
/// As in [`attention_packed`]; the log-sum-exp is `[1, heads, queries]` in f32.
///
/// # Errors
/// The errors of [`attention_packed`].
pub fn attention_packed_with_lse(
    ctx: &Ctx,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    packing: &Packing,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let (out, lse) = packed(ctx, [q, k, v], packing, options, true)?;
    Ok((out, lse.expect("asked for")))
}

fn packed(
    ctx: &Ctx,
    [q, k, v]: [Tensor<4>; 3],
    packing: &Packing,
    options: AttentionOptions,
    lse: bool,
) -> Result<(Tensor<4>, Option<Tensor<3>>), OpError> {
    on_cubecl(&q.device())?;
    validate(&q, &k, &v, None, None)?;
    let [batch, _, queries, _] = q.dims();
    if batch != 1 {
        return Err(OpError::Shape {
            what: "q",
            have: q.dims().to_vec(),
            need: [&[1], &q.dims()[1..]].concat(),
        });
    }
    packing.covers("queries", &packing.q, queries)?;
    packing.covers("keys", &packing.kv, k.dims()[2])?;
    attend(ctx, [q, k, v], None, None, Asked { options, packing: Some(packing.clone()), lse })
}

/// Request for a validated attention.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) options: AttentionOptions,
    pub(crate) packing: Option<Packing>,
    /// True if the log-sum-exp is returned.
    pub(crate) lse: bool,
}

fn attend(
    ctx: &Ctx,
    [q, k, v]: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    asked: Asked,
) -> Result<(Tensor<4>, Option<Tensor<3>>), OpError> {
    let shape = q.dims();
    if shape.contains(&0) || k.dims().contains(&0) {
        let one = AttentionProblem::dense(1, [1; 2], [1; 2], size_of(shape[3])?, DType::F32)?;
        asked.options.on(one).checked()?;
        let [batch, heads, seq_q, _] = shape;
        let device = q.device();
        let lse = asked.lse.then(|| {
            let nothing = Tensor::<3>::full([batch, heads, seq_q], f32::NEG_INFINITY, &device);
            nothing.cast(FloatDType::F32)
        });
        return Ok((Tensor::<4>::zeros(shape, &device).cast(q.dtype()), lse));
    }
    let call = Call::new(ctx);
    let (out, lse) = <Dispatch as AttentionOps>::attend(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        Masking::from_tensor(mask.map(Tensor::into_dispatch)),
        Optional::from_tensor(bias.map(Tensor::into_dispatch)),
        asked,
        call.clone(),
    );
    match call.failed() {
        None => Ok((Tensor::from_dispatch(out), lse.map(Tensor::from_dispatch))),
        Some(e) => Err(e),
    }
}

fn validate(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    mask: Option<&Tensor<4, Bool>>,
    bias: Option<&Tensor<4>>,
) -> Result<(), OpError> {
    let need = q.dtype();
    float_of(need)?;
    let typed = [("k", Some(k.dtype())), ("v", Some(v.dtype())), ("bias", bias.map(Tensor::dtype))];
    for (what, have) in typed {
        if let Some(have) = have.filter(|have| *have != need) {
            return Err(OpError::DType { what, have, need });
        }
    }
    let [batch, heads, seq_q, head_dim] = q.dims();
    let [_, kv_heads, seq_kv, _] = k.dims();
    let keys = [batch, kv_heads, seq_kv, head_dim];
    for (what, have) in [("k", k.dims()), ("v", v.dims())] {
        if have != keys {
            return Err(OpError::Shape { what, have: have.to_vec(), need: keys.to_vec() });
        }
    }
    if heads != kv_heads && heads.checked_rem(kv_heads) != Some(0) {
        return Err(OpError::Heads { heads, kv_heads });
    }
    let scores = [batch, heads, seq_q, seq_kv];
    let fits = |have: [usize; 4]| have.iter().zip(scores).all(|(h, s)| *h == s || *h == 1);
    for (what, have) in [("mask", mask.map(Tensor::dims)), ("bias", bias.map(Tensor::dims))] {
        if let Some(have) = have.filter(|have| !fits(*have)) {
            return Err(OpError::Scores { what, have: have.to_vec(), scores: scores.to_vec() });
        }
    }
    let long = q.dims().into_iter().chain(k.dims()).find(|s| u32::try_from(*s).is_err());
    long.map_or(Ok(()), |size| Err(OpError::TooLarge(size)))
}

/// `Option` of a boolean tensor, which does not cross Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) enum Masking<B: Backend> {
    Absent,
    Present(BoolTensor<B>),
}

impl<B: Backend> Masking<B> {
    fn from_tensor(tensor: Option<BoolTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }

    /// Returns the same mask on another backend.
    fn map<C: Backend>(self, of: impl Fn(BoolTensor<B>) -> BoolTensor<C>) -> Masking<C> {
        Masking::from_tensor(self.into_option().map(of))
    }

    fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait AttentionOps: Backend {
    /// Returns the result, and the log-sum-exp if requested. The call is validated, and no size is 0.
    fn attend(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] mask: Masking<Self>,
        #[extension_type] bias: Optional<Self>,
        asked: Asked,
        call: Call,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);

    /// Returns the gradients of q, k and v.
    fn gradients(
        #[extension_type] saved: Saved<Self>,
        dout: FloatTensor<Self>,
        asked: Asked,
        call: Call,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

/// Operands and results of a forward pass, for the backward pass.
#[derive(Clone, ExtensionType)]
pub(crate) struct Saved<B: Backend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    #[extension_type]
    mask: Masking<B>,
    #[extension_type]
    bias: Optional<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
}

impl AttentionOps for CubeBackend {
    fn attend(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        mask: Masking<Self>,
        bias: Optional<Self>,
        asked: Asked,
        call: Call,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let operands = [q, k, v].map(along_head_dim);
        let scores = [mask.into_option(), bias.into_option()];
        let q = &operands[0];
        let out = in_order_of(q);
        let lse = asked.lse.then(|| log_sums_like(q));
        let launched = Launch::new(&operands, scores, &out, lse.as_ref(), &asked).and_then(|l| {
            let device = call.ctx.device(&out.device)?;
            let config = match asked.options.implementation {
                None => call.ctx.config::<Attention>(&device, &l.problem)?,
                Some(wanted) => wanted
                    .config(device.profile(), &l.problem)
                    .map_err(|why| forced(wanted, &why))?,
            };
            call.ctx.launch::<Attention>(&device, &l.problem, &config, &l.operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        (out, lse)
    }

    fn gradients(
        saved: Saved<Self>,
        dout: CubeTensor,
        asked: Asked,
        call: Call,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let Saved { q, k, v, mask, bias, out, lse } = saved;
        let operands = [q, k, v].map(along_head_dim);
        let [out, dout] = [out, dout].map(along_head_dim);
        let scores = [mask.into_option(), bias.into_option()];
        let gradients = operands.each_ref().map(in_order_of);
        let forward = Launch::new(&operands, scores, &out, Some(&into_contiguous(lse)), &asked);
        let launched = forward
            .and_then(|forward| forward.gradients(&call.ctx, dout, gradients.each_ref(), &asked));
        if let Err(e) = launched {
            call.fail(e);
        }
        gradients.into()
    }
}

/// A forward pass in the kernel's terms.
pub(crate) struct Launch {
    pub(crate) problem: AttentionProblem,
    pub(crate) operands: AttentionOperands,
}

impl Launch {
    pub(crate) fn new(
        [q, k, v]: &[CubeTensor; 3],
        [mask, bias]: [Option<CubeTensor>; 2],
        out: &CubeTensor,
        lse: Option<&CubeTensor>,
        asked: &Asked,
    ) -> Result<Self, OpError> {
        let size = |t: &CubeTensor, axis: usize| t.meta.shape()[axis] as u32;
        let (heads, dtype) = ([size(q, 1), size(k, 1)], float_of(q.dtype)?);
        let (batch, seqs) = match &asked.packing {
            None => (size(q, 0), [size(q, 2), size(k, 2)]),
            Some(packing) => {
                (size_of(packing.sequences())?, [longest(&packing.q), longest(&packing.kv)])
            }
        };
        let dense = AttentionProblem::dense(batch, heads, seqs, size(q, 3), dtype)?;
        // Burn's booleans are bytes or words.
        let mask_dtype = match mask.as_ref().map(|m| m.dtype.size()) {
            Some(4) => DType::I32,
            _ => DType::U8,
        };
        let problem = AttentionProblem {
            q: head_strides(q),
            k: head_strides(k),
            v: head_strides(v),
            out: head_strides(out),
            bias: bias.as_ref().map(score_strides),
            mask: mask.as_ref().map(score_strides),
            mask_dtype,
            lse: lse.is_some(),
            varlen: asked.packing.is_some(),
            ..asked.options.on(dense)
        }
        .checked()?;
        let operands = AttentionOperands {
            q: q.handle.clone(),
            k: k.handle.clone(),
            v: v.handle.clone(),
            out: out.handle.clone(),
            lse: lse.map(|t| t.handle.clone()),
            bias: bias.map(|t| t.handle),
            mask: mask.map(|t| t.handle),
            offsets: asked.packing.as_ref().map(|packing| Offsets {
                q: u32_buffer(&q.client, &packing.q),
                kv: u32_buffer(&q.client, &packing.kv),
                queries: size(q, 2),
            }),
        };
        Ok(Self { problem, operands })
    }

    /// Enqueues the backward pass into `gradients`, whose head dimensions are contiguous.
    pub(crate) fn gradients(
        self,
        ctx: &Ctx,
        dout: CubeTensor,
        gradients: [&CubeTensor; 3],
        asked: &Asked,
    ) -> Result<(), OpError> {
        let [dq, dk, dv] = gradients.map(head_strides);
        let problem =
            BackwardProblem { forward: self.problem, dout: head_strides(&dout), dq, dk, dv };
        let problem = problem.checked()?;
        let device = ctx.device(&dout.device)?;
        let config = match asked.options.implementation {
            None => ctx.config::<AttentionBackward>(&device, &problem)?,
            Some(wanted) => wanted
                .backward_config(device.profile(), &problem)
                .map_err(|why| forced(wanted, &why))?,
        };
        let [dq, dk, dv] = gradients.map(|gradient| gradient.handle.clone());
        let operands = BackwardOperands { forward: self.operands, dout: dout.handle, dq, dk, dv };
        let scratch = AttentionBackward::scratch(&device, &problem, &config);
        ctx.launch::<AttentionBackward>(&device, &problem, &config, &operands, scratch.as_ref());
        Ok(())
    }
}

/// Allocates a log-sum-exp per row of q, `[batch, heads, seq_q]` in f32.
pub(crate) fn log_sums_like(q: &CubeTensor) -> CubeTensor {
    let rows = Shape::new([q.meta.shape()[0], q.meta.shape()[1], q.meta.shape()[2]]);
    let float = burn::tensor::DType::F32;
    result(q.client.clone(), q.device.clone(), rows, float)
}

pub(crate) fn forced(implementation: Implementation, why: &Infeasible) -> OpError {
    OpError::Forced { implementation, why: why.to_string() }
}

/// Returns the tensor, or a copy if its last axis is not contiguous.
pub(crate) fn along_head_dim(tensor: CubeTensor) -> CubeTensor {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    // The stride of an axis of length 1 is arbitrary; positions must not overlap.
    let contiguous =
        (strides[3] == 1 || shape[3] == 1) && (strides[2] >= shape[3] || shape[2] == 1);
    if contiguous { tensor } else { into_contiguous(tensor) }
}

/// Allocates a tensor with the shape and dtype of `heads`, and the order of its axes: tokens before heads if its heads are
/// columns of a projection. Then the result is rows of the next projection without a copy.
fn in_order_of(heads: &CubeTensor) -> CubeTensor {
    let (shape, strides) = (heads.meta.shape(), heads.meta.strides());
    if strides[1] >= strides[2] {
        return like(heads);
    }
    let dtype = float_of(heads.dtype).expect("checked before");
    let mut made = result_like(heads, [shape[0], shape[2], shape[1], shape[3]], dtype);
    made.meta.swap(1, 2);
    made
}

pub(crate) fn head_strides(tensor: &CubeTensor) -> HeadStrides {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let step = |axis: usize| strides[axis] as u64;
    HeadStrides {
        batch: step(0),
        head: step(1),
        seq: if shape[2] == 1 { shape[3] as u64 } else { step(2) },
    }
}

/// Returns the strides of a tensor of scores; an axis of length 1 repeats.
fn score_strides(tensor: &CubeTensor) -> ScoreStrides {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let step = |axis: usize| if shape[axis] == 1 { 0 } else { strides[axis] as u64 };
    ScoreStrides { batch: step(0), head: step(1), row: step(2), col: step(3) }
}

/// Parents of an attention's node: q, k and v.
#[derive(Debug)]
struct Attend;

/// State that the gradients need. Burn's checkpointing restores q, k and v from their nodes.
#[derive(Clone)]
struct State<B: Backend> {
    nodes: [NodeId; 3],
    mask: Masking<B>,
    bias: Optional<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    asked: Asked,
    ctx: Ctx,
}

impl<B: Backend> std::fmt::Debug for State<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("asked", &self.asked).finish_non_exhaustive()
    }
}

impl<B: AttentionOps> Backward<B, 3> for Attend {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<State<B>, 3>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let state = ops.state;
        let dout = gradients.consume::<B>(&ops.node);
        let call = Call::new(&state.ctx);
        let [q, k, v] = state.nodes.map(|node| checkpointer.retrieve_node_output(node));
        let State { mask, bias, out, lse, asked, .. } = state;
        let saved = Saved { q, k, v, mask, bias, out, lse };
        let (dq, dk, dv) = B::gradients(saved, dout, asked, call.clone());
        // Burn's backward pass cannot return an error.
        if let Some(e) = call.failed() {
            panic!("the backward pass of attention failed: {e}");
        }
        for (parent, gradient) in ops.parents.into_iter().zip([dq, dk, dv]) {
            if let Some(node) = parent {
                gradients.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attend(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: Masking<Self>,
        bias: Optional<Self>,
        asked: Asked,
        call: Call,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        if let Optional::Present(bias) = &bias
            && bias.is_tracked()
        {
            let options = asked.options;
            if let Err(why) = stored::check::<Self>(&q, &k, &options) {
                call.fail(why);
                return (q, None);
            }
            let (mask, bias) = (mask.into_option(), bias.clone());
            let (out, lse) = stored::attend::<Self>([q, k, v], mask, Some(bias), &options);
            return (out, asked.lse.then(|| Self::from_inner(lse.into_primitive())));
        }
        let (mask, bias) = (mask.map(Self::bool_inner), bias.map(Self::inner));
        let forward = |[q, k, v]: [FloatTensor<Self>; 3], lse: bool, call: Call| {
            let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
            B::attend(q, k, v, mask.clone(), bias.clone(), Asked { lse, ..asked.clone() }, call)
        };
        match Attend.prepare::<C>([q.node(), k.node(), v.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let nodes = [&q, &k, &v].map(|t| prep.checkpoint(t));
                let ctx = call.ctx.clone();
                let (out, lse) = forward([q, k, v], true, call);
                let lse = lse.expect("asked for");
                let given = asked.lse.then(|| Self::from_inner(lse.clone()));
                let state = State { nodes, mask, bias, out: out.clone(), lse, asked, ctx };
                (prep.finish(state, out), given)
            }
            OpsKind::UnTracked(prep) => {
                let (out, lse) = forward([q, k, v], asked.lse, call);
                (prep.finish(out), lse.map(Self::from_inner))
            }
        }
    }

    fn gradients(
        saved: Saved<Self>,
        dout: FloatTensor<Self>,
        asked: Asked,
        call: Call,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Saved { q, k, v, mask, bias, out, lse } = saved;
        let [q, k, v, out, lse, dout] = [q, k, v, out, lse, dout].map(Self::inner);
        let (mask, bias) = (mask.map(Self::bool_inner), bias.map(Self::inner));
        let saved = Saved { q, k, v, mask, bias, out, lse };
        let (dq, dk, dv) = B::gradients(saved, dout, asked, call);
        (Self::from_inner(dq), Self::from_inner(dk), Self::from_inner(dv))
    }
}
