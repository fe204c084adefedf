//! Matmul configs: one variant per path, checks, and the order in which candidates are measured.

use arch::{ArchProfile, DType};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::cpu_gemv::CpuGemvConfig;
use super::fma::FmaConfig;
use super::gemv::{GemvConfig, MAX_NORMED_ROWS};
use super::kernel::Loop;
use super::mma::MmaConfig;
use super::packed::PackedConfig;
use super::path::{FEW_ROWS, IN_FLIGHT, Path, check_sizes};
use super::pipelined::PipelinedConfig;
use super::problem::{MatmulProblem, Precision};
use super::subgroup::SubgroupConfig;
use super::tma::TmaConfig;
use super::workgroup::WorkgroupConfig;
use crate::fits::{iterations, lacks};
use crate::rows::NormKind;

/// A path and its tile sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "path", rename_all = "lowercase")]
pub enum MatmulConfig {
    Mma(MmaConfig),
    Tma(TmaConfig),
    #[serde(rename = "cube")]
    Workgroup(WorkgroupConfig),
    #[serde(rename = "plane")]
    Subgroup(SubgroupConfig),
    #[serde(rename = "ahead")]
    Pipelined(PipelinedConfig),
    Fma(FmaConfig),
    #[serde(rename = "cores")]
    Packed(PackedConfig),
    #[serde(rename = "dots")]
    CpuGemv(CpuGemvConfig),
    #[serde(rename = "lanes")]
    Gemv(GemvConfig),
}

impl MatmulConfig {
    pub(super) fn path(&self) -> &dyn Path {
        match self {
            Self::Mma(c) => c,
            Self::Tma(c) => c,
            Self::Workgroup(c) => c,
            Self::Subgroup(c) => c,
            Self::Pipelined(c) => c,
            Self::Fma(c) => c,
            Self::Packed(c) => c,
            Self::CpuGemv(c) => c,
            Self::Gemv(c) => c,
        }
    }

