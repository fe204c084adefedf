//! The one way to refuse a workload.

use super::plan::{Plan, formatted};

/// Reason why a workload is refused.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The model and its workload take more than the device or the budget has.
    #[error("{0}\nhint: {advice}", advice = .0.advice())]
    Memory(Box<Plan>),
    /// One buffer is larger than any that the device gives.
    #[error(
        "it needs a buffer of {}, and the device has none above {}\nhint: a shorter context or fewer sequences, where keys \
         are the largest; else another model, or --backend vulkan, cuda or cpu", formatted(*need), formatted(*most)
    )]
    Buffer {
        /// Bytes of a weight, of the keys of a layer, or of activations.
        need: u64,
        /// Bytes of the device's largest buffer.
        most: u64,
    },
    /// A limit, a fraction, a batch or a context out of its range.
    #[error("{name} is {value}\nhint: a number {range}")]
    Budget {
        /// Name of the number.
        name: &'static str,
        /// Value that was given.
        value: String,
        /// Range, after "a number".
        range: &'static str,
    },
    /// A fraction or a reserve of a total that the device does not report.
    #[error(
        "the device does not tell how much memory it has, of which a fraction or a reserve would be a part\nhint: a \
         limit in bytes, as --memory-limit"
    )]
    BudgetOfUnknown,
    /// More positions than the model has, or an adapter that it cannot have.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// Burn's ops element by element are no valid SPIR-V in bf16 (CubeCL 0.11.3): NaN at the first step on an H200, where
    /// f16 and f32 learn as on CUDA.
    #[error("gradients in bf16 are not right through Vulkan\nhint: --dtype f16 or f32, or CUDA")]
    TrainBf16,
}

impl PlanError {
    /// Returns true if a smaller batch or a shorter context would have fitted.
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Buffer { .. })
    }

    /// Returns the model's context length if more positions were asked for.
    pub const fn context(&self) -> Option<usize> {
        match self {
            Self::Model(models::Error::Context { max_seq, .. }) => Some(*max_seq),
            _ => None,
        }
    }
}

impl Plan {
    /// Refuses a plan that does not fit.
    ///
    /// # Errors
    /// [`PlanError::Memory`].
    pub fn fitting(self) -> Result<Self, PlanError> {
        if self.fits() { Ok(self) } else { Err(PlanError::Memory(Box::new(self))) }
    }
}
