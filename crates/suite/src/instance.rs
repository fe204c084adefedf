//! Instances of one kernel to cross-compile: every config, and every code path around it.

use std::collections::HashMap;
use std::sync::Arc;

use arch::ArchProfile;
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::prelude::CubeKernel;
use serde_json::Value;
use tune::TuneCache;

use crate::case::InstanceCase;
use crate::kernel::KernelSuite;

/// Shared memory that an RTX card gives one cube, in bytes.
pub const RTX_SHARED_BYTES: u32 = 99 << 10;

/// One program to compile.
pub struct Instance {
    pub kernel: &'static str,
    /// Name of the case: `matmul bf16 4096x4096x4096 lhs=row rhs=col`.
    pub name: String,
    pub config: Value,
    pub program: Box<dyn CubeKernel>,
    /// True if it must not spill on an RTX card.
    pub clean: bool,
    /// True if it comes from [`KernelSuite::instances`].
    pub swept: bool,
    /// True if the shipped cache chose it.
    pub tuned: bool,
}

/// See [`crate::AnyKernel::instances`].
pub(crate) fn instances<K: KernelSuite>(
    arch: &ArchProfile,
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
) -> Vec<Instance> {
    // Keyed by program identity, which has no order. The list keeps the order of the cases.
    let mut places = HashMap::new();
    let mut instances: Vec<Instance> = Vec::new();
    // `clean` is `None` for a tuned config, which must always be clean.
    let mut add = |problem: &K::Problem, config: K::Config, clean: Option<bool>| {
        let (swept, tuned, clean) = (clean.is_some(), clean.is_none(), clean.unwrap_or(true));
        let name = record::case_name(K::NAME, &K::params(problem));
        let programs = K::programs(arch, problem, &config, properties, target);
        for (launch, program) in programs.into_iter().enumerate() {
            let place = *places.entry(program.id()).or_insert(instances.len());
            match instances.get_mut(place) {
                Some(same) => {
                    same.clean |= clean;
                    same.swept |= swept;
                    same.tuned |= tuned;
                }
                None => instances.push(Instance {
                    kernel: K::NAME,
                    name: match launch {
                        0 => name.clone(),
                        later => format!("{name} launch {}", later + 1),
                    },
                    config: serde_json::to_value(config).expect("a config is plain data"),
                    program,
                    clean,
                    swept,
                    tuned,
                }),
            }
        }
    };
    for InstanceCase { problem, max_candidates, clean } in K::instances() {
        let candidates = K::candidates(arch, &problem).into_iter().take(max_candidates);
        candidates.enumerate().for_each(|(i, config)| add(&problem, config, Some(i < clean)));
    }
    for (problem, config) in tuned::<K>(arch) {
        add(&problem, config, None);
    }
    instances
}

/// Configs that the shipped cache holds for an RTX profile, measured on another card. Keeps those that the tuner of
/// `arch` would also measure.
fn tuned<K: KernelSuite>(arch: &ArchProfile) -> Vec<(K::Problem, K::Config)> {
    if arch.max_shared_bytes > RTX_SHARED_BYTES {
        return Vec::new();
    }
    let cache = TuneCache::shipped();
    let of_kernel = cache.entries().map(|(entry, _)| entry).filter(|entry| {
        let key = &entry.key;
        key.kernel == K::NAME && key.version == K::VERSION && key.arch_id.0.contains("@rtx")
    });
    of_kernel
        .map(|entry| {
            let problem = serde_json::from_value(entry.problem.clone());
            let config = serde_json::from_value(entry.config.clone());
            (problem.expect("a problem of the kernel"), config.expect("a config of the kernel"))
        })
        .filter(|(problem, config)| K::candidates(arch, problem).contains(config))
        .collect()
}
