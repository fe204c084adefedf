//! `cargo xtask test`: runs everything that CI runs, in order, and stops at the first failure.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use record::Backend;
use report::Doctor;
use report::fail::check;

use crate::cli::TestArgs;
use crate::conformance;
use crate::place::{self, Place};
use crate::programs::{Programs, finish, release_dir, run_cargo};
use crate::setup::{self, Cuda, Ready, Wants};
use crate::{readme, tidy};

pub(crate) fn run(args: &TestArgs) -> Result<()> {
    let place = Place::find()?;
    let root = place.workspace()?;
    let mut steps = Steps::default();
    let result =
        if args.fast { fast(&place, root, &mut steps) } else { full(&place, root, &mut steps) };
    command::print(&format!("\n{steps}\n"))?;
    result
}

fn fast(place: &Place, root: &Path, steps: &mut Steps) -> Result<()> {
    steps.step("setup", |_| {
        setup::prepare(place, Wants { cuda: Cuda::Installed, gl: false, node_tests: false })?;
        Ok(Outcome::Passed)
    })?;
    source(root, steps)?;
    steps.step("clippy", |_| {
        let args = ["clippy", "--workspace", "--all-targets", "--release", "--", "-D", "warnings"];
        run_cargo(root, &args)?;
        Ok(Outcome::Passed)
    })?;
    steps.step("unit tests", |counts| {
        cargo_test(place::cargo_in(root), &["--lib", "--bins"], counts)?;
        Ok(Outcome::Passed)
    })
}

fn full(place: &Place, root: &Path, steps: &mut Steps) -> Result<()> {
    let mut ready = None;
    steps.step("setup", |_| {
        ready =
            Some(setup::prepare(place, Wants { cuda: Cuda::Always, gl: true, node_tests: true })?);
        Ok(Outcome::Passed)
    })?;
    let ready = ready.context("setup returned no result")?;
    source(root, steps)?;
    let mut built = None;
    steps.step("clippy and build", |_| {
        for args in [&["build"][..], &["test", "--no-run"]] {
            finish(linted(root).args(args).args(["--release", "--workspace"]))?;
        }
        built = Some(Programs::at(release_dir(root)?, &ready)?);
        Ok(Outcome::Passed)
    })?;
    let programs = built.context("the build returned no result")?;
    steps.step("tests", |counts| {
        cargo_test(linted(root), &[], counts)?;
        Ok(Outcome::Passed)
    })?;
    // With one backend, all that is optional is compiled without its feature somewhere.
    steps.step("features", |_| {
        let features = ["--no-default-features", "--features", "cpu"];
        run_cargo(root, &[&["check", "--release", "-p", "flashover"][..], &features].concat())?;
        Ok(Outcome::Passed)
    })?;
    steps.step("targets", |_| targets(&programs, &ready))?;
    steps.step("onnx", |_| match &ready.node_tests {
        Ok(folder) => {
            let counts = conformance::check(&programs, folder, Backend::Cpu, None)?;
            command::print(&format!("{counts}\n"))?;
            Ok(Outcome::Passed)
        }
        Err(reason) => Ok(Outcome::Skipped(reason.clone())),
    })?;
    for backend in [Backend::Cpu, Backend::WebGpu] {
        steps
            .step(&format!("verify {backend}"), |_| verified(place, &programs, &ready, backend))?;
    }
    steps.step("readme", |_| {
        readme::check_file(root)?;
        Ok(Outcome::Passed)
    })
}

/// Steps that need only the sources, cheapest first.
fn source(root: &Path, steps: &mut Steps) -> Result<()> {
    steps.step("format", |_| {
        run_cargo(root, &["fmt", "--all", "--check"])?;
        Ok(Outcome::Passed)
    })?;
    steps.step("tidy", |_| {
        tidy::check_tree(root)?;
        Ok(Outcome::Passed)
    })
}

/// Returns a cargo that compiles our own packages with clippy, with warnings as errors, so that the tested code is also
/// the linted code. `cargo clippy` would check all dependencies once more without linting them.
fn linted(root: &Path) -> Command {
    let mut cargo = place::cargo_in(root);
    // Arguments in the form that `cargo clippy` passes them.
    cargo
        .env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver")
        .env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
    cargo
}

/// Cross-compiles for GPUs that are not present. Needs the CUDA tools but no GPU.
fn targets(programs: &Programs, ready: &Ready) -> Result<Outcome> {
    let home = match &ready.cuda {
        Ok(home) => &home.root,
        Err(reason) => return Ok(Outcome::Skipped(reason.clone())),
    };
    // Configs that are shipped are compiled whole when they are added: `cargo xtask targets --tuned`.
    let share = ["targets", "--tuned", "--share", "4", "--cuda-home"].map(OsStr::new);
    let args = [&share[..], &[home.as_os_str()]].concat();
    programs.pass_through("flashover-bench", &args)?;
    Ok(Outcome::Passed)
}

