//! Checks generated chains against their program in f64.

use std::f64::consts::SQRT_2;

use arch::{Backend, DType, Device};
use kernels::matmul::{Activation, Constant, Precision};
use kernels::pointwise::{
    Function, Operation, Pointwise, PointwiseConfig, PointwiseInput, PointwiseOperands,
    PointwiseProblem, Program, Step,
};
use reference::{Distribution, compare, fill};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, unwritten, values,
};
use crate::kernel::{KernelSuite, Params, params, precision};
use crate::matmul::reference_activation;

/// A program to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: PointwiseProblem,
    pub seed: u64,
}

impl KernelSuite for Pointwise {
    type Case = EdgeCase;

    fn precision(p: &PointwiseProblem) -> Precision {
        precision(p.out.dtype)
    }

    fn params(p: &PointwiseProblem) -> Params {
        let list = |own: &[u32]| own.iter().map(u32::to_string).collect::<Vec<_>>().join("x");
        let operand = |own: &PointwiseInput| format!("{} {}", own.dtype, list(&own.strides));
        let inputs: Vec<_> = p.inputs.iter().map(operand).collect();
        let steps: Vec<_> = p.program.steps.iter().map(|own| format!("{own:?}")).collect();
        params([
            ("shape", list(&p.shape).into()),
            ("inputs", inputs.join(", ").into()),
            ("out", operand(&p.out).into()),
            ("steps", steps.join("; ").into()),
        ])
    }

    fn problem(case: &EdgeCase) -> &PointwiseProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut problems: Vec<_> =
            one_step().into_iter().map(|own| dense(own, 1000, dtype)).collect();
        problems.extend(layouts(dtype));
        let seeded = |(seed, problem)| EdgeCase { problem, seed };
        (41_000..).zip(problems).map(seeded).collect()
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let problem = dense(gated(), 1000, precision.storage());
        vec![EdgeCase { problem, seed: 41_500 }]
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &PointwiseConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let upload = |(salt, own): (u64, &PointwiseInput)| {
            let normal = fill(8 * case.seed + salt, reach(p, own), Distribution::Normal);
            let bytes = match own.dtype {
                DType::U8 => normal.iter().map(|x| u8::from(*x > 0.0)).collect(),
                dtype => reference_dtype(dtype).encode(&normal),
            };
            device.client().create_from_slice(&padded(&bytes))
        };
        let operands = PointwiseOperands {
            inputs: (0..).zip(&p.inputs).map(upload).collect(),
            out: unwritten(device, reach(p, &p.out) * p.out.dtype.size()),
        };
        launch_twice::<Self>(device, p, config, &operands, &[&operands.out])?;
        Self::verify_operands(device, p, &operands, case.seed)
    }

    fn verify_operands(
        device: &Device,
        p: &PointwiseProblem,
        operands: &PointwiseOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let mut inputs = Vec::new();
        for (own, handle) in p.inputs.iter().zip(&operands.inputs) {
            inputs.push(match own.dtype {
                DType::U8 => {
                    read(device, handle, reach(p, own))?.into_iter().map(f32::from).collect()
                }
                dtype => values(device, handle, reach(p, own), dtype)?,
            });
        }
        let got = read(device, &operands.out, reach(p, &p.out) * p.out.dtype.size())?;
        let logic = p.out.dtype == DType::U8;
        let dtype = reference_dtype(if logic { DType::F32 } else { p.out.dtype });
        let all = match logic {
            true => got.iter().map(|own| f32::from(*own)).collect(),
            false => dtype.decode(&got)?,
        };
        let (mut out, mut exact, mut naive) = (Vec::new(), Vec::new(), Vec::new());
        for at in 0..p.elements() {
            let registers = |place: &PointwiseInput| place_of(p, place, at);
            let read = inputs.iter().zip(&p.inputs);
            let given: Vec<f64> = read.map(|(data, own)| f64::from(data[registers(own)])).collect();
            out.push(all[registers(&p.out)]);
            exact.push(run(&p.program, &given, |own| own));
            naive.push(dtype.round(run(&p.program, &given, |own| f64::from(own as f32))));
        }
        let comparison = compare(&out, &exact, &naive, dtype)?;
        Ok(Verdict { comparison, digest: fnv1a(&got) })
    }

    /// A gated activation and a scaled residual: 32 images of a ViT, with a factor of each channel.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<PointwiseProblem>> {
        let (rows, dtype) = match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => return Vec::new(),
            (_, Scale::Host) => (256, DType::F32),
            (_, Scale::Gpu) => (32 * 197, DType::F16),
        };
        let scaled = problem(
            scaled(),
            &[rows, 768],
            &[(dtype, &[768, 1]), (dtype, &[0, 1]), (dtype, &[768, 1])],
            (dtype, &[768, 1]),
        );
        vec![BenchCase::alone(dense(gated(), rows * 3072, dtype)), BenchCase::alone(scaled)]
    }

    fn instances() -> Vec<InstanceCase<PointwiseProblem>> {
        let all = [DType::F16, DType::Bf16, DType::F32].into_iter();
        let all = all.flat_map(|dtype| [dense(gated(), 1 << 20, dtype), channels(dtype)]);
        let case =
            |problem| InstanceCase { problem, max_candidates: usize::MAX, clean: usize::MAX };
        all.map(case).collect()
    }
}

