//! Kernels on devices without a GPU: the CPU runtime, and WGSL on a software rasteriser if one is installed.
//! `edge_cases` checks every kernel of the suite on the CPU; `flashover-bench verify` does the same on every
//! backend.

mod edge_cases;
mod random;
mod spirv;

use std::io::Write;

use arch::{ArchProfile, Backend, DType, Device};
use cubecl::launched::LaunchedKernels;
use kernels::attention::backward::AttentionBackward;
use kernels::int8::{Int8Quantize, QuantizeProblem};
use kernels::matmul::{
    Activation, Epilogue, Layout, Matmul, MatmulConfig, MatmulProblem, Precision,
};
use kernels::nf4::{Codebook, Nf4Matmul, Nf4MatmulProblem, Order, Weight, quantize};
use kernels::norm::{Norm, NormKind};
use kernels::quantized::QuantizeError;
use suite::KernelSuite;
use suite::matmul::{EdgeCase, Inputs};
use tune::{Kernel, Queue, TuneCache};

/// Opens `backend`, or reports why the test is skipped. The report bypasses the test harness, which hides the
/// output of passing tests. `cargo xtask test` counts these lines.
fn device(backend: Backend) -> Option<Device> {
    match Device::open(backend) {
        Ok(device) => Some(device),
        Err(why) => {
            let why = why.to_string();
            let why = why.lines().next().unwrap_or_default();
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("test");
            writeln!(std::io::stdout(), "skipped: {test}: {why}").expect("somebody reads");
            None
        }
    }
}

#[test]
fn more_blocks_than_one_dimension_of_a_grid_holds_are_all_multiplied() {
    let Some(device) = device(Backend::WebGpu) else { return };
    let rows = [Layout::Row, Layout::Row];
    // Blocks of the baseline config have 32 rows; one dimension of a grid holds 65 535 blocks.
    let problem = MatmulProblem::dense(1, [65_537 * 32, 1, 1], rows, Precision::F32);
    let case = EdgeCase { problem: problem.expect("valid sizes"), inputs: Inputs::Normal(3) };
    let config = Matmul::baseline(device.profile(), &case.problem).expect("any GPU has one");
    let verdict = Matmul::verify(&device, &case, &config).expect("runs");
    assert!(verdict.comparison.passed, "{}", verdict.comparison);
}

#[test]
fn every_cpu_config_is_right() {
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    // Halves differ only in loads and stores, and each config takes seconds to compile.
    for (precision, every) in [(Precision::F32, 1), (Precision::Bf16, 5)] {
        for case in Matmul::config_cases(precision).into_iter().step_by(every) {
            let configs = Matmul::candidates(device.profile(), &case.problem);
            let served = Matmul::baseline(device.profile(), &case.problem).is_ok();
            assert_eq!(!configs.is_empty(), served, "{case:?}");
            for config in configs {
                let verdict = Matmul::verify(&device, &case, &config).expect("runs");
                assert!(verdict.comparison.passed, "{case:?} {config:?}: {}", verdict.comparison);
            }
        }
    }
}

#[test]
fn a_precision_that_the_device_lacks_has_no_candidate() {
    let arch = ArchProfile::recorded("rtx4090").expect("recorded");
    let problem =
        MatmulProblem::dense(1, [64; 3], [Layout::Row; 2], Precision::Bf16).expect("valid");
    let mut without = arch.clone();
    without.dtypes.remove(&DType::Bf16);
    assert!(!Matmul::candidates(&arch, &problem).is_empty());
    assert!(Matmul::candidates(&without, &problem).is_empty());
}

