//! The trait that every kernel family implements.

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

/// A kernel family: one computation, many ways to run it.
///
/// `candidates`, `check` and `cost` are pure: they see the facts of a device, never the device, so
/// that they are tested for cards that are not there.
pub trait Kernel: 'static {
    /// What to compute: sizes, dtypes, layout and every flag that changes the answer.
    type Problem: Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync;
    /// How: tile sizes, stages, planes. The comptime argument of the kernel and the cached value.
    type Config: Copy + Debug + Eq + Hash + Serialize + DeserializeOwned + Send + Sync;
    /// Device buffers of one problem, inputs and output.
    type Operands: Clone + Send;

    const NAME: &'static str;
    /// Bumped when the body changes, so that old timings are not believed.
    const VERSION: u32;

    /// Rounds only the sizes that may share a config; the text is the cache key.
    fn bucket(problem: &Self::Problem) -> String;

    /// Configs worth measuring, every one of which passes [`Kernel::check`]; the first is what runs
    /// when nothing was measured. Empty when the device cannot serve the problem.
    fn candidates(arch: &ArchProfile, problem: &Self::Problem) -> Vec<Self::Config>;

    /// Whether `config` would compile and launch for `problem` on `arch`.
    ///
    /// # Errors
    /// The first limit that is exceeded.
    fn check(
        arch: &ArchProfile,
        problem: &Self::Problem,
        config: &Self::Config,
    ) -> Result<(), Infeasible>;

    /// The least work that any implementation must do.
    fn cost(problem: &Self::Problem) -> Cost;

    /// The config with the least to go wrong; what others are compared with.
    ///
    /// # Errors
    /// What the device lacks for the problem; there are then no candidates either.
    fn simplest(arch: &ArchProfile, problem: &Self::Problem) -> Result<Self::Config, Infeasible>;

    /// Seeded random operands for measuring.
    fn operands(queue: &Queue, problem: &Self::Problem, seed: u64) -> Self::Operands;

    /// The buffers that a launch writes.
    fn outputs(problem: &Self::Problem, operands: &Self::Operands) -> Vec<Output>;

    /// Bytes that a launch of `config` needs beside its operands, for what it keeps between kernels.
    fn scratch_bytes(_problem: &Self::Problem, _config: &Self::Config) -> u64 {
        0
    }

    /// The buffer of [`Kernel::scratch_bytes`]; none when it needs none.
    fn scratch(device: &Device, problem: &Self::Problem, config: &Self::Config) -> Option<Handle> {
        let bytes = Self::scratch_bytes(problem, config);
        (bytes > 0).then(|| {
            let scratch = device.client().empty(bytes as usize);
            Self::prepare(device, &scratch);
            scratch
        })
    }

    /// Writes what the first launch must find in scratch; all else there may be anything.
    fn prepare(_device: &Device, _scratch: &Handle) {}

    /// Enqueues the kernel; `scratch` is [`Kernel::scratch`] of the same config. Failures to compile or
    /// launch surface when an output is read or checked.
    fn launch(
        queue: &Queue,
        problem: &Self::Problem,
        config: &Self::Config,
        operands: &Self::Operands,
        scratch: Option<&Handle>,
    );

    /// The programs of a launch of `config` on a device with these properties, in the order they run in: for
    /// compiling them without launching them.
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

/// Text that is no config of a kernel.
#[derive(Debug, thiserror::Error)]
#[error("no config of {kernel}: {why}")]
pub struct InvalidConfig {
    pub kernel: &'static str,
    pub why: String,
}

/// The config that `value` is, as a cache keeps it.
///
/// # Errors
/// A field is missing, unknown or of another kind.
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

/// The first field of `given` that `kept` has not.
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
    /// Largest difference between two right answers, relative to the largest magnitude.
    pub tolerance: f64,
}

/// The least work of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: u64,
    /// Bytes of every input read once and every output written once.
    pub bytes: u64,
}

/// Why a config cannot run a problem on an architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Infeasible {
    #[error("needs {need} bytes of shared memory, the device has {have}")]
    SharedMemory { need: u32, have: u32 },
    #[error("needs {need} units in a cube, the device has {have}")]
    Units { need: u32, have: u32 },
    #[error("needs {need} turns of loops, the device leaves them after {have}")]
    Turns { need: u64, have: u32 },
    #[error("needs {what}, which the device lacks")]
    Feature { what: String },
    #[error("{name} = {value} does not fit: {why}")]
    Shape { name: &'static str, value: u64, why: String },
}
