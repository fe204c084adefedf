//! Kernels on random problems on the CPU runtime, by the paths that it has. A fixed seed makes every run the
//! same.

use arch::{Backend, DType};
use kernels::attention::decode::{Decode, DecodeProblem};
use kernels::attention::{Attention, AttentionOptions, AttentionProblem, ScoreStrides};
use kernels::int8::{Activations, Int8Dequantize, Int8Matmul, Int8MatmulProblem, Int8Quantize};
use kernels::matmul::{Activation, Epilogue, Layout, Matmul, MatmulProblem, Precision};
use kernels::nf4::{Codebook, Nf4Dequantize, Nf4Matmul, Nf4MatmulProblem, Nf4Quantize, Order};
use kernels::norm::NormKind;
use kernels::{int8, nf4};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use reference::FourBit;
use suite::nf4::{DequantizeCase, MatmulCase, QuantizeCase};
use suite::{KernelSuite, attention, decode, matmul};

/// Checks `cases` random cases, each with one of the device's configs, baseline included.
fn each<K: KernelSuite>(cases: u32, drawn: impl Strategy<Value = K::Case>) {
    let device = crate::device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let arch = device.profile();
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        // Many steps of shrinking a failure compile a kernel.
        max_shrink_iters: 64,
        ..ProptestConfig::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let drawn = (drawn, any::<Index>());
    let ran = TestRunner::new_with_rng(config, rng).run(&drawn, |(case, which)| {
        let mut configs = K::candidates(arch, K::problem(&case));
        configs.extend(K::baseline(arch, K::problem(&case)));
        let config = which.get(&configs);
        let verdict = K::verify(&device, &case, config);
        let verdict = verdict.map_err(|why| TestCaseError::fail(format!("{config:?}: {why}")))?;
        prop_assert!(verdict.comparison.passed, "{:?}: {}", config, verdict.comparison);
        Ok(())
    });
    if let Err(failure) = ran {
        panic!("{failure}");
    }
}

/// Returns any size, or a multiple of 8 or 64.
fn size(max: u32) -> impl Strategy<Value = u32> {
    let whole = |by: u32| (1..=max / by).prop_map(move |times| by * times);
    prop_oneof![1..=max, whole(8), whole(64)]
}

/// 4-bit weights of every block size, in tiles if whole tiles divide them.
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

/// Few rows, which have their own paths, and many rows.
fn rows() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(1), 2 => 1..=8u32, 3 => 1..=48u32]
}

/// Types that the CPU runtime computes in; not every CPU has bf16.
fn dtype() -> impl Strategy<Value = DType> {
    let device = crate::device(Backend::Cpu).expect("the CPU runtime needs nothing");
    let all = [DType::F32, DType::F16, DType::Bf16];
    select(all.into_iter().filter(|d| device.profile().dtypes.contains(d)).collect::<Vec<_>>())
}

/// Epilogues of matmuls with quantised weights.
fn inference() -> impl Strategy<Value = Epilogue> {
    let activation = proptest::option::of(select(&Activation::ALL[..]));
    (any::<[bool; 3]>(), activation).prop_map(|([bias, gate, residual], activation)| Epilogue {
        bias,
        activation,
        gate,
        residual,
        ..Epilogue::default()
    })
}

