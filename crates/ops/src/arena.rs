//! Memory for results that outlive other allocations.
//!
//! A pool places results into the holes that temporaries left. Results that live from the forward to the backward pass then lie
//! apart, the holes between them fit nothing, and the pool takes a second page. An [`Arena`] keeps such results together.

use std::cell::{Cell, RefCell};

use burn::tensor::{Device, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::server::Handle;

use crate::OpError;
use crate::cube::cube;

/// Every buffer of an arena begins at a multiple of these bytes, so that all devices can bind it.
pub(crate) const ALIGNED: u64 = 512;

thread_local! {
    /// The arena that results of this thread go to.
    static OPEN: RefCell<Option<Open>> = const { RefCell::new(None) };
}

/// Memory for results, and for the scratch of kernels.
pub(crate) struct Open {
    pub(crate) buffer: Handle,
    /// First free byte.
    pub(crate) next: u64,
    pub(crate) workspace: Option<Handle>,
}

/// A buffer on a device, which results of ops share.
#[derive(Debug)]
pub struct Arena {
    buffer: Tensor<1>,
    next: Cell<u64>,
}

impl Arena {
    /// Returns the bytes of an arena for results of these bytes.
    pub fn bytes_for(results: impl IntoIterator<Item = u128>) -> u128 {
        results.into_iter().map(|bytes| bytes.next_multiple_of(ALIGNED.into())).sum()
    }

    /// Allocates at least `bytes` in a page of their own.
    pub fn new(bytes: usize, device: &Device) -> Self {
        let words = bytes.div_ceil(4);
        let on = (device, burn::tensor::DType::F32);
        let buffer =
            device.memory_persistent_allocations((), move |()| Tensor::<1>::empty([words], on));
        Self { buffer, next: Cell::new(0) }
    }

    /// Returns the bytes needed by all results, including those that did not fit.
    pub fn needed(&self) -> u64 {
        self.next.get()
    }

    /// Frees all places. No result that is still alive may be used any more.
    pub fn clear(&self) {
        self.next.set(0);
    }

    /// Runs ops whose results take places in this arena. A result that finds none is allocated as usual; see [`Arena::needed`].
    ///
    /// # Errors
    /// [`OpError::Device`] for a device without kernels.
    pub fn keep<T>(&self, run: impl FnOnce() -> T) -> Result<T, OpError> {
        let buffer = cube(self.buffer.clone())?.handle;
        let open = Open { buffer, next: self.next.get(), workspace: None };
        let (made, open) = with(Some(open), run);
        self.next.set(open.map_or(0, |open| open.next));
        Ok(made)
    }
}

/// Runs ops whose results are temporaries, which take no places in an arena.
pub fn apart<T>(run: impl FnOnce() -> T) -> T {
    with(None, run).0
}

/// Runs ops with another arena; afterwards that of before is open again.
pub(crate) fn with<T>(open: Option<Open>, run: impl FnOnce() -> T) -> (T, Option<Open>) {
    struct Restore(Option<Open>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OPEN.set(self.0.take());
        }
    }
    let restore = Restore(OPEN.replace(open));
    let made = run();
    let own = OPEN.take();
    drop(restore);
    (made, own)
}

/// Returns the open arena's scratch memory if it has `bytes`.
pub(crate) fn workspace(bytes: u64) -> Option<Handle> {
    let own = OPEN.with_borrow(|open| open.as_ref()?.workspace.clone())?;
    (own.size_in_used() >= bytes).then_some(own)
}

/// Allocates a dense result.
pub(crate) fn result(
    client: Client,
    device: CubeDevice,
    shape: Shape,
    dtype: burn::tensor::DType,
) -> CubeTensor {
    let bytes = (shape.num_elements() * dtype.size()) as u64;
    let place = OPEN.with_borrow_mut(|open| {
        let open = open.as_mut()?;
        let (from, all) = (open.next, open.buffer.size_in_used());
        open.next += bytes.next_multiple_of(ALIGNED);
        let place = || open.buffer.clone().offset_start(from).offset_end(all - from - bytes);
        (bytes > 0 && from + bytes <= all).then(place)
    });
    match place {
        None => empty_device_contiguous_dtype(client, device, shape, dtype),
        Some(handle) => CubeTensor::new_contiguous(client, device, shape, handle, dtype),
    }
}
