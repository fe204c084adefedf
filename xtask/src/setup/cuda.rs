//! The CUDA compiler (NVRTC with its headers) and assembler (ptxas). Uses an installed toolkit, or downloads the wheels
//! that NVIDIA publishes for Python.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{Missing, announce, apt, cannot_write};
use crate::place;
use report::fail::check;

/// Folder in the user's cache. Change it with the pins below.
const CACHE: &str = "flashover/cuda-13.0";

/// CUDA 13.0, the oldest release 13. A driver loads PTX of its own release and older, so this version works with every
/// driver from 580 on. cuobjdump has no wheel of that release; a newer one reads older files.
const WHEELS: [&str; 6] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-cuobjdump==13.2.86",
];

/// A folder with the CUDA compiler and assembler.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CudaHome {
    pub(crate) root: PathBuf,
    libraries: PathBuf,
}

impl CudaHome {
    /// Opens a toolkit folder; fails unless it has compiler, headers and assembler.
    fn open(root: &Path) -> Result<Self, Missing> {
        let libraries = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
            .iter()
            .map(|dir| root.join(dir))
            .find(|dir| nvrtc_in(dir).is_some())
            .ok_or_else(|| format!("{} has no libnvrtc", root.display()))?;
        for file in ["bin/ptxas", "include/cuda_fp16.h", "include/cuda_runtime.h"] {
            if !has_bytes(&root.join(file)) {
                return Err(format!("{} has no {file}", root.display()));
            }
        }
        Ok(Self { root: root.to_owned(), libraries })
    }

    /// Environment variables for a program that compiles CUDA with this folder.
    pub(crate) fn env(&self) -> Result<Vec<(&'static str, OsString)>> {
        Ok(vec![
            ("CUDA_PATH", self.root.clone().into_os_string()),
            ("LD_LIBRARY_PATH", place::library_path(&self.libraries)?),
        ])
    }
}

/// Returns the toolkit of this machine, or the downloaded one.
pub(super) fn installed() -> Option<CudaHome> {
    let fetched = dirs::cache_dir().map(|cache| cache.join(CACHE));
    place::cuda_roots().into_iter().chain(fetched).find_map(|root| CudaHome::open(&root).ok())
}

/// Reason to report if there is no toolkit.
pub(super) fn absent() -> Missing {
    "needs ptxas and NVRTC (no CUDA toolkit was found)".into()
}

/// Returns the [`installed`] toolkit or downloads the wheels. The inner error is the reason why they are unavailable.
pub(super) fn installed_or_fetched() -> Result<Result<CudaHome, Missing>> {
    if let Some(home) = installed() {
        return Ok(Ok(home));
    }
    if !cfg!(target_os = "linux") {
        return Ok(Err("needs ptxas (its wheels exist for Linux only)".into()));
    }
    if !has_pip() {
        match apt::install(&["python3-pip"], "the CUDA compiler is distributed as Python wheels")? {
            Ok(()) => {}
            Err(commands) => return Ok(Err(format!("needs ptxas (fetched by pip: {commands})"))),
        }
    }
    let cache = dirs::cache_dir().context("no cache folder for this user")?;
    let home = cache.join(CACHE);
    announce(&format!("fetching the CUDA 13.0 compiler and assembler into {}", home.display()));
    fetch(&home).map(|result| result.map_err(|why| format!("needs ptxas ({why})")))
}

fn has_pip() -> bool {
    let version = Command::new("python3").args(["-m", "pip", "--version"]).output();
    version.is_ok_and(|out| out.status.success())
}

/// Downloads and unpacks into a temporary folder next to the final one, then renames it, so that an incomplete folder
/// is never used. The inner error is a failed download.
fn fetch(home: &Path) -> Result<Result<CudaHome, Missing>> {
    let parent = home.parent().context("the cache folder has no parent folder")?;
    fs::create_dir_all(parent).map_err(|why| cannot_write(parent, &why))?;
    let work = tempfile::Builder::new().prefix(".cuda-").tempdir_in(parent);
    let work = work.map_err(|why| cannot_write(parent, &why))?;
    let wheels = work.path().join("wheels");
    let download = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"])
        .args(["--disable-pip-version-check", "--dest"])
        .arg(&wheels)
        .args(WHEELS)
        .output()
        .context("cannot start python3")?;
    if !download.status.success() {
        let log = String::from_utf8_lossy(&download.stderr);
        let last = log.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("no message").trim();
        return Ok(Err(format!("pip could not download it: {last}")));
    }
    let tree = work.path().join("tree");
    for wheel in list(&wheels)? {
        let status = Command::new("python3")
            .args(["-m", "zipfile", "-e"])
            .args([&wheel, &tree])
            .status()
            .context("cannot start python3")?;
        if !status.success() {
            return Err(check(format!("cannot unpack {}", wheel.display())));
        }
    }
    let root = tree.join("nvidia/cu13");
    complete(&root)?;
    CudaHome::open(&root)
        .map_err(|why| check(format!("the wheels are incompatible with each other: {why}")))?;
    if home.exists() {
        // An earlier download that has since lost files.
        fs::remove_dir_all(home).with_context(|| format!("cannot replace {}", home.display()))?;
    }
    if let Err(error) = fs::rename(&root, home) {
        // Another xtask may have won the race; its folder is just as good.
        return CudaHome::open(home)
            .map(Ok)
            .map_err(|_| error)
            .with_context(|| format!("cannot create {}", home.display()));
    }
    Ok(CudaHome::open(home))
}

