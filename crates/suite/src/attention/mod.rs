//! Attention: cases, instances and peers.

mod check;

use arch::{Backend, DType, Device};
use kernels::attention::{
    Attention, AttentionConfig, AttentionOperands, AttentionProblem, HeadStrides, ScoreStrides,
};
use kernels::matmul::Precision;
use serde_json::{Value, json};
use tune::Kernel;

pub use self::check::{EdgeCase, Inputs};
pub(crate) use self::check::{Host, Part, dense, digest, extents, parts, read, strides, values};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, FAR, Verdict};
use crate::kernel::{KernelSuite, Params, Peers, insert_rules, params, precision};
use crate::pairs::pairwise;
use crate::peers;

impl KernelSuite for Attention {
    type Case = EdgeCase;

    fn precision(p: &AttentionProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &AttentionProblem) -> Params {
        let mut params = params([
            ("batch", p.batch.into()),
            ("heads", p.heads.into()),
            ("kv_heads", p.kv_heads.into()),
            ("seq_q", p.seq_q.into()),
            ("seq_kv", p.seq_kv.into()),
            ("head_dim", p.head_dim.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        insert_rules(&mut params, p.rules());
        params
    }

    fn problem(case: &EdgeCase) -> &AttentionProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let p = &case.problem;
        let mut params = Self::params(p);
        // Distinguishes cases that differ in more than sizes and rules.
        params.insert("seed".to_owned(), case.seed.into());
        if case.inputs != Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        if case.inputs == Inputs::Far {
            params.insert("extent".to_owned(), p.extents()[0].into());
        }
        params
    }

    fn edge_cases(precision: Precision, backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let dense = |batch, heads, seqs, head_dim| {
            let p = AttentionProblem::dense(batch, heads, seqs, head_dim, dtype);
            AttentionProblem { lse: true, ..p.expect("sizes below are valid") }
        };
        let mut add = |problem: AttentionProblem, inputs| {
            let seed = 1000 + cases.len() as u64;
            let problem = problem.checked().expect("valid");
            cases.push(EdgeCase { problem, inputs, seed, lengths: None });
        };
        // Every head dimension; whole and ragged tiles; with and without causal order.
        for head_dim in HEAD_DIMS.into_iter().chain([8, 40, 72]) {
            for seqs in [[128, 128], [67, 45]] {
                let p = dense(1, [2, 2], seqs, head_dim);
                add(p, Inputs::Normal);
                add(AttentionProblem { causal: true, ..p }, Inputs::Normal);
            }
        }
        // Head dimensions that are not multiples of a tensor core tile, and odd positions.
        add(dense(1, [2, 1], [9, 11], 20), Inputs::Normal);
        add(dense(1, [2, 1], [9, 11], 7), Inputs::Normal);
        // Lengths: one, fewer queries than keys, more (the first rows see no key), primes, long.
        for seqs in [[1, 1], [1, 300], [16, 257], [3, 64], [130, 50], [127, 131], [260, 520]] {
            for causal in [false, true] {
                add(AttentionProblem { causal, ..dense(2, [4, 2], seqs, 64) }, Inputs::Normal);
            }
        }
        // Windows, causal and bidirectional, narrower and wider than a tile.
        for window in [1, 7, 40, 100] {
            for causal in [false, true] {
                let p = dense(1, [2, 2], [150, 190], 64);
                add(AttentionProblem { causal, window: Some(window), ..p }, Inputs::Normal);
            }
        }
        // One key head for all query heads, an explicit scale, a soft cap, large scores.
        let p = dense(1, [6, 1], [70, 90], 64);
        add(AttentionProblem { scale: 0.3, ..p }, Inputs::Normal);
        add(AttentionProblem { softcap: Some(5.0), causal: true, ..p }, Inputs::Normal);
        add(AttentionProblem { causal: true, ..p }, Inputs::Large);
        add(AttentionProblem { softcap: Some(30.0), ..p }, Inputs::Large);
        // Soft caps too large to change a score.
        for softcap in [1e4, 1e30] {
            add(AttentionProblem { softcap: Some(softcap), ..p }, Inputs::Normal);
        }
        // Infinities and NaN.
        let p = dense(2, [4, 2], [50, 70], 64);
        add(p, Inputs::Special);
        add(AttentionProblem { softcap: Some(3.0), ..p }, Inputs::Special);
        add(AttentionProblem { causal: true, ..p }, Inputs::Special);
        // Batches past 2^31 elements, for 16-bit types only: wider ones take twice the memory.
        if backend == Backend::Cuda && dtype.size() == 2 {
            let apart = |s: HeadStrides, far| HeadStrides { batch: s.batch + far, ..s };
            let (q, out) = (apart(p.q, FAR[0]), apart(p.out, FAR[0]));
            add(AttentionProblem { q, out, causal: true, ..p }, Inputs::Far);
            let (k, v) = (apart(p.k, FAR[1]), apart(p.v, FAR[1]));
            add(AttentionProblem { k, v, causal: true, ..p }, Inputs::Far);
        }
        // Every broadcast of bias and mask, with fully masked rows.
        let full = ScoreStrides { batch: 4 * 50 * 70, head: 50 * 70, row: 70, col: 1 };
        let shared = ScoreStrides { batch: 0, head: 0, row: 70, col: 1 };
        let keys = ScoreStrides { batch: 70, head: 0, row: 0, col: 1 };
        let mask_dtype = if backend == Backend::WebGpu { DType::I32 } else { DType::U8 };
        for causal in [false, true] {
            let p = AttentionProblem { causal, mask_dtype, ..p };
            for (strides, inputs) in
                [(full, Inputs::Hidden), (shared, Inputs::Hidden), (keys, Inputs::Normal)]
            {
                add(AttentionProblem { bias: Some(strides), ..p }, inputs);
                add(AttentionProblem { mask: Some(strides), ..p }, inputs);
            }
            let both = AttentionProblem { bias: Some(keys), mask: Some(shared), ..p };
            add(AttentionProblem { softcap: Some(3.0), window: Some(30), ..both }, Inputs::Hidden);
        }
        // Layout `[batch, seq, heads, head_dim]`, padded, and without the log-sum-exp.
        let mut p = dense(2, [4, 2], [60, 75], 64);
        (p.q, p.out) = (interleaved(4, 60, 64), interleaved(4, 60, 64));
        (p.k, p.v) =
            (interleaved(2, 75, 64), HeadStrides { seq: 72, head: 72 * 75, batch: 72 * 150 });
        add(AttentionProblem { lse: false, ..p }, Inputs::Normal);
        // Sequences of different lengths in one launch, including an empty one and one without keys.
        for (causal, window) in [(false, None), (true, None), (true, Some(20))] {
            let mut p = dense(5, [4, 2], [97, 130], 64);
            (p.q, p.k, p.v, p.out) =
                (interleaved(4, 97, 64), interleaved(2, 97, 64), interleaved(2, 97, 64), p.q);
            p.out = interleaved(4, 97, 64);
            let lengths = vec![(30, 30), (1, 130), (0, 17), (97, 64), (40, 0)];
            cases.push(EdgeCase {
                problem: AttentionProblem { causal, window, varlen: true, ..p },
                inputs: Inputs::Normal,
                seed: 2000,
                lengths: Some(lengths),
            });
        }
        cases.extend(together(dtype, mask_dtype));
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        for (head_dim, seqs, causal) in [
            (128, [256, 256], true),
            (64, [133, 201], false),
            (64, [133, 201], true),
            (80, [90, 61], true),
            (40, [70, 77], false),
        ] {
            let p = AttentionProblem::dense(1, [2, 1], seqs, head_dim, dtype).expect("valid sizes");
            let problem = AttentionProblem { causal, lse: true, ..p };
            let seed = 3000 + cases.len() as u64;
            cases.push(EdgeCase { problem, inputs: Inputs::Normal, seed, lengths: None });
        }
        cases
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &AttentionConfig,
    ) -> Result<Verdict, CheckError> {
        check::verify(device, case, config)
    }

    /// Supports dense results without bias, mask or varying lengths.
    fn verify_operands(
        device: &Device,
        p: &AttentionProblem,
        operands: &AttentionOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        check::verify_operands(device, p, operands, seed)
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<AttentionProblem>> {
        let case = |batch, heads, seq: u32, head_dim, dtype, causal, peers| {
            let p = AttentionProblem::dense(batch, heads, [seq; 2], head_dim, dtype);
            let problem = AttentionProblem { causal, ..p.expect("valid sizes") };
            BenchCase { problem, peers }
        };
        let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
        let (full, causal) = (false, true);
        let more = suite != Suite::Quick;
        let mut cases = Vec::new();
        match (suite, scale) {
            (Suite::Documents, _) => {}
            (_, Scale::Host) => {
                cases.push(case(1, [4, 4], 256, 64, f32, full, true));
                cases.push(case(1, [4, 4], 256, 64, f32, causal, true));
                if more {
                    cases.push(case(1, [8, 2], 512, 128, f32, causal, false));
                    cases.push(case(1, [4, 4], 256, 64, bf16, causal, false));
                }
            }
            (_, Scale::Gpu) => {
                // Burn's attention autotunes for minutes per shape: one shape, in the longer suites.
                cases.push(case(4, [16, 16], 4096, 128, bf16, full, more));
                cases.push(case(4, [16, 16], 4096, 128, bf16, causal, false));
                cases.push(case(4, [16, 16], 2048, 64, bf16, causal, false));
                if more {
                    cases.push(case(4, [16, 16], 4096, 128, f16, full, false));
                    cases.push(case(4, [16, 16], 2048, 64, bf16, full, false));
                    cases.push(case(4, [32, 8], 4096, 128, bf16, causal, false));
                    cases.push(case(1, [32, 8], 512, 128, bf16, causal, false));
                    cases.push(case(1, [32, 8], 16384, 128, bf16, causal, false));
                    cases.push(case(4, [16, 16], 4096, 80, bf16, causal, false));
                    cases.push(case(4, [16, 16], 2048, 256, bf16, causal, false));
                    // Levels of Stable Diffusion 1.5's U-Net, and of the benchmarks'.
                    cases.push(case(1, [8, 8], 4096, 40, f16, full, false));
                    cases.push(case(8, [8, 8], 4096, 40, f16, full, false));
                    cases.push(case(1, [8, 8], 1024, 80, f16, full, false));
                    cases.push(case(1, [48, 48], 1024, 8, f16, full, false));
                }
            }
        }
        cases
    }

    /// Every head dimension, whole and ragged tiles, and each rule that changes scores.
    fn instances() -> Vec<InstanceCase<AttentionProblem>> {
        let dense = |seq, head_dim| {
            AttentionProblem::dense(4, [16, 4], [seq; 2], head_dim, DType::Bf16)
                .expect("valid sizes")
        };
        let case = |problem, max_candidates| InstanceCase { problem, max_candidates, clean: 1 };
        let mut cases = vec![case(dense(4096, 128), 4)];
        for head_dim in HEAD_DIMS {
            let p = AttentionProblem { causal: true, lse: true, ..dense(4001, head_dim) };
            cases.push(case(p, 2));
        }
        cases.extend([case(dense(4096, 40), 2), case(dense(1001, 8), 2)]);
        let p = dense(4001, 128);
        let scores = Some(ScoreStrides { batch: 0, head: 0, row: 4001, col: 1 });
        cases.push(case(AttentionProblem { window: Some(512), softcap: Some(50.0), ..p }, 1));
        cases.push(case(AttentionProblem { bias: scores, mask: scores, ..p }, 1));
        cases.push(case(AttentionProblem { causal: true, varlen: true, ..p }, 1));
        cases
    }

    fn peers(device: &Device, p: &AttentionProblem, sets: usize) -> Peers {
        vec![(peers::burn_name(device.backend()), peers::burn_attention(device, p, sets))]
    }

    fn torch(p: &AttentionProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "batch": p.batch,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "seq_q": p.seq_q,
            "seq_kv": p.seq_kv,
            "head_dim": p.head_dim,
            "dtype": p.dtype.name(),
            "causal": p.causal,
        }))
    }
}

