//! Every kernel over its edge shapes, against the reference.

mod families;
mod memory;
mod models;

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use arch::{ArchProfile, Backend, Device};
use cubecl::prelude::CubeKernel;
use kernels::attention::Attention;
use kernels::attention::backward::AttentionBackward;
use kernels::attention::decode::Decode;
use kernels::embed::Embed;
use kernels::int8::{Int8Dequantize, Int8Matmul, Int8Quantize};
use kernels::matmul::Matmul;
use kernels::nf4::{Nf4Dequantize, Nf4Matmul, Nf4Quantize};
use kernels::norm::Norm;
use kernels::rope::Rope;
use kernels::sample::Sample;
use oracle::{CheckError, Verdict};
use record::{Check, Line};
use serde_json::Value;
use tune::{Entry, Kernel, Key, TuneCache};

use crate::emit::emit;
use crate::family::Family;
use crate::{Target, provenance, tuning};

/// One check: a problem with a config, or with what the device lacks for it.
struct Job {
    op: &'static str,
    params: BTreeMap<String, Value>,
    config: Result<Value, String>,
    programs: Option<Box<Programs>>,
    run: Box<Run>,
}

type Programs = dyn Fn(&Device) -> Vec<Box<dyn CubeKernel>> + Sync;
type Run = dyn Fn(&Device) -> Result<Verdict, CheckError>;

impl Job {
    fn name(&self) -> String {
        record::case_name(self.op, &self.params)
    }
}

/// Each so many checks, from one on. Those that need gigabytes are the first part's, so that a card need hold but one
/// at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    from: usize,
    of: usize,
}

impl Part {
    fn of(self, jobs: Vec<Job>) -> Vec<Job> {
        let (large, small): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| job.params.contains_key("extent"));
        let mine = small.into_iter().skip(self.from).step_by(self.of);
        if self.from == 0 { mine.chain(large).collect() } else { mine.collect() }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (from, of) = text.split_once('/')?;
            Some((from.parse::<usize>().ok()?, of.parse().ok()?))
        };
        match read() {
            Some((from, of)) if (1..=of).contains(&from) => Ok(Self { from: from - 1, of }),
            _ => Err(format!("`{text}` is no part\nhint: such as 2/8, the second of eight")),
        }
    }
}

/// Verifies every kernel, the models below `fixtures`, and what becomes of a model where memory ends, which some of
/// the checks take all of if `exhaust` says so; false when a check failed.
pub(crate) fn verify(
    target: &Target,
    filter: Option<&str>,
    configs: bool,
    exhaust: bool,
    fixtures: Option<&Path>,
    part: Option<Part>,
) -> anyhow::Result<bool> {
    let Some(device) = target.open_or_skip()? else { return Ok(true) };
    emit(&Line::Card(provenance::card(&device)?))?;
    let mut jobs = jobs(device.profile(), &tuning::open_cache()?, configs);
    jobs.extend(memory::jobs(&device, exhaust));
    if let Some(fixtures) = fixtures {
        jobs.extend(models::jobs(device.profile(), fixtures)?);
    }
    if let Some(filter) = filter {
        jobs.retain(|job| job.name().contains(filter));
        if jobs.is_empty() {
            anyhow::bail!("no check matches `{filter}`\nhint: names look like `matmul f32 1x1x1`");
        }
    }
    if let Some(part) = part {
        jobs = part.of(jobs);
    }
    emit(&Line::Plan { cases: jobs.len() })?;
    let programs: Vec<_> = jobs.iter().filter_map(|job| job.programs.as_ref()).collect();
    ahead::compile(&device, programs.len(), |i| programs[i](&device));
    let mut good = true;
    for job in jobs {
        emit(&Line::Begin { case: job.name() })?;
        let config = match job.config.clone() {
            Ok(config) => config,
            Err(reason) => {
                emit(&Line::Skip { case: job.name(), reason })?;
                continue;
            }
        };
        let mut line = Check {
            op: job.op.to_owned(),
            params: job.params.clone(),
            backend: device.backend().to_string(),
            config: Some(config),
            max_err: None,
            tolerance: None,
            passed: false,
            error: None,
            digest: None,
        };
        match (job.run)(&device) {
            Ok(verdict) => {
                line.max_err = Some(verdict.comparison.max_err);
                line.tolerance = Some(verdict.comparison.tolerance);
                line.passed = verdict.comparison.passed;
                line.digest = Some(format!("{:016x}", verdict.digest));
                if !line.passed {
                    line.error = Some(verdict.comparison.to_string());
                }
            }
            Err(e) => line.error = Some(e.to_string()),
        }
        good &= line.passed;
        emit(&Line::Check(line))?;
    }
    Ok(good)
}

