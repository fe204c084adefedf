//! Operators along dimensions: reductions, argmax, cumulative sums, softmax, top-k.

use burn::backend::ops::{ActivationOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, IntDType, TensorData};

use super::fused::mean_of_pixels;
use super::{Call, Inputs, Read, axis};
use crate::array::{Array, Kind, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    let fold: fn(Array, &[usize]) -> Array = match call.op() {
        "ReduceSum" => sum,
        "ReduceMean" => mean,
        "ReduceProd" => |x, axes| each(x, axes, Dispatch::float_prod_dim, Dispatch::int_prod_dim),
        "ReduceMax" => max,
        "ReduceMin" => min,
        "ReduceL1" => |x, axes| sum(abs(x), axes),
        "ReduceL2" => |x, axes| sum(x.clone().times(x), axes).float(Dispatch::float_sqrt),
        "ReduceSumSquare" => |x, axes| sum(x.clone().times(x), axes),
        "ReduceLogSum" => |x, axes| sum(x, axes).float(Dispatch::float_log),
        "ReduceLogSumExp" => log_sum_exp,
        _ => return others(call),
    };
    let fixed = call.ints("axes").map(<[i64]>::to_vec);
    let (keep, none) = (call.int("keepdims") != Some(0), call.flag("noop_with_empty_axes"));
    let (is_mean, ours) = (call.op() == "ReduceMean", call.has_kernels());
    Some(Ok(Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let own = x.shape();
        let axes = match (&fixed, inputs.maybe(1)) {
            (Some(fixed), _) => fixed.clone(),
            (None, Some(axes)) => axes.ints()?,
            (None, None) => Vec::new(),
        };
        let mut axes: Vec<usize> =
            axes.iter().map(|at| axis(*at, own.len())).collect::<Result<_, _>>()?;
        if axes.is_empty() && !none {
            axes = (0..own.len()).collect();
        }
        if own.is_empty() {
            axes.clear();
        }
        axes.sort_unstable();
        let kept: Vec<usize> = own
            .iter()
            .enumerate()
            .map(|(at, len)| if axes.contains(&at) { 1 } else { *len })
            .collect();
        let left = kept.iter().enumerate().filter(|(at, _)| keep || !axes.contains(at));
        let shape: Vec<usize> = left.map(|(_, len)| *len).collect();
        let of_pixels = is_mean && own.len() > 2 && axes.iter().copied().eq(2..own.len());
        if of_pixels && let Some(mean) = mean_of_pixels(inputs.ctx, ours, &x)? {
            return Ok(vec![mean.reshape(&shape)]);
        }
        Ok(vec![fold(x, &axes).reshape(&shape)])
    })))
}

/// Reduces one dimension after another; reduced dimensions have length 1.
fn each(
    mut x: Array,
    axes: &[usize],
    float: fn(DispatchTensor, usize) -> DispatchTensor,
    int: fn(DispatchTensor, usize) -> DispatchTensor,
) -> Array {
    for at in axes {
        x = match x.kind() {
            Kind::Float => Array::from_dispatch(float(x.into_inner(), *at)),
            _ => Array::from_dispatch(int(x.into_inner(), *at)),
        };
    }
    x
}

pub(super) fn sum(x: Array, axes: &[usize]) -> Array {
    each(x, axes, Dispatch::float_sum_dim, Dispatch::int_sum_dim)
}

fn mean(x: Array, axes: &[usize]) -> Array {
    let own = x.shape();
    let count: usize = axes.iter().map(|at| own[*at]).product();
    match x.kind() {
        Kind::Float => sum(x, axes).times_number(1.0 / count as f64),
        _ => {
            let dtype = x.dtype();
            let count = Array::full(&[], scalar_of(count as f64, dtype), dtype, &x.device());
            sum(x, axes).over(count)
        }
    }
}

fn abs(x: Array) -> Array {
    match x.kind() {
        Kind::Float => x.float(Dispatch::float_abs),
        _ => x.float(Dispatch::int_abs),
    }
}

/// Returns true if a reduction over these dimensions has no elements.
fn is_empty(x: &Array, axes: &[usize]) -> bool {
    let own = x.shape();
    axes.iter().any(|at| own[*at] == 0)
}

/// Returns the maximum or minimum of an empty set: an infinity, or the limit of an integer dtype.
fn extreme_of_empty(x: &Array, axes: &[usize], value: f64) -> Array {
    let mut shape = x.shape();
    axes.iter().for_each(|at| shape[*at] = 1);
    let (least, most) = super::quant::limits(x.dtype());
    let value = if x.kind() == Kind::Int { value.clamp(least, most) } else { value };
    Array::full(&shape, scalar_of(value, x.dtype()), x.dtype(), &x.device())
}

