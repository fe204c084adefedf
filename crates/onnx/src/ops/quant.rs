//! Quantisation with scales and zero points, and quantised matmuls and convolutions.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;

use super::linear::matmul;
use super::{Call, Inputs, Read, Run, axis, windows};
use crate::array::{Array, Kind};
use crate::tensor;

pub(super) fn read(call: &Call<'_>) -> Read {
    let (at, block) = (call.int("axis").unwrap_or(1), call.int("block_size").unwrap_or(0) as usize);
    Some(match call.op() {
        "QuantizeLinear" => {
            let to = call.int("output_dtype").filter(|own| *own != 0);
            to.map(|own| tensor::dtype(own as i32))
                .transpose()
                .map(|to| -> Run { Box::new(move |inputs| quantize(inputs, at, block, to)) })
        }
        "DequantizeLinear" => {
            let to = call.int("output_dtype").filter(|own| *own != 0);
            to.map(|own| tensor::dtype(own as i32)).transpose().map(|to| -> Run {
                Box::new(move |inputs| {
                    let scale = inputs.get(1)?;
                    let out =
                        dequantize(inputs.get(0)?, scale.clone(), inputs.maybe(2), at, block)?;
                    Ok(vec![out.cast(to.unwrap_or(scale.dtype()))])
                })
            })
        }
        "DynamicQuantizeLinear" => Ok(Box::new(dynamic)),
        "MatMulInteger" => Ok(Box::new(|inputs| {
            let a = shifted(inputs.get(0)?, inputs.maybe(2), true)?;
            let b = shifted(inputs.get(1)?, inputs.maybe(3), false)?;
            Ok(vec![matmul(inputs.ctx, a, b)?.cast(DType::I32)])
        })),
        "QLinearMatMul" => Ok(Box::new(|inputs| {
            let rows = |x: usize| {
                let own = inputs.get(x)?;
                let scale =
                    if x == 0 { lines(inputs.get(1)?, own.rank()) } else { inputs.get(4)? };
                let zero =
                    if x == 0 { lines(inputs.get(2)?, own.rank()) } else { inputs.get(5)? };
                Ok::<_, String>((
                    own.cast(DType::F32).minus(zero.cast(DType::F32)),
                    scale.cast(DType::F32),
                ))
            };
            let ((a, of_a), (b, of_b)) = (rows(0)?, rows(3)?);
            let out = matmul(inputs.ctx, a, b)?.times(of_a).times(of_b);
            let (scale, zero) = (inputs.get(6)?, inputs.get(7)?);
            Ok(vec![rounded(out.over(scale.cast(DType::F32)), Some(zero.clone()), zero.dtype())])
        })),
        "ConvInteger" | "QLinearConv" => {
            let quantised = call.op() == "QLinearConv";
            windows::plain(call).map(|conv| -> Run {
                Box::new(move |inputs| match quantised {
                    false => {
                        let x = shifted(inputs.get(0)?, inputs.maybe(2), false)?.cast(DType::F32);
                        let w =
                            subtract_filter_zeros(inputs.get(1)?, inputs.maybe(3)).cast(DType::F32);
                        // Sums below 2^24 are exact in f32. For larger sums, x is split: x = 16 · high + low.
                        let taps: usize = w.shape()[1..].iter().product();
                        if taps <= EXACT {
                            return Ok(vec![round(conv(x, w, None)?).cast(DType::I32)]);
                        }
                        let high = x.clone().times_number(1.0 / 16.0).float(Dispatch::float_floor);
                        let low = x.minus(high.clone().times_number(16.0));
                        let sum = |x: Array| {
                            Ok::<_, String>(round(conv(x, w.clone(), None)?).cast(DType::I32))
                        };
                        Ok(vec![sum(high)?.times_number(16.0).plus(sum(low)?)])
                    }
                    true => {
                        let x =
                            inputs.get(0)?.cast(DType::F32).minus(inputs.get(2)?.cast(DType::F32));
                        let w =
                            subtract_filter_zeros(inputs.get(3)?, inputs.maybe(5)).cast(DType::F32);
                        let bias = inputs.maybe(8).map(|own| own.cast(DType::F32));
                        let out = conv(x, w, bias)?;
                        let mut scale = inputs.get(4)?.cast(DType::F32);
                        if scale.count() > 1 {
                            let mut each = vec![1; out.rank()];
                            each[1] = scale.count();
                            scale = scale.reshape(&each);
                        }
                        let factor = scale
                            .times(inputs.get(1)?.cast(DType::F32))
                            .over(inputs.get(6)?.cast(DType::F32));
                        let zero = inputs.get(7)?;
                        Ok(vec![rounded(out.times(factor), Some(zero.clone()), zero.dtype())])
                    }
                })
            })
        }
        _ => return None,
    })
}

/// Returns per-row values as a column.
fn lines(x: Array, rank: usize) -> Array {
    match x.rank() {
        1 if x.count() > 1 && rank >= 2 => {
            let count = x.count();
            x.reshape(&[count, 1])
        }
        _ => x,
    }
}

pub(super) fn round(x: Array) -> Array {
    x.float(Dispatch::float_round)
}

