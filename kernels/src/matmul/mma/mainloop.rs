//! Loop over work items, tiles of k and instruction steps.

use cubecl::prelude::*;

use super::accumulators::{Accumulators, AccumulatorsExpand, F16Accumulators, F32Accumulators};
use super::feed::{Feed, FeedExpand};
use super::fragments::Lanes;
use super::source::{Dense, RightOperand, RightOperandExpand};
use super::store::{store, store_partials};
use super::work::Work;
use super::{MmaConfig, MmaPlan};
use crate::matmul::dims::Dims;
use crate::matmul::epilogue::Finish;
use crate::tile::{next_stage, shared_address};

/// Multiplies dense operands, with the accumulators of the plan's precision.
#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(crate) fn multiply_dense<
    F: Float,
    I: Float,
    E: Float,
    M: CubeType,
    D: Feed<M>,
    NL: Size,
    NR: Size,
    NO: Size,
    NP: Size,
>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    more: &M,
    finish: &Finish<F, E, NO>,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let dense = Dense {};
    if comptime!(plan.accumulates_f16) {
        multiply::<F, I, E, F16Accumulators, Dense, M, D, NL, NR, NO, NP>(
            lhs, rhs, out, partials, more, finish, &dense, dims, plan,
        );
    } else {
        multiply::<F, I, E, F32Accumulators, Dense, M, D, NL, NR, NO, NP>(
            lhs, rhs, out, partials, more, finish, &dense, dims, plan,
        );
    }
}

/// Multiplies with accumulators `A`, an rhs decoded by `S`, and tiles copied by `D`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(crate) fn multiply<
    F: Float,
    I: Float,
    E: Float,
    A: Accumulators,
    S: RightOperand<A>,
    M: CubeType,
    D: Feed<M>,
    NL: Size,
    NR: Size,
    NO: Size,
    NP: Size,
>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    more: &M,
    finish: &Finish<F, E, NO>,
    source: &S,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let MmaConfig { stages, planes_n, .. } = comptime!(plan.config);
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let (frags_m, frags_n) = comptime!((wm as usize / 16, wn as usize / 16));
    let steps = comptime!((plan.config.tile_k / plan.inst_k) as usize);
    let packing = comptime!(plan.packing);
    let around = comptime!(if plan.fixed_stages { stages as usize } else { 1 });

    // [stages, lhs tile then rhs tile]
    let mut ring = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((stages * plan.stage_bytes() / 16) as usize),
        comptime!(if plan.fixed_stages { 1024usize } else { 128 }),
    );
    let shared = shared_address(&mut ring);

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let part_m = plane / planes_n * wm;
    let part_n = plane % planes_n * wn;
    let lanes = Lanes::new(part_m, part_n, lane, plan);

    let mut acc = A::new(comptime!(frags_m * frags_n * 2)); // [wm / 16, wn / 8]
    acc.clear(comptime!(frags_m * frags_n * 2));
    // Register sets of the current and the next step: [2, frags] each, with two rhs fragments in
    // one. Whole words: the compiler would split vectors of halves between the iterations of the
    // loop.
    let mut a = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime!(2 * frags_m) {
        a.push(Array::<u32>::new(4usize));
    }
    let mut b = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime!(2 * frags_n) {
        b.push(Array::<u32>::new(4usize));
    }
    let mut decoded = Array::<u32>::new(comptime!(if packing > 1 { 4 * frags_n } else { 1 }));

    let feed = D::new::<F, NL, NR>(lhs, rhs, more, shared, plane * 32 + lane, dims, plan);
    let work = Work::new(dims, plan.config);
    feed.aim::<F, NL, NR>(lhs, rhs, more, dims, &work, CUBE_POS_X, plan);
    feed.take_next(more, plan);
    #[unroll]
    for stage in 0..comptime!(plan.tiles_in_flight()) {
        feed.tile(more, &mut ring, stage, plan);
    }
    feed.wait(0u32, plan);
    let mut read = shared;
    let end = shared + comptime!(stages * plan.stage_bytes());
    lanes.load_lhs::<I>(read, &mut a, 0u32, 0usize, plan);
    lanes.load_rhs::<I>(read, &mut b, 0u32, 0usize, plan);

    let items = work.items();
    let mut id = CUBE_POS_X;
    while id < items {
        let now = work.item(dims, id, plan.config);
        if comptime!(plan.streams) {
            feed.aim::<F, NL, NR>(lhs, rhs, more, dims, &work, id + CUBE_COUNT_X, plan);
        }
        let rounds = if comptime!(plan.fixed_stages) { now.tiles / stages } else { now.tiles };
        for _ in 0..rounds {
            #[unroll]
            for iteration in 0..comptime!(around * steps) {
                // With fixed stages, `here` is the stage that is multiplied.
                let (here, step) = comptime!(((iteration / steps) as u32, iteration % steps));
                let (set, into) = comptime!((step % 2, (step + 1) % 2));
                let next = comptime!((step + 1) % steps);
                let (rhs_set, rhs_into) = comptime!((step / packing % 2, (next / packing) % 2));
                if comptime!(step == steps - 1) {
                    let ready = comptime!((here + 1) % stages);
                    feed.release(lane, here);
                    feed.wait(ready, plan);
                    if comptime!(plan.fixed_stages) {
                        read = shared + comptime!(ready * plan.stage_bytes());
                    } else {
                        read = next_stage(read, shared, end, plan.stage_bytes());
                    }
                }
                lanes.load_lhs::<I>(read, &mut a, comptime!(next as u32), into, plan);
                if comptime!(next % packing == 0) {
                    let next = comptime!((next / packing) as u32);
                    lanes.load_rhs::<I>(read, &mut b, next, rhs_into, plan);
                }
                if comptime!(step == 0) {
                    feed.tile(
                        more,
                        &mut ring,
                        comptime!((here + plan.tiles_in_flight()) % stages),
                        plan,
                    );
                }
                source.decode(&b, &mut decoded, rhs_set, step, plan);
                // Alternate the direction over the columns: neighbouring multiplies share a
                // register.
                #[unroll]
                for i in 0..frags_m {
                    let left = a.index(comptime!(set * frags_m + i));
                    #[unroll]
                    for x in 0..comptime!(2 * frags_n) {
                        let j = comptime!(if i % 2 == 1 { 2 * frags_n - 1 - x } else { x });
                        let at = comptime!(i * frags_n * 2 + j);
                        if comptime!(packing > 1) {
                            A::multiply::<I>(
                                &mut acc,
                                left,
                                &decoded,
                                comptime!(2 * j),
                                at,
                                plan.inst_k,
                            );
                        } else {
                            let pair = b.index(comptime!(rhs_set * frags_n + j / 2));
                            A::multiply::<I>(
                                &mut acc,
                                left,
                                pair,
                                comptime!(j % 2 * 2),
                                at,
                                plan.inst_k,
                            );
                        }
                    }
                }
            }
        }
        let (row, col) = (now.row + part_m, now.col + part_n);
        source.scale(&mut acc, &now, row, col, lane, dims, plan);
        if comptime!(plan.partial) {
            let matrix = dims.m as usize * dims.n as usize;
            let start = (now.part * dims.batches + now.batch) as usize * matrix;
            store_partials::<A, NP>(partials, &acc, start, row, col, lane, dims, plan);
        } else {
            store::<F, E, A, NO>(out, finish, &acc, &now, row, col, lane, dims, plan);
        }
        acc.clear(comptime!(frags_m * frags_n * 2));
        id += CUBE_COUNT_X;
    }
}
