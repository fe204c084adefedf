//! What ran, when and for whom, while somebody records.
//!
//! ```text
//! Recording ── start ──> spans of the host      [generate [prompt [layer 0 [matmul]] ..]]
//!                        launches on the device  each in the innermost span of the thread that issued it
//!                        readings of memory
//!           ── finish ─> Trace ─> totals per operator and per layer, a Chrome trace
//! ```
//!
//! Spans nest by thread: an operator's says what it is for, so that its launches, also those of a library beneath
//! it, are counted there. A span costs one load of a flag while nobody records.
//!
//! Launches are timed by two events each that nothing waits for, on the device's own clock where it has one, and read
//! when recording ends. What is replayed from a graph is launched by no one: whoever captures asks [`timed`] first.

mod chrome;
mod record;
mod totals;

pub use record::{
    AlreadyRecording, First, Recording, SpanGuard, first, memory, operator, span, timed,
};
pub use totals::{ELSEWHERE, Layer, Operator};
use tune::Cost;

/// What a recording saw. Times are nanoseconds since it began.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    pub spans: Vec<Span>,
    pub launches: Vec<Launch>,
    pub memory: Vec<Memory>,
    /// Launches whose time the device did not tell.
    pub untimed: usize,
}

/// Something that a thread of the host did.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub name: String,
    /// The span around it, of [`Trace::spans`].
    pub parent: Option<usize>,
    /// Threads are counted as they come up.
    pub thread: usize,
    pub begin_ns: u64,
    pub end_ns: u64,
    /// The least work of it, of an operator.
    pub cost: Option<Cost>,
}

/// A kernel that ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The kernel's function.
    pub kernel: String,
    /// The innermost span that issued it.
    pub span: Option<usize>,
    pub begin_ns: u64,
    pub end_ns: u64,
    pub clock: Clock,
}

/// Whose clock a launch was timed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    Device,
    /// The host's, around submission and completion.
    Host,
}

/// Memory of a device at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub at_ns: u64,
    /// Bytes of what is alive.
    pub used: u64,
    /// Bytes that the pools hold.
    pub reserved: u64,
}

impl Launch {
    /// How long it ran.
    pub const fn ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.begin_ns)
    }
}

impl Trace {
    /// The spans from `span` outwards.
    pub fn outwards(&self, span: Option<usize>) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(span, |at| self.spans[*at].parent)
    }
}
