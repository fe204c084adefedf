//! The path of some rows through Vulkan: codes decoded into a tile in shared memory, which matrices of a plane are
//! loaded from ([`cooperative`](crate::cooperative)).
//!
//! | loop                                              | level                                        |
//! |---------------------------------------------------|----------------------------------------------|
//! | `(tile_m, columns·planes)` blocks of y, parts of k | cubes                                        |
//! | 64 of k                                           | a tile of x and one of the weight, in shared memory |
//! | `columns` of y                                    | planes, accumulators in registers            |
//! | `kk` in steps of the instruction                  | matrices of 16 x 16                          |
//!
//! A unit decodes 32 codes at a time, which have one absmax: `book[code] · absmax` in f32, rounded once, as a dense weight
//! is. What the next tile is made of is read while a tile is multiplied.
//!
//! Of two matrices a plane has as many columns of each, so that what gates a column lies in the same plane.
//!
//! Cost: the weight's codes once for every `tile_m` rows of x, a read of the book and about 10 instructions a code, and
//! products.
//!
//! Ladder, us at m = 4 / 16 / 64 / 128 (14336 x 4096 in rows, bf16, H200 through Vulkan; a dense weight and its product
//! 106 at 16 and 113 by `Lanes` at 8):
//!
//! | version                                                                  |  4 | 16 | 64 | 128 |
//! |--------------------------------------------------------------------------|----|----|----|-----|
//! | v1 read while a tile is multiplied                                       | 48 | 45 | 76 | 127 |
//! | v2 v1, read before a tile is decoded, nested book in shared memory (dropped) | 50 | 49 | 75 | 124 |
//!
//! That v2 is no faster says that the reads are not what is waited for, and the same time of 4 and of 16 rows that decoding
//! is.

use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::Dims;
use crate::cooperative::{self, Corner, Tile, Word, put, read, zeros};
use crate::matmul::{Columns, Finish};
use crate::nf4::{Codes, code_shift};
use crate::round::{pack_bf16, rounded};

/// Tile sizes of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlaneConfig {
    /// Rows of x that a cube takes.
    pub tile_m: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Rows of the weight that each plane has.
    pub columns: u32,
    /// Parts that k is cut into, each the work of other cubes.
    pub parts: u32,
}

/// k of a tile.
pub(super) const STEP: u32 = 64;
/// Codes that a unit decodes at a time: a vector of four words, in a block of any size.
const VECTOR: u32 = 32;
/// Words of a 16 x 16 result.
const RESULT: u32 = 16 * 16 / 4;

impl PlaneConfig {
    /// Rows of the weight that a cube has.
    pub(super) const fn tile_n(self) -> u32 {
        self.planes * self.columns
    }

    /// Steps of each part but the last.
    pub(super) const fn part_steps(self, k: u32) -> u32 {
        (k / STEP).div_ceil(self.parts)
    }

    const fn tiles(self, units: u32, exact: bool) -> [Tile; 2] {
        [
            Tile { lines: self.tile_m, line: STEP, units, exact },
            Tile { lines: self.tile_n(), line: STEP, units, exact: true },
        ]
    }

    pub(super) const fn shared_bytes(self) -> u32 {
        let [x, weight] = self.tiles(1, true);
        x.bytes() + weight.bytes() + 16 * 4
    }
}

/// Comptime facts of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PlanePlan {
    /// With one part, so that instances differ by `partial` alone.
    pub(super) config: PlaneConfig,
    /// Units of a plane.
    pub(super) plane: u32,
    /// Depth of the instruction, 16 x 16 in rows and columns.
    pub(super) inst_k: u32,
    /// Weights and results are rounded to bf16 by hand: a conversion through Vulkan cuts them off.
    pub(super) bf16: bool,
    /// Every tile of x is full.
    pub(super) exact: bool,
    /// Of a plane's columns the first half is one matrix's, and the other of the one it gates.
    pub(super) glu: bool,
    /// Sums go to the workspace.
    pub(super) partial: bool,
}

impl PlanePlan {
    pub(super) const fn units(self) -> u32 {
        self.config.planes * self.plane
    }

    /// Vectors of codes of a tile, and those that a unit takes.
    const fn vectors(self) -> u32 {
        self.config.tile_n() * STEP / VECTOR
    }

    const fn copies(self) -> usize {
        self.vectors().div_ceil(self.units()) as usize
    }

    /// Columns of y that a plane has.
    const fn wide(self) -> u32 {
        if self.glu { self.config.columns / 2 } else { self.config.columns }
    }
}

