//! Tiles of the multiply-add path: layout of an operand in shared memory, and positions that a unit
//! reads.

use cubecl::prelude::*;

use crate::tile::{TileShape, offset_in_tile};

/// Units of a group: rows, columns.
pub(super) const GROUP: (u32, u32) = (4, 8);

/// Comptime parameters of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FmaOperand {
    /// Swizzled if k is contiguous, because a group then reads it across its rows.
    pub(crate) tile: TileShape,
    /// Rows (lhs) or columns (rhs) of C per unit, and units of a group along them.
    pub(crate) own: u32,
    pub(crate) group: u32,
}

impl FmaOperand {
    pub(super) const fn along_k(self) -> bool {
        !self.tile.transposed
    }

    /// Returns result and k of the first element of vector `i` that a unit reads in one pass. A
    /// vector holds k of one result, or results of one k.
    pub(super) const fn vector(self, i: u32, pass: u32, width: u32) -> (u32, u32) {
        if self.along_k() {
            let vectors = pass / width;
            (i / vectors, i % vectors * width)
        } else {
            let vectors = self.own / width;
            (i % vectors * width, i / vectors)
        }
    }

    /// Returns result and k of element `e` of the vector at `(nth, k)`.
    pub(super) const fn element(self, nth: u32, k: u32, e: u32) -> (u32, u32) {
        if self.along_k() { (nth, k + e) } else { (nth + e, k) }
    }

    /// Number of a unit's rows that the swizzle treats differently; the pattern repeats after eight
    /// rows.
    pub(super) const fn swizzle_patterns(self) -> u32 {
        if self.along_k() { 8 / self.group } else { 1 }
    }

    /// Number of vectors from base `pattern` to result `nth` at depth `k` of the pass.
    pub(super) const fn distance(self, nth: u32, k: u32, pattern: u32, width: u32) -> u32 {
        let cols = self.tile.cols as u32;
        if self.along_k() {
            ((nth - pattern) * self.group * cols + k) / width
        } else {
            (k * cols + self.nth(nth, width)) / width
        }
    }

    /// Distance between the first results of neighbouring units: 1, or a vector.
    pub(super) const fn first_step(self, width: u32) -> u32 {
        if self.along_k() { 1 } else { width }
    }

    /// Distance of result `i` of a unit from its first, with vectors of `width`.
    pub(super) const fn nth(self, i: u32, width: u32) -> u32 {
        if self.along_k() { i * self.group } else { i / width * width * self.group + i % width }
    }
}

/// Location of a cube's tiles in one operand: start, stride, first row (or column) of C, and the
/// ends of its rows and of the range of k.
#[derive(CubeType)]
pub(super) struct Source {
    pub(super) start: usize,
    pub(super) stride: usize,
    pub(super) outer: u32,
    pub(super) outer_end: u32,
    pub(super) k_start: u32,
    pub(super) k_end: u32,
}

#[cube]
impl Source {
    /// Returns the index of row (or column) `outer` of the tile at depth `k` of the matrix.
    pub(super) fn element(&self, outer: u32, k: u32, #[comptime] operand: FmaOperand) -> usize {
        let outer = (self.outer + outer) as usize;
        if comptime!(operand.along_k()) {
            self.start + outer * self.stride + k as usize
        } else {
            self.start + k as usize * self.stride + outer
        }
    }

    pub(super) fn holds(&self, outer: u32, k: u32) -> bool {
        self.outer + outer < self.outer_end && k < self.k_end
    }
}

/// Returns the offset of `(outer, k)` in a tile, in bytes.
#[cube]
pub(super) fn offset_of(outer: u32, k: u32, #[comptime] operand: FmaOperand) -> u32 {
    if comptime!(operand.along_k()) {
        offset_in_tile(outer, k, operand.tile)
    } else {
        offset_in_tile(k, outer, operand.tile)
    }
}