    /// Returns the loop of the path with its comptime parameters.
    pub(super) fn plan(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Loop {
        match self {
            Self::Mma(c) => Loop::Mma(c.plan(arch, problem)),
            Self::Tma(c) => Loop::Tma(c.plan(arch, problem)),
            Self::Workgroup(c) => Loop::Workgroup(c.plan(problem)),
            Self::Subgroup(c) => Loop::Subgroup(c.plan(arch, problem)),
            Self::Pipelined(c) => Loop::Pipelined(c.plan(arch, problem)),
            Self::Fma(c) => Loop::Fma(c.plan(problem)),
            Self::Packed(c) => Loop::Packed(c.plan(problem)),
            Self::CpuGemv(c) => Loop::CpuGemv(*c),
            Self::Gemv(c) => Loop::Gemv(c.plan(problem)),
        }
    }

    /// Number of split-k splits.
    pub(crate) fn splits(&self) -> u32 {
        self.path().splits()
    }
}

/// Returns the candidates of one path, in that path's order.
fn path_candidates<P: Path>(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    config: fn(P) -> MatmulConfig,
) -> impl Iterator<Item = MatmulConfig> {
    P::candidates(arch, problem).into_iter().map(config)
}

pub(super) fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<MatmulConfig> {
    let mut feasible: Vec<_> = path_candidates(arch, problem, MatmulConfig::Packed)
        .chain(path_candidates(arch, problem, MatmulConfig::CpuGemv))
        .chain(path_candidates(arch, problem, MatmulConfig::Mma))
        .chain(path_candidates(arch, problem, MatmulConfig::Tma))
        .chain(path_candidates(arch, problem, MatmulConfig::Workgroup))
        .chain(path_candidates(arch, problem, MatmulConfig::Subgroup))
        .chain(path_candidates(arch, problem, MatmulConfig::Pipelined))
        .chain(path_candidates(arch, problem, MatmulConfig::Fma))
        .chain(path_candidates(arch, problem, MatmulConfig::Gemv))
        .filter(|c| check(arch, problem, c).is_ok())
        .collect();
    let plain = |c: &MatmulConfig| matches!(c, MatmulConfig::Fma(_));
    if feasible.iter().any(|c| !plain(c) && !matches!(c, MatmulConfig::Gemv(_))) {
        feasible.retain(|c| !plain(c));
    }
    promising(arch, problem, feasible, MatmulConfig::path)
}

/// Returns the feasible configs worth measuring. The first one covers the problem with the least
/// waste and still fills the device.
fn promising<C>(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    mut feasible: Vec<C>,
    path: fn(&C) -> &dyn Path,
) -> Vec<C> {
    let fill = |c: &C| waste(arch, problem, path(c));
    if let Some(least) = feasible.iter().map(fill).min_by(f64::total_cmp) {
        feasible.retain(|c| fill(c) <= HOPELESS * least);
    }
    let cost = |c: &C| fill(c) + path(c).compile_cost(problem);
    feasible.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    feasible.truncate(WORTH_MEASURING);
    feasible
}

/// Returns those `configs`, with and without split-k, that pass `fits`, ordered as in [`candidates`].
pub(crate) fn spread(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    configs: &[MmaConfig],
    fits: impl Fn(&MmaConfig) -> bool,
) -> Vec<MmaConfig> {
    let all = configs.iter().flat_map(|c| c.with_splits(arch, problem));
    promising(arch, problem, all.filter(fits).collect(), |c| c)
}

/// Candidates beyond this rank in the order of [`waste`], or this many times more wasteful than the
/// first, have never won.
const WORTH_MEASURING: usize = 14;
const HOPELESS: f64 = 3.0;

/// Returns the relative cost of covering the problem with whole tiles in whole waves, in multiplies
/// per unit of k. It is only a model. Equal costs keep the order of the paths' lists.
fn waste(arch: &ArchProfile, problem: &MatmulProblem, config: &dyn Path) -> f64 {
    let (tile_m, tile_n) = config.tile();
    let splits = f64::from(config.splits());
    let items = problem.blocks((tile_m, tile_n)) as f64 * splits;
    // The cooperative-matrix driver does not report the number of processors.
    let few = FEW_ROWS.contains(&problem.m) || problem.window.is_some();
    let processors = match arch.matrices_from_words() && few {
        true => IN_FLIGHT as f64,
        false => f64::from(arch.processors.unwrap_or(32)),
    };
    let concurrent = config.concurrent();
    let waves = (items / (processors * concurrent)).ceil() * concurrent / splits;
    // A larger tile reads each operand fewer times: the traffic of a tile is m + n per step of k.
    let traffic = 1.0 / f64::from(tile_m.min(256)) + 1.0 / f64::from(tile_n.min(256));
    let read = config.read_cost();
    // Partial sums are written and read in f32; a byte takes about as long as two multiplies.
    let results = f64::from(problem.m) * f64::from(problem.n) * problem.batch() as f64;
    let sums = if splits > 1.0 { 4.0 * splits * results / f64::from(problem.k) } else { 0.0 };
    waves * f64::from(tile_m) * f64::from(tile_n) * (1.0 + read * traffic) + sums
}

/// Returns true if a path normalises the rows that it multiplies and the saved launch pays for it.
pub(super) fn takes_norm(arch: &ArchProfile, problem: &MatmulProblem) -> bool {
    let few = problem.norm.is_some() && problem.m <= MAX_NORMED_ROWS;
    few && path_candidates(arch, problem, MatmulConfig::Gemv)
        .any(|c| check(arch, problem, &c).is_ok())
}

pub(super) fn baseline(
    arch: &ArchProfile,
    problem: &MatmulProblem,
) -> Result<MatmulConfig, Infeasible> {
    let config = match problem.precision {
        // Results of these precisions differ from f32 by rounding, so the baseline is a tensor-core
        // config. Take the last candidate: the first runs untuned and needs another to be compared
        // with. Without candidates, report what the smallest tile lacks.
        Precision::Tf32 | Precision::F16Acc16 => {
            candidates(arch, problem).pop().unwrap_or(MatmulConfig::Mma(MmaConfig::SMALLEST))
        }
        _ if problem.norm.is_some() => path_candidates(arch, problem, MatmulConfig::Gemv)
            .last()
            .ok_or_else(|| lacks("a norm fused into this matmul"))?,
        _ => path_candidates(arch, problem, MatmulConfig::Packed)
            .last()
            .unwrap_or(MatmulConfig::Fma(FmaConfig::BASELINE)),
    };
    check(arch, problem, &config).map(|()| config)
}

pub(super) fn check(
    arch: &ArchProfile,
    problem: &MatmulProblem,
    config: &MatmulConfig,
) -> Result<(), Infeasible> {
    let (precision, path) = (problem.precision, config.path());
    if let Some(dtype) =
        [precision.storage(), problem.out].into_iter().find(|d| !arch.dtypes.contains(d))
    {
        return Err(lacks(format!("{dtype} buffers")));
    }
    check_sizes(path)?;
    iterations(arch, path.iterations(u64::from(problem.k)))?;
    if precision.sums() == DType::F16 && !path.accumulates_f16() {
        return Err(lacks("matrix instructions for f16 accumulation"));
    }
    if problem.grouped && problem.batch_slices(arch).len() > 1 {
        return Err(lacks(format!("one launch for {} groups", problem.batch())));
    }
    if problem.window.is_some() && !path.gathers() {
        return Err(lacks("windows of an image as rows"));
    }
    if problem.interleaved && problem.batch_slices(arch).len() > 1 {
        return Err(lacks(format!("one launch for {} groups", problem.batch())));
    }
    match problem.norm {
        None => {}
        Some(NormKind::Layer) => {
            return Err(lacks("LayerNorm fused into a matmul"));
        }
        Some(_) if path.normalizes() && !problem.grouped => {}
        Some(_) => {
            return Err(lacks("a norm fused into this matmul"));
        }
    }
    path.check(arch, problem)
}
#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use arch::{Backend, CubeMma, MmaShape};

