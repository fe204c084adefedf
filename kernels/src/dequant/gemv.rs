//! GEMV for weights with codes of a byte, decoded in registers.
//!
//! ```text
//!   for each `columns` rows of x
//!     for each vector of a row of the weight              // one unit; neighbouring units take neighbouring vectors
//!       acc += scale_by_block(code, block) · x            // for `rows` rows and `columns` of x
//!     y = epilogue(scale_by_row(sum of the units' acc, row))    // tree reduction through shared memory
//! ```
//!
//! Arithmetic is f32, and the scale of a row is applied to its sum. If 4 does not divide k, a word spans two
//! rows, and elements are decoded one by one.
//!
//! Decoding takes three instructions an element, one more if blocks have scales, plus one per row of x. Codes
//! are read once for every `columns` rows of x.
//!
//! A CPU keeps one accumulator per vector element, so that codes are decoded and multiplied as vectors. On
//! two cores of cpu-genuineintel.6.167-2 one row of 4096 x 4096 int8 in f32 takes 1.19 ms this way. Element
//! by element it takes 3.29 ms, and with a dense weight 2.46 ms.

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::{DequantizeBytes, code_of};
use crate::fits::{lacks, limits, shape};
use crate::matmul::{Columns, Finish};

/// Launch shape of the GEMV.
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
    pub(crate) const fn rows_of_cube(self) -> u32 {
        self.units / self.lanes * self.rows
    }

    const fn shared_bytes(self) -> u32 {
        if self.lanes > 1 { 4 * self.units * self.rows * self.columns } else { 0 }
    }

    /// Returns the baseline config.
    pub(crate) fn baseline(arch: &ArchProfile) -> Self {
        match arch.cores() {
            Some(units) => Self { units, lanes: 1, rows: 1, columns: 1 },
            None => Self { units: 64, lanes: 8, rows: 1, columns: 1 },
        }
    }

    /// Returns candidate configs.
    pub(crate) fn candidates(arch: &ArchProfile, m: u32) -> Vec<Self> {
        let columns = m.next_power_of_two().min(8);
        if let Some(units) = arch.cores() {
            let columns = columns.min(4);
            return [8, 4, 2, 1].map(|rows| Self { units, lanes: 1, rows, columns }).to_vec();
        }
        let shapes = match columns {
            1 => &[
                [128, 32, 4],
                [128, 64, 4],
                [64, 32, 4],
                [128, 128, 2],
                [128, 32, 2],
                [256, 64, 8],
            ],
            2 => &[
                [128, 32, 4],
                [128, 64, 4],
                [256, 32, 4],
                [128, 128, 2],
                [128, 32, 2],
                [256, 64, 8],
            ],
            // With 128 units, 32 lanes by two rows and 64 lanes by four rows spill 8 bytes (sm_89, sm_120).
            _ => &[[128, 32, 4], [256, 32, 4], [256, 32, 2], [256, 64, 2]][..],
        };
        let config = |&[units, lanes, rows]: &[u32; 3]| Self { units, lanes, rows, columns };
        shapes.iter().map(config).chain([Self::baseline(arch)]).collect()
    }

    /// Checks the config for a weight of `n` rows.
    pub(crate) fn check(&self, arch: &ArchProfile, n: u32) -> Result<(), Infeasible> {
        limits(arch, self.units, 0)?;
        if !self.lanes.is_power_of_two() || self.units % self.lanes != 0 {
            return Err(shape(
                "lanes",
                self.lanes,
                "expected a power of two that divides the units",
            ));
        }
        if arch.cores().is_some() && self.lanes != 1 {
            return Err(lacks("cheap barriers (a GPU)"));
        }
        for (name, value) in [("rows", self.rows), ("columns", self.columns)] {
            if !(1..=8).contains(&value) {
                return Err(shape(name, value, "expected 1 to 8"));
            }
        }
        if self.rows * self.columns > 32 {
            return Err(shape(
                "columns",
                self.columns,
                "more than 32 accumulators would spill registers",
            ));
        }
        if n.div_ceil(self.rows_of_cube()) > 65_535 {
            return Err(shape("n", n, "expected at most 65535 cubes in one grid dimension"));
        }
        limits(arch, self.units, self.shared_bytes())
    }
}

