//! Wheels of Python's package index, unpacked into folders of the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use report::fail::check;

use super::{apt, cannot_write};

/// Installs pip if it is missing. The inner error is the commands that would install it.
pub(super) fn pip(what: &str) -> Result<Result<(), String>> {
    let version = Command::new("python3").args(["-m", "pip", "--version"]).output();
    match version.is_ok_and(|out| out.status.success()) {
        true => Ok(Ok(())),
        false => apt::install(&["python3-pip"], what),
    }
}

/// Downloads and unpacks wheels into a temporary folder, prepares a part of it, and renames this part to `home`, so that an incomplete
/// folder is never used. The inner error is a failed download.
pub(super) fn fetch(
    home: &Path,
    wheels: &[&str],
    part: &str,
    prepare: impl FnOnce(&Path) -> Result<()>,
) -> Result<Result<(), String>> {
    let parent = home.parent().context("the cache folder has no parent folder")?;
    fs::create_dir_all(parent).map_err(|why| cannot_write(parent, &why))?;
    let work = tempfile::Builder::new().prefix(".wheels-").tempdir_in(parent);
    let work = work.map_err(|why| cannot_write(parent, &why))?;
    let packed = work.path().join("wheels");
    let download = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"])
        .args(["--disable-pip-version-check", "--dest"])
        .arg(&packed)
        .args(wheels)
        .output()
        .context("cannot start python3")?;
    if !download.status.success() {
        let log = String::from_utf8_lossy(&download.stderr);
        let last = log.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("no message").trim();
        return Ok(Err(format!("pip could not download it: {last}")));
    }
    let tree = work.path().join("tree");
    for wheel in list(&packed)? {
        let status = Command::new("python3")
            .args(["-m", "zipfile", "-e"])
            .args([&wheel, &tree])
            .status()
            .context("cannot start python3")?;
        if !status.success() {
            return Err(check(format!("cannot unpack {}", wheel.display())));
        }
    }
    let root = tree.join(part);
    prepare(&root)?;
    if home.exists() {
        // An earlier download that has since lost files.
        fs::remove_dir_all(home).with_context(|| format!("cannot replace {}", home.display()))?;
    }
    match fs::rename(&root, home) {
        // Another xtask may have won the race; its folder is just as good.
        Err(error) if !home.exists() => {
            Err(error).with_context(|| format!("cannot create {}", home.display()))
        }
        _ => Ok(Ok(())),
    }
}

pub(super) fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect();
    let files: std::io::Result<Vec<_>> = read();
    files.with_context(|| format!("cannot list {}", dir.display()))
}
