//! Decode attention on Burn tensors: the newest positions of sequences over their KV cache.

use arch::DType;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, ExtensionType, backend_extension,
};
use burn::tensor::{Device, Int, IntDType, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::attention::decode::{
    CacheLayout, CacheStrides, Decode, DecodeOperands, DecodeProblem, Scales,
};
use kernels::attention::{HeadStrides, Implementation};
use tune::Kernel;

use crate::attention::{along_head_dim, forced, head_strides, log_sums_like};
use crate::call::{Call, float_of, like, on_cubecl, same_dtype, same_shape, size_of};
use crate::{Ctx, OpError};

/// Keys and values of all positions so far, including those of the step.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Keys of all positions.
    pub k: Cached,
    /// Values, in the dtype of the keys.
    pub v: Cached,
    /// Number of positions of each sequence.
    pub lengths: Lengths,
    /// Block table of a paged cache; none for a contiguous cache.
    pub table: Option<Table>,
}

/// Keys or values of a cache. As i8 they take half the bytes of 16-bit floats, plus the scales.
///
/// # Shapes
/// `[batch, kv_heads, capacity, head_dim]`, or paged `[blocks, block_size, kv_heads, head_dim]`, with a
/// contiguous head dimension; scales without the last axis.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a call has one or two")]
pub enum Cached {
    /// Values in the dtype of q.
    Float(Tensor<4>),
    /// i8 values with an f32 scale per position and head.
    Bytes {
        /// I8, `[batch, kv_heads, capacity, head_dim]` or paged.
        values: Tensor<4, Int>,
        /// Scales in f32, with the same shape without the last axis.
        scales: Tensor<3>,
    },
}

/// Number of positions of each sequence of the batch, including the new ones.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a call has one or two")]
pub enum Lengths {
    /// Lengths on the host, checked against the cache.
    Host(Vec<u32>),
    /// Lengths on the device, `[batch]`. A length past the cache counts as a full cache. No sequence may be
    /// longer than `longest`.
    Device {
        /// Number of positions of each sequence.
        lengths: Tensor<1, Int>,
        /// Upper bound of the longest sequence, in positions.
        longest: u32,
    },
}

/// Block table of a paged cache: the blocks of each sequence, in order.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a call has one or two")]
pub enum Table {
    /// `[batch, max_blocks]`, row-major. Blocks are checked up to the length of each sequence, or up to
    /// `longest` if the lengths are on the device.
    Host(Vec<u32>),
    /// `[batch, max_blocks]`; a block that does not exist counts as the last one.
    Device(Tensor<2, Int>),
}

/// Options of a decode step.
#[derive(Debug, Clone, Copy, Default)]
pub struct DecodeOptions {
    /// Factor of the scores; none for 1 / √head_dim.
    pub scale: Option<f32>,
    /// Soft cap: scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Sliding window: a query attends to positions at a distance below this.
    pub window: Option<u32>,
    /// Implementation to use; none for the tuner's choice.
    pub implementation: Option<Implementation>,
}

/// Computes attention of the newest positions of each sequence, up to 16, over all positions up to their own.
/// Groups of `heads / kv_heads` adjacent query heads share a cache head.
///
/// # Shapes
/// q `[batch, heads, seq_q, head_dim]`, any strides; the result has the shape of q.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Heads`] for operands that do not fit;
/// [`OpError::Decode`] for lengths or blocks outside the cache, if they are on the host; [`OpError::Apart`]
/// for a cache that would have to be copied; [`OpError::Forced`] for an unsupported implementation;
/// [`OpError::Device`] for a device without kernels; [`OpError::NoGradient`] for tracked tensors.
pub fn decode(
    ctx: &Ctx,
    q: Tensor<4>,
    cache: Cache,
    options: DecodeOptions,
) -> Result<Tensor<4>, OpError> {
    Ok(step(ctx, q, cache, options, false)?.0)
}

/// Computes [`decode`] and also returns the log-sum-exp of the visible scores of each query. It merges the
/// result with attentions over other keys: see [`crate::attention_with_lse`].
///
/// # Shapes
/// As in [`decode`]; the log-sum-exp is `[batch, heads, seq_q]` in f32, -inf for a query without visible
/// keys.
///
/// # Errors
/// The errors of [`decode`].
pub fn decode_with_lse(
    ctx: &Ctx,
    q: Tensor<4>,
    cache: Cache,
    options: DecodeOptions,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let (out, lse) = step(ctx, q, cache, options, true)?;
    Ok((out, lse.expect("asked for")))
}

