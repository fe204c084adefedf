//! Where the time of a model goes.

use serde::Serialize;
use trace::{Operator, Recording, Trace};

use super::Engine;
use super::error::GenerateError;
use super::measure::{Run, SpeedTest};
use crate::memory::MemoryUsage;

/// One run of a test, kernel by kernel.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Which test it was.
    pub test: SpeedTest,
    /// All that was seen: [`Trace::chrome`] writes it for Perfetto.
    pub trace: Trace,
    /// Nanoseconds by the host's clock, launch by launch: what replays a graph is faster.
    pub wall_ns: f64,
    /// What ran, the longest first.
    pub operators: Vec<Operator>,
    /// The embedding, each layer, the head.
    pub layers: Vec<LayerProfile>,
    /// At its end, its keys and values still there.
    pub memory: MemoryUsage,
}

/// What one part of a model took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerProfile {
    /// Such as `embedding`, `layer 0` or `head`.
    pub name: String,
    /// How often tokens passed it.
    pub passes: usize,
    /// Kernels of all passes.
    pub launches: usize,
    /// Nanoseconds that these ran.
    pub total_ns: u64,
    /// Of all that ran.
    pub share: f64,
    /// Bytes of its weights on the device; norms and biases are not counted.
    pub weight_bytes: u64,
    /// Bytes of its keys and values, for the positions of the test.
    pub cache_bytes: u64,
}

impl Profile {
    /// Nanoseconds that kernels ran, over those that passed.
    pub fn busy(&self) -> f64 {
        self.trace.busy_ns() as f64 / self.wall_ns
    }
}

impl Engine {
    /// Runs a test once to warm up and once more while every launch of this thread is timed.
    ///
    /// # Errors
    /// [`GenerateError::Recording`] while something else records; as [`Engine::measure`].
    pub fn profile(&self, test: SpeedTest) -> Result<Profile, GenerateError> {
        let mut run = Run::new(self, test)?;
        run.prepare()?;
        run.once()?;
        run.prepare()?;
        let recording = Recording::of_this_thread()?;
        self.note_memory();
        let (wall_ns, _) = run.once()?;
        let trace = recording.finish();
        let memory = self.memory();
        let positions = test.depth + test.prompt + test.generated;
        let config = self.config();
        let all = config.cache_bytes(self.decoder().precision(), test.batch, positions);
        let each = u64::try_from(all / config.layers.len().max(1) as u128).unwrap_or(u64::MAX);
        let bytes = |name: &str| match name.strip_prefix("layer ").map(str::parse::<usize>) {
            Some(Ok(index)) => [self.decoder().layer_bytes(index), each],
            _ if name == "head" => [self.decoder().head_bytes(), 0],
            _ => [self.decoder().weight_bytes() - self.decoder().matrix_bytes(), 0],
        };
        let parts = trace.layers(|name| {
            name.starts_with("layer ") || matches!(name, "embedding" | "head" | "sampling")
        });
        let layers = parts.into_iter().map(|part| {
            let [weight_bytes, cache_bytes] = match part.name.as_str() {
                "sampling" | trace::ELSEWHERE => [0, 0],
                name => bytes(name),
            };
            LayerProfile {
                weight_bytes,
                cache_bytes,
                name: part.name,
                passes: part.passes,
                launches: part.launches,
                total_ns: part.total_ns,
                share: part.share,
            }
        });
        let (operators, layers) = (trace.operators(), layers.collect());
        Ok(Profile { test, wall_ns, operators, layers, memory, trace })
    }

    /// Notes, for who records a trace, the bytes that are alive in the pools of the device and those that they hold.
    pub fn note_memory(&self) {
        trace::memory(|| {
            let memory = self.memory();
            (memory.used_bytes, memory.reserved_bytes)
        });
    }
}
