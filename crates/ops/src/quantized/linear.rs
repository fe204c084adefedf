//! Matmuls and linear layers with a quantised weight.

use burn::backend::Dispatch;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use kernels::matmul::Activation;
use quant::Scheme;

use super::QuantizedWeight;
use super::dispatch::{QuantizedOps, Spec};
use crate::call::{Call, Optional, Parts, float_of, on_cubecl};
use crate::matmul::linear_memory;
use crate::memory::bytes_of;
use crate::{Ctx, Epilogue, MemoryProfile, OpError, OpMemory};

/// Computes `residual + gate · activation(x · wᵀ + bias)` with a frozen quantised weight.
///
/// # Shapes
/// x `[.., k]`, result `[.., n]`; bias `[n]`. Gradients flow to every tensor except the weight.
///
/// # Errors
/// [`OpError::Depth`], [`OpError::Shape`], [`OpError::DType`] for operands that do not fit, or a result dtype
/// other than that of x; [`OpError::F16Accumulation`] and [`OpError::NoTf32`] for options that these kernels lack;
/// [`OpError::Device`] for a device without kernels; [`OpError::Tune`] if the policy allows no config for the
/// shape.
pub fn quantized_linear<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &QuantizedWeight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    run(ctx, x, weight, epilogue, false)
}

/// Computes `residual + gate · activation(x · Gᵀ + bias) · (x · Uᵀ + bias)`: the first half of a gated
/// feed-forward block, in one launch. The weight joins G and U by [`QuantizedWeight::join`].
///
/// # Shapes
/// x `[.., k]`, weight `[2n, k]`, bias `[2n]`, result `[.., n]`.
///
/// # Errors
/// The errors of [`quantized_linear`]; [`OpError::Matmul`] for a weight with an odd number of rows, or a
/// format without a gated matmul.
pub fn quantized_glu<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &QuantizedWeight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    run(ctx, x, weight, epilogue, true)
}

/// Returns the bytes of [`quantized_linear`] with a weight `[n, k]`. More rows than the codes can serve take
/// a dense copy, as does any backward pass. The gradients read no operand.
pub fn quantized_linear_memory(
    profile: MemoryProfile,
    rows: u128,
    [n, k]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let dense_weight =
        if rows > profile.max_fused_rows.into() { bytes_of(n * k, dtype) } else { 0 };
    OpMemory { dense_weight, saved: 0, ..linear_memory(profile, rows, [n, k], dtype) }
}

/// Returns the bytes of [`quantized_glu`] with a weight `[2n, k]`. With a dense copy, the gate matmul has a
/// separate result.
pub fn quantized_glu_memory(
    profile: MemoryProfile,
    rows: u128,
    [both, k]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let joint = quantized_linear_memory(profile, rows, [both, k], dtype);
    let result = joint.result / 2;
    let temporary = if joint.dense_weight > 0 { result } else { 0 };
    OpMemory { result, temporary, ..joint }
}

