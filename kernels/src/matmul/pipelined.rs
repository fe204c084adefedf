//! Pipelined (double-buffered) subgroup path for Vulkan: while one tile is multiplied, the next is
//! prefetched into registers ([`cooperative`](crate::cooperative)). The
//! [`subgroup`](super::subgroup) path waits for each tile instead. Timed once by `tune try` on an
//! H200 through Vulkan, f16 8192^3: 213 TFLOP/s, where that path reaches 115. Two tiles of each
//! operand in shared memory, with one barrier per tile instead of two, were slower: 128 instead of
//! 195 with the same tiles.
//!
//! Convolutions of small images have few blocks and a deep k. Split-k brought a frame of unet-880m (f16, batch 1) on an H200
//! through Vulkan from 28.5 to 11.8 ms, and tuned configs to 8.6 ms; CUDA takes 2.7 ms. Each kernel takes two to three times
//! as long as there, the smallest too, and launches wait for each other.

use arch::ArchProfile;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::{Dims, own_block};
use super::epilogue::Finish;
use super::path::{
    Grid, IN_FLIGHT, Path, check_splits, one_part, part_tiles, plane_inst, split_counts,
};
use super::problem::{Layout, MatmulProblem};
use super::subgroup::{SubgroupConfig, layout_of};
use super::window::{Corner as WindowCorner, Gather};
use crate::cooperative::{self, Corner, Tile, U32x4, packed, put, read, zeros};
use crate::fits::{lacks, limits, shape};

/// Tile sizes of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PipelinedConfig {
    #[serde(flatten)]
    pub tiles: SubgroupConfig,
    /// Number of split-k splits; each is the work of another cube.
    #[serde(default = "one_part")]
    pub parts: u32,
}

/// Configs, most frequent winners first.
const CONFIGS: [SubgroupConfig; 7] = [
    SubgroupConfig::new([128, 128, 64], [2, 4]),
    SubgroupConfig::new([128, 128, 32], [2, 2]),
    SubgroupConfig::new([128, 256, 32], [2, 4]),
    SubgroupConfig::new([256, 128, 32], [4, 2]),
    SubgroupConfig::new([128, 64, 32], [2, 2]),
    SubgroupConfig::new([64, 64, 32], [2, 2]),
    SubgroupConfig::new([16, 64, 32], [1, 2]),
];

impl PipelinedConfig {
    /// k tiles per split, except the last.
    const fn part_tiles(self, k: u32) -> u32 {
        part_tiles(k, self.tiles.tile_k, self.parts)
    }

    /// Returns the config, and with the splits that fill a card once and twice. Small images have few blocks and a deep k.
    /// The [`workgroup`](super::workgroup) path splits the other matmuls where a device has it.
    fn with_splits(self, arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        let splits = problem.window.is_some() || arch.cube_mma.is_empty();
        if !splits || problem.grouped || problem.interleaved {
            return vec![self];
        }
        let blocks = problem.blocks(self.tile());
        let wishes = [1, 2].map(|times| times * IN_FLIGHT / blocks);
        let parts = split_counts(problem.k, self.tiles.tile_k, wishes).into_iter();
        parts.map(|parts| Self { parts, ..self }).collect()
    }

    /// Estimated registers per unit: accumulators, fragments of a step, prefetched tiles,
    /// addresses.
    const fn registers(self, plane: u32) -> u32 {
        let SubgroupConfig { tile_m, tile_n, tile_k, planes_m, planes_n } = self.tiles;
        let (part_m, part_n) = (tile_m / planes_m, tile_n / planes_n);
        let ahead = (tile_m + tile_n) * tile_k / 2 / (self.tiles.planes() * plane);
        part_m * part_n / plane + (part_m + 16) * 16 / 2 / plane + ahead + 40
    }

    /// Returns the comptime parameters of the kernel instance.
    pub(super) fn plan(&self, arch: &ArchProfile, problem: &MatmulProblem) -> PipelinedPlan {
        PipelinedPlan {
            config: self.tiles,
            plane: arch.plane_size.0,
            inst_k: plane_inst(arch, problem.precision).map_or(0, |s| s.k),
            lhs_rows: problem.lhs.layout == Layout::Row,
            rhs_rows: problem.rhs.layout == Layout::Row,
            exact: problem.divides(self.tile(), self.tile_k()),
            one_pixel: problem
                .window
                .is_some_and(|window| window.channels.iter().all(|count| count % 8 == 0)),
            partial: self.parts > 1,
        }
    }
}

