//! Time of a model per kernel, operator and layer.

use serde::Serialize;
use trace::{Operator, Recording, Trace};

use super::Engine;
use super::error::GenerateError;
use super::measure::{Run, SpeedTest};
use crate::memory::MemoryUsage;

/// Profile of one run of a test, per kernel.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The test.
    pub test: SpeedTest,
    /// All recorded events: [`Trace::chrome`] writes them for Perfetto.
    pub trace: Trace,
    /// Nanoseconds on the host's clock, with one launch per kernel. Normal runs replay a graph and are faster.
    pub wall_ns: f64,
    /// Time per operator, longest first.
    pub operators: Vec<Operator>,
    /// Time of the embedding, each layer, the output projection and sampling.
    pub layers: Vec<LayerProfile>,
    /// Memory at the end of the run, with its KV cache.
    pub memory: MemoryUsage,
}

/// Time and memory of one part of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerProfile {
    /// Name of the part, such as `embedding`, `layer 0` or `head`.
    pub name: String,
    /// Number of forward passes.
    pub passes: usize,
    /// Number of kernel launches over all passes.
    pub launches: usize,
    /// Nanoseconds of these kernels.
    pub total_ns: u64,
    /// Share of the time of all kernels, from 0 to 1.
    pub share: f64,
    /// Bytes of its weights on the device, without norms and biases.
    pub weight_bytes: u64,
    /// Bytes of its KV cache, for the positions of the test.
    pub cache_bytes: u64,
}

impl Profile {
    /// Returns the share of the wall time in which kernels ran.
    pub fn busy(&self) -> f64 {
        self.trace.busy_ns() as f64 / self.wall_ns
    }
}

impl Engine {
    /// Runs a test once as warm-up, and once more with every launch of this thread timed.
    ///
    /// # Errors
    /// [`GenerateError::Recording`] during another recording; the errors of [`Engine::measure`].
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

    /// Records the live bytes and the reserved bytes of the device's pools in the current trace, if there is one.
    pub fn note_memory(&self) {
        trace::memory(|| {
            let memory = self.memory();
            (memory.used_bytes, memory.reserved_bytes)
        });
    }
}
