//! Attention configs: requirements, checks and candidates to measure.

use arch::{ArchProfile, DType, MmaShape};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::flash::{FlashConfig, FlashPlan};
use super::problem::{AttentionProblem, Implementation};
use super::rows::RowsConfig;
use super::subgroup::SubgroupConfig;
use crate::fits::{iterations, lacks, limits, rtx, shape, stores};

/// A path and its tile sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum AttentionConfig {
    Flash(FlashConfig),
    #[serde(rename = "plane")]
    Subgroup(SubgroupConfig),
    Rows(RowsConfig),
}

impl AttentionConfig {
    /// Smallest config of the matrix path for `arch`.
    const fn smallest(arch: &ArchProfile) -> Self {
        match arch.matrices_from_words() {
            true => Self::Subgroup(subgroup(2, 16, 16)),
            false => Self::Flash(flash(2, 16, 16, 2)),
        }
    }

    /// Queries per cube, for paths that process blocks of queries.
    const fn tile_q(self) -> Option<u32> {
        match self {
            Self::Flash(c) => Some(c.tile_q()),
            Self::Subgroup(c) => Some(c.tile_q()),
            Self::Rows(_) => None,
        }
    }
}

impl Implementation {
    /// Returns the default config, used without tuning.
    ///
    /// # Errors
    /// The reason why the implementation does not support the problem on this device.
    pub fn config(
        self,
        arch: &ArchProfile,
        problem: &AttentionProblem,
    ) -> Result<AttentionConfig, Infeasible> {
        let in_blocks = |c: &AttentionConfig| c.tile_q().is_some();
        match self {
            Self::Plain => baseline(arch, problem),
            Self::Flash => {
                match candidates(arch, problem).into_iter().find(in_blocks) {
                    Some(config) => Ok(config),
                    // A requirement that the smallest config misses, every config misses.
                    None => {
                        let smallest = AttentionConfig::smallest(arch);
                        check(arch, problem, &smallest).map(|()| smallest)
                    }
                }
            }
        }
    }
}

pub(super) const fn flash(planes: u32, rows: u32, tile_kv: u32, stages: u32) -> FlashConfig {
    FlashConfig { planes, rows, tile_kv, stages }
}

/// Ordered by how often they win.
const FLASH: [FlashConfig; 9] = [
    flash(4, 32, 32, 2),
    flash(4, 32, 32, 3),
    flash(4, 32, 64, 2),
    flash(4, 16, 64, 2),
    flash(8, 32, 32, 2),
    flash(8, 16, 64, 2),
    flash(4, 16, 32, 3),
    flash(4, 16, 32, 2),
    flash(2, 16, 32, 3),
];

pub(super) const fn subgroup(planes: u32, rows: u32, tile_kv: u32) -> SubgroupConfig {
    SubgroupConfig { planes, rows, tile_kv }
}

const SUBGROUP: [SubgroupConfig; 7] = [
    subgroup(8, 16, 32),
    subgroup(4, 16, 16),
    subgroup(8, 16, 16),
    subgroup(4, 16, 32),
    subgroup(4, 32, 32),
    subgroup(2, 32, 32),
    subgroup(2, 16, 32),
];

pub(super) fn candidates(arch: &ArchProfile, problem: &AttentionProblem) -> Vec<AttentionConfig> {
    let all: Vec<_> = match arch.matrices_from_words() {
        true => SUBGROUP.map(AttentionConfig::Subgroup).into(),
        false => FLASH.map(AttentionConfig::Flash).into(),
    };
    let worth =
        |c: &AttentionConfig| check(arch, problem, c).is_ok() && !(rtx(arch) && spills(problem, c));
    let mut found: Vec<_> = all.into_iter().filter(worth).collect();
    // Prefer configs that fill the rows of a cube and give every processor a cube.
    let heads = u64::from(problem.batch) * u64::from(problem.heads);
    let waste = |c: &AttentionConfig| {
        c.tile_q().map_or(u64::MAX, |tile_q| {
            let blocks = u64::from(problem.seq_q.div_ceil(tile_q)) * heads;
            let waves = blocks.div_ceil(u64::from(arch.processors.unwrap_or(32)));
            waves * u64::from(tile_q)
        })
    };
    let least = found.iter().map(waste).min().unwrap_or(0);
    found.retain(|c| waste(c) <= 2 * least);
    found.sort_by_key(|c| waste(c) > least + least / 4);
    if found.is_empty() {
        found.extend(baseline(arch, problem));
    }
    found
}

