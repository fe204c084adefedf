//! Memory that a device gets back.

use arch::Device;

use crate::context::on_burn;
use crate::memory::MemoryUsage;

/// The pages of a model, which go back to the device after it.
pub(super) struct Pages(pub(super) Device);

impl Pages {
    /// Gives back those that nothing alive is in.
    pub(super) fn give_back(&self) -> Result<(), String> {
        let _at_work = ops::at_work();
        // What still runs holds what it reads.
        on_burn(&self.0).sync().map_err(|why| format!("{why:?}"))?;
        // Looks, for the sake of the peak.
        MemoryUsage::read(&self.0);
        self.0.client().memory_cleanup().map_err(|why| format!("{why:?}"))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Of a device that failed nobody asks for more.
        if !std::thread::panicking() {
            let _failed = self.give_back();
        }
    }
}
