//! Copies by the tensor memory accelerator (TMA): one unit asks for a whole tile, which is written as the swizzle of
//! [`TileShape`] has it and counted by an `mbarrier`; past the edges of an operand there are zeros.
//!
//! Of the loop of [`mma`](super::mma) this replaces what each unit copies, and how it waits: a plane for a stage to be
//! full, the unit that asks for one to be read by every plane, and planes not for each other. Stages are known when it is
//! compiled: their tiles are at constant addresses, and the tiles of k are whole rounds of them.
//!
//! TFLOP/s in bf16 on an H200, both operands along k, timed once for 25 ms by `tune try`; the ring of [`mma`](super::mma) in
//! the same run 495 and 497:
//!
//! | version                                               | 128 x 256 x 32 | 128 x 256 x 64 | 256 x 128 x 64 |
//! |-------------------------------------------------------|----------------|----------------|----------------|
//! | v1 planes meet once a tile; four stages, 4096^3       | 439            | 502            | 499            |
//! | v2 planes wait for stages, a tile of slack; 4096^3    | 424            | 503            | 512            |
//! | v2 at 8192^3                                          | 444            | 513            | 498 to 529     |
//! | v2 with two stages, which 99 KB hold; 4096^3          |                | 464            |                |
//!
//! Waiting for a barrier takes longer than for a group of copies, so that tiles of 32 are too short. Over the 100 ms of the
//! records: 496 and 480, in tf32 233, where the ring has 468, 454 and 219 (RTX 4090's features, another run).
//!
//! Source: PTX ISA, "Tensor Swizzling Modes": 16-byte chunks of lines of 32, 64 or 128 bytes, XORed with the line.

use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::bytes;
use super::dims::Dims;
use super::epilogue::Finish;
use super::mma::{self, MmaPlan, Work};
use super::problem::Operand;
use crate::tile::TileShape;

impl TileShape {
    /// How the accelerator calls its swizzle; none for lines that it does not swizzle so.
    pub(crate) const fn bulk_swizzle(self) -> Option<TensorMapSwizzle> {
        match (self.row_bytes(), self.transposed) {
            (32, false) => Some(TensorMapSwizzle::B32),
            (64, false) => Some(TensorMapSwizzle::B64),
            (128, false) => Some(TensorMapSwizzle::B128),
            _ => None,
        }
    }
}

/// Both operands, as words.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Maps {
    lhs: TensorMap<u32, Tiled>,
    rhs: TensorMap<u32, Tiled>,
}

/// A place in both operands.
#[derive(CubeType)]
struct Place {
    row: RuntimeCell<u32>,
    col: RuntimeCell<u32>,
    k: RuntimeCell<u32>,
    tiles: RuntimeCell<u32>,
}

#[cube]
impl Place {
    fn nowhere() -> Place {
        Place {
            row: RuntimeCell::new(0u32),
            col: RuntimeCell::new(0u32),
            k: RuntimeCell::new(0u32),
            tiles: RuntimeCell::new(0u32),
        }
    }
}

/// The copies; one unit's but for the waiting.
#[derive(CubeType)]
pub(crate) struct Bulk {
    maps: Maps,
    /// Of each stage, complete when its tiles are there.
    full: Sequence<Shared<Barrier>>,
    /// Of each stage, complete when every plane has read its tiles.
    read: Sequence<Shared<Barrier>>,
    /// Parities of the rounds of stages that are waited for: full ones, and those read.
    round: RuntimeCell<u32>,
    round_read: RuntimeCell<u32>,
    elected: bool,
    at: Place,
    next: Place,
}

#[cube]
impl Bulk {
    pub(crate) fn new(maps: Maps, unit: u32, #[comptime] plan: MmaPlan) -> Bulk {
        let mut full = Sequence::<Shared<Barrier>>::new();
        let mut read = Sequence::<Shared<Barrier>>::new();
        #[unroll]
        for _ in 0..comptime!(plan.config.stages) {
            full.push(Barrier::shared_uninit());
            read.push(Barrier::shared_uninit());
        }
        if unit == 0 {
            #[unroll]
            for stage in 0..comptime!(plan.config.stages as usize) {
                full.index(stage).init_manual(1u32);
                read.index(stage).init_manual(comptime!(plan.config.units() / 32));
            }
            sync_async_proxy_shared();
        }
        sync_cube();
        Bulk {
            maps,
            full,
            read,
            round: RuntimeCell::new(1u32),
            round_read: RuntimeCell::new(0u32),
            elected: unit == 0,
            at: Place::nowhere(),
            next: Place::nowhere(),
        }
    }

    /// Makes item `id` the next one, if there is such an item.
    pub(crate) fn aim(&self, dims: &Dims, work: &Work, id: u32, #[comptime] plan: MmaPlan) {
        if self.elected && id < work.items() {
            let item = work.item(dims, id, plan.config);
            self.next.row.store(item.row);
            self.next.col.store(item.col);
            self.next.k.store(item.k);
            self.next.tiles.store(item.tiles);
        }
    }

