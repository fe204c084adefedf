//! Tensor-core path for CUDA: `mma.sync` fed by `ldmatrix` from a ring of `cp.async` stages.
//!
//! | loop                              | level                                                  |
//! |-----------------------------------|--------------------------------------------------------|
//! | items: `(tile_m, tile_n)` blocks, in `parts` splits of k | cubes, one row of them for the whole launch |
//! | `k0` in steps of `tile_k`         | ring of `stages` shared tiles, `stages - 1` ahead      |
//! | `(plane_m, plane_n)` parts        | planes, accumulators in registers                      |
//! | `kk` in steps of the instruction  | fragments in registers, prefetched one step ahead      |
//!
//! A cube processes its items as one stream: while it multiplies the last tiles of one block, the
//! copies of the next are in flight. With split-k, partial sums go to a workspace in f32, and
//! [`super::split_k`] adds them in a fixed order.
//!
//! Three types define an instance: [`accumulators`] by precision, a [`source`] of the rhs that
//! decodes stored words into fragments, and a [`feed`] that fills the ring.
//!
//! Ladder, TFLOP/s at 4096^3 bf16, B column-major / row-major, on an H200 restricted to an RTX
//! 4090's features. Its limit with operands in registers is 620; Burn 0.22.1 reached 268 / 214 in
//! the same run:
//!
//! | version                                                            | col | row |
//! |--------------------------------------------------------------------|-----|-----|
//! | v1 ring of 3 stages, 128 x 128 x 32, four planes of 64 x 64        | 381 | 376 |
//! | v2 v1, fragments loaded one step ahead of the multiply (dropped)   | 370 | 336 |
//! | v3 v1, addresses in vectors, fragments at constant distances       | 369 | 390 |
//! | v4 fragments one step ahead, 128 x 256 x 32, eight planes, streams | 413 | 411 |
//! | v5 v4, addresses in bytes: 128 instructions per tile, 64 of them HMMA | 492 | 490 |
//!
//! v2 lacked cheap addresses: its prefetches waited for address arithmetic, and so did v4's. A warp
//! of v4 spent one cycle in six waiting for `ldmatrix`; in v5 it spends almost none. In v5 the
//! tensor pipe is the first stall, then the barrier (0.43 of 6.4 cycles per instruction) and the
//! copies (0.41). The card is at its power limit: 1.98 GHz when idle, 1.6 to 1.75 under this load.
//! v4 and v5 were timed for 25 ms. Over the 100 ms of the records v5 reaches 470 / 466 on one card
//! and 488 / 481 on another. At 8192^3 it reaches 446 / 451 and 450 / 474, where the first 25 ms
//! give 516 / 517: the remaining limit is energy per multiply, not time.
//!
//! Tried and slower at the same tile (CUDA C++ prototypes of v5, 467 at 4096^3 before streaming):
//! - `mbarrier` full/empty pairs instead of the barrier: 418.
//! - 256 x 192 x 32 with planes of 64 x 96, which leaves no registers for prefetching: 404.
//! - Two stages of 64 instead of four of 32: 375.
//! - Groups of 4 or 16 block rows instead of 8: 454 and 423. For v5 at 8192^3, bf16 and tf32,
//!   groups of 4, 12, 16 and 24 are within 2% of 8.
//! - Copies through the L1 cache: 393.
//!
//! Without copies the loop reaches 517, without fragment loads 540. Whole waves do not pay either.
//! 128 x 224 x 32 (planes of 64 x 56) makes 256 blocks of 512 x 14336 x 4096 for 132 processors;
//! 128 x 256 makes 224. It takes 145 us instead of 144, most likely because the partial last wave of
//! 128 x 256 runs on a card below its power limit. At 4096^3 it reaches 405 instead of 491.

mod accumulators;
mod feed;
mod fragments;
mod mainloop;
mod source;
mod store;
mod window_feed;
mod work;

use arch::{ArchProfile, DType};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::path::{self, Grid, Path, check_sizes, check_splits, mma_inst};
use super::problem::{Layout, MatmulProblem, Precision};
use crate::fits::{lacks, limits, shape};
use crate::tile::{CopyPlan, TileShape};

pub(crate) use accumulators::{F32Accumulators, I32Accumulators};
pub(crate) use feed::{CopyFeed, Feed, FeedExpand, Maps, MapsLaunch};
pub(crate) use mainloop::{multiply, multiply_dense};
pub(crate) use source::{RightOperand, RightOperandExpand};
pub(crate) use store::store_quad;
pub(crate) use window_feed::WindowFeed;
pub(crate) use work::{Item, Work};

