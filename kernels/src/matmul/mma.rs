//! The tensor-core path of CUDA: `mma.sync` fed by `ldmatrix` from a ring of `cp.async` stages.
//!
//! | loop                              | level                                                  |
//! |-----------------------------------|--------------------------------------------------------|
//! | items: `(tile_m, tile_n)` blocks, each cut into `parts` along k | cubes, one row of them for the whole launch |
//! | `k0` in steps of `tile_k`         | ring of `stages` shared tiles, `stages - 1` ahead      |
//! | `(plane_m, plane_n)` parts        | planes, accumulators in registers                      |
//! | `kk` in steps of the instruction  | fragments in registers, one step ahead                 |
//!
//! A cube works through its items as one stream: while it multiplies the last tiles of one block, the
//! copies of the next are under way. With more than one part, partial sums go to a workspace in f32 and
//! [`super::parts`] adds them in a fixed order.
//!
//! Ladder, TFLOP/s at 4096^3 bf16, B column-major / row-major, on an H200 restricted to an RTX 4090's
//! features (620 from registers alone; Burn 0.22.1 in the same run 268 / 214):
//!
//! | version                                                            | col | row |
//! |--------------------------------------------------------------------|-----|-----|
//! | v1 ring of 3 stages, 128 x 128 x 32, four planes of 64 x 64        | 381 | 376 |
//! | v2 v1, fragments loaded one step ahead of the multiply (dropped)   | 370 | 336 |
//! | v3 v1, addresses in vectors, fragments at constant distances       | 369 | 390 |
//! | v4 fragments one step ahead, 128 x 256 x 32, eight planes, streams | 413 | 411 |
//! | v5 v4, addresses in bytes: 128 instructions a tile, 64 of them HMMA | 492 | 490 |
//!
//! What v2 lacked were cheap addresses: its loads ahead waited behind the arithmetic for them, and so
//! did v4's (a warp spent one cycle in six waiting for `ldmatrix`, in v5 next to none). In v5 the tensor
//! pipe is the first stall, then the barrier (0.43 of 6.4 cycles an instruction) and the copies (0.41). The
//! card is at its power limit: 1.98 GHz when idle, 1.6 to 1.75 under this load. v4 and v5 were timed for
//! 25 ms; over the 100 ms of the records v5 reaches 470 / 466 on one card and 488 / 481 on another, and at 8192^3 446 / 451
//! and 450 / 474 where the first 25 ms give 516 / 517: what is left there is energy a multiply, not time.
//!
//! Tried and slower at the same tile (CUDA C++ prototypes of v5, 467 at 4096^3 before streaming):
//! `mbarrier` full/empty pairs for the barrier 418; 256 x 192 x 32 with planes of 64 x 96, which has no
//! registers left to load ahead, 404; two stages of 64 for four of 32, 375; groups of 4 or 16 block rows
//! for 8, 454 and 423 (of v5 at 8192^3, bf16 and tf32, groups of 4, 12, 16 and 24 are within 2% of 8); copies through the
//! first-level cache 393. Without copies the loop reaches 517,
//! without fragment loads 540. Nor do whole waves pay: 128 x 224 x 32 (planes of 64 x 56) cuts 512 x 14336 x 4096 into
//! 256 blocks for 132 processors where 128 x 256 makes 224, and takes 145 us for 144, most likely because blocks of a last
//! wave find a card that is not at its power limit; at 4096^3 it reaches 405 for 491.

use arch::ArchProfile;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::bulk::Bulk;
use super::bytes::{Rounded, Worth, decode, half_chunk_lane, load_half_chunks};
use super::dims::{Dims, block_of};
use super::epilogue::{Columns, Finish};
use super::problem::{Layout, Precision};
use crate::tile::{
    CopyLane, CopyPlan, LHS_REGISTERS, RHS_REGISTERS, Start, TileShape, commit_copies,
    gather_fragments, gather_lane, lhs_lane, load_fragments, multiply_bytes, multiply_halves,
    next_stage, quad_transpose, rhs_lane, shared_address, typed, wait_copies,
};

/// Tile sizes of the tensor-core path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MmaConfig {
    /// Rows, columns and depth of a cube's tile.
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Grid of planes that share the tile.
    pub planes_m: u32,
    pub planes_n: u32,
    /// Shared tiles in the ring.
    pub stages: u32,
    /// Parts that k is cut into, each the work of another cube.
    pub parts: u32,
}

impl MmaConfig {
    pub(crate) const fn units(self) -> u32 {
        32 * self.planes_m * self.planes_n
    }

    /// Rows and columns of one plane's part.
    pub(crate) const fn plane_tile(self) -> (u32, u32) {
        (self.tile_m / self.planes_m, self.tile_n / self.planes_n)
    }

    /// The shared tile of the left operand, elements of `elem` bytes.
    pub(crate) const fn lhs_tile(self, layout: Layout, elem: usize) -> TileShape {
        TileShape::new(self.tile_m, self.tile_k, matches!(layout, Layout::Col), elem)
    }

