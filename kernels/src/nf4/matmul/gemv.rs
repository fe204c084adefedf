//! The GEMV path for any GPU, and for CPUs where [`pairs`](super::pairs) does not apply. Neighbouring units
//! share rows of the weight.
//!
//! ```text
//!   for each `columns` rows of x
//!     for each 32 elements of a row of the weight       // one unit; neighbouring units take neighbouring elements
//!       acc += absmax · Σ book[code] · x                // for `rows` rows and `columns` of x
//!     y = epilogue(sum of the units' acc)               // tree reduction through shared memory
//! ```
//!
//! Arithmetic is f32. If units share a codebook, it lies in shared memory, one value a bank, so that any mix
//! of codes is read at once. If 8 does not divide k, a word spans two rows, and elements are decoded one by
//! one.
//!
//! Cost: one codebook read and about four other instructions per element, for each row of the weight.
//!
//! Ladder in us at m = 1 (14336 x 4096 in rows, bf16, H200 through Vulkan / limited to the features of an RTX
//! 4090):
//!
//! | version                                                       | Vulkan | CUDA |
//! |---------------------------------------------------------------|--------|------|
//! | v1 a word at a time, its absmax looked up for each, two rows    | 29.7   | 28.2 |
//! | v2 four words and one absmax at a time, two rows                | 30.5   | 25.4 |
//! | v3 v2, eight rows of 128 units on Vulkan, four of 32 on CUDA    | 20.7   | 19.8 |
//! | v4 v3, tree reduction over units instead of a sequential sum    | 22.9   | 19.8 |
//!
//! v4 works with the same shapes for a gated pair, where v3 spills 24 to 72 bytes on CUDA. The reason for its
//! cost of 2 us on Vulkan is unknown.
//!
//! With two rows, v2 is bound by shared memory and the first-level cache, which are busy for 69% of the time.
//! Neighbouring units read x 64 bytes apart. More rows share these reads.

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::Dims;
use crate::matmul::{Columns, Finish, NormWeight};
use crate::nf4::{QuantizedValues, code_shift};
use crate::rows::NormKind;

/// Launch shape of the GEMV path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemvConfig {
    /// Units of a cube.
    pub units: u32,
    /// Units that share rows.
    pub lanes: u32,
    /// Rows of the weight that a group of lanes processes at once.
    pub rows: u32,
    /// Rows of x that a group of lanes processes at once.
    pub columns: u32,
}

impl GemvConfig {
    /// Rows of the weight that a cube processes.
    pub(super) const fn rows_of_cube(self) -> u32 {
        self.units / self.lanes * self.rows
    }

