//! Loops of the multiply-add path.

use cubecl::prelude::*;

use super::tile::{FmaOperand, GROUP, Source, offset_of};
use super::{FmaConfig, FmaPlan, Path, ring};
use crate::matmul::dims::{Dims, own_block};
use crate::matmul::epilogue::Finish;
use crate::matmul::window::Gather;

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results, what they are")]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    finish: &Finish<F, E, NO>,
    window: &ComptimeOption<Gather<F, NL>>,
    dims: &Dims,
    #[comptime] plan: FmaPlan,
) {
    let config = comptime!(plan.config);
    let (tile_m, tile_n) = comptime!(config.tile());
    let (own_m, own_n) = comptime!((config.own_m as usize, config.own_n as usize));
    let (lanes_lhs, lanes_rhs) = (NL::value(), NR::value());
    // The ring's tiles are read in chunks of four, even if the copies into them are narrower.
    let width_lhs = comptime!(if config.stages > 1 { 4 } else { lanes_lhs as u32 });
    let width_rhs = comptime!(if config.stages > 1 { 4 } else { lanes_rhs as u32 });

    let unit = UNIT_POS;
    let (group, lane) = (unit / 32, unit % 32);
    let (block_m, block_n) = own_block(dims, tile_m, tile_n);
    let parts = if comptime!(plan.partial) { dims.parts } else { 1u32.runtime() };
    let (batch, part) = (CUBE_POS_Y / parts, CUBE_POS_Y % parts);
    let (row_start, row_end) = dims.rows(batch);
    let (row0, col0) = (row_start + block_m * tile_m, block_n * tile_n);
    if comptime!(dims.grouped) && row0 >= row_end {
        // The grid has enough blocks for a group that spans all of lhs.
        terminate!();
    }
    let (start_lhs, start_rhs, start_out) = dims.batch(batch as usize);
    let mut k_start = 0u32.runtime();
    let mut k_end = dims.k;
    if comptime!(plan.partial) {
        let depth = dims.part_tiles * comptime!(config.tile_k);
        k_start = part * depth;
        k_end = min(k_start + depth, dims.k);
    }
    let from_lhs = Source {
        start: start_lhs,
        stride: dims.lhs_stride,
        outer: row0,
        outer_end: row_end,
        k_start,
        k_end,
    };
    let from_rhs = Source {
        start: start_rhs,
        stride: dims.rhs_stride,
        outer: col0,
        outer_end: dims.n,
        k_start,
        k_end,
    };
    // This unit's first row and column of the tile.
    let unit_m = group / config.groups_n * comptime!(GROUP.0 * config.own_m)
        + lane / 8 * comptime!(plan.lhs.first_step(width_lhs));
    let unit_n = group % config.groups_n * comptime!(GROUP.1 * config.own_n)
        + lane % 8 * comptime!(plan.rhs.first_step(width_rhs));

    let mut acc = Array::<f32>::new(comptime!(own_m * own_n)); // [own_m, own_n]
    #[unroll]
    for i in 0..comptime!(own_m * own_n) {
        acc[i] = 0.0;
    }
    // The ring leaves no registers for the position of the block, which would spill. Shared memory
    // keeps it; the ring's barriers order the access.
    let mut place = Shared::<[u32]>::new_slice(2usize);
    if comptime!(config.stages > 1) {
        if unit == 0 {
            place[0] = row0;
            place[1] = col0;
        }
        ring::accumulate::<F, NL, NR>(
            lhs, rhs, &from_lhs, &from_rhs, &mut acc, unit, unit_m, unit_n, plan,
        );
    } else {
        accumulate::<F, NL, NR>(
            lhs, rhs, window, &from_lhs, &from_rhs, &mut acc, unit, unit_m, unit_n, plan,
        );
    }

    let (row0, col0) =
        if comptime!(config.stages > 1) { (place[0], place[1]) } else { (row0, col0) };
    #[unroll]
    for i in 0..own_m {
        let row = row0 + unit_m + comptime!(plan.lhs.nth(i as u32, width_lhs));
        if comptime!(plan.exact) || row < row_end {
            let columns = dims.columns(batch, row);
            // [parts, batches, m, n]
            let line_of = (part * dims.batches + batch) as usize * dims.m as usize + row as usize;
            let partial = line_of * dims.n as usize + (col0 + unit_n) as usize;
            let (first, end) = (start_out + row as usize * dims.out_stride, out.len());
            let first = first + (col0 + unit_n) as usize;
            // Results of a row lie at constant distances, so one address suffices; registers have
            // room for no more.
            let line = &mut out[first..end];
            #[unroll]
            for j in 0..own_n {
                let far = comptime!(plan.rhs.nth(j as u32, width_rhs));
                let col = col0 + unit_n + far;
                if comptime!(plan.exact) || col < dims.n {
                    let far = comptime!(far as usize);
                    let sum = acc[comptime!(i * own_n + j)];
                    if comptime!(plan.partial) {
                        partials[partial + far] = Vector::new(sum);
                    } else {
                        let value = finish.one(sum, first + far, col, &columns);
                        line[far] = Vector::new(E::cast_from(value));
                    }
                }
            }
        }
    }
}

