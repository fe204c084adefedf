//! Records spans, launches and memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cubecl::future::block_on;
use cubecl::logging::{LaunchObservation, LaunchObserver, TimingRequest};
use cubecl::profile::{Duration, ProfileDuration, TimingMethod};
use tune::Cost;
use tune::timing::Stopwatch;

use crate::{Clock, Launch, Memory, Span, Trace};

/// True while a recording runs; every span checks it first.
static RECORDING: AtomicBool = AtomicBool::new(false);
static RECORDER: Mutex<Option<Arc<Recorder>>> = Mutex::new(None);

thread_local! {
    /// Open spans of this thread, outermost first, each with the id of its recorder.
    static OPEN: RefCell<Vec<(u64, usize)>> = const { RefCell::new(Vec::new()) };
    /// True while this thread holds an active [`First`] guard of a brief recording.
    static FIRST: Cell<bool> = const { Cell::new(false) };
}

/// Marks a guard as not `Send`, because its thread holds state for it.
type OfThread = PhantomData<*const ()>;

/// A running recording on all devices of the process, until [`Recording::finish`].
#[must_use = "a recording that is dropped is lost"]
pub struct Recording {
    recorder: Arc<Recorder>,
    observation: Option<LaunchObservation>,
}

/// Another recording runs; a process has one at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("another recording is active\nhint: finish that recording first")]
pub struct AlreadyRecording;

struct Recorder {
    id: u64,
    /// Thread to record; `None` records all threads.
    only: Option<ThreadId>,
    /// State of a brief recording, which times one forward pass of each kind.
    once: Option<Mutex<Once>>,
    clock: Stopwatch,
    events: Mutex<Events>,
}

#[derive(Default)]
struct Once {
    seen: BTreeSet<String>,
    /// True when the recording has ended.
    closed: bool,
    /// Observation of the pass that is being timed.
    observation: Option<LaunchObservation>,
}

#[derive(Default)]
struct Events {
    trace: Trace,
    pending: Vec<Pending>,
    threads: Vec<ThreadId>,
}

/// A launch with a time that was not read yet.
struct Pending {
    kernel: &'static str,
    span: Option<usize>,
    time: Time,
}

enum Time {
    Profiled(ProfileDuration),
    /// A time that was reported when the launch ended.
    Timed {
        end_ns: u64,
        duration: Duration,
        clock: Clock,
    },
}

impl Recording {
    /// Starts to record all threads with every launch.
    ///
    /// # Errors
    /// [`AlreadyRecording`].
    pub fn start() -> Result<Self, AlreadyRecording> {
        Self::new(None, None)
    }

    /// Starts to record all threads, with every span but launches of only one forward pass of each kind (see
    /// [`first`]): timing a short launch costs more than the launch itself.
    ///
    /// # Errors
    /// [`AlreadyRecording`].
    pub fn brief() -> Result<Self, AlreadyRecording> {
        Self::new(None, Some(Mutex::default()))
    }

    /// Starts to record only the calling thread.
    ///
    /// # Errors
    /// [`AlreadyRecording`].
    pub fn of_this_thread() -> Result<Self, AlreadyRecording> {
        Self::new(Some(thread::current().id()), None)
    }

    fn new(only: Option<ThreadId>, once: Option<Mutex<Once>>) -> Result<Self, AlreadyRecording> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let mut slot = locked(&RECORDER);
        if slot.is_some() {
            return Err(AlreadyRecording);
        }
        let recorder = Arc::new(Recorder {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            only,
            once,
            clock: Stopwatch::start(),
            events: Mutex::default(),
        });
        *slot = Some(recorder.clone());
        RECORDING.store(true, Ordering::Release);
        let every = recorder.once.is_none();
        let observation = every.then(|| LaunchObservation::new(recorder.clone()));
        Ok(Self { recorder, observation })
    }

    /// Waits for all launches and returns the trace. Open spans end now.
    pub fn finish(mut self) -> Trace {
        self.stop();
        let Events { mut trace, pending, .. } = std::mem::take(&mut *self.recorder.events());
        let now = self.recorder.now();
        trace.spans.iter_mut().filter(|span| span.end_ns == OPEN_END).for_each(|s| s.end_ns = now);
        for Pending { kernel, span, time } in pending {
            let Some((begin_ns, end_ns, clock)) = self.recorder.read(time) else {
                trace.untimed += 1;
                continue;
            };
            let kernel = function_of(kernel);
            trace.launches.push(Launch { kernel, span, begin_ns, end_ns, clock });
        }
        trace
    }

    fn stop(&mut self) {
        // Must end before another recording can take the slot.
        self.observation = None;
        if let Some(once) = &self.recorder.once {
            let mut once = locked(once);
            (once.closed, once.observation) = (true, None);
        }
        let mut slot = locked(&RECORDER);
        if slot.as_ref().is_some_and(|recorder| recorder.id == self.recorder.id) {
            RECORDING.store(false, Ordering::Release);
            *slot = None;
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.stop();
    }
}

