//! Compiles the commit into the program, so that a record says what was measured.

use std::process::Command;

#[path = "../crates/arch/export.rs"]
mod export;

fn main() {
    export::main();
    // The index changes with a commit, the folders with an edit that makes the tree dirty.
    let sources =
        ["../crates", "../kernels", "../models", "../benches", "../xtask", "../Cargo.lock"];
    for path in ["../.git/HEAD", "../.git/index", "../.git/logs/HEAD"].iter().chain(&sources) {
        println!("cargo::rerun-if-changed={path}");
    }
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    let dirty = git(&["status", "--porcelain"]).is_none_or(|s| !s.is_empty());
    println!("cargo::rustc-env=FLASHOVER_COMMIT={commit}");
    println!("cargo::rustc-env=FLASHOVER_DIRTY={dirty}");
}
