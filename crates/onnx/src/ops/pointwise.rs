//! Elementwise programs, which the pass `chain` creates.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{BoolStore, DType};
use ops::{Function, Operation, Program, Step};

use super::fused::activated;
use super::{Call, Read, chain};
use crate::array::{Array, Kind, Order, bool_dtype, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    if call.op() != "flashover::Pointwise" {
        return None;
    }
    let program = call.program()?;
    let ours = call.has_kernels();
    Some(Ok(Box::new(move |inputs| {
        let mut all = Array::together(inputs.each()?);
        // Shapes stay on the host.
        if !ours || all.iter().all(Array::is_on_host) {
            return Ok(vec![without_kernels(&program, all)?]);
        }
        let float = all.iter().map(Array::dtype).find(DType::is_float).unwrap_or(DType::F32);
        // The kernel reads at most two dtypes.
        for own in &mut all {
            if own.dtype().is_float() && own.dtype() != float {
                *own = own.clone().cast(float);
            }
        }
        let device = all[0].device();
        let out = if is_logic(&program) { stored(bool_dtype(&device)) } else { float };
        let rank = all.iter().map(Array::rank).max().unwrap_or(0);
        let all: Vec<_> = all.into_iter().map(Array::into_inner).collect();
        let made =
            ops::pointwise(inputs.ctx, &program, &all, out).map_err(|why| why.to_string())?;
        let made = Array::from_dispatch(made);
        Ok(vec![if rank == 0 { made.reshape(&[]) } else { made }])
    })))
}

const fn stored(own: burn::tensor::BoolDType) -> DType {
    match own {
        burn::tensor::BoolDType::U8 => DType::Bool(BoolStore::U8),
        burn::tensor::BoolDType::U32 => DType::Bool(BoolStore::U32),
        burn::tensor::BoolDType::Native => DType::Bool(BoolStore::Native),
    }
}

/// Returns true if the result of a program is a bool.
fn is_logic(program: &Program) -> bool {
    match program.steps.last() {
        Some(Step::Unary(Function::Not, _)) => true,
        Some(Step::Binary(operation, ..)) => matches!(
            operation,
            Operation::Equal
                | Operation::Greater
                | Operation::GreaterOrEqual
                | Operation::And
                | Operation::Or
        ),
        _ => false,
    }
}

/// Runs a program without our kernels.
///
/// # Errors
/// The shapes do not broadcast.
pub(super) fn without_kernels(program: &Program, inputs: Vec<Array>) -> Result<Array, String> {
    match !is_logic(program) && chain::supports(&inputs) {
        true => chain::run(program, inputs),
        false => by_steps(program, inputs),
    }
}

/// Runs a program with Burn's operations, step by step.
fn by_steps(program: &Program, inputs: Vec<Array>) -> Result<Array, String> {
    let narrow = inputs.iter().map(Array::dtype).find(DType::is_float).unwrap_or(DType::F32);
    // As in the kernel, only the result is rounded to 16 bits.
    let float = if narrow.size() == 2 { DType::F32 } else { narrow };
    let device = inputs.first().ok_or("a program has no inputs")?.device();
    let mut registers = inputs;
    for step in &program.steps {
        let register = |own: u8| registers[usize::from(own)].clone();
        let number = |own: u8| register(own).cast(float);
        let made = match *step {
            Step::Constant(own) => {
                Array::full(&[], scalar_of(own.value().into(), float), float, &device)
            }
            Step::Unary(Function::Not, a) => match register(a) {
                own if own.kind() == Kind::Bool => own.not(),
                own => own.cast(crate::tensor::BOOL).not(),
            },
            Step::Unary(function, a) => unary(function, number(a))?,
            Step::Binary(operation, a, b) => match operation {
                Operation::Add => number(a).plus(number(b)),
                Operation::Subtract => number(a).minus(number(b)),
                Operation::Multiply => number(a).times(number(b)),
                Operation::Divide => number(a).over(number(b)),
                Operation::Power => {
                    number(a).numbers(number(b), Dispatch::float_powf, Dispatch::float_powf)
                }
                Operation::Max => super::elementwise::largest(number(a), number(b))?,
                Operation::Min => super::elementwise::smallest(number(a), number(b))?,
                Operation::Equal => same(register(a), register(b), float),
                Operation::Greater => number(a).compared(number(b), Order::Greater),
                Operation::GreaterOrEqual => number(a).compared(number(b), Order::GreaterOrEqual),
                Operation::And => register(a).bools(register(b), |a, b| {
                    <Dispatch as burn::backend::ops::BoolTensorOps<Dispatch>>::bool_and(a, b)
                }),
                Operation::Or => register(a).bools(register(b), |a, b| {
                    <Dispatch as burn::backend::ops::BoolTensorOps<Dispatch>>::bool_or(a, b)
                }),
            },
            Step::Select(which, yes, no) => {
                let (yes, no) = (register(yes), register(no));
                let bools = yes.kind() == Kind::Bool && no.kind() == Kind::Bool;
                let pair = if bools { (yes, no) } else { (yes.cast(float), no.cast(float)) };
                register(which).cast(crate::tensor::BOOL).choose(pair.0, pair.1)?
            }
        };
        registers.push(made);
    }
    let made = registers.pop().ok_or("a program is empty")?;
    Ok(if made.kind() == Kind::Float { made.cast(narrow) } else { made })
}

fn same(a: Array, b: Array, float: DType) -> Array {
    match a.kind() == Kind::Bool && b.kind() == Kind::Bool {
        true => a.compared(b, Order::Equal),
        false => a.cast(float).compared(b.cast(float), Order::Equal),
    }
}

fn unary(function: Function, x: Array) -> Result<Array, String> {
    Ok(match function {
        Function::Activation(own) => activated(x, Some(own))?,
        Function::Abs => x.float(Dispatch::float_abs),
        Function::Ceil => x.float(Dispatch::float_ceil),
        Function::Cos => x.float(Dispatch::float_cos),
        Function::Erf => x.float(Dispatch::float_erf),
        Function::Exp => x.float(Dispatch::float_exp),
        Function::Floor => x.float(Dispatch::float_floor),
        Function::Log => x.float(Dispatch::float_log),
        Function::Negate => x.float(Dispatch::float_neg),
        Function::Not => x.cast(crate::tensor::BOOL).not(),
        Function::Reciprocal => x.float(Dispatch::float_recip),
        Function::Round => x.float(Dispatch::float_round),
        Function::Sign => x.float(Dispatch::float_sign),
        Function::Sin => x.float(Dispatch::float_sin),
        Function::Sqrt => x.float(Dispatch::float_sqrt),
    })
}
