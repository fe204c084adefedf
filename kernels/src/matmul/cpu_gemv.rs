//! GEMV for CPUs, for few rows, with both operands contiguous along k as in a linear layer. Nothing
//! is packed; every vector of B is loaded once.
//!
//! ```text
//!   for each (rows x cols) block of C                 // one unit
//!     for each vector of k
//!       acc[row, col] += A[row, k..] · B[k.., col]    // lane by lane
//!     C = round(epilogue(sum of acc's lanes))
//! ```
//!
//! At 1x4096x4096 in f32 on cpu-genuineintel.6.167-2 with 2 cores, whose copy reaches 25 GB/s, this
//! path reads B at 27 GB/s; burn-flex reads it at 12 GB/s.

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::Dims;
use super::epilogue::Finish;
use super::path::{Grid, Path, check_vector};
use super::problem::{Layout, MatmulProblem};
use crate::fits::shape;

/// Block sizes of the CPU GEMV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CpuGemvConfig {
    /// Block of C that a unit sums at once; it takes `rows * cols` vector registers.
    pub rows: u32,
    pub cols: u32,
    /// f32 elements per vector register.
    pub vector: u32,
    /// Units, one per core.
    pub units: u32,
}

impl Path for CpuGemvConfig {
    fn candidates(arch: &ArchProfile, _problem: &MatmulProblem) -> Vec<Self> {
        let Some(units) = arch.cores() else { return Vec::new() };
        let vector = (arch.load_bytes / 4).clamp(4, 16);
        let config = |[rows, cols]: [u32; 2]| Self { rows, cols, vector, units };
        [[1, 4], [1, 8], [2, 4], [4, 4], [8, 2]].map(config).to_vec()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("rows", self.rows),
            ("cols", self.cols),
            ("vector", self.vector),
            ("units", self.units),
        ]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        check_vector(arch, problem, self.vector)?;
        if problem.lhs.layout != Layout::Row || problem.rhs.layout != Layout::Col {
            return Err(shape("vector", self.vector, "expected both operands contiguous along k"));
        }
        let [lhs, rhs, _] = problem.widths(u64::from(self.vector));
        if [lhs, rhs] != [self.vector as usize; 2] {
            return Err(shape("vector", self.vector, "expected rows of whole vectors"));
        }
        if self.rows > 16 || self.rows * self.cols > 24 {
            return Err(shape("rows", self.rows, "more accumulators than vector registers"));
        }
        Ok(())
    }

    fn tile(&self) -> (u32, u32) {
        (self.rows, self.cols)
    }

    fn tile_k(&self) -> u32 {
        self.vector
    }

    /// Nothing is packed, so a read costs little more than a multiply.
    fn read_cost(&self) -> f64 {
        1.5
    }

    fn grid(&self, _arch: &ArchProfile, _problem: &MatmulProblem) -> Grid {
        let vector = self.vector as usize;
        Grid {
            widths: [vector, vector, 1, 1],
            per_cube: self.units,
            ..Grid::new(self.tile(), (self.units, 1))
        }
    }
}

/// Requires `NL` = `NR` = `config.vector` and `NO` = 1.
#[cube]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    dims: &Dims,
    #[comptime] config: CpuGemvConfig,
) {
    let (rows, cols) = comptime!((config.rows as usize, config.cols as usize));
    let size!(W) = config.vector as usize;

    // Blocks that share columns are neighbours.
    let blocks_m = dims.m.div_ceil(config.rows);
    let block = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    let (row_start, row_end) = dims.rows(CUBE_POS_Y);
    let row0 = row_start + block % blocks_m * config.rows;
    let col0 = block / blocks_m * config.cols;
    // A group has fewer blocks than the whole of lhs.
    if col0 < dims.n && row0 < row_end {
        let (lhs_start, rhs_start, out_start) = dims.batch(CUBE_POS_Y as usize);

        // Rows and columns past the end repeat the last; they are never stored.
        let mut a = Array::<usize>::new(rows);
        #[unroll]
        for r in 0..rows {
            let row = min(row0 + comptime!(r as u32), row_end - 1) as usize;
            a[r] = (lhs_start + row * dims.lhs_stride) / NL::value();
        }
        let mut b = Array::<usize>::new(cols);
        #[unroll]
        for c in 0..cols {
            let col = min(col0 + comptime!(c as u32), dims.n - 1) as usize;
            b[c] = (rhs_start + col * dims.rhs_stride) / NR::value();
        }

        let mut acc = Array::<Vector<f32, W>>::new(comptime!(rows * cols));
        #[unroll]
        for i in 0..comptime!(rows * cols) {
            acc[i] = Vector::new(0.0f32);
        }
        for step in 0..dims.k as usize / NR::value() {
            let mut right = Array::<Vector<f32, W>>::new(cols);
            #[unroll]
            for c in 0..cols {
                right[c] = Vector::cast_from(rhs[b[c] + step]);
            }
            #[unroll]
            for r in 0..rows {
                let left = Vector::<f32, W>::cast_from(lhs[a[r] + step]);
                #[unroll]
                for c in 0..cols {
                    let at = comptime!(r * cols + c);
                    acc[at] = fma(left, right[c], acc[at]);
                }
            }
        }

        #[unroll]
        for r in 0..rows {
            #[unroll]
            for c in 0..cols {
                let (row, col) = (row0 + comptime!(r as u32), col0 + comptime!(c as u32));
                if row < row_end && col < dims.n {
                    let sums = acc[comptime!(r * cols + c)];
                    let mut sum = sums.extract(0usize);
                    #[unroll]
                    for e in 1..W::value() {
                        sum += sums.extract(e);
                    }
                    let at = out_start + row as usize * dims.out_stride + col as usize;
                    let columns = dims.columns(CUBE_POS_Y, row);
                    let value = finish.one(sum, at, col, &columns);
                    out[at] = Vector::new(E::cast_from(value));
                }
            }
        }
    }
}
