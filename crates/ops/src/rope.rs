//! RoPE on Burn tensors: normalises and rotates heads, and writes keys and values into a cache in place.

use arch::DType;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, ExtensionType, backend_extension,
};
use burn::tensor::{FloatDType, Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::attention::decode::{CacheStrides, Scales};
use kernels::norm::NormKind;
use kernels::rope::{HeadNorm, HeadWeights, KvLayout, Rope, RopeOperands, RopeProblem};

use crate::call::{
    Call, Optional, as_int32, empty_like, float_of, on_cubecl, same_dtype, same_shape, size_of,
};
use crate::decode::{Blocks, Stored, axes, cache_strides, inner, scale_strides};
use crate::layout::rows_of;
use crate::memory::bytes_of;
use crate::{Cached, Ctx, OpError, OpMemory};

/// KV cache of a layer, and the positions that each sequence has.
///
/// # Shapes
/// k and v as in [`Cached`], both in the dtype of the projection or both in bytes. Any strides with separate
/// positions; the scales of k and v have the same strides. Each tensor has its own memory. start `[batch]`,
/// pages `[batch, max_blocks]`, I32 or U32 without a copy.
#[derive(Debug, Clone)]
pub struct KvSlots {
    /// Keys, written in place.
    pub k: Cached,
    /// Values, written in place.
    pub v: Cached,
    /// Number of positions before the call, per sequence.
    pub start: Tensor<1, Int>,
    /// Block table of a paged cache: the pages of each sequence, in order. A position on a page that does not
    /// exist is dropped, like one past the cache. If two sequences write to the same page, the result is
    /// undefined.
    pub pages: Option<Tensor<2, Int>>,
}

/// Norms of queries and keys, per head.
///
/// # Shapes
/// Both weights `[head_dim]`.
#[derive(Debug, Clone)]
pub struct QkNorm {
    /// Kind of the norm: with or without the mean, and the meaning of the weights.
    pub kind: NormKind,
    /// Epsilon, added to the mean of squares.
    pub eps: f32,
    /// Norm weight of queries.
    pub q: Tensor<1>,
    /// Norm weight of keys.
    pub k: Tensor<1>,
}

/// Head layout, RoPE table and QK norm.
#[derive(Debug, Clone)]
pub struct RopeOptions {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads, and of value heads; divides `heads`.
    pub kv_heads: usize,
    /// Dimension of a head.
    pub head_dim: usize,
    /// RoPE table, f32 `[positions, dim]`: for each position `dim / 2` cosines, then `dim / 2` sines, with
    /// the magnitude factor of RoPE scaling included. Pair i of a head is dimensions i and `i + dim / 2`;
    /// dimensions past dim are not rotated. None rotates nothing.
    pub table: Option<Tensor<2>>,
    /// Norms of queries and keys; none to skip them.
    pub qk_norm: Option<QkNorm>,
}

/// Prepares heads for attention, in one launch. Queries and keys are normalised and rotated by their
/// position. Queries are returned; keys and values are written into the cache. Computes in f32 and rounds
/// once. In an int8 cache the largest magnitude of each head sets its scale.
///
/// Position `start[b] + s` of k and v is **written in place**: every clone of these tensors, and every tensor
/// that shares their memory, sees it. Results that Burn's own ops computed from them before keep their
/// values. A position past the cache or the table is not written, and its queries are NaN.
///
/// # Shapes
/// qkv `[batch · seq, (heads + 2 · kv_heads) · head_dim]`, any strides: queries, keys and values of token `b
/// · seq + s`. The result is `[batch, heads, seq, head_dim]`, a view of `[batch, seq, heads, head_dim]`.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`] or [`OpError::Rope`] for invalid operands; [`OpError::Apart`] for a
/// cache that cannot be written in place; [`OpError::Device`] for a device without kernels;
/// [`OpError::NoGradient`] for tracked tensors. After an error nothing is written.
pub fn rope(
    ctx: &Ctx,
    qkv: Tensor<2>,
    slots: &KvSlots,
    options: RopeOptions,
) -> Result<Tensor<4>, OpError> {
    on_cubecl(&qkv.device())?;
    let problem = problem(&qkv, slots, &options)?;
    let KvSlots { k, v, start, pages } = slots.clone();
    let weights = options.qk_norm.map_or(Weights::Absent, |norm| Weights::Present {
        q: norm.q.into_dispatch(),
        k: norm.k.into_dispatch(),
    });
    let call = Call::new(ctx);
    let q = <Dispatch as RopeOps>::rope(
        qkv.into_dispatch(),
        Slots {
            k: Stored::from_cached(k),
            v: Stored::from_cached(v),
            start: as_int32(start).into_dispatch(),
            pages: Blocks::from_tensor(pages.map(|pages| as_int32(pages).into_dispatch())),
        },
        Optional::from_tensor(options.table.map(Tensor::into_dispatch)),
        weights,
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::<4>::from_dispatch(q).swap_dims(1, 2)),
        Some(e) => Err(e),
    }
}

