//! Attention with masks, and the ONNX operator `Attention`.
//!
//! ```text
//! s[i, j] = softcap(scale · q[i] · k[j]) + mask[i, j]      out[i] = Σ_j softmax_j(s)[i, j] · v[j]
//! ```
//!
//! With `causal`, query i attends to the keys up to i + offset, or to a window of them. Scores and
//! probabilities are f32, or f64. A query without visible keys returns 0.

use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice};
use burn::tensor::{DType, TensorData};
use ops::{AttentionOptions, Ctx};

use super::fused::is_ours;
use super::linear::matmul;
use super::{Call, Read, Run};
use crate::array::{Array, Kind, Order, scalar_of};
use crate::tensor;

pub(super) fn read(call: &Call<'_>) -> Read {
    Some(match call.op() {
        "Attention" => attention(call),
        _ => return None,
    })
}

/// Stage of the scores that a node returns as an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scores {
    Plain,
    Capped,
    Masked,
    Shares,
}

/// Operands of an attention, split into heads.
pub(crate) struct Heads {
    /// `[batch, heads, rows, size]`
    pub(crate) q: Array,
    /// `[batch, kv_heads, columns, size]`; kv_heads divides the heads of q.
    pub(crate) k: Array,
    /// `[batch, kv_heads, columns, size of values]`
    pub(crate) v: Array,
}

/// Options of the scores and of the mask.
#[derive(Clone)]
pub(crate) struct Scoring {
    /// True if our kernels run on the device.
    pub(crate) ours: bool,
    /// Factor on q·kᵀ; None means 1 / √size.
    pub(crate) scale: Option<f64>,
    /// Soft cap of the scores; 0 disables it.
    pub(crate) softcap: f64,
    /// Additive masks, which broadcast to the scores.
    pub(crate) masks: Vec<Array>,
    /// Causal offset: query i attends to the keys up to i + offset.
    pub(crate) causal: Option<usize>,
    /// Size of a sliding window of keys, with `causal`.
    pub(crate) window: Option<usize>,
    /// Attention sink of each head `[heads]`: a score without a value.
    pub(crate) sinks: Option<Array>,
    /// Dtype of the probabilities; None means that of the scores.
    pub(crate) precision: Option<DType>,
    /// Scores to return, if any.
    pub(crate) shown: Option<Scores>,
}

impl Scoring {
    pub(super) fn new(call: &Call<'_>) -> Self {
        Self {
            scale: call.float("scale"),
            softcap: call.float("softcap").unwrap_or(0.0),
            ..Self::plain(call.has_kernels())
        }
    }

    /// Returns options without a mask, with the default scale.
    pub(crate) const fn plain(ours: bool) -> Self {
        Self {
            ours,
            scale: None,
            softcap: 0.0,
            masks: Vec::new(),
            causal: None,
            window: None,
            sinks: None,
            precision: None,
            shown: None,
        }
    }
}

