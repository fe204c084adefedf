//! Burn modules that run Flashover's kernels. Their parameters are Burn's, so Burn's optimizers, records and
//! quantisation work on them.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use ops::{Activation, Ctx, Epilogue, OpError, linear};

/// A linear layer: `activation(x · weight + bias)` in one launch.
///
/// ```
/// use flashover::burn::tensor::{Device, Distribution, Tensor};
/// use flashover::nn::Linear;
/// use flashover::ops::{Activation, Ctx};
///
/// let (ctx, device) = (Ctx::default(), Device::cpu());
/// let layer = Linear::new(64, 32, true, &device);
/// let x = Tensor::<3>::random([2, 16, 64], Distribution::Default, &device);
/// let y = layer.forward(&ctx, x, Some(Activation::Silu))?;
/// assert_eq!(y.dims(), [2, 16, 32]);
/// # Ok::<(), flashover::ops::OpError>(())
/// ```
#[derive(Module, Debug)]
pub struct Linear {
    /// Weight: `[inputs, outputs]`.
    pub weight: Param<Tensor<2>>,
    /// Bias: `[outputs]`; none for a layer without bias.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// Returns a layer with parameters drawn uniformly from ±1/√inputs, as in Burn's and PyTorch's linear layers.
    pub fn new(inputs: usize, outputs: usize, bias: bool, device: &Device) -> Self {
        let uniform = Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false };
        let (fan_in, fan_out) = (Some(inputs), Some(outputs));
        Self {
            weight: uniform.init_with([inputs, outputs], fan_in, fan_out, device),
            bias: bias.then(|| uniform.init_with([outputs], fan_in, fan_out, device)),
        }
    }

    /// Returns `activation(x · weight + bias)`; gradients flow to x and to the parameters.
    ///
    /// # Shapes
    /// x: `[.., inputs]`; result: `[.., outputs]`.
    ///
    /// # Errors
    /// The errors of [`ops::linear`](linear).
    pub fn forward<const D: usize>(
        &self,
        ctx: &Ctx,
        x: Tensor<D>,
        activation: Option<Activation>,
    ) -> Result<Tensor<D>, OpError> {
        let bias = self.bias.as_ref().map(Param::val);
        linear(ctx, x, self.weight.val(), Epilogue { bias, activation, ..Epilogue::default() })
    }
}