/// Tile sizes of the tensor-core path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MmaConfig {
    /// Rows, columns and depth of a cube's tile.
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Grid of planes that share the tile.
    pub planes_m: u32,
    pub planes_n: u32,
    /// Shared tiles in the ring.
    pub stages: u32,
    /// Number of split-k splits; each is the work of another cube.
    pub parts: u32,
}

impl MmaConfig {
    /// Config with tiles `[tile_m, tile_n, tile_k]` and planes `[planes_m, planes_n]`, without
    /// split-k.
    pub(crate) const fn new(tiles: [u32; 3], planes: [u32; 2], stages: u32) -> Self {
        let ([tile_m, tile_n, tile_k], [planes_m, planes_n]) = (tiles, planes);
        Self { tile_m, tile_n, tile_k, planes_m, planes_n, stages, parts: 1 }
    }

    pub(crate) const fn units(self) -> u32 {
        32 * self.planes_m * self.planes_n
    }

    /// Rows and columns of one plane's part of the tile.
    pub(crate) const fn plane_tile(self) -> (u32, u32) {
        (self.tile_m / self.planes_m, self.tile_n / self.planes_n)
    }

    /// Shared tile of lhs, with elements of `elem` bytes.
    pub(crate) const fn lhs_tile(self, layout: Layout, elem: usize) -> TileShape {
        TileShape::new(self.tile_m, self.tile_k, matches!(layout, Layout::Col), elem)
    }

    /// Shared tile of rhs, with elements of `elem` bytes.
    pub(crate) const fn rhs_tile(self, layout: Layout, elem: usize) -> TileShape {
        TileShape::new(self.tile_n, self.tile_k, matches!(layout, Layout::Row), elem)
    }

    pub(crate) const fn shared_bytes(self, elem: usize) -> u32 {
        self.stages * (self.tile_m + self.tile_n) * self.tile_k * elem as u32
    }

    /// Estimated registers per unit: accumulators of `sum` bytes, two steps of fragments,
    /// addresses.
    const fn registers(self, sum: usize) -> u32 {
        let (m, n) = self.plane_tile();
        m * n * sum as u32 / 128 + (m + n) / 2 + 56
    }

    /// Number of cubes that fit on one processor at the same time.
    pub(crate) fn resident(self, arch: &ArchProfile, precision: Precision) -> u32 {
        const REGISTERS: u32 = 65_536;
        const RESERVED: u32 = 1024; // shared memory per cube that the driver reserves
        let by_registers = REGISTERS / (self.registers(precision.sums().size()) * self.units());
        let shared = self.shared_bytes(precision.storage().size());
        let by_shared = (arch.max_shared_bytes + RESERVED) / (shared + RESERVED);
        by_registers.min(by_shared).max(1)
    }

    /// Returns true if a cube may process several items. The copies look at most one item ahead.
    pub(crate) const fn streams(self, k: u32) -> bool {
        let last = k.div_ceil(self.tile_k) - (self.parts - 1) * self.part_tiles(k);
        last >= self.stages
    }

    /// k tiles per split, except the last.
    pub(crate) const fn part_tiles(self, k: u32) -> u32 {
        path::part_tiles(k, self.tile_k, self.parts)
    }

    /// Returns the config, and with the splits that fill idle processors once and twice.
    pub(super) fn with_splits(self, arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        if problem.grouped || problem.interleaved {
            return vec![self];
        }
        let blocks = problem.blocks((self.tile_m, self.tile_n));
        let room = arch.processors.unwrap_or(1) * self.resident(arch, problem.precision);
        let wishes = [1, 2].map(|times| times * u64::from(room) / blocks);
        let parts = path::split_counts(problem.k, self.tile_k, wishes).into_iter();
        parts.map(|parts| Self { parts, ..self }).collect()
    }

