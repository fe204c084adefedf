//! Elementwise operators: activations, arithmetic, comparisons, logic, casts.

use burn::backend::ops::{ActivationOps, BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, Scalar};

use super::{Call, Inputs, Read, Run};
use crate::array::{Array, Kind, Order, bool_dtype, scalar_of};
use crate::tensor;

pub(super) fn read(call: &Call<'_>) -> Read {
    if call.op() == "Dropout" && call.is_given(2) {
        return Some(Err(
            "expected a constant training_mode, got an input: training is not supported".to_owned(),
        ));
    }
    if call.op() == "Cast" {
        let to = call.int("to").and_then(|to| i32::try_from(to).ok()).unwrap_or(0);
        return Some(tensor::dtype(to).map(|to| one_input(move |x| x.cast(to))));
    }
    let run = unary(call).or_else(|| binary(call)).or_else(|| others(call))?;
    let from = call.int("axis").filter(|_| call.opset < 7 && call.flag("broadcast"));
    Some(Ok(match from {
        Some(from) => from_axis(run, from),
        None => run,
    }))
}

/// Runs an operator of opset 6 or older, whose second input broadcasts from an axis of the first.
fn from_axis(run: Run, from: i64) -> Run {
    Box::new(move |inputs| {
        let (a, b) = (inputs.get(0)?, inputs.get(1)?);
        let from = super::axis(from, a.rank())?;
        let mut shape = b.shape();
        if from + shape.len() > a.rank() {
            let whole = a.shape();
            return Err(format!("expected b to fit {whole:?} from axis {from} on, got {shape:?}"));
        }
        shape.resize(a.rank() - from, 1);
        let all = [Some(a), Some(b.reshape(&shape))];
        run(&Inputs { all: &all, ..*inputs })
    })
}

/// Returns an operator with one input.
fn one_input(run: impl Fn(Array) -> Array + Send + Sync + 'static) -> Run {
    Box::new(move |inputs| Ok(vec![run(inputs.get(0)?)]))
}

fn float(run: fn(DispatchTensor) -> DispatchTensor) -> Run {
    one_input(move |x| x.float(run))
}

