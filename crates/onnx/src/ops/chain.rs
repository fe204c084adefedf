//! Elementwise programs on a CPU, in f32.
//!
//! ```text
//! for each block of 256 elements, on all cores:  registers[inputs + i] = step_i(registers)
//! ```
//!
//! The registers of a block stay in the L1 cache, and a step is a loop of vector instructions. Burn
//! computes one operation over all elements after the other, on one core and with one exponential at
//! a time.
//!
//! exp: the reduction and the polynomial of Cephes (Moshier), to 4e-7 of the value. erf: Abramowitz
//! and Stegun 7.1.26, to 3e-7, and its Taylor series near 0.
//!
//! Times: `benches/baselines/onnx/cpu.md`.

use burn::backend::flex::FlexTensor;
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, TensorData};
use multiversion::multiversion;
use ops::{Activation, Function, Operation, Program, Step};
use rayon::prelude::*;

use crate::array::{Array, broadcast};
use crate::devices;

/// Elements of a block.
const BLOCK: usize = 256;
/// Elements of a core's task.
const TASK: usize = 64 * BLOCK;

/// Elements of a row from which copying rows is faster than Burn's copy of tiles.
const LEAST_ROW: usize = 16;

/// Values of one block.
type Register = [f32; BLOCK];

/// Returns true if [`run`] supports these inputs.
pub(super) fn supports(inputs: &[Array]) -> bool {
    inputs.iter().all(|own| own.is_on_host() && own.dtype() == DType::F32)
}

/// Runs a program on inputs that broadcast. The result takes the memory of an input that nothing else
/// reads.
///
/// # Errors
/// The shapes do not broadcast, or [`supports`] is false.
pub(super) fn run(program: &Program, inputs: Vec<Array>) -> Result<Array, String> {
    let shapes: Vec<_> = inputs.iter().map(Array::shape).collect();
    let shape = broadcast(&shapes).ok_or_else(|| format!("shapes {shapes:?} do not broadcast"))?;
    let count = shape.iter().product();
    let mut tensors = inputs.into_iter().map(host).collect::<Result<Vec<_>, _>>()?;
    let lines = Lines::new(&shape, &tensors);
    let reused = tensors.iter().position(|own| {
        own.is_contiguous() && own.storage::<f32>().len() == count && own.is_unique()
    });
    if let Some(at) = reused {
        let mut own = tensors.remove(at);
        let mut sources: Vec<_> = tensors.iter().map(|own| Some(own.storage())).collect();
        sources.insert(at, None);
        compute(program, &lines, &sources, own.storage_mut());
        let kind = DispatchTensorKind::Flex(BackendTensor::Float(own));
        let autodiff = DispatchAutodiffContext::Disabled;
        return Ok(Array::from_dispatch(DispatchTensor { kind, autodiff }).reshape(&shape));
    }
    let mut all = vec![0.0; count];
    let sources: Vec<_> = tensors.iter().map(|own| Some(own.storage())).collect();
    compute(program, &lines, &sources, &mut all);
    Ok(Array::from_data(TensorData::new(all, shape), &devices::host()))
}

/// Copies a tensor of rows to memory order, on all cores. Returns any other tensor as it is.
pub(super) fn packed(own: Array) -> Array {
    let Some(tensor) = own.host_floats().filter(|own| !own.is_contiguous()) else { return own };
    let (shape, copy) = (own.shape(), Program { inputs: 1, steps: Vec::new() });
    let lines = Lines::new(&shape, std::slice::from_ref(tensor));
    let rows = lines.inputs[0].1.last() == Some(&1) && lines.lengths.last() >= Some(&LEAST_ROW);
    if !rows {
        return own;
    }
    let mut all = vec![0.0; shape.iter().product()];
    compute(&copy, &lines, &[Some(tensor.storage())], &mut all);
    Array::from_data(TensorData::new(all, shape), &devices::host())
}

fn host(own: Array) -> Result<FlexTensor, String> {
    match own.into_inner().kind {
        DispatchTensorKind::Flex(BackendTensor::Float(own)) => Ok(own),
        _ => Err("expected a float tensor on the host".to_owned()),
    }
}

