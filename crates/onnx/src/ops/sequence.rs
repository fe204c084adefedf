//! Operators of sequence models: RoPE, linear attention, causal convolutions, and cache updates.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, TensorData};
use ops::Activation;

use super::fused::{Convolution, Operands};
use super::linear::matmul;
use super::windows::{Padding, Windows};
use super::{Call, Inputs, Read, Run, axis};
use crate::array::{Array, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "RotaryEmbedding" => Ok(rotary(call)),
        "LinearAttention" => linear_attention(call),
        "CausalConvWithState" => causal_conv(call),
        "TensorScatter" => {
            let (at, circular) =
                (call.int("axis").unwrap_or(-2), call.text("mode") == Some("circular"));
            Ok(Box::new(move |inputs| write_cache(inputs, at, circular)))
        }
        "ReverseSequence" => {
            let (batch, time) =
                (call.int("batch_axis").unwrap_or(1), call.int("time_axis").unwrap_or(0));
            Ok(Box::new(move |inputs| reversed(inputs, batch, time)))
        }
        _ => return None,
    })
}

fn rotary(call: &Call<'_>) -> Run {
    let (pairs, dims) =
        (call.flag("interleaved"), call.int("rotary_embedding_dim").unwrap_or(0) as usize);
    let heads = call.int("num_heads").unwrap_or(0) as usize;
    Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let own = x.shape();
        // [batch, positions, heads, size]
        let x = match own[..] {
            [_, _, _, _] => x.permute(&[0, 2, 1, 3]),
            [batch, positions, width] if heads > 0 => {
                x.reshape(&[batch, positions, heads, width / heads])
            }
            _ => return Err(format!("expected x of rank 4, or 3 with num_heads, got {own:?}")),
        };
        let [batch, positions, _, size] = x.shape()[..] else { unreachable!("rank 4") };
        let dims = if dims == 0 { size } else { dims };
        let half = dims / 2;
        let table = |at: usize| {
            let table = inputs.get(at)?;
            let table = match inputs.maybe(3) {
                Some(places) => {
                    let count = places.count();
                    table.select(0, places.cast(DType::I64).reshape(&[count]))
                }
                None => table,
            };
            Ok::<_, String>(table.reshape(&[batch, positions, 1, half]))
        };
        let out = rotate(x, &Angles { cos: table(1)?, sin: table(2)?, pairs }, dims);
        Ok(vec![if own.len() == 4 { out.permute(&[0, 2, 1, 3]) } else { out.reshape(&own) }])
    })
}

/// Angles of RoPE.
pub(super) struct Angles {
    /// `[batch, positions, 1, dims / 2]`
    pub(super) cos: Array,
    pub(super) sin: Array,
    /// True to pair neighbours (interleaved), false to pair halves.
    pub(super) pairs: bool,
}

/// Applies RoPE to the first `dims` elements of each head of `[batch, positions, heads, size]`.
pub(super) fn rotate(x: Array, angles: &Angles, dims: usize) -> Array {
    let [batch, positions, heads, size] = x.shape()[..] else { unreachable!("rank 4") };
    let half = dims / 2;
    let first = x.clone().narrow(3, 0, dims);
    let part = |at: usize| match angles.pairs {
        true => first
            .clone()
            .reshape(&[batch, positions, heads, half, 2])
            .narrow(4, at, at + 1)
            .reshape(&[batch, positions, heads, half]),
        false => first.clone().narrow(3, at * half, (at + 1) * half),
    };
    let (one, other) = (part(0), part(1));
    let (cos, sin) = (angles.cos.clone(), angles.sin.clone());
    let real = cos.clone().times(one.clone()).minus(sin.clone().times(other.clone()));
    let other = sin.times(one).plus(cos.times(other));
    let rotated = match angles.pairs {
        true => {
            let shape = [batch, positions, heads, half, 1];
            let both = vec![real.reshape(&shape), other.reshape(&shape)];
            Array::concat(both, 4).reshape(&[batch, positions, heads, dims])
        }
        false => Array::concat(vec![real, other], 3),
    };
    match dims == size {
        true => rotated,
        false => Array::concat(vec![rotated, x.narrow(3, dims, size)], 3),
    }
}