fn step(
    ctx: &Ctx,
    q: Tensor<4>,
    cache: Cache,
    options: DecodeOptions,
    lse: bool,
) -> Result<(Tensor<4>, Option<Tensor<3>>), OpError> {
    let device = q.device();
    on_cubecl(&device)?;
    let problem = DecodeProblem { lse, ..problem(&q, &cache, &options)? };
    match (&cache.lengths, &cache.table) {
        (Lengths::Host(lengths), Some(Table::Host(table))) => {
            problem.check_table(lengths, table)?
        }
        (Lengths::Host(lengths), _) => problem.check_lengths(lengths)?,
        // Any sequence may be as long as the longest.
        (Lengths::Device { .. }, Some(Table::Host(table))) => {
            problem.check_table(&vec![problem.longest; problem.batch as usize], table)?;
        }
        (Lengths::Device { .. }, _) => {}
    }
    let Cache { k, v, lengths, table } = cache;
    let lengths = match lengths {
        Lengths::Host(lengths) => u32_tensor(lengths, [problem.batch as usize], &device),
        Lengths::Device { lengths, .. } => lengths.cast(IntDType::I32),
    };
    let table = table.map(|table| match table {
        Table::Host(blocks) => {
            let batch = problem.batch as usize;
            let shape = [batch, blocks.len() / batch];
            u32_tensor(blocks, shape, &device)
        }
        Table::Device(blocks) => blocks.cast(IntDType::I32),
    });
    let call = Call::new(ctx);
    let (out, lse) = <Dispatch as DecodeOps>::step(
        q.into_dispatch(),
        Stored::from_cached(k),
        Stored::from_cached(v),
        lengths.into_dispatch(),
        Blocks::from_tensor(table.map(Tensor::into_dispatch)),
        Asked { problem, implementation: options.implementation },
        call.clone(),
    );
    match call.failed() {
        None => Ok((Tensor::from_dispatch(out), lse.map(Tensor::from_dispatch))),
        Some(e) => Err(e),
    }
}

/// Uploads words from the host.
fn u32_tensor<const D: usize>(
    words: Vec<u32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
    Tensor::<D, Int>::from_data(TensorData::new(words, shape), (device, burn::tensor::DType::I32))
}

/// Returns the kernel's description of the step, with the strides of a dense cache.
fn problem(
    q: &Tensor<4>,
    cache: &Cache,
    options: &DecodeOptions,
) -> Result<DecodeProblem, OpError> {
    let need = q.dtype();
    let dtype = float_of(need)?;
    let [k, v] = [&cache.k, &cache.v].map(Cached::dims);
    same_shape("v", &v, &k)?;
    for (what, cached) in [("k", &cache.k), ("v", &cache.v)] {
        match cached {
            Cached::Float(values) => same_dtype(what, values.dtype(), need)?,
            Cached::Bytes { values, scales } => {
                same_dtype(what, values.dtype(), burn::tensor::DType::I8)?;
                same_dtype("scales", scales.dtype(), burn::tensor::DType::F32)?;
                same_shape("scales", &scales.dims(), &k[..3])?;
            }
        }
    }
    let quantized = matches!(cache.k, Cached::Bytes { .. });
    if quantized != matches!(cache.v, Cached::Bytes { .. }) {
        return Err(OpError::DType { what: "v", have: cache.v.dtype(), need: cache.k.dtype() });
    }
    let [batch, heads, seq_q, head_dim] = q.dims();
    let kv_heads = if cache.table.is_some() { k[2] } else { k[1] };
    same_shape("k", &k, &[k[0], k[1], k[2], head_dim])?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(OpError::Heads { heads, kv_heads });
    }
    let long = q.dims().into_iter().chain(k).find(|size| u32::try_from(*size).is_err());
    if let Some(size) = long {
        return Err(OpError::TooLarge(size));
    }
    let [batch32, heads, kv_heads, seq_q, head_dim] =
        [batch, heads, kv_heads, seq_q, head_dim].map(|size| size as u32);
    let blocks = k.map(|size| size as u32);
    let (layout, strides, scales) = match &cache.table {
        None => {
            same_shape("k", &k[..1], &[batch])?;
            let capacity = blocks[2];
            let strides = |width| CacheStrides::contiguous(kv_heads, capacity, width);
            (CacheLayout::Contiguous { capacity }, strides(head_dim), strides(1))
        }
        Some(table) => {
            let entries = match table {
                Table::Host(blocks) => blocks.len(),
                Table::Device(blocks) => blocks.dims().iter().product(),
            };
            let max_blocks = entries / batch.max(1);
            match table {
                Table::Host(blocks) => same_shape("table", &[blocks.len()], &[batch * max_blocks])?,
                Table::Device(blocks) => same_shape("table", &blocks.dims(), &[batch, max_blocks])?,
            }
            let [blocks, block_size, ..] = blocks;
            let max_blocks = size_of(max_blocks)?;
            let strides = |width| CacheStrides::paged(kv_heads, block_size, width);
            let layout = CacheLayout::Paged { block_size, blocks, max_blocks };
            (layout, strides(head_dim), strides(1))
        }
    };
    let longest = match &cache.lengths {
        Lengths::Host(lengths) => lengths.iter().copied().max().unwrap_or(0),
        Lengths::Device { lengths, longest } => {
            same_shape("lengths", &lengths.dims(), &[batch])?;
            *longest
        }
    };
    let queries = HeadStrides::dense(heads, seq_q, head_dim);
    let problem = DecodeProblem {
        batch: batch32,
        heads,
        kv_heads,
        seq_q,
        head_dim,
        dtype,
        cache: if quantized { DType::I8 } else { dtype },
        layout,
        longest,
        q: queries,
        out: queries,
        k: strides,
        v: strides,
        scales,
        scale: options.scale.unwrap_or(1.0 / (head_dim as f32).sqrt()),
        softcap: options.softcap,
        window: options.window,
        lse: false,
    };
    Ok(problem.checked()?)
}

