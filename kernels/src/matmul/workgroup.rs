//! Workgroup path for Vulkan (`VK_NV_cooperative_matrix2`): the driver loads and multiplies the
//! tile of a cube; tensor layouts clamp the edges.
//!
//! On an H200, f16 8192^3 runs at 249 TFLOP/s and 4096^3 at 232, up from 142 (Vulkan records in
//! benches/baselines). Steps in between, timed once by `tune try` at 8192^3: 209 when tiles divide
//! the problem, the driver is told so, and it can see that starts and strides are multiples of 8.
//! Four tiles of k per round of the loop reach 248, eight reach 47. Declaring another alignment on
//! the loads changes nothing.
//!
//! Results are stored without an epilogue: reading buffers inside a cube-scope element-wise
//! operation makes CubeCL 0.11's SPIR-V compiler panic. Problems with an epilogue use subgroup
//! matrices ([`pipelined`](super::pipelined)) or split-k, whose reduction applies it. Few rows use
//! split-k too, which keeps enough of B in flight.

use arch::{ArchProfile, CubeMma, DType};
use cubecl::cmma::{self, Cube, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::{Dims, own_block};
use super::epilogue::Epilogue;
use super::path::{self, FEW_ROWS, Grid, IN_FLIGHT, Path, check_splits};
use super::problem::{Layout, MatmulProblem, Precision};
use crate::fits::{lacks, limits, shape};

/// Tile sizes of the workgroup path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WorkgroupConfig {
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Units per cube.
    pub units: u32,
    /// Tiles of k per round of the loop; the driver may reorder within a round.
    pub unroll: u32,
    /// Number of split-k splits; each is the work of another cube.
    #[serde(default = "path::one_part")]
    pub parts: u32,
}

const fn workgroup(tiles: [u32; 3], units: u32, unroll: u32) -> WorkgroupConfig {
    let [tile_m, tile_n, tile_k] = tiles;
    WorkgroupConfig { tile_m, tile_n, tile_k, units, unroll, parts: 1 }
}

/// Configs, most frequent winners first.
const CONFIGS: [WorkgroupConfig; 14] = [
    workgroup([128, 128, 32], 128, 4),
    workgroup([128, 256, 64], 256, 2),
    workgroup([128, 256, 32], 256, 4),
    workgroup([256, 128, 32], 256, 4),
    workgroup([128, 256, 32], 256, 1),
    workgroup([256, 128, 32], 256, 1),
    workgroup([256, 256, 32], 256, 1),
    workgroup([128, 128, 64], 256, 1),
    workgroup([128, 128, 32], 128, 1),
    workgroup([64, 64, 64], 128, 1),
    workgroup([32, 64, 64], 128, 1),
    workgroup([16, 64, 128], 64, 1),
    workgroup([16, 64, 64], 64, 1),
    workgroup([16, 32, 64], 64, 1),
];

/// Maximum rows for which a matmul with an epilogue uses two splits.
const MAX_HALVED_ROWS: u32 = 2048;

impl WorkgroupConfig {
    /// k tiles per split, except the last.
    const fn part_tiles(self, k: u32) -> u32 {
        path::part_tiles(k, self.tile_k, self.parts)
    }

    /// Returns the config. For few rows also returns it with the splits that fill a card once and
    /// twice.
    ///
    /// For somewhat more rows, matmuls whose epilogue these matrices cannot apply use two splits;
    /// the reduction applies the epilogue. 512 x 4096 x 14336 with a residual takes 266 us, and 287
    /// by [`pipelined`](super::pipelined) (bf16, H200).
    fn with_splits(self, problem: &MatmulProblem) -> Vec<Self> {
        let mut parts = vec![1];
        match problem.m {
            _ if problem.grouped => {}
            m if FEW_ROWS.contains(&m) => {
                let blocks = problem.blocks(self.tile());
                let all = problem.k.div_ceil(self.tile_k);
                for wish in [IN_FLIGHT.div_ceil(blocks), (2 * IN_FLIGHT).div_ceil(blocks), 2] {
                    let wish = wish.clamp(1, u64::from(all.div_ceil(4))) as u32;
                    parts.push(all.div_ceil(Self { parts: wish, ..self }.part_tiles(problem.k)));
                }
            }
            // For wide results the f32 partial sums would be larger than the operands.
            0..=MAX_HALVED_ROWS if !is_plain(problem) && problem.n <= problem.k => parts.push(2),
            _ => {}
        }
        parts.sort_unstable();
        parts.dedup();
        parts.into_iter().map(|parts| Self { parts, ..self }).collect()
    }

