//! The CUDA compiler (NVRTC with its headers) and assembler (ptxas). Uses an installed toolkit, or downloads the wheels
//! that NVIDIA publishes for Python.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::wheels::{self, list};
use super::{Missing, announce};
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
    if let Err(commands) = wheels::pip("the CUDA compiler is distributed as Python wheels")? {
        return Ok(Err(format!("needs ptxas (fetched by pip: {commands})")));
    }
    let cache = dirs::cache_dir().context("no cache folder for this user")?;
    let home = cache.join(CACHE);
    announce(&format!("fetching the CUDA 13.0 compiler and assembler into {}", home.display()));
    fetch(&home).map(|result| result.map_err(|why| format!("needs ptxas ({why})")))
}

fn fetch(home: &Path) -> Result<Result<CudaHome, Missing>> {
    let open = |root: &Path| {
        CudaHome::open(root)
            .map(drop)
            .map_err(|why| check(format!("the wheels are incompatible with each other: {why}")))
    };
    let prepare = |root: &Path| complete(root).and_then(|()| open(root));
    match wheels::fetch(home, &WHEELS, "nvidia/cu13", prepare)? {
        Ok(()) => Ok(CudaHome::open(home)),
        Err(why) => Ok(Err(why)),
    }
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
