//! Activations and gates as ordinary differentiable ops: the part of an epilogue that is not fused.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch};
use burn::tensor::{FloatDType, Scalar, Tensor};
use kernels::matmul::Activation;

use crate::call::{same_dtype, same_shape};
use crate::memory::bytes_of;
use crate::{OpError, OpMemory};

/// Computes `activation(x) · gate` element by element, with ordinary differentiable ops, as a fused epilogue
/// would.
///
/// # Shapes
/// gate and result have the shape of x.
///
/// # Errors
/// [`OpError::Shape`] or [`OpError::DType`] for a gate that does not match x.
pub fn activate<const D: usize>(
    x: Tensor<D>,
    activation: Activation,
    gate: Option<Tensor<D>>,
) -> Result<Tensor<D>, OpError> {
    if let Some(gate) = &gate {
        same_shape("gate", &gate.dims(), &x.dims())?;
        same_dtype("gate", gate.dtype(), x.dtype())?;
    }
    let gate = gate.map(Tensor::into_dispatch);
    let out = finish::<Dispatch>(x.into_dispatch(), Some(activation), gate, None);
    Ok(Tensor::from_dispatch(out))
}

/// Returns the bytes of [`activate`] on x `[rows, n]`. Its backward pass reads x, the intermediates of the
/// activation, and both factors of the gate.
pub fn activate_memory(
    rows: u128,
    n: u128,
    activation: Activation,
    gated: bool,
    dtype: FloatDType,
) -> OpMemory {
    let intermediates = match activation {
        Activation::Silu => 2,
        Activation::Gelu => 3,
        Activation::GeluTanh => 4,
        _ => 3,
    };
    let (temporary, gate) = if gated { (2, 2) } else { (1, 0) };
    let matrix = bytes_of(rows * n, dtype);
    OpMemory {
        result: matrix,
        temporary: temporary * matrix,
        saved: (intermediates + gate) * matrix,
        ..OpMemory::default()
    }
}

/// Returns `clip(scale · x + shift, 0, 1)`.
fn line_between<B: Backend>(x: FloatTensor<B>, scale: f64, shift: f64) -> FloatTensor<B> {
    let line = B::float_add_scalar(B::float_mul_scalar(x, scale.into()), shift.into());
    B::float_clamp(line, 0.0.into(), 1.0.into())
}

/// Applies the rest of an epilogue with ordinary ops.
pub(crate) fn finish<B: Backend>(
    sum: FloatTensor<B>,
    activation: Option<Activation>,
    gate: Option<FloatTensor<B>>,
    residual: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let scaled = |t, by: f64| B::float_mul_scalar(t, Scalar::from(by));
    let halves = |x, curve| scaled(B::float_mul(x, B::float_add_scalar(curve, 1.0.into())), 0.5);
    let mut out = match activation {
        None => sum,
        Some(Activation::Silu) => B::float_mul(sum.clone(), B::sigmoid(sum)),
        // Not `B::gelu`: Burn 0.22 gives it the gradient of the tanh formula, 1e-3 off.
        Some(Activation::Gelu) => {
            let erf = B::float_erf(scaled(sum.clone(), std::f64::consts::FRAC_1_SQRT_2));
            halves(sum, erf)
        }
        Some(Activation::GeluTanh) => {
            let square = B::float_mul(sum.clone(), sum.clone());
            let cubic = scaled(B::float_mul(square, sum.clone()), 0.044_715);
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = B::float_tanh(scaled(B::float_add(sum.clone(), cubic), root));
            halves(sum, tanh)
        }
        Some(Activation::Relu) => B::relu(sum),
        Some(Activation::Sigmoid) => B::sigmoid(sum),
        Some(Activation::Tanh) => B::float_tanh(sum),
        Some(Activation::HardSigmoid { scale, shift }) => {
            line_between::<B>(sum, scale.value().into(), shift.value().into())
        }
        Some(Activation::HardSwish) => {
            B::float_mul(sum.clone(), line_between::<B>(sum, 1.0 / 6.0, 0.5))
        }
        Some(Activation::Clip { low, high }) => {
            let [low, high] = [low, high].map(|bound| Scalar::from(bound.value()));
            B::float_clamp(sum, low, high)
        }
        Some(Activation::LeakyRelu { slope }) => B::leaky_relu(sum, Scalar::from(slope.value())),
    };
    if let Some(gate) = gate {
        out = B::float_mul(out, gate);
    }
    if let Some(residual) = residual {
        out = B::float_add(out, residual);
    }
    out
}
