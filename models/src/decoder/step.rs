//! One step of all sequences, and the captured graph of a repeated step.

use std::fmt;
use std::thread::{self, ThreadId};

use burn::tensor::{DType, Device, Graph, Int, Tensor, TensorData};

use super::Decoder;
use super::memory::Memory;
use crate::Error;

/// Device inputs of a step, apart from weights and cache.
#[derive(Debug, Clone)]
pub(super) struct Step {
    /// `[batch, seq]`
    pub(super) tokens: Tensor<2, Int>,
    /// `[batch]`: positions of each sequence before the step.
    pub(super) start: Tensor<1, Int>,
    /// Upper bound of the positions of any sequence after the step.
    pub(super) longest: usize,
}

impl Step {
    /// Creates a step of the same number of tokens per sequence; `lengths` are the positions before it.
    pub(super) fn new(tokens: &[&[u32]], lengths: &[usize], device: &Device) -> Self {
        let [batch, seq] = [tokens.len(), tokens[0].len()];
        let word = |word: &usize| (*word as u32).cast_signed();
        let ids: Vec<i32> = tokens.concat().into_iter().map(u32::cast_signed).collect();
        let start: Vec<i32> = lengths.iter().map(word).collect();
        let options = (device, DType::I32);
        Self {
            tokens: Tensor::from_data(TensorData::new(ids, [batch, seq]), options),
            start: Tensor::from_data(TensorData::new(start, [batch]), options),
            longest: lengths.iter().copied().max().unwrap_or(0) + seq,
        }
    }
}

/// Steps up to this many positions share one capture; longer ones share one per power of two.
const SHORTEST: usize = 256;
/// Eager steps before a capture, which takes as long as a few steps.
const EAGER: usize = 2;

/// Returns the positions that a one-token step after `before` positions is launched for.
pub(super) fn decode_longest(before: usize, capacity: usize) -> usize {
    (before + 1).next_power_of_two().max(SHORTEST).min(capacity)
}

type Run = Box<dyn FnMut() -> Result<Tensor<2>, Error> + Send>;

/// Steps of one token, captured when they repeat.
#[derive(Default)]
pub(super) struct Single(Option<Repeated>);

struct Repeated {
    step: Step,
    by: By,
}

#[expect(clippy::large_enum_variant, reason = "a cache has one")]
enum By {
    /// Launched kernel by kernel; counts the steps so far.
    Launches(usize),
    Graph {
        graph: Graph<Result<Tensor<2>, Error>, Run>,
        thread: ThreadId,
    },
}

/// Ending a graph waits for its stream.
impl Drop for Single {
    fn drop(&mut self) {
        let _stream_guard = ops::stream_guard();
        self.0 = None;
    }
}

impl Single {
    pub(super) fn captured(&self) -> bool {
        let hardware = |by: &By| matches!(by, By::Graph { graph, .. } if graph.is_hardware());
        self.0.as_ref().is_some_and(|repeated| hardware(&repeated.by))
    }

    /// Returns the logits after one more token per sequence.
    pub(super) fn run(
        &mut self,
        of: &Decoder,
        memory: &Memory,
        tokens: &[&[u32]],
        lengths: &[usize],
        capacity: usize,
    ) -> Result<Tensor<2>, Error> {
        // A graph belongs to the stream of its capture, and a thread is a stream.
        let here = |repeated: &Repeated| match &repeated.by {
            By::Graph { thread, .. } => *thread == thread::current().id(),
            By::Launches(_) => true,
        };
        let longest = decode_longest(lengths.iter().copied().max().unwrap_or(0), capacity);
        let fits = |repeated: &Repeated| repeated.step.longest == longest && here(repeated);
        let repeated = match self.0.take().filter(fits) {
            Some(repeated) => self.0.insert(repeated),
            None => {
                let batch = tokens.len();
                let options = (&of.device, DType::I32);
                let step = Step {
                    tokens: Tensor::zeros([batch, 1], options),
                    start: Tensor::zeros([batch], options),
                    longest,
                };
                self.0.insert(Repeated { step, by: By::Launches(0) })
            }
        };
        let start: Vec<u32> = lengths.iter().map(|length| *length as u32).collect();
        ops::update_inputs(&repeated.step.tokens, &tokens.concat())?;
        ops::update_inputs(&repeated.step.start, &start)?;
        repeated.run(of, memory)
    }
}

impl Repeated {
    fn run(&mut self, of: &Decoder, memory: &Memory) -> Result<Tensor<2>, Error> {
        // A trace cannot see the kernels of a replay.
        let seen = trace::timed();
        let launches = match &mut self.by {
            By::Launches(launches) => launches,
            By::Graph { .. } if seen => return of.logits(of.layers(memory, &self.step)?),
            By::Graph { graph, .. } => {
                // SAFETY: the graph's closure holds clones of everything that it reads and writes, so that
                // all of it lives as long as the graph: weights, tables, the step and the cache. Weights and
                // tables are never written. Step and cache belong to one KvCache, which `&mut` lets one
                // thread use at a time. The graph was captured on the stream of this thread (`Single::run`).
                // The result is read on it, before the next step, as `Decoder::decode` says.
                return read(unsafe { graph.replay() });
            }
        };
        if seen || !of.captures || *launches < EAGER {
            *launches += 1;
            return of.logits(of.layers(memory, &self.step)?);
        }
        let (own, memory, step) = (of.clone(), memory.clone(), self.step.clone());
        let run: Run = Box::new(move || own.logits(own.layers(&memory, &step)?));
        let mut graph = ops::capture_alone(&of.device, run);
        if !graph.is_hardware() {
            log::warn!("a step could not be captured; its kernels are launched one by one");
        }
        // Capturing records the kernels and does not run them.
        // SAFETY: as above.
        let logits = read(unsafe { graph.replay() })?;
        self.by = By::Graph { graph, thread: thread::current().id() };
        Ok(logits)
    }
}

/// Returns the result of a graph.
fn read(logits: &Result<Tensor<2>, Error>) -> Result<Tensor<2>, Error> {
    match logits {
        Ok(logits) => Ok(logits.clone()),
        Err(why) => Err(Error::Failed(why.to_string())),
    }
}

impl fmt::Debug for Single {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Single").field("captured", &self.captured()).finish_non_exhaustive()
    }
}
