//! Signal operators: Fourier transforms, window functions and mel filter banks.

use burn::tensor::{DType, TensorData};
use ops::Ctx;

use super::linear::matmul;
use super::{Call, Read, Run, axis};
use crate::array::{Array, scalar_of};
use crate::devices::host;
use crate::limits::fits;
use crate::tensor;

pub(super) fn read(call: &Call<'_>) -> Read {
    // Coefficients of the cosines of 0, 1 and 2 times the angle.
    let coefficients = match call.op() {
        "HannWindow" => [0.5, -0.5, 0.0],
        "HammingWindow" => [25.0 / 46.0, -21.0 / 46.0, 0.0],
        "BlackmanWindow" => [0.42, -0.5, 0.08],
        "DFT" => return Some(Ok(transform(call))),
        "STFT" => return Some(Ok(frames(call))),
        "MelWeightMatrix" => return Some(mel(call)),
        _ => return None,
    };
    let periodic = call.int("periodic") != Some(0);
    let to = match tensor::dtype(call.int("output_datatype").unwrap_or(1) as i32) {
        Ok(to) => to,
        Err(why) => return Some(Err(why)),
    };
    Some(Ok(Box::new(move |inputs| {
        let size = inputs.lengths(0)?[0];
        fits(&[size], DType::F64, &host())?;
        let turn = if periodic { size } else { size.saturating_sub(1) };
        let value = |at: usize| {
            let angle = std::f64::consts::TAU * at as f64 / turn.max(1) as f64;
            let term = |(times, own): (usize, &f64)| own * (times as f64 * angle).cos();
            coefficients.iter().enumerate().map(term).sum::<f64>()
        };
        let data = TensorData::new((0..size).map(value).collect::<Vec<f64>>(), [size]);
        Ok(vec![Array::from_data(data.convert_dtype(to), inputs.device)])
    })))
}

fn transform(call: &Call<'_>) -> Run {
    let (inverse, onesided) = (call.flag("inverse"), call.flag("onesided"));
    // Until opset 19 the axis was an attribute.
    let fixed = if call.opset < 20 { Some(call.int("axis").unwrap_or(1)) } else { None };
    Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let at = match (fixed, inputs.maybe(2)) {
            (Some(fixed), _) => fixed,
            (None, Some(own)) => own.ints()?[0],
            (None, None) => -2,
        };
        let at = axis(at, x.rank())?;
        let given = inputs.maybe(1).map(|own| own.lengths()).transpose()?;
        let n = given.and_then(|own| own.first().copied());
        dft(inputs.ctx, x, at, n, inverse, onesided)
    })
}

/// Transforms frames of a signal `[batch, length, 1 or 2]` to `[batch, frames, frequencies, 2]`.
fn frames(call: &Call<'_>) -> Run {
    let onesided = call.int("onesided") != Some(0);
    Box::new(move |inputs| {
        let (signal, window) = (inputs.get(0)?, inputs.maybe(2));
        let one = |at: usize| {
            inputs.lengths(at)?.first().copied().ok_or_else(|| format!("input {at} is empty"))
        };
        let step = one(1)?;
        let size = match (inputs.maybe(3), &window) {
            (Some(_), _) => one(3)?,
            (None, Some(window)) => window.count(),
            (None, None) => {
                return Err("expected a window or a frame_length, got neither".to_owned());
            }
        };
        let own = signal.shape();
        let [batch, length, parts] = own[..]
            .try_into()
            .map_err(|_| format!("expected a signal of rank 3, got shape {own:?}"))?;
        if step == 0 || size == 0 || size > length {
            return Err(format!(
                "expected a frame_step of 1 or more and a frame_length from 1 to {length}, got {step} and {size}"
            ));
        }
        let count = (length - size) / step + 1;
        let places: Vec<i64> = (0..count)
            .flat_map(|frame| (0..size).map(move |at| (frame * step + at) as i64))
            .collect();
        let places = Array::from_data(TensorData::new(places, [count * size]), &signal.device());
        let mut all = signal.select(1, places).reshape(&[batch, count, size, parts]);
        if let Some(window) = window {
            all = all.times(window.reshape(&[size, 1]));
        }
        dft(inputs.ctx, all, 2, None, false, onesided)
    })
}

