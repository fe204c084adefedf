//! Of a build script: compiles the commit into the program, so that a figure says what was measured.

use std::process::Command;

/// Sets `FLASHOVER_COMMIT`, `unknown` outside of a repository, `FLASHOVER_DIRTY` for a tree with uncommitted changes, and
/// `FLASHOVER_MARK`, what a commit is followed by where it is not all.
pub(crate) fn main() {
    // Scripts of packages run in their folders, which lie at different depths.
    let Some(root) = root() else {
        println!("cargo::rustc-env=FLASHOVER_COMMIT=unknown");
        println!("cargo::rustc-env=FLASHOVER_DIRTY=true");
        println!("cargo::rustc-env=FLASHOVER_MARK=");
        return;
    };
    // The index changes with a commit, the folders with an edit that makes the tree dirty.
    let sources = ["crates", "kernels", "models", "benches", "xtask", "Cargo.lock"];
    for path in [".git/HEAD", ".git/index", ".git/logs/HEAD"].iter().chain(&sources) {
        println!("cargo::rerun-if-changed={root}/{path}");
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    let dirty = git(&["status", "--porcelain"]).is_none_or(|s| !s.is_empty());
    println!("cargo::rustc-env=FLASHOVER_COMMIT={commit}");
    println!("cargo::rustc-env=FLASHOVER_DIRTY={dirty}");
    println!("cargo::rustc-env=FLASHOVER_MARK={}", if dirty { "-dirty" } else { "" });
}

fn root() -> Option<String> {
    git(&["rev-parse", "--show-toplevel"])
}

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}
