//! Programs, and the tensors that they read.

use arch::{ArchProfile, DType};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use crate::fits::limits;
use crate::launch::vector;
use crate::matmul::{Activation, Constant};

/// Maximum inputs of a program: each is a buffer, and WebGPU limits bindings.
pub const MAX_INPUTS: usize = 6;
/// Maximum steps of a program.
pub const MAX_STEPS: usize = 48;

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Function {
    Activation(Activation),
    Abs,
    Ceil,
    Cos,
    Erf,
    Exp,
    Floor,
    Log,
    Negate,
    /// 1 for 0, and 0 for any other number.
    Not,
    Reciprocal,
    /// Rounds to the nearest integer; ties to even.
    Round,
    Sign,
    Sin,
    Sqrt,
}

/// An operation on two numbers. Comparisons give 1 or 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
    /// The maximum; propagates NaN.
    Max,
    /// The minimum; propagates NaN.
    Min,
    Equal,
    Greater,
    GreaterOrEqual,
    And,
    Or,
}

/// A step of a program. Operands are register indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    Constant(Constant),
    Unary(Function, u8),
    Binary(Operation, u8, u8),
    /// The second register if the first is not 0, otherwise the third.
    Select(u8, u8, u8),
}

/// Steps over registers: first the inputs, then the result of each step. The last register is the
/// result of the program.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Program {
    pub inputs: u8,
    pub steps: Vec<Step>,
}

/// Dtype and strides of an operand.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PointwiseInput {
    pub dtype: DType,
    /// Strides in elements; 0 broadcasts.
    pub strides: Vec<u32>,
}

/// A program over tensors. Validate it with [`PointwiseProblem::checked`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointwiseProblem {
    pub program: Program,
    /// Lengths of the dimensions, outermost first.
    pub shape: Vec<u32>,
    pub inputs: Vec<PointwiseInput>,
    pub out: PointwiseInput,
}

/// An invalid problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidPointwise {
    #[error("expected a result with elements\nhint: skip an empty chain")]
    Empty,
    #[error("expected less than 2^31 elements, got {0}\nhint: split the tensors")]
    Large(usize),
    #[error(
        "expected 1 to {MAX_INPUTS} inputs and at most {MAX_STEPS} steps, got {inputs} and {steps}\nhint: split the chain"
    )]
    Size { inputs: usize, steps: usize },
    #[error("step {step} reads the register of a later step")]
    Register { step: usize },
    #[error("expected a stride for each of {rank} dimensions, got {have}")]
    Rank { rank: usize, have: usize },
    #[error("expected numbers or bools, got {0}\nhint: cast them")]
    DType(DType),
    #[error("expected an output without stride 0\nhint: allocate the full shape")]
    Repeats,
}

impl PointwiseProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidPointwise`].
    pub fn checked(self) -> Result<Self, InvalidPointwise> {
        let Self { program, shape, inputs, out } = &self;
        let (count, steps) = (inputs.len(), program.steps.len());
        if shape.is_empty() || shape.contains(&0) {
            return Err(InvalidPointwise::Empty);
        }
        let elements = self.elements();
        if elements >= 1 << 31 {
            return Err(InvalidPointwise::Large(elements));
        }
        if count == 0
            || count > MAX_INPUTS
            || steps > MAX_STEPS
            || usize::from(program.inputs) != count
        {
            return Err(InvalidPointwise::Size { inputs: count, steps });
        }
        for (step, own) in program.steps.iter().enumerate() {
            if own.reads().iter().flatten().any(|register| usize::from(*register) >= count + step) {
                return Err(InvalidPointwise::Register { step });
            }
        }
        for own in inputs.iter().chain([out]) {
            if own.strides.len() != shape.len() {
                return Err(InvalidPointwise::Rank { rank: shape.len(), have: own.strides.len() });
            }
            if !matches!(
                own.dtype,
                DType::F32
                    | DType::F16
                    | DType::Bf16
                    | DType::U8
                    | DType::U32
                    | DType::I32
                    | DType::I64
            ) {
                return Err(InvalidPointwise::DType(own.dtype));
            }
        }
        if out.strides.iter().zip(shape).any(|(stride, len)| *stride == 0 && *len > 1) {
            return Err(InvalidPointwise::Repeats);
        }
        Ok(self)
    }

    /// Returns the number of elements of the result.
    pub fn elements(&self) -> usize {
        self.shape.iter().map(|len| *len as usize).product()
    }

    /// Returns the number of elements that the memory of an operand spans.
    pub(super) fn reach(&self, operand: &PointwiseInput) -> usize {
        let last = self.shape.iter().zip(&operand.strides);
        last.map(|(len, stride)| (*len as usize - 1) * *stride as usize).sum::<usize>() + 1
    }

    /// Returns the vector width: all operands have stride 1 or 0 along the innermost dimension.
    pub(super) fn vector(&self, arch: &ArchProfile) -> u32 {
        let all = || self.inputs.iter().chain([&self.out]);
        let widest = all().map(|own| own.dtype).max_by_key(|dtype| dtype.size());
        let inner = self.shape[self.shape.len() - 1];
        let whole = |v: u32| {
            inner.is_multiple_of(v)
                && all().all(|own| {
                    let (last, outer) = own.strides.split_last().expect("checked");
                    match last {
                        0 => true,
                        1 => outer.iter().all(|stride| stride.is_multiple_of(v)),
                        _ => false,
                    }
                })
        };
        let writes_lines = self.out.strides.last() == Some(&1) || inner == 1;
        match widest.filter(|_| writes_lines) {
            Some(widest) => vector(arch, widest, whole),
            None => 1,
        }
    }

    pub(super) fn bucket(&self) -> String {
        let inputs: Vec<String> = self.inputs.iter().map(|own| own.dtype.to_string()).collect();
        let (steps, rank) = (self.program.steps.len(), self.shape.len());
        let elements = self.elements().next_power_of_two();
        format!("{} to {} steps {steps} rank {rank} {elements}", inputs.join(" "), self.out.dtype)
    }
}

impl Step {
    /// Returns the registers that a step reads.
    pub(super) const fn reads(self) -> [Option<u8>; 3] {
        match self {
            Self::Constant(_) => [None; 3],
            Self::Unary(_, a) => [Some(a), None, None],
            Self::Binary(_, a, b) => [Some(a), Some(b), None],
            Self::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        }
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PointwiseConfig {
    /// Units of a cube.
    pub units: u32,
}

impl PointwiseConfig {
    pub(super) fn check(self, arch: &ArchProfile, p: &PointwiseProblem) -> Result<(), Infeasible> {
        let all = p.inputs.iter().chain([&p.out]).map(|own| own.dtype);
        // A profile does not list wider integers.
        let listed = |own: &DType| matches!(own, DType::F16 | DType::Bf16 | DType::U8);
        crate::fits::stores(arch, all.filter(listed))?;
        limits(arch, self.units, 0)
    }

    pub(super) fn baseline(arch: &ArchProfile, p: &PointwiseProblem) -> Result<Self, Infeasible> {
        let config = Self { units: arch.cores().unwrap_or(256) };
        config.check(arch, p).map(|()| config)
    }
}