/// Verifies kernels on their edge cases, and small models, on one backend, if it has a device. On a CPU it verifies
/// only models, because the tests of `kernels` have checked the kernels.
fn verified(
    place: &Place,
    programs: &Programs,
    ready: &Ready,
    backend: Backend,
) -> Result<Outcome> {
    if Doctor::ask(programs.command("flashover"))?.device(backend).is_none() {
        let reason = match (&ready.gl, backend) {
            (Err(reason), Backend::WebGpu) => reason.clone(),
            _ => format!("needs a {backend} device"),
        };
        return Ok(Outcome::Skipped(reason));
    }
    // One process per core: most checks are a compiler or a reference on one thread.
    let jobs = thread::available_parallelism().map_or(1, NonZeroUsize::get).to_string();
    let mut args: Vec<OsString> =
        ["verify", "--backend", backend.name(), "--jobs", &jobs].map(Into::into).into();
    if backend == Backend::Cpu {
        args.extend(["--filter".into(), "model ".into()]);
    }
    args.extend(place.fixtures().into_iter().flat_map(|dir| ["--fixtures".into(), dir.into()]));
    programs.pass_through("flashover-bench", &args)?;
    Ok(Outcome::Passed)
}

/// Runs the tests and adds up the results of the test programs.
fn cargo_test(mut cargo: Command, which: &[&str], counts: &mut Counts) -> Result<()> {
    let mut child = cargo
        .args(["test", "--workspace", "--release", "--no-fail-fast"])
        .args(which)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let stdout = child.stdout.take().context("cargo has no standard output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        command::print(&format!("{line}\n"))?;
        counts.add(&line);
    }
    if child.wait()?.success() { Ok(()) } else { Err(check("tests failed")) }
}

/// Result of a step that did not fail.
#[derive(Debug)]
enum Outcome {
    Passed,
    /// The reason: `needs X`.
    Skipped(String),
}

/// Counts over all test programs.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    /// Includes tests that reported themselves as skipped, because they returned.
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    /// Reads `test result: ok. 3 passed; 0 failed; ...` and a test's own `skipped: its::name: why`. Ignores other
    /// lines.
    fn add(&mut self, line: &str) {
        // With one thread, the harness prints the start of its line before the test prints.
        self.skipped +=
            usize::from(line.starts_with("skipped: ") || line.contains("... skipped: "));
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let number = |what: &str| {
            let before = result.split_once(what)?.0.trim_end();
            before.rsplit(' ').next()?.parse::<usize>().ok()
        };
        self.passed += number("passed").unwrap_or(0);
        self.failed += number("failed;").unwrap_or(0);
    }
}

/// Completed steps, for the summary.
#[derive(Debug, Default)]
struct Steps {
    done: Vec<(String, Duration, Option<Outcome>)>,
    counts: Counts,
}

impl Steps {
    fn step(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Counts) -> Result<Outcome>,
    ) -> Result<()> {
        command::print(&format!("\n== {name}\n"))?;
        let begin = Instant::now();
        let result = work(&mut self.counts);
        let time = begin.elapsed();
        let (outcome, end) = match result {
            Ok(outcome) => (Some(outcome), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let word = word(outcome.as_ref());
        command::print(&format!("== {name}: {word} ({:.1} s)\n", time.as_secs_f64()))?;
        self.done.push((name.to_owned(), time, outcome));
        end
    }
}

fn word(outcome: Option<&Outcome>) -> String {
    match outcome {
        Some(Outcome::Passed) => "passed".to_owned(),
        Some(Outcome::Skipped(reason)) => format!("skipped: {reason}"),
        None => "FAILED".to_owned(),
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: Duration = self.done.iter().map(|(_, time, _)| *time).sum();
        for (name, time, outcome) in &self.done {
            let word = word(outcome.as_ref());
            writeln!(f, "{name:<14} {:>8.1} s  {word}", time.as_secs_f64())?;
        }
        let skipped =
            self.done.iter().filter(|(.., o)| matches!(o, Some(Outcome::Skipped(_)))).count();
        let failed = self.done.iter().filter(|(.., o)| o.is_none()).count();
        write!(
            f,
            "steps: {} passed, {failed} failed, {skipped} skipped; tests: {} passed, {} failed, {} skipped; {:.1} min",
            self.done.len() - failed - skipped,
            self.counts.passed.saturating_sub(self.counts.skipped),
            self.counts.failed,
            self.counts.skipped,
            total.as_secs_f64() / 60.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_test_programs_add_up() {
        let mut counts = Counts::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "skipped: a::c: no webgpu device: EGL is not installed",
            "test a::d ... skipped: a::d: no webgpu device",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            counts.add(line);
        }
        assert_eq!(counts, Counts { passed: 13, failed: 2, skipped: 2 });
    }

    #[test]
    fn the_summary_tells_skipped_from_passed_and_failed() {
        let mut steps = Steps::default();
        steps.step("one", |_| Ok(Outcome::Passed)).unwrap();
        steps.step("two", |_| Ok(Outcome::Skipped("needs ptxas".into()))).unwrap();
        assert!(steps.step("three", |_| Err(check("no"))).is_err());
        let text = steps.to_string();
        assert!(text.contains("skipped: needs ptxas"), "{text}");
        assert!(text.contains("steps: 1 passed, 1 failed, 1 skipped"), "{text}");
    }
}