    /// Returns the baseline config for one matrix or a gated pair.
    pub(super) fn baseline(arch: &ArchProfile, glu: bool) -> Self {
        let rows = if glu { 2 } else { 1 };
        match arch.cores() {
            Some(units) => Self { units, lanes: 1, rows, columns: 1 },
            None => Self { units: 64, lanes: 8, rows, columns: 1 },
        }
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GemvPlan {
    pub(super) config: GemvConfig,
    /// True if no word spans two rows.
    pub(super) whole: bool,
    /// Neighbouring words that a unit decodes at once; they share one absmax.
    pub(super) words: u32,
    /// True if a unit's rows alternate between a matrix and the one that it gates.
    pub(super) glu: bool,
    pub(super) norm: Option<NormKind>,
}

impl GemvPlan {
    /// Rows of the weight that form one column of y.
    pub(super) const fn matrices(self) -> u32 {
        if self.glu { 2 } else { 1 }
    }

    /// Dot products that a unit accumulates.
    pub(super) const fn products(self) -> u32 {
        self.config.rows * self.config.columns
    }

    /// Accumulators of a unit. With a norm, the squares of its rows of x come last.
    const fn sums(self) -> u32 {
        self.products() + if self.norm.is_some() { self.config.columns } else { 0 }
    }

    pub(super) const fn shared_bytes(self) -> u32 {
        let sums = if self.config.lanes > 1 { self.config.units * self.sums() } else { 0 };
        16 * 4 + sums * 4
    }

    /// Index of the accumulator for the unit's row `r` of the weight and row `c` of x.
    pub(super) const fn place(self, r: u32, c: u32) -> usize {
        let matrices = self.matrices();
        ((r / matrices * self.config.columns + c) * matrices + r % matrices) as usize
    }
}

#[cube]
pub(crate) fn gemv<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    out: &mut [Vector<F, NO>],
    finish: &Finish<F, F, NO>,
    norm: &ComptimeOption<NormWeight<F, NX>>,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) {
    if comptime!(plan.config.lanes > 1) {
        let mut codebook = Shared::<[f32]>::new_slice(16usize);
        if UNIT_POS < 16 {
            codebook[UNIT_POS as usize] = weight.codebook[UNIT_POS as usize];
        }
        sync_cube();
        multiply::<F, NX, NW, NO>(x, weight, &codebook, out, finish, norm, dims, plan);
    } else {
        multiply::<F, NX, NW, NO>(x, weight, &weight.codebook, out, finish, norm, dims, plan);
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, and what is done to them")]
fn multiply<F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &QuantizedValues<NW>,
    codebook: &[f32],
    out: &mut [Vector<F, NO>],
    finish: &Finish<F, F, NO>,
    norm: &ComptimeOption<NormWeight<F, NX>>,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) {
    let GemvConfig { units, lanes, rows, columns } = comptime!(plan.config);
    let matrices = comptime!(plan.matrices());
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    // First column of y of the cube, columns of a group, and accumulators of a unit.
    let first = CUBE_POS_X * comptime!(plan.config.rows_of_cube() / matrices);
    let width = dims.n / matrices;
    let per_group = comptime!(rows / matrices);
    let (products, per_unit) = comptime!((plan.products() as usize, plan.sums() as usize));
    let mut sums = Shared::<[f32]>::new_slice(comptime!(if lanes > 1 {
        units as usize * per_unit
    } else {
        1
    }));
    let mut col = 0u32;
    while col < dims.m {
        let mut acc = Array::<f32>::new(per_unit); // [per_group, columns, matrices], squares [columns]
        #[unroll]
        for i in 0..per_unit {
            acc[i] = 0.0f32;
        }
        if comptime!(plan.whole) {
            let together = comptime!(plan.words);
            let chunks = dims.k / comptime!(8 * together);
            let mut at = u32::cast_from(lane);
            while at < chunks {
                let own = first + group * per_group;
                let Chunk { codes, absmax } = chunk_of(weight, own, at, width, dims, plan);
                let mut part = Array::<f32>::new(products);
                #[unroll]
                for i in 0..products {
                    part[i] = 0.0f32;
                }
                #[unroll]
                for w in 0..together {
                    let mut eights = load_eights(x, col, at * together + w, dims, plan);
                    #[comptime]
                    match norm {
                        ComptimeOption::Some(norm) => {
                            apply_norm_weight(&mut eights, &mut acc, norm, at * together + w, plan);
                        }
                        ComptimeOption::None => {}
                    }
                    #[unroll]
                    for r in 0..rows {
                        let word = codes[comptime!((r * together + w) as usize)];
                        #[unroll]
                        for e in 0..8u32 {
                            let shift = comptime!(code_shift(e));
                            let value = codebook[((word >> shift) & 15) as usize];
                            #[unroll]
                            for c in 0..columns {
                                let i = comptime!(plan.place(r, c));
                                let x = eights[comptime!((c * 8 + e) as usize)];
                                part[i] = fma(value, x, part[i]);
                            }
                        }
                    }
                }
                #[unroll]
                for r in 0..rows {
                    #[unroll]
                    for c in 0..columns {
                        let i = comptime!(plan.place(r, c));
                        acc[i] = fma(part[i], absmax[comptime!(r as usize)], acc[i]);
                    }
                }
                at += lanes;
            }
        } else {
            let mut at = u32::cast_from(lane);
            while at < dims.k {
                #[unroll]
                for r in 0..rows {
                    let row = row_of(first + group * per_group, r, width, plan);
                    let flat = row as usize * dims.k as usize + at as usize;
                    let word = weight.codes[flat / 8].extract(0usize);
                    let e = (flat % 8) as u32;
                    let code = (word >> (e / 2 * 8 + (1 - e % 2) * 4)) & 15;
                    let block = (flat / comptime!(weight.plan.block_size as usize)) as u32;
                    let value = codebook[code as usize] * weight.absmax_at(block, block, dims.k);
                    #[unroll]
                    for c in 0..columns {
                        let line = min(col + c, dims.m - 1) as usize * dims.k as usize;
                        let mut x = f32::cast_from(x[line + at as usize].extract(0usize));
                        #[comptime]
                        match norm {
                            ComptimeOption::Some(norm) => {
                                if comptime!(r == 0) {
                                    let square = comptime!(products + c as usize);
                                    acc[square] = fma(x, x, acc[square]);
                                }
                                let norm_weights = norm.factors(at as usize);
                                x *= norm_weights[0];
                            }
                            ComptimeOption::None => {}
                        }
                        let i = comptime!(plan.place(r, c));
                        acc[i] = fma(value, x, acc[i]);
                    }
                }
                at += lanes;
            }
        }
        let results = comptime!(per_group * columns);
        if comptime!(lanes > 1) {
            #[unroll]
            for i in 0..per_unit {
                sums[UNIT_POS as usize * per_unit + i] = acc[i];
            }
            // Tree reduction: the upper half of a row's units adds to the lower half.
            #[unroll]
            for level in 0..comptime!(lanes.ilog2()) {
                sync_cube();
                let apart = comptime!(lanes >> (level + 1));
                if lane < apart {
                    #[unroll]
                    for i in 0..per_unit {
                        let at = UNIT_POS as usize * per_unit + i;
                        sums[at] += sums[at + apart as usize * per_unit];
                    }
                }
            }
            sync_cube();
            let mut id = UNIT_POS;
            while id < comptime!(units / lanes * results) {
                let (group, i) = (id / results, id % results);
                let of_group = group * comptime!(lanes * plan.sums());
                let from = of_group + i * matrices;
                let mut total = Array::<f32>::new(comptime!(matrices as usize));
                #[unroll]
                for which in 0..matrices {
                    total[comptime!(which as usize)] = sums[(from + which) as usize];
                }
                #[comptime]
                match norm {
                    ComptimeOption::Some(norm) => {
                        let square = of_group + comptime!(plan.products()) + i % columns;
                        let factor = norm.factor(sums[square as usize]);
                        #[unroll]
                        for which in 0..matrices {
                            total[comptime!(which as usize)] *= factor;
                        }
                    }
                    ComptimeOption::None => {}
                }
                let (n, m) = (first + group * per_group + i / columns, col + i % columns);
                store(out, finish, &total, 0usize, n, m, dims, plan);
                id += units;
            }
            sync_cube();
        } else {
            #[comptime]
            match norm {
                ComptimeOption::Some(norm) =>
                {
                    #[unroll]
                    for c in 0..columns {
                        let square = acc[comptime!(products + c as usize)];
                        let factor = norm.factor(square);
                        #[unroll]
                        for r in 0..rows {
                            acc[comptime!(plan.place(r, c))] *= factor;
                        }
                    }
                }
                ComptimeOption::None => {}
            }
            #[unroll]
            for i in 0..results {
                let n = first + group * per_group + comptime!(i / columns);
                let m = col + comptime!(i % columns);
                store(out, finish, &acc, comptime!((i * matrices) as usize), n, m, dims, plan);
            }
        }
        col += columns;
    }
}

/// Codes that a unit decodes at once.
#[derive(CubeType)]
pub(super) struct Chunk {
    /// `[rows, words]`
    pub(super) codes: Array<u32>,
    /// `[rows]`
    pub(super) absmax: Array<f32>,
}

/// Loads chunk `at` of a unit's rows of the weight. The first row belongs to column `first` of y.
#[cube]
pub(super) fn chunk_of<NW: Size>(
    weight: &QuantizedValues<NW>,
    first: u32,
    at: u32,
    width: u32,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) -> Chunk {
    let (rows, together) = comptime!((plan.config.rows, plan.words));
    let chunks = dims.k / comptime!(8 * together);
    let mut codes = Array::<u32>::new(comptime!((rows * together) as usize));
    let mut absmax = Array::<f32>::new(comptime!(rows as usize));
    #[unroll]
    for r in 0..rows {
        let row = row_of(first, r, width, plan);
        let flat = row * chunks + at;
        if comptime!(together > 1) {
            let vector = weight.codes[flat as usize];
            #[unroll]
            for w in 0..together {
                let to = comptime!((r * together + w) as usize);
                codes[to] = vector.extract(comptime!(w as usize));
            }
        } else {
            codes[comptime!(r as usize)] = weight.word(flat, row, at, dims.k);
        }
        let (word, chunk) = (flat * together, at * together);
        absmax[comptime!(r as usize)] = weight.absmax_of_word(word, row, chunk, dims.k);
    }
    Chunk { codes, absmax }
}

/// Returns row `r` of a unit's rows of the weight. The first row belongs to column `first` of y. Rows past the
/// end repeat the last one and are never stored.
#[cube]
fn row_of(first: u32, #[comptime] r: u32, width: u32, #[comptime] plan: GemvPlan) -> u32 {
    let matrices = comptime!(plan.matrices());
    min(first + comptime!(r / matrices), width - 1) + comptime!(r % matrices) * width
}

/// Loads eight elements of each of a unit's rows of x. Rows past the end repeat the last one.
#[cube]
fn load_eights<F: Float, NX: Size>(
    x: &[Vector<F, NX>],
    col: u32,
    at: u32,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) -> Array<f32> {
    let width = NX::value();
    let columns = comptime!(plan.config.columns as usize);
    let mut eights = Array::<f32>::new(comptime!(columns * 8));
    #[unroll]
    for c in 0..columns {
        let line = min(col + comptime!(c as u32), dims.m - 1) as usize * dims.k as usize;
        let from = (line + at as usize * 8) / NX::value();
        #[unroll]
        for v in 0..comptime!(8 / width) {
            let vector = x[from + v];
            #[unroll]
            for e in 0..width {
                eights[comptime!(c * 8 + v * width + e)] = f32::cast_from(vector.extract(e));
            }
        }
    }
    eights
}

/// Accumulates the squares of eight elements of x, and multiplies the elements by the norm weight.
#[cube]
fn apply_norm_weight<F: Float, NX: Size>(
    eights: &mut Array<f32>,
    acc: &mut Array<f32>,
    norm: &NormWeight<F, NX>,
    at: u32,
    #[comptime] plan: GemvPlan,
) {
    let width = NX::value();
    let first = at as usize * comptime!(8 / width);
    #[unroll]
    for v in 0..comptime!(8 / width) {
        let norm_weights = norm.factors(first + v);
        #[unroll]
        for e in 0..width {
            #[unroll]
            for c in 0..comptime!(plan.config.columns as usize) {
                let i = comptime!(c * 8 + v * width + e);
                let square = comptime!(plan.products() as usize + c);
                acc[square] = fma(eights[i], eights[i], acc[square]);
                eights[i] *= norm_weights[e];
            }
        }
    }
}

/// Stores the result of column `n` and row `m` of y, from the sum at `at` or from a gated pair of sums.
#[cube]
#[expect(clippy::too_many_arguments, reason = "sums, a result and its place")]
pub(super) fn store<F: Float, NO: Size>(
    out: &mut [Vector<F, NO>],
    finish: &Finish<F, F, NO>,
    sums: &Array<f32>,
    #[comptime] at: usize,
    n: u32,
    m: u32,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) {
    let width = dims.n / comptime!(plan.matrices());
    if n < width && m < dims.m {
        let columns = Columns { first: 0usize.runtime(), count: dims.n };
        let to = m as usize * width as usize + n as usize;
        let value = if comptime!(plan.glu) {
            let both = (sums[at], sums[comptime!(at + 1)]);
            finish.one_of_two(both, to, (n, width + n), &columns)
        } else {
            finish.one(sums[at], to, n, &columns)
        };
        out[to] = Vector::new(F::cast_from(value));
    }
}
