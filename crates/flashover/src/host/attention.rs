//! Attention of host tensors, and its gradients.

use arch::DType;
use burn::tensor::Tensor;
use kernels::attention::AttentionOptions;
use tune::Policy;

use super::call::{Call, check_dtypes};
use super::error::HostOpError;
use super::tensor::HostTensor;

use crate::device::Device;

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
/// `[batch, heads, seq_q, seq_kv]`, each axis possibly 1. Without batches, heads or queries the result is empty; without
/// keys it is 0, and the log-sum-exp -inf.
///
/// # Errors
/// See [`HostOpError`].
pub fn attention(
    device: &Device,
    operands: [&HostTensor; 3],
    bias: Option<&HostTensor>,
    options: &AttentionOptions,
    policy: Policy,
) -> Result<Attended, HostOpError> {
    let On { call, qkv: [q, k, v], bias } = On::new(device, operands, bias, &[], policy)?;
    let (out, lse) = ops::attention_with_lse(&call.ctx, q, k, v, None, bias, *options)?;
    attended(&call, operands[0], out, lse)
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

/// [`attention`], and the gradients by q, k and v from `dout`, the gradient of its result; the scores are computed again.
///
/// # Shapes
/// As [`attention`]; dout as its result.
///
/// # Errors
/// See [`HostOpError`].
pub fn attention_backward(
    device: &Device,
    operands: [&HostTensor; 3],
    bias: Option<&HostTensor>,
    dout: &HostTensor,
    options: &AttentionOptions,
    policy: Policy,
) -> Result<(Attended, AttentionGradients), HostOpError> {
    let [q, k, v] = operands;
    check_dtypes(q, &[("dout", Some(dout))])?;
    let more = [("dout", dout), ("dq", q), ("dk", k), ("dv", v)];
    let On { call, qkv, bias } = On::new(device, operands, bias, &more, policy)?;
    let dout = call.upload(dout.bytes().to_vec(), axes("dout", dout)?);
    let (ctx, [tq, tk, tv]) = (&call.ctx, qkv.clone());
    let (out, lse) = ops::attention_with_lse(ctx, tq, tk, tv, None, bias.clone(), *options)?;
    let forward = (out.clone(), lse.clone());
    let gradients = ops::attention_backward(ctx, qkv, None, bias, forward, dout, *options)?;
    let [dq, dk, dv] = gradients;
    let gradient = |made, of: &HostTensor| call.download(made, of.dtype(), of.shape());
    let gradients =
        AttentionGradients { dq: gradient(dq, q)?, dk: gradient(dk, k)?, dv: gradient(dv, v)? };
    Ok((attended(&call, q, out, lse)?, gradients))
}

/// Operands on a device.
struct On {
    call: Call,
    qkv: [Tensor<4>; 3],
    bias: Option<Tensor<4>>,
}

impl On {
    /// Uploads operands where there is memory for them, the results and `more`.
    fn new(
        device: &Device,
        [q, k, v]: [&HostTensor; 3],
        bias: Option<&HostTensor>,
        more: &[(&'static str, &HostTensor)],
        policy: Policy,
    ) -> Result<Self, HostOpError> {
        check_dtypes(q, &[("k", Some(k)), ("v", Some(v)), ("bias", bias)])?;
        let shapes = [axes("q", q)?, axes("k", k)?, axes("v", v)?];
        let bias_shape = bias.map(|bias| axes("bias", bias)).transpose()?;
        let lse = shapes[0][..3].iter().fold(4, |n: u128, s| n.saturating_mul(*s as u128));
        let operands = [("q", q), ("k", k), ("v", v), ("the result", q)];
        let tensors = operands.iter().chain(more).copied().chain(bias.map(|bias| ("bias", bias)));
        let needs = tensors.map(|(what, tensor)| (what, tensor.bytes().len() as u128));
        let needs: Vec<_> = needs.chain([("the log-sum-exp", lse)]).collect();
        let call = Call::new(device, policy, q.dtype(), &needs)?;
        let on = |tensor: &HostTensor, shape| call.upload(tensor.bytes().to_vec(), shape);
        let qkv = [on(q, shapes[0]), on(k, shapes[1]), on(v, shapes[2])];
        let bias = bias.zip(bias_shape).map(|(bias, shape)| on(bias, shape));
        Ok(Self { call, qkv, bias })
    }
}

fn axes(what: &'static str, tensor: &HostTensor) -> Result<[usize; 4], HostOpError> {
    let takes = "attention takes [batch, heads, positions, head_dim], and bias as [batch, heads, seq_q, seq_kv]";
    let rank = tensor.shape().len();
    tensor.shape().try_into().map_err(|_| HostOpError::Rank { what, rank, takes })
}

fn attended(
    call: &Call,
    q: &HostTensor,
    out: Tensor<4>,
    lse: Tensor<3>,
) -> Result<Attended, HostOpError> {
    Ok(Attended {
        out: call.download(out, q.dtype(), q.shape())?,
        lse: call.download(lse, DType::F32, &q.shape()[..3])?,
    })
}