/// End time of an open span.
const OPEN_END: u64 = u64::MAX;

impl Recorder {
    fn events(&self) -> MutexGuard<'_, Events> {
        locked(&self.events)
    }

    fn now(&self) -> u64 {
        nanoseconds(self.clock.elapsed())
    }

    /// Returns the innermost open span of this thread that belongs to this recorder.
    fn innermost(&self) -> Option<usize> {
        OPEN.with_borrow(|open| {
            open.iter().rev().find(|(id, _)| *id == self.id).map(|(_, span)| *span)
        })
    }

    /// Returns true if this thread is recorded.
    fn counts(&self) -> bool {
        self.only.is_none_or(|only| only == thread::current().id())
    }

    fn push(&self, kernel: &'static str, time: Time) {
        // A brief recording keeps only launches of the thread with an active `First` guard.
        if self.counts() && (self.once.is_none() || FIRST.get()) {
            let span = self.innermost();
            self.events().pending.push(Pending { kernel, span, time });
        }
    }

    fn read(&self, time: Time) -> Option<(u64, u64, Clock)> {
        match time {
            Time::Timed { end_ns, duration, clock } => {
                Some((end_ns.saturating_sub(nanoseconds(duration)), end_ns, clock))
            }
            Time::Profiled(profile) => {
                let clock = clock_of(profile.timing_method());
                let ticks = block_on(profile.resolve())?;
                let (begin, end) = self.clock.place(&ticks);
                Some((nanoseconds(begin), nanoseconds(end), clock))
            }
        }
    }
}

impl LaunchObserver for Recorder {
    // `profiled` or `timed` follows for each launch and records it.
    fn launched(&self, _kernel: &'static str) {}

    fn timing(&self) -> TimingRequest {
        TimingRequest::Deferred
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        self.push(kernel, Time::Profiled(profile));
    }

    fn timed(&self, kernel: &'static str, duration: Duration, method: TimingMethod) {
        self.push(kernel, Time::Timed { end_ns: self.now(), duration, clock: clock_of(method) });
    }
}

/// Returns true while a recording runs.
fn recording() -> bool {
    RECORDING.load(Ordering::Relaxed)
}

/// Returns true if launches of this thread are currently timed.
pub fn timed() -> bool {
    recorder().is_some_and(|recorder| recorder.once.is_none() || FIRST.get())
}

/// Lets a [brief](Recording::brief) recording time this thread's launches until the guard is dropped, if `kind` is new
/// to it. It times one thread at a time.
pub fn first<N: Into<String>>(kind: impl FnOnce() -> N) -> First {
    let Some(recorder) = recorder() else { return First(None, PhantomData) };
    let Some(once) = &recorder.once else { return First(None, PhantomData) };
    let mut state = locked(once);
    if state.closed || state.observation.is_some() || !state.seen.insert(kind().into()) {
        return First(None, PhantomData);
    }
    state.observation = Some(LaunchObservation::new(recorder.clone()));
    drop(state);
    FIRST.set(true);
    First(Some(recorder), PhantomData)
}

/// Guard of [`first`]; ends the timing when dropped.
#[must_use = "launches are timed until it is dropped"]
pub struct First(Option<Arc<Recorder>>, OfThread);

impl Drop for First {
    fn drop(&mut self) {
        if let Some(once) = self.0.as_ref().and_then(|recorder| recorder.once.as_ref()) {
            FIRST.set(false);
            locked(once).observation = None;
        }
    }
}

impl fmt::Debug for First {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("First").field(&self.0.is_some()).finish()
    }
}

/// Begins a span on this thread, until the guard is dropped. Does nothing while nothing records.
pub fn span<N: Into<String>>(name: impl FnOnce() -> N) -> SpanGuard {
    begin(name, || None)
}

/// Begins the span of an operator with its minimum work.
pub fn operator<N: Into<String>>(
    name: impl FnOnce() -> N,
    cost: impl FnOnce() -> Cost,
) -> SpanGuard {
    begin(name, || Some(cost()))
}

/// Records memory while a recording runs; `read` returns the bytes of live allocations and the bytes of the pools.
pub fn memory(read: impl FnOnce() -> (u64, u64)) {
    if let Some(recorder) = recorder() {
        let (used, reserved) = read();
        let at_ns = recorder.now();
        recorder.events().trace.memory.push(Memory { at_ns, used, reserved });
    }
}

/// Guard of a span; ends it when dropped, on the same thread.
///
/// ```compile_fail
/// let guard = trace::span(|| "here");
/// std::thread::spawn(|| drop(guard));
/// ```
#[must_use = "a span ends when its guard is dropped"]
pub struct SpanGuard(Option<(Arc<Recorder>, usize)>, OfThread);

