//! Tiles in shared memory that plane-scope matrices are loaded from: the path through Vulkan's
//! `VK_KHR_cooperative_matrix`.
//!
//! There are no asynchronous copies: what comes next is read into registers before a tile is multiplied, and put into
//! its place after. A tile is declared as words of 16 bytes, whatever it holds, so that units store whole words and the
//! driver knows that every line of a matrix is aligned; a matrix may be loaded through a pointer to any type. Lines are
//! an odd number of words apart: eight neighbouring lines lie in different banks.

use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// What a tile is declared as.
pub(crate) type Word = Vector<u32, Const<4>>;

/// Lines of elements of 16 bits, and how many units bring them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub(crate) lines: u32,
    /// Elements of a line, a multiple of 8.
    pub(crate) line: u32,
    pub(crate) units: u32,
    /// None of its lines is past the last, and none cut short.
    pub(crate) exact: bool,
}

/// Where in a matrix a tile lies, in elements.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Corner {
    /// The matrix's first element, and elements between its lines.
    pub(crate) start: usize,
    pub(crate) stride: usize,
    /// First line, and one past the matrix's last.
    pub(crate) line: u32,
    pub(crate) lines: u32,
    /// First element of the lines, and one past their last.
    pub(crate) element: u32,
    pub(crate) elements: u32,
}

impl Tile {
    /// Words from one line to the next.
    pub(crate) const fn pitch(self) -> u32 {
        self.line / 8 + 1
    }

    pub(crate) const fn words(self) -> u32 {
        self.lines * self.pitch()
    }

    pub(crate) const fn bytes(self) -> u32 {
        16 * self.words()
    }

    /// Words that a unit brings.
    pub(crate) const fn copies(self) -> usize {
        (self.lines * self.line / 8).div_ceil(self.units) as usize
    }

    const fn divides(self) -> bool {
        self.lines * self.line / 8 % self.units == 0
    }
}

/// Reads unit `unit`'s words of a tile, zeros past the ends.
#[cube]
pub(crate) fn read<F: Float, N: Size>(
    from: &[Vector<F, N>],
    into: &mut Array<Word>,
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
            let mut found = Word::new(0u32);
            let is_there = comptime!(tile.divides()) || word < comptime!(tile.lines * per_line);
            if is_there && line < corner.lines && element < corner.elements {
                found = eight::<F, N>(from, at, corner.elements - element, tile.exact);
            }
            into[i] = found;
        }
    }
}

/// Eight elements from element `at` on, zeros from the `left`th on.
#[cube]
fn eight<F: Float, N: Size>(
    from: &[Vector<F, N>],
    at: usize,
    left: u32,
    #[comptime] all: bool,
) -> Word {
    let width = N::value();
    let mut word = Word::new(0u32);
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

/// Puts what was read into the tile.
#[cube]
pub(crate) fn put(shared: &mut [Word], read: &Array<Word>, unit: u32, #[comptime] tile: Tile) {
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

/// The matrix of 16 lines by `depth` elements, or the other way round, whose corner is element `element` of line `line`;
/// `element` is a multiple of 8.
#[cube]
pub(crate) fn load<F: Float>(
    shared: &[Word],
    line: u32,
    element: u32,
    #[comptime] ident: MatrixIdent,
    #[comptime] layout: MatrixLayout,
    #[comptime] depth: usize,
    #[comptime] tile: Tile,
) -> Matrix<F> {
    // SAFETY: loaded in the next line.
    let mut matrix = unsafe { Matrix::<F>::uninitialized(ident, 16usize, 16usize, depth, layout) };
    let at = line * comptime!(tile.pitch()) + element / 8;
    let end = shared.len();
    // The stride counts elements of what the pointer is to, numbers of 32 bits.
    cmma::load(&mut matrix, &shared[at as usize..end], comptime!(4 * tile.pitch()));
    matrix
}

/// A matrix of zeros to add to.
#[cube]
pub(crate) fn zeros(#[comptime] depth: usize) -> Matrix<f32> {
    let undefined = comptime!(MatrixLayout::Undefined);
    Matrix::<f32>::from_value(MatrixIdent::Accumulator, 16usize, 16usize, depth, undefined, 0.0)
}
