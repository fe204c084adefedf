//! Attention on host tensors, forward and backward.

use arch::DType;
use burn::tensor::Tensor;
use kernels::attention::AttentionOptions;
use tune::Policy;

use super::call::{Call, check_dtypes};
use super::error::HostOpError;
use super::tensor::HostTensor;

use crate::device::Device;

/// Result and log-sum-exp of attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attended {
    /// Result: `[batch, heads, seq_q, head_dim]`, in the operands' dtype.
    pub out: HostTensor,
    /// Log-sum-exp of the scores: `[batch, heads, seq_q]`, f32.
    pub lse: HostTensor,
}

/// Computes `softmax(rules(q·kᵀ) + bias)·v`, where the rules are scale, soft cap and masks of `options`. Each head of k
/// and v serves `heads / kv_heads` adjacent heads of q.
///
/// # Shapes
/// - q: `[batch, heads, seq_q, head_dim]`
/// - k and v: `[batch, kv_heads, seq_kv, head_dim]`
/// - bias: `[batch, heads, seq_q, seq_kv]`; an axis of size 1 broadcasts
/// - result: see [`Attended`]
///
/// Without batches, heads or queries the result is empty. Without keys the result is 0 and the log-sum-exp is -inf.
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

/// Gradients of attention with respect to its operands. Each has the shape and dtype of its operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionGradients {
    /// Gradient of q: `[batch, heads, seq_q, head_dim]`.
    pub dq: HostTensor,
    /// Gradient of k: `[batch, kv_heads, seq_kv, head_dim]`.
    pub dk: HostTensor,
    /// Gradient of v: `[batch, kv_heads, seq_kv, head_dim]`.
    pub dv: HostTensor,
}

/// Computes [`attention`] and the gradients of q, k and v from `dout`, the gradient of the result. The scores are
/// recomputed.
///
/// # Shapes
/// As for [`attention`]; dout has the shape of the result.
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

/// Operands on the device.
struct On {
    call: Call,
    qkv: [Tensor<4>; 3],
    bias: Option<Tensor<4>>,
}

impl On {
    /// Uploads the operands if the device has memory for them, the results and `more`.
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
    let takes = "attention takes q, k, v as [batch, heads, positions, head_dim], bias as [batch, heads, seq_q, seq_kv]";
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
