//! Maps a group of units to a head of a token, and the head to its destination.

use cubecl::prelude::*;

use super::RopePlan;

/// Sizes of one launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Dims {
    /// Heads of all tokens.
    pub(super) groups: u32,
    pub(super) seq: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    /// First position that the cache or the table does not have.
    pub(super) limit: u32,
    /// Pages of a paged cache, and maximum pages of a sequence.
    pub(super) blocks: u32,
    pub(super) max_blocks: u32,
    /// Vectors from one position of the table to the next.
    pub(super) table_stride: u32,
    pub(super) k: Steps,
    pub(super) v: Steps,
    /// Strides of the scales in elements.
    pub(super) scales: Steps,
    pub(super) eps: f32,
}

/// [`CacheStrides`] in vectors.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Steps {
    pub(super) page: usize,
    pub(super) head: usize,
    pub(super) seq: usize,
}

#[cube]
impl Steps {
    /// Returns the first vector of a position.
    fn at(&self, page: u32, head: u32, position: u32) -> usize {
        page as usize * self.page + head as usize * self.head + position as usize * self.seq
    }
}

/// A head of a token, its kind and its destination.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Head {
    /// First vector of the head in the projection, and in the destination.
    pub(super) from: usize,
    pub(super) to: usize,
    /// Index of the scale, for a cache in i8.
    pub(super) scale: usize,
    /// First vector of the head's position in the table.
    pub(super) table_row: usize,
    pub(super) position: u32,
    pub(super) query: bool,
    pub(super) key: bool,
    /// True if the position exists in the cache, so that the head is stored.
    pub(super) within: bool,
}

#[cube]
impl Head {
    /// Returns head `index` of all tokens' heads.
    pub(super) fn new(
        index: u32,
        start: &[u32],
        pages: &[u32],
        dims: &Dims,
        #[comptime] plan: RopePlan,
    ) -> Head {
        let all = dims.heads + 2 * dims.kv_heads;
        let (token, head) = (index / all, index % all);
        let (b, s) = (token / dims.seq, token % dims.seq);
        let before = start[b as usize];
        let position = before + s;
        let query = head < dims.heads;
        let key = !query && head < dims.heads + dims.kv_heads;
        let of_query = token as usize * dims.heads as usize + head as usize;
        let of_query = of_query * comptime!(plan.head as usize);
        // Value heads follow key heads.
        let kv_head = (head - min(head, dims.heads)) % dims.kv_heads;
        // A start near 2^32 wraps around.
        let mut within = before < dims.limit && position < dims.limit;
        let mut page = b;
        let mut row = position;
        if comptime!(plan.block_size > 0) {
            let block = min(position / comptime!(plan.block_size), dims.max_blocks - 1);
            page = pages[(b * dims.max_blocks + block) as usize];
            row = position % comptime!(plan.block_size);
            within = within && page < dims.blocks;
        }
        let of_key = dims.k.at(page, kv_head, row);
        let of_value = dims.v.at(page, kv_head, row);
        let mut scale = 0usize.runtime();
        if comptime!(plan.bytes) {
            scale = dims.scales.at(page, kv_head, row);
        }
        Head {
            from: index as usize * comptime!(plan.head as usize),
            to: select(query, of_query, select(key, of_key, of_value)),
            scale,
            table_row: position as usize * dims.table_stride as usize,
            position,
            query,
            key,
            within,
        }
    }
}
