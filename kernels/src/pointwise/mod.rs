//! A chain of elementwise operations as one kernel, generated from a program.
//!
//! ```text
//! out[i] = round(program(in0[i], in1[i], …))      inputs broadcast: a stride of 0 repeats an element
//! ```
//!
//! A program is a list of steps over registers: the first registers are the inputs, each step adds
//! one, and the last one is the result. All arithmetic is f32, with one rounding at the end; bools
//! are 0 and 1. Inputs and the result have any strides, so a program without steps copies,
//! transposes, slices or concatenates.
//!
//! Cost: each input is read once, the result is written once. Without this kernel every
//! intermediate is written and read: a chain of n steps over one tensor moves 2n times its bytes.
//!
//! Layout: the caller sorts the dimensions in the memory order of the result, and merges those that
//! are contiguous in all operands. Most chains keep one dimension; those with a vector that
//! broadcasts keep two. Along the innermost dimension an operand is read in vectors, or as one
//! element if its stride is 0. If an operand has another stride there, all are read element by
//! element.

mod kernel;
mod problem;

pub use kernel::{Pointwise, PointwiseOperands};
pub use problem::{
    Function, InvalidPointwise, MAX_INPUTS, MAX_STEPS, Operation, PointwiseConfig, PointwiseInput,
    PointwiseProblem, Program, Step,
};
