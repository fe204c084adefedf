//! How to compute it: configs, what they need, which are worth measuring.

use arch::{ArchProfile, Backend, CubeMma, DType, MmaShape};
use cubecl::ir::ElemType;
use cubecl::prelude::{AddressType, CubeCount, CubeDim};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use crate::elem::elem;
use crate::fits::{lacks, limits, shape, turns};
use crate::rows::NormKind;
use crate::tile::{CopyPlan, TileShape};

use super::ahead::AheadPlan;
use super::cmma::{CubeConfig, CubePlan, PlaneConfig, PlanePlan};
use super::cores::{CoresConfig, CoresPlan};
use super::dots::DotsConfig;
use super::fma::{FmaConfig, FmaPlan};
use super::lanes::{LanesConfig, LanesPlan};
use super::mma::{Codes, MmaConfig, MmaPlan};
use super::{Epilogue, Layout, MatmulProblem, Path, Precision, bytes};

/// One way to run a matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum MatmulConfig {
    Mma(MmaConfig),
    Tma(MmaConfig),
    Cube(CubeConfig),
    Plane(PlaneConfig),
    Ahead(PlaneConfig),
    Fma(FmaConfig),
    Cores(CoresConfig),
    Dots(DotsConfig),
    Lanes(LanesConfig),
}

impl MatmulConfig {
    /// Every size in it, by name.
    fn sizes(&self) -> Vec<(&'static str, u32)> {
        match *self {
            Self::Mma(c) | Self::Tma(c) => vec![
                ("tile_m", c.tile_m),
                ("tile_n", c.tile_n),
                ("tile_k", c.tile_k),
                ("planes_m", c.planes_m),
                ("planes_n", c.planes_n),
                ("stages", c.stages),
                ("parts", c.parts),
            ],
            Self::Cube(c) => vec![
                ("tile_m", c.tile_m),
                ("tile_n", c.tile_n),
                ("tile_k", c.tile_k),
                ("units", c.units),
                ("unroll", c.unroll),
                ("parts", c.parts),
            ],
            Self::Plane(c) | Self::Ahead(c) => vec![
                ("tile_m", c.tile_m),
                ("tile_n", c.tile_n),
                ("tile_k", c.tile_k),
                ("planes_m", c.planes_m),
                ("planes_n", c.planes_n),
            ],
            Self::Fma(c) => vec![
                ("own_m", c.own_m),
                ("own_n", c.own_n),
                ("groups_m", c.groups_m),
                ("groups_n", c.groups_n),
                ("tile_k", c.tile_k),
                ("stages", c.stages),
            ],
            Self::Cores(c) => vec![
                ("block_m", c.block_m),
                ("block_n", c.block_n),
                ("block_k", c.block_k),
                ("rows", c.rows),
                ("vector", c.vector),
                ("units", c.units),
            ],
            Self::Dots(c) => {
                vec![("rows", c.rows), ("cols", c.cols), ("vector", c.vector), ("units", c.units)]
            }
            Self::Lanes(c) => {
                vec![("units", c.units), ("lanes", c.lanes), ("rows", c.rows), ("cols", c.cols)]
            }
        }
    }

    /// Parts that k is cut into.
    pub(crate) const fn parts(&self) -> u32 {
        match self {
            Self::Mma(c) | Self::Tma(c) => c.parts,
            Self::Cube(c) => c.parts,
            _ => 1,
        }
    }
}

const fn mma(tiles: [u32; 3], planes: [u32; 2], stages: u32) -> MatmulConfig {
    let [tile_m, tile_n, tile_k] = tiles;
    let [planes_m, planes_n] = planes;
    MatmulConfig::Mma(MmaConfig { tile_m, tile_n, tile_k, planes_m, planes_n, stages, parts: 1 })
}

const fn tma(tiles: [u32; 3], planes: [u32; 2], stages: u32) -> MatmulConfig {
    let [tile_m, tile_n, tile_k] = tiles;
    let [planes_m, planes_n] = planes;
    MatmulConfig::Tma(MmaConfig { tile_m, tile_n, tile_k, planes_m, planes_n, stages, parts: 1 })
}

const fn cube(tiles: [u32; 3], units: u32, unroll: u32) -> MatmulConfig {
    let [tile_m, tile_n, tile_k] = tiles;
    MatmulConfig::Cube(CubeConfig { tile_m, tile_n, tile_k, units, unroll, parts: 1 })
}

const fn ahead(tiles: [u32; 3], planes: [u32; 2]) -> MatmulConfig {
    let [tile_m, tile_n, tile_k] = tiles;
    let [planes_m, planes_n] = planes;
    MatmulConfig::Ahead(PlaneConfig { tile_m, tile_n, tile_k, planes_m, planes_n })
}

const fn plane(tiles: [u32; 3], planes: [u32; 2]) -> MatmulConfig {
    let [tile_m, tile_n, tile_k] = tiles;
    let [planes_m, planes_n] = planes;
    MatmulConfig::Plane(PlaneConfig { tile_m, tile_n, tile_k, planes_m, planes_n })
}

const fn fma(own: [u32; 2], groups: [u32; 2], tile_k: u32) -> MatmulConfig {
    let [own_m, own_n] = own;
    let [groups_m, groups_n] = groups;
    MatmulConfig::Fma(FmaConfig { own_m, own_n, groups_m, groups_n, tile_k, stages: 1 })
}

/// Configs in the order of how often they win; depths are for 2-byte elements and halve for 4.
const MMA: [MatmulConfig; 11] = [
    mma([128, 256, 32], [2, 4], 4),
    mma([256, 128, 32], [4, 2], 4),
    mma([128, 128, 32], [2, 2], 3),
    mma([128, 128, 64], [2, 4], 3),
    mma([128, 64, 64], [2, 2], 3),
    mma([64, 128, 64], [2, 2], 4),
    mma([64, 64, 64], [2, 2], 6),
    mma([64, 64, 128], [2, 2], 2),
    mma([32, 64, 128], [1, 4], 3),
    mma([16, 64, 128], [1, 4], 4),
    mma([16, 32, 128], [1, 2], 6),
];
const TMA: [MatmulConfig; 3] = [
    tma([128, 256, 64], [2, 4], 4),
    tma([256, 128, 64], [4, 2], 4),
    tma([128, 256, 64], [2, 4], 2),
];
const CUBE: [MatmulConfig; 14] = [
    cube([128, 128, 32], 128, 4),
    cube([128, 256, 64], 256, 2),
    cube([128, 256, 32], 256, 4),
    cube([256, 128, 32], 256, 4),
    cube([128, 256, 32], 256, 1),
    cube([256, 128, 32], 256, 1),
    cube([256, 256, 32], 256, 1),
    cube([128, 128, 64], 256, 1),
    cube([128, 128, 32], 128, 1),
    cube([64, 64, 64], 128, 1),
    cube([32, 64, 64], 128, 1),
    cube([16, 64, 128], 64, 1),
    cube([16, 64, 64], 64, 1),
    cube([16, 32, 64], 64, 1),
];
const PLANE: [MatmulConfig; 4] = [
    plane([128, 128, 32], [2, 2]),
    plane([64, 64, 32], [2, 2]),
    plane([128, 64, 32], [2, 2]),
    plane([16, 64, 32], [1, 2]),
];
const AHEAD: [MatmulConfig; 7] = [
    ahead([128, 128, 64], [2, 4]),
    ahead([128, 128, 32], [2, 2]),
    ahead([128, 256, 32], [2, 4]),
    ahead([256, 128, 32], [4, 2]),
    ahead([128, 64, 32], [2, 2]),
    ahead([64, 64, 32], [2, 2]),
    ahead([16, 64, 32], [1, 2]),
];
const FMA: [MatmulConfig; 9] = [
    fma([16, 8], [2, 4], 16),
    fma([8, 16], [4, 2], 16),
    fma([16, 8], [2, 4], 8),
    fma([16, 8], [2, 2], 16),
    fma([16, 8], [2, 2], 8),
    fma([8, 8], [4, 2], 16),
    fma([8, 8], [2, 2], 16),
    fma([4, 4], [2, 1], 16),
    fma([4, 4], [1, 2], 32),
];
/// What others are compared with: nothing asynchronous, no tensor core, small tiles.
const SIMPLEST_GPU: MatmulConfig = fma([4, 4], [2, 1], 16);

