//! The kernel, generated from the steps of a program.

use arch::{ArchProfile, DType};
use cubecl::ir::{ElemType, IntKind, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::std::FastDivmod;
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use super::problem::{
    Function, Operation, PointwiseConfig, PointwiseInput, PointwiseProblem, Step,
};
use crate::elem::{elem, rounding};
use crate::launch::{index_width, launch};
use crate::matmul::{Arithmetic, activation};
use crate::round::{by_hand, rounded};

/// The kernel that runs a program.
pub struct Pointwise;

/// Device buffers, which start at the first element of their tensors.
#[derive(Debug, Clone)]
pub struct PointwiseOperands {
    pub inputs: Vec<Handle>,
    pub out: Handle,
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Plan {
    steps: Vec<Step>,
    /// Sequence of each input, and its index there.
    inputs: Vec<(Held, usize)>,
    rank: usize,
    /// True if the kernel rounds results in software before it stores them.
    rounds: bool,
    /// True for a result of bools.
    logic: bool,
}

/// Sequence of inputs, by dtype and by access along the innermost dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Held {
    Lines,
    Points,
    OtherLines,
    OtherPoints,
}

/// An input of a kernel.
#[derive(CubeType, CubeLaunch)]
struct Input<E: Numeric, N: Size> {
    data: Box<[Vector<E, N>]>,
    /// Strides in vectors or elements.
    strides: Sequence<u32>,
}

impl Kernel for Pointwise {
    type Problem = PointwiseProblem;
    type Config = PointwiseConfig;
    type Operands = PointwiseOperands;

    const NAME: &'static str = "pointwise";
    const VERSION: u32 = 1;

    fn bucket(p: &PointwiseProblem) -> String {
        p.bucket()
    }

    fn candidates(arch: &ArchProfile, p: &PointwiseProblem) -> Vec<PointwiseConfig> {
        PointwiseConfig::baseline(arch, p).into_iter().collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &PointwiseProblem,
        c: &PointwiseConfig,
    ) -> Result<(), Infeasible> {
        c.check(arch, p)
    }

    fn cost(p: &PointwiseProblem) -> Cost {
        let elements = p.elements() as u64;
        // A repeated element is read once.
        let read = |own: &PointwiseInput| {
            let dims = p.shape.iter().zip(&own.strides);
            let distinct = dims.filter(|(_, stride)| **stride > 0).map(|(len, _)| u64::from(*len));
            distinct.product::<u64>() * own.dtype.size() as u64
        };
        Cost {
            flops: elements * p.program.steps.len() as u64,
            bytes: p.inputs.iter().map(read).sum::<u64>() + elements * p.out.dtype.size() as u64,
        }
    }

    fn baseline(arch: &ArchProfile, p: &PointwiseProblem) -> Result<PointwiseConfig, Infeasible> {
        PointwiseConfig::baseline(arch, p)
    }

    fn operands(queue: &Queue, p: &PointwiseProblem, seed: u64) -> PointwiseOperands {
        let make = |(salt, own): (u64, &PointwiseInput)| match own.dtype {
            DType::U32 | DType::I32 | DType::I64 => {
                queue.empty((p.reach(own) * own.dtype.size()).next_multiple_of(4))
            }
            dtype => crate::noise(queue, p.reach(own), dtype, 8 * seed + salt),
        };
        PointwiseOperands {
            inputs: (0..).zip(&p.inputs).map(make).collect(),
            out: queue.empty((p.reach(&p.out) * p.out.dtype.size()).next_multiple_of(4)),
        }
    }

    fn outputs(p: &PointwiseProblem, operands: &PointwiseOperands) -> Vec<Output> {
        // For a result with gaps, compare the elements before the first gap.
        let reach = p.reach(&p.out);
        let row = if p.out.strides.last() == Some(&1) { p.shape[p.shape.len() - 1] } else { 1 };
        let len = if reach == p.elements() { reach } else { row as usize };
        let (handle, dtype) = (operands.out.clone(), p.out.dtype);
        vec![Output { handle, dtype, len, tolerance: rounding(dtype).max(1e-5) }]
    }

    fn launch(
        queue: &Queue,
        p: &PointwiseProblem,
        c: &PointwiseConfig,
        operands: &PointwiseOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch) as usize;
        // The dtype of the first input, and at most one other.
        let own = p.inputs[0].dtype;
        let other = p.inputs.iter().map(|own| own.dtype).find(|dtype| *dtype != own);
        let (mut lines, mut points) = (SequenceArg::new(), SequenceArg::new());
        let (mut other_lines, mut other_points) = (SequenceArg::new(), SequenceArg::new());
        let mut held = Vec::new();
        for (input, handle) in p.inputs.iter().zip(&operands.inputs) {
            let (reach, line) = (p.reach(input), input.strides.last() == Some(&1) || vector == 1);
            let each = if line { vector } else { 1 };
            let strides: SequenceArg<u32> = vector_strides(input, each).collect();
            // SAFETY: the caller passes buffers of the tensors that the problem describes.
            let data = unsafe { BufferArg::from_raw_parts(handle.clone(), reach.div_ceil(each)) };
            let (kind, place) = match (input.dtype == own, line) {
                (true, true) => (Held::Lines, lines.values.len()),
                (true, false) => (Held::Points, points.values.len()),
                (false, true) => (Held::OtherLines, other_lines.values.len()),
                (false, false) => (Held::OtherPoints, other_points.values.len()),
            };
            held.push((kind, place));
            match kind {
                Held::Lines => lines.push(InputLaunch::new(data, strides)),
                Held::Points => points.push(InputLaunch::new(data, strides)),
                Held::OtherLines => other_lines.push(InputLaunch::new(data, strides)),
                Held::OtherPoints => other_points.push(InputLaunch::new(data, strides)),
            }
        }
        let vectors = p.elements() / vector;
        let reach = p.reach(&p.out).div_ceil(vector);
        let cubes = crate::cubes(arch, vectors as u64, c.units);
        let longest = p.inputs.iter().chain([&p.out]).map(|own| p.reach(own)).max().unwrap_or(0);
        let last = p.shape.len() - 1;
        let lengths = p
            .shape
            .iter()
            .enumerate()
            .map(|(at, len)| if at == last { len / vector as u32 } else { *len });
        let plan = Plan {
            steps: p.program.steps.clone(),
            inputs: held,
            rank: p.shape.len(),
            rounds: by_hand(arch, p.out.dtype),
            logic: matches!(p.out.dtype, DType::U8 | DType::U32),
        };
        // SAFETY: the lengths follow from the problem, and the kernel accesses only elements within
        // them.
        unsafe {
            launch!(
                queue,
                pointwise,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                index_width(longest as u64),
                vector,
                lines,
                points,
                other_lines,
                other_points,
                BufferArg::from_raw_parts(operands.out.clone(), reach),
                vectors,
                lengths.collect::<SequenceArg<FastDivmod<u32>>>(),
                vector_strides(&p.out, vector).collect::<SequenceArg<u32>>(),
                plan,
                stored(own),
                stored(other.unwrap_or(own)),
                stored(p.out.dtype),
            );
        }
    }
}

