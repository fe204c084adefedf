//! AdamW over all weights of a model or an adapter, or Muon over the matrices of its layers.
//!
//! ```text
//! control: norm of the gradient, factor of clipping and of the loss scale, whether it is finite       one launch
//! for each group of parameters: moments, master, weights                                              one launch each
//! ```
//!
//! No step waits for the host: a gradient that is not finite changes nothing, and halves the loss scale if that adapts. Moments and
//! master weights may be in host memory: see `host`.

mod host;
mod muon;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use ops::Ctx;
use ops::training::{
    AdamWState, BLOCK, BlockScales, Control, HostBuffer, Link, Moments, Scalars, StepRules, adamw,
    control, signed_map, unsigned_map,
};

use crate::decoder::{FlatWeights, Gradients, Trained, zeros};
use crate::parameters::Group;
use crate::{Error, Offload, Parameters};
use host::{HostState, Staging};

pub(crate) use host::staging_bytes;
pub use muon::MuonOptions;
use muon::MuonState;

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
    /// Muon for the matrices of layers; none for AdamW. Its moments are f32.
    pub muon: Option<MuonOptions>,
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
            muon: None,
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

/// Exact weights in f32 next to weights in 16 bits.
pub enum Master<'a> {
    /// There are none: the weights are exact, or rounded stochastically.
    Absent,
    /// On the device.
    Device(&'a FlatWeights),
    /// In host memory.
    Host(HostWeights),
}

impl Master<'_> {
    /// Takes the master weights of a group, if they are in host memory.
    fn of_host(&mut self, range: &Range<usize>) -> Option<HostBuffer> {
        let Self::Host(HostWeights { groups }) = self else { return None };
        let at = groups.iter().position(|(own, _)| own == range).expect("each group has them");
        Some(groups.swap_remove(at).1)
    }
}

/// Exact weights in f32 in host memory, by group.
pub struct HostWeights {
    groups: Vec<(Range<usize>, HostBuffer)>,
}

impl HostWeights {
    /// Allocates zeros for all parameters.
    ///
    /// # Errors
    /// [`Error::Op`] for too little host memory.
    pub fn zeros(link: &Link, parameters: &Parameters) -> Result<Self, Error> {
        let group = |(_, range): &(Group, Range<usize>)| {
            let buffer = HostBuffer::zeros(link, 4 * range.len()).map_err(ops::OpError::from)?;
            Ok::<_, Error>((range.clone(), buffer))
        };
        Ok(Self { groups: parameters.groups().iter().map(group).collect::<Result<_, _>>()? })
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(|(_, buffer)| buffer.len()).sum()
    }

    /// Overwrites values from `at` on, which are of one group.
    pub(crate) fn write(&mut self, at: usize, values: &[f32]) {
        let group = self.groups.iter_mut().find(|(range, _)| range.contains(&at));
        let (range, buffer) = group.expect("a parameter of the decoder");
        let bytes = buffer.bytes().expect("no transfer is under way");
        let own = bytes[4 * (at - range.start)..].chunks_exact_mut(4);
        own.zip(values).for_each(|(own, value)| own.copy_from_slice(&value.to_le_bytes()));
    }
}

/// A buffer of an optimizer.
pub enum Buffer<'a> {
    /// On the device.
    Device(Box<Tensor<1>>),
    /// In host memory, with values of a dtype.
    Host(&'a mut HostBuffer, DType),
}

/// AdamW of one model.
pub struct Optimizer {
    options: AdamWOptions,
    groups: Vec<OwnGroup>,
    control: Tensor<1>,
    growth_interval: Option<u32>,
    /// Present if some state is in host memory.
    staging: Option<Staging>,
}

/// Values that share their rules, and their state.
struct OwnGroup {
    group: Group,
    range: Range<usize>,
    weights: Tensor<1>,
    state: Place,
}

enum Place {
    Device(Box<AdamWState>),
    Host(HostState),
    Muon(Box<MuonState>),
}

impl OwnGroup {
    /// Returns the state in host memory, if it is there.
    const fn host(&self) -> Option<&HostState> {
        match &self.state {
            Place::Host(state) => Some(state),
            Place::Device(_) | Place::Muon(_) => None,
        }
    }
}

