//! Operators of the domain `com.microsoft`, which ONNX Runtime's optimiser and exporters create.
//!
//! Source: ContribOperators.md of ONNX Runtime 1.22, and its CPU kernels for details that it omits.

mod attention;
pub(crate) mod packed;

use burn::backend::Dispatch;
use burn::backend::ops::ActivationOps;
use ops::{Activation, Constant};

use super::fused::{Convolution, Operands, activated};
use super::linear::matmul;
use super::norm::{grouped, normed, scaled};
use super::windows::Windows;
use super::{Call, Inputs, Read, Run};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Read {
    // Some files have the simplified norm without its domain.
    let op = match call.op() {
        "SimplifiedLayerNormalization" => "SimplifiedLayerNormalization",
        own => own.strip_prefix("com.microsoft::")?,
    };
    Some(Ok(match op {
        "SimplifiedLayerNormalization" => simplified(call),
        "SkipLayerNormalization" => skip(call, true),
        "SkipSimplifiedLayerNormalization" => skip(call, false),
        "BiasGelu" => Box::new(|inputs| {
            let x = inputs.get(0)?.plus(inputs.get(1)?);
            Ok(vec![x.float(Dispatch::gelu)])
        }),
        "Gelu" => Box::new(|inputs| Ok(vec![inputs.get(0)?.float(Dispatch::gelu)])),
        "FastGelu" => Box::new(|inputs| {
            let x = inputs.get(0)?;
            let x = match inputs.maybe(1) {
                Some(bias) => x.plus(bias),
                None => x,
            };
            Ok(vec![activated(x, Some(Activation::GeluTanh))?])
        }),
        "QuickGelu" => {
            let alpha = call.float("alpha").unwrap_or(1.702);
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let gate = x.clone().times_number(alpha).float(Dispatch::sigmoid);
                Ok(vec![x.times(gate)])
            })
        }
        "FusedMatMul" | "TransposeMatMul" => fused_matmul(call),
        "FusedGemm" => return Some(gemm(call)),
        "FusedConv" | "NhwcConv" | "NhwcFusedConv" => return Some(conv(call, op)),
        "GroupNorm" => group_norm(call, false),
        "SkipGroupNorm" => group_norm(call, true),
        "MatMulNBits" => return Some(packed::read(call)),
        "Attention" => return Some(attention::merged(call)),
        "MultiHeadAttention" => return Some(attention::multi_head(call)),
        "GroupQueryAttention" => return Some(attention::grouped_query(call)),
        "RotaryEmbedding" => return Some(attention::rotary(call)),
        _ => return None,
    }))
}

/// Computes `x / √(mean of squares + ε) · scale`.
fn simplified(call: &Call<'_>) -> Run {
    let (first, epsilon) = (call.int("axis").unwrap_or(-1), call.float("epsilon").unwrap_or(1e-5));
    Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let axes: Vec<usize> = (super::axis(first, x.rank())?..x.rank()).collect();
        let (normed, _, inverse) = normed(x.clone(), &axes, epsilon, false);
        Ok(vec![scaled(normed, inputs.maybe(1), None).cast(x.dtype()), inverse])
    })
}

/// Computes the norm of `input + skip + bias`, and this sum as the fourth output.
fn skip(call: &Call<'_>, centred: bool) -> Run {
    let epsilon = call.float("epsilon").unwrap_or(1e-12);
    Box::new(move |inputs| {
        let (x, skip, gamma) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        let (beta, bias) = match centred {
            true => (inputs.maybe(3), inputs.maybe(4)),
            false => (None, inputs.maybe(3)),
        };
        let dtype = x.dtype();
        let sum = x.plus(skip);
        let sum = match bias {
            Some(bias) => sum.plus(bias),
            None => sum,
        };
        let last = sum.rank() - 1;
        let (normed, mean, inverse) = normed(sum.clone(), &[last], epsilon, centred);
        Ok(vec![scaled(normed, Some(gamma), beta).cast(dtype), mean, inverse, sum])
    })
}

/// Computes `α · op(A) · op(B)`. `op` may transpose the last two dimensions, and move the batch
/// dimensions.
fn fused_matmul(call: &Call<'_>) -> Run {
    let alpha = call.float("alpha").unwrap_or(1.0);
    let transposed = [call.flag("transA"), call.flag("transB")];
    let batched = [call.flag("transBatchA"), call.flag("transBatchB")];
    Box::new(move |inputs| {
        let [a, b] = [0, 1].map(|at| {
            let own = inputs.get(at)?;
            let rank = own.rank();
            let mut order: Vec<usize> = (0..rank).collect();
            if batched[at] && rank > 2 {
                // [m, batch …, k] becomes [batch …, m, k].
                let first = order.remove(0);
                order.insert(rank - 2, first);
            }
            if transposed[at] && rank > 1 {
                order.swap(rank - 1, rank - 2);
            }
            Ok::<_, String>(own.permute(&order))
        });
        let out = matmul(inputs.ctx, a?, b?)?;
        Ok(vec![if alpha == 1.0 { out } else { out.times_number(alpha) }])
    })
}

