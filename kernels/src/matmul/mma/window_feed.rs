//! Copies of windows of an image into the ring: an implicit matmul of a convolution.
//!
//! A unit copies the same columns of several rows of every lhs tile. It holds the pixel of each row at its tap, and the address of
//! its channel in the image; a copy takes one multiply-add of the two. Pixels change with the tap, once in `channels / tile_k`
//! tiles. Without a pixel, `cp.async` writes zeros and reads nothing.
//!
//! A cube computes one item, unlike in a dense matmul: its divisions come before the loop, and need no registers in it.
//!
//! Time of our matmul of equal sizes over that of the convolution, f16, 3x3 of Stable Diffusion 1.5 (H200 as RTX 4090):
//!
//! | version | batch 1 | batch 8 |
//! |---|---|---|
//! | the divisions of the next item are predicated, and issued for every tile | 0.75 to 0.88 | 0.74 to 0.97 |
//! | one item for each cube: 216 instead of 466 instructions a tile of 64 HMMA | 0.97 to 1.10 | 0.95 to 1.13 |
//!
//! At batch 8 it reaches 0.51 to 0.64 of the ceiling of `mma.sync`. Tried there, and no faster: 128 x 160 x 32 by eight planes, 128 x
//! 128 x 64 by four. CUTLASS takes 0.79 to 0.93 of our time above 8 x 8 pixels. Its tiles there take 96 KiB; an H200 has room for two
//! of them on a processor, an RTX card for one.
//!
//! Tried: tiles of k that run through all taps of some channels, with copies through the L1 cache. Frames were as fast, and two
//! instances spilled.
//!
//! Records, of one call: `conv.jsonl` and `conv.cutlass.jsonl` in `benches/baselines/cuda-sm90-132@rtx4090`.

use cubecl::prelude::*;

use super::MmaPlan;
use super::feed::{Feed, FeedExpand};
use super::work::Work;
use crate::matmul::dims::Dims;
use crate::matmul::window::{Corner, Gather, NONE, Tap};
use crate::tile::{CopyLane, Start, commit_copies, global_address, next_stage, wait_copies};

/// `cp.async` copies of windows by every unit, `stages - 1` tiles ahead of the multiplies.
#[derive(CubeType)]
pub(crate) struct WindowFeed {
    lhs: CopyLane,
    rhs: CopyLane,
    start_lhs: Start,
    start_rhs: Start,
    rhs_line: u64,
    shared: u32,
    stage: RuntimeCell<u32>,
    /// Corner of the window of each copied row, and its pixel at the tap.
    corners: Sequence<RuntimeCell<u32>>,
    pixels: Sequence<RuntimeCell<u32>>,
    tap_row: RuntimeCell<u32>,
    tap_col: RuntimeCell<u32>,
    channel: RuntimeCell<u32>,
    /// Addresses of the group's first channel in both images.
    image: RuntimeCell<u64>,
    second: RuntimeCell<u64>,
    rhs_at: RuntimeCell<u64>,
    tiles: RuntimeCell<u32>,
    cols: RuntimeCell<u32>,
    depth: RuntimeCell<u32>,
}

#[cube]
impl WindowFeed {
    /// Finds the pixels of all rows at the tap.
    fn locate<F: Float, N: Size>(&self, gather: &Gather<F, N>, #[comptime] plan: MmaPlan) {
        let tap = self.tap();
        #[unroll]
        for i in 0..comptime!(plan.lhs.copies()) {
            let image = self.corners.index(comptime!(2 * i)).read();
            let place = self.corners.index(comptime!(2 * i + 1)).read();
            self.pixels.index(i).store(gather.pixel(&Corner { image, place }, &tap));
        }
    }

    fn tap(&self) -> Tap {
        Tap { row: self.tap_row.read(), col: self.tap_col.read(), channel: self.channel.read() }
    }

    fn set_tap(&self, tap: &Tap) {
        self.tap_row.store(tap.row);
        self.tap_col.store(tap.col);
        self.channel.store(tap.channel);
    }
}

#[cube]
impl<G: Float, NG: Size> Feed<Gather<G, NG>> for WindowFeed {
    fn new<F: Float, NL: Size, NR: Size>(
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        _gather: &Gather<G, NG>,
        shared: u32,
        unit: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) -> WindowFeed {
        let mut corners = Sequence::<RuntimeCell<u32>>::new();
        let mut pixels = Sequence::<RuntimeCell<u32>>::new();
        #[unroll]
        for _ in 0..comptime!(plan.lhs.copies()) {
            corners.push(RuntimeCell::new(0u32));
            corners.push(RuntimeCell::new(0u32));
            pixels.push(RuntimeCell::new(0u32));
        }
        WindowFeed {
            lhs: CopyLane::new(unit, plan.lhs),
            rhs: CopyLane::new(unit, plan.rhs),
            start_lhs: Start::new(lhs, 0u64.runtime(), comptime!(plan.holds())),
            start_rhs: Start::new(rhs, 0u64.runtime(), comptime!(plan.holds())),
            rhs_line: u64::cast_from(dims.rhs_stride) * comptime!(plan.rhs.shape.elem as u64),
            shared,
            stage: RuntimeCell::new(shared),
            corners,
            pixels,
            tap_row: RuntimeCell::new(0u32),
            tap_col: RuntimeCell::new(0u32),
            channel: RuntimeCell::new(0u32),
            image: RuntimeCell::new(0u64),
            second: RuntimeCell::new(0u64),
            rhs_at: RuntimeCell::new(0u64),
            tiles: RuntimeCell::new(0u32),
            cols: RuntimeCell::new(0u32),
            depth: RuntimeCell::new(0u32),
        }
    }

