//! Interface of a matmul path: sizes, limits and launch geometry of its config.

use arch::{ArchProfile, DType, MmaShape};
use cubecl::prelude::{AddressType, CubeCount, CubeDim};
use tune::Infeasible;

use super::problem::{MatmulProblem, Precision};
use crate::fits::{lacks, shape};

/// Config of one path.
pub(crate) trait Path {
    /// Returns the configs worth trying, most frequent winners first, unchecked.
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self>
    where
        Self: Sized;

    /// Returns every size in the config, by name.
    fn sizes(&self) -> Vec<(&'static str, u32)>;

    /// Checks the config against the device and the problem.
    ///
    /// # Errors
    /// The device lacks a feature, or a size does not fit.
    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible>;

    /// Rows and columns of a block of C.
    fn tile(&self) -> (u32, u32);

    /// Depth of a tile in k.
    fn tile_k(&self) -> u32;

    /// Maximum number of loop iterations of a unit over k: tiles, and each step of k in them. The
    /// check that ends a loop counts as one.
    fn iterations(&self, k: u64) -> u64 {
        let tile_k = u64::from(self.tile_k());
        k.div_ceil(tile_k) * (tile_k + 2) + 1
    }

    /// Number of split-k splits.
    fn splits(&self) -> u32 {
        1
    }

    /// Cubes that a processor must run at the same time to reach its rate.
    fn concurrent(&self) -> f64 {
        1.0
    }

    /// Cost of reading an element, in multiplies.
    fn read_cost(&self) -> f64 {
        16.0
    }

    /// Cost of compiling the instance, in the unit of [`waste`](super::config).
    fn compile_cost(&self, _problem: &MatmulProblem) -> f64 {
        0.0
    }

    /// Returns true if the path can accumulate in f16.
    fn accumulates_f16(&self) -> bool {
        false
    }

    /// Returns true if the path normalises rows of lhs while it multiplies them.
    fn normalizes(&self) -> bool {
        false
    }

    /// Returns true if rows of lhs can be windows of an image.
    fn gathers(&self) -> bool {
        false
    }

    /// Returns the geometry of a launch.
    fn grid(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Grid;
}

/// Checks that every size is in range. Users may edit the tune cache; after this check no other
/// rule divides by zero or overflows.
pub(super) fn check_sizes(config: &dyn Path) -> Result<(), Infeasible> {
    let out = config.sizes().into_iter().find(|(_, value)| !(1..=1 << 14).contains(value));
    out.map_or(Ok(()), |(name, value)| Err(shape(name, value, "expected a size from 1 to 16384")))
}

/// k tiles per split of `parts`, except the last.
pub(super) const fn part_tiles(k: u32, tile_k: u32, parts: u32) -> u32 {
    k.div_ceil(tile_k).div_ceil(parts)
}

/// Returns 1, and the numbers of splits next to `wishes` that leave no split empty, in order. A split
/// has at least four k tiles, which fill a ring of stages.
pub(super) fn split_counts(k: u32, tile_k: u32, wishes: impl IntoIterator<Item = u64>) -> Vec<u32> {
    let tiles = k.div_ceil(tile_k);
    let mut parts: Vec<u32> = wishes
        .into_iter()
        .map(|wish| wish.min(u64::from(tiles / 4)).max(1) as u32)
        .map(|wish| tiles.div_ceil(part_tiles(k, tile_k, wish)))
        .chain([1])
        .collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}

/// Number of splits in a tune cache that names none.
pub(super) const fn one_part() -> u32 {
    1
}

/// Checks that no split of k is empty, and that one launch covers all of them.
pub(super) fn check_splits(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    config: &dyn Path,
) -> Result<(), Infeasible> {
    let (parts, tile_k) = (config.splits(), config.tile_k());
    let why = match parts {
        1 => return Ok(()),
        _ if problem.batch_slices(arch).len() > 1 => "split-k supports one launch only",
        _ if problem.grouped || problem.interleaved => "a grouped matmul does not support split-k",
        _ if problem.batch() * u64::from(parts) > 65_535 => {
            "expected at most 65535 cubes in one grid dimension"
        }
        _ if (parts - 1) * part_tiles(problem.k, tile_k, parts) >= problem.k.div_ceil(tile_k) => {
            "expected at least one k tile per split"
        }
        _ => return Ok(()),
    };
    Err(shape("parts", parts, why))
}

/// Checks the common requirements of both CPU paths.
pub(super) fn check_vector(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    vector: u32,
) -> Result<(), Infeasible> {
    if arch.cores().is_none() {
        return Err(lacks("one core per unit (a CPU)"));
    }
    if problem.precision == Precision::Tf32 {
        return Err(lacks("tf32 matrix instructions"));
    }
    if !vector.is_power_of_two() || vector > 16 {
        return Err(shape("vector", vector, "expected a power of two up to 16"));
    }
    Ok(())
}

/// Geometry of a launch: vectors, units, blocks and cubes.
pub(crate) struct Grid {
    /// Elements per vector of lhs, rhs, out and partial sums.
    pub(crate) widths: [usize; 4],
    /// k tiles per split, except the last.
    pub(crate) part_tiles: u32,
    /// Rows and columns of a block of C.
    pub(super) tile: (u32, u32),
    pub(super) units: (u32, u32),
    /// Blocks of C per cube.
    pub(super) per_cube: u32,
    /// Maximum number of cubes, for a launch that streams work items through them.
    pub(super) streams: Option<u32>,
    /// Forces 64-bit indices, even for small buffers.
    pub(super) wide_indices: bool,
}

impl Grid {
    /// Geometry with one cube of `units` per block of C, and no vectors.
    pub(super) const fn new(tile: (u32, u32), units: (u32, u32)) -> Self {
        Self {
            widths: [1; 4],
            part_tiles: 0,
            tile,
            units,
            per_cube: 1,
            streams: None,
            wide_indices: false,
        }
    }

    /// Index width: offsets past 2^32 elements need 64 bits, which cost registers.
    pub(crate) fn address(&self, problem: &MatmulProblem) -> AddressType {
        let longest = problem.extents().into_iter().max().unwrap_or(0);
        let wide = self.wide_indices || longest > u32::MAX as usize;
        if wide { AddressType::U64 } else { AddressType::U32 }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.units.0, self.units.1)
    }

    /// Number of cubes of a launch with `batch` batches and `splits` splits of k.
    pub(crate) fn cubes(
        &self,
        arch: &ArchProfile,
        problem: &MatmulProblem,
        batch: u32,
        splits: u32,
    ) -> CubeCount {
        let (rows, cols) = (problem.m.div_ceil(self.tile.0), problem.n.div_ceil(self.tile.1));
        let tiles = rows * cols;
        match self.streams {
            Some(streams) => {
                let items = match problem.grouped {
                    // Each group may have one partial block; the kernel counts the blocks.
                    true => u64::from(rows + batch) * u64::from(cols),
                    false => u64::from(tiles) * u64::from(splits) * u64::from(batch),
                };
                CubeCount::Static(items.min(u64::from(streams)) as u32, 1, 1)
            }
            None => {
                let [max, _] = arch.max_cubes();
                let cubes = tiles.div_ceil(self.per_cube);
                let lines = cubes.div_ceil(max);
                CubeCount::Static(cubes.div_ceil(lines), batch * splits, lines)
            }
        }
    }
}

/// Returns the deepest `mma.sync` instruction of a precision.
pub(super) fn mma_inst(arch: &ArchProfile, precision: Precision) -> Option<MmaShape> {
    arch.mma_for(precision.instruction(), precision.sums())
}

/// Returns the deepest 16 x 16 plane-scope matrices of a precision.
pub(crate) fn plane_inst(arch: &ArchProfile, precision: Precision) -> Option<MmaShape> {
    let ab = precision.instruction();
    let fits = |s: &&MmaShape| s.ab == ab && s.acc == DType::F32 && s.m == 16 && s.n == 16;
    arch.cmma.iter().filter(fits).max_by_key(|s| s.k).copied()
}

/// Rows for which cube-scope matrices use split-k; from the first on they are as fast as GEMV.
pub(super) const FEW_ROWS: std::ops::RangeInclusive<u32> = 4..=128;
/// Assumed cubes in flight for few rows, on a card with an unknown number of processors.
pub(crate) const IN_FLIGHT: u64 = 512;
