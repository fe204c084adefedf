//! One decode step: out = softmax(rules(q·kᵀ))·v    q, out: `[batch, heads, seq_q, head_dim]`
//! k, v: a cache of `kv_heads` heads, contiguous per sequence or paged; f16, bf16, f32, or i8 with
//! scales
//!
//! ```text
//!   for each sequence b, head h: for each of its seq_q newest positions i
//!     for each position j <= i of the sequence           // page = table[b][j / block_size]
//!       s = rules(k_scale[j] · (q · k[j]))               // scale, soft cap, window
//!       m' = max(m, s);  p = exp(s - m')
//!       l = l·exp(m - m') + p;  acc = acc·exp(m - m') + p·v_scale[j] · v[j]
//!     out = acc / l;  lse = m + log l
//! ```
//!
//! The newest positions are already in the cache, and a causal mask applies among them.
//! `heads / kv_heads` neighbouring q heads share one head of the cache; nothing is copied.
//! Sequences differ in length: the device reads each length, and the host knows the longest. A
//! query without visible positions gets 0, and its lse is -inf. This occurs in sequences shorter
//! than seq_q.
//!
//! Cost: reads the cache once; `4·head_dim` flop per visible pair. At 4 to 8 flop per byte,
//! bandwidth and latency dominate.
//!
//! One kernel source with three paths. [`DecodeConfig`] selects one:
//!
//! | path    | multiplies with | operands arrive by                      | runs on         |
//! |---------|-----------------|-----------------------------------------|-----------------|
//! | `Split` | `mma.sync`      | one `cp.async` ring per plane, `ldmatrix` | CUDA, f16, bf16 |
//! | `Gemv`  | multiply-add    | coalesced loads                         | CUDA, Vulkan    |
//! | `Rows`  | multiply-add    | one position at a time                  | any device      |
//!
//! The device clamps its reads to the cache: a length past the capacity becomes the capacity, and a
//! block past the last becomes the last. If the host has lengths and table,
//! [`DecodeProblem::check_table`] rejects them before the launch.
//!
//! Sources: Kwon et al., "PagedAttention" (2023); Dao et al., "Flash-Decoding" (2023); Ainslie et al.,
//! "GQA" (2023).

mod cache;
mod config;
mod fragments;
mod gemv;
mod merge;
mod plan;
mod problem;
mod rows;
mod scores;
mod split;
mod stream;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::{ElemType, IntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use config::DecodeConfig;
pub use gemv::GemvConfig;
pub use plan::SplitConfig;
pub use problem::{CacheLayout, CacheStrides, DecodeProblem, InvalidDecode, MAX_QUERIES};

use super::{RowsConfig, bytes_of, tolerance};
use crate::elem::elem;
use crate::launch::{index_width, launch};
use cache::{Cache, CacheLaunch, CachePlan, Dims};
use gemv::GemvPlan;
use plan::SplitPlan;
use rows::RowsPlan;
use scores::{Rules, Scores, ScoresLaunch};

/// The decode kernel family.
pub struct Decode;

/// Device buffers of one decode step.
#[derive(Debug, Clone)]
pub struct DecodeOperands {
    pub q: Handle,
    pub k: Handle,
    pub v: Handle,
    pub out: Handle,
    /// u32 `[batch]`: positions of each sequence, including the new ones.
    pub lengths: Handle,
    /// u32 `[batch, max_blocks]`; present for a paged cache.
    pub table: Option<Handle>,
    /// f32; present for an i8 cache.
    pub scales: Option<Scales>,
    /// f32 `[batch, heads, seq_q]`; present when the problem stores the log-sum-exp.
    pub lse: Option<Handle>,
}

/// Scales of an i8 cache, one per position and head.
#[derive(Debug, Clone)]
pub struct Scales {
    pub k: Handle,
    pub v: Handle,
}

impl Kernel for Decode {
    type Problem = DecodeProblem;
    type Config = DecodeConfig;
    type Operands = DecodeOperands;

    const NAME: &'static str = "attention_decode";
    const VERSION: u32 = 1;

    fn bucket(problem: &DecodeProblem) -> String {
        problem.bucket()
    }

    fn candidates(arch: &ArchProfile, problem: &DecodeProblem) -> Vec<DecodeConfig> {
        config::candidates(arch, problem)
    }

    fn check(
        arch: &ArchProfile,
        problem: &DecodeProblem,
        config: &DecodeConfig,
    ) -> Result<(), Infeasible> {
        config::check(arch, problem, config)
    }

    fn cost(problem: &DecodeProblem) -> Cost {
        problem.cost()
    }

    fn baseline(arch: &ArchProfile, problem: &DecodeProblem) -> Result<DecodeConfig, Infeasible> {
        config::baseline(arch, problem)
    }

