//! Context of ops: tuned configs, devices and scratch memory.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use arch::Device;
use burn::backend::DispatchDevice;
use burn_cubecl::CubeDevice;
use cubecl::prelude::CubeKernel;
use cubecl::server::Handle;
use precompile::Missing;
use tune::{CacheError, Choice, Kernel, Key, Policy, Queue, Source, TuneCache, Tuner, with_cores};

use crate::OpError;
use crate::arena::workspace;

/// Returns the CubeCL device of a Burn device.
pub(crate) fn cube_of(device: &burn::tensor::Device) -> Result<CubeDevice, OpError> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device) => Ok(device.clone()),
        other => Err(OpError::Device(format!("{other:?}"))),
    }
}

/// Known configs, and the policy for shapes without one. Cheap to clone; clones share the configs that they
/// learn.
#[derive(Clone)]
pub struct Ctx {
    inner: Arc<Mutex<Inner>>,
    /// Kernels that a rehearsal collects instead of launching them.
    rehearsal: Option<Arc<Mutex<Rehearsed>>>,
}

/// Kernels that a rehearsal collected.
#[derive(Default)]
pub struct Rehearsed {
    device: Option<Device>,
    /// Name of each launch in a trace, and its kernels.
    launches: Vec<(String, Box<Programs>)>,
    missing: Missing,
    /// Bytes of the largest scratch memory of a launch.
    workspace: u64,
}

type Programs = dyn Fn(&Device) -> Vec<Box<dyn CubeKernel>> + Send + Sync;

impl Rehearsed {
    /// Returns the launches under their names in a trace: kernel and bucket.
    pub fn launches(&self) -> impl Iterator<Item = &str> {
        self.launches.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the number of kernels that the kernel cache lacks; 0 on backends other than CUDA.
    pub const fn count(&self) -> usize {
        self.missing.count()
    }

    /// Returns the bytes of the largest scratch memory of a launch, that of split-k mostly.
    pub const fn workspace(&self) -> u64 {
        self.workspace
    }

    /// Compiles the kernels that the kernel cache lacks, on many cores, and stores them there. Any thread may
    /// call this while the device works.
    pub fn compile(self) {
        if let Some(device) = &self.device {
            self.missing.compile(device, |i| (self.launches[i].1)(device));
        }
    }
}

struct Inner {
    cache: TuneCache,
    policy: Policy,
    /// Recorded profile that CUDA devices are restricted to.
    profile: Option<String>,
    devices: Vec<(CubeDevice, Device)>,
    /// Scratch of kernels that keep counters in it, one per stream; CubeCL uses one stream per thread.
    scratch: Vec<(CubeDevice, ThreadId, Scratch)>,
    /// Configs by key, each a `Vec` in the order in which the problems came. Problems of one key may need
    /// different configs. A problem always gets the first one that fits, so that repeated calls give the same
    /// bits.
    known: BTreeMap<String, Box<dyn Any + Send>>,
    date: String,
}

struct Scratch {
    bytes: u64,
    handle: Handle,
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ctx")
    }
}

impl Default for Ctx {
    /// Creates a context with the configs that ship with the program. Other shapes use the first candidate.
    fn default() -> Self {
        Self::new(TuneCache::shipped(), Policy::Default, String::new())
    }
}

impl Ctx {
    /// Creates a context that looks configs up in `cache`. `date` (UTC, RFC 3339) is recorded with
    /// measurements.
    pub fn new(cache: TuneCache, policy: Policy, date: String) -> Self {
        let inner = Inner {
            cache,
            policy,
            profile: None,
            devices: Vec::new(),
            scratch: Vec::new(),
            known: BTreeMap::new(),
            date,
        };
        Self { inner: Arc::new(Mutex::new(inner)), rehearsal: None }
    }

    /// Creates a context with the user's cache on top of the shipped configs, as `flashover` uses it.
    ///
    /// # Errors
    /// Returns an error if the cache cannot be read.
    pub fn of_user(policy: Policy, date: String) -> Result<Self, CacheError> {
        let cache = match tune::default_cache_path() {
            Some(path) => TuneCache::open(&path)?,
            None => TuneCache::shipped(),
        };
        Ok(Self::new(cache, policy, date))
    }

    /// Restricts devices to the recorded profile `name`: they run the kernels of an RTX card, for example, on
    /// another card.
    #[must_use]
    pub fn restricted_to(self, name: &str) -> Self {
        {
            let mut inner = self.lock();
            inner.profile = Some(name.to_owned());
            inner.devices.clear();
        }
        self
    }

