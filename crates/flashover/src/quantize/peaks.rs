//! Peak memory of quantisation.

use cubecl::MemoryScope;
use serde::Serialize;

use crate::device::Device;

/// Peak memory of a quantisation run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Peaks {
    /// Peak bytes of this process, with program and drivers; none if the system does not report it.
    pub host_bytes: Option<u64>,
    /// Peak bytes of this process before the first tensor.
    pub host_bytes_before: Option<u64>,
    /// Peak bytes of the device's pools, which hold one tensor with its quantised values.
    pub device_bytes: u64,
}

impl Peaks {
    pub(super) fn start() -> Self {
        Self { host_bytes: None, host_bytes_before: host_peak(), device_bytes: 0 }
    }

    /// Updates the peak; called when the device holds the most.
    pub(super) fn see(&mut self, device: &Device) {
        let usage = device.client().memory_report(MemoryScope::Device).usage();
        self.device_bytes = self.device_bytes.max(usage.bytes_reserved);
    }

    pub(super) fn finish(&mut self) {
        self.host_bytes = host_peak();
    }
}

/// Reads the peak resident set size from Linux.
fn host_peak() -> Option<u64> {
    peak_of(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn peak_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_kib() {
        let status = "Name:\tflashover\nVmPeak:\t  999 kB\nVmHWM:\t   12 kB\nVmRSS:\t 10 kB\n";
        assert_eq!(peak_of(status), Some(12 << 10));
        assert_eq!(peak_of("Name:\tflashover\n"), None);
    }
}
