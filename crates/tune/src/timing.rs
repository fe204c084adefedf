//! Times launches, for the tuner and the bench.
//!
//! It uses device timestamps where the runtime has them. On CUDA, a long launch is timed alone after the
//! caches are overwritten, as `triton.testing.do_bench` does; through wgpu, many launches are timed at
//! once. Short launches on CUDA are captured into a graph and replayed, so that launch overhead on the
//! host is not timed. The caller's closure gets the launch number, to rotate among operand sets that
//! together exceed the cache.

use std::convert::Infallible;
use std::thread;
use std::time::{Duration, Instant};

use arch::{Backend, Device};
use cubecl::future::block_on;
use cubecl::profile::{ProfileDuration, ProfileTicks, TimingMethod};
use cubecl::server::Handle;
use record::Summary;

use crate::fill::fill;

/// Limits of a measurement: time and number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Idle time before the measurement. A GPU at its power limit slows down while it is busy, so every
    /// measurement starts after the same rest.
    pub rest: Duration,
    /// Time of work before the first sample: clocks rise from idle only under load.
    pub warm_up: Duration,
    /// Samples to take within the time limit.
    pub samples: usize,
    /// Samples to take even past the time limit.
    pub min_samples: usize,
    /// Wall-clock limit of all samples together.
    pub limit: Duration,
}

/// Time until GPU clocks rise from idle. A 1.24B model prefilled 512 tokens through Vulkan at 8000 to 9000 tokens/s
/// for a quarter of a second, then at 33000 tokens/s (H200).
const CLOCKS_RISE: Duration = Duration::from_millis(300);

impl Effort {
    /// Returns the effort for reported figures. CUDA: about as long as `triton.testing.do_bench` (25 ms of
    /// warm-up, 100 ms of samples), so that figures compare. wgpu: longer, because the host waits between
    /// samples and clocks rise slowly. CPU: longest, because other programs share it.
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

    /// Returns the effort for choosing among candidates.
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
                // `glance` has warmed up already.
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

    /// Returns the effort of a single sample, to drop slow candidates early. A GPU that waited for a driver to compile
    /// is at idle clocks, and a sample takes four to five times as long. Attention backward through Vulkan took
    /// 24.6 ms instead of 5.3 ms (H200).
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

/// Samples of the time of one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    pub samples_ns: Vec<f64>,
    /// Clock that was read: `device` or `host`.
    pub clock: &'static str,
    /// True if the launches were replayed from a graph.
    pub graph: bool,
}

impl Timing {
    /// Returns the median sample in nanoseconds.
    pub fn median_ns(&self) -> f64 {
        let summary = Summary::from_samples(&self.samples_ns);
        summary.expect("a sample is a duration, and there is one at least").median
    }
}

/// The reason that a measurement failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TimingError {
    /// The kernel did not compile, launch or run.
    #[error("{0}")]
    Failed(String),
    /// The runtime's clock gave no measurement.
    #[error("the device clock returned no measurement")]
    NoMeasurement,
}

/// Launches shorter than this are timed through a graph, where the backend can capture one.
const GRAPH_BELOW_NS: f64 = 250_000.0;
/// Time per sample that makes the clock's own error small.
const SAMPLE_NS: f64 = 400_000.0;
/// Time per sample through wgpu that outweighs the wait for the host between samples.
const SAMPLE_NS_WGPU: f64 = 5_000_000.0;

/// Times `launch`, which gets the launch number (0, 1, 2, ...) and may be called any number of times.
///
/// # Errors
/// A launch fails (the device reports it at the first synchronisation), or the clock gives no measurement.
pub fn measure(
    device: &Device,
    effort: Effort,
    launch: impl FnMut(usize),
) -> Result<Timing, TimingError> {
    measure_with(device, effort, true, launch)
}

/// Times `launch` like [`measure`], without graphs: for work that allocates, such as another library's ops.
///
/// # Errors
/// Errors of [`measure`].
pub fn measure_launches(
    device: &Device,
    effort: Effort,
    launch: impl FnMut(usize),
) -> Result<Timing, TimingError> {
    measure_with(device, effort, false, launch)
}

/// A stopwatch on the host's clock, for work longer than launches: a prefill, a generation.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    /// Returns the start and the end of a timed launch, relative to the start of the stopwatch.
    pub fn place(&self, ticks: &ProfileTicks) -> (Duration, Duration) {
        (ticks.start_duration_since(self.0), ticks.end_duration_since(self.0))
    }
}

