//! Cases of one kernel, as its file lists them.

use arch::{Backend, Device};
pub use record::Suite;

/// Size of the cases: for a GPU, or for the CPU of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Gpu,
    Host,
}

impl Scale {
    /// The scale for `device`; a software rasteriser counts as a host.
    pub fn of_device(device: &Device) -> Self {
        let host = device.backend() == Backend::Cpu || arch::report::describe(device).software;
        if host { Self::Host } else { Self::Gpu }
    }
}

/// A problem that the bench measures.
#[derive(Debug, Clone, Copy)]
pub struct BenchCase<P> {
    pub problem: P,
    /// True to measure Burn's and cubek's ops too. Burn's first call on a GPU autotunes for up to 40 s.
    pub peers: bool,
}

impl<P> BenchCase<P> {
    /// A case without peers.
    pub const fn alone(problem: P) -> Self {
        Self { problem, peers: false }
    }
}

/// A problem that generates different code from the others.
#[derive(Debug, Clone)]
pub struct InstanceCase<P> {
    pub problem: P,
    /// Number of its candidates to compile.
    pub max_candidates: usize,
    /// Number of compiled candidates that must not spill on an RTX card.
    pub clean: usize,
}
