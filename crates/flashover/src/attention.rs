//! Attention on the caller's own tensors, and its gradients.

use arch::{DType, Device};
use cubecl::server::Handle;
use kernels::attention::backward::{AttentionBackward, BackwardOperands, BackwardProblem};
use kernels::attention::{
    Attention, AttentionOperands, AttentionOptions, AttentionProblem, InvalidAttention,
    ScoreStrides,
};
use tune::{Kernel, Policy};

use crate::HostTensor;
use crate::op::{OpError, check_memory, choose, read, upload};

/// Result and log-sum-exp of an attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attended {
    /// `[batch, heads, seq_q, head_dim]`, in the operands' dtype.
    pub out: HostTensor,
    /// `[batch, heads, seq_q]`, f32.
    pub lse: HostTensor,
}

/// `softmax(rules(q·kᵀ) + bias)·v`; each of `kv_heads` heads of k and v serves `heads / kv_heads`
/// neighbours of q.
///
/// # Shapes
/// q `[batch, heads, seq_q, head_dim]`, k and v `[batch, kv_heads, seq_kv, head_dim]`; bias
/// `[batch, heads, seq_q, seq_kv]`, each axis possibly 1. Of no batches, heads or queries the result is empty; of no keys
/// it is 0, and the log-sum-exp -inf.
///
/// # Errors
/// See [`OpError`].
pub fn attention(
    device: &Device,
    operands: [&HostTensor; 3],
    bias: Option<&HostTensor>,
    options: &AttentionOptions,
    policy: Policy,
) -> Result<Attended, OpError> {
    let Some(problem) = problem(operands, bias, options)? else { return nothing(operands[0]) };
    Forward::run(device, problem, operands, bias, options, policy, 0)?.attended(device, operands[0])
}

/// The gradients of an attention by its operands, each of its operand's shape and dtype.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionGradients {
    /// By q.
    pub dq: HostTensor,
    /// By k.
    pub dk: HostTensor,
    /// By v.
    pub dv: HostTensor,
}

/// [`attention`], and what `dout`, the gradient of its result, makes of q, k and v; the scores are computed again.
///
/// # Shapes
/// As [`attention`]; dout as its result.
///
/// # Errors
/// See [`OpError`].
pub fn attention_backward(
    device: &Device,
    operands: [&HostTensor; 3],
    bias: Option<&HostTensor>,
    dout: &HostTensor,
    options: &AttentionOptions,
    policy: Policy,
) -> Result<(Attended, AttentionGradients), OpError> {
    let [q, k, v] = operands;
    let need = q.dtype();
    if dout.dtype() != need {
        return Err(OpError::DType { what: "dout", have: dout.dtype(), first: "q", need });
    }
    let shape = |tensor: &HostTensor| tensor.shape().iter().map(|axis| *axis as u32).collect();
    if dout.shape() != q.shape() {
        return Err(OpError::Shape { what: "dout", have: shape(dout), need: shape(q) });
    }
    let Some(problem) = problem(operands, bias, options)? else {
        let (dq, dk, dv) = (zeros(q)?, zeros(k)?, zeros(v)?);
        return Ok((nothing(q)?, AttentionGradients { dq, dk, dv }));
    };
    let all: usize = [q, q, k, v].iter().map(|tensor| tensor.bytes().len()).sum();
    let run = Forward::run(device, problem, operands, bias, options, policy, all)?;
    let problem = BackwardProblem::of(run.problem)?;
    let config = match options.implementation {
        None => choose::<AttentionBackward>(device, &problem, policy)?,
        Some(implementation) => implementation
            .backward_config(device.profile(), &problem)
            .map_err(|why| OpError::Forced { implementation, why })?,
    };
    let [_, dq, dk, dv] = problem.extents();
    let backward = BackwardOperands {
        forward: run.operands.clone(),
        dout: upload(device, dout.bytes()),
        dq: empty(device, dq * need.size()),
        dk: empty(device, dk * need.size()),
        dv: empty(device, dv * need.size()),
    };
    let scratch = AttentionBackward::scratch(device, &problem, &config);
    AttentionBackward::launch(device, &problem, &config, &backward, scratch.as_ref());
    let of = |buffer, len: usize, like: &HostTensor| {
        HostTensor::new(need, like.shape(), read(device, buffer, len * need.size())?)
            .map_err(OpError::from)
    };
    let gradients = AttentionGradients {
        dq: of(backward.dq, dq, q)?,
        dk: of(backward.dk, dk, k)?,
        dv: of(backward.dv, dv, v)?,
    };
    Ok((run.attended(device, q)?, gradients))
}

/// What a query that sees no key gets, for every query.
fn nothing(q: &HostTensor) -> Result<Attended, OpError> {
    let rows = q.shape()[..3].iter().product::<usize>();
    let lse = f32::NEG_INFINITY.to_le_bytes().repeat(rows);
    Ok(Attended { out: zeros(q)?, lse: HostTensor::new(DType::F32, &q.shape()[..3], lse)? })
}

fn zeros(like: &HostTensor) -> Result<HostTensor, OpError> {
    Ok(HostTensor::new(like.dtype(), like.shape(), vec![0; like.bytes().len()])?)
}

/// A forward pass that was launched.
struct Forward {
    problem: AttentionProblem,
    operands: AttentionOperands,
}

