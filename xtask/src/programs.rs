//! The built programs: how they come about and how they are started.

use std::cmp::Reverse;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::fail::{Fail, check, usage};
use crate::place::{self, PROGRAMS, Place};
use crate::setup::{self, Ready, Wants};

/// A folder of programs and the environment they run in.
#[derive(Debug)]
pub(crate) struct Programs {
    dir: PathBuf,
    env: Vec<(&'static str, OsString)>,
}

impl Programs {
    /// Sets the machine up, builds when there are sources, and says what optional parts are there.
    pub(crate) fn ready(place: &Place, wants: Wants) -> Result<(Self, Ready)> {
        let ready = setup::prepare(place, wants)?;
        let dir = match place {
            Place::Workspace(root) => {
                build(root)?;
                release_dir(root)?
            }
            Place::Bundle(dir) => dir.clone(),
        };
        Ok((Self::at(dir, &ready)?, ready))
    }

    /// Programs that are built already.
    pub(crate) fn at(dir: PathBuf, ready: &Ready) -> Result<Self> {
        if let Some(absent) = PROGRAMS.iter().find(|name| !dir.join(name).is_file()) {
            return Err(check(format!("the build left no program {}", dir.join(absent).display())));
        }
        let env = match &ready.cuda {
            Ok(home) => home.env()?,
            Err(_) => Vec::new(),
        };
        Ok(Self { dir, env })
    }

    /// Where the programs lie.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A program, ready to get its arguments.
    pub(crate) fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.dir.join(name));
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        command
    }

    /// Runs a program on our terminal; its exit code becomes ours.
    pub(crate) fn pass_through(&self, name: &str, args: &[impl AsRef<OsStr>]) -> Result<()> {
        let status = self
            .command(name)
            .args(args)
            .status()
            .with_context(|| format!("cannot start {name}"))?;
        end_of(name, status)
    }

    /// Standard output of a program that is expected to succeed; what it logs is shown.
    pub(crate) fn output(&self, name: &str, args: &[impl AsRef<OsStr>]) -> Result<String> {
        let output = self
            .command(name)
            .args(args)
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start {name}"))?;
        end_of(name, output.status)?;
        String::from_utf8(output.stdout).with_context(|| format!("{name} printed no UTF-8"))
    }

    /// Refuses a filter that selects no case, before anything runs.
    pub(crate) fn check_filter(&self, suite: &str, filter: &str) -> Result<()> {
        let names = self.output("flashover-bench", &["list", "--suite", suite])?;
        let names: Vec<_> = names.lines().collect();
        if names.iter().any(|name| name.contains(filter)) {
            return Ok(());
        }
        let near: Vec<_> = nearest(&names, filter).iter().map(|n| format!("`{n}`")).collect();
        Err(usage(
            format!("no case of suite {suite} has `{filter}` in its name"),
            format!("its cases are such as {}", near.join(", ")),
        ))
    }
}

/// The three names that have most of the filter's words in them, the first ones where several have as many.
fn nearest<'a>(names: &[&'a str], filter: &str) -> Vec<&'a str> {
    let filter = filter.to_lowercase();
    let words = |name: &str| filter.split_whitespace().filter(|word| name.contains(word)).count();
    let mut near = names.to_vec();
    near.sort_by_key(|name| Reverse(words(name)));
    near.truncate(3);
    near
}

/// A program that ended well, or the error that stands for how it ended.
fn end_of(name: &str, status: ExitStatus) -> Result<()> {
    match status.code() {
        Some(0) => Ok(()),
        Some(code) if code < 128 => Err(Fail::Child(u8::try_from(code)?).into()),
        _ => Err(check(format!("{name} {}", describe(status)))),
    }
}

/// `ended by signal 11 (segmentation fault)` or `ended with exit code 101`.
pub(crate) fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    let Some(signal) = status.signal() else {
        return match status.code() {
            Some(101) => "ended by a panic (exit code 101)".into(),
            Some(code) => format!("ended with exit code {code}"),
            None => "ended in an unknown way".into(),
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

/// One profile and always the whole workspace: features then agree between building, linting and
/// testing, and Burn is compiled once.
pub(crate) fn build(root: &Path) -> Result<()> {
    run_cargo(root, &["build", "--release", "--workspace"])
}

/// Runs cargo in the checkout, on our terminal.
pub(crate) fn run_cargo(root: &Path, args: &[&str]) -> Result<()> {
    finish(place::cargo_in(root).args(args))
}

/// Runs a command of cargo's to its end.
pub(crate) fn finish(cargo: &mut Command) -> Result<()> {
    if cargo.status().context("cannot start cargo")?.success() {
        return Ok(());
    }
    let args: Vec<_> = cargo.get_args().map(|arg| arg.to_string_lossy()).collect();
    Err(check(format!("`cargo {}` failed", args.join(" "))))
}

/// Where cargo puts release programs, whatever its settings are.
pub(crate) fn release_dir(root: &Path) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Metadata {
        target_directory: PathBuf,
    }
    let metadata: Metadata = serde_json::from_str(&metadata(root)?)
        .context("`cargo metadata` printed something else")?;
    Ok(metadata.target_directory.join("release"))
}

/// `cargo metadata` of our own packages.
pub(crate) fn metadata(root: &Path) -> Result<String> {
    let output = place::cargo()
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        return Err(check(format!("`cargo metadata` failed: {}", log.trim())));
    }
    String::from_utf8(output.stdout).context("`cargo metadata` printed no UTF-8")
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
    fn names_near_a_filter_share_its_words() {
        let names = ["copy mib=480", "matmul f32 8x8x8", "matmul bf16 8x8x8", "nf4 bf16 1x8x8"];
        assert_eq!(nearest(&names, "Matmul BF16 9x9x9"), [names[2], names[1], names[3]]);
        assert_eq!(nearest(&names, "x"), names[1..], "in their order");
        assert_eq!(nearest(&names, "alien"), names[..3]);
    }

    #[test]
    fn a_programs_exit_code_is_ours() {
        let code = |script| end_of("x", sh(script)).map_err(|e| crate::fail::report(&e));
        assert_eq!(code("exit 0"), Ok(()));
        assert_eq!(code("exit 2"), Err(2));
        assert_eq!(code("kill -ABRT $$"), Err(1));
    }
}
