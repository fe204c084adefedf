//! Stores results: from accumulator fragments through the epilogue to memory.

use cubecl::prelude::*;

use super::MmaPlan;
use super::accumulators::{Accumulators, AccumulatorsExpand, Pair};
use super::work::Item;
use crate::matmul::dims::Dims;
use crate::matmul::epilogue::{Columns, Finish};
use crate::tile::quad_transpose;

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
    let (wm, wn) = comptime!(plan.config.plane_tile());
    let frags_n = comptime!(wn as usize / 8);
    let width = NO::value();
    let exact = comptime!(plan.exact);
    let (_, _, start) = dims.batch(item.batch as usize);
    let columns = dims.columns(item.batch);
    #[unroll]
    for i in 0..comptime!(wm as usize / 8) {
        let row = row + comptime!(8 * i as u32) + lane / 4;
        let line = start + row as usize * dims.n as usize;
        if comptime!(exact) || row < item.row_end {
            let (fragment, half) = comptime!((i / 2 * frags_n, i % 2));
            if comptime!(width == 8) {
                #[unroll]
                for quad in 0..comptime!(frags_n / 4) {
                    let mut pairs = Array::<Pair>::new(4usize);
                    #[unroll]
                    for j in 0..4usize {
                        pairs[j] = acc.pair(comptime!(fragment + 4 * quad + j), half);
                    }
                    let col = col + comptime!(32 * quad as u32);
                    store_quad::<F, E, Const<2>, NO>(
                        out, finish, &mut pairs, line, col, lane, &columns, exact,
                    );
                }
            } else {
                #[unroll]
                for j in 0..frags_n {
                    let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
                    let sum = acc.pair(comptime!(fragment + j), half);
                    if comptime!(width == 2) {
                        if comptime!(exact) || left < dims.n {
                            let at = (line + left as usize) / 2;
                            let value = finish.activate::<Const<2>>(sum, left, &columns);
                            out[at] = Vector::cast_from(finish.join::<Const<2>>(value, at));
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
}

/// Stores a unit's four pairs of columns `col` to `col + 31`, in the row that starts at `line`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
pub(crate) fn store_quad<F: Float, E: Float, NC: Size, NO: Size>(
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    pairs: &mut Array<Vector<f32, NC>>,
    line: usize,
    col: u32,
    lane: u32,
    columns: &Columns,
    #[comptime] exact: bool,
) {
    let mine = col + lane % 4 * 8;
    let inside = mine < columns.count;
    let at = (line + mine as usize) / 8;
    #[unroll]
    for j in 0..4usize {
        let left = col + comptime!(8 * j as u32) + lane % 4 * 2;
        pairs[j] = finish.activate::<NC>(pairs[j], left, columns);
    }
    finish.join_quad::<NC>(pairs, at, comptime!(exact) || inside, lane);
    let mut words = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        words[j] = u32::reinterpret(Vector::<E, NC>::cast_from(pairs[j]));
    }
    quad_transpose(&mut words, lane);
    if comptime!(exact) || inside {
        let mut vector = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for j in 0..4usize {
            vector.insert(j, words[j]);
        }
        out[at] = Vector::reinterpret(vector);
    }
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
