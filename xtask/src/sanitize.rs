//! NVIDIA's compute-sanitizer around a program that launches kernels: it sees what a wrong result may not show, such as a
//! read past the end of a buffer, or two units that meet in shared memory.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::fail::usage;
use crate::place;

/// What compute-sanitizer looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sanitizer {
    /// Accesses outside of a buffer, or misaligned
    Memcheck,
    /// Accesses to shared memory that race
    Racecheck,
    /// Reads of what nobody wrote
    Initcheck,
    /// Barriers that not all units reach
    Synccheck,
}

impl Sanitizer {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Racecheck => "racecheck",
            Self::Initcheck => "initcheck",
            Self::Synccheck => "synccheck",
        }
    }

    /// `command` below the tool, which writes what it finds to `log`.
    pub(crate) fn around(self, command: &Command, log: &Path) -> Result<Command> {
        Ok(self.below(&tool()?, command, log))
    }

    fn below(self, tool: &Path, command: &Command, log: &Path) -> Command {
        let mut wrapped = Command::new(tool);
        wrapped.args(["--tool", self.name(), "--log-file"]).arg(log);
        wrapped.arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(key, value),
                None => wrapped.env_remove(key),
            };
        }
        wrapped
    }

    /// Why what ran below the tool is not clean, by its log; none where it is.
    pub(crate) fn found(self, log: &Path) -> Result<Option<String>> {
        let text = fs::read_to_string(log)
            .with_context(|| format!("compute-sanitizer left no log at {}", log.display()))?;
        let lines: Vec<_> = text.lines().map(|line| line.trim_start_matches(['=', ' '])).collect();
        let errors = lines.iter().find_map(|line| {
            let (_, counted) = line.split_once("SUMMARY: ")?;
            counted.split(' ').next()?.parse::<u64>().ok()
        });
        let mut why = match errors {
            Some(0) => return Ok(None),
            Some(errors) => format!("{}: {errors} errors", self.name()),
            None => format!("{} came to no end", self.name()),
        };
        for line in lines.iter().filter(|line| !line.is_empty()).take(24) {
            write!(why, "\n  {line}").expect("a string takes all");
        }
        Ok(Some(why))
    }
}

fn tool() -> Result<PathBuf> {
    const NAME: &str = "compute-sanitizer";
    let installed = place::cuda_roots().into_iter().map(|root| root.join("bin").join(NAME));
    place::tool(NAME).or_else(|| installed.into_iter().find(|file| file.is_file())).ok_or_else(
        || {
            usage(
                "compute-sanitizer is not installed",
                "it comes with the CUDA toolkit; put its bin folder on the PATH",
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_clean_by_its_summary_alone() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let found = |tool: Sanitizer, text: &str| {
            fs::write(log.path(), text).unwrap();
            tool.found(log.path()).unwrap()
        };
        let clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n";
        assert_eq!(found(Sanitizer::Memcheck, clean), None);
        let race = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n";
        assert_eq!(found(Sanitizer::Racecheck, race), None);
        let bad = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 2 bytes\n\
                   =========\n========= ERROR SUMMARY: 7 errors\n";
        let why = found(Sanitizer::Memcheck, bad).unwrap();
        assert!(
            why.starts_with("memcheck: 7 errors\n  COMPUTE-SANITIZER\n  Invalid __global__"),
            "{why}"
        );
        let cut = "========= COMPUTE-SANITIZER\n";
        assert!(found(Sanitizer::Initcheck, cut).unwrap().starts_with("initcheck came to no end"));
        assert!(Sanitizer::Memcheck.found(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn a_command_keeps_its_arguments_and_variables() {
        let mut command = Command::new("verify");
        command.args(["--filter", "a b"]).env("CUDA_PATH", "/x").env_remove("HOME");
        let wrapped = Sanitizer::Racecheck.below(Path::new("/tool"), &command, Path::new("log"));
        assert_eq!(wrapped.get_program(), "/tool");
        let args: Vec<_> = wrapped.get_args().map(|arg| arg.to_str().unwrap()).collect();
        assert_eq!(args, ["--tool", "racecheck", "--log-file", "log", "verify", "--filter", "a b"]);
        let envs: Vec<_> = wrapped.get_envs().map(|(key, value)| (key, value.is_some())).collect();
        assert_eq!(envs, [("CUDA_PATH".as_ref(), true), ("HOME".as_ref(), false)]);
    }
}
