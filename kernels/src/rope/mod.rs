//! Rotates queries and keys by their position (RoPE), and writes keys and values to the cache.
//!
//! ```text
//!   qkv: [batch · seq, (heads + 2 · kv_heads) · head_dim]
//!   for each token (b, s) and each of its heads         // one group of units
//!     x = norm(x) · w                                   // queries and keys only, if the model has QK norms
//!     position = start[b] + s
//!     for each pair of the first dim dimensions, (x, y) = (x[i], x[i + dim / 2]):
//!       (x, y) = (x · cos - y · sin, y · cos + x · sin)         // cos, sin: table[position], f32
//!     q[b, s, head] = round(x);  k[b, head, position] = round(x);  v[b, head, position] = x
//!     // cache in i8: scale[b, head, position] = max |x| / 127, and bytes round(x / scale)
//!     // paged cache: page pages[b][position / block_size], row position % block_size of it
//! ```
//!
//! The table is `[positions, dim]`: `dim / 2` cosines, then `dim / 2` sines, already multiplied by the
//! magnitude factor of RoPE scaling. `start` is the number of positions that each sequence already has. Only
//! the device needs to know it, so that a decode step can be captured once and replayed. A position past the
//! cache or the table, or in a page that the cache does not have, is not stored: its keys and values are
//! dropped. Its queries are NaN, so that the error is visible.
//!
//! Arithmetic is f32 and rounded once, also to i8. A head of zeros, or of numbers below 4e-37, has scale 0. A
//! head with NaN or infinity gets a scale that is NaN or infinite, so that it decodes to no number.
//! Transformers rounds after the norm, both products and their sum: its bf16 results are further from the
//! exact ones.
//!
//! Cost: one read and one write of the projection, and `4 · dim` bytes of the table per token, which its
//! heads share in the first-level cache. If a unit has several vectors of a cache in i8, it computes them
//! twice, first to find the largest magnitude. One launch replaces six: norms, rotations and two copies.
//!
//! Source: Su et al., "RoFormer" (2021); the two halves of a head form pairs, not neighbours, as in GPT-NeoX.

mod head;
pub mod in_place;
mod problem;
mod rotate;

use arch::{ArchProfile, DType};
use cubecl::ir::{ElemType, IntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use problem::{HeadNorm, InvalidRope, KvLayout, RopeProblem};

use self::head::{DimsLaunch, StepsLaunch};
use self::rotate::rotate_heads;
use crate::attention::decode::{CacheLayout, CacheStrides, Scales};
use crate::elem::{elem, rounding};
use crate::fits::stores;
use crate::launch::{index_width, launch};
use crate::norm::NormKind;
use crate::round::by_hand;
use crate::rows::RowPlan;

/// The kernel between the QKV projection and attention.
pub struct Rope;

/// Launch shape of a RoPE kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share a head.
    pub lanes: u32,
}

/// Device buffers of one launch.
#[derive(Debug, Clone)]
pub struct RopeOperands {
    pub qkv: Handle,
    /// u32 `[batch]`: positions that each sequence already has.
    pub start: Handle,
    /// u32 `[batch, max_blocks]`: the pages of each sequence in order, for a paged cache.
    pub pages: Option<Handle>,
    /// f32 `[positions, dim]` with the row stride of the problem; exists if any dimension is rotated.
    pub table: Option<Handle>,
    /// QK norm weights `[head_dim]`, if the problem has norms.
    pub weights: Option<HeadWeights>,
    pub q: Handle,
    /// KV caches; the kernel writes only the new positions.
    pub k: Handle,
    pub v: Handle,
    /// f32 scales, for caches in i8.
    pub scales: Option<Scales>,
}

/// Weights `[head_dim]` of the norms of queries and keys.
#[derive(Debug, Clone)]
pub struct HeadWeights {
    pub q: Handle,
    pub k: Handle,
}

impl Kernel for Rope {
    type Problem = RopeProblem;
    type Config = RopeConfig;
    type Operands = RopeOperands;

    const NAME: &'static str = "rope";
    const VERSION: u32 = 1;

    fn bucket(p: &RopeProblem) -> String {
        let RopeProblem { dtype, heads, kv_heads, head_dim, dim, .. } = p;
        let norm = p.qk_norm.map_or(String::new(), |norm| format!(" {}", norm.kind.name()));
        let tokens = p.tokens().next_power_of_two().min(4096);
        let bytes = if p.cache.quantized() { " i8" } else { "" };
        format!("{dtype}{bytes} {heads}/{kv_heads} d{head_dim} rope{dim}{norm} tokens {tokens}")
    }