    /// Checks everything except the layout of the operands, whose shared tiles are `tiles`.
    pub(super) fn check_tiles(
        &self,
        arch: &ArchProfile,
        problem: &MatmulProblem,
        tiles: [TileShape; 2],
    ) -> Result<(), Infeasible> {
        let precision = problem.precision;
        if precision == Precision::F32 {
            return Err(lacks("f32 matrix instructions"));
        }
        let inst = mma_inst(arch, precision)
            .ok_or_else(|| lacks(format!("{} matrix instructions", precision.name())))?;
        if !arch.async_copy || !arch.inline_ptx() {
            return Err(lacks("asynchronous copies"));
        }
        // Rows of a shared tile may be any number.
        let tile_n = if tiles[1].transposed { self.tile_n } else { 16 };
        let powers = [("tile_m", self.tile_m), ("tile_n", tile_n), ("tile_k", self.tile_k)];
        if let Some((name, value)) = powers.into_iter().find(|(_, v)| !v.is_power_of_two()) {
            return Err(shape(
                name,
                value,
                "expected a power of two, because the swizzle stays within a tile",
            ));
        }
        let (part_m, part_n) = self.plane_tile();
        if part_m % 16 != 0 || part_m == 0 {
            return Err(shape("tile_m", self.tile_m, "expected a multiple of 16 rows per plane"));
        }
        if part_n % 16 != 0 || part_n == 0 {
            return Err(shape(
                "tile_n",
                self.tile_n,
                "expected a multiple of 16 columns per plane",
            ));
        }
        if self.tile_k % inst.k != 0 {
            return Err(shape("tile_k", self.tile_k, "expected a multiple of the instruction's k"));
        }
        if self.tile_k / inst.k % 2 != 0 {
            let why = "expected an even number of k steps, because fragments alternate between two \
                 register sets";
            return Err(shape("tile_k", self.tile_k, why));
        }
        if self.planes_m * self.planes_n > 32 {
            return Err(shape("planes_m", self.planes_m, "expected at most 32 planes per cube"));
        }
        check_splits(arch, problem, self)?;
        if self.stages < 2 {
            return Err(shape("stages", self.stages, "expected at least 2 stages"));
        }
        let units = self.units();
        if tiles.iter().any(|t| t.len() / t.chunk() % units as usize != 0) {
            return Err(shape(
                "planes_m",
                self.planes_m,
                "the units cannot share the copies of a tile equally",
            ));
        }
        if tiles.iter().any(|t| t.elem == 4 && t.transposed && t.cols < 32) {
            let why = "expected at least 32 columns for a transposed tile of 4-byte elements";
            return Err(shape("tile_n", self.tile_n, why));
        }
        if self.registers(precision.sums().size()) > 255 {
            let why = "accumulators and fragments would spill registers";
            return Err(shape("planes_n", self.planes_n, why));
        }
        let stage: u64 = tiles.iter().map(|tile| u64::from(tile.bytes())).sum();
        limits(arch, units, u32::try_from(u64::from(self.stages) * stage).unwrap_or(u32::MAX))
    }

    /// Shared tiles of both operands in their memory layout.
    pub(super) const fn tiles(&self, problem: &MatmulProblem) -> [TileShape; 2] {
        let elem = problem.precision.storage().size();
        [self.lhs_tile(problem.lhs.layout, elem), self.rhs_tile(problem.rhs.layout, elem)]
    }

    /// Returns the comptime parameters of the kernel instance for dense operands.
    pub(crate) fn plan(&self, arch: &ArchProfile, problem: &MatmulProblem) -> MmaPlan {
        let [lhs, rhs] = self.tiles(problem);
        let [width_lhs, width_rhs, _] = problem.widest();
        let exact = problem.divides(self.tile(), self.tile_k);
        let units = self.units() as usize;
        let copies = |shape, width| CopyPlan { shape, width, units, exact };
        // Windows have edges even in whole tiles.
        let inside = exact && problem.window.is_none();
        MmaPlan {
            config: Self { parts: 1, ..*self },
            lhs: CopyPlan { exact: inside, ..copies(lhs, width_lhs) },
            rhs: copies(rhs, width_rhs),
            inst_k: mma_inst(arch, problem.precision).map_or(0, |s| s.k),
            fixed_stages: false,
            streams: problem.window.is_none(),
            exact,
            partial: self.parts > 1,
            accumulates_f16: problem.precision.sums() == DType::F16,
            packing: 1,
            rounds_tf32: arch.compute_capability >= Some(90),
        }
    }
}

/// Configs, most frequent winners first; depths are for 2-byte elements and halve for 4.
const CONFIGS: [MmaConfig; 11] = [
    MmaConfig::new([128, 256, 32], [2, 4], 4),
    MmaConfig::new([256, 128, 32], [4, 2], 4),
    MmaConfig::new([128, 128, 32], [2, 2], 3),
    MmaConfig::new([128, 128, 64], [2, 4], 3),
    MmaConfig::new([128, 64, 64], [2, 2], 3),
    MmaConfig::new([64, 128, 64], [2, 2], 4),
    MmaConfig::new([64, 64, 64], [2, 2], 6),
    MmaConfig::new([64, 64, 128], [2, 2], 2),
    MmaConfig::new([32, 64, 128], [1, 4], 3),
    MmaConfig::new([16, 64, 128], [1, 4], 4),
    MmaConfig::SMALLEST,
];

/// Configs for channels of U-Nets, which 160 or 192 divide but no large power of two.
const CHANNELS: [MmaConfig; 2] =
    [MmaConfig::new([64, 160, 64], [2, 2], 3), MmaConfig::new([64, 192, 64], [2, 2], 3)];

impl MmaConfig {
    /// Smallest tile; every other config needs at least as much.
    pub(super) const SMALLEST: Self = Self::new([16, 32, 128], [1, 2], 6);

