//! Gradients of attention: dq, dk and dv from dout. The softmax weights are recomputed, not stored.
//!
//! ```text
//!   p = exp(rules(scale·q·kᵀ) - lse)                // as in the forward pass
//!   dv = pᵀ·dout
//!   ds = p · (dout·vᵀ - delta) · rules'              delta = rowsum(out·dout)
//!   dq = scale · ds·k        dk = scale · dsᵀ·q      // dk and dv summed over the heads that share them
//! ```
//!
//! Three launches: the statistics of every query, then one launch per side: dq, and dk with dv. dk
//! and dv get separate launches if both accumulators do not fit in registers. Each result has one
//! writer, so the pass is deterministic. Extra memory is 8 bytes per query. The paths are those of
//! the forward pass; each side has its own config.
//!
//! Cost: `10·head_dim` flop per visible pair; this implementation computes 14 to 16, because both
//! sides need p and ds. It reads q, k, v, out and dout once, and writes dq, dk and dv once.
//!
//! Source: Dao et al., "FlashAttention" (2022), section 3.1 and appendix B.

mod flash;
mod problem;
mod rows;
mod stats;
mod subgroup;

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

pub use problem::BackwardProblem;

use super::config::{addresses, flash as tiles, matrices, serves, subgroup as blocks};
use super::scores::{Scores, ScoresLaunch};
use super::subgroup::{SubgroupConfig, SubgroupPlan};
use super::{
    AttentionConfig, AttentionOperands, Dims, FlashConfig, HeadStrides, Implementation, RowsConfig,
    Sequences, SequencesLaunch, Steps, address, bytes_of, types,
};
use crate::elem::elem;
use crate::fits::{iterations, limits, rtx, shape};
use crate::launch::launch;
use flash::{FlashPlan, Side};
use rows::RowsPlan;
use subgroup::SidePlan;

/// The attention kernel family, backward.
pub struct AttentionBackward;

/// Device buffers of one backward pass.
#[derive(Debug, Clone)]
pub struct BackwardOperands {
    /// Buffers of the forward pass, including out and the log-sum-exp.
    pub forward: AttentionOperands,
    pub dout: Handle,
    pub dq: Handle,
    pub dk: Handle,
    pub dv: Handle,
}

/// Configs of both sides. `rows` counts rows that a plane owns; `tile_kv` counts rows of the other
/// side per tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BackwardConfig {
    /// Side that owns queries: dq.
    pub queries: SideConfig,
    /// Side that owns keys: dk and dv.
    pub keys: SideConfig,
}

/// Path and tile sizes of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum SideConfig {
    Flash(FlashConfig),
    #[serde(rename = "plane")]
    Subgroup(SubgroupConfig),
    Rows(RowsConfig),
}

impl From<SideConfig> for AttentionConfig {
    fn from(config: SideConfig) -> Self {
        match config {
            SideConfig::Flash(c) => Self::Flash(c),
            SideConfig::Subgroup(c) => Self::Subgroup(c),
            SideConfig::Rows(c) => Self::Rows(c),
        }
    }
}

/// Ordered from the widest tiles. Cooperative-matrix configs serve both sides.
const SUBGROUP: [SideConfig; 6] = [
    SideConfig::Subgroup(blocks(8, 16, 32)),
    SideConfig::Subgroup(blocks(4, 16, 32)),
    SideConfig::Subgroup(blocks(8, 16, 16)),
    SideConfig::Subgroup(blocks(4, 16, 16)),
    SideConfig::Subgroup(blocks(2, 16, 32)),
    SideConfig::Subgroup(blocks(2, 16, 16)),
];
const QUERIES: [SideConfig; 6] = [
    SideConfig::Flash(tiles(4, 32, 32, 2)),
    SideConfig::Flash(tiles(4, 32, 64, 2)),
    SideConfig::Flash(tiles(4, 16, 64, 2)),
    SideConfig::Flash(tiles(4, 16, 32, 2)),
    SideConfig::Flash(tiles(2, 16, 32, 2)),
    SideConfig::Flash(tiles(4, 16, 16, 2)),
];
const KEYS: [SideConfig; 8] = [
    SideConfig::Flash(tiles(4, 32, 64, 2)),
    SideConfig::Flash(tiles(4, 16, 64, 2)),
    SideConfig::Flash(tiles(4, 32, 32, 2)),
    SideConfig::Flash(tiles(4, 16, 48, 2)),
    SideConfig::Flash(tiles(4, 16, 32, 2)),
    SideConfig::Flash(tiles(2, 16, 32, 2)),
    SideConfig::Flash(tiles(4, 16, 16, 2)),
    SideConfig::Flash(tiles(2, 16, 16, 2)),
];

