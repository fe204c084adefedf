//! Iteration of a plane over the cache: its tiles, their addresses, and the copies into its ring.

use cubecl::prelude::*;

use super::cache::{Cache, Dims, PageSteps, bytes};
use super::plan::SplitPlan;
use super::scores::Scores;
use crate::tile::{CopyLane, CopyPlan, TileShape, commit_copies, copy_vector};

/// First tile and number of iterations of a plane: for the length that the host knows if
/// `foreseen`, else for `length` positions.
#[cube]
pub(crate) fn first_iterations(
    length: u32,
    scores: &Scores,
    dims: &Dims,
    part: u32,
    plane: u32,
    #[comptime] plan: SplitPlan,
) -> (u32, u32) {
    if comptime!(plan.foreseen) {
        iterations(dims.first_tile, dims.whole, dims.rest, part, plane, plan.planes)
    } else {
        iterations_of(length, scores, dims, part, plane, plan)
    }
}

/// First tile and number of iterations of a plane, for a sequence of `length` positions.
#[cube]
pub(crate) fn iterations_of(
    length: u32,
    scores: &Scores,
    dims: &Dims,
    part: u32,
    plane: u32,
    #[comptime] plan: SplitPlan,
) -> (u32, u32) {
    let (tile_kv, planes) = comptime!((plan.tile_kv(), plan.planes));
    let newest = length as i32 - comptime!(plan.seq_q as i32);
    let end = length.div_ceil(tile_kv);
    let first_tile = min(scores.first(newest) as u32 / tile_kv, end);
    let tiles = end - first_tile;
    iterations(first_tile, tiles / dims.splits, tiles % dims.splits, part, plane, planes)
}

/// First tile and number of iterations of a plane. Tiles start at `first_tile`; each split has
/// `whole`, and the first `rest` splits have one more.
#[cube]
fn iterations(
    first_tile: u32,
    whole: u32,
    rest: u32,
    part: u32,
    plane: u32,
    #[comptime] planes: u32,
) -> (u32, u32) {
    let from = first_tile + part * whole + min(part, rest);
    let to = from + whole + select(part < rest, 1u32, 0u32);
    let own = from + plane;
    (own, (to - min(own, to)).div_ceil(planes))
}

/// State of a plane's iteration over the cache.
#[derive(CubeType)]
pub(crate) struct Stream {
    pub(crate) from_k: u64,
    pub(crate) from_v: u64,
    pub(crate) lane: CopyLane,
    pub(crate) batch: u32,
    pub(crate) kv_head: u32,
    /// First tile; the next one is `planes` tiles further.
    pub(crate) own_tile: u32,
    pub(crate) count: u32,
    pub(crate) length: u32,
}

/// Location of a tile: its page, its first row there, and the rows of the sequence from that row
/// on.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Tile {
    page: u32,
    row: u32,
    left: u32,
    there: bool,
}

#[cube]
impl Stream {
    /// Page number of iteration `from` plus this unit's lane.
    pub(crate) fn pages(
        &self,
        cache: &Cache,
        dims: &Dims,
        from: u32,
        #[comptime] plan: SplitPlan,
    ) -> u32 {
        let (planes, tile_kv) = comptime!((plan.planes, plan.tile_kv()));
        // Nothing is copied past the last iteration; clamp to an entry that exists.
        let iteration = min(from + UNIT_POS_X, max(self.count, 1u32) - 1);
        let key = min((self.own_tile + iteration * planes) * tile_kv, dims.capacity - 1);
        let (page, _row) = cache.place(dims, self.batch, key, plan.cache);
        page
    }

    /// Tile of iteration `iteration`; one unit of the plane holds its page number in `pages`.
    pub(crate) fn place(&self, pages: u32, iteration: u32, #[comptime] plan: SplitPlan) -> Tile {
        let first_key =
            (self.own_tile + iteration * comptime!(plan.planes)) * comptime!(plan.tile_kv());
        let mut page = self.batch;
        let mut row = first_key;
        if comptime!(plan.cache.block > 0) {
            page = plane_shuffle(pages, iteration % 32);
            row = first_key % comptime!(plan.cache.block);
        }
        let there = iteration < self.count;
        Tile { page, row, left: self.length - min(first_key, self.length), there }
    }

    /// Issues the copies of a tile's keys into the stage at `to`, if the tile exists, and commits
    /// their group.
    pub(crate) fn copy_keys(
        &self,
        tile: &Tile,
        cache: &Cache,
        dims: &Dims,
        to: u32,
        #[comptime] plan: SplitPlan,
    ) {
        if tile.there {
            self.copy(self.from_k, &dims.k, tile, to, plan);
            if comptime!(plan.cache.quantized) {
                let scales = cache.k_scales_address();
                self.copy_scales(
                    scales,
                    dims,
                    tile,
                    to + comptime!(2 * plan.tile.shape.bytes()),
                    plan,
                );
            }
        }
        commit_copies();
    }

    /// Like [`Stream::copy_keys`], for the tile's values.
    pub(crate) fn copy_values(
        &self,
        tile: &Tile,
        cache: &Cache,
        dims: &Dims,
        to: u32,
        #[comptime] plan: SplitPlan,
    ) {
        if tile.there {
            let to_v = to + comptime!(plan.tile.shape.bytes());
            self.copy(self.from_v, &dims.v, tile, to_v, plan);
            if comptime!(plan.cache.quantized) {
                let scales = cache.v_scales_address();
                let far = comptime!(2 * plan.tile.shape.bytes() + plan.scale_bytes());
                self.copy_scales(scales, dims, tile, to + far, plan);
            }
        }
        commit_copies();
    }

    fn copy(
        &self,
        from: u64,
        steps: &PageSteps,
        tile: &Tile,
        to: u32,
        #[comptime] plan: SplitPlan,
    ) {
        let elem = comptime!(plan.tile.shape.elem as u32);
        let line = bytes(steps.seq, elem);
        let corner = from + bytes(steps.at(tile.page, self.kv_head, tile.row), elem);
        let start = corner + self.lane.start(line, plan.tile);
        self.lane.copy(start, line, to, tile.left, plan.head_dim, plan.tile);
    }

    fn copy_scales(
        &self,
        from: u64,
        dims: &Dims,
        tile: &Tile,
        to: u32,
        #[comptime] plan: SplitPlan,
    ) {
        let rows = comptime!(plan.tile_kv());
        let one = comptime!(CopyPlan {
            shape: TileShape { swizzled: false, ..TileShape::new(rows, 1, false, 4) },
            width: 1,
            units: 32,
            exact: false,
        });
        #[unroll]
        for pass in 0..comptime!(rows.div_ceil(32)) {
            let row = UNIT_POS_X + comptime!(32 * pass);
            if row < rows {
                let at = dims.scales.at(tile.page, self.kv_head, tile.row + row);
                copy_vector(from + bytes(at, 4u32), to + row * 4, 0u32, row < tile.left, one);
            }
        }
    }
}
