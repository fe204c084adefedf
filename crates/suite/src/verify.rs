//! Checks of one kernel on one device, listed before the first one runs.

use arch::{ArchProfile, Device};
use cubecl::prelude::CubeKernel;
use kernels::matmul::Precision;
use serde_json::Value;
use tune::{Entry, Kernel, Key, TuneCache};

use crate::check::{CheckError, Verdict};
use crate::kernel::{KernelSuite, Params};

/// One check: a case with a config, or with the reason why the device cannot run the case.
pub struct Job {
    /// Name of the kernel, or of another checked part.
    pub op: &'static str,
    pub params: Params,
    pub config: Result<Value, String>,
    /// Programs that the check launches, so that all cores can compile them first.
    pub programs: Option<Box<Programs>>,
    pub run: Box<Run>,
}

type Programs = dyn Fn(&Device) -> Vec<Box<dyn CubeKernel>> + Sync;
type Run = dyn Fn(&Device) -> Result<Verdict, CheckError>;

impl Job {
    /// Name of the case: `matmul bf16 128x128x128 lhs=row rhs=col`.
    pub fn name(&self) -> String {
        record::case_name(self.op, &self.params)
    }

    /// Returns true if a filter is part of the name, or is `train` and the kernel is one of training.
    pub fn matches(&self, filter: &str) -> bool {
        let trains = || crate::TRAINING.iter().any(|kernel| kernel.name() == self.op);
        self.name().contains(filter) || (filter == "train" && trains())
    }
}

/// See [`crate::AnyKernel::checks`].
pub(crate) fn jobs<K: KernelSuite>(
    arch: &ArchProfile,
    cache: &TuneCache,
    configs: bool,
) -> Vec<Job> {
    let mut jobs = Vec::new();
    let tuned = tuned::<K>(arch, cache);
    for precision in K::PRECISIONS {
        for case in K::edge_cases(*precision, arch.backend) {
            let problem = K::problem(&case);
            let first = K::candidates(arch, problem).into_iter().take(1);
            let key = Key::new::<K>(&arch.id, problem);
            let known = tuned.iter().filter(|(of, ..)| **of == key).map(|(.., config)| *config);
            let inherited = cache.inherited::<K>(arch, problem).map(|(config, _)| config);
            let mut few = feasible::<K>(arch, problem, first.chain(known).chain(inherited));
            if few.is_empty() {
                match K::baseline(arch, problem) {
                    Ok(config) => few.push(config),
                    Err(why) => jobs.push(job::<K>(&case, Err(why.to_string()))),
                }
            }
            jobs.extend(few.into_iter().map(|config| job::<K>(&case, Ok(config))));
        }
        for case in K::config_cases(*precision) {
            let problem = K::problem(&case);
            let known = tuned.iter().filter(|(_, of, _)| of == precision);
            let others = if configs { K::candidates(arch, problem) } else { Vec::new() };
            let all = known.map(|(.., config)| *config).chain(others);
            let many = feasible::<K>(arch, problem, all);
            jobs.extend(many.into_iter().map(|config| job::<K>(&case, Ok(config))));
        }
    }
    jobs
}

fn job<K: KernelSuite>(case: &K::Case, config: Result<K::Config, String>) -> Job {
    let (of, problem) = (case.clone(), K::problem(case).clone());
    let plain = |config: &K::Config| serde_json::to_value(config).expect("a config is plain data");
    Job {
        op: K::NAME,
        params: K::case_params(case),
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
            Ok(config) => K::verify(device, &of, config),
            Err(why) => Err(CheckError::Kernel(why.clone())),
        }),
    }
}

/// The configs of `all` that can run `problem`, without duplicates and in order.
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

/// Configs measured on this architecture, locally or shipped, each with the precision of its problem. Prints results
/// that this version cannot read to standard error.
fn tuned<'a, K: KernelSuite>(
    arch: &ArchProfile,
    cache: &'a TuneCache,
) -> Vec<(&'a Key, Precision, K::Config)> {
    let ours =
        |key: &Key| key.kernel == K::NAME && key.version == K::VERSION && key.arch_id == arch.id;
    let read = |entry: &'a Entry| -> Result<_, String> {
        let problem: K::Problem =
            serde_json::from_value(entry.problem.clone()).map_err(|e| e.to_string())?;
        let config = tune::config_of::<K>(&entry.config).map_err(|e| e.to_string())?;
        Ok((&entry.key, K::precision(&problem), config))
    };
    let entries = cache.entries().map(|(entry, _)| entry).filter(|entry| ours(&entry.key));
    entries
        .filter_map(|entry| {
            read(entry).inspect_err(|e| eprintln!("{}: ignored: {e}", entry.key)).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use arch::{Backend, DType};
    use kernels::matmul::Matmul;

    use super::*;
    use crate::KERNELS;

    fn all(arch: &ArchProfile, cache: &TuneCache) -> Vec<Job> {
        KERNELS.iter().flat_map(|kernel| kernel.checks(arch, cache, false)).collect()
    }

    #[test]
    fn shipped_configs_are_verified_where_they_were_measured() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let arch = h200.restrict("rtx4090", &rtx4090);
        let cache = TuneCache::shipped();
        let shipped = tuned::<Matmul>(&arch, &cache);
        assert!(!shipped.is_empty());
        let jobs = all(&arch, &cache);
        for (key, precision, config) in shipped {
            let config = serde_json::to_value(config).expect("plain data");
            let runs = |job: &Job| {
                job.op == "matmul"
                    && job.params["dtype"] == precision.name()
                    && job.config.as_ref() == Ok(&config)
            };
            assert!(jobs.iter().any(runs), "{key}: {config}");
        }
        assert!(tuned::<Matmul>(&rtx4090, &cache).is_empty(), "nothing was measured there");
        for kernel in KERNELS {
            assert!(jobs.iter().any(|job| job.op == kernel.name()), "{}", kernel.name());
        }
    }

    #[test]
    fn what_cannot_be_served_is_skipped_for_its_reason() {
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let mut arch = ArchProfile { backend: Backend::WebGpu, ..rtx4090 };
        arch.mma.clear();
        arch.dtypes.remove(&DType::Bf16);
        let jobs = all(&arch, &TuneCache::default());
        let why = |dtype: &str| {
            let of = jobs.iter().filter(|job| job.op == "matmul" && job.params["dtype"] == dtype);
            of.filter_map(|job| job.config.clone().err()).next().unwrap_or_default()
        };
        assert_eq!(why("bf16"), "needs bf16 buffers, which the device lacks");
        assert_eq!(why("tf32"), "needs tf32 matrix instructions, which the device lacks");
        assert_eq!(why("f16acc16"), "needs f16acc16 matrix instructions, which the device lacks");
        assert_eq!(why("f32"), "");
    }
}
