//! The target of launches: a device, or only a compiler.

use std::cell::RefCell;
use std::sync::Arc;

use arch::{ArchProfile, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_environment::stream::StreamId;

/// A queue of launches.
pub enum Queue<'a> {
    /// Runs launches on a device.
    Device(&'a Device),
    /// Collects programs and runs nothing: to precompile, also for devices that the machine does not have.
    Compiler(Compiler<'a>),
}

/// Collects the programs of launches for a device with these properties. Its buffers have no memory.
pub struct Compiler<'a> {
    arch: &'a ArchProfile,
    pub properties: Arc<DeviceProperties>,
    pub target: Arc<TargetProperties>,
    programs: RefCell<Vec<Box<dyn CubeKernel>>>,
}

impl<'a> Queue<'a> {
    /// Returns a queue that collects programs for a device with these properties.
    pub fn compiler(
        arch: &'a ArchProfile,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Self {
        let (properties, target) = (properties.clone(), target.clone());
        Self::Compiler(Compiler { arch, properties, target, programs: RefCell::default() })
    }

    /// Returns the collected programs, in the order of their first launches.
    pub fn into_programs(self) -> Vec<Box<dyn CubeKernel>> {
        match self {
            Self::Device(_) => Vec::new(),
            Self::Compiler(compiler) => compiler.programs.into_inner(),
        }
    }

    /// Returns the profile of the device.
    pub fn profile(&self) -> &ArchProfile {
        match self {
            Self::Device(device) => device.profile(),
            Self::Compiler(compiler) => compiler.arch,
        }
    }

    /// Allocates an uninitialised buffer of `bytes` bytes.
    pub fn empty(&self, bytes: usize) -> Handle {
        match self {
            Self::Device(device) => device.client().empty(bytes),
            Self::Compiler(_) => nowhere(bytes),
        }
    }

    /// Uploads `bytes` to a new buffer.
    pub fn upload(&self, bytes: &[u8]) -> Handle {
        self.made(bytes.len(), bytes.iter().copied())
    }

    /// Uploads the `len` bytes of an iterator to a new buffer. A compiler does not run the iterator.
    pub fn made(&self, len: usize, bytes: impl Iterator<Item = u8>) -> Handle {
        match self {
            Self::Device(device) => device.client().create_from_slice(&bytes.collect::<Vec<_>>()),
            Self::Compiler(_) => nowhere(len),
        }
    }
}

/// Returns the handle of a buffer without memory.
fn nowhere(bytes: usize) -> Handle {
    let service = ServiceId::of::<Compiler<'static>>(DeviceId::new(0, 0));
    Handle::new(service, StreamId { value: 0 }, bytes as u64)
}

impl Compiler<'_> {
    /// Adds a program that runs without bounds checks, unless it was added before.
    pub fn keep(&self, program: impl CubeKernel) {
        let (program, mut programs) = (Unchecked(program), self.programs.borrow_mut());
        if programs.iter().all(|kept| kept.id() != program.id()) {
            programs.push(Box::new(program));
        }
    }
}

/// A program without bounds checks. When CubeCL builds one without a launch, it always adds them.
struct Unchecked<K>(K);

impl<K: CubeKernel> KernelMetadata for Unchecked<K> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn id(&self) -> KernelId {
        self.0.id().mode(ExecutionMode::Unchecked)
    }

    fn address_type(&self) -> ElemType {
        self.0.address_type()
    }
}

impl<K: CubeKernel> CubeKernel for Unchecked<K> {
    fn define(&self) -> KernelDefinition {
        let mut definition = self.0.define();
        definition.settings.execution_mode = ExecutionMode::Unchecked;
        definition
    }
}