/// Dimensions of the result, and the strides of the inputs along them.
struct Lines {
    /// Lengths, outermost first. Neighbours that all inputs store evenly are merged.
    lengths: Vec<usize>,
    /// First element and strides of each input; stride 0 broadcasts.
    inputs: Vec<(isize, Vec<isize>)>,
}

impl Lines {
    fn new(shape: &[usize], tensors: &[FlexTensor]) -> Self {
        let strides = |own: &FlexTensor, at: usize| {
            let layout = own.layout();
            let lengths = layout.shape().as_slice();
            let at = (at + lengths.len()).checked_sub(shape.len())?;
            (lengths[at] > 1).then(|| layout.strides()[at])
        };
        let mut lengths: Vec<usize> = Vec::new();
        let mut all = vec![Vec::new(); tensors.len()];
        for (at, length) in shape.iter().enumerate().filter(|(_, length)| **length != 1) {
            let own: Vec<isize> = tensors.iter().map(|own| strides(own, at).unwrap_or(0)).collect();
            let even = |(before, own): (&Vec<isize>, &isize)| {
                before.last() == Some(&(own * *length as isize))
            };
            if let Some(last) = lengths.last_mut()
                && all.iter().zip(&own).all(even)
            {
                *last *= length;
                all.iter_mut().zip(own).for_each(|(all, own)| {
                    all.pop();
                    all.push(own);
                });
            } else {
                lengths.push(*length);
                all.iter_mut().zip(own).for_each(|(all, own)| all.push(own));
            }
        }
        let starts = tensors.iter().map(|own| own.layout().start_offset() as isize);
        Self { lengths, inputs: starts.zip(all).collect() }
    }

    /// Copies elements `from`, `from + 1`, … of input `input` to a register.
    fn read(&self, input: usize, source: &[f32], from: usize, register: &mut [f32]) {
        let (start, strides) = &self.inputs[input];
        let (Some(length), Some(stride)) = (self.lengths.last(), strides.last()) else {
            register.fill(source[*start as usize]);
            return;
        };
        let mut done = 0;
        while done < register.len() {
            let (mut rest, column) = ((from + done) / length, (from + done) % length);
            let mut first = *start + column as isize * stride;
            for (length, stride) in self.lengths.iter().zip(strides).rev().skip(1) {
                first += (rest % length) as isize * stride;
                rest /= length;
            }
            let run = (length - column).min(register.len() - done);
            let line = &mut register[done..done + run];
            match stride {
                0 => line.fill(source[first as usize]),
                1 => line.copy_from_slice(&source[first as usize..][..run]),
                _ => line.iter_mut().enumerate().for_each(|(at, own)| {
                    *own = source[(first + at as isize * stride) as usize];
                }),
            }
            done += run;
        }
    }
}

/// Computes all elements. A source of None is the elements of `all` before the program.
fn compute(program: &Program, lines: &Lines, sources: &[Option<&[f32]>], all: &mut [f32]) {
    let task = |(task, own): (usize, &mut [f32])| {
        let mut registers = vec![[0.0; BLOCK]; sources.len() + program.steps.len()];
        for (block, own) in own.chunks_mut(BLOCK).enumerate() {
            let from = task * TASK + block * BLOCK;
            for (at, source) in sources.iter().enumerate() {
                let register = &mut registers[at][..own.len()];
                match source {
                    Some(source) => lines.read(at, source, from, register),
                    None => register.copy_from_slice(own),
                }
            }
            for (at, step) in program.steps.iter().enumerate() {
                let (before, after) = registers.split_at_mut(sources.len() + at);
                apply(*step, before, &mut after[0]);
            }
            let last = registers.last().map_or(&[][..], |own| &own[..own.len()]);
            let length = own.len();
            own.copy_from_slice(&last[..length]);
        }
    };
    if all.len() <= TASK {
        task((0, all));
    } else {
        all.par_chunks_mut(TASK).enumerate().for_each(task);
    }
}