    fn operands(queue: &Queue, problem: &DecodeProblem, seed: u64) -> DecodeOperands {
        let [q, k, v, out, scales] = problem.extents();
        let make = |len, dtype, salt| crate::noise(queue, len, dtype, 5 * seed + salt);
        let words = |words: Vec<u32>| {
            queue.upload(&words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>())
        };
        let pages = u64::from(problem.pages());
        // Shuffle the blocks, as in a cache in use.
        let apart = (pages / 2..).find(|step| step % 2 == 1 && pages % step != 0).unwrap_or(1);
        let block = |at: u64| ((at * apart + seed) % pages) as u32;
        DecodeOperands {
            q: make(q, problem.dtype, 0),
            k: make(k, problem.cache, 1),
            v: make(v, problem.cache, 2),
            out: queue.empty(bytes_of(out, problem.dtype)),
            lengths: words(vec![problem.longest; problem.batch as usize]),
            table: (problem.table_len() > 0)
                .then(|| words((0..problem.table_len() as u64).map(block).collect())),
            scales: problem.quantized().then(|| {
                // Random i8 values are uniform, with standard deviation 74.
                let scale = |i: usize| (1.0 / 74.0) * (1.0 + (i % 5) as f32 / 8.0);
                let one = words((0..scales).map(|i| scale(i).to_bits()).collect());
                Scales { k: one.clone(), v: one }
            }),
            lse: problem.lse.then(|| queue.empty(problem.rows() as usize * 4)),
        }
    }

    fn outputs(problem: &DecodeProblem, operands: &DecodeOperands) -> Vec<Output> {
        vec![Output {
            handle: operands.out.clone(),
            dtype: problem.dtype,
            len: problem.extents()[3],
            tolerance: tolerance(problem.dtype),
        }]
    }

    /// Counters, then partial accumulators.
    fn scratch_bytes(problem: &DecodeProblem, config: &DecodeConfig) -> u64 {
        match config {
            DecodeConfig::Split(c) if c.splits > 1 => {
                let parts = problem.rows() * u64::from(c.splits);
                let sums = 4 * u64::from(problem.head_dim) * parts;
                // Counters, then m and l of every split in whole vectors, then its accumulators.
                4 * u64::from(merge::COUNTERS) + 16 * parts.div_ceil(2) + sums
            }
            DecodeConfig::Gemv(c) => gemv::scratch_bytes(problem, c),
            _ => 0,
        }
    }

    /// Sets the counters to 0. Each launch leaves them at 0, so that scratch serves one launch
    /// after another, of any problem that fits. Two launches must not use it at the same time.
    fn prepare(device: &Device, scratch: &Handle) {
        tune::fill(device, scratch, merge::COUNTERS as usize, 0);
    }

