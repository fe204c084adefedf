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

#[cfg(all(test, unix))]
mod tests {
    use std::fs::{self, File};
    use std::process::Command;

    use checkpoint::{DType, Plan, Tensor, Writer};

    use super::*;

    /// Environment variable that names the file to the process that ends.
    const FILE: &str = "FLASHOVER_SHORTENED_FILE";

    /// The process that ends: reads a tensor of a file that became shorter.
    #[test]
    fn reads_a_shortened_file() {
        let Some(path) = std::env::var_os(FILE) else { return };
        name_signals().expect("no handler is refused");
        let file = checkpoint::Checkpoint::open(&path).expect("whole");
        let tensor = file.tensor("all").expect("there");
        let shorter = File::options().write(true).open(&path).expect("ours");
        shorter.set_len(4096).expect("it is longer");
        let sum: u64 = tensor.bytes.iter().map(|byte| u64::from(*byte)).sum();
        panic!("the bytes are gone, but their sum is {sum}");
    }

    #[test]
    fn a_shortened_file_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        let tensor = Tensor::new(DType::F32, &[100_000], vec![1; 400_000]);
        let plan = Plan::new("all", tensor.dtype, &tensor.shape);
        let mut writer = Writer::create(path.clone(), vec![plan]).expect("writable");
        writer.write_all(&[("all".to_owned(), tensor)]).expect("room");
        writer.finish().expect("room");
        let out = Command::new(std::env::current_exe().expect("this test"))
            .args(["faults::tests::reads_a_shortened_file", "--exact", "--nocapture"])
            .env(FILE, &path)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(135), "{said}");
        assert!(said.contains(SHORTENED), "{said}");
        assert_eq!(fs::metadata(path).expect("there").len(), 4096);
    }
}
