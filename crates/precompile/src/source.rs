//! Generates CUDA C++ from a CubeCL kernel.

use cubecl::ir::pliron::op::Op;
use cubecl::ir::pliron::printable::Printable;
use cubecl::prelude::CubeKernel;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_server::kernel::{BufferIOAttr, CompiledKernel, KernelDefinition};

use crate::nvrtc::CompileError;

/// A kernel in CUDA C++.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) text: String,
    /// Name of the kernel in `text`.
    pub(crate) entry: String,
    /// Bytes of dynamic shared memory per launch.
    pub(crate) shared_bytes: usize,
    pub(crate) io: Option<Vec<BufferIOAttr>>,
}

/// A kernel in CubeCL's own representation. Its conversion to CUDA C++ takes far longer than the expansion.
pub(crate) struct Expanded<'a> {
    kernel: &'a dyn CubeKernel,
    definition: KernelDefinition,
    options: CompilationOptions,
}

/// Expands a kernel to its operations for compute capability `sm`.
///
/// # Errors
/// The expansion fails.
pub(crate) fn expand(kernel: &dyn CubeKernel, sm: u32) -> Result<Expanded<'_>, CompileError> {
    // Same options as in `cubecl-cuda/src/runtime.rs`.
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
    /// Returns everything that the source depends on, except CubeCL itself. The kernel is renamed to `kernel`, because
    /// its own name ends in a hash of Rust types that changes with the compiler's flags.
    pub(crate) fn text(&self) -> String {
        let KernelDefinition { body, info, settings } = &self.definition;
        let name = &settings.kernel_name;
        let module = body.state().module.get_operation();
        let text =
            format!("{}\n{info:?}\n{settings:?}\n{:?}", module.disp(body.ctx()), self.options);
        text.replace(name, "kernel")
    }

    /// Returns the number of units of a cube.
    pub(crate) fn units(&self) -> u32 {
        let dim = self.definition.settings.cube_dim;
        dim.x * dim.y * dim.z
    }

    /// Generates the same CUDA C++ as CubeCL's runtime.
    ///
    /// # Errors
    /// CubeCL cannot compile the kernel.
    pub(crate) fn source(self) -> Result<Source, CompileError> {
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
