//! How to compute it: configs, what they need, which are worth measuring.

use arch::{ArchProfile, Backend, DType};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::AttentionProblem;
use super::flash::{FlashConfig, FlashPlan};
use super::rows::RowsConfig;
use crate::fits::{lacks, limits, shape, stores};

/// One way to run an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum AttentionConfig {
    Flash(FlashConfig),
    Rows(RowsConfig),
}

impl AttentionConfig {
    pub(super) const fn smallest_flash() -> Self {
        Self::Flash(flash(2, 16, 16, 2))
    }
}

/// Which kernel computes an attention, where a caller forces one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Implementation {
    /// Tensor cores; the scores stay in registers.
    Flash,
    /// One key after the other, in f32: what others are checked against.
    Plain,
}

impl Implementation {
    /// The config of it that runs unmeasured.
    ///
    /// # Errors
    /// Why it cannot serve the problem on the device.
    pub fn config(
        self,
        arch: &ArchProfile,
        problem: &AttentionProblem,
    ) -> Result<AttentionConfig, Infeasible> {
        let flash = |c: &AttentionConfig| matches!(c, AttentionConfig::Flash(_));
        match self {
            Self::Plain => simplest(arch, problem),
            Self::Flash => match candidates(arch, problem).into_iter().find(flash) {
                Some(config) => Ok(config),
                // What the smallest lacks, every one lacks.
                None => {
                    let smallest = AttentionConfig::smallest_flash();
                    check(arch, problem, &smallest).map(|()| smallest)
                }
            },
        }
    }
}

pub(super) const fn flash(planes: u32, rows: u32, tile_kv: u32, stages: u32) -> FlashConfig {
    FlashConfig { planes, rows, tile_kv, stages }
}

/// In the order of how often they win.
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

pub(super) fn candidates(arch: &ArchProfile, problem: &AttentionProblem) -> Vec<AttentionConfig> {
    let mut found: Vec<_> = FLASH
        .into_iter()
        .map(AttentionConfig::Flash)
        .filter(|c| check(arch, problem, c).is_ok())
        .collect();
    // A cube should have rows to work on, and every processor a cube.
    let heads = u64::from(problem.batch) * u64::from(problem.heads);
    let waste = |c: &AttentionConfig| match c {
        AttentionConfig::Flash(c) => {
            let blocks = u64::from(problem.seq_q.div_ceil(c.tile_q())) * heads;
            let waves = blocks.div_ceil(u64::from(arch.processors.unwrap_or(32)));
            waves * u64::from(c.tile_q())
        }
        AttentionConfig::Rows(_) => u64::MAX,
    };
    let least = found.iter().map(waste).min().unwrap_or(0);
    found.retain(|c| waste(c) <= 2 * least);
    found.sort_by_key(|c| waste(c) > least + least / 4);
    if found.is_empty() {
        found.extend(simplest(arch, problem));
    }
    found
}

pub(super) fn simplest(
    arch: &ArchProfile,
    problem: &AttentionProblem,
) -> Result<AttentionConfig, Infeasible> {
    let config = AttentionConfig::Rows(RowsConfig::of(arch));
    check(arch, problem, &config).map(|()| config)
}

pub(super) fn check(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    config: &AttentionConfig,
) -> Result<(), Infeasible> {
    serves(arch, problem, config)?;
    let AttentionConfig::Flash(c) = config else { return Ok(()) };
    let plan = FlashPlan::new(*c, problem.head_dim, true, problem.width(8), false, false);
    for copies in [plan.q, plan.kv] {
        if !copies.divides() {
            return Err(shape("tile_kv", c.tile_kv, "the copies of a tile do not divide"));
        }
    }
    if c.registers(problem.head_dim) + addresses(problem) > 255 {
        return Err(shape("rows", c.rows, "results and scores would spill"));
    }
    limits(arch, c.units(), c.shared_bytes(problem.head_dim))
}

/// Registers for the addresses of a bias or mask: with 32 rows of 128 they spill 164 bytes (sm_120).
pub(super) const fn addresses(problem: &AttentionProblem) -> u32 {
    if problem.bias.is_some() || problem.mask.is_some() { 32 } else { 0 }
}

/// Whether the device has what `config` is made of, for passes in both directions.
pub(super) fn serves(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    config: &AttentionConfig,
) -> Result<(), Infeasible> {
    let mask = problem.mask.map(|_| problem.mask_dtype);
    stores(arch, [problem.dtype].into_iter().chain(mask))?;
    let c = match config {
        AttentionConfig::Flash(c) => c,
        AttentionConfig::Rows(c) => return limits(arch, c.units, 0),
    };
    tensor_cores(arch, problem.dtype, problem.head_dim)?;
    for (name, value, allowed) in [
        ("rows", c.rows, &[16u32, 32][..]),
        ("planes", c.planes, &[1, 2, 4, 8]),
        ("tile_kv", c.tile_kv, &[16, 32, 48, 64, 128]),
        ("stages", c.stages, &[2, 3, 4]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("one of {allowed:?}")));
        }
    }
    limits(arch, c.units(), 0)
}

/// Whether the device has the instructions of the tensor-core paths, and they divide the head dimension.
pub(super) fn tensor_cores(
    arch: &ArchProfile,
    dtype: DType,
    head_dim: u32,
) -> Result<(), Infeasible> {
    if dtype == DType::F32 {
        return Err(lacks("f32 matrix instructions"));
    }
    let inst = arch.mma_for(dtype, DType::F32);
    if arch.backend != Backend::Cuda || inst.is_none_or(|s| s.k != 16) {
        return Err(lacks(format!("{dtype} matrix instructions 16 deep")));
    }
    if !arch.async_copy {
        return Err(lacks("asynchronous copies"));
    }
    if head_dim % 16 != 0 || head_dim > 256 {
        return Err(shape("head_dim", head_dim, "a multiple of 16 up to 256"));
    }
    Ok(())
}