/// Returns the activation of a fused operator, by name and parameters.
fn activation_by_name(call: &Call<'_>, numbers: &[f32]) -> Result<Option<Activation>, String> {
    let number = |at: usize, usual: f32| Constant::new(numbers.get(at).copied().unwrap_or(usual));
    Ok(Some(match call.text("activation").unwrap_or_default() {
        "" => return Ok(None),
        "Relu" => Activation::Relu,
        "Sigmoid" => Activation::Sigmoid,
        "Tanh" => Activation::Tanh,
        "LeakyRelu" => Activation::LeakyRelu { slope: number(0, 0.01) },
        "HardSigmoid" => Activation::HardSigmoid { scale: number(0, 0.2), shift: number(1, 0.5) },
        "Clip" => {
            Activation::Clip { low: number(0, f32::NEG_INFINITY), high: number(1, f32::INFINITY) }
        }
        "Gelu" => Activation::Gelu,
        "Silu" | "Swish" => Activation::Silu,
        "HardSwish" => Activation::HardSwish,
        other => return Err(format!("activation `{other}` is not supported")),
    }))
}

fn gemm(call: &Call<'_>) -> Result<Run, String> {
    let number = |name: &str, usual: f64| call.float(name).unwrap_or(usual);
    let (alpha, beta) = (number("alpha", 1.0), number("beta", 1.0));
    let transposed = [call.flag("transA"), call.flag("transB")];
    let slope = [call.float("activation_alpha"), call.float("activation_beta")];
    let numbers: Vec<f32> = slope.into_iter().flatten().map(|own| own as f32).collect();
    let activation = activation_by_name(call, &numbers)?;
    Ok(Box::new(move |inputs| {
        let [a, b] = [0, 1].map(|at| {
            let own = inputs.get(at)?;
            Ok::<_, String>(if transposed[at] { own.permute(&[1, 0]) } else { own })
        });
        let mut out = matmul(inputs.ctx, a?, b?)?.times_number(alpha);
        if let Some(c) = inputs.maybe(2) {
            out = out.plus(c.times_number(beta));
        }
        Ok(vec![activated(out, activation)?])
    }))
}

/// Computes `activation(x ∗ w + bias + z)`. Images of `NhwcFusedConv` are NHWC; `NhwcConv` also has
/// channels-last filters.
fn conv(call: &Call<'_>, op: &str) -> Result<Run, String> {
    let (last, filters_last) = (op != "FusedConv", op == "NhwcConv");
    let own = Convolution {
        windows: Windows::from_call(call)?,
        activation: activation_by_name(call, call.floats("activation_params").unwrap_or(&[]))?,
        last: call.has_input(3),
        doubled: false,
        ours: call.has_kernels(),
        channels: None,
    };
    Ok(Box::new(move |inputs| {
        let first = |own: Array| {
            let rank = own.rank();
            let order: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
            own.permute(&order)
        };
        let image = |own: Array| if last { first(own) } else { own };
        let w = inputs.get(1)?;
        let operands = Operands {
            x: image(inputs.get(0)?),
            weight: if filters_last { first(w) } else { w },
            bias: inputs.maybe(2),
            residual: inputs.maybe(3).map(image),
            each: None,
            second: None,
        };
        let out = own.run(inputs.ctx, operands)?;
        let rank = out.rank();
        let order: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
        Ok(vec![if last { out.permute(&order) } else { out }])
    }))
}

/// Computes a group norm, then SiLU if the activation is 1. With `skip`, its input is x + skip +
/// bias, which is the second output.
fn group_norm(call: &Call<'_>, skip: bool) -> Run {
    let groups = call.int("groups").unwrap_or(32) as usize;
    let epsilon = call.float("epsilon").unwrap_or(1e-5);
    let silu = call.flag("activation");
    let last = call.int("channels_last") != Some(0);
    Box::new(move |inputs: &Inputs<'_>| {
        let image = |own: Array| if last { own.permute(&[0, 3, 1, 2]) } else { own };
        let back = |own: Array| if last { own.permute(&[0, 2, 3, 1]) } else { own };
        let mut x = image(inputs.get(0)?);
        if skip {
            let more = inputs.get(3)?;
            let (batch, channels) = (x.shape()[0], x.shape()[1]);
            let more = match more.rank() {
                2 => more.reshape(&[batch, channels, 1, 1]),
                _ => image(more),
            };
            x = x.plus(more);
            if let Some(bias) = inputs.maybe(4) {
                x = x.plus(bias.reshape(&[1, channels, 1, 1]));
            }
        }
        let dtype = x.dtype();
        let out = grouped(x.clone(), inputs.maybe(1), inputs.maybe(2), groups, epsilon)?;
        let out = activated(out.cast(dtype), silu.then_some(Activation::Silu))?;
        Ok(vec![back(out), back(x)])
    })
}