/// Elements from the first one of an operand to the last.
fn reach(p: &PointwiseProblem, of: &PointwiseInput) -> usize {
    place_of(p, of, p.elements() - 1) + 1
}

/// Returns the place of an element of the result in an operand.
fn place_of(p: &PointwiseProblem, of: &PointwiseInput, at: usize) -> usize {
    let (mut rest, mut place) = (at, 0);
    for (len, stride) in p.shape.iter().zip(&of.strides).rev() {
        place += rest % *len as usize * *stride as usize;
        rest /= *len as usize;
    }
    place
}

/// Runs a program on numbers, and rounds after each step.
fn run(program: &Program, inputs: &[f64], round: impl Fn(f64) -> f64) -> f64 {
    let mut registers = inputs.to_vec();
    for step in &program.steps {
        let of = |own: u8| registers[usize::from(own)];
        registers.push(round(match *step {
            Step::Constant(own) => f64::from(own.value()),
            Step::Unary(function, a) => unary(function, of(a)),
            Step::Binary(operation, a, b) => binary(operation, of(a), of(b)),
            Step::Select(which, yes, no) => of(if of(which) == 0.0 { no } else { yes }),
        }));
    }
    registers.pop().unwrap_or(f64::NAN)
}

fn unary(function: Function, x: f64) -> f64 {
    match function {
        Function::Activation(own) => reference_activation(own).exact(x),
        Function::Abs => x.abs(),
        Function::Ceil => x.ceil(),
        Function::Cos => x.cos(),
        // GELU is x · (1 + erf(x / √2)) / 2.
        Function::Erf if x == 0.0 => 0.0,
        Function::Erf => {
            let wide = SQRT_2 * x;
            2.0 * reference_activation(Activation::Gelu).exact(wide) / wide - 1.0
        }
        Function::Exp => x.exp(),
        Function::Floor => x.floor(),
        Function::Log => x.ln(),
        Function::Negate => -x,
        Function::Not => f64::from(u8::from(x == 0.0)),
        Function::Reciprocal => 1.0 / x,
        Function::Round => x.round_ties_even(),
        Function::Sign if x == 0.0 => 0.0,
        Function::Sign => x.signum(),
        Function::Sin => x.sin(),
        Function::Sqrt => x.sqrt(),
    }
}

fn binary(operation: Operation, a: f64, b: f64) -> f64 {
    let logic = |own: bool| f64::from(u8::from(own));
    match operation {
        Operation::Add => a + b,
        Operation::Subtract => a - b,
        Operation::Multiply => a * b,
        Operation::Divide => a / b,
        Operation::Power => a.powf(b),
        Operation::Max => a.max(b),
        Operation::Min => a.min(b),
        Operation::Equal => logic(a == b),
        Operation::Greater => logic(a > b),
        Operation::GreaterOrEqual => logic(a >= b),
        Operation::And => logic(a != 0.0 && b != 0.0),
        Operation::Or => logic(a != 0.0 || b != 0.0),
    }
}