/// Computes the attention. Returns `[batch, heads, rows, size of values]`, and the requested
/// scores.
///
/// # Errors
/// Head counts that do not match; the device failed.
pub(crate) fn attend(
    ctx: &Ctx,
    heads: Heads,
    scoring: Scoring,
) -> Result<(Array, Option<Array>), String> {
    let Heads { q, k, v } = heads;
    let [batch, count, rows, size] = q.shape()[..] else {
        return Err(format!("expected q of rank 4, got shape {:?}", q.shape()));
    };
    let (kv_heads, columns) = (k.shape()[1], k.shape()[2]);
    if kv_heads == 0 || count % kv_heads != 0 {
        return Err(format!("expected heads of k that divide the {count} of q, got {kv_heads}"));
    }
    let dtype = q.dtype();
    let ends = scoring.causal.is_none_or(|offset| offset + rows == columns);
    let plain = scoring.sinks.is_none() && scoring.shown.is_none() && ends;
    if scoring.ours && plain && is_ours(dtype) && v.shape()[3] == size && v.dtype() == dtype {
        let mask = scoring.masks.into_iter().map(|own| own.cast(dtype)).reduce(Array::plus);
        let options = AttentionOptions {
            scale: scoring.scale.map(|own| own as f32),
            softcap: (scoring.softcap > 0.0).then_some(scoring.softcap as f32),
            causal: scoring.causal.is_some(),
            window: scoring.window.map(|own| own as u32),
            ..AttentionOptions::default()
        };
        let [q, k, v] = [q, k, v].map(Array::tensor::<4>);
        let out = ops::attention(ctx, q, k, v, None, mask.map(Array::tensor), options);
        return Ok((Array::from_tensor(out.map_err(|why| why.to_string())?), None));
    }
    // Repeat each key head for its group of query heads.
    let shared = |own: Array| {
        let [batch, kv_heads, positions, size] = own.shape()[..] else { unreachable!("rank 4") };
        let each = own.reshape(&[batch, kv_heads, 1, positions, size]);
        let each = each.expand(&[batch, kv_heads, count / kv_heads, positions, size]);
        each.reshape(&[batch, count, positions, size])
    };
    let (k, v) = if kv_heads == count { (k, v) } else { (shared(k), shared(v)) };
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let scale = scoring.scale.unwrap_or(1.0 / (size as f64).sqrt());
    let (q, k) = (q.cast(wide).times_number(scale), k.cast(wide));
    let hides = scoring.causal.is_some() || !scoring.masks.is_empty();
    let mut scores = matmul(ctx, q, k.permute(&[0, 1, 3, 2]))?;
    let mut shown = (scoring.shown == Some(Scores::Plain)).then(|| scores.clone());
    if scoring.softcap > 0.0 {
        let cap = scoring.softcap;
        scores = scores.times_number(1.0 / cap).float(Dispatch::float_tanh).times_number(cap);
    }
    if scoring.shown == Some(Scores::Capped) {
        shown = Some(scores.clone());
    }
    let device = scores.device();
    let seen = scoring.causal.map(|offset| {
        let window = scoring.window.unwrap_or(usize::MAX);
        let sees = |row: usize, column: usize| {
            let last = row + offset;
            column <= last && last - column < window
        };
        seen([1, rows, columns], |_, row, column| sees(row, column), &device)
    });
    for mask in scoring.masks.into_iter().chain(seen) {
        scores = scores.plus(mask.cast(wide));
    }
    if scoring.shown == Some(Scores::Masked) {
        shown = Some(scores.clone());
    }
    if let Some(sinks) = scoring.sinks {
        let each = sinks.cast(wide).reshape(&[1, count, 1, 1]).expand(&[batch, count, rows, 1]);
        scores = Array::concat(vec![scores, each], 3);
    }
    let narrow = scoring.precision.filter(|own| own.is_float()).unwrap_or(wide);
    let scores = scores.cast(narrow).cast(wide);
    let rows_hidden = hides.then(|| {
        let most = Array::from_dispatch(Dispatch::float_max_dim(scores.clone().into_inner(), 3));
        let lowest = Array::full(&[], scalar_of(f64::NEG_INFINITY, wide), wide, &device);
        most.compared(lowest, Order::Equal)
    });
    let mut shares = super::reduce::shares(scores, 3).narrow(3, 0, columns);
    if let Some(hidden) = rows_hidden {
        let none = Array::full(&[], scalar_of(0.0, wide), wide, &device);
        shares = hidden.choose(none, shares)?;
    }
    if scoring.shown == Some(Scores::Shares) {
        shown = Some(shares.clone());
    }
    let out = matmul(ctx, shares, v.cast(wide))?.cast(dtype);
    Ok((out, shown.map(|own| own.cast(dtype))))
}

/// Returns an additive mask `[batch, 1, rows, columns]`: 0 for visible keys, -∞ for others.
pub(super) fn seen(
    [batch, rows, columns]: [usize; 3],
    sees: impl Fn(usize, usize, usize) -> bool,
    device: &DispatchDevice,
) -> Array {
    let mut all = Vec::with_capacity(batch * rows * columns);
    for each in 0..batch {
        for row in 0..rows {
            let number = |column| if sees(each, row, column) { 0.0 } else { f32::NEG_INFINITY };
            all.extend((0..columns).map(number));
        }
    }
    Array::from_data(TensorData::new(all, [batch, 1, rows, columns]), device)
}

/// Concatenates past keys or values with the new ones.
pub(crate) fn with_past(past: Option<Array>, new: Array) -> Array {
    match past {
        Some(past) => Array::concat(vec![past, new], 2),
        None => new,
    }
}

/// Splits the last dimension into heads: `[batch, positions, heads · size]` becomes `[batch, heads, positions, size]`.
///
/// # Errors
/// The rank is not 3, or the heads do not divide the width.
pub(crate) fn split(x: Array, heads: usize) -> Result<Array, String> {
    let [batch, positions, width] = x.shape()[..] else {
        return Err(format!("expected an operand of rank 3, got shape {:?}", x.shape()));
    };
    if heads == 0 || width % heads != 0 {
        return Err(format!("expected a hidden size divisible by {heads} heads, got {width}"));
    }
    Ok(x.reshape(&[batch, positions, heads, width / heads]).permute(&[0, 2, 1, 3]))
}