fn unary(call: &Call<'_>) -> Option<Run> {
    let number = |name: &str, usual: f64| call.float(name).unwrap_or(usual);
    Some(match call.op() {
        "Identity" => one_input(|x| x),
        "Abs" => numeric(Dispatch::float_abs, Dispatch::int_abs),
        "Neg" => numeric(Dispatch::float_neg, Dispatch::int_neg),
        "Sign" => numeric(Dispatch::float_sign, Dispatch::int_sign),
        "Acos" => float(Dispatch::float_acos),
        "Acosh" => float(Dispatch::float_acosh),
        "Asin" => float(Dispatch::float_asin),
        "Asinh" => float(Dispatch::float_asinh),
        "Atan" => float(Dispatch::float_atan),
        "Atanh" => float(Dispatch::float_atanh),
        "Ceil" => float(Dispatch::float_ceil),
        "Cos" => float(Dispatch::float_cos),
        "Cosh" => float(Dispatch::float_cosh),
        "Erf" => float(Dispatch::float_erf),
        "Exp" => float(Dispatch::float_exp),
        "Floor" => float(Dispatch::float_floor),
        "Log" => float(Dispatch::float_log),
        "Reciprocal" => float(Dispatch::float_recip),
        "Round" => float(Dispatch::float_round),
        "Sin" => float(Dispatch::float_sin),
        "Sinh" => float(Dispatch::float_sinh),
        "Sqrt" => float(Dispatch::float_sqrt),
        "Tan" => float(Dispatch::float_tan),
        "Tanh" => float(Dispatch::float_tanh),
        "Sigmoid" => float(Dispatch::sigmoid),
        "Relu" => one_input(|x| x.at_least(0.0)),
        "LeakyRelu" => {
            let alpha = number("alpha", 0.01);
            one_input(move |x| below_zero(x, |x| x.times_number(alpha)))
        }
        "Elu" => {
            let alpha = number("alpha", 1.0);
            one_input(move |x| below_zero(x, |x| exp_minus_one(x).times_number(alpha)))
        }
        "Selu" => {
            let alpha = number("alpha", 1.673_263_192_176_818_8);
            let gamma = number("gamma", 1.050_701_022_148_132_3);
            one_input(move |x| {
                below_zero(x, |x| exp_minus_one(x).times_number(alpha)).times_number(gamma)
            })
        }
        "Celu" => {
            let alpha = number("alpha", 1.0);
            one_input(move |x| {
                below_zero(x, |x| exp_minus_one(x.times_number(1.0 / alpha)).times_number(alpha))
            })
        }
        "Gelu" if call.text("approximate") == Some("tanh") => one_input(gelu_by_tanh),
        "Gelu" => float(Dispatch::gelu),
        "Mish" => one_input(|x| {
            let gate = softplus(x.clone()).float(Dispatch::float_tanh);
            x.times(gate)
        }),
        "Softplus" => one_input(softplus),
        "Softsign" => one_input(|x| {
            let scale = x.clone().float(Dispatch::float_abs).plus_number(1.0);
            x.over(scale)
        }),
        "Swish" => {
            let alpha = number("alpha", 1.0);
            one_input(move |x| {
                let gate = x.clone().times_number(alpha).float(Dispatch::sigmoid);
                x.times(gate)
            })
        }
        "HardSigmoid" => {
            let (alpha, beta) = (number("alpha", 0.2), number("beta", 0.5));
            one_input(move |x| hard_sigmoid(x, alpha, beta))
        }
        "HardSwish" => one_input(|x| x.clone().times(hard_sigmoid(x, 1.0 / 6.0, 0.5))),
        "ThresholdedRelu" => {
            let alpha = number("alpha", 1.0);
            one_input(move |x| {
                let zero =
                    Array::full(&x.shape(), scalar_of(0.0, x.dtype()), x.dtype(), &x.device());
                zero.replaced(x.clone().above(alpha), x)
            })
        }
        "Shrink" => {
            let (lambda, bias) = (number("lambd", 0.5), number("bias", 0.0));
            one_input(move |x| {
                let up = x.clone().above(lambda);
                let down = x.clone().times_number(-1.0).above(lambda);
                let zero =
                    Array::full(&x.shape(), scalar_of(0.0, x.dtype()), x.dtype(), &x.device());
                let out = zero.replaced(up, x.clone().plus_number(-bias));
                out.replaced(down, x.plus_number(bias))
            })
        }
        "IsNaN" => one_input(is_nan),
        "IsInf" => {
            let both = |name: &str| call.int(name) != Some(0);
            let (negative, positive) = (both("detect_negative"), both("detect_positive"));
            one_input(move |x| is_inf(x, negative, positive))
        }
        "Not" => one_input(Array::not),
        "BitwiseNot" => one_input(|x| x.float(Dispatch::bitwise_not)),
        "Dropout" => dropout(),
        _ => return None,
    })
}

fn numeric(
    of_floats: fn(DispatchTensor) -> DispatchTensor,
    of_ints: fn(DispatchTensor) -> DispatchTensor,
) -> Run {
    one_input(move |x| match x.kind() {
        Kind::Float => x.float(of_floats),
        _ => x.float(of_ints),
    })
}

/// Returns x for x > 0, and `run(x)` otherwise.
fn below_zero(x: Array, run: impl Fn(Array) -> Array) -> Array {
    let above = x.clone().above(0.0);
    let below = run(x.clone().at_most(0.0));
    below.replaced(above, x)
}

fn exp_minus_one(x: Array) -> Array {
    x.float(Dispatch::float_exp).plus_number(-1.0)
}

/// Computes ln(1 + e^x), as max(x, 0) + ln(1 + u) with u = e^-|x|.
///
/// Here ln(1 + u) is 2 artanh(z) = 2 z (1 + z²/3 + z⁴/5 + …) with z = u / (2 + u), because Vulkan's
/// logarithm near 1 has errors up to 5e-7.
fn softplus(x: Array) -> Array {
    let u = x.clone().float(Dispatch::float_abs).times_number(-1.0).float(Dispatch::float_exp);
    let small = if x.dtype() == DType::F64 {
        u.float(Dispatch::float_log1p)
    } else {
        let z = u.clone().over(u.plus_number(2.0));
        let square = z.clone().times(z.clone());
        let mut sum = square.clone().times_number(1.0 / 11.0);
        for term in [9.0, 7.0, 5.0, 3.0] {
            sum = sum.plus_number(1.0 / term).times(square.clone());
        }
        z.times(sum.plus_number(1.0)).times_number(2.0)
    };
    x.at_least(0.0).plus(small)
}

