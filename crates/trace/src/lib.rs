//! Profiler: records spans of the host, launches on the device and memory.
//!
//! ```text
//! Recording ── start ──> spans of the host      [generate [prompt [layer 0 [matmul]] ..]]
//!                        launches on the device  each in the innermost span of its host thread
//!                        memory readings
//!           ── finish ─> Trace ─> totals per operator and per layer, a Chrome trace
//! ```
//!
//! Spans nest by thread. All launches within an operator's span count for that operator, including launches of a
//! library that it calls. While nothing records, a span costs one load of a flag.
//!
//! Two events per launch take the time, on the device's own clock if it has one. Nothing waits for them; they are read
//! when the recording ends. Replays of a graph issue no launches, so check [`timed`] before you capture one.

mod chrome;
mod record;
mod totals;

pub use record::{
    AlreadyRecording, First, Recording, SpanGuard, first, memory, operator, span, timed,
};
pub use totals::{ELSEWHERE, Layer, Operator};
use tune::Cost;

/// The result of a recording. Times are nanoseconds since its start.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    pub spans: Vec<Span>,
    pub launches: Vec<Launch>,
    pub memory: Vec<Memory>,
    /// Number of launches without a time from the device.
    pub untimed: usize,
}

/// A named interval on a host thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub name: String,
    /// Index of the enclosing span in [`Trace::spans`].
    pub parent: Option<usize>,
    /// Thread number from 0, in order of first appearance.
    pub thread: usize,
    pub begin_ns: u64,
    pub end_ns: u64,
    /// Minimum work, for an operator.
    pub cost: Option<Cost>,
}

/// A kernel launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Name of the kernel's function.
    pub kernel: String,
    /// Index of the innermost span that issued it.
    pub span: Option<usize>,
    pub begin_ns: u64,
    pub end_ns: u64,
    pub clock: Clock,
}

/// The clock that timed a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    Device,
    /// The host's clock, from submission to completion.
    Host,
}

/// Memory of a device at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub at_ns: u64,
    /// Bytes of live allocations.
    pub used: u64,
    /// Bytes that the pools have reserved.
    pub reserved: u64,
}

impl Launch {
    /// Returns the run time in nanoseconds.
    pub const fn ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.begin_ns)
    }
}

impl Trace {
    /// Returns `span` and its enclosing spans, innermost first.
    pub fn outwards(&self, span: Option<usize>) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(span, |at| self.spans[*at].parent)
    }
}
