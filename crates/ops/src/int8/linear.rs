//! Layers over an 8-bit weight.

use burn::backend::Dispatch;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::Int8Weight;
use super::product::{Int8Ops, Spec};
use crate::call::Call;
use crate::frozen::{self, Flat};
use crate::norm::normalised;
use crate::{Ctx, Epilogue, OpError};

/// `residual + gate · activation(x · wᵀ + bias)` with a frozen weight in 8 bits.
///
/// # Shapes
/// x `[.., k]`, result `[.., n]`; bias `[n]`. Gradients flow to every tensor but the weight.
///
/// # Errors
/// Shapes or dtypes that do not fit, another result dtype than x's or `tf32`, which the kernels have not, a
/// device without our kernels, a policy that forbids the shape.
pub fn int8_linear<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &Int8Weight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    let shape = weight.shape();
    frozen::product(x, shape, shape[0], epilogue, |flat| {
        let Flat { x, parts, activation, norm, dtype } = flat;
        let (call, words) = (Call::of(ctx), weight.words());
        let spec =
            Spec { weight: weight.weight, activations: weight.activations, dtype, activation };
        // No path of these normalises.
        let (x, parts) = normalised::<Dispatch>(x, parts, norm, &call);
        let made = <Dispatch as Int8Ops>::int8_product(x, words, parts, spec, call.clone());
        call.failed().map_or(Ok(made), Err)
    })
}

/// A linear layer with a frozen weight in 8 bits, in place of Burn's `Linear`.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use ops::{Ctx, Int8Linear};
///
/// let device = Device::cpu();
/// let dense = LinearConfig::new(256, 32).init(&device);
/// let layer = Int8Linear::of(&Ctx::default(), dense)?;
/// let y = layer.forward(Tensor::<2>::random([4, 256], Distribution::Default, &device))?;
/// assert_eq!(y.dims(), [4, 32]);
/// # Ok::<(), ops::OpError>(())
/// ```
#[derive(Module, Debug)]
pub struct Int8Linear {
    /// `[n, k]`; it does not train.
    pub weight: Int8Weight,
    /// `[n]`; it trains, unless it is told otherwise.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    ctx: Ctx,
}

impl Int8Linear {
    /// A layer of a weight, with a bias `[n]` or none.
    pub fn new(ctx: &Ctx, weight: Int8Weight, bias: Option<Param<Tensor<1>>>) -> Self {
        Self { weight, bias, ctx: ctx.clone() }
    }

    /// Quantises a layer of Burn's; its bias stays as it is.
    ///
    /// # Errors
    /// As [`Int8Weight::quantize`].
    pub fn of(ctx: &Ctx, linear: Linear) -> Result<Self, OpError> {
        let Linear { weight, bias } = linear;
        let weight = Int8Weight::quantize(ctx, weight.val().detach().transpose())?;
        Ok(Self::new(ctx, weight, bias))
    }

    /// `x · wᵀ + bias`.
    ///
    /// # Shapes
    /// x `[.., k]`, result `[.., n]`.
    ///
    /// # Errors
    /// As [`int8_linear`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        int8_linear(&self.ctx, x, &self.weight, Epilogue { bias, ..Epilogue::default() })
    }
}
