//! Path for any GPU: multiply-adds over shared tiles.
//!
//! | loop                             | level                                                       |
//! |----------------------------------|-------------------------------------------------------------|
//! | `(tile_m, tile_n)` blocks of C, in `parts` splits of k | cubes                                 |
//! | `k0` in steps of `tile_k`        | ring of `stages` shared tiles; without asynchronous copies  |
//! |                                  | one tile, and the next is prefetched into registers         |
//! | `(own_m, own_n)` grids of C      | units, 4 x 8 of them in a group, accumulators in registers  |
//! | `kk` in steps of a vector        | registers                                                   |
//!
//! A tile has the layout of its operand. If k is contiguous, a unit reads vectors of k for each of
//! its rows (four apart) or columns (eight apart). Otherwise it reads vectors of neighbouring rows
//! or columns for each k. In both cases a group of 32 units reads each 16 bytes once and shares
//! them.
//!
//! Floor: a step of `own_m · own_n` multiply-adds reads `own_m + own_n` elements, so a 16 x 8 grid
//! does 5.3 multiply-adds per read. f32 multiply-adds in registers reach 62.6 TFLOP/s on an H200.
//!
//! Ladder, TFLOP/s at 8192^3 f32 on an H200 (torch 51), B column-major / row-major; Vulkan at
//! 4096^3:
//!
//! | version                                                            | col | row | Vulkan |
//! |--------------------------------------------------------------------|-----|-----|--------|
//! | v1 8 x 8 grids, one tile at a time, single elements from shared    | 30  | 31  |        |
//! | v2 vectors from swizzled tiles, grids of 16 x 8, next tile prefetched | 38 | 41 | 36    |
//! | v3 v2 read by [`ring`] on CUDA                                     | 46  | 50  | 34     |
//!
//! Vulkan keeps v2's loop; the cause of its loss since then is unknown. Instructions that a unit
//! with a 16 x 8 grid executes per tile of depth 16, including 2048 multiply-adds and 96 reads of
//! shared memory:
//!
//! | version                                           | sm_89 col | row  | sm_90 col | row  |
//! |---------------------------------------------------|-----------|------|-----------|------|
//! | v2 a pass is a loop, reads compute addresses      | 2559      | 2545 |           |      |
//! | v3 a tile is unrolled, distances are immediates   | 2211      | 2200 | 2207      | 2199 |
//!
//! v4 splits k, and [`split_k`](super::split_k) adds the partial sums: few blocks with a deep k left
//! most processors idle. A run of resnet50 in f32, batch 1, takes 0.784 instead of 2.99 ms (H200 as
//! RTX 4090, untuned, two calls).
//!
//! A CUDA C++ prototype of v2's tile with immediate distances reached 45 / 47.

mod mainloop;
mod ring;
mod tile;

use arch::ArchProfile;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::path::{self, Grid, Path, check_splits};
use super::problem::{Layout, MatmulProblem, Precision};
use crate::fits::{lacks, limits, shape};
use crate::tile::TileShape;
use tile::{FmaOperand, GROUP};

pub(super) use mainloop::multiply;

/// Tile sizes of the multiply-add path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FmaConfig {
    /// Results per unit: rows, columns.
    pub own_m: u32,
    pub own_n: u32,
    /// Grid of groups of 32 units that share the tile.
    pub groups_m: u32,
    pub groups_n: u32,
    pub tile_k: u32,
    /// Shared tiles in the ring; 1 without asynchronous copies.
    pub stages: u32,
    /// Number of split-k splits; each is the work of another cube.
    #[serde(default = "path::one_part")]
    pub parts: u32,
}

impl FmaConfig {
    /// Baseline config of a GPU: synchronous copies, no tensor cores, small tiles.
    pub(super) const BASELINE: Self = fma([4, 4], [2, 1], 16);

    pub(crate) const fn units(self) -> u32 {
        32 * self.groups_m * self.groups_n
    }

    fn shared_bytes(self, elem: usize) -> u32 {
        let (m, n) = self.tile();
        self.stages * (m + n) * self.tile_k * elem as u32
    }

    /// k tiles per split, except the last.
    const fn part_tiles(self, k: u32) -> u32 {
        path::part_tiles(k, self.tile_k, self.parts)
    }

    /// Returns the config without splits, and with splits that give each processor one cube, 8 warps
    /// or 16.
    fn with_splits(self, arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        let blocks = problem.blocks(self.tile());
        let processors = u64::from(arch.processors.unwrap_or(32));
        let cubes = |warps: u32| u64::from((32 * warps).div_ceil(self.units())) * processors;
        let wishes = [1, 8, 16].map(|warps| cubes(warps) / blocks);
        let parts = path::split_counts(problem.k, self.tile_k, wishes).into_iter();
        parts.map(|parts| Self { parts, ..self }).collect()
    }

    /// Returns the comptime parameters of the kernel instance.
    pub(super) fn plan(&self, problem: &MatmulProblem) -> FmaPlan {
        let exact = problem.divides(self.tile(), self.tile_k);
        let (lhs, rhs) = (problem.lhs.layout, problem.rhs.layout);
        let elem = problem.precision.storage().size();
        FmaPlan {
            partial: self.parts > 1,
            ..FmaPlan::new(*self, lhs == Layout::Row, rhs == Layout::Col, elem, exact)
        }
    }
}

