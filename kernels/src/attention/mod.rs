//! out = softmax(rules(q·kᵀ))·v    q, out: `[batch, heads, seq_q, head_dim]`
//! k, v: `[batch, kv_heads, seq_kv, head_dim]`
//!
//! ```text
//!   for each block of queries of a head                // one cube (plain path: one unit per query)
//!     for each tile of keys that the block may see
//!       s = rules(q · kᵀ)                              // scale, soft cap, masks, bias
//!       m' = max(m, rowmax s);  p = exp(s - m')
//!       l = l·exp(m - m') + rowsum p;  acc = acc·exp(m - m') + p · v
//!     out = acc / l;  lse = m + log l
//! ```
//!
//! Scores never reach global memory. A row without visible keys gets 0, and its lse is -inf. With
//! fewer k and v heads than q heads (GQA), `heads / kv_heads` neighbouring q heads read the same
//! one; nothing is copied. The causal mask is aligned bottom-right: query i sees key j when
//! `j <= i + seq_kv - seq_q`.
//!
//! Cost: `4·head_dim` flop per visible pair; reads q, k and v once, writes out once. Gradients:
//! [`backward`].
//!
//! One kernel source with three paths. [`AttentionConfig`] selects one:
//!
//! | path       | multiplies with      | operands arrive by                   | runs on           |
//! |------------|----------------------|--------------------------------------|-------------------|
//! | `Flash`    | `mma.sync`           | `cp.async` ring, `ldmatrix`          | CUDA, f16, bf16   |
//! | `Subgroup` | cooperative matrices | shared memory, one tile of prefetch  | Vulkan, f16, bf16 |
//! | `Rows`     | multiply-add         | one key at a time                    | any device        |
//!
//! Sources: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023); Ainslie et al., "GQA"
//! (2023) for shared heads.

pub mod backward;
mod config;
pub mod decode;
mod flash;
mod problem;
mod rows;
mod scores;
mod subgroup;
mod tiles;