/// Computes one step of a block.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn apply(step: Step, registers: &[Register], out: &mut Register) {
    let register = |own: u8| &registers[usize::from(own)];
    match step {
        Step::Constant(own) => out.fill(own.value()),
        Step::Unary(function, x) => {
            let x = register(x);
            macro_rules! each {
                ($value:ident => $result:expr) => {
                    for at in 0..BLOCK {
                        let $value = x[at];
                        out[at] = $result;
                    }
                };
            }
            match function {
                Function::Abs => each!(x => x.abs()),
                Function::Ceil => each!(x => x.ceil()),
                Function::Cos => each!(x => x.cos()),
                Function::Erf => each!(x => erf(x)),
                Function::Exp => each!(x => exp(x)),
                Function::Floor => each!(x => x.floor()),
                Function::Log => each!(x => x.ln()),
                Function::Negate => each!(x => -x),
                Function::Not => each!(x => f32::from(x == 0.0)),
                Function::Reciprocal => each!(x => 1.0 / x),
                Function::Round => each!(x => x.round_ties_even()),
                Function::Sign => {
                    each!(x => if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x })
                }
                Function::Sin => each!(x => x.sin()),
                Function::Sqrt => each!(x => x.sqrt()),
                Function::Activation(own) => match own {
                    Activation::Silu => each!(x => x / (1.0 + exp(-x))),
                    Activation::Gelu => {
                        each!(x => 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)));
                    }
                    Activation::GeluTanh => {
                        each!(x => x / (1.0 + exp((x * x * x * -0.044_715 - x) * 1.595_769)));
                    }
                    Activation::Relu => each!(x => if x < 0.0 { 0.0 } else { x }),
                    Activation::Sigmoid => each!(x => 1.0 / (1.0 + exp(-x))),
                    Activation::Tanh => each!(x => tanh(x)),
                    Activation::HardSigmoid { scale, shift } => {
                        let (scale, shift) = (scale.value(), shift.value());
                        each!(x => (scale * x + shift).clamp(0.0, 1.0));
                    }
                    Activation::HardSwish => each!(x => x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
                    Activation::Clip { low, high } => {
                        let (low, high) = (low.value(), high.value());
                        each!(x => {
                            let below = if x > high { high } else { x };
                            if below < low { low } else { below }
                        });
                    }
                    Activation::LeakyRelu { slope } => {
                        let slope = slope.value();
                        each!(x => if x < 0.0 { slope * x } else { x });
                    }
                },
            }
        }
        Step::Binary(operation, a, b) => {
            let (a, b) = (register(a), register(b));
            macro_rules! each {
                ($a:ident, $b:ident => $result:expr) => {
                    for at in 0..BLOCK {
                        let ($a, $b) = (a[at], b[at]);
                        out[at] = $result;
                    }
                };
            }
            match operation {
                Operation::Add => each!(a, b => a + b),
                Operation::Subtract => each!(a, b => a - b),
                Operation::Multiply => each!(a, b => a * b),
                Operation::Divide => each!(a, b => a / b),
                Operation::Power => each!(a, b => a.powf(b)),
                Operation::Max => each!(a, b => if a > b || a.is_nan() { a } else { b }),
                Operation::Min => each!(a, b => if a < b || a.is_nan() { a } else { b }),
                Operation::Equal => each!(a, b => f32::from(a == b)),
                Operation::Greater => each!(a, b => f32::from(a > b)),
                Operation::GreaterOrEqual => each!(a, b => f32::from(a >= b)),
                Operation::And => each!(a, b => f32::from(a != 0.0 && b != 0.0)),
                Operation::Or => each!(a, b => f32::from(a != 0.0 || b != 0.0)),
            }
        }
        Step::Select(which, yes, no) => {
            let (which, yes, no) = (register(which), register(yes), register(no));
            for at in 0..BLOCK {
                out[at] = if which[at] != 0.0 { yes[at] } else { no[at] };
            }
        }
    }
}