fn max(x: Array, axes: &[usize]) -> Array {
    match x.kind() {
        // true is the larger one.
        Kind::Bool => max(x.cast(DType::I32), axes).cast(crate::tensor::BOOL),
        _ if is_empty(&x, axes) => extreme_of_empty(&x, axes, f64::NEG_INFINITY),
        _ => each(x, axes, Dispatch::float_max_dim, Dispatch::int_max_dim),
    }
}

fn min(x: Array, axes: &[usize]) -> Array {
    match x.kind() {
        Kind::Bool => min(x.cast(DType::I32), axes).cast(crate::tensor::BOOL),
        _ if is_empty(&x, axes) => extreme_of_empty(&x, axes, f64::INFINITY),
        _ => each(x, axes, Dispatch::float_min_dim, Dispatch::int_min_dim),
    }
}

/// Computes ln Σ e^x, as m + ln Σ e^(x - m) with the maximum m.
fn log_sum_exp(x: Array, axes: &[usize]) -> Array {
    let largest = max(x.clone(), axes);
    // An infinite maximum would give NaN.
    let bound = largest.clone().at_least(f64::from(f32::MIN)).at_most(f64::from(f32::MAX));
    let sum = sum(x.minus(bound.clone()).float(Dispatch::float_exp), axes);
    sum.float(Dispatch::float_log).plus(bound)
}

fn others(call: &Call<'_>) -> Read {
    Some(Ok(match call.op() {
        "ArgMax" | "ArgMin" => {
            let largest = call.op() == "ArgMax";
            let (at, keep) = (call.int("axis").unwrap_or(0), call.int("keepdims") != Some(0));
            let last = call.flag("select_last_index");
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let at = axis(at, x.rank())?;
                let mut shape = x.shape();
                let len = shape[at];
                let x = if last { x.flip(&[at]) } else { x };
                let is_float = x.kind() == Kind::Float;
                let x = x.into_inner();
                let out = Array::from_dispatch(match (largest, is_float) {
                    (true, true) => Dispatch::float_argmax(x, at, IntDType::I64),
                    (false, true) => Dispatch::float_argmin(x, at, IntDType::I64),
                    (true, false) => Dispatch::int_argmax(x, at),
                    (false, false) => Dispatch::int_argmin(x, at),
                });
                let out = out.cast(DType::I64);
                let out = match last {
                    true => out.times_number(-1.0).plus_number(len as f64 - 1.0),
                    false => out,
                };
                if keep {
                    shape[at] = 1;
                } else {
                    shape.remove(at);
                }
                Ok(vec![out.reshape(&shape)])
            })
        }
        "Softmax" | "LogSoftmax" | "Hardmax" => {
            let op = call.op().to_owned();
            let (rows, at) = (call.opset < 13, call.int("axis"));
            Box::new(move |inputs| softmax(inputs, &op, rows, at))
        }
        "CumSum" | "CumProd" => {
            let (sums, exclusive) = (call.op() == "CumSum", call.flag("exclusive"));
            let reverse = call.flag("reverse");
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let at = axis(inputs.get(1)?.ints()?[0], x.rank())?;
                let x = if reverse { x.flip(&[at]) } else { x };
                let mut out = cumulate(x.clone(), at, sums);
                if exclusive {
                    let len = x.shape()[at];
                    let mut first = x.shape();
                    first[at] = 1;
                    let start = scalar_of(if sums { 0.0 } else { 1.0 }, x.dtype());
                    let first = Array::full(&first, start, x.dtype(), &x.device());
                    out = match len {
                        0 | 1 => first,
                        len => Array::concat(vec![first, out.narrow(at, 0, len - 1)], at),
                    };
                }
                Ok(vec![if reverse { out.flip(&[at]) } else { out }])
            })
        }
        "TopK" => {
            let (at, largest) = (call.int("axis").unwrap_or(-1), call.int("largest") != Some(0));
            let fixed = call.int("k");
            Box::new(move |inputs| top_k(inputs, at, largest, fixed))
        }
        _ => return None,
    }))
}

