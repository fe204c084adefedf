//! Tensor-core path for CUDA: the cache streams through many small rings, one per plane.
//!
//! | loop                                   | level                                                |
//! |----------------------------------------|------------------------------------------------------|
//! | sequences, cache heads, `splits`       | cubes                                                |
//! | tiles of `tile_kv` keys                | planes, round robin; each has a ring of `stages` tiles |
//! | keys, then head dimension, by 16       | fragments in registers                               |
//!
//! All queries that share a cache head, `group · seq_q` of them, are rows of one matmul, so that
//! the cache is read once for all. Queries are few and keys are many. Keys are therefore the 16
//! rows of the instruction and queries its 8 columns: `sᵀ = k·qᵀ` and `accᵀ = vᵀ·pᵀ`. This takes
//! half the instructions and half the registers of the forward kernel, which pads queries to 16.
//! The first matmul leaves the weights with keys down the rows; the second needs keys along the
//! rows. One `movmatrix` transposes an 8 x 8 block of them.
//!
//! Reading the cache dominates, so copies must always be in flight. A plane waits for its own
//! copies only, never for another plane. K and V of a tile have separate slots in the ring, and a
//! slot is refilled as soon as it has been read. All slots except one are in flight at any time.
//! Sequences are split over cubes (`splits`) until every processor has work from the start.
//!
//! The remaining time is dependent round trips of about 0.7 us each, while a short step streams for
//! 8 us. They are: the length, the page, the tile, the accumulators of a split, its count, the
//! accumulators of all splits. For a single sequence the host knows the length. The ring is then
//! filled before the device's length arrives, and refilled if they differ. The planes of a cube
//! merge in shared memory behind one barrier. For a split sequence, the last cube to finish reads
//! the partial results of all at once ([`merge`](super::merge)), in the same launch. Fragments are
//! loaded in batches. Those of V are loaded while weights are computed, which also shortens the
//! last tile.
//!
//! Scores are in units of log₂, and row maxima only move when a score exceeds them by 2⁸, as in the
//! forward kernel.
//!
//! A page of the cache holds whole tiles. Each unit of a plane loads the page number of one of the
//! plane's next 32 tiles, 32 tiles in advance, and a shuffle distributes it. The loop never waits
//! for the table.
//!
//! An i8 cache is copied to shared memory unchanged and converted to 16-bit floats in registers
//! ([`fragments`](super::fragments)).
//!
//! Cost: reads the cache once; `head_dim / 8` instructions per 16 keys and eight queries.
//!
//! Ladder, us per step over 8192 positions, 32 heads sharing 8 cache heads of 128, bf16, on an H200
//! with 99 KB of shared memory. At its copy rate of 4113 GB/s the cache alone takes 8.2 and 131 us;
//! torch's FlashAttention took 22.5 and 132 in the run of v2:
//!
//! | version                                                          | batch 1 | batch 16 |
//! |------------------------------------------------------------------|---------|----------|
//! | v1 lengths before tiles, one fragment at a time, eight splits at a time | 14.5 | 123  |
//! | v2 tiles before lengths, fragments in batches, all splits at once | 13.0   | 122      |
//!
//! Sources: Dao et al., "Flash-Decoding" (2023), for the splits; Ainslie et al., "GQA" (2023).

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::cache::{Cache, Dims, bytes};
use super::fragments::{finish, keys_of, load_batch, multiply_rows, top, values_of};
use super::merge::{WorkTile, merge_planes, write_partials};
use super::plan::SplitPlan;
use super::scores::Scores;
use super::stream::{Stream, first_iterations, iterations_of};
use crate::attention::tiles::{registers, zeros};
use crate::tile::{
    CopyLane, exp2, global_address, lhs_lane, load_shared, load_word, next_stage, pack_pair,
    shared_address, transpose_halves, typed, wait_copies,
};

