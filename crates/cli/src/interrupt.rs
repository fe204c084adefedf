//! Whether somebody wants this program to stop. A second signal ends it as it would any other.

use std::fmt;
#[cfg(not(unix))]
use std::sync::OnceLock;
#[cfg(not(unix))]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicI32, Ordering};

#[cfg(unix)]
use anyhow::Context;
#[cfg(not(unix))]
use anyhow::bail;
#[cfg(unix)]
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The signal that came; 0 before.
static CAME: AtomicI32 = AtomicI32::new(0);
/// That of Ctrl-C.
const SIGINT: i32 = 2;

/// Work that a signal ended, and what is left of it.
#[derive(Debug)]
pub(crate) struct Stopped(pub(crate) String);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Stopped {}

/// Waits for signals until it is dropped.
pub(crate) struct Listening(#[cfg(unix)] Vec<(Signal, SigAction)>);

/// Whether a signal that [`listen`] waits for came.
pub(crate) fn came() -> bool {
    CAME.load(Ordering::Relaxed) != 0
}

/// # Errors
/// [`Stopped`] with `what`, where one came.
pub(crate) fn check(what: &str) -> Result<(), Stopped> {
    if came() { Err(Stopped(what.to_owned())) } else { Ok(()) }
}

/// Forgets a Ctrl-C that ended a part of the work alone; another signal stays.
pub(crate) fn forget() {
    // The other outcome is that another signal stays, or that there is none.
    CAME.compare_exchange(SIGINT, 0, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_default();
}

/// What a program that a signal ended exits with, as shells have it.
pub(crate) fn status() -> u8 {
    u8::try_from(128 + CAME.load(Ordering::Relaxed)).unwrap_or(u8::MAX)
}

/// Names the reason of two signals that end a program without a word: a mapped file that was shortened, and a file that
/// passes the limit of `ulimit -f`, whose write then fails as on a full disk.
///
/// # Errors
/// Handlers cannot be set.
#[cfg(unix)]
pub(crate) fn name_faults() -> anyhow::Result<()> {
    const TEXT: &str = "error: a file changed while it was read\nhint: leave the files of a model alone while it loads\n";
    extern "C" fn shortened(signal: i32) {
        // SAFETY: handlers may call both; nothing of this process is used after.
        unsafe {
            nix::libc::write(2, TEXT.as_ptr().cast(), TEXT.len());
            nix::libc::_exit(128 + signal);
        }
    }

    let faults =
        [(Signal::SIGBUS, SigHandler::Handler(shortened)), (Signal::SIGXFSZ, SigHandler::SigIgn)];
    for (signal, handler) in faults {
        let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
        // SAFETY: `shortened` calls what handlers may, and the other signal has no handler.
        unsafe { sigaction(signal, &action) }.context("cannot set a signal handler")?;
    }
    Ok(())
}

#[cfg(not(unix))]
pub(crate) fn name_faults() -> anyhow::Result<()> {
    Ok(())
}

/// Waits for Ctrl-C, for SIGTERM, and for SIGHUP unless nohup has it ignored.
#[cfg(unix)]
pub(crate) fn listen() -> anyhow::Result<Listening> {
    extern "C" fn note(signal: i32) {
        CAME.store(signal, Ordering::Relaxed);
    }

    let flags = SaFlags::SA_RESTART | SaFlags::SA_RESETHAND;
    let action = SigAction::new(SigHandler::Handler(note), flags, SigSet::empty());
    let mut listening = Listening(Vec::new());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: `note` stores an atomic and does nothing else, which handlers may.
        let before = unsafe { sigaction(signal, &action) }.context("cannot listen for Ctrl-C")?;
        listening.0.push((signal, before));
        if signal == Signal::SIGHUP && matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: it is ignored again, by no handler.
            unsafe { sigaction(signal, &before) }.context("cannot listen for Ctrl-C")?;
        }
    }
    Ok(listening)
}

#[cfg(unix)]
impl Drop for Listening {
    fn drop(&mut self) {
        for (signal, before) in &self.0 {
            // SAFETY: it is what was there before.
            unsafe { sigaction(*signal, before) }.expect("a signal that was listened for");
        }
    }
}

/// Whether somebody listens.
#[cfg(not(unix))]
static LISTENING: AtomicBool = AtomicBool::new(false);

/// Waits for Ctrl-C.
#[cfg(not(unix))]
pub(crate) fn listen() -> anyhow::Result<Listening> {
    static ONCE: OnceLock<Result<(), ctrlc::Error>> = OnceLock::new();
    let set = || {
        ctrlc::set_handler(|| {
            if !LISTENING.load(Ordering::Relaxed) || CAME.swap(SIGINT, Ordering::Relaxed) != 0 {
                std::process::exit(128 + SIGINT);
            }
        })
    };
    if let Err(why) = ONCE.get_or_init(set) {
        bail!("cannot listen for Ctrl-C: {why}");
    }
    LISTENING.store(true, Ordering::Relaxed);
    Ok(Listening())
}

#[cfg(not(unix))]
impl Drop for Listening {
    fn drop(&mut self) {
        LISTENING.store(false, Ordering::Relaxed);
    }
}