impl Path for PipelinedConfig {
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        let whole = CONFIGS.map(|tiles| Self { tiles, parts: 1 });
        whole.iter().flat_map(|c| c.with_splits(arch, problem)).collect()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        let mut sizes = self.tiles.sizes();
        sizes.push(("parts", self.parts));
        sizes
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        if !arch.matrices_from_words() {
            return Err(lacks("subgroup cooperative matrices that load from u32 shared memory"));
        }
        self.tiles.check_matrices(arch, problem)?;
        check_splits(arch, problem, self)?;
        let plan = self.plan(arch, problem);
        if self.registers(plan.plane) > 270 {
            let why = "accumulators and loaded tiles would spill registers";
            return Err(shape("tile_m", self.tiles.tile_m, why));
        }
        if problem.window.is_some() && plan.units() % (self.tiles.tile_k / 8) != 0 {
            return Err(shape("tile_k", self.tiles.tile_k, "expected whole lines of copies"));
        }
        limits(arch, plan.units(), plan.shared_bytes())
    }

    fn tile(&self) -> (u32, u32) {
        self.tiles.tile()
    }

    fn tile_k(&self) -> u32 {
        self.tiles.tile_k
    }

    fn gathers(&self) -> bool {
        true
    }

    fn splits(&self) -> u32 {
        self.parts
    }

    fn grid(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let part_tiles = self.part_tiles(problem.k);
        Grid { part_tiles, ..self.tiles.grid(arch, problem) }
    }
}

/// Words of a 16 x 16 result.
const RESULT: u32 = 16 * 16 / 4;

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PipelinedPlan {
    pub(crate) config: SubgroupConfig,
    /// Units per plane.
    pub(crate) plane: u32,
    /// Depth of the instruction in k; it has 16 rows and 16 columns.
    pub(crate) inst_k: u32,
    pub(crate) lhs_rows: bool,
    pub(crate) rhs_rows: bool,
    /// True if the tiles divide the problem.
    pub(crate) exact: bool,
    /// True if eight neighbours in the depth of a window are channels of one pixel.
    pub(crate) one_pixel: bool,
    /// True if accumulators go to the workspace.
    pub(crate) partial: bool,
}

impl PipelinedPlan {
    const fn units(self) -> u32 {
        self.config.planes() * self.plane
    }

    /// Operand tiles in their memory layout.
    const fn tiles(self) -> [Tile; 2] {
        let SubgroupConfig { tile_m, tile_n, tile_k, .. } = self.config;
        let (lhs, lhs_line) = if self.lhs_rows { (tile_m, tile_k) } else { (tile_k, tile_m) };
        let (rhs, rhs_line) = if self.rhs_rows { (tile_k, tile_n) } else { (tile_n, tile_k) };
        let (units, exact) = (self.units(), self.exact);
        [
            Tile { lines: lhs, line: lhs_line, units, exact },
            Tile { lines: rhs, line: rhs_line, units, exact },
        ]
    }

    /// Vectors of the lhs tile; afterwards it holds a 16 x 16 result of every plane.
    const fn lhs_vectors(self) -> u32 {
        let [lhs, _] = self.tiles();
        let (tile, results) = (lhs.vectors(), self.config.planes() * RESULT);
        if tile > results { tile } else { results }
    }

    const fn shared_bytes(self) -> u32 {
        let [_, rhs] = self.tiles();
        16 * self.lhs_vectors() + rhs.bytes()
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    finish: &Finish<F, E, NO>,
    window: &ComptimeOption<Gather<F, NL>>,
    dims: &Dims,
    #[comptime] plan: PipelinedPlan,
) {
    let SubgroupConfig { tile_m, tile_n, tile_k, planes_m, planes_n } = comptime!(plan.config);
    let (part_m, part_n) = comptime!((tile_m / planes_m, tile_n / planes_n));
    let (frags_m, frags_n) = comptime!((part_m as usize / 16, part_n as usize / 16));
    let depth = comptime!(plan.inst_k as usize);
    let tiles = comptime!(plan.tiles());
    let (tile_lhs, tile_rhs) = comptime!((tiles[0], tiles[1]));
    let (layout_lhs, layout_rhs) = comptime!((layout_of(plan.lhs_rows), layout_of(plan.rhs_rows)));

    let mut shared_lhs =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(plan.lhs_vectors() as usize), 128usize);
    let mut shared_rhs =
        Shared::<[U32x4]>::new_aligned_slice(comptime!(tile_rhs.vectors() as usize), 128usize);

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * plan.plane + lane;
    let (block_m, block_n) = own_block(dims, tile_m, tile_n);
    let parts = if comptime!(plan.partial) { dims.parts } else { 1u32.runtime() };
    let (batch, part) = (CUBE_POS_Y / parts, CUBE_POS_Y % parts);
    let (row_start, row_end) = dims.rows(batch);
    let (row0, col0) = (row_start + block_m * tile_m, block_n * tile_n);
    if comptime!(dims.grouped) && row0 >= row_end {
        // The grid has enough blocks for a group that spans all of lhs.
        terminate!();
    }
    let (from_m, from_n) = (plane / planes_n * part_m, plane % planes_n * part_n);
    let (lhs_start, rhs_start, out_start) = dims.batch(batch as usize);