/// f16 accumulators are a precision of their own, and only matrix instructions have them.
#[test]
fn f16_sums_are_for_instructions_that_have_them() {
    let arch = ArchProfile::recorded("rtx4090").expect("recorded");
    let problem =
        MatmulProblem::dense(1, [64; 3], [Layout::Row; 2], Precision::F16Acc16).expect("valid");
    let all = Matmul::candidates(&arch, &problem);
    assert!(!all.is_empty() && all.iter().all(|c| matches!(c, MatmulConfig::Mma(_))), "{all:?}");
    let mut without = arch.clone();
    without.mma.retain(|shape| shape.acc != DType::F16);
    assert!(Matmul::candidates(&without, &problem).is_empty());
    let f16 = MatmulProblem { precision: Precision::F16, ..problem };
    let fma = Matmul::baseline(&arch, &f16).expect("any GPU has one");
    assert!(Matmul::check(&arch, &problem, &fma).is_err(), "{fma:?} sums in f32");
}

#[test]
fn a_cached_config_that_does_not_fit_is_said_and_passed_over() {
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let problem = MatmulProblem::dense(1, [8; 3], [Layout::Row; 2], Precision::F32).expect("valid");
    let key = tune::Key::new::<Matmul>(&device.profile().id, &problem);
    let line = serde_json::json!({
        "format": 1, "kernel": key.kernel, "version": key.version, "arch_id": key.arch_id,
        "bucket": key.bucket, "problem": null, "config": { "path": "alien" }, "median_ns": 1.0,
        "timings": [], "commit": "", "date": "2026-01-01T00:00:00Z",
    });
    let mut cache = TuneCache::default();
    let merged = cache.merge_text(&line.to_string(), "test").expect("no file to write");
    assert_eq!((merged.results, merged.taken), (1, 1));
    let (commit, date) = (String::new(), String::new());
    let policy = tune::Policy::Default;
    let mut tuner = tune::Tuner { device: &device, cache, policy, commit, date };
    let choice = tuner.choose::<Matmul>(&problem).expect("the CPU multiplies f32");
    assert_eq!(choice.source, tune::Source::Default);
    let warnings = tuner.cache.warnings();
    assert!(warnings.len() == 1 && warnings[0].to_string().contains("alien"), "{warnings:?}");
    tuner.policy = tune::Policy::Frozen;
    let refused = tuner.choose::<Matmul>(&problem).expect_err("nothing else is known").to_string();
    assert!(refused.contains("no config fits") && refused.contains("alien"), "{refused}");
}

#[test]
fn shipped_configs_are_of_this_version_and_fit_their_device() {
    let card = |name| ArchProfile::recorded(name).expect("recorded");
    let cuda = card("h200").restrict("rtx4090", &card("rtx4090"));
    let cache = TuneCache::shipped();
    let mut served = std::collections::BTreeSet::new();
    for (entry, _) in cache.entries() {
        let kernel = suite::kernel(&entry.key.kernel).expect("a kernel of the suite");
        let here = entry.key.arch_id == cuda.id;
        let accepted = kernel.accepts(entry, here.then_some(&cuda));
        accepted.unwrap_or_else(|why| panic!("{}: {why}", entry.key));
        if here {
            served.insert(kernel.name());
        }
    }
    for kernel in suite::KERNELS {
        assert!(served.contains(kernel.name()), "no shipped result for {}", kernel.name());
    }
}