    /// The shared tile of the right operand.
    pub(crate) const fn rhs_tile(self, layout: Layout, elem: usize) -> TileShape {
        TileShape::new(self.tile_n, self.tile_k, matches!(layout, Layout::Row), elem)
    }

    pub(crate) const fn shared_bytes(self, elem: usize) -> u32 {
        self.stages * (self.tile_m + self.tile_n) * self.tile_k * elem as u32
    }

    /// Registers of a unit, roughly: accumulators of `sum` bytes, two steps of fragments, addresses.
    pub(crate) const fn registers(self, sum: usize) -> u32 {
        let (m, n) = self.plane_tile();
        m * n * sum as u32 / 128 + (m + n) / 2 + 56
    }

    /// Cubes that one processor holds at a time.
    pub(crate) fn resident(self, arch: &ArchProfile, precision: Precision) -> u32 {
        const REGISTERS: u32 = 65_536;
        const RESERVED: u32 = 1024; // shared memory that the driver keeps, a cube
        let by_registers = REGISTERS / (self.registers(precision.sums().size()) * self.units());
        let shared = self.shared_bytes(precision.storage().size());
        let by_shared = (arch.max_shared_bytes + RESERVED) / (shared + RESERVED);
        by_registers.min(by_shared).max(1)
    }

    /// Whether a cube may take one item after another: the copies look one item ahead, no further.
    pub(crate) const fn streams(self, k: u32) -> bool {
        let last = k.div_ceil(self.tile_k) - (self.parts - 1) * self.part_tiles(k);
        last >= self.stages
    }

    /// Tiles of k in each part but the last.
    pub(crate) const fn part_tiles(self, k: u32) -> u32 {
        k.div_ceil(self.tile_k).div_ceil(self.parts)
    }
}

/// Which operands are bytes, two in an element: see [`super::bytes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Codes {
    Neither,
    /// The right one, which becomes halves, those of bf16 or of f16, on its way to the instruction.
    Right {
        bf16: bool,
    },
    /// Both, and sums are i32 until an item is done. Columns may be left out of them.
    Both {
        outlying: bool,
    },
}

/// Comptime facts of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MmaPlan {
    /// With one part, so that instances differ by `partial` alone.
    pub(crate) config: MmaConfig,
    pub(crate) lhs: CopyPlan,
    pub(crate) rhs: CopyPlan,
    /// Depth of the instruction.
    pub(crate) inst_k: u32,
    /// Tiles come by [`bulk`](super::bulk) copies.
    pub(crate) bulk: bool,
    /// Every tile is full: no edge is checked.
    pub(crate) exact: bool,
    /// Sums go to the workspace.
    pub(crate) partial: bool,
    /// Sums are f16.
    pub(crate) half_sums: bool,
    pub(crate) codes: Codes,
    /// f32 operands are rounded to tf32 by one instruction (compute capability 9.0 and later).
    pub(crate) rounds_tf32: bool,
}

impl MmaPlan {
    /// Whether codes become halves.
    const fn decodes(self) -> bool {
        matches!(self.codes, Codes::Right { .. })
    }

    /// Whether codes are multiplied.
    const fn bytes(self) -> bool {
        matches!(self.codes, Codes::Both { .. })
    }

    /// Elements of the left operand's k to one of the right operand's, which may be two codes.
    const fn rhs_every(self) -> usize {
        if self.decodes() { 2 } else { 1 }
    }

    /// Tiles that are on their way while one is multiplied. Bulk copies go into a stage that was read a tile before, where
    /// there are stages enough, so that nobody waits for the slowest plane.
    const fn ahead(self) -> u32 {
        let stages = self.config.stages;
        if self.bulk && stages > 3 { stages - 2 } else { stages - 1 }
    }

    /// Whether the addresses of the operands stay in registers.
    const fn holds(self) -> bool {
        self.config.tile_m > 16
    }

    pub(crate) const fn stage_bytes(self) -> u32 {
        self.lhs.shape.bytes() + self.rhs.shape.bytes()
    }
}

impl TileShape {
    /// How many places the fragments of `outer` rows or columns need.
    fn lanes(self, outer: u32) -> u32 {
        match (self.gathered(), self.transposed) {
            (true, _) => (outer / 8).min(4),
            (false, true) => outer / 16,
            (false, false) => 1,
        }
    }
}

/// One piece of work: a block of C over a range of k.
#[derive(CubeType)]
pub(crate) struct Item {
    pub(crate) row: u32,
    pub(crate) col: u32,
    /// The first row past those of the batch.
    row_end: u32,
    /// First k, and tiles from there.
    pub(crate) k: u32,
    pub(crate) tiles: u32,
    batch: u32,
    part: u32,
}

/// What there is to do: blocks in each product, and products. Groups are one product, whose block rows
/// are theirs one after the other.
#[derive(CubeType)]
pub(crate) struct Work {
    rows: u32,
    cols: u32,
    slices: u32,
}

