//! Decode problems: shapes, cache layout, masks and options.

use arch::DType;
use serde::{Deserialize, Serialize};
use tune::Cost;

use crate::attention::problem::HeadStrides;

/// Maximum queries per sequence; more count as a prompt, for the forward kernel.
pub const MAX_QUERIES: u32 = 16;

/// Minimum positions per page.
const MIN_BLOCK: u32 = 16;

/// Strides of one cache tensor in elements; the head dimension is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CacheStrides {
    /// Distance between pages; for a contiguous cache, between batches.
    pub page: u64,
    pub head: u64,
    pub seq: u64,
}

impl CacheStrides {
    /// Strides of a dense `[batch, kv_heads, capacity, width]`.
    pub const fn contiguous(kv_heads: u32, capacity: u32, width: u32) -> Self {
        let head = capacity as u64 * width as u64;
        Self { page: kv_heads as u64 * head, head, seq: width as u64 }
    }

    /// Strides of a dense `[blocks, block_size, kv_heads, width]`.
    pub const fn paged(kv_heads: u32, block_size: u32, width: u32) -> Self {
        let seq = kv_heads as u64 * width as u64;
        Self { page: block_size as u64 * seq, head: width as u64, seq }
    }
}

/// Layout of the positions of a sequence in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "layout", rename_all = "lowercase")]
pub enum CacheLayout {
    /// Contiguous: each sequence has `capacity` positions.
    Contiguous { capacity: u32 },
    /// Paged: the cache has `blocks` pages of `block_size` positions. A u32 table
    /// `[batch, max_blocks]` lists the pages of each sequence, in order.
    Paged { block_size: u32, blocks: u32, max_blocks: u32 },
}

impl CacheLayout {
    /// Maximum positions of a sequence.
    pub const fn capacity(self) -> u64 {
        match self {
            Self::Contiguous { capacity } => capacity as u64,
            Self::Paged { block_size, max_blocks, .. } => block_size as u64 * max_blocks as u64,
        }
    }

    /// Positions per page; 0 for a contiguous cache.
    pub(crate) const fn block_size(self) -> u32 {
        match self {
            Self::Contiguous { .. } => 0,
            Self::Paged { block_size, .. } => block_size,
        }
    }
}

/// One decode step: the newest positions of every sequence attend to all positions before them.
/// Build it with [`DecodeProblem::contiguous`] or [`DecodeProblem::paged`], change fields, then
/// call [`DecodeProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DecodeProblem {
    pub batch: u32,
    pub heads: u32,
    /// Number of cache heads; each serves `heads / kv_heads` neighbouring q heads.
    pub kv_heads: u32,
    /// New positions per sequence, 1 to 16.
    pub seq_q: u32,
    pub head_dim: u32,
    /// Element type of q and out.
    pub dtype: DType,
    /// Element type of the cache: `dtype`, or I8 with one f32 scale of k and one of v per position
    /// and head.
    pub cache: DType,
    pub layout: CacheLayout,
    /// Positions of the longest sequence, including the new ones.
    pub longest: u32,
    pub q: HeadStrides,
    pub out: HeadStrides,
    pub k: CacheStrides,
    pub v: CacheStrides,
    /// Strides of the scales of k and v, if the cache is I8.
    pub scales: CacheStrides,
    /// Factor on q·kᵀ.
    pub scale: f32,
    /// Soft cap: scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Sliding window: a query sees positions at a distance below this.
    pub window: Option<u32>,
    /// Stores the log-sum-exp of every query, f32 `[batch, heads, seq_q]`.
    pub lse: bool,
}