/// Merges heads: the inverse of [`split`].
pub(crate) fn joined(x: Array) -> Array {
    let [batch, heads, positions, size] = x.shape()[..] else { unreachable!("rank 4") };
    x.permute(&[0, 2, 1, 3]).reshape(&[batch, positions, heads * size])
}

fn attention(call: &Call<'_>) -> Result<Run, String> {
    let count = |name: &str| call.int(name).map(|own| own as usize);
    let heads = [count("q_num_heads"), count("kv_num_heads"), count("kv_num_heads")];
    let causal = call.flag("is_causal");
    let side = |name: &str| call.int(name).and_then(|own| usize::try_from(own).ok());
    let (left, right) = (side("left_window_size"), side("right_window_size"));
    let kind = match call.int("qk_matmul_output_mode").unwrap_or(0) {
        0 => Scores::Plain,
        1 => Scores::Capped,
        2 => Scores::Masked,
        3 => Scores::Shares,
        other => return Err(format!("qk_matmul_output_mode {other} is not supported")),
    };
    let scoring = Arc::new(Scoring {
        precision: call
            .int("softmax_precision")
            .map(|own| tensor::dtype(own as i32))
            .transpose()?,
        shown: (call.outputs() > 3).then_some(kind),
        ..Scoring::new(call)
    });
    Ok(Box::new(move |inputs| {
        let mut flat = false;
        let mut own = [inputs.get(0)?, inputs.get(1)?, inputs.get(2)?];
        for (own, heads) in own.iter_mut().zip(heads) {
            if own.rank() == 3 {
                *own = split(
                    own.clone(),
                    heads.ok_or("attribute `q_num_heads` or `kv_num_heads` is missing")?,
                )?;
                flat = true;
            }
        }
        let [q, k, v] = own;
        let past = inputs.maybe(4).map_or(0, |own| own.shape()[2]);
        let (k, v) = (with_past(inputs.maybe(4), k), with_past(inputs.maybe(5), v));
        let present = [k.clone(), v.clone()];
        let (batch, rows, columns) = (q.shape()[0], q.shape()[2], k.shape()[2]);
        let mask = inputs.maybe(3).map(|own| whole(as_numbers(own)?, columns)).transpose()?;
        let lengths = inputs.maybe(6).map(|own| own.ints()).transpose()?;
        if let Some(own) = lengths.as_ref().filter(|own| own.len() != batch) {
            return Err(format!("expected {batch} key lengths, got {}", own.len()));
        }
        // Our kernel has no such mask. With lengths, the last query is at the last key.
        let needed = lengths.is_some() || left.is_some() || right.is_some();
        let own = needed.then(|| {
            let sees = |each: usize, row: usize, column: usize| {
                let column = column as i64;
                let length = lengths.as_ref().map(|own| own[each]);
                let at = row as i64 + length.map_or(past as i64, |own| own - rows as i64);
                length.is_none_or(|own| column < own)
                    && (!causal || column <= at)
                    && left.is_none_or(|own| at - column <= own as i64)
                    && right.is_none_or(|own| column - at <= own as i64)
            };
            seen([batch, rows, columns], sees, &q.device())
        });
        let scoring = Scoring {
            causal: (causal && own.is_none()).then_some(past),
            masks: mask.into_iter().chain(own).collect(),
            ..(*scoring).clone()
        };
        let (out, shown) = attend(inputs.ctx, Heads { q, k, v }, scoring)?;
        let [keys, values] = present;
        let out = if flat { joined(out) } else { out };
        Ok([out, keys, values].into_iter().chain(shown).collect())
    }))
}

/// Converts a mask to an additive one: false becomes -∞.
///
/// # Errors
/// The device failed.
pub(crate) fn as_numbers(mask: Array) -> Result<Array, String> {
    if mask.kind() != Kind::Bool {
        return Ok(mask);
    }
    let number = |value: f64| Array::full(&[], value.into(), DType::F32, &mask.device());
    let (yes, no) = (number(0.0), number(f64::NEG_INFINITY));
    mask.choose(yes, no)
}

/// Pads a mask to all columns; the added columns are masked out.
///
/// # Errors
/// The mask is a scalar.
pub(crate) fn whole(mask: Array, columns: usize) -> Result<Array, String> {
    let mut shape = mask.shape();
    let last = shape.last_mut().ok_or("expected a mask of rank 1 or more, got a scalar")?;
    if *last >= columns {
        return Ok(mask);
    }
    *last = columns - *last;
    let (axis, dtype) = (shape.len() - 1, mask.dtype());
    let hidden = Array::full(&shape, scalar_of(f64::NEG_INFINITY, dtype), dtype, &mask.device());
    Ok(Array::concat(vec![mask, hidden], axis))
}
