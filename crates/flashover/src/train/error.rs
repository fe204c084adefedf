//! Errors of training.

use crate::device_error::DeviceError;
use crate::load_error::LoadError;
use crate::memory::PlanError;

/// Error of training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The workload does not fit in memory, or cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The model cannot be trained on the examples or have the adapter, or files cannot be written.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The device failed, or had less free memory than planned.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A training option is out of range.
    #[error("{name} is {value}\nhint: use a number {range}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// The value given.
        value: f64,
        /// The valid range, after "a number".
        range: &'static str,
    },
    /// The loss, its gradient or a trained value is not finite.
    #[error(
        "the loss or its gradient is not finite at step {step}\nhint: use a smaller learning rate; the \
         values before the step are kept"
    )]
    Diverged {
        /// Step of the failure, counted from 1.
        step: usize,
    },
    /// All weights are trained, so that there is no adapter to save.
    #[error("all weights are trained\nhint: save the model instead of an adapter")]
    NoAdapter,
}