impl Kernel for AttentionBackward {
    type Problem = BackwardProblem;
    type Config = BackwardConfig;
    type Operands = BackwardOperands;

    const NAME: &'static str = "attention_backward";
    const VERSION: u32 = 1;

    fn bucket(problem: &BackwardProblem) -> String {
        problem.forward.bucket()
    }

    /// The first config of both sides, then the others of each side, each with the other side's
    /// first. The sides are independent.
    fn candidates(arch: &ArchProfile, problem: &BackwardProblem) -> Vec<BackwardConfig> {
        let head_dim = problem.forward.head_dim;
        let of = |all: &[SideConfig], keys: bool| -> Vec<SideConfig> {
            let sides =
                |c: &SideConfig| if keys { of_keys(c, head_dim) } else { &[Side::QUERIES][..] };
            let fit =
                |c: &&SideConfig| sides(c).iter().all(|s| check(arch, problem, c, *s).is_ok());
            let mut all: Vec<_> = all.iter().chain(&SUBGROUP).filter(fit).copied().collect();
            let any = |c: &SideConfig, of: fn(&ArchProfile, &BackwardProblem, &SideConfig, Side) -> bool| {
                sides(c).iter().any(|s| of(arch, problem, c, *s))
            };
            // On RTX cards drop configs that spill; elsewhere they are measured, but never first.
            all.retain(|c| !(rtx(arch) && any(c, spills)));
            all.sort_by_key(|c| any(c, full) || any(c, spills));
            all
        };
        let (queries, keys) = (of(&QUERIES, false), of(&KEYS, true));
        let (Some(&first_queries), Some(&first_keys)) = (queries.first(), keys.first()) else {
            return Self::baseline(arch, problem).into_iter().collect();
        };
        let first = BackwardConfig { queries: first_queries, keys: first_keys };
        let other_queries = queries[1..].iter().map(|&queries| BackwardConfig { queries, ..first });
        let other_keys = keys[1..].iter().map(|&keys| BackwardConfig { keys, ..first });
        std::iter::once(first).chain(other_keys).chain(other_queries).collect()
    }

    fn check(
        arch: &ArchProfile,
        problem: &BackwardProblem,
        config: &BackwardConfig,
    ) -> Result<(), Infeasible> {
        check(arch, problem, &config.queries, Side::QUERIES)?;
        let sides = of_keys(&config.keys, problem.forward.head_dim);
        sides.iter().try_for_each(|side| check(arch, problem, &config.keys, *side))
    }

    fn cost(problem: &BackwardProblem) -> Cost {
        problem.cost()
    }

    fn baseline(
        arch: &ArchProfile,
        problem: &BackwardProblem,
    ) -> Result<BackwardConfig, Infeasible> {
        let side = SideConfig::Rows(RowsConfig::new(arch));
        let config = BackwardConfig { queries: side, keys: side };
        Self::check(arch, problem, &config).map(|()| config)
    }

