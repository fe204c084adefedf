//! Requests to stop: Ctrl-C and other signals.
//!
//! Work looks for a signal between its steps. If a step takes longer than [`GRACE`], the process ends within it, unless
//! the work is saved first; a second signal ends it at once in any case.

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
use nix::libc;
#[cfg(unix)]
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// First signal that was received; 0 before.
static CAME: AtomicI32 = AtomicI32::new(0);
/// Signal of Ctrl-C.
const SIGINT: i32 = 2;
/// Seconds from a signal to the end of the process.
#[cfg(unix)]
const GRACE: u32 = 2;

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
    if CAME.compare_exchange(SIGINT, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        #[cfg(unix)]
        nix::unistd::alarm::cancel();
    }
}

/// Returns the exit code of a program that a signal ended, as shells report it.
pub(crate) fn status() -> u8 {
    u8::try_from(128 + CAME.load(Ordering::Relaxed)).unwrap_or(u8::MAX)
}

/// Collects Ctrl-C, SIGTERM and SIGHUP; not SIGHUP if `nohup` ignores it. The process ends [`GRACE`] seconds after a
/// signal at the latest.
#[cfg(unix)]
pub(crate) fn listen() -> anyhow::Result<Listening> {
    extern "C" fn note(signal: i32) {
        CAME.store(signal, Ordering::Relaxed);
        // SAFETY: handlers may call it.
        unsafe { libc::alarm(GRACE) };
    }
    extern "C" fn end(_: i32) {
        // SAFETY: handlers may call it; nothing of this process is used after it.
        unsafe { libc::_exit(128 + CAME.load(Ordering::Relaxed)) };
    }

    let action = SigAction::new(SigHandler::Handler(end), SaFlags::empty(), SigSet::empty());
    // SAFETY: `end` calls only a function that is allowed in handlers.
    unsafe { sigaction(Signal::SIGALRM, &action) }.context("cannot listen for Ctrl-C")?;
    collect(note)
}

/// Collects signals like [`listen`], for work that is saved before the process ends, however long its step takes.
#[cfg(unix)]
pub(crate) fn listen_and_save() -> anyhow::Result<Listening> {
    extern "C" fn note(signal: i32) {
        const TEXT: &str =
            "\nstopping after this step, then saving; press Ctrl-C again to stop now\n";
        CAME.store(signal, Ordering::Relaxed);
        // SAFETY: handlers may call it.
        unsafe { libc::write(2, TEXT.as_ptr().cast(), TEXT.len()) };
    }
    collect(note)
}

#[cfg(unix)]
fn collect(note: extern "C" fn(i32)) -> anyhow::Result<Listening> {
    let flags = SaFlags::SA_RESTART | SaFlags::SA_RESETHAND;
    let action = SigAction::new(SigHandler::Handler(note), flags, SigSet::empty());
    let mut listening = Listening(Vec::new());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handlers store an atomic and call functions that are allowed in handlers.
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

/// Collects Ctrl-C like [`listen`].
#[cfg(not(unix))]
pub(crate) fn listen_and_save() -> anyhow::Result<Listening> {
    listen()
}

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
        bail!("cannot listen for Ctrl-C: {why}\nhint: report this as a bug");
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
