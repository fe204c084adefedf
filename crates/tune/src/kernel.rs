//! The trait of all tunable kernels.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

use arch::{ArchProfile, DType, Device};
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::prelude::CubeKernel;
use cubecl::server::Handle;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::queue::Queue;

/// A kernel: one computation with several configs to run it.
///
/// `candidates`, `check` and `cost` are pure: they take the profile of a device, not the device.
/// Tests therefore cover cards that the machine does not have.
pub trait Kernel: 'static {
    /// The computation: sizes, dtypes, layout and every flag that changes the result.
    type Problem: Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync;
    /// The way to run it: tile sizes, stages, planes. It is the kernel's comptime argument and the cached value.
    type Config: Copy + Debug + Eq + Hash + Serialize + DeserializeOwned + Send + Sync;
    /// Device buffers of one problem: inputs and outputs.
    type Operands: Clone + Send;

    const NAME: &'static str;
    /// Kernel version, incremented when the body changes, so that old timings no longer apply.
    const VERSION: u32;
    /// True if each unit sums for itself: results then depend on the number of units.
    const SUMS_BY_UNITS: bool = false;

    /// Returns the problem's part of the cache key. Only sizes that may share a config are rounded.
    fn bucket(problem: &Self::Problem) -> String;

    /// Returns the configs worth measuring; all pass [`Kernel::check`]. The first is the default config,
    /// which runs when nothing was measured. Empty if the device cannot run the problem.
    fn candidates(arch: &ArchProfile, problem: &Self::Problem) -> Vec<Self::Config>;

    /// Checks that `config` compiles and launches for `problem` on `arch`.
    ///
    /// # Errors
    /// The first limit that the config exceeds.
    fn check(
        arch: &ArchProfile,
        problem: &Self::Problem,
        config: &Self::Config,
    ) -> Result<(), Infeasible>;

    /// Returns the minimum work of any implementation.
    fn cost(problem: &Self::Problem) -> Cost;

    /// Returns the baseline config: the simplest one, which verifies the results of the others.
    ///
    /// # Errors
    /// The device cannot run the problem; [`Kernel::candidates`] is then empty.
    fn baseline(arch: &ArchProfile, problem: &Self::Problem) -> Result<Self::Config, Infeasible>;

    /// Makes seeded random operands for measuring.
    fn operands(queue: &Queue, problem: &Self::Problem, seed: u64) -> Self::Operands;

    /// Returns the buffers that a launch writes.
    fn outputs(problem: &Self::Problem, operands: &Self::Operands) -> Vec<Output>;

    /// Bytes of scratch memory that a launch of `config` needs in addition to its operands.
    fn scratch_bytes(_problem: &Self::Problem, _config: &Self::Config) -> u64 {
        0
    }

    /// Allocates and prepares [`Kernel::scratch_bytes`]; `None` for zero bytes.
    fn scratch(device: &Device, problem: &Self::Problem, config: &Self::Config) -> Option<Handle> {
        let bytes = Self::scratch_bytes(problem, config);
        (bytes > 0).then(|| {
            let scratch = device.client().empty(bytes as usize);
            Self::prepare(device, &scratch);
            scratch
        })
    }

    /// Initialises the scratch memory that the first launch reads; the rest may hold anything.
    fn prepare(_device: &Device, _scratch: &Handle) {}

    /// Enqueues the kernel; `scratch` is [`Kernel::scratch`] of the same config. Compile and launch errors
    /// surface when an output is read or checked.
    fn launch(
        queue: &Queue,
        problem: &Self::Problem,
        config: &Self::Config,
        operands: &Self::Operands,
        scratch: Option<&Handle>,
    );

    /// Returns the programs that a launch of `config` runs on a device with these properties, in order.
    /// They can be compiled without a launch.
    fn programs(
        arch: &ArchProfile,
        problem: &Self::Problem,
        config: &Self::Config,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Vec<Box<dyn CubeKernel>> {
        let queue = || Queue::compiler(arch, properties, target);
        // Making operands may launch kernels too.
        let (operands, launches) = (Self::operands(&queue(), problem, 0), queue());
        let scratch = Self::scratch_bytes(problem, config);
        let scratch = (scratch > 0).then(|| launches.empty(scratch as usize));
        Self::launch(&launches, problem, config, &operands, scratch.as_ref());
        launches.into_programs()
    }
}