#[inline(always)]
fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is 0 or infinite. NaN passes.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let n = (x * std::f32::consts::LOG2_E + 0.5).floor();
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = ((1.987_569_1e-4 * r + 1.398_199_9e-3) * r + 8.333_452e-3) * r + 4.166_579_6e-2;
    let y = ((p * r + 1.666_666_5e-1) * r + 0.5) * r * r + r + 1.0;
    // The exponent of the largest and of denormal results takes two factors.
    let n = n as i32;
    let power = |n: i32| f32::from_bits(((n + 127) << 23).cast_unsigned());
    y * power(n >> 1) * power(n - (n >> 1))
}

#[inline(always)]
fn tanh(x: f32) -> f32 {
    let square = x * x;
    let near = x
        * (1.0
            + square
                * (-1.0 / 3.0
                    + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))));
    let e = exp(-2.0 * x.abs());
    let far = ((1.0 - e) / (1.0 + e)).copysign(x);
    if x.abs() < 0.3 { near } else { far }
}

#[inline(always)]
fn erf(x: f32) -> f32 {
    let (size, square) = (x.abs(), x * x);
    let near = x
        * (std::f32::consts::FRAC_2_SQRT_PI
            + square
                * (-0.376_126_4
                    + square
                        * (0.112_837_92 + square * (-0.026_866_17 + square * 0.005_223_977_6))));
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let odd = ((1.061_405_4 * t - 1.453_152) * t + 1.421_413_7) * t - 0.284_496_74;
    let far = (1.0 - (odd * t + 0.254_829_6) * t * exp(-square)).copysign(x);
    if size < 0.4 { near } else { far }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use ops::Constant;

    use super::*;

    fn array(values: &[f32], shape: &[usize]) -> Array {
        Array::from_data(TensorData::new(values.to_vec(), shape.to_vec()), &devices::host())
    }

    fn floats(own: &Array) -> Vec<f64> {
        own.floats().expect("on the host")
    }

    /// Values in f64 of the functions of one number.
    fn exact(function: Function, x: f64) -> f64 {
        // erf by its series, which converges for all x here.
        let erf = |x: f64| {
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            if x.abs() > 4.5 { x.signum() } else { sum * std::f64::consts::FRAC_2_SQRT_PI }
        };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match function {
            Function::Exp => x.exp(),
            Function::Erf => erf(x),
            Function::Round => x.round_ties_even(),
            Function::Sign => {
                if x == 0.0 {
                    0.0
                } else {
                    x.signum()
                }
            }
            Function::Sqrt => x.sqrt(),
            Function::Activation(Activation::Silu) => x * sigmoid(x),
            Function::Activation(Activation::Sigmoid) => sigmoid(x),
            Function::Activation(Activation::Tanh) => x.tanh(),
            Function::Activation(Activation::Gelu) => {
                x * 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
            }
            Function::Activation(Activation::GeluTanh) => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            Function::Activation(Activation::HardSwish) => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
            _ => unreachable!("not tested"),
        }
    }

    #[test]
    fn functions_are_near_their_values_in_f64() {
        let xs: Vec<f32> = (-4000..=4000).map(|at| at as f32 * 0.0051).collect();
        for (function, relative, absolute) in [
            (Function::Exp, 4e-7, 0.0),
            (Function::Erf, 1e-6, 3e-7),
            (Function::Round, 0.0, 0.0),
            (Function::Sign, 0.0, 0.0),
            (Function::Activation(Activation::Silu), 1e-6, 1e-9),
            (Function::Activation(Activation::Sigmoid), 1e-6, 0.0),
            (Function::Activation(Activation::Tanh), 1e-6, 0.0),
            (Function::Activation(Activation::Gelu), 1e-6, 2e-6),
            (Function::Activation(Activation::GeluTanh), 2e-5, 1e-9),
            (Function::Activation(Activation::HardSwish), 1e-6, 1e-6),
        ] {
            let program = Program { inputs: 1, steps: vec![Step::Unary(function, 0)] };
            let made = run(&program, vec![array(&xs, &[xs.len()])]).expect("it runs");
            for (x, own) in xs.iter().zip(floats(&made)) {
                let want = exact(function, f64::from(*x));
                let far = (own - want).abs();
                assert!(far <= relative * want.abs() + absolute, "{function:?} {x}: {own} {want}");
            }
        }
    }

    #[test]
    fn ends_of_the_range() {
        let at = |function, x: f32| {
            let program = Program { inputs: 1, steps: vec![Step::Unary(function, 0)] };
            floats(&run(&program, vec![array(&[x], &[1])]).expect("it runs"))[0]
        };
        let logistic = |own| Function::Activation(own);
        assert_eq!(at(Function::Exp, f32::NEG_INFINITY), 0.0);
        assert_eq!(at(Function::Exp, f32::INFINITY), f64::INFINITY);
        assert_eq!(at(Function::Exp, 88.8), f64::INFINITY);
        assert!((at(Function::Exp, 88.7) / 88.7f64.exp() - 1.0).abs() < 1e-5);
        assert!((at(Function::Exp, -90.0) / (-90f64).exp() - 1.0).abs() < 1e-3, "a denormal");
        assert_eq!(at(logistic(Activation::Sigmoid), -200.0), 0.0);
        assert_eq!(at(logistic(Activation::Tanh), 200.0), 1.0);
        assert_eq!(at(Function::Erf, -9.0), -1.0);
        for function in [
            Function::Exp,
            Function::Erf,
            Function::Sign,
            logistic(Activation::Relu),
            logistic(Activation::Silu),
            logistic(Activation::Tanh),
            logistic(Activation::HardSwish),
            logistic(Activation::Clip { low: Constant::new(0.0), high: Constant::new(6.0) }),
        ] {
            assert!(at(function, f32::NAN).is_nan(), "{function:?}");
        }
    }

    /// Broadcast, transposed and shared operands, over more than one task.
    #[test]
    fn operands_lie_anywhere() {
        let (rows, columns) = (211, 97);
        let of = |len: usize, by: f32| -> Vec<f32> { (0..len).map(|at| at as f32 * by).collect() };
        let x = array(&of(rows * columns, 0.01), &[columns, rows]).permute(&[1, 0]);
        let swapped = array(&of(6 * columns, 1.0), &[2, 3, columns]).permute(&[1, 0, 2]);
        assert_eq!(floats(&packed(swapped.clone())), floats(&swapped));
        let half = swapped.cast(DType::F16);
        assert_eq!(floats(&packed(half.clone())), floats(&half), "a copy of Burn");
        let (line, column) =
            (array(&of(columns, 1.0), &[columns]), array(&of(rows, -1.0), &[rows, 1]));
        let deep = array(&of(2, 1000.0), &[2, 1, 1]);
        let steps = vec![
            Step::Binary(Operation::Add, 0, 1),
            Step::Binary(Operation::Multiply, 4, 2),
            Step::Binary(Operation::Subtract, 5, 3),
        ];
        let program = Program { inputs: 4, steps };
        let made = run(&program, vec![x, line, column, deep]).expect("it runs");
        assert_eq!(made.shape(), [2, rows, columns]);
        let made = floats(&made);
        for each in 0..2 {
            for row in 0..rows {
                for column in 0..columns {
                    let x = (column * rows + row) as f32 * 0.01;
                    let want = (x + column as f32) * -(row as f32) - each as f32 * 1000.0;
                    let own = made[(each * rows + row) * columns + column];
                    assert_eq!(own, f64::from(want), "{each} {row} {column}");
                }
            }
        }
    }

    #[test]
    fn an_input_that_is_read_elsewhere_stays() {
        let program = Program { inputs: 1, steps: vec![Step::Unary(Function::Negate, 0)] };
        let x = array(&[1.0, -2.0], &[2]);
        let y = run(&program, vec![x.clone()]).expect("it runs");
        assert_eq!((floats(&x), floats(&y)), (vec![1.0, -2.0], vec![-1.0, 2.0]));
        let y = run(&program, vec![x]).expect("it runs");
        assert_eq!(floats(&y), [-1.0, 2.0]);
        let scalar = run(&program, vec![array(&[3.0], &[])]).expect("it runs");
        assert_eq!((scalar.shape(), floats(&scalar)), (vec![], vec![-3.0]));
        assert!(run(&program, vec![array(&[], &[0, 2])]).expect("it runs").shape() == [0, 2]);
    }
}