#[cube]
impl Work {
    fn of(dims: &Dims, #[comptime] config: MmaConfig) -> Work {
        let mut rows = dims.m.div_ceil(config.tile_m);
        let mut slices = dims.parts * dims.batches;
        if comptime!(dims.grouped) {
            rows = 0u32.runtime();
            slices = 1u32.runtime();
            for group in 0..dims.batches {
                rows += block_rows(dims, group, config);
            }
        }
        Work { rows, cols: dims.n.div_ceil(config.tile_n), slices }
    }

    pub(crate) fn items(&self) -> u32 {
        self.rows * self.cols * self.slices
    }

    /// Item `id`. Neighbouring items are neighbouring blocks over the same k.
    pub(crate) fn item(&self, dims: &Dims, id: u32, #[comptime] config: MmaConfig) -> Item {
        let (tile_m, tile_n, tile_k) = comptime!((config.tile_m, config.tile_n, config.tile_k));
        let blocks = self.rows * self.cols;
        let (slice, block) = (id / blocks, id % blocks);
        let (block_m, block_n) = block_of(self.rows, self.cols, block);
        let (mut block_m, mut batch) = (block_m, slice / dims.parts);
        if comptime!(dims.grouped) {
            // There is such a group, because the block is one of those that were counted.
            let mut here = block_rows(dims, batch, config);
            while block_m >= here {
                block_m -= here;
                batch += 1;
                here = block_rows(dims, batch, config);
            }
        }
        let part = slice % dims.parts;
        let first = part * dims.part_tiles;
        let tiles = min(dims.k.div_ceil(tile_k) - first, dims.part_tiles);
        let (row0, row_end) = dims.rows(batch);
        let (row, col) = (row0 + block_m * tile_m, block_n * tile_n);
        Item { row, col, row_end, k: first * tile_k, tiles, batch, part }
    }
}

