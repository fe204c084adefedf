//! Errors of training.

use std::path::PathBuf;

use super::data::DatasetError;
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
    /// The data can no longer be read.
    #[error(transparent)]
    Data(Box<DatasetError>),
    /// A training option is out of range.
    #[error("--{name} is {value}\nhint: use a number {range}")]
    Option {
        /// Name of the option on the command line.
        name: &'static str,
        /// The value given.
        value: f64,
        /// The valid range, after "a number".
        range: &'static str,
    },
    /// Options that exclude each other.
    #[error("cannot {0}")]
    Unsupported(&'static str),
    /// Others generate with the weights that a step would change.
    #[error(
        "others generate with the weights, which a training step changes\nhint: wait for them, or train a copy of the model"
    )]
    Busy,
    /// An earlier attempt to allocate the optimizer's state failed, and took the master weights.
    #[error(
        "the trainer lost its master weights when it ran out of memory\nhint: load the model again"
    )]
    Incomplete,
    /// The loss, its gradient or a trained value is not finite. A gradient that is not finite changes no value.
    #[error(
        "the loss or its gradient is not finite at step {step}\nhint: use a smaller --learning-rate, or more --warmup"
    )]
    Diverged {
        /// Step of the failure, counted from 1.
        step: usize,
    },
    /// The folders of saved steps cannot be made, listed or removed.
    #[error("cannot keep saves in {}: {why}\nhint: check the permissions of the output folder", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The error of the system.
        why: std::io::Error,
    },
    /// The folder has no run to resume.
    #[error("{} has no training run\nhint: name a folder that `train --save-every` wrote", .0.display())]
    NoRun(PathBuf),
    /// The state of a run is damaged or incomplete.
    #[error("cannot resume: {}: {why}\nhint: resume from another save, or start a new run", .path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// The options differ from those of the run to resume.
    #[error("the run was started with other options: {}\nhint: use the options of the saved run, or start a new run", .0.join("; "))]
    Resume(Vec<String>),
}

impl From<DatasetError> for TrainError {
    fn from(why: DatasetError) -> Self {
        Self::Data(Box::new(why))
    }
}
