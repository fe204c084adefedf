//! AdamW over all weights of a model or an adapter, with its state on the device.
//!
//! ```text
//! control: norm of the gradient, factor of clipping and of the loss scale, whether it is finite       one launch
//! for each group of parameters: moments, master, weights                                              one launch each
//! ```
//!
//! No step waits for the host: a gradient that is not finite changes nothing, and halves the loss scale if that adapts.

use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::Ctx;
use ops::training::{
    AdamWState, BLOCK, BlockScales, Control, Moments, Scalars, StepRules, adamw, control,
    signed_map, unsigned_map,
};

use crate::Error;
use crate::decoder::{FlatWeights, Gradients, Trained, zeros};
use crate::parameters::Group;

/// Hyperparameters of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Decay rate of the first moments, from 0 to below 1.
    pub beta1: f64,
    /// Decay rate of the second moments, from 0 to below 1.
    pub beta2: f64,
    /// Constant added to the root of the second moment.
    pub eps: f64,
    /// Decay of matrices and tables: each step multiplies them by 1 - learning rate · weight decay. Biases and norms do not
    /// decay.
    pub weight_decay: f64,
    /// Largest norm of the gradient; a larger one is scaled down to it. None for no limit.
    pub max_grad_norm: Option<f64>,
    /// Storage of the moments.
    pub moments: Moments,
    /// Seed of stochastic rounding.
    pub seed: u32,
}

impl Default for AdamWOptions {
    /// Returns the options of GPT-2's training in llm.c and nanoGPT.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            max_grad_norm: Some(1.0),
            moments: Moments::F32,
            seed: 0,
        }
    }
}

/// Factor of the loss, so that gradients in f16 do not vanish.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// Always 1.
    One,
    /// Begins at 2¹⁶; doubles after 2000 finite steps, halves after one that is not.
    Adaptive,
}

/// AdamW of one model.
#[derive(Debug, Clone)]
pub struct Optimizer {
    options: AdamWOptions,
    groups: Vec<(Group, Range<usize>, AdamWState)>,
    control: Tensor<1>,
    growth_interval: Option<u32>,
}

impl Optimizer {
    /// Creates moments of 0. If `master` is given, it holds the exact weights, and `trained` their rounded copies.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels.
    pub fn new(
        trained: Trained<'_>,
        master: Option<&FlatWeights>,
        options: AdamWOptions,
        scale: LossScale,
    ) -> Result<Self, Error> {
        let device = trained.values().device();
        let group = |(group, range): (Group, Range<usize>)| {
            let len = range.len();
            let own = |values: &Tensor<1>| ops::view(values, range.start, [len]);
            let eight = options.moments == Moments::Int8 && !group.exact;
            let (words, dtype) = match options.moments {
                Moments::Int8 if eight => (len / 4, FloatDType::F32),
                Moments::Bf16 => (len, FloatDType::BF16),
                _ => (len, FloatDType::F32),
            };
            let zeros = |words: usize| zeros(words, dtype, &device);
            let scales = || BlockScales {
                absmax: zeros(2 * len / BLOCK as usize).reshape([2, len / BLOCK as usize]),
                maps: upload([signed_map(), unsigned_map()].concat(), &device),
            };
            let state = AdamWState {
                weights: own(trained.values())?,
                master: master.map(FlatWeights::values).map(own).transpose()?,
                m: zeros(words),
                v: zeros(words),
                scales: eight.then(scales),
            };
            Ok::<_, Error>((group, range.clone(), state))
        };
        let groups = trained.groups().into_iter().map(group).collect::<Result<_, _>>()?;
        let (start, growth_interval) = match scale {
            LossScale::One => (1.0, None),
            LossScale::Adaptive => (65_536.0, Some(2000)),
        };
        let control = upload(Control::new(start).to_array().to_vec(), &device);
        Ok(Self { options, groups, control, growth_interval })
    }

    /// Returns the factor of the next loss, `[1]` on the device.
    pub fn scale(&self) -> Tensor<1> {
        self.control.clone().slice_dim(0, 5..6)
    }

    /// Returns the state after the last step: the fields of [`Control`], on the device.
    pub const fn control(&self) -> &Tensor<1> {
        &self.control
    }

    /// Returns all state with its names: moments of each group, the scales of 8-bit moments, and the state of the steps.
    pub fn buffers(&self) -> Vec<(String, Tensor<1>)> {
        let mut all = vec![("control".to_owned(), self.control.clone())];
        for (index, (_, _, state)) in self.groups.iter().enumerate() {
            all.push((format!("m.{index}"), state.m.clone()));
            all.push((format!("v.{index}"), state.v.clone()));
            if let Some(BlockScales { absmax, .. }) = &state.scales {
                let len = absmax.shape().num_elements();
                all.push((format!("absmax.{index}"), absmax.clone().reshape([len])));
            }
        }
        all
    }

    /// Takes a step by the gradient of the scaled loss.
    ///
    /// # Errors
    /// [`Error::Op`].
    pub fn step(&self, ctx: &Ctx, gradients: &Gradients, learning_rate: f64) -> Result<(), Error> {
        let _stream_guard = ops::stream_guard();
        let AdamWOptions { beta1, beta2, eps, weight_decay, max_grad_norm, seed, .. } =
            self.options;
        let max_norm = max_grad_norm.map(|norm| norm as f32);
        let rules = StepRules { max_norm, beta1, beta2, growth_interval: self.growth_interval };
        control(ctx, gradients.sums(), &self.control, rules)?;
        for (index, (group, range, state)) in self.groups.iter().enumerate() {
            let gradient = ops::view(gradients.sums(), range.start, [range.len()])?;
            let scalars = Scalars {
                learning_rate: learning_rate as f32,
                beta1,
                beta2,
                eps: eps as f32,
                weight_decay: if group.vector { 0.0 } else { weight_decay as f32 },
                seed: seed.wrapping_add(index as u32),
            };
            adamw(ctx, &gradient, state, &self.control, scalars)?;
        }
        Ok(())
    }
}

fn upload(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
}
