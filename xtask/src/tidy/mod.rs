//! `cargo xtask tidy`: checks the project rules that the compiler cannot check.

mod rules;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::place::Place;
use crate::programs::metadata;
use report::fail::check;

pub(crate) fn run() -> Result<()> {
    let place = Place::find()?;
    let files = check_tree(place.workspace()?)?;
    eprintln!("tidy: {files} files follow the rules");
    Ok(())
}

/// Checks every file that is tracked or not ignored. Returns the number of files.
pub(crate) fn check_tree(root: &Path) -> Result<usize> {
    let files = tracked(root)?;
    let mut findings = rules::top_level(&files);
    findings.extend(rules::dependencies(&dependencies(root)?));
    let (mut guide, mut sources) = (String::new(), Vec::new());
    for file in &files {
        let path = root.join(file);
        let meta = fs::symlink_metadata(&path).with_context(|| file.clone())?;
        findings.extend(rules::size(file, meta.len()));
        if !meta.is_file() {
            continue;
        }
        let bytes = fs::read(&path).with_context(|| file.clone())?;
        // Binary files have no lines to check.
        if let Ok(text) = String::from_utf8(bytes) {
            findings.extend(rules::lines(file, &text));
            findings.extend(rules::prose(file, &text));
            sources.extend(rules::joined(file, &text));
            if file == rules::GUIDE {
                guide = text;
            }
        }
    }
    findings.extend(rules::symptoms(&guide, &sources));
    if findings.is_empty() {
        return Ok(files.len());
    }
    Err(check(format!("{} rule violations:\n{}", findings.len(), findings.join("\n"))))
}

/// Paths relative to the root, without files deleted since the last commit.
fn tracked(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        return Err(check(format!("git cannot list the files: {}", log.trim())));
    }
    let names = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    let there = |name: &&str| !name.is_empty() && root.join(name).symlink_metadata().is_ok();
    Ok(names.split('\0').filter(there).map(str::to_owned).collect())
}

/// Direct dependencies of each of our packages, by the name of the folder.
fn dependencies(root: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        dependencies: Vec<Dependency>,
    }
    #[derive(Deserialize)]
    struct Dependency {
        name: String,
    }
    let metadata: Metadata = serde_json::from_str(&metadata(root)?)
        .context("`cargo metadata` printed unexpected output")?;
    let short = |name: String| name.strip_prefix("flashover-").map_or(name.clone(), str::to_owned);
    let names = |package: Package| {
        (short(package.name), package.dependencies.into_iter().map(|own| short(own.name)).collect())
    };
    Ok(metadata.packages.into_iter().map(names).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(root: &Path, args: &[&str]) {
        let output = Command::new("git").args(args).current_dir(root).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn new_files_count_ignored_and_deleted_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        git(dir.path(), &["init", "-q"]);
        for name in ["kept.rs", "gone.rs", "ignored.log", "new.rs"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        fs::write(dir.path().join(".gitignore"), "*.log\n").unwrap();
        git(dir.path(), &["add", "kept.rs", "gone.rs"]);
        fs::remove_file(dir.path().join("gone.rs")).unwrap();
        let mut files = tracked(dir.path()).unwrap();
        files.sort();
        assert_eq!(files, [".gitignore", "kept.rs", "new.rs"]);
    }
}
