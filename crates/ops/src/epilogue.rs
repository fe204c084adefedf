//! The rest of a matmul: what surrounds the sum, in the same launch.

use burn::tensor::{FloatDType, Tensor};
use kernels::matmul::Activation;
use kernels::norm::{NormKind, NormProblem};

use crate::OpError;
use crate::call::{float_of, same_dtype, same_shape, size_of};

/// What is done to a product before it is stored, and to the rows of its left operand before it is made, for a result of
/// rank `D`.
#[derive(Debug, Clone)]
pub struct Epilogue<const D: usize> {
    /// Added to every row. `[n]`, in the operands' dtype.
    pub bias: Option<Tensor<1>>,
    /// Applied to the product once the bias is added, before the gate.
    pub activation: Option<Activation>,
    /// Multiplied, element by element. The result's shape and dtype.
    pub gate: Option<Tensor<D>>,
    /// Added last. The result's shape and dtype.
    pub residual: Option<Tensor<D>>,
    /// The result's dtype; the operands' when none.
    pub out: Option<FloatDType>,
    /// Lets tensor cores round f32 operands to 10 mantissa bits.
    pub tf32: bool,
    /// Lets tensor cores add products of f16 operands in f16: at twice the rate on GeForce cards, and with the range and
    /// the 10 bits of mantissa of f16. Gradients are added in f32 all the same.
    pub half_sums: bool,
    /// What is done to the rows that are multiplied, before: in the same launch where few rows meet a weight that
    /// lies along k ([`takes_norm`](crate::takes_norm)), else in one of its own.
    pub norm: Option<RowNorm>,
}

/// What is done to each row x before it is multiplied: `x / rms · weight`, or with the weight one larger, or with the mean
/// of the row taken off first, as [`NormKind`] says. The last is always a launch of its own, and has no bias here.
///
/// # Shapes
/// weight `[k]`, in the dtype of the rows.
#[derive(Debug, Clone)]
pub struct RowNorm {
    /// One factor for each column.
    pub weight: Tensor<1>,
    /// Kind of norm: with or without the mean, and the meaning of the weight.
    pub kind: NormKind,
    /// Added to the mean of the squares, or to the variance.
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
            half_sums: false,
            norm: None,
        }
    }
}

impl<const D: usize> Epilogue<D> {
    /// The bias has the operands' dtype, the matrices the result's.
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

    /// The norm of rows `lhs`, all of them, where there is one. Of no rows, or of rows of nothing, it is checked all
    /// the same, as of one row of one element.
    pub(crate) fn norm_of(&self, lhs: &Tensor<D>) -> Result<Option<NormProblem>, OpError> {
        let Some(RowNorm { weight, kind, eps }) = &self.norm else { return Ok(None) };
        let (dims, dtype) = (lhs.dims(), lhs.dtype());
        let k = dims[D - 1];
        same_shape("norm", &weight.dims(), &[k])?;
        same_dtype("norm", weight.dtype(), dtype)?;
        let rows = size_of(dims[..D - 1].iter().product::<usize>().max(1))?;
        Ok(Some(NormProblem::new(rows, size_of(k.max(1))?, float_of(dtype)?, *kind, *eps)?))
    }

    /// The bias has `bias` elements, the matrices the result's shape.
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