use arch::{ArchProfile, DType};
use cubecl::ir::{ElemType, IntKind, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use config::AttentionConfig;
pub use flash::FlashConfig;
pub use problem::{
    AttentionOptions, AttentionProblem, HeadStrides, Implementation, InvalidAttention, ScoreStrides,
};
pub use rows::RowsConfig;
pub use subgroup::SubgroupConfig;

use crate::elem::elem;
use crate::launch::{index_width, launch};
use flash::FlashPlan;
use rows::RowsPlan;
use scores::{Rules, Scores, ScoresLaunch};
use subgroup::SubgroupPlan;

/// The attention kernel family, forward.
pub struct Attention;

/// Device buffers of one attention.
#[derive(Debug, Clone)]
pub struct AttentionOperands {
    pub q: Handle,
    pub k: Handle,
    pub v: Handle,
    pub out: Handle,
    /// f32, one per query; present when the problem stores the log-sum-exp.
    pub lse: Option<Handle>,
    pub bias: Option<Handle>,
    pub mask: Option<Handle>,
    /// Present when the sequences vary in length.
    pub offsets: Option<Offsets>,
}

/// Sequence starts of a variable-length batch: u32 buffers of `batch + 1` offsets, in positions.
#[derive(Debug, Clone)]
pub struct Offsets {
    pub q: Handle,
    pub kv: Handle,
    /// Total number of queries over all sequences.
    pub queries: u32,
}

impl Kernel for Attention {
    type Problem = AttentionProblem;
    type Config = AttentionConfig;
    type Operands = AttentionOperands;

    const NAME: &'static str = "attention";
    const VERSION: u32 = 1;

    fn bucket(problem: &AttentionProblem) -> String {
        problem.bucket()
    }

    fn candidates(arch: &ArchProfile, problem: &AttentionProblem) -> Vec<AttentionConfig> {
        config::candidates(arch, problem)
    }

    fn check(
        arch: &ArchProfile,
        problem: &AttentionProblem,
        config: &AttentionConfig,
    ) -> Result<(), Infeasible> {
        config::check(arch, problem, config)
    }

    fn cost(problem: &AttentionProblem) -> Cost {
        problem.cost()
    }

    fn baseline(
        arch: &ArchProfile,
        problem: &AttentionProblem,
    ) -> Result<AttentionConfig, Infeasible> {
        config::baseline(arch, problem)
    }

    fn operands(queue: &Queue, problem: &AttentionProblem, seed: u64) -> AttentionOperands {
        let make = |len, salt| crate::noise(queue, len, problem.dtype, 5 * seed + salt);
        let [q, k, v, out] = problem.extents();
        let words = |offsets: Vec<u32>| {
            let bytes: Vec<u8> = offsets.into_iter().flat_map(u32::to_le_bytes).collect();
            queue.upload(&bytes)
        };
        AttentionOperands {
            q: make(q, 0),
            k: make(k, 1),
            v: make(v, 2),
            out: queue.empty(bytes_of(out, problem.dtype)),
            lse: problem.lse.then(|| queue.empty(problem.rows() as usize * 4)),
            bias: problem.bias.map(|s| make(problem.score_extent(s), 3)),
            mask: problem.mask.map(|s| {
                let bytes = problem.score_extent(s) * problem.mask_dtype.size();
                let bytes = bytes.next_multiple_of(4);
                queue.made(bytes, std::iter::repeat_n(0, bytes))
            }),
            offsets: problem.varlen.then(|| Offsets {
                q: words((0..=problem.batch).map(|b| b * problem.seq_q).collect()),
                kv: words((0..=problem.batch).map(|b| b * problem.seq_kv).collect()),
                queries: problem.batch * problem.seq_q,
            }),
        }
    }

    fn outputs(problem: &AttentionProblem, operands: &AttentionOperands) -> Vec<Output> {
        vec![Output {
            handle: operands.out.clone(),
            dtype: problem.dtype,
            len: problem.extents()[3],
            tolerance: tolerance(problem.dtype),
        }]
    }

    fn launch(
        queue: &Queue,
        problem: &AttentionProblem,
        config: &AttentionConfig,
        operands: &AttentionOperands,
        _scratch: Option<&Handle>,
    ) {
        let plan = Plan::new(queue.profile(), problem, config);
        let [width_in, width_out] = plan.widths;
        let [q, k, v, out] = problem.extents();
        let rows = problem.rows() as usize;
        // A kernel that stores no log-sum-exp still binds a buffer in its place.
        let (lse, lse_len) = match &operands.lse {
            Some(lse) => (lse, rows),
            None => (&operands.out, 1),
        };
        // SAFETY: buffer lengths come from the problem, and every path stays within its strides.
        // Rows and keys past the ends are neither read nor written.
        unsafe {
            launch!(
                queue,
                attention,
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
                ScoresLaunch::from_problem(problem, operands),
                SequencesLaunch::from_operands(problem, operands),
                Dims::launch_args(problem, operands),
                plan.path,
                types(problem),
            );
        }
    }
}

/// A config bound to a problem.
struct Plan {
    path: Path,
    /// Elements per vector: of q, k and v, then of out.
    widths: [usize; 2],
    cubes: CubeCount,
    cube_dim: CubeDim,
}

impl Plan {
    fn new(arch: &ArchProfile, problem: &AttentionProblem, config: &AttentionConfig) -> Self {
        let p = problem;
        match *config {
            AttentionConfig::Flash(c) => Self {
                path: Path::Flash(FlashPlan::new(
                    c,
                    p.head_dim,
                    p.dtype == DType::Bf16,
                    p.width(8),
                    !p.varlen && p.seq_q % c.tile_q() == 0,
                    !p.varlen && p.seq_kv % c.tile_kv == 0,
                )),
                widths: [p.width(8), 2],
                cubes: CubeCount::Static(p.seq_q.div_ceil(c.tile_q()), p.heads, p.batch),
                cube_dim: CubeDim::new_2d(32, c.planes),
            },
            AttentionConfig::Subgroup(c) => {
                // Results are stored with the vector width of the loads.
                let width = p.width_with(4, &[p.out]);
                let plane = arch.plane_size.0;
                Self {
                    path: Path::Subgroup(SubgroupPlan {
                        config: c,
                        head_dim: p.head_dim,
                        plane,
                        by_hand: crate::round::by_hand(arch, p.dtype),
                        exact: !p.varlen && p.seq_kv % c.tile_kv == 0,
                    }),
                    widths: [width; 2],
                    cubes: CubeCount::Static(p.seq_q.div_ceil(c.tile_q()), p.heads, p.batch),
                    cube_dim: CubeDim::new_2d(plane, c.planes),
                }
            }
            AttentionConfig::Rows(c) => Self {
                path: Path::Rows(RowsPlan { head_dim: p.head_dim }),
                widths: [p.width(RowsConfig::widest(arch)), 1],
                cubes: c.cubes(arch, p.rows()),
                cube_dim: CubeDim::new_1d(c.units),
            },
        }
    }
}

/// Largest allowed difference between two correct results, relative to the largest result. Softmax
/// weights and results are rounded, and the order of summation differs.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-9),
        DType::Bf16 => 2f64.powi(-6),
        _ => 2f64.powi(-16),
    }
}