/// Computes the weights `[frequencies, bands]` of triangular filters with even spacing on the mel
/// scale, as in ONNX.
fn mel(call: &Call<'_>) -> Result<Run, String> {
    let to = tensor::dtype(call.int("output_datatype").unwrap_or(1) as i32)?;
    Ok(Box::new(move |inputs| {
        let number = |at: usize| {
            inputs.get(at)?.floats()?.first().copied().ok_or_else(|| format!("input {at} is empty"))
        };
        let (bands, size, rate) = (number(0)? as usize, number(1)? as usize, number(2)?);
        let frequencies = size / 2 + 1;
        fits(&[frequencies, bands.saturating_add(2)], DType::F64, &host())?;
        let scale = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
        let (low, high) = (scale(number(3)?), scale(number(4)?));
        let step = (high - low) / (bands + 2) as f64;
        let corner = |band: usize| {
            let hertz = 700.0 * (10f64.powf((band as f64 * step + low) / 2595.0) - 1.0);
            ((size + 1) as f64 * hertz / rate).floor()
        };
        let corners: Vec<f64> = (0..bands + 2).map(corner).collect();
        if !corners.iter().all(|own| (0.0..=frequencies as f64).contains(own)) {
            return Err(format!("expected band edges within {frequencies} frequencies"));
        }
        let weight = |frequency: usize, band: usize| {
            let at = frequency as f64;
            let [lower, centre, upper] = [0, 1, 2].map(|corner| corners[band + corner]);
            match () {
                () if at == centre => 1.0,
                () if lower <= at && at < centre => (at - lower) / (centre - lower),
                () if centre < at && at < upper => (upper - at) / (upper - centre),
                () => 0.0,
            }
        };
        let all = (0..frequencies).flat_map(|at| (0..bands).map(move |band| (at, band)));
        let all: Vec<f64> = all.map(|(at, band)| weight(at, band)).collect();
        let data = TensorData::new(all, [frequencies, bands]).convert_dtype(to);
        Ok(vec![Array::from_data(data, inputs.device)])
    }))
}

/// Computes X[k] = Σ x[t] · e^(∓2πi·k·t/n); the inverse is divided by n. A one-sided transform has
/// only the first n/2 + 1 elements of X.
fn dft(
    ctx: &Ctx,
    x: Array,
    at: usize,
    given: Option<usize>,
    inverse: bool,
    onesided: bool,
) -> Result<Vec<Array>, String> {
    let (own, dtype) = (x.shape(), x.dtype());
    let rank = own.len();
    if rank < 2 || at == rank - 1 || own[rank - 1] == 0 || own[rank - 1] > 2 {
        return Err(format!(
            "expected axis {at} before a last dimension of 1 or 2, got shape {own:?}"
        ));
    }
    let to_real = inverse && onesided;
    let usual = if to_real { 2 * (own[at].max(1) - 1) } else { own[at] };
    let n = given.unwrap_or(usual);
    if n == 0 {
        return Err("expected a dft_length of 1 or more".to_owned());
    }
    let taken = own[at].min(if to_real { n / 2 + 1 } else { n });
    let made = if onesided && !inverse { n / 2 + 1 } else { n };
    // Move the dimension to the end.
    let mut order: Vec<usize> = (0..rank - 1).filter(|own| *own != at).collect();
    order.push(at);
    let lines: usize = order[..rank - 2].iter().map(|at| own[*at]).product();
    let part = |which: usize| {
        let part = x.clone().narrow(rank - 1, which, which + 1).reshape(&own[..rank - 1]);
        part.permute(&order).reshape(&[lines, own[at]]).narrow(1, 0, taken)
    };
    let real = part(0);
    let imaginary = match own[rank - 1] {
        2 => part(1),
        _ => Array::full(&[lines, taken], scalar_of(0.0, dtype), dtype, &x.device()),
    };
    let sign = if inverse { 1.0 } else { -1.0 };
    let weight = |t: usize| match (inverse, to_real) {
        (false, _) => 1.0,
        (true, false) => 1.0 / n as f64,
        // Omitted frequencies are conjugates of the others.
        (true, true) if t == 0 || 2 * t == n => 1.0 / n as f64,
        (true, true) => 2.0 / n as f64,
    };
    let matrix = |wave: fn(f64) -> f64, sign: f64| {
        let value = |t: usize, k: usize| {
            let angle = std::f64::consts::TAU * (t * k % n) as f64 / n as f64;
            sign * weight(t) * wave(angle)
        };
        let all: Vec<f64> = (0..taken)
            .flat_map(|t| (0..made).map(move |k| (t, k)))
            .map(|(t, k)| value(t, k))
            .collect();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let data = TensorData::new(all, [taken, made]).convert_dtype(wide);
        Array::from_data(data, &x.device()).cast(dtype)
    };
    let (cos, sin) = (matrix(f64::cos, 1.0), matrix(f64::sin, sign));
    let out_real =
        matmul(ctx, real.clone(), cos.clone())?.minus(matmul(ctx, imaginary.clone(), sin.clone())?);
    let mut shape: Vec<usize> = order.iter().map(|at| own[*at]).collect();
    shape[rank - 2] = made;
    let mut back: Vec<usize> = (0..rank - 2).collect();
    back.insert(at, rank - 2);
    let finished = |part: Array| {
        let part = part.reshape(&shape).permute(&back);
        let whole = [&part.shape()[..], &[1]].concat();
        part.reshape(&whole)
    };
    if to_real {
        return Ok(vec![finished(out_real)]);
    }
    let out_imaginary = matmul(ctx, real, sin)?.plus(matmul(ctx, imaginary, cos)?);
    Ok(vec![Array::concat(vec![finished(out_real), finished(out_imaginary)], rank - 1)])
}
