//! Matmuls whose results, or additions, training alone needs.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::column_sums::{ColumnSums, ColumnSumsOperands, ColumnSumsProblem};
use kernels::matmul::{
    Epilogue, EpilogueBuffers, Matmul, MatmulOperands, MatmulProblem, Precision,
};

use crate::call::{float_of, result_like, same_dtype, same_shape, size_of};
use crate::cube::{cube, float, written};
use crate::layout::{Matrices, rows_of};
use crate::matmul::precision_of;
use crate::{Activation, Ctx, OpError};

/// A product of two matrices in their layouts.
struct Product {
    lhs: CubeTensor,
    rhs: CubeTensor,
    /// Without epilogue.
    problem: MatmulProblem,
}

impl Product {
    fn new(lhs: Tensor<2>, rhs: Tensor<2>, tf32: bool) -> Result<Self, OpError> {
        let ([m, k], [depth, n]) = (lhs.dims(), rhs.dims());
        if k != depth {
            let (lhs, rhs) = (vec![m, k], vec![depth, n]);
            return Err(OpError::Depth { lhs, lhs_k: k, rhs, rhs_k: depth });
        }
        same_dtype("rhs", rhs.dtype(), lhs.dtype())?;
        let precision = match precision_of(float_of(lhs.dtype())?) {
            Precision::F32 if tf32 => Precision::Tf32,
            own => own,
        };
        let (lhs, left) = Matrices::of_any(cube(lhs)?, &[]);
        let (rhs, right) = Matrices::of_any(cube(rhs)?, &[]);
        let plain = MatmulProblem::dense(
            1,
            [size_of(m)?, size_of(n)?, size_of(k)?],
            [left.operand.layout, right.operand.layout],
            precision,
        )?;
        let problem = MatmulProblem { lhs: left.operand, rhs: right.operand, ..plain };
        Ok(Self { lhs, rhs, problem })
    }

    /// Allocates a dense matrix like the result.
    fn result(&self) -> CubeTensor {
        let MatmulProblem { m, n, out, .. } = self.problem;
        result_like(&self.lhs, [m as usize, n as usize], out)
    }

    fn run(
        self,
        ctx: &Ctx,
        out: &CubeTensor,
        epilogue: Epilogue,
        buffers: EpilogueBuffers,
    ) -> Result<(), OpError> {
        let problem = MatmulProblem { epilogue, ..self.problem };
        let operands = MatmulOperands {
            lhs: self.lhs.handle.clone(),
            rhs: self.rhs.handle,
            out: out.handle.clone(),
            norm: None,
            epilogue: buffers,
            rows: None,
            second: None,
        };
        ctx.run::<Matmul>(&self.lhs, &problem, &operands)
    }
}

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
    let mut product = Product::new(lhs, rhs, false)?;
    let MatmulProblem { m, n, .. } = product.problem;
    product.problem.out = arch::DType::F32;
    let out = written("the sums", sums, &[m as usize, n as usize], DType::F32)?;
    let residual = accumulate.then(|| out.handle.clone());
    let epilogue = Epilogue { residual: accumulate, ..Epilogue::default() };
    product.run(ctx, &out, epilogue, EpilogueBuffers { residual, ..EpilogueBuffers::default() })
}

/// Computes `z = x · weight + bias` and `h = activation(z)` in one launch, and returns both. h is that of z as it is stored.
///
/// # Shapes
/// x `[rows, k]`, weight `[k, n]`, any strides; bias `[n]`; z and h `[rows, n]`; all of one dtype. With `tf32`, tensor cores round
/// operands in f32 to 10 mantissa bits.
///
/// # Errors
/// [`OpError::Depth`], [`OpError::Shape`], [`OpError::DType`] for invalid operands; [`OpError::Device`], [`OpError::NoGradient`],
/// [`OpError::Tune`].
pub fn linear_activated(
    ctx: &Ctx,
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: Activation,
    tf32: bool,
) -> Result<[Tensor<2>; 2], OpError> {
    let ([_, n], dtype) = (weight.dims(), x.dtype());
    let product = Product::new(x, weight, tf32)?;
    let [z, h] = [product.result(), product.result()];
    let bias = bias.map(|bias| {
        same_shape("bias", &bias.dims(), &[n])?;
        same_dtype("bias", bias.dtype(), dtype)?;
        Ok::<_, OpError>(into_contiguous(cube(bias)?).handle)
    });
    let bias = bias.transpose()?;
    let epilogue = Epilogue {
        bias: bias.is_some(),
        pre_activation: true,
        activation: Some(activation),
        ..Epilogue::default()
    };
    let pre_activation = Some(z.handle.clone());
    let buffers = EpilogueBuffers { bias, pre_activation, ..EpilogueBuffers::default() };
    product.run(ctx, &h, epilogue, buffers)?;
    Ok([float(z), float(h)])
}

/// Computes `(dout · weight) · activation'(z)`, the gradient of z through `activation(z)` and the linear layer after it.
///
/// # Shapes
/// dout `[rows, n]`, weight `[n, k]`, any strides; z and the result `[rows, k]`; all of one dtype. With `tf32`, tensor cores round
/// operands in f32 to 10 mantissa bits.
///
/// # Errors
/// [`OpError::Depth`], [`OpError::Shape`], [`OpError::DType`] for invalid operands; [`OpError::Device`], [`OpError::NoGradient`],
/// [`OpError::Tune`].
pub fn linear_activated_backward(
    ctx: &Ctx,
    dout: Tensor<2>,
    weight: Tensor<2>,
    z: Tensor<2>,
    activation: Activation,
    tf32: bool,
) -> Result<Tensor<2>, OpError> {
    same_shape("z", &z.dims(), &[dout.dims()[0], weight.dims()[1]])?;
    same_dtype("z", z.dtype(), dout.dtype())?;
    let product = Product::new(dout, weight, tf32)?;
    let dz = product.result();
    let epilogue = Epilogue { gate: true, slope: Some(activation), ..Epilogue::default() };
    let gate = Some(into_contiguous(cube(z)?).handle);
    product.run(ctx, &dz, epilogue, EpilogueBuffers { gate, ..EpilogueBuffers::default() })?;
    Ok(float(dz))
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