    let mut acc = Sequence::<Matrix<f32>>::new(); // [part_m / 16, part_n / 16]
    #[unroll]
    for _ in 0..comptime!(frags_m * frags_n) {
        acc.push(zeros(depth));
    }

    let (mut k0, mut k_end) = (0u32.runtime(), dims.k);
    if comptime!(plan.partial) {
        k0 = part * dims.part_tiles * tile_k;
        k_end = min(k0 + dims.part_tiles * tile_k, dims.k);
    }
    let mut at_lhs = corner(lhs_start, dims.lhs_stride, row0, row_end, k0, dims.k, plan.lhs_rows);
    let mut at_rhs =
        corner(rhs_start, dims.rhs_stride, col0, dims.n, k0, dims.k, comptime!(!plan.rhs_rows));
    let mut next_lhs = Array::<U32x4>::new(comptime!(tile_lhs.copies()));
    let mut next_rhs = Array::<U32x4>::new(comptime!(tile_rhs.copies()));
    let corners = corners(window, row0, row_end, unit, tile_lhs);
    read_lhs::<F, NL>(lhs, window, &mut next_lhs, &at_lhs, &corners, unit, plan);
    read::<F, NR>(rhs, &mut next_rhs, &at_rhs, unit, tile_rhs);

    while k0 < k_end {
        sync_cube();
        put(&mut shared_lhs, &next_lhs, unit, tile_lhs);
        put(&mut shared_rhs, &next_rhs, unit, tile_rhs);
        sync_cube();
        k0 += tile_k;
        // The read after the last tile is not used.
        let ahead = if comptime!(plan.exact) { min(k0, dims.k - tile_k) } else { k0 };
        if comptime!(plan.lhs_rows) {
            at_lhs.element = ahead;
        } else {
            at_lhs.line = ahead;
        }
        if comptime!(plan.rhs_rows) {
            at_rhs.line = ahead;
        } else {
            at_rhs.element = ahead;
        }
        read_lhs::<F, NL>(lhs, window, &mut next_lhs, &at_lhs, &corners, unit, plan);
        read::<F, NR>(rhs, &mut next_rhs, &at_rhs, unit, tile_rhs);
        #[unroll]
        for step in 0..comptime!(tile_k / plan.inst_k) {
            let kk = comptime!(step * plan.inst_k);
            let mut a = Sequence::<Matrix<F>>::new();
            #[unroll]
            for i in 0..frags_m {
                let from = from_m + comptime!(16 * i as u32);
                a.push(fragment::<F>(
                    &shared_lhs,
                    from,
                    kk,
                    MatrixIdent::A,
                    layout_lhs,
                    depth,
                    tile_lhs,
                    plan.lhs_rows,
                ));
            }
            #[unroll]
            for j in 0..frags_n {
                let from = from_n + comptime!(16 * j as u32);
                let b = fragment::<F>(
                    &shared_rhs,
                    from,
                    kk,
                    MatrixIdent::B,
                    layout_rhs,
                    depth,
                    tile_rhs,
                    comptime!(!plan.rhs_rows),
                );
                #[unroll]
                for i in 0..frags_m {
                    let c = acc.index(comptime!(i * frags_n + j));
                    cmma::execute(a.index(i), &b, c, c);
                }
            }
        }
    }

    // Wait until every plane has multiplied its last tile.
    sync_cube();
    let own = plane * RESULT;
    let own_end = own + RESULT;
    #[unroll]
    for i in 0..frags_m {
        #[unroll]
        for j in 0..frags_n {
            cmma::store(
                &mut shared_lhs[own as usize..own_end as usize],
                acc.index(comptime!(i * frags_n + j)),
                16,
                MatrixLayout::RowMajor,
            );
            sync_plane();
            let mut word = lane;
            while word < RESULT {
                let row = row0 + from_m + comptime!(16 * i as u32) + word / 4;
                let col0 = col0 + from_n + comptime!(16 * j as u32) + word % 4 * 4;
                let four = shared_lhs[(own + word) as usize];
                #[unroll]
                for e in 0..4usize {
                    let col = col0 + comptime!(e as u32);
                    if row < row_end && col < dims.n {
                        let sum = f32::reinterpret(four.extract(e));
                        if comptime!(plan.partial) {
                            // [parts, batches, m, n]
                            let line = (part * dims.batches + batch) as usize * dims.m as usize;
                            let at = (line + row as usize) * dims.n as usize + col as usize;
                            partials[at] = Vector::new(sum);
                        } else {
                            let at = out_start + row as usize * dims.out_stride + col as usize;
                            let columns = dims.columns(batch, row);
                            let value = finish.one(sum, at, col, &columns);
                            out[at] = Vector::new(E::cast_from(value));
                        }
                    }
                }
                word += plan.plane;
            }
            sync_plane();
        }
    }
}

