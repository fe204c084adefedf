//! Norms. Statistics are f32, or f64.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;

use super::{Call, Inputs, Read, axis};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Read {
    let epsilon = call.float("epsilon").unwrap_or(1e-5);
    Some(Ok(match call.op() {
        "BatchNormalization" => {
            let (train, momentum) =
                (call.flag("training_mode"), call.float("momentum").unwrap_or(0.9));
            Box::new(move |inputs| batch_norm(inputs, epsilon, train.then_some(momentum)))
        }
        "InstanceNormalization" => Box::new(move |inputs| {
            let x = inputs.get(0)?;
            let axes: Vec<usize> = (2..x.rank()).collect();
            let (normed, ..) = normed(x.clone(), &axes, epsilon, true);
            let each = per_channel(x.rank());
            let out = scaled(
                normed,
                Some(inputs.get(1)?.reshape(&each(&inputs.get(1)?))),
                Some(inputs.get(2)?.reshape(&each(&inputs.get(2)?))),
            );
            Ok(vec![out.cast(x.dtype())])
        }),
        "LayerNormalization" | "RMSNormalization" => {
            let (first, centred) =
                (call.int("axis").unwrap_or(-1), call.op() == "LayerNormalization");
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let first = axis(first, x.rank())?;
                let axes: Vec<usize> = (first..x.rank()).collect();
                let (normed, mean, inverse) = normed(x.clone(), &axes, epsilon, centred);
                let out = scaled(normed, inputs.maybe(1), inputs.maybe(2));
                Ok(vec![out.cast(x.dtype()), mean, inverse])
            })
        }
        "GroupNormalization" => {
            let groups = call.int("num_groups").unwrap_or(1) as usize;
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                Ok(vec![grouped(x, inputs.maybe(1), inputs.maybe(2), groups, epsilon)?])
            })
        }
        "LpNormalization" => {
            let (at, p) = (call.int("axis").unwrap_or(-1), call.int("p").unwrap_or(2));
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let at = axis(at, x.rank())?;
                let sum = |own: Array| {
                    Array::from_dispatch(Dispatch::float_sum_dim(own.into_inner(), at))
                };
                let size = match p {
                    1 => sum(x.clone().float(Dispatch::float_abs)),
                    2 => sum(x.clone().times(x.clone())).float(Dispatch::float_sqrt),
                    other => return Err(format!("expected p of 1 or 2, got {other}")),
                };
                // Zeros stay zeros.
                let zero = size.clone().above(0.0).not().cast(x.dtype());
                Ok(vec![x.over(size.plus(zero))])
            })
        }
        "MeanVarianceNormalization" => {
            let axes = call.ints("axes").map_or_else(|| vec![0, 2, 3], <[i64]>::to_vec);
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let axes =
                    axes.iter().map(|at| axis(*at, x.rank())).collect::<Result<Vec<_>, _>>()?;
                let (normed, ..) = normed(x.clone(), &axes, 1e-9, true);
                Ok(vec![normed.cast(x.dtype())])
            })
        }
        "LRN" => {
            let size = call.int("size").unwrap_or(1).max(1) as usize;
            let number = |name: &str, usual: f64| call.float(name).unwrap_or(usual);
            let (alpha, beta, bias) =
                (number("alpha", 1e-4), number("beta", 0.75), number("bias", 1.0));
            Box::new(move |inputs| {
                let x = inputs.get(0)?;
                let channels = x.shape()[1];
                let squares = x.clone().times(x.clone());
                let (before, after) = ((size - 1) / 2, size / 2);
                let window = |at: usize| {
                    let (from, to) = (at.saturating_sub(before), (at + after + 1).min(channels));
                    let part = squares.clone().narrow(1, from, to);
                    Array::from_dispatch(Dispatch::float_sum_dim(part.into_inner(), 1))
                };
                let sums = Array::concat((0..channels).map(window).collect(), 1);
                let scale = sums.times_number(alpha / size as f64).plus_number(bias);
                let scale = Array::from_dispatch(Dispatch::float_powf_scalar(
                    scale.into_inner(),
                    beta.into(),
                ));
                Ok(vec![x.over(scale)])
            })
        }
        _ => return None,
    }))
}