/// Returns the bytes of a [`rope`] of `rows` tokens with queries of width `q`. Keys and values go into the
/// cache.
pub fn rope_memory(rows: u128, q: u128, dtype: FloatDType) -> OpMemory {
    OpMemory { result: bytes_of(rows * q, dtype), ..OpMemory::default() }
}

fn problem(
    qkv: &Tensor<2>,
    slots: &KvSlots,
    options: &RopeOptions,
) -> Result<RopeProblem, OpError> {
    let RopeOptions { heads, kv_heads, head_dim, table, qk_norm } = options;
    let dtype = qkv.dtype();
    let float = float_of(dtype)?;
    let ([rows, width], [first, second, third, _]) = (qkv.dims(), slots.k.dims());
    let (batch, cached) = match &slots.pages {
        None => (first, [first, *kv_heads, third, *head_dim]),
        Some(pages) => (pages.dims()[0], [first, second, *kv_heads, *head_dim]),
    };
    // The kernel's own check rejects an empty batch.
    let seq = rows / batch.max(1);
    same_shape("qkv", &[rows, width], &[batch * seq, (heads + 2 * kv_heads) * head_dim])?;
    for (what, cache) in [("k", &slots.k), ("v", &slots.v)] {
        same_shape(what, &cache.dims(), &cached)?;
        match cache {
            Cached::Float(values) => same_dtype(what, values.dtype(), dtype)?,
            Cached::Bytes { values, scales } => {
                same_dtype(what, values.dtype(), burn::tensor::DType::I8)?;
                same_dtype("scales", scales.dtype(), burn::tensor::DType::F32)?;
                same_shape("scales", &scales.dims(), &cached[..3])?;
            }
        }
    }
    same_dtype("v", slots.v.dtype(), slots.k.dtype())?;
    let bytes = matches!(slots.k, Cached::Bytes { .. });
    let stored = if bytes { DType::I8 } else { float };
    same_shape("start", &slots.start.dims(), &[batch])?;
    let [positions, dim] = match table {
        Some(table) => {
            same_dtype("table", table.dtype(), burn::tensor::DType::F32)?;
            table.dims()
        }
        None => [0, 0],
    };
    if let Some(norm) = qk_norm {
        for (what, weight) in [("query weight", &norm.q), ("key weight", &norm.k)] {
            same_shape(what, &weight.dims(), &[*head_dim])?;
            same_dtype(what, weight.dtype(), dtype)?;
        }
    }
    // Strides of dense tensors; the real ones are only known behind Burn's dispatch.
    let (kv_heads, head_dim) = (size_of(*kv_heads)?, size_of(*head_dim)?);
    let cache = match &slots.pages {
        None => KvLayout::dense(kv_heads, size_of(third)?, head_dim, stored),
        Some(pages) => {
            let (blocks, max_blocks) = ([size_of(first)?, size_of(second)?], pages.dims()[1]);
            KvLayout::paged(kv_heads, blocks, size_of(max_blocks)?, head_dim, stored)
        }
    };
    let problem = RopeProblem {
        batch: size_of(batch)?,
        seq: size_of(seq)?,
        heads: size_of(*heads)?,
        kv_heads,
        head_dim,
        dtype: float,
        cache,
        dim: size_of(dim)?,
        positions: size_of(positions)?,
        table_stride: size_of(dim)?,
        qk_norm: qk_norm.as_ref().map(|norm| HeadNorm { kind: norm.kind, eps: norm.eps }),
    };
    Ok(problem.checked()?)
}

/// [`KvSlots`] behind Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) struct Slots<B: Backend> {
    #[extension_type]
    k: Stored<B>,
    #[extension_type]
    v: Stored<B>,
    start: IntTensor<B>,
    #[extension_type]
    pages: Blocks<B>,
}

