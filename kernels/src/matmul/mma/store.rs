//! Stores results: from accumulator fragments through the epilogue to memory.

use cubecl::prelude::*;

use super::MmaPlan;
use super::accumulators::{Accumulators, AccumulatorsExpand, Pair};
use super::work::Item;
use crate::matmul::dims::Dims;
use crate::matmul::epilogue::{Columns, Epilogue, Finish, store_transposed};

/// Returns the rows whose vectors of the epilogue's matrices are loaded together. A unit holds 4 registers for each vector; an
/// activation leaves fewer.
const fn rows_ahead(epilogue: Epilogue) -> usize {
    if epilogue.activation.is_some() && epilogue.residual { 1 } else { 4 }
}

/// Stores a plane's part: whole quads as 16-byte vectors if the result has vectors of eight, else
/// the pairs of a unit.
///
/// A fragment is 16 x 8; a unit holds columns `2 * (lane % 4)` and `+ 1` of rows `lane / 4` and `+ 8`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
pub(crate) fn store<F: Float, E: Float, A: Accumulators, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    acc: &A,
    item: &Item,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let width = NO::value();
    if comptime!(width == 8) {
        store_quads::<F, E, A, NO>(out, finish, acc, item, row, col, lane, dims, plan);
    } else {
        store_pairs::<F, E, A, NO>(out, finish, acc, item, row, col, lane, dims, plan);
    }
}

/// Returns the elements between rows of the result. One number in place of two saves registers.
#[cube]
fn line_of(dims: &Dims) -> usize {
    if comptime!(dims.interleaved) { dims.out_stride } else { dims.n as usize }
}

/// Returns the columns of a row, which are those of all rows unless the bias changes.
#[cube]
fn columns_of(dims: &Dims, all_rows: &Columns, batch: u32, row: u32) -> Columns {
    if comptime!(dims.periodic) {
        dims.columns(batch, row)
    } else {
        Columns { first: all_rows.first, count: all_rows.count }
    }
}

/// Loads for several rows come first, so that they wait together: the compiler moves no load before a store.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
fn store_quads<F: Float, E: Float, A: Accumulators, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    acc: &A,
    item: &Item,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let (all, quads) = comptime!((wm as usize / 8, wn as usize / 32));
    let rows = comptime!(rows_ahead(finish.epilogue).min(all));
    let exact = comptime!(plan.exact);
    let (_, _, start) = dims.batch(item.batch as usize);
    let all_rows = dims.columns(item.batch, item.row);
    #[unroll]
    for block in 0..comptime!(all / rows) {
        let mut ahead = Array::<Vector<u32, Const<4>>>::new(comptime!(rows * quads));
        #[unroll]
        for i in 0..rows {
            let row = row + comptime!(8 * (block * rows + i) as u32) + lane / 4;
            let line = start + row as usize * line_of(dims);
            #[unroll]
            for quad in 0..quads {
                let mine = col + comptime!(32 * quad as u32) + lane % 4 * 8;
                let inside = comptime!(exact) || (row < item.row_end && mine < all_rows.count);
                let at = (line + mine as usize) / 8;
                ahead[comptime!(i * quads + quad)] = finish.ahead(at, inside);
            }
        }
        #[unroll]
        for i in 0..rows {
            let own = comptime!(block * rows + i);
            let row = row + comptime!(8 * own as u32) + lane / 4;
            let line = start + row as usize * line_of(dims);
            if comptime!(exact) || row < item.row_end {
                let columns = columns_of(dims, &all_rows, item.batch, row);
                #[unroll]
                for quad in 0..quads {
                    let mut pairs = Array::<Pair>::new(4usize);
                    #[unroll]
                    for j in 0..4usize {
                        let fragment = comptime!(4 * (own / 2 * quads + quad) + j);
                        pairs[j] = acc.pair(fragment, comptime!(own % 2));
                    }
                    let col = col + comptime!(32 * quad as u32);
                    let first = ahead[comptime!(i * quads + quad)];
                    store_quad::<F, E, Const<2>, NO>(
                        out, finish, &mut pairs, first, line, col, lane, &columns, exact,
                    );
                }
            }
        }
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
fn store_pairs<F: Float, E: Float, A: Accumulators, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    acc: &A,
    item: &Item,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let frags_n = comptime!(wn as usize / 8);
    let width = NO::value();
    let exact = comptime!(plan.exact);
    let (_, _, start) = dims.batch(item.batch as usize);
    let all_rows = dims.columns(item.batch, item.row);
    #[unroll]
    for i in 0..comptime!(wm as usize / 8) {
        let row = row + comptime!(8 * i as u32) + lane / 4;
        let line = start + row as usize * line_of(dims);
        if comptime!(exact) || row < item.row_end {
            let columns = columns_of(dims, &all_rows, item.batch, row);
            #[unroll]
            for j in 0..frags_n {
                let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
                let sum = acc.pair(comptime!(i / 2 * frags_n + j), comptime!(i % 2));
                if comptime!(width == 2) {
                    if comptime!(exact) || left < dims.n {
                        let at = (line + left as usize) / 2;
                        let value = finish.vector::<Const<2>>(sum, at, left, &columns);
                        out[at] = Vector::cast_from(value);
                    }
                } else {
                    #[unroll]
                    for e in 0..2usize {
                        let col = left + comptime!(e as u32);
                        if comptime!(exact) || col < dims.n {
                            let at = line + col as usize;
                            let value = finish.one(sum.extract(e), at, col, &columns);
                            out[at] = Vector::new(E::cast_from(value));
                        }
                    }
                }
            }
        }
    }
}

/// Stores a unit's four pairs of columns `col` to `col + 31`, in the row that starts at `line`. `ahead` is the [`Finish::ahead`] of
/// the unit's vector.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
pub(crate) fn store_quad<F: Float, E: Float, NC: Size, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    pairs: &mut Array<Vector<f32, NC>>,
    ahead: Vector<u32, Const<4>>,
    line: usize,
    col: u32,
    lane: u32,
    columns: &Columns,
    #[comptime] exact: bool,
) {
    let mine = col + lane % 4 * 8;
    let inside = mine < columns.count;
    let at = (line + mine as usize) / 8;
    let inside = comptime!(exact) || inside;
    finish.quad::<NC>(pairs, ahead, at, col, lane, columns, inside);
    store_transposed::<E, NC, NO>(out, pairs, at, inside, lane);
}

/// Stores a plane's part of the split-k partial sums, like [`store`].
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
pub(crate) fn store_partials<A: Accumulators, NP: Size>(
    out: &mut [Vector<f32, NP>],
    acc: &A,
    start: usize,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: MmaPlan,
) {
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let frags_n = comptime!(wn as usize / 8);
    let width = NP::value();
    let exact = comptime!(plan.exact);
    #[unroll]
    for i in 0..comptime!(wm as usize / 8) {
        let row = row + comptime!(8 * i as u32) + lane / 4;
        let line = start + row as usize * dims.n as usize;
        if comptime!(exact) || row < dims.m {
            #[unroll]
            for j in 0..frags_n {
                let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
                let sum = acc.pair(comptime!(i / 2 * frags_n + j), comptime!(i % 2));
                if comptime!(width == 2) {
                    if comptime!(exact) || left < dims.n {
                        out[(line + left as usize) / 2] = Vector::cast_from(sum);
                    }
                } else {
                    #[unroll]
                    for e in 0..2usize {
                        let col = left + comptime!(e as u32);
                        if comptime!(exact) || col < dims.n {
                            out[line + col as usize] = Vector::new(sum.extract(e));
                        }
                    }
                }
            }
        }
    }
}