/// Computes `acc += A · B` over the range of k, one shared tile at a time, with the next prefetched
/// into registers.
#[cube]
#[expect(clippy::too_many_arguments, reason = "two operands, one place")]
fn accumulate<F: Float, NL: Size, NR: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    window: &ComptimeOption<Gather<F, NL>>,
    from_lhs: &Source,
    from_rhs: &Source,
    acc: &mut Array<f32>,
    unit: u32,
    unit_m: u32,
    unit_n: u32,
    #[comptime] plan: FmaPlan,
) {
    let config = comptime!(plan.config);
    let (lanes_lhs, lanes_rhs) = (NL::value(), NR::value());
    let mut shared_lhs = Shared::<[Vector<F, NL>]>::new_aligned_slice(
        comptime!(plan.lhs.tile.len() / lanes_lhs),
        16usize,
    );
    let mut shared_rhs = Shared::<[Vector<F, NR>]>::new_aligned_slice(
        comptime!(plan.rhs.tile.len() / lanes_rhs),
        16usize,
    );
    let first = from_lhs.k_start;
    let tiles = (from_lhs.k_end - first).div_ceil(config.tile_k);
    let mut next_lhs = fetch_left::<F, NL>(lhs, window, from_lhs, first, unit, plan.lhs, config);
    let mut next_rhs = fetch::<F, NR>(rhs, from_rhs, first, unit, plan.rhs, config);
    for tile in 0..tiles {
        put::<F, NL>(&mut shared_lhs, &next_lhs, unit, plan.lhs, config);
        put::<F, NR>(&mut shared_rhs, &next_rhs, unit, plan.rhs, config);
        sync_cube();
        if tile + 1 < tiles {
            let k0 = first + (tile + 1) * config.tile_k;
            next_lhs = fetch_left::<F, NL>(lhs, window, from_lhs, k0, unit, plan.lhs, config);
            next_rhs = fetch::<F, NR>(rhs, from_rhs, k0, unit, plan.rhs, config);
        }
        multiply_tile::<F, NL, NR>(&shared_lhs, &shared_rhs, acc, unit_m, unit_n, plan);
        sync_cube();
    }
}

/// Computes `acc += A · B` for one pair of tiles.
#[cube]
fn multiply_tile<F: Float, NL: Size, NR: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    acc: &mut Array<f32>,
    unit_m: u32,
    unit_n: u32,
    #[comptime] plan: FmaPlan,
) {
    let (lanes_lhs, lanes_rhs) = (NL::value(), NR::value());
    let (width_lhs, width_rhs) = comptime!((lanes_lhs as u32, lanes_rhs as u32));
    let (own_m, own_n) = comptime!((plan.config.own_m as usize, plan.config.own_n as usize));
    // Depth of a pass in k: the width of the wider vector along k.
    let lhs_k = comptime!(if plan.lhs.along_k() { width_lhs } else { 1 });
    let rhs_k = comptime!(if plan.rhs.along_k() { width_rhs } else { 1 });
    let pass = comptime!(if lhs_k > rhs_k { lhs_k } else { rhs_k });
    let depth = comptime!(pass as usize);
    for kk in range_stepped(0, plan.config.tile_k, pass) {
        let from_lhs = bases::<NL>(unit_m, kk, plan.lhs);
        let from_rhs = bases::<NR>(unit_n, kk, plan.rhs);
        let mut a = Array::<f32>::new(comptime!(own_m * depth)); // [own_m, depth]
        #[unroll]
        for i in 0..comptime!(own_m as u32 * pass / width_lhs) {
            let (row, k) = comptime!(plan.lhs.vector(i, pass, width_lhs));
            let vector = read::<F, NL>(lhs, &from_lhs, row, k, plan.lhs);
            #[unroll]
            for e in 0..NL::value() {
                let (row, k) = comptime!(plan.lhs.element(row, k, e as u32));
                a[comptime!((row * pass + k) as usize)] = vector.extract(e);
            }
        }
        #[unroll]
        for j in 0..comptime!(own_n as u32 * pass / width_rhs) {
            let (col, k) = comptime!(plan.rhs.vector(j, pass, width_rhs));
            let vector = read::<F, NR>(rhs, &from_rhs, col, k, plan.rhs);
            #[unroll]
            for e in 0..NR::value() {
                let (col, k) = comptime!(plan.rhs.element(col, k, e as u32));
                let b = vector.extract(e);
                #[unroll]
                for i in 0..own_m {
                    let at = comptime!(i * own_n + col as usize);
                    acc[at] = fma(a[comptime!(i * depth + k as usize)], b, acc[at]);
                }
            }
        }
    }
}

