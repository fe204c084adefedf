//! Devices: what models and kernels run on.

use std::fmt;

use burn::backend::DispatchDevice;
use cubecl::client::Client;

pub use arch::report;
pub use arch::{ArchId, ArchProfile, Backend, DType, OpenError, UnknownBackend, UnknownProfile};

/// A processor that is open through one back end. Clones share it.
#[derive(Clone)]
pub struct Device(arch::Device);

impl Device {
    /// Opens the device that `flashover doctor` calls chosen: the first GPU through CUDA, Vulkan or WebGPU, else the CPU.
    ///
    /// # Errors
    /// [`OpenError`] if the CPU back end does not start either.
    pub fn auto() -> Result<Self, OpenError> {
        Ok(Self(report::open_best()?))
    }

    /// Opens the first device of `backend`.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`] names what is missing and how to get it. Nothing falls back to another back end.
    pub fn open(backend: Backend) -> Result<Self, OpenError> {
        Self::open_nth(backend, 0)
    }

    /// Opens device `ordinal` of `backend`, counted from 0.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`]; [`OpenError::Ordinal`] if there are fewer devices.
    pub fn open_nth(backend: Backend, ordinal: usize) -> Result<Self, OpenError> {
        Ok(Self(arch::Device::open_nth(backend, ordinal)?))
    }

    /// Opens CUDA device `ordinal`, counted from 0 as `CUDA_VISIBLE_DEVICES` leaves them.
    ///
    /// # Errors
    /// As [`Device::open_nth`].
    pub fn cuda(ordinal: usize) -> Result<Self, OpenError> {
        Self::open_nth(Backend::Cuda, ordinal)
    }

    /// Opens Vulkan adapter `ordinal`, counted from 0. Software adapters do not count.
    ///
    /// # Errors
    /// As [`Device::open_nth`].
    pub fn vulkan(ordinal: usize) -> Result<Self, OpenError> {
        Self::open_nth(Backend::Vulkan, ordinal)
    }

    /// Opens adapter `ordinal` for WGSL kernels, counted from 0, hardware before software.
    ///
    /// # Errors
    /// As [`Device::open_nth`].
    pub fn webgpu(ordinal: usize) -> Result<Self, OpenError> {
        Self::open_nth(Backend::WebGpu, ordinal)
    }

    /// Opens the CPU, all of its cores.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn cpu() -> Result<Self, OpenError> {
        Self::open(Backend::Cpu)
    }

    /// Returns this device limited to the features and memory of a recorded profile, such as `rtx4090`.
    ///
    /// # Errors
    /// [`OpenError::UnknownProfile`]; [`OpenError::ForeignProfile`] for a profile of another back end.
    pub fn restrict(&self, profile: &str) -> Result<Self, OpenError> {
        Ok(Self(self.0.restrict(profile)?))
    }

    /// Back end that the device was opened through.
    pub fn backend(&self) -> Backend {
        self.0.backend()
    }

    /// Index of the device among those of its back end.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal()
    }

    /// Features, limits and memory of the device.
    pub fn profile(&self) -> &ArchProfile {
        self.0.profile()
    }

    pub(crate) fn client(&self) -> &Client {
        self.0.client()
    }

    /// The device as the crates beneath take it.
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

    /// Fails with [`OpenError::Foreign`] for a device that CubeCL does not run, such as `Device::flex()`.
    fn try_from(device: &burn::tensor::Device) -> Result<Self, OpenError> {
        match device.clone().inner().as_dispatch() {
            DispatchDevice::Cube(raw) => Ok(Self(arch::Device::of(raw.clone())?)),
            other => Err(OpenError::Foreign { runtime: format!("{other:?}") }),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.backend(), self.ordinal(), self.profile().name)
    }
}