/// Block rows of group `group`.
#[cube]
fn block_rows(dims: &Dims, group: u32, #[comptime] config: MmaConfig) -> u32 {
    let (first, end) = dims.rows(group);
    (max(first, end) - first).div_ceil(config.tile_m)
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(crate) fn multiply<F: Float, I: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    bulk: ComptimeOption<Bulk>,
    finish: &Finish<F, E, NO>,
    worth: &ComptimeOption<Worth<F>>,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let config = comptime!(plan.config);
    let stages = comptime!(config.stages);
    let (wm, wn) = comptime!(config.plane_tile());
    let (frags_m, frags_n) = comptime!((wm as usize / 16, wn as usize / 16));
    let steps = comptime!((config.tile_k / plan.inst_k) as usize);
    let every = comptime!(plan.rhs_every());
    let around = comptime!(if plan.bulk { stages as usize } else { 1 });

    // [stages, lhs tile then rhs tile]
    let mut ring = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((stages * plan.stage_bytes() / 16) as usize),
        comptime!(if plan.bulk { 1024usize } else { 128 }),
    );
    let shared = shared_address(&mut ring);

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let part_m = plane / config.planes_n * wm;
    let part_n = plane % config.planes_n * wn;
    let lanes = Lanes::new(part_m, part_n, lane, plan);

    let def = MmaDefinition::<I, I, f32>::new(16usize, 8usize, plan.inst_k as usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = Sums::<NC>::new(comptime!(frags_m * frags_n * 2), plan); // [wm / 16, wn / 8]
    acc.clear(comptime!(frags_m * frags_n * 2), plan);
    // Register sets of the step at hand and of the next: [2, frags] each, two right fragments in one.
    // Whole words: as vectors of halves they would be taken apart between the turns of the loop.
    let mut a = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime!(2 * frags_m) {
        a.push(Array::<u32>::new(4usize));
    }
    let mut b = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime!(2 * frags_n) {
        b.push(Array::<u32>::new(4usize));
    }
    let mut decoded = Array::<u32>::new(comptime!(if plan.decodes() { 4 * frags_n } else { 1 }));

    let copies = Copies::new(lhs, rhs, shared, plane * 32 + lane, dims, plan);
    let feed = Feed { copies, bulk };
    let work = Work::of(dims, config);
    feed.aim(lhs, rhs, dims, &work, CUBE_POS_X, plan);
    feed.take_next();
    #[unroll]
    for stage in 0..comptime!(plan.ahead()) {
        feed.tile(&mut ring, stage, plan);
    }
    feed.wait(0u32, plan);
    let mut read = shared;
    let end = shared + comptime!(stages * plan.stage_bytes());
    lanes.load_lhs::<I>(read, &mut a, 0u32, 0usize, plan);
    lanes.load_rhs::<I>(read, &mut b, 0u32, 0usize, plan);

    let items = work.items();
    let mut id = CUBE_POS_X;
    while id < items {
        let now = work.item(dims, id, config);
        feed.aim(lhs, rhs, dims, &work, id + CUBE_COUNT_X, plan);
        let rounds = if comptime!(plan.bulk) { now.tiles / stages } else { now.tiles };
        for _ in 0..rounds {
            #[unroll]
            for turn in 0..comptime!(around * steps) {
                // Where stages are known, the one that is multiplied is `here`.
                let (here, step) = comptime!(((turn / steps) as u32, turn % steps));
                let (set, into) = comptime!((step % 2, (step + 1) % 2));
                let next = comptime!((step + 1) % steps);
                let (rhs_set, rhs_into) = comptime!((step / every % 2, (next / every) % 2));
                if comptime!(step == steps - 1) {
                    let ready = comptime!((here + 1) % stages);
                    feed.release(lane, here);
                    feed.wait(ready, plan);
                    if comptime!(plan.bulk) {
                        read = shared + comptime!(ready * plan.stage_bytes());
                    } else {
                        read = next_stage(read, shared, end, plan.stage_bytes());
                    }
                }
                lanes.load_lhs::<I>(read, &mut a, comptime!(next as u32), into, plan);
                if comptime!(next % every == 0) {
                    let next = comptime!((next / every) as u32);
                    lanes.load_rhs::<I>(read, &mut b, next, rhs_into, plan);
                }
                if comptime!(step == 0) {
                    feed.tile(&mut ring, comptime!((here + plan.ahead()) % stages), plan);
                }
                if comptime!(plan.decodes()) {
                    #[unroll]
                    for j in 0..comptime!(2 * frags_n) {
                        let pair = b.index(comptime!(rhs_set * frags_n + j / 2));
                        let word = pair[comptime!(j % 2 * 2 + step % 2)];
                        decode(word, &mut decoded, comptime!(2 * j), plan.codes);
                    }
                }
                // Back and forth over the columns: neighbouring multiplies share a register.
                #[unroll]
                for i in 0..frags_m {
                    let left = a.index(comptime!(set * frags_m + i));
                    #[unroll]
                    for x in 0..comptime!(2 * frags_n) {
                        let j = comptime!(if i % 2 == 1 { 2 * frags_n - 1 - x } else { x });
                        let pair = b.index(comptime!(rhs_set * frags_n + j / 2));
                        let at = comptime!(i * frags_n * 2 + j);
                        if comptime!(plan.half_sums) {
                            multiply_halves(
                                left,
                                pair,
                                comptime!(j % 2 * 2),
                                acc.halves.index_mut(at),
                            );
                        } else if comptime!(plan.bytes()) {
                            let sums = acc.bytes.index_mut(at);
                            multiply_bytes(left, pair, comptime!(j % 2 * 2), sums);
                        } else if comptime!(plan.decodes()) {
                            let left = typed::<I, NF>(left, 0usize, 4usize);
                            let right = typed::<I, NF>(&decoded, comptime!(2 * j), 2usize);
                            def.execute_inplace(&left, &right, acc.words.index_mut(at));
                        } else {
                            let left = typed::<I, NF>(left, 0usize, 4usize);
                            let right = typed::<I, NF>(pair, comptime!(j % 2 * 2), 2usize);
                            def.execute_inplace(&left, &right, acc.words.index_mut(at));
                        }
                    }
                }
            }
        }
        let (row, col) = (now.row + part_m, now.col + part_n);
        #[comptime]
        match worth {
            ComptimeOption::Some(worth) => {
                let first = now.part == 0;
                acc.weigh::<F>(worth, row, col, lane, first, dims, plan)
            }
            ComptimeOption::None => {}
        }
        if comptime!(plan.partial) {
            let matrix = dims.m as usize * dims.n as usize;
            let start = (now.part * dims.batches + now.batch) as usize * matrix;
            store_sums::<NC, NP>(partials, &acc, start, row, col, lane, dims, plan);
        } else {
            store::<F, E, NC, NO>(out, finish, &acc, &now, row, col, lane, dims, plan);
        }
        acc.clear(comptime!(frags_m * frags_n * 2), plan);
        id += CUBE_COUNT_X;
    }
}

/// What fills the ring: the copies of every unit, or bulk ones.
#[derive(CubeType)]
struct Feed {
    copies: Copies,
    bulk: ComptimeOption<Bulk>,
}

#[cube]
impl Feed {
    fn aim<F: Float, NL: Size, NR: Size>(
        &self,
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        dims: &Dims,
        work: &Work,
        id: u32,
        #[comptime] plan: MmaPlan,
    ) {
        #[comptime]
        match &self.bulk {
            ComptimeOption::Some(bulk) => bulk.aim(dims, work, id, plan),
            ComptimeOption::None => self.copies.aim(lhs, rhs, dims, work, id, plan),
        }
    }

    fn take_next(&self) {
        #[comptime]
        match &self.bulk {
            ComptimeOption::Some(bulk) => bulk.take_next(),
            ComptimeOption::None => self.copies.take_next(),
        }
    }