    /// Returns the comptime parameters of the kernel instance.
    pub(super) fn plan(&self, problem: &MatmulProblem) -> WorkgroupPlan {
        let [lhs, rhs, _] = problem.widest();
        WorkgroupPlan {
            config: Self { parts: 1, ..*self },
            exact: [
                problem.m % self.tile_m == 0,
                problem.n % self.tile_n == 0,
                problem.k % (self.tile_k * self.unroll) == 0,
            ],
            starts: has_starts(problem),
            partial: self.parts > 1,
            multiples: [lhs, rhs],
            lhs_rows: problem.lhs.layout == Layout::Row,
            rhs_rows: problem.rhs.layout == Layout::Row,
        }
    }
}

/// Returns true if the result is just the rounded accumulator.
fn is_plain(problem: &MatmulProblem) -> bool {
    problem.epilogue == Epilogue::default() && problem.out == problem.precision.storage()
}

/// Returns true if some batch starts past the beginning of a buffer.
fn has_starts(problem: &MatmulProblem) -> bool {
    problem.batch() > 1 || problem.lhs.start > 0 || problem.rhs.start > 0
}

impl Path for WorkgroupConfig {
    fn candidates(_arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        CONFIGS.iter().flat_map(|c| c.with_splits(problem)).collect()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("tile_m", self.tile_m),
            ("tile_n", self.tile_n),
            ("tile_k", self.tile_k),
            ("units", self.units),
            ("unroll", self.unroll),
            ("parts", self.parts),
        ]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        let ab = problem.precision.instruction();
        if problem.precision == Precision::F32 {
            return Err(lacks("f32 workgroup cooperative matrices"));
        }
        if !is_plain(problem) && self.parts == 1 {
            return Err(lacks("epilogues on workgroup cooperative matrices"));
        }
        // Groups start at any row, so their loads are clamped: 4.5 ms, where plane scope took 3.4
        // (8 groups of 4096 x 4096 x 4096).
        if problem.grouped {
            return Err(lacks("groups on workgroup cooperative matrices"));
        }
        let tile = [self.tile_m, self.tile_n, self.tile_k];
        let fits = |s: &CubeMma| {
            (s.ab, s.acc) == (ab, DType::F32)
                && s.units.is_none_or(|units| units == self.units)
                && tile.iter().zip([s.m, s.n, s.k]).all(|(tile, of)| tile % of == 0)
        };
        if !arch.cube_mma.iter().any(fits) {
            return Err(lacks(format!(
                "workgroup cooperative matrices of {ab} with this granularity"
            )));
        }
        if self.unroll > 8 {
            return Err(shape("unroll", self.unroll, "expected at most 8 tiles per iteration"));
        }
        // The last round would also multiply elements past k, or past its split.
        if self.unroll > 1 && problem.k % (self.tile_k * self.unroll) != 0 {
            return Err(shape("unroll", self.unroll, "expected iterations that divide k"));
        }
        if self.parts > 1 {
            check_splits(arch, problem, self)?;
            if self.part_tiles(problem.k) % self.unroll != 0 {
                return Err(shape(
                    "unroll",
                    self.unroll,
                    "expected iterations that divide each split of k",
                ));
            }
        }
        let spans = [problem.lhs.stride, problem.rhs.stride];
        if spans.iter().any(|s| *s > u64::from(u32::MAX)) {
            return Err(shape("stride", u32::MAX, "tensor layouts are limited to 32-bit strides"));
        }
        // Batches and partial sums are offset along an axis, which is limited to 32 bits.
        let [lhs, rhs, out] = problem.extents();
        let reach = lhs.max(rhs).max(out * self.parts as usize);
        if (has_starts(problem) || self.parts > 1) && reach > u32::MAX as usize {
            return Err(shape("batch", u32::MAX, "tensor layouts are limited to 32-bit sizes"));
        }
        limits(arch, self.units, arch.cube_mma_reserved_bytes)
    }

    fn tile(&self) -> (u32, u32) {
        (self.tile_m, self.tile_n)
    }

    fn tile_k(&self) -> u32 {
        self.tile_k
    }

    fn splits(&self) -> u32 {
        self.parts
    }

    fn grid(&self, _arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let part_tiles = self.part_tiles(problem.k);
        Grid { part_tiles, ..Grid::new(self.tile(), (self.units, 1)) }
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WorkgroupPlan {
    /// Config with one split, so that instances differ only in `partial`.
    pub(crate) config: WorkgroupConfig,
    /// True where the tiles divide rows, columns and k: nothing is clamped.
    pub(crate) exact: [bool; 3],
    /// True if some batch starts past the beginning of its buffers.
    pub(crate) starts: bool,
    /// True if accumulators go to the workspace.
    pub(crate) partial: bool,
    /// Known divisor of each operand's starts and stride in elements, for the driver to see.
    pub(crate) multiples: [usize; 2],
    /// True if the contiguous axis is the operand's second.
    pub(crate) lhs_rows: bool,
    pub(crate) rhs_rows: bool,
}

#[cube]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    dims: &Dims,
    #[comptime] plan: WorkgroupPlan,
) {
    let WorkgroupConfig { tile_m, tile_n, tile_k, unroll, .. } = comptime!(plan.config);
    let (m, n, k) = comptime!((tile_m as usize, tile_n as usize, tile_k as usize));
    let (block_m, block_n) = own_block(dims, tile_m, tile_n);
    let parts = if comptime!(plan.partial) { dims.parts } else { 1u32.runtime() };
    let (batch, part) = (CUBE_POS_Y / parts, CUBE_POS_Y % parts);
    let k_from = part * dims.part_tiles * tile_k;
    let k_to = min(k_from + dims.part_tiles * tile_k, dims.k);
    let (row0, col0) = (block_m * tile_m, block_n * tile_n);

    let undefined = comptime!(MatrixLayout::Undefined);
    let acc = Matrix::<f32, Cube>::from_value(MatrixIdent::Accumulator, m, n, k, undefined, 0.0);

    let [exact_m, exact_n, exact_k] = comptime!(plan.exact);
    let clamp_lhs = comptime!(clamp_of(exact_m && exact_k));
    let clamp_rhs = comptime!(clamp_of(exact_n && exact_k));
    let clamp_out = comptime!(clamp_of(exact_m && exact_n));
    let (span_lhs, span_rhs) = comptime!((plan.multiples[0], plan.multiples[1]));
    let lhs_stride = known_multiple(dims.lhs_stride, span_lhs) as u32;
    let rhs_stride = known_multiple(dims.rhs_stride, span_rhs) as u32;
    // A view loses the start of its slice (CubeCL 0.11.3, `__extract_list`), so the start of a
    // batch is an offset along the contiguous axis.
    let mut starts = Sequence::<u32>::new();
    if comptime!(plan.starts) {
        let (lhs_start, rhs_start, out_start) = dims.batch(batch as usize);
        starts.push(known_multiple(lhs_start, span_lhs) as u32);
        starts.push(known_multiple(rhs_start, span_rhs) as u32);
        starts.push(out_start as u32);
    } else {
        starts.push(0u32.runtime());
        starts.push(0u32.runtime());
        starts.push(0u32.runtime());
    }
    let (lhs_from, rhs_from, out_from) = (*starts.index(0), *starts.index(1), *starts.index(2));
    for round in range_stepped(k_from, k_to, comptime!(unroll * tile_k)) {
        #[unroll]
        for i in 0..unroll {
            let k0 = round + comptime!(i * tile_k);
            // SAFETY: loaded below.
            let mut a =
                unsafe { Matrix::<F, Cube>::uninitialized(MatrixIdent::A, m, n, k, undefined) };
            // SAFETY: as above.
            let mut b =
                unsafe { Matrix::<F, Cube>::uninitialized(MatrixIdent::B, m, n, k, undefined) };
            if comptime!(plan.lhs_rows) {
                let view = TensorView::new(lhs, seq![dims.m, lhs_from + dims.k])
                    .with_strides(seq![lhs_stride, 1u32])
                    .with_clamp_mode(clamp_lhs)
                    .finish()
                    .slice(seq![row0, lhs_from + k0], seq![tile_m, tile_k]);
                cmma::load_tensor(&mut a, &view);
            } else {
                let view = TensorView::new(lhs, seq![dims.k, lhs_from + dims.m])
                    .with_strides(seq![lhs_stride, 1u32])
                    .with_clamp_mode(clamp_lhs)
                    .finish()
                    .slice(seq![k0, lhs_from + row0], seq![tile_k, tile_m])
                    .permuted(seq![1, 0]);
                cmma::load_tensor(&mut a, &view);
            }
            if comptime!(plan.rhs_rows) {
                let view = TensorView::new(rhs, seq![dims.k, rhs_from + dims.n])
                    .with_strides(seq![rhs_stride, 1u32])
                    .with_clamp_mode(clamp_rhs)
                    .finish()
                    .slice(seq![k0, rhs_from + col0], seq![tile_k, tile_n]);
                cmma::load_tensor(&mut b, &view);
            } else {
                let view = TensorView::new(rhs, seq![dims.n, rhs_from + dims.k])
                    .with_strides(seq![rhs_stride, 1u32])
                    .with_clamp_mode(clamp_rhs)
                    .finish()
                    .slice(seq![col0, rhs_from + k0], seq![tile_n, tile_k])
                    .permuted(seq![1, 0]);
                cmma::load_tensor(&mut b, &view);
            }
            cmma::execute(&a, &b, &acc, &acc);
        }
    }

    if comptime!(plan.partial) {
        // [parts, batches, m, n]
        let first = (part * dims.batches + batch) * dims.m * dims.n;
        let end = partials.len();
        let mut view = TensorView::new(&partials[0..end], seq![dims.m, first + dims.n])
            .with_strides(seq![dims.n, 1u32])
            .with_clamp_mode(clamp_out)
            .finish()
            .slice(seq![row0, first + col0], seq![tile_m, tile_n]);
        cmma::store_tensor(&mut view, &acc);
    } else {
        let rounded = cmma::cast::<f32, E, Cube>(&acc);
        let end = out.len();
        let mut view = TensorView::new(&out[0..end], seq![dims.m, out_from + dims.n])
            .with_strides(seq![dims.out_stride as u32, 1u32])
            .with_clamp_mode(clamp_out)
            .finish()
            .slice(seq![row0, out_from + col0], seq![tile_m, tile_n]);
        cmma::store_tensor(&mut view, &rounded);
    }
}

const fn clamp_of(exact: bool) -> TensorClampMode {
    if exact { TensorClampMode::Undefined } else { TensorClampMode::Constant(0) }
}

/// Returns `value`, a multiple of the power of two `of`, in a form from which the compiler sees
/// that.
#[cube]
fn known_multiple(value: usize, #[comptime] of: usize) -> usize {
    if comptime!(of > 1) { value / of * of } else { value }
}