/// Returns a program for each function and operation. Those that need positive numbers get |x| + 1/2.
fn one_step() -> Vec<Program> {
    use {Function as F, Operation as O};
    let number = |own: f32| Step::Constant(Constant::new(own));
    let any = [F::Abs, F::Ceil, F::Exp, F::Floor, F::Negate, F::Not, F::Sign];
    let any = Activation::ALL.into_iter().map(F::Activation).chain(any);
    let mut all: Vec<_> =
        any.map(|own| Program { inputs: 1, steps: vec![Step::Unary(own, 0)] }).collect();
    let positive = vec![Step::Unary(F::Abs, 0), number(0.5), Step::Binary(O::Add, 1, 2)];
    all.extend([F::Log, F::Reciprocal, F::Sqrt].map(|own| Program {
        inputs: 1,
        steps: [positive.clone(), vec![Step::Unary(own, 3)]].concat(),
    }));
    // Of multiples of a half, which have ties.
    let half =
        [number(2.0), Step::Binary(O::Multiply, 0, 1), Step::Unary(F::Floor, 2), number(0.5)];
    let round = [Step::Binary(O::Multiply, 3, 4), Step::Unary(F::Round, 5)];
    all.push(Program { inputs: 1, steps: [&half[..], &round].concat() });
    // One more: a device without erf has a polynomial whose error is 5e-7, and sines of Vulkan may be as far off.
    all.extend([F::Cos, F::Erf, F::Sin].map(|own| {
        let steps = vec![Step::Unary(own, 0), number(1.0), Step::Binary(O::Add, 1, 2)];
        Program { inputs: 1, steps }
    }));
    let two = |steps| Program { inputs: 2, steps };
    let plain = [O::Add, O::Subtract, O::Multiply, O::Max, O::Min, O::Greater, O::GreaterOrEqual];
    all.extend(plain.map(|own| two(vec![Step::Binary(own, 0, 1)])));
    // Of |x| + 1/2 and y, of signs, and of x > 0 and y > 0.
    let above = [Step::Unary(F::Abs, 0), number(0.5), Step::Binary(O::Add, 2, 3)];
    all.push(two([&above[..], &[Step::Binary(O::Power, 4, 1)]].concat()));
    all.push(two([&above[..], &[Step::Binary(O::Divide, 1, 4)]].concat()));
    let signs = [Step::Unary(F::Sign, 0), Step::Unary(F::Sign, 1)];
    all.push(two([&signs[..], &[Step::Binary(O::Equal, 2, 3)]].concat()));
    let positive = [number(0.0), Step::Binary(O::Greater, 0, 2), Step::Binary(O::Greater, 1, 2)];
    all.extend(
        [O::And, O::Or].map(|own| two([&positive[..], &[Step::Binary(own, 3, 4)]].concat())),
    );
    all.push(two([&positive[..], &[Step::Select(3, 1, 4)]].concat()));
    all
}

/// `silu(x) · y`.
fn gated() -> Program {
    let silu = Step::Unary(Function::Activation(Activation::Silu), 0);
    Program { inputs: 2, steps: vec![silu, Step::Binary(Operation::Multiply, 2, 1)] }
}

/// `x · y + z`.
fn scaled() -> Program {
    let steps = vec![Step::Binary(Operation::Multiply, 0, 1), Step::Binary(Operation::Add, 3, 2)];
    Program { inputs: 3, steps }
}

/// A program on dense tensors.
fn dense(program: Program, count: u32, dtype: DType) -> PointwiseProblem {
    let inputs = vec![(dtype, &[1][..]); usize::from(program.inputs)];
    problem(program, &[count], &inputs, (dtype, &[1]))
}

/// An image with channels last, a factor of each channel, and an image with channels first.
fn channels(dtype: DType) -> PointwiseProblem {
    problem(
        scaled(),
        &[2, 35, 24],
        &[(dtype, &[840, 24, 1]), (dtype, &[0, 0, 1]), (dtype, &[840, 1, 35])],
        (dtype, &[840, 24, 1]),
    )
}

/// Tensors that broadcast, lie in several orders, or hold other elements.
fn layouts(dtype: DType) -> Vec<PointwiseProblem> {
    let copy = || Program { inputs: 1, steps: Vec::new() };
    let line: &[u32] = &[1];
    let chosen = Program { inputs: 3, steps: vec![Step::Select(0, 1, 2)] };
    let greater = Program { inputs: 2, steps: vec![Step::Binary(Operation::Greater, 0, 1)] };
    let mut all = vec![
        channels(dtype),
        problem(copy(), &[1], &[(dtype, line)], (dtype, line)),
        // A transposition, and three channels as the first ones of eight.
        problem(copy(), &[33, 40], &[(dtype, &[1, 33])], (dtype, &[40, 1])),
        problem(copy(), &[77, 3], &[(dtype, &[1, 77])], (dtype, &[8, 1])),
        problem(
            scaled(),
            &[9, 64],
            &[(dtype, &[0, 1]), (dtype, &[1, 0]), (dtype, &[0, 0])],
            (dtype, &[64, 1]),
        ),
        problem(chosen, &[1003], &[(DType::U8, line), (dtype, line), (dtype, line)], (dtype, line)),
        problem(greater, &[1003], &[(dtype, line), (dtype, line)], (DType::U8, line)),
    ];
    if dtype != DType::F32 {
        all.push(problem(
            gated(),
            &[500],
            &[(dtype, line), (DType::F32, line)],
            (DType::F32, line),
        ));
    }
    all
}

fn problem(
    program: Program,
    shape: &[u32],
    inputs: &[(DType, &[u32])],
    out: (DType, &[u32]),
) -> PointwiseProblem {
    let operand =
        |&(dtype, strides): &(DType, &[u32])| PointwiseInput { dtype, strides: strides.to_vec() };
    let (shape, out) = (shape.to_vec(), operand(&out));
    PointwiseProblem { program, shape, inputs: inputs.iter().map(operand).collect(), out }
        .checked()
        .expect("sizes are valid")
}
