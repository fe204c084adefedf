//! CubeCL kernel to CUDA C++.

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
    /// Name of the kernel in it.
    pub(crate) entry: String,
    /// Bytes of dynamic shared memory of a launch.
    pub(crate) shared_bytes: usize,
    pub(crate) io: Option<Vec<BufferIOAttr>>,
}

/// A kernel in CubeCL's own representation. CubeCL's passes and its printer, which take far longer, turn it into CUDA C++.
pub(crate) struct Expanded<'a> {
    kernel: &'a dyn CubeKernel,
    definition: KernelDefinition,
    options: CompilationOptions,
}

/// The kernel's operations for compute capability `sm`.
///
/// # Errors
/// An expansion that fails.
pub(crate) fn expand(kernel: &dyn CubeKernel, sm: u32) -> Result<Expanded<'_>, CompileError> {
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
    /// Everything that the source depends on except CubeCL itself. The kernel is called `kernel` there: its own name ends
    /// in a hash of Rust types, which changes with the compiler's flags.
    pub(crate) fn text(&self) -> String {
        let KernelDefinition { body, info, settings } = &self.definition;
        let name = &settings.kernel_name;
        let module = body.state().module.get_operation();
        let text =
            format!("{}\n{info:?}\n{settings:?}\n{:?}", module.disp(body.ctx()), self.options);
        text.replace(name, "kernel")
    }

    /// Units of a cube.
    pub(crate) fn units(&self) -> u32 {
        let dim = self.definition.settings.cube_dim;
        dim.x * dim.y * dim.z
    }

    /// The CUDA C++ that CubeCL's runtime generates.
    ///
    /// # Errors
    /// What CubeCL refuses.
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
