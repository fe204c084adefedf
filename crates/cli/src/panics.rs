//! Panics of threads beside the one that was asked.
//!
//! CubeCL's runtime for CPUs (0.11.3) compiles and runs kernels on a thread of its own. One that panics there leaves what it
//! should have written as it was, and who reads that is not told. What such a panic prints is on standard error; that a
//! command ended well is then not said.

use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::faults;

static SEEN: AtomicBool = AtomicBool::new(false);
/// Whether panics are answers. They are printed all the same, for they have the reason.
static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on remembers panics of all threads but this.
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

/// Opens devices. A broken driver makes CubeCL panic when it is opened, which `open` reports.
pub(crate) fn expected<T>(open: impl FnOnce() -> T) -> T {
    ASKED.store(true, Ordering::Relaxed);
    let opened = open();
    ASKED.store(false, Ordering::Relaxed);
    opened
}

/// # Errors
/// A thread panicked.
pub(crate) fn check() -> anyhow::Result<()> {
    if SEEN.load(Ordering::Relaxed) {
        anyhow::bail!(
            "a kernel was not compiled or did not run, as said above: results are not to be trusted\n\
             hint: another --backend or --dtype may do; please report what was said"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_elsewhere_is_no_success() {
        check().expect("nobody panicked");
        watch();
        ASKED.store(true, Ordering::Relaxed);
        thread::spawn(|| panic!("as a driver may")).join().expect_err("it panicked");
        ASKED.store(false, Ordering::Relaxed);
        check().expect("it was asked for");
        let beside = thread::spawn(|| panic!("as a kernel may"));
        beside.join().expect_err("it panicked");
        let why = check().expect_err("it was seen").to_string();
        assert!(why.starts_with("a kernel was not compiled or did not run"), "{why}");
    }
}