/// Times work that runs on the calling thread, by the host's clock.
pub fn measure_host(effort: Effort, mut work: impl FnMut(usize)) -> Timing {
    let mut iteration = 0;
    let mut sample = || {
        let start = Instant::now();
        work(iteration);
        iteration += 1;
        vec![start.elapsed().as_nanos() as f64]
    };
    let samples_ns =
        collect(effort, || Ok::<_, Infallible>(sample())).unwrap_or_else(|never| match never {});
    Timing { samples_ns, clock: "host", graph: false }
}

/// Minimum time of a batch between two waits for the device. A wait takes some tens of microseconds,
/// less than one percent of it.
const BATCH: Duration = Duration::from_millis(20);

/// Times launches with the host's clock, where our timestamps cannot bracket them: another library's
/// launches on its own stream, for example. A sample is the time between two `wait`s for the device,
/// divided by the number of launches between them.
///
/// # Errors
/// Errors of `wait`.
pub fn measure_batches<E>(
    effort: Effort,
    mut launch: impl FnMut(usize),
    mut wait: impl FnMut() -> Result<(), E>,
) -> Result<Timing, E> {
    let mut iteration = 0;
    let mut batch = |launches: usize| {
        wait()?;
        let start = Instant::now();
        for _ in 0..launches {
            launch(iteration);
            iteration += 1;
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
    // The CPU runtime reports device timing, but its clock is the host's.
    let own = method == TimingMethod::Device && device.backend() != Backend::Cpu;
    let clock = if own { "device" } else { "host" };
    let mut iteration = 0;
    let mut run = |n: usize| {
        for _ in 0..n {
            launch(iteration);
            iteration += 1;
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
        // Every launch starts with cold caches, as in do_bench.
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
            // SAFETY: the caller of `measure` owns the graph's operands, so they outlive the graph;
            // nothing else runs on this stream meanwhile.
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

/// Number of windows to open before the first is read, so that the device does not wait for the host.
const AT_ONCE: usize = 8;

/// A buffer that is overwritten to evict everything else from the caches.
struct Cold<'a> {
    device: &'a Device,
    buffer: Handle,
    words: usize,
}

impl<'a> Cold<'a> {
    fn new(device: &'a Device) -> Self {
        let bytes = 4 * device.profile().cache_bytes.unwrap_or(64 << 20) as usize;
        let client = device.client();
        // Dedicated allocations go back to the driver afterwards and do not affect the pool's page sizes.
        let buffer = client.memory_dedicated_allocation((), |()| client.empty(bytes));
        Self { device, buffer, words: bytes / 4 }
    }

    fn chill(&self) {
        fill(self.device, &self.buffer, self.words, 0);
    }
}

/// Warms up, then takes samples; each call of `sample` returns one or several.
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

/// Times `work` on the device; returns nanoseconds, or the error of `work`.
fn window<T: Elapsed>(device: &Device, work: impl FnOnce() -> T) -> Result<T::Out, TimingError> {
    open_window(device, work)?.resolve()
}

/// Work between two timestamps that were not read yet.
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

/// Lets [`window`] time both infallible and fallible work.
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

    /// Simulates a device that runs only while waited for, one millisecond per launch.
    #[test]
    fn a_batch_is_divided_among_its_launches() {
        let (iteration, queued) = (Cell::new(0), Cell::new(0));
        let launch = |i| {
            assert_eq!(iteration.replace(i + 1), i, "launches are numbered in order");
            queued.set(queued.get() + 1);
        };
        let wait = || {
            thread::sleep(Duration::from_millis(queued.take()));
            Ok::<_, Infallible>(())
        };
        let Ok(timing) = measure_batches(EFFORT, launch, wait);
        assert_eq!((timing.samples_ns.len(), timing.clock), (3, "host"));
        // A sleep is never shorter than requested, and even on a busy machine below eight times that.
        let ms = timing.median_ns() / 1e6;
        assert!((1.0..8.0).contains(&ms), "{ms} ms");
    }

    #[test]
    fn a_device_that_fails_gives_no_time() {
        let failed = measure_batches(EFFORT, |_| {}, || Err("lost"));
        assert_eq!(failed, Err("lost"));
    }
}
