//! Errors of planning a workload.

use arch::HostMemory;

use super::plan::{Plan, formatted};

/// Error of planning a workload.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The model and its workload need more memory than the device or the budget has.
    #[error("{0}\nhint: {advice}", advice = .0.advice())]
    Memory(Box<Plan>),
    /// One buffer exceeds the device's largest buffer.
    #[error(
        "the workload needs a buffer of {}, but the device allows at most {}\nhint: use a shorter context or fewer \
         sequences; for a weight that is too large, use another model or another `Backend` (--backend vulkan, cuda or \
         cpu)", formatted(*need), formatted(*max)
    )]
    Buffer {
        /// Bytes of the buffer: a weight, the keys of a layer, or activations.
        need: u64,
        /// Bytes of the device's largest buffer.
        max: u64,
    },
    /// The host has too little memory for what is offloaded to it.
    #[error(
        "training needs {} of host memory, but {} are free\nhint: offload less (--offload), use fewer micro-batches per \
         step, moments in 8 bits (--optimizer adamw8), or no master weights (--no-master)",
        formatted(*need), formatted(*free)
    )]
    HostMemory {
        /// Bytes of the offloaded parts.
        need: u64,
        /// Free bytes of the host.
        free: u64,
    },
    /// A limit, a fraction, a batch or a context is out of range.
    #[error("{name} is {value}\nhint: use a number {range}")]
    Budget {
        /// Name of the number.
        name: &'static str,
        /// The value given.
        value: String,
        /// The valid range, after "a number".
        range: &'static str,
    },
    /// The budget is a fraction or a reserve of a total that the device does not report.
    #[error(
        "the device does not report its memory, so a fraction or a reserve of it is unknown\nhint: use \
         `MemoryBudget::limit_bytes` (--memory-limit)"
    )]
    BudgetOfUnknown,
    /// The workload has more positions than the model, or an adapter that the model cannot have.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// Training in bf16 on Vulkan is not supported: Burn's elementwise ops compile to invalid SPIR-V in bf16 (CubeCL
    /// 0.11.3). On an H200 the first step gave NaN, while f16 and f32 trained as on CUDA.
    #[error(
        "training in bf16 is not supported on Vulkan\nhint: use `Compute::F16` or `Compute::F32` (--dtype), or CUDA"
    )]
    TrainBf16,
}

/// Refuses more offloaded bytes than the host has free memory for; nothing if that is unknown.
///
/// # Errors
/// [`PlanError::HostMemory`].
pub(crate) fn check_host(need: u128) -> Result<(), PlanError> {
    let need = u64::try_from(need).unwrap_or(u64::MAX);
    match HostMemory::now() {
        Some(HostMemory { free, .. }) if need > free => Err(PlanError::HostMemory { need, free }),
        _ => Ok(()),
    }
}

impl PlanError {
    /// Returns true if a smaller batch or a shorter context might fit.
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Buffer { .. } | Self::HostMemory { .. })
    }

    /// Returns the model's context length if the error is a request for more positions.
    pub const fn context(&self) -> Option<usize> {
        match self {
            Self::Model(models::Error::Context { max_seq, .. }) => Some(*max_seq),
            _ => None,
        }
    }
}

impl Plan {
    /// Returns the plan if it fits.
    ///
    /// # Errors
    /// [`PlanError::Memory`] if it does not fit.
    pub fn fitting(self) -> Result<Self, PlanError> {
        if self.fits() { Ok(self) } else { Err(PlanError::Memory(Box::new(self))) }
    }
}
