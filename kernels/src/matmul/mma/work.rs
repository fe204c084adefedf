//! Work items: blocks of C, each over a range of k.

use cubecl::prelude::*;

use super::MmaConfig;
use crate::matmul::dims::{Dims, block_of};

/// Work item: a block of C over a range of k.
#[derive(CubeType)]
pub(crate) struct Item {
    pub(crate) row: u32,
    pub(crate) col: u32,
    /// One past the last row of the batch.
    pub(crate) row_end: u32,
    /// First k, and number of tiles from there.
    pub(crate) k: u32,
    pub(crate) tiles: u32,
    pub(crate) batch: u32,
    /// Index of the split of k.
    pub(crate) part: u32,
}

/// All work items of a launch: blocks of each matmul, times the number of matmuls and splits.
///
/// Groups count as one matmul, whose block rows are those of all groups in order.
#[derive(CubeType)]
pub(crate) struct Work {
    rows: u32,
    cols: u32,
    slices: u32,
}

#[cube]
impl Work {
    pub(crate) fn new(dims: &Dims, #[comptime] config: MmaConfig) -> Work {
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

    /// Returns item `id`. Neighbouring items are neighbouring blocks over the same k.
    pub(crate) fn item(&self, dims: &Dims, id: u32, #[comptime] config: MmaConfig) -> Item {
        let (tile_m, tile_n, tile_k) = comptime!((config.tile_m, config.tile_n, config.tile_k));
        let blocks = self.rows * self.cols;
        let (slice, block) = (id / blocks, id % blocks);
        let (block_m, block_n) = block_of(self.rows, self.cols, block);
        let (mut block_m, mut batch) = (block_m, slice / dims.parts);
        if comptime!(dims.grouped) {
            // The loop ends at a group, because the counted blocks include this one.
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

/// Number of block rows of group `group`.
#[cube]
fn block_rows(dims: &Dims, group: u32, #[comptime] config: MmaConfig) -> u32 {
    let (first, end) = dims.rows(group);
    (max(first, end) - first).div_ceil(config.tile_m)
}