    fn candidates(arch: &ArchProfile, p: &RopeProblem) -> Vec<RopeConfig> {
        let mut configs = Vec::new();
        if arch.cores().is_some() {
            configs.extend(Self::baseline(arch, p));
            return configs;
        }
        // One pair of vectors, or one vector that is not rotated, per unit.
        let max = plan(arch, p, &RopeConfig { units: 32, lanes: 1 }).items();
        let max = max.next_power_of_two().min(32);
        for (units, lanes) in [(128, max), (64, max), (256, max)] {
            let config = RopeConfig { units, lanes };
            if !configs.contains(&config) && Self::check(arch, p, &config).is_ok() {
                configs.push(config);
            }
        }
        configs
    }

    fn check(arch: &ArchProfile, p: &RopeProblem, c: &RopeConfig) -> Result<(), Infeasible> {
        stores(arch, [p.dtype, p.cache.dtype])?;
        RowPlan::new(arch, c.units, c.lanes).check(arch)
    }

    fn cost(p: &RopeProblem) -> Cost {
        let tokens = u64::from(p.tokens());
        let [all, ..] = p.extents();
        let rotated = tokens * u64::from(p.heads + p.kv_heads) * u64::from(p.dim);
        let cells = 2 * tokens * u64::from(p.kv_heads) * u64::from(p.head_dim);
        let scales = if p.cache.quantized() { 8 * tokens * u64::from(p.kv_heads) } else { 0 };
        let size = p.dtype.size() as u64;
        let written = (all as u64 - cells) * size + cells * p.cache.dtype.size() as u64 + scales;
        let bytes = all as u64 * size + written + 4 * tokens * u64::from(p.dim);
        Cost { flops: 3 * rotated, bytes }
    }

    fn baseline(arch: &ArchProfile, p: &RopeProblem) -> Result<RopeConfig, Infeasible> {
        let units = arch.cores().unwrap_or(64);
        let config = RopeConfig { units, lanes: 1 };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &RopeProblem, seed: u64) -> RopeOperands {
        let [all, queries, k, v, scales] = p.extents();
        let noise = |len, dtype, salt| crate::noise(queue, len, dtype, 8 * seed + salt);
        // The first sequence is empty; the others have arbitrary lengths.
        let free = p.limit() - p.seq + 1;
        let start: Vec<u32> = (0..p.batch).map(|b| b.wrapping_mul(977) % free).collect();
        let head = p.head_dim as usize;
        RopeOperands {
            qkv: noise(all, p.dtype, 0),
            start: queue.upload(u32::as_bytes(&start)),
            pages: own_pages(p).map(|pages| queue.upload(u32::as_bytes(&pages))),
            table: (p.dim > 0).then(|| noise(p.table_len(), DType::F32, 1)),
            weights: p
                .qk_norm
                .map(|_| HeadWeights { q: noise(head, p.dtype, 2), k: noise(head, p.dtype, 3) }),
            q: queue.empty((queries * p.dtype.size()).next_multiple_of(4)),
            k: noise(k, p.cache.dtype, 4),
            v: noise(v, p.cache.dtype, 5),
            scales: p.cache.quantized().then(|| Scales {
                k: noise(scales, DType::F32, 6),
                v: noise(scales, DType::F32, 7),
            }),
        }
    }

    /// The queries, and the part of the caches that [`Rope::operands`] is known to fill: the first head of
    /// the first sequence.
    fn outputs(p: &RopeProblem, operands: &RopeOperands) -> Vec<Output> {
        // Configs sum in different orders, then round to the dtype.
        let tolerance = rounding(p.dtype).max(1e-5);
        // If positions are strided, the gaps between them are not written.
        let slots = |strides: CacheStrides| match strides.seq == u64::from(p.head_dim) {
            true => (p.seq * p.head_dim) as usize,
            false => p.head_dim as usize,
        };
        let [k, v] = [p.cache.k, p.cache.v].map(slots);
        // Values may round to the neighbouring i8.
        let cells = if p.cache.quantized() { 1.5 / 127.0 } else { tolerance };
        let output = |handle: &Handle, dtype, len, tolerance| Output {
            handle: handle.clone(),
            dtype,
            len,
            tolerance,
        };
        let mut outputs = vec![
            output(&operands.q, p.dtype, p.extents()[1], tolerance),
            output(&operands.k, p.cache.dtype, k, cells),
            output(&operands.v, p.cache.dtype, v, cells),
        ];
        if let Some(scales) = &operands.scales {
            // If scales are strided, only the first is known to be written.
            let len = if p.cache.scales.seq == 1 { p.seq as usize } else { 1 };
            outputs.extend([&scales.k, &scales.v].map(|s| output(s, DType::F32, len, tolerance)));
        }
        outputs
    }

