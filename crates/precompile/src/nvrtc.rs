//! Compiles CUDA C++ to PTX or machine code with NVRTC.

use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;

use cudarc::nvrtc::{result, sys};

/// The reason that a kernel could not be compiled.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CompileError {
    #[error("CubeCL: {0}")]
    CubeCl(String),
    #[error("NVRTC: {0}")]
    Nvrtc(String),
}

impl CompileError {
    pub(crate) fn cubecl(error: &dyn std::fmt::Debug) -> Self {
        Self::CubeCl(format!("{error:?}"))
    }

    fn nvrtc(error: impl std::fmt::Display) -> Self {
        Self::Nvrtc(error.to_string())
    }
}

/// Output format of a compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// PTX text, zero-terminated.
    Ptx,
    /// Machine code.
    Cubin,
}

/// Returns NVRTC's name of the architecture. From 9.0 on, CubeCL compiles for the architecture-specific variant.
pub(crate) fn target_name(sm: u32) -> String {
    if sm >= 90 { format!("sm_{sm}a") } else { format!("sm_{sm}") }
}

/// Returns NVRTC's options for compute capability `sm` as in CubeCL's runtime, without include folders.
pub(crate) fn options(sm: u32) -> Vec<String> {
    vec![format!("--gpu-architecture={}", target_name(sm)), "-lineinfo".into()]
}

/// Returns the version of the library, such as `13.0`; `None` if the dynamic linker finds no library.
///
/// # Errors
/// The library reports an error.
pub(crate) fn version() -> Result<Option<String>, CompileError> {
    // SAFETY: only tries to load each candidate name.
    if !unsafe { sys::is_culib_present() } {
        return Ok(None);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded, and both pointers are valid for writes.
    let status = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    status.result().map_err(|e| CompileError::Nvrtc(format!("{e:?}")))?;
    Ok(Some(format!("{major}.{minor}")))
}

/// Compiles CUDA C++ with the headers in the folders `include`.
///
/// # Errors
/// Compilation fails; the error contains NVRTC's log.
pub(crate) fn compile(
    text: &str,
    sm: u32,
    include: &[PathBuf],
    output: Output,
) -> Result<Vec<c_char>, CompileError> {
    let text = CString::new(text).map_err(CompileError::nvrtc)?;
    let mut options = options(sm);
    options.extend(include.iter().map(|path| format!("--include-path={}", path.display())));
    let program = result::create_program(&text, None).map_err(CompileError::nvrtc)?;
    // SAFETY: `program` is valid until it is destroyed below, and nothing else holds it.
    unsafe {
        let outcome = match result::compile_program(program, &options) {
            Ok(()) if output == Output::Ptx => {
                result::get_ptx(program).map_err(CompileError::nvrtc)
            }
            Ok(()) => cubin(program),
            Err(_) => Err(match result::get_program_log(program) {
                Ok(log) => CompileError::nvrtc(CStr::from_ptr(log.as_ptr()).to_string_lossy()),
                Err(e) => CompileError::nvrtc(e),
            }),
        };
        result::destroy_program(program).map_err(CompileError::nvrtc)?;
        outcome
    }
}

/// Returns the machine code of a compiled program.
///
/// # Safety
/// `program` is valid and was compiled for a real architecture.
unsafe fn cubin(program: sys::nvrtcProgram) -> Result<Vec<c_char>, CompileError> {
    let failed = |e: result::NvrtcError| CompileError::nvrtc(e);
    let mut size = 0;
    // SAFETY: the caller guarantees a valid program; `size` and `code` are local, and `code` has `size` bytes.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &raw mut size).result().map_err(failed)?;
        let mut code = vec![0; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr()).result().map_err(failed)?;
        Ok(code)
    }
}
