//! Paths of the repository, programs and libraries, and the environment variables.
//!
//! No other file of xtask reads environment variables.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use report::fail::usage;
pub(crate) use report::{cuda_roots, tool};

/// The programs that xtask drives.
pub(crate) const PROGRAMS: [&str; 2] = ["flashover", "flashover-bench"];

/// Source of the programs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Place {
    /// A checkout, whose programs are built before they run.
    Workspace(PathBuf),
    /// A folder of built programs, as `bundle` writes it. Nothing is built or installed.
    Bundle(PathBuf),
}

impl Place {
    /// Looks at `FLASHOVER_PROGRAMS`, then for a checkout around the caller, then in the folder of this program.
    pub(crate) fn find() -> Result<Self> {
        if let Some(dir) = env::var_os("FLASHOVER_PROGRAMS") {
            let dir = PathBuf::from(dir);
            return if has_programs(&dir) {
                Ok(Self::Bundle(dir))
            } else {
                Err(usage(
                    format!("FLASHOVER_PROGRAMS names {}, which lacks the programs", dir.display()),
                    format!("set it to a folder with {}", PROGRAMS.join(" and ")),
                ))
            };
        }
        let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let cwd = env::current_dir().context("cannot read the current folder")?;
        if let Some(root) = manifest.iter().chain([&cwd]).find_map(|dir| workspace_around(dir)) {
            return Ok(Self::Workspace(root));
        }
        let exe = env::current_exe().context("cannot read the path of this program")?;
        match exe.parent() {
            Some(dir) if has_programs(dir) => Ok(Self::Bundle(dir.to_owned())),
            _ => Err(usage(
                "expected a Flashover checkout or its programs here, found neither",
                "run this inside a checkout, or in the folder of a bundle's programs",
            )),
        }
    }

    /// Root of the checkout; an error for a bundle.
    pub(crate) fn workspace(&self) -> Result<&Path> {
        match self {
            Self::Workspace(root) => Ok(root),
            Self::Bundle(_) => Err(usage(
                "this command needs a checkout of the repository",
                "use doctor, bench, verify, compare, tune or targets with a bundle",
            )),
        }
    }

    /// Folder of the small models to verify, if this is a checkout.
    pub(crate) fn fixtures(&self) -> Option<PathBuf> {
        Some(self.workspace().ok()?.join("models/fixtures"))
    }
}

fn has_programs(dir: &Path) -> bool {
    PROGRAMS.iter().all(|name| dir.join(name).is_file())
}

/// Nearest ancestor that is this workspace, recognised by two of its members.
fn workspace_around(start: &Path) -> Option<PathBuf> {
    start
        .ancestors()
        .find(|dir| {
            ["Cargo.toml", "xtask/Cargo.toml", "benches/Cargo.toml"]
                .iter()
                .all(|file| dir.join(file).is_file())
        })
        .map(Path::to_owned)
}

/// Returns the cargo that runs us, or the one on the search path, without the variables that cargo set for us. Build
/// scripts that watch them would run again, and Burn would be rebuilt.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let told = name.to_str().is_some_and(|n| {
            ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"]
                .iter()
                .any(|prefix| n.starts_with(prefix))
        });
        if told {
            command.env_remove(name);
        }
    }
    command
}

/// [`cargo`] in a checkout.
pub(crate) fn cargo_in(root: &Path) -> Command {
    let mut command = cargo();
    command.current_dir(root);
    command
}

/// C and C++ compilers that build scripts will use.
pub(crate) fn compilers() -> [(OsString, &'static str); 2] {
    [("CC", "cc"), ("CXX", "c++")].map(|(var, name)| {
        (env::var_os(var).filter(|v| !v.is_empty()).unwrap_or_else(|| name.into()), name)
    })
}

/// The value of `LD_LIBRARY_PATH` with `first` in front.
pub(crate) fn library_path(first: &Path) -> Result<OsString> {
    let old = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let rest = env::split_paths(&old).filter(|dir| !dir.as_os_str().is_empty());
    env::join_paths([first.to_owned()].into_iter().chain(rest))
        .with_context(|| format!("{} cannot be an entry of LD_LIBRARY_PATH", first.display()))
}

/// Folders that the loader searches for shared libraries. A cheap approximation.
pub(crate) fn library_dirs() -> Vec<PathBuf> {
    let set = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let multiarch = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
    let fixed = [
        multiarch.as_str(),
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    env::split_paths(&set).chain(fixed.iter().map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checkout_is_found_from_a_folder_inside_it() {
        let dir = tempfile::tempdir().unwrap();
        for member in ["xtask", "benches/src"] {
            std::fs::create_dir_all(dir.path().join(member)).unwrap();
        }
        assert_eq!(workspace_around(&dir.path().join("benches/src")), None);
        for file in ["Cargo.toml", "xtask/Cargo.toml", "benches/Cargo.toml"] {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        assert_eq!(workspace_around(&dir.path().join("benches/src")).as_deref(), Some(dir.path()));
    }

    #[test]
    fn a_folder_with_one_program_is_no_bundle() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("flashover"), "").unwrap();
        assert!(!has_programs(dir.path()));
        std::fs::write(dir.path().join("flashover-bench"), "").unwrap();
        assert!(has_programs(dir.path()));
    }

    #[test]
    fn a_bundle_refuses_what_needs_the_sources() {
        let error = Place::Bundle("x".into()).workspace().unwrap_err();
        assert!(error.to_string().contains("needs a checkout"), "{error}");
    }
}
