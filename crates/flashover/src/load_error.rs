//! What can be wrong with a model's files and how it is to be loaded.

use std::path::PathBuf;

use arch::{Backend, DType, OpenError};

use crate::device_error::DeviceError;
use crate::memory::PlanError;

/// Why a model is not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A folder that holds no model of ours, or no adapter of this model.
    #[error("{0}{hint}", hint = .0.hint())]
    Folder(models::Error),
    /// Weights that cannot be read, or that the device does not hold or run.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// A tokenizer that cannot be read, or is another model's.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// The model and its workload do not fit, or are not planned for.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device failed, or had less memory than was planned.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// No device opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A model on the Hugging Face Hub that cannot be found or downloaded.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] hub::HubError),
    /// The dtype that was asked for is none of the device's.
    #[error("the {backend} device has no {need}\nhint: f32 runs everywhere")]
    DType {
        /// What was asked for.
        need: DType,
        /// The device's.
        backend: Backend,
    },
    /// Keys and values were to be in 8 bits, which the device does not store.
    #[error(
        "the {backend} device has no i8, for keys and values in 8 bits\nhint: KvFormat::Float or \
         --kv-cache float holds them as they are computed"
    )]
    KvFormat {
        /// The device's.
        backend: Backend,
    },
    /// A shape that is none of [`Engine::shapes`](crate::Engine::shapes).
    #[error("no published shape is called {shape}\nhint: one of {known}")]
    Shape {
        /// The name that was asked for.
        shape: String,
        /// Names that there are, separated by commas.
        known: String,
    },
    /// More bits were asked for than matrices of this folder have: those are in 4 bits.
    #[error(
        "{} has matrices in 4 bits, which do not become 8\nhint: load it as it is, or what it was made of",
        .0.display()
    )]
    FourBits(PathBuf),
    /// [`EngineOptions::int8_activations`](crate::EngineOptions::int8_activations) without matrices in 8 bits, or not on CUDA.
    #[error(
        "what products read is rounded to 8 bits on CUDA alone, and where matrices are in 8 bits\nhint: leave \
         int8_activations or --int8-activations out, or take --backend cuda and --quant int8"
    )]
    Int8Activations,
    /// [`Compute::Tf32`](crate::Compute::Tf32) was asked for with matrices in 4 or 8 bits.
    #[error("weights of 4 and 8 bits are not multiplied in tf32\nhint: f32 or bf16 beside them")]
    Tf32,
    /// The tune cache cannot be read or written.
    #[error(transparent)]
    Cache(#[from] tune::CacheError),
}

impl LoadError {
    /// How many positions the model has, where more were asked for.
    pub const fn context(&self) -> Option<usize> {
        match self {
            Self::Plan(why) => why.context(),
            _ => None,
        }
    }
}
