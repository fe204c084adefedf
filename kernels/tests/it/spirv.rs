//! Compiles kernels with cooperative matrices to SPIR-V. No CI device has such matrices, but any can compile
//! for them.

use std::sync::Arc;

use arch::{ArchProfile, Backend, CubeMma, DType, MmaShape};
use cubecl::features::{Features, MmaConfig, TypeUsage};
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, IntKind,
    MemoryDeviceProperties, TargetProperties, UIntKind,
};
use cubecl::profile::TimingMethod;
use cubecl::{Compiler, CubeKernel, WgpuCompilationOptions};
use cubecl_spirv::SpirvCompiler;
use kernels::attention::backward::{AttentionBackward, BackwardProblem, SideConfig};
use kernels::attention::{Attention, AttentionConfig, AttentionProblem};
use kernels::matmul::{Layout, Matmul, MatmulConfig, MatmulProblem, Precision};
use kernels::nf4::{Nf4Matmul, Nf4MatmulConfig, Nf4MatmulProblem, Weight};
use tune::Kernel;

/// Returns a card with `VK_KHR_cooperative_matrix`, as NVIDIA's driver reports it.
fn card() -> ArchProfile {
    let mut card = ArchProfile::recorded("h200").expect("recorded");
    (card.backend, card.max_shared_bytes) = (Backend::Vulkan, 48 << 10);
    card.cmma = [DType::F16, DType::Bf16]
        .map(|ab| MmaShape { ab, acc: DType::F32, m: 16, n: 16, k: 16 })
        .into();
    card.cube_mma = card.cmma.iter().map(|s| CubeMma::new(*s, None)).collect();
    card
}

fn properties(card: &ArchProfile) -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 64,
        max_shared_memory_size: card.max_shared_bytes as usize,
        max_cube_count: (65_535, 65_535, 65_535),
        max_units_per_cube: card.max_units_per_cube,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        max_vector_size: 4,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity =
        DeviceIdentity { name: String::new(), fingerprint: String::new(), physical: None };
    let memory = MemoryDeviceProperties::new(8 << 30, 256);
    let mut out = DeviceProperties::new(
        Features::default(),
        memory,
        hardware,
        TimingMethod::Device,
        identity,
    );
    let float = ElemType::Float;
    let words =
        [ElemType::Int(IntKind::I32), ElemType::UInt(UIntKind::U32), ElemType::UInt(UIntKind::U8)];
    for elem in
        [FloatKind::F16, FloatKind::BF16, FloatKind::F32].map(float).into_iter().chain(words)
    {
        for usage in [TypeUsage::Conversion, TypeUsage::Arithmetic, TypeUsage::Buffer] {
            out.register_type_usage(elem, usage);
        }
    }
    for ab in [FloatKind::F16, FloatKind::BF16].map(float) {
        let cd_type = float(FloatKind::F32);
        out.features.matmul.cmma.insert(MmaConfig {
            a_type: ab,
            b_type: ab,
            cd_type,
            m: 16,
            n: 16,
            k: 16,
        });
    }
    Arc::new(out)
}

/// Compiles kernels to SPIR-V text, and writes it to the folder `FLASHOVER_SPIRV` if that is set.
fn compiled(name: &str, kernels: Vec<Box<dyn CubeKernel>>) -> Vec<String> {
    let mut options = WgpuCompilationOptions {
        supports_vulkan_compiler: true,
        ..WgpuCompilationOptions::default()
    };
    options.vulkan.max_spirv_version = (1, 6);
    options.vulkan.max_vector_size = 4;
    options.vulkan.supports_explicit_smem = true;
    let text = |(i, kernel): (usize, Box<dyn CubeKernel>)| {
        let spirv = SpirvCompiler.compile(kernel.define(), &options);
        let text = spirv.unwrap_or_else(|why| panic!("{name}: {why}")).to_string();
        if let Ok(folder) = std::env::var("FLASHOVER_SPIRV") {
            std::fs::write(format!("{folder}/{name}-{i}.spvasm"), &text).expect("a folder");
        }
        text
    };
    kernels.into_iter().enumerate().map(text).collect()
}

#[test]
fn attention_compiles_for_cooperative_matrices() {
    let card = card();
    let (properties, target) =
        (properties(&card), Arc::new(TargetProperties { mma: Default::default() }));
    let mut all = 0;
    for (dtype, head_dim, seqs, bent) in [
        (DType::F16, 128, [256, 256], false),
        (DType::Bf16, 64, [133, 201], false),
        (DType::F16, 80, [90, 61], true),
        (DType::Bf16, 256, [90, 61], false),
    ] {
        let dense = AttentionProblem::dense(1, [2, 1], seqs, head_dim, dtype).expect("valid sizes");
        let softcap = bent.then_some(30.0);
        let problem = AttentionProblem { causal: true, lse: true, softcap, ..dense };
        let configs = Attention::candidates(&card, &problem);
        assert!(configs.iter().all(|c| matches!(c, AttentionConfig::Subgroup(_))), "{configs:?}");
        for config in configs {
            let programs = Attention::programs(&card, &problem, &config, &properties, &target);
            for text in compiled(&format!("attention-{dtype}-{head_dim}-{all}"), programs) {
                assert!(text.contains("OpCooperativeMatrixMulAddKHR"), "{config:?}");
                all += 1;
            }
        }
    }
    assert!(all > 8, "{all}");
}