    /// Sends for the next tile; it comes to `stage` where stages are known.
    fn tile(
        &self,
        ring: &mut [Vector<u32, Const<4>>],
        #[comptime] stage: u32,
        #[comptime] plan: MmaPlan,
    ) {
        #[comptime]
        match &self.bulk {
            ComptimeOption::Some(bulk) => bulk.tile(ring, stage, plan),
            ComptimeOption::None => self.copies.tile(plan),
        }
    }

    /// Says, where stages are known, that this plane has read the tiles of one.
    fn release(&self, lane: u32, #[comptime] stage: u32) {
        #[comptime]
        match &self.bulk {
            ComptimeOption::Some(bulk) => bulk.release(lane, stage),
            ComptimeOption::None => {}
        }
    }

    /// Waits for the oldest tile that was sent for: that of `stage` where stages are known, else also for all planes.
    fn wait(&self, #[comptime] stage: u32, #[comptime] plan: MmaPlan) {
        #[comptime]
        match &self.bulk {
            ComptimeOption::Some(bulk) => bulk.wait(stage),
            ComptimeOption::None => {
                wait_copies(comptime!(plan.config.stages - 2));
                sync_cube();
            }
        }
    }
}

/// A plane's accumulators, fragment by fragment; of each a unit holds two pairs of neighbouring columns,
/// eight rows apart. Two of the three sequences are empty.
#[derive(CubeType)]
struct Sums<NC: Size> {
    words: Sequence<Array<Vector<f32, NC>>>,
    /// Two f16 in a word.
    halves: Sequence<Array<u32>>,
    /// i32 in words; f32 once they are weighed.
    bytes: Sequence<Array<u32>>,
}

#[cube]
impl<NC: Size> Sums<NC> {
    fn new(#[comptime] fragments: usize, #[comptime] plan: MmaPlan) -> Sums<NC> {
        let mut words = Sequence::<Array<Vector<f32, NC>>>::new();
        let mut halves = Sequence::<Array<u32>>::new();
        let mut bytes = Sequence::<Array<u32>>::new();
        #[unroll]
        for _ in 0..fragments {
            if comptime!(plan.half_sums) {
                halves.push(Array::<u32>::new(2usize));
            } else if comptime!(plan.bytes()) {
                bytes.push(Array::<u32>::new(4usize));
            } else {
                words.push(Array::<Vector<f32, NC>>::new(2usize));
            }
        }
        Sums::<NC> { words, halves, bytes }
    }

    fn clear(&mut self, #[comptime] fragments: usize, #[comptime] plan: MmaPlan) {
        #[unroll]
        for i in 0..fragments {
            #[unroll]
            for half in 0..2usize {
                if comptime!(plan.half_sums) {
                    self.halves.index_mut(i)[half] = 0u32;
                } else if comptime!(plan.bytes()) {
                    self.bytes.index_mut(i)[comptime!(2 * half)] = 0u32;
                    self.bytes.index_mut(i)[comptime!(2 * half + 1)] = 0u32;
                } else {
                    self.words.index_mut(i)[half] = Vector::new(0.0f32);
                }
            }
        }
    }

    /// The pair of rows 0 to 7 (`half` 0) or 8 to 15 of a fragment.
    fn pair(
        &self,
        #[comptime] fragment: usize,
        #[comptime] half: usize,
        #[comptime] plan: MmaPlan,
    ) -> Vector<f32, NC> {
        if comptime!(plan.half_sums) {
            let word = self.halves.index(fragment)[half];
            Vector::cast_from(Vector::<half::f16, NC>::reinterpret(word))
        } else if comptime!(plan.bytes()) {
            let words = self.bytes.index(fragment);
            let mut pair = Vector::<f32, NC>::new(0.0f32);
            pair.insert(0usize, f32::reinterpret(words[comptime!(2 * half)]));
            pair.insert(1usize, f32::reinterpret(words[comptime!(2 * half + 1)]));
            pair
        } else {
            self.words.index(fragment)[half]
        }
    }

    /// Makes sums of codes what they are worth, of a plane's part that begins at `row` and `col`; where they are the
    /// `first` part of k, with the columns that were left out.
    #[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
    fn weigh<F: Float>(
        &mut self,
        worth: &Worth<F>,
        row: u32,
        col: u32,
        lane: u32,
        first: bool,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) {
        let (wm, wn) = comptime!(plan.config.plane_tile());
        let (rows, cols) = comptime!((wm as usize / 8, wn as usize / 4));
        // Past the edge the last ones are repeated, and never stored.
        let mut own_cols = Array::<u32>::new(cols);
        let mut units = Array::<f32>::new(cols);
        #[unroll]
        for j in 0..cols {
            let near = comptime!((8 * (j / 2) + j % 2) as u32);
            own_cols[j] = min(col + near + lane % 4 * 2, dims.n - 1);
            units[j] = worth.scb[own_cols[j] as usize] * comptime!(1.0f32 / 127.0);
        }
        #[comptime]
        match &worth.rounded {
            ComptimeOption::Some(rounded) => {
                self.weigh_bytes::<F>(rounded, row, lane, &own_cols, &units, first, dims, plan)
            }
            ComptimeOption::None =>
            {
                #[unroll]
                for i in 0..rows {
                    #[unroll]
                    for j in 0..comptime!(cols / 2) {
                        let mut pair = Vector::<f32, NC>::new(0.0f32);
                        pair.insert(0usize, units[comptime!(2 * j)]);
                        pair.insert(1usize, units[comptime!(2 * j + 1)]);
                        let sums = self.words.index_mut(comptime!(i / 2 * (cols / 2) + j));
                        sums[comptime!(i % 2)] *= pair;
                    }
                }
            }
        }
    }

