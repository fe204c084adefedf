//! The vocabulary of tensor-core kernels: asynchronous copies, swizzled tiles, fragments.
//!
//! A *plane* is CUDA's warp and Vulkan's subgroup, a *unit* a thread, a *cube* a thread block.
//! A shared tile is `[rows, cols]` with `cols` contiguous, cut into 16-byte chunks. `ldmatrix` reads
//! the same chunk column of eight rows at once; stored as they come, those eight chunks fall into
//! the same banks. XOR-ing the chunk with the row spreads them over all banks, for the copies in and
//! the reads out alike.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::frontend::barrier::{copy_async, copy_async_checked};
use cubecl::prelude::*;

/// A shared tile's geometry: comptime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileShape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Bytes of an element.
    pub(crate) elem: usize,
    /// Whether fragments read it across its rows (`ldmatrix.trans`, or scalar loads for 4 bytes).
    pub(crate) transposed: bool,
}

impl TileShape {
    /// Elements of a 16-byte chunk.
    pub(crate) const fn chunk(self) -> usize {
        16 / self.elem
    }

    pub(crate) const fn len(self) -> usize {
        self.rows * self.cols
    }

    /// How the chunk index depends on the row: `chunk ^ (((row >> shift) & mask) << up)`.
    const fn swizzle(self) -> (u32, u32, u32) {
        let chunks = self.cols / self.chunk();
        if self.elem == 4 && self.transposed {
            // Scalar reads: four rows at a time, eight neighbouring elements (two chunks) of each.
            return (0, 3, 1);
        }
        match chunks {
            1 => (0, 0, 0),
            2 => (2, 1, 0),
            4 => (1, 3, 0),
            _ => (0, 7, 0),
        }
    }
}

/// Offset in elements of `(row, col)` in a swizzled tile.
#[cube]
pub(crate) fn offset_in_tile(row: u32, col: u32, #[comptime] shape: TileShape) -> u32 {
    let chunk = comptime!(shape.chunk() as u32);
    let (shift, mask, up) = comptime!(shape.swizzle());
    let twisted = (col / chunk) ^ (((row >> shift) & mask) << up);
    row * comptime!(shape.cols as u32) + twisted * chunk + col % chunk
}

/// Closes the group of asynchronous copies issued since the last one.
#[cube]
pub(crate) fn commit_copies() {
    gpu_asm!("cp.async.commit_group;", options(nomem));
}

