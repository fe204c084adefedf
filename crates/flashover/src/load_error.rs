//! Errors of loading a model.

use std::path::PathBuf;

use arch::{Backend, DType, OpenError};

use crate::device_error::DeviceError;
use crate::memory::PlanError;

/// Error of loading a model.
#[derive(Debug, thiserror::Error)]
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
    #[error("the {backend} device has no {need}\nhint: f32 runs everywhere")]
    DType {
        /// The requested dtype.
        need: DType,
        /// Backend of the device.
        backend: Backend,
    },
    /// The device lacks i8, which [`KvFormat::Int8`](crate::KvFormat::Int8) needs.
    #[error(
        "the {backend} device has no i8, for keys and values in 8 bits\nhint: KvFormat::Float or \
         --kv-cache float holds them as they are computed"
    )]
    KvFormat {
        /// Backend of the device.
        backend: Backend,
    },
    /// The name is not one of [`Engine::shapes`](crate::Engine::shapes).
    #[error("no published shape is called {shape}\nhint: one of {known}")]
    Shape {
        /// The requested name.
        shape: String,
        /// Valid names, separated by commas.
        known: String,
    },
    /// [`EngineOptions::quant`](crate::EngineOptions::quant) has more bits than the 4-bit weights of this folder.
    #[error(
        "{} has matrices in 4 bits, which do not become 8\nhint: load it as it is, or what it was made of",
        .0.display()
    )]
    FourBits(PathBuf),
    /// [`EngineOptions::int8_activations`](crate::EngineOptions::int8_activations) is set without int8 weights or CUDA.
    #[error(
        "what products read is rounded to 8 bits on CUDA alone, and where matrices are in 8 bits\nhint: leave \
         int8_activations or --int8-activations out, or take --backend cuda and --quant int8"
    )]
    Int8Activations,
    /// [`Compute::Tf32`](crate::Compute::Tf32) is set for weights in 4 or 8 bits.
    #[error("weights of 4 and 8 bits are not multiplied in tf32\nhint: f32 or bf16 beside them")]
    Tf32,
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