/// Reason why a decode problem is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidDecode {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty attention")]
    Empty { axis: &'static str },
    #[error(
        "expected at most 16 new positions per sequence, got {0}\nhint: call `attention` to \
         prefill a longer prompt"
    )]
    Queries(u32),
    #[error(
        "expected a multiple of {kv_heads} KV heads, got {heads} query heads\nhint: use the same \
         number of query heads for every KV head"
    )]
    Heads { heads: u32, kv_heads: u32 },
    #[error(
        "expected {operand} with a stride of at least the row width, got stride {stride} for a \
         width of {width} elements\nhint: pass rows that do not overlap; gaps are allowed"
    )]
    Stride { operand: &'static str, stride: u64, width: u32 },
    #[error(
        "expected a page size that is a power of two of at least 16 positions, got {0}\nhint: \
         allocate the cache with larger pages, for example of 16 positions"
    )]
    BlockSize(u32),
    #[error(
        "`longest` is {longest} positions, but the cache holds {capacity} per sequence\nhint: \
         enlarge the cache, or lower `longest`"
    )]
    Capacity { longest: u32, capacity: u64 },
    #[error("expected a finite softcap above 0, got {0}\nhint: omit `softcap` to disable it")]
    Softcap(f32),
    #[error("expected a finite scale above 0, got {0}\nhint: fold the sign into q")]
    Scale(f32),
    #[error("expected f32, f16 or bf16 attention operands, got {0}\nhint: cast q, k and v")]
    DType(DType),
    #[error(
        "expected a KV cache in the dtype of the queries or i8, got {cache} with {dtype} \
         queries\nhint: allocate the cache in {dtype} or i8"
    )]
    Cache { cache: DType, dtype: DType },
    #[error(
        "got {have} {what}, expected {need}\nhint: pass one length per sequence, and `max_blocks` \
         table entries per sequence for a paged cache only"
    )]
    Count { what: &'static str, have: usize, need: usize },
    #[error(
        "sequence {sequence} has {length} positions, expected at most `longest`, which is \
         {longest}\nhint: raise `longest` to the largest length"
    )]
    Length { sequence: usize, length: u32, longest: u32 },
    #[error(
        "block table of sequence {sequence} has block {block} at index {index}, but the cache has \
         {blocks} blocks\nhint: number blocks from 0"
    )]
    Block { sequence: usize, index: usize, block: u32, blocks: u32 },
}

impl DecodeProblem {
    /// Problem on a full, dense cache `[batch, kv_heads, capacity, head_dim]`, with dense q and
    /// scale 1/√head_dim.
    ///
    /// # Errors
    /// See [`InvalidDecode`].
    pub fn contiguous(
        batch: u32,
        [heads, kv_heads]: [u32; 2],
        seq_q: u32,
        capacity: u32,
        head_dim: u32,
        dtype: DType,
    ) -> Result<Self, InvalidDecode> {
        let cache = CacheStrides::contiguous(kv_heads, capacity, head_dim);
        let queries = HeadStrides::dense(heads, seq_q, head_dim);
        Self {
            batch,
            heads,
            kv_heads,
            seq_q,
            head_dim,
            dtype,
            cache: dtype,
            layout: CacheLayout::Contiguous { capacity },
            longest: capacity,
            q: queries,
            out: queries,
            k: cache,
            v: cache,
            scales: CacheStrides::contiguous(kv_heads, capacity, 1),
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: None,
            window: None,
            lse: false,
        }
        .checked()
    }