#[cube]
pub(crate) fn planes<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &Codes<NW>,
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] plan: PlanePlan,
) {
    let PlaneConfig { tile_m, planes, columns, .. } = comptime!(plan.config);
    let (frags_m, frags_n) = comptime!((tile_m as usize / 16, columns as usize / 16));
    let depth = comptime!(plan.inst_k as usize);
    let tiles = comptime!(plan.config.tiles(plan.units(), plan.exact));
    let (tile_x, tile_w) = comptime!((tiles[0], tiles[1]));
    let mut shared_x =
        Shared::<[Word]>::new_aligned_slice(comptime!(tile_x.words() as usize), 128usize);
    // Results pass through it afterwards, which are smaller.
    let mut shared_w =
        Shared::<[Word]>::new_aligned_slice(comptime!(tile_w.words() as usize), 128usize);
    let mut book = Shared::<[f32]>::new_slice(16usize);

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * plan.plane + lane;
    if unit < 16 {
        book[unit as usize] = weight.book[unit as usize];
    }
    // Neighbouring cubes have the same columns of y, and read the same codes.
    let rows = dims.m.div_ceil(tile_m);
    let (block_m, block_n) = (CUBE_POS_X % rows, CUBE_POS_X / rows);
    let (row0, first_col) = (block_m * tile_m, block_n * comptime!(planes * plan.wide()));

    let mut acc = Sequence::<Matrix<f32>>::new(); // [tile_m / 16, columns / 16]
    #[unroll]
    for _ in 0..comptime!(frags_m * frags_n) {
        acc.push(zeros(depth));
    }

    let first = CUBE_POS_Y * dims.part_steps;
    let end = min(dims.k / STEP, first + dims.part_steps);
    let mut at = Corner {
        start: 0usize.runtime(),
        stride: dims.k as usize,
        line: row0,
        lines: dims.m,
        element: first * STEP,
        elements: dims.k,
    };
    let mut next_x = Array::<Word>::new(comptime!(tile_x.copies()));
    let mut codes = Array::<u32>::new(comptime!(4 * plan.copies()));
    let mut absmax = Array::<f32>::new(comptime!(plan.copies()));
    read::<F, NX>(x, &mut next_x, &at, unit, tile_x);
    read_codes(weight, &mut codes, &mut absmax, first, first_col, unit, dims, plan);

    let mut step = first;
    while step < end {
        sync_cube();
        put(&mut shared_x, &next_x, unit, tile_x);
        decode::<F>(&mut shared_w, &codes, &absmax, &book, unit, tile_w, plan);
        sync_cube();
        step += 1;
        // After the last tile nobody takes it.
        let ahead = min(step, end - 1);
        at.element = ahead * STEP;
        read::<F, NX>(x, &mut next_x, &at, unit, tile_x);
        read_codes(weight, &mut codes, &mut absmax, ahead, first_col, unit, dims, plan);
        #[unroll]
        for turn in 0..comptime!(STEP / plan.inst_k) {
            let kk = comptime!(turn * plan.inst_k).runtime();
            let mut a = Sequence::<Matrix<F>>::new();
            #[unroll]
            for i in 0..frags_m {
                let row = comptime!(16 * i as u32).runtime();
                a.push(cooperative::load::<F>(
                    &shared_x,
                    row,
                    kk,
                    MatrixIdent::A,
                    MatrixLayout::RowMajor,
                    depth,
                    tile_x,
                ));
            }
            #[unroll]
            for j in 0..frags_n {
                let col = plane * columns + comptime!(16 * j as u32);
                let b = cooperative::load::<F>(
                    &shared_w,
                    col,
                    kk,
                    MatrixIdent::B,
                    MatrixLayout::ColMajor,
                    depth,
                    tile_w,
                );
                #[unroll]
                for i in 0..frags_m {
                    let c = acc.index(comptime!(i * frags_n + j));
                    cmma::execute(a.index(i), &b, c, c);
                }
            }
        }
    }

    // Every plane has multiplied its last tile.
    sync_cube();
    let own = plane * comptime!(RESULT * frags_n as u32);
    let col0 = first_col + plane * comptime!(plan.wide());
    #[unroll]
    for i in 0..frags_m {
        #[unroll]
        for j in 0..frags_n {
            let from = own + comptime!(RESULT * j as u32);
            cmma::store(
                &mut shared_w[from as usize..(from + RESULT) as usize],
                acc.index(comptime!(i * frags_n + j)),
                16,
                MatrixLayout::RowMajor,
            );
        }
        sync_plane();
        let row0 = row0 + comptime!(16 * i as u32);
        #[unroll]
        for j in 0..comptime!(plan.wide() as usize / 16) {
            let col0 = col0 + comptime!(16 * j as u32);
            let from = own + comptime!(RESULT * j as u32);
            let mut word = lane;
            while word < RESULT {
                let (row, col) = (row0 + word / 4, col0 + word % 4 * 4);
                if row < dims.m {
                    let sums = shared_w[(from + word) as usize];
                    let far = from + word + comptime!(RESULT * plan.wide() / 16);
                    #[unroll]
                    for e in 0..4usize {
                        let sum = f32::reinterpret(sums.extract(e));
                        let col = col + comptime!(e as u32);
                        if comptime!(plan.glu) {
                            let gated = f32::reinterpret(shared_w[far as usize].extract(e));
                            store_both(out, partials, finish, (sum, gated), row, col, dims, plan);
                        } else {
                            store_one(out, partials, finish, sum, row, col, dims, plan);
                        }
                    }
                }
                word += plan.plane;
            }
        }
        sync_plane();
    }
}

