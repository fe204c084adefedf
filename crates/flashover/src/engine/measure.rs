//! Speed of a model, and the device's ceilings to compare it with.

use std::time::Duration;

use arch::Backend;
use burn::tensor::FloatDType;
use kernels::ceiling;
use kernels::matmul::Precision;
use models::{KvCache, Param, Slot};
use record::Summary;
use serde::Serialize;
use tune::timing::{Stopwatch, Timing, TimingError};

use super::Engine;
use super::error::GenerateError;
use super::sampler::Sampler;
use super::sampling::{Place, Sampling, Token};
use crate::device::Device;
use crate::device_error::DeviceError;
use crate::memory::Grant;

/// A speed test: prefill of a prompt, then decode steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SpeedTest {
    /// Number of prefilled tokens per sequence; 0 for none.
    pub prompt: usize,
    /// Number of decode steps; 0 for none.
    pub generated: usize,
    /// Depth: number of tokens in the KV cache before the test, per sequence.
    pub depth: usize,
    /// Number of sequences in the batch.
    pub batch: usize,
}

/// Measured speed of a test.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// The test.
    pub test: SpeedTest,
    /// Nanoseconds of each repetition on the host's clock: from tokens on the host to the most likely next tokens on
    /// the host.
    pub samples_ns: Vec<f64>,
    /// Nanoseconds to the first token in the first repetition: after prefill, or after the first decode step without a
    /// prompt.
    pub first_token_ns: f64,
    /// Joules of the card per token; none if the driver does not report energy, for runs below a second, or with a
    /// depth.
    pub joules_per_token: Option<f64>,
    /// Bytes that a decode step must read: weights, and the KV cache at half of the generated tokens.
    pub bytes_per_step: u64,
    /// Operations of the matmuls of a repetition; a multiply-add counts as two. Only the last token of a prompt gets
    /// logits.
    pub flops: u64,
}

/// Ceilings of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// Memory bandwidth of a copy, in GB/s read and written.
    pub gbps: f64,
    /// Peak GFLOP/s in registers; none if the backend cannot measure it.
    pub gflops: Option<f64>,
}

impl Ceilings {
    /// Measures the ceilings of the engine's device in its compute dtype.
    ///
    /// # Errors
    /// [`DeviceError`] if the device fails.
    pub fn measure(engine: &Engine) -> Result<Self, DeviceError> {
        Self::of_device(&engine.0.device, engine.decoder().dtype())
    }

    /// Measures the ceilings of a device in a compute dtype.
    pub(crate) fn of_device(device: &Device, dtype: FloatDType) -> Result<Self, DeviceError> {
        let _stream_guard = ops::stream_guard();
        let failed = |e: TimingError| DeviceError::new(device, e.to_string());
        // As in the bench's tables, p10: close to the best, and independent of a single sample.
        let best = |timing: &Timing| {
            Summary::from_samples(&timing.samples_ns).map_or(f64::NAN, |summary| summary.p10)
        };
        let (bytes, timing) = ceiling::time_copy(device.arch()).map_err(failed)?;
        let precision = match dtype {
            FloatDType::F16 => Precision::F16,
            FloatDType::BF16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let multiply = ceiling::time_multiply(device.arch(), precision).map_err(failed)?;
        // The copy's buffers do not count as the model's memory.
        let cleaned = device.client().memory_cleanup();
        cleaned.map_err(|why| DeviceError::new(device, format!("{why:?}")))?;
        Ok(Self {
            gbps: bytes as f64 / best(&timing),
            gflops: multiply.map(|(flops, timing)| flops as f64 / best(&timing)),
        })
    }
}

impl SpeedTest {
    /// Returns the name in llama-bench: `pp512`, `tg128 @ d1024`.
    pub fn name(&self) -> String {
        let what = match self.generated {
            0 => format!("pp{}", self.prompt),
            generated => format!("tg{generated}"),
        };
        match self.depth {
            0 => what,
            depth => format!("{what} @ d{depth}"),
        }
    }

    /// Returns the number of prefilled and generated tokens over all sequences.
    pub const fn tokens(&self) -> usize {
        (self.prompt + self.generated) * self.batch
    }
}

impl Speed {
    /// Returns the tokens per second of each repetition, over all sequences.
    pub fn rates(&self) -> Vec<f64> {
        self.samples_ns.iter().map(|ns| self.test.tokens() as f64 / ns * 1e9).collect()
    }

    /// Returns the mean of [`Speed::rates`], in tokens per second.
    pub fn rate(&self) -> f64 {
        self.rates().iter().sum::<f64>() / self.samples_ns.len() as f64
    }

    /// Returns the bandwidth of the necessary reads as a share of a copy's bandwidth; none for a test without decode
    /// steps.
    pub fn share_of_bandwidth(&self, ceilings: &Ceilings) -> Option<f64> {
        let steps = self.test.generated as f64;
        let gbps = self.bytes_per_step as f64 * steps / self.median_ns();
        (self.test.generated > 0).then(|| gbps / ceilings.gbps)
    }

    /// Returns the model FLOPs utilisation: the achieved share of the peak GFLOP/s; none without a measured peak.
    pub fn utilisation(&self, ceilings: &Ceilings) -> Option<f64> {
        ceilings.gflops.map(|ceiling| self.flops as f64 / self.median_ns() / ceiling)
    }