fn linear_attention(call: &Call<'_>) -> Result<Run, String> {
    let count = |name: &str| call.int(name).filter(|own| *own > 0).map(|own| own as usize);
    let heads = count("q_num_heads").ok_or("attribute `q_num_heads` is missing")?;
    let kv_heads = count("kv_num_heads").ok_or("attribute `kv_num_heads` is missing")?;
    if heads % kv_heads != 0 {
        return Err(format!("expected kv_num_heads that divides {heads}, got {kv_heads}"));
    }
    let scale = call.float("scale").filter(|own| *own != 0.0);
    let rule = call.text("update_rule").unwrap_or("gated_delta");
    let (gated, delta) = match rule {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(format!("update_rule `{other}` is not supported")),
    };
    Ok(Box::new(move |inputs| {
        let q = inputs.get(0)?;
        let dtype = q.dtype();
        let [batch, steps, width] = q.shape()[..] else {
            return Err(format!("expected q of rank 3, got shape {:?}", q.shape()));
        };
        let size = width / heads;
        // [batch, heads, steps, size] in f32
        let split = |own: Array, heads: usize| {
            let size = own.shape()[2] / heads;
            own.cast(DType::F32).reshape(&[batch, steps, heads, size]).permute(&[0, 2, 1, 3])
        };
        let (q, k, v) =
            (split(q, heads), split(inputs.get(1)?, kv_heads), split(inputs.get(2)?, kv_heads));
        let size_v = v.shape()[3];
        let decay = if gated { Some(split(inputs.get(4)?, kv_heads)) } else { None };
        let beta = match delta {
            true => {
                let own = inputs.get(5)?;
                let last = own.shape()[2];
                Some(split(own, last))
            }
            false => None,
        };
        let zero = || {
            Array::full(
                &[batch, kv_heads, size, size_v],
                scalar_of(0.0, DType::F32),
                DType::F32,
                &k.device(),
            )
        };
        let past = inputs.maybe(3);
        let kept = past.as_ref().map_or(dtype, Array::dtype);
        let mut state = past.map_or_else(zero, |own| own.cast(DType::F32));
        let scale = scale.unwrap_or(1.0 / (size as f64).sqrt());
        let mut lines = Vec::new();
        let at = |own: &Array, step: usize| own.clone().narrow(2, step, step + 1);
        for step in 0..steps {
            let key = at(&k, step).permute(&[0, 1, 3, 2]);
            let mut value = at(&v, step);
            if let Some(decay) = &decay {
                let factor = at(decay, step).permute(&[0, 1, 3, 2]).float(Dispatch::float_exp);
                state = state.times(factor);
            }
            if let Some(beta) = &beta {
                let known = matmul(inputs.ctx, at(&k, step), state.clone())?;
                value = value.minus(known).times(at(beta, step));
            }
            state = state.plus(matmul(inputs.ctx, key, value)?);
            let each = state.clone().reshape(&[batch, kv_heads, 1, size, size_v]);
            let each = each.expand(&[batch, kv_heads, heads / kv_heads, size, size_v]);
            let all = each.reshape(&[batch, heads, size, size_v]);
            lines.push(matmul(inputs.ctx, at(&q, step), all)?.times_number(scale));
        }
        let out =
            Array::concat(lines, 2).permute(&[0, 2, 1, 3]).reshape(&[batch, steps, heads * size_v]);
        Ok(vec![out.cast(dtype), state.cast(kept)])
    }))
}

fn causal_conv(call: &Call<'_>) -> Result<Run, String> {
    let silu = match call.text("activation").unwrap_or("none") {
        "none" => false,
        "silu" | "swish" => true,
        other => return Err(format!("activation `{other}` is not supported")),
    };
    let ours = call.has_kernels();
    Ok(Box::new(move |inputs| {
        let (x, filters) = (inputs.get(0)?, inputs.get(1)?);
        let dtype = x.dtype();
        let [batch, channels, _] = x.shape()[..] else {
            return Err(format!("expected x of rank 3, got shape {:?}", x.shape()));
        };
        let before = filters.shape()[2] - 1;
        let past = inputs.maybe(3).unwrap_or_else(|| {
            Array::full(&[batch, channels, before], scalar_of(0.0, dtype), dtype, &x.device())
        });
        let padded = if before == 0 { x } else { Array::concat(vec![past, x], 2) };
        let own = Convolution {
            windows: Windows::new(&[1], Padding::Pads(&[0, 0]), &[1], channels),
            activation: silu.then_some(Activation::Silu),
            last: false,
            doubled: false,
            ours,
            channels: None,
        };
        let operands = Operands {
            x: padded.clone(),
            weight: filters,
            bias: inputs.maybe(2),
            residual: None,
            each: None,
            second: None,
        };
        let out = own.run(inputs.ctx, operands)?;
        let len = padded.shape()[2];
        Ok(vec![out, padded.narrow(2, len - before, len)])
    }))
}

/// Writes an update into each sequence of a cache, at its own start position.
fn write_cache(inputs: &Inputs<'_>, at: i64, circular: bool) -> Result<Vec<Array>, String> {
    let (past, update) = (inputs.get(0)?, inputs.get(1)?);
    let own = past.shape();
    let at = axis(at, own.len())?;
    let (len, more) = (own[at], update.shape()[at]);
    let starts = inputs.maybe(2).map(|own| own.ints()).transpose()?;
    let starts = starts.unwrap_or_else(|| vec![0; own[0]]);
    let mut all = Vec::new();
    for (batch, start) in starts.iter().enumerate() {
        let mut line = past.clone().narrow(0, batch, batch + 1);
        for step in 0..more {
            let place = usize::try_from(*start)
                .map_err(|_| "expected write positions of 0 or more")?
                + step;
            let place = if circular { place % len } else { place };
            if place >= len {
                return Err(format!("expected a write position below {len}, got {place}"));
            }
            let part = update.clone().narrow(0, batch, batch + 1).narrow(at, step, step + 1);
            let mut parts = Vec::new();
            if place > 0 {
                parts.push(line.clone().narrow(at, 0, place));
            }
            parts.push(part);
            if place + 1 < len {
                parts.push(line.narrow(at, place + 1, len));
            }
            line = Array::concat(parts, at);
        }
        all.push(line);
    }
    Ok(vec![Array::concat(all, 0)])
}

/// Reverses each sequence up to its length.
fn reversed(inputs: &Inputs<'_>, batch: i64, time: i64) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let own = x.shape();
    let (batch, time) = (axis(batch, own.len())?, axis(time, own.len())?);
    let mut all = Vec::new();
    for (at, len) in inputs.lengths(1)?.into_iter().enumerate() {
        let places: Vec<i64> = (0..own[time])
            .map(|step| if step < len { len - 1 - step } else { step } as i64)
            .collect();
        let places = Array::from_data(TensorData::new(places, [own[time]]), &x.device());
        all.push(x.clone().narrow(batch, at, at + 1).select(time, places));
    }
    Ok(vec![Array::concat(all, batch)])
}