/// Returns the strides of an operand in vectors of `each` elements.
fn vector_strides(operand: &PointwiseInput, each: usize) -> impl Iterator<Item = u32> {
    let last = operand.strides.len() - 1;
    // Along the innermost dimension, vectors are consecutive, or an element repeats.
    operand.strides.iter().enumerate().map(move |(at, stride)| {
        if at == last && each > 1 { *stride } else { stride / each as u32 }
    })
}

/// Returns the element type of a buffer.
fn stored(dtype: DType) -> ElemType {
    match dtype {
        DType::U8 => ElemType::UInt(UIntKind::U8),
        DType::U32 => ElemType::UInt(UIntKind::U32),
        DType::I32 => ElemType::Int(IntKind::I32),
        DType::I64 => ElemType::Int(IntKind::I64),
        other => elem(other),
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "a launch passes each sequence by itself")]
fn pointwise<F: Numeric, H: Numeric, O: Numeric, N: Size>(
    lines: &Sequence<Input<F, N>>,
    points: &Sequence<Input<F, Const<1>>>,
    other_lines: &Sequence<Input<H, N>>,
    other_points: &Sequence<Input<H, Const<1>>>,
    out: &mut [Vector<O, N>],
    vectors: usize,
    lengths: Sequence<FastDivmod<u32>>,
    out_strides: Sequence<u32>,
    #[comptime] plan: Plan,
    #[define(F)] _of_lines: ElemType,
    #[define(H)] _of_others: ElemType,
    #[define(O)] _of_out: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let mut places = Sequence::<u32>::new();
        let mut rest = at as u32;
        #[unroll]
        for i in 0..comptime!(plan.rank) {
            let dim = comptime!(plan.rank - 1 - i);
            if comptime!(dim == 0) {
                places.push(rest);
            } else {
                let (outer, place) = lengths.index(dim).div_mod(rest);
                places.push(place);
                rest = outer;
            }
        }
        let mut values = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for i in 0..comptime!(plan.inputs.len()) {
            let (kind, place) = comptime!(plan.inputs[i]);
            match comptime!(kind) {
                Held::Lines => {
                    let input = lines.index(place);
                    values.push(Vector::cast_from(
                        input.data[offset(&places, &input.strides, plan.rank)],
                    ));
                }
                Held::Points => {
                    let input = points.index(place);
                    let one = input.data[offset(&places, &input.strides, plan.rank)];
                    values.push(Vector::new(f32::cast_from(one.extract(0usize))));
                }
                Held::OtherLines => {
                    let input = other_lines.index(place);
                    values.push(Vector::cast_from(
                        input.data[offset(&places, &input.strides, plan.rank)],
                    ));
                }
                Held::OtherPoints => {
                    let input = other_points.index(place);
                    let one = input.data[offset(&places, &input.strides, plan.rank)];
                    values.push(Vector::new(f32::cast_from(one.extract(0usize))));
                }
            }
        }
        let mut result = Vector::<O, N>::new(O::from_int(0));
        #[unroll]
        for e in 0..N::value() {
            let mut registers = Sequence::<f32>::new();
            #[unroll]
            for i in 0..comptime!(plan.inputs.len()) {
                registers.push(values.index(i).extract(e));
            }
            #[unroll]
            for i in 0..comptime!(plan.steps.len()) {
                registers.push(step(&registers, comptime!(plan.steps[i])));
            }
            let last = *registers.index(comptime!(plan.inputs.len() + plan.steps.len() - 1));
            if comptime!(plan.logic) {
                result.insert(e, O::cast_from(select(last != 0.0f32, 1u32, 0u32)));
            } else {
                result.insert(e, O::cast_from(rounded::<f32>(last, plan.rounds)));
            }
        }
        out[offset(&places, &out_strides, plan.rank)] = result;
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Returns the offset of an element. `places` are its coordinates, innermost dimension first.
#[cube]
fn offset(places: &Sequence<u32>, strides: &Sequence<u32>, #[comptime] rank: usize) -> usize {
    let mut sum = 0usize;
    #[unroll]
    for i in 0..rank {
        let dim = comptime!(rank - 1 - i);
        sum += *places.index(i) as usize * *strides.index(dim) as usize;
    }
    sum
}

#[cube]
fn step(registers: &Sequence<f32>, #[comptime] step: Step) -> f32 {
    match comptime!(step) {
        Step::Constant(value) => comptime!(value.value()).runtime(),
        Step::Unary(function, a) => unary(*registers.index(comptime!(a as usize)), function),
        Step::Binary(operation, a, b) => binary(
            *registers.index(comptime!(a as usize)),
            *registers.index(comptime!(b as usize)),
            operation,
        ),
        Step::Select(which, yes, no) => select(
            *registers.index(comptime!(which as usize)) != 0.0f32,
            *registers.index(comptime!(yes as usize)),
            *registers.index(comptime!(no as usize)),
        ),
    }
}

#[cube]
fn unary(x: f32, #[comptime] function: Function) -> f32 {
    match comptime!(function) {
        Function::Activation(own) => activation(x, comptime!(Some(own)), Arithmetic::Plain),
        Function::Abs => x.abs(),
        Function::Ceil => x.ceil(),
        Function::Cos => x.cos(),
        Function::Erf => Erf::erf(x),
        Function::Exp => x.exp(),
        Function::Floor => x.floor(),
        Function::Log => x.ln(),
        Function::Negate => -x,
        Function::Not => select(x == 0.0f32, 1.0f32, 0.0f32),
        Function::Reciprocal => 1.0f32 / x,
        Function::Round => x.round(),
        Function::Sign => select(x > 0.0f32, 1.0f32, select(x < 0.0f32, -1.0f32, x * 0.0f32)),
        Function::Sin => x.sin(),
        Function::Sqrt => x.sqrt(),
    }
}

#[cube]
fn binary(a: f32, b: f32, #[comptime] operation: Operation) -> f32 {
    match comptime!(operation) {
        Operation::Add => a + b,
        Operation::Subtract => a - b,
        Operation::Multiply => a * b,
        Operation::Divide => a / b,
        Operation::Power => a.powf(b),
        // With a NaN both comparisons fail.
        Operation::Max => select(a > b, a, select(a <= b, b, a + b)),
        Operation::Min => select(a < b, a, select(a >= b, b, a + b)),
        Operation::Equal => select(a == b, 1.0f32, 0.0f32),
        Operation::Greater => select(a > b, 1.0f32, 0.0f32),
        Operation::GreaterOrEqual => select(a >= b, 1.0f32, 0.0f32),
        Operation::And => select(a != 0.0f32 && b != 0.0f32, 1.0f32, 0.0f32),
        Operation::Or => select(a != 0.0f32 || b != 0.0f32, 1.0f32, 0.0f32),
    }
}