    /// Goes on to the next item when the one at hand is copied.
    pub(crate) fn take_next(&self) {
        if self.at.tiles.read() == 0 {
            self.at.row.store(self.next.row.read());
            self.at.col.store(self.next.col.read());
            self.at.k.store(self.next.k.read());
            self.at.tiles.store(self.next.tiles.read());
            self.next.tiles.store(0u32);
        }
    }

    /// Asks for the next tiles, if there are such, once those before them in the stage are read; the stage is complete all
    /// the same.
    pub(crate) fn tile(
        &self,
        ring: &mut [Vector<u32, Const<4>>],
        #[comptime] stage: u32,
        #[comptime] plan: MmaPlan,
    ) {
        if self.elected {
            if comptime!(stage == 0) {
                self.round_read.store(self.round_read.read() ^ 1);
            }
            // In the first round it has nothing to wait for: a barrier begins after a phase of parity 1.
            self.read.index(comptime!(stage as usize)).wait_parity(self.round_read.read());
            let full = self.full.index(comptime!(stage as usize));
            let tiles = self.at.tiles.read();
            if tiles > 0 {
                let vectors = comptime!((plan.stage_bytes() / 16) as usize);
                let start = comptime!(stage as usize * vectors);
                let between = comptime!(start + (plan.lhs.shape.bytes() / 16) as usize);
                let end = comptime!(start + vectors);
                full.arrive_and_expect_tx(1u32, comptime!(plan.stage_bytes()));
                let k = self.at.k.read();
                // In words.
                let word = k / comptime!(4 / plan.lhs.shape.elem as u32);
                let (row, col) = (self.at.row.read() as i32, self.at.col.read() as i32);
                full.tma_load_2d(&self.maps.lhs, &mut ring[start..between], row, word as i32);
                full.tma_load_2d(&self.maps.rhs, &mut ring[between..end], col, word as i32);
                self.at.k.store(k + comptime!(plan.config.tile_k));
                self.at.tiles.store(tiles - 1);
            } else {
                full.arrive();
            }
            self.take_next();
        }
    }

    /// Says that this plane has read the tiles of a stage.
    pub(crate) fn release(&self, lane: u32, #[comptime] stage: u32) {
        sync_plane();
        if lane == 0 {
            self.read.index(comptime!(stage as usize)).arrive();
        }
    }

    /// Waits for the tiles of a stage; stages are waited for in their order, from the first on.
    pub(crate) fn wait(&self, #[comptime] stage: u32) {
        if comptime!(stage == 0) {
            self.round.store(self.round.read() ^ 1);
        }
        self.full.index(comptime!(stage as usize)).wait_parity(self.round.read());
    }
}

/// What the accelerator knows of an operand of `[lines, k]`: words, and tiles of `shape`.
///
/// # Safety
/// The handle has the operand's lines.
pub(crate) unsafe fn map(
    handle: &Handle,
    operand: Operand,
    [lines, k]: [u32; 2],
    shape: TileShape,
) -> TensorMapArg<Tiled> {
    let words = |elements: usize| elements * shape.elem / 4;
    let start = handle.clone().offset_start(operand.start * shape.elem as u64);
    let sizes = [lines as usize, words(k as usize)];
    let strides = [words(operand.stride as usize), 1];
    // SAFETY: as the caller's.
    let tensor = unsafe { TensorArg::from_raw_parts(start, strides.into(), sizes.into()) };
    let tile_size = [shape.rows, words(shape.cols)].into();
    TensorMapArg::new(TiledArgs { tile_size }, tensor, ElemType::UInt(UIntKind::U32))
        .with_swizzle(shape.bulk_swizzle().expect("checked with the config"))
        .with_prefetch(TensorMapPrefetch::B256)
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[expect(clippy::too_many_arguments, reason = "operands, each twice, results, what they are")]
pub(crate) fn matmul_tma<F: Float, I: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    lhs_map: TensorMap<u32, Tiled>,
    rhs_map: TensorMap<u32, Tiled>,
    finish: Finish<F, E, NO>,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
    #[define(F, I, E)] _dtypes: [ElemType; 3],
) {
    let worth = ComptimeOption::<bytes::Worth<F>>::new_None();
    let unit = UNIT_POS_Y * 32 + UNIT_POS_X;
    let bulk = Bulk::new(Maps { lhs: lhs_map, rhs: rhs_map }, unit, plan);
    let bulk = ComptimeOption::<Bulk>::new_Some(bulk);
    mma::multiply::<F, I, E, NL, NR, NO, NP>(
        lhs, rhs, out, partials, bulk, &finish, &worth, dims, plan,
    )
}