    fn median_ns(&self) -> f64 {
        Summary::from_samples(&self.samples_ns).map_or(f64::NAN, |summary| summary.median)
    }
}

/// Minimum warm-up. On an H200 through Vulkan, prefill of 512 tokens (1.24B parameters) ran at 8000 to 9000 tokens/s
/// four times, and then at 33000 tokens/s.
const WARM_UP: Duration = Duration::from_millis(500);

/// Repetitions of a test on one KV cache.
pub(super) struct Run<'a> {
    engine: &'a Engine,
    test: SpeedTest,
    cache: KvCache,
    sampler: Sampler,
    _grant: Option<Grant>,
}

impl<'a> Run<'a> {
    pub(super) fn new(engine: &'a Engine, test: SpeedTest) -> Result<Self, GenerateError> {
        let SpeedTest { prompt, generated, depth, batch } = test;
        let positions = depth.saturating_add(prompt).saturating_add(generated);
        let (cache, grant) = engine.cache(batch, positions)?;
        let sampler = Sampler::new(engine, &vec![(Sampling::default(), &[][..]); batch]);
        Ok(Self { engine, test, cache, sampler, _grant: grant })
    }

    /// Clears the cache and prefills the test's depth.
    pub(super) fn prepare(&mut self) -> Result<(), GenerateError> {
        self.cache.clear();
        if self.test.depth > 0 {
            self.pass(1, self.test.depth)?;
        }
        Ok(())
    }

    /// Runs one repetition. Returns the nanoseconds of all of it, and those to the first token.
    pub(super) fn once(&mut self) -> Result<(f64, f64), GenerateError> {
        let begin = Stopwatch::start();
        let mut first = None;
        if self.test.prompt > 0 {
            self.pass(2, self.test.prompt)?;
            first = Some(begin.elapsed());
        }
        for step in 0..self.test.generated {
            self.pass(3 + step, 1)?;
            first.get_or_insert_with(|| begin.elapsed());
        }
        let all = begin.elapsed().as_nanos() as f64;
        Ok((all, first.map_or(f64::NAN, |first| first.as_nanos() as f64)))
    }

    fn pass(&mut self, seed: usize, count: usize) -> Result<Vec<Token>, GenerateError> {
        let batch = self.test.batch;
        let tokens = vec![self.engine.some_tokens(seed, count); batch];
        let logits = self.engine.decoder().prefill(&mut self.cache, &tokens)?;
        let places = vec![Place { position: 0, completion: 0 }; batch];
        self.sampler.sample(self.engine, logits, &places)
    }
}

impl Engine {
    /// Runs a test as warm-up, which also captures the decode graph, and then `repetitions` times. GPUs warm up for at
    /// least half a second, since an idle card runs at low clocks.
    ///
    /// # Errors
    /// [`GenerateError::Model`] for more positions than the model has; [`GenerateError::Plan`] if the test does not fit
    /// in memory.
    pub fn measure(&self, test: SpeedTest, repetitions: usize) -> Result<Speed, GenerateError> {
        let SpeedTest { generated, depth, batch, .. } = test;
        let _weights = self.reading();
        let mut run = Run::new(self, test)?;
        self.precompile(&run.cache, test.prompt, generated > 0)?;
        let profile = self.0.device.profile();
        let energy = || arch::energy_millijoules(&profile.name);
        let rests = profile.backend != Backend::Cpu;
        let warming = Stopwatch::start();
        loop {
            run.prepare()?;
            run.once()?;
            if !rests || warming.elapsed() >= WARM_UP {
                break;
            }
        }
        let (mut samples_ns, mut first_token_ns) = (Vec::new(), f64::NAN);
        let mut before = None;
        for repetition in 0..repetitions {
            run.prepare()?;
            if repetition == 0 {
                before = energy().map(|energy| (energy, Stopwatch::start()));
            }
            let (all_ns, first_ns) = run.once()?;
            samples_ns.push(all_ns);
            if repetition == 0 {
                first_token_ns = first_ns;
            }
        }
        let tokens = (test.tokens() * repetitions) as f64;
        // The counter has coarse steps: for less than a second the result is mostly rounding.
        let joules = before.zip(energy()).and_then(|((before, clock), after)| {
            let enough = depth == 0 && clock.elapsed() >= Duration::from_secs(1);
            enough.then(|| after.abs_diff(before) as f64 / 1e3 / tokens)
        });
        let kv = self.decoder().read_bytes(batch, depth + generated / 2);
        Ok(Speed {
            test,
            samples_ns,
            first_token_ns,
            joules_per_token: joules,
            bytes_per_step: self.decoder().matrix_bytes() + u64::try_from(kv).unwrap_or(u64::MAX),
            flops: self.flops(test),
        })
    }

    /// Returns arbitrary valid tokens.
    pub(crate) fn some_tokens(&self, seed: usize, count: usize) -> Vec<u32> {
        let vocab = self.config().vocab;
        (0..count).map(|at| ((at * 7919 + seed * 104_729) % vocab) as u32).collect()
    }

    /// Returns the operations of a repetition: two per matrix value and token.
    fn flops(&self, test: SpeedTest) -> u64 {
        let config = self.config();
        let matrix =
            |param: &&Param| matches!(param.slot, Slot::Layer(..)) && param.shape.len() == 2;
        let params = config.params();
        let values = |param: &Param| param.shape.iter().product::<usize>() as u64;
        let layers: u64 = params.iter().filter(matrix).map(values).sum();
        let head = (config.vocab * config.hidden) as u64;
        let prompts = u64::from(test.prompt > 0);
        let rows = test.batch as u64 * (prompts + test.generated as u64);
        2 * (layers * test.tokens() as u64 + head * rows)
    }
}
