//! Properties of cards that the machine does not have, as CubeCL's runtime would report them.

use std::path::PathBuf;
use std::sync::Arc;

use arch::ArchProfile;
use cubecl::features::TypeUsage;
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, VectorSize,
};
use cubecl::profile::TimingMethod;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaCmmaCompiler;

/// Returns the properties of a CUDA card as CubeCL's runtime would report them.
pub fn properties(arch: &ArchProfile) -> Arc<DeviceProperties> {
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

/// Returns CUDA's layout of matrix fragments.
#[cfg(feature = "cuda")]
pub fn target_properties() -> Arc<cubecl::ir::TargetProperties> {
    use cubecl::__private::Runtime;
    Arc::new(cubecl::cuda::CudaRuntime::target_properties())
}

/// Returns the folders of CUDA's headers.
#[cfg(feature = "cuda")]
pub(crate) fn headers() -> Vec<PathBuf> {
    use cubecl::cuda::install;
    vec![install::include_path(), install::cccl_include_path()]
}

/// Returns no folder: without CUDA, no device has a store to fill.
#[cfg(not(feature = "cuda"))]
pub(crate) const fn headers() -> Vec<PathBuf> {
    Vec::new()
}