fn run<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &QuantizedWeight,
    epilogue: Epilogue<D>,
    glu: bool,
) -> Result<Tensor<D>, OpError> {
    let [n, k] = weight.shape();
    on_cubecl(&x.device())?;
    let need = x.dtype();
    let dtype = float_of(need)?;
    // Also checked if the gradient uses ordinary ops.
    weight.weight.check_gated(glu)?;
    let have = x.dims();
    if have[D - 1] != k {
        let (lhs, rhs) = (have.to_vec(), vec![n, k]);
        return Err(OpError::Depth { lhs, lhs_k: have[D - 1], rhs, rhs_k: k });
    }
    let columns = if glu { n / 2 } else { n };
    let mut shape = have;
    shape[D - 1] = columns;
    epilogue.check_dtypes(need, need)?;
    epilogue.check_shapes(n, shape)?;
    let problem = epilogue.norm_of(&x)?;
    let Epilogue { bias, activation, gate, residual, out, tf32, f16_accumulation, norm } = epilogue;
    if let Some(out) = out.filter(|out| burn::tensor::DType::from(*out) != need) {
        return Err(OpError::DType { what: "the result", have: out.into(), need });
    }
    if f16_accumulation {
        return Err(OpError::F16Accumulation(need));
    }
    if tf32 {
        return Err(OpError::NoTf32);
    }
    if shape.contains(&0) {
        return Ok(Tensor::<D>::zeros(shape, &x.device()).cast(need));
    }
    let rows: usize = have[..D - 1].iter().product();
    let flat = |t: Option<Tensor<D>>| {
        Optional::from_tensor(t.map(|t| t.reshape([rows, columns]).into_dispatch()))
    };
    let parts = Parts {
        bias: Optional::from_tensor(bias.map(Tensor::into_dispatch)),
        gate: flat(gate),
        residual: flat(residual),
        norm: Optional::from_tensor(norm.map(|norm| norm.weight.into_dispatch())),
    };
    let x = x.reshape([rows, k]).into_dispatch();
    let spec = Spec { weight: weight.weight, dtype, activation, glu, norm: problem };
    let call = Call::new(ctx);
    let made = <Dispatch as QuantizedOps>::multiply_quantized(
        x,
        weight.packed(),
        parts,
        spec,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::<2>::from_dispatch(made).reshape(shape)),
        Some(e) => Err(e),
    }
}

/// A linear layer with a frozen quantised weight, in place of Burn's `Linear`.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use ops::{Ctx, QuantizedLinear, WeightFormat};
///
/// let device = Device::cpu();
/// let dense = LinearConfig::new(256, 32).init(&device);
/// let layer = QuantizedLinear::quantize(&Ctx::default(), dense, WeightFormat::Nf4)?;
/// let y = layer.forward(Tensor::<2>::random([4, 256], Distribution::Default, &device))?;
/// assert_eq!(y.dims(), [4, 32]);
/// # Ok::<(), ops::OpError>(())
/// ```
#[derive(Module, Debug)]
pub struct QuantizedLinear {
    /// Frozen weight `[n, k]`
    pub weight: QuantizedWeight,
    /// Bias `[n]`; it is trainable unless frozen.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    ctx: Ctx,
}

impl QuantizedLinear {
    /// Creates a layer from a weight and an optional bias `[n]`.
    pub fn new(ctx: &Ctx, weight: QuantizedWeight, bias: Option<Param<Tensor<1>>>) -> Self {
        Self { weight, bias, ctx: ctx.clone() }
    }

    /// Quantises a Burn layer; the bias stays as it is.
    ///
    /// # Errors
    /// The errors of [`QuantizedWeight::quantize`].
    pub fn quantize(ctx: &Ctx, linear: Linear, scheme: impl Into<Scheme>) -> Result<Self, OpError> {
        let Linear { weight, bias } = linear;
        let weight = weight.val().detach().transpose();
        Ok(Self::new(ctx, QuantizedWeight::quantize(ctx, weight, scheme)?, bias))
    }

    /// Computes `x · wᵀ + bias`.
    ///
    /// # Shapes
    /// x `[.., k]`, result `[.., n]`.
    ///
    /// # Errors
    /// The errors of [`quantized_linear`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        quantized_linear(&self.ctx, x, &self.weight, Epilogue { bias, ..Epilogue::default() })
    }

    /// Computes `activation(x · wᵀ + bias)` in one launch.
    ///
    /// # Shapes
    /// x `[.., k]`, result `[.., n]`.
    ///
    /// # Errors
    /// The errors of [`quantized_linear`].
    pub fn forward_activated<const D: usize>(
        &self,
        x: Tensor<D>,
        activation: Activation,
    ) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        let epilogue = Epilogue { bias, activation: Some(activation), ..Epilogue::default() };
        quantized_linear(&self.ctx, x, &self.weight, epilogue)
    }
}
