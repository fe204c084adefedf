//! Copies by the tensor memory accelerator (TMA): one unit requests a whole tile. TMA writes it
//! with the swizzle of [`TileShape`], counts it on an `mbarrier`, and pads with zeros past the
//! edges of an operand.
//!
//! The loop is that of [`mma`](super::mma); copies and waits differ. A plane waits for a full
//! stage, and the requesting unit waits until every plane has read the stage. Planes do not wait
//! for each other. Stages are fixed at compile time: their tiles have constant addresses, and the
//! tiles of k must be whole rounds of stages.
//!
//! TFLOP/s in bf16 on an H200, both operands along k, timed once for 25 ms by `tune try`. The ring
//! of [`mma`](super::mma) reached 495 and 497 in the same run:
//!
//! | version                                               | 128 x 256 x 32 | 128 x 256 x 64 | 256 x 128 x 64 |
//! |-------------------------------------------------------|----------------|----------------|----------------|
//! | v1 one barrier for all planes per tile; four stages, 4096^3 | 439      | 502            | 499            |
//! | v2 planes wait for stages, one tile of slack; 4096^3  | 424            | 503            | 512            |
//! | v2 at 8192^3                                          | 444            | 513            | 498 to 529     |
//! | v2 with two stages, which fit in 99 KB; 4096^3        |                | 464            |                |
//!
//! Waiting for a barrier takes longer than waiting for a group of copies, so tiles of depth 32 are
//! too short. Over the 100 ms of the records: 496 and 480, in tf32 233; the ring has 468, 454 and
//! 219 (RTX 4090's features, another run).
//!
//! Source: PTX ISA, "Tensor Swizzling Modes": 16-byte chunks of lines of 32, 64 or 128 bytes, XORed
//! with the line.

use arch::ArchProfile;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::Dims;
use super::mma::{Feed, FeedExpand, Maps, MapsLaunch, MmaConfig, MmaPlan, Work};
use super::path::{Grid, Path};
use super::problem::{MatmulProblem, Operand};
use crate::fits::{lacks, limits, shape};
use crate::tile::TileShape;

/// Tile sizes of the path; same fields as [`mma`](super::mma).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TmaConfig(pub MmaConfig);

/// Configs, most frequent winners first; depths are for 2-byte elements and halve for 4.
const CONFIGS: [MmaConfig; 3] = [
    MmaConfig::new([128, 256, 64], [2, 4], 4),
    MmaConfig::new([256, 128, 64], [4, 2], 4),
    MmaConfig::new([128, 256, 64], [2, 4], 2),
];

impl TmaConfig {
    /// Returns the comptime parameters of the kernel instance.
    pub(super) fn plan(&self, arch: &ArchProfile, problem: &MatmulProblem) -> MmaPlan {
        MmaPlan { fixed_stages: true, ..self.0.plan(arch, problem) }
    }
}

impl Path for TmaConfig {
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        MmaConfig::fitted(&CONFIGS, arch, problem).into_iter().map(Self).collect()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        self.0.sizes()
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        let (Self(c), elem) = (self, problem.precision.storage().size());
        if !arch.tma {
            return Err(lacks("TMA (bulk tensor copies)"));
        }
        if problem.grouped || problem.batch() > 1 {
            return Err(lacks("TMA copies for batches and groups"));
        }
        let tiles = c.tiles(problem);
        c.check_tiles(arch, problem, tiles)?;
        if tiles.iter().any(|tile| tile.tma_swizzle().is_none()) {
            let why = "expected tile rows of 32, 64 or 128 bytes along k";
            return Err(shape("tile_k", c.tile_k, why));
        }
        let [lhs, rhs, _] = problem.widest();
        if [lhs, rhs] != [16 / elem; 2] {
            return Err(shape(
                "tile_k",
                c.tile_k,
                "expected operand rows in multiples of 16 bytes",
            ));
        }
        if c.tile_m > 256 || c.tile_n > 256 {
            return Err(shape("tile_m", c.tile_m, "expected at most 256 rows per TMA copy"));
        }
        let all = problem.k.div_ceil(c.tile_k);
        let each = c.part_tiles(problem.k);
        if [each, all - (c.parts - 1) * each].iter().any(|tiles| tiles % c.stages != 0) {
            return Err(shape(
                "stages",
                c.stages,
                "expected every split of k to be a multiple of the stages",
            ));
        }
        // The ring starts at a multiple of 1024 bytes, the period of the swizzle. Each stage also
        // needs two barriers.
        limits(arch, c.units(), c.shared_bytes(elem) + (16 * c.stages).next_multiple_of(1024))
    }

    fn tile(&self) -> (u32, u32) {
        self.0.tile()
    }

    fn tile_k(&self) -> u32 {
        self.0.tile_k
    }

    fn splits(&self) -> u32 {
        self.0.parts
    }

    fn accumulates_f16(&self) -> bool {
        true
    }

    fn grid(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        self.0.grid(arch, problem)
    }
}

impl TileShape {
    /// Returns TMA's swizzle mode for lines of this length, if it has one.
    const fn tma_swizzle(self) -> Option<TensorMapSwizzle> {
        match (self.row_bytes(), self.transposed) {
            (32, false) => Some(TensorMapSwizzle::B32),
            (64, false) => Some(TensorMapSwizzle::B64),
            (128, false) => Some(TensorMapSwizzle::B128),
            _ => None,
        }
    }
}

/// Position in both operands.
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