/// Waits until at most `pending` groups of copies are under way.
#[cube]
pub(crate) fn wait_copies(#[comptime] pending: u32) {
    gpu_asm!(
        "cp.async.wait_group {pending};",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Fills a tile at `dst[slot..]` from the matrix corner at `src[corner..]`, whose lines are `line`
/// apart; `slot`, `corner` and `line` count vectors. Rows past `rows_left` and columns past
/// `cols_left` become zero. `units` work together; `exact` promises that nothing is past the edge.
///
/// A unit's copies are whole rows apart, so everything but the corner is the same for every tile, and
/// copies differ by constants.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one tile, one edge")]
pub(crate) fn copy_tile<F: Float, N: Size>(
    src: &[Vector<F, N>],
    dst: &mut [Vector<F, N>],
    corner: usize,
    line: usize,
    slot: u32,
    rows_left: u32,
    cols_left: u32,
    unit: u32,
    #[comptime] units: usize,
    #[comptime] shape: TileShape,
    #[comptime] exact: bool,
) {
    let width = N::value();
    let per_row = comptime!((shape.cols / width) as u32);
    let copies = comptime!(shape.len() / width / units);
    // Rows between a unit's copies; the swizzle repeats after eight.
    let pass = comptime!(units as u32 / per_row);
    let even = comptime!(units as u32 % per_row == 0 && pass % 8 == 0);
    let (row0, chunk0) = (unit / per_row, unit % per_row);
    let col0 = chunk0 * comptime!(width as u32);
    let to0 = offset_in_tile(row0, col0, shape) / comptime!(width as u32);
    let from0 = corner + row0 as usize * line + chunk0 as usize;
    #[unroll]
    for i in 0..copies {
        if comptime!(even) {
            let down = comptime!(i as u32 * pass);
            let from = from0 + comptime!(down as usize) * line;
            let to = (slot + to0 + comptime!(down * per_row)) as usize;
            let inside = row0 + down < rows_left && col0 < cols_left;
            copy_vector::<F, N>(src, dst, from, to, inside, shape, exact);
        } else {
            let at = unit + comptime!((i * units) as u32);
            let (row, chunk) = (at / per_row, at % per_row);
            let col = chunk * comptime!(width as u32);
            let from = corner + row as usize * line + chunk as usize;
            let to = (slot + offset_in_tile(row, col, shape) / comptime!(width as u32)) as usize;
            let inside = row < rows_left && col < cols_left;
            copy_vector::<F, N>(src, dst, from, to, inside, shape, exact);
        }
    }
}

/// Copies one vector, or writes zero when `inside` is false.
#[cube]
fn copy_vector<F: Float, N: Size>(
    src: &[Vector<F, N>],
    dst: &mut [Vector<F, N>],
    from: usize,
    to: usize,
    inside: bool,
    #[comptime] shape: TileShape,
    #[comptime] exact: bool,
) {
    let width = N::value();
    let bytes = comptime!(width * shape.elem);
    if comptime!(bytes < 4) {
        // cp.async moves 4, 8 or 16 bytes: single half-precision elements go through a register.
        let mut value = Vector::<F, N>::new(F::new(0.0));
        if inside {
            value = src[from];
        }
        dst[to] = value;
    } else if comptime!(exact) {
        copy_async(&src[from..from + 1], &mut dst[to..to + 1], comptime!(width as u32));
    } else {
        let from = select(inside, from, 0);
        let valid = select(inside, 1usize, 0usize);
        copy_async_checked(&src[from..from + valid], &mut dst[to..to + 1], comptime!(width as u32));
    }
}

/// Where a unit's `ldmatrix` row of the left operand starts, in vectors from the tile's start: the
/// fragment at `(row, k)` of a `[m, k]` tile, or of a `[k, m]` tile when it is transposed. Fragments a
/// multiple of eight rows of the tile further on are at a constant distance.
#[cube]
pub(crate) fn lhs_lane<N: Size>(row: u32, k: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    let width = N::value();
    let chunk = comptime!(shape.chunk() as u32);
    let (r, j) = (lane % 8, lane / 8);
    let at = if comptime!(shape.transposed) {
        offset_in_tile(k + r + (j / 2) * 8, row + (j % 2) * 8, shape)
    } else {
        offset_in_tile(row + r + (j % 2) * 8, k + (j / 2) * chunk, shape)
    };
    at / comptime!(width as u32)
}

/// As [`lhs_lane`] for two neighbouring 8-column fragments of the right operand at `(k, col)` of a
/// `[k, n]` tile (`transposed`), or of an `[n, k]` tile.
#[cube]
pub(crate) fn rhs_lane<N: Size>(col: u32, k: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    let width = N::value();
    let chunk = comptime!(shape.chunk() as u32);
    let (r, j) = (lane % 8, lane / 8);
    let at = if comptime!(shape.transposed) {
        offset_in_tile(k + r + (j % 2) * 8, col + (j / 2) * 8, shape)
    } else {
        offset_in_tile(col + r + (j / 2) * 8, k + (j % 2) * chunk, shape)
    };
    at / comptime!(width as u32)
}

/// One 16-row fragment of the left operand: the four registers that `ldmatrix` brings from the rows at
/// `at`, which is [`lhs_lane`] plus the stage.
#[cube]
pub(crate) fn load_lhs<F: Float, I: Float, N: Size, NF: Size>(
    tile: &[Vector<F, N>],
    at: u32,
    def: &MmaDefinition<I, I, f32>,
    #[comptime] shape: TileShape,
) -> Array<Vector<I, NF>> {
    let start = at as usize;
    let raw = def.load_matrix::<Vector<F, N>, NF>(
        &tile[start..start + 1],
        MatrixIdent::A,
        4usize,
        comptime!(shape.transposed),
    );
    let mut out = Array::<Vector<I, NF>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        if comptime!(shape.elem == 2) {
            // The same type: a conversion would take the two halves apart.
            out[i] = Vector::reinterpret(raw[i]);
        } else {
            out[i] = Vector::cast_from(raw[i]);
        }
    }
    out
}

/// Two neighbouring fragments.
#[derive(CubeType)]
pub(crate) struct Pair<I: Float, NF: Size> {
    pub(crate) left: Array<Vector<I, NF>>,
    pub(crate) right: Array<Vector<I, NF>>,
}

/// Two neighbouring 8-column fragments of the right operand; `at` is [`rhs_lane`] plus the stage.
#[cube]
pub(crate) fn load_rhs<F: Float, I: Float, N: Size, NF: Size>(
    tile: &[Vector<F, N>],
    at: u32,
    def: &MmaDefinition<I, I, f32>,
    #[comptime] shape: TileShape,
) -> Pair<I, NF> {
    let raw = load_lhs::<F, I, N, NF>(tile, at, def, shape); // the same four rows of eight chunks
    let mut left = Array::<Vector<I, NF>>::new(2usize);
    let mut right = Array::<Vector<I, NF>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        left[i] = raw[i];
        right[i] = raw[i + 2];
    }
    Pair::<I, NF> { left, right }
}

