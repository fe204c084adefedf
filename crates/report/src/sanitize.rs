//! Runs a program under NVIDIA's compute-sanitizer. It finds errors that results may not show, such as a read past the
//! end of a buffer or a race in shared memory.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::fail::usage;
use crate::process::{cuda_roots, tool};

/// A tool of compute-sanitizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sanitizer {
    /// Out-of-bounds or misaligned accesses
    Memcheck,
    /// Races in shared memory
    Racecheck,
    /// Reads of uninitialised memory
    Initcheck,
    /// Barriers that some threads do not reach
    Synccheck,
}

impl Sanitizer {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().expect("no value is hidden").get_name().to_owned()
    }

    /// Wraps `command` in the tool, which writes its findings to `log`.
    pub(crate) fn around(self, command: &Command, log: &Path) -> Result<Command> {
        Ok(self.below(&sanitizer()?, command, log))
    }

    fn below(self, tool: &Path, command: &Command, log: &Path) -> Command {
        let mut wrapped = Command::new(tool);
        wrapped.args(["--tool", &self.name(), "--log-file"]).arg(log);
        wrapped.arg(command.get_program()).args(command.get_args());
        wrapped
    }

    /// Reads the errors from the log of the tool; `None` for a clean run.
    pub(crate) fn found(self, log: &Path) -> Result<Option<String>> {
        let text = fs::read_to_string(log)
            .with_context(|| format!("compute-sanitizer wrote no log at {}", log.display()))?;
        let lines: Vec<_> = text.lines().map(|line| line.trim_start_matches(['=', ' '])).collect();
        let errors = lines.iter().find_map(|line| {
            let (_, counted) = line.split_once("SUMMARY: ")?;
            counted.split(' ').next()?.parse::<u64>().ok()
        });
        let mut why = match errors {
            Some(0) => return Ok(None),
            Some(errors) => format!("{}: {errors} errors", self.name()),
            None => format!("{} did not finish", self.name()),
        };
        for line in lines.iter().filter(|line| !line.is_empty()).take(24) {
            write!(why, "\n  {line}").expect("a string takes all");
        }
        Ok(Some(why))
    }
}

fn sanitizer() -> Result<PathBuf> {
    const NAME: &str = "compute-sanitizer";
    let installed = cuda_roots().into_iter().map(|root| root.join("bin").join(NAME));
    tool(NAME).or_else(|| installed.into_iter().find(|file| file.is_file())).ok_or_else(|| {
        usage(
            "compute-sanitizer is not installed",
            "install the CUDA toolkit, and add its bin folder to the PATH",
        )
    })
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
        assert!(found(Sanitizer::Initcheck, cut).unwrap().starts_with("initcheck did not finish"));
        assert!(Sanitizer::Memcheck.found(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn a_command_keeps_its_arguments() {
        let mut command = Command::new("verify");
        command.args(["--filter", "a b"]);
        let wrapped = Sanitizer::Racecheck.below(Path::new("/tool"), &command, Path::new("log"));
        assert_eq!(wrapped.get_program(), "/tool");
        let args: Vec<_> = wrapped.get_args().map(|arg| arg.to_str().unwrap()).collect();
        assert_eq!(args, ["--tool", "racecheck", "--log-file", "log", "verify", "--filter", "a b"]);
    }
}