/// Computes a group norm.
pub(super) fn grouped(
    x: Array,
    factor: Option<Array>,
    bias: Option<Array>,
    groups: usize,
    epsilon: f64,
) -> Result<Array, String> {
    let (own, dtype) = (x.shape(), x.dtype());
    let (batch, channels) = (own[0], own[1]);
    if groups == 0 || channels % groups != 0 {
        return Err(format!("expected channels divisible by {groups} groups, got {channels}"));
    }
    let rest = x.count() / (batch * groups).max(1);
    let (normed, ..) = normed(x.reshape(&[batch, groups, rest]), &[2], epsilon, true);
    // Until opset 20 there is one weight per group.
    let of_channel = |each: Array| {
        let count = each.count();
        let mut shape = vec![1; own.len()];
        shape[1] = channels;
        let each = match count == groups && count != channels {
            true => each.reshape(&[groups, 1]).expand(&[groups, channels / groups]),
            false => each,
        };
        each.reshape(&shape)
    };
    let [factor, bias] = [factor, bias].map(|each| each.map(of_channel));
    Ok(scaled(normed.reshape(&own), factor, bias).cast(dtype))
}

/// Returns the shape of a vector along the second of `rank` dimensions.
fn per_channel(rank: usize) -> impl Fn(&Array) -> Vec<usize> {
    move |own| {
        let mut each = vec![1; rank];
        each[1] = own.count();
        each
    }
}

fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

fn mean_of(mut x: Array, axes: &[usize]) -> Array {
    for at in axes {
        x = Array::from_dispatch(Dispatch::float_mean_dim(x.into_inner(), *at));
    }
    x
}

/// Returns (x - mean) / √(variance + ε) over dimensions, the mean and the inverse deviation. If not
/// `centred`, the mean is not subtracted.
pub(super) fn normed(
    x: Array,
    axes: &[usize],
    epsilon: f64,
    centred: bool,
) -> (Array, Array, Array) {
    let x = x.clone().cast(wide(x.dtype()));
    let mean = mean_of(x.clone(), axes);
    let far = if centred { x.minus(mean.clone()) } else { x };
    let variance = mean_of(far.clone().times(far.clone()), axes);
    let inverse =
        variance.plus_number(epsilon).float(Dispatch::float_sqrt).float(Dispatch::float_recip);
    (far.times(inverse.clone()), mean, inverse)
}

pub(super) fn scaled(x: Array, factor: Option<Array>, bias: Option<Array>) -> Array {
    let dtype = x.dtype();
    let x = match factor {
        Some(factor) => x.times(factor.cast(dtype)),
        None => x,
    };
    match bias {
        Some(bias) => x.plus(bias.cast(dtype)),
        None => x,
    }
}

fn batch_norm(inputs: &Inputs<'_>, epsilon: f64, train: Option<f64>) -> Result<Vec<Array>, String> {
    let x = inputs.get(0)?;
    let own = x.dtype();
    let at = |index: usize| {
        let value = inputs.get(index)?;
        let dtype = wide(own);
        let shape = per_channel(x.rank())(&value);
        Ok::<_, String>(value.reshape(&shape).cast(dtype))
    };
    let (factor, bias, mean, variance) = (at(1)?, at(2)?, at(3)?, at(4)?);
    let x = x.clone().cast(wide(own));
    let Some(momentum) = train else {
        let inverse =
            variance.plus_number(epsilon).float(Dispatch::float_sqrt).float(Dispatch::float_recip);
        let out = x.minus(mean).times(inverse.times(factor)).plus(bias);
        return Ok(vec![out.cast(own)]);
    };
    let axes: Vec<usize> = (0..x.rank()).filter(|at| *at != 1).collect();
    let now = mean_of(x.clone(), &axes);
    let far = x.minus(now.clone());
    let spread = mean_of(far.clone().times(far.clone()), &axes);
    let inverse = spread
        .clone()
        .plus_number(epsilon)
        .float(Dispatch::float_sqrt)
        .float(Dispatch::float_recip);
    let out = far.times(inverse.times(factor)).plus(bias);
    let channels = mean.count();
    let running = |before: Array, now: Array, like: usize| {
        let mixed = before.times_number(momentum).plus(now.times_number(1.0 - momentum));
        Ok::<_, String>(mixed.reshape(&[channels]).cast(inputs.get(like)?.dtype()))
    };
    Ok(vec![out.cast(own), running(mean, now, 3)?, running(variance, spread, 4)?])
}