fn hard_sigmoid(x: Array, alpha: f64, beta: f64) -> Array {
    x.times_number(alpha).plus_number(beta).at_least(0.0).at_most(1.0)
}

/// Computes x / 2 · (1 + tanh(√(2 / π) (x + 0.044715 x³))).
fn gelu_by_tanh(x: Array) -> Array {
    let cube = x.clone().times(x.clone()).times(x.clone()).times_number(0.044_715);
    let inner = x.clone().plus(cube).times_number((2.0 / std::f64::consts::PI).sqrt());
    let gate = inner.float(Dispatch::float_tanh).plus_number(1.0).times_number(0.5);
    x.times(gate)
}

fn is_nan(x: Array) -> Array {
    let stored = bool_dtype(&x.device());
    let (shape, tensor) = (x.shape(), x.into_inner());
    Array::from_dispatch(Dispatch::float_is_nan(tensor, stored)).reshape(&shape)
}

fn is_inf(x: Array, negative: bool, positive: bool) -> Array {
    let stored = bool_dtype(&x.device());
    let shape = x.shape();
    let infinite = Array::from_dispatch(Dispatch::float_is_inf(x.clone().into_inner(), stored))
        .reshape(&shape);
    let above = x.above(0.0);
    match (negative, positive) {
        (true, true) => infinite,
        (false, true) => infinite.bools(above, Dispatch::bool_and),
        (true, false) => infinite.bools(above.not(), Dispatch::bool_and),
        (false, false) => infinite.clone().bools(infinite.not(), Dispatch::bool_and),
    }
}

/// Returns dropout in inference: the identity.
fn dropout() -> Run {
    Box::new(|inputs| {
        if let Some(train) = inputs.maybe(2)
            && train.ints()? != [0]
        {
            return Err("expected training_mode false: training is not supported".to_owned());
        }
        let x = inputs.get(0)?;
        let all = Scalar::Bool(true);
        let kept = Array::full(&x.shape(), all, tensor::BOOL, &x.device());
        Ok(vec![x, kept])
    })
}

/// Returns an operator with two inputs that broadcast.
fn two_inputs(run: impl Fn(Array, Array) -> Result<Array, String> + Send + Sync + 'static) -> Run {
    Box::new(move |inputs| Ok(vec![run(inputs.get(0)?, inputs.get(1)?)?]))
}

fn binary(call: &Call<'_>) -> Option<Run> {
    let order = |by: Order, swap: bool| {
        two_inputs(move |a, b| Ok(if swap { b.compared(a, by) } else { a.compared(b, by) }))
    };
    let logic = |run: fn(DispatchTensor, DispatchTensor) -> DispatchTensor| {
        two_inputs(move |a, b| Ok(a.bools(b, run)))
    };
    Some(match call.op() {
        "Add" => two_inputs(|a, b| Ok(a.plus(b))),
        "Sub" => two_inputs(|a, b| Ok(a.minus(b))),
        "Mul" => two_inputs(|a, b| Ok(a.times(b))),
        "Div" => two_inputs(|a, b| Ok(a.over(b))),
        "Pow" => two_inputs(|a, b| Ok(pow(a, b))),
        "Mod" if call.flag("fmod") => two_inputs(|a, b| Ok(fmod(a, b))),
        "Mod" => {
            two_inputs(|a, b| Ok(a.numbers(b, Dispatch::float_remainder, Dispatch::int_remainder)))
        }
        "PRelu" => {
            let by_channel = call.opset < 7;
            two_inputs(move |x, slope| {
                let above = x.clone().above(0.0);
                // Until opset 6 there is one slope per channel.
                let slope = match slope.count() {
                    1 => slope,
                    channels if by_channel => {
                        let mut each = vec![1; x.rank()];
                        each[1] = channels;
                        slope.reshape(&each)
                    }
                    _ => slope,
                };
                above.choose(x.clone(), x.times(slope))
            })
        }
        "Equal" => order(Order::Equal, false),
        "Greater" => order(Order::Greater, false),
        "GreaterOrEqual" => order(Order::GreaterOrEqual, false),
        "Less" => order(Order::Greater, true),
        "LessOrEqual" => order(Order::GreaterOrEqual, true),
        "And" => logic(Dispatch::bool_and),
        "Or" => logic(Dispatch::bool_or),
        "Xor" => logic(Dispatch::bool_xor),
        "BitwiseAnd" => logic(Dispatch::bitwise_and),
        "BitwiseOr" => logic(Dispatch::bitwise_or),
        "BitwiseXor" => logic(Dispatch::bitwise_xor),
        "BitShift" if call.text("direction") == Some("LEFT") => logic(Dispatch::bitwise_left_shift),
        "BitShift" => logic(Dispatch::bitwise_right_shift),
        _ => return None,
    })
}

