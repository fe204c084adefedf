//! Failures of a device. Only this module reads CubeCL's messages: they alone distinguish a lack of memory.

use arch::Backend;

use crate::device::Device;
use crate::memory::{MemoryUsage, free_bytes};

/// Failure of a device at run time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device lacks memory, although the plan fitted: other processes may hold some of it. CubeCL does not report
    /// the largest free block.
    #[error(
        "the device is out of memory: {need} bytes needed{}; this process holds {} bytes, {} of them in use\nhint: use \
         fewer sequences or a shorter context; `Engine::clear_cache` returns unused pages to the device; a \
         `MemoryBudget` leaves memory for other processes",
        free.map_or_else(String::new, |free| format!(", {free} bytes free")), have.reserved_bytes, have.used_bytes
    )]
    OutOfMemory {
        /// Bytes of the failed allocation.
        need: u64,
        /// Free bytes of the device, if known.
        free: Option<u64>,
        /// Memory of this process on the device.
        have: MemoryUsage,
    },
    /// The device failed for another reason than a lack of memory; its error message.
    #[error(
        "the device failed: {0}\nhint: check the device with `flashover doctor`, or use another `Backend` (--backend)"
    )]
    Failed(String),
}

impl DeviceError {
    /// Returns the failure behind CubeCL's message `why`.
    pub(crate) fn new(device: &Device, why: String) -> Self {
        match bytes_lacked(&why) {
            None => Self::Failed(why),
            Some(need) => Self::OutOfMemory {
                need,
                free: free_bytes(device),
                have: MemoryUsage::read(device),
            },
        }
    }
}

/// Returns the bytes of the failed allocation if CubeCL's error reports a lack of memory.
fn bytes_lacked(why: &str) -> Option<u64> {
    let after = ["out of device memory allocating ", "can't allocate buffer of size: "]
        .into_iter()
        .find_map(|words| why.split_once(words))?
        .1;
    let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after[..end].parse().ok()
}

/// Refuses more than the free memory of a host. Linux overcommits and kills a process that uses too much; a card's
/// driver refuses on its own.
pub(crate) fn check_free(device: &Device, need: u128) -> Result<(), DeviceError> {
    if device.profile().backend != Backend::Cpu {
        return Ok(());
    }
    refuse_over(free_bytes(device), MemoryUsage::read(device), need)
}

fn refuse_over(free: Option<u64>, have: MemoryUsage, need: u128) -> Result<(), DeviceError> {
    let need = lacking(have, need);
    match free.is_some_and(|free| need > free) {
        true => Err(DeviceError::OutOfMemory { need, free, have }),
        false => Ok(()),
    }
}

/// Returns the part of `need` bytes that exceeds the free space in allocated pages.
fn lacking(have: MemoryUsage, need: u128) -> u64 {
    let spare = have.reserved_bytes.saturating_sub(have.used_bytes);
    u64::try_from(need).unwrap_or(u64::MAX).saturating_sub(spare)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_refused() {
        let have = MemoryUsage {
            used_bytes: 10,
            reserved_bytes: 14,
            peak_bytes: 14,
            padding_bytes: 0,
            allocations: 1,
        };
        assert!(refuse_over(Some(6), have, 10).is_ok(), "four bytes lie in pages by now");
        assert!(refuse_over(None, have, u128::MAX).is_ok(), "nobody knows");
        let refused = refuse_over(Some(6), have, 11).expect_err("seven of six");
        let said = refused.to_string();
        assert!(
            said.starts_with("the device is out of memory: 7 bytes needed, 6 bytes free; "),
            "{said}"
        );
        assert!(said.contains("\nhint: use fewer sequences"), "{said}");
        let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
        let refused = check_free(&device, 1 << 60);
        assert!(matches!(refused, Err(DeviceError::OutOfMemory { .. })), "{refused:?}");
    }

    #[test]
    fn memory_that_ran_out_is_told_from_other_failures() {
        let cuda = "Execution { reason: \"out of device memory allocating 1048576 bytes\\n..\" }";
        assert_eq!(bytes_lacked(cuda), Some(1 << 20));
        assert_eq!(bytes_lacked("can't allocate buffer of size: 77"), Some(77));
        // The form of the error for a timed kernel.
        let timed = "An execution error happened\nCaused by:\n  out of device memory allocating 503316480 bytes\nNo";
        assert_eq!(bytes_lacked(timed), Some(503_316_480));
        assert_eq!(bytes_lacked("the device was poisoned"), None);
        assert_eq!(bytes_lacked("out of device memory allocating all bytes"), None);
    }
}
