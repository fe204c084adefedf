//! Requests to stop: Ctrl-C and other signals. A second signal ends the process at once.

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

/// First signal that was received; 0 before.
static CAME: AtomicI32 = AtomicI32::new(0);
/// Signal of Ctrl-C.
const SIGINT: i32 = 2;

/// The error of work that a signal ended; the text says what remains of it.
#[derive(Debug)]
pub(crate) struct Stopped(pub(crate) String);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Stopped {}

/// Collects signals until it is dropped; before and after, they end the process.
pub(crate) struct Listening(#[cfg(unix)] Vec<(Signal, SigAction)>);

/// Returns true once a signal that [`listen`] collects was received.
pub(crate) fn came() -> bool {
    CAME.load(Ordering::Relaxed) != 0
}

/// Checks for a signal.
///
/// # Errors
/// [`Stopped`] with the text `what`.
pub(crate) fn check(what: &str) -> Result<(), Stopped> {
    if came() { Err(Stopped(what.to_owned())) } else { Ok(()) }
}

/// Forgets a Ctrl-C that ended only a part of the work. Other signals stay.
pub(crate) fn forget() {
    // The exchange fails if there was no signal or another one.
    CAME.compare_exchange(SIGINT, 0, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_default();
}

/// Returns the exit code of a program that a signal ended, as shells report it.
pub(crate) fn status() -> u8 {
    u8::try_from(128 + CAME.load(Ordering::Relaxed)).unwrap_or(u8::MAX)
}

/// Collects Ctrl-C, SIGTERM and SIGHUP; not SIGHUP if `nohup` ignores it.
#[cfg(unix)]
pub(crate) fn listen() -> anyhow::Result<Listening> {
    extern "C" fn note(signal: i32) {
        CAME.store(signal, Ordering::Relaxed);
    }

    let flags = SaFlags::SA_RESTART | SaFlags::SA_RESETHAND;
    let action = SigAction::new(SigHandler::Handler(note), flags, SigSet::empty());
    let mut listening = Listening(Vec::new());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: `note` only stores an atomic, which is allowed in handlers.
        let before = unsafe { sigaction(signal, &action) }.context("cannot listen for Ctrl-C")?;
        listening.0.push((signal, before));
        if signal == Signal::SIGHUP && matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: the signal is ignored again, without a handler.
            unsafe { sigaction(signal, &before) }.context("cannot listen for Ctrl-C")?;
        }
    }
    Ok(listening)
}

#[cfg(unix)]
impl Drop for Listening {
    fn drop(&mut self) {
        for (signal, before) in &self.0 {
            // SAFETY: the action is the one from before.
            unsafe { sigaction(*signal, before) }.expect("a signal that was listened for");
        }
    }
}

/// True while signals are collected.
#[cfg(not(unix))]
static LISTENING: AtomicBool = AtomicBool::new(false);

/// Collects Ctrl-C.
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
