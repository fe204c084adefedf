//! Attention on the caller's own tensors.

use arch::{DType, Device};
use kernels::attention::{
    Attention, AttentionOperands, AttentionOptions, AttentionProblem, ScoreStrides,
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
/// `[batch, heads, seq_q, seq_kv]`, each axis possibly 1.
///
/// # Errors
/// See [`OpError`].
pub fn attention(
    device: &Device,
    [q, k, v]: [&HostTensor; 3],
    bias: Option<&HostTensor>,
    options: &AttentionOptions,
    policy: Policy,
) -> Result<Attended, OpError> {
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
    let dense = AttentionProblem::dense(batch, [heads, kv_heads], [seq_q, seq_kv], head_dim, need)?;
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
        ],
    )?;
    let config = match options.implementation {
        None => choose::<Attention>(device, &problem, policy)?,
        Some(wanted) => {
            let refused = |why| OpError::Forced { implementation: wanted, why };
            wanted.config(device.profile(), &problem).map_err(refused)?
        }
    };
    let empty = |bytes: usize| device.client().empty(bytes.next_multiple_of(4));
    let lse = empty(rows * 4);
    let operands = AttentionOperands {
        q: upload(device, q.bytes()),
        k: upload(device, k.bytes()),
        v: upload(device, v.bytes()),
        out: empty(out_len * need.size()),
        lse: Some(lse.clone()),
        bias: bias.map(|tensor| upload(device, tensor.bytes())),
        mask: None,
        offsets: None,
    };
    Attention::launch(device, &problem, &config, &operands, None);
    let out = read(device, operands.out, out_len * need.size())?;
    let lse = read(device, lse, rows * 4)?;
    Ok(Attended {
        out: HostTensor::new(need, q.shape(), out)?,
        lse: HostTensor::new(DType::F32, &q.shape()[..3], lse)?,
    })
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
