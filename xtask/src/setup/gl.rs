//! The GL driver. Backend `webgpu` (WGSL on a native device) needs one on a machine without a GPU.

use std::path::Path;

use anyhow::Result;

use super::{Missing, announce, apt, has_library};
use crate::place;

/// Mesa's software driver and its loaders.
const PACKAGES: [&str; 4] = ["libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libgles2"];

/// Checks that a GL device can be opened, or returns what is missing.
pub(super) fn present() -> Result<(), Missing> {
    if !has_library("libEGL.so.1") {
        return Err("needs libEGL.so.1 (Debian package libegl1)".into());
    }
    let nvidia = has_library("libEGL_nvidia.so.0");
    let mesa = has_library("libEGL_mesa.so.0") && place::library_dirs().iter().any(|d| has_mesa(d));
    if nvidia || mesa {
        Ok(())
    } else {
        Err("needs a GL driver (Debian package libgl1-mesa-dri)".into())
    }
}

/// Installs Mesa if no driver is present and this user has the permission.
pub(super) fn prepare() -> Result<Result<(), Missing>> {
    let Err(reason) = present() else { return Ok(Ok(())) };
    match apt::install(&PACKAGES, &format!("backend webgpu {reason}"))? {
        Ok(()) => {
            announce("GL driver installed");
            Ok(present())
        }
        Err(commands) => Ok(Err(format!("{reason}; {commands}"))),
    }
}

/// Checks for Mesa's drivers: one file each up to release 24.2, one shared library since.
fn has_mesa(library_dir: &Path) -> bool {
    if library_dir.join("dri/swrast_dri.so").exists() {
        return true;
    }
    std::fs::read_dir(library_dir).is_ok_and(|entries| {
        entries
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().starts_with("libgallium-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_of_mesa_are_known() {
        let old = tempfile::tempdir().unwrap();
        assert!(!has_mesa(old.path()));
        std::fs::create_dir(old.path().join("dri")).unwrap();
        std::fs::write(old.path().join("dri/swrast_dri.so"), "").unwrap();
        assert!(has_mesa(old.path()));

        let new = tempfile::tempdir().unwrap();
        std::fs::write(new.path().join("libgallium-25.0.7-2.so"), "").unwrap();
        assert!(has_mesa(new.path()));
    }
}
