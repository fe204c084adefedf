//! Attention operators of ONNX Runtime, with projections, RoPE and KV caches.
//!
//! Masks are 0 for masked keys. `mask_filter_value`, not -∞, is added to the score of a masked key:
//! if all keys are masked, the query attends to all of them.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::backend::ops::BoolTensorOps;
use burn::tensor::{DType, TensorData};

use super::super::attention::{Heads, Scoring, attend, joined, seen, split, whole, with_past};
use super::super::fused::{LinearEpilogue, project};
use super::super::norm::{normed, scaled};
use super::super::sequence::{Angles, rotate};
use super::super::{Call, Inputs, Run};
use crate::array::{Array, Order, scalar_of};

/// Reads `Attention`: one matmul computes q, k and v.
pub(super) fn merged(call: &Call<'_>) -> Result<Run, String> {
    let own = Common::from_call(call)?;
    if call.flag("do_rotary") || call.flag("past_present_share_buffer") {
        return Err("do_rotary and past_present_share_buffer are not supported".to_owned());
    }
    let widths = call.ints("qkv_hidden_sizes").map(<[i64]>::to_vec);
    let ours = call.has_kernels();
    Ok(Box::new(move |inputs| {
        let epilogue = LinearEpilogue { bias: inputs.maybe(2), ..LinearEpilogue::default() };
        let all = project(inputs.ctx, ours, inputs.get(0)?, inputs.get(1)?, epilogue)?;
        let width = all.shape()[2];
        let ends = match widths.as_deref() {
            Some(&[q, k, v]) if [q, k, v].iter().all(|own| *own > 0) => {
                [0, q as usize, (q + k) as usize, (q + k + v) as usize]
            }
            None => [0, width / 3, width / 3 * 2, width],
            Some(_) => return Err("expected three positive qkv_hidden_sizes".to_owned()),
        };
        if ends[3] != width {
            return Err(format!("expected qkv_hidden_sizes with the sum {width}, got {}", ends[3]));
        }
        let part = |at: usize| split(all.clone().narrow(2, ends[at], ends[at + 1]), own.heads);
        let [q, k, v] = [part(0)?, part(1)?, part(2)?];
        let past = inputs.maybe(4).map(|own| {
            let shape = own.shape();
            [0, 1].map(|at| own.clone().narrow(0, at, at + 1).reshape(&shape[1..]))
        });
        let (out, [k, v]) = own.run(inputs, [q, k, v], past, inputs.maybe(3), inputs.maybe(5))?;
        let stacked = || {
            let shape = [&[1], &k.shape()[..]].concat();
            Array::concat(vec![k.clone().reshape(&shape), v.clone().reshape(&shape)], 0)
        };
        Ok(if own.presents { vec![out, stacked()] } else { vec![out] })
    }))
}