/// Computes powers in the dtype of the base.
fn pow(base: Array, exponent: Array) -> Array {
    let dtype = base.dtype();
    match (base.kind(), exponent.kind()) {
        (Kind::Float, _) => {
            base.numbers(exponent.cast(dtype), Dispatch::float_powf, Dispatch::int_powi)
        }
        (_, Kind::Float) => {
            let wide = exponent.dtype();
            base.cast(wide).numbers(exponent, Dispatch::float_powf, Dispatch::int_powi).cast(dtype)
        }
        _ => base.numbers(exponent.cast(dtype), Dispatch::float_powf, Dispatch::int_powi),
    }
}

/// Computes the remainder, with the sign of the dividend.
fn fmod(a: Array, b: Array) -> Array {
    let quotient = a.clone().over(b.clone());
    let whole = match a.kind() {
        Kind::Float => quotient.float(Dispatch::float_trunc),
        _ => quotient,
    };
    a.minus(whole.times(b))
}

fn others(call: &Call<'_>) -> Option<Run> {
    Some(match call.op() {
        "Max" => fold(largest),
        "Min" => fold(smallest),
        "Sum" => fold(|a, b| Ok(a.plus(b))),
        "Mean" => Box::new(|inputs| {
            let count = inputs.all.len() as f64;
            let all = inputs.each()?;
            let sum = all
                .into_iter()
                .reduce(Array::plus)
                .ok_or("expected at least one input, got none")?;
            Ok(vec![sum.times_number(1.0 / count)])
        }),
        "Where" => {
            Box::new(|inputs| Ok(vec![inputs.get(0)?.choose(inputs.get(1)?, inputs.get(2)?)?]))
        }
        "Clip" => {
            let limits = [call.float("min"), call.float("max")];
            Box::new(move |inputs| clip(inputs, limits))
        }
        "CastLike" => two_inputs(|x, like| Ok(x.cast(like.dtype()))),
        _ => return None,
    })
}

fn fold(run: impl Fn(Array, Array) -> Result<Array, String> + Send + Sync + 'static) -> Run {
    Box::new(move |inputs| {
        let mut all = inputs.each()?.into_iter();
        let first = all.next().ok_or("expected at least one input, got none")?;
        Ok(vec![all.try_fold(first, &run)?])
    })
}

pub(super) fn largest(a: Array, b: Array) -> Result<Array, String> {
    extreme(a.clone().compared(b.clone(), Order::Greater), a, b)
}

pub(super) fn smallest(a: Array, b: Array) -> Result<Array, String> {
    extreme(b.clone().compared(a.clone(), Order::Greater), a, b)
}

/// Selects a where `first` is true, and b otherwise. NaN in either operand propagates.
fn extreme(first: Array, a: Array, b: Array) -> Result<Array, String> {
    let chosen = first.choose(a.clone(), b.clone())?;
    if a.kind() != Kind::Float {
        return Ok(chosen);
    }
    let is_number = |own: &Array| own.clone().compared(own.clone(), Order::Equal);
    is_number(&b).choose(is_number(&a).choose(chosen, a)?, b)
}

fn clip(inputs: &Inputs<'_>, limits: [Option<f64>; 2]) -> Result<Vec<Array>, String> {
    let mut x = inputs.get(0)?;
    if let Some(least) = limits[0] {
        x = x.at_least(least);
    }
    if let Some(most) = limits[1] {
        x = x.at_most(most);
    }
    if let Some(least) = inputs.maybe(1) {
        let below = least.clone().compared(x.clone(), Order::Greater);
        x = below.choose(least, x)?;
    }
    if let Some(most) = inputs.maybe(2) {
        let above = x.clone().compared(most.clone(), Order::Greater);
        x = above.choose(most, x)?;
    }
    Ok(vec![x])
}