    fn aim<F: Float, NL: Size, NR: Size>(
        &self,
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        gather: &Gather<G, NG>,
        dims: &Dims,
        work: &Work,
        id: u32,
        #[comptime] plan: MmaPlan,
    ) {
        if id < work.items() {
            let item = work.item(dims, id, plan.config);
            let (start_lhs, start_rhs, _) = dims.batch(item.batch as usize);
            let elem = comptime!(plan.lhs.shape.elem as u64);
            let rhs_at = start_rhs + item.col as usize * dims.rhs_stride + item.k as usize;
            let rhs_at = self.start_rhs.address(rhs) + u64::cast_from(rhs_at) * elem;
            self.rhs_at.store(rhs_at + self.rhs.start(self.rhs_line, plan.rhs));
            self.image.store(self.start_lhs.address(lhs) + u64::cast_from(start_lhs) * elem);
            #[comptime]
            match &gather.second {
                ComptimeOption::Some(second) => self.second.store(global_address(second)),
                ComptimeOption::None => {}
            }
            self.tiles.store(item.tiles);
            self.cols.store(dims.n - item.col);
            self.depth.store(dims.k - item.k);
            #[unroll]
            for i in 0..comptime!(plan.lhs.copies()) {
                let (_, down) = self.lhs.place(i, plan.lhs);
                let corner = gather.corner(item.row + down, item.row_end);
                self.corners.index(comptime!(2 * i)).store(corner.image);
                self.corners.index(comptime!(2 * i + 1)).store(corner.place);
            }
            let (col, _) = self.lhs.place(0usize, plan.lhs);
            self.set_tap(&gather.tap(item.k + col));
            self.locate::<G, NG>(gather, plan);
        }
    }

    fn take_next(&self, _gather: &Gather<G, NG>, #[comptime] _plan: MmaPlan) {}

    fn tile(
        &self,
        gather: &Gather<G, NG>,
        _ring: &mut [Vector<u32, Const<4>>],
        #[comptime] _stage: u32,
        #[comptime] plan: MmaPlan,
    ) {
        let stage = self.stage.read();
        let (left, right) = comptime!((plan.lhs.shape, plan.rhs.shape));
        if self.tiles.read() > 0 {
            let elem = comptime!(left.elem as u32);
            let tap = self.tap();
            let mut from = self.image.read();
            let mut pitch = gather.pitch;
            let mut channel = tap.channel;
            if comptime!(gather.joined) && channel >= gather.first {
                from = self.second.read();
                pitch = gather.second_pitch;
                channel -= gather.first;
            }
            from += u64::cast_from(channel * elem);
            let pitch = u64::cast_from(pitch * elem);
            #[unroll]
            for i in 0..comptime!(plan.lhs.copies()) {
                let pixel = self.pixels.index(i).read();
                let at = u64::cast_from(pixel) * pitch + from;
                self.lhs.copy_one(i, at, stage, pixel != NONE, plan.lhs);
            }
            let (cols, depth) = (self.cols.read(), self.depth.read());
            let to_rhs = stage + comptime!(left.bytes());
            self.rhs.copy(self.rhs_at.read(), self.rhs_line, to_rhs, cols, depth, plan.rhs);
            self.rhs_at.store(self.rhs_at.read() + comptime!(right.row_bytes() as u64));
            self.depth.store(depth - min(depth, plan.config.tile_k));
            self.tiles.store(self.tiles.read() - 1);
            let channel = tap.channel + plan.config.tile_k;
            if channel < gather.channels {
                self.channel.store(channel);
            } else {
                self.set_tap(&gather.after(&tap, plan.config.tile_k));
                self.locate::<G, NG>(gather, plan);
            }
        }
        commit_copies();
        let end = self.shared + comptime!(plan.config.stages * plan.stage_bytes());
        self.stage.store(next_stage(stage, self.shared, end, plan.stage_bytes()));
    }

    fn release(&self, _lane: u32, #[comptime] _stage: u32) {}

    fn wait(&self, #[comptime] _stage: u32, #[comptime] plan: MmaPlan) {
        wait_copies(comptime!(plan.config.stages - 2));
        sync_cube();
    }
}
