//! Shared tiles of the multiply-add path on CUDA: a ring filled by `cp.async` and read by
//! `ld.shared` at immediate distances.
//!
//! A pass is four deep in k. The operand of which a unit owns less is *held*: registers hold its
//! part of this pass, and the part of the next pass is loaded meanwhile. The other operand is
//! *streamed*: each of its 16-byte chunks is multiplied by everything that is held. Reads run ahead
//! into the next tile, so that no tile starts with a wait for shared memory. The barrier therefore
//! precedes a tile's last pass. At that time slower planes may still read the previous tile, so
//! copies after the barrier go to the stage before it. A ring of `stages` tiles thus runs
//! `stages - 2` ahead.

use cubecl::prelude::*;

use super::FmaPlan;
use super::tile::{FmaOperand, Source, offset_of};
use crate::tile::{
    CopyLane, CopyPlan, commit_copies, global_address, load_chunk, next_stage, shared_address,
    wait_copies,
};

/// f32 elements per chunk, and depth of a pass in k.
const CHUNK: u32 = 4;
/// Registers for streamed chunks, in chunks, and distance of the reads in chunks. With a distance
/// of three, some configs spill on compute capability 12.0; with one, others do.
const SLOTS: u32 = 4;
const AHEAD: u32 = 2;

/// Role of one operand in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Role {
    operand: FmaOperand,
    /// Bytes from the start of a stage to its tile.
    start: u32,
    lhs: bool,
}

impl FmaPlan {
    fn stage_bytes(self) -> u32 {
        self.lhs.tile.bytes() + self.rhs.tile.bytes()
    }

    /// Returns the held operand, then the streamed one.
    fn roles(self) -> (Role, Role) {
        let lhs = Role { operand: self.lhs, start: 0, lhs: true };
        let rhs = Role { operand: self.rhs, start: self.lhs.tile.bytes(), lhs: false };
        if self.lhs.own < self.rhs.own { (lhs, rhs) } else { (rhs, lhs) }
    }

    fn copies(self, operand: FmaOperand, width: usize) -> CopyPlan {
        let units = self.config.units() as usize;
        CopyPlan { shape: operand.tile, width, units, exact: self.exact }
    }
}

impl Role {
    /// Returns the step from a unit's first chunk of a tile to its chunk `i` of pass `pass`; see
    /// `TileShape::step`.
    fn step(self, pass: u32, i: u32) -> (u32, u32) {
        let (nth, k) = self.operand.vector(i, CHUNK, CHUNK);
        let (outer, k) = (self.operand.nth(nth, CHUNK), pass * CHUNK + k);
        if self.operand.along_k() {
            self.operand.tile.step(outer, k)
        } else {
            self.operand.tile.step(k, outer)
        }
    }

    /// Returns the index of result `nth` at depth `k` of a pass, among the chunks in registers from
    /// chunk `first` on.
    const fn element(self, first: u32, nth: u32, k: u32) -> u32 {
        let (chunk, e) = if self.operand.along_k() {
            (nth, k)
        } else {
            (k * (self.operand.own / CHUNK) + nth / CHUNK, nth % CHUNK)
        };
        (first + chunk) * CHUNK + e
    }
}

/// Copies of one operand's tiles.
#[derive(CubeType)]
struct Feed {
    lane: CopyLane,
    /// Address of this unit's first vector of the next tile.
    from: RuntimeCell<u64>,
    /// Bytes between lines of the operand.
    line: u64,
    /// Rows (or columns) of the matrix from the tile's first on.
    outer: u32,
}

#[cube]
impl Feed {
    fn new<F: Float, N: Size>(
        matrix: &[Vector<F, N>],
        source: &Source,
        unit: u32,
        #[comptime] operand: FmaOperand,
        #[comptime] copies: CopyPlan,
    ) -> Feed {
        let elem = comptime!(operand.tile.elem as u64);
        let line = u64::cast_from(source.stride) * elem;
        let lane = CopyLane::new(unit, copies);
        let corner = u64::cast_from(source.element(0u32.runtime(), source.k_start, operand)) * elem;
        let from = global_address(matrix) + corner + lane.start(line, copies);
        Feed { lane, from: RuntimeCell::new(from), line, outer: source.outer_end - source.outer }
    }