    fn operands(queue: &Queue, problem: &BackwardProblem, seed: u64) -> BackwardOperands {
        let p = &problem.forward;
        let make = |len, salt| crate::noise(queue, len, p.dtype, 5 * seed + salt);
        let empty = |len: usize| queue.empty(bytes_of(len, p.dtype));
        let [dout, dq, dk, dv] = problem.extents();
        let operands = BackwardOperands {
            forward: super::Attention::operands(queue, p, seed),
            dout: make(dout, 7),
            dq: empty(dq),
            dk: empty(dk),
            dv: empty(dv),
        };
        // The weights are a softmax only with the log-sum-exp of the forward pass.
        if let Some(config) = super::Attention::candidates(queue.profile(), p).first() {
            super::Attention::launch(queue, p, config, &operands.forward, None);
        }
        operands
    }

    fn outputs(problem: &BackwardProblem, operands: &BackwardOperands) -> Vec<Output> {
        let dtype = problem.forward.dtype;
        let tolerance = super::tolerance(dtype);
        let [_, dq, dk, dv] = problem.extents();
        let forward = &problem.forward;
        let [q, kv] = [(forward.heads, forward.seq_q), (forward.kv_heads, forward.seq_kv)]
            .map(|(heads, seq)| (forward.batch * heads * seq * forward.head_dim) as usize);
        // Gaps between rows are not written: then one row is compared. The first of dq is 0 with a causal mask.
        let row = forward.head_dim as usize;
        let last = (dq - row) as u64 * dtype.size() as u64;
        let output = |handle: &Handle, from: u64, len: usize, dense: usize| {
            let (from, len) = if len == dense { (0, len) } else { (from, row) };
            Output { handle: handle.clone().offset_start(from), dtype, len, tolerance }
        };
        vec![
            output(&operands.dq, last, dq, q),
            output(&operands.dk, 0, dk, kv),
            output(&operands.dv, 0, dv, kv),
        ]
    }

    /// Two f32 values per query.
    fn scratch_bytes(problem: &BackwardProblem, _config: &BackwardConfig) -> u64 {
        problem.forward.rows() * 8
    }

    fn launch(
        queue: &Queue,
        problem: &BackwardProblem,
        config: &BackwardConfig,
        operands: &BackwardOperands,
        scratch: Option<&Handle>,
    ) {
        let p = &problem.forward;
        let forward = &operands.forward;
        let scratch = scratch.expect("scratch_bytes is never 0");
        let lse = forward.lse.as_ref().expect("a checked problem stores its log-sum-exp");
        let rows = p.rows() as usize;
        let [q, k, v, out] = p.extents();
        let [dout, dq, dk, dv] = problem.extents();
        let spread = RowsConfig::new(queue.profile());
        let width = problem.width(8);
        // SAFETY: buffer lengths come from the problem, and the kernel stays within its strides.
        unsafe {
            launch!(
                queue,
                stats::stats,
                spread.cubes(queue.profile(), p.rows()),
                CubeDim::new_1d(spread.units),
                address(p),
                width,
                BufferArg::from_raw_parts(forward.out.clone(), out / width),
                BufferArg::from_raw_parts(operands.dout.clone(), dout / width),
                BufferArg::from_raw_parts(lse.clone(), rows),
                BufferArg::from_raw_parts(scratch.clone(), rows),
                SequencesLaunch::from_operands(p, forward),
                Dims::launch_args(p, forward),
                Steps::launch_args(problem.dout, p.varlen),
                f32::INFINITY,
                p.head_dim,
                elem(p.dtype),
            );
        }
        let (query, key) = ((&forward.q, q, p.q), (&forward.k, k, p.k));
        let (value, change) = ((&forward.v, v, p.v), (&operands.dout, dout, problem.dout));
        for (side, config) in sides(p.head_dim, config) {
            let plan = Plan::new(queue.profile(), problem, config, side);
            let [width_in, width_out] = plan.widths;
            let (own, other, results) = if side.keys {
                (
                    [key, value],
                    [query, change],
                    [(&operands.dk, dk, problem.dk), (&operands.dv, dv, problem.dv)],
                )
            } else {
                // The query side has one result; its second output is bound but never written.
                let result = (&operands.dq, dq, problem.dq);
                ([query, change], [key, value], [result, result])
            };
            // SAFETY: buffer lengths come from the problem, and every path stays within its
            // strides. Rows past the ends are neither read nor written.
            unsafe {
                let read = |(handle, len, _): (&Handle, usize, HeadStrides)| {
                    BufferArg::from_raw_parts(handle.clone(), len / width_in)
                };
                let write = |(handle, len, _): (&Handle, usize, HeadStrides)| {
                    BufferArg::from_raw_parts(handle.clone(), len / width_out)
                };
                launch!(
                    queue,
                    gradients,
                    plan.cubes,
                    plan.cube_dim,
                    address(p),
                    width_in,
                    width_out,
                    read(own[0]),
                    read(own[1]),
                    read(other[0]),
                    read(other[1]),
                    BufferArg::from_raw_parts(scratch.clone(), rows),
                    write(results[0]),
                    write(results[1]),
                    ScoresLaunch::from_problem(p, forward),
                    SequencesLaunch::from_operands(p, forward),
                    Dims::launch_args(p, forward),
                    Roles::launch_args(
                        [own, other, results].map(|pair| pair.map(|(.., s)| s)),
                        p.varlen
                    ),
                    plan.path,
                    types(p),
                );
            }
        }
    }
}

