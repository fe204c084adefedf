//! Where launches go: to a device, or to a compiler alone.

use std::cell::RefCell;
use std::sync::Arc;

use arch::{ArchProfile, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_environment::stream::StreamId;

/// A queue of launches.
pub enum Queue<'a> {
    /// Runs them on a device.
    Device(&'a Device),
    /// Keeps their programs and runs nothing: for compiling ahead, and for devices that are not there.
    Compiler(Compiler<'a>),
}

/// Programs of launches, for a device with these properties. Its buffers hold nothing.
pub struct Compiler<'a> {
    arch: &'a ArchProfile,
    pub properties: Arc<DeviceProperties>,
    pub target: Arc<TargetProperties>,
    programs: RefCell<Vec<Box<dyn CubeKernel>>>,
}

impl<'a> Queue<'a> {
    /// A queue that keeps programs for a device with these properties.
    pub fn compiler(
        arch: &'a ArchProfile,
        properties: &Arc<DeviceProperties>,
        target: &Arc<TargetProperties>,
    ) -> Self {
        let (properties, target) = (properties.clone(), target.clone());
        Self::Compiler(Compiler { arch, properties, target, programs: RefCell::default() })
    }

    /// The programs that were kept, in the order of their first launches.
    pub fn into_programs(self) -> Vec<Box<dyn CubeKernel>> {
        match self {
            Self::Device(_) => Vec::new(),
            Self::Compiler(compiler) => compiler.programs.into_inner(),
        }
    }

    /// Facts of the device.
    pub fn profile(&self) -> &ArchProfile {
        match self {
            Self::Device(device) => device.profile(),
            Self::Compiler(compiler) => compiler.arch,
        }
    }

    /// A buffer of `bytes` bytes of anything.
    pub fn empty(&self, bytes: usize) -> Handle {
        match self {
            Self::Device(device) => device.client().empty(bytes),
            Self::Compiler(_) => nowhere(bytes),
        }
    }

    /// A buffer with these bytes.
    pub fn upload(&self, bytes: &[u8]) -> Handle {
        self.made(bytes.len(), bytes.iter().copied())
    }

    /// A buffer with these bytes, `len` of them, which only a device makes.
    pub fn made(&self, len: usize, bytes: impl Iterator<Item = u8>) -> Handle {
        match self {
            Self::Device(device) => device.client().create_from_slice(&bytes.collect::<Vec<_>>()),
            Self::Compiler(_) => nowhere(len),
        }
    }
}

/// The handle of a buffer that no device has.
fn nowhere(bytes: usize) -> Handle {
    let service = ServiceId::of::<Compiler<'static>>(DeviceId::new(0, 0));
    Handle::new(service, StreamId { value: 0 }, bytes as u64)
}

impl Compiler<'_> {
    /// Keeps a program that is launched without checks of bounds, once.
    pub fn keep(&self, program: impl CubeKernel) {
        let (program, mut programs) = (Unchecked(program), self.programs.borrow_mut());
        if programs.iter().all(|kept| kept.id() != program.id()) {
            programs.push(Box::new(program));
        }
    }
}

/// A program without checks of bounds: CubeCL builds one without launching it only with them.
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
