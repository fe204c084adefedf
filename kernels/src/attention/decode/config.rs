//! Decode configs: requirements, checks and candidates to measure.

use arch::ArchProfile;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::DecodeProblem;
use super::gemv::{self, GemvConfig};
use super::merge::COUNTERS;
use super::plan::{SplitConfig, SplitPlan};
use crate::attention::Implementation;
use crate::attention::config::tensor_cores;
use crate::attention::rows::RowsConfig;
use crate::fits::{iterations, limits, shape, stores};

/// A path and its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum DecodeConfig {
    Split(SplitConfig),
    #[serde(rename = "lanes")]
    Gemv(GemvConfig),
    Rows(RowsConfig),
}

/// Planes, keys per tile, stages.
const GEOMETRIES: [[u32; 3]; 12] = [
    [4, 16, 3],
    [4, 16, 2],
    [2, 16, 3],
    [4, 32, 3],
    [4, 32, 2],
    [8, 16, 2],
    [8, 16, 1],
    [2, 16, 6],
    [2, 32, 3],
    [6, 16, 2],
    [4, 64, 2],
    [8, 32, 1],
];

/// Target numbers of cubes per processor.
const CUBES: [u32; 3] = [1, 2, 4];

impl DecodeConfig {
    /// Returns the config without splits, or None if it has none.
    pub fn without_splits(self) -> Option<Self> {
        match self {
            Self::Split(c) if c.splits > 1 => Some(Self::Split(SplitConfig { splits: 1, ..c })),
            Self::Gemv(c) if c.splits > 1 => Some(Self::Gemv(GemvConfig { splits: 1, ..c })),
            _ => None,
        }
    }
}

impl Implementation {
    /// Returns the default config of a decode step, like [`Implementation::config`]. The flash
    /// kernels split the cache: over tensor cores, or over the units of a plane if there are no
    /// tensor cores.
    ///
    /// # Errors
    /// The reason why the implementation does not support the problem on this device.
    pub fn decode_config(
        self,
        arch: &ArchProfile,
        problem: &DecodeProblem,
    ) -> Result<DecodeConfig, Infeasible> {
        let shared_out = |c: &DecodeConfig| !matches!(c, DecodeConfig::Rows(_));
        match self {
            Self::Plain => baseline(arch, problem),
            Self::Flash => match candidates(arch, problem).into_iter().find(shared_out) {
                Some(config) => Ok(config),
                // A requirement that the smallest config misses, every config misses.
                None => {
                    let [units, keys] = gemv::GEOMETRIES[0];
                    let config = DecodeConfig::Gemv(GemvConfig { units, keys, splits: 1 });
                    check(arch, problem, &config).map(|()| config)
                }
            },
        }
    }
}

pub(super) fn candidates(arch: &ArchProfile, problem: &DecodeProblem) -> Vec<DecodeConfig> {
    let mut found = Vec::new();
    let mut add = |config| {
        if check(arch, problem, &config).is_ok() && !found.contains(&config) {
            found.push(config);
        }
    };
    for cubes in CUBES {
        for [planes, tile_kv, stages] in GEOMETRIES {
            let splits = splits(arch, problem, cubes, planes * tile_kv, SplitConfig::MAX_SPLITS);
            add(DecodeConfig::Split(SplitConfig { planes, tile_kv, stages, splits }));
        }
    }
    if found.is_empty() {
        found.extend(without_tensor_cores(arch, problem));
    }
    if found.is_empty() {
        found.extend(baseline(arch, problem));
    }
    found
}

fn without_tensor_cores(arch: &ArchProfile, problem: &DecodeProblem) -> Vec<DecodeConfig> {
    let mut found = Vec::new();
    for cubes in CUBES {
        for [units, keys] in gemv::GEOMETRIES {
            let keys_at_once = gemv::reach(arch, problem, units, keys);
            let wanted = splits(arch, problem, cubes, keys_at_once, gemv::MAX_SPLITS);
            for splits in [wanted, 1] {
                let config = DecodeConfig::Gemv(GemvConfig { units, keys, splits });
                if check(arch, problem, &config).is_ok() && !found.contains(&config) {
                    found.push(config);
                }
            }
        }
    }
    found
}

/// Number of splits that gives each processor `cubes` cubes. Each split has at least `keys`
/// positions, which keep all planes of a cube busy.
fn splits(
    arch: &ArchProfile,
    problem: &DecodeProblem,
    cubes: u32,
    keys: u32,
    max_splits: u32,
) -> u32 {
    // If the driver does not report processors, assume a mid-range card.
    let wanted = u64::from(arch.processors.unwrap_or(64) * cubes) / work_tiles(problem);
    let max_splits = problem.visible().div_ceil(keys).min(max_splits);
    (wanted.min(u64::from(max_splits)) as u32).max(1)
}

/// Number of work tiles without splits: cache heads of all sequences times cubes per cache head.
fn work_tiles(problem: &DecodeProblem) -> u64 {
    let chunks = problem.shared_rows().div_ceil(SplitPlan::rows_of(problem));
    u64::from(problem.batch) * u64::from(problem.kv_heads) * u64::from(chunks)
}

