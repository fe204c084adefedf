//! CubeCL kernel to CUDA C++ to PTX to machine code.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use arch::ArchProfile;
use cubecl::__private::Runtime;
use cubecl::features::TypeUsage;
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, TargetProperties, VectorSize,
};
use cubecl::prelude::CubeKernel;
use cubecl::profile::TimingMethod;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaCmmaCompiler;
use cudarc::nvrtc::CompileOptions;

use crate::known::{self, Compiled, Known};

/// What a kernel's machine code uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Registers of one unit.
    pub registers: u32,
    /// Bytes that spilled out of registers.
    pub spill_stores: u32,
    pub spill_loads: u32,
    /// Bytes of local memory of one unit, spills included.
    pub stack: u32,
    /// Bytes of shared memory of one cube, which CubeCL asks for at the launch.
    pub shared: u32,
    /// Units of one cube.
    pub units: u32,
}

impl Usage {
    /// Bytes that spilled, written and read.
    pub fn spilled(&self) -> u32 {
        self.spill_stores + self.spill_loads
    }
}

/// Why a kernel has no machine code.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error(
        "{path} is missing\nhint: point --cuda-home at a CUDA 13 toolkit, or let cargo xtask fetch it"
    )]
    Missing { path: PathBuf },
    #[error(transparent)]
    Source(#[from] ahead::CompileError),
    #[error("NVRTC: {0}")]
    Nvrtc(String),
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
    /// Versions of both, and of CubeCL.
    versions: String,
}

impl Toolkit {
    /// The toolkit under `home`; NVRTC itself is found by the dynamic linker.
    ///
    /// # Errors
    /// A file that is not there.
    pub fn at(home: &Path) -> Result<Self, CompileError> {
        let (ptxas, include) = (home.join("bin/ptxas"), home.join("include"));
        for path in [&ptxas, &include.join("cuda_fp16.h")] {
            if !path.exists() {
                return Err(CompileError::Missing { path: path.clone() });
            }
        }
        // SAFETY: only tries to load each candidate name.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            return Err(CompileError::Missing { path: PathBuf::from("libnvrtc.so") });
        }
        let out = Command::new(&ptxas).arg("--version").output()?;
        let assembler = String::from_utf8_lossy(&out.stdout);
        let assembler = assembler.lines().last().unwrap_or_default();
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is there, and both places may be written.
        unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|e| CompileError::Nvrtc(format!("{e:?}")))?;
        let versions = format!("{}, nvrtc {major}.{minor}, ptxas {assembler}", cubecl());
        Ok(Self { ptxas, include, versions })
    }

    /// What `kernel` uses on compute capability `sm`: as `known`, or else compiled. With `dump` it is always
    /// compiled, and `dump.cu`, `dump.ptx` and `dump.cubin` are kept.
    ///
    /// # Errors
    /// The stage that refused it, with its words.
    pub fn usage(
        &self,
        kernel: &dyn CubeKernel,
        sm: u32,
        dump: Option<&Path>,
        known: &Known,
    ) -> Result<Usage, CompileError> {
        let expanded = ahead::expand(kernel, sm)?;
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

    /// CUDA C++ to PTX.
    fn ptx(&self, source: &str, sm: u32) -> Result<String, CompileError> {
        let options = CompileOptions {
            include_paths: vec![
                self.include.display().to_string(),
                self.include.join("cccl").display().to_string(),
            ],
            options: options(sm),
            ..CompileOptions::default()
        };
        let ptx = cudarc::nvrtc::compile_ptx_with_opts(source, options)
            .map_err(|e| CompileError::Nvrtc(format!("{e:?}")))?;
        Ok(ptx.to_src())
    }

    /// PTX, of a kernel with `shared` bytes, to machine code, whose resource report `ptxas -v` prints.
    fn assemble(
        &self,
        ptx: &str,
        sm: u32,
        shared: u32,
        stem: &Path,
    ) -> Result<Compiled, CompileError> {
        let (input, output) = (stem.with_extension("ptx"), stem.with_extension("cubin"));
        std::fs::write(&input, ptx)?;
        let out = Command::new(&self.ptxas)
            .arg("-v")
            .arg(format!("-arch={}", ahead::target_name(sm)))
            .arg("-o")
            .args([&output, &input])
            .output()?;
        let report = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() {
            return Err(CompileError::Ptxas(report.into_owned()));
        }
        parse_report(&report, shared).ok_or_else(|| CompileError::Ptxas(report.into_owned()))
    }
}

/// What makes CUDA C++ of a kernel, and its versions, as they were locked.
fn cubecl() -> String {
    let locked = include_str!("../../../Cargo.lock").split("[[package]]").skip(1);
    let names = locked.filter_map(|package| {
        let field = |name: &str| package.lines().find_map(|l| l.strip_prefix(name));
        let (name, version) = (field("name = ")?, field("version = ")?);
        let part = ["\"cubecl", "\"pliron"].iter().any(|of| name.starts_with(of));
        part.then(|| format!("{name} {version}").replace('"', ""))
    });
    names.collect::<Vec<_>>().join(", ")
}

/// Of NVRTC.
fn options(sm: u32) -> Vec<String> {
    vec![format!("--gpu-architecture={}", ahead::target_name(sm)), "-lineinfo".into()]
}

/// Reads `ptxas -v`: `Used R registers`, `F bytes stack frame, S bytes spill stores, L bytes spill
/// loads`, of a kernel with `shared` bytes.
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

/// Properties of a CUDA card as CubeCL's runtime would report them.
pub(crate) fn properties(arch: &ArchProfile) -> Arc<DeviceProperties> {
    let sm = arch.compute_capability.unwrap_or(89);
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: arch.max_shared_bytes as usize,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: arch.max_units_per_cube,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: arch.processors,
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let memory = MemoryDeviceProperties::new(arch.memory_bytes.unwrap_or(8 << 30), 512);
    let identity = DeviceIdentity {
        name: arch.name.clone(),
        fingerprint: format!("ptx_sm{sm}"),
        physical: None,
    };
    let mut out = DeviceProperties::new(
        cubecl::features::Features::default(),
        memory,
        hardware,
        TimingMethod::Device,
        identity,
    );
    cubecl_cpp::register_supported_types(&mut out);
    let card = CudaArchitecture { version: sm, tensor_cores: true };
    let cmma = CudaCmmaCompiler::Cpp.supported_cmma_combinations(&card);
    cubecl_cpp::shared::register_wmma_features(cmma, &mut out);
    let mma = cubecl_cpp::cuda::supported_mma_combinations(&card);
    cubecl_cpp::shared::register_mma_features(mma, &mut out);
    out.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    out.features.copy_async = arch.async_copy;
    out.features.memory_reinterpret = true;
    out.features.alignment = true;
    for half in [FloatKind::F16, FloatKind::BF16] {
        out.features.matmul.ldmatrix.insert(ElemType::Float(half));
    }
    Arc::new(out)
}

/// How CUDA lays out matrix fragments.
pub(crate) fn target_properties() -> Arc<TargetProperties> {
    Arc::new(cubecl::cuda::CudaRuntime::target_properties())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubecl_is_what_was_locked() {
        let parts = cubecl();
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
