//! Builds and starts the programs.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use report::fail::check;
use serde::Deserialize;

use crate::place::{self, PROGRAMS, Place};
use crate::setup::{self, Ready, Wants};

/// A folder of programs and their environment.
#[derive(Debug)]
pub(crate) struct Programs {
    dir: PathBuf,
    env: Vec<(&'static str, OsString)>,
}

impl Programs {
    /// Sets up the machine, builds the programs of a checkout, and reports which optional parts are available.
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

    /// Opens a folder of built programs.
    pub(crate) fn at(dir: PathBuf, ready: &Ready) -> Result<Self> {
        if let Some(absent) = PROGRAMS.iter().find(|name| !dir.join(name).is_file()) {
            return Err(check(format!(
                "the build created no program {}",
                dir.join(absent).display()
            )));
        }
        let env = match &ready.cuda {
            Ok(home) => home.env()?,
            Err(_) => Vec::new(),
        };
        Ok(Self { dir, env })
    }

    /// Folder of the programs.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A command for a program, without arguments yet.
    pub(crate) fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.dir.join(name));
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        command
    }

    /// Runs a program on our terminal and fails with its exit code.
    pub(crate) fn pass_through(&self, name: &str, args: &[impl AsRef<OsStr>]) -> Result<()> {
        let status = self
            .command(name)
            .args(args)
            .status()
            .with_context(|| format!("cannot start {name}"))?;
        report::end_of(name, status)
    }
}

/// Builds the whole workspace with one profile. Building, linting and testing then use the same features, so Burn is
/// compiled once.
pub(crate) fn build(root: &Path) -> Result<()> {
    run_cargo(root, &["build", "--release", "--workspace"])
}

/// Runs cargo in the checkout, on our terminal.
pub(crate) fn run_cargo(root: &Path, args: &[&str]) -> Result<()> {
    finish(place::cargo_in(root).args(args))
}

/// Runs a cargo command to its end.
pub(crate) fn finish(cargo: &mut Command) -> Result<()> {
    if cargo.status().context("cannot start cargo")?.success() {
        return Ok(());
    }
    let args: Vec<_> = cargo.get_args().map(|arg| arg.to_string_lossy()).collect();
    Err(check(format!("`cargo {}` failed", args.join(" "))))
}

/// Folder of release programs, with any cargo settings.
pub(crate) fn release_dir(root: &Path) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Metadata {
        target_directory: PathBuf,
    }
    let metadata: Metadata = serde_json::from_str(&metadata(root)?)
        .context("`cargo metadata` printed unexpected output")?;
    Ok(metadata.target_directory.join("release"))
}

/// Output of `cargo metadata` for our own packages.
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
    String::from_utf8(output.stdout).context("`cargo metadata` did not print UTF-8")
}
