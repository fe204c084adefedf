//! What the pools of a device hold.

use arch::Device;
use cubecl::MemoryScope;
use serde::Serialize;

/// Memory of a device that this process has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Of what is alive.
    pub used_bytes: u64,
    /// Of pages, with what is kept for later.
    pub reserved_bytes: u64,
    /// Between the end of what is alive and the end of what it was given.
    pub padding_bytes: u64,
    /// Buffers that are alive.
    pub allocations: u64,
}

impl MemoryUsage {
    /// What the pools of `device` hold now.
    pub fn of(device: &Device) -> Self {
        let usage = device.client().memory_report(MemoryScope::Device).usage();
        Self {
            used_bytes: usage.bytes_in_use,
            reserved_bytes: usage.bytes_reserved,
            padding_bytes: usage.bytes_padding,
            allocations: usage.number_allocs,
        }
    }

    /// Share of the pages that nothing alive is in.
    pub fn fragmentation(&self) -> f64 {
        match self.reserved_bytes {
            0 => 0.0,
            reserved => 1.0 - self.used_bytes as f64 / reserved as f64,
        }
    }
}
