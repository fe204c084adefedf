//! What can be wrong with training.

use crate::device_error::DeviceError;
use crate::load_error::LoadError;
use crate::memory::PlanError;

/// Why an adapter is not trained.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A model that is not loaded, or not planned for.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A workload that does not fit, or is not planned for.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Examples that the model cannot learn, an adapter that it cannot have, or files that cannot be written.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// The device failed, or had less memory than was planned.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An option of training out of its range.
    #[error("{name} is {value}\nhint: a number {range}")]
    Option {
        /// Which option.
        name: &'static str,
        /// As it was given.
        value: f64,
        /// What it may be, after "a number".
        range: &'static str,
    },
    /// The loss, its gradient or what was learned is not finite.
    #[error(
        "the loss or its gradient is not finite at step {step}\nhint: a smaller learning rate; what was learned before is \
         kept"
    )]
    Diverged {
        /// Counted from 1.
        step: usize,
    },
}
