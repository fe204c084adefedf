//! U-Nets of diffusers: `UNet2DModel` and `UNet2DConditionModel`.
//!
//! | module | contents |
//! |---|---|
//! | `config` | [`UnetConfig`], from `config.json` |
//! | `modules` | the weights, by name and shape |
//! | `forward` | the forward pass, once for all machines |
//! | `device` | runs it |
//! | `plan` | [`UnetPlan`]: counts it, layer by layer |
//! | `weights` | [`UnetWeights`]: a checkpoint with exactly these weights |
//! | `frames` | [`Frames`]: one shape, captured and replayed |
//! | `schedule` | [`Schedule`]: DDIM and Euler steps |
//! | `waves` | embedding of timesteps and sizes |
//! | [`shapes`] | configurations of public models and of benchmarks |

mod config;
mod device;
mod forward;
mod frames;
mod modules;
mod plan;
mod schedule;
pub mod shapes;
mod waves;
mod weights;

use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use ops::{Ctx, Pass};

pub use config::{Attention, Classes, Level, Middle, Resample, TextTime, Time, UnetConfig, Waves};
pub use frames::{Condition, Frames, UnetShape};
pub use plan::{LayerPlan, UnetPlan};
pub use schedule::{Method, Schedule, Steps};
pub use weights::UnetWeights;

use crate::Error;
use device::OnDevice;
use modules::{Modules, Part};

/// Options of loading a U-Net.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnetOptions {
    /// Compute dtype; none for the dtype of the first convolution in the file.
    pub dtype: Option<FloatDType>,
    /// True to let tensor cores round f32 operands to tf32.
    pub tf32: bool,
    /// True to let tensor cores accumulate f16 matmuls and convolutions in f16.
    pub f16_accumulation: bool,
}

/// A U-Net with its weights on a device. Clones share its memory.
#[derive(Debug, Clone)]
pub struct Unet {
    config: UnetConfig,
    ctx: Ctx,
    device: Device,
    dtype: FloatDType,
    options: UnetOptions,
    modules: std::sync::Arc<Modules<Tensor<1>>>,
}

impl Unet {
    /// Loads the weights of a checkpoint onto a device.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]; [`Error::NotFinite`] for a weight with values that are infinite or NaN in the compute dtype.
    pub fn load(
        weights: &UnetWeights,
        device: &Device,
        ctx: Ctx,
        options: UnetOptions,
    ) -> Result<Self, Error> {
        let dtype = options.dtype.unwrap_or_else(|| weights.dtype());
        let modules = weights.load(device, dtype)?;
        Ok(Self::of(weights.config().clone(), modules, device, ctx, dtype, options))
    }

    /// Creates a U-Net of random weights, for benchmarks. The default dtype is f16.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn random(
        config: &UnetConfig,
        device: &Device,
        ctx: Ctx,
        options: UnetOptions,
    ) -> Result<Self, Error> {
        let dtype = options.dtype.unwrap_or(FloatDType::F16);
        let modules = Modules::build(config, &mut |part: &Part| {
            let shape = &part.tensors[0].shape;
            let norm = part.tensors[0].names[0].contains("norm");
            let (len, k) = (part.values(), shape[1..].iter().product::<usize>());
            let _stream_guard = ops::stream_guard();
            let on = (device, burn::tensor::DType::from(dtype));
            let made =
                device.memory_persistent_allocations((), move |()| match (norm, shape.len()) {
                    (true, 1) => Tensor::<1>::ones([len], on),
                    (_, 1) => Tensor::<1>::zeros([len], on),
                    _ => {
                        let spread = Distribution::Normal(0.0, 1.0 / (k as f64).sqrt());
                        Tensor::<1>::random([len], spread, on)
                    }
                });
            Ok(made)
        })?;
        Ok(Self::of(config.clone(), modules, device, ctx, dtype, options))
    }

    fn of(
        config: UnetConfig,
        modules: Modules<Tensor<1>>,
        device: &Device,
        ctx: Ctx,
        dtype: FloatDType,
        options: UnetOptions,
    ) -> Self {
        let (device, modules) = (device.clone(), std::sync::Arc::new(modules));
        Self { config, ctx, device, dtype, options, modules }
    }

    /// Returns the configuration.
    pub const fn config(&self) -> &UnetConfig {
        &self.config
    }

    /// Returns the compute dtype.
    pub const fn dtype(&self) -> FloatDType {
        self.dtype
    }

    fn machine(&self, ctx: &Ctx, batch: usize, places: Option<Pass>) -> OnDevice {
        let UnetOptions { tf32, f16_accumulation, .. } = self.options;
        OnDevice { ctx: ctx.clone(), places, batch, f16_accumulation, tf32 }
    }
}
