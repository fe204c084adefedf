//! Errors of loading a model.

use std::path::PathBuf;

use arch::{Backend, DType, OpenError};

use crate::device_error::DeviceError;
use crate::memory::PlanError;

/// Error of loading a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The folder has no supported model, or no adapter of this model.
    #[error("{0}{hint}", hint = .0.hint())]
    Folder(models::Error),
    /// The weights cannot be read, or the device cannot hold or run them.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The tokenizer cannot be read, or belongs to another model.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// The model and its workload do not fit in memory, or cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device has too little free memory. Nothing was allocated.
    #[error(
        "{what} needs {need} bytes of device memory, but {free} are free\nhint: use a smaller or a single sample, f16 \
         (--dtype f16), or a smaller model"
    )]
    Memory {
        /// The model, or a frame.
        what: &'static str,
        /// Bytes needed.
        need: u64,
        /// Free bytes of the device.
        free: u64,
    },
    /// The device failed, or had less free memory than planned.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// No device opens.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A model of the Hugging Face Hub is not found or not downloaded.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] hub::HubError),
    /// The device lacks the requested dtype.
    #[error("the {backend} device does not support {need}\nhint: use `Compute::F32` (--dtype f32)")]
    DType {
        /// The requested dtype.
        need: DType,
        /// Backend of the device.
        backend: Backend,
    },
    /// A U-Net in bf16 on Vulkan is not supported: Burn's elementwise ops compile to invalid SPIR-V in bf16 (CubeCL 0.11.3). On an
    /// H200 frames were wrong or NaN, and the device was lost once.
    #[error(
        "a U-Net in bf16 is not supported on Vulkan\nhint: use `Compute::F16` or `Compute::F32` (--dtype), or CUDA"
    )]
    UnetBf16,
    /// The device lacks i8, which [`KvFormat::Int8`](crate::KvFormat::Int8) needs.
    #[error(
        "the {backend} device does not support i8, which a KV cache in 8 bits needs\nhint: use \
         `KvFormat::Float` (--kv-cache float)"
    )]
    KvFormat {
        /// Backend of the device.
        backend: Backend,
    },
    /// The name is neither one of [`Engine::shapes`](crate::Engine::shapes) nor that of a `.json` file.
    #[error("unknown shape `{shape}`\nhint: name a config.json, or one of {known}")]
    Shape {
        /// The requested name.
        shape: String,
        /// Valid names, separated by commas.
        known: String,
    },
    /// [`EngineOptions::quant`](crate::EngineOptions::quant) has more bits than the 4-bit weights of this folder.
    #[error(
        "{} has weights in 4 bits, which cannot be quantised to 8\nhint: leave out `EngineOptions::quant` (--quant), \
         or load the original model",
        .0.display()
    )]
    FourBits(PathBuf),
    /// [`EngineOptions::int8_activations`](crate::EngineOptions::int8_activations) is set without int8 weights or CUDA.
    #[error(
        "activations in 8 bits need int8 weights and CUDA\nhint: leave out `EngineOptions::int8_activations` \
         (--int8-activations), or use `WeightFormat::Int8` (--quant int8) on `Backend::Cuda` (--backend cuda)"
    )]
    Int8Activations,
    /// [`Compute::Tf32`](crate::Compute::Tf32) is set for weights in 4 or 8 bits.
    #[error(
        "expected dense weights for tf32, got weights in 4 or 8 bits\nhint: \
         use `Compute::F32` or `Compute::Bf16` (--dtype)"
    )]
    Tf32,
    /// Another recording runs in this process.
    #[error(transparent)]
    Recording(#[from] trace::AlreadyRecording),
    /// The tune cache cannot be read or written.
    #[error(transparent)]
    Cache(#[from] tune::CacheError),
}

impl LoadError {
    /// Returns the model's context length if the error is a request for more positions.
    pub const fn context(&self) -> Option<usize> {
        match self {
            Self::Plan(why) => why.context(),
            _ => None,
        }
    }
}