/// Returns true where ptxas 13.0 spills 8 or 16 bytes (stores and loads) although registers are
/// free. Found by `cargo xtask targets`.
fn spills(problem: &AttentionProblem, config: &AttentionConfig) -> bool {
    let AttentionConfig::Flash(c) = config else { return false };
    let ragged = problem.varlen || problem.seq_kv % c.tile_kv != 0;
    ragged && (65..=128).contains(&problem.head_dim) && (c.rows, c.tile_kv, c.stages) == (16, 32, 3)
}

pub(super) fn baseline(
    arch: &ArchProfile,
    problem: &AttentionProblem,
) -> Result<AttentionConfig, Infeasible> {
    let config = AttentionConfig::Rows(RowsConfig::new(arch));
    check(arch, problem, &config).map(|()| config)
}

pub(super) fn check(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    config: &AttentionConfig,
) -> Result<(), Infeasible> {
    serves(arch, problem, config)?;
    iterations(arch, u64::from(problem.seq_kv) + 3)?;
    let c = match config {
        AttentionConfig::Flash(c) => c,
        AttentionConfig::Subgroup(c) => return check_subgroup(arch, problem, *c),
        AttentionConfig::Rows(_) => return Ok(()),
    };
    let plan = FlashPlan::new(*c, problem.head_dim, true, problem.width(8), false, false);
    for copies in [plan.q, plan.kv] {
        if !copies.divides() {
            return Err(shape(
                "tile_kv",
                c.tile_kv,
                "the units cannot share the copies of a tile equally",
            ));
        }
    }
    if c.registers(problem.head_dim) + addresses(problem) > 255 {
        return Err(shape("rows", c.rows, "accumulators and scores would spill registers"));
    }
    limits(arch, c.units(), c.shared_bytes(problem.head_dim))
}

fn check_subgroup(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    c: SubgroupConfig,
) -> Result<(), Infeasible> {
    let plane = arch.plane_size.0;
    // A software device keeps registers in memory, so it has no spills.
    if plane > 16 && c.registers(problem.head_dim, plane) > 270 {
        return Err(shape("rows", c.rows, "accumulators and scores would spill registers"));
    }
    matrices(arch, c, c.shared_bytes(problem.head_dim))
}

/// Checks the tile sizes of a cooperative-matrix config, its units and its `shared_bytes`.
pub(super) fn matrices(
    arch: &ArchProfile,
    c: SubgroupConfig,
    shared_bytes: u32,
) -> Result<(), Infeasible> {
    for (name, value, allowed) in [
        ("rows", c.rows, &[16u32, 32][..]),
        ("planes", c.planes, &[1, 2, 4, 8]),
        ("tile_kv", c.tile_kv, &[16, 32, 48, 64]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("expected one of {allowed:?}")));
        }
    }
    limits(arch, c.planes * arch.plane_size.0, shared_bytes)
}

/// Registers for the addresses of a bias or mask. With 32 rows at head_dim 128 they spill 164 bytes
/// (sm_120).
pub(super) const fn addresses(problem: &AttentionProblem) -> u32 {
    if problem.bias.is_some() || problem.mask.is_some() { 32 } else { 0 }
}