/// Sizes of one launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
}

#[cube]
pub(crate) fn multiply<W: DequantizeBytes<NW>, F: Float, NX: Size, NW: Size, NO: Size>(
    x: &[Vector<F, NX>],
    weight: &W,
    out: &mut [Vector<F, NO>],
    finish: &Finish<F, F, NO>,
    dims: &Dims,
    #[comptime] config: GemvConfig,
) {
    let GemvConfig { units, lanes, rows, columns } = comptime!(config);
    let (width, words) = (NX::value(), NW::value());
    let per_unit = comptime!((rows * columns) as usize);
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);
    let first = CUBE_POS_X * comptime!(config.rows_of_cube());
    let own = first + group * rows;
    let mut sums = Shared::<[f32]>::new_slice(comptime!(if lanes > 1 {
        units as usize * per_unit
    } else {
        1
    }));
    let mut col = 0u32;
    while col < dims.m {
        let mut acc = Array::<f32>::new(per_unit); // [rows, columns]
        #[unroll]
        for i in 0..per_unit {
            acc[i] = 0.0f32;
        }
        // A unit without partners, as on a CPU, has one accumulator per vector element, because its registers
        // are vectors.
        let wide = comptime!(lanes == 1 && width > 1);
        let mut apart = Array::<Vector<f32, NX>>::new(comptime!(if wide { per_unit } else { 1 }));
        #[unroll]
        for i in 0..comptime!(if wide { per_unit } else { 1 }) {
            apart[i] = Vector::new(0.0f32);
        }
        if comptime!(width > 1) {
            let vectors = dims.k / comptime!(4 * words as u32);
            let mut at = u32::cast_from(lane);
            while at < vectors {
                let mut right = Array::<Vector<u32, NW>>::new(comptime!(rows as usize));
                let mut scales = Sequence::<f32>::new();
                #[unroll]
                for r in 0..rows {
                    // Rows past the end repeat the last one and are never stored.
                    let row = min(own + r, dims.n - 1) as usize;
                    let from = row * vectors as usize + at as usize;
                    right[comptime!(r as usize)] = W::codes(weight, from);
                    scales.push(W::block(weight, from));
                }
                #[unroll]
                for v in 0..comptime!(4 * words / width) {
                    let mut left = Array::<Vector<F, NX>>::new(comptime!(columns as usize));
                    #[unroll]
                    for c in 0..columns {
                        let row = min(col + c, dims.m - 1) as usize;
                        let from = (row * dims.k as usize) / NX::value();
                        left[comptime!(c as usize)] =
                            x[from + at as usize * comptime!(4 * words / width) + v];
                    }
                    if comptime!(wide) {
                        #[unroll]
                        for r in 0..rows {
                            let mut values = Vector::<f32, NX>::new(0.0f32);
                            #[unroll]
                            for e in 0..width {
                                let element = comptime!(v * width + e);
                                let word =
                                    right[comptime!(r as usize)].extract(comptime!(element / 4));
                                let code = code_of(word, comptime!(element as u32 % 4));
                                let block = *scales.index(comptime!(r as usize));
                                values.insert(e, W::scale_by_block(code, block));
                            }
                            #[unroll]
                            for c in 0..columns {
                                let i = comptime!((r * columns + c) as usize);
                                let x = Vector::cast_from(left[comptime!(c as usize)]);
                                apart[i] = fma(values, x, apart[i]);
                            }
                        }
                    }
                    #[unroll]
                    for e in 0..comptime!(if wide { 0 } else { width }) {
                        let element = comptime!(v * width + e);
                        #[unroll]
                        for r in 0..rows {
                            let word = right[comptime!(r as usize)].extract(comptime!(element / 4));
                            let code = code_of(word, comptime!(element as u32 % 4));
                            let code =
                                W::scale_by_block(code, *scales.index(comptime!(r as usize)));
                            #[unroll]
                            for c in 0..columns {
                                let i = comptime!((r * columns + c) as usize);
                                let x = f32::cast_from(left[comptime!(c as usize)].extract(e));
                                acc[i] = fma(code, x, acc[i]);
                            }
                        }
                    }
                }
                at += lanes;
            }
        } else {
            let mut at = u32::cast_from(lane);
            while at < dims.k {
                #[unroll]
                for r in 0..rows {
                    let row = min(own + r, dims.n - 1) as usize;
                    let flat = row * dims.k as usize + at as usize;
                    let word =
                        W::codes(weight, flat / 4).extract(0usize) >> ((flat % 4) as u32 * 8);
                    let code = W::scale_by_block(code_of(word, 0u32), W::block(weight, flat / 4));
                    #[unroll]
                    for c in 0..columns {
                        let line = min(col + c, dims.m - 1) as usize * dims.k as usize;
                        let x = f32::cast_from(x[line + at as usize].extract(0usize));
                        let i = comptime!((r * columns + c) as usize);
                        acc[i] = fma(code, x, acc[i]);
                    }
                }
                at += lanes;
            }
        }
        if comptime!(wide) {
            #[unroll]
            for i in 0..per_unit {
                #[unroll]
                for e in 0..width {
                    acc[i] += apart[i].extract(e);
                }
            }
        }
        let results = comptime!(rows * columns);
        if comptime!(lanes > 1) {
            // Results of a group are adjacent, those of one unit a cube apart, so that no two units of a
            // plane share a bank.
            #[unroll]
            for i in 0..per_unit {
                sums[comptime!(i * units as usize) + UNIT_POS as usize] = acc[i];
            }
            #[unroll]
            for level in 0..comptime!(lanes.ilog2()) {
                sync_cube();
                let apart = comptime!((lanes >> (level + 1)) as usize);
                if lane < comptime!(apart as u32) {
                    #[unroll]
                    for i in 0..per_unit {
                        let at = comptime!(i * units as usize) + UNIT_POS as usize;
                        sums[at] += sums[at + apart];
                    }
                }
            }
            sync_cube();
            // Neighbouring units store neighbouring columns of y.
            let per_cube = comptime!(config.rows_of_cube());
            let mut id = UNIT_POS;
            while id < comptime!(config.rows_of_cube() * columns) {
                let (c, row) = (id / per_cube, id % per_cube);
                let i = row % rows * columns + c;
                let sum = sums[(i * units + row / rows * lanes) as usize];
                store::<W, F, NW, NO>(out, weight, finish, sum, first + row, col + c, dims);
                id += units;
            }
            sync_cube();
        } else {
            #[unroll]
            for i in 0..results {
                let (n, m) = (own + comptime!(i / columns), col + comptime!(i % columns));
                store::<W, F, NW, NO>(out, weight, finish, acc[comptime!(i as usize)], n, m, dims);
            }
        }
        col += columns;
    }
}

/// Stores the result of column `n` and row `m` of y.
#[cube]
fn store<W: DequantizeBytes<NW>, F: Float, NW: Size, NO: Size>(
    out: &mut [Vector<F, NO>],
    weight: &W,
    finish: &Finish<F, F, NO>,
    sum: f32,
    n: u32,
    m: u32,
    dims: &Dims,
) {
    if n < dims.n && m < dims.m {
        let columns = Columns { first: 0usize.runtime(), count: dims.n };
        let to = m as usize * dims.n as usize + n as usize;
        let value =
            finish.one(W::scale_by_row(sum, W::row(weight, n as usize), dims.k), to, n, &columns);
        out[to] = Vector::new(F::cast_from(value));
    }
}
