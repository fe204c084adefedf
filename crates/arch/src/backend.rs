//! The four ways to reach a processor.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A runtime and the code it is fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// CUDA C++ through NVRTC.
    Cuda,
    /// SPIR-V through wgpu.
    Vulkan,
    /// WGSL through wgpu, on a native device: what a browser's WebGPU would be given.
    WebGpu,
    /// LLVM JIT on the host's cores.
    Cpu,
}

impl Backend {
    /// Every backend, fastest first: the order in which `auto` chooses.
    pub const ALL: [Self; 4] = [Self::Cuda, Self::Vulkan, Self::WebGpu, Self::Cpu];

    /// The name used in flags, records and caches.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
            Self::WebGpu => "webgpu",
            Self::Cpu => "cpu",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A backend name that is none of [`Backend::ALL`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown backend `{0}`\nhint: one of cuda, vulkan, webgpu, cpu")]
pub struct UnknownBackend(pub String);

impl FromStr for Backend {
    type Err = UnknownBackend;

    fn from_str(s: &str) -> Result<Self, UnknownBackend> {
        Self::ALL.into_iter().find(|b| b.name() == s).ok_or_else(|| UnknownBackend(s.to_owned()))
    }
}