impl Cached {
    pub(crate) fn dims(&self) -> [usize; 4] {
        match self {
            Self::Float(values) => values.dims(),
            Self::Bytes { values, .. } => values.dims(),
        }
    }

    pub(crate) fn dtype(&self) -> burn::tensor::DType {
        match self {
            Self::Float(values) => values.dtype(),
            Self::Bytes { values, .. } => values.dtype(),
        }
    }
}

/// [`Cached`] behind Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) enum Stored<B: Backend> {
    Float(FloatTensor<B>),
    Bytes { values: IntTensor<B>, scales: FloatTensor<B> },
}

impl Stored<Dispatch> {
    pub(crate) fn from_cached(cached: Cached) -> Self {
        match cached {
            Cached::Float(values) => Self::Float(values.into_dispatch()),
            Cached::Bytes { values, scales } => {
                Self::Bytes { values: values.into_dispatch(), scales: scales.into_dispatch() }
            }
        }
    }
}

impl Stored<CubeBackend> {
    /// Returns the values, and the scales of bytes.
    pub(crate) fn parts(self) -> (CubeTensor, Option<CubeTensor>) {
        match self {
            Self::Float(values) => (values, None),
            Self::Bytes { values, scales } => (values, Some(scales)),
        }
    }
}

impl<B: Backend, C: CheckpointStrategy> Stored<Autodiff<B, C>> {
    pub(crate) fn is_tracked(&self) -> bool {
        match self {
            Self::Float(values) => values.is_tracked(),
            Self::Bytes { scales, .. } => scales.is_tracked(),
        }
    }
}

/// Detaches a cache from autodiff.
pub(crate) fn inner<B: Backend, C: CheckpointStrategy>(
    stored: Stored<Autodiff<B, C>>,
) -> Stored<B> {
    match stored {
        Stored::Float(values) => Stored::Float(Autodiff::<B, C>::inner(values)),
        Stored::Bytes { values, scales } => Stored::Bytes {
            values: Autodiff::<B, C>::int_inner(values),
            scales: Autodiff::<B, C>::inner(scales),
        },
    }
}

/// `Option` of an integer tensor, which does not cross Burn's dispatch.
#[derive(Clone, ExtensionType)]
pub(crate) enum Blocks<B: Backend> {
    Absent,
    Present(IntTensor<B>),
}

impl<B: Backend> Blocks<B> {
    pub(crate) fn from_tensor(tensor: Option<IntTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }

    pub(crate) fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}

/// Request for validated tensors.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    /// Describes the tensors except for their strides.
    problem: DecodeProblem,
    implementation: Option<Implementation>,
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait DecodeOps: Backend {
    /// Returns the result, and the log-sum-exp if requested.
    fn step(
        q: FloatTensor<Self>,
        #[extension_type] k: Stored<Self>,
        #[extension_type] v: Stored<Self>,
        lengths: IntTensor<Self>,
        #[extension_type] table: Blocks<Self>,
        asked: Asked,
        call: Call,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);
}

impl DecodeOps for CubeBackend {
    fn step(
        q: CubeTensor,
        k: Stored<Self>,
        v: Stored<Self>,
        lengths: CubeTensor,
        table: Blocks<Self>,
        asked: Asked,
        call: Call,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let q = along_head_dim(q);
        let out = like(&q);
        let lse = asked.problem.lse.then(|| log_sums_like(&q));
        let [lengths, table] = [Some(lengths), table.into_option()].map(|t| t.map(into_contiguous));
        let lengths = lengths.expect("put there above");
        if let Err(e) = run(&q, k, v, lengths, table, &out, lse.as_ref(), asked, &call) {
            call.fail(e);
        }
        (out, lse)
    }
}

