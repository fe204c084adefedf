//! Compiles kernels for cards that the machine does not have, and reports their resource usage.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use cubecl::prelude::CubeKernel;

use crate::known::{self, Compiled, Known};
use crate::nvrtc::{self, CompileError, Output, options, target_name};
use crate::source::expand;

/// Resource usage of a kernel's machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Registers of one unit.
    pub registers: u32,
    /// Bytes of register spills that are written.
    pub spill_stores: u32,
    pub spill_loads: u32,
    /// Bytes of local memory of one unit, spills included.
    pub stack: u32,
    /// Bytes of shared memory of one cube, which CubeCL requests at the launch.
    pub shared: u32,
    /// Units of one cube.
    pub units: u32,
}

impl Usage {
    /// Returns the bytes of register spills, written plus read.
    pub fn spilled(&self) -> u32 {
        self.spill_stores + self.spill_loads
    }
}

/// The reason that a kernel has no usage report.
#[derive(Debug, thiserror::Error)]
pub enum ToolkitError {
    #[error(
        "{path} is missing\nhint: set --cuda-home to a CUDA 13 toolkit, or let `cargo xtask` \
         fetch it"
    )]
    Missing { path: PathBuf },
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error("ptxas: {0}")]
    Ptxas(String),
    #[error("cannot run ptxas: {0}")]
    Io(#[from] std::io::Error),
}

/// NVRTC, its headers and `ptxas`.
#[derive(Debug, Clone)]
pub struct Toolkit {
    ptxas: PathBuf,
    include: PathBuf,
    /// Versions of CubeCL, NVRTC and `ptxas`.
    versions: String,
}

impl Toolkit {
    /// Opens the toolkit under `home`; the dynamic linker finds NVRTC itself.
    ///
    /// # Errors
    /// A file is missing, or `ptxas` cannot run.
    pub fn at(home: &Path) -> Result<Self, ToolkitError> {
        let (ptxas, include) = (home.join("bin/ptxas"), home.join("include"));
        for path in [&ptxas, &include.join("cuda_fp16.h")] {
            if !path.exists() {
                return Err(ToolkitError::Missing { path: path.clone() });
            }
        }
        let Some(nvrtc) = nvrtc::version()? else {
            return Err(ToolkitError::Missing { path: PathBuf::from("libnvrtc.so") });
        };
        let out = Command::new(&ptxas).arg("--version").output()?;
        let assembler = String::from_utf8_lossy(&out.stdout);
        let assembler = assembler.lines().last().unwrap_or_default();
        let versions = format!("{}, nvrtc {nvrtc}, ptxas {assembler}", CUBECL);
        Ok(Self { ptxas, include, versions })
    }

    /// Returns the resource usage of `kernel` on compute capability `sm`, from `known` or by compiling. With `dump` it
    /// always compiles, and keeps `dump.cu`, `dump.ptx` and `dump.cubin`.
    ///
    /// # Errors
    /// The first stage that fails, with its message.
    pub fn usage(
        &self,
        kernel: &dyn CubeKernel,
        sm: u32,
        dump: Option<&Path>,
        known: &Known,
    ) -> Result<Usage, ToolkitError> {
        let expanded = expand(kernel, sm)?;
        let units = expanded.units();
        let key = known::key(&expanded.text(), &options(sm), &self.versions);
        let compile = || {
            let source = expanded.source()?;
            let ptx = self.ptx(&source.text, sm)?;
            let dir = tempfile::tempdir()?;
            let stem = dump.map_or_else(|| dir.path().join("k"), Path::to_owned);
            if dump.is_some() {
                std::fs::write(stem.with_extension("cu"), &source.text)?;
            }
            self.assemble(&ptx, sm, source.shared_bytes as u32, &stem)
        };
        let Compiled { registers, spill_stores, spill_loads, stack, shared } = match dump {
            Some(_) => compile()?,
            None => known.get_or(key, compile)?,
        };
        Ok(Usage { registers, spill_stores, spill_loads, stack, shared, units })
    }

    /// Compiles CUDA C++ to PTX.
    fn ptx(&self, source: &str, sm: u32) -> Result<String, ToolkitError> {
        let include = [self.include.clone(), self.include.join("cccl")];
        let ptx = nvrtc::compile(source, sm, &include, Output::Ptx)?;
        let bytes: Vec<u8> = ptx.into_iter().map(|c| c as u8).collect();
        let text = CStr::from_bytes_until_nul(&bytes);
        let text = text.map_err(|e| CompileError::Nvrtc(e.to_string()))?;
        Ok(text.to_string_lossy().into_owned())
    }

    /// Assembles PTX to machine code and returns the report of `ptxas -v`. `shared` is the kernel's shared memory in
    /// bytes.
    fn assemble(
        &self,
        ptx: &str,
        sm: u32,
        shared: u32,
        stem: &Path,
    ) -> Result<Compiled, ToolkitError> {
        let (input, output) = (stem.with_extension("ptx"), stem.with_extension("cubin"));
        std::fs::write(&input, ptx)?;
        let out = Command::new(&self.ptxas)
            .arg("-v")
            .arg(format!("-arch={}", target_name(sm)))
            .arg("-o")
            .args([&output, &input])
            .output()?;
        let report = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() {
            return Err(ToolkitError::Ptxas(report.into_owned()));
        }
        parse_report(&report, shared).ok_or_else(|| ToolkitError::Ptxas(report.into_owned()))
    }
}

/// Crates that generate CUDA C++, with their versions.
const CUBECL: &str = env!("FLASHOVER_CUBECL");

/// Parses the output of `ptxas -v`: `Used R registers`, `F bytes stack frame, S bytes spill stores, L bytes
/// spill loads`. `shared` is passed on to the result.
fn parse_report(report: &str, shared: u32) -> Option<Compiled> {
    let before = |text: &str, unit: &str| -> Option<u32> {
        let head = &text[..text.find(unit)?];
        head.split_whitespace().last()?.parse().ok()
    };
    Some(Compiled {
        registers: before(report, "registers")?,
        spill_stores: before(report, "bytes spill stores")?,
        spill_loads: before(report, "bytes spill loads")?,
        stack: before(report, "bytes stack frame")?,
        shared,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubecl_is_what_was_locked() {
        let parts = CUBECL;
        for part in ["cubecl-core 0.", "cubecl-cpp 0.", "cubecl-opt 0.", "pliron 0."] {
            assert!(parts.contains(part), "{part} in {parts}");
        }
    }

    #[test]
    fn ptxas_reports_are_read() {
        let report = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k' for 'sm_89'\n\
            ptxas info    : Function properties for k\n\
            \x20   16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 448 bytes cmem[0]\n";
        let want =
            Compiled { registers: 168, spill_stores: 8, spill_loads: 12, stack: 16, shared: 4096 };
        assert_eq!(parse_report(report, 4096), Some(want));
        assert_eq!(parse_report("error: nothing", 0), None);
    }
}