/// Reads `MultiHeadAttention`: q, k and v are separate or packed inputs.
pub(super) fn multi_head(call: &Call<'_>) -> Result<Run, String> {
    let own = Common::from_call(call)?;
    if call.has_input(8) || call.has_input(9) {
        return Err(
            "inputs past_sequence_length and cache_indirection are not supported".to_owned()
        );
    }
    if call.outputs() > 3 {
        return Err("output qk is not supported".to_owned());
    }
    Ok(Box::new(move |inputs| {
        let (q, k, v) = (inputs.get(0)?, inputs.maybe(1), inputs.maybe(2));
        // [batch, positions, heads, parts, size]
        let part = |own: &Array, at: usize| {
            let shape = own.shape();
            let one = own.clone().narrow(3, at, at + 1);
            one.reshape(&[shape[0], shape[1], shape[2], shape[4]]).permute(&[0, 2, 1, 3])
        };
        let heads = |x: Array| if x.rank() == 4 { Ok(x) } else { split(x, own.heads) };
        let given = k.as_ref().is_some_and(|own| own.rank() == 4);
        let [q, k, v] = match (q.rank(), k, v) {
            (5, None, None) => [part(&q, 0), part(&q, 1), part(&q, 2)],
            (3, Some(k), None) if k.rank() == 5 => [heads(q)?, part(&k, 0), part(&k, 1)],
            (3, Some(k), Some(v)) => [heads(q)?, heads(k)?, heads(v)?],
            _ => return Err("expected q, k and v of rank 3, or packed heads of rank 5".to_owned()),
        };
        // One bias for q, k and v. Keys of rank 4 already include it.
        let bias = inputs.maybe(3);
        let width = q.shape()[1] * q.shape()[3];
        let with_bias = |x: Array, from: usize| match &bias {
            Some(bias) => {
                let (heads, size) = (x.shape()[1], x.shape()[3]);
                let own = bias.clone().narrow(0, from, from + heads * size);
                x.plus(own.reshape(&[1, heads, 1, size]))
            }
            None => x,
        };
        let q = with_bias(q, 0);
        let (k, v) = match given {
            true => (k, v),
            false => (with_bias(k, width), with_bias(v, 2 * width)),
        };
        let past = inputs.maybe(6).zip(inputs.maybe(7)).map(|(k, v)| [k, v]);
        let (out, [k, v]) = own.run(inputs, [q, k, v], past, inputs.maybe(4), inputs.maybe(5))?;
        Ok(vec![out, k, v])
    }))
}

/// Common attributes of `Attention` and `MultiHeadAttention`.
struct Common {
    heads: usize,
    causal: bool,
    /// Score of masked keys.
    filter: f64,
    presents: bool,
    scoring: Scoring,
}

impl Common {
    fn from_call(call: &Call<'_>) -> Result<Arc<Self>, String> {
        Ok(Arc::new(Self {
            heads: count(call, "num_heads")?,
            causal: call.flag("unidirectional"),
            filter: call.float("mask_filter_value").unwrap_or(-10_000.0),
            presents: call.outputs() > 1,
            scoring: scoring(call),
        }))
    }

    /// Returns the result `[batch, positions, width]`, and the present keys and values.
    fn run(
        &self,
        inputs: &Inputs<'_>,
        [q, k, v]: [Array; 3],
        past: Option<[Array; 2]>,
        mask: Option<Array>,
        bias: Option<Array>,
    ) -> Result<(Array, [Array; 2]), String> {
        let before = past.as_ref().map_or(0, |own| own[0].shape()[2]);
        let [past_k, past_v] = past.map_or([None, None], |own| own.map(Some));
        let [k, v] = [with_past(past_k, k), with_past(past_v, v)];
        let (batch, rows, columns) = (q.shape()[0], q.shape()[2], k.shape()[2]);
        let mask =
            mask.map(|own| self.filtered(own, [batch, rows, columns], before)).transpose()?;
        let scoring = Scoring {
            masks: mask.into_iter().chain(bias).collect(),
            causal: self.causal.then_some(before),
            ..self.scoring.clone()
        };
        let heads = Heads { q, k: k.clone(), v: v.clone() };
        Ok((joined(attend(inputs.ctx, heads, scoring)?.0), [k, v]))
    }