    /// Like [`DecodeProblem::contiguous`], with a cache of dense pages
    /// `[blocks, block_size, kv_heads, head_dim]`. It has the pages that `batch` sequences of
    /// `capacity` positions fill.
    ///
    /// # Errors
    /// See [`InvalidDecode`].
    pub fn paged(
        batch: u32,
        [heads, kv_heads]: [u32; 2],
        seq_q: u32,
        capacity: u32,
        head_dim: u32,
        block_size: u32,
        dtype: DType,
    ) -> Result<Self, InvalidDecode> {
        let dense = Self::contiguous(batch, [heads, kv_heads], seq_q, capacity, head_dim, dtype)?;
        let max_blocks = capacity.div_ceil(block_size.max(1));
        let cache = CacheStrides::paged(kv_heads, block_size, head_dim);
        let blocks = batch.saturating_mul(max_blocks);
        Self {
            layout: CacheLayout::Paged { block_size, blocks, max_blocks },
            k: cache,
            v: cache,
            scales: CacheStrides::paged(kv_heads, block_size, 1),
            ..dense
        }
        .checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidDecode`].
    pub fn checked(self) -> Result<Self, InvalidDecode> {
        let Self { heads, kv_heads, head_dim, dtype, cache, longest, .. } = self;
        let mut sizes = vec![
            ("batch", self.batch),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("seq_q", self.seq_q),
            ("head_dim", head_dim),
            ("longest", longest),
            ("window", self.window.unwrap_or(1)),
        ];
        if let CacheLayout::Paged { block_size, blocks, max_blocks } = self.layout {
            if !block_size.is_power_of_two() || block_size < MIN_BLOCK {
                return Err(InvalidDecode::BlockSize(block_size));
            }
            sizes.extend([("blocks", blocks), ("max_blocks", max_blocks)]);
        }
        if let Some((axis, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(InvalidDecode::Empty { axis });
        }
        if self.seq_q > MAX_QUERIES {
            return Err(InvalidDecode::Queries(self.seq_q));
        }
        if heads % kv_heads != 0 {
            return Err(InvalidDecode::Heads { heads, kv_heads });
        }
        let capacity = self.layout.capacity();
        if u64::from(longest) > capacity {
            return Err(InvalidDecode::Capacity { longest, capacity });
        }
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Err(InvalidDecode::DType(dtype));
        }
        if cache != dtype && cache != DType::I8 {
            return Err(InvalidDecode::Cache { cache, dtype });
        }
        for (operand, stride, width) in [
            ("q", self.q.seq, head_dim),
            ("out", self.out.seq, head_dim),
            ("k", self.k.seq, head_dim),
            ("v", self.v.seq, head_dim),
            ("scales", self.scales.seq, 1),
        ] {
            if stride < u64::from(width) {
                return Err(InvalidDecode::Stride { operand, stride, width });
            }
        }
        let positive = |x: f32| x.is_finite() && x > 0.0;
        if let Some(cap) = self.softcap.filter(|cap| !positive(*cap)) {
            return Err(InvalidDecode::Softcap(cap));
        }
        if !positive(self.scale) {
            return Err(InvalidDecode::Scale(self.scale));
        }
        Ok(self)
    }

    /// Checks lengths that the host knows against the problem. The device clamps a longer sequence
    /// to the capacity of the cache.
    ///
    /// # Errors
    /// The number of lengths is not `batch`, or a sequence is longer than `longest`.
    pub fn check_lengths(&self, lengths: &[u32]) -> Result<(), InvalidDecode> {
        let (have, need) = (lengths.len(), self.batch as usize);
        if have != need {
            return Err(InvalidDecode::Count { what: "lengths", have, need });
        }
        let long = lengths.iter().enumerate().find(|(_, length)| **length > self.longest);
        long.map_or(Ok(()), |(sequence, &length)| {
            Err(InvalidDecode::Length { sequence, length, longest: self.longest })
        })
    }

    /// Checks that a block table that the host knows lists existing blocks, as far as `lengths`
    /// reach. The device reads the last block instead of a missing one, never past the cache.
    ///
    /// # Errors
    /// The errors of [`DecodeProblem::check_lengths`]; a wrong number of entries; a block past the last.
    pub fn check_table(&self, lengths: &[u32], table: &[u32]) -> Result<(), InvalidDecode> {
        self.check_lengths(lengths)?;
        let CacheLayout::Paged { block_size, blocks, max_blocks } = self.layout else {
            let have = table.len();
            return Err(InvalidDecode::Count { what: "table entries", have, need: 0 });
        };
        let (have, need) = (table.len(), self.batch as usize * max_blocks as usize);
        if have != need {
            return Err(InvalidDecode::Count { what: "table entries", have, need });
        }
        let rows = table.chunks(max_blocks as usize).zip(lengths).enumerate();
        for (sequence, (row, length)) in rows {
            let used = &row[..length.div_ceil(block_size) as usize];
            if let Some(index) = used.iter().position(|block| *block >= blocks) {
                let block = used[index];
                return Err(InvalidDecode::Block { sequence, index, block, blocks });
            }
        }
        Ok(())
    }

    /// Returns true if the cache is I8 with scales.
    pub const fn quantized(&self) -> bool {
        matches!(self.cache, DType::I8)
    }

    /// Number of q heads that share a cache head.
    pub const fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Number of queries that share a cache head.
    pub(crate) const fn shared_rows(&self) -> u32 {
        self.group() * self.seq_q
    }

    /// Number of pages of the cache; the batch size for a contiguous cache.
    pub(crate) const fn pages(&self) -> u32 {
        match self.layout {
            CacheLayout::Contiguous { .. } => self.batch,
            CacheLayout::Paged { blocks, .. } => blocks,
        }
    }

    /// Minimum number of elements in the buffers of q, k, v, out and of each scale.
    pub fn extents(&self) -> [usize; 5] {
        let Self { batch, heads, kv_heads, seq_q, head_dim, .. } = *self;
        let last = |steps: [(u32, u64); 3], width: u32| {
            let start: u64 = steps.iter().map(|(size, step)| u64::from(size - 1) * step).sum();
            (start + u64::from(width)) as usize
        };
        let queries =
            |s: HeadStrides| last([(batch, s.batch), (heads, s.head), (seq_q, s.seq)], head_dim);
        let positions = match self.layout {
            CacheLayout::Contiguous { capacity } => capacity,
            CacheLayout::Paged { block_size, .. } => block_size,
        };
        let cached = |s: CacheStrides, width| {
            last([(self.pages(), s.page), (kv_heads, s.head), (positions, s.seq)], width)
        };
        [
            queries(self.q),
            cached(self.k, head_dim),
            cached(self.v, head_dim),
            queries(self.out),
            if self.quantized() { cached(self.scales, 1) } else { 0 },
        ]
    }

    /// Number of u32 entries of the block table.
    pub fn table_len(&self) -> usize {
        match self.layout {
            CacheLayout::Contiguous { .. } => 0,
            CacheLayout::Paged { max_blocks, .. } => self.batch as usize * max_blocks as usize,
        }
    }

    /// Number of output rows: queries of all heads and batches.
    pub fn rows(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.heads) * u64::from(self.seq_q)
    }

    /// Number of positions of the longest sequence that some query sees.
    pub fn visible(&self) -> u32 {
        match self.window {
            Some(window) => self.longest.min(window.saturating_add(self.seq_q - 1)),
            None => self.longest,
        }
    }

    /// Minimum work if every sequence has the longest length: reads the visible part of the cache
    /// once.
    pub fn cost(&self) -> Cost {
        let head_dim = u64::from(self.head_dim);
        let seen = |i: u32| {
            // seq_q - 1 - i queries come after query i.
            let end = self.longest.saturating_sub(self.seq_q - 1 - i);
            u64::from(end.min(self.window.unwrap_or(u32::MAX)))
        };
        let pairs: u64 = (0..self.seq_q).map(seen).sum();
        let heads = u64::from(self.batch) * u64::from(self.heads);
        let scale = if self.quantized() { 4 } else { 0 };
        let position = 2 * (head_dim * self.cache.size() as u64 + scale);
        let shared = u64::from(self.batch) * u64::from(self.kv_heads);
        Cost {
            flops: 4 * heads * pairs * head_dim,
            bytes: shared * u64::from(self.visible()) * position
                + 2 * self.rows() * head_dim * self.dtype.size() as u64,
        }
    }

    /// Widest vector in elements, at most `limit`, that divides all strides of q, k and v and the
    /// head dimension.
    pub(crate) fn width(&self, limit: u64) -> usize {
        let facts = self.cache_steps().into_iter().chain([
            self.q.batch,
            self.q.head,
            self.q.seq,
            u64::from(self.head_dim),
        ]);
        let facts: Vec<_> = facts.collect();
        let mut width = limit;
        while facts.iter().any(|f| f % width != 0) {
            width /= 2;
        }
        width as usize
    }

    /// All strides of k and v.
    pub(crate) fn cache_steps(&self) -> [u64; 6] {
        let (k, v) = (self.k, self.v);
        [k.page, k.head, k.seq, v.page, v.head, v.seq]
    }

    /// Cache key of the tuner. It holds everything that changes the kernel; sizes are rounded so
    /// that similar problems share a config.
    pub(crate) fn bucket(&self) -> String {
        let pages = match self.layout.block_size() {
            0 => "whole".to_owned(),
            // Every tile fits into pages of 64 or more.
            size => format!("pages{}", size.min(64)),
        };
        let mut key = format!(
            "{} {} d{} {pages} w{} r{} kv{} b{}",
            self.dtype,
            self.cache,
            self.head_dim,
            self.width(16),
            self.shared_rows().next_power_of_two(),
            self.visible().next_power_of_two(),
            (u64::from(self.batch) * u64::from(self.kv_heads)).next_power_of_two(),
        );
        self.rules().into_iter().for_each(|rule| key += &format!(" {rule}"));
        key
    }

    /// Names of the score rules and other options that change the kernel.
    pub fn rules(&self) -> Vec<&'static str> {
        [(self.window.is_some(), "window"), (self.softcap.is_some(), "softcap"), (self.lse, "lse")]
            .into_iter()
            .filter_map(|(on, name)| on.then_some(name))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paged() -> DecodeProblem {
        DecodeProblem::paged(2, [8, 2], 2, 100, 64, 16, DType::F16).expect("valid")
    }

    #[test]
    fn the_cache_is_what_costs() {
        let p = DecodeProblem::contiguous(1, [32, 8], 1, 8192, 128, DType::Bf16).expect("valid");
        assert_eq!(p.cost().bytes, 8 * 8192 * 2 * 256 + 2 * 32 * 256);
        assert_eq!(p.cost().flops, 4 * 32 * 8192 * 128);
        let bytes = DecodeProblem { cache: DType::I8, ..p };
        assert_eq!(bytes.cost().bytes, 8 * 8192 * 2 * (128 + 4) + 2 * 32 * 256);
        let window = DecodeProblem { window: Some(100), seq_q: 3, ..p };
        assert_eq!(window.visible(), 102);
        assert_eq!(window.cost().flops, 4 * 32 * 300 * 128);
    }

    #[test]
    fn pages_hold_what_sequences_do() {
        let p = paged();
        assert_eq!(p.layout, CacheLayout::Paged { block_size: 16, blocks: 14, max_blocks: 7 });
        assert_eq!(p.extents()[1], 14 * 16 * 2 * 64);
        assert_eq!(p.table_len(), 14);
    }

    /// Returns the text of an error and checks that it ends with a hint.
    fn hinted(error: &InvalidDecode) -> String {
        let text = error.to_string();
        assert!(text.lines().last().is_some_and(|line| line.starts_with("hint: ")), "{text}");
        text
    }

    #[test]
    fn mistakes_are_named() {
        let p = paged();
        let bad = |p: DecodeProblem| hinted(&p.checked().expect_err("a mistake"));
        assert!(bad(DecodeProblem { seq_q: 17, ..p }).contains("got 17\n"));
        assert!(bad(DecodeProblem { kv_heads: 3, ..p }).contains("8 query heads"));
        assert!(bad(DecodeProblem { longest: 113, ..p }).contains("holds 112"));
        assert!(bad(DecodeProblem { cache: DType::Bf16, ..p }).contains("f16 or i8"));
        assert!(bad(DecodeProblem { dtype: DType::I8, ..p }).contains("got i8\n"));
        for wrong in [f32::NAN, f32::INFINITY, 0.0] {
            assert!(
                bad(DecodeProblem { scale: wrong, ..p }).contains(&format!("above 0, got {wrong}"))
            );
            assert!(
                bad(DecodeProblem { softcap: Some(wrong), ..p })
                    .contains("finite softcap above 0, got ")
            );
        }
        let mut short = p;
        short.k.seq = 1;
        assert!(bad(short).contains("k with a stride"));
        for block_size in [0, 8, 24] {
            let layout = CacheLayout::Paged { block_size, blocks: 9, max_blocks: 9 };
            assert!(bad(DecodeProblem { layout, ..p }).contains("power of two"));
        }
    }

    #[test]
    fn lengths_and_tables_of_the_host_are_checked() {
        let p = paged();
        let mut table: Vec<u32> = (0..14).collect();
        assert_eq!(p.check_table(&[100, 17], &table), Ok(()));
        // Block 9 lies past the end of the second sequence.
        table[9] = 14;
        assert_eq!(p.check_table(&[100, 17], &table), Ok(()));
        let block = InvalidDecode::Block { sequence: 1, index: 2, block: 14, blocks: 14 };
        assert_eq!(p.check_table(&[100, 33], &table), Err(block));
        let length = InvalidDecode::Length { sequence: 0, length: 101, longest: 100 };
        assert_eq!(p.check_table(&[101, 33], &table), Err(length));
        hinted(&p.check_lengths(&[1]).expect_err("one of two"));
        hinted(&p.check_lengths(&[101, 1]).expect_err("too long"));
        hinted(&p.check_table(&[100, 33], &table).expect_err("no such block"));
        hinted(&p.check_table(&[1, 1], &table[1..]).expect_err("an entry is missing"));
    }
}