    /// [`Sums::weigh`] where rows were rounded, too; `units` are those of the columns `own_cols`.
    #[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
    fn weigh_bytes<F: Float>(
        &mut self,
        rounded: &Rounded<F>,
        row: u32,
        lane: u32,
        own_cols: &Array<u32>,
        units: &Array<f32>,
        first: bool,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) {
        let (wm, wn) = comptime!(plan.config.plane_tile());
        let (rows, cols) = comptime!((wm as usize / 8, wn as usize / 4));
        let mut own_rows = Array::<u32>::new(rows);
        let mut scales = Array::<f32>::new(rows);
        #[unroll]
        for i in 0..rows {
            own_rows[i] = min(row + comptime!(8 * i as u32) + lane / 4, dims.m - 1);
            scales[i] = rounded.scales[own_rows[i] as usize];
        }
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for j in 0..cols {
                let sums = self.bytes.index_mut(comptime!(i / 2 * (cols / 2) + j / 2));
                let at = comptime!(i % 2 * 2 + j % 2);
                let sum = f32::cast_from(i32::reinterpret(sums[at]));
                sums[at] = u32::reinterpret(sum * scales[i] * units[j]);
            }
        }
        if comptime!(plan.codes == Codes::Both { outlying: true }) {
            let count = select(first, rounded.outliers[0], 0u32);
            let k = dims.k as usize * 2;
            for o in 0..count {
                let column = rounded.outliers[o as usize + 1] as usize;
                let mut left = Array::<f32>::new(rows);
                #[unroll]
                for i in 0..rows {
                    left[i] = f32::cast_from(rounded.x[own_rows[i] as usize * k + column]);
                }
                #[unroll]
                for j in 0..cols {
                    let at = own_cols[j] as usize * k + column;
                    let byte = rounded.words[at / 4] << ((3 - at % 4) as u32 * 8);
                    let right = f32::cast_from(i32::reinterpret(byte) >> 24) * units[j];
                    #[unroll]
                    for i in 0..rows {
                        let sums = self.bytes.index_mut(comptime!(i / 2 * (cols / 2) + j / 2));
                        let at = comptime!(i % 2 * 2 + j % 2);
                        sums[at] =
                            u32::reinterpret(fma(left[i], right, f32::reinterpret(sums[at])));
                    }
                }
            }
        }
    }
}

/// Where a unit's fragments lie in the shared tiles: one place, from which fragments are at constant
/// distances along the outer axis and one XOR away along k; or one place a fragment where k is the
/// tile's row, and constant distances along k.
#[derive(CubeType)]
struct Lanes {
    lhs: Sequence<u32>,
    rhs: Sequence<u32>,
}

#[cube]
impl Lanes {
    fn new(part_m: u32, part_n: u32, lane: u32, #[comptime] plan: MmaPlan) -> Lanes {
        let (wm, wn) = comptime!(plan.config.plane_tile());
        let (left, right) = comptime!((plan.lhs.shape, plan.rhs.shape));
        let mut lhs = Sequence::<u32>::new();
        #[unroll]
        for x in 0..comptime!(left.lanes(wm)) {
            if comptime!(left.halved) {
                lhs.push(half_chunk_lane(part_m, lane, left));
            } else if comptime!(left.gathered()) {
                lhs.push(gather_lane(part_m + comptime!(8 * x), lane, left));
            } else {
                lhs.push(lhs_lane(part_m + comptime!(16 * x), lane, left));
            }
        }
        let mut rhs = Sequence::<u32>::new();
        #[unroll]
        for x in 0..comptime!(right.lanes(wn)) {
            if comptime!(right.gathered()) {
                rhs.push(gather_lane(part_n + comptime!(8 * x), lane, right));
            } else {
                rhs.push(rhs_lane(part_n + comptime!(16 * x), lane, right));
            }
        }
        Lanes { lhs, rhs }
    }