/// CubeCL looks up precompiled programs by this hash when a kernel is launched.
#[test]
fn programs_are_those_of_the_launch() {
    fn check<K: Kernel>(device: &Device, problem: &K::Problem) {
        let client = device.client();
        let (properties, target) = (client.properties_shared(), client.target_properties_shared());
        let config = K::baseline(device.profile(), problem).expect("any device has one");
        let programs = K::programs(device.profile(), problem, &config, &properties, &target);
        let queue = Queue::Device(device);
        let operands = K::operands(&queue, problem, 1);
        let scratch = K::scratch(device, problem, &config);
        let launched = LaunchedKernels::new();
        K::launch(&queue, problem, &config, &operands, scratch.as_ref());
        let launched = launched.finish();
        assert!(!programs.is_empty());
        for program in programs {
            assert!(launched.contains(&program.id().stable_hash()), "{}", program.name());
        }
    }
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let plain = MatmulProblem::dense(1, [7, 9, 11], [Layout::Row; 2], Precision::F32);
    check::<Matmul>(&device, &plain.expect("valid"));
    let grouped = MatmulProblem::grouped(3, [7, 9, 11], Layout::Row, Precision::F32);
    check::<Matmul>(&device, &grouped.expect("valid"));
    let weight = Weight::new(48, 128, 64, true).expect("valid");
    check::<Nf4Matmul>(&device, &Nf4MatmulProblem::new(5, weight, DType::F32).expect("rows"));
    let int8 = kernels::int8::Weight::new(48, 128).expect("valid");
    check::<Int8Quantize>(&device, &QuantizeProblem { weight: int8, dtype: DType::F32 });
}

/// CubeCL caches kernels by this hash: two kernels with the same hash are one kernel to it.
#[test]
fn every_epilogue_is_another_program_and_so_are_groups() {
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let client = device.client();
    let (properties, target) = (client.properties_shared(), client.target_properties_shared());
    let plain = MatmulProblem::dense(1, [8; 3], [Layout::Row; 2], Precision::F32).expect("valid");
    let config = Matmul::baseline(device.profile(), &plain).expect("the CPU multiplies f32");
    let mut hashes = std::collections::BTreeSet::new();
    let mut count = 0;
    for activation in [None].into_iter().chain(Activation::SMOOTH.map(Some)) {
        for flags in 0..16 {
            let [bias, gate, residual, pre_activation] = [1, 2, 4, 8].map(|flag| flags & flag > 0);
            let slope = activation.filter(|_| gate && pre_activation);
            let own = Epilogue { bias, pre_activation, activation, gate, ..Epilogue::default() };
            let epilogue = Epilogue { slope, residual, ..own };
            for out in [DType::F32, DType::F16] {
                let problem = MatmulProblem { epilogue, out, ..plain };
                let arch = device.profile();
                let programs = Matmul::programs(arch, &problem, &config, &properties, &target);
                hashes.insert(programs[0].id().stable_hash());
                count += 1;
            }
        }
    }
    let grouped = MatmulProblem::grouped(2, [8; 3], Layout::Row, Precision::F32).expect("valid");
    let programs = Matmul::programs(device.profile(), &grouped, &config, &properties, &target);
    hashes.insert(programs[0].id().stable_hash());
    assert_eq!(hashes.len(), count + 1);
}

#[test]
fn a_weight_with_infinities_is_not_quantised() {
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let weight = Weight::new(16, 256, 64, true).and_then(|w| w.ordered(Order::Tiles));
    let weight = weight.expect("whole tiles");
    let mut values = vec![0.5f32; 16 * 256];
    for bad in [None, Some(f32::INFINITY), Some(f32::NEG_INFINITY), Some(f32::NAN)] {
        values[1234] = bad.unwrap_or(-1.0);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let handle = device.client().create_from_slice(&bytes);
        let made = quantize(&device, &handle, weight, DType::F32, Codebook::Nf4);
        match bad {
            None => drop(made.expect("finite")),
            Some(bad) => assert!(matches!(made, Err(QuantizeError::NotFinite)), "{bad}"),
        }
    }
}

/// Runs the cases for non-default configs; a CPU has none, so that they run with the default.
#[test]
fn config_cases_are_right_on_the_cpu() {
    fn each<K: KernelSuite>(precision: Precision) {
        let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
        for case in K::config_cases(precision) {
            // A fused norm saves no launch on a CPU, so that there is no candidate for it.
            let first = K::candidates(device.profile(), K::problem(&case)).first().copied();
            let baseline = || K::baseline(device.profile(), K::problem(&case));
            let config = first.unwrap_or_else(|| baseline().expect("any device has one"));
            let verdict = K::verify(&device, &case, &config).expect("runs");
            assert!(verdict.comparison.passed, "{case:?}: {}", verdict.comparison);
        }
    }
    each::<Nf4Matmul>(Precision::F32);
    each::<Nf4Matmul>(Precision::Bf16);
    each::<AttentionBackward>(Precision::Bf16);
}

