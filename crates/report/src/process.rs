//! Starts this program and installed ones, and describes how a process ended.

use std::env;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result};

use crate::fail::{Fail, check};

/// Returns a command for this program under the name `flashover` or `flashover-bench`. One file may contain both.
///
/// # Errors
/// The system does not report the path of this program.
pub fn own(name: &str) -> Result<Command> {
    let mut command =
        Command::new(env::current_exe().context("cannot read the path of this program")?);
    command.arg0(name);
    Ok(command)
}

/// Converts the exit status of a program to our result.
///
/// # Errors
/// [`Fail::Child`] with its exit code, or a description if it has none.
pub fn end_of(name: &str, status: ExitStatus) -> Result<()> {
    match status.code() {
        Some(0) => Ok(()),
        Some(code) if code < 128 => Err(Fail::Child(u8::try_from(code)?).into()),
        _ => Err(check(format!("{name} {}", describe(status)))),
    }
}

/// Describes an exit status: `ended by signal 11 (segmentation fault)` or `ended with exit code 101`.
pub fn describe(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else {
        return match status.code() {
            Some(101) => "ended by a panic (exit code 101)".into(),
            Some(code) => format!("ended with exit code {code}"),
            None => "ended for an unknown reason".into(),
        };
    };
    let name = match signal {
        2 => " (interrupted)",
        4 => " (illegal instruction)",
        6 => " (aborted)",
        7 => " (bus error)",
        8 => " (arithmetic error)",
        9 => " (killed, often for lack of memory)",
        11 => " (segmentation fault)",
        15 => " (terminated)",
        _ => "",
    };
    format!("ended by signal {signal}{name}")
}

/// Finds a program on the search path, or in the system folders that an ordinary user's path often lacks.
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Folders that may contain a CUDA toolkit, in order of preference.
pub fn cuda_roots() -> Vec<PathBuf> {
    let set = env::var_os("CUDA_PATH").filter(|v| !v.is_empty()).map(PathBuf::from);
    set.into_iter().chain(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> ExitStatus {
        Command::new("sh").args(["-c", script]).status().unwrap()
    }

    #[test]
    fn ends_are_described() {
        assert_eq!(describe(sh("kill -SEGV $$")), "ended by signal 11 (segmentation fault)");
        assert_eq!(describe(sh("exit 7")), "ended with exit code 7");
        assert_eq!(describe(sh("exit 101")), "ended by a panic (exit code 101)");
    }

    #[test]
    fn a_programs_exit_code_is_ours() {
        let code = |script| end_of("x", sh(script)).map_err(|e| crate::fail::report(&e));
        assert_eq!(code("exit 0"), Ok(()));
        assert_eq!(code("exit 2"), Err(2));
        assert_eq!(code("kill -ABRT $$"), Err(1));
    }
}