    /// Issues the copies of the next tile to `to`; `depth` is the rest of k.
    fn tile(
        &self,
        to: u32,
        depth: u32,
        #[comptime] operand: FmaOperand,
        #[comptime] copies: CopyPlan,
    ) {
        let from = self.from.read();
        let shape = comptime!(operand.tile);
        if comptime!(operand.along_k()) {
            self.lane.copy(from, self.line, to, self.outer, depth, copies);
            self.from.store(from + comptime!(u64::from(shape.row_bytes())));
        } else {
            self.lane.copy(from, self.line, to, depth, self.outer, copies);
            self.from.store(from + self.line * comptime!(shape.rows as u64));
        }
    }
}

/// Copies of both operands, `stages - 2` tiles ahead of the multiplies.
#[derive(CubeType)]
struct Feeds {
    lhs: Feed,
    rhs: Feed,
    k: u32,
    /// Stage of the next tile.
    to: RuntimeCell<u32>,
    start: u32,
    end: u32,
}

#[cube]
impl Feeds {
    /// Issues the copies of tile `index`, if it exists, and commits their group.
    fn tile(
        &self,
        index: u32,
        #[comptime] plan: FmaPlan,
        #[comptime] lhs: CopyPlan,
        #[comptime] rhs: CopyPlan,
    ) {
        let (to, k0) = (self.to.read(), index * plan.config.tile_k);
        if k0 < self.k {
            let depth = self.k - k0;
            self.lhs.tile(to, depth, plan.lhs, lhs);
            self.rhs.tile(to + comptime!(plan.lhs.tile.bytes()), depth, plan.rhs, rhs);
        }
        commit_copies();
        self.to.store(next_stage(to, self.start, self.end, plan.stage_bytes()));
    }
}

/// Computes `acc += A · B` over the range of k.
#[cube]
#[expect(clippy::too_many_arguments, reason = "two operands, one place")]
pub(super) fn accumulate<F: Float, NL: Size, NR: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    from_lhs: &Source,
    from_rhs: &Source,
    acc: &mut Array<f32>,
    unit: u32,
    unit_m: u32,
    unit_n: u32,
    #[comptime] plan: FmaPlan,
) {
    let (lanes_lhs, lanes_rhs) = (NL::value(), NR::value());
    let copies_lhs = comptime!(plan.copies(plan.lhs, lanes_lhs));
    let copies_rhs = comptime!(plan.copies(plan.rhs, lanes_rhs));
    let (held, streamed) = comptime!(plan.roles());
    let (stages, bytes) = comptime!((plan.config.stages, plan.stage_bytes()));
    let passes = comptime!(plan.config.tile_k / CHUNK);
    let (held_chunks, streamed_chunks) = comptime!((held.operand.own, streamed.operand.own));

    // [stages, lhs tile then rhs tile]
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((stages * bytes / 16) as usize),
        128usize,
    );
    let shared = shared_address(&mut shared);
    let end = shared + comptime!(stages * bytes);
    let feeds = Feeds {
        lhs: Feed::new::<F, NL>(lhs, from_lhs, unit, plan.lhs, copies_lhs),
        rhs: Feed::new::<F, NR>(rhs, from_rhs, unit, plan.rhs, copies_rhs),
        k: from_lhs.k_end - from_lhs.k_start,
        to: RuntimeCell::new(shared),
        start: shared,
        end,
    };
    #[unroll]
    for tile in 0..comptime!(stages - 2) {
        feeds.tile(tile.runtime(), plan, copies_lhs, copies_rhs);
    }
    wait_copies(comptime!(stages - 3));
    sync_cube();

    let lane_held = lane(unit_m, unit_n, held);
    let lane_streamed = lane(unit_m, unit_n, streamed);
    let mut read = shared;
    let mut hold = Array::<f32>::new(comptime!((2 * held_chunks * CHUNK) as usize));
    #[unroll]
    for i in 0..held_chunks {
        load(read + lane_held, &mut hold, i, 0u32, i, held);
    }
    let mut stream = Array::<f32>::new(comptime!((SLOTS * CHUNK) as usize));
    #[unroll]
    for i in 0..AHEAD {
        load(read + lane_streamed, &mut stream, i, 0u32, i, streamed);
    }

    for tile in 0..feeds.k.div_ceil(plan.config.tile_k) {
        feeds.tile(tile + comptime!(stages - 2), plan, copies_lhs, copies_rhs);
        #[unroll]
        for pass in 0..passes {
            let after = comptime!((pass + 1) % passes);
            let (set, into) = comptime!((pass % 2 * held_chunks, after % 2 * held_chunks));
            let this = read + lane_streamed;
            if comptime!(after == 0) {
                wait_copies(comptime!(stages - 3));
                sync_cube();
                read = next_stage(read, shared, end, bytes);
            }
            #[unroll]
            for i in 0..streamed_chunks {
                if comptime!(i < held_chunks) {
                    load(read + lane_held, &mut hold, comptime!(into + i), after, i, held);
                }
                let ahead = comptime!(i + AHEAD);
                let slot = comptime!(ahead % SLOTS);
                if comptime!(ahead < streamed_chunks) {
                    load(this, &mut stream, slot, pass, ahead, streamed);
                } else {
                    let ahead = comptime!(ahead - streamed_chunks);
                    load(read + lane_streamed, &mut stream, slot, after, ahead, streamed);
                }
                multiply_chunk(acc, &hold, &stream, set, i, plan);
            }
        }
    }
}