/// Returns the corners of the windows of the rows that a unit copies: image, then place.
#[cube]
fn corners<F: Float, N: Size>(
    window: &ComptimeOption<Gather<F, N>>,
    row0: u32,
    row_end: u32,
    unit: u32,
    #[comptime] tile: Tile,
) -> Array<u32> {
    let mut corners = Array::<u32>::new(comptime!(2 * tile.copies()));
    #[comptime]
    match window {
        ComptimeOption::Some(gather) =>
        {
            #[unroll]
            for i in 0..comptime!(tile.copies()) {
                let word = unit + comptime!(i as u32 * tile.units);
                let corner = gather.corner(row0 + word / comptime!(tile.line / 8), row_end);
                corners[comptime!(2 * i)] = corner.image;
                corners[comptime!(2 * i + 1)] = corner.place;
            }
        }
        ComptimeOption::None => {}
    }
    corners
}

/// Reads the vectors of a tile of lhs that a unit copies, as [`read`]; rows may be windows of an image.
#[cube]
fn read_lhs<F: Float, N: Size>(
    lhs: &[Vector<F, N>],
    window: &ComptimeOption<Gather<F, N>>,
    into: &mut Array<U32x4>,
    at: &Corner,
    corners: &Array<u32>,
    unit: u32,
    #[comptime] plan: PipelinedPlan,
) {
    let tile = comptime!(plan.tiles()[0]);
    #[comptime]
    match window {
        ComptimeOption::Some(gather) => {
            let (width, per_line) = (N::value(), comptime!(tile.line / 8));
            // Units are a multiple of a line's vectors: all copies of a unit have the same depth.
            let depth = at.element + unit % per_line * 8;
            let first = gather.tap(depth);
            #[unroll]
            for i in 0..comptime!(tile.copies()) {
                let image = corners[comptime!(2 * i)];
                let corner = WindowCorner { image, place: corners[comptime!(2 * i + 1)] };
                let mut vectors = Array::<Vector<F, N>>::new(comptime!(8 / width));
                let mut pixel = gather.pixel(&corner, &first);
                #[unroll]
                for part in 0..comptime!(8 / width) {
                    let more = comptime!((part * width) as u32);
                    let mut channel = first.channel + more;
                    if comptime!(!plan.one_pixel && more > 0) {
                        let tap = gather.tap(depth + more);
                        pixel = gather.pixel(&corner, &tap);
                        channel = tap.channel;
                    }
                    vectors[part] = gather.vector(lhs, at.start, pixel, channel);
                }
                into[i] = packed::<F, N>(&vectors);
            }
        }
        ComptimeOption::None => read::<F, N>(lhs, into, at, unit, tile),
    }
}

/// Returns the corner of a tile of an operand; `k_last` is true if k is the contiguous axis.
#[cube]
fn corner(
    start: usize,
    stride: usize,
    outer0: u32,
    outer: u32,
    k0: u32,
    k: u32,
    #[comptime] k_last: bool,
) -> Corner {
    let (line, lines, element, elements) =
        if comptime!(k_last) { (outer0, outer, k0, k) } else { (k0, k, outer0, outer) };
    Corner { start, stride, line, lines, element, elements }
}

/// Loads the operand fragment at row or column `outer` and depth `kk` of the tile.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a place, and how the tile lies")]
fn fragment<F: Float>(
    tile: &[U32x4],
    outer: u32,
    #[comptime] kk: u32,
    #[comptime] ident: MatrixIdent,
    #[comptime] layout: MatrixLayout,
    #[comptime] depth: usize,
    #[comptime] of: Tile,
    #[comptime] k_last: bool,
) -> Matrix<F> {
    let (line, element) = if comptime!(k_last) {
        (outer, comptime!(kk).runtime())
    } else {
        (comptime!(kk).runtime(), outer)
    };
    cooperative::load::<F>(tile, line, element, ident, layout, depth, of)
}
