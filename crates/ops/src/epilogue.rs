//! Ops fused into a matmul: an epilogue on its result, and a norm of its lhs rows.

use burn::tensor::{FloatDType, Tensor};
use kernels::matmul::Activation;
use kernels::norm::{NormKind, NormProblem};

use crate::OpError;
use crate::call::{float_of, same_dtype, same_shape, size_of};

/// Ops fused into a matmul with a result of rank `D`: bias, activation, gate and residual on the result, and
/// a norm of the lhs rows.
#[derive(Debug, Clone)]
pub struct Epilogue<const D: usize> {
    /// Bias `[n]`, added to every row, in the operands' dtype.
    pub bias: Option<Tensor<1>>,
    /// Activation, applied after the bias and before the gate.
    pub activation: Option<Activation>,
    /// Factor of each element, with the result's shape and dtype.
    pub gate: Option<Tensor<D>>,
    /// Addend, applied last, with the result's shape and dtype.
    pub residual: Option<Tensor<D>>,
    /// Dtype of the result; none for the operands' dtype.
    pub out: Option<FloatDType>,
    /// True to let tensor cores round f32 operands to tf32, with 10 mantissa bits.
    pub tf32: bool,
    /// True to let tensor cores accumulate f16 matmuls in f16. That is twice as fast on GeForce cards, with
    /// the range and the 10 mantissa bits of f16. Gradients still accumulate in f32.
    pub f16_accumulation: bool,
    /// Norm of the lhs rows. It is fused for few rows and a weight that is contiguous along k
    /// ([`takes_norm`](crate::takes_norm)); otherwise it is a separate launch.
    pub norm: Option<RowNorm>,
}

/// Norm of each lhs row x: `x / rms · weight`, or the variants of [`NormKind`]. A layer norm is always a
/// separate launch, and has no bias here.
///
/// # Shapes
/// weight `[k]`, in the dtype of the rows.
#[derive(Debug, Clone)]
pub struct RowNorm {
    /// Norm weight: one factor per column.
    pub weight: Tensor<1>,
    /// Kind of the norm: with or without the mean, and the meaning of the weight.
    pub kind: NormKind,
    /// Epsilon, added to the mean of squares or to the variance.
    pub eps: f32,
}

impl<const D: usize> Default for Epilogue<D> {
    fn default() -> Self {
        Self {
            bias: None,
            activation: None,
            gate: None,
            residual: None,
            out: None,
            tf32: false,
            f16_accumulation: false,
            norm: None,
        }
    }
}

impl<const D: usize> Epilogue<D> {
    /// Checks that the bias has the operands' dtype, and gate and residual the result's dtype.
    pub(crate) fn check_dtypes(
        &self,
        operands: burn::tensor::DType,
        out: burn::tensor::DType,
    ) -> Result<(), OpError> {
        let typed = [
            ("bias", self.bias.as_ref().map(Tensor::dtype), operands),
            ("gate", self.gate.as_ref().map(Tensor::dtype), out),
            ("residual", self.residual.as_ref().map(Tensor::dtype), out),
        ];
        for (what, have, need) in typed {
            if let Some(have) = have.filter(|have| *have != need) {
                return Err(OpError::DType { what, have, need });
            }
        }
        Ok(())
    }

    /// Returns the norm of the rows `lhs`, if any. An empty `lhs` is checked as one row of one element.
    pub(crate) fn norm_of(&self, lhs: &Tensor<D>) -> Result<Option<NormProblem>, OpError> {
        let Some(RowNorm { weight, kind, eps }) = &self.norm else { return Ok(None) };
        let (dims, dtype) = (lhs.dims(), lhs.dtype());
        let k = dims[D - 1];
        same_shape("norm", &weight.dims(), &[k])?;
        same_dtype("norm", weight.dtype(), dtype)?;
        let rows = size_of(dims[..D - 1].iter().product::<usize>().max(1))?;
        Ok(Some(NormProblem::new(rows, size_of(k.max(1))?, float_of(dtype)?, *kind, *eps)?))
    }

    /// Checks that the bias has `bias` elements, and that gate and residual have the result's shape.
    pub(crate) fn check_shapes(&self, bias: usize, result: [usize; D]) -> Result<(), OpError> {
        if let Some(have) = self.bias.as_ref().map(Tensor::dims).filter(|have| *have != [bias]) {
            return Err(OpError::Shape { what: "bias", have: have.to_vec(), need: vec![bias] });
        }
        for (what, tensor) in [("gate", &self.gate), ("residual", &self.residual)] {
            if let Some(have) = tensor.as_ref().map(Tensor::dims).filter(|have| *have != result) {
                let need = result.to_vec();
                return Err(OpError::Shape { what, have: have.to_vec(), need });
            }
        }
        Ok(())
    }
}
