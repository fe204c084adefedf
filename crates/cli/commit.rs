//! Part of build scripts: compiles the commit into the program, so that results name the code that was measured.

use std::process::Command;

/// Sets three environment variables for the compiler.
///
/// - `FLASHOVER_COMMIT`: the commit, 12 digits; `unknown` outside of a repository.
/// - `FLASHOVER_DIRTY`: `true` if the tree has uncommitted changes or its state is unknown.
/// - `FLASHOVER_MARK`: suffix of the commit, `-dirty` for uncommitted changes, else empty.
pub(crate) fn main() {
    // A build script runs in the folder of its package, so git must tell the root of the repository.
    let Some(root) = root() else {
        println!("cargo::rustc-env=FLASHOVER_COMMIT=unknown");
        println!("cargo::rustc-env=FLASHOVER_DIRTY=true");
        println!("cargo::rustc-env=FLASHOVER_MARK=");
        return;
    };
    // A commit changes the index; an edit that makes the tree dirty changes a folder.
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
