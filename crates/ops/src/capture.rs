//! Capture of a thread's launches as a graph, while other threads use the device.
//!
//! While one thread captures, CUDA rejects allocations and waits for reads by any thread of the process
//! (CubeCL 0.11.3 captures in the mode `GLOBAL`). So a capture runs alone, and every other thread holds a
//! guard around its work.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use burn::backend::DispatchDevice;
use burn::tensor::{Device, Graph, capture};

/// Returns true if work on `device` can be captured as a graph and replayed.
pub fn captures(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(raw) => raw.client().name() != "cpu",
        _ => false,
    }
}

/// Guard that keeps other threads from capturing while it lives. Hold it around work on a device that another
/// thread may capture on. Guards may be nested.
#[must_use = "work goes on while it lives"]
#[derive(Debug)]
pub struct StreamGuard(
    /// Makes the guard `!Send`: it belongs to its thread.
    PhantomData<*const ()>,
);

/// Waits until no thread captures, and returns a guard.
pub fn stream_guard() -> StreamGuard {
    if DEPTH.get() == 0 {
        CAPTURE_LOCK.begin();
    }
    DEPTH.set(DEPTH.get() + 1);
    StreamGuard(PhantomData)
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() == 0 {
            CAPTURE_LOCK.end();
        }
    }
}

/// Captures the launches of `run`, once no other thread holds a guard of [`stream_guard`]. This thread's own guard
/// is suspended meanwhile.
///
/// A live graph reserves the memory that it was recorded on, in whole pages of a pool. These pages are as
/// large as the largest pass that the thread ever made (CubeCL 0.11.3, `guard`). So allocations during a
/// capture are persistent: outside the pools, each with its own size.
pub fn capture_alone<T: Send + 'static, F: FnMut() -> T + Send + 'static>(
    device: &Device,
    run: F,
) -> Graph<T, F> {
    CAPTURE_LOCK.pausing(DEPTH.get() > 0, || match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(raw) => {
            raw.client().memory_persistent_allocation(run, |run| capture(device, run))
        }
        _ => capture(device, run),
    })
}

thread_local! {
    /// Number of [`StreamGuard`] guards that this thread holds.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

static CAPTURE_LOCK: CaptureLock =
    CaptureLock { state: Mutex::new(State::NONE), changed: Condvar::new() };

struct CaptureLock {
    state: Mutex<State>,
    changed: Condvar,
}

/// Counts of threads that work and of threads that wait to capture; `alone` is true while one captures.
struct State {
    working: usize,
    waiting: usize,
    alone: bool,
}

impl State {
    const NONE: Self = Self { working: 0, waiting: 0, alone: false };
}

impl CaptureLock {
    fn state(&self) -> MutexGuard<'_, State> {
        // The state is plain numbers, which no panic leaves half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, until: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_while(self.state(), |state| !until(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for captures; threads that wait to capture go first.
    fn begin(&self) {
        self.wait(|state| !state.alone && state.waiting == 0).working += 1;
    }

    fn end(&self) {
        self.state().working -= 1;
        self.changed.notify_all();
    }

    /// Runs `work` alone. If this thread is `guarded`, its guard is suspended and restored, even after a
    /// panic.
    fn pausing<T>(&self, guarded: bool, work: impl FnOnce() -> T) -> T {
        struct Paused<'a>(&'a CaptureLock);
        impl Drop for Paused<'_> {
            fn drop(&mut self) {
                self.0.begin();
            }
        }
        let _paused = guarded.then(|| {
            self.end();
            Paused(self)
        });
        // Dropped before the suspension ends.
        let _alone = self.alone();
        work()
    }

    fn alone(&self) -> Alone<'_> {
        self.state().waiting += 1;
        let mut state = self.wait(|state| !state.alone && state.working == 0);
        state.waiting -= 1;
        state.alone = true;
        Alone(self)
    }
}

struct Alone<'a>(&'a CaptureLock);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.state().alone = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn who_captures_is_alone_and_nobody_waits_for_ever() {
        let (working, alone) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let lock = CaptureLock { state: Mutex::new(State::NONE), changed: Condvar::new() };
        thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for round in 0..200 {
                        if round % 10 == 0 {
                            let _alone = lock.alone();
                            assert_eq!(alone.fetch_add(1, Ordering::SeqCst), 0);
                            assert_eq!(working.load(Ordering::SeqCst), 0);
                            thread::yield_now();
                            alone.fetch_sub(1, Ordering::SeqCst);
                        } else {
                            lock.begin();
                            working.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(alone.load(Ordering::SeqCst), 0);
                            thread::yield_now();
                            working.fetch_sub(1, Ordering::SeqCst);
                            lock.end();
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn work_that_pauses_goes_on_after_a_panic_too() {
        let lock = CaptureLock { state: Mutex::new(State::NONE), changed: Condvar::new() };
        lock.begin();
        assert_eq!(lock.pausing(true, || lock.state().working), 0);
        let caught = std::panic::catch_unwind(AssertUnwindSafe(|| {
            lock.pausing(true, || panic!("as a capture may"));
        }));
        caught.expect_err("it panicked");
        let state = || {
            let state = lock.state();
            (state.working, state.alone)
        };
        assert_eq!(state(), (1, false));
        lock.end();
        assert!(lock.pausing(false, || lock.state().alone));
        assert_eq!(state(), (0, false));
    }

    #[test]
    fn work_within_work_is_one() {
        let outer = stream_guard();
        let inner = stream_guard();
        drop(outer);
        assert_eq!(DEPTH.get(), 1);
        drop(inner);
        assert_eq!(DEPTH.get(), 0);
    }
}
