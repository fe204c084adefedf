//! Copies that fill the ring of shared tiles.

use cubecl::prelude::*;

use super::MmaPlan;
use super::work::Work;
use crate::matmul::dims::Dims;
use crate::tile::{CopyLane, Start, commit_copies, next_stage, wait_copies};

/// Tensor maps of both operands for TMA; elements are words.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Maps {
    pub(crate) lhs: TensorMap<u32, Tiled>,
    pub(crate) rhs: TensorMap<u32, Tiled>,
}

/// Copies that fill the ring, item after item. `M` is what they need besides the operands.
#[cube]
pub(crate) trait Feed<M: CubeType>: CubeType {
    /// Prepares the copies of unit `unit` into the ring at `shared`.
    fn new<F: Float, NL: Size, NR: Size>(
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        more: &M,
        shared: u32,
        unit: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) -> Self;

    /// Makes item `id` the next one, if the launch has it.
    fn aim<F: Float, NL: Size, NR: Size>(
        &self,
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        more: &M,
        dims: &Dims,
        work: &Work,
        id: u32,
        #[comptime] plan: MmaPlan,
    );

    /// Switches to the next item once all tiles of the current one are in flight.
    fn take_next(&self, more: &M, #[comptime] plan: MmaPlan);

    /// Issues the copies of the next tile, if it exists; into stage `stage` if the plan fixes
    /// stages.
    fn tile(
        &self,
        more: &M,
        ring: &mut [Vector<u32, Const<4>>],
        #[comptime] stage: u32,
        #[comptime] plan: MmaPlan,
    );

    /// Marks the tiles of a stage as read by this plane.
    fn release(&self, lane: u32, #[comptime] stage: u32);

    /// Waits for the oldest tile in flight: with fixed stages for that of `stage`, otherwise also
    /// for all planes.
    fn wait(&self, #[comptime] stage: u32, #[comptime] plan: MmaPlan);
}

/// Position in both operands: addresses of this unit's first vectors of the next tile, tiles left
/// in the item, and rows, columns and depth left in the matrix.
#[derive(CubeType)]
struct Place {
    lhs: RuntimeCell<u64>,
    rhs: RuntimeCell<u64>,
    tiles: RuntimeCell<u32>,
    rows: RuntimeCell<u32>,
    cols: RuntimeCell<u32>,
    depth: RuntimeCell<u32>,
}

/// `cp.async` copies by every unit, `stages - 1` tiles ahead of the multiplies.
#[derive(CubeType)]
pub(crate) struct CopyFeed {
    at: Place,
    /// Start of the next item, computed once per item, so that tiles need no division. An item has
    /// at least `stages` tiles unless it is its cube's only one.
    next: Place,
    stage: RuntimeCell<u32>,
    shared: u32,
    start_lhs: Start,
    start_rhs: Start,
    /// Bytes between lines of the operands.
    lhs_line: u64,
    rhs_line: u64,
    lhs: CopyLane,
    rhs: CopyLane,
}

#[cube]
impl Place {
    fn nowhere() -> Place {
        Place {
            lhs: RuntimeCell::new(0u64),
            rhs: RuntimeCell::new(0u64),
            tiles: RuntimeCell::new(0u32),
            rows: RuntimeCell::new(0u32),
            cols: RuntimeCell::new(0u32),
            depth: RuntimeCell::new(0u32),
        }
    }

    fn set(&self, other: &Place) {
        self.lhs.store(other.lhs.read());
        self.rhs.store(other.rhs.read());
        self.tiles.store(other.tiles.read());
        self.rows.store(other.rows.read());
        self.cols.store(other.cols.read());
        self.depth.store(other.depth.read());
    }
}

/// Returns the address `index` elements from `start`.
#[cube]
fn element(start: u64, index: usize, #[comptime] elem: usize) -> u64 {
    start + u64::cast_from(index) * comptime!(elem as u64)
}

#[cube]
impl Feed<ComptimeOption<Maps>> for CopyFeed {
    fn new<F: Float, NL: Size, NR: Size>(
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        _maps: &ComptimeOption<Maps>,
        shared: u32,
        unit: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) -> CopyFeed {
        CopyFeed {
            at: Place::nowhere(),
            next: Place::nowhere(),
            stage: RuntimeCell::new(shared),
            shared,
            start_lhs: Start::new(lhs, 0u64.runtime(), comptime!(plan.holds())),
            start_rhs: Start::new(rhs, 0u64.runtime(), comptime!(plan.holds())),
            lhs_line: element(0u64.runtime(), dims.lhs_stride, plan.lhs.shape.elem),
            rhs_line: element(0u64.runtime(), dims.rhs_stride, plan.rhs.shape.elem),
            lhs: CopyLane::new(unit, plan.lhs),
            rhs: CopyLane::new(unit, plan.rhs),
        }
    }

    fn aim<F: Float, NL: Size, NR: Size>(
        &self,
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        _maps: &ComptimeOption<Maps>,
        dims: &Dims,
        work: &Work,
        id: u32,
        #[comptime] plan: MmaPlan,
    ) {
        if id < work.items() {
            let item = work.item(dims, id, plan.config);
            let (start_lhs, start_rhs, _) = dims.batch(item.batch as usize);
            let (row, col, k) = (item.row as usize, item.col as usize, item.k as usize);
            let lhs_at = if comptime!(plan.lhs.shape.transposed) {
                start_lhs + k * dims.lhs_stride + row
            } else {
                start_lhs + row * dims.lhs_stride + k
            };
            let rhs_at = if comptime!(plan.rhs.shape.transposed) {
                start_rhs + k * dims.rhs_stride + col
            } else {
                start_rhs + col * dims.rhs_stride + k / comptime!(plan.packing)
            };
            let elem = comptime!(plan.lhs.shape.elem);
            let lhs_at = element(self.start_lhs.address(lhs), lhs_at, elem);
            let rhs_at = element(self.start_rhs.address(rhs), rhs_at, elem);
            self.next.lhs.store(lhs_at + self.lhs.start(self.lhs_line, plan.lhs));
            self.next.rhs.store(rhs_at + self.rhs.start(self.rhs_line, plan.rhs));
            self.next.tiles.store(item.tiles);
            self.next.rows.store(item.row_end - item.row);
            self.next.cols.store(dims.n - item.col);
            self.next.depth.store(dims.k - item.k);
        }
    }

    fn take_next(&self, _maps: &ComptimeOption<Maps>, #[comptime] _plan: MmaPlan) {
        if self.at.tiles.read() == 0 {
            self.at.set(&self.next);
            self.next.tiles.store(0u32);
        }
    }

    fn tile(
        &self,
        maps: &ComptimeOption<Maps>,
        _ring: &mut [Vector<u32, Const<4>>],
        #[comptime] _stage: u32,
        #[comptime] plan: MmaPlan,
    ) {
        let at = &self.at;
        let stage = self.stage.read();
        let (left, right) = comptime!((plan.lhs.shape, plan.rhs.shape));
        if at.tiles.read() > 0 {
            let (rows, cols, depth) = (at.rows.read(), at.cols.read(), at.depth.read());
            let (lhs_rows, lhs_cols) =
                if comptime!(left.transposed) { (depth, rows) } else { (rows, depth) };
            let every = comptime!(plan.packing as u32);
            let (rhs_rows, rhs_cols) =
                if comptime!(right.transposed) { (depth, cols) } else { (cols, depth / every) };
            let to_rhs = stage + comptime!(left.bytes());
            self.lhs.copy(at.lhs.read(), self.lhs_line, stage, lhs_rows, lhs_cols, plan.lhs);
            self.rhs.copy(at.rhs.read(), self.rhs_line, to_rhs, rhs_rows, rhs_cols, plan.rhs);
            let lines = comptime!(plan.config.tile_k as u64);
            let bytes = comptime!(u64::from(plan.config.tile_k) * left.elem as u64);
            let lhs_step =
                if comptime!(left.transposed) { self.lhs_line * lines } else { bytes.runtime() };
            let rhs_bytes = comptime!(right.row_bytes() as u64);
            let rhs_step = if comptime!(right.transposed) {
                self.rhs_line * lines
            } else {
                rhs_bytes.runtime()
            };
            at.lhs.store(at.lhs.read() + lhs_step);
            at.rhs.store(at.rhs.read() + rhs_step);
            at.depth.store(depth - min(depth, plan.config.tile_k));
            at.tiles.store(at.tiles.read() - 1);
        }
        commit_copies();
        // Switch now, not when the next tile needs it: addresses that are ready let its copies
        // issue early.
        self.take_next(maps, plan);
        let end = self.shared + comptime!(plan.config.stages * plan.stage_bytes());
        self.stage.store(next_stage(stage, self.shared, end, plan.stage_bytes()));
    }

    fn release(&self, _lane: u32, #[comptime] _stage: u32) {}

    fn wait(&self, #[comptime] _stage: u32, #[comptime] plan: MmaPlan) {
        wait_copies(comptime!(plan.config.stages - 2));
        sync_cube();
    }
}
