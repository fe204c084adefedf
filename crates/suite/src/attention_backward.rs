//! Checks the gradients of attention against their reference.

use arch::{Backend, DType, Device};
use kernels::attention::backward::{
    AttentionBackward, BackwardConfig, BackwardOperands, BackwardProblem,
};
use kernels::attention::{Attention, AttentionProblem, ScoreStrides};
use kernels::matmul::Precision;
use reference::{Comparison, Lines, Saved, Scores};
use serde_json::Value;
use tune::{Kernel, Queue};

use crate::attention::{
    EdgeCase, HEAD_DIMS, Host, Inputs, Part, digest, extents, parts, read, values,
};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{CheckError, Verdict, launch_twice, padded, reference_dtype, unwritten};
use crate::kernel::{KernelSuite, Params};

/// A problem to verify, with the inputs of its forward pass.
#[derive(Debug, Clone)]
pub struct BackwardCase {
    pub problem: BackwardProblem,
    pub forward: EdgeCase,
}

impl KernelSuite for AttentionBackward {
    type Case = BackwardCase;

    fn precision(problem: &BackwardProblem) -> Precision {
        Attention::precision(&problem.forward)
    }

    fn params(problem: &BackwardProblem) -> Params {
        let mut params = Attention::params(&problem.forward);
        params.remove("lse");
        params
    }

    fn problem(case: &BackwardCase) -> &BackwardProblem {
        &case.problem
    }

    fn case_params(case: &BackwardCase) -> Params {
        Attention::case_params(&case.forward)
    }

    /// Cases of the forward pass with its log-sum-exp. Leaves out non-finite inputs, whose gradients are unspecified,
    /// and batches that lie far apart.
    fn edge_cases(precision: Precision, backend: Backend) -> Vec<BackwardCase> {
        let ordinary = |case: &EdgeCase| !matches!(case.inputs, Inputs::Special | Inputs::Far);
        let forward = Attention::edge_cases(precision, backend).into_iter();
        forward.filter(ordinary).map(of_forward).collect()
    }

    fn config_cases(precision: Precision) -> Vec<BackwardCase> {
        let dtype = precision.storage();
        let forward = Attention::config_cases(precision).into_iter();
        let mut cases: Vec<_> = forward.map(of_forward).collect();
        // Head dimensions at which the tile sizes change.
        for head_dim in [32, 256] {
            let p = AttentionProblem::dense(1, [2, 1], [77, 140], head_dim, dtype).expect("valid");
            cases.push(of_forward(EdgeCase {
                problem: AttentionProblem { causal: true, ..p },
                inputs: Inputs::Normal,
                seed: 4000 + u64::from(head_dim),
                lengths: None,
            }));
        }
        cases
    }

    /// Runs our forward pass and reads its result back, so that only the backward pass is checked.
    fn verify(
        device: &Device,
        case: &BackwardCase,
        config: &BackwardConfig,
    ) -> Result<Verdict, CheckError> {
        let (problem, p) = (&case.problem, &case.problem.forward);
        let dtype = reference_dtype(p.dtype);
        let host = Host::new(device, &case.forward)?;
        let forward = Attention::baseline(device.profile(), p)
            .map_err(|why| CheckError::Kernel(format!("forward pass: {why}")))?;
        Attention::launch(&Queue::Device(device), p, &forward, &host.operands, None);
        let (out, lse) = host.results(device)?;
        let lse = lse.expect("a checked problem stores its log-sum-exp");

        let [q_len, k_len, v_len, out_len] = extents(&case.forward);
        let dout = values(&case.forward, out_len, 5, 1.0)?;
        let upload = |bytes: &[u8]| device.client().create_from_slice(&padded(bytes));
        let gradient = |len: usize| unwritten(device, len * p.dtype.size());
        let operands = BackwardOperands {
            forward: host.operands.clone(),
            dout: upload(&dtype.encode(&dout)),
            dq: gradient(q_len),
            dk: gradient(k_len),
            dv: gradient(v_len),
        };
        let results = [&operands.dq, &operands.dk, &operands.dv];
        launch_twice::<AttentionBackward>(device, problem, config, &operands, &results)?;
        let dq = read(device, &operands.dq, dtype, q_len)?;
        let dk = read(device, &operands.dk, dtype, k_len)?;
        let dv = read(device, &operands.dv, dtype, v_len)?;

        // Errors are measured over all sequences together. A sequence of one key has only zero gradients, so it has no
        // scale to measure an error by.
        let mut lines: Option<[Lines; 3]> = None;
        for part in parts(&case.forward) {
            let queries = |from: &[f32], s| {
                part.dense(from, s, [p.heads, part.seq_q], part.from_q, p.head_dim)
            };
            let keys = |from: &[f32], s| {
                part.dense(from, s, [p.kv_heads, part.seq_kv], part.from_kv, p.head_dim)
            };
            let (out, dout) = (queries(&out, p.out), queries(&dout, problem.dout));
            let sums = part.sums(p, &lse);
            let saved = Saved { out: &out, lse: &sums, dout: &dout };
            let (bias, mask) = host.scores(p, &part);
            let scores = Scores { bias: bias.as_deref(), mask: mask.as_deref() };
            let results = [queries(&dq, problem.dq), keys(&dk, problem.dk), keys(&dv, problem.dv)];
            let results = results.each_ref().map(Vec::as_slice);
            let reference = part.reference(p);
            let rows = reference.every();
            let operands = host.qkv(p, &part);
            let of_part = reference.gradient_lines(&rows, operands, scores, saved, results)?;
            lines = Some(match lines {
                None => of_part,
                Some([dq, dk, dv]) => {
                    let [more_dq, more_dk, more_dv] = of_part;
                    [dq.and(more_dq), dk.and(more_dk), dv.and(more_dv)]
                }
            });
        }
        let lines = lines.expect("a problem has a sequence");
        let comparisons = lines.iter().map(Lines::compare).collect::<Result<_, _>>()?;
        let all = [dq, dk, dv].concat();
        Ok(Verdict { comparison: Comparison::worst(comparisons), digest: digest(&all) })
    }

