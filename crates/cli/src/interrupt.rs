//! Whether somebody wants this program to stop. A second signal ends it as it would any other.

use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::Context;

/// The signal that came; 0 before.
static CAME: AtomicI32 = AtomicI32::new(0);

/// Work that a signal ended, and what is left of it.
#[derive(Debug)]
pub(crate) struct Stopped(pub(crate) String);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Stopped {}

/// Whether a signal that [`listen`] waits for came.
pub(crate) fn came() -> bool {
    CAME.load(Ordering::Relaxed) != 0
}

/// What a program that a signal ended exits with, as shells have it.
pub(crate) fn status() -> u8 {
    u8::try_from(128 + CAME.load(Ordering::Relaxed)).unwrap_or(u8::MAX)
}

/// Waits for Ctrl-C, for SIGTERM, and for SIGHUP unless nohup has it ignored.
#[cfg(unix)]
pub(crate) fn listen() -> anyhow::Result<()> {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    extern "C" fn note(signal: i32) {
        CAME.store(signal, Ordering::Relaxed);
    }

    let flags = SaFlags::SA_RESTART | SaFlags::SA_RESETHAND;
    let action = SigAction::new(SigHandler::Handler(note), flags, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: `note` stores an atomic and does nothing else, which handlers may.
        let before = unsafe { sigaction(signal, &action) }.context("cannot listen for Ctrl-C")?;
        if signal == Signal::SIGHUP && matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: it is ignored again, by no handler.
            unsafe { sigaction(signal, &before) }.context("cannot listen for Ctrl-C")?;
        }
    }
    Ok(())
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
pub(crate) fn listen() -> anyhow::Result<()> {
    const SIGINT: i32 = 2;
    ctrlc::set_handler(|| {
        if CAME.swap(SIGINT, Ordering::Relaxed) != 0 {
            std::process::exit(128 + SIGINT);
        }
    })
    .context("cannot listen for Ctrl-C")
}
