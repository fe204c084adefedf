//! Building blocks of tensor-core kernels: asynchronous copies, swizzled tiles, fragments.
//!
//! A *plane* is CUDA's warp and Vulkan's subgroup, a *unit* a thread, a *cube* a thread block. A shared tile
//! is `[rows, cols]` with `cols` contiguous, divided into 16-byte chunks. `ldmatrix` reads the same chunk
//! column of eight rows at once. Without a swizzle those eight chunks would fall into the same banks. XOR of
//! the chunk with the row spreads them over all banks, both for the copies in and for the reads out.

mod arithmetic;
mod copies;
mod fragments;
mod memory;

use cubecl::prelude::*;

pub(crate) use arithmetic::{
    exp2, fma_pairs, multiply_bytes, multiply_halves, pack_pair, reciprocal, typed,
};
pub(crate) use copies::{
    CopyLane, CopyPlan, Start, commit_copies, copy_vector, next_stage, wait_copies,
};
pub(crate) use fragments::{
    LHS_REGISTERS, RHS_REGISTERS, gather_fragments, gather_lane, half_chunk_lane, lhs_lane,
    load_fragments, load_half_chunks, quad_transpose, rhs_lane, transpose_halves,
};
pub(crate) use memory::{
    global_address, global_address_mut, load_chunk, load_pair, load_shared, load_word, load_words,
    shared_address, store_pair, store_shared, store_word, store_words,
};

/// Compile-time geometry of a shared tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileShape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Bytes of an element.
    pub(crate) elem: usize,
    /// True if fragments read the tile across its rows (`ldmatrix.trans`, or scalar loads for 4 bytes).
    pub(crate) transposed: bool,
    /// True if chunks are XORed with their rows; false if a row is read at a time.
    pub(crate) swizzled: bool,
    /// True if units read half chunks: two neighbouring chunks of four rows at once.
    pub(crate) halved: bool,
}

impl TileShape {
    /// Creates an `[outer, k]` tile, or `[k, outer]` if the outer axis is the contiguous one (`transposed`).
    pub(crate) const fn new(outer: u32, k: u32, transposed: bool, elem: usize) -> Self {
        let (rows, cols) = if transposed { (k, outer) } else { (outer, k) };
        let (rows, cols) = (rows as usize, cols as usize);
        Self { rows, cols, elem, transposed, swizzled: true, halved: false }
    }

    /// Elements of a 16-byte chunk.
    pub(crate) const fn chunk(self) -> usize {
        16 / self.elem
    }

    /// Returns whether fragments are read element by element.
    pub(crate) const fn gathered(self) -> bool {
        self.elem == 4 && self.transposed
    }

    pub(crate) const fn len(self) -> usize {
        self.rows * self.cols
    }

    pub(crate) const fn bytes(self) -> u32 {
        (self.len() * self.elem) as u32
    }

    /// Bytes of a row.
    pub(crate) const fn row_bytes(self) -> u32 {
        (self.cols * self.elem) as u32
    }

    /// Returns the swizzle of the chunk index by the row: `chunk ^ (((row >> shift) & mask) << up)`.
    const fn swizzle(self) -> (u32, u32, u32) {
        let chunks = self.cols / self.chunk();
        if !self.swizzled {
            return (0, 0, 0);
        }
        if self.gathered() {
            // Scalar reads access four rows at a time, eight neighbouring elements (two chunks) of each.
            return (0, 3, 1);
        }
        match chunks {
            1 => (0, 0, 0),
            2 => (2, 1, 0),
            4 => (1, 3, 0),
            _ if self.halved => (0, 3, 1),
            _ => (0, 7, 0),
        }
    }

    /// Returns the step from a position in the tile to the one `rows` down and `cols` to the right: an XOR of
    /// the address, then an addition. Neither may carry into the three bits of row or chunk that the swizzle
    /// mixes. A tile must start at a multiple of 128 bytes.
    pub(crate) const fn step(self, rows: u32, cols: u32) -> (u32, u32) {
        let (shift, mask, up) = self.swizzle();
        let chunk = cols / self.chunk() as u32;
        let mixed = if self.swizzled { chunk % 8 } else { 0 };
        let twist = mixed ^ (((rows >> shift) & mask) << up);
        (twist * 16, rows * self.row_bytes() + (chunk - mixed) * 16)
    }
}

/// Returns the byte offset of `(row, col)` in a swizzled tile.
#[cube]
pub(crate) fn offset_in_tile(row: u32, col: u32, #[comptime] shape: TileShape) -> u32 {
    let (chunk, elem) = comptime!((shape.chunk() as u32, shape.elem as u32));
    let (shift, mask, up) = comptime!(shape.swizzle());
    let twisted = (col / chunk) ^ (((row >> shift) & mask) << up);
    row * comptime!(shape.row_bytes()) + twisted * 16 + col % chunk * elem
}
