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

/// A step of one shape, launched kernel by kernel until it repeats, and then replayed.
pub(super) struct Repeated {
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
        self.0.as_ref().is_some_and(Repeated::captured)
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
        let longest = decode_longest(lengths.iter().copied().max().unwrap_or(0), capacity);
        let fits = |repeated: &Repeated| repeated.step.longest == longest && repeated.is_here();
        let repeated = match self.0.take().filter(fits) {
            Some(repeated) => repeated,
            None => Repeated::new(of, tokens.len(), longest),
        };
        let start: Vec<u32> = lengths.iter().map(|length| *length as u32).collect();
        self.0.insert(repeated).run(of, memory, &tokens.concat(), &start)
    }
}

impl Repeated {
    /// Creates a step of one token of each of `batch` sequences, of up to `longest` positions after it.
    pub(super) fn new(of: &Decoder, batch: usize, longest: usize) -> Self {
        let options = (&of.device, DType::I32);
        let tokens = Tensor::zeros([batch, 1], options);
        let step = Step { tokens, start: Tensor::zeros([batch], options), longest };
        Self { step, by: By::Launches(0) }
    }

    /// Returns true if this thread may run it: a graph belongs to the stream of its capture, and a thread is a stream.
    pub(super) fn is_here(&self) -> bool {
        match &self.by {
            By::Graph { thread, .. } => *thread == thread::current().id(),
            By::Launches(_) => true,
        }
    }

    pub(super) fn captured(&self) -> bool {
        matches!(&self.by, By::Graph { graph, .. } if graph.is_hardware())
    }

    /// Returns the logits after one more token per sequence, `[batch, vocab]`. `start` are the positions of each before it.
    pub(super) fn run(
        &mut self,
        of: &Decoder,
        memory: &Memory,
        tokens: &[u32],
        start: &[u32],
    ) -> Result<Tensor<2>, Error> {
        ops::update_inputs(&self.step.tokens, tokens)?;
        ops::update_inputs(&self.step.start, start)?;
        // A trace cannot see the kernels of a replay.
        let seen = trace::timed();
        let launches = match &mut self.by {
            By::Launches(launches) => launches,
            By::Graph { .. } if seen => return of.logits(of.layers(memory, &self.step)?),
            By::Graph { graph, .. } => {
                // SAFETY: the graph's closure holds clones of everything that it reads and writes, so that
                // all of it lives as long as the graph: weights, tables, the step and the cache. Tables are
                // never written. Weights are written in place by an optimizer alone, whose caller lets no
                // step run beside it; its launches end before the next replay, which reads the new values:
                // they are on the same stream, or the optimizer's thread has waited for them. Step and cache
                // belong to one KvCache or PagedCache, which `&mut` lets one thread use at a time. The graph
                // was captured on the stream of this thread (`is_here`). The result is read on it, before the
                // next step, as `Decoder::decode` says.
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