/// Head dimensions with specialised code.
pub(crate) const HEAD_DIMS: [u32; 7] = [32, 64, 80, 96, 128, 192, 256];

/// Index of `dtype` in the list f32, f16, bf16.
pub(crate) const fn place_of(dtype: DType) -> usize {
    match dtype {
        DType::F16 => 1,
        DType::Bf16 => 2,
        _ => 0,
    }
}

/// Cases for every pair of options, including the dtype. A second list covers the options that combine with varying
/// lengths.
fn together(dtype: DType, mask_dtype: DType) -> Vec<EdgeCase> {
    const WINDOWS: [Option<u32>; 3] = [None, Some(9), Some(50)];
    let heads = [[2, 2], [4, 2], [3, 1]];
    let seqs = [[64, 64], [67, 45], [33, 130], [1, 77], [97, 97]];
    let own = place_of(dtype);
    let mut cases = Vec::new();
    for row in pairwise(&[3, 7, 3, 5, 2, 3, 2, 3, 2]) {
        let [of, head_dim, head, seq, causal, window, softcap, bias, mask] = row[..] else {
            unreachable!("as many as there are factors")
        };
        if of != own {
            continue;
        }
        let [seq_q, seq_kv] = seqs[seq];
        let p =
            AttentionProblem::dense(2, heads[head], [seq_q, seq_kv], HEAD_DIMS[head_dim], dtype)
                .expect("sizes here are valid");
        let (row, matrix) = (u64::from(seq_kv), u64::from(seq_q * seq_kv));
        let of_heads = u64::from(p.heads) * matrix;
        let full = ScoreStrides { batch: of_heads, head: matrix, row, col: 1 };
        let keys = ScoreStrides { batch: row, head: 0, row: 0, col: 1 };
        let problem = AttentionProblem {
            lse: true,
            causal: causal == 1,
            window: WINDOWS[window],
            softcap: (softcap == 1).then_some(2.5),
            bias: [None, Some(full), Some(keys)][bias],
            mask: (mask == 1).then_some(ScoreStrides { batch: 0, head: 0, ..full }),
            mask_dtype,
            ..p
        };
        let problem = problem.checked().expect("valid");
        let seed = 2100 + cases.len() as u64;
        cases.push(EdgeCase { problem, inputs: Inputs::Holes, seed, lengths: None });
    }
    for row in pairwise(&[3, 7, 3, 2, 3, 2]) {
        let [of, head_dim, head, causal, window, softcap] = row[..] else {
            unreachable!("as many as there are factors")
        };
        if of != own {
            continue;
        }
        let (head_dim, [of_q, of_kv]) = (HEAD_DIMS[head_dim], heads[head]);
        let p = AttentionProblem::dense(4, [of_q, of_kv], [70, 90], head_dim, dtype)
            .expect("sizes here are valid");
        let keys = interleaved(of_kv, 90, head_dim);
        let problem = AttentionProblem {
            lse: true,
            varlen: true,
            causal: causal == 1,
            window: WINDOWS[window],
            softcap: (softcap == 1).then_some(2.5),
            q: interleaved(of_q, 70, head_dim),
            k: keys,
            v: keys,
            out: interleaved(of_q, 70, head_dim),
            ..p
        };
        let lengths = Some(vec![(33, 90), (70, 41), (1, 1), (16, 64)]);
        let seed = 2200 + cases.len() as u64;
        cases.push(EdgeCase { problem, inputs: Inputs::Normal, seed, lengths });
    }
    cases
}

/// Strides of a dense `[batch, seq, heads, head_dim]`.
pub const fn interleaved(heads: u32, seq: u32, head_dim: u32) -> HeadStrides {
    let step = heads as u64 * head_dim as u64;
    HeadStrides { batch: seq as u64 * step, head: head_dim as u64, seq: step }
}
