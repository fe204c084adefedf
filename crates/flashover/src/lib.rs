//! Flashover: a portable GPU engine for running and training models.
//!
//! Each kernel is written once, runs through CUDA, Vulkan, WebGPU and on the CPU, and is tuned for the card. This crate
//! is the only public one; all other crates may change at any time.
//!
//! ```
//! use flashover::{Backend, Device, Policy};
//! use flashover::host::{HostTensor, MatmulOptions, matmul};
//!
//! let device = Device::open(Backend::Cpu)?;
//! let lhs = HostTensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
//! let rhs = HostTensor::from_f32(&[3, 1], &[1.0, 0.0, -1.0])?;
//! let out = matmul(&device, &lhs, &rhs, None, &MatmulOptions::default(), Policy::Default)?;
//! assert_eq!((out.shape(), out.to_f32()?), (&[2, 1][..], vec![-2.0, -2.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The functions of [`host`] copy host tensors to the device and back. The functions of [`ops`] run the same kernels on
//! the tensors of a Burn model, without copies and with gradients.
//!
//! [`Engine`] loads a model from a Hugging Face folder and generates text. [`quantize_model`](quantize::quantize_model)
//! writes a model's weights in 4 or 8 bits. [`train`] trains adapters or all weights, [`grpo`] on rewards of their own
//! completions. [`unet`] runs U-Nets of diffusers, [`onnx`] ONNX graphs. `hub::Hub` downloads models from the Hugging
//! Face Hub. [`monitor`] reads temperature, power, clocks, memory and load of every device, as text and for Prometheus.
//!
//! # Features
//!
//! All are on by default. At least one backend is needed.
//!
//! | feature | adds |
//! |---|---|
//! | `cuda` | backend CUDA |
//! | `vulkan` | backends Vulkan and WebGPU |
//! | `cpu` | backend CPU |
//! | `hub` | `hub::Hub`, and models by name in [`Engine::builder`] |

#![warn(missing_docs)]

mod batch_size;
mod context;
pub mod device;
mod device_error;
mod engine;
mod fnv;
pub mod grpo;
pub mod host;
mod load_error;
pub mod memory;
mod model_files;
pub mod nn;
pub mod onnx;
mod options;
mod prepare;
mod preset;
pub mod quantize;
pub mod train;
pub mod unet;

#[cfg(feature = "hub")]
pub use ::hub;
pub use ::text::{Message, Tokenizer};
pub use arch::monitor;
pub use burn;
pub use device::{Backend, Device, OpenError, limit_threads};
pub use device_error::DeviceError;
pub use engine::{
    Answer, BatchStep, BuildProgress, Completion, Conversation, Engine, EngineBuilder,
    FinishReason, GenerateError, Generation, LoadProgress, ModelFolder, Request, Sampling, Session,
    TextStream, Token, Tokens,
};
pub use load_error::LoadError;
pub use models::{DecoderConfig, GenerationConfig, KvFormat};
pub use ops;
pub use options::{Compute, EngineOptions};
pub use quant::WeightFormat;
pub use tune::Policy;

/// Speed of a model: tests named as in llama-bench, and time per operator and per layer.
pub mod bench {
    pub use crate::engine::{Ceilings, LayerProfile, Profile, Speed, SpeedTest};
    pub use crate::train::{StepShape, TrainSpeed, TrainTest};
    pub use trace;
}

/// Runs the examples of the README as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