pub(super) fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<MatmulConfig> {
    let halved = problem.precision.storage().size() == 4;
    let depth = |config: MatmulConfig| match config {
        MatmulConfig::Mma(c) if halved => {
            MatmulConfig::Mma(MmaConfig { tile_k: c.tile_k / 2, ..c })
        }
        MatmulConfig::Tma(c) if halved => {
            MatmulConfig::Tma(MmaConfig { tile_k: c.tile_k / 2, ..c })
        }
        MatmulConfig::Plane(c) if halved => {
            MatmulConfig::Plane(PlaneConfig { tile_k: c.tile_k / 2, ..c })
        }
        MatmulConfig::Fma(c) if arch.async_copy && halved => {
            MatmulConfig::Fma(FmaConfig { stages: 3, ..c })
        }
        other => other,
    };
    let all: Vec<_> = match arch.backend {
        Backend::Cpu => cores(arch).into_iter().chain(dots(arch)).collect(),
        // `wmma` is a tenth to a third as fast as `mma.sync` (H200): for cards without it only.
        Backend::Cuda if mma_inst(arch, problem.precision).is_some() => {
            MMA.into_iter().chain(TMA).chain(FMA).collect()
        }
        Backend::Cuda => PLANE.into_iter().chain(FMA).collect(),
        // Where groups end is not known before, so loads are checked: 8 of 512 x 4096 x 4096 take 1.44 ms on an H200 where
        // tiles are waited for, and 1.79 ms a tile ahead.
        Backend::Vulkan if problem.grouped => PLANE.into_iter().chain(AHEAD).chain(FMA).collect(),
        Backend::Vulkan => CUBE.into_iter().chain(AHEAD).chain(FMA).collect(),
        Backend::WebGpu => FMA.to_vec(),
    };
    let mut feasible: Vec<_> = all
        .into_iter()
        .chain(lanes(arch, problem))
        .map(depth)
        .flat_map(|c| cuts(arch, problem, c))
        .filter(|c| check(arch, problem, c).is_ok())
        .collect();
    let plain = |c: &MatmulConfig| matches!(c, MatmulConfig::Fma(_));
    if feasible.iter().any(|c| !plain(c) && !matches!(c, MatmulConfig::Lanes(_))) {
        feasible.retain(|c| !plain(c));
    }
    promising(arch, problem, feasible)
}

/// Of configs that fit those worth measuring: the tile that covers the problem with the least waste and still fills the
/// device comes first.
fn promising(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    mut feasible: Vec<MatmulConfig>,
) -> Vec<MatmulConfig> {
    let fill = |c: &MatmulConfig| waste(arch, problem, c);
    if let Some(least) = feasible.iter().map(fill).min_by(f64::total_cmp) {
        feasible.retain(|c| fill(c) <= HOPELESS * least);
    }
    // What packs takes 1.5 s of a CPU to compile, in every process: so many multiplies, over a hundred uses.
    let compiled = |c: &MatmulConfig| match c {
        MatmulConfig::Cores(_) => 7.5e8 / f64::from(problem.k),
        _ => 0.0,
    };
    feasible.sort_by(|a, b| (fill(a) + compiled(a)).total_cmp(&(fill(b) + compiled(b))));
    feasible.truncate(WORTH_MEASURING);
    feasible
}

/// Those of `configs`, also with k cut into parts, that pass `fits`, in the order of [`candidates`].
pub(crate) fn spread(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    configs: &[MmaConfig],
    fits: impl Fn(&MmaConfig) -> bool,
) -> Vec<MmaConfig> {
    let own = |config| match config {
        MatmulConfig::Mma(c) => Some(c),
        _ => None,
    };
    let all = configs.iter().flat_map(|c| cuts(arch, problem, MatmulConfig::Mma(*c)));
    let feasible = all.filter(|c| own(*c).as_ref().is_some_and(&fits)).collect();
    promising(arch, problem, feasible).into_iter().filter_map(own).collect()
}

/// Candidates past this many in the order of [`waste`], or this much more wasteful than the first,
/// have never won.
const WORTH_MEASURING: usize = 14;
const HOPELESS: f64 = 3.0;

/// `config`, and where its blocks leave processors idle also with k cut into as many parts as fill
/// them once, and twice.
fn cuts(arch: &ArchProfile, problem: &MatmulProblem, config: MatmulConfig) -> Vec<MatmulConfig> {
    let (c, of): (_, fn(MmaConfig) -> MatmulConfig) = match config {
        MatmulConfig::Mma(c) => (c, MatmulConfig::Mma),
        MatmulConfig::Tma(c) => (c, MatmulConfig::Tma),
        MatmulConfig::Cube(c) => return cube_cuts(problem, c),
        _ => return vec![config],
    };
    if problem.grouped {
        return vec![config];
    }
    let blocks = blocks(problem, c.tile_m, c.tile_n);
    let room = u64::from(arch.processors.unwrap_or(1) * c.resident(arch, problem.precision));
    // Fewer than four tiles a part would not fill the ring of stages.
    let most = u64::from(problem.k.div_ceil(c.tile_k) / 4);
    let mut parts = vec![1];
    for wish in [room / blocks, 2 * room / blocks] {
        let wish = wish.min(most) as u32;
        if wish > 1 {
            // As many as leave no part empty.
            let tiles = MmaConfig { parts: wish, ..c }.part_tiles(problem.k);
            parts.push(problem.k.div_ceil(c.tile_k).div_ceil(tiles));
        }
    }
    parts.sort_unstable();
    parts.dedup();
    parts.into_iter().map(|parts| of(MmaConfig { parts, ..c })).collect()
}

/// `c`, and of few rows also with k cut into as many parts as give a card its fill of cubes once, and twice: how many
/// processors it has nobody tells through Vulkan. Of some more rows what these matrices cannot finish themselves has two
/// parts, and is finished where they are added: 512 x 4096 x 14336 with a residual 266 us, by `Ahead` 287 (bf16, H200).
fn cube_cuts(problem: &MatmulProblem, c: CubeConfig) -> Vec<MatmulConfig> {
    let mut parts = vec![1];
    match problem.m {
        _ if problem.grouped => {}
        FEW_FOR_CUBES..=MOST_CUT_ROWS => {
            let blocks = blocks(problem, c.tile_m, c.tile_n);
            let all = problem.k.div_ceil(c.tile_k);
            for wish in [IN_FLIGHT.div_ceil(blocks), (2 * IN_FLIGHT).div_ceil(blocks), 2] {
                let wish = wish.clamp(1, u64::from(all.div_ceil(4))) as u32;
                parts.push(all.div_ceil(CubeConfig { parts: wish, ..c }.part_tiles(problem.k)));
            }
        }
        // Sums in f32 of wide results would be more than operands are.
        0..=MOST_HALVED_ROWS if !is_plain(problem) && problem.n <= problem.k => parts.push(2),
        _ => {}
    }
    parts.sort_unstable();
    parts.dedup();
    parts.into_iter().map(|parts| MatmulConfig::Cube(CubeConfig { parts, ..c })).collect()
}