    fn launch(
        queue: &Queue,
        p: &RopeProblem,
        c: &RopeConfig,
        operands: &RopeOperands,
        _scratch: Option<&Handle>,
    ) {
        let plan = plan(queue.profile(), p, c);
        let groups = p.tokens() * p.all_heads();
        let cubes = crate::cubes(queue.profile(), groups.into(), plan.rows.rows());
        let vector = p.vector(queue.profile()) as usize;
        let [.., scales_len] = p.extents();
        let [all, queries, k, v, _] = p.extents().map(|len| len / vector);
        // Absent operands are bound to another buffer, which the kernel does not read.
        let (table, table_len) = match &operands.table {
            Some(table) => (table, p.table_len() / vector),
            None => (&operands.qkv, 1),
        };
        let (pages, blocks, max_blocks) = match (&operands.pages, p.cache.layout) {
            (Some(pages), CacheLayout::Paged { blocks, max_blocks, .. }) => {
                (pages, blocks, max_blocks)
            }
            _ => (&operands.start, 1, 1),
        };
        let weights = operands.weights.as_ref();
        let [q_weight, k_weight] = match weights {
            Some(HeadWeights { q, k }) => [q, k],
            None => [&operands.qkv; 2],
        };
        let (scales, scales_len) = match &operands.scales {
            Some(Scales { k, v }) => ([k, v], scales_len),
            None => ([&operands.q; 2], 1),
        };
        let head = p.head_dim as usize / vector;
        let steps = |strides: CacheStrides, vector: usize| {
            let CacheStrides { page, head, seq } = strides;
            StepsLaunch::new(page as usize / vector, head as usize / vector, seq as usize / vector)
        };
        // SAFETY: the lengths follow from the problem. The kernel reads whole heads of `groups`, and bounds a
        // position by the cache and the table before it accesses them.
        unsafe {
            launch!(
                queue,
                rotate_heads,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                address(p),
                vector,
                BufferArg::from_raw_parts(operands.qkv.clone(), all),
                BufferArg::from_raw_parts(operands.start.clone(), p.batch as usize),
                BufferArg::from_raw_parts(pages.clone(), p.pages_len().max(1)),
                BufferArg::from_raw_parts(table.clone(), table_len),
                BufferArg::from_raw_parts(q_weight.clone(), head),
                BufferArg::from_raw_parts(k_weight.clone(), head),
                BufferArg::from_raw_parts(operands.q.clone(), queries),
                BufferArg::from_raw_parts(operands.k.clone(), k),
                BufferArg::from_raw_parts(operands.v.clone(), v),
                BufferArg::from_raw_parts(scales[0].clone(), scales_len),
                BufferArg::from_raw_parts(scales[1].clone(), scales_len),
                DimsLaunch::new(
                    groups,
                    p.seq,
                    p.heads,
                    p.kv_heads,
                    p.limit(),
                    blocks,
                    max_blocks,
                    (p.table_stride as usize / vector) as u32,
                    steps(p.cache.k, vector),
                    steps(p.cache.v, vector),
                    steps(p.cache.scales, 1),
                    p.qk_norm.map_or(0.0, |norm| norm.eps),
                ),
                plan,
                types(p),
            );
        }
    }
}

/// Returns a block table in which no two sequences share pages, if the cache has enough. The first sequence
/// starts with page 0.
fn own_pages(p: &RopeProblem) -> Option<Vec<u32>> {
    match p.cache.layout {
        CacheLayout::Contiguous { .. } => None,
        CacheLayout::Paged { blocks, max_blocks, .. } => {
            Some((0..p.batch * max_blocks).map(|at| at % blocks).collect())
        }
    }
}

/// Element types of the projection and of the cache.
fn types(p: &RopeProblem) -> [ElemType; 2] {
    let cache = if p.cache.quantized() { ElemType::Int(IntKind::I8) } else { elem(p.dtype) };
    [elem(p.dtype), cache]
}

