//! Kernels on problems that nobody chose, on the CPU runtime and by the paths that it has: drawn from a fixed seed, so that
//! every run has the same.

use std::fmt::Debug;

use arch::{Backend, DType, Device};
use kernels::attention::{Attention, AttentionOptions, AttentionProblem};
use kernels::int8::{Activations, Int8Dequantize, Int8Matmul, Int8MatmulProblem, Int8Quantize};
use kernels::matmul::{Activation, Epilogue, Layout, Matmul, MatmulProblem, Precision};
use kernels::nf4::{CodeBook, Nf4Dequantize, Nf4Matmul, Nf4MatmulProblem, Nf4Quantize, Order};
use kernels::norm::NormKind;
use kernels::{int8, nf4};
use oracle::nf4::{DequantizeCase, ProductCase, QuantizeCase};
use oracle::{CheckError, Verdict, attention, matmul};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use reference::FourBit;
use tune::Kernel;

/// Runs each of so many cases by one of the configs that the device has for it, the simplest among them.
fn each<K: Kernel, C: Debug>(
    cases: u32,
    drawn: impl Strategy<Value = C>,
    problem: impl Fn(&C) -> K::Problem,
    check: impl Fn(&Device, &C, &K::Config) -> Result<Verdict, CheckError>,
) {
    let device = crate::device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let arch = device.profile();
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        // A kernel is compiled anew for much of what is tried to make a failure smaller.
        max_shrink_iters: 64,
        ..ProptestConfig::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let drawn = (drawn, any::<Index>());
    let ran = TestRunner::new_with_rng(config, rng).run(&drawn, |(case, which)| {
        let problem = problem(&case);
        let mut configs = K::candidates(arch, &problem);
        configs.extend(K::simplest(arch, &problem));
        let config = which.get(&configs);
        let verdict = check(&device, &case, config);
        let verdict = verdict.map_err(|why| TestCaseError::fail(format!("{config:?}: {why}")))?;
        prop_assert!(verdict.comparison.passed, "{:?}: {}", config, verdict.comparison);
        Ok(())
    });
    if let Err(failure) = ran {
        panic!("{failure}");
    }
}

/// Any size, or one that vectors of 8 or more divide.
fn size(most: u32) -> impl Strategy<Value = u32> {
    let whole = |by: u32| (1..=most / by).prop_map(move |times| by * times);
    prop_oneof![1..=most, whole(8), whole(64)]
}

/// Of every block size; in tiles where they divide it.
fn four_bits() -> impl Strategy<Value = nf4::Weight> {
    let tiles = (1..=8u32, 1..=3u32).prop_map(|(n, k)| (16 * n, 256 * k));
    let sizes = prop_oneof![2 => (size(150), size(600)), 1 => tiles];
    (sizes, 5..=12u32, any::<bool>(), any::<bool>()).prop_map(|((n, k), log, nested, tiled)| {
        let rows = nf4::Weight::new(n, k, 1 << log, nested).expect("valid");
        if tiled { rows.ordered(Order::Tiles).unwrap_or(rows) } else { rows }
    })
}

fn eight_bits() -> impl Strategy<Value = int8::Weight> {
    (size(150), size(600)).prop_map(|(n, k)| int8::Weight::new(n, k).expect("valid"))
}

/// Few rows, which have paths of their own, and many.
fn rows() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(1), 2 => 1..=8u32, 3 => 1..=48u32]
}

/// What the CPU runtime computes in; bf16 is not everywhere.
fn dtype() -> impl Strategy<Value = DType> {
    let device = crate::device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let all = [DType::F32, DType::F16, DType::Bf16];
    select(all.into_iter().filter(|d| device.profile().dtypes.contains(d)).collect::<Vec<_>>())
}

fn epilogue() -> impl Strategy<Value = Epilogue> {
    let activation = proptest::option::of(select(&Activation::ALL[..]));
    (any::<bool>(), activation, any::<bool>(), any::<bool>()).prop_map(
        |(bias, activation, gate, residual)| Epilogue { bias, activation, gate, residual },
    )
}

fn code() -> impl Strategy<Value = FourBit> {
    select(&FourBit::ALL[..])
}

#[test]
fn products_are_those_of_the_reference() {
    let layout = || select(vec![Layout::Row, Layout::Col]);
    let sizes = (1..=3u32, rows(), size(150), size(300));
    let problem = (sizes, layout(), layout(), dtype(), epilogue()).prop_map(
        |((batch, m, n, k), lhs, rhs, dtype, epilogue)| {
            let precision = match dtype {
                DType::F16 => Precision::F16,
                DType::Bf16 => Precision::Bf16,
                _ => Precision::F32,
            };
            let dense = MatmulProblem::dense(batch, [m, n, k], [lhs, rhs], precision);
            MatmulProblem { epilogue, ..dense.expect("valid") }
        },
    );
    let drawn = (problem, 0..999u64).prop_map(|(problem, seed)| matmul::EdgeCase {
        problem,
        inputs: matmul::Inputs::Normal(seed),
    });
    each::<Matmul, _>(16, drawn, |case| case.problem, matmul::check);
}

