//! How to compute it: configs, what they need, which are worth measuring.

use arch::{ArchProfile, Backend, DType};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::AttentionProblem;
use super::flash::{FlashConfig, FlashPlan};
use super::rows::RowsConfig;

/// One way to run an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum AttentionConfig {
    Flash(FlashConfig),
    Rows(RowsConfig),
}

impl AttentionConfig {
    const fn smallest_flash() -> Self {
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
    let units = match arch.backend {
        Backend::Cpu => arch.processors.unwrap_or(1),
        _ => 64,
    };
    let config = AttentionConfig::Rows(RowsConfig { units });
    check(arch, problem, &config).map(|()| config)
}

pub(super) fn check(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    config: &AttentionConfig,
) -> Result<(), Infeasible> {
    serves(arch, problem, config)?;
    let AttentionConfig::Flash(c) = config else { return Ok(()) };
    let shape = |name, value: u32, why: &str| {
        Err(Infeasible::Shape { name, value: u64::from(value), why: why.to_owned() })
    };
    let plan = FlashPlan::new(*c, problem.head_dim, true, problem.width(8), false, false);
    for copies in [plan.q, plan.kv] {
        if copies.shape.len() / copies.width % copies.units != 0 {
            return shape("tile_kv", c.tile_kv, "the copies of a tile do not divide");
        }
    }
    // Reading scores for a bias or mask takes addresses: with 32 rows of 128 it spills 164 bytes (sm_120).
    let addresses = if problem.bias.is_some() || problem.mask.is_some() { 32 } else { 0 };
    if c.registers(problem.head_dim) + addresses > 255 {
        return shape("rows", c.rows, "results and scores would spill");
    }
    let (need, have) = (c.shared_bytes(problem.head_dim), arch.max_shared_bytes);
    if need > have {
        return Err(Infeasible::SharedMemory { need, have });
    }
    Ok(())
}

/// Whether the device has what `config` is made of, for passes in both directions.
pub(super) fn serves(
    arch: &ArchProfile,
    problem: &AttentionProblem,
    config: &AttentionConfig,
) -> Result<(), Infeasible> {
    let lacks = |what: String| Err(Infeasible::Feature { what });
    let shape = |name, value: u32, why: &str| {
        Err(Infeasible::Shape { name, value: u64::from(value), why: why.to_owned() })
    };
    if !arch.dtypes.contains(&problem.dtype) {
        return lacks(format!("{} buffers", problem.dtype));
    }
    if problem.mask.is_some() && !arch.dtypes.contains(&problem.mask_dtype) {
        return lacks(format!("{} buffers", problem.mask_dtype));
    }
    let c = match config {
        AttentionConfig::Flash(c) => c,
        AttentionConfig::Rows(c) => return fits(arch, c.units),
    };
    if problem.dtype == DType::F32 {
        return lacks("f32 matrix instructions".to_owned());
    }
    let inst = arch.mma_for(problem.dtype, DType::F32);
    if arch.backend != Backend::Cuda || inst.is_none_or(|s| s.k != 16) {
        return lacks(format!("{} matrix instructions 16 deep", problem.dtype));
    }
    if !arch.async_copy {
        return lacks("asynchronous copies".to_owned());
    }
    if problem.head_dim % 16 != 0 || problem.head_dim > 256 {
        return shape("head_dim", problem.head_dim, "a multiple of 16 up to 256");
    }
    for (name, value, allowed) in [
        ("rows", c.rows, &[16u32, 32][..]),
        ("planes", c.planes, &[1, 2, 4, 8]),
        ("tile_kv", c.tile_kv, &[16, 32, 48, 64, 128]),
        ("stages", c.stages, &[2, 3, 4]),
    ] {
        if !allowed.contains(&value) {
            return shape(name, value, &format!("one of {allowed:?}"));
        }
    }
    fits(arch, c.units())
}

pub(super) fn fits(arch: &ArchProfile, units: u32) -> Result<(), Infeasible> {
    match (1..=arch.max_units_per_cube).contains(&units) {
        true => Ok(()),
        false => Err(Infeasible::Units { need: units, have: arch.max_units_per_cube }),
    }
}