/// [`load_lhs`] for transposed 4-byte tiles, which `ldmatrix` cannot turn: element by element, the
/// fragment at `(k, row)` of the tile that starts at element `slot`.
#[cube]
pub(crate) fn gather_lhs<F: Float, I: Float, N: Size, NF: Size>(
    tile: &[Vector<F, N>],
    slot: u32,
    row: u32,
    k: u32,
    lane: u32,
    #[comptime] shape: TileShape,
) -> Array<Vector<I, NF>> {
    let mut out = Array::<Vector<I, NF>>::new(4usize);
    #[unroll]
    for r in 0..4u32 {
        let (dm, dk) = comptime!((8 * (r % 2), 4 * (r / 2)));
        let at = slot + offset_in_tile(k + dk + lane % 4, row + dm + lane / 4, shape);
        out[comptime!(r as usize)] = one::<F, I, N, NF>(tile, at);
    }
    out
}

/// [`load_rhs`] for transposed 4-byte tiles.
#[cube]
pub(crate) fn gather_rhs<F: Float, I: Float, N: Size, NF: Size>(
    tile: &[Vector<F, N>],
    slot: u32,
    col: u32,
    k: u32,
    lane: u32,
    #[comptime] shape: TileShape,
) -> Pair<I, NF> {
    let mut left = Array::<Vector<I, NF>>::new(2usize);
    let mut right = Array::<Vector<I, NF>>::new(2usize);
    #[unroll]
    for r in 0..2u32 {
        let dk = comptime!(4 * r);
        let at = slot + offset_in_tile(k + dk + lane % 4, col + lane / 4, shape);
        left[comptime!(r as usize)] = one::<F, I, N, NF>(tile, at);
        let at = slot + offset_in_tile(k + dk + lane % 4, col + 8 + lane / 4, shape);
        right[comptime!(r as usize)] = one::<F, I, N, NF>(tile, at);
    }
    Pair::<I, NF> { left, right }
}

/// One element of a vectorised tile, rounded to the instruction's type.
#[cube]
fn one<F: Float, I: Float, N: Size, NF: Size>(tile: &[Vector<F, N>], at: u32) -> Vector<I, NF> {
    let scalars = tile.with_vector_size::<Const<1>>();
    Vector::new(I::cast_from(scalars[at as usize].extract(0usize)))
}