/// Bytes of a buffer of `len` elements, padded to 4.
const fn bytes_of(len: usize, dtype: DType) -> usize {
    (len * dtype.size()).next_multiple_of(4)
}

fn types(problem: &AttentionProblem) -> [ElemType; 2] {
    let mask = match problem.mask_dtype {
        DType::U8 => ElemType::UInt(UIntKind::U8),
        _ => ElemType::Int(IntKind::I32),
    };
    [elem(problem.dtype), mask]
}

/// Index width: offsets past 2^32 elements need 64-bit indices.
fn address(problem: &AttentionProblem) -> AddressType {
    let scores = [problem.bias, problem.mask].into_iter().flatten();
    let scores = scores.map(|s| problem.score_extent(s));
    let longest = problem.extents().into_iter().chain(scores).max().unwrap_or(0);
    index_width(longest as u64)
}

/// Comptime path and geometry of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Path {
    Flash(FlashPlan),
    Subgroup(SubgroupPlan),
    Rows(RowsPlan),
}

/// Sizes and strides of one launch, in elements.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    pub(crate) batch: u32,
    pub(crate) heads: u32,
    /// Number of q heads that share a k and v head.
    pub(crate) group: u32,
    pub(crate) seq_q: u32,
    pub(crate) seq_kv: u32,
    pub(crate) q: Steps,
    pub(crate) k: Steps,
    pub(crate) v: Steps,
    pub(crate) out: Steps,
    pub(crate) bias: ScoreSteps,
    pub(crate) mask: ScoreSteps,
    /// Distance in queries between the log-sum-exps of neighbouring heads, then of neighbouring
    /// batches.
    lse_head: u32,
    lse_batch: u32,
}

/// [`HeadStrides`] on the device.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Steps {
    batch: usize,
    head: usize,
    pub(crate) seq: usize,
}

/// [`ScoreStrides`] on the device.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ScoreSteps {
    batch: usize,
    head: usize,
    row: usize,
    col: usize,
}

/// One sequence of the batch: start and length in q, k and v.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) from_q: u32,
    pub(crate) from_kv: u32,
    pub(crate) seq_q: u32,
    pub(crate) seq_kv: u32,
    /// Position of query 0 among the keys: seq_kv - seq_q.
    pub(crate) offset: i32,
}

/// Sequence starts when lengths vary; [`Rules`] holds the comptime flag.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Sequences {
    q: ComptimeOption<Box<[u32]>>,
    kv: ComptimeOption<Box<[u32]>>,
}

#[cube]
impl Steps {
    /// Index of the first element of position `seq` of a head. With varying lengths, `seq` counts
    /// positions through all batches.
    pub(crate) fn at(&self, seq: u32, batch: u32, head: u32) -> usize {
        batch as usize * self.batch + head as usize * self.head + seq as usize * self.seq
    }
}

#[cube]
impl ScoreSteps {
    pub(crate) fn at(&self, place: &scores::Place) -> usize {
        place.batch as usize * self.batch
            + place.head as usize * self.head
            + place.row as usize * self.row
            + place.col as usize * self.col
    }
}

#[cube]
impl Dims {
    /// Index of the log-sum-exp of query `seq`.
    pub(crate) fn lse_at(&self, seq: u32, batch: u32, head: u32) -> usize {
        (batch * self.lse_batch + head * self.lse_head + seq) as usize
    }
}