    /// Converts a mask to an additive one.
    fn filtered(
        &self,
        mask: Array,
        [batch, rows, columns]: [usize; 3],
        before: usize,
    ) -> Result<Array, String> {
        let device = mask.device();
        let shown = match mask.shape()[..] {
            [count] if count == batch || count == 2 * batch => {
                let place = Array::arange(columns, &device).cast(mask.dtype());
                let place = place.reshape(&[1, 1, 1, columns]);
                let ends = |from: usize| {
                    mask.clone().narrow(0, from, from + batch).reshape(&[batch, 1, 1, 1])
                };
                let inside = ends(0).compared(place.clone(), Order::Greater);
                match count == batch {
                    true => inside,
                    // Left padding: the start positions of the sequences follow.
                    false => {
                        let begun = place.compared(ends(batch), Order::GreaterOrEqual);
                        inside.bools(begun, Dispatch::bool_and)
                    }
                }
            }
            [own, all] if own == batch && all == columns => {
                mask.reshape(&[batch, 1, 1, columns]).above(0.0)
            }
            [own, each, all] if own == batch && each == rows && all == columns => {
                mask.reshape(&[batch, 1, rows, columns]).above(0.0)
            }
            [own, 1, most, all] if own == batch && most >= before + rows && all >= columns => {
                mask.narrow(2, before, before + rows).narrow(3, 0, columns).above(0.0)
            }
            ref other => {
                return Err(format!(
                    "a mask of shape {other:?} is not supported for {batch} sequences of {rows} queries and {columns} keys"
                ));
            }
        };
        let number = |value: f64| Array::full(&[], value.into(), DType::F32, &device);
        shown.choose(number(0.0), number(self.filter))
    }
}

/// Reads `GroupQueryAttention`, with a KV cache, RoPE and sequences of different lengths.
pub(super) fn grouped_query(call: &Call<'_>) -> Result<Run, String> {
    let own = Arc::new(Grouped::from_call(call)?);
    Ok(Box::new(move |inputs| own.run(inputs)))
}

struct Grouped {
    heads: usize,
    kv_heads: usize,
    causal: bool,
    window: Option<usize>,
    rotary: bool,
    pairs: bool,
    /// Smooth softmax: an additional score of 0 without a value.
    smooth: bool,
    /// Epsilon of the norms of q and k.
    epsilon: f64,
    scoring: Scoring,
}

impl Grouped {
    fn from_call(call: &Call<'_>) -> Result<Self, String> {
        for name in ["k_quant_type", "v_quant_type"] {
            if call.text(name).is_some_and(|own| own != "NONE") {
                return Err(format!("{name} other than NONE is not supported"));
            }
        }
        if call.flag("sliding_window_cache") || call.flag("qk_output") {
            return Err("sliding_window_cache and qk_output are not supported".to_owned());
        }
        Ok(Self {
            heads: count(call, "num_heads")?,
            kv_heads: count(call, "kv_num_heads")?,
            causal: call.int("causal") != Some(0),
            window: call
                .int("local_window_size")
                .and_then(|own| usize::try_from(own).ok())
                .filter(|own| *own > 0),
            rotary: call.flag("do_rotary"),
            pairs: call.flag("rotary_interleaved"),
            smooth: call.flag("smooth_softmax"),
            epsilon: call.float("qk_norm_epsilon").unwrap_or(1e-6),
            scoring: scoring(call),
        })
    }

