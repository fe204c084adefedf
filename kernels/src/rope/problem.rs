//! Shapes and layouts of a RoPE problem.

use arch::{ArchProfile, DType};
use serde::{Deserialize, Serialize};

use crate::attention::decode::{CacheLayout, CacheStrides};
use crate::launch::vector;
use crate::norm::NormKind;

/// Memory layout of the caches of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Stored type: the projection's type, or I8 with one f32 scale per position and head for k and for v.
    pub dtype: DType,
    pub layout: CacheLayout,
    pub k: CacheStrides,
    pub v: CacheStrides,
    /// Strides of the scales of k and of v, if the cache is I8.
    #[serde(default)]
    pub scales: CacheStrides,
}

impl KvLayout {
    /// Contiguous layout `[batch, kv_heads, capacity, head_dim]` for both caches.
    pub const fn dense(kv_heads: u32, capacity: u32, head_dim: u32, dtype: DType) -> Self {
        let strides = CacheStrides::contiguous(kv_heads, capacity, head_dim);
        let scales = CacheStrides::contiguous(kv_heads, capacity, 1);
        let layout = CacheLayout::Contiguous { capacity };
        Self { dtype, layout, k: strides, v: strides, scales }
    }

    /// Paged layout `[blocks, block_size, kv_heads, head_dim]` for both caches.
    pub const fn paged(
        kv_heads: u32,
        [blocks, block_size]: [u32; 2],
        max_blocks: u32,
        head_dim: u32,
        dtype: DType,
    ) -> Self {
        let strides = CacheStrides::paged(kv_heads, block_size, head_dim);
        let scales = CacheStrides::paged(kv_heads, block_size, 1);
        let layout = CacheLayout::Paged { block_size, blocks, max_blocks };
        Self { dtype, layout, k: strides, v: strides, scales }
    }

    /// Returns whether the cache is I8 with scales.
    pub const fn quantized(&self) -> bool {
        matches!(self.dtype, DType::I8)
    }
}

/// A norm of each head before rotation (QK norm).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HeadNorm {
    pub kind: NormKind,
    /// Constant added to the mean square.
    pub eps: f32,
}

/// Projected heads of the newest positions of every sequence. Build it with [`RopeProblem::new`], change
/// fields, end with [`RopeProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RopeProblem {
    pub batch: u32,
    /// New positions of each sequence.
    pub seq: u32,
    pub heads: u32,
    /// Number of key heads, equal to that of value heads.
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Type of the projection, the queries and the norm weights.
    pub dtype: DType,
    pub cache: KvLayout,
    /// Number of rotated dimensions, the first of each head; 0 for none.
    pub dim: u32,
    /// Positions of the table.
    pub positions: u32,
    /// Elements from one position of the table to the next.
    pub table_stride: u32,
    /// Norm of queries and keys.
    pub qk_norm: Option<HeadNorm>,
}

/// An invalid RoPE problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidRope {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty projection")]
    Empty { axis: &'static str },
    #[error(
        "expected a multiple of {kv_heads} KV heads, got {heads} query heads\nhint: use the same \
         number of query heads for every KV head"
    )]
    Heads { heads: u32, kv_heads: u32 },
    #[error(
        "expected an even number of rotary dimensions up to head_dim, got {dim} of \
         {head_dim}\nhint: pass the rotary dimension of the model's config"
    )]
    Dim { dim: u32, head_dim: u32 },
    #[error(
        "got {seq} new positions, but the {what} holds {have}\nhint: enlarge it, or pass fewer \
         tokens per call"
    )]
    Short { what: &'static str, seq: u32, have: u32 },
    #[error(
        "expected {operand} with a stride of at least the row width, got stride {stride} for a \
         width of {width} elements\nhint: pass rows that do not overlap; gaps are allowed"
    )]
    Stride { operand: &'static str, stride: u64, width: u32 },
    #[error(
        "expected fewer than 2^32 heads and cache positions per launch, got {0}\nhint: split the \
         batch, or shorten the cache"
    )]
    TooLarge(u64),
    #[error(
        "expected a finite eps of at least 0, got {0}\nhint: pass the eps of the model's config"
    )]
    Eps(f32),
    #[error("expected f32, f16 or bf16 heads for RoPE, got {0}\nhint: cast the projection")]
    DType(DType),
    #[error(
        "expected a page size that is a power of two, got {0} positions\nhint: allocate the cache \
         with pages of 16 positions, for example"
    )]
    BlockSize(u32),
    #[error(
        "expected a KV cache in the dtype of the queries or i8, got {cache} with {dtype} \
         queries\nhint: allocate the cache in {dtype} or i8"
    )]
    Cache { cache: DType, dtype: DType },
}