/// Row of the weight that line `line` of a cube's tile is; past the end the last.
#[cube]
fn row_of(line: u32, first_col: u32, dims: &Dims, #[comptime] plan: PlanePlan) -> u32 {
    if comptime!(plan.glu) {
        let (columns, wide) = comptime!((plan.config.columns, plan.wide()));
        let (plane, within) = (line / columns, line % columns);
        let half = dims.n / 2;
        min(first_col + plane * wide + within % wide, half - 1) + within / wide * half
    } else {
        min(first_col + line, dims.n - 1)
    }
}

/// Reads a unit's codes of step `step`, and their absmax.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one weight, one place")]
fn read_codes<NW: Size>(
    weight: &Codes<NW>,
    codes: &mut Array<u32>,
    absmax: &mut Array<f32>,
    step: u32,
    first_col: u32,
    unit: u32,
    dims: &Dims,
    #[comptime] plan: PlanePlan,
) {
    let per_line = comptime!(STEP / VECTOR);
    #[unroll]
    for i in 0..comptime!(plan.copies()) {
        // Units without a vector repeat the last, and put it nowhere.
        let vector = min(unit + comptime!(i as u32 * plan.units()), comptime!(plan.vectors() - 1));
        let row = row_of(vector / per_line, first_col, dims, plan);
        let column = step * per_line + vector % per_line;
        let flat = row * (dims.k / VECTOR) + column;
        let words = weight.codes[flat as usize];
        #[unroll]
        for w in 0..4usize {
            codes[comptime!(4 * i + w)] = words.extract(w);
        }
        absmax[i] = weight.absmax_of_word(4 * flat, row, 4 * column, dims.k);
    }
}

/// Puts what a unit's codes stand for into the tile.
#[cube]
fn decode<F: Float>(
    shared: &mut [Word],
    codes: &Array<u32>,
    absmax: &Array<f32>,
    book: &[f32],
    unit: u32,
    #[comptime] tile: Tile,
    #[comptime] plan: PlanePlan,
) {
    let per_line = comptime!(STEP / VECTOR);
    #[unroll]
    for i in 0..comptime!(plan.copies()) {
        let vector = unit + comptime!(i as u32 * plan.units());
        if comptime!(plan.vectors() % plan.units() == 0) || vector < comptime!(plan.vectors()) {
            let to = vector / per_line * comptime!(tile.pitch()) + vector % per_line * 4;
            #[unroll]
            for w in 0..4usize {
                let eight = codes[comptime!(4 * i + w)];
                let mut word = Word::new(0u32);
                #[unroll]
                for part in 0..4usize {
                    let (first, second) = comptime!((2 * part as u32, 2 * part as u32 + 1));
                    let low = book[((eight >> comptime!(code_shift(first))) & 15) as usize];
                    let high = book[((eight >> comptime!(code_shift(second))) & 15) as usize];
                    let (low, high) = (low * absmax[i], high * absmax[i]);
                    if comptime!(plan.bf16) {
                        word.insert(part, pack_bf16(low, high));
                    } else {
                        let mut pair = Vector::<F, Const<2>>::new(F::cast_from(low));
                        pair.insert(1usize, F::cast_from(high));
                        word.insert(part, u32::reinterpret(pair));
                    }
                }
                shared[(to + comptime!(w as u32)) as usize] = word;
            }
        }
    }
}

/// Stores one sum, or the result that it makes.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a sum and its place")]
fn store_one<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    sum: f32,
    row: u32,
    col: u32,
    dims: &Dims,
    #[comptime] plan: PlanePlan,
) {
    if col < dims.n {
        let to = row as usize * dims.n as usize + col as usize;
        if comptime!(plan.partial) {
            partials[(CUBE_POS_Y * dims.m) as usize * dims.n as usize + to] = sum;
        } else {
            let columns = Columns { first: 0usize.runtime(), count: dims.n };
            let value = finish.one(sum, to, col, &columns);
            out[to] = Vector::new(rounded::<F>(value, plan.bf16));
        }
    }
}

/// Stores two sums, the first of which gates the second, or the result that they make.
#[cube]
#[expect(clippy::too_many_arguments, reason = "two sums and their place")]
fn store_both<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    sums: (f32, f32),
    row: u32,
    col: u32,
    dims: &Dims,
    #[comptime] plan: PlanePlan,
) {
    let half = dims.n / 2;
    if col < half {
        if comptime!(plan.partial) {
            let line = (CUBE_POS_Y * dims.m + row) as usize * dims.n as usize;
            partials[line + col as usize] = sums.0;
            partials[line + (half + col) as usize] = sums.1;
        } else {
            let to = row as usize * half as usize + col as usize;
            let columns = Columns { first: 0usize.runtime(), count: dims.n };
            let value = finish.one_of_two(sums, to, (col, half + col), &columns);
            out[to] = Vector::new(rounded::<F>(value, plan.bf16));
        }
    }
}
