//! Used and free bytes of a device.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use arch::monitor::{Kind, Monitor, Reading};
use arch::{Backend, HostMemory};
use cubecl::MemoryScope;
use serde::Serialize;

use crate::device::Device;

/// Device memory of this process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Bytes of live buffers.
    pub used_bytes: u64,
    /// Bytes of allocated pages, in use or free for reuse.
    pub reserved_bytes: u64,
    /// Peak of `reserved_bytes` over all reads. Pages only grow until they are returned, and returning them reads
    /// first.
    pub peak_bytes: u64,
    /// Bytes of padding between the end of a buffer and the end of its allocation.
    pub padding_bytes: u64,
    /// Number of live buffers.
    pub allocations: u64,
}

/// Peak of reserved bytes by architecture and ordinal of the device.
static PEAKS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());

impl MemoryUsage {
    /// Reads the current use of the pools of `device`.
    pub fn read(device: &Device) -> Self {
        let usage = device.client().memory_report(MemoryScope::Device).usage();
        let mut peaks = PEAKS.lock().unwrap_or_else(PoisonError::into_inner);
        let peak = peaks.entry((device.profile().id.to_string(), device.ordinal())).or_default();
        *peak = usage.bytes_reserved.max(*peak);
        Self {
            used_bytes: usage.bytes_in_use,
            reserved_bytes: usage.bytes_reserved,
            peak_bytes: *peak,
            padding_bytes: usage.bytes_padding,
            allocations: usage.number_allocs,
        }
    }

    /// Returns the share of allocated pages without a live buffer, from 0 to 1.
    pub fn fragmentation(&self) -> f64 {
        match self.reserved_bytes {
            0 => 0.0,
            reserved => 1.0 - self.used_bytes as f64 / reserved as f64,
        }
    }
}

/// Returns the free bytes of a device, as its driver reports them. Returns none if the driver does not report them, or
/// outside CUDA if several cards share its name.
pub fn free_bytes(device: &Device) -> Option<u64> {
    let profile = device.profile();
    if profile.backend == Backend::Cpu {
        return HostMemory::now().map(|memory| memory.free);
    }
    let readings = Monitor::open().sample();
    let uuid = device.arch().uuid();
    let own = |reading: &&Reading| uuid.as_ref() == Some(&reading.id);
    let named = |reading: &&Reading| reading.kind != Kind::Cpu && reading.name == profile.name;
    let reading = readings.iter().find(own).or_else(|| {
        // Two cards may share a name.
        let mut found = readings.iter().filter(named);
        found.next().filter(|_| found.next().is_none())
    })?;
    reading.memory_total_bytes?.checked_sub(reading.memory_used_bytes?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_stays_when_pages_go() {
        let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
        let before = MemoryUsage::read(&device);
        let held = device.client().empty(64 << 20);
        let full = MemoryUsage::read(&device);
        assert!(full.reserved_bytes >= before.reserved_bytes + (64 << 20), "{full:?}");
        assert!(full.peak_bytes >= full.reserved_bytes, "{full:?}");
        drop(held);
        device.client().memory_cleanup().expect("nothing is captured");
        let after = MemoryUsage::read(&device);
        assert!(after.reserved_bytes < full.reserved_bytes, "{after:?}");
        assert!(after.peak_bytes >= full.peak_bytes, "{after:?}");
        assert!((0.0..=1.0).contains(&after.fragmentation()), "{after:?}");
    }

    #[test]
    fn a_host_tells_what_is_free() {
        let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
        let free = free_bytes(&device).expect("the kernel tells it");
        assert!(free > 0 && Some(free) < device.profile().memory_bytes, "{free}");
    }
}
