//! Shared-memory tiles for plane-scope matrices: the path through Vulkan's `VK_KHR_cooperative_matrix`.
//!
//! There are no asynchronous copies. A unit reads its part of the next tile into registers, multiplies the
//! current tile, and then stores the registers to shared memory. A tile is declared as vectors of 16 bytes,
//! whatever its element type. Units therefore store whole vectors, and the driver knows that every line of a
//! matrix is aligned. A matrix may be loaded through a pointer to any type. The pitch of lines is an odd
//! number of vectors, so that eight neighbouring lines lie in different banks.

use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Declared element of a tile: 16 bytes.
pub(crate) type U32x4 = Vector<u32, Const<4>>;

/// Shape of a tile of 16-bit elements, and the number of units that copy it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub(crate) lines: u32,
    /// Elements of a line, a multiple of 8.
    pub(crate) line: u32,
    pub(crate) units: u32,
    /// True if no tile is partial: none crosses the last line or the end of a line.
    pub(crate) exact: bool,
}

/// Position of a tile within a matrix, in elements.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Corner {
    /// First element of the matrix, and elements from one line to the next.
    pub(crate) start: usize,
    pub(crate) stride: usize,
    /// First line of the tile, and the number of lines of the matrix.
    pub(crate) line: u32,
    pub(crate) lines: u32,
    /// First element of the tile's lines, and the number of elements of the matrix's lines.
    pub(crate) element: u32,
    pub(crate) elements: u32,
}

impl Tile {
    /// Vectors from one line to the next.
    pub(crate) const fn pitch(self) -> u32 {
        self.line / 8 + 1
    }

    pub(crate) const fn vectors(self) -> u32 {
        self.lines * self.pitch()
    }

    pub(crate) const fn bytes(self) -> u32 {
        16 * self.vectors()
    }

    /// Vectors that a unit copies.
    pub(crate) const fn copies(self) -> usize {
        (self.lines * self.line / 8).div_ceil(self.units) as usize
    }

    const fn divides(self) -> bool {
        self.lines * self.line / 8 % self.units == 0
    }
}

/// Reads the vectors of a tile that unit `unit` copies. Vectors past the ends are 0.
#[cube]
pub(crate) fn read<F: Float, N: Size>(
    from: &[Vector<F, N>],
    into: &mut Array<U32x4>,
    corner: &Corner,
    unit: u32,
    #[comptime] tile: Tile,
) {
    let per_line = comptime!(tile.line / 8);
    #[unroll]
    for i in 0..comptime!(tile.copies()) {
        let word = unit + comptime!(i as u32 * tile.units);
        let line = corner.line + word / per_line;
        let element = corner.element + word % per_line * 8;
        let at = corner.start + line as usize * corner.stride + element as usize;
        if comptime!(tile.exact && tile.divides()) {
            into[i] = eight::<F, N>(from, at, 8u32, true);
        } else {
            let mut found = U32x4::new(0u32);
            let is_there = comptime!(tile.divides()) || word < comptime!(tile.lines * per_line);
            if is_there && line < corner.lines && element < corner.elements {
                found = eight::<F, N>(from, at, corner.elements - element, tile.exact);
            }
            into[i] = found;
        }
    }
}

/// Returns eight elements from element `at` on. Elements from the `left`th on are 0.
#[cube]
fn eight<F: Float, N: Size>(
    from: &[Vector<F, N>],
    at: usize,
    left: u32,
    #[comptime] all: bool,
) -> U32x4 {
    let width = N::value();
    let mut word = U32x4::new(0u32);
    if comptime!(width == 4) {
        #[unroll]
        for half in 0..2usize {
            if comptime!(all) || comptime!(4 * half as u32) < left {
                let pair = Vector::<u32, Const<2>>::reinterpret(from[at / width + half]);
                word.insert(comptime!(2 * half), pair.extract(0usize));
                word.insert(comptime!(2 * half + 1), pair.extract(1usize));
            }
        }
    } else {
        #[unroll]
        for part in 0..4usize {
            let mut pair = Vector::<F, Const<2>>::new(F::new(0.0));
            #[unroll]
            for e in 0..2usize {
                let element = comptime!(2 * part + e);
                if comptime!(all) || comptime!(element as u32) < left {
                    let vector = from[at / width + comptime!(element / width)];
                    pair.insert(e, vector.extract(comptime!(element % width)));
                }
            }
            word.insert(part, u32::reinterpret(pair));
        }
    }
    word
}

/// Returns the eight elements of some vectors.
#[cube]
pub(crate) fn packed<F: Float, N: Size>(vectors: &Array<Vector<F, N>>) -> U32x4 {
    let width = N::value();
    let mut word = U32x4::new(0u32);
    #[unroll]
    for part in 0..4usize {
        let mut pair = Vector::<F, Const<2>>::new(F::new(0.0));
        #[unroll]
        for e in 0..2usize {
            let element = comptime!(2 * part + e);
            let vector = vectors[comptime!(element / width)];
            pair.insert(e, vector.extract(comptime!(element % width)));
        }
        word.insert(part, u32::reinterpret(pair));
    }
    word
}

/// Stores the vectors read by [`read`] in the tile.
#[cube]
pub(crate) fn put(shared: &mut [U32x4], read: &Array<U32x4>, unit: u32, #[comptime] tile: Tile) {
    let per_line = comptime!(tile.line / 8);
    #[unroll]
    for i in 0..comptime!(tile.copies()) {
        let word = unit + comptime!(i as u32 * tile.units);
        if comptime!(tile.divides()) || word < comptime!(tile.lines * per_line) {
            shared[(word / per_line * comptime!(tile.pitch()) + word % per_line) as usize] =
                read[i];
        }
    }
}

/// Loads the matrix of 16 lines by `depth` elements, or its transpose, whose corner is element `element` of
/// line `line`. `element` is a multiple of 8.
#[cube]
pub(crate) fn load<F: Float>(
    shared: &[U32x4],
    line: u32,
    element: u32,
    #[comptime] ident: MatrixIdent,
    #[comptime] layout: MatrixLayout,
    #[comptime] depth: usize,
    #[comptime] tile: Tile,
) -> Matrix<F> {
    // SAFETY: the `load` below initialises the matrix.
    let mut matrix = unsafe { Matrix::<F>::uninitialized(ident, 16usize, 16usize, depth, layout) };
    let at = line * comptime!(tile.pitch()) + element / 8;
    let end = shared.len();
    // The stride counts elements of the pointer's type, which has 32 bits.
    cmma::load(&mut matrix, &shared[at as usize..end], comptime!(4 * tile.pitch()));
    matrix
}

/// Returns an accumulator of zeros.
#[cube]
pub(crate) fn zeros(#[comptime] depth: usize) -> Matrix<f32> {
    let undefined = comptime!(MatrixLayout::Undefined);
    Matrix::<f32>::from_value(MatrixIdent::Accumulator, 16usize, 16usize, depth, undefined, 0.0)
}
