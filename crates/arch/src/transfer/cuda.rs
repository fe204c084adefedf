//! Copies by the copy engines of CUDA.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cubecl::server::Handle;
use cudarc::driver::result::{
    ctx, device, event, memcpy_dtoh_async, memcpy_htod_async, primary_ctx, stream,
};
use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUevent, CUevent_flags, CUstream, cuMemHostRegister_v2,
    cuMemHostUnregister,
};

use super::resource::Resource;
use super::{HostBuffer, Memory, PAGE, Transfer, TransferError, failed};
use crate::Device;

/// One stream for each direction, in the device's primary context, which CubeCL uses too.
pub(super) struct Streams {
    ordinal: i32,
    context: CUcontext,
    to_host: CUstream,
    to_device: CUstream,
}

// SAFETY: the driver's handles may be used by any thread once its context is current, which each method sees to.
unsafe impl Send for Streams {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Streams {}

impl Streams {
    pub(super) fn new(ordinal: usize) -> Result<Self, TransferError> {
        let ordinal = i32::try_from(ordinal).map_err(failed)?;
        let own = device::get(ordinal).map_err(failed)?;
        // SAFETY: the device is valid; the context is released when this value is dropped.
        let context = unsafe { primary_ctx::retain(own) }.map_err(failed)?;
        // SAFETY: the context was just retained.
        unsafe { ctx::set_current(context) }.map_err(failed)?;
        let open = || stream::create(stream::StreamKind::NonBlocking).map_err(failed);
        Ok(Self { ordinal, context, to_host: open()?, to_device: open()? })
    }

    /// Makes the context current on this thread.
    fn enter(&self) -> Result<(), TransferError> {
        // SAFETY: the context lives as long as this value.
        unsafe { ctx::set_current(self.context) }.map_err(failed)
    }

    /// Locks the pages of a buffer, so that copies need no staging.
    pub(super) fn lock(&self, memory: &mut Memory) -> Result<(), TransferError> {
        self.enter()?;
        let (start, bytes) = (memory.start.as_ptr(), memory.len.max(1).next_multiple_of(PAGE));
        // SAFETY: the range is one allocation of whole pages; it is unlocked before it is freed.
        let status = unsafe {
            cuMemHostRegister_v2(start.cast::<c_void>(), bytes, CU_MEMHOSTREGISTER_PORTABLE)
        };
        let why = |error| TransferError::Lock { bytes, why: format!("{error:?}") };
        status.result().map_err(why)?;
        memory.locked = true;
        Ok(())
    }

    pub(super) fn save(
        &self,
        device: &Device,
        from: &Handle,
        to: &HostBuffer,
        at: usize,
        len: usize,
    ) -> Result<Transfer, TransferError> {
        self.copy(device, from, to, self.to_host, |resource, memory| {
            // SAFETY: the caller checked the range. Nobody reads or writes these bytes before the transfer is waited for.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(memory.start.as_ptr().add(at), len);
                memcpy_dtoh_async(bytes, resource.address(), self.to_host)
            }
        })
    }

    pub(super) fn load(
        &self,
        device: &Device,
        from: &HostBuffer,
        at: usize,
        to: &Handle,
        len: usize,
    ) -> Result<Transfer, TransferError> {
        self.copy(device, to, from, self.to_device, |resource, memory| {
            // SAFETY: as in `save`.
            unsafe {
                let bytes = std::slice::from_raw_parts(memory.start.as_ptr().add(at), len);
                memcpy_htod_async(resource.address(), bytes, self.to_device)
            }
        })
    }

    fn copy(
        &self,
        device: &Device,
        handle: &Handle,
        host: &HostBuffer,
        on: CUstream,
        begin: impl FnOnce(&Resource, &Memory) -> Result<(), cudarc::driver::DriverError>,
    ) -> Result<Transfer, TransferError> {
        self.enter()?;
        let resource = Resource::new(device, handle)?;
        let memory = host.memory.clone();
        let end = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed)?;
        // From here on the transfer waits for the copy before it lets go of the memory.
        let running =
            Running { end, _handle: handle.clone(), _resource: resource, _memory: memory };
        begin(&running._resource, &running._memory).map_err(failed)?;
        // SAFETY: event and stream are of this context.
        unsafe { event::record(end, on) }.map_err(failed)?;
        Ok(Transfer { running: Some(running) })
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let done = self.enter().and_then(|()| {
            let own = device::get(self.ordinal).map_err(failed)?;
            // SAFETY: nothing uses the streams any more: transfers are waited for by their own events.
            unsafe {
                stream::destroy(self.to_host).map_err(failed)?;
                stream::destroy(self.to_device).map_err(failed)?;
                primary_ctx::release(own).map_err(failed)
            }
        });
        if let Err(why) = done {
            log::warn!("copy streams were not closed: {why}");
        }
    }
}

/// Unlocks the pages of a buffer.
pub(super) fn unlock(start: NonNull<u8>) {
    // SAFETY: `lock` registered the pages that begin here.
    let status = unsafe { cuMemHostUnregister(start.as_ptr().cast::<c_void>()) };
    if let Err(why) = status.result() {
        log::warn!("host memory was not unlocked: {why:?}");
    }
}

/// A copy, and what it reads and writes.
pub(super) struct Running {
    end: CUevent,
    _handle: Handle,
    _resource: Resource,
    _memory: Arc<Memory>,
}

impl Running {
    pub(super) fn wait(self) -> Result<(), TransferError> {
        // SAFETY: the event is alive until `self` is dropped.
        unsafe { event::synchronize(self.end) }.map_err(failed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // SAFETY: the event is alive, and used no more afterwards. An event that was never recorded is complete.
        let done = unsafe { event::synchronize(self.end).and_then(|()| event::destroy(self.end)) };
        if let Err(why) = done {
            log::warn!("a copy was not completed: {why:?}");
        }
    }
}
