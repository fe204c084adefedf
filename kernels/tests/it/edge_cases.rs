//! Checks every edge case of every kernel on the CPU, with the config that runs there, against the f64
//! reference.
//!
//! The CPU runtime compiles kernels on one thread. The test therefore starts itself once per core, and each
//! process takes a part of the checks.

use std::process::{Command, Stdio};

use arch::Backend;
use suite::{Job, KERNELS};
use tune::TuneCache;

/// Environment variable with the part that a process checks, for example `1/2`.
const PART: &str = "FLASHOVER_TEST_PART";
/// Line that a process prints after it has checked its part.
const CHECKED: &str = "every check of this part passed";

#[test]
fn every_kernel_is_right_on_the_cpu() {
    if let Ok(part) = std::env::var(PART) {
        let (index, parts) = part.split_once('/').expect("I/N");
        return check(index.parse().expect("a number"), parts.parse().expect("a number"));
    }
    let parts = std::thread::available_parallelism().map_or(1, usize::from);
    let program = std::env::current_exe().expect("the path of this test");
    let start = |index: usize| {
        Command::new(&program)
            .args(["--exact", "edge_cases::every_kernel_is_right_on_the_cpu", "--nocapture"])
            .env(PART, format!("{index}/{parts}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this test starts")
    };
    for child in (0..parts).map(start).collect::<Vec<_>>() {
        let output = child.wait_with_output().expect("it ends");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{out}\n{error}");
        // A child whose filter matches no test runs nothing and succeeds.
        assert!(out.contains(CHECKED), "{out}\n{error}");
    }
}

fn check(index: usize, parts: usize) {
    let device = crate::device(Backend::Cpu).expect("the CPU runtime needs nothing");
    for kernel in KERNELS {
        let jobs = kernel.checks(device.profile(), &TuneCache::default(), false);
        let able = jobs.iter().filter(|job| job.config.is_ok()).count();
        assert!(able > 0, "{} has no check for a CPU", kernel.name());
        let mine = |(at, job): (usize, Job)| (at % parts == index).then_some(job);
        for job in jobs.into_iter().enumerate().filter_map(mine).filter(|job| job.config.is_ok()) {
            let verdict = (job.run)(&device);
            let verdict = verdict.unwrap_or_else(|why| panic!("{}: {why}", job.name()));
            assert!(verdict.comparison.passed, "{}: {}", job.name(), verdict.comparison);
        }
    }
    println!("{CHECKED}");
}