#[test]
fn gradients_compile_for_cooperative_matrices() {
    let card = card();
    let (properties, target) =
        (properties(&card), Arc::new(TargetProperties { mma: Default::default() }));
    let mut all = 0;
    for (dtype, head_dim, heads, seqs, bent) in [
        (DType::F16, 128, [2, 2], [256, 256], false),
        (DType::Bf16, 64, [4, 1], [133, 201], true),
        (DType::F16, 256, [2, 1], [90, 61], false),
    ] {
        let dense = AttentionProblem::dense(1, heads, seqs, head_dim, dtype).expect("valid sizes");
        let softcap = bent.then_some(30.0);
        let forward = AttentionProblem { causal: true, lse: true, softcap, ..dense };
        let problem = BackwardProblem::from_forward(forward).expect("it stores its log-sum-exp");
        for config in AttentionBackward::candidates(&card, &problem) {
            assert!(matches!(config.keys, SideConfig::Subgroup(_)), "{config:?}");
            let programs =
                AttentionBackward::programs(&card, &problem, &config, &properties, &target);
            // Programs: statistics, dq, dk, dv.
            assert_eq!(programs.len(), 4, "{config:?}");
            let texts = compiled(&format!("gradients-{dtype}-{head_dim}-{all}"), programs);
            for text in &texts[1..] {
                assert!(text.contains("OpCooperativeMatrixMulAddKHR"), "{config:?}");
            }
            all += 1;
        }
    }
    assert!(all > 12, "{all}");
}

#[test]
fn products_compile_for_cooperative_matrices() {
    let card = card();
    let (properties, target) =
        (properties(&card), Arc::new(TargetProperties { mma: Default::default() }));
    let (mut all, mut cubes, mut cut) = (0, 0, 0);
    for (precision, batch, sizes, layouts) in [
        (Precision::F16, 1, [1024, 1024, 1024], [Layout::Row, Layout::Col]),
        (Precision::Bf16, 1, [1024, 1024, 1024], [Layout::Row, Layout::Row]),
        (Precision::F16, 1, [133, 77, 59], [Layout::Col, Layout::Row]),
        (Precision::Bf16, 3, [24, 136, 4096], [Layout::Row, Layout::Col]),
    ] {
        let problem = MatmulProblem::dense(batch, sizes, layouts, precision).expect("valid sizes");
        for config in Matmul::candidates(&card, &problem) {
            let name = match config {
                MatmulConfig::Workgroup(_) => "workgroup",
                MatmulConfig::Pipelined(_) => "pipelined",
                _ => continue,
            };
            cubes += usize::from(name == "workgroup");
            let programs = Matmul::programs(&card, &problem, &config, &properties, &target);
            let texts = compiled(&format!("matmul-{precision:?}-{name}-{all}"), programs);
            assert!(texts[0].contains("OpCooperativeMatrixMulAddKHR"), "{config:?}");
            // A second program adds partial sums.
            cut += usize::from(texts.len() > 1);
            all += 1;
        }
    }
    assert!(cubes > 4 && all - cubes > 8 && cut > 2, "{cubes} of {all}, {cut} cut");
}

#[test]
fn products_with_codes_compile_for_cooperative_matrices() {
    let card = card();
    let (properties, target) =
        (properties(&card), Arc::new(TargetProperties { mma: Default::default() }));
    let (mut all, mut cut) = (0, 0);
    for (dtype, m, [n, k], nested, glu) in [
        (DType::Bf16, 16, [4096, 4096], true, false),
        (DType::F16, 5, [264, 320], false, false),
        (DType::Bf16, 100, [4096, 4096], true, true),
        (DType::F16, 33, [152, 8192], false, true),
    ] {
        let weight = Weight::new(n, k, 64, nested).expect("a weight");
        let problem = Nf4MatmulProblem::new(m, weight, dtype).expect("rows");
        let problem = if glu { problem.gated_by_half().expect("halves") } else { problem };
        for config in Nf4Matmul::candidates(&card, &problem) {
            let Nf4MatmulConfig::Subgroup(c) = config else { continue };
            let programs = Nf4Matmul::programs(&card, &problem, &config, &properties, &target);
            assert_eq!(programs.len(), if c.parts > 1 { 2 } else { 1 }, "{config:?}");
            let text = compiled(&format!("nf4-{dtype}-{m}-{all}"), programs);
            assert!(text[0].contains("OpCooperativeMatrixMulAddKHR"), "{config:?}");
            cut += usize::from(c.parts > 1);
            all += 1;
        }
    }
    assert!(all > 12 && cut > 4, "{all} {cut}");
}