#[test]
fn attention_is_that_of_the_reference() {
    let heads = (1..=3u32, 1..=3u32).prop_map(|(kv_heads, group)| [group * kv_heads, kv_heads]);
    let head_dim = select(vec![32, 64, 80, 96, 128, 192, 256]);
    let options = (
        proptest::option::of(0.05..0.5f32),
        proptest::option::of(1.0..30.0f32),
        any::<bool>(),
        proptest::option::of(1..=80u32),
    )
        .prop_map(|(scale, softcap, causal, window)| AttentionOptions {
            scale,
            softcap,
            causal,
            window,
            implementation: None,
        });
    let problem = (1..=2u32, heads, (size(70), size(90)), head_dim, dtype(), options).prop_map(
        |(batch, heads, (seq_q, seq_kv), head_dim, dtype, options)| {
            let dense = AttentionProblem::dense(batch, heads, [seq_q, seq_kv], head_dim, dtype);
            AttentionProblem { lse: true, ..options.on(dense.expect("valid")) }
        },
    );
    let drawn = (problem, 0..999u64).prop_map(|(problem, seed)| attention::EdgeCase {
        problem,
        inputs: attention::Inputs::Normal,
        seed,
        lengths: None,
    });
    each::<Attention, _>(12, drawn, |case| case.problem, attention::check);
}

#[test]
fn four_bit_codes_and_absmax_are_those_of_the_reference() {
    let book = select(vec![CodeBook::Nf4, CodeBook::Fp4]);
    let drawn = (four_bits(), dtype(), book, 0..999u64).prop_map(|(weight, dtype, book, seed)| {
        let weight = nf4::Weight { order: Order::Rows, ..weight };
        QuantizeCase { problem: nf4::QuantizeProblem { weight, dtype, book }, seed }
    });
    each::<Nf4Quantize, _>(64, drawn, |case| case.problem, oracle::nf4::check_quantize);
}

#[test]
fn four_bits_are_decoded_to_the_last_bit() {
    let drawn = (four_bits(), dtype(), code(), 0..999u64).prop_map(|(weight, out, code, seed)| {
        DequantizeCase { problem: nf4::DequantizeProblem { weight, out }, code, seed }
    });
    each::<Nf4Dequantize, _>(128, drawn, |case| case.problem, oracle::nf4::check_dequantize);
}

#[test]
fn products_with_four_bits_are_those_of_the_dense_weight() {
    let norm = prop_oneof![
        3 => Just(None),
        1 => select(vec![NormKind::Rms, NormKind::RmsPlusOne]).prop_map(Some),
    ];
    let problem = (rows(), four_bits(), dtype(), epilogue(), norm, any::<bool>()).prop_map(
        |(m, weight, dtype, epilogue, norm, glu)| {
            let plain = Nf4MatmulProblem::new(m, weight, dtype).expect("there are rows");
            let problem = if glu { plain.gated_by_half().unwrap_or(plain) } else { plain };
            Nf4MatmulProblem { epilogue, norm, ..problem }
        },
    );
    let drawn = (problem, code(), 0..999u64).prop_map(|(problem, code, seed)| ProductCase {
        problem,
        code,
        seed,
    });
    each::<Nf4Matmul, _>(48, drawn, |case| case.problem, oracle::nf4::check);
}

#[test]
fn eight_bit_codes_and_scales_are_those_of_the_reference() {
    let drawn = (eight_bits(), dtype(), 0..999u64).prop_map(|(weight, dtype, seed)| {
        oracle::int8::Case { problem: int8::QuantizeProblem { weight, dtype }, seed }
    });
    each::<Int8Quantize, _>(64, drawn, |case| case.problem, oracle::int8::check_quantize);
}

#[test]
fn eight_bits_are_decoded_to_the_last_bit() {
    let drawn = (eight_bits(), dtype(), 0..999u64).prop_map(|(weight, out, seed)| {
        oracle::int8::Case { problem: int8::DequantizeProblem { weight, out }, seed }
    });
    each::<Int8Dequantize, _>(96, drawn, |case| case.problem, oracle::int8::check_dequantize);
}

#[test]
fn products_with_eight_bits_are_those_of_the_dense_weight() {
    let rounding = prop_oneof![
        1 => Just(None),
        1 => select(vec![0.0, 2.0, 3.5]).prop_map(|threshold| Some(Activations { threshold })),
    ];
    let drawn = (rows(), eight_bits(), dtype(), epilogue(), rounding, 0..999u64).prop_map(
        |(m, weight, dtype, epilogue, activations, seed)| {
            let plain = Int8MatmulProblem::new(m, weight, dtype).expect("there are rows");
            let problem = Int8MatmulProblem { epilogue, activations, ..plain };
            oracle::int8::Case { problem, seed }
        },
    );
    each::<Int8Matmul, _>(40, drawn, |case| case.problem, oracle::int8::check);
}