    /// Returns the warnings about the cache so far.
    pub fn warnings(&self) -> Vec<String> {
        self.lock().cache.warnings().iter().map(ToString::to_string).collect()
    }

    /// Returns a context whose ops choose configs and collect kernels without launching them: results stay
    /// unwritten. [`Ctx::rehearsed`] returns the kernels.
    #[must_use]
    pub fn rehearsal(&self) -> Self {
        Self { inner: self.inner.clone(), rehearsal: Some(Arc::default()) }
    }

    /// Returns true for a [rehearsal](Ctx::rehearsal).
    pub const fn rehearses(&self) -> bool {
        self.rehearsal.is_some()
    }

    /// Returns true if [`Rehearsed::compile`] compiles kernels for `device`, which must be CUDA.
    pub fn precompiles(device: &burn::tensor::Device) -> bool {
        cube_of(device).is_ok_and(|raw| raw.client().name() == "cuda")
    }

    /// Takes the kernels that a [rehearsal](Ctx::rehearsal) collected so far.
    pub fn rehearsed(&self) -> Rehearsed {
        let Some(rehearsal) = &self.rehearsal else { return Rehearsed::default() };
        let rehearsed = mem::take(&mut *rehearsal.lock().unwrap_or_else(PoisonError::into_inner));
        let Some(device) = &rehearsed.device else { return rehearsed };
        let kernels = |i: usize| (rehearsed.launches[i].1)(device);
        Rehearsed { missing: Missing::find(device, rehearsed.launches.len(), kernels), ..rehearsed }
    }

    /// Launches a kernel, as an operator of the trace if there is one; a rehearsal collects it instead.
    pub(crate) fn launch<K: Kernel>(
        &self,
        device: &Device,
        problem: &K::Problem,
        config: &K::Config,
        operands: &K::Operands,
        scratch: Option<&Handle>,
    ) {
        let name = || format!("{} {}", K::NAME, K::bucket(problem));
        if let Some(rehearsal) = &self.rehearsal {
            let (name, problem, config) = (name(), problem.clone(), *config);
            let mut rehearsed = rehearsal.lock().unwrap_or_else(PoisonError::into_inner);
            rehearsed.device.get_or_insert_with(|| device.clone());
            let programs = move |device: &Device| {
                let client = device.client();
                let (properties, target) =
                    (client.properties_shared(), client.target_properties_shared());
                K::programs(device.profile(), &problem, &config, &properties, &target)
            };
            rehearsed.launches.push((name, Box::new(programs)));
            return;
        }
        let _operator = trace::operator(name, || K::cost(problem));
        // CubeCL hands a launch that waits for another one to the next core, where it spins. Beside other programs that core
        // may be theirs, so launches wait for each other here.
        let waits = device.profile().is_shared();
        if waits {
            wait(device);
        }
        K::launch(&Queue::Device(device), problem, config, operands, scratch);
        if waits {
            wait(device);
        }
    }

