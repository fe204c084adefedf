//! `cargo xtask fuzz`: runs the random tests of file readers with more cases than `cargo xtask test`.

use std::process::Command;

use anyhow::{Context, Result};
use report::fail::check;

use crate::cli::FuzzArgs;
use crate::place::{self, Place};
use crate::programs::run_cargo;
use crate::setup::{self, Cuda, Wants};

/// Limit of the address space in KiB: the mappings of a test program before it reads a file, plus 2 GiB.
const MAX_KIB: &str = "3145728";

pub(crate) fn run(args: &FuzzArgs) -> Result<()> {
    let place = Place::find()?;
    let root = place.workspace()?;
    setup::prepare(&place, Wants { cuda: Cuda::Installed, gl: false, node_tests: false })?;
    let tests = ["test", "--release", "-p", "flashover-text", "-p", "flashover", "--test", "it"];
    run_cargo(root, &[&tests[..], &["--no-run"]].concat())?;
    let cargo = place::cargo_in(root);
    let mut limited = Command::new("sh");
    limited
        .current_dir(root)
        .args(["-c", r#"ulimit -v "$1" && shift && exec "$@""#, "sh", MAX_KIB])
        .arg(cargo.get_program())
        .args(tests)
        .args(["--", &format!("fuzz::{}", args.filter.as_deref().unwrap_or_default())])
        .env("PROPTEST_CASES", args.runs.to_string())
        // Each malloc arena reserves 64 MiB.
        .env("MALLOC_ARENA_MAX", "1");
    match limited.status().context("cannot start sh")?.success() {
        true => Ok(()),
        false => Err(check("a case failed\nhint: see its input in the test's output above")),
    }
}
