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
pub struct AtWork(
    /// Makes the guard `!Send`: it belongs to its thread.
    PhantomData<*const ()>,
);

/// Waits until no thread captures, and returns a guard.
pub fn at_work() -> AtWork {
    if DEPTH.get() == 0 {
        TURNS.begin();
    }
    DEPTH.set(DEPTH.get() + 1);
    AtWork(PhantomData)
}

impl Drop for AtWork {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() == 0 {
            TURNS.end();
        }
    }
}

/// Captures the launches of `run`, once no other thread holds a guard of [`at_work`]. This thread's own guard
/// is suspended meanwhile.
///
/// A live graph reserves the memory that it was recorded on, in whole pages of a pool. These pages are as
/// large as the largest pass that the thread ever made (CubeCL 0.11.3, `guard`). So allocations during a
/// capture are persistent: outside the pools, each with its own size.
pub fn capture_alone<T: Send + 'static, F: FnMut() -> T + Send + 'static>(
    device: &Device,
    run: F,
) -> Graph<T, F> {
    TURNS.pausing(DEPTH.get() > 0, || match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(raw) => {
            raw.client().memory_persistent_allocation(run, |run| capture(device, run))
        }
        _ => capture(device, run),
    })
}

thread_local! {
    /// Number of [`AtWork`] guards that this thread holds.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

static TURNS: Turns = Turns { state: Mutex::new(State::NONE), changed: Condvar::new() };

struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

/// Counts of threads that work and of threads that wait to capture; `alone` is true while one captures.
struct State {
    at_work: usize,
    waiting: usize,
    alone: bool,
}

impl State {
    const NONE: Self = Self { at_work: 0, waiting: 0, alone: false };
}

impl Turns {
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
        self.wait(|state| !state.alone && state.waiting == 0).at_work += 1;
    }

    fn end(&self) {
        self.state().at_work -= 1;
        self.changed.notify_all();
    }

    /// Runs `work` alone. If this thread is `at_work`, its guard is suspended and restored, even after a
    /// panic.
    fn pausing<T>(&self, at_work: bool, work: impl FnOnce() -> T) -> T {
        struct Paused<'a>(&'a Turns);
        impl Drop for Paused<'_> {
            fn drop(&mut self) {
                self.0.begin();
            }
        }
        let _paused = at_work.then(|| {
            self.end();
            Paused(self)
        });
        // Dropped before the suspension ends.
        let _alone = self.alone();
        work()
    }

    fn alone(&self) -> Alone<'_> {
        self.state().waiting += 1;
        let mut state = self.wait(|state| !state.alone && state.at_work == 0);
        state.waiting -= 1;
        state.alone = true;
        Alone(self)
    }
}

struct Alone<'a>(&'a Turns);

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
        let turns = Turns { state: Mutex::new(State::NONE), changed: Condvar::new() };
        thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for round in 0..200 {
                        if round % 10 == 0 {
                            let _alone = turns.alone();
                            assert_eq!(alone.fetch_add(1, Ordering::SeqCst), 0);
                            assert_eq!(working.load(Ordering::SeqCst), 0);
                            thread::yield_now();
                            alone.fetch_sub(1, Ordering::SeqCst);
                        } else {
                            turns.begin();
                            working.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(alone.load(Ordering::SeqCst), 0);
                            thread::yield_now();
                            working.fetch_sub(1, Ordering::SeqCst);
                            turns.end();
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn work_that_pauses_goes_on_after_a_panic_too() {
        let turns = Turns { state: Mutex::new(State::NONE), changed: Condvar::new() };
        turns.begin();
        assert_eq!(turns.pausing(true, || turns.state().at_work), 0);
        let caught = std::panic::catch_unwind(AssertUnwindSafe(|| {
            turns.pausing(true, || panic!("as a capture may"));
        }));
        caught.expect_err("it panicked");
        let state = || {
            let state = turns.state();
            (state.at_work, state.alone)
        };
        assert_eq!(state(), (1, false));
        turns.end();
        assert!(turns.pausing(false, || turns.state().alone));
        assert_eq!(state(), (0, false));
    }

    #[test]
    fn work_within_work_is_one() {
        let outer = at_work();
        let inner = at_work();
        drop(outer);
        assert_eq!(DEPTH.get(), 1);
        drop(inner);
        assert_eq!(DEPTH.get(), 0);
    }
}
