//! GEMV for GPUs, for few rows, with both operands contiguous along k as in a decoding linear
//! layer. Neighbouring units share columns, and each loads its vectors of B once.
//!
//! ```text
//!   for each (rows x cols) block of C                 // `lanes` units
//!     for each vector of k                            // one unit; the next unit takes the next vector
//!       acc[row, col] += A[row, k..] · B[k.., col]
//!     C = round(epilogue(sum of the units' acc))      // tree reduction through shared memory
//! ```
//!
//! All arithmetic is f32. There are no tensor cores, no prefetch, and between planes only one
//! reduction. Many units with `cols` loads in flight each hide the latency. Without split-k there
//! is no second launch.
//!
//! Cost: B's bytes, once; two instructions per element, row and column. For a fused norm
//! ([`NormWeight`]) every group recomputes the squares of the rows: 31.8 us instead of 31.2 at
//! 14336 x 4096, and it saves a launch of 1.9 us. Slower variants: normalised rows in shared memory
//! (32.4), squares after the loop (32.6), and a weight multiplied in pairs of bf16 (33.5). Without
//! a norm, prefetching B one step ahead is slower too (35.4).
//!
//! Times in us at m = 1 in bf16 (H200 restricted to an RTX 4090's features / through Vulkan; a copy
//! reaches 4.1 TB/s). "Before" is the tuner's earlier choice: `Mma` with split-k, cube-scope
//! matrices.
//!
//! | n x k        | `Gemv`      | before      |
//! |--------------|-------------|-------------|
//! | 14336 x 4096 | 32.0 / 31.6 | 32.4 / 87.1 |
//! | 4096 x 14336 | 30.8        | 32.1        |
//!
//! It also saves the launch that reduces the splits: a 1.24B model generates 1001 tokens a second
//! on CUDA, 916 before. At m = 8 `Mma` stays faster there: 33.7 and 32.1 us in a run where this
//! path took 30.1 at m = 1. Through Vulkan, matrices with split-k are faster (48.8 us; this path
//! 63.1).

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::Dims;
use super::epilogue::Finish;
use super::norm_weight::NormWeight;
use super::path::{Grid, Path, mma_inst};
use super::problem::{Layout, MatmulProblem, Precision};
use crate::fits::{lacks, limits, shape};
use crate::rows::NormKind;

/// Units and block sizes of the GPU GEMV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GemvConfig {
    /// Units per cube.
    pub units: u32,
    /// Units that share a block of C.
    pub lanes: u32,
    /// Rows and columns of that block.
    pub rows: u32,
    pub cols: u32,
}

impl GemvConfig {
    /// Columns per cube.
    const fn columns_of_cube(self) -> u32 {
        self.units / self.lanes * self.cols
    }

    /// Returns the comptime parameters of the kernel instance.
    pub(super) const fn plan(&self, problem: &MatmulProblem) -> GemvPlan {
        GemvPlan { config: *self, norm: problem.norm }
    }
}

/// Units, units that share a block, and columns: `WIDE` for one or two rows, `NARROW` for more.
const WIDE: [[u32; 3]; 6] =
    [[256, 32, 4], [256, 32, 2], [128, 128, 4], [128, 64, 2], [128, 128, 2], [256, 16, 4]];
const NARROW: [[u32; 3]; 6] =
    [[256, 32, 2], [128, 32, 4], [128, 128, 4], [128, 64, 2], [128, 128, 2], [256, 32, 1]];

/// Maximum rows of A; with more, tiles of tensor cores and of shared memory are no longer mostly
/// empty.
const MAX_ROWS: u32 = 8;
/// Maximum rows of A on devices with `mma.sync`; 8 x 14336 x 4096 takes the tensor cores 33.7 us.
const MAX_ROWS_WITH_MMA: u32 = 2;
/// Maximum rows of A for a fused norm. More rows wait for the multiply-adds, and whether the saved
/// launch pays for them is not measured.
pub(crate) const MAX_NORMED_ROWS: u32 = 2;