/// Softmax weights stay at or below 2 to this power.
const HEADROOM: f32 = 8.0;

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(crate) fn split<F: Float, C: Numeric, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<C, NI>],
    v: &[Vector<C, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    partials: &mut [Vector<f32, Const<4>>],
    cache: &Cache,
    scores: &Scores,
    dims: &Dims,
    #[comptime] plan: SplitPlan,
) {
    let (tile_kv, stages, planes) = comptime!((plan.tile_kv(), plan.stages, plan.planes));
    let fragments = comptime!(plan.fragments as usize);
    let frags_kv = comptime!(tile_kv as usize / 16);
    let (per_load, steps) = comptime!((plan.per_load(), plan.steps()));
    let (all, at_once) = comptime!((frags_kv * plan.loads(), plan.at_once()));
    let paged = comptime!(plan.cache.block > 0);

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let (column, octet) = (lane % 4 * 2, lane / 4);
    let work = WorkTile::new(dims, plan);
    let (batch, kv_head) = (work.batch, work.kv_head);

    // [planes, stages, K, V and their scales]
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((plan.shared_bytes / 16) as usize),
        128usize,
    );
    let shared = shared_address(&mut shared);
    let ring = shared + plane * comptime!(plan.ring_bytes());
    let end = ring + comptime!(plan.ring_bytes());

    // Tiles of this cube; each plane takes every `planes`th. For one sequence the host knows the
    // length: fetch its first tiles while the device's length arrives, and again if they differ.
    let there = cache.length(dims, batch);
    let foreseen = if comptime!(plan.foreseen) { dims.longest } else { there };
    let (own, iterations) = first_iterations(there, scores, dims, work.part, plane, plan);
    let mut length = u32::cast_from(foreseen);
    let mut own_tile = u32::cast_from(own);
    let mut count = u32::cast_from(iterations);
    let (from_k, from_v) = (global_address(k), global_address(v));
    let mut pages = 0u32.runtime();
    let mut later = 0u32.runtime();
    let mut filling = true.runtime();
    while filling {
        let lane = CopyLane::new(lane, plan.tile);
        let stream = Stream { from_k, from_v, lane, batch, kv_head, own_tile, count, length };
        if comptime!(paged) {
            pages = stream.pages(cache, dims, 0u32.runtime(), plan);
            later = stream.pages(cache, dims, 32u32.runtime(), plan);
        }
        let mut to = u32::cast_from(ring);
        for stage in 0..stages {
            let tile = stream.place(pages, stage, plan);
            stream.copy_keys(&tile, cache, dims, to, plan);
            stream.copy_values(&tile, cache, dims, to, plan);
            to += comptime!(plan.stage_bytes());
        }
        filling = false;
        if comptime!(plan.foreseen) {
            // The whole cube takes the same branch.
            if length != there {
                wait_copies(0u32);
                length = there;
                let (own, iterations) = iterations_of(there, scores, dims, work.part, plane, plan);
                own_tile = own;
                count = iterations;
                filling = true;
            }
        }
    }
    let copies = CopyLane::new(lane, plan.tile);
    let stream = Stream { from_k, from_v, lane: copies, batch, kv_head, own_tile, count, length };
    // Position of the sequence's first query.
    let newest = length as i32 - comptime!(plan.seq_q as i32);

    // While the first tiles are in flight, load qᵀ: fragments of 16 of the head dimension by 8
    // queries.
    let mut queries = Sequence::<Array<u32>>::new();
    #[unroll]
    for f in 0..fragments {
        let (i, head) = work.query(dims, comptime!(8 * f as u32) + octet, plan);
        // i8 cache elements come in fours, so a unit's two words of q are neighbours.
        let (apart, between) = comptime!(if plan.cache.quantized { (4u32, 4u32) } else { (2, 16) });
        let at = bytes(dims.q.at(i, batch, head), 2u32) + u64::cast_from(column * apart);
        let from = global_address(q) + at;
        let mut words = Array::<u32>::new(comptime!(2 * steps));
        #[unroll]
        for step in 0..steps {
            words[comptime!(2 * step)] = load_word(from, comptime!(32 * step as u32));
            words[comptime!(2 * step + 1)] = load_word(from, comptime!(32 * step as u32 + between));
        }
        queries.push(words);
    }

    let mut position = Array::<i32>::new(comptime!(2 * fragments));
    #[unroll]
    for r in 0..comptime!(2 * fragments) {
        let row = work.first + comptime!((8 * (r / 2) + r % 2) as u32) + column;
        position[r] = newest + (row % comptime!(plan.seq_q)) as i32;
    }

    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NF) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = zeros::<NC>(comptime!(steps * fragments)); //      [head_dim / 16, queries / 8]
    let mut row_max = Array::<f32>::new(comptime!(2 * fragments)); //   m of queries `column` and + 1
    let mut sum = Array::<f32>::new(comptime!(2 * fragments)); //    this unit's part of l
    #[unroll]
    for r in 0..comptime!(2 * fragments) {
        row_max[r] = f32::NEG_INFINITY.runtime();
        sum[r] = 0.0f32.runtime();
    }

    let lane_k = lhs_lane(0u32.runtime(), lane, plan.tile.shape);
    let lane_v = lhs_lane(0u32.runtime(), lane, comptime!(plan.values()));
    let mut words = registers(at_once);
    let mut read = ring;
    for iteration in 0..count {
        // sᵀ = k · qᵀ
        wait_copies(comptime!(2 * stages - 1));
        sync_plane();
        let mut s = zeros::<NC>(comptime!(frags_kv * fragments)); // [tile_kv / 16, queries / 8]
        // With a single fragment, odd steps use a second accumulator: a shorter dependency chain.
        let mut apart = zeros::<NC>(1usize);
        #[unroll]
        for batch in 0..comptime!(all.div_ceil(at_once)) {
            load_batch::<F>(&mut words, read + lane_k, batch, plan.tile.shape, plan);
            #[unroll]
            for at in 0..comptime!(at_once * per_load) {
                let (t, step) = comptime!(plan.place(batch, at));
                if comptime!(t < frags_kv && step < steps) {
                    let keys = keys_of(words.index(comptime!(at / per_load)), at, plan);
                    let left = typed::<F, NF>(&keys, 0usize, 4usize);
                    #[unroll]
                    for f in 0..fragments {
                        let right = typed::<F, NF>(queries.index(f), comptime!(2 * step), 2usize);
                        if comptime!(frags_kv * fragments == 1 && step % 2 == 1) {
                            def.execute_inplace(&left, &right, apart.index_mut(0usize));
                        } else {
                            let sums = s.index_mut(comptime!(t * fragments + f));
                            def.execute_inplace(&left, &right, sums);
                        }
                    }
                }
            }
        }
        if comptime!(frags_kv * fragments == 1) {
            let sums = s.index_mut(0usize);
            sums[0] += apart.index(0usize)[0];
            sums[1] += apart.index(0usize)[1];
        }
        if comptime!(plan.cache.quantized) {
            let at = read + comptime!(2 * plan.tile.shape.bytes()) + octet * 4;
            multiply_rows::<NC>(&mut s, at, plan);
        }
        sync_plane();
        let ahead = iteration + stages;
        if comptime!(paged) {
            // All page numbers of the previous load are used up.
            if ahead % 32 == 0 {
                pages = later;
                later = stream.pages(cache, dims, ahead + 32, plan);
            }
        }
        let next = stream.place(pages, ahead, plan);
        stream.copy_keys(&next, cache, dims, read, plan);

        // s = scale · s .., or -inf where hidden
        let first_key = (own_tile + iteration * planes) * tile_kv;
        finish::<NC>(&mut s, first_key, &position, newest, length, scores, plan);

        // Update m and rescale everything that is a multiple of exp(-m).
        let mut grows = false;
        let mut tops = Array::<f32>::new(comptime!(2 * fragments));
        #[unroll]
        for r in 0..comptime!(2 * fragments) {
            tops[r] = top::<NC>(&s, r, plan) * scores.unit();
            grows = grows || tops[r] > row_max[r] + HEADROOM;
        }
        if plane_any(grows) {
            #[unroll]
            for f in 0..fragments {
                let mut factors = Vector::<f32, NC>::new(1.0f32);
                #[unroll]
                for e in 0..2usize {
                    let r = comptime!(2 * f + e);
                    let mut reached = max(tops[r], plane_shuffle_xor(tops[r], 4));
                    reached = max(reached, plane_shuffle_xor(reached, 8));
                    reached = max(reached, plane_shuffle_xor(reached, 16));
                    let grown = max(row_max[r], reached);
                    // -inf - -inf is NaN: leave a query without keys so far as it is.
                    let factor = select(grown == f32::NEG_INFINITY, 1.0, exp2(row_max[r] - grown));
                    row_max[r] = grown;
                    sum[r] *= factor;
                    factors.insert(e, factor);
                }
                #[unroll]
                for d in 0..steps {
                    let fragment = acc.index_mut(comptime!(d * fragments + f));
                    fragment[0] *= factors;
                    fragment[1] *= factors;
                }
            }
        }

        wait_copies(comptime!(2 * stages - 1));
        sync_plane();

        // Load the first V fragments while weights are computed.
        let from_values = read + comptime!(plan.tile.shape.bytes()) + lane_v;
        load_batch::<F>(&mut words, from_values, 0usize, comptime!(plan.values()), plan);

        // pᵀ = exp2(s - m), l; times the scales of V, in the layout of the second matmul
        let mut weights = Sequence::<Array<u32>>::new(); // [tile_kv / 16, queries / 8]
        let scales = read + comptime!(2 * plan.tile.shape.bytes() + plan.scale_bytes()) + octet * 4;
        #[unroll]
        for t in 0..frags_kv {
            #[unroll]
            for f in 0..fragments {
                let fragment = s.index_mut(comptime!(t * fragments + f));
                let mut words = Array::<u32>::new(2usize);
                #[unroll]
                for half in 0..2usize {
                    let mut pair = fragment[half];
                    let mut scale = 1.0f32.runtime();
                    if comptime!(plan.cache.quantized) {
                        scale = load_shared(scales, comptime!((64 * t + 32 * half) as u32));
                    }
                    #[unroll]
                    for e in 0..2usize {
                        let r = comptime!(2 * f + e);
                        let shift = select(row_max[r] == f32::NEG_INFINITY, 0.0, -row_max[r]);
                        let weight = exp2(fma(pair.extract(e), scores.unit(), shift));
                        sum[r] += weight;
                        let weight =
                            if comptime!(plan.cache.quantized) { weight * scale } else { weight };
                        pair.insert(e, weight);
                    }
                    words[half] = transpose_halves(pack_pair::<NC>(pair, plan.bf16));
                }
                weights.push(words);
            }
        }

        // accᵀ += vᵀ · pᵀ
        #[unroll]
        for batch in 0..comptime!(all.div_ceil(at_once)) {
            if comptime!(batch > 0) {
                load_batch::<F>(&mut words, from_values, batch, comptime!(plan.values()), plan);
            }
            #[unroll]
            for at in 0..comptime!(at_once * per_load) {
                let (t, step) = comptime!(plan.place(batch, at));
                if comptime!(t < frags_kv && step < steps) {
                    let values = values_of(words.index(comptime!(at / per_load)), at, plan);
                    let left = typed::<F, NF>(&values, 0usize, 4usize);
                    #[unroll]
                    for f in 0..fragments {
                        let weights = weights.index(comptime!(t * fragments + f));
                        let right = typed::<F, NF>(weights, 0usize, 2usize);
                        let sums = acc.index_mut(comptime!(step * fragments + f));
                        def.execute_inplace(&left, &right, sums);
                    }
                }
            }
        }
        sync_plane();
        stream.copy_values(&next, cache, dims, read, plan);
        read = next_stage(read, ring, end, plan.stage_bytes());
    }
    // Wait for copies into the rest of the ring before its memory is reused.
    wait_copies(0u32);
    sync_cube();
    write_partials::<NC>(&acc, &row_max, &sum, shared, plan);
    merge_planes::<F, NO>(out, lse, partials, scores, dims, &work, shared, plan);
}