    /// The left fragments of one step of k, from the stage at `read` into register set `set`.
    fn load_lhs<I: Float>(
        &self,
        read: u32,
        a: &mut Sequence<Array<u32>>,
        #[comptime] step: u32,
        #[comptime] set: usize,
        #[comptime] plan: MmaPlan,
    ) {
        let frags = comptime!(plan.config.plane_tile().0 as usize / 16);
        #[unroll]
        for i in 0..frags {
            let into = a.index_mut(comptime!(set * frags + i));
            let (row, k) = comptime!((16 * i as u32, step * plan.inst_k));
            let shape = comptime!(plan.lhs.shape);
            if comptime!(shape.halved) {
                let lane = *self.lhs.index(0usize) ^ comptime!(k * shape.elem as u32);
                load_half_chunks(read + lane, into, comptime!(row * shape.row_bytes()), shape);
            } else {
                let at = comptime!((row, k));
                load::<I>(read, &self.lhs, into, at, shape, plan.rounds_tf32, LHS_REGISTERS);
            }
        }
    }

    /// The right fragments of one step of k, two to a register group; see [`Lanes::load_lhs`].
    fn load_rhs<I: Float>(
        &self,
        read: u32,
        b: &mut Sequence<Array<u32>>,
        #[comptime] step: u32,
        #[comptime] set: usize,
        #[comptime] plan: MmaPlan,
    ) {
        let frags = comptime!(plan.config.plane_tile().1 as usize / 16);
        let tile = read + comptime!(plan.lhs.shape.bytes());
        #[unroll]
        for j in 0..frags {
            let into = b.index_mut(comptime!(set * frags + j));
            let at = comptime!((16 * j as u32, step * plan.inst_k));
            load::<I>(tile, &self.rhs, into, at, plan.rhs.shape, plan.rounds_tf32, RHS_REGISTERS);
        }
    }
}

/// One register group: the fragment at `at` = (row or column, k) of a plane's part of `tile`.
#[cube]
fn load<I: Float>(
    tile: u32,
    lanes: &Sequence<u32>,
    into: &mut Array<u32>,
    #[comptime] at: (u32, u32),
    #[comptime] shape: TileShape,
    #[comptime] rounds: bool,
    #[comptime] registers: [(u32, u32); 4],
) {
    let (outer, k) = comptime!(at);
    if comptime!(shape.gathered()) {
        gather_fragments::<I>(tile, lanes, into, at, shape, registers, rounds);
    } else if comptime!(shape.transposed) {
        let lane = *lanes.index(comptime!(outer as usize / 16));
        load_fragments::<I>(tile + lane, into, comptime!(k * shape.row_bytes()), shape, rounds);
    } else {
        let lane = *lanes.index(0usize) ^ comptime!(k * shape.elem as u32);
        load_fragments::<I>(tile + lane, into, comptime!(outer * shape.row_bytes()), shape, rounds);
    }
}

/// A place in both operands: addresses of this unit's first vectors of the next tile, tiles from there
/// to the end of the item, and what is left of the matrix.
#[derive(CubeType)]
struct Place {
    lhs: RuntimeCell<u64>,
    rhs: RuntimeCell<u64>,
    tiles: RuntimeCell<u32>,
    rows: RuntimeCell<u32>,
    cols: RuntimeCell<u32>,
    depth: RuntimeCell<u32>,
}

