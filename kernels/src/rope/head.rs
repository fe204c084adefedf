//! Which head a group of units has, and where it goes.

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
    /// The first position that is not written.
    pub(super) limit: u32,
    /// Pages of the cache, and of a sequence, where it is in pages.
    pub(super) blocks: u32,
    pub(super) max_blocks: u32,
    /// Vectors from a position of the table to the next.
    pub(super) turn: u32,
    pub(super) k: Steps,
    pub(super) v: Steps,
    /// In elements.
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
    /// First vector of a position.
    fn at(&self, page: u32, head: u32, position: u32) -> usize {
        page as usize * self.page + head as usize * self.head + position as usize * self.seq
    }
}

/// A head of a token: what it is, and where it goes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Head {
    /// First vector of it in the projection, and of where it goes.
    pub(super) from: usize,
    pub(super) to: usize,
    /// Where its scale goes, of a cache in i8.
    pub(super) scale: usize,
    /// First vector of its position in the table.
    pub(super) turns: usize,
    pub(super) position: u32,
    pub(super) query: bool,
    pub(super) key: bool,
    /// Whether it goes anywhere.
    pub(super) within: bool,
}

#[cube]
impl Head {
    /// Head `index` of those of all tokens.
    pub(super) fn of(
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
        // Heads of values follow those of keys.
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
            turns: position as usize * dims.turn as usize,
            position,
            query,
            key,
            within,
        }
    }
}