/// Enqueues the kernel.
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
fn run(
    q: &CubeTensor,
    k: Stored<CubeBackend>,
    v: Stored<CubeBackend>,
    lengths: CubeTensor,
    table: Option<CubeTensor>,
    out: &CubeTensor,
    lse: Option<&CubeTensor>,
    Asked { problem, implementation }: Asked,
    call: &Call,
) -> Result<(), OpError> {
    let ((k, k_scales), (v, v_scales)) = (k.parts(), v.parts());
    let axes = axes(problem.layout);
    // Burn pads the rows of scales. They are read in place if both have the same strides.
    let (scales, strides) = match k_scales.zip(v_scales) {
        None => (None, problem.scales),
        Some((k, v)) => match (scale_strides(&k, axes), scale_strides(&v, axes)) {
            (k_strides, v_strides) if k_strides == v_strides => (Some((k, v)), k_strides),
            _ => (Some((into_contiguous(k), into_contiguous(v))), problem.scales),
        },
    };
    let problem = DecodeProblem {
        q: head_strides(q),
        out: head_strides(out),
        k: cache_strides("k", &k, axes)?,
        v: cache_strides("v", &v, axes)?,
        scales: strides,
        ..problem
    }
    .checked()?;
    let device = call.ctx.device(&out.device)?;
    let config = match implementation {
        None => call.ctx.config::<Decode>(&device, &problem)?,
        Some(wanted) => {
            wanted.decode_config(device.profile(), &problem).map_err(|why| forced(wanted, &why))?
        }
    };
    let operands = DecodeOperands {
        q: q.handle.clone(),
        k: k.handle,
        v: v.handle,
        out: out.handle.clone(),
        lengths: lengths.handle,
        table: table.map(|t| t.handle),
        scales: scales.map(|(k, v)| Scales { k: k.handle, v: v.handle }),
        lse: lse.map(|lse| lse.handle.clone()),
    };
    let bytes = Decode::scratch_bytes(&problem, &config);
    // The scratch outlives the step, and graphs read it. In a pool it would reserve a whole page.
    let make = || {
        let of = |()| Decode::scratch(&device, &problem, &config);
        device.client().memory_persistent_allocation((), of)
    };
    let scratch = call.ctx.scratch(&out.device, bytes, make);
    call.ctx.launch::<Decode>(&device, &problem, &config, &operands, scratch.as_ref());
    Ok(())
}

/// Returns the axes of heads and of positions.
pub(crate) const fn axes(layout: CacheLayout) -> [usize; 2] {
    match layout {
        CacheLayout::Contiguous { .. } => [1, 2],
        CacheLayout::Paged { .. } => [2, 1],
    }
}

/// Returns the strides of scales with these axes of heads and positions.
pub(crate) fn scale_strides(tensor: &CubeTensor, [head, seq]: [usize; 2]) -> CacheStrides {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    // The stride of an axis of length 1 is arbitrary.
    let step = |axis: usize| if shape[axis] == 1 { 1 } else { strides[axis] as u64 };
    CacheStrides { page: step(0), head: step(head), seq: step(seq) }
}

/// Returns the strides of a cache with these axes of heads and positions; an error if it would have to be
/// copied.
pub(crate) fn cache_strides(
    what: &'static str,
    tensor: &CubeTensor,
    [head, seq]: [usize; 2],
) -> Result<CacheStrides, OpError> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let step = |axis: usize| strides[axis] as u64;
    let head_dim = shape[3] as u64;
    // The stride of an axis of length 1 is arbitrary.
    let contiguous = step(3) == 1 || shape[3] == 1;
    let apart = if shape[seq] == 1 { head_dim } else { step(seq) };
    if !contiguous || apart < head_dim {
        return Err(OpError::Apart(what));
    }
    Ok(CacheStrides { page: step(0), head: step(head), seq: apart })
}

impl<B: DecodeOps, C: CheckpointStrategy> DecodeOps for Autodiff<B, C> {
    fn step(
        q: FloatTensor<Self>,
        k: Stored<Self>,
        v: Stored<Self>,
        lengths: IntTensor<Self>,
        table: Blocks<Self>,
        asked: Asked,
        call: Call,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let gradient = q.is_tracked() || k.is_tracked() || v.is_tracked();
        let q = Self::inner(q);
        if gradient {
            call.fail(OpError::NoGradient);
            return (Self::from_inner(q), None);
        }
        let table = Blocks::from_tensor(table.into_option().map(Self::int_inner));
        let lengths = Self::int_inner(lengths);
        let (out, lse) = B::step(q, inner(k), inner(v), lengths, table, asked, call);
        (Self::from_inner(out), lse.map(Self::from_inner))
    }
}