/// Norms fused into a matmul; a CPU runs them as separate launches.
#[test]
fn products_that_normalise_are_right_in_wgsl() {
    let Some(device) = device(Backend::WebGpu) else { return };
    let arch = device.profile();
    let normed = |case: &&EdgeCase| case.problem.norm.is_some();
    let mut runs = 0;
    for case in Matmul::edge_cases(Precision::F32, Backend::WebGpu).iter().filter(normed) {
        for config in Matmul::candidates(arch, &case.problem) {
            let verdict = Matmul::verify(&device, case, &config).expect("runs");
            assert!(verdict.comparison.passed, "{case:?} {config:?}: {}", verdict.comparison);
            runs += 1;
        }
    }
    assert!(runs > 10, "{runs} runs");
    let mut runs = 0;
    for case in Nf4Matmul::config_cases(Precision::F32) {
        if case.problem.norm.is_none() {
            continue;
        }
        for config in Nf4Matmul::candidates(arch, &case.problem) {
            let verdict = Nf4Matmul::verify(&device, &case, &config).expect("runs");
            assert!(verdict.comparison.passed, "{case:?} {config:?}: {}", verdict.comparison);
            runs += 1;
        }
    }
    assert!(runs > 0, "no product with a weight in 4 bits normalises");
}

#[test]
fn every_norm_in_a_product_is_another_program() {
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let client = device.client();
    let (properties, target) = (client.properties_shared(), client.target_properties_shared());
    let weight = Weight::new(16, 256, 64, true).expect("valid");
    let plain = Nf4MatmulProblem::new(1, weight, DType::F32).expect("rows");
    let config = Nf4Matmul::baseline(device.profile(), &plain).expect("any device has one");
    let norms = [None, Some(NormKind::Rms), Some(NormKind::RmsPlusOne)];
    let hashes: std::collections::BTreeSet<_> = norms
        .into_iter()
        .map(|norm| {
            let problem = Nf4MatmulProblem { norm, ..plain };
            let arch = device.profile();
            let programs = Nf4Matmul::programs(arch, &problem, &config, &properties, &target);
            programs[0].id().stable_hash()
        })
        .collect();
    assert_eq!(hashes.len(), norms.len());
}

/// Covers every way in which units share rows.
#[test]
fn every_config_of_a_norm_is_right_in_wgsl() {
    let Some(device) = device(Backend::WebGpu) else { return };
    for case in Norm::config_cases(Precision::F32) {
        let configs = Norm::candidates(device.profile(), &case.problem);
        assert!(!configs.is_empty(), "{case:?}");
        for config in configs {
            let verdict = Norm::verify(&device, &case, &config).expect("runs");
            assert!(verdict.comparison.passed, "{case:?} {config:?}: {}", verdict.comparison);
        }
    }
}

#[test]
fn an_odd_number_of_halves_is_tuned() {
    let device = device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let problem = MatmulProblem::dense(1, [3, 5, 8], [Layout::Row; 2], Precision::Bf16);
    let (commit, date) = (String::new(), String::new());
    let cache = TuneCache::default();
    let policy = tune::Policy::Measure;
    let tuner = tune::Tuner { device: &device, cache, policy, commit, date };
    let problem = problem.expect("valid sizes");
    let configs = Matmul::candidates(device.profile(), &problem);
    for (config, outcome) in tuner.time::<Matmul>(&problem, configs) {
        // The last word of the buffer holds half a result; the other half is poison.
        outcome.unwrap_or_else(|why| panic!("{config:?}: {why}"));
    }
}