fn address(p: &RopeProblem) -> AddressType {
    let longest = p.extents().into_iter().chain([p.table_len()]).max().unwrap_or(0);
    index_width(longest as u64)
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RopePlan {
    rows: RowPlan,
    /// Vectors of a head.
    head: u32,
    /// Vectors of the first half of the rotated dimensions; each forms a pair with one of the second half.
    half: u32,
    norm: Option<NormKind>,
    /// Positions of a page; 0 for a contiguous cache.
    block_size: u32,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
    /// True if the cache is i8 with scales.
    bytes: bool,
}

impl RopePlan {
    /// Pairs of vectors that are rotated, plus vectors that are not.
    const fn items(self) -> u32 {
        self.head - self.half
    }
}

fn plan(arch: &ArchProfile, p: &RopeProblem, c: &RopeConfig) -> RopePlan {
    let vector = p.vector(arch);
    RopePlan {
        rows: RowPlan::new(arch, c.units, c.lanes),
        head: p.head_dim / vector,
        half: p.dim / 2 / vector,
        norm: p.qk_norm.map(|norm| norm.kind),
        block_size: p.cache.layout.block_size(),
        rounds: by_hand(arch, p.dtype),
        bytes: p.cache.quantized(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_candidates_that_fit() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                for (head_dim, dim) in [(1, 0), (6, 4), (64, 64), (80, 32), (128, 128), (256, 64)] {
                    let whole = RopeProblem::new([3, 5], [8, 2], head_dim, 64, dtype);
                    let qk_norm = Some(HeadNorm { kind: NormKind::Rms, eps: 1e-6 });
                    let p = RopeProblem { dim, qk_norm, ..whole.unwrap_or(odd(dtype)) };
                    let bytes = KvLayout { dtype: DType::I8, ..p.cache };
                    for cache in [p.cache, bytes] {
                        let p = RopeProblem { cache, ..p }.checked().expect("valid");
                        let all = Rope::candidates(&arch, &p);
                        if !arch.dtypes.contains(&cache.dtype) {
                            assert!(all.is_empty() && Rope::baseline(&arch, &p).is_err());
                            continue;
                        }
                        assert!(!all.is_empty(), "{name} {p:?}");
                        let baseline = Rope::baseline(&arch, &p).expect("there is one");
                        for config in all.into_iter().chain([baseline]) {
                            Rope::check(&arch, &p, &config).expect("it is feasible");
                        }
                    }
                }
            }
        }
    }

    /// Problem with head_dim 1, which cannot be rotated.
    fn odd(dtype: DType) -> RopeProblem {
        let even = RopeProblem::new([3, 5], [8, 2], 2, 64, dtype).expect("valid");
        let cache = KvLayout::dense(2, 64, 1, dtype);
        RopeProblem { head_dim: 1, dim: 0, cache, ..even }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        let new =
            |tokens, heads, capacity| RopeProblem::new(tokens, heads, 8, capacity, DType::F16);
        let good = new([2, 3], [4, 2], 9).expect("valid");
        assert_eq!(new([0, 3], [4, 2], 9), Err(InvalidRope::Empty { axis: "batch" }));
        assert_eq!(new([2, 3], [4, 3], 9), Err(InvalidRope::Heads { heads: 4, kv_heads: 3 }));
        let short = InvalidRope::Short { what: "cache", seq: 3, have: 2 };
        assert_eq!(new([2, 3], [4, 2], 2), Err(short));
        let refused = |p: RopeProblem| p.checked().expect_err("refused");
        let table = refused(RopeProblem { positions: 2, ..good });
        assert_eq!(table, InvalidRope::Short { what: "table", seq: 3, have: 2 });
        assert!(RopeProblem { positions: 0, dim: 0, ..good }.checked().is_ok(), "nothing turns");
        for dim in [3, 10] {
            let dim = refused(RopeProblem { dim, ..good });
            assert!(matches!(dim, InvalidRope::Dim { head_dim: 8, .. }));
        }
        let cache = KvLayout { dtype: DType::F32, ..good.cache };
        let other = InvalidRope::Cache { cache: DType::F32, dtype: DType::F16 };
        assert_eq!(refused(RopeProblem { cache, ..good }), other);
        let bytes = KvLayout { dtype: DType::I8, ..good.cache };
        assert!(RopeProblem { cache: bytes, ..good }.checked().is_ok());
        let scales = CacheStrides::default();
        let over = refused(RopeProblem { cache: KvLayout { scales, ..bytes }, ..good });
        assert_eq!(over, InvalidRope::Stride { operand: "scales", stride: 0, width: 1 });
        let over = CacheStrides { seq: 7, ..good.cache.v };
        let over = refused(RopeProblem { cache: KvLayout { v: over, ..good.cache }, ..good });
        assert_eq!(over, InvalidRope::Stride { operand: "v", stride: 7, width: 8 });
        let layout = CacheLayout::Contiguous { capacity: u32::MAX - 2 };
        let cache = KvLayout { layout, ..good.cache };
        let wraps = refused(RopeProblem { cache, ..good });
        assert_eq!(wraps, InvalidRope::TooLarge(u64::from(u32::MAX) + 1));
        let pages = |blocks, size, max| {
            let cache = KvLayout::paged(2, [blocks, size], max, 8, DType::F16);
            RopeProblem { cache, ..good }.checked()
        };
        assert!(pages(1, 16, 1).is_ok());
        assert_eq!(pages(0, 16, 1), Err(InvalidRope::Empty { axis: "blocks" }));
        assert_eq!(pages(1, 16, 0), Err(InvalidRope::Empty { axis: "max_blocks" }));
        assert_eq!(pages(1, 12, 1), Err(InvalidRope::BlockSize(12)));
        let short = InvalidRope::Short { what: "cache", seq: 3, have: 2 };
        assert_eq!(pages(9, 2, 1), Err(short));
        assert!(matches!(pages(1, 1 << 31, 1 << 31), Err(InvalidRope::TooLarge(_))));
    }
}