impl Implementation {
    /// Returns the default config of the gradients, like [`Implementation::config`].
    ///
    /// # Errors
    /// The reason why the implementation does not support the problem on this device.
    pub fn backward_config(
        self,
        arch: &ArchProfile,
        problem: &BackwardProblem,
    ) -> Result<BackwardConfig, Infeasible> {
        let flash = |c: &BackwardConfig| !matches!(c.queries, SideConfig::Rows(_));
        match self {
            Self::Plain => AttentionBackward::baseline(arch, problem),
            Self::Flash => {
                match AttentionBackward::candidates(arch, problem).into_iter().find(flash) {
                    Some(config) => Ok(config),
                    // A requirement that the smallest config misses, every config misses.
                    None => {
                        let smallest = match arch.matrices_from_words() {
                            true => SideConfig::Subgroup(blocks(2, 16, 16)),
                            false => SideConfig::Flash(tiles(2, 16, 16, 2)),
                        };
                        let config = BackwardConfig { queries: smallest, keys: smallest };
                        AttentionBackward::check(arch, problem, &config).map(|()| config)
                    }
                }
            }
        }
    }
}

/// Launches of the two sides, each with its config.
fn sides(
    head_dim: u32,
    config: &BackwardConfig,
) -> impl Iterator<Item = (Side, SideConfig)> + use<> {
    let (queries, keys) = (config.queries, config.keys);
    let of_keys = of_keys(&keys, head_dim).iter().map(move |side| (*side, keys));
    std::iter::once((Side::QUERIES, queries)).chain(of_keys)
}

/// Launches that compute dk and dv.
const fn of_keys(config: &SideConfig, head_dim: u32) -> &'static [Side] {
    match config {
        SideConfig::Flash(_) => Side::of_keys(head_dim),
        SideConfig::Subgroup(_) => Side::APART,
        SideConfig::Rows(_) => Side::of_keys(0),
    }
}

