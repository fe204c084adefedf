//! Devices that run models and kernels.

use std::fmt;
use std::num::NonZeroUsize;
use std::thread;

use burn::backend::DispatchDevice;
use cubecl::client::Client;

pub use arch::report;
pub use arch::{ArchId, ArchProfile, Backend, DType, OpenError, UnknownBackend, UnknownProfile};

/// Limits the cores that this process computes with on a CPU, and returns their number. More than the process may use, by its
/// affinity and the quota of its control group, are as many as it may use. Call it before a device is opened.
pub fn limit_threads(threads: NonZeroUsize) -> usize {
    let most = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = threads.get().min(most);
    arch::limit_cores(threads as u32);
    // Burn's CPU backend, which runs ONNX graphs. A pool that a user's program has built stays.
    if let Err(why) = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global() {
        log::debug!("{why}");
    }
    threads
}

/// A GPU or CPU that is open through one backend. Clones share it.
#[derive(Clone)]
pub struct Device(arch::Device);

impl Device {
    /// Opens the device that `flashover doctor` marks as chosen: the first GPU through CUDA, Vulkan or WebGPU, or the
    /// CPU.
    ///
    /// # Errors
    /// [`OpenError`] if no GPU opens and the CPU backend does not start.
    pub fn auto() -> Result<Self, OpenError> {
        Ok(Self(report::open_best()?))
    }

    /// Opens the first device of `backend`.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`] names the missing part and a way to get it. No other backend is tried.
    pub fn open(backend: Backend) -> Result<Self, OpenError> {
        Self::open_nth(backend, 0)
    }

    /// Opens device `ordinal` of `backend`, counted from 0.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`]; [`OpenError::Ordinal`] if the backend has fewer devices.
    pub fn open_nth(backend: Backend, ordinal: usize) -> Result<Self, OpenError> {
        Ok(Self(arch::Device::open_nth(backend, ordinal)?))
    }

    /// Opens CUDA device `ordinal`, counted from 0 among the devices in `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// The errors of [`Device::open_nth`].
    pub fn cuda(ordinal: usize) -> Result<Self, OpenError> {
        Self::open_nth(Backend::Cuda, ordinal)
    }

    /// Opens Vulkan adapter `ordinal`, counted from 0 without software adapters.
    ///
    /// # Errors
    /// The errors of [`Device::open_nth`].
    pub fn vulkan(ordinal: usize) -> Result<Self, OpenError> {
        Self::open_nth(Backend::Vulkan, ordinal)
    }

    /// Opens adapter `ordinal` for WGSL kernels, counted from 0 with hardware adapters before software adapters.
    ///
    /// # Errors
    /// The errors of [`Device::open_nth`].
    pub fn webgpu(ordinal: usize) -> Result<Self, OpenError> {
        Self::open_nth(Backend::WebGpu, ordinal)
    }

    /// Opens the CPU with all of its cores.
    ///
    /// # Errors
    /// The errors of [`Device::open`].
    pub fn cpu() -> Result<Self, OpenError> {
        Self::open(Backend::Cpu)
    }

    /// Returns this device limited to the features and memory of a recorded profile, such as `rtx4090`.
    ///
    /// # Errors
    /// [`OpenError::UnknownProfile`]; [`OpenError::ForeignProfile`] for a profile of another backend.
    pub fn restrict(&self, profile: &str) -> Result<Self, OpenError> {
        Ok(Self(self.0.restrict(profile)?))
    }

    /// Returns the backend that the device was opened through.
    pub fn backend(&self) -> Backend {
        self.0.backend()
    }

    /// Returns the index of the device among those of its backend, counted from 0.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal()
    }

    /// Returns the features, limits and memory of the device.
    pub fn profile(&self) -> &ArchProfile {
        self.0.profile()
    }

    pub(crate) fn client(&self) -> &Client {
        self.0.client()
    }

    /// Returns the device type of the internal crates.
    #[doc(hidden)]
    pub fn arch(&self) -> &arch::Device {
        &self.0
    }
}

#[doc(hidden)]
impl From<arch::Device> for Device {
    fn from(device: arch::Device) -> Self {
        Self(device)
    }
}

impl From<&Device> for burn::tensor::Device {
    fn from(device: &Device) -> Self {
        Self::from(device.0.raw().clone())
    }
}

impl TryFrom<&burn::tensor::Device> for Device {
    type Error = OpenError;

    /// Returns [`OpenError::Foreign`] for a device that CubeCL does not run, such as `Device::flex()`.
    fn try_from(device: &burn::tensor::Device) -> Result<Self, OpenError> {
        match device.clone().inner().as_dispatch() {
            DispatchDevice::Cube(raw) => Ok(Self(arch::Device::from_raw(raw.clone())?)),
            other => Err(OpenError::Foreign { runtime: format!("{other:?}") }),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.backend(), self.ordinal(), self.profile().name)
    }
}