/// Vector width of the loads in elements.
fn width(arch: &ArchProfile, problem: &MatmulProblem) -> u32 {
    (arch.load_bytes.min(16) / problem.precision.storage().size() as u32).max(1)
}

impl Path for GemvConfig {
    /// Returns configs with the problem's rows, whose accumulators fit in registers.
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        let has_mma = mma_inst(arch, problem.precision).is_some();
        let max = if has_mma { MAX_ROWS_WITH_MMA } else { MAX_ROWS };
        if arch.cores().is_some() || problem.m > max {
            return Vec::new();
        }
        let rows = problem.m.next_power_of_two();
        let shapes = match rows {
            1 | 2 => WIDE,
            _ => NARROW,
        };
        shapes.map(|[units, lanes, cols]| Self { units, lanes, rows, cols }).to_vec()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![("units", self.units), ("lanes", self.lanes), ("rows", self.rows), ("cols", self.cols)]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        if arch.cores().is_some() {
            return Err(lacks("cheap barriers (a GPU)"));
        }
        if problem.precision == Precision::Tf32 {
            return Err(lacks("matrix instructions for tf32"));
        }
        if problem.lhs.layout != Layout::Row || problem.rhs.layout != Layout::Col {
            return Err(shape("lanes", self.lanes, "expected both operands contiguous along k"));
        }
        let widest = width(arch, problem) as usize;
        let [lhs, rhs, _] = problem.widths(widest as u64);
        if [lhs, rhs] != [widest; 2] {
            return Err(shape("lanes", self.lanes, "expected rows of whole vectors"));
        }
        if !self.lanes.is_power_of_two() || self.units % self.lanes != 0 {
            return Err(shape(
                "lanes",
                self.lanes,
                "expected a power of two that divides the units",
            ));
        }
        if self.rows > 16 || self.cols > 16 || self.rows * self.cols > 32 {
            return Err(shape(
                "rows",
                self.rows,
                "accumulators and operands would spill registers",
            ));
        }
        limits(arch, self.units, self.plan(problem).shared_bytes())
    }

    fn tile(&self) -> (u32, u32) {
        (self.rows, self.columns_of_cube())
    }

    fn tile_k(&self) -> u32 {
        self.lanes
    }

    /// Units share k: each takes one vector at a time.
    fn iterations(&self, k: u64) -> u64 {
        k.div_ceil(u64::from(self.lanes)) + 1
    }

    fn normalizes(&self) -> bool {
        true
    }

    fn grid(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let width = width(arch, problem) as usize;
        Grid { widths: [width, width, 1, 1], ..Grid::new(self.tile(), (self.units, 1)) }
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GemvPlan {
    config: GemvConfig,
    norm: Option<NormKind>,
}

impl GemvPlan {
    /// Sums per unit: its block of C, and for a fused norm the squares of each row.
    const fn sums(self) -> u32 {
        let GemvConfig { rows, cols, .. } = self.config;
        rows * if self.norm.is_some() { cols + 1 } else { cols }
    }

    const fn shared_bytes(self) -> u32 {
        4 * self.config.units * self.sums()
    }
}

/// Requires the widest vectors for `NL` and `NR`, and `NO` = 1.
#[cube]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    norm: &ComptimeOption<NormWeight<F, NL>>,
    dims: &Dims,
    #[comptime] plan: GemvPlan,
) {
    let config = comptime!(plan.config);
    let GemvConfig { units, lanes, .. } = comptime!(config);
    let (rows, cols) = comptime!((config.rows as usize, config.cols as usize));
    let sums = comptime!(plan.sums() as usize);
    let (group, lane) = (UNIT_POS / lanes, UNIT_POS % lanes);

    // Blocks that share columns are neighbours.
    let blocks_m = dims.m.div_ceil(config.rows);
    let block = CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X;
    let (row_start, row_end) = dims.rows(CUBE_POS_Y);
    let row0 = row_start + block % blocks_m * config.rows;
    let first = block / blocks_m * comptime!(config.columns_of_cube());
    // A group has fewer blocks than the whole of lhs.
    if first < dims.n && row0 < row_end {
        let (lhs_start, rhs_start, out_start) = dims.batch(CUBE_POS_Y as usize);
        let col0 = first + group * config.cols;

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

        let mut acc = Array::<f32>::new(sums); // [rows, cols], squares [rows]
        #[unroll]
        for i in 0..sums {
            acc[i] = 0.0f32;
        }
        let vectors = dims.k as usize / NR::value();
        let mut at = lane as usize;
        while at < vectors {
            let mut right = Array::<Vector<F, NR>>::new(cols);
            #[unroll]
            for c in 0..cols {
                right[c] = rhs[b[c] + at];
            }
            #[unroll]
            for r in 0..rows {
                let left = lhs[a[r] + at];
                #[comptime]
                match norm {
                    ComptimeOption::Some(norm) => {
                        let (wide, square) = (widen(left), comptime!(rows * cols + r));
                        #[unroll]
                        for e in 0..NL::value() {
                            acc[square] = fma(wide[e], wide[e], acc[square]);
                        }
                        add_row(&mut acc, &norm.weighted(left, at), &right, r, cols);
                    }
                    ComptimeOption::None => add_row(&mut acc, &widen(left), &right, r, cols),
                }
            }
            at += lanes as usize;
        }

        // Equal sums of all units are adjacent, and a unit's sums are `units` apart: no bank
        // conflicts within a plane.
        let mut shared = Shared::<[f32]>::new_slice(comptime!(units as usize * sums));
        #[unroll]
        for i in 0..sums {
            shared[comptime!(i * units as usize) + UNIT_POS as usize] = acc[i];
        }
        #[unroll]
        for level in 0..comptime!(lanes.ilog2()) {
            sync_cube();
            let apart = comptime!((lanes >> (level + 1)) as usize);
            if lane < comptime!(apart as u32) {
                #[unroll]
                for i in 0..sums {
                    let at = comptime!(i * units as usize) + UNIT_POS as usize;
                    shared[at] += shared[at + apart];
                }
            }
        }
        sync_cube();
        // Neighbouring units store neighbouring columns.
        let per_row = comptime!(config.columns_of_cube());
        let mut id = UNIT_POS;
        while id < comptime!(config.rows * config.columns_of_cube()) {
            let (r, col) = (id / per_row, id % per_row);
            let i = r * config.cols + col % config.cols;
            let group = col / config.cols * lanes;
            let mut sum = shared[(i * units + group) as usize];
            #[comptime]
            match norm {
                ComptimeOption::Some(norm) => {
                    let square = comptime!(config.rows * config.cols) + r;
                    sum *= norm.factor(shared[(square * units + group) as usize]);
                }
                ComptimeOption::None => {}
            }
            let (row, col) = (row0 + r, first + col);
            if row < row_end && col < dims.n {
                let at = out_start + row as usize * dims.out_stride + col as usize;
                let columns = dims.columns(CUBE_POS_Y, row);
                let value = finish.one(sum, at, col, &columns);
                out[at] = Vector::new(E::cast_from(value));
            }
            id += units;
        }
    }
}

#[cube]
fn widen<F: Float, NL: Size>(vector: Vector<F, NL>) -> Array<f32> {
    let mut wide = Array::<f32>::new(NL::value());
    #[unroll]
    for e in 0..NL::value() {
        wide[e] = f32::cast_from(vector.extract(e));
    }
    wide
}

/// Adds a vector of row `r` of A, times the columns of B, to that row's accumulators.
#[cube]
fn add_row<F: Float, NR: Size>(
    acc: &mut Array<f32>, // [rows, cols]
    left: &Array<f32>,
    right: &Array<Vector<F, NR>>,
    #[comptime] r: usize,
    #[comptime] cols: usize,
) {
    #[unroll]
    for e in 0..NR::value() {
        #[unroll]
        for c in 0..cols {
            let i = comptime!(r * cols + c);
            acc[i] = fma(left[e], f32::cast_from(right[c].extract(e)), acc[i]);
        }
    }
}
