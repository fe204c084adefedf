//! The one way to time a launch: the tuner and the bench share it.
//!
//! Device timestamps where the runtime has them. A long launch is timed alone, the caches overwritten
//! before it, as `triton.testing.do_bench` does (CUDA; through wgpu many at once). Launches shorter than the cost of launching are
//! recorded into a graph and replayed, so that what is timed is the kernel and not the host; the
//! caller's closure gets the launch number, to rotate among operand sets larger than the cache.

use std::convert::Infallible;
use std::thread;
use std::time::{Duration, Instant};

use arch::{Backend, Device};
use cubecl::future::block_on;
use cubecl::profile::{ProfileDuration, ProfileTicks, TimingMethod};
use cubecl::server::Handle;
use record::Summary;

use crate::fill::fill;

/// How long to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Idle time before. A GPU at its power limit runs slower the longer it has been busy, so every
    /// measurement starts from the same rest.
    pub rest: Duration,
    /// Work before the first sample: clocks rise from idle only under load.
    pub warm_up: Duration,
    /// Samples to take when time allows.
    pub samples: usize,
    /// Samples to take even when it does not.
    pub min_samples: usize,
    /// Wall-clock limit of the samples together.
    pub limit: Duration,
}

/// From idle clocks to those of work: 1.24B passed 512 tokens through Vulkan at 8000 to 9000 tokens/s for a quarter of a
/// second, and then at 33000 (H200).
const CLOCKS_RISE: Duration = Duration::from_millis(300);

impl Effort {
    /// For figures that are reported: on CUDA about as long as `triton.testing.do_bench` (25 ms of
    /// warm-up, 100 ms of samples), so that figures compare; through wgpu longer, because the host
    /// waits between samples and clocks rise slowly; on a CPU longer still, because other programs share
    /// it.
    pub const fn report(backend: Backend) -> Self {
        match backend {
            Backend::Cpu => Self {
                rest: Duration::ZERO,
                warm_up: Duration::from_millis(100),
                samples: 60,
                min_samples: 5,
                limit: Duration::from_millis(1200),
            },
            Backend::Vulkan | Backend::WebGpu => Self {
                rest: Duration::ZERO,
                warm_up: CLOCKS_RISE,
                samples: 60,
                min_samples: 5,
                limit: Duration::from_millis(300),
            },
            Backend::Cuda => Self {
                rest: Duration::from_millis(300),
                warm_up: Duration::from_millis(40),
                samples: 200,
                min_samples: 5,
                limit: Duration::from_millis(100),
            },
        }
    }

    /// For choosing among candidates.
    pub const fn tune(backend: Backend) -> Self {
        match backend {
            Backend::Cpu => Self {
                warm_up: Duration::from_millis(20),
                samples: 12,
                min_samples: 3,
                limit: Duration::from_millis(100),
                ..Self::report(backend)
            },
            Backend::Vulkan | Backend::WebGpu => Self {
                // After a glance.
                warm_up: Duration::ZERO,
                samples: 12,
                min_samples: 3,
                limit: Duration::from_millis(60),
                ..Self::report(backend)
            },
            Backend::Cuda => Self {
                rest: Duration::from_millis(40),
                warm_up: Duration::from_millis(15),
                samples: 40,
                min_samples: 3,
                limit: Duration::from_millis(20),
            },
        }
    }

    /// One sample, to tell the hopeless from the rest. A GPU that waited for a driver to compile is at the clocks of its
    /// rest, and a sample takes four to five times as long: gradients of attention through Vulkan 24.6 ms for 5.3 (H200).
    pub const fn glance(backend: Backend) -> Self {
        Self {
            rest: Duration::ZERO,
            warm_up: match backend {
                Backend::Vulkan | Backend::WebGpu => CLOCKS_RISE,
                Backend::Cuda | Backend::Cpu => Duration::ZERO,
            },
            samples: 1,
            min_samples: 1,
            ..Self::tune(backend)
        }
    }
}

/// Nanoseconds of one launch, one value a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    pub samples_ns: Vec<f64>,
    /// `device` or `host`: whose clock.
    pub clock: &'static str,
    /// Whether launches were replayed from a graph.
    pub graph: bool,
}

impl Timing {
    /// The median sample.
    pub fn median_ns(&self) -> f64 {
        let summary = Summary::of(&self.samples_ns);
        summary.expect("a sample is a duration, and there is one at least").median
    }
}

/// Why nothing was timed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TimingError {
    /// The kernel did not compile, launch or run.
    #[error("{0}")]
    Failed(String),
    /// The runtime's clock gave no measurement.
    #[error("the device clock gave no measurement")]
    NoMeasurement,
}

/// Below this a launch is timed through a graph, where the backend can capture one.
const GRAPH_BELOW_NS: f64 = 250_000.0;
/// Work per sample that makes the clock's own error small.
const SAMPLE_NS: f64 = 400_000.0;
/// Work per sample that outweighs the wait for the host between samples, through wgpu.
const SAMPLE_NS_WGPU: f64 = 5_000_000.0;