impl RopeProblem {
    /// Creates a problem that rotates whole heads without norms. All tensors are dense, and the table is as
    /// long as the cache.
    ///
    /// # Errors
    /// See [`InvalidRope`].
    pub fn new(
        [batch, seq]: [u32; 2],
        [heads, kv_heads]: [u32; 2],
        head_dim: u32,
        capacity: u32,
        dtype: DType,
    ) -> Result<Self, InvalidRope> {
        Self {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            dtype,
            cache: KvLayout::dense(kv_heads, capacity, head_dim, dtype),
            dim: head_dim,
            positions: capacity,
            table_stride: head_dim,
            qk_norm: None,
        }
        .checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidRope`].
    pub fn checked(self) -> Result<Self, InvalidRope> {
        let Self { batch, seq, heads, kv_heads, head_dim, dtype, cache, dim, positions, .. } = self;
        for (axis, size) in [
            ("batch", batch),
            ("seq", seq),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ] {
            if size == 0 {
                return Err(InvalidRope::Empty { axis });
            }
        }
        if heads % kv_heads != 0 {
            return Err(InvalidRope::Heads { heads, kv_heads });
        }
        if dim % 2 != 0 || dim > head_dim {
            return Err(InvalidRope::Dim { dim, head_dim });
        }
        if let CacheLayout::Paged { block_size, blocks, max_blocks } = cache.layout {
            if !block_size.is_power_of_two() {
                return Err(InvalidRope::BlockSize(block_size));
            }
            for (axis, size) in [("blocks", blocks), ("max_blocks", max_blocks)] {
                if size == 0 {
                    return Err(InvalidRope::Empty { axis });
                }
            }
        }
        let capacity = cache.layout.capacity();
        if u64::from(seq) > capacity {
            return Err(InvalidRope::Short { what: "cache", seq, have: capacity as u32 });
        }
        if dim > 0 && seq > positions {
            return Err(InvalidRope::Short { what: "table", seq, have: positions });
        }
        for (operand, stride, width) in [
            ("k", cache.k.seq, head_dim),
            ("v", cache.v.seq, head_dim),
            ("scales", cache.scales.seq, u32::from(cache.quantized())),
            ("table", u64::from(self.table_stride), dim),
        ] {
            if stride < u64::from(width) {
                return Err(InvalidRope::Stride { operand, stride, width });
            }
        }
        let all = u64::from(batch) * u64::from(seq);
        let all = all * (u64::from(heads) + 2 * u64::from(kv_heads));
        // The end of the newest positions must also fit in u32.
        let end = capacity.saturating_add(seq.into());
        if let Some(large) = [all, end].into_iter().find(|n| *n > u64::from(u32::MAX)) {
            return Err(InvalidRope::TooLarge(large));
        }
        if let Some(HeadNorm { eps, .. }) = self.qk_norm
            && (!eps.is_finite() || eps < 0.0)
        {
            return Err(InvalidRope::Eps(eps));
        }
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Err(InvalidRope::DType(dtype));
        }
        if cache.dtype != dtype && !cache.quantized() {
            return Err(InvalidRope::Cache { cache: cache.dtype, dtype });
        }
        Ok(self)
    }

    /// Rows of the projection.
    pub const fn tokens(&self) -> u32 {
        self.batch * self.seq
    }

    /// Heads in a row of the projection: queries, keys and values.
    pub const fn all_heads(&self) -> u32 {
        self.heads + 2 * self.kv_heads
    }

    /// Elements of five buffers: projection, queries, keys, values, and the scales of each cache (0 without
    /// scales).
    pub fn extents(&self) -> [usize; 5] {
        let (tokens, head_dim) = (self.tokens() as usize, self.head_dim as usize);
        let [pages, page] = match self.cache.layout {
            CacheLayout::Contiguous { capacity } => [self.batch, capacity],
            CacheLayout::Paged { block_size, blocks, .. } => [blocks, block_size],
        };
        let last = [pages, self.kv_heads, page].map(|size| u64::from(size - 1));
        let slots = |s: CacheStrides, width: usize| {
            let [page, head, seq] = last;
            (page * s.page + head * s.head + seq * s.seq) as usize + width
        };
        let KvLayout { k, v, scales, .. } = self.cache;
        [
            tokens * self.all_heads() as usize * head_dim,
            tokens * self.heads as usize * head_dim,
            slots(k, head_dim),
            slots(v, head_dim),
            if self.cache.quantized() { slots(scales, 1) } else { 0 },
        ]
    }

    /// Elements of the table's buffer: cosines, then sines for each position.
    pub const fn table_len(&self) -> usize {
        match self.positions {
            0 => 0,
            positions => (positions - 1) as usize * self.table_stride as usize + self.dim as usize,
        }
    }

    /// Words of the block table `[batch, max_blocks]`; 0 for a contiguous cache.
    pub const fn pages_len(&self) -> usize {
        match self.cache.layout {
            CacheLayout::Contiguous { .. } => 0,
            CacheLayout::Paged { max_blocks, .. } => self.batch as usize * max_blocks as usize,
        }
    }

    /// First position that the cache or the table does not have.
    pub(super) const fn limit(&self) -> u32 {
        let capacity = self.cache.layout.capacity() as u32;
        if self.dim > 0 && self.positions < capacity { self.positions } else { capacity }
    }

    /// Vector width in elements: the widest load that divides a head, the halves of the rotated dimensions
    /// and the strides.
    pub(super) fn vector(&self, arch: &ArchProfile) -> u32 {
        let KvLayout { k, v, .. } = self.cache;
        let table = if self.dim > 0 { self.table_stride } else { 0 };
        let sizes = [self.head_dim, self.dim / 2, table].map(u64::from);
        let whole = |width: u32| {
            let strides = [k.page, k.head, k.seq, v.page, v.head, v.seq];
            sizes.into_iter().chain(strides).all(|size| size % u64::from(width) == 0)
        };
        vector(arch, self.dtype, whole)
    }
}