/// The copies, `stages - 1` tiles ahead of the multiplies.
#[derive(CubeType)]
struct Copies {
    at: Place,
    /// Start of the item after the one at hand: found once an item, so that a tile pays for no
    /// division. An item has `stages` tiles at least, or it is its cube's only one.
    next: Place,
    stage: RuntimeCell<u32>,
    shared: u32,
    start_lhs: Start,
    start_rhs: Start,
    /// Bytes between the lines of the operands.
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

/// `index` elements from `start`, as an address.
#[cube]
fn element(start: u64, index: usize, #[comptime] elem: usize) -> u64 {
    start + u64::cast_from(index) * comptime!(elem as u64)
}

#[cube]
impl Copies {
    fn new<F: Float, NL: Size, NR: Size>(
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
        shared: u32,
        unit: u32,
        dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) -> Copies {
        Copies {
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

    /// Makes item `id` the next one, if there is such an item.
    fn aim<F: Float, NL: Size, NR: Size>(
        &self,
        lhs: &[Vector<F, NL>],
        rhs: &[Vector<F, NR>],
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
                start_rhs + col * dims.rhs_stride + k / comptime!(plan.rhs_every())
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

    /// Goes on to the next item when the one at hand is copied.
    fn take_next(&self) {
        if self.at.tiles.read() == 0 {
            self.at.set(&self.next);
            self.next.tiles.store(0u32);
        }
    }

    /// Issues the copies of the next tile, if there is one, and closes their group.
    fn tile(&self, #[comptime] plan: MmaPlan) {
        let at = &self.at;
        let stage = self.stage.read();
        let (left, right) = comptime!((plan.lhs.shape, plan.rhs.shape));
        if at.tiles.read() > 0 {
            let (rows, cols, depth) = (at.rows.read(), at.cols.read(), at.depth.read());
            let (lhs_rows, lhs_cols) =
                if comptime!(left.transposed) { (depth, rows) } else { (rows, depth) };
            let every = comptime!(plan.rhs_every() as u32);
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
        // Now, not when the next tile needs it: addresses that are ready let its copies go out early.
        self.take_next();
        let end = self.shared + comptime!(plan.config.stages * plan.stage_bytes());
        self.stage.store(next_stage(stage, self.shared, end, plan.stage_bytes()));
    }
}

/// Stores a plane's part: whole quads as 16-byte vectors where the result has those, else the pairs
/// that a unit holds.
///
/// A fragment is 16 x 8; a unit holds columns `2 * (lane % 4)` and `+ 1` of rows `lane / 4` and `+ 8`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
fn store<F: Float, E: Float, NC: Size, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    acc: &Sums<NC>,
    item: &Item,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let frags_n = comptime!(wn as usize / 8);
    let width = NO::value();
    let exact = comptime!(plan.exact);
    let (_, _, start) = dims.batch(item.batch as usize);
    let columns = dims.columns(item.batch);
    #[unroll]
    for i in 0..comptime!(wm as usize / 8) {
        let row = row + comptime!(8 * i as u32) + lane / 4;
        let line = start + row as usize * dims.n as usize;
        if comptime!(exact) || row < item.row_end {
            let (fragment, half) = comptime!((i / 2 * frags_n, i % 2));
            if comptime!(width == 8) {
                #[unroll]
                for quad in 0..comptime!(frags_n / 4) {
                    let mut pairs = Array::<Vector<f32, NC>>::new(4usize);
                    #[unroll]
                    for j in 0..4usize {
                        pairs[j] = acc.pair(comptime!(fragment + 4 * quad + j), half, plan);
                    }
                    let col = col + comptime!(32 * quad as u32);
                    store_quad::<F, E, NC, NO>(
                        out, finish, &mut pairs, line, col, lane, &columns, exact,
                    );
                }
            } else {
                #[unroll]
                for j in 0..frags_n {
                    let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
                    let sum = acc.pair(comptime!(fragment + j), half, plan);
                    if comptime!(width == 2) {
                        if comptime!(exact) || left < dims.n {
                            let at = (line + left as usize) / 2;
                            let value = finish.activate::<NC>(sum, left, &columns);
                            out[at] = Vector::cast_from(finish.join::<NC>(value, at));
                        }
                    } else {
                        #[unroll]
                        for e in 0..2usize {
                            let col = left + comptime!(e as u32);
                            if comptime!(exact) || col < dims.n {
                                let at = line + col as usize;
                                let value = finish.one(sum.extract(e), at, col, &columns);
                                out[at] = Vector::new(E::cast_from(value));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Stores the four pairs that a unit has of columns `col` to `col + 31` of the row that begins at `line`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
pub(crate) fn store_quad<F: Float, E: Float, NC: Size, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    pairs: &mut Array<Vector<f32, NC>>,
    line: usize,
    col: u32,
    lane: u32,
    columns: &Columns,
    #[comptime] exact: bool,
) {
    let mine = col + lane % 4 * 8;
    let inside = mine < columns.count;
    let at = (line + mine as usize) / 8;
    #[unroll]
    for j in 0..4usize {
        let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
        pairs[j] = finish.activate::<NC>(pairs[j], left, columns);
    }
    finish.join_quad::<NC>(pairs, at, comptime!(exact) || inside, lane);
    let mut words = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        words[j] = u32::reinterpret(Vector::<E, NC>::cast_from(pairs[j]));
    }
    quad_transpose(&mut words, lane);
    if comptime!(exact) || inside {
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for j in 0..4usize {
            vector.insert(j, words[j]);
        }
        out[at] = Vector::reinterpret(vector);
    }
}

/// Stores a plane's part of the partial sums, as [`store`] does.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
fn store_sums<NC: Size, NP: Size>(
    out: &mut [Vector<f32, NP>],
    acc: &Sums<NC>,
    start: usize,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let frags_n = comptime!(wn as usize / 8);
    let width = NP::value();
    let exact = comptime!(plan.exact);
    #[unroll]
    for i in 0..comptime!(wm as usize / 8) {
        let row = row + comptime!(8 * i as u32) + lane / 4;
        let line = start + row as usize * dims.n as usize;
        if comptime!(exact) || row < dims.m {
            #[unroll]
            for j in 0..frags_n {
                let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
                let sum = acc.pair(comptime!(i / 2 * frags_n + j), comptime!(i % 2), plan);
                if comptime!(width == 2) {
                    if comptime!(exact) || left < dims.n {
                        out[(line + left as usize) / 2] = Vector::cast_from(sum);
                    }
                } else {
                    #[unroll]
                    for e in 0..2usize {
                        let col = left + comptime!(e as u32);
                        if comptime!(exact) || col < dims.n {
                            out[line + col as usize] = Vector::new(sum.extract(e));
                        }
                    }
                }
            }
        }
    }
}