/// Times `launch`, which is given 0, 1, 2, ... and must be right to call any number of times.
///
/// # Errors
/// A launch that fails, reported by the device at the first synchronisation.
pub fn measure(
    device: &Device,
    effort: Effort,
    launch: impl FnMut(usize),
) -> Result<Timing, TimingError> {
    measure_with(device, effort, true, launch)
}

/// As [`measure`], without graphs: for work that allocates, such as another library's ops.
///
/// # Errors
/// As [`measure`].
pub fn measure_launches(
    device: &Device,
    effort: Effort,
    launch: impl FnMut(usize),
) -> Result<Timing, TimingError> {
    measure_with(device, effort, false, launch)
}

/// The host's clock, for what is longer than launches: a model's prompt, a generation.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    /// Where a timed launch began and ended, from the start on.
    pub fn place(&self, ticks: &ProfileTicks) -> (Duration, Duration) {
        (ticks.start_duration_since(self.0), ticks.end_duration_since(self.0))
    }
}

/// Times work that runs on the calling thread, by the host's clock.
pub fn measure_host(effort: Effort, mut work: impl FnMut(usize)) -> Timing {
    let mut turn = 0;
    let mut sample = || {
        let start = Instant::now();
        work(turn);
        turn += 1;
        vec![start.elapsed().as_nanos() as f64]
    };
    let samples_ns =
        collect(effort, || Ok::<_, Infallible>(sample())).unwrap_or_else(|never| match never {});
    Timing { samples_ns, clock: "host", graph: false }
}

/// Work between two waits for the device: the wait, some tens of microseconds, is within a percent of
/// it.
const BATCH: Duration = Duration::from_millis(20);

/// Times work whose launches no timestamp of ours brackets, such as another library's on a stream of
/// its own, by the host's clock: many launches between two `wait`s for the device, whose share of the
/// sample each launch then has.
///
/// # Errors
/// Those of `wait`.
pub fn measure_batches<E>(
    effort: Effort,
    mut launch: impl FnMut(usize),
    mut wait: impl FnMut() -> Result<(), E>,
) -> Result<Timing, E> {
    let mut turn = 0;
    let mut batch = |launches: usize| {
        wait()?;
        let start = Instant::now();
        for _ in 0..launches {
            launch(turn);
            turn += 1;
        }
        wait()?;
        Ok(start.elapsed())
    };
    thread::sleep(effort.rest);
    // The first launch may compile.
    batch(1)?;
    let mut launches = 1;
    while batch(launches)? < BATCH {
        launches *= 2;
    }
    let sample = || Ok(vec![batch(launches)?.as_nanos() as f64 / launches as f64]);
    Ok(Timing { samples_ns: collect(effort, sample)?, clock: "host", graph: false })
}

fn measure_with(
    device: &Device,
    effort: Effort,
    graphs: bool,
    mut launch: impl FnMut(usize),
) -> Result<Timing, TimingError> {
    sync(device)?;
    thread::sleep(effort.rest);
    let method = device.client().properties().timing_method;
    // The CPU runtime calls its clock a device's; it is the host's.
    let own = method == TimingMethod::Device && device.backend() != Backend::Cpu;
    let clock = if own { "device" } else { "host" };
    let mut turn = 0;
    let mut run = |n: usize| {
        for _ in 0..n {
            launch(turn);
            turn += 1;
        }
    };
    run(1);
    sync(device)?;
    let first = window(device, || run(1))?.min(window(device, || run(1))?);
    let cuda = device.backend() == Backend::Cuda;
    let sample_ns = match device.backend() {
        Backend::Vulkan => SAMPLE_NS_WGPU,
        _ => SAMPLE_NS,
    };
    let inner = (sample_ns / first.max(1000.0)).ceil().clamp(1.0, 256.0) as usize;

    let (samples_ns, graph) = if cuda && first >= GRAPH_BELOW_NS {
        // As do_bench does: every launch finds cold caches.
        let cold = Cold::new(device);
        let samples = collect(effort, || {
            let windows: Result<Vec<_>, TimingError> = (0..AT_ONCE)
                .map(|_| {
                    cold.chill();
                    open_window(device, || run(1))
                })
                .collect();
            windows?.into_iter().map(|w| w.resolve()).collect()
        })?;
        (samples, false)
    } else if cuda && graphs {
        let graph = capture(device, inner, &mut run)?;
        let samples = collect(effort, || {
            // SAFETY: the operands that the graph launches on are owned by the caller of `measure`
            // and outlive it; nothing else runs on this stream meanwhile.
            let elapsed = window(device, || unsafe { graph.replay() }.map_err(failed))??;
            Ok::<_, TimingError>(vec![elapsed / inner as f64])
        })?;
        (samples, true)
    } else {
        let samples = collect(effort, || {
            Ok::<_, TimingError>(vec![window(device, || run(inner))? / inner as f64])
        })?;
        (samples, false)
    };
    sync(device)?;
    Ok(Timing { samples_ns, clock, graph })
}

