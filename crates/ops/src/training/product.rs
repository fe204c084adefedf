//! Gradients of weights and biases.

use burn::tensor::{DType, Tensor};
use kernels::column_sums::{ColumnSums, ColumnSumsOperands, ColumnSumsProblem};
use kernels::matmul::{
    Epilogue, EpilogueBuffers, Matmul, MatmulOperands, MatmulProblem, Precision,
};

use crate::call::{float_of, same_dtype, size_of};
use crate::cube::{cube, written};
use crate::layout::{Matrices, rows_of};
use crate::{Ctx, OpError};

/// Adds `lhs · rhs` to `sums` in place, or replaces them unless `accumulate`. With lhs = doutᵀ and rhs = x this is the gradient
/// of a weight `[n, k]`.
///
/// # Shapes
/// lhs `[m, k]`, rhs `[k, n]`, any strides, of one dtype; sums `[m, n]` in f32, dense.
///
/// # Errors
/// [`OpError::Depth`], [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`] for invalid operands; [`OpError::Device`],
/// [`OpError::NoGradient`], [`OpError::Tune`].
pub fn add_product(
    ctx: &Ctx,
    lhs: Tensor<2>,
    rhs: Tensor<2>,
    sums: &Tensor<2>,
    accumulate: bool,
) -> Result<(), OpError> {
    let ([m, k], [depth, n]) = (lhs.dims(), rhs.dims());
    if k != depth {
        let (lhs, rhs) = (vec![m, k], vec![depth, n]);
        return Err(OpError::Depth { lhs, lhs_k: k, rhs, rhs_k: depth });
    }
    same_dtype("rhs", rhs.dtype(), lhs.dtype())?;
    let precision = match float_of(lhs.dtype())? {
        arch::DType::F16 => Precision::F16,
        arch::DType::Bf16 => Precision::Bf16,
        _ => Precision::F32,
    };
    let out = written("the sums", sums, &[m, n], DType::F32)?;
    let (lhs, left) = Matrices::of_any(cube(lhs)?, &[]);
    let (rhs, right) = Matrices::of_any(cube(rhs)?, &[]);
    let plain = MatmulProblem::dense(
        1,
        [size_of(m)?, size_of(n)?, size_of(k)?],
        [left.operand.layout, right.operand.layout],
        precision,
    )?;
    let problem = MatmulProblem {
        lhs: left.operand,
        rhs: right.operand,
        out: arch::DType::F32,
        epilogue: Epilogue { residual: accumulate, ..Epilogue::default() },
        ..plain
    };
    let residual = accumulate.then(|| out.handle.clone());
    let operands = MatmulOperands {
        lhs: lhs.handle.clone(),
        rhs: rhs.handle,
        out: out.handle.clone(),
        norm: None,
        epilogue: EpilogueBuffers { bias: None, gate: None, residual },
        rows: None,
    };
    ctx.run::<Matmul>(&lhs, &problem, &operands)
}

/// Adds the sums of the columns of `x` to `sums` in place, or replaces them unless `accumulate`: the gradient of a bias.
///
/// # Shapes
/// x `[rows, n]`; sums `[n]` in f32, dense.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`] for invalid operands; [`OpError::Device`],
/// [`OpError::NoGradient`], [`OpError::Tune`].
pub fn add_column_sums(
    ctx: &Ctx,
    x: Tensor<2>,
    sums: &Tensor<1>,
    accumulate: bool,
) -> Result<(), OpError> {
    let [rows, width] = x.dims();
    let dtype = float_of(x.dtype())?;
    let out = written("the sums", sums, &[width], DType::F32)?;
    let (x, stride) = rows_of(cube(x)?);
    let problem = ColumnSumsProblem {
        rows: size_of(rows)?,
        width: size_of(width)?,
        stride: size_of(stride)?,
        dtype,
        accumulate,
    }
    .checked()?;
    let operands = ColumnSumsOperands { x: x.handle.clone(), out: out.handle };
    ctx.run::<ColumnSums>(&x, &problem, &operands)
}