pub(super) fn baseline(
    arch: &ArchProfile,
    problem: &DecodeProblem,
) -> Result<DecodeConfig, Infeasible> {
    let config = DecodeConfig::Rows(RowsConfig::new(arch));
    check(arch, problem, &config).map(|()| config)
}

pub(super) fn check(
    arch: &ArchProfile,
    problem: &DecodeProblem,
    config: &DecodeConfig,
) -> Result<(), Infeasible> {
    stores(arch, [problem.dtype, problem.cache])?;
    iterations(arch, u64::from(problem.longest) + 3)?;
    let c = match config {
        DecodeConfig::Split(c) => c,
        DecodeConfig::Gemv(c) => return gemv::check(arch, problem, c),
        DecodeConfig::Rows(c) => return limits(arch, c.units, 0),
    };
    tensor_cores(arch, problem.dtype, problem.head_dim, 16)?;
    let vector = 16 / problem.cache.size() as u64;
    if let Some(step) = problem.cache_steps().into_iter().find(|step| step % vector != 0) {
        return Err(shape("stride", step, "expected cache rows aligned to 16 bytes"));
    }
    let (q, out) = (problem.q, problem.out);
    let ends = [q.batch, q.head, q.seq, out.batch, out.head, out.seq];
    if let Some(step) = ends.into_iter().find(|step| step % 4 != 0) {
        return Err(shape("stride", step, "expected rows of q and out aligned to 8 bytes"));
    }
    // One dimension of the grid.
    if problem.batch > 65_535 {
        return Err(shape("batch", problem.batch, "expected at most 65535"));
    }
    for (name, value, allowed) in [
        ("planes", c.planes, &[1u32, 2, 3, 4, 6, 8, 12, 16][..]),
        ("tile_kv", c.tile_kv, &[16, 32, 64]),
        ("stages", c.stages, &[1, 2, 3, 4, 6, 8]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("expected one of {allowed:?}")));
        }
    }
    if !(1..=SplitConfig::MAX_SPLITS).contains(&c.splits) {
        let why = format!("expected 1 to {}", SplitConfig::MAX_SPLITS);
        return Err(shape("splits", c.splits, &why));
    }
    if c.splits > 1 && work_tiles(problem) > u64::from(COUNTERS) {
        let why = format!(
            "expected 1, because {} work tiles already fill the device",
            work_tiles(problem)
        );
        return Err(shape("splits", c.splits, &why));
    }
    let block = problem.layout.block_size();
    if block > 0 && c.tile_kv > block {
        return Err(shape("tile_kv", c.tile_kv, "expected a tile no longer than a page"));
    }
    let plan = SplitPlan::new(*c, problem);
    if plan.registers() > 255 {
        return Err(shape("tile_kv", c.tile_kv, "accumulators and scores would spill registers"));
    }
    limits(arch, c.units(), plan.shared_bytes())
}

#[cfg(test)]
mod tests {
    use arch::DType;

    use super::*;

    #[test]
    fn every_processor_has_a_part() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let of = |batch| {
            DecodeProblem::contiguous(batch, [32, 8], 1, 8192, 128, DType::Bf16).expect("valid")
        };
        let max_splits = SplitConfig::MAX_SPLITS;
        assert_eq!(splits(&arch, &of(1), 1, 64, max_splits), 16);
        assert_eq!(splits(&arch, &of(1), 2, 64, max_splits), 32);
        assert_eq!(splits(&arch, &of(16), 2, 64, max_splits), 2);
        assert_eq!(splits(&arch, &of(64), 2, 64, max_splits), 1);
        let short = DecodeProblem { longest: 130, ..of(1) };
        assert_eq!(splits(&arch, &short, 2, 64, max_splits), 3);
    }

    #[test]
    fn one_of_two_implementations_is_forced() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = DecodeProblem::contiguous(2, [32, 8], 1, 8192, 128, DType::Bf16).expect("valid");
        let flash = |p: &DecodeProblem| Implementation::Flash.decode_config(&arch, p);
        assert!(matches!(flash(&p), Ok(DecodeConfig::Split(_))));
        let wide = DecodeProblem::contiguous(2, [32, 8], 1, 8192, 128, DType::F32).expect("valid");
        assert!(matches!(flash(&wide), Ok(DecodeConfig::Gemv(_))));
        let uneven = DecodeProblem::contiguous(2, [32, 8], 1, 8192, 7, DType::Bf16).expect("valid");
        assert!(flash(&uneven).is_err());
        for p in [p, wide, uneven] {
            let plain = Implementation::Plain.decode_config(&arch, &p);
            assert!(matches!(plain, Ok(DecodeConfig::Rows(_))));
        }
    }

    #[test]
    fn pages_bound_tiles() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = DecodeProblem::paged(1, [32, 8], 1, 8192, 128, 16, DType::Bf16).expect("valid");
        let found = candidates(&arch, &p);
        assert!(!found.is_empty());
        assert!(found.iter().all(|c| matches!(c, DecodeConfig::Split(c) if c.tile_kv == 16)));
    }
}