    fn run(&self, inputs: &Inputs<'_>) -> Result<Vec<Array>, String> {
        let [mut q, mut k, v] = self.heads(inputs)?;
        let (batch, rows, dtype, device) = (q.shape()[0], q.shape()[2], q.dtype(), q.device());
        let ends = inputs.get(5)?.ints()?;
        let most = inputs.get(6)?.lengths()?;
        let (Some(&total), true) = (most.first(), ends.len() == batch) else {
            return Err(format!("expected {batch} seqlens_k and a total_sequence_length"));
        };
        if total < rows {
            return Err(format!("expected a total_sequence_length of {rows} or more, got {total}"));
        }
        // Length of each sequence including new keys, and the position of the first new key.
        let ends: Vec<usize> = ends.into_iter().map(|own| (own + 1).max(0) as usize).collect();
        let first = rows == total;
        let starts: Vec<usize> =
            ends.iter().map(|own| if first { 0 } else { own.saturating_sub(rows) }).collect();
        if let (Some(of_q), Some(of_k)) = (inputs.maybe(14), inputs.maybe(15)) {
            let norm = |x: Array, weight: Array| {
                let (normed, ..) = normed(x, &[3], self.epsilon, false);
                scaled(normed, Some(weight), None).cast(dtype)
            };
            (q, k) = (norm(q, of_q), norm(k, of_k));
        }
        if self.rotary {
            let places = match inputs.maybe(9) {
                Some(own) => own.cast(DType::I64).reshape(&[batch * rows]),
                None => {
                    let all = starts.iter().flat_map(|from| (0..rows).map(move |at| from + at));
                    let all: Vec<i64> = all.map(|own| own as i64).collect();
                    Array::from_data(TensorData::new(all, [batch * rows]), &device)
                }
            };
            let (cos, sin) = (inputs.get(7)?, inputs.get(8)?);
            let (places_of_table, half) = (cos.shape()[0], cos.shape()[1]);
            if total > places_of_table {
                return Err(format!(
                    "expected cos_cache of {total} positions, got {places_of_table}"
                ));
            }
            let table = |own: Array| own.select(0, places.clone()).reshape(&[batch, rows, 1, half]);
            let angles = Angles { cos: table(cos), sin: table(sin), pairs: self.pairs };
            let by_place = |x: Array| {
                rotate(x.permute(&[0, 2, 1, 3]), &angles, 2 * half).permute(&[0, 2, 1, 3])
            };
            (q, k) = (by_place(q), by_place(k));
        }
        let present = [
            cached(inputs.maybe(3), k, &starts, total)?,
            cached(inputs.maybe(4), v, &starts, total)?,
        ];
        let [k, v] = present.clone().map(|own| own.narrow(2, 0, total));
        let uniform = ends.iter().all(|own| *own == total);
        let limits = (!uniform || !self.causal).then(|| {
            let sees = |each: usize, row: usize, column: usize| {
                let at = starts[each] + row;
                column < ends[each].max(1)
                    && (!self.causal || column <= at)
                    && self.window.is_none_or(|own| at < column + own)
            };
            seen([batch, rows, total], sees, &device)
        });
        let bias = inputs.maybe(10).map(|own| whole(own, total)).transpose()?;
        let zeros = || Array::full(&[self.heads], 0.0.into(), DType::F32, &device);
        let uniform = limits.is_none();
        let scoring = Scoring {
            causal: uniform.then_some(total - rows),
            window: self.window.filter(|_| uniform),
            masks: bias.into_iter().chain(limits).collect(),
            sinks: inputs.maybe(11).or_else(|| self.smooth.then(zeros)),
            ..self.scoring.clone()
        };
        let (out, _) = attend(inputs.ctx, Heads { q, k, v }, scoring)?;
        let [k, v] = present;
        Ok(vec![joined(out), k, v])
    }

    /// Returns q, k and v split into heads, from three inputs or a packed one.
    fn heads(&self, inputs: &Inputs<'_>) -> Result<[Array; 3], String> {
        let q = inputs.get(0)?;
        if let (Some(k), Some(v)) = (inputs.maybe(1), inputs.maybe(2)) {
            return Ok([split(q, self.heads)?, split(k, self.kv_heads)?, split(v, self.kv_heads)?]);
        }
        let all = split(q, self.heads + 2 * self.kv_heads)?;
        let ends = [0, self.heads, self.heads + self.kv_heads, self.heads + 2 * self.kv_heads];
        Ok([0, 1, 2].map(|at| all.clone().narrow(1, ends[at], ends[at + 1])))
    }
}

