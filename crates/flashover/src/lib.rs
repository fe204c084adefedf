//! Flashover: a portable GPU engine for running and fine-tuning models.
//!
//! Kernels are written once and run through CUDA, Vulkan, WGSL and on the CPU; each is tuned for the
//! card it runs on. This crate is the only public one: the others may change at any time.
//!
//! ```
//! use flashover::{Backend, Device, HostTensor, MatmulOptions, Policy, matmul};
//!
//! let device = Device::open(Backend::Cpu)?;
//! let lhs = HostTensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
//! let rhs = HostTensor::from_f32(&[3, 1], &[1.0, 0.0, -1.0])?;
//! let out = matmul(&device, &lhs, &rhs, None, &MatmulOptions::default(), Policy::Default)?;
//! assert_eq!((out.shape(), out.to_f32()?), (&[2, 1][..], vec![-2.0, -2.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! That copies host tensors in and out. On the tensors of a Burn model, where they lie and with gradients,
//! the kernels are the functions of [`ops`].
//!
//! [`Engine`] answers with a model from a Hugging Face folder, and [`quantize_model`] makes weights in 4 or
//! 8 bits of one. With the feature `hub`, `hub::Hub` gives a model's folder by its name on the Hugging Face
//! Hub. [`monitor`] reads heat, power, clocks, memory and load of every device, for people and for
//! Prometheus.

#![warn(missing_docs)]

mod batch_size;
mod context;
mod device_error;
mod engine;
mod host;
mod load_error;
mod memory;
mod options;
mod prepare;
mod preset;
mod quantize;
mod train;

#[cfg(feature = "hub")]
pub use ::hub;
pub use ::text::{Message, Tokenizer};
pub use arch::{
    ArchId, ArchProfile, Backend, DType, Device, OpenError, UnknownBackend, UnknownProfile,
    monitor, report,
};
pub use batch_size::{BatchSize, BatchTry, find_batch_size, optimal_batch_size};
pub use device_error::DeviceError;
pub use engine::{
    BatchStep, Ceilings, Completion, End, Engine, GenerateError, LayerProfile, LoadProgress,
    ModelFolder, Profile, Request, Sampling, Session, Speed, SpeedTest, Text, Token, Tokens,
};
pub use host::{
    Attended, AttentionGradients, HostOpError, HostTensor, MatmulOptions, TensorError, attention,
    attention_backward, matmul, run_op,
};
pub use kernels::attention::{AttentionOptions, Implementation};
pub use kernels::matmul::{Layout, Precision};
pub use load_error::LoadError;
pub use memory::{MemoryBudget, MemoryUsage, Plan, PlanError, free_bytes};
pub use models::{
    Adapter, DecoderConfig, Example, GenerationConfig, KvFormat, LoraOptions, Recompute, Training,
    Workload,
};
pub use ops::{self, OpError};
pub use options::{Compute, EngineOptions};
pub use preset::{Chosen, Preset, UnknownPreset};
pub use quant::WeightFormat;
pub use quantize::{
    Figures, Peaks, QuantizeError, QuantizeOptions, QuantizedModel, QuantizedWeight, WeightErrors,
    quantize_model, quantize_model_until,
};
pub use trace;
pub use train::{
    Dataset, DatasetError, Schedule, Taught, TrainError, TrainOptions, TrainSpeed, TrainTest,
    Trainer,
};
pub use tune::Policy;

/// The examples of the README run as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
