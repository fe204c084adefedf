//! Layers over a 4-bit weight.

use burn::backend::Dispatch;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use kernels::matmul::Activation;
use kernels::nf4::Nf4MatmulProblem;

use super::product::{Nf4Ops, Nf4Spec};
use super::{Nf4Options, Nf4Weight};
use crate::call::{Call, float_of};
use crate::frozen::{self, Flat};
use crate::{Ctx, Epilogue, OpError};

/// `residual + gate · activation(x · wᵀ + bias)` with a frozen weight in 4 bits.
///
/// # Shapes
/// x `[.., k]`, result `[.., n]`; bias `[n]`. Gradients flow to every tensor but the weight.
///
/// # Errors
/// Shapes or dtypes that do not fit, another result dtype than x's or `tf32`, which the kernels have not, a
/// device without our kernels, a policy that forbids the shape.
pub fn nf4_linear<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &Nf4Weight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    run(ctx, x, weight, epilogue, false)
}

/// `residual + gate · activation(x · Gᵀ + bias) · (x · Uᵀ + bias)`: a gated feed-forward's first half in one
/// launch, of a weight that [`Nf4Weight::join`] made of G and U.
///
/// # Shapes
/// x `[.., k]`, weight `[2n, k]`, bias `[2n]`, result `[.., n]`.
///
/// # Errors
/// As [`nf4_linear`]; a weight that is not two matrices of one height.
pub fn nf4_glu<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &Nf4Weight,
    epilogue: Epilogue<D>,
) -> Result<Tensor<D>, OpError> {
    run(ctx, x, weight, epilogue, true)
}

fn run<const D: usize>(
    ctx: &Ctx,
    x: Tensor<D>,
    weight: &Nf4Weight,
    epilogue: Epilogue<D>,
    glu: bool,
) -> Result<Tensor<D>, OpError> {
    if glu {
        // By ordinary ops too, where a gradient is asked for.
        Nf4MatmulProblem::new(1, weight.weight, float_of(x.dtype())?)?.gated_by_half()?;
    }
    let columns = weight.shape()[0] / if glu { 2 } else { 1 };
    frozen::product(x, weight.shape(), columns, epilogue, |flat| {
        let Flat { x, parts, activation, norm, dtype } = flat;
        let spec = Nf4Spec { weight: weight.weight, dtype, activation, glu, norm };
        let (call, words) = (Call::of(ctx), weight.words());
        let made = <Dispatch as Nf4Ops>::nf4_product(x, words, parts, spec, call.clone());
        call.failed().map_or(Ok(made), Err)
    })
}

/// A linear layer with a frozen weight in 4 bits, in place of Burn's `Linear`.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use ops::{Ctx, Nf4Linear, Nf4Options};
///
/// let device = Device::cpu();
/// let dense = LinearConfig::new(256, 32).init(&device);
/// let layer = Nf4Linear::of(&Ctx::default(), dense, Nf4Options::default())?;
/// let y = layer.forward(Tensor::<2>::random([4, 256], Distribution::Default, &device))?;
/// assert_eq!(y.dims(), [4, 32]);
/// # Ok::<(), ops::OpError>(())
/// ```
#[derive(Module, Debug)]
pub struct Nf4Linear {
    /// `[n, k]`; it does not train.
    pub weight: Nf4Weight,
    /// `[n]`; it trains, unless it is told otherwise.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    ctx: Ctx,
}

impl Nf4Linear {
    /// A layer of a weight, with a bias `[n]` or none.
    pub fn new(ctx: &Ctx, weight: Nf4Weight, bias: Option<Param<Tensor<1>>>) -> Self {
        Self { weight, bias, ctx: ctx.clone() }
    }

    /// Quantises a layer of Burn's; its bias stays as it is.
    ///
    /// # Errors
    /// As [`Nf4Weight::quantize`].
    pub fn of(ctx: &Ctx, linear: Linear, options: Nf4Options) -> Result<Self, OpError> {
        let Linear { weight, bias } = linear;
        let weight = Nf4Weight::quantize(ctx, weight.val().detach().transpose(), options)?;
        Ok(Self::new(ctx, weight, bias))
    }

    /// `x · wᵀ + bias`.
    ///
    /// # Shapes
    /// x `[.., k]`, result `[.., n]`.
    ///
    /// # Errors
    /// As [`nf4_linear`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        nf4_linear(&self.ctx, x, &self.weight, Epilogue { bias, ..Epilogue::default() })
    }

    /// `activation(x · wᵀ + bias)` in one launch.
    ///
    /// # Errors
    /// As [`nf4_linear`].
    pub fn forward_activated<const D: usize>(
        &self,
        x: Tensor<D>,
        activation: Activation,
    ) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        let epilogue = Epilogue { bias, activation: Some(activation), ..Epilogue::default() };
        nf4_linear(&self.ctx, x, &self.weight, epilogue)
    }
}