/// Writes new keys `[batch, heads, rows, size]` into a cache, at a start position per sequence. The
/// result has `total` positions, or those of the cache if it has more; positions after the new keys
/// are 0.
fn cached(
    past: Option<Array>,
    new: Array,
    starts: &[usize],
    total: usize,
) -> Result<Array, String> {
    let [batch, heads, rows, size] = new.shape()[..] else { unreachable!("rank 4") };
    let have = past.as_ref().map_or(0, |own| own.shape()[2]);
    let places = total.max(have);
    let past = past.filter(|_| have > 0);
    let one = |each: std::ops::Range<usize>, start: usize| {
        if start > have || start + rows > places {
            return Err(format!(
                "expected {rows} keys after at most {have} cached ones, got start {start} of {places}"
            ));
        }
        let own = |x: &Array| x.clone().narrow(0, each.start, each.end);
        let mut parts = Vec::new();
        if let Some(past) = past.as_ref().filter(|_| start > 0) {
            parts.push(own(past).narrow(2, 0, start));
        }
        parts.push(own(&new));
        let rest = places - start - rows;
        if rest > 0 {
            let shape = [each.len(), heads, rest, size];
            let dtype = new.dtype();
            parts.push(Array::full(&shape, scalar_of(0.0, dtype), dtype, &new.device()));
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Array::concat(parts, 2) })
    };
    if starts.iter().all(|own| *own == starts[0]) {
        return one(0..batch, starts[0]);
    }
    let each = starts.iter().enumerate().map(|(at, start)| one(at..at + 1, *start));
    Ok(Array::concat(each.collect::<Result<_, _>>()?, 0))
}

/// Reads `RotaryEmbedding`. A single position id is that of the first position.
pub(super) fn rotary(call: &Call<'_>) -> Result<Run, String> {
    if call.flag("is_packed_batching") || call.float("scale").is_some_and(|own| own != 1.0) {
        return Err("is_packed_batching and scale are not supported".to_owned());
    }
    let pairs = call.flag("interleaved");
    let heads = call.int("num_heads").unwrap_or(0) as usize;
    Ok(Box::new(move |inputs| {
        let (x, cos, sin) = (inputs.get(0)?, inputs.get(2)?, inputs.get(3)?);
        let (shape, half) = (x.shape(), cos.shape()[1]);
        let by_heads = shape.len() == 4;
        let x = match shape[..] {
            [_, _, _, _] => x.permute(&[0, 2, 1, 3]),
            [batch, rows, width] => {
                let heads = if heads > 0 { heads } else { width / (2 * half).max(1) };
                if heads == 0 || width % heads != 0 {
                    return Err(format!(
                        "expected a hidden size divisible by {heads} heads, got {width}"
                    ));
                }
                x.reshape(&[batch, rows, heads, width / heads])
            }
            _ => return Err(format!("expected x of rank 3 or 4, got shape {shape:?}")),
        };
        let (batch, rows) = (x.shape()[0], x.shape()[1]);
        let places = inputs.get(1)?;
        let table = |own: Array| match places.count() == batch * rows && places.rank() == 2 {
            true => Ok(own
                .select(0, places.clone().cast(DType::I64).reshape(&[batch * rows]))
                .reshape(&[batch, rows, 1, half])),
            false => {
                let from = places.lengths()?.first().copied().unwrap_or(0);
                if from + rows > own.shape()[0] {
                    let (want, have) = (from + rows, own.shape()[0]);
                    return Err(format!("expected a table of {want} positions, got {have}"));
                }
                Ok(own.narrow(0, from, from + rows).reshape(&[1, rows, 1, half]))
            }
        };
        let angles = Angles { cos: table(cos)?, sin: table(sin)?, pairs };
        let out = rotate(x, &angles, 2 * half);
        Ok(vec![if by_heads { out.permute(&[0, 2, 1, 3]) } else { out.reshape(&shape) }])
    }))
}

/// Returns the score options of a node. A scale of 0 means the default.
fn scoring(call: &Call<'_>) -> Scoring {
    let own = Scoring::new(call);
    Scoring { scale: own.scale.filter(|own| *own != 0.0), ..own }
}

fn count(call: &Call<'_>, name: &str) -> Result<usize, String> {
    let own = call.int(name).and_then(|own| usize::try_from(own).ok()).filter(|own| *own > 0);
    own.ok_or_else(|| format!("expected attribute `{name}` of 1 or more"))
}