/// Checks that the device supports `config`, for the forward and the backward pass.
pub(super) fn serves(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    config: &AttentionConfig,
) -> Result<(), Infeasible> {
    let mask = problem.mask.map(|_| problem.mask_dtype);
    stores(arch, [problem.dtype].into_iter().chain(mask))?;
    if let AttentionConfig::Rows(c) = config {
        return limits(arch, c.units, 0);
    }
    // Each is one dimension of the grid.
    for (name, value) in [("batch", problem.batch), ("heads", problem.heads)] {
        if value > 65_535 {
            return Err(shape(name, value, "expected at most 65535"));
        }
    }
    let AttentionConfig::Flash(c) = config else {
        return plane_scope(arch, problem);
    };
    tensor_cores(arch, problem.dtype, problem.head_dim, 8)?;
    for (name, value, allowed) in [
        ("rows", c.rows, &[16u32, 32][..]),
        ("planes", c.planes, &[1, 2, 4, 8]),
        ("tile_kv", c.tile_kv, &[16, 32, 48, 64, 128]),
        ("stages", c.stages, &[2, 3, 4]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("expected one of {allowed:?}")));
        }
    }
    limits(arch, c.units(), 0)
}

/// Checks that the device has the matrices of the cooperative-matrix path and that they divide the
/// head dimension.
fn plane_scope(arch: &ArchProfile, problem: &AttentionProblem) -> Result<(), Infeasible> {
    if !arch.matrices_from_words() {
        return Err(lacks("subgroup cooperative matrices that load from u32 shared memory"));
    }
    let (ab, acc) = (problem.dtype, DType::F32);
    if ab == DType::F32 {
        return Err(lacks("f32 subgroup cooperative matrices"));
    }
    if !arch.cmma.contains(&MmaShape { ab, acc, m: 16, n: 16, k: 16 }) {
        return Err(lacks(format!("16 x 16 x 16 subgroup cooperative matrices of {ab}")));
    }
    let (plane, max_plane) = arch.plane_size;
    if plane != max_plane || ![8, 16, 32, 64].contains(&plane) {
        return Err(lacks("a fixed plane size of 8 to 64 units"));
    }
    if problem.head_dim % 8 != 0 || problem.head_dim > 256 {
        return Err(shape("head_dim", problem.head_dim, "expected a multiple of 8 up to 256"));
    }
    Ok(())
}

/// Checks that the device has the instructions of the `mma.sync` paths and that the head dimension
/// is a multiple of `multiple`.
pub(super) fn tensor_cores(
    arch: &ArchProfile,
    dtype: DType,
    head_dim: u32,
    multiple: u32,
) -> Result<(), Infeasible> {
    if dtype == DType::F32 {
        return Err(lacks("f32 matrix instructions"));
    }
    let inst = arch.mma_for(dtype, DType::F32);
    if !arch.inline_ptx() || inst.is_none_or(|s| s.k != 16) {
        return Err(lacks(format!("{dtype} matrix instructions with k = 16")));
    }
    if !arch.async_copy {
        return Err(lacks("asynchronous copies"));
    }
    if head_dim % multiple != 0 || head_dim > 256 {
        let why = format!("expected a multiple of {multiple} up to 256");
        return Err(shape("head_dim", head_dim, &why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The driver would refuse a launch with so large a grid.
    #[test]
    fn more_heads_or_batches_than_a_grid_has_go_by_rows() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        for (batch, heads, fits) in
            [(65_535, 2, true), (70_000, 2, false), (2, 65_535, true), (1, 70_000, false)]
        {
            let p = AttentionProblem::dense(batch, [heads, heads], [16, 16], 64, DType::Bf16)
                .expect("valid");
            let rows = |c: &AttentionConfig| matches!(c, AttentionConfig::Rows(_));
            assert_eq!(candidates(&arch, &p).iter().all(rows), !fits, "{batch} x {heads}");
            let flash = AttentionConfig::Flash(FLASH[0]);
            assert_eq!(check(&arch, &p, &flash).is_ok(), fits, "{batch} x {heads}");
        }
    }
}