/// Windows that are opened before the first is read, so that the device does not wait for the host.
const AT_ONCE: usize = 8;

/// A buffer to overwrite, so that nothing else is left in the caches.
struct Cold<'a> {
    device: &'a Device,
    buffer: Handle,
    words: usize,
}

impl<'a> Cold<'a> {
    fn new(device: &'a Device) -> Self {
        let bytes = 4 * device.profile().cache_bytes.unwrap_or(64 << 20) as usize;
        let client = device.client();
        // Back to the driver once it is over, and no measure of the pages of a pool.
        let buffer = client.memory_dedicated_allocation((), |()| client.empty(bytes));
        Self { device, buffer, words: bytes / 4 }
    }

    fn chill(&self) {
        fill(self.device, &self.buffer, self.words, 0);
    }
}

/// Warms up, then takes samples; `sample` gives one or several.
fn collect<E>(
    effort: Effort,
    mut sample: impl FnMut() -> Result<Vec<f64>, E>,
) -> Result<Vec<f64>, E> {
    let start = Instant::now();
    while start.elapsed() < effort.warm_up {
        sample()?;
    }
    let start = Instant::now();
    let mut samples = Vec::with_capacity(effort.samples);
    while samples.len() < effort.samples
        && (samples.len() < effort.min_samples || start.elapsed() < effort.limit)
    {
        samples.extend(sample()?);
    }
    Ok(samples)
}

/// Nanoseconds that `work` takes on the device, and what it returned.
fn window<T: Elapsed>(device: &Device, work: impl FnOnce() -> T) -> Result<T::Out, TimingError> {
    open_window(device, work)?.resolve()
}

/// Work between two timestamps that are not read yet.
struct Window<T> {
    ticks: ProfileDuration,
    out: T,
}

fn open_window<T: Elapsed>(
    device: &Device,
    work: impl FnOnce() -> T,
) -> Result<Window<T>, TimingError> {
    let client = device.client();
    let opened = client.profile_start().map_err(failed)?;
    let out = work();
    Ok(Window { ticks: client.profile_end(opened).map_err(failed)?, out })
}

impl<T: Elapsed> Window<T> {
    fn resolve(self) -> Result<T::Out, TimingError> {
        let ticks = block_on(self.ticks.resolve()).ok_or(TimingError::NoMeasurement)?;
        Ok(self.out.with(ticks.duration().as_nanos() as f64))
    }
}

/// Lets [`window`] time both work that cannot fail and work that can.
trait Elapsed {
    type Out;
    fn with(self, ns: f64) -> Self::Out;
}

impl Elapsed for () {
    type Out = f64;
    fn with(self, ns: f64) -> f64 {
        ns
    }
}

impl Elapsed for Result<(), TimingError> {
    type Out = Result<f64, TimingError>;
    fn with(self, ns: f64) -> Result<f64, TimingError> {
        self.map(|()| ns)
    }
}

fn capture(
    device: &Device,
    launches: usize,
    run: &mut impl FnMut(usize),
) -> Result<cubecl::client::Graph, TimingError> {
    let client = device.client();
    client.graph_prepare().map_err(failed)?;
    run(launches);
    client.start_capture().map_err(failed)?;
    run(launches);
    client.stop_capture().map_err(failed)
}

fn sync(device: &Device) -> Result<(), TimingError> {
    block_on(device.client().sync()).map_err(failed)
}

fn failed(e: impl std::fmt::Debug) -> TimingError {
    TimingError::Failed(format!("{e:?}"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const EFFORT: Effort = Effort {
        rest: Duration::ZERO,
        warm_up: Duration::ZERO,
        samples: 3,
        min_samples: 3,
        limit: Duration::ZERO,
    };

    /// A device that does nothing until it is waited for, then takes a millisecond a launch.
    #[test]
    fn a_batch_is_divided_among_its_launches() {
        let (turn, queued) = (Cell::new(0), Cell::new(0));
        let launch = |i| {
            assert_eq!(turn.replace(i + 1), i, "launches are numbered in order");
            queued.set(queued.get() + 1);
        };
        let wait = || {
            thread::sleep(Duration::from_millis(queued.take()));
            Ok::<_, Infallible>(())
        };
        let Ok(timing) = measure_batches(EFFORT, launch, wait);
        assert_eq!((timing.samples_ns.len(), timing.clock), (3, "host"));
        // A sleep is never shorter than asked, and not eight times as long on a machine that is busy.
        let ms = timing.median_ns() / 1e6;
        assert!((1.0..8.0).contains(&ms), "{ms} ms");
    }

    #[test]
    fn a_device_that_fails_gives_no_time() {
        let failed = measure_batches(EFFORT, |_| {}, || Err("lost"));
        assert_eq!(failed, Err("lost"));
    }
}
