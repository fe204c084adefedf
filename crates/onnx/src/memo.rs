//! Copies between the host and a device: counted, and kept for the next run.

use std::cell::{Cell, RefCell};

use burn::backend::DispatchDevice;
use burn::tensor::TensorData;

use crate::array::{Array, is_host};

thread_local! {
    /// Copies between host and device by this thread.
    static COPIES: Cell<usize> = const { Cell::new(0) };
}

/// Counts host-device copies of this thread. A run with copies cannot be captured.
pub(crate) fn copies() -> usize {
    COPIES.get()
}

/// Data that an operator copies to a device in each run, such as indices from constants. Unchanged data are not copied again.
#[derive(Debug, Default)]
pub(crate) struct Memo {
    slots: Vec<(TensorData, Array)>,
    at: usize,
}

/// Maximum bytes of data that are kept for the next run.
pub(crate) const MOST_KEPT: usize = 64 << 20;

thread_local! {
    static MEMO: RefCell<Option<Memo>> = const { RefCell::new(None) };
}

impl Memo {
    /// Returns the arrays that are kept.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = Array> {
        self.slots.iter().map(|(_, array)| array.clone())
    }

    /// Runs an operator with the copies of its last run.
    pub(crate) fn during<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let own = Self { slots: std::mem::take(&mut self.slots), at: 0 };
        let outer = MEMO.replace(Some(own));
        let made = run();
        if let Some(own) = MEMO.replace(outer) {
            *self = own;
        }
        made
    }

    /// Returns the next kept array, if it was copied from the same data.
    pub(crate) fn find(data: &TensorData) -> Option<Array> {
        MEMO.with_borrow_mut(|memo| {
            let memo = memo.as_mut()?;
            let found = memo.slots.get(memo.at).filter(|(own, _)| own == data)?.1.clone();
            memo.at += 1;
            Some(found)
        })
    }

    /// Keeps a copy for the next run.
    pub(crate) fn keep(data: TensorData, array: &Array) {
        MEMO.with_borrow_mut(|memo| {
            let Some(memo) = memo else { return };
            memo.slots.truncate(memo.at);
            memo.slots.push((data, array.clone()));
            memo.at += 1;
        });
    }
}

/// Counts a copy between the host and a device.
pub(crate) fn count_copy(device: &DispatchDevice) {
    if !is_host(device) {
        COPIES.set(COPIES.get() + 1);
    }
}