/// A kernel family that is verified.
trait Verified: Family {
    /// A problem with its inputs.
    type Case: Clone + 'static;

    /// What splits the cases: configs measured for one kind are tried on that kind only.
    type Kind: Copy + PartialEq;

    fn kinds() -> Vec<Self::Kind>;
    fn kind(problem: &Self::Problem) -> Self::Kind;
    fn edge_cases(kind: Self::Kind, backend: Backend) -> Vec<Self::Case>;
    fn config_cases(kind: Self::Kind) -> Vec<Self::Case>;
    fn problem(case: &Self::Case) -> &Self::Problem;
    fn params(case: &Self::Case) -> BTreeMap<String, Value>;
    fn run(
        device: &Device,
        case: &Self::Case,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError>;
}

fn jobs(arch: &ArchProfile, cache: &TuneCache, configs: bool) -> Vec<Job> {
    let mut jobs = jobs_of::<Matmul>(arch, cache, configs);
    jobs.extend(jobs_of::<Attention>(arch, cache, configs));
    jobs.extend(jobs_of::<AttentionBackward>(arch, cache, configs));
    jobs.extend(jobs_of::<Decode>(arch, cache, configs));
    jobs.extend(jobs_of::<Nf4Dequantize>(arch, cache, configs));
    jobs.extend(jobs_of::<Nf4Matmul>(arch, cache, configs));
    jobs.extend(jobs_of::<Nf4Quantize>(arch, cache, configs));
    jobs.extend(jobs_of::<Int8Dequantize>(arch, cache, configs));
    jobs.extend(jobs_of::<Int8Matmul>(arch, cache, configs));
    jobs.extend(jobs_of::<Int8Quantize>(arch, cache, configs));
    jobs.extend(jobs_of::<Embed>(arch, cache, configs));
    jobs.extend(jobs_of::<Norm>(arch, cache, configs));
    jobs.extend(jobs_of::<Rope>(arch, cache, configs));
    jobs.extend(jobs_of::<Sample>(arch, cache, configs));
    jobs
}

/// What runs on a device: every edge case with the config that it gets unmeasured, the simplest where that is none, and the one that was
/// measured for it, then fewer cases with every measured config and, with `configs`, every candidate.
fn jobs_of<K: Verified>(arch: &ArchProfile, cache: &TuneCache, configs: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    let tuned = tuned::<K>(arch, cache);
    for kind in K::kinds() {
        for case in K::edge_cases(kind, arch.backend) {
            let problem = K::problem(&case);
            let first = K::candidates(arch, problem).into_iter().take(1);
            let key = Key::of::<K>(&arch.id, problem);
            let known = tuned.iter().filter(|(of, ..)| **of == key).map(|(.., config)| *config);
            let mut few = feasible::<K>(arch, problem, first.chain(known));
            if few.is_empty() {
                match K::simplest(arch, problem) {
                    Ok(config) => few.push(config),
                    Err(why) => jobs.push(job::<K>(&case, Err(why.to_string()))),
                }
            }
            jobs.extend(few.into_iter().map(|config| job::<K>(&case, Ok(config))));
        }
        for case in K::config_cases(kind) {
            let problem = K::problem(&case);
            let known = tuned.iter().filter(|(_, of, _)| *of == kind);
            let others = if configs { K::candidates(arch, problem) } else { Vec::new() };
            let all = known.map(|(.., config)| *config).chain(others);
            let many = feasible::<K>(arch, problem, all);
            jobs.extend(many.into_iter().map(|config| job::<K>(&case, Ok(config))));
        }
    }
    jobs
}

fn job<K: Verified>(case: &K::Case, config: Result<K::Config, String>) -> Job {
    let (of, problem) = (case.clone(), K::problem(case).clone());
    let plain = |config: &K::Config| serde_json::to_value(config).expect("a config is plain data");
    Job {
        op: K::NAME,
        params: <K as Verified>::params(case),
        config: config.as_ref().map(plain).map_err(String::clone),
        programs: config.as_ref().ok().copied().map(|config| -> Box<Programs> {
            Box::new(move |device| {
                let client = device.client();
                let (properties, target) =
                    (client.properties_shared(), client.target_properties_shared());
                K::programs(device.profile(), &problem, &config, &properties, &target)
            })
        }),
        run: Box::new(move |device| match &config {
            Ok(config) => K::run(device, &of, config),
            Err(why) => Err(CheckError::Kernel(why.clone())),
        }),
    }
}

/// Those that can run `problem`, each once, in their order.
fn feasible<K: Kernel>(
    arch: &ArchProfile,
    problem: &K::Problem,
    all: impl Iterator<Item = K::Config>,
) -> Vec<K::Config> {
    let mut each = Vec::new();
    for config in all {
        if !each.contains(&config) && K::check(arch, problem, &config).is_ok() {
            each.push(config);
        }
    }
    each
}

/// The configs that were measured best on this architecture, here or before shipping, with the kind of
/// each. One that this version cannot read is named on standard error.
fn tuned<'a, K: Verified>(
    arch: &ArchProfile,
    cache: &'a TuneCache,
) -> Vec<(&'a Key, K::Kind, K::Config)> {
    let ours =
        |key: &Key| key.kernel == K::NAME && key.version == K::VERSION && key.arch_id == arch.id;
    let read = |entry: &'a Entry| {
        let problem: K::Problem = serde_json::from_value(entry.problem.clone())?;
        Ok((&entry.key, K::kind(&problem), tune::config_of::<K>(&entry.config)?))
    };
    let entries = cache.entries().map(|(entry, _)| entry).filter(|entry| ours(&entry.key));
    entries
        .filter_map(|entry| {
            let known: anyhow::Result<_> = read(entry);
            known.inspect_err(|e| eprintln!("{}: ignored: {e}", entry.key)).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use arch::DType;

    use super::*;

    #[test]
    fn shipped_configs_are_verified_where_they_were_measured() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let arch = h200.restrict("rtx4090", &rtx4090);
        let cache = TuneCache::shipped();
        let shipped = tuned::<Matmul>(&arch, &cache);
        assert!(!shipped.is_empty());
        let jobs = jobs(&arch, &cache, false);
        for (key, precision, config) in shipped {
            let config = serde_json::to_value(config).expect("plain data");
            let runs = |job: &Job| {
                job.params["dtype"] == precision.name() && job.config.as_ref() == Ok(&config)
            };
            assert!(jobs.iter().any(runs), "{key}: {config}");
        }
        assert!(tuned::<Matmul>(&rtx4090, &cache).is_empty(), "nothing was measured there");
        assert!(jobs.iter().any(|job| job.op == "attention"));
        assert!(jobs.iter().any(|job| job.op == Decode::NAME));
    }

    #[test]
    fn parts_are_counted_from_one() {
        assert_eq!("2/8".parse(), Ok(Part { from: 1, of: 8 }));
        for bad in ["", "2", "0/8", "9/8", "1/0", "a/8", "-1/8"] {
            bad.parse::<Part>().expect_err(bad);
        }
    }

    #[test]
    fn parts_are_the_whole_and_the_large_checks_are_together() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let all = || jobs(&h200, &TuneCache::default(), false);
        let names = |jobs: Vec<Job>| jobs.iter().map(Job::name).collect::<Vec<_>>();
        let mut shared = Vec::new();
        for from in 0..3 {
            let mine = names(Part { from, of: 3 }.of(all()));
            assert_eq!(mine.iter().any(|name| name.contains("extent=")), from == 0);
            shared.extend(mine);
        }
        let mut whole = names(all());
        assert!(!whole.is_empty());
        shared.sort_unstable();
        whole.sort_unstable();
        assert_eq!(shared, whole);
    }

    #[test]
    fn what_cannot_be_served_is_skipped_for_its_reason() {
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let mut arch = ArchProfile { backend: Backend::WebGpu, ..rtx4090 };
        arch.mma.clear();
        arch.dtypes.remove(&DType::Bf16);
        let jobs = jobs(&arch, &TuneCache::default(), false);
        let why = |dtype: &str| {
            let of = jobs.iter().filter(|job| job.params["dtype"] == dtype && job.op == "matmul");
            of.filter_map(|job| job.config.clone().err()).next().unwrap_or_default()
        };
        assert_eq!(why("bf16"), "needs bf16 buffers, which the device lacks");
        assert_eq!(why("tf32"), "needs tf32 matrix instructions, which the device lacks");
        assert_eq!(why("f16acc16"), "needs f16acc16 matrix instructions, which the device lacks");
        assert_eq!(why("f32"), "");
    }
}