fn epilogue() -> impl Strategy<Value = Epilogue> {
    let activation = proptest::option::of(select(&Activation::ALL[..]));
    let slope = proptest::option::of(select(&Activation::ALL[..]));
    (any::<[bool; 5]>(), activation, slope).prop_map(
        |([bias, pre_activation, gate, residual, last], activation, slope)| {
            let slope = slope.filter(|_| gate);
            let activation_last = last && activation.is_some();
            let own = Epilogue {
                bias,
                pre_activation,
                activation,
                activation_last,
                gate,
                ..Epilogue::default()
            };
            Epilogue { slope, residual, ..own }
        },
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
    each::<Matmul>(16, drawn);
}

/// Number of query heads and of key-value heads.
fn heads() -> impl Strategy<Value = [u32; 2]> {
    (1..=3u32, 1..=3u32).prop_map(|(kv_heads, group)| [group * kv_heads, kv_heads])
}

fn head_dim() -> impl Strategy<Value = u32> {
    select(vec![32, 64, 80, 96, 128, 192, 256])
}

/// Axes (batch, head, row) along which a tensor of scores is not broadcast.
fn own_axes() -> impl Strategy<Value = Option<[bool; 3]>> {
    proptest::option::of(any::<[bool; 3]>())
}

/// Sequences of different lengths; the first is not empty.
fn lengths(max: [u32; 2]) -> impl Strategy<Value = Vec<(u32, u32)>> {
    let others = vec((0..=max[0], 0..=max[1]), 0..=3);
    ((1..=max[0], 1..=max[1]), others).prop_map(|(first, mut others)| {
        others.insert(0, first);
        others
    })
}

#[test]
fn attention_is_that_of_the_reference() {
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
    // Equal lengths with a bias and a mask, or different lengths without.
    let sequences = prop_oneof![
        2 => (1..=2u32, (size(70), size(90)), own_axes(), own_axes())
            .prop_map(|(batch, seqs, bias, mask)| (vec![seqs; batch as usize], bias, mask, false)),
        1 => lengths([70, 90]).prop_map(|lengths| (lengths, None, None, true)),
    ];
    let problem = (sequences, heads(), head_dim(), dtype(), options).prop_map(
        |((lengths, bias, mask, varlen), heads, head_dim, dtype, options)| {
            let batch = lengths.len() as u32;
            let seq_q = lengths.iter().map(|(queries, _)| *queries).max().expect("one at least");
            let seq_kv = lengths.iter().map(|(_, keys)| *keys).max().expect("one at least");
            let dense = AttentionProblem::dense(batch, heads, [seq_q, seq_kv], head_dim, dtype);
            let dense = options.on(dense.expect("valid"));
            let [row, matrix] = [seq_kv, seq_q * seq_kv].map(u64::from);
            let steps = [u64::from(heads[0]) * matrix, matrix, row];
            let scores = |own: [bool; 3]| {
                let [batch, head, row] = [0, 1, 2].map(|i| if own[i] { steps[i] } else { 0 });
                ScoreStrides { batch, head, row, col: 1 }
            };
            let (bias, mask) = (bias.map(scores), mask.map(scores));
            let mut problem = AttentionProblem { bias, mask, varlen, lse: true, ..dense };
            if varlen {
                let [queries, keys] = [(heads[0], seq_q), (heads[1], seq_kv)]
                    .map(|(heads, seq)| attention::interleaved(heads, seq, head_dim));
                (problem.q, problem.k, problem.v, problem.out) = (queries, keys, keys, queries);
            }
            (problem, varlen.then_some(lengths))
        },
    );
    let inputs = select(vec![
        attention::Inputs::Normal,
        attention::Inputs::Hidden,
        attention::Inputs::Holes,
    ]);
    let drawn = (problem, inputs, 0..999u64).prop_map(|((problem, lengths), inputs, seed)| {
        attention::EdgeCase { problem, inputs, seed, lengths }
    });
    each::<Attention>(16, drawn);
}

#[test]
fn steps_of_decoding_are_those_of_the_reference() {
    let lengths = lengths([200, 1]).prop_map(|all| all.into_iter().map(|(len, _)| len).collect());
    let block_size = select(vec![None, Some(16), Some(64)]);
    let choices = (
        any::<bool>(),
        proptest::option::of(1.0..30.0f32),
        proptest::option::of(1..=150u32),
        0.05..0.5f32,
    );
    let drawn =
        (lengths, heads(), (1..=16u32, head_dim()), dtype(), block_size, choices, 0..999u64);
    let drawn =
        drawn.prop_map(|(lengths, heads, (seq_q, head_dim), dtype, block_size, of, seed)| {
            let lengths: Vec<u32> = lengths;
            let sizes = decode::Sizes { lengths: &lengths, heads, seq_q, head_dim };
            let (bytes, softcap, window, scale) = of;
            let cache = if bytes { DType::I8 } else { dtype };
            let dense = sizes.problem(block_size, dtype);
            let problem = DecodeProblem { cache, softcap, window, scale, ..dense };
            decode::EdgeCase { problem, lengths, inputs: decode::Inputs::Normal, seed }
        });
    each::<Decode>(12, drawn);
}

#[test]
fn four_bit_codes_and_absmax_are_those_of_the_reference() {
    let codebook = select(vec![Codebook::Nf4, Codebook::Fp4]);
    let drawn =
        (four_bits(), dtype(), codebook, 0..999u64).prop_map(|(weight, dtype, codebook, seed)| {
            let weight = nf4::Weight { order: Order::Rows, ..weight };
            QuantizeCase { problem: nf4::QuantizeProblem { weight, dtype, codebook }, seed }
        });
    each::<Nf4Quantize>(64, drawn);
}

#[test]
fn four_bits_are_decoded_to_the_last_bit() {
    let drawn = (four_bits(), dtype(), code(), 0..999u64).prop_map(|(weight, out, code, seed)| {
        DequantizeCase { problem: nf4::DequantizeProblem { weight, out }, code, seed }
    });
    each::<Nf4Dequantize>(128, drawn);
}

#[test]
fn products_with_four_bits_are_those_of_the_dense_weight() {
    let norm = prop_oneof![
        3 => Just(None),
        1 => select(vec![NormKind::Rms, NormKind::RmsPlusOne]).prop_map(Some),
    ];
    let problem = (rows(), four_bits(), dtype(), inference(), norm, any::<bool>()).prop_map(
        |(m, weight, dtype, epilogue, norm, glu)| {
            let plain = Nf4MatmulProblem::new(m, weight, dtype).expect("there are rows");
            let problem = if glu { plain.gated_by_half().unwrap_or(plain) } else { plain };
            Nf4MatmulProblem { epilogue, norm, ..problem }
        },
    );
    let drawn = (problem, code(), 0..999u64).prop_map(|(problem, code, seed)| MatmulCase {
        problem,
        code,
        seed,
    });
    each::<Nf4Matmul>(48, drawn);
}

#[test]
fn eight_bit_codes_and_scales_are_those_of_the_reference() {
    let drawn = (eight_bits(), dtype(), 0..999u64).prop_map(|(weight, dtype, seed)| {
        suite::int8::Case { problem: int8::QuantizeProblem { weight, dtype }, seed }
    });
    each::<Int8Quantize>(64, drawn);
}

#[test]
fn eight_bits_are_decoded_to_the_last_bit() {
    let drawn = (eight_bits(), dtype(), 0..999u64).prop_map(|(weight, out, seed)| {
        suite::int8::Case { problem: int8::DequantizeProblem { weight, out }, seed }
    });
    each::<Int8Dequantize>(96, drawn);
}

#[test]
fn products_with_eight_bits_are_those_of_the_dense_weight() {
    let rounding = prop_oneof![
        1 => Just(None),
        1 => select(vec![0.0, 2.0, 3.5]).prop_map(|threshold| Some(Activations { threshold })),
    ];
    let drawn = (rows(), eight_bits(), dtype(), inference(), rounding, 0..999u64).prop_map(
        |(m, weight, dtype, epilogue, activations, seed)| {
            let plain = Int8MatmulProblem::new(m, weight, dtype).expect("there are rows");
            let problem = Int8MatmulProblem { epilogue, activations, ..plain };
            suite::int8::Case { problem, seed }
        },
    );
    each::<Int8Matmul>(40, drawn);
}