/// Subtracts zero points in i32. Per-row zero points are a column.
pub(super) fn shifted(x: Array, zero: Option<Array>, of_rows: bool) -> Result<Array, String> {
    let rank = x.rank();
    let x = x.cast(DType::I32);
    Ok(match zero {
        None => x,
        Some(zero) => {
            let zero = if of_rows { lines(zero, rank) } else { zero };
            x.minus(zero.cast(DType::I32))
        }
    })
}

/// Subtracts the zero points of filters.
fn subtract_filter_zeros(w: Array, zero: Option<Array>) -> Array {
    let mut each = vec![1; w.rank()];
    let w = w.cast(DType::I32);
    match zero {
        None => w,
        Some(zero) => {
            each[0] = zero.count();
            w.minus(zero.reshape(&each).cast(DType::I32))
        }
    }
}

/// Returns the minimum and maximum of an integer dtype.
pub(crate) fn limits(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::I8 => (-128.0, 127.0),
        DType::U8 => (0.0, 255.0),
        DType::I16 => (-32_768.0, 32_767.0),
        DType::U16 => (0.0, 65_535.0),
        DType::I64 => (i64::MIN as f64, i64::MAX as f64),
        DType::U32 => (0.0, f64::from(u32::MAX)),
        DType::U64 => (0.0, u64::MAX as f64),
        _ => (f64::from(i32::MIN), f64::from(i32::MAX)),
    }
}

/// Maximum terms of a sum of byte products that is exact in f32: 512 · 255 · 128 < 2^24.
pub(super) const EXACT: usize = 512;

/// Adds a zero point, and rounds to an integer dtype.
fn rounded(x: Array, zero: Option<Array>, dtype: DType) -> Array {
    let (least, most) = limits(dtype);
    let x = round(x);
    let x = match zero {
        Some(zero) => {
            let own = x.dtype();
            x.plus(zero.cast(own))
        }
        None => x,
    };
    x.at_least(least).at_most(most).cast(dtype)
}

/// Broadcasts scales or zero points to a shape: per tensor, per axis, or per block along an axis.
fn spread(own: Array, shape: &[usize], at: i64, block: usize) -> Result<Array, String> {
    let rank = shape.len();
    if own.rank() == 0 || own.count() == 1 && rank == 0 {
        return Ok(own.reshape(&[]));
    }
    let at = axis(at, rank)?;
    if own.rank() == 1 && block == 0 {
        let mut each = vec![1; rank];
        each[at] = own.count();
        return Ok(own.reshape(&each));
    }
    if own.rank() != rank || block == 0 {
        let have = own.shape();
        return Err(format!("expected scales for shape {shape:?}, got scales of shape {have:?}"));
    }
    let mut parts = own.shape();
    let count = parts[at];
    parts.insert(at + 1, 1);
    let mut wide = parts.clone();
    wide[at + 1] = block;
    let mut joined = own.shape();
    joined[at] = count * block;
    let all = own.reshape(&parts).expand(&wide).reshape(&joined);
    Ok(all.narrow(at, 0, shape[at]))
}

fn quantize(
    inputs: &Inputs<'_>,
    at: i64,
    block: usize,
    to: Option<DType>,
) -> Result<Vec<Array>, String> {
    let (x, scale, zero) = (inputs.get(0)?, inputs.get(1)?, inputs.maybe(2));
    let dtype = zero.as_ref().map(Array::dtype).or(to).unwrap_or(DType::U8);
    let shape = x.shape();
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let scale = spread(scale.cast(wide), &shape, at, block)?;
    let zero = zero.map(|own| spread(own, &shape, at, block)).transpose()?;
    Ok(vec![rounded(x.cast(wide).over(scale), zero, dtype)])
}

fn dequantize(
    x: Array,
    scale: Array,
    zero: Option<Array>,
    at: i64,
    block: usize,
) -> Result<Array, String> {
    let shape = x.shape();
    let scale = spread(scale.cast(DType::F32), &shape, at, block)?;
    // The difference of integers is exact.
    let x = match zero {
        Some(zero) if x.kind() == Kind::Int => {
            x.cast(DType::I32).minus(spread(zero.cast(DType::I32), &shape, at, block)?)
        }
        _ => x,
    };
    Ok(x.cast(DType::F32).times(scale))
}

/// Quantises x to u8, with scale and zero point from its range, which includes 0.
fn dynamic(inputs: &Inputs<'_>) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let count = x.count();
    let flat = x.clone().reshape(&[count]).into_inner();
    let most =
        Array::from_dispatch(Dispatch::float_max_dim(flat.clone(), 0)).reshape(&[]).at_least(0.0);
    let least = Array::from_dispatch(Dispatch::float_min_dim(flat, 0)).reshape(&[]).at_most(0.0);
    let scale = most.minus(least.clone()).times_number(1.0 / 255.0);
    // All elements are 0: any scale gives zeros.
    let one = Array::full(&[], 1f64.into(), scale.dtype(), &scale.device());
    let scale = scale.clone().above(0.0).choose(scale, one)?;
    let zero = round(least.times_number(-1.0).over(scale.clone())).at_least(0.0).at_most(255.0);
    let zero = zero.cast(DType::U8);
    let out = rounded(x.over(scale.clone()), Some(zero.clone()), DType::U8);
    Ok(vec![out, scale, zero])
}