impl Forward {
    /// `more` bytes are to fit beside what the pass itself takes.
    fn run(
        device: &Device,
        problem: AttentionProblem,
        [q, k, v]: [&HostTensor; 3],
        bias: Option<&HostTensor>,
        options: &AttentionOptions,
        policy: Policy,
        more: usize,
    ) -> Result<Self, OpError> {
        let need = q.dtype();
        let bytes = |tensor: Option<&HostTensor>| tensor.map_or(0, |t| t.bytes().len() as u128);
        let (rows, out_len) = (problem.rows() as usize, problem.extents()[3]);
        check_memory(
            device,
            &[
                ("q", bytes(Some(q))),
                ("k", bytes(Some(k))),
                ("v", bytes(Some(v))),
                ("bias", bytes(bias)),
                ("the result", (out_len * need.size() + rows * 4) as u128),
                ("dout and the gradients", more as u128),
            ],
        )?;
        let config = match options.implementation {
            None => choose::<Attention>(device, &problem, policy)?,
            Some(implementation) => implementation
                .config(device.profile(), &problem)
                .map_err(|why| OpError::Forced { implementation, why })?,
        };
        let operands = AttentionOperands {
            q: upload(device, q.bytes()),
            k: upload(device, k.bytes()),
            v: upload(device, v.bytes()),
            out: empty(device, out_len * need.size()),
            lse: Some(empty(device, rows * 4)),
            bias: bias.map(|tensor| upload(device, tensor.bytes())),
            mask: None,
            offsets: None,
        };
        Attention::launch(device, &problem, &config, &operands, None);
        Ok(Self { problem, operands })
    }

    fn attended(self, device: &Device, q: &HostTensor) -> Result<Attended, OpError> {
        let (dtype, out_len) = (self.problem.dtype, self.problem.extents()[3]);
        let out = read(device, self.operands.out, out_len * dtype.size())?;
        let lse = self.operands.lse.expect("every pass stores it");
        let lse = read(device, lse, self.problem.rows() as usize * 4)?;
        Ok(Attended {
            out: HostTensor::new(dtype, q.shape(), out)?,
            lse: HostTensor::new(DType::F32, &q.shape()[..3], lse)?,
        })
    }
}

fn empty(device: &Device, bytes: usize) -> Handle {
    device.client().empty(bytes.next_multiple_of(4))
}

/// The problem that the tensors are of, with its log-sum-exp stored; none where no query sees a key, for there are none of
/// one or the other.
fn problem(
    [q, k, v]: [&HostTensor; 3],
    bias: Option<&HostTensor>,
    options: &AttentionOptions,
) -> Result<Option<AttentionProblem>, OpError> {
    let need = q.dtype();
    for (what, tensor) in [("k", Some(k)), ("v", Some(v)), ("bias", bias)] {
        if let Some(have) = tensor.map(HostTensor::dtype).filter(|have| *have != need) {
            return Err(OpError::DType { what, have, first: "q", need });
        }
    }
    let axes = |what: &'static str, tensor: &HostTensor| -> Result<[u32; 4], OpError> {
        let shape: [usize; 4] = tensor
            .shape()
            .try_into()
            .map_err(|_| OpError::FourAxes { what, rank: tensor.shape().len() })?;
        let long = shape.into_iter().find(|size| u32::try_from(*size).is_err());
        long.map_or(Ok(shape.map(|size| size as u32)), |size| Err(OpError::TooLarge(size)))
    };
    let [batch, heads, seq_q, head_dim] = axes("q", q)?;
    let [_, kv_heads, seq_kv, _] = axes("k", k)?;
    let keys = [batch, kv_heads, seq_kv, head_dim];
    for (what, have) in [("k", axes("k", k)?), ("v", axes("v", v)?)] {
        if have != keys {
            return Err(OpError::Shape { what, have: have.to_vec(), need: keys.to_vec() });
        }
    }
    if kv_heads == 0 && heads > 0 {
        return Err(InvalidAttention::Heads { heads, kv_heads }.into());
    }
    let empty = [batch, heads, seq_q, seq_kv].contains(&0);
    // Of nothing all else is looked at all the same.
    let [some_batch, some_keys, some_kv_heads] = [batch, seq_kv, kv_heads].map(|size| size.max(1));
    let some_heads = if heads == 0 { some_kv_heads } else { heads };
    let dense = AttentionProblem::dense(
        some_batch,
        [some_heads, some_kv_heads],
        [seq_q.max(1), some_keys],
        head_dim,
        need,
    )?;
    let scores = [batch, heads, seq_q, seq_kv];
    let bias_steps = match bias {
        None => None,
        Some(tensor) => {
            let have = axes("bias", tensor)?;
            if have.iter().zip(scores).any(|(have, size)| *have != size && *have != 1) {
                let (have, scores) = (have.to_vec(), scores.to_vec());
                return Err(OpError::ScoreBias { have, scores });
            }
            Some(repeated(have))
        }
    };
    let problem =
        AttentionProblem { bias: bias_steps, lse: true, ..options.on(dense) }.checked()?;
    Ok((!empty).then_some(problem))
}

/// Steps of a dense tensor of scores whose axes of one repeat.
fn repeated(shape: [u32; 4]) -> ScoreStrides {
    let [_, heads, rows, cols] = shape.map(u64::from);
    let step = |axis: usize, step: u64| if shape[axis] == 1 { 0 } else { step };
    ScoreStrides {
        batch: step(0, heads * rows * cols),
        head: step(1, rows * cols),
        row: step(2, cols),
        col: step(3, 1),
    }
}
