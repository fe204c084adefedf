//! Matmuls and layers with a quantised weight.

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

/// `residual + gate · activation(x · wᵀ + bias)` with a frozen quantised weight.
///
/// # Shapes
/// x `[.., k]`, result `[.., n]`; bias `[n]`. Gradients flow to every tensor except the weight.
///
/// # Errors
/// Shapes or dtypes that do not fit, another result dtype than that of x, `tf32` or `half_sums`, which the kernels do not
/// have, a device without our kernels, a policy that forbids the shape.
pub fn quantized_linear<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &QuantizedWeight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    run(ctx, x, weight, epilogue, false)
}

/// `residual + gate · activation(x · Gᵀ + bias) · (x · Uᵀ + bias)`: a gated feed-forward's first half in one launch, of a
/// weight that [`QuantizedWeight::join`] made of G and U.
///
/// # Shapes
/// x `[.., k]`, weight `[2n, k]`, bias `[2n]`, result `[.., n]`.
///
/// # Errors
/// As [`quantized_linear`]; a weight that is not two matrices of one height, or a format without a gated matmul.
pub fn quantized_glu<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &QuantizedWeight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    run(ctx, x, weight, epilogue, true)
}

/// Bytes of [`quantized_linear`] with a weight `[n, k]`: more rows than its codes serve make a dense copy, as any backward
/// pass does. Gradients read no operand.
pub fn quantized_linear_memory(
    profile: MemoryProfile,
    rows: u128,
    [n, k]: [u128; 2],
    dtype: FloatDType,
) -> OpMemory {
    let dense_weight = if rows > profile.coded_rows.into() { bytes_of(n * k, dtype) } else { 0 };
    OpMemory { dense_weight, saved: 0, ..linear_memory(profile, rows, [n, k], dtype) }
}

/// Bytes of [`quantized_glu`] with a weight `[2n, k]`: next to a dense copy the matmul that gates has a result of its own.
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
    // By ordinary ops too, where a gradient is asked for.
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
    let Epilogue { bias, activation, gate, residual, out, tf32, half_sums, norm } = epilogue;
    if let Some(out) = out.filter(|out| burn::tensor::DType::from(*out) != need) {
        return Err(OpError::DType { what: "the result", have: out.into(), need });
    }
    if half_sums {
        return Err(OpError::HalfSums(need));
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
    let parts = Parts {
        bias: Optional::of(bias.map(Tensor::into_dispatch)),
        gate: flat(gate),
        residual: flat(residual),
        norm: Optional::of(norm.map(|norm| norm.weight.into_dispatch())),
    };
    let x = x.reshape([rows, k]).into_dispatch();
    let spec = Spec { weight: weight.weight, dtype, activation, glu, norm: problem };
    let call = Call::of(ctx);
    let made = <Dispatch as QuantizedOps>::multiply_quantized(
        x,
        weight.words(),
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
    /// `[n, k]`; it does not train.
    pub weight: QuantizedWeight,
    /// `[n]`; it trains, unless it is told otherwise.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    ctx: Ctx,
}

impl QuantizedLinear {
    /// A layer of a weight, with a bias `[n]` or none.
    pub fn new(ctx: &Ctx, weight: QuantizedWeight, bias: Option<Param<Tensor<1>>>) -> Self {
        Self { weight, bias, ctx: ctx.clone() }
    }

    /// Quantises a layer of Burn's; its bias stays as it is.
    ///
    /// # Errors
    /// As [`QuantizedWeight::quantize`].
    pub fn quantize(ctx: &Ctx, linear: Linear, scheme: impl Into<Scheme>) -> Result<Self, OpError> {
        let Linear { weight, bias } = linear;
        let weight = weight.val().detach().transpose();
        Ok(Self::new(ctx, QuantizedWeight::quantize(ctx, weight, scheme)?, bias))
    }

    /// `x · wᵀ + bias`.
    ///
    /// # Shapes
    /// x `[.., k]`, result `[.., n]`.
    ///
    /// # Errors
    /// As [`quantized_linear`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        quantized_linear(&self.ctx, x, &self.weight, Epilogue { bias, ..Epilogue::default() })
    }

    /// `activation(x · wᵀ + bias)` in one launch.
    ///
    /// # Errors
    /// As [`quantized_linear`].
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