/// A value that is not a valid config of a kernel.
#[derive(Debug, thiserror::Error)]
#[error("invalid config of {kernel}: {why}")]
pub struct InvalidConfig {
    pub kernel: &'static str,
    pub why: String,
}

/// Parses a config from its JSON form in a cache.
///
/// # Errors
/// A field is missing, unknown or of the wrong type.
pub fn config_of<K: Kernel>(value: &Value) -> Result<K::Config, InvalidConfig> {
    let refused = |why: String| InvalidConfig { kernel: K::NAME, why };
    let config: K::Config =
        serde_json::from_value(value.clone()).map_err(|e| refused(e.to_string()))?;
    let kept = serde_json::to_value(config).expect("a config is plain data");
    match unread(value, &kept) {
        Some(field) => Err(refused(format!("unknown field `{field}`"))),
        None => Ok(config),
    }
}

/// Returns the first field of `given` that `kept` lacks.
fn unread<'a>(given: &'a Value, kept: &Value) -> Option<&'a str> {
    given.as_object()?.iter().find_map(|(name, value)| match kept.get(name) {
        None => Some(name.as_str()),
        Some(kept) => unread(value, kept),
    })
}

/// An output buffer.
#[derive(Debug, Clone)]
pub struct Output {
    pub handle: Handle,
    pub dtype: DType,
    pub len: usize,
    /// Largest difference between two correct results, relative to the largest magnitude.
    pub tolerance: f64,
}

/// The minimum work of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts as two.
    pub flops: u64,
    /// Bytes when every input is read once and every output written once.
    pub bytes: u64,
}

impl Cost {
    /// Nanoseconds on one core of a CPU, as a rough estimate: 16 GFLOP/s and 10 GB/s.
    pub fn core_ns(self) -> f64 {
        (self.flops as f64 / 16.0).max(self.bytes as f64 / 10.0)
    }
}

/// Returns a config that runs on at most `cores` cores of a CPU: with fewer units, each a core. The config stays if its results
/// depend on the units, or if the kernel cannot run with fewer.
pub fn with_cores<K: Kernel>(
    arch: &ArchProfile,
    problem: &K::Problem,
    config: K::Config,
    cores: u32,
) -> K::Config {
    fn limit(value: &mut Value, cores: u32) {
        let Value::Object(fields) = value else { return };
        for (name, value) in fields {
            match value.as_u64() {
                Some(units) if name == "units" => *value = units.min(cores.into()).into(),
                _ => limit(value, cores),
            }
        }
    }
    if K::SUMS_BY_UNITS {
        return config;
    }
    let mut value = serde_json::to_value(config).expect("a config is plain data");
    limit(&mut value, cores);
    let fewer = config_of::<K>(&value).ok();
    fewer.filter(|fewer| K::check(arch, problem, fewer).is_ok()).unwrap_or(config)
}

/// The reason that a config cannot run a problem on an architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Infeasible {
    #[error("needs {need} bytes of shared memory, but the device has {have}")]
    SharedMemory { need: u32, have: u32 },
    #[error("needs {need} units per cube, but the device allows {have}")]
    Units { need: u32, have: u32 },
    #[error("needs {need} loop iterations, but the device stops loops after {have}")]
    Iterations { need: u64, have: u32 },
    #[error("needs {what}, which the device lacks")]
    Feature { what: String },
    #[error("{name} = {value} is not supported: {why}")]
    Shape { name: &'static str, value: u64, why: String },
}