/// Adds what unpacking a wheel leaves out: execute permissions, and the names that libraries are loaded by.
fn complete(root: &Path) -> Result<()> {
    for program in list(&root.join("bin"))?.into_iter().filter(|file| file.is_file()) {
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    }
    let lib = root.join("lib");
    let nvrtc = nvrtc_in(&lib).context("the wheels contain no libnvrtc")?;
    if nvrtc != "libnvrtc.so" {
        symlink(&nvrtc, lib.join("libnvrtc.so"))?;
    }
    symlink("lib", root.join("lib64"))?;
    // Releases from 13.3 on put these headers one level up.
    if !root.join("include/cccl").exists() {
        symlink(".", root.join("include/cccl"))?;
    }
    Ok(())
}

/// True if the file exists and is not empty; a full disk leaves empty files.
fn has_bytes(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.len() > 0)
}

/// Name of the NVRTC library in a folder, the plain name first.
fn nvrtc_in(dir: &Path) -> Option<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter(|entry| has_bytes(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name == "libnvrtc.so" || name.starts_with("libnvrtc.so."))
        .collect();
    names.sort();
    names.into_iter().next()
}

fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect();
    let files: std::io::Result<Vec<_>> = read();
    files.with_context(|| format!("cannot list {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree like that of unpacked wheels.
    fn unpacked() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in [
            "bin/ptxas",
            "include/cuda_fp16.h",
            "include/cuda_runtime.h",
            "include/cccl/cuda/std/array",
            "lib/libnvrtc.so.13",
            "lib/libnvrtc-builtins.so.13.0",
            "lib/libnvrtc.alt.so.13",
        ] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "something").unwrap();
        }
        dir
    }

    #[test]
    fn the_wheels_become_a_toolkit() {
        let dir = unpacked();
        complete(dir.path()).unwrap();
        let home = CudaHome::open(dir.path()).unwrap();
        let mode = fs::metadata(dir.path().join("bin/ptxas")).unwrap().permissions().mode();
        assert_eq!(mode & 0o111, 0o111);
        assert!(dir.path().join("lib64/libnvrtc.so").exists());
        let env = home.env().unwrap();
        assert_eq!(env[0], ("CUDA_PATH", dir.path().as_os_str().to_owned()));
        assert!(env[1].1.to_string_lossy().starts_with(&*home.libraries.to_string_lossy()));
    }

    #[test]
    fn a_toolkit_without_its_assembler_is_named_as_such() {
        let dir = unpacked();
        complete(dir.path()).unwrap();
        fs::remove_file(dir.path().join("bin/ptxas")).unwrap();
        let missing = CudaHome::open(dir.path()).unwrap_err();
        assert!(missing.ends_with("has no bin/ptxas"), "{missing}");
        fs::write(dir.path().join("bin/ptxas"), "").unwrap();
        let empty = CudaHome::open(dir.path()).unwrap_err();
        assert_eq!(empty, missing);
        fs::write(dir.path().join("bin/ptxas"), "something").unwrap();
        fs::write(dir.path().join("lib/libnvrtc.so.13"), "").unwrap();
        let empty = CudaHome::open(dir.path()).unwrap_err();
        assert!(empty.ends_with("has no libnvrtc"), "{empty}");
    }

    #[test]
    fn the_alternative_compiler_is_not_taken_for_nvrtc() {
        let dir = unpacked();
        fs::remove_file(dir.path().join("lib/libnvrtc.so.13")).unwrap();
        assert_eq!(nvrtc_in(&dir.path().join("lib")), None);
    }
}
