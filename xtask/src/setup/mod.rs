//! Prepares the machine for building and running the programs.
//!
//! Each step first checks. It changes the machine only if something is missing, and announces that in one line. A
//! missing requirement of the build is an error with the commands to fix it. A requirement of some checks only is
//! returned as a [`Missing`] reason, which the caller prints as skipped.

mod apt;
mod cuda;
mod gl;
mod llvm;
mod node_tests;
mod wheels;

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use record::Backend;
use report::Selection;
use report::fail::usage;

pub(crate) use cuda::CudaHome;

use crate::place::{self, Place};

/// Reason why an optional part is missing: `needs ptxas (no network)`.
pub(crate) type Missing = String;

/// Policy for downloading CUDA tools that are not installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cuda {
    /// Use an installed toolkit; download nothing.
    Installed,
    /// Download the compiler if an NVIDIA driver can run its output.
    WithDriver,
    /// Download compiler and assembler on any machine.
    Always,
}

/// Optional parts that a command wants.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wants {
    pub(crate) cuda: Cuda,
    /// A GL driver, for backend `webgpu`.
    pub(crate) gl: bool,
    /// The tests of ONNX's operators.
    pub(crate) node_tests: bool,
}

/// State of the optional parts.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) cuda: Result<CudaHome, Missing>,
    pub(crate) gl: Result<(), Missing>,
    /// Folder with the folders of tests `node`, `simple` and so on.
    pub(crate) node_tests: Result<PathBuf, Missing>,
}

/// Prepares the machine. In a bundle, nothing is installed or downloaded.
pub(crate) fn prepare(place: &Place, wants: Wants) -> Result<Ready> {
    if let Place::Bundle(_) = place {
        return Ok(Ready {
            cuda: cuda::installed().ok_or_else(cuda::absent),
            gl: gl::present(),
            node_tests: node_tests::found(),
        });
    }
    toolchain()?;
    llvm::prepare()?;
    let cuda = match wants.cuda {
        Cuda::Installed => cuda::installed().ok_or_else(cuda::absent),
        Cuda::WithDriver if !has_library("libcuda.so.1") => {
            cuda::installed().ok_or_else(cuda::absent)
        }
        Cuda::WithDriver | Cuda::Always => cuda::installed_or_fetched()?,
    };
    let gl = if wants.gl { gl::prepare()? } else { gl::present() };
    let node_tests =
        if wants.node_tests { node_tests::found_or_fetched()? } else { node_tests::found() };
    Ok(Ready { cuda, gl, node_tests })
}

/// Refuses an explicitly named backend without a driver, before anything is built.
pub(crate) fn check_drivers(selection: &Selection) -> Result<()> {
    match absent_driver(selection, has_library) {
        None => Ok(()),
        Some((backend, library, how)) => Err(usage(
            format!("no device for backend `{backend}` on this machine: {library} is missing"),
            how,
        )),
    }
}

/// First named backend whose driver library is missing, with the library and the fix.
fn absent_driver(
    selection: &Selection,
    has: impl Fn(&str) -> bool,
) -> Option<(Backend, &'static str, &'static str)> {
    let Selection::List(list) = selection else { return None };
    let drivers = [
        (Backend::Cuda, "libcuda.so.1", "install NVIDIA driver 580 or newer, which NVRTC 13 needs"),
        (
            Backend::Vulkan,
            "libvulkan.so.1",
            "install the Vulkan loader (Debian package libvulkan1)",
        ),
    ];
    drivers.into_iter().find(|(backend, library, _)| list.contains(backend) && !has(library))
}

/// Announces a change to the machine.
fn announce(what: &str) {
    eprintln!("setup: {what}");
}

/// Error for a folder that is not writable.
fn cannot_write(folder: &Path, why: &io::Error) -> anyhow::Error {
    usage(
        format!("cannot write {}: {why}", folder.display()),
        "make it and its parent folders writable, or set HOME, XDG_DATA_HOME and XDG_CACHE_HOME \
         to writable folders",
    )
}

/// Installs C and C++ compilers, which build scripts call.
fn toolchain() -> Result<()> {
    let absent: Vec<_> = place::compilers()
        .into_iter()
        .filter(|(compiler, _)| {
            // `CC` may contain a wrapper or options after the program name.
            let text = compiler.to_string_lossy();
            let program = text.split_whitespace().next().unwrap_or_default();
            !Path::new(program).is_file() && place::tool(program).is_none()
        })
        .map(|(_, name)| name)
        .collect();
    if absent.is_empty() {
        return Ok(());
    }
    let what = format!("compiler `{}` is missing, which build scripts need", absent.join("`, `"));
    match apt::install(&["gcc", "g++", "libc6-dev"], &what)? {
        Ok(()) => Ok(()),
        Err(commands) => Err(usage(what, format!("install one, on Debian with: {commands}"))),
    }
}

/// Installs xz, which `bundle` packs with.
pub(crate) fn ensure_xz() -> Result<()> {
    if place::tool("xz").is_some() {
        return Ok(());
    }
    match apt::install(&["xz-utils"], "the bundle is packed with xz")? {
        Ok(()) => Ok(()),
        Err(commands) => Err(usage("the bundle is packed with xz, which is missing", commands)),
    }
}

/// True if the loader finds a shared library of this name.
fn has_library(name: &str) -> bool {
    if place::library_dirs().iter().any(|dir| dir.join(name).exists()) {
        return true;
    }
    let Some(ldconfig) = place::tool("ldconfig") else { return false };
    std::process::Command::new(ldconfig).arg("-p").output().is_ok_and(|out| {
        String::from_utf8_lossy(&out.stdout)
            .lines()
            .any(|line| line.split_whitespace().next() == Some(name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_backend_needs_its_driver() {
        let absent = |text: &str| {
            let selection: Selection = text.parse().unwrap();
            absent_driver(&selection, |library| library == "libvulkan.so.1").map(|(b, ..)| b)
        };
        assert_eq!(absent("cpu,cuda"), Some(Backend::Cuda));
        for text in ["auto", "all", "vulkan", "webgpu", "cpu"] {
            assert_eq!(absent(text), None, "{text}");
        }
    }

    #[test]
    fn the_loader_finds_libc_and_no_nonsense() {
        assert!(has_library("libc.so.6"));
        assert!(!has_library("libflashover-is-not-a-library.so.1"));
    }
}
