//! Gradients of attention against their reference. The forward pass is ours, its result read back: what
//! a backward pass makes of it is what is checked.

use arch::{Backend, DType, Device};
use kernels::attention::backward::{
    AttentionBackward, BackwardConfig, BackwardOperands, BackwardProblem,
};
use kernels::attention::{Attention, AttentionProblem};
use reference::{Comparison, Lines, Saved, Scores};
use tune::Kernel;

use crate::attention::{
    EdgeCase, Host, Inputs, Part, digest, edge_cases as forward_cases, extents, parts, read, values,
};
use crate::{CheckError, Verdict, launch_twice, reference_dtype, unwritten};

/// One problem to verify, and the inputs of its forward pass.
#[derive(Debug, Clone)]
pub struct BackwardCase {
    pub problem: BackwardProblem,
    pub forward: EdgeCase,
}

/// Runs `case` on fresh host inputs and compares every gradient with the reference. Gradients are filled
/// with NaN first, so that an element nobody wrote fails.
///
/// # Errors
/// A kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check(
    device: &Device,
    case: &BackwardCase,
    config: &BackwardConfig,
) -> Result<Verdict, CheckError> {
    let (problem, p) = (&case.problem, &case.problem.forward);
    let dtype = reference_dtype(p.dtype);
    let host = Host::new(device, &case.forward)?;
    let forward = Attention::simplest(device.profile(), p)
        .map_err(|why| CheckError::Kernel(format!("no forward pass: {why}")))?;
    Attention::launch(device, p, &forward, &host.operands, None);
    let (out, lse) = host.results(device)?;
    let lse = lse.expect("a checked problem stores its log-sum-exp");

    let [q_len, k_len, v_len, out_len] = extents(&case.forward);
    let dout = values(&case.forward, out_len, 5, 1.0)?;
    let upload = |bytes: &[u8]| device.client().create_from_slice(&crate::padded(bytes));
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

    // Of all sequences together: one of a single key has no gradients but 0, and no error to measure by.
    let mut lines: Option<[Lines; 3]> = None;
    for part in parts(&case.forward) {
        let queries =
            |from: &[f32], s| part.dense(from, s, [p.heads, part.seq_q], part.from_q, p.head_dim);
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
        let operands = host.of(p, &part);
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

/// Compares what a launch left in `operands` with the reference at a seeded sample of rows, reading
/// everything else back from the device: dense, without bias, mask or varying lengths.
///
/// # Errors
/// A launch failed.
pub fn check_operands(
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

/// The problems that every config must get right, for one type on one backend: those of the forward pass and its
/// log-sum-exp, but for inputs that are not finite, whose gradients are left open, and batches far from each other.
pub fn edge_cases(dtype: DType, backend: Backend) -> Vec<BackwardCase> {
    let ordinary = |case: &EdgeCase| !matches!(case.inputs, Inputs::Special | Inputs::Far);
    forward_cases(dtype, backend).into_iter().filter(ordinary).map(of_forward).collect()
}

/// Fewer problems for configs that are not the default.
pub fn config_cases(dtype: DType) -> Vec<BackwardCase> {
    let mut cases: Vec<_> =
        crate::attention::config_cases(dtype).into_iter().map(of_forward).collect();
    // Every head dimension from whose size on the sides change.
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

fn of_forward(mut forward: EdgeCase) -> BackwardCase {
    forward.problem.lse = true;
    let problem =
        BackwardProblem::of(forward.problem).expect("a valid forward pass that stores it");
    BackwardCase { problem, forward }
}
