//! CUDA kernels compiled ahead of their first launch, on as many cores as there are.
//!
//! CubeCL compiles a kernel when it is first launched, on the one thread that serves the device: a
//! tuner with a dozen candidates waits for a dozen compilations in a row. [`compile`] runs NVRTC on
//! every core and puts the machine code into the store in which CubeCL looks before it compiles
//! (`[compilation] cache`, which `arch` turns on). What is missing from the store, for whatever reason,
//! CubeCL compiles itself.

use std::ffi::{CStr, CString, c_char};

use arch::{Backend, Device};
use cubecl::cuda::install;
use cubecl::ir::pliron::op::Op;
use cubecl::ir::pliron::printable::Printable;
use cubecl::prelude::CubeKernel;
use cubecl::prelude::KernelId;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_server::compiler::{KernelCacheKey, build_id_hash, compilation_store, store_compiled};
use cubecl_server::kernel::{BufferIOAttr, CompiledKernel, KernelDefinition};
use cudarc::nvrtc::{result, sys};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Why a kernel has no machine code.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CompileError {
    #[error("CubeCL: {0}")]
    CubeCl(String),
    #[error("NVRTC: {0}")]
    Nvrtc(String),
}

impl CompileError {
    fn cubecl(error: &dyn std::fmt::Debug) -> Self {
        Self::CubeCl(format!("{error:?}"))
    }
}

/// A kernel in CUDA C++.
#[derive(Debug)]
pub struct Source {
    pub text: String,
    /// Name of the kernel in it.
    pub entry: String,
    /// Bytes of dynamic shared memory of a launch.
    pub shared_bytes: usize,
    io: Option<Vec<BufferIOAttr>>,
}

/// A kernel in CubeCL's own representation, of which passes and a printer make CUDA C++, by far the longer part.
pub struct Expanded<'a> {
    kernel: &'a dyn CubeKernel,
    definition: KernelDefinition,
    options: CompilationOptions,
}

/// The kernel's operations for compute capability `sm`.
///
/// # Errors
/// An expansion that fails.
pub fn expand(kernel: &dyn CubeKernel, sm: u32) -> Result<Expanded<'_>, CompileError> {
    // The options of `cubecl-cuda/src/runtime.rs`.
    let options = CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            fast_math: true,
            fast_tanh: true,
            dp4a: true,
            clusters: sm >= 90,
            elect_sync: sm >= 90,
        },
        ..CompilationOptions::default()
    };
    let definition = cubecl::define_kernel(kernel).map_err(|e| CompileError::cubecl(&e))?;
    Ok(Expanded { kernel, definition, options })
}

impl Expanded<'_> {
    /// Everything that the source depends on beside CubeCL itself, the kernel called `kernel`: its own name ends in a hash
    /// of Rust types, which changes with the compiler's flags.
    pub fn text(&self) -> String {
        let KernelDefinition { body, info, settings } = &self.definition;
        let name = &settings.kernel_name;
        let module = body.state().module.get_operation();
        let text =
            format!("{}\n{info:?}\n{settings:?}\n{:?}", module.disp(body.ctx()), self.options);
        text.replace(name, "kernel")
    }

    /// Units of a cube.
    pub fn units(&self) -> u32 {
        let dim = self.definition.settings.cube_dim;
        dim.x * dim.y * dim.z
    }

    /// The CUDA C++ that CubeCL's runtime generates.
    ///
    /// # Errors
    /// What CubeCL refuses.
    pub fn source(self) -> Result<Source, CompileError> {
        let mut compiler = CppCompiler::<Cuda>::default();
        let compiled =
            CompiledKernel::compile(self.kernel, self.definition, &mut compiler, &self.options)
                .map_err(|e| CompileError::cubecl(&e))?;
        Ok(Source {
            shared_bytes: compiled.repr.as_ref().map_or(0, |r| r.shared_memory_size),
            text: compiled.source,
            entry: compiled.entrypoint_name,
            io: compiled.io,
        })
    }
}

