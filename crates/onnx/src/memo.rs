//! Copies between the host and a device: counted, and kept for the next run.

use std::cell::{Cell, RefCell};

use burn::backend::DispatchDevice;
use burn::tensor::TensorData;

use crate::array::{Array, is_host};

thread_local! {
    /// Copies between the host and a device, of this thread.
    static COPIES: Cell<usize> = const { Cell::new(0) };
}

/// Returns the number of copies between the host and a device that this thread made so far. Work with copies cannot be captured.
pub(crate) fn copies() -> usize {
    COPIES.get()
}

/// Data that an operator copies to a device in each run, such as places that follow from a constant. What did not change is not
/// copied again.
#[derive(Debug, Default)]
pub(crate) struct Memo {
    slots: Vec<(TensorData, Array)>,
    at: usize,
}

/// Most bytes that are kept for another run.
pub(crate) const MOST_KEPT: usize = 64 << 20;

thread_local! {
    static MEMO: RefCell<Option<Memo>> = const { RefCell::new(None) };
}

impl Memo {
    /// Returns what is kept.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = Array> {
        self.slots.iter().map(|(_, array)| array.clone())
    }

    /// Runs an operator with what its last run copied.
    pub(crate) fn during<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let own = Self { slots: std::mem::take(&mut self.slots), at: 0 };
        let outer = MEMO.replace(Some(own));
        let made = run();
        if let Some(own) = MEMO.replace(outer) {
            *self = own;
        }
        made
    }

    /// Returns what was copied before at this place, if it was the same.
    pub(crate) fn find(data: &TensorData) -> Option<Array> {
        MEMO.with_borrow_mut(|memo| {
            let memo = memo.as_mut()?;
            let found = memo.slots.get(memo.at).filter(|(own, _)| own == data)?.1.clone();
            memo.at += 1;
            Some(found)
        })
    }

    /// Keeps what was copied.
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