    /// Returns scratch memory for a launch: that of the open arena if it suffices.
    pub(crate) fn scratch_of<K: Kernel>(
        &self,
        device: &Device,
        problem: &K::Problem,
        config: &K::Config,
    ) -> Option<Handle> {
        let bytes = K::scratch_bytes(problem, config);
        if let Some(rehearsal) = &self.rehearsal {
            let mut rehearsed = rehearsal.lock().unwrap_or_else(PoisonError::into_inner);
            rehearsed.workspace = rehearsed.workspace.max(bytes);
        }
        match workspace(bytes).filter(|_| bytes > 0) {
            Some(kept) => {
                K::prepare(device, &kept);
                Some(kept)
            }
            None => K::scratch(device, problem, config),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves the caches intact.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the `arch` device of a CubeCL device.
    pub(crate) fn device(&self, raw: &CubeDevice) -> Result<Device, OpError> {
        let mut inner = self.lock();
        if let Some((_, device)) = inner.devices.iter().find(|(known, _)| known == raw) {
            return Ok(device.clone());
        }
        let refused = |e: arch::OpenError| OpError::Device(e.to_string());
        let mut device = Device::from_raw(raw.clone()).map_err(refused)?;
        if let Some(name) = &inner.profile {
            device = device.restrict(name).map_err(refused)?;
        }
        inner.devices.push((raw.clone(), device.clone()));
        Ok(device)
    }

    /// Returns scratch of at least `bytes` for launches of this thread; none for 0 bytes. Calls `make` if the
    /// kept scratch is too small. Launches of one stream run in order, so they can share it.
    pub(crate) fn scratch(
        &self,
        raw: &CubeDevice,
        bytes: u64,
        make: impl FnOnce() -> Option<Handle>,
    ) -> Option<Handle> {
        if bytes == 0 {
            return None;
        }
        let (mut inner, thread) = (self.lock(), thread::current().id());
        let own = |(of, by, _): &(CubeDevice, ThreadId, Scratch)| of == raw && *by == thread;
        if let Some((.., kept)) = inner.scratch.iter().find(|kept| own(kept))
            && kept.bytes >= bytes
        {
            return Some(kept.handle.clone());
        }
        let handle = make()?;
        inner.scratch.retain(|kept| !own(kept));
        let kept = Scratch { bytes, handle: handle.clone() };
        inner.scratch.push((raw.clone(), thread, kept));
        Some(handle)
    }

    /// Returns the config of a problem.
    pub(crate) fn config<K: Kernel>(
        &self,
        device: &Device,
        problem: &K::Problem,
    ) -> Result<K::Config, OpError> {
        let mut inner = self.lock();
        let mut key = Key::new::<K>(&device.profile().id, problem).to_string();
        // Beside other programs, fewer cores of a CPU are faster.
        let profile = device.profile();
        let free = profile.free_cores();
        // Read once: the load may change meanwhile.
        if let Some(free) = free.filter(|_| free != profile.cores()) {
            key += &format!(" on {free}");
        }
        let known = inner.known.get(&key).and_then(|all| all.downcast_ref::<Vec<K::Config>>());
        let known = known.map(Vec::as_slice).unwrap_or_default();
        let fits = |config: &&K::Config| K::check(device.profile(), problem, config).is_ok();
        if let Some(config) = known.iter().find(fits) {
            return Ok(*config);
        }
        let mut known = known.to_vec();
        let mut tuner = Tuner {
            device,
            cache: mem::take(&mut inner.cache),
            policy: inner.policy,
            commit: concat!("v", env!("CARGO_PKG_VERSION")).to_owned(),
            date: inner.date.clone(),
        };
        let chosen = tuner.choose::<K>(problem);
        inner.cache = tuner.cache;
        let Choice { mut config, source } = chosen?;
        if let Some(free) = free {
            let useful = profile.useful_cores(K::cost(problem).core_ns()).unwrap_or(free);
            let cores = if source == Source::Default { useful.min(free) } else { free };
            config = with_cores::<K>(profile, problem, config, cores);
        }
        known.push(config);
        inner.known.insert(key, Box::new(known));
        Ok(config)
    }
}

/// Waits for the launches of this thread. A read of its results reports a failure.
fn wait(device: &Device) {
    if let Err(why) = device.client().flush() {
        log::debug!("a launch failed: {why}");
    }
}

#[cfg(test)]
mod tests {
    use arch::Backend;
    use kernels::matmul::{Layout, Matmul, MatmulProblem, Precision};

    use super::*;

    #[test]
    fn a_problem_keeps_its_config_whoever_shares_its_key() {
        let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
        let ctx = Ctx::new(TuneCache::default(), Policy::Default, String::new());
        let product = |k| {
            let layouts = [Layout::Row, Layout::Col];
            MatmulProblem::dense(1, [64, 64, k], layouts, Precision::F32).expect("valid")
        };
        let config = |k| ctx.config::<Matmul>(&device, &product(k)).expect("f32");
        // Only the first has k divisible by 8.
        let (first, other) = (config(512), config(508));
        assert_eq!(Matmul::bucket(&product(512)), Matmul::bucket(&product(508)));
        if device.profile().load_bytes > 16 {
            assert_ne!(first, other);
        }
        assert_eq!([config(512), config(508)], [first, other]);
    }

    #[test]
    fn a_short_kernel_uses_one_core() {
        let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
        let ctx = Ctx::new(TuneCache::default(), Policy::Default, String::new());
        let units = |n| {
            let layouts = [Layout::Row, Layout::Col];
            let product =
                MatmulProblem::dense(1, [n, n, n], layouts, Precision::F32).expect("valid");
            let config = ctx.config::<Matmul>(&device, &product).expect("f32");
            let value = format!("{config:?}");
            let (_, rest) = value.split_once("units: ").expect("it has units");
            rest.chars().take_while(char::is_ascii_digit).collect::<String>()
        };
        assert_eq!(units(64), "1");
        // Beside other programs a long kernel has fewer, too.
        let all = device.profile().cores().expect("a CPU");
        assert!((1..=all).contains(&units(1024).parse().expect("a number")));
    }
}