    /// Returns `configs` with their depth adapted to the element size, each with and without
    /// split-k.
    pub(super) fn fitted(
        configs: &[Self],
        arch: &ArchProfile,
        problem: &MatmulProblem,
    ) -> Vec<Self> {
        let halves = if problem.precision.storage().size() == 4 { 2 } else { 1 };
        let fitted = |c: &Self| Self { tile_k: c.tile_k / halves, ..*c };
        configs.iter().map(fitted).flat_map(|c| c.with_splits(arch, problem)).collect()
    }
}

impl Path for MmaConfig {
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        let mut configs = Self::fitted(&CONFIGS, arch, problem);
        let divides = |c: &Self| problem.n.is_multiple_of(c.tile_n);
        let own: Vec<_> = CHANNELS.into_iter().filter(divides).collect();
        configs.extend(Self::fitted(&own, arch, problem));
        configs
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("tile_m", self.tile_m),
            ("tile_n", self.tile_n),
            ("tile_k", self.tile_k),
            ("planes_m", self.planes_m),
            ("planes_n", self.planes_n),
            ("stages", self.stages),
            ("parts", self.parts),
        ]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        self.check_tiles(arch, problem, self.tiles(problem))?;
        let Some(window) = &problem.window else { return Ok(()) };
        if !window.packs() {
            return Err(lacks("positions of this image in 16 bits"));
        }
        match self.plan(arch, problem).lhs.stays_in_column() {
            true => Ok(()),
            false => Err(shape("planes_m", self.planes_m, "a unit copies different channels")),
        }
    }

    fn gathers(&self) -> bool {
        true
    }

    fn tile(&self) -> (u32, u32) {
        (self.tile_m, self.tile_n)
    }

    fn tile_k(&self) -> u32 {
        self.tile_k
    }

    fn splits(&self) -> u32 {
        self.parts
    }

    fn accumulates_f16(&self) -> bool {
        true
    }

    fn grid(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let [lhs, rhs, _] = problem.widest();
        let wide = self.plane_tile().1 % 32 == 0 && problem.out.size() == 2 && problem.n % 8 == 0;
        let even = if problem.n % 2 == 0 { 2 } else { 1 };
        let resident = arch.processors.unwrap_or(1) * self.resident(arch, problem.precision);
        let streams = problem.window.is_none() && self.streams(problem.k);
        Grid {
            widths: [lhs, rhs, if wide { 8 } else { even }, even],
            part_tiles: self.part_tiles(problem.k),
            streams: Some(if streams { resident } else { u32::MAX }),
            ..Grid::new(self.tile(), (32, self.planes_m * self.planes_n))
        }
    }
}

/// Checks a matmul whose operands are not those of a dense matmul; their shared tiles are `tiles`.
pub(crate) fn check_source(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    c: &MmaConfig,
    tiles: [TileShape; 2],
) -> Result<(), Infeasible> {
    check_sizes(c)?;
    c.check_tiles(arch, problem, tiles)
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MmaPlan {
    /// Config with one split, so that instances differ only in `partial`.
    pub(crate) config: MmaConfig,
    pub(crate) lhs: CopyPlan,
    pub(crate) rhs: CopyPlan,
    /// Depth of the instruction.
    pub(crate) inst_k: u32,
    /// True if the stage of every tile is known at compile time, and k is whole rounds of stages.
    pub(crate) fixed_stages: bool,
    /// True if a cube may process several items; false for windows, whose items begin with divisions.
    pub(crate) streams: bool,
    /// True if every tile is full: no edge needs a check.
    pub(crate) exact: bool,
    /// True if accumulators go to the workspace.
    pub(crate) partial: bool,
    /// True for dense matmuls with f16 accumulation.
    pub(crate) accumulates_f16: bool,
    /// Values of k per element of the rhs tile.
    pub(crate) packing: usize,
    /// True if one instruction rounds f32 operands to tf32 (compute capability 9.0 or newer).
    pub(crate) rounds_tf32: bool,
}

impl MmaPlan {
    /// Number of tiles in flight while one is multiplied.
    ///
    /// With more than three fixed stages, copies go to the stage that was read one tile earlier, so
    /// that no plane waits for the slowest.
    const fn tiles_in_flight(self) -> u32 {
        let stages = self.config.stages;
        if self.fixed_stages && stages > 3 { stages - 2 } else { stages - 1 }
    }

    /// Returns true if the addresses of the operands stay in registers.
    const fn holds(self) -> bool {
        self.config.tile_m > 16
    }

    pub(crate) const fn stage_bytes(self) -> u32 {
        self.lhs.shape.bytes() + self.rhs.shape.bytes()
    }
}