/// Rows from which cube-scope matrices do what groups of units do, up to which k is cut for them, and up to which it is
/// halved.
const FEW_FOR_CUBES: u32 = 4;
const MOST_CUT_ROWS: u32 = 128;
const MOST_HALVED_ROWS: u32 = 2048;
/// Cubes that a card has at once, of those that few rows make.
pub(crate) const IN_FLIGHT: u64 = 512;

/// Whether accumulators are results as they are.
fn is_plain(problem: &MatmulProblem) -> bool {
    problem.epilogue == Epilogue::default() && problem.out == problem.precision.storage()
}

/// Blocks of C in all batches, and in groups as if they were even.
fn blocks(problem: &MatmulProblem, tile_m: u32, tile_n: u32) -> u64 {
    let m = if problem.grouped {
        u64::from(problem.m).div_ceil(problem.batch())
    } else {
        u64::from(problem.m)
    };
    m.div_ceil(u64::from(tile_m)) * u64::from(problem.n.div_ceil(tile_n)) * problem.batch()
}

/// Relative cost of covering the problem with whole tiles on whole waves, ignoring what only a
/// measurement can tell: multiplies a unit of k. Equal costs keep the order of the lists above.
fn waste(arch: &ArchProfile, problem: &MatmulProblem, config: &MatmulConfig) -> f64 {
    let (tile_m, tile_n) = match config {
        MatmulConfig::Mma(c) | MatmulConfig::Tma(c) => (c.tile_m, c.tile_n),
        MatmulConfig::Cube(c) => (c.tile_m, c.tile_n),
        MatmulConfig::Plane(c) | MatmulConfig::Ahead(c) => (c.tile_m, c.tile_n),
        MatmulConfig::Fma(c) => c.tile(),
        MatmulConfig::Cores(c) => (c.block_m, c.block_n),
        MatmulConfig::Dots(c) => (c.rows, c.cols),
        MatmulConfig::Lanes(c) => (c.rows, c.columns_of_cube()),
    };
    let parts = f64::from(config.parts());
    let items = blocks(problem, tile_m, tile_n) as f64 * parts;
    let few = (FEW_FOR_CUBES..=MOST_CUT_ROWS).contains(&problem.m);
    let processors = match arch.backend {
        Backend::Vulkan if few => IN_FLIGHT as f64,
        _ => f64::from(arch.processors.unwrap_or(32)),
    };
    let waves = (items / processors).ceil() / parts;
    // A larger tile reads each operand fewer times: the traffic of one tile is m + n a multiply.
    let traffic = 1.0 / f64::from(tile_m.min(256)) + 1.0 / f64::from(tile_n.min(256));
    // A read takes about as long as 16 multiplies, and little more than one where nothing is packed.
    let read = if matches!(config, MatmulConfig::Dots(_)) { 1.5 } else { 16.0 };
    // Partial sums are written and read in f32; a byte takes about as long as two multiplies.
    let results = f64::from(problem.m) * f64::from(problem.n) * problem.batch() as f64;
    let sums = if parts > 1.0 { 4.0 * parts * results / f64::from(problem.k) } else { 0.0 };
    waves * f64::from(tile_m) * f64::from(tile_n) * (1.0 + read * traffic) + sums
}

fn cores(arch: &ArchProfile) -> Vec<MatmulConfig> {
    let units = arch.processors.unwrap_or(1);
    let vector = (arch.load_bytes / 4).clamp(4, 16);
    let config = |block_m, vectors, block_k, rows| {
        let block_n = vectors * vector;
        MatmulConfig::Cores(CoresConfig { block_m, block_n, block_k, rows, vector, units })
    };
    // Sums, a line of the panel and a number of A fill registers: 32 of AVX-512, 16 of what is narrower. There 4 rows of 3
    // vectors take 2.1 ms for 512 x 512 x 512 on two cores of a Zen 3, 8 rows of 2, which spill, 4.9.
    let large = match vector {
        16 => vec![config(64, 2, 256, 8), config(64, 4, 128, 4)],
        _ => vec![config(128, 3, 128, 4), config(126, 3, 512, 3), config(252, 2, 512, 6)],
    };
    let small = [
        config(64, 2, 256, 4),
        config(32, 2, 256, 4),
        config(16, 2, 256, 4),
        config(8, 2, 512, 8),
        config(4, 4, 256, 4),
        config(1, 4, 256, 1),
    ];
    large.into_iter().chain(small).collect()
}

fn dots(arch: &ArchProfile) -> Vec<MatmulConfig> {
    let units = arch.processors.unwrap_or(1);
    let vector = (arch.load_bytes / 4).clamp(4, 16);
    let config =
        |[rows, cols]: [u32; 2]| MatmulConfig::Dots(DotsConfig { rows, cols, vector, units });
    [[1, 4], [1, 8], [2, 4], [4, 4], [8, 2]].map(config).to_vec()
}

