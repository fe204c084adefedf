//! How fast a model is, and against what a device gives at most.

use std::time::Duration;

use arch::Backend;
use burn::tensor::DType;
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
use crate::device_error::DeviceError;
use crate::memory::Grant;

/// What is measured: a prompt that passes, or tokens that are generated one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SpeedTest {
    /// Tokens of a prompt; 0 for none.
    pub prompt: usize,
    /// Tokens that are generated; 0 for none.
    pub generated: usize,
    /// Positions that are there before.
    pub depth: usize,
    /// Sequences that run together.
    pub batch: usize,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// Which test it was.
    pub test: SpeedTest,
    /// Nanoseconds of each repetition, by the host's clock, from tokens on the host to the likeliest next
    /// ones on the host.
    pub samples_ns: Vec<f64>,
    /// Nanoseconds up to the first generated token, of the first repetition; the prompt's where there is one.
    pub first_token_ns: f64,
    /// Joules of the card for a token, where the driver tells, and over a second or more.
    pub joules_per_token: Option<f64>,
    /// Bytes that a step of generating must read: weights, and keys and values halfway.
    pub bytes_per_step: u64,
    /// Operations of the products of a repetition; a multiply-add counts two. Of a prompt only the last token
    /// gets logits.
    pub flops: u64,
}

/// The most that a device gives.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// Gigabytes a second of a copy, read and written.
    pub gbps: f64,
    /// Operations a nanosecond in registers, where the backend has a way to measure it.
    pub gflops: Option<f64>,
}

impl Ceilings {
    /// Measures them for what `engine` computes in.
    ///
    /// # Errors
    /// Those of the device.
    pub fn measure(engine: &Engine) -> Result<Self, DeviceError> {
        let _at_work = ops::at_work();
        let device = &engine.0.device;
        let failed = |e: TimingError| engine.failed(e.to_string());
        // As the bench's tables have it: the best that a device gives, and not by one sample.
        let best = |timing: &Timing| {
            Summary::of(&timing.samples_ns).map_or(f64::NAN, |summary| summary.p10)
        };
        let (bytes, timing) = ceiling::time_copy(device.arch()).map_err(failed)?;
        let precision = match DType::from(engine.decoder().dtype()) {
            DType::F16 => Precision::F16,
            DType::BF16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let multiply = ceiling::time_multiply(device.arch(), precision).map_err(failed)?;
        // What was copied is not the model's memory.
        let cleaned = device.client().memory_cleanup();
        cleaned.map_err(|why| engine.failed(format!("{why:?}")))?;
        Ok(Self {
            gbps: bytes as f64 / best(&timing),
            gflops: multiply.map(|(flops, timing)| flops as f64 / best(&timing)),
        })
    }
}

impl SpeedTest {
    /// Its name as llama-bench has it: `pp512`, `tg128 @ d1024`.
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

    /// Tokens of all sequences.
    pub const fn tokens(&self) -> usize {
        (self.prompt + self.generated) * self.batch
    }
}

impl Speed {
    /// Tokens a second of each repetition, of all sequences.
    pub fn rates(&self) -> Vec<f64> {
        self.samples_ns.iter().map(|ns| self.test.tokens() as f64 / ns * 1e9).collect()
    }

    /// The mean of them.
    pub fn rate(&self) -> f64 {
        self.rates().iter().sum::<f64>() / self.samples_ns.len() as f64
    }

    /// Bytes that had to be read over those that a copy would have moved, for generated tokens.
    pub fn share_of_bandwidth(&self, ceilings: &Ceilings) -> Option<f64> {
        let steps = self.test.generated as f64;
        let gbps = self.bytes_per_step as f64 * steps / self.median_ns();
        (self.test.generated > 0).then(|| gbps / ceilings.gbps)
    }

    /// Model FLOPs utilisation: operations of the products over what registers would have given.
    pub fn utilisation(&self, ceilings: &Ceilings) -> Option<f64> {
        ceilings.gflops.map(|ceiling| self.flops as f64 / self.median_ns() / ceiling)
    }

    fn median_ns(&self) -> f64 {
        Summary::of(&self.samples_ns).map_or(f64::NAN, |summary| summary.median)
    }
}

/// 1.24B through Vulkan passed 512 tokens at 8000 to 9000 tokens/s four times, and then at 33000 (H200).
const WARM_UP: Duration = Duration::from_millis(500);

/// Repetitions of a test, over one cache.
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

    /// Lets pass what is there before.
    pub(super) fn prepare(&mut self) -> Result<(), GenerateError> {
        self.cache.clear();
        if self.test.depth > 0 {
            self.pass(1, self.test.depth)?;
        }
        Ok(())
    }

    /// One repetition: nanoseconds of all of it, and up to the first token.
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
    /// Runs a test to warm up, which is when a step is captured, and then as often as `repetitions` says. Off a CPU it
    /// warms up for half a second at least: a card that rested has not its clocks at once.
    ///
    /// # Errors
    /// [`GenerateError::Model`] for more positions than the model has.
    pub fn measure(&self, test: SpeedTest, repetitions: usize) -> Result<Speed, GenerateError> {
        let SpeedTest { generated, depth, batch, .. } = test;
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
        // The counter moves in steps: what took less than a second is mostly rounding.
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

    /// Tokens of no meaning.
    pub(crate) fn some_tokens(&self, seed: usize, count: usize) -> Vec<u32> {
        let vocab = self.config().vocab;
        (0..count).map(|at| ((at * 7919 + seed * 104_729) % vocab) as u32).collect()
    }

    /// Two for each value of a matrix that a token passes.
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