impl Optimizer {
    /// Creates moments of 0, on the device or, as `offload` selects, in host memory. If there is a `master`, it holds the master weights, and
    /// `trained` their rounded copies.
    ///
    /// # Errors
    /// [`Error::Op`] for a device without kernels, or too little host memory.
    pub fn new(
        trained: Trained<'_>,
        mut master: Master<'_>,
        options: AdamWOptions,
        scale: LossScale,
        offload: Option<(&Arc<Link>, Offload)>,
    ) -> Result<Self, Error> {
        let device = trained.values().device();
        let link = offload.and_then(|(link, offload)| offload.optimizer.then_some(link));
        let group = |(group, range): (Group, Range<usize>)| {
            let len = range.len();
            let own = |values: &Tensor<1>| ops::view(values, range.start, [len]);
            let weights = own(trained.values())?;
            let moments = Self::moments_of(options.moments, group);
            let muon = options.muon.is_some() && !group.outer;
            let state = match &link {
                None if muon => {
                    let tensors = match trained {
                        Trained::Weights(flat) => flat.parameters().tensors(),
                        Trained::Adapter(_) => &[],
                    };
                    let own = tensors.iter().filter(|own| range.contains(&own.at)).cloned();
                    let exact = match &master {
                        Master::Device(master) => {
                            Some(ops::view(master.values(), range.start, [len])?)
                        }
                        _ => None,
                    };
                    Place::Muon(MuonState::zeros(own.collect(), len, exact, &weights).into())
                }
                Some(link) if group.on_host() => {
                    let master = master.of_host(&range);
                    Place::Host(HostState::zeros(link, moments, len, master)?)
                }
                _ => {
                    let (words, dtype) = match moments {
                        Moments::Int8 => (len / 4, FloatDType::F32),
                        Moments::Bf16 => (len, FloatDType::BF16),
                        Moments::F32 => (len, FloatDType::F32),
                    };
                    let zeros_of = |words, dtype| zeros(words, dtype, &device);
                    let scales = || BlockScales {
                        absmax: zeros_of(2 * len / BLOCK as usize, FloatDType::F32)
                            .reshape([2, len / BLOCK as usize]),
                        maps: upload([signed_map(), unsigned_map()].concat(), &device),
                    };
                    let master = match &mut master {
                        Master::Absent => None,
                        Master::Device(master) => Some(own(master.values())?),
                        Master::Host(_) => {
                            let mut host = master.of_host(&range).expect("each group has them");
                            let bytes = host.bytes().expect("no transfer is under way").to_vec();
                            let master = zeros_of(len, FloatDType::F32);
                            ops::training::overwrite(&master, 0, bytes)?;
                            Some(master)
                        }
                    };
                    Place::Device(Box::new(AdamWState {
                        weights: weights.clone(),
                        master,
                        m: zeros_of(words, dtype),
                        v: zeros_of(words, dtype),
                        scales: (moments == Moments::Int8).then(scales),
                    }))
                }
            };
            Ok::<_, Error>(OwnGroup { group, range, weights, state })
        };
        let groups = trained.groups().into_iter().map(group).collect::<Result<Vec<_>, _>>()?;
        let offloaded = offload.is_some_and(|(_, offload)| offload.gradients);
        let staging = link.map(|link| Staging::new(link, &groups, offloaded, &device));
        let (start, growth_interval) = match scale {
            LossScale::One => (1.0, None),
            LossScale::Adaptive => (65_536.0, Some(2000)),
        };
        let control = upload(Control::new(start).to_array().to_vec(), &device);
        Ok(Self { options, groups, control, growth_interval, staging })
    }

    /// Returns the storage of a group's moments.
    pub(crate) fn moments_of(moments: Moments, group: Group) -> Moments {
        match moments {
            Moments::Int8 if group.exact => Moments::F32,
            other => other,
        }
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
    pub fn buffers(&mut self) -> Vec<(String, Buffer<'_>)> {
        let mut all = vec![("control".to_owned(), Buffer::Device(self.control.clone().into()))];
        for (index, own) in self.groups.iter_mut().enumerate() {
            let mut add = |name: &str, buffer| all.push((format!("{name}.{index}"), buffer));
            match &mut own.state {
                Place::Device(state) => {
                    add("m", Buffer::Device(state.m.clone().into()));
                    add("v", Buffer::Device(state.v.clone().into()));
                    if let Some(master) = &state.master {
                        add("master", Buffer::Device(master.clone().into()));
                    }
                    if let Some(BlockScales { absmax, .. }) = &state.scales {
                        let len = absmax.shape().num_elements();
                        add("absmax", Buffer::Device(absmax.clone().reshape([len]).into()));
                    }
                }
                Place::Muon(state) => {
                    add("m", Buffer::Device(state.m.clone().into()));
                    if let Some(master) = &state.master {
                        add("master", Buffer::Device(master.clone().into()));
                    }
                }
                Place::Host(state) => {
                    for (name, buffer, dtype) in state.buffers() {
                        add(name, Buffer::Host(buffer, dtype));
                    }
                }
            }
        }
        all
    }

    /// Takes a step by the gradient of the scaled loss.
    ///
    /// # Errors
    /// [`Error::Op`].
    pub fn step(
        &mut self,
        ctx: &Ctx,
        gradients: &Gradients,
        learning_rate: f64,
    ) -> Result<(), Error> {
        let _stream_guard = ops::stream_guard();
        let AdamWOptions { beta1, beta2, eps, weight_decay, max_grad_norm, seed, .. } =
            self.options;
        let max_norm = max_grad_norm.map(|norm| norm as f32);
        let rules = StepRules { max_norm, beta1, beta2, growth_interval: self.growth_interval };
        control(ctx, &gradients.for_norm(ctx)?, &self.control, rules)?;
        for (index, own) in self.groups.iter_mut().enumerate() {
            let scalars = Scalars {
                learning_rate: learning_rate as f32,
                beta1,
                beta2,
                eps: eps as f32,
                weight_decay: if own.group.vector { 0.0 } else { weight_decay as f32 },
                seed: seed.wrapping_add(index as u32),
                first: 0,
            };
            match &mut own.state {
                Place::Device(state) => {
                    let gradient = gradients.on_device(&own.range)?.expect("it is not offloaded");
                    adamw(ctx, &gradient, state, &self.control, scalars)?;
                }
                Place::Muon(state) => {
                    let gradient = gradients.on_device(&own.range)?.expect("it is not offloaded");
                    let at = (&own.weights, own.range.start);
                    let rules = (self.options.muon.unwrap_or_default(), scalars);
                    state.step(ctx, &gradient, at, &self.control, rules)?;
                }
                Place::Host(state) => {
                    let staging = self.staging.as_mut().expect("some state is in host memory");
                    let at = (&own.weights, own.range.start);
                    staging.step(ctx, gradients, at, state, &self.control, scalars)?;
                }
            }
        }
        Ok(())
    }
}

fn upload(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
}