/// Returns the offset of a unit's first chunk of an operand from the start of a stage.
#[cube]
fn lane(unit_m: u32, unit_n: u32, #[comptime] role: Role) -> u32 {
    let outer = if comptime!(role.lhs) { unit_m } else { unit_n };
    offset_of(outer, 0u32.runtime(), role.operand) + comptime!(role.start)
}

/// Loads chunk `i` of pass `pass` into slot `slot`; `at` is the stage plus [`lane`].
#[cube]
fn load(
    at: u32,
    into: &mut Array<f32>,
    #[comptime] slot: u32,
    #[comptime] pass: u32,
    #[comptime] i: u32,
    #[comptime] role: Role,
) {
    let (twist, far) = comptime!(role.step(pass, i));
    let chunk = load_chunk(at ^ twist, far);
    #[unroll]
    for e in 0..4usize {
        into[comptime!(slot as usize * 4 + e)] = chunk.extract(e);
    }
}

/// Multiplies streamed chunk `i` of a pass by everything held in the set that starts with chunk
/// `set`.
#[cube]
fn multiply_chunk(
    acc: &mut Array<f32>,
    hold: &Array<f32>,
    stream: &Array<f32>,
    #[comptime] set: u32,
    #[comptime] i: u32,
    #[comptime] plan: FmaPlan,
) {
    let (held, streamed) = comptime!(plan.roles());
    let (first, k) = comptime!(streamed.operand.vector(i, CHUNK, CHUNK));
    #[unroll]
    for e in 0..CHUNK {
        let (s, k) = comptime!(streamed.operand.element(first, k, e));
        #[unroll]
        for h in 0..comptime!(held.operand.own) {
            let at = comptime!(if held.lhs { h * plan.rhs.own + s } else { s * plan.rhs.own + h });
            let value = stream[comptime!((i % SLOTS * CHUNK + e) as usize)];
            let other = hold[comptime!(held.element(set, h, k) as usize)];
            let at = comptime!(at as usize);
            acc[at] = fma(value, other, acc[at]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::FmaConfig;

    /// Every chunk that a unit reads is the one that it multiplies, wherever the swizzle put it.
    #[test]
    fn steps_lead_to_where_chunks_lie() {
        let configs = [([16, 8], [2, 4], 16), ([8, 16], [4, 2], 8), ([4, 4], [1, 2], 32)];
        for ([own_m, own_n], [groups_m, groups_n], tile_k) in configs {
            let config =
                FmaConfig { own_m, own_n, groups_m, groups_n, tile_k, stages: 3, parts: 1 };
            for along_k in [true, false] {
                let plan = FmaPlan::new(config, along_k, along_k, 4, true);
                let (held, streamed) = plan.roles();
                for role in [held, streamed] {
                    let FmaOperand { own, group, .. } = role.operand;
                    for unit in 0..4 * group {
                        check(role, unit / group * group * own, unit % group, tile_k);
                    }
                }
            }
        }
    }

    fn check(role: Role, group_start: u32, unit: u32, tile_k: u32) {
        let operand = role.operand;
        let step = if operand.along_k() { 1 } else { CHUNK };
        let outer = group_start + unit * step;
        for pass in 0..tile_k / CHUNK {
            for i in 0..operand.own {
                let (nth, k) = operand.vector(i, CHUNK, CHUNK);
                let (twist, far) = role.step(pass, i);
                let at = offset_of(outer, 0, operand);
                let lies = offset_of(outer + operand.nth(nth, CHUNK), pass * CHUNK + k, operand);
                assert_eq!((at ^ twist) + far, lies, "{role:?} {outer} {pass} {i}");
            }
        }
    }
}