/// Weights of the QK norms, behind Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) enum Weights<B: Backend> {
    Absent,
    Present { q: FloatTensor<B>, k: FloatTensor<B> },
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait RopeOps: Backend {
    /// Returns the queries `[batch, seq, heads, head_dim]`; `problem` describes these tensors except for
    /// their strides.
    fn rope(
        qkv: FloatTensor<Self>,
        #[extension_type] slots: Slots<Self>,
        #[extension_type] table: Optional<Self>,
        #[extension_type] weights: Weights<Self>,
        problem: RopeProblem,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl RopeOps for CubeBackend {
    fn rope(
        qkv: CubeTensor,
        slots: Slots<Self>,
        table: Optional<Self>,
        weights: Weights<Self>,
        problem: RopeProblem,
        call: Call,
    ) -> CubeTensor {
        let RopeProblem { batch, seq, heads, head_dim, dtype, .. } = problem;
        let shape = [batch, seq, heads, head_dim].map(|size| size as usize);
        let q = empty_like(&qkv, shape, dtype);
        let weights = match weights {
            Weights::Absent => None,
            Weights::Present { q, k } => {
                let [q, k] = [q, k].map(|weight| into_contiguous(weight).handle);
                Some(HeadWeights { q, k })
            }
        };
        let launched = call.ctx.device(&q.device).and_then(|device| {
            let axes = axes(problem.cache.layout);
            let ((k, k_scales), (v, v_scales)) = (slots.k.parts(), slots.v.parts());
            let cache = KvLayout {
                k: slot_strides("k", &k, axes)?,
                v: slot_strides("v", &v, axes)?,
                ..problem.cache
            };
            let (scales, cache) = match k_scales.zip(v_scales) {
                None => (None, cache),
                Some((k, v)) => {
                    let strides = scale_strides(&k, axes);
                    if written_over(&k) || strides != scale_strides(&v, axes) {
                        return Err(OpError::Apart("scales"));
                    }
                    let scales = Scales { k: k.handle, v: v.handle };
                    (Some(scales), KvLayout { scales: strides, ..cache })
                }
            };
            let (table, table_stride) = table.into_option().map(rows_of).unzip();
            let problem =
                RopeProblem { cache, table_stride: size_of(table_stride.unwrap_or(0))?, ..problem }
                    .checked()?;
            let config = call.ctx.config::<Rope>(&device, &problem)?;
            let operands = RopeOperands {
                qkv: into_contiguous(qkv).handle,
                start: into_contiguous(slots.start).handle,
                pages: slots.pages.into_option().map(|pages| into_contiguous(pages).handle),
                table: table.map(|table| table.handle),
                weights,
                q: q.handle.clone(),
                k: k.handle,
                v: v.handle,
                scales,
            };
            call.ctx.launch::<Rope>(&device, &problem, &config, &operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        q
    }
}

/// Returns the strides of a cache that is written in place; an error if its positions overlap.
fn slot_strides(
    what: &'static str,
    tensor: &CubeTensor,
    axes: [usize; 2],
) -> Result<CacheStrides, OpError> {
    match written_over(tensor) {
        true => Err(OpError::Apart(what)),
        false => cache_strides(what, tensor, axes),
    }
}

/// Returns true if elements share memory.
fn written_over(tensor: &CubeTensor) -> bool {
    let sizes = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    sizes.into_iter().any(|(size, stride)| *size > 1 && *stride == 0)
}

impl<B: RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    fn rope(
        qkv: FloatTensor<Self>,
        slots: Slots<Self>,
        table: Optional<Self>,
        weights: Weights<Self>,
        problem: RopeProblem,
        call: Call,
    ) -> FloatTensor<Self> {
        let table = table.into_option();
        let all = [Some(&qkv), table.as_ref()];
        let norms = match &weights {
            Weights::Absent => [None; 2],
            Weights::Present { q, k } => [Some(q), Some(k)],
        };
        let all = all.into_iter().chain(norms);
        let gradient = all.flatten().any(|tensor| tensor.is_tracked())
            || slots.k.is_tracked()
            || slots.v.is_tracked();
        let qkv = Self::inner(qkv);
        if gradient {
            call.fail(OpError::NoGradient);
            return Self::from_inner(qkv);
        }
        let slots = Slots {
            k: inner(slots.k),
            v: inner(slots.v),
            start: Self::int_inner(slots.start),
            pages: Blocks::from_tensor(slots.pages.into_option().map(Self::int_inner)),
        };
        let table = Optional::from_tensor(table.map(Self::inner));
        let weights = match weights {
            Weights::Absent => Weights::Absent,
            Weights::Present { q, k } => Weights::Present { q: Self::inner(q), k: Self::inner(k) },
        };
        Self::from_inner(B::rope(qkv, slots, table, weights, problem, call))
    }
}
