//! Capabilities that follow from the backend's language and from how its units run.
//!
//! Kernels ask for a capability, never for a backend, so a new backend is added only here.

use crate::cores::free_cores;
use crate::{ArchProfile, Backend};

impl ArchProfile {
    /// Number of cores where every unit is a core; `None` where units share a processor and barriers are cheap.
    pub const fn cores(&self) -> Option<u32> {
        match (self.backend, self.processors) {
            (Backend::Cpu, Some(cores)) => Some(cores),
            (Backend::Cpu, None) => Some(1),
            _ => None,
        }
    }

    /// Number of [`ArchProfile::cores`] that other programs leave free now, at least 1; `None` where that is.
    pub fn free_cores(&self) -> Option<u32> {
        self.cores().map(free_cores)
    }

    /// Returns true for a CPU whose cores other programs use at present.
    pub fn is_shared(&self) -> bool {
        self.free_cores() != self.cores()
    }

    /// Number of cores for a kernel that takes `nanoseconds` on one; `None` where [`ArchProfile::cores`] is. A short kernel
    /// on one core ends before others would have begun.
    pub fn useful_cores(&self, nanoseconds: f64) -> Option<u32> {
        /// Work that is worth a core.
        const GRAIN_NS: f64 = 2e5;
        self.cores().map(|all| ((nanoseconds / GRAIN_NS).ceil() as u32).clamp(1, all))
    }

    /// Returns whether kernels may contain inline PTX: `mma.sync`, `cp.async`, shuffles in planes of 32 units.
    pub const fn inline_ptx(&self) -> bool {
        matches!(self.backend, Backend::Cuda)
    }

    /// Returns whether units of a plane can read each other's registers.
    pub const fn plane_shuffles(&self) -> bool {
        matches!(self.backend, Backend::Cuda | Backend::Vulkan)
    }

    /// Returns whether plane-scope matrices can load from shared memory that is declared as words.
    pub const fn matrices_from_words(&self) -> bool {
        matches!(self.backend, Backend::Vulkan)
    }

    /// Returns whether a conversion from f32 to bf16 truncates instead of rounding to nearest.
    pub const fn truncates_bf16(&self) -> bool {
        matches!(self.backend, Backend::Vulkan)
    }

    /// Returns whether a buffer argument may begin at any element of an allocation.
    pub const fn unaligned_buffers(&self) -> bool {
        matches!(self.backend, Backend::Cuda)
    }

    /// Largest number of cubes along the first and along the other dimensions of a grid.
    pub const fn max_cubes(&self) -> [u32; 2] {
        match self.backend {
            Backend::Cuda => [i32::MAX as u32, 65_535],
            Backend::Vulkan | Backend::WebGpu => [65_535; 2],
            Backend::Cpu => [u32::MAX; 2],
        }
    }
}