/// Copies that one unit requests and every plane waits for.
#[derive(CubeType)]
pub(crate) struct TmaFeed {
    /// One barrier per stage, complete when its tiles have arrived.
    full: Sequence<Shared<Barrier>>,
    /// One barrier per stage, complete when every plane has read its tiles.
    read: Sequence<Shared<Barrier>>,
    /// Parities of the awaited rounds of stages: of `full`, then of `read`.
    round: RuntimeCell<u32>,
    round_read: RuntimeCell<u32>,
    elected: bool,
    at: Place,
    next: Place,
}

#[cube]
impl Feed<ComptimeOption<Maps>> for TmaFeed {
    fn new<F: Float, NL: Size, NR: Size>(
        _lhs: &[Vector<F, NL>],
        _rhs: &[Vector<F, NR>],
        _maps: &ComptimeOption<Maps>,
        _shared: u32,
        unit: u32,
        _dims: &Dims,
        #[comptime] plan: MmaPlan,
    ) -> TmaFeed {
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
        TmaFeed {
            full,
            read,
            round: RuntimeCell::new(1u32),
            round_read: RuntimeCell::new(0u32),
            elected: unit == 0,
            at: Place::nowhere(),
            next: Place::nowhere(),
        }
    }

    fn aim<F: Float, NL: Size, NR: Size>(
        &self,
        _lhs: &[Vector<F, NL>],
        _rhs: &[Vector<F, NR>],
        _maps: &ComptimeOption<Maps>,
        dims: &Dims,
        work: &Work,
        id: u32,
        #[comptime] plan: MmaPlan,
    ) {
        if self.elected && id < work.items() {
            let item = work.item(dims, id, plan.config);
            self.next.row.store(item.row);
            self.next.col.store(item.col);
            self.next.k.store(item.k);
            self.next.tiles.store(item.tiles);
        }
    }

    fn take_next(&self, _maps: &ComptimeOption<Maps>, #[comptime] _plan: MmaPlan) {
        if self.at.tiles.read() == 0 {
            self.at.row.store(self.next.row.read());
            self.at.col.store(self.next.col.read());
            self.at.k.store(self.next.k.read());
            self.at.tiles.store(self.next.tiles.read());
            self.next.tiles.store(0u32);
        }
    }

    /// Requests the next tiles once every plane has read the previous ones in the stage. Without a
    /// next tile the stage still completes.
    fn tile(
        &self,
        maps: &ComptimeOption<Maps>,
        ring: &mut [Vector<u32, Const<4>>],
        #[comptime] stage: u32,
        #[comptime] plan: MmaPlan,
    ) {
        if self.elected {
            if comptime!(stage == 0) {
                self.round_read.store(self.round_read.read() ^ 1);
            }
            // The first round does not wait: a new barrier counts as having completed a phase of
            // parity 1.
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
                // TMA coordinates are in words.
                let word = k / comptime!(4 / plan.lhs.shape.elem as u32);
                let (row, col) = (self.at.row.read() as i32, self.at.col.read() as i32);
                #[comptime]
                match maps {
                    ComptimeOption::Some(maps) => {
                        full.tma_load_2d(&maps.lhs, &mut ring[start..between], row, word as i32);
                        full.tma_load_2d(&maps.rhs, &mut ring[between..end], col, word as i32);
                    }
                    ComptimeOption::None => {}
                }
                self.at.k.store(k + comptime!(plan.config.tile_k));
                self.at.tiles.store(tiles - 1);
            } else {
                full.arrive();
            }
            self.take_next(maps, plan);
        }
    }

    fn release(&self, lane: u32, #[comptime] stage: u32) {
        sync_plane();
        if lane == 0 {
            self.read.index(comptime!(stage as usize)).arrive();
        }
    }

    /// Waits for the tiles of a stage. Callers wait for the stages in order, starting with the
    /// first.
    fn wait(&self, #[comptime] stage: u32, #[comptime] _plan: MmaPlan) {
        if comptime!(stage == 0) {
            self.round.store(self.round.read() ^ 1);
        }
        self.full.index(comptime!(stage as usize)).wait_parity(self.round.read());
    }
}

/// Returns the tensor maps of both operands.
///
/// # Safety
/// The handles must hold all lines of the operands.
pub(super) unsafe fn maps(
    problem: &MatmulProblem,
    plan: &MmaPlan,
    lhs: &Handle,
    rhs: &Handle,
) -> MapsLaunch {
    // SAFETY: guaranteed by the caller.
    unsafe {
        MapsLaunch::new(
            map(lhs, problem.lhs, [problem.m, problem.k], plan.lhs.shape),
            map(rhs, problem.rhs, [problem.n, problem.k], plan.rhs.shape),
        )
    }
}

/// Returns the tensor map of an operand `[lines, k]`, in words, with tiles of `shape`.
///
/// # Safety
/// The handle must hold all lines of the operand.
unsafe fn map(
    handle: &Handle,
    operand: Operand,
    [lines, k]: [u32; 2],
    shape: TileShape,
) -> TensorMapArg<Tiled> {
    let words = |elements: usize| elements * shape.elem / 4;
    let start = handle.clone().offset_start(operand.start * shape.elem as u64);
    let sizes = [lines as usize, words(k as usize)];
    let strides = [words(operand.stride as usize), 1];
    // SAFETY: guaranteed by the caller.
    let tensor = unsafe { TensorArg::from_raw_parts(start, strides.into(), sizes.into()) };
    let tile_size = [shape.rows, words(shape.cols)].into();
    TensorMapArg::new(TiledArgs { tile_size }, tensor, ElemType::UInt(UIntKind::U32))
        .with_swizzle(shape.tma_swizzle().expect("checked with the config"))
        .with_prefetch(TensorMapPrefetch::B256)
}