#[cube]
impl Sequences {
    pub(crate) fn span(&self, dims: &Dims, batch: u32) -> Span {
        let mut from_q = 0u32.runtime();
        let mut from_kv = 0u32.runtime();
        let mut seq_q = dims.seq_q;
        let mut seq_kv = dims.seq_kv;
        #[comptime]
        match &self.q {
            ComptimeOption::Some(starts) => {
                from_q = starts[batch as usize];
                seq_q = starts[batch as usize + 1] - from_q;
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.kv {
            ComptimeOption::Some(starts) => {
                from_kv = starts[batch as usize];
                seq_kv = starts[batch as usize + 1] - from_kv;
            }
            ComptimeOption::None => {}
        }
        Span { from_q, from_kv, seq_q, seq_kv, offset: seq_kv as i32 - seq_q as i32 }
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn attention<F: Float, M: Int, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<F, NI>],
    v: &[Vector<F, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    scores: Scores<F, M>,
    sequences: Sequences,
    dims: &Dims,
    #[comptime] path: Path,
    #[define(F, M)] _dtypes: [ElemType; 2],
) {
    match path {
        Path::Flash(plan) => {
            flash::flash::<F, M, NI, NO>(q, k, v, out, lse, &scores, &sequences, dims, plan)
        }
        Path::Subgroup(plan) => {
            subgroup::subgroup::<F, M, NI, NO>(q, k, v, out, lse, &scores, &sequences, dims, plan)
        }
        Path::Rows(plan) => {
            rows::rows::<F, M, NI, NO>(q, k, v, out, lse, &scores, &sequences, dims, plan)
        }
    }
}

impl Steps {
    fn launch_args(s: HeadStrides, varlen: bool) -> StepsLaunch {
        let batch = if varlen { 0 } else { s.batch };
        StepsLaunch::new(batch as usize, s.head as usize, s.seq as usize)
    }
}

impl Dims {
    fn launch_args(p: &AttentionProblem, operands: &AttentionOperands) -> DimsLaunch {
        let steps = |s| Steps::launch_args(s, p.varlen);
        let score_steps = |s: Option<ScoreStrides>| {
            let s = s.unwrap_or(ScoreStrides { batch: 0, head: 0, row: 0, col: 0 });
            ScoreStepsLaunch::new(s.batch as usize, s.head as usize, s.row as usize, s.col as usize)
        };
        let (lse_head, lse_batch) = match &operands.offsets {
            Some(offsets) => (offsets.queries, 0),
            None => (p.seq_q, p.heads * p.seq_q),
        };
        DimsLaunch::new(
            p.batch,
            p.heads,
            p.heads / p.kv_heads,
            p.seq_q,
            p.seq_kv,
            steps(p.q),
            steps(p.k),
            steps(p.v),
            steps(p.out),
            score_steps(p.bias),
            score_steps(p.mask),
            lse_head,
            lse_batch,
        )
    }
}

impl Rules {
    const fn new(p: &AttentionProblem) -> Self {
        Self {
            causal: p.causal,
            window: p.window.is_some(),
            softcap: p.softcap.is_some(),
            bias: p.bias.is_some(),
            mask: p.mask.is_some(),
            lse: p.lse,
            varlen: p.varlen,
        }
    }
}

/// A buffer of `len` elements that may be absent.
fn bound<T: LaunchArg<RuntimeArg = BufferArg>>(
    handle: Option<(&Handle, usize)>,
) -> ComptimeOptionArgs<T> {
    ComptimeOptionArgs::from(handle.map(|(handle, len)| {
        // SAFETY: callers pass the length that the problem gives the buffer.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    }))
}

impl<F: Float, M: Int> ScoresLaunch<F, M> {
    fn from_problem(p: &AttentionProblem, operands: &AttentionOperands) -> Self {
        let buffer = |handle: &Option<Handle>, strides: Option<ScoreStrides>| {
            handle.clone().zip(strides.map(|s| p.score_extent(s)))
        };
        let (bias, mask) = (buffer(&operands.bias, p.bias), buffer(&operands.mask, p.mask));
        Self::new(
            bound(bias.as_ref().map(|(h, len)| (h, *len))),
            bound(mask.as_ref().map(|(h, len)| (h, *len))),
            p.scale,
            p.softcap.unwrap_or(0.0),
            // Distances are i32; a window of 2^30 keys or more hides nothing.
            p.window.unwrap_or(0).min(i32::MAX as u32 / 2),
            f32::NEG_INFINITY,
            Rules::new(p),
        )
    }
}

impl SequencesLaunch {
    fn from_operands(p: &AttentionProblem, operands: &AttentionOperands) -> Self {
        let len = p.batch as usize + 1;
        let offsets = operands.offsets.as_ref();
        Self::new(bound(offsets.map(|o| (&o.q, len))), bound(offsets.map(|o| (&o.kv, len))))
    }
}
