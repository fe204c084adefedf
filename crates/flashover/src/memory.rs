//! What the pools of a device hold.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use arch::monitor::{Kind, Monitor, Reading};
use arch::{Backend, Device, HostMemory};
use cubecl::MemoryScope;
use serde::Serialize;

/// Memory of a device that this process has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Of what is alive.
    pub used_bytes: u64,
    /// Of pages, with what is kept for later.
    pub reserved_bytes: u64,
    /// The most that pages were when somebody looked. They grow until they are given back, and giving them back looks
    /// first.
    pub peak_bytes: u64,
    /// Between the end of what is alive and the end of what it was given.
    pub padding_bytes: u64,
    /// Buffers that are alive.
    pub allocations: u64,
}

/// The most that was reserved, of devices by their ids.
static PEAKS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

impl MemoryUsage {
    /// What the pools of `device` hold now.
    pub fn of(device: &Device) -> Self {
        let usage = device.client().memory_report(MemoryScope::Device).usage();
        let mut peaks = PEAKS.lock().unwrap_or_else(PoisonError::into_inner);
        let peak = peaks.entry(device.profile().id.to_string()).or_default();
        *peak = usage.bytes_reserved.max(*peak);
        Self {
            used_bytes: usage.bytes_in_use,
            reserved_bytes: usage.bytes_reserved,
            peak_bytes: *peak,
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

/// Bytes of a device that nobody has, as its driver tells them: of a card, as far as it is the only one of its name.
pub fn free_bytes(device: &Device) -> Option<u64> {
    let profile = device.profile();
    if profile.backend == Backend::Cpu {
        return HostMemory::now().map(|memory| memory.free);
    }
    let own = |reading: &&Reading| reading.kind != Kind::Cpu && reading.name == profile.name;
    let readings = Monitor::open().sample();
    let mut found = readings.iter().filter(own);
    let (reading, None) = (found.next()?, found.next()) else { return None };
    reading.memory_total_bytes?.checked_sub(reading.memory_used_bytes?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_stays_when_pages_go() {
        let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
        let before = MemoryUsage::of(&device);
        let held = device.client().empty(64 << 20);
        let full = MemoryUsage::of(&device);
        assert!(full.reserved_bytes >= before.reserved_bytes + (64 << 20), "{full:?}");
        assert!(full.peak_bytes >= full.reserved_bytes, "{full:?}");
        drop(held);
        device.client().memory_cleanup().expect("nothing is captured");
        let after = MemoryUsage::of(&device);
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
