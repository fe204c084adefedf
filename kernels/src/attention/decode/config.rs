//! How to compute it: configs, what they need, which are worth measuring.

use arch::ArchProfile;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::DecodeProblem;
use super::lanes::{self, LanesConfig};
use super::merge::COUNTERS;
use super::plan::{SplitConfig, SplitPlan};
use crate::attention::Implementation;
use crate::attention::config::tensor_cores;
use crate::attention::rows::RowsConfig;
use crate::fits::{iterations, limits, shape, stores};

/// One way to run a step of decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum DecodeConfig {
    Split(SplitConfig),
    Lanes(LanesConfig),
    Rows(RowsConfig),
}

/// Planes, keys of a tile, stages.
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

/// Cubes a processor that a launch is cut for.
const CUBES: [u32; 3] = [1, 2, 4];

impl DecodeConfig {
    /// The same without parts, where it has some.
    pub fn uncut(self) -> Option<Self> {
        match self {
            Self::Split(c) if c.splits > 1 => Some(Self::Split(SplitConfig { splits: 1, ..c })),
            Self::Lanes(c) if c.splits > 1 => Some(Self::Lanes(LanesConfig { splits: 1, ..c })),
            _ => None,
        }
    }
}

impl Implementation {
    /// As [`Implementation::config`] for a step of decoding, whose flash kernels share out the cache: by tensor
    /// cores, or by the units of a plane where there are none.
    ///
    /// # Errors
    /// Why it cannot serve the problem on the device.
    pub fn decode_config(
        self,
        arch: &ArchProfile,
        problem: &DecodeProblem,
    ) -> Result<DecodeConfig, Infeasible> {
        let shared_out = |c: &DecodeConfig| !matches!(c, DecodeConfig::Rows(_));
        match self {
            Self::Plain => simplest(arch, problem),
            Self::Flash => match candidates(arch, problem).into_iter().find(shared_out) {
                Some(config) => Ok(config),
                // What the smallest lacks, every one lacks.
                None => {
                    let [units, keys] = lanes::GEOMETRIES[0];
                    let config = DecodeConfig::Lanes(LanesConfig { units, keys, splits: 1 });
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
        found.extend(simplest(arch, problem));
    }
    found
}

fn without_tensor_cores(arch: &ArchProfile, problem: &DecodeProblem) -> Vec<DecodeConfig> {
    let mut found = Vec::new();
    for cubes in CUBES {
        for [units, keys] in lanes::GEOMETRIES {
            let keys_at_once = lanes::reach(arch, problem, units, keys);
            let cut = splits(arch, problem, cubes, keys_at_once, lanes::MOST_SPLITS);
            for splits in [cut, 1] {
                let config = DecodeConfig::Lanes(LanesConfig { units, keys, splits });
                if check(arch, problem, &config).is_ok() && !found.contains(&config) {
                    found.push(config);
                }
            }
        }
    }
    found
}

/// Parts that give each processor `cubes` cubes, none of them shorter than `keys`, which keep all of a
/// cube's planes busy.
fn splits(arch: &ArchProfile, problem: &DecodeProblem, cubes: u32, keys: u32, most: u32) -> u32 {
    // A driver that does not tell: as many as a middling card has.
    let wanted = u64::from(arch.processors.unwrap_or(64) * cubes) / shares(problem);
    let most = problem.visible().div_ceil(keys).min(most);
    (wanted.min(u64::from(most)) as u32).max(1)
}

/// Heads of the cache, times the cubes that their queries take.
fn shares(problem: &DecodeProblem) -> u64 {
    let chunks = problem.shared_rows().div_ceil(SplitPlan::rows_of(problem));
    u64::from(problem.batch) * u64::from(problem.kv_heads) * u64::from(chunks)
}

pub(super) fn simplest(
    arch: &ArchProfile,
    problem: &DecodeProblem,
) -> Result<DecodeConfig, Infeasible> {
    let config = DecodeConfig::Rows(RowsConfig::of(arch));
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
        DecodeConfig::Lanes(c) => return lanes::check(arch, problem, c),
        DecodeConfig::Rows(c) => return limits(arch, c.units, 0),
    };
    tensor_cores(arch, problem.dtype, problem.head_dim)?;
    let vector = 16 / problem.cache.size() as u64;
    if let Some(step) = problem.cache_steps().into_iter().find(|step| step % vector != 0) {
        return Err(shape("stride", step, "rows of the cache start at multiples of 16 bytes"));
    }
    let (q, out) = (problem.q, problem.out);
    let ends = [q.batch, q.head, q.seq, out.batch, out.head, out.seq];
    if let Some(step) = ends.into_iter().find(|step| step % 4 != 0) {
        return Err(shape("stride", step, "rows of q and out start at multiples of 8 bytes"));
    }
    // One dimension of a grid.
    if problem.batch > 65_535 {
        return Err(shape("batch", problem.batch, "up to 65535"));
    }
    for (name, value, allowed) in [
        ("planes", c.planes, &[1u32, 2, 3, 4, 6, 8, 12, 16][..]),
        ("tile_kv", c.tile_kv, &[16, 32, 64]),
        ("stages", c.stages, &[1, 2, 3, 4, 6, 8]),
    ] {
        if !allowed.contains(&value) {
            return Err(shape(name, value, &format!("one of {allowed:?}")));
        }
    }
    if !(1..=SplitConfig::MAX_SPLITS).contains(&c.splits) {
        let why = format!("1 to {}", SplitConfig::MAX_SPLITS);
        return Err(shape("splits", c.splits, &why));
    }
    if c.splits > 1 && shares(problem) > u64::from(COUNTERS) {
        let why = format!("{} shares of work need not be cut", shares(problem));
        return Err(shape("splits", c.splits, &why));
    }
    let block = problem.layout.block_size();
    if block > 0 && c.tile_kv > block {
        return Err(shape("tile_kv", c.tile_kv, "a tile lies within a page"));
    }
    let plan = SplitPlan::new(*c, problem);
    if plan.registers() > 255 {
        return Err(shape("tile_kv", c.tile_kv, "sums and scores would spill"));
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
        let most = SplitConfig::MAX_SPLITS;
        assert_eq!(splits(&arch, &of(1), 1, 64, most), 16);
        assert_eq!(splits(&arch, &of(1), 2, 64, most), 32);
        assert_eq!(splits(&arch, &of(16), 2, 64, most), 2);
        assert_eq!(splits(&arch, &of(64), 2, 64, most), 1);
        let short = DecodeProblem { longest: 130, ..of(1) };
        assert_eq!(splits(&arch, &short, 2, 64, most), 3);
    }

    #[test]
    fn one_of_two_implementations_is_forced() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = DecodeProblem::contiguous(2, [32, 8], 1, 8192, 128, DType::Bf16).expect("valid");
        let flash = |p: &DecodeProblem| Implementation::Flash.decode_config(&arch, p);
        assert!(matches!(flash(&p), Ok(DecodeConfig::Split(_))));
        let wide = DecodeProblem::contiguous(2, [32, 8], 1, 8192, 128, DType::F32).expect("valid");
        assert!(matches!(flash(&wide), Ok(DecodeConfig::Lanes(_))));
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
