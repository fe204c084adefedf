//! Memory that a device gets back.

use crate::context::on_burn;
use crate::device::Device;
use crate::memory::MemoryUsage;

/// Pages of a model's device. They go back to the device after the model.
pub(super) struct Pages(pub(super) Device);

impl Pages {
    /// Gives back the pages in which no buffer is alive.
    pub(super) fn give_back(&self) -> Result<(), String> {
        let _at_work = ops::at_work();
        // Kernels that still run hold their operands.
        on_burn(&self.0).sync().map_err(|why| format!("{why:?}"))?;
        // Updates the peak.
        MemoryUsage::read(&self.0);
        self.0.client().memory_cleanup().map_err(|why| format!("{why:?}"))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // A device that failed gets no further requests.
        if !std::thread::panicking() {
            let _failed = self.give_back();
        }
    }
}
