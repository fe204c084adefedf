//! The CPU path: one lookup decodes a byte to its two values.
//!
//! ```text
//!   pairs[byte] = (book[byte / 16], book[byte % 16])
//!   for each `rows` rows of the weight                    // one unit
//!     for each `columns` rows of x
//!       for each 32 elements of a row
//!         acc += absmax · Σ pairs[byte] · (x, x')         // for `rows` rows and `columns` of x, lane by lane
//!       y = epilogue(acc + acc')
//! ```
//!
//! Arithmetic is f32. Each unit builds its own table of pairs once a launch, 2 KB in the first-level cache.
//! Even and odd bytes have separate accumulators, so that no addition waits for the previous one.
//!
//! Cost: one lookup, two integer instructions and one multiply-add for two elements of a row of the weight.
//!
//! Ladder in ms at m = 1 with 8 / 4 / 1 rows of the weight at a time (4096 x 4096 in rows, f32, two cores of
//! cpu-genuineintel.6.167-2, where a dense matmul takes 2.49):
//!
//! | version                                                              |                    |
//! |----------------------------------------------------------------------|--------------------|
//! | v1 [`gemv`](super::gemv): one value at a time, one accumulator a row | 1.93 / 2.34 / 4.26 |
//! | v2 one pair at a time, two accumulators of pairs a row               | 1.48 / 1.70 / 1.91 |

use cubecl::prelude::*;

use super::Dims;
use super::gemv::{Chunk, GemvConfig, GemvPlan, chunk_of, store};
use crate::matmul::Finish;
use crate::nf4::{QuantizedValues, code_shift};

/// Runs the CPU path. Needs `plan.whole`, and `plan.config.lanes` = 1.
#[cube]
pub(crate) fn pairs<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    finish: &Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) {
    let GemvConfig { units, rows, columns, .. } = comptime!(plan.config);
    let matrices = comptime!(plan.matrices());
    let products = comptime!(plan.products() as usize);
    let together = comptime!(plan.words);
    let (width, per_unit) = (dims.n / matrices, comptime!(rows / matrices));
    let chunks = dims.k / comptime!(8 * together);
    let pairs = pairs_of(&weight.codebook);
    let mut first = (CUBE_POS_X * units + UNIT_POS) * per_unit;
    while first < width {
        let mut col = 0u32.runtime();
        while col < dims.m {
            let mut acc = zeros(products); // [per_unit, columns, matrices]
            for at in 0..chunks {
                let mut part = zeros(comptime!(2 * products)); // accumulators of even bytes, then of odd bytes
                let Chunk { codes, absmax } = chunk_of(weight, first, at, width, dims, plan);
                #[unroll]
                for w in 0..together {
                    let fours = load_fours(x, col, at * together + w, dims, plan);
                    #[unroll]
                    for r in 0..rows {
                        let word = codes[comptime!((r * together + w) as usize)];
                        #[unroll]
                        for byte in 0..4u32 {
                            let pair = pairs[((word >> comptime!(8 * byte)) & 255) as usize];
                            #[unroll]
                            for c in 0..columns {
                                let i = comptime!(2 * plan.place(r, c) + byte as usize % 2);
                                let x = fours[comptime!((4 * c + byte) as usize)];
                                part[i] = fma(pair, x, part[i]);
                            }
                        }
                    }
                }
                #[unroll]
                for r in 0..rows {
                    let absmax = Vector::<f32, Const<2>>::new(absmax[comptime!(r as usize)]);
                    #[unroll]
                    for c in 0..columns {
                        let i = comptime!(plan.place(r, c));
                        let both = part[comptime!(2 * i)] + part[comptime!(2 * i + 1)];
                        acc[i] = fma(both, absmax, acc[i]);
                    }
                }
            }
            let mut sums = Array::<f32>::new(products);
            #[unroll]
            for i in 0..products {
                sums[i] = acc[i].extract(0usize) + acc[i].extract(1usize);
            }
            #[unroll]
            for i in 0..comptime!(per_unit * columns) {
                let (n, m) = (first + comptime!(i / columns), col + comptime!(i % columns));
                store(out, finish, &sums, comptime!((i * matrices) as usize), n, m, dims, plan);
            }
            col += columns;
        }
        first += CUBE_COUNT_X * comptime!(units * per_unit);
    }
}

/// Returns the values of each byte: that of its high half, then that of its low half.
#[cube]
fn pairs_of(codebook: &[f32]) -> Array<Vector<f32, Const<2>>> {
    let mut pairs = Array::<Vector<f32, Const<2>>>::new(256usize);
    for byte in 0..256u32 {
        let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2u32 {
            let code = (byte >> comptime!(code_shift(e))) & 15;
            pair.insert(comptime!(e as usize), codebook[code as usize]);
        }
        pairs[byte as usize] = pair;
    }
    pairs
}

#[cube]
fn zeros(#[comptime] len: usize) -> Array<Vector<f32, Const<2>>> {
    let mut all = Array::<Vector<f32, Const<2>>>::new(len);
    #[unroll]
    for i in 0..len {
        all[i] = Vector::new(0.0f32);
    }
    all
}

/// Loads eight elements of each of a unit's rows of x, in pairs. Rows past the end repeat the last one.
#[cube]
fn load_fours<F: Float, NX: Size>(
    x: &[Vector<F, NX>],
    col: u32,
    at: u32,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) -> Array<Vector<f32, Const<2>>> {
    let width = NX::value();
    let columns = comptime!(plan.config.columns as usize);
    let mut fours = zeros(comptime!(4 * columns));
    #[unroll]
    for c in 0..columns {
        let line = min(col + comptime!(c as u32), dims.m - 1) as usize * dims.k as usize;
        let from = (line + at as usize * 8) / NX::value();
        #[unroll]
        for p in 0..4usize {
            let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
            #[unroll]
            for e in 0..2usize {
                let vector = x[from + comptime!((2 * p + e) / width)];
                let value = f32::cast_from(vector.extract(comptime!((2 * p + e) % width)));
                pair.insert(e, value);
            }
            fours[comptime!(4 * c + p)] = pair;
        }
    }
    fours
}