/// Returns the positions of this unit's first results at depth `k`, in vectors: one for each
/// swizzle pattern of its rows.
#[cube]
fn bases<N: Size>(outer: u32, k: u32, #[comptime] operand: FmaOperand) -> Sequence<usize> {
    let width = N::value();
    let mut out = Sequence::<usize>::new();
    #[unroll]
    for pattern in 0..comptime!(operand.swizzle_patterns()) {
        out.push(place(outer + comptime!(pattern * operand.group), k, width, operand) as usize);
    }
    out
}

/// Reads the vector at result `nth` and depth `k`, at a constant distance from its base in `bases`.
#[cube]
fn read<F: Float, N: Size>(
    tile: &[Vector<F, N>],
    bases: &Sequence<usize>,
    #[comptime] nth: u32,
    #[comptime] k: u32,
    #[comptime] operand: FmaOperand,
) -> Vector<f32, N> {
    let width = N::value();
    let pattern = comptime!(nth % operand.swizzle_patterns());
    let far = comptime!(operand.distance(nth, k, pattern, width as u32));
    let (from, end) = (*bases.index(comptime!(pattern as usize)), tile.len());
    let window = &tile[from..end];
    Vector::cast_from(window[comptime!(far as usize)])
}

/// Returns the index of `(outer, k)` in a tile, in vectors.
#[cube]
fn place(outer: u32, k: u32, #[comptime] width: usize, #[comptime] operand: FmaOperand) -> u32 {
    let bytes = comptime!((operand.tile.elem * width) as u32);
    offset_of(outer, k, operand) / bytes
}

/// Returns row or column, and depth, of vector `at` of a tile, in memory order.
#[cube]
fn vector_at<N: Size>(at: u32, #[comptime] operand: FmaOperand) -> (u32, u32) {
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let across = comptime!(operand.tile.cols as u32 / width);
    let (major, minor) = (at / across, at % across * width);
    if comptime!(operand.along_k()) { (major, minor) } else { (minor, major) }
}

/// Loads this unit's vectors of one tile; zero past the edges.
#[cube]
fn fetch<F: Float, N: Size>(
    src: &[Vector<F, N>],
    from: &Source,
    k0: u32,
    unit: u32,
    #[comptime] operand: FmaOperand,
    #[comptime] config: FmaConfig,
) -> Array<Vector<F, N>> {
    let width = N::value();
    let vectors = comptime!((operand.tile.len() / width) as u32);
    let mut out = Array::<Vector<F, N>>::new(comptime!((vectors / config.units()) as usize));
    #[unroll]
    for i in 0..comptime!(vectors / config.units()) {
        let (outer, k) = vector_at::<N>(unit + comptime!(i * config.units()), operand);
        let mut value = Vector::<F, N>::new(F::new(0.0));
        if from.holds(outer, k0 + k) {
            value = src[from.element(outer, k0 + k, operand) / N::value()];
        }
        out[comptime!(i as usize)] = value;
    }
    out
}

/// Loads this unit's vectors of a tile of lhs, whose rows may be windows of an image.
#[cube]
fn fetch_left<F: Float, N: Size>(
    src: &[Vector<F, N>],
    window: &ComptimeOption<Gather<F, N>>,
    from: &Source,
    k0: u32,
    unit: u32,
    #[comptime] operand: FmaOperand,
    #[comptime] config: FmaConfig,
) -> Array<Vector<F, N>> {
    #[comptime]
    match window {
        ComptimeOption::Some(gather) => {
            let width = N::value();
            let vectors = comptime!((operand.tile.len() / width) as u32);
            let mut out =
                Array::<Vector<F, N>>::new(comptime!((vectors / config.units()) as usize));
            #[unroll]
            for i in 0..comptime!(vectors / config.units()) {
                let (outer, k) = vector_at::<N>(unit + comptime!(i * config.units()), operand);
                let corner = gather.corner(from.outer + outer, from.outer_end);
                let tap = gather.tap(k0 + k);
                let pixel = gather.pixel(&corner, &tap);
                out[comptime!(i as usize)] = gather.vector(src, from.start, pixel, tap.channel);
            }
            out
        }
        ComptimeOption::None => fetch::<F, N>(src, from, k0, unit, operand, config),
    }
}

/// Stores the vectors from [`fetch`] into the tile.
#[cube]
fn put<F: Float, N: Size>(
    dst: &mut [Vector<F, N>],
    values: &Array<Vector<F, N>>,
    unit: u32,
    #[comptime] operand: FmaOperand,
    #[comptime] config: FmaConfig,
) {
    let width = N::value();
    let vectors = comptime!((operand.tile.len() / width) as u32);
    #[unroll]
    for i in 0..comptime!(vectors / config.units()) {
        let (outer, k) = vector_at::<N>(unit + comptime!(i * config.units()), operand);
        dst[place(outer, k, width, operand) as usize] = values[comptime!(i as usize)];
    }
}
