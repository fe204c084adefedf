//! The object-safe form of [`KernelSuite`], so that one list holds every kernel.

use std::sync::Arc;

use arch::ArchProfile;
use cubecl::ir::{DeviceProperties, TargetProperties};
use kernels::conv::Conv;
use kernels::group_norm::GroupNorm;
use tune::{Entry, Kernel, TuneCache};

use crate::bench::{AnyBench, BenchOf};
use crate::case::{Scale, Suite};
use crate::instance::{self, Instance};
use crate::kernel::KernelSuite;
use crate::verify::{self, Job};

/// Kernels whose cases [`Suite::Conv`] measures.
const OF_CONV: [&str; 2] = [Conv::NAME, GroupNorm::NAME];

/// A [`KernelSuite`] with its types erased.
pub trait AnyKernel: Sync {
    /// Name in records, tune caches and on the command line.
    fn name(&self) -> &'static str;

    /// Version in tune caches.
    fn version(&self) -> u32;

    /// Cases of a bench suite.
    fn bench_cases(&self, suite: Suite, scale: Scale) -> Vec<Box<dyn AnyBench>>;

    /// Checks for `arch`. Every edge case runs with the default config (or the baseline config without one) and the
    /// measured config. The config cases run with every measured config and, with `configs`, with every candidate.
    fn checks(&self, arch: &ArchProfile, cache: &TuneCache, configs: bool) -> Vec<Job>;

    /// Programs to compile for `arch`, each once. They come from [`KernelSuite::instances`] and from shipped tuning
    /// results that `arch` would inherit.
    fn instances(
        &self,
        arch: &ArchProfile,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Instance>;

    /// Parses the problem and the config of a tuning result, and checks that `arch`, if known, can run them.
    ///
    /// # Errors
    /// The reason why this program ignores the result.
    fn accepts(&self, entry: &Entry, arch: Option<&ArchProfile>) -> Result<(), String>;
}

impl<K: KernelSuite> AnyKernel for K {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn version(&self) -> u32 {
        K::VERSION
    }

    fn bench_cases(&self, suite: Suite, scale: Scale) -> Vec<Box<dyn AnyBench>> {
        let suite = match suite {
            Suite::Conv if !OF_CONV.contains(&K::NAME) => return Vec::new(),
            Suite::Conv => Suite::Kernels,
            suite => suite,
        };
        let cases = K::bench_cases(suite, scale).into_iter();
        cases.map(|case| Box::new(BenchOf::<K>(case)) as Box<dyn AnyBench>).collect()
    }

    fn checks(&self, arch: &ArchProfile, cache: &TuneCache, configs: bool) -> Vec<Job> {
        verify::jobs::<K>(arch, cache, configs)
    }

    fn instances(
        &self,
        arch: &ArchProfile,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Instance> {
        instance::instances::<K>(arch, properties, target)
    }

    fn accepts(&self, entry: &Entry, arch: Option<&ArchProfile>) -> Result<(), String> {
        if entry.key.version != K::VERSION {
            return Err(format!(
                "it has version {}, but the kernel has {}",
                entry.key.version,
                K::VERSION
            ));
        }
        let problem: K::Problem =
            serde_json::from_value(entry.problem.clone()).map_err(|e| e.to_string())?;
        let config = tune::config_of::<K>(&entry.config).map_err(|e| e.to_string())?;
        match arch {
            Some(arch) => K::check(arch, &problem, &config)
                .map_err(|why| format!("its config is unusable: {why}")),
            None => Ok(()),
        }
    }
}
