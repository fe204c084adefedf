//! Names the reason of failures that would end the process without a message.

#[cfg(unix)]
use anyhow::Context;
#[cfg(unix)]
use nix::libc;
#[cfg(unix)]
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
#[cfg(unix)]
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// Exit code of an error with a hint.
#[cfg(unix)]
const REFUSED: i32 = 2;

/// Message of a failure below a memory limit. Libraries below us then fail anywhere, and some wait forever for a thread
/// that has failed.
#[cfg(unix)]
const LIMITED: &str = "error: the process failed below a memory limit (ulimit -v)\n\
                       hint: raise the limit, or choose a smaller model, batch or context\n";
#[cfg(unix)]
const SHORTENED: &str = "error: a file changed while it was read\n\
                         hint: leave the files of a model alone while it loads\n";

/// Handles signals that would end the process without a message:
///
/// - SIGBUS: a mapped file became shorter;
/// - SIGXFSZ: a file passed the limit of `ulimit -f`; ignored, so that the write fails as on a full disk;
/// - SIGABRT and SIGSEGV below a limit of `ulimit -v`: memory could not be allocated.
///
/// # Errors
/// Handlers cannot be set.
#[cfg(unix)]
pub(crate) fn name_signals() -> anyhow::Result<()> {
    extern "C" fn shortened(signal: libc::c_int) {
        end(SHORTENED, 128 + signal);
    }
    extern "C" fn limited(_: libc::c_int) {
        end(LIMITED, REFUSED);
    }

    let mut faults = vec![
        (Signal::SIGBUS, SigHandler::Handler(shortened)),
        (Signal::SIGXFSZ, SigHandler::SigIgn),
    ];
    if is_limited() {
        let handler = SigHandler::Handler(limited);
        faults.extend([(Signal::SIGABRT, handler), (Signal::SIGSEGV, handler)]);
    }
    for (signal, handler) in faults {
        let action = SigAction::new(handler, SaFlags::SA_ONSTACK, SigSet::empty());
        // SAFETY: the handlers call only functions that are allowed in handlers.
        unsafe { sigaction(signal, &action) }.context("cannot set a signal handler")?;
    }
    Ok(())
}

/// Ends the process on a panic below a memory limit; other threads might wait for the one that panicked.
#[cfg(unix)]
pub(crate) fn on_panic() {
    if is_limited() {
        end(LIMITED, REFUSED);
    }
}

/// Returns true if `ulimit -v` limits the address space of the process.
#[cfg(unix)]
fn is_limited() -> bool {
    getrlimit(Resource::RLIMIT_AS).is_ok_and(|(limit, _)| limit != RLIM_INFINITY)
}

#[cfg(unix)]
fn end(text: &str, status: i32) {
    // SAFETY: signal handlers may call both; nothing of this process is used after them.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(status);
    }
}

#[cfg(not(unix))]
pub(crate) fn name_signals() -> anyhow::Result<()> {
    Ok(())
}

#[cfg(not(unix))]
pub(crate) fn on_panic() {}