impl Drop for SpanGuard {
    fn drop(&mut self) {
        let Some((recorder, span)) = &self.0 else { return };
        OPEN.with_borrow_mut(|open| open.retain(|own| *own != (recorder.id, *span)));
        let now = recorder.now();
        // `finish` may have taken the spans already.
        if let Some(span) = recorder.events().trace.spans.get_mut(*span) {
            span.end_ns = now;
        }
    }
}

impl fmt::Debug for SpanGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SpanGuard").field(&self.0.as_ref().map(|(_, span)| span)).finish()
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

fn begin<N: Into<String>>(
    name: impl FnOnce() -> N,
    cost: impl FnOnce() -> Option<Cost>,
) -> SpanGuard {
    let Some(recorder) = recorder() else { return SpanGuard(None, PhantomData) };
    let (parent, begin_ns, own) = (recorder.innermost(), recorder.now(), thread::current().id());
    let (name, cost) = (name().into(), cost());
    let span = {
        let mut events = recorder.events();
        let thread = events.threads.iter().position(|known| *known == own).unwrap_or_else(|| {
            events.threads.push(own);
            events.threads.len() - 1
        });
        let span = Span { name, parent, thread, begin_ns, end_ns: OPEN_END, cost };
        events.trace.spans.push(span);
        events.trace.spans.len() - 1
    };
    OPEN.with_borrow_mut(|open| open.push((recorder.id, span)));
    SpanGuard(Some((recorder, span)), PhantomData)
}

fn recorder() -> Option<Arc<Recorder>> {
    if !recording() {
        return None;
    }
    locked(&RECORDER).clone().filter(|recorder| recorder.counts())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves the data consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

const fn clock_of(method: TimingMethod) -> Clock {
    match method {
        TimingMethod::Device => Clock::Device,
        TimingMethod::System => Clock::Host,
    }
}

/// Returns `rotate_heads` for `kernels::rope::rotate_heads::RotateHeads<..>`: CubeCL names the module of a kernel's
/// struct after its function.
fn function_of(kernel: &str) -> String {
    let path = kernel.split_once('<').map_or(kernel, |(path, _)| path);
    let mut parts = path.rsplit("::");
    let last = parts.next().unwrap_or(path);
    parts.next().unwrap_or(last).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_called_as_their_functions() {
        assert_eq!(function_of("kernels::rope::rotate_heads::RotateHeads<f32, 4>"), "rotate_heads");
        assert_eq!(function_of("kernels::norm::norm_rows::NormRows"), "norm_rows");
        assert_eq!(function_of("Alone"), "Alone");
        assert_eq!(function_of("a::b::C<x::y::Z>"), "b");
    }

    #[test]
    fn spans_nest_by_thread_and_end_with_the_recording() {
        let nothing = span(|| -> String { unreachable!("nobody records") });
        let recording = Recording::start().expect("the only one");
        assert_eq!(Recording::start().expect_err("one at a time"), AlreadyRecording);
        drop(nothing);
        let outer = span(|| "outer");
        {
            let _inner = operator(|| "inner", || Cost { flops: 2, bytes: 3 });
        }
        thread::spawn(|| drop(span(|| "elsewhere"))).join().expect("it runs");
        memory(|| (5, 7));
        let trace = recording.finish();
        drop(outer);
        let seen: Vec<_> =
            trace.spans.iter().map(|s| (s.name.as_str(), s.parent, s.thread)).collect();
        assert_eq!(seen, [("outer", None, 0), ("inner", Some(0), 0), ("elsewhere", None, 1)]);
        assert_eq!(trace.spans[1].cost, Some(Cost { flops: 2, bytes: 3 }));
        assert!(trace.spans.iter().all(|span| span.begin_ns <= span.end_ns));
        assert!(trace.spans[0].end_ns >= trace.spans[2].end_ns, "it was open to the end");
        let [read] = trace.memory[..] else { panic!("{:?}", trace.memory) };
        assert_eq!((read.used, read.reserved), (5, 7));
        // A brief recording times the first pass of each kind, and only one thread at a time.
        let brief = Recording::brief().expect("the first is over");
        assert!(!timed());
        {
            let _step = first(|| "step");
            assert!(timed());
            thread::spawn(|| {
                let _prompt = first(|| "prompt");
                assert!(!timed(), "one thread at a time");
            })
            .join()
            .expect("it runs");
        }
        let again = first(|| "step");
        assert!(!timed(), "steps were seen");
        drop(again);
        let prompt = first(|| "prompt");
        assert!(timed(), "prompts were not");
        drop(brief);
        assert!(!timed());
        drop(prompt);
        // Open spans of an earlier recording are not parents in a later one, and other threads may be excluded.
        let again = Recording::of_this_thread().expect("the others are over");
        let _late = span(|| "late");
        thread::spawn(|| drop(span(|| "elsewhere"))).join().expect("it runs");
        let spans = again.finish().spans;
        assert_eq!(spans.len(), 1);
        assert_eq!(spans[0].parent, None);
    }
}