fn check(
    arch: &ArchProfile,
    problem: &BackwardProblem,
    config: &SideConfig,
    side: Side,
) -> Result<(), Infeasible> {
    let p = &problem.forward;
    serves(arch, p, &(*config).into())?;
    let queries = u64::from(p.heads / p.kv_heads) * (u64::from(p.seq_q) + 1);
    iterations(arch, if side.keys { queries } else { u64::from(p.seq_kv) } + 3)?;
    let c = match config {
        SideConfig::Flash(_) | SideConfig::Subgroup(_) if p.head_dim % 16 != 0 => {
            return Err(shape("head_dim", p.head_dim, "expected a multiple of 16"));
        }
        SideConfig::Flash(c) => c,
        SideConfig::Subgroup(c) => {
            // At head_dim 256, both operands of 16 rows and their accumulators do not fit in
            // registers. Even with spills they are many times faster than the plain path.
            return matrices(arch, *c, SidePlan::shared_bytes(*c, p.head_dim));
        }
        SideConfig::Rows(_) => return Ok(()),
    };
    if side.keys && c.tile_kv > c.units() {
        return Err(shape(
            "tile_kv",
            c.tile_kv,
            "expected at most one query per unit, because each unit copies the statistics of one",
        ));
    }
    let plan = FlashPlan::new(*c, side, p.head_dim, true, problem.width(8), false, false);
    for copies in [plan.own, plan.other] {
        if !copies.divides() {
            return Err(shape(
                "tile_kv",
                c.tile_kv,
                "the units cannot share the copies of a tile equally",
            ));
        }
    }
    if registers(arch, problem, config, side) > 255 {
        return Err(shape("rows", c.rows, "accumulators and scores would spill registers"));
    }
    limits(arch, c.units(), side.shared_bytes(*c, p.head_dim))
}

/// Estimated registers per unit; 0 for the plain path.
fn registers(
    arch: &ArchProfile,
    problem: &BackwardProblem,
    config: &SideConfig,
    side: Side,
) -> u32 {
    let p = &problem.forward;
    match config {
        SideConfig::Flash(c) => {
            let slopes = if p.softcap.is_some() { 8 } else { 0 };
            side.registers(*c, p.head_dim) + addresses(p) + slopes
        }
        SideConfig::Subgroup(c) => SidePlan::registers(*c, side, p.head_dim, arch.plane_size.0),
        SideConfig::Rows(_) => 0,
    }
}

/// Returns true if a side takes almost all registers.
fn full(arch: &ArchProfile, problem: &BackwardProblem, config: &SideConfig, side: Side) -> bool {
    registers(arch, problem, config, side) > 248
}

/// Returns true where ptxas 13.0 spills 8 to 80 bytes of a side (stores and loads) although its
/// registers fit. Found by `cargo xtask targets`.
fn spills(arch: &ArchProfile, problem: &BackwardProblem, config: &SideConfig, side: Side) -> bool {
    let (p, SideConfig::Flash(c)) = (&problem.forward, config) else { return false };
    let rtx = rtx(arch);
    let sm_120 = arch.compute_capability.is_some_and(|sm| sm >= 120);
    let whole = !p.varlen && p.seq_q % c.tile_kv == 0;
    match (side.keys, p.head_dim) {
        (true, 33..=64) if sm_120 => whole && c.rows > 16,
        (true, 33..=64) => rtx && if whole { c.tile_kv > 48 } else { c.rows > 16 },
        (true, 97..=128) => {
            (p.varlen || p.softcap.is_some()) && c.tile_kv > 32
                || rtx && (c.tile_kv > 48 || c.planes < 4)
        }
        (true, 129..=192) if !sm_120 => rtx && c.tile_kv > 16 && c.planes < 4,
        (true, 129..=192) => c.tile_kv > 16 || c.planes > 2,
        (true, 193..) => sm_120 && c.tile_kv > 16,
        (false, ..=32) => sm_120 && c.rows > 16,
        _ => false,
    }
}

/// A side's config bound to a problem.
struct Plan {
    path: Path,
    /// Elements per vector: of the operands, then of the results.
    widths: [usize; 2],
    cubes: CubeCount,
    cube_dim: CubeDim,
}

