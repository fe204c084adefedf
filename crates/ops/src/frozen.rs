//! What products with frozen weights have in common: arguments that fit, as matrices.

use arch::DType;
use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use kernels::matmul::Activation;
use kernels::norm::NormProblem;

use crate::call::{Optional, Parts, float_of, on_cubecl};
use crate::{Epilogue, OpError};

/// Arguments as matrices: x `[m, k]`, bias `[n]`, gate and residual of the result.
pub(crate) struct Flat {
    pub(crate) x: FloatTensor<Dispatch>,
    pub(crate) parts: Parts<Dispatch>,
    pub(crate) activation: Option<Activation>,
    pub(crate) norm: Option<NormProblem>,
    pub(crate) dtype: DType,
}

/// `multiply` by a weight `[n, k]` whose result has so many columns, for arguments that fit.
///
/// # Errors
/// Shapes or dtypes that do not, another result dtype than x's or `tf32`, which these kernels have not, a device without
/// our kernels; those of `multiply`.
pub(crate) fn product<const D: usize>(
    x: Tensor<D>,
    [n, k]: [usize; 2],
    columns: usize,
    epilogue: Epilogue<D>,
    multiply: impl FnOnce(Flat) -> Result<FloatTensor<Dispatch>, OpError>,
) -> Result<Tensor<D>, OpError> {
    on_cubecl(&x.device())?;
    let need = x.dtype();
    let dtype = float_of(need)?;
    let have = x.dims();
    if have[D - 1] != k {
        return Err(OpError::Depth {
            lhs: have.to_vec(),
            lhs_k: have[D - 1],
            rhs: vec![n, k],
            rhs_k: k,
        });
    }
    let mut shape = have;
    shape[D - 1] = columns;
    epilogue.check_dtypes(need, need)?;
    epilogue.check_shapes(n, shape)?;
    let problem = epilogue.norm_of(&x)?;
    let Epilogue { bias, activation, gate, residual, out, tf32, half_sums, norm } = epilogue;
    if let Some(out) = out.filter(|out| burn::tensor::DType::from(*out) != need) {
        return Err(OpError::DType { what: "the result", have: out.into(), need });
    }
    if half_sums {
        return Err(OpError::HalfSums(x.dtype()));
    }
    if tf32 {
        return Err(OpError::NoTf32);
    }
    if shape.contains(&0) {
        return Ok(Tensor::<D>::zeros(shape, &x.device()).cast(need));
    }
    let rows: usize = have[..D - 1].iter().product();
    let flat =
        |t: Option<Tensor<D>>| Optional::of(t.map(|t| t.reshape([rows, columns]).into_dispatch()));
    let flat = Flat {
        x: x.reshape([rows, k]).into_dispatch(),
        parts: Parts {
            bias: Optional::of(bias.map(Tensor::into_dispatch)),
            gate: flat(gate),
            residual: flat(residual),
            norm: Optional::of(norm.map(|norm| norm.weight.into_dispatch())),
        },
        activation,
        norm: problem,
        dtype,
    };
    let made = multiply(flat)?;
    Ok(Tensor::<2>::from_dispatch(made).reshape(shape))
}