    fn launch(
        queue: &Queue,
        problem: &DecodeProblem,
        config: &DecodeConfig,
        operands: &DecodeOperands,
        scratch: Option<&Handle>,
    ) {
        let plan = Plan::new(queue.profile(), problem, config);
        let [width_in, width_out] = plan.widths;
        let [q, k, v, out, _] = problem.extents();
        // A kernel without log-sum-exp or partial results still binds a buffer in their place.
        let (lse, lse_len) = match &operands.lse {
            Some(lse) => (lse, problem.rows() as usize),
            None => (&operands.out, 1),
        };
        let (partials, partials_len) = match scratch {
            Some(scratch) => (scratch, Self::scratch_bytes(problem, config) as usize / 16),
            None => (&operands.out, 1),
        };
        // SAFETY: buffer lengths come from the problem, and every path stays within its strides.
        // Lengths and blocks are clamped to them.
        unsafe {
            launch!(
                queue,
                decode,
                plan.cubes,
                plan.cube_dim,
                address(problem),
                width_in,
                width_out,
                BufferArg::from_raw_parts(operands.q.clone(), q / width_in),
                BufferArg::from_raw_parts(operands.k.clone(), k / width_in),
                BufferArg::from_raw_parts(operands.v.clone(), v / width_in),
                BufferArg::from_raw_parts(operands.out.clone(), out / width_out),
                BufferArg::from_raw_parts(lse.clone(), lse_len),
                BufferArg::from_raw_parts(partials.clone(), partials_len),
                CacheLaunch::from_operands(problem, operands),
                ScoresLaunch::from_problem(problem),
                Dims::launch_args(problem, plan.splits, plan.tile_kv),
                plan.path,
                types(problem),
            );
            if merges(config) {
                let queries = problem.rows() as u32;
                let lines = queries.div_ceil(65_535);
                launch!(
                    queue,
                    gemv::merge_parts,
                    CubeCount::Static(queries.div_ceil(lines), lines, 1),
                    CubeDim::new_1d(MERGE),
                    address(problem),
                    BufferArg::from_raw_parts(operands.out.clone(), out),
                    BufferArg::from_raw_parts(lse.clone(), lse_len),
                    BufferArg::from_raw_parts(partials.clone(), partials_len),
                    ScoresLaunch::from_problem(problem),
                    Dims::launch_args(problem, plan.splits, plan.tile_kv),
                    problem.head_dim,
                    types(problem)[0],
                );
            }
        }
    }
}

/// Returns true if a separate launch merges the splits of a sequence.
fn merges(config: &DecodeConfig) -> bool {
    matches!(config, DecodeConfig::Gemv(c) if c.splits > 1)
}

/// Units that merge the splits of one query.
const MERGE: u32 = 64;

/// A config bound to a problem.
struct Plan {
    path: Path,
    /// Elements per vector: of q, k and v, then of out.
    widths: [usize; 2],
    cubes: CubeCount,
    cube_dim: CubeDim,
    splits: u32,
    /// Positions that are read at once.
    tile_kv: u32,
}

impl Plan {
    fn new(arch: &ArchProfile, problem: &DecodeProblem, config: &DecodeConfig) -> Self {
        let p = problem;
        match *config {
            DecodeConfig::Split(c) => {
                let plan = SplitPlan::new(c, p);
                Self {
                    path: Path::Split(plan),
                    // This path takes buffer addresses; the widths have no effect.
                    widths: [4, 4],
                    cubes: CubeCount::Static(plan.chunks * c.splits, p.kv_heads, p.batch),
                    cube_dim: CubeDim::new_2d(32, c.planes),
                    splits: c.splits,
                    tile_kv: c.tile_kv,
                }
            }
            DecodeConfig::Gemv(c) => {
                let plan = GemvPlan::new(arch, c, p);
                Self {
                    path: Path::Gemv(plan),
                    widths: [gemv::width(arch, p), 1],
                    cubes: CubeCount::Static(plan.chunks * c.splits, p.kv_heads, p.batch),
                    cube_dim: CubeDim::new_1d(c.units),
                    splits: c.splits,
                    tile_kv: 1,
                }
            }
            DecodeConfig::Rows(c) => {
                let plan = RowsPlan { head_dim: p.head_dim, cache: CachePlan::new(p) };
                Self {
                    path: Path::Rows(plan),
                    widths: [p.width(RowsConfig::widest(arch)), 1],
                    cubes: c.cubes(arch, p.rows()),
                    cube_dim: CubeDim::new_1d(c.units),
                    splits: 1,
                    tile_kv: 1,
                }
            }
        }
    }
}

fn types(problem: &DecodeProblem) -> [ElemType; 2] {
    let cache = match problem.cache {
        DType::I8 => ElemType::Int(IntKind::I8),
        dtype => elem(dtype),
    };
    [elem(problem.dtype), cache]
}

/// Index width: offsets past 2^32 elements need 64-bit indices.
fn address(problem: &DecodeProblem) -> AddressType {
    let longest = problem.extents().into_iter().max().unwrap_or(0);
    index_width(longest as u64)
}

/// Comptime path and geometry of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Path {
    Split(SplitPlan),
    Gemv(GemvPlan),
    Rows(RowsPlan),
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn decode<F: Float, C: Numeric, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<C, NI>],
    v: &[Vector<C, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    partials: &mut [Vector<f32, Const<4>>],
    cache: Cache,
    scores: Scores,
    dims: &Dims,
    #[comptime] path: Path,
    #[define(F, C)] _dtypes: [ElemType; 2],
) {
    match path {
        Path::Split(plan) => {
            split::split::<F, C, NI, NO>(q, k, v, out, lse, partials, &cache, &scores, dims, plan)
        }
        Path::Gemv(plan) => {
            gemv::gemv::<F, C, NI, NO>(q, k, v, out, lse, partials, &cache, &scores, dims, plan)
        }
        Path::Rows(plan) => {
            rows::rows::<F, C, NI, NO>(q, k, v, out, lse, &cache, &scores, dims, plan)
        }
    }
}

impl Rules {
    const fn new(p: &DecodeProblem) -> Self {
        Self { window: p.window.is_some(), softcap: p.softcap.is_some(), lse: p.lse }
    }
}

impl ScoresLaunch {
    fn from_problem(p: &DecodeProblem) -> Self {
        Self::new(
            p.scale,
            p.softcap.unwrap_or(1.0),
            // Distances are i32; a window of 2^30 positions or more hides nothing.
            p.window.unwrap_or(0).min(i32::MAX as u32 / 2),
            f32::NEG_INFINITY,
            Rules::new(p),
        )
    }
}
