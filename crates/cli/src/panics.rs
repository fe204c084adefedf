//! Detects panics on other threads than the main thread.
//!
//! CubeCL's runtime for CPUs (0.11.3) compiles and runs kernels on its own thread. After a panic there, output buffers
//! keep their old contents, and a later read reports no error. The panic message goes to standard error. [`check`] then
//! makes the command fail.

use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::faults;

static SEEN: AtomicBool = AtomicBool::new(false);
/// True while panics are expected and do not count as failures. They are still printed, because they contain the
/// reason.
static ASKED: AtomicBool = AtomicBool::new(false);

/// Starts to record panics of all threads except the calling one.
pub(crate) fn watch() {
    let (own, before) = (thread::current().id(), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        if thread::current().id() != own && !ASKED.load(Ordering::Relaxed) {
            SEEN.store(true, Ordering::Relaxed);
        }
        // Below a memory limit, not even a backtrace may be possible.
        faults::on_panic();
        before(info);
    }));
}

/// Runs `open`, which opens devices. A broken driver makes CubeCL panic; such a panic does not count, because `open`
/// reports the failure.
pub(crate) fn expected<T>(open: impl FnOnce() -> T) -> T {
    ASKED.store(true, Ordering::Relaxed);
    let opened = open();
    ASKED.store(false, Ordering::Relaxed);
    opened
}

/// Checks for recorded panics.
///
/// # Errors
/// A thread panicked.
pub(crate) fn check() -> anyhow::Result<()> {
    if SEEN.load(Ordering::Relaxed) {
        anyhow::bail!(
            "a kernel failed to compile or run, see the log above; results are invalid\n\
             hint: try another --backend or --dtype, and report the log"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_elsewhere_is_no_success() {
        check().expect("no thread panicked");
        watch();
        ASKED.store(true, Ordering::Relaxed);
        thread::spawn(|| panic!("as a driver may")).join().expect_err("it panicked");
        ASKED.store(false, Ordering::Relaxed);
        check().expect("the panic was expected");
        let beside = thread::spawn(|| panic!("as a kernel may"));
        beside.join().expect_err("it panicked");
        let why = check().expect_err("the panic counts").to_string();
        assert!(why.starts_with("a kernel failed to compile or run"), "{why}");
    }
}