impl Plan {
    fn new(arch: &ArchProfile, problem: &BackwardProblem, config: SideConfig, side: Side) -> Self {
        let p = &problem.forward;
        let ((own_heads, own), others) = if side.keys {
            ((p.kv_heads, p.seq_kv), p.seq_q)
        } else {
            ((p.heads, p.seq_q), p.seq_kv)
        };
        match config {
            SideConfig::Flash(c) => Self {
                path: Path::Flash(FlashPlan::new(
                    c,
                    side,
                    p.head_dim,
                    p.dtype == DType::Bf16,
                    problem.width(8),
                    !p.varlen && own % c.tile_q() == 0,
                    !p.varlen && others % c.tile_kv == 0,
                )),
                widths: [problem.width(8), 2],
                cubes: CubeCount::Static(own.div_ceil(c.tile_q()), own_heads, p.batch),
                cube_dim: CubeDim::new_2d(32, c.planes),
            },
            SideConfig::Subgroup(c) => {
                let BackwardProblem { dout, dq, dk, dv, .. } = *problem;
                let plane = arch.plane_size.0;
                let plan = SubgroupPlan {
                    config: c,
                    head_dim: p.head_dim,
                    plane,
                    by_hand: crate::round::by_hand(arch, p.dtype),
                    exact: !p.varlen && others % c.tile_kv == 0,
                };
                Self {
                    path: Path::Subgroup(SidePlan { side, subgroup: plan }),
                    widths: [p.width_with(4, &[p.out, dout, dq, dk, dv]); 2],
                    cubes: CubeCount::Static(own.div_ceil(c.tile_q()), own_heads, p.batch),
                    cube_dim: CubeDim::new_2d(plane, c.planes),
                }
            }
            SideConfig::Rows(c) => {
                let rows = u64::from(p.batch) * u64::from(own_heads) * u64::from(own);
                Self {
                    path: Path::Rows(RowsPlan { side, head_dim: p.head_dim }),
                    widths: [problem.width(RowsConfig::widest(arch)), 1],
                    cubes: c.cubes(arch, rows),
                    cube_dim: CubeDim::new_1d(c.units),
                }
            }
        }
    }
}

/// Comptime path and geometry of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Path {
    Flash(FlashPlan),
    Subgroup(SidePlan),
    Rows(RowsPlan),
}

/// Strides of the tensors that a side owns, iterates over and writes.
#[derive(CubeType, CubeLaunch)]
struct Roles {
    own_1: Steps,
    own_2: Steps,
    other_1: Steps,
    other_2: Steps,
    out_1: Steps,
    out_2: Steps,
}

impl Roles {
    fn launch_args([own, other, out]: [[HeadStrides; 2]; 3], varlen: bool) -> RolesLaunch {
        let steps = |s| Steps::launch_args(s, varlen);
        RolesLaunch::new(
            steps(own[0]),
            steps(own[1]),
            steps(other[0]),
            steps(other[1]),
            steps(out[0]),
            steps(out[1]),
        )
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn gradients<F: Float, M: Int, NI: Size, NO: Size>(
    own_1: &[Vector<F, NI>],
    own_2: &[Vector<F, NI>],
    other_1: &[Vector<F, NI>],
    other_2: &[Vector<F, NI>],
    stats: &[Vector<f32, Const<2>>],
    out_1: &mut [Vector<F, NO>],
    out_2: &mut [Vector<F, NO>],
    scores: Scores<F, M>,
    sequences: Sequences,
    dims: &Dims,
    roles: &Roles,
    #[comptime] path: Path,
    #[define(F, M)] _dtypes: [ElemType; 2],
) {
    match path {
        Path::Flash(plan) => flash::flash::<F, M, NI, NO>(
            own_1, own_2, other_1, other_2, stats, out_1, out_2, &scores, &sequences, dims, roles,
            plan,
        ),
        Path::Subgroup(plan) => subgroup::subgroup::<F, M, NI, NO>(
            own_1, own_2, other_1, other_2, stats, out_1, out_2, &scores, &sequences, dims, roles,
            plan,
        ),
        Path::Rows(plan) => rows::rows::<F, M, NI, NO>(
            own_1, own_2, other_1, other_2, stats, out_1, out_2, &scores, &sequences, dims, roles,
            plan,
        ),
    }
}