/// NVRTC's name of the architecture: CubeCL compiles for the specific variant from 9.0 up.
pub fn target_name(sm: u32) -> String {
    if sm >= 90 { format!("sm_{sm}a") } else { format!("sm_{sm}") }
}

/// What CubeCL's CUDA server keeps of a compiled kernel: the same fields in the same order as its own
/// `PtxCacheEntry`, which is private. `ptx` is whatever the driver's loader takes, here machine code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
    #[serde(default)]
    io: Option<Vec<BufferIOAttr>>,
}

/// Compiles the kernels of launches 0 to `count` on `device`, those that the store lacks. One that fails
/// is left to its launch, which reports why. Does nothing but on CUDA.
pub fn compile(
    device: &Device,
    count: usize,
    kernels: impl Fn(usize) -> Vec<Box<dyn CubeKernel>> + Sync,
) {
    let (Backend::Cuda, Some(sm)) = (device.backend(), device.profile().compute_capability) else {
        return;
    };
    let store = compilation_store::<KernelCacheKey, Entry>("cuda", format!("ptx_sm{sm}-cpp"));
    let Some(mut store) = store else { return };
    let key = |id: &KernelId| KernelCacheKey::new(id, build_id_hash());
    let mut missing = Vec::new();
    for i in 0..count {
        for (j, kernel) in kernels(i).iter().enumerate() {
            if store.get_mut(&key(&kernel.id())).is_none() {
                missing.push((i, j));
            }
        }
    }
    let compiled: Vec<_> = missing
        .into_par_iter()
        .filter_map(|(i, j)| {
            let kernel = kernels(i).swap_remove(j);
            match machine_code(kernel.as_ref(), sm) {
                Ok(entry) => Some((key(&kernel.id()), entry)),
                Err(e) => {
                    log::info!("not compiled ahead: {}: {e}", kernel.name());
                    None
                }
            }
        })
        .collect();
    for (key, entry) in compiled {
        store_compiled(&mut store, key, entry);
    }
}

fn machine_code(kernel: &dyn CubeKernel, sm: u32) -> Result<Entry, CompileError> {
    let source = expand(kernel, sm)?.source()?;
    Ok(Entry {
        ptx: nvrtc(&source.text, sm)?,
        entrypoint_name: source.entry,
        shared_mem_bytes: source.shared_bytes,
        io: source.io,
    })
}

/// CUDA C++ to machine code, with the options of CubeCL's runtime.
fn nvrtc(text: &str, sm: u32) -> Result<Vec<c_char>, CompileError> {
    let failed = |e: &dyn std::fmt::Display| CompileError::Nvrtc(e.to_string());
    let text = CString::new(text).map_err(|e| failed(&e))?;
    let include = |path: std::path::PathBuf| format!("--include-path={}", path.display());
    let options = [
        format!("--gpu-architecture={}", target_name(sm)),
        include(install::include_path()),
        include(install::cccl_include_path()),
        "-lineinfo".to_owned(),
    ];
    let program = result::create_program(&text, None).map_err(|e| failed(&e))?;
    // SAFETY: `program` is valid until it is destroyed below, and nothing else holds it; the code
    // buffer has the size that NVRTC asked for.
    unsafe {
        let outcome = match result::compile_program(program, &options) {
            Ok(()) => cubin(program),
            Err(_) => Err(match result::get_program_log(program) {
                Ok(log) => failed(&CStr::from_ptr(log.as_ptr()).to_string_lossy()),
                Err(e) => failed(&e),
            }),
        };
        result::destroy_program(program).map_err(|e| failed(&e))?;
        outcome
    }
}

/// # Safety
/// `program` was compiled for a real architecture.
unsafe fn cubin(program: sys::nvrtcProgram) -> Result<Vec<c_char>, CompileError> {
    let failed = |e: result::NvrtcError| CompileError::Nvrtc(e.to_string());
    let mut size = 0;
    // SAFETY: the caller's promise; `size` and `code` are ours, and `code` has `size` bytes.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &raw mut size).result().map_err(failed)?;
        let mut code = vec![0; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr()).result().map_err(failed)?;
        Ok(code)
    }
}
