//! Copies between a device and host memory beside its kernels.
//!
//! On CUDA the memory is page-locked, and each direction has a stream of its own: both directions and kernels run at once. A copy
//! begins after all earlier launches of the calling thread: [`Link`] waits for these on the host, some 50 µs, so that copies should
//! be of megabytes. On other backends a copy is complete when its call returns.

mod cuda;
mod resource;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::future::block_on;
use cubecl::server::Handle;

use crate::Device;

/// The reason that a copy or an allocation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The host has too little memory.
    #[error("expected {bytes} bytes of free host memory\nhint: close programs, or offload less")]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
    },
    /// CUDA could not lock the pages of a buffer.
    #[error(
        "CUDA could not lock {bytes} bytes of host memory: {why}\nhint: raise the limit of locked \
         memory (`ulimit -l`), or offload less"
    )]
    Lock {
        /// Bytes of the buffer.
        bytes: usize,
        /// Message of the driver.
        why: String,
    },
    /// The device failed.
    #[error("the device failed during a copy: {0}")]
    Failed(String),
}

fn failed(why: impl std::fmt::Debug) -> TransferError {
    TransferError::Failed(format!("{why:?}"))
}

/// Bytes in host memory.
#[derive(Debug)]
pub struct HostBuffer {
    memory: Arc<Memory>,
}

#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    len: usize,
    locked: bool,
}

// SAFETY: the memory belongs to this value alone; no thread-local state refers to it.
unsafe impl Send for Memory {}
// SAFETY: shared references give access only to transfers, which take the pointer, not the bytes.
unsafe impl Sync for Memory {}

/// Alignment of pages.
const PAGE: usize = 4096;

impl Memory {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1).next_multiple_of(PAGE), PAGE).expect("a valid size")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.locked {
            cuda::unlock(self.start);
        }
        // SAFETY: `alloc_zeroed` returned it for this layout.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) };
    }
}

impl HostBuffer {
    /// Allocates zeros.
    ///
    /// # Errors
    /// [`TransferError::OutOfMemory`], [`TransferError::Lock`].
    pub fn zeros(link: &Link, len: usize) -> Result<Self, TransferError> {
        let free = crate::HostMemory::now().map_or(u64::MAX, |memory| memory.free);
        let small = TransferError::OutOfMemory { bytes: len };
        if len as u64 > free {
            return Err(small);
        }
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(Memory::layout(len)) };
        let start = NonNull::new(start).ok_or(small)?;
        let mut memory = Memory { start, len, locked: false };
        link.lock(&mut memory)?;
        Ok(Self { memory: Arc::new(memory) })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// Returns true for a buffer without bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes; none before all transfers of the buffer are waited for.
    pub fn bytes(&mut self) -> Option<&mut [u8]> {
        let memory = Arc::get_mut(&mut self.memory)?;
        // SAFETY: the allocation has `len` initialised bytes, and no transfer or other reference exists.
        Some(unsafe { std::slice::from_raw_parts_mut(memory.start.as_ptr(), memory.len) })
    }
}

/// Streams of a device for copies in both directions.
pub struct Link {
    device: Device,
    streams: Option<cuda::Streams>,
}

impl Link {
    /// Opens the streams.
    ///
    /// # Errors
    /// [`TransferError::Failed`] if the device refuses them.
    pub fn new(device: &Device) -> Result<Self, TransferError> {
        Ok(Self {
            device: device.clone(),
            streams: match device.backend() {
                crate::Backend::Cuda => Some(cuda::Streams::new(device.ordinal())?),
                _ => None,
            },
        })
    }

    fn lock(&self, memory: &mut Memory) -> Result<(), TransferError> {
        if let Some(streams) = &self.streams {
            streams.lock(memory)?;
        }
        Ok(())
    }

    fn finished(&self) -> Result<(), TransferError> {
        block_on(self.device.client().sync()).map_err(failed)
    }

    /// Begins to copy a dense device buffer into bytes `at..` of host memory. Neither may change before [`Transfer::wait`], and no
    /// other transfer may use these bytes.
    ///
    /// # Errors
    /// [`TransferError::Failed`].
    ///
    /// # Panics
    /// If the host buffer ends before the device's does.
    #[doc(hidden)]
    pub fn save(
        &self,
        from: &Handle,
        to: &mut HostBuffer,
        at: usize,
    ) -> Result<Transfer, TransferError> {
        let len = from.size_in_used() as usize;
        assert!(at + len <= to.len(), "{at} + {len} bytes of {}", to.len());
        self.finished()?;
        if let Some(streams) = &self.streams {
            return streams.save(&self.device, from, to, at, len);
        }
        let bytes = self.device.client().read_one(from.clone()).map_err(failed)?;
        let all = to.bytes().expect("copies of this backend are complete");
        all[at..at + len].copy_from_slice(&bytes[..len]);
        Ok(Transfer::complete())
    }

    /// Begins to copy bytes `at..` of host memory into a dense device buffer. Neither may be used before [`Transfer::wait`].
    ///
    /// # Errors
    /// [`TransferError::Failed`].
    ///
    /// # Panics
    /// If the host buffer ends before the device's does.
    #[doc(hidden)]
    pub fn load(
        &self,
        from: &mut HostBuffer,
        at: usize,
        to: &Handle,
    ) -> Result<Transfer, TransferError> {
        let len = to.size_in_used() as usize;
        assert!(at + len <= from.len(), "{at} + {len} bytes of {}", from.len());
        self.finished()?;
        if let Some(streams) = &self.streams {
            return streams.load(&self.device, from, at, to, len);
        }
        let all = from.bytes().expect("copies of this backend are complete");
        let bytes = Bytes::from_bytes_vec(all[at..at + len].to_vec());
        self.device.client().write(to, bytes);
        Ok(Transfer::complete())
    }
}

/// A copy that may be under way. Dropping it waits too.
#[must_use = "the buffers may not be used before the copy is complete"]
pub struct Transfer {
    running: Option<cuda::Running>,
}

impl Transfer {
    fn complete() -> Self {
        Self { running: None }
    }

    /// Waits until the copy is complete.
    ///
    /// # Errors
    /// [`TransferError::Failed`].
    pub fn wait(self) -> Result<(), TransferError> {
        if let Some(running) = self.running {
            return running.wait();
        }
        Ok(())
    }
}
