//! Fragments of both operands: their positions in the shared tiles, and the loads into registers.

use cubecl::prelude::*;

use super::MmaPlan;
use crate::tile::{
    LHS_REGISTERS, RHS_REGISTERS, TileShape, gather_fragments, gather_lane, half_chunk_lane,
    lhs_lane, load_fragments, load_half_chunks, rhs_lane,
};

impl TileShape {
    /// Number of base positions that the fragments of `outer` rows or columns need.
    fn lanes(self, outer: u32) -> u32 {
        match (self.gathered(), self.transposed) {
            (true, _) => (outer / 8).min(4),
            (false, true) => outer / 16,
            (false, false) => 1,
        }
    }
}

/// Base positions of a unit's fragments in the shared tiles.
///
/// From a base position, fragments are at constant distances along the outer axis and one XOR away
/// along k. In transposed tiles there is one base per fragment (up to four if gathered), with
/// constant distances along k.
#[derive(CubeType)]
pub(crate) struct Lanes {
    lhs: Sequence<u32>,
    rhs: Sequence<u32>,
}

#[cube]
impl Lanes {
    pub(crate) fn new(part_m: u32, part_n: u32, lane: u32, #[comptime] plan: MmaPlan) -> Lanes {
        let (wm, wn) = comptime!(plan.config.plane_tile());
        let (left, right) = comptime!((plan.lhs.shape, plan.rhs.shape));
        let mut lhs = Sequence::<u32>::new();
        #[unroll]
        for x in 0..comptime!(left.lanes(wm)) {
            if comptime!(left.halved) {
                lhs.push(half_chunk_lane(part_m, lane, left));
            } else if comptime!(left.gathered()) {
                lhs.push(gather_lane(part_m + comptime!(8 * x), lane, left));
            } else {
                lhs.push(lhs_lane(part_m + comptime!(16 * x), lane, left));
            }
        }
        let mut rhs = Sequence::<u32>::new();
        #[unroll]
        for x in 0..comptime!(right.lanes(wn)) {
            if comptime!(right.gathered()) {
                rhs.push(gather_lane(part_n + comptime!(8 * x), lane, right));
            } else {
                rhs.push(rhs_lane(part_n + comptime!(16 * x), lane, right));
            }
        }
        Lanes { lhs, rhs }
    }

    /// Loads the lhs fragments of one step of k from the stage at `read` into register set `set`.
    pub(crate) fn load_lhs<I: Float>(
        &self,
        read: u32,
        a: &mut Sequence<Array<u32>>,
        #[comptime] step: u32,
        #[comptime] set: usize,
        #[comptime] plan: MmaPlan,
    ) {
        let frags = comptime!(plan.config.plane_tile().0 as usize / 16);
        #[unroll]
        for i in 0..frags {
            let into = a.index_mut(comptime!(set * frags + i));
            let (row, k) = comptime!((16 * i as u32, step * plan.inst_k));
            let shape = comptime!(plan.lhs.shape);
            if comptime!(shape.halved) {
                let lane = *self.lhs.index(0usize) ^ comptime!(k * shape.elem as u32);
                load_half_chunks(read + lane, into, comptime!(row * shape.row_bytes()), shape);
            } else {
                let at = comptime!((row, k));
                load::<I>(read, &self.lhs, into, at, shape, plan.rounds_tf32, LHS_REGISTERS);
            }
        }
    }

    /// Loads the rhs fragments of one step of k, two per register group; see [`Lanes::load_lhs`].
    pub(crate) fn load_rhs<I: Float>(
        &self,
        read: u32,
        b: &mut Sequence<Array<u32>>,
        #[comptime] step: u32,
        #[comptime] set: usize,
        #[comptime] plan: MmaPlan,
    ) {
        let frags = comptime!(plan.config.plane_tile().1 as usize / 16);
        let tile = read + comptime!(plan.lhs.shape.bytes());
        #[unroll]
        for j in 0..frags {
            let into = b.index_mut(comptime!(set * frags + j));
            let at = comptime!((16 * j as u32, step * plan.inst_k));
            load::<I>(tile, &self.rhs, into, at, plan.rhs.shape, plan.rounds_tf32, RHS_REGISTERS);
        }
    }
}

/// Loads one register group: the fragment at `at` = (row or column, k) of a plane's part of `tile`.
#[cube]
fn load<I: Float>(
    tile: u32,
    lanes: &Sequence<u32>,
    into: &mut Array<u32>,
    #[comptime] at: (u32, u32),
    #[comptime] shape: TileShape,
    #[comptime] rounds: bool,
    #[comptime] registers: [(u32, u32); 4],
) {
    let (outer, k) = comptime!(at);
    if comptime!(shape.gathered()) {
        gather_fragments::<I>(tile, lanes, into, at, shape, registers, rounds);
    } else if comptime!(shape.transposed) {
        let lane = *lanes.index(comptime!(outer as usize / 16));
        load_fragments::<I>(tile + lane, into, comptime!(k * shape.row_bytes()), shape, rounds);
    } else {
        let lane = *lanes.index(0usize) ^ comptime!(k * shape.elem as u32);
        load_fragments::<I>(tile + lane, into, comptime!(outer * shape.row_bytes()), shape, rounds);
    }
}