const fn fma(own: [u32; 2], groups: [u32; 2], tile_k: u32) -> FmaConfig {
    let ([own_m, own_n], [groups_m, groups_n]) = (own, groups);
    FmaConfig { own_m, own_n, groups_m, groups_n, tile_k, stages: 1, parts: 1 }
}

/// Configs, most frequent winners first.
pub(super) const CONFIGS: [FmaConfig; 9] = [
    fma([16, 8], [2, 4], 16),
    fma([8, 16], [4, 2], 16),
    fma([16, 8], [2, 4], 8),
    fma([16, 8], [2, 2], 16),
    fma([16, 8], [2, 2], 8),
    fma([8, 8], [4, 2], 16),
    fma([8, 8], [2, 2], 16),
    FmaConfig::BASELINE,
    fma([4, 4], [1, 2], 32),
];

impl Path for FmaConfig {
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        let dense = problem.window.is_none();
        let ring = arch.async_copy && problem.precision.storage().size() == 4 && dense;
        let stages = if ring { 3 } else { 1 };
        let all = CONFIGS.map(|c| Self { stages, ..c });
        all.iter().flat_map(|c| c.with_splits(arch, problem)).collect()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("own_m", self.own_m),
            ("own_n", self.own_n),
            ("groups_m", self.groups_m),
            ("groups_n", self.groups_n),
            ("tile_k", self.tile_k),
            ("stages", self.stages),
            ("parts", self.parts),
        ]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        if problem.precision == Precision::Tf32 {
            return Err(lacks("matrix instructions for tf32"));
        }
        if arch.cores().is_some() {
            return Err(lacks("cheap barriers (a GPU)"));
        }
        if self.stages == 2 || self.stages > 1 && !arch.async_copy {
            return Err(lacks("asynchronous copies"));
        }
        if self.stages > 1 && problem.precision != Precision::F32 {
            return Err(shape("stages", self.stages, "more than one stage needs f32 operands"));
        }
        if self.stages > 1 && (self.tile_k % 8 != 0 || !self.tile_k.is_power_of_two()) {
            let why = "expected a power of two that is a multiple of 8";
            return Err(shape("tile_k", self.tile_k, why));
        }
        if self.own_m % 4 != 0 || self.own_n % 4 != 0 {
            return Err(shape(
                "own_m",
                self.own_m,
                "expected own_m and own_n to be multiples of 4",
            ));
        }
        if self.own_m * self.own_n + 4 * self.own_m > 192 {
            return Err(shape(
                "own_m",
                self.own_m,
                "accumulators and operands would spill registers",
            ));
        }
        let (tile_m, tile_n) = self.tile();
        if [tile_m, tile_n].iter().any(|t| t * self.tile_k / 4 % self.units() != 0) {
            return Err(shape(
                "groups_m",
                self.groups_m,
                "the units cannot share the copies of a tile equally",
            ));
        }
        check_splits(arch, problem, self)?;
        limits(arch, self.units(), self.shared_bytes(problem.precision.storage().size()))
    }

    fn gathers(&self) -> bool {
        self.stages == 1
    }

    fn tile(&self) -> (u32, u32) {
        (self.groups_m * GROUP.0 * self.own_m, self.groups_n * GROUP.1 * self.own_n)
    }

    fn tile_k(&self) -> u32 {
        self.tile_k
    }

    fn splits(&self) -> u32 {
        self.parts
    }

    /// Eight warps hide the latency of a multiply-add and of shared memory.
    fn concurrent(&self) -> f64 {
        f64::from((256 / self.units()).max(1))
    }

    fn grid(&self, _arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let [lhs, rhs, _] = problem.widest().map(|width| width.min(4));
        Grid {
            widths: [lhs, rhs, 1, 1],
            // The ring uses indices only for results, 128 per unit. 32-bit sums may wrap, so the
            // compiler cannot fold constant distances into the instructions; 64-bit sums allow it.
            wide_indices: self.stages > 1,
            part_tiles: self.part_tiles(problem.k),
            ..Grid::new(self.tile(), (self.units(), 1))
        }
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FmaPlan {
    pub(crate) config: FmaConfig,
    pub(crate) lhs: FmaOperand,
    pub(crate) rhs: FmaOperand,
    /// True if every tile is full: no edge needs a check.
    pub(crate) exact: bool,
    /// True if accumulators go to the workspace of split-k.
    pub(crate) partial: bool,
}

impl FmaPlan {
    fn new(
        config: FmaConfig,
        lhs_along_k: bool,
        rhs_along_k: bool,
        elem: usize,
        exact: bool,
    ) -> Self {
        let (tile_m, tile_n) = config.tile();
        let shape = |outer, along_k: bool| TileShape {
            swizzled: along_k,
            ..TileShape::new(outer, config.tile_k, !along_k, elem)
        };
        Self {
            config: FmaConfig { parts: 1, ..config },
            lhs: FmaOperand { tile: shape(tile_m, lhs_along_k), own: config.own_m, group: GROUP.0 },
            rhs: FmaOperand { tile: shape(tile_n, rhs_along_k), own: config.own_n, group: GROUP.1 },
            exact,
            partial: false,
        }
    }
}