    use super::*;
    use crate::matmul::{Batches, Layout, fma};

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
            assert!(found.iter().all(|c| matches!(c, MatmulConfig::Gemv(_))), "{found:?}");
            assert_eq!(baseline(arch, &p).is_ok(), !found.is_empty());
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
    fn names_in_tune_caches_stay() {
        let mma = r#""tile_m":1,"tile_n":2,"tile_k":3,"planes_m":4,"planes_n":5"#;
        let workgroup = r#""tile_m":1,"tile_n":2,"tile_k":3,"units":4,"unroll":5,"parts":6"#;
        let fma =
            r#""own_m":1,"own_n":2,"groups_m":3,"groups_n":4,"tile_k":5,"stages":6,"parts":7"#;
        let packed = r#""block_m":1,"block_n":2,"block_k":3,"rows":4,"vector":5,"units":6"#;
        for (path, fields) in [
            ("mma", format!(r#"{mma},"stages":6,"parts":7"#)),
            ("tma", format!(r#"{mma},"stages":6,"parts":7"#)),
            ("cube", workgroup.to_owned()),
            ("plane", mma.to_owned()),
            ("ahead", format!(r#"{mma},"parts":6"#)),
            ("fma", fma.to_owned()),
            ("cores", packed.to_owned()),
            ("dots", r#""rows":1,"cols":2,"vector":3,"units":4"#.to_owned()),
            ("lanes", r#""units":1,"lanes":2,"rows":3,"cols":4"#.to_owned()),
        ] {
            let text = format!(r#"{{"path":"{path}",{fields}}}"#);
            let config: MatmulConfig = serde_json::from_str(&text).expect(path);
            assert_eq!(serde_json::to_string(&config).expect("plain data"), text);
        }
    }

    #[test]
    fn sizes_that_an_edited_cache_may_hold_are_refused() {
        let (gpu, cpu) = (ArchProfile::recorded("rtx4090").expect("recorded"), cpu());
        let p = problem([64, 64, 64], [Layout::Row, Layout::Col], Precision::F16);
        let known: Vec<_> = candidates(&gpu, &p)
            .into_iter()
            .chain(fma::CONFIGS.map(MatmulConfig::Fma))
            .map(|c| (&gpu, c))
            .collect();
        let cores = candidates(&cpu, &p).into_iter().map(|c| (&cpu, c));
        let mut vulkan = ArchProfile { backend: Backend::Vulkan, ..gpu.clone() };
        let of = |ab| MmaShape { ab, acc: DType::F32, m: 16, n: 16, k: 16 };
        vulkan.cmma = [of(DType::F16)].into();
        vulkan.cube_mma = vulkan.cmma.iter().map(|s| CubeMma::new(*s, None)).collect();
        let matrices = candidates(&vulkan, &p).into_iter().map(|c| (&vulkan, c));
        let matrices: Vec<_> = matrices.collect();
        assert!(matrices.iter().any(|(_, c)| matches!(c, MatmulConfig::Workgroup(_))));
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
        let odd = PackedConfig { vector: 3, block_n: 33, ..PackedConfig::candidates(&cpu, &p)[0] };
        assert!(check(&cpu, &p, &MatmulConfig::Packed(odd)).is_err());
    }

    #[test]
    fn a_product_that_the_device_would_not_end_is_refused() {
        let arch = ArchProfile {
            backend: Backend::WebGpu,
            max_loop_iterations: Some(65_535),
            mma: BTreeSet::new(),
            async_copy: false,
            ..recorded("rtx4090")
        };
        let of = |k, layouts| problem([2, 3, k], layouts, Precision::F32);
        let across = [Layout::Col, Layout::Row];
        let config = baseline(&arch, &of(50_000, across)).expect("few turns");
        check(&arch, &of(50_000, across), &config).expect("few turns");
        let refused = Err(Infeasible::Iterations { need: 65_536 / 16 * 18 + 1, have: 65_535 });
        assert_eq!(check(&arch, &of(65_536, across), &config), refused);
        assert!(candidates(&arch, &of(65_536, across)).is_empty());
        // Units that share k need fewer iterations.
        let along = [Layout::Row, Layout::Col];
        let shared = candidates(&arch, &of(65_536, along));
        assert!(!shared.is_empty());
        assert!(shared.iter().all(|c| matches!(c, MatmulConfig::Gemv(_))), "{shared:?}");
        let endless = ArchProfile { max_loop_iterations: None, ..arch };
        check(&endless, &of(65_536, across), &config).expect("no limit");
    }

    #[test]
    fn candidates_of_a_cpu_are_each_one() {
        let p = problem([64; 3], [Layout::Row; 2], Precision::F32);
        for load_bytes in [16, 32, 64] {
            let all = PackedConfig::candidates(&ArchProfile { load_bytes, ..cpu() }, &p);
            let mut each = all.clone();
            each.sort_unstable_by_key(|config| format!("{config:?}"));
            each.dedup();
            assert_eq!(each.len(), all.len(), "{load_bytes}");
        }
    }

    #[test]
    fn tma_copies_are_for_one_product_along_k() {
        let (with, without) = (recorded("h200"), recorded("rtx4090"));
        let p = problem([4096; 3], [Layout::Row, Layout::Col], Precision::Bf16);
        let of = |arch: &ArchProfile, p: &MatmulProblem| -> Vec<_> {
            let tma = |c: &MatmulConfig| matches!(c, MatmulConfig::Tma(_));
            candidates(arch, p).into_iter().filter(tma).collect()
        };
        assert_eq!((of(&with, &p).len(), of(&without, &p).len()), (3, 0));
        let config = of(&with, &p)[0];
        let rows = problem([4096; 3], [Layout::Row; 2], Precision::Bf16);
        let several =
            MatmulProblem::dense(2, [4096; 3], [Layout::Row, Layout::Col], Precision::Bf16);
        // Lines that are not whole chunks, and tiles of k that are not whole rounds of stages.
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
            mma: BTreeSet::new(),
            cmma: BTreeSet::new(),
            ..ArchProfile::recorded("rtx4090").expect("recorded")
        }
    }

    #[test]
    fn few_rows_of_a_linear_layer_are_not_packed() {
        let (cpu, linear) = (cpu(), [Layout::Row, Layout::Col]);
        let dots = |sizes, layouts| {
            let all = candidates(&cpu, &problem(sizes, layouts, Precision::F32));
            let is = |c: &MatmulConfig| matches!(c, MatmulConfig::CpuGemv(_));
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
    fn split_k_is_for_the_batches_of_one_launch() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let batches = Batches { outer: 2, inner: 3, lhs: (64 * 4096, 0), rhs: (0, 64 * 4096) };
        let one = problem([64, 64, 4096], [Layout::Row, Layout::Row], Precision::Bf16);
        let two = MatmulProblem { batches, ..one };
        let parts = |p: &MatmulProblem| candidates(&arch, p).iter().map(MatmulConfig::splits).max();
        assert!(parts(&one) > Some(1), "a deep problem is cut");
        assert_eq!(parts(&two), Some(1), "this one takes two launches");
    }

    #[test]
    fn rtx_cards_never_get_more_shared_memory_than_they_have() {
        let arch = ArchProfile::recorded("rtx4090").expect("recorded");
        let p = problem([4096; 3], [Layout::Row, Layout::Row], Precision::Bf16);
        let greedy = MmaConfig::new([256, 256, 64], [4, 4], 4);
        let need = 4 * (256 + 256) * 64 * 2;
        let have = 99 << 10;
        assert_eq!(
            check(&arch, &p, &MatmulConfig::Mma(greedy)),
            Err(Infeasible::SharedMemory { need, have })
        );
    }
}