    /// Supports dense results without bias, mask or varying lengths.
    fn verify_operands(
        device: &Device,
        problem: &BackwardProblem,
        operands: &BackwardOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        let p = &problem.forward;
        let dtype = reference_dtype(p.dtype);
        let [q, k, v, out] = p.extents();
        let read_half = |handle, len| read(device, handle, dtype, len);
        let forward = &operands.forward;
        let (q, k, v) =
            (read_half(&forward.q, q)?, read_half(&forward.k, k)?, read_half(&forward.v, v)?);
        let lse = forward.lse.as_ref().expect("a checked problem stores its log-sum-exp");
        let lse = read(device, lse, reference::DType::F32, p.rows() as usize)?;
        let part = Part::whole(p);
        let dense = |handle, len, strides, heads| {
            let values = read_half(handle, len)?;
            Ok::<_, CheckError>(part.dense(&values, strides, heads, 0, p.head_dim))
        };
        let (queries, keys) = ([p.heads, p.seq_q], [p.kv_heads, p.seq_kv]);
        let [dout, dq, dk, dv] = problem.extents();
        let out = dense(&forward.out, out, p.out, queries)?;
        let dout = dense(&operands.dout, dout, problem.dout, queries)?;
        let saved = Saved { out: &out, lse: &lse, dout: &dout };
        let dq = dense(&operands.dq, dq, problem.dq, queries)?;
        let dk = dense(&operands.dk, dk, problem.dk, keys)?;
        let dv = dense(&operands.dv, dv, problem.dv, keys)?;
        let reference = part.reference(p);
        let rows = reference.sample_gradients(seed, 64);
        let results = [dq.as_slice(), &dk, &dv];
        let comparison =
            reference.check_gradients(&rows, [&q, &k, &v], Scores::default(), saved, results)?;
        Ok(Verdict { comparison, digest: digest(&[dq, dk, dv].concat()) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<BackwardProblem>> {
        let case = |batch, heads, seq: u32, head_dim, dtype, causal| {
            let p = AttentionProblem::dense(batch, heads, [seq; 2], head_dim, dtype);
            let forward = AttentionProblem { causal, lse: true, ..p.expect("valid sizes") };
            BenchCase::alone(
                BackwardProblem::from_forward(forward).expect("it stores its log-sum-exp"),
            )
        };
        let (f32, bf16) = (DType::F32, DType::Bf16);
        let mut cases = match (suite, scale) {
            (Suite::Documents, _) => return Vec::new(),
            (_, Scale::Host) => vec![case(1, [4, 4], 256, 64, f32, true)],
            (_, Scale::Gpu) => {
                [false, true].map(|causal| case(4, [16, 16], 4096, 128, bf16, causal)).into()
            }
        };
        match (suite, scale) {
            (Suite::Quick, _) => {}
            (_, Scale::Host) => cases.push(case(1, [8, 2], 256, 128, f32, false)),
            (_, Scale::Gpu) => cases.extend([
                case(4, [16, 16], 2048, 64, bf16, true),
                case(4, [32, 8], 4096, 128, bf16, true),
                case(1, [32, 8], 16384, 128, bf16, true),
                case(4, [16, 16], 4096, 80, bf16, true),
                case(4, [16, 16], 2048, 256, bf16, true),
            ]),
        }
        cases
    }

    fn instances() -> Vec<InstanceCase<BackwardProblem>> {
        let dense = |seq, head_dim| {
            let p = AttentionProblem::dense(4, [16, 4], [seq; 2], head_dim, DType::Bf16);
            AttentionProblem { lse: true, ..p.expect("valid sizes") }
        };
        let case = |forward, max_candidates| {
            let problem =
                BackwardProblem::from_forward(forward).expect("it stores its log-sum-exp");
            InstanceCase { problem, max_candidates, clean: 1 }
        };
        let mut cases = vec![case(dense(4096, 128), usize::MAX)];
        for head_dim in HEAD_DIMS {
            cases.push(case(AttentionProblem { causal: true, ..dense(4001, head_dim) }, 3));
        }
        let p = dense(4001, 128);
        let scores = Some(ScoreStrides { batch: 0, head: 0, row: 4001, col: 1 });
        cases.push(case(AttentionProblem { window: Some(512), softcap: Some(50.0), ..p }, 1));
        cases.push(case(AttentionProblem { bias: scores, mask: scores, ..p }, 1));
        cases.push(case(AttentionProblem { causal: true, varlen: true, ..p }, 1));
        cases
    }

    fn torch(problem: &BackwardProblem) -> Option<Value> {
        let mut case = Attention::torch(&problem.forward)?;
        case["op"] = Self::NAME.into();
        Some(case)
    }
}

fn of_forward(mut forward: EdgeCase) -> BackwardCase {
    forward.problem.lse = true;
    let problem = BackwardProblem::from_forward(forward.problem)
        .expect("a valid forward pass that stores it");
    BackwardCase { problem, forward }
}