fn cumulate(x: Array, at: usize, sums: bool) -> Array {
    let is_float = x.kind() == Kind::Float;
    let x = x.into_inner();
    Array::from_dispatch(match (sums, is_float) {
        (true, true) => Dispatch::float_cumsum(x, at),
        (false, true) => Dispatch::float_cumprod(x, at),
        (true, false) => Dispatch::int_cumsum(x, at),
        (false, false) => Dispatch::int_cumprod(x, at),
    })
}

/// Computes a softmax, log-softmax or hardmax. With `rows` (until opset 12), the dimensions from
/// the axis on count as one.
fn softmax(
    inputs: &Inputs<'_>,
    op: &str,
    rows: bool,
    at: Option<i64>,
) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let own = x.shape();
    let at = axis(at.unwrap_or(if rows { 1 } else { -1 }), own.len())?;
    let (x, at) = match rows {
        true => {
            let (lines, columns) = (own[..at].iter().product(), own[at..].iter().product());
            (x.reshape(&[lines, columns]), 1)
        }
        false if own.is_empty() => (x.reshape(&[1]), 0),
        false => (x, at),
    };
    let out = match op {
        "Softmax" => wide(x, |x| shares(Array::from_dispatch(x), at).into_inner()),
        "LogSoftmax" => wide(x, |x| Dispatch::log_softmax(x, at)),
        _ => {
            let dtype = x.dtype();
            let len = x.shape()[at];
            let place = Array::from_dispatch(Dispatch::float_argmax(
                x.clone().into_inner(),
                at,
                IntDType::I64,
            ));
            let mut each = vec![1; x.rank()];
            each[at] = len;
            let places = Array::arange(len, &x.device()).reshape(&each);
            let same = places.compared(place, crate::array::Order::Equal);
            same.cast(dtype)
        }
    };
    Ok(vec![out.reshape(&own)])
}

/// Computes the softmax along a dimension.
///
/// In Burn's CPU backend, the sequential sum of a softmax of 18,000 elements is off by 3e-4, but
/// sums along a dimension are accurate. So the probabilities are divided by such a sum again.
pub(super) fn shares(x: Array, at: usize) -> Array {
    let shares = Array::from_dispatch(Dispatch::softmax(x.into_inner(), at));
    if !shares.is_on_host() {
        return shares;
    }
    let sum = Array::from_dispatch(Dispatch::float_sum_dim(shares.clone().into_inner(), at));
    shares.over(sum)
}

fn top_k(
    inputs: &Inputs<'_>,
    at: i64,
    largest: bool,
    fixed: Option<i64>,
) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let at = axis(at, x.rank())?;
    let k = match fixed {
        Some(k) => k,
        None => inputs.get(1)?.ints()?[0],
    };
    let len = x.shape()[at];
    let count = usize::try_from(k).ok().filter(|k| *k <= len);
    let k = count.ok_or_else(|| format!("expected k from 0 to {len} on axis {at}, got {k}"))?;
    // ONNX orders equal elements by index, but Burn's sort is not stable: sort (key, index) on the
    // host.
    let data = x.to_data()?;
    let own = x.shape();
    let (outer, inner): (usize, usize) =
        (own[..at].iter().product(), own[at + 1..].iter().product());
    let values: Vec<f64> = data.iter::<f64>().collect();
    let ints: Vec<i64> =
        if x.kind() == Kind::Int { data.iter::<i64>().collect() } else { Vec::new() };
    let order = |one: usize, other: usize| match ints.is_empty() {
        false => ints[one].cmp(&ints[other]),
        true => values[one].total_cmp(&values[other]),
    };
    let mut places = vec![0i64; outer * k * inner];
    for row in 0..outer {
        for column in 0..inner {
            let place = |index: usize| (row * len + index) * inner + column;
            let mut all: Vec<usize> = (0..len).collect();
            all.sort_by(|one, other| {
                let by = order(place(*one), place(*other));
                if largest { by.reverse() } else { by }
            });
            for (rank, index) in all.into_iter().take(k).enumerate() {
                places[(row * k + rank) * inner + column] = index as i64;
            }
        }
    }
    let mut shape = own;
    shape[at] = k;
    let places = Array::from_data(TensorData::new(places, shape), &x.device());
    Ok(vec![x.gather(at, places.clone()), places])
}

/// Runs a function in f32 if x has 16 bits.
fn wide(x: Array, run: impl FnOnce(DispatchTensor) -> DispatchTensor) -> Array {
    let dtype = x.dtype();
    let x = if dtype.size() == 2 { x.cast(DType::F32) } else { x };
    Array::from_dispatch(run(x.into_inner())).cast(dtype)
}
