//! Classification losses.

use burn::backend::Dispatch;
use burn::backend::ops::ActivationOps;
use burn::tensor::DType;

use super::{Call, Inputs, Read};
use crate::array::{Array, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    let of_scores = match call.op() {
        "NegativeLogLikelihoodLoss" => false,
        "SoftmaxCrossEntropyLoss" => true,
        _ => return None,
    };
    let by = match call.text("reduction").unwrap_or("mean") {
        "none" => Fold::None,
        "mean" => Fold::Mean,
        "sum" => Fold::Sum,
        other => return Some(Err(format!("reduction `{other}` is not supported"))),
    };
    let ignored = call.int("ignore_index");
    Some(Ok(Box::new(move |inputs| {
        let x = inputs.get(0)?;
        let logs = match of_scores {
            true => Array::from_dispatch(Dispatch::log_softmax(x.into_inner(), 1)),
            false => x,
        };
        let loss = loss(inputs, logs.clone(), by, ignored)?;
        Ok(if of_scores { vec![loss, logs] } else { vec![loss] })
    })))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fold {
    None,
    Mean,
    Sum,
}

/// Computes -w[t] · x[n, t, …], with weight 0 for ignored targets; the mean is weighted.
fn loss(inputs: &Inputs<'_>, logs: Array, by: Fold, ignored: Option<i64>) -> Result<Array, String> {
    let target = inputs.get(1)?.cast(DType::I64);
    let (shape, classes, dtype) = (target.shape(), logs.shape()[1], logs.dtype());
    let device = logs.device();
    let kept = match ignored {
        None => None,
        Some(own) => {
            let own = Array::full(&[], scalar_of(own as f64, DType::I64), DType::I64, &device);
            Some(target.clone().compared(own, crate::array::Order::Equal).not())
        }
    };
    // An ignored target may be out of range.
    let target = target.at_least(0.0).at_most(classes as f64 - 1.0);
    let weight = match inputs.maybe(2) {
        Some(weight) => {
            let count = target.count();
            weight.select(0, target.clone().reshape(&[count])).reshape(&shape).cast(dtype)
        }
        None => Array::full(&shape, scalar_of(1.0, dtype), dtype, &device),
    };
    let weight = match kept {
        Some(kept) => weight.times(kept.cast(dtype)),
        None => weight,
    };
    let mut places = shape.clone();
    places.insert(1, 1);
    let taken = logs.gather(1, target.reshape(&places)).reshape(&shape);
    let each = taken.times(weight.clone()).times_number(-1.0);
    let sum = |own: Array| {
        let count = own.count();
        super::reduce::sum(own.reshape(&[count]), &[0]).reshape(&[])
    };
    Ok(match by {
        Fold::None => each,
        Fold::Sum => sum(each),
        Fold::Mean => sum(each).over(sum(weight)),
    })
}
