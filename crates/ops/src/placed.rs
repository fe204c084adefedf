//! Results of a fixed sequence of ops at fixed places in one buffer.
//!
//! A pool gives each pass other places, and a captured graph keeps all of its memory. If sizes and lifetimes are known before the
//! first pass, results that never live at once share memory. Places are found greedily, the largest result first: within a few
//! percent of the largest sum of live results in practice (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
//! Inference", 2020).

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use cubecl::server::Handle;

use crate::OpError;
use crate::arena::{ALIGNED, Open, with};
use crate::ctx::cube_of;
use crate::cube::cube;

/// Size and lifetime of a result. Time counts results: result `i` of a pass is made at `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetime {
    /// Bytes, or values.
    pub size: u128,
    /// Results that were made before it.
    pub from: usize,
    /// Results that were made before it was freed.
    pub to: usize,
}

/// Returns the first byte of each result, and the bytes of all. Results whose lifetimes overlap lie apart.
pub fn places(results: &[Lifetime]) -> (Vec<u128>, u128) {
    let size = |at: usize| results[at].size.next_multiple_of(ALIGNED.into());
    let mut order: Vec<usize> = (0..results.len()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(results[*at].size), *at));
    let mut offsets = vec![0; results.len()];
    let mut placed: Vec<usize> = Vec::new(); // By first byte.
    for at in order {
        let own = results[at];
        let at_once = |other: &usize| {
            let other = results[*other];
            own.from < other.to && other.from < own.to
        };
        let mut first = 0;
        for other in placed.iter().copied().filter(at_once) {
            if first + size(at) <= offsets[other] {
                break;
            }
            first = first.max(offsets[other] + size(other));
        }
        offsets[at] = first;
        let next = placed.partition_point(|other| offsets[*other] <= first);
        placed.insert(next, at);
    }
    let end = (0..results.len()).map(|at| offsets[at] + size(at)).max();
    (offsets, end.unwrap_or(0))
}

/// Memory of the results of a pass. Clones share it.
#[derive(Debug, Clone)]
pub struct Placed {
    buffer: Tensor<1>,
    /// Scratch memory of the kernels, which run one after the other.
    workspace: Option<Tensor<1>>,
    /// First byte and size of each result.
    places: Arc<[[u64; 2]]>,
}

impl Placed {
    /// Allocates memory for results in the order in which they are made, each in one of the `blocks`, whose sizes are in bytes; none
    /// if it is larger than the device's largest buffer. A result that is made in place has the block of the one it overwrites.
    ///
    /// # Errors
    /// [`OpError::Device`] for a device without kernels.
    pub fn new(
        blocks: &[Lifetime],
        results: &[usize],
        device: &Device,
    ) -> Result<Option<Self>, OpError> {
        let (offsets, bytes) = places(blocks);
        let largest = cube_of(device)?.client().properties().memory.max_page_size;
        if bytes > largest.into() {
            return Ok(None);
        }
        let place = |block: &usize| [offsets[*block] as u64, blocks[*block].size as u64];
        let places = results.iter().map(place).collect();
        Ok(Some(Self { buffer: allocated(bytes as usize, device), workspace: None, places }))
    }

    /// Allocates scratch memory of `bytes` for all kernels of a pass. A kernel that needs more allocates its own.
    pub fn set_workspace(&mut self, bytes: u64, device: &Device) {
        self.workspace = (bytes > 0).then(|| allocated(bytes as usize, device));
    }

    /// Begins a pass.
    ///
    /// # Errors
    /// [`OpError::Device`] for a device without kernels.
    pub fn pass(&self) -> Result<Pass, OpError> {
        self.pass_from(0)
    }

    /// Begins a pass at a later result.
    ///
    /// # Errors
    /// The errors of [`Placed::pass`].
    pub fn pass_from(&self, first: usize) -> Result<Pass, OpError> {
        let handle = |tensor: &Tensor<1>| cube(tensor.clone()).map(|tensor| tensor.handle);
        let workspace = self.workspace.as_ref().map(handle).transpose()?;
        let (buffer, places) = (handle(&self.buffer)?, self.places.clone());
        Ok(Pass { buffer, workspace, places, next: Cell::new(first) })
    }
}

/// Returns a buffer in memory of its own.
fn allocated(bytes: usize, device: &Device) -> Tensor<1> {
    let on = (device, DType::F32);
    let words = bytes.div_ceil(4).max(1);
    device.memory_persistent_allocations((), move |()| Tensor::<1>::empty([words], on))
}

/// One pass through the places.
#[derive(Debug, Clone)]
pub struct Pass {
    buffer: Handle,
    workspace: Option<Handle>,
    places: Arc<[[u64; 2]]>,
    next: Cell<usize>,
}

impl Pass {
    /// Runs an op whose result takes the next place. A result that is larger is allocated as usual.
    pub fn place<T>(&self, run: impl FnOnce() -> T) -> T {
        let Some([from, bytes]) = self.places.get(self.next.get()).copied() else { return run() };
        self.skip();
        let all = self.buffer.size_in_used();
        let buffer = self.buffer.clone().offset_start(from).offset_end(all - from - bytes);
        let open = Open { buffer, next: 0, workspace: self.workspace.clone() };
        with(Some(open), run).0
    }

    /// Leaves a place empty, for a result that is allocated elsewhere.
    pub fn skip(&self) {
        self.next.set(self.next.get() + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_live_at_once_lie_apart() {
        // A chain in which each result is freed once the next one is made, next to one that lives throughout.
        let chain = (1..20).map(|i| Lifetime {
            size: 1024 * (1 + i % 3),
            from: i as usize,
            to: i as usize + 2,
        });
        let long = Lifetime { size: 4096, from: 0, to: 21 };
        let results: Vec<_> = [long].into_iter().chain(chain).collect();
        let (offsets, bytes) = places(&results);
        for (i, a) in results.iter().enumerate() {
            assert!(offsets[i] + a.size <= bytes && offsets[i] % 512 == 0);
            for (j, b) in results.iter().enumerate().skip(i + 1) {
                let at_once = a.from < b.to && b.from < a.to;
                let apart = offsets[i] + a.size <= offsets[j] || offsets[j] + b.size <= offsets[i];
                assert!(apart || !at_once, "{i} and {j}");
            }
        }
        // At most 9 KiB live at once.
        assert_eq!(bytes, 4096 + 1024 + 2048 + 3072);
        assert_eq!(places(&[]), (Vec::new(), 0));
    }

    #[test]
    fn a_hole_between_neighbours_is_used() {
        let result = |size, from, to| Lifetime { size, from, to };
        // 0 and 2 live throughout; 1 is freed before 3 is made.
        let (offsets, bytes) = places(&[
            result(2048, 0, 9),
            result(1024, 1, 3),
            result(1536, 2, 9),
            result(512, 3, 9),
        ]);
        assert_eq!(bytes, 2048 + 1536 + 1024);
        assert_eq!(offsets[3], offsets[1]);
    }
}