/// Few rows on a GPU: `rows` at once as there are, and sums that registers hold.
fn lanes(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<MatmulConfig> {
    // Tensor cores do more rows as fast: 33.7 us for 8 x 14336 x 4096.
    let most = if mma_inst(arch, problem.precision).is_some() { 2 } else { MOST_ROWS };
    if arch.backend == Backend::Cpu || problem.m > most {
        return Vec::new();
    }
    let rows = problem.m.next_power_of_two();
    let shapes = match rows {
        1 | 2 => {
            [[256, 32, 4], [256, 32, 2], [128, 128, 4], [128, 64, 2], [128, 128, 2], [256, 16, 4]]
        }
        _ => [[256, 32, 2], [128, 32, 4], [128, 128, 4], [128, 64, 2], [128, 128, 2], [256, 32, 1]],
    };
    shapes
        .map(|[units, lanes, cols]| MatmulConfig::Lanes(LanesConfig { units, lanes, rows, cols }))
        .to_vec()
}

/// Whether a path normalises the rows that it multiplies, and a launch less is worth it: of more rows than these the
/// multiply-adds are what such products wait for, and nobody has measured that more of them pay.
pub(super) fn takes_norm(arch: &ArchProfile, problem: &MatmulProblem) -> bool {
    let few = problem.norm.is_some() && problem.m <= MOST_NORMED_ROWS;
    few && lanes(arch, problem).iter().any(|c| check(arch, problem, c).is_ok())
}

/// What is multiplied by units in place of tensor cores.
pub(crate) const MOST_NORMED_ROWS: u32 = 2;

/// Rows of A past which the tiles of tensor cores and of shared memory are not mostly empty.
const MOST_ROWS: u32 = 8;

pub(super) fn simplest(
    arch: &ArchProfile,
    problem: &MatmulProblem,
) -> Result<MatmulConfig, Infeasible> {
    let config = match problem.precision {
        // Results of these differ from f32 ones by rounding, so their simplest config is a tensor-core one:
        // the last candidate, so that the first, which runs unmeasured, is compared with another. Where
        // there is none, what the smallest tile lacks, all lack.
        Precision::Tf32 | Precision::F16Acc16 => {
            candidates(arch, problem).pop().unwrap_or(MMA[MMA.len() - 1])
        }
        _ if problem.norm.is_some() => lanes(arch, problem)
            .pop()
            .ok_or_else(|| lacks("a path that normalises so many rows as it multiplies them"))?,
        _ if arch.backend == Backend::Cpu => cores(arch).pop().expect("the list has an end"),
        _ => SIMPLEST_GPU,
    };
    check(arch, problem, &config).map(|()| config)
}

pub(super) fn check(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    config: &MatmulConfig,
) -> Result<(), Infeasible> {
    let precision = problem.precision;
    if let Some(dtype) =
        [precision.storage(), problem.out].into_iter().find(|d| !arch.dtypes.contains(d))
    {
        return Err(lacks(format!("{dtype} buffers")));
    }
    check_sizes(config)?;
    turns(arch, loop_turns(problem, config))?;
    if precision.sums() == DType::F16
        && !matches!(config, MatmulConfig::Mma(_) | MatmulConfig::Tma(_))
    {
        return Err(lacks("f16 sums but in matrix instructions"));
    }
    if problem.grouped && problem.batch_slices(arch).len() > 1 {
        return Err(lacks(format!("{} groups in one launch", problem.batch())));
    }
    match (problem.norm, config) {
        (None, _) => {}
        (Some(NormKind::Layer), _) => {
            return Err(lacks("a path that takes the mean off rows that it multiplies"));
        }
        (Some(_), MatmulConfig::Lanes(_)) if !problem.grouped => {}
        (Some(_), _) => {
            return Err(lacks("a path that normalises so many rows as it multiplies them"));
        }
    }
    match config {
        MatmulConfig::Mma(c) => {
            let elem = problem.precision.storage().size();
            let lhs = c.lhs_tile(problem.lhs.layout, elem);
            check_mma(arch, problem, c, [lhs, c.rhs_tile(problem.rhs.layout, elem)])
        }
        MatmulConfig::Tma(c) => check_tma(arch, problem, c),
        MatmulConfig::Cube(c) => check_cube(arch, problem, c),
        MatmulConfig::Plane(c) => check_plane(arch, problem, c),
        MatmulConfig::Ahead(c) => check_ahead(arch, problem, c),
        MatmulConfig::Fma(c) => check_fma(arch, problem, c),
        MatmulConfig::Cores(c) => check_cores(arch, problem, c),
        MatmulConfig::Dots(c) => check_dots(arch, problem, c),
        MatmulConfig::Lanes(c) => check_lanes(arch, problem, c),
    }
}

/// Turns of loops of a unit over k, at the most: tiles and each of their k, where units share k a vector of theirs. The turn
/// that finds a loop at its end is one.
fn loop_turns(problem: &MatmulProblem, config: &MatmulConfig) -> u64 {
    let k = u64::from(problem.k);
    let tile_k = match config {
        MatmulConfig::Lanes(c) => return k.div_ceil(u64::from(c.lanes)) + 1,
        MatmulConfig::Mma(c) | MatmulConfig::Tma(c) => c.tile_k,
        MatmulConfig::Cube(c) => c.tile_k,
        MatmulConfig::Plane(c) | MatmulConfig::Ahead(c) => c.tile_k,
        MatmulConfig::Fma(c) => c.tile_k,
        MatmulConfig::Cores(c) => c.block_k,
        MatmulConfig::Dots(c) => c.vector,
    };
    k.div_ceil(u64::from(tile_k)) * (u64::from(tile_k) + 2) + 1
}

/// A cache is a file that people edit: no other rule may divide by zero or overflow.
fn check_sizes(config: &MatmulConfig) -> Result<(), Infeasible> {
    let out = config.sizes().into_iter().find(|(_, value)| !(1..=1 << 14).contains(value));
    out.map_or(Ok(()), |(name, value)| Err(shape(name, value, "sizes are 1 to 16384")))
}

/// [`check`] of a product whose right operand is codes that become halves.
pub(crate) fn check_coded(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &MmaConfig,
) -> Result<(), Infeasible> {
    check_sizes(&MatmulConfig::Mma(*c))?;
    check_mma(arch, problem, c, [bytes::halves_tile(*c), bytes::codes_tile(*c)])
}

fn mma_inst(arch: &ArchProfile, precision: Precision) -> Option<MmaShape> {
    arch.mma_for(precision.instruction(), precision.sums())
}

fn check_mma(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &MmaConfig,
    tiles: [TileShape; 2],
) -> Result<(), Infeasible> {
    let precision = problem.precision;
    if precision == Precision::F32 {
        return Err(lacks("f32 matrix instructions"));
    }
    let inst = mma_inst(arch, precision)
        .ok_or_else(|| lacks(format!("{} matrix instructions", precision.name())))?;
    if !arch.async_copy {
        return Err(lacks("asynchronous copies"));
    }
    let powers = [("tile_m", c.tile_m), ("tile_n", c.tile_n), ("tile_k", c.tile_k)];
    if let Some((name, value)) = powers.into_iter().find(|(_, v)| !v.is_power_of_two()) {
        return Err(shape(name, value, "tiles are powers of two, or the swizzle leaves them"));
    }
    let (part_m, part_n) = c.plane_tile();
    if part_m % 16 != 0 || part_m == 0 {
        return Err(shape("tile_m", c.tile_m, "a plane needs a multiple of 16 rows"));
    }
    if part_n % 16 != 0 || part_n == 0 {
        return Err(shape("tile_n", c.tile_n, "a plane needs a multiple of 16 columns"));
    }
    if c.tile_k % inst.k != 0 {
        return Err(shape("tile_k", c.tile_k, "not a multiple of the instruction's depth"));
    }
    if c.tile_k / inst.k % 2 != 0 {
        return Err(shape("tile_k", c.tile_k, "fragments alternate between two register sets"));
    }
    if c.planes_m * c.planes_n > 32 {
        return Err(shape("planes_m", c.planes_m, "a cube has 32 planes at most"));
    }
    if c.parts > 1 && problem.batch_slices(arch).len() > 1 {
        return Err(shape("parts", c.parts, "partial sums hold the batches of one launch"));
    }
    if c.parts > 1 && problem.grouped {
        return Err(shape("parts", c.parts, "groups fill the device as they are"));
    }
    let tiles_k = problem.k.div_ceil(c.tile_k);
    if (c.parts - 1) * c.part_tiles(problem.k) >= tiles_k {
        return Err(shape("parts", c.parts, "every part needs a tile of k"));
    }
    if c.stages < 2 {
        return Err(shape("stages", c.stages, "a ring needs two"));
    }
    let units = c.units();
    if tiles.iter().any(|t| t.len() / t.chunk() % units as usize != 0) {
        return Err(shape("planes_m", c.planes_m, "the copies of a tile do not divide"));
    }
    if tiles.iter().any(|t| t.elem == 4 && t.transposed && t.cols < 32) {
        return Err(shape("tile_n", c.tile_n, "a transposed 4-byte tile needs 32 columns"));
    }
    if c.registers(precision.sums().size()) > 255 {
        return Err(shape("planes_n", c.planes_n, "accumulators and fragments would spill"));
    }
    let stage: u64 = tiles.iter().map(|tile| u64::from(tile.bytes())).sum();
    limits(arch, units, u32::try_from(u64::from(c.stages) * stage).unwrap_or(u32::MAX))
}

fn check_tma(arch: &ArchProfile, problem: &MatmulProblem, c: &MmaConfig) -> Result<(), Infeasible> {
    let elem = problem.precision.storage().size();
    if !arch.tma {
        return Err(lacks("bulk tensor copies"));
    }
    if problem.grouped || problem.batch() > 1 {
        return Err(lacks("bulk copies of several products"));
    }
    let tiles = [c.lhs_tile(problem.lhs.layout, elem), c.rhs_tile(problem.rhs.layout, elem)];
    check_mma(arch, problem, c, tiles)?;
    if tiles.iter().any(|tile| tile.bulk_swizzle().is_none()) {
        return Err(shape("tile_k", c.tile_k, "lines of a tile are 32, 64 or 128 bytes along k"));
    }
    let widest = 16 / elem;
    let [lhs, rhs, _] = problem.widths(widest as u64);
    if [lhs, rhs] != [widest; 2] {
        return Err(shape("tile_k", c.tile_k, "lines of an operand are not whole chunks"));
    }
    if c.tile_m > 256 || c.tile_n > 256 {
        return Err(shape("tile_m", c.tile_m, "a bulk copy has 256 lines at most"));
    }
    let all = problem.k.div_ceil(c.tile_k);
    let each = c.part_tiles(problem.k);
    if [each, all - (c.parts - 1) * each].iter().any(|tiles| tiles % c.stages != 0) {
        return Err(shape("stages", c.stages, "a part of k is whole rounds of stages"));
    }
    // The ring begins at a multiple of what the swizzle repeats after, beside two barriers a stage.
    limits(arch, c.units(), c.shared_bytes(elem) + (16 * c.stages).next_multiple_of(1024))
}

fn check_cube(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &CubeConfig,
) -> Result<(), Infeasible> {
    let ab = problem.precision.instruction();
    if problem.precision == Precision::F32 {
        return Err(lacks("f32 cube-scope matrices"));
    }
    if !is_plain(problem) && c.parts == 1 {
        return Err(lacks("epilogues on cube-scope matrices"));
    }
    // Loads of groups, which begin anywhere, are clamped: 4.5 ms where plane scope took 3.4 (8 groups of 4096 x 4096 x 4096).
    if problem.grouped {
        return Err(lacks("groups on cube-scope matrices"));
    }
    let fits = |s: &CubeMma| {
        (s.ab, s.acc) == (ab, DType::F32)
            && s.units.is_none_or(|units| units == c.units)
            && [(c.tile_m, s.m), (c.tile_n, s.n), (c.tile_k, s.k)].iter().all(|(t, g)| t % g == 0)
    };
    if !arch.cube_mma.iter().any(fits) {
        return Err(lacks(format!("cube-scope {ab} matrices of that granularity")));
    }
    if c.unroll > 8 {
        return Err(shape("unroll", c.unroll, "at most 8 tiles a round"));
    }
    // What is past k, or past a part of it, would be multiplied all the same.
    if c.unroll > 1 && problem.k % (c.tile_k * c.unroll) != 0 {
        return Err(shape("unroll", c.unroll, "rounds that do not divide k"));
    }
    if c.parts > 1 {
        let (each, all) = (c.part_tiles(problem.k), problem.k.div_ceil(c.tile_k));
        if (c.parts - 1) * each >= all {
            return Err(shape("parts", c.parts, "every part needs a tile of k"));
        }
        if each % c.unroll != 0 {
            return Err(shape("unroll", c.unroll, "rounds that do not divide a part of k"));
        }
        if problem.batch_slices(arch).len() > 1 {
            return Err(shape("parts", c.parts, "partial sums hold the batches of one launch"));
        }
        if problem.batch() * u64::from(c.parts) > 65_535 {
            return Err(shape("parts", c.parts, "more cubes than a grid has in a line"));
        }
    }
    let spans = [problem.lhs.stride, problem.rhs.stride];
    if spans.iter().any(|s| *s > u64::from(u32::MAX)) {
        return Err(shape("stride", u32::MAX, "tensor layouts hold 32-bit strides"));
    }
    // So far along an axis they begin, and partial sums.
    let [lhs, rhs, out] = problem.extents();
    let reach = lhs.max(rhs).max(out * c.parts as usize);
    if (has_starts(problem) || c.parts > 1) && reach > u32::MAX as usize {
        return Err(shape("batch", u32::MAX, "tensor layouts hold 32-bit sizes"));
    }
    limits(arch, c.units, arch.cube_mma_reserved_bytes)
}

/// Whether some batch begins past the start of a buffer.
fn has_starts(problem: &MatmulProblem) -> bool {
    problem.batch() > 1 || problem.lhs.start > 0 || problem.rhs.start > 0
}

/// The 16 x 16 plane-scope matrices of a precision, the deepest.
pub(crate) fn plane_inst(arch: &ArchProfile, precision: Precision) -> Option<MmaShape> {
    let ab = precision.instruction();
    let fits = |s: &&MmaShape| s.ab == ab && s.acc == DType::F32 && s.m == 16 && s.n == 16;
    arch.cmma.iter().filter(fits).max_by_key(|s| s.k).copied()
}

fn check_plane(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &PlaneConfig,
) -> Result<(), Infeasible> {
    plane_scope(arch, problem, c)?;
    let rows = |l| l == Layout::Row;
    let shared = c.shared_bytes(
        rows(problem.lhs.layout),
        rows(problem.rhs.layout),
        problem.precision.storage().size(),
    );
    limits(arch, c.planes() * arch.plane_size.0, shared)
}

fn check_ahead(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &PlaneConfig,
) -> Result<(), Infeasible> {
    if arch.backend != Backend::Vulkan {
        return Err(lacks("plane-scope matrices that are loaded from words"));
    }
    plane_scope(arch, problem, c)?;
    let plane = arch.plane_size.0;
    if c.registers(plane) > 270 {
        return Err(shape("tile_m", c.tile_m, "sums and tiles on their way would spill"));
    }
    let rows = |l| l == Layout::Row;
    let shared = c.shared_bytes_ahead(rows(problem.lhs.layout), rows(problem.rhs.layout));
    limits(arch, c.planes() * plane, shared)
}

/// Whether the device has plane-scope matrices of the problem's, and they divide the tiles.
fn plane_scope(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &PlaneConfig,
) -> Result<(), Infeasible> {
    let precision = problem.precision;
    if matches!(precision, Precision::F32 | Precision::Tf32) {
        return Err(lacks(format!("{} plane-scope matrices", precision.name())));
    }
    let inst = plane_inst(arch, precision)
        .ok_or_else(|| lacks(format!("16 x 16 plane-scope {} matrices", precision.name())))?;
    let (plane, most) = arch.plane_size;
    if plane != most {
        return Err(lacks("one fixed plane size"));
    }
    if c.tile_m % (16 * c.planes_m) != 0 || c.tile_n % (16 * c.planes_n) != 0 {
        return Err(shape("tile_m", c.tile_m, "planes hold multiples of 16 x 16"));
    }
    if c.tile_k % inst.k != 0 {
        return Err(shape("tile_k", c.tile_k, "not a multiple of the instruction's depth"));
    }
    Ok(())
}

fn check_fma(arch: &ArchProfile, problem: &MatmulProblem, c: &FmaConfig) -> Result<(), Infeasible> {
    if problem.precision == Precision::Tf32 {
        return Err(lacks("tf32 without matrix instructions"));
    }
    if arch.backend == Backend::Cpu {
        return Err(lacks("cheap barriers"));
    }
    if c.stages == 2 || c.stages > 1 && !arch.async_copy {
        return Err(lacks("asynchronous copies"));
    }
    if c.stages > 1 && problem.precision != Precision::F32 {
        return Err(shape("stages", c.stages, "the ring is read in chunks of four f32"));
    }
    if c.stages > 1 && (c.tile_k % 8 != 0 || !c.tile_k.is_power_of_two()) {
        return Err(shape(
            "tile_k",
            c.tile_k,
            "the ring is read in pairs of passes, four deep each",
        ));
    }
    if c.own_m % 4 != 0 || c.own_n % 4 != 0 {
        return Err(shape("own_m", c.own_m, "a unit owns whole vectors of four"));
    }
    if c.own_m * c.own_n + 4 * c.own_m > 192 {
        return Err(shape("own_m", c.own_m, "sums and operands would spill"));
    }
    let (tile_m, tile_n) = c.tile();
    if [tile_m, tile_n].iter().any(|t| t * c.tile_k / 4 % c.units() != 0) {
        return Err(shape("groups_m", c.groups_m, "the copies of a tile do not divide"));
    }
    limits(arch, c.units(), c.shared_bytes(problem.precision.storage().size()))
}

/// What both paths of the CPU need.
fn check_cpu(arch: &ArchProfile, problem: &MatmulProblem, vector: u32) -> Result<(), Infeasible> {
    if arch.backend != Backend::Cpu {
        return Err(lacks("a core per unit"));
    }
    if problem.precision == Precision::Tf32 {
        return Err(lacks("tf32 matrix instructions"));
    }
    if !vector.is_power_of_two() || vector > 16 {
        return Err(shape("vector", vector, "a vector register holds a power of two, 16 at most"));
    }
    Ok(())
}

fn check_dots(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &DotsConfig,
) -> Result<(), Infeasible> {
    check_cpu(arch, problem, c.vector)?;
    if problem.lhs.layout != Layout::Row || problem.rhs.layout != Layout::Col {
        return Err(shape("vector", c.vector, "an operand does not lie along k"));
    }
    let [lhs, rhs, _] = problem.widths(u64::from(c.vector));
    if lhs != c.vector as usize || rhs != c.vector as usize {
        return Err(shape("vector", c.vector, "lines are not whole vectors"));
    }
    if c.rows > 16 || c.rows * c.cols > 24 {
        return Err(shape("rows", c.rows, "more sums than vector registers"));
    }
    Ok(())
}

fn check_lanes(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &LanesConfig,
) -> Result<(), Infeasible> {
    if arch.backend == Backend::Cpu {
        return Err(lacks("cheap barriers"));
    }
    if problem.precision == Precision::Tf32 {
        return Err(lacks("tf32 without matrix instructions"));
    }
    if problem.lhs.layout != Layout::Row || problem.rhs.layout != Layout::Col {
        return Err(shape("lanes", c.lanes, "an operand does not lie along k"));
    }
    let widest = u64::from(lanes_width(arch, problem));
    let [lhs, rhs, _] = problem.widths(widest);
    if [lhs, rhs] != [widest as usize; 2] {
        return Err(shape("lanes", c.lanes, "lines are not whole vectors"));
    }
    if !c.lanes.is_power_of_two() || c.units % c.lanes != 0 {
        return Err(shape("lanes", c.lanes, "sums are added by halves"));
    }
    if c.rows > 16 || c.cols > 16 || c.rows * c.cols > 32 {
        return Err(shape("rows", c.rows, "sums and operands would spill"));
    }
    limits(arch, c.units, LanesPlan { config: *c, norm: problem.norm }.shared_bytes())
}

/// Elements of the vectors that [`LanesConfig`] loads.
fn lanes_width(arch: &ArchProfile, problem: &MatmulProblem) -> u32 {
    (arch.load_bytes.min(16) / problem.precision.storage().size() as u32).max(1)
}

fn check_cores(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &CoresConfig,
) -> Result<(), Infeasible> {
    check_cpu(arch, problem, c.vector)?;
    if c.rows > 16 || c.rows * c.block_n / c.vector > 32 {
        return Err(shape("rows", c.rows, "more sums than vector registers"));
    }
    for (name, size, of) in [("block_m", c.block_m, c.rows), ("block_n", c.block_n, c.vector)] {
        if of == 0 || size == 0 || size % of != 0 {
            return Err(shape(name, size, "not a multiple of the register block"));
        }
    }
    if c.block_k % c.vector != 0 {
        return Err(shape("block_k", c.block_k, "the panel is packed in whole vectors"));
    }
    if c.stack_bytes() > 256 << 10 {
        return Err(shape("block_k", c.block_k, "the panel outgrows a unit's stack"));
    }
    Ok(())
}

/// A config bound to a problem: comptime path, vector widths and grid.
pub(super) struct Plan {
    pub(super) path: Path,
    /// Elements of a vector of lhs, rhs, out and partial sums.
    pub(super) widths: [usize; 4],
    /// Tiles of k in each part but the last.
    pub(super) part_tiles: u32,
    units: (u32, u32),
    tile: (u32, u32),
    /// Tiles of one cube.
    per_cube: u32,
    /// Cubes that the first dimension of a grid holds.
    cubes_in_a_line: u32,
    /// Cubes of a launch that streams its items through them.
    streams: Option<u32>,
}

impl Plan {
    pub(super) fn new(arch: &ArchProfile, problem: &MatmulProblem, config: &MatmulConfig) -> Self {
        let elem = problem.precision.storage().size();
        let widest = problem.widths(16 / elem as u64);
        let wide_out = problem.out.size() == 2 && problem.n % 8 == 0;
        let cubes_in_a_line = match arch.backend {
            Backend::Cuda => i32::MAX as u32,
            Backend::Cpu => u32::MAX,
            Backend::Vulkan | Backend::WebGpu => 65_535,
        };
        let (lhs, rhs) = (problem.lhs.layout, problem.rhs.layout);
        let (lhs_rows, rhs_rows) = (lhs == Layout::Row, rhs == Layout::Row);
        let exact = |tile_m, tile_n, tile_k| {
            !problem.grouped
                && problem.m % tile_m == 0
                && problem.n % tile_n == 0
                && problem.k % tile_k == 0
        };
        match *config {
            MatmulConfig::Mma(c) | MatmulConfig::Tma(c) => {
                let wide = c.plane_tile().1 % 32 == 0 && wide_out;
                let even = if problem.n % 2 == 0 { 2 } else { 1 };
                let units = c.units() as usize;
                let exact = exact(c.tile_m, c.tile_n, c.tile_k);
                let copies = |shape, width| CopyPlan { shape, width, units, exact };
                Self {
                    path: Path::Mma(MmaPlan {
                        config: MmaConfig { parts: 1, ..c },
                        lhs: copies(c.lhs_tile(lhs, elem), widest[0]),
                        rhs: copies(c.rhs_tile(rhs, elem), widest[1]),
                        inst_k: mma_inst(arch, problem.precision).map_or(0, |s| s.k),
                        bulk: matches!(config, MatmulConfig::Tma(_)),
                        exact,
                        partial: c.parts > 1,
                        half_sums: problem.precision.sums() == DType::F16,
                        codes: Codes::Neither,
                        rounds_tf32: arch.compute_capability >= Some(90),
                    }),
                    widths: [widest[0], widest[1], if wide { 8 } else { even }, even],
                    part_tiles: c.part_tiles(problem.k),
                    units: (32, c.planes_m * c.planes_n),
                    tile: (c.tile_m, c.tile_n),
                    per_cube: 1,
                    cubes_in_a_line,
                    streams: Some(if c.streams(problem.k) {
                        arch.processors.unwrap_or(1) * c.resident(arch, problem.precision)
                    } else {
                        u32::MAX
                    }),
                }
            }
            MatmulConfig::Cube(c) => Self {
                path: Path::Cube(CubePlan {
                    config: CubeConfig { parts: 1, ..c },
                    exact: [
                        problem.m % c.tile_m == 0,
                        problem.n % c.tile_n == 0,
                        problem.k % (c.tile_k * c.unroll) == 0,
                    ],
                    starts: has_starts(problem),
                    partial: c.parts > 1,
                    multiples: [widest[0], widest[1]],
                    lhs_rows,
                    rhs_rows,
                }),
                widths: [1; 4],
                part_tiles: c.part_tiles(problem.k),
                streams: None,
                units: (c.units, 1),
                tile: (c.tile_m, c.tile_n),
                per_cube: 1,
                cubes_in_a_line,
            },
            MatmulConfig::Plane(c) => Self {
                path: Path::Plane(PlanePlan {
                    config: c,
                    plane: arch.plane_size.0,
                    inst_k: plane_inst(arch, problem.precision).map_or(0, |s| s.k),
                    elem,
                    lhs_rows,
                    rhs_rows,
                }),
                widths: [widest[0].min(4), widest[1].min(4), 1, 1],
                part_tiles: 0,
                streams: None,
                units: (arch.plane_size.0, c.planes_m * c.planes_n),
                tile: (c.tile_m, c.tile_n),
                per_cube: 1,
                cubes_in_a_line,
            },
            MatmulConfig::Ahead(c) => Self {
                path: Path::Ahead(AheadPlan {
                    config: c,
                    plane: arch.plane_size.0,
                    inst_k: plane_inst(arch, problem.precision).map_or(0, |s| s.k),
                    lhs_rows,
                    rhs_rows,
                    exact: exact(c.tile_m, c.tile_n, c.tile_k),
                }),
                widths: [widest[0].min(4), widest[1].min(4), 1, 1],
                part_tiles: 0,
                streams: None,
                units: (arch.plane_size.0, c.planes()),
                tile: (c.tile_m, c.tile_n),
                per_cube: 1,
                cubes_in_a_line,
            },
            MatmulConfig::Fma(c) => {
                let tile = c.tile();
                let exact = exact(tile.0, tile.1, c.tile_k);
                Self {
                    path: Path::Fma(FmaPlan::new(c, lhs_rows, !rhs_rows, elem, exact)),
                    widths: [widest[0].min(4), widest[1].min(4), 1, 1],
                    part_tiles: 0,
                    streams: None,
                    units: (c.units(), 1),
                    tile,
                    per_cube: 1,
                    cubes_in_a_line,
                }
            }
            MatmulConfig::Cores(c) => {
                let whole = problem.widths(u64::from(c.vector));
                let all_or_one = |w: usize| if w == c.vector as usize { w } else { 1 };
                Self {
                    path: Path::Cores(CoresPlan {
                        config: c,
                        lhs_along_k: lhs_rows,
                        rhs_along_k: !rhs_rows,
                    }),
                    widths: [1, all_or_one(whole[1]), all_or_one(whole[2]), 1],
                    part_tiles: 0,
                    streams: None,
                    units: (c.units, 1),
                    tile: (c.block_m, c.block_n),
                    per_cube: c.units,
                    cubes_in_a_line,
                }
            }
            MatmulConfig::Lanes(c) => {
                let width = lanes_width(arch, problem) as usize;
                Self {
                    path: Path::Lanes(LanesPlan { config: c, norm: problem.norm }),
                    widths: [width, width, 1, 1],
                    part_tiles: 0,
                    streams: None,
                    units: (c.units, 1),
                    tile: (c.rows, c.columns_of_cube()),
                    per_cube: 1,
                    cubes_in_a_line,
                }
            }
            MatmulConfig::Dots(c) => Self {
                path: Path::Dots(c),
                widths: [c.vector as usize, c.vector as usize, 1, 1],
                part_tiles: 0,
                streams: None,
                units: (c.units, 1),
                tile: (c.rows, c.cols),
                per_cube: c.units,
                cubes_in_a_line,
            },
        }
    }

    /// Types of operands, instruction and result.
    pub(super) fn types(problem: &MatmulProblem) -> [ElemType; 3] {
        let precision = problem.precision;
        [elem(precision.storage()), elem(precision.instruction()), elem(problem.out)]
    }

    /// Offsets past 2^32 elements need 64-bit indices, which cost registers; but not where only results
    /// are indexed, 128 a unit: there they let constant distances into the instructions, which a sum
    /// that may wrap does not.
    pub(super) fn address(&self, problem: &MatmulProblem) -> AddressType {
        let longest = problem.extents().into_iter().max().unwrap_or(0);
        let ring = matches!(self.path, Path::Fma(plan) if plan.config.stages > 1);
        if ring || longest > u32::MAX as usize { AddressType::U64 } else { AddressType::U32 }
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.units.0, self.units.1)
    }

    pub(super) fn cubes(&self, problem: &MatmulProblem, batch: u32, parts: u32) -> CubeCount {
        let (rows, cols) = (problem.m.div_ceil(self.tile.0), problem.n.div_ceil(self.tile.1));
        let tiles = rows * cols;
        match self.streams {
            Some(streams) => {
                let items = match problem.grouped {
                    // Each group may have one block that is not full; the kernel counts them.
                    true => u64::from(rows + batch) * u64::from(cols),
                    false => u64::from(tiles) * u64::from(parts) * u64::from(batch),
                };
                CubeCount::Static(items.min(u64::from(streams)) as u32, 1, 1)
            }
            None => {
                let cubes = tiles.div_ceil(self.per_cube);
                let lines = cubes.div_ceil(self.cubes_in_a_line);
                CubeCount::Static(cubes.div_ceil(lines), batch * parts, lines)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::matmul::Batches;

    fn problem(sizes: [u32; 3], layouts: [Layout; 2], precision: Precision) -> MatmulProblem {
        MatmulProblem::dense(1, sizes, layouts, precision).expect("valid sizes")
    }

    #[test]
    fn rows_are_normalised_where_few_of_them_meet_a_weight_along_k() {
        let arch = |name| ArchProfile::recorded(name).expect("recorded");
        let takes = |arch: &ArchProfile, m, rhs, norm| {
            let plain = problem([m, 4096, 4096], [Layout::Row, rhs], Precision::Bf16);
            let p = MatmulProblem { norm: Some(norm), ..plain };
            let found = candidates(arch, &p);
            assert_eq!(takes_norm(arch, &p), !found.is_empty());
            assert!(found.iter().all(|c| matches!(c, MatmulConfig::Lanes(_))), "{found:?}");
            assert_eq!(simplest(arch, &p).is_ok(), !found.is_empty());
            !found.is_empty()
        };
        let cuda = arch("rtx4090");
        assert!(takes(&cuda, 1, Layout::Col, NormKind::Rms));
        assert!(takes(&cuda, 2, Layout::Col, NormKind::RmsPlusOne));
        assert!(!takes(&cuda, 3, Layout::Col, NormKind::Rms), "tensor cores do more rows as fast");
        assert!(!takes(&cuda, 1, Layout::Row, NormKind::Rms));
        assert!(!takes(&cuda, 1, Layout::Col, NormKind::Layer));
        let plain = problem([1, 4096, 4096], [Layout::Row, Layout::Col], Precision::Bf16);
        assert!(!takes_norm(&cuda, &plain), "there is none");
    }

    #[test]
    fn every_profile_has_a_candidate_and_every_candidate_passes_its_check() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for precision in Precision::ALL {
                for lhs in [Layout::Row, Layout::Col] {
                    for rhs in [Layout::Row, Layout::Col] {
                        for sizes in [[1, 1, 1], [7, 129, 33], [4096, 4096, 4096]] {
                            let p = problem(sizes, [lhs, rhs], precision);
                            let found = candidates(&arch, &p);
                            assert!(!found.is_empty(), "{name} {p:?}");
                            for c in found {
                                check(&arch, &p, &c).expect("candidates are checked");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_that_an_edited_cache_may_hold_are_refused() {
        let (gpu, cpu) = (ArchProfile::recorded("rtx4090").expect("recorded"), cpu());
        let p = problem([64, 64, 64], [Layout::Row, Layout::Col], Precision::F16);
        let known: Vec<_> =
            candidates(&gpu, &p).into_iter().chain(FMA).map(|c| (&gpu, c)).collect();
        let cores = candidates(&cpu, &p).into_iter().map(|c| (&cpu, c));
        let mut vulkan = ArchProfile { backend: Backend::Vulkan, ..gpu.clone() };
        let of = |ab| MmaShape { ab, acc: DType::F32, m: 16, n: 16, k: 16 };
        vulkan.cmma = [of(DType::F16)].into();
        vulkan.cube_mma = vulkan.cmma.iter().map(|s| CubeMma::of(*s, None)).collect();
        let matrices = candidates(&vulkan, &p).into_iter().map(|c| (&vulkan, c));
        let matrices: Vec<_> = matrices.collect();
        assert!(matrices.iter().any(|(_, c)| matches!(c, MatmulConfig::Cube(_))));
        for (arch, config) in known.into_iter().chain(cores).chain(matrices) {
            let fields = serde_json::to_value(config).expect("plain data");
            for name in fields.as_object().expect("a struct").keys().filter(|k| *k != "path") {
                for bad in [0, 3, u32::MAX] {
                    let mut edited = fields.clone();
                    edited[name] = bad.into();
                    let edited: MatmulConfig = serde_json::from_value(edited).expect("numbers");
                    let verdict = check(arch, &p, &edited); // must not panic
                    assert!(bad == 3 || verdict.is_err(), "{edited:?}");
                }
            }
        }
        let odd = CoresConfig { vector: 3, block_n: 33, ..cores_config(&cpu) };
        assert!(check(&cpu, &p, &MatmulConfig::Cores(odd)).is_err());
    }

    #[test]
    fn a_product_that_the_device_would_not_end_is_refused() {
        let arch = ArchProfile {
            backend: Backend::WebGpu,
            max_loop_turns: Some(65_535),
            mma: BTreeSet::new(),
            async_copy: false,
            ..recorded("rtx4090")
        };
        let of = |k, layouts| problem([2, 3, k], layouts, Precision::F32);
        let across = [Layout::Col, Layout::Row];
        let config = simplest(&arch, &of(50_000, across)).expect("few turns");
        check(&arch, &of(50_000, across), &config).expect("few turns");
        let refused = Err(Infeasible::Turns { need: 65_536 / 16 * 18 + 1, have: 65_535 });
        assert_eq!(check(&arch, &of(65_536, across), &config), refused);
        assert!(candidates(&arch, &of(65_536, across)).is_empty());
        // Units that share k take fewer.
        let along = [Layout::Row, Layout::Col];
        let shared = candidates(&arch, &of(65_536, along));
        assert!(!shared.is_empty());
        assert!(shared.iter().all(|c| matches!(c, MatmulConfig::Lanes(_))), "{shared:?}");
        let endless = ArchProfile { max_loop_turns: None, ..arch };
        check(&endless, &of(65_536, across), &config).expect("no limit");
    }

    #[test]
    fn candidates_of_a_cpu_are_each_one() {
        for load_bytes in [16, 32, 64] {
            let all = cores(&ArchProfile { load_bytes, ..cpu() });
            let mut each = all.clone();
            each.sort_unstable_by_key(|config| format!("{config:?}"));
            each.dedup();
            assert_eq!(each.len(), all.len(), "{load_bytes}");
        }
    }

    #[test]
    fn bulk_copies_are_for_one_product_along_k() {
        let (with, without) = (recorded("h200"), recorded("rtx4090"));
        let p = problem([4096; 3], [Layout::Row, Layout::Col], Precision::Bf16);
        let of = |arch: &ArchProfile, p: &MatmulProblem| -> Vec<_> {
            let tma = |c: &MatmulConfig| matches!(c, MatmulConfig::Tma(_));
            candidates(arch, p).into_iter().filter(tma).collect()
        };
        assert_eq!((of(&with, &p).len(), of(&without, &p).len()), (TMA.len(), 0));
        let config = of(&with, &p)[0];
        let rows = problem([4096; 3], [Layout::Row; 2], Precision::Bf16);
        let several =
            MatmulProblem::dense(2, [4096; 3], [Layout::Row, Layout::Col], Precision::Bf16);
        // Lines that are not whole chunks, and stages that do not go around.
        let [odd, short] = [4095, 4096 - 64]
            .map(|k| problem([4096, 4096, k], [Layout::Row, Layout::Col], Precision::Bf16));
        for refused in [rows, several.expect("valid"), odd, short] {
            assert!(check(&with, &refused, &config).is_err(), "{refused:?}");
        }
    }

    fn recorded(name: &str) -> ArchProfile {
        ArchProfile::recorded(name).expect("recorded")
    }

    /// A CPU with two cores and 16-lane registers.
    fn cpu() -> ArchProfile {
        ArchProfile {
            backend: Backend::Cpu,
            processors: Some(2),
            load_bytes: 64,
            ..ArchProfile::recorded("rtx4090").expect("recorded")
        }
    }

    fn cores_config(arch: &ArchProfile) -> CoresConfig {
        match cores(arch)[0] {
            MatmulConfig::Cores(c) => c,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn few_rows_of_a_linear_layer_are_not_packed() {
        let (cpu, linear) = (cpu(), [Layout::Row, Layout::Col]);
        let dots = |sizes, layouts| {
            let all = candidates(&cpu, &problem(sizes, layouts, Precision::F32));
            let is = |c: &MatmulConfig| matches!(c, MatmulConfig::Dots(_));
            (is(&all[0]), all.iter().any(is))
        };
        for m in [1, 2, 8] {
            assert_eq!(dots([m, 4096, 4096], linear), (true, true), "{m}");
        }
        assert_eq!(dots([512, 512, 256], linear), (true, true), "compiling would take longest");
        assert_eq!(dots([512, 4096, 4096], linear), (false, true), "what is packed is faster");
        assert_eq!(dots([1, 4096, 4092], linear), (false, false), "lines end within a vector");
        assert_eq!(dots([1, 4096, 4096], [Layout::Row; 2]), (false, false), "rhs lies along n");
        assert_eq!(dots([1, 4096, 4096], [Layout::Col; 2]), (false, false), "lhs lies along m");
    }

    #[test]
    fn parts_are_for_the_batches_of_one_launch() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let batches = Batches { outer: 2, inner: 3, lhs: (64 * 4096, 0), rhs: (0, 64 * 4096) };
        let one = problem([64, 64, 4096], [Layout::Row, Layout::Row], Precision::Bf16);
        let two = MatmulProblem { batches, ..one };
        let parts = |p: &MatmulProblem| candidates(&arch, p).iter().map(MatmulConfig::parts).max();
        assert!(parts(&one) > Some(1), "a deep problem is cut");
        assert_eq!(parts(&two), Some(1), "this one takes two launches");
    }

    #[test]
    fn rtx_cards_never_get_more_shared_memory_than_they_have() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = problem([4096; 3], [Layout::Row, Layout::Row], Precision::Bf16);
        let greedy = mma([256, 256, 64], [4, 4], 4);
        let need = 4 * (256 + 256) * 64 * 2;
        let have = 99 << 10;
        assert_eq!(check(&arch, &p, &greedy), Err(Infeasible::SharedMemory { need, have }));
    }
}
