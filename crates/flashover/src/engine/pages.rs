//! Return of device memory.

use crate::context::on_burn;
use crate::device::Device;
use crate::memory::MemoryUsage;

/// Pages of a model's device. Dropping it returns free pages to the device.
pub(super) struct Pages(pub(super) Device);

impl Pages {
    /// Returns the pages without a live buffer to the device.
    pub(super) fn give_back(&self) -> Result<(), String> {
        let _stream_guard = ops::stream_guard();
        // Running kernels keep their operands alive.
        on_burn(&self.0).sync().map_err(|why| format!("{why:?}"))?;
        // Updates the peak.
        MemoryUsage::read(&self.0);
        self.0.client().memory_cleanup().map_err(|why| format!("{why:?}"))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // After a panic the device may have failed, so it gets no further requests.
        if !std::thread::panicking() {
            let _failed = self.give_back();
        }
    }
}
