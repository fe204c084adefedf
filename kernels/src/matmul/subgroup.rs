//! Subgroup path: cooperative matrices of a plane (`VK_KHR_cooperative_matrix`, and `wmma` on
//! CUDA), one tile at a time.
//!
//! Units copy tiles into shared memory. Results pass through shared memory too, because a
//! cooperative matrix cannot be indexed.

use arch::ArchProfile;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::{Dims, own_block};
use super::epilogue::Finish;
use super::path::{Grid, Path, mma_inst, plane_inst};
use super::problem::{Layout, MatmulProblem, Precision};
use crate::fits::{lacks, limits, shape};

/// Tile sizes of the subgroup paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SubgroupConfig {
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Grid of planes that share the tile.
    pub planes_m: u32,
    pub planes_n: u32,
}

impl SubgroupConfig {
    /// Config with tiles `[tile_m, tile_n, tile_k]` and planes `[planes_m, planes_n]`.
    pub(super) const fn new(tiles: [u32; 3], planes: [u32; 2]) -> Self {
        let ([tile_m, tile_n, tile_k], [planes_m, planes_n]) = (tiles, planes);
        Self { tile_m, tile_n, tile_k, planes_m, planes_n }
    }

    /// Padding of a shared line in elements (16 bytes), against bank conflicts.
    pub(crate) const fn pad(elem: usize) -> u32 {
        16 / elem as u32
    }

    /// Bytes of the two operand tiles, plus one 16 x 16 result per plane.
    pub(crate) const fn shared_bytes(self, lhs_rows: bool, rhs_rows: bool, elem: usize) -> u32 {
        let Self { tile_m, tile_n, tile_k, planes_m, planes_n } = self;
        let pad = Self::pad(elem);
        let lhs = if lhs_rows { tile_m * (tile_k + pad) } else { tile_k * (tile_m + pad) };
        let rhs = if rhs_rows { tile_k * (tile_n + pad) } else { tile_n * (tile_k + pad) };
        (lhs + rhs) * elem as u32 + planes_m * planes_n * 256 * 4
    }

    /// Number of planes that share the tile.
    pub(super) const fn planes(self) -> u32 {
        self.planes_m * self.planes_n
    }

    /// Checks that the device has plane-scope matrices of the problem's precision and that they
    /// divide the tiles.
    pub(super) fn check_matrices(
        &self,
        arch: &ArchProfile,
        problem: &MatmulProblem,
    ) -> Result<(), Infeasible> {
        let precision = problem.precision;
        if matches!(precision, Precision::F32 | Precision::Tf32) {
            return Err(lacks(format!("{} subgroup cooperative matrices", precision.name())));
        }
        let inst = plane_inst(arch, precision)
            .ok_or_else(|| lacks(format!("16 x 16 subgroup {} matrices", precision.name())))?;
        let (plane, max_plane) = arch.plane_size;
        if plane != max_plane {
            return Err(lacks("a fixed plane size"));
        }
        if self.tile_m % (16 * self.planes_m) != 0 || self.tile_n % (16 * self.planes_n) != 0 {
            return Err(shape("tile_m", self.tile_m, "expected a multiple of 16 x 16 per plane"));
        }
        if self.tile_k % inst.k != 0 {
            return Err(shape("tile_k", self.tile_k, "expected a multiple of the instruction's k"));
        }
        Ok(())
    }

    /// Returns the comptime parameters of the kernel instance.
    pub(super) fn plan(&self, arch: &ArchProfile, problem: &MatmulProblem) -> SubgroupPlan {
        SubgroupPlan {
            config: *self,
            plane: arch.plane_size.0,
            inst_k: plane_inst(arch, problem.precision).map_or(0, |s| s.k),
            elem: problem.precision.storage().size(),
            lhs_rows: problem.lhs.layout == Layout::Row,
            rhs_rows: problem.rhs.layout == Layout::Row,
        }
    }
}

/// Configs, most frequent winners first; depths are for 2-byte elements and halve for 4.
const CONFIGS: [SubgroupConfig; 4] = [
    SubgroupConfig::new([128, 128, 32], [2, 2]),
    SubgroupConfig::new([64, 64, 32], [2, 2]),
    SubgroupConfig::new([128, 64, 32], [2, 2]),
    SubgroupConfig::new([16, 64, 32], [1, 2]),
];

impl Path for SubgroupConfig {
    fn candidates(arch: &ArchProfile, problem: &MatmulProblem) -> Vec<Self> {
        // `wmma` reaches a tenth to a third of the speed of `mma.sync` (H200).
        let has_mma = arch.inline_ptx() && mma_inst(arch, problem.precision).is_some();
        // Group ends are not known in advance, so loads need checks. 8 groups of 512 x 4096 x 4096
        // take 1.44 ms on an H200 here, and 1.79 ms pipelined.
        let pipelined = arch.matrices_from_words() && !problem.grouped;
        if has_mma || pipelined {
            return Vec::new();
        }
        let halves = if problem.precision.storage().size() == 4 { 2 } else { 1 };
        CONFIGS.iter().map(|c| Self { tile_k: c.tile_k / halves, ..*c }).collect()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("tile_m", self.tile_m),
            ("tile_n", self.tile_n),
            ("tile_k", self.tile_k),
            ("planes_m", self.planes_m),
            ("planes_n", self.planes_n),
        ]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        self.check_matrices(arch, problem)?;
        let SubgroupPlan { plane, elem, lhs_rows, rhs_rows, .. } = self.plan(arch, problem);
        limits(arch, self.planes() * plane, self.shared_bytes(lhs_rows, rhs_rows, elem))
    }

    fn tile(&self) -> (u32, u32) {
        (self.tile_m, self.tile_n)
    }

    fn tile_k(&self) -> u32 {
        self.tile_k
    }

    fn grid(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let [lhs, rhs, _] = problem.widest().map(|width| width.min(4));
        let widths = [lhs, rhs, 1, 1];
        Grid { widths, ..Grid::new(self.tile(), (arch.plane_size.0, self.planes())) }
    }
}

/// Returns the layout of an operand: row-major if `rows`.
pub(super) const fn layout_of(rows: bool) -> MatrixLayout {
    if rows { MatrixLayout::RowMajor } else { MatrixLayout::ColMajor }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SubgroupPlan {
    pub(crate) config: SubgroupConfig,
    /// Units per plane.
    pub(crate) plane: u32,
    /// Depth of the instruction in k; it has 16 rows and 16 columns.
    pub(crate) inst_k: u32,
    pub(crate) elem: usize,
    pub(crate) lhs_rows: bool,
    pub(crate) rhs_rows: bool,
}

#[cube]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    dims: &Dims,
    #[comptime] plan: SubgroupPlan,
) {
    let SubgroupConfig { tile_m, tile_n, tile_k, planes_m, planes_n } = comptime!(plan.config);
    let units = comptime!((planes_m * planes_n * plan.plane) as usize);
    let (part_m, part_n) = comptime!((tile_m / planes_m, tile_n / planes_n));
    let (frags_m, frags_n) = comptime!((part_m as usize / 16, part_n as usize / 16));
    let pad = comptime!(SubgroupConfig::pad(plan.elem));
    let (lhs_lines, lhs_line) =
        comptime!(if plan.lhs_rows { (tile_m, tile_k) } else { (tile_k, tile_m) });
    let (rhs_lines, rhs_line) =
        comptime!(if plan.rhs_rows { (tile_k, tile_n) } else { (tile_n, tile_k) });
    let (lhs_pitch, rhs_pitch) = comptime!((lhs_line + pad, rhs_line + pad));
    let inst_k = comptime!(plan.inst_k as usize);
    let layout_lhs =
        comptime!(if plan.lhs_rows { MatrixLayout::RowMajor } else { MatrixLayout::ColMajor });
    let layout_rhs =
        comptime!(if plan.rhs_rows { MatrixLayout::RowMajor } else { MatrixLayout::ColMajor });

    let (width_lhs, width_rhs) = (NL::value(), NR::value());
    let mut shared_lhs = Shared::<[Vector<F, NL>]>::new_aligned_slice(
        comptime!((lhs_lines * lhs_pitch) as usize / width_lhs),
        16usize,
    );
    let mut shared_rhs = Shared::<[Vector<F, NR>]>::new_aligned_slice(
        comptime!((rhs_lines * rhs_pitch) as usize / width_rhs),
        16usize,
    );
    let mut shared_out = Shared::<[f32]>::new_aligned_slice(
        comptime!((planes_m * planes_n * 256) as usize),
        16usize,
    );

    let (lane, plane) = (UNIT_POS_X, UNIT_POS_Y);
    let unit = plane * plan.plane + lane;
    let (block_m, block_n) = own_block(dims, tile_m, tile_n);
    let (row_start, row_end) = dims.rows(CUBE_POS_Y);
    let (row0, col0) = (row_start + block_m * tile_m, block_n * tile_n);
    if comptime!(dims.grouped) && row0 >= row_end {
        // The grid has enough blocks for a group that spans all of lhs.
        terminate!();
    }
    let (from_m, from_n) = (plane / planes_n * part_m, plane % planes_n * part_n);
    let (lhs_start, rhs_start, out_start) = dims.batch(CUBE_POS_Y as usize);

    let mut acc = Sequence::<Matrix<f32>>::new(); // [part_m / 16, part_n / 16]
    #[unroll]
    for _ in 0..comptime!(frags_m * frags_n) {
        acc.push(Matrix::<f32>::from_value(
            MatrixIdent::Accumulator,
            16usize,
            16usize,
            inst_k,
            MatrixLayout::Undefined,
            0.0,
        ));
    }

    let mut k0 = 0u32;
    while k0 < dims.k {
        stage::<F, NL>(
            lhs,
            &mut shared_lhs,
            lhs_start,
            dims.lhs_stride,
            row0,
            row_end,
            k0,
            dims.k,
            unit,
            units,
            lhs_lines,
            lhs_line,
            lhs_pitch,
            plan.lhs_rows,
        );
        stage::<F, NR>(
            rhs,
            &mut shared_rhs,
            rhs_start,
            dims.rhs_stride,
            col0,
            dims.n,
            k0,
            dims.k,
            unit,
            units,
            rhs_lines,
            rhs_line,
            rhs_pitch,
            comptime!(!plan.rhs_rows),
        );
        sync_cube();
        #[unroll]
        for step in 0..comptime!(tile_k / plan.inst_k) {
            let kk = comptime!(step * plan.inst_k);
            let mut a = Sequence::<Matrix<F>>::new();
            #[unroll]
            for i in 0..frags_m {
                let row = from_m + comptime!(16 * i as u32);
                let at = if comptime!(plan.lhs_rows) {
                    row * lhs_pitch + kk
                } else {
                    row + kk * lhs_pitch
                };
                a.push(fragment::<F, NL>(
                    &shared_lhs,
                    at,
                    MatrixIdent::A,
                    inst_k,
                    layout_lhs,
                    lhs_pitch,
                ));
            }
            #[unroll]
            for j in 0..frags_n {
                let col = from_n + comptime!(16 * j as u32);
                let at = if comptime!(plan.rhs_rows) {
                    col + kk * rhs_pitch
                } else {
                    col * rhs_pitch + kk
                };
                let b = fragment::<F, NR>(
                    &shared_rhs,
                    at,
                    MatrixIdent::B,
                    inst_k,
                    layout_rhs,
                    rhs_pitch,
                );
                #[unroll]
                for i in 0..frags_m {
                    let c = acc.index(comptime!(i * frags_n + j));
                    cmma::execute(a.index(i), &b, c, c);
                }
            }
        }
        sync_cube();
        k0 += tile_k;
    }

    let own = plane * 256;
    let own_end = own + 256;
    #[unroll]
    for i in 0..frags_m {
        #[unroll]
        for j in 0..frags_n {
            cmma::store(
                &mut shared_out[own as usize..own_end as usize],
                acc.index(comptime!(i * frags_n + j)),
                16,
                MatrixLayout::RowMajor,
            );
            sync_cube();
            let mut e = lane;
            while e < 256 {
                let row = row0 + from_m + comptime!(16 * i as u32) + e / 16;
                let col = col0 + from_n + comptime!(16 * j as u32) + e % 16;
                if row < row_end && col < dims.n {
                    let at = out_start + row as usize * dims.out_stride + col as usize;
                    let columns = dims.columns(CUBE_POS_Y, row);
                    let value = finish.one(shared_out[(own + e) as usize], at, col, &columns);
                    out[at] = Vector::new(E::cast_from(value));
                }
                e += plan.plane;
            }
            sync_cube();
        }
    }
}

/// Loads an operand fragment at element `at` of a shared tile.
#[cube]
fn fragment<F: Float, N: Size>(
    tile: &[Vector<F, N>],
    at: u32,
    #[comptime] ident: MatrixIdent,
    #[comptime] inst_k: usize,
    #[comptime] layout: MatrixLayout,
    #[comptime] pitch: u32,
) -> Matrix<F> {
    // SAFETY: the load below initialises the matrix.
    let mut matrix = unsafe { Matrix::<F>::uninitialized(ident, 16usize, 16usize, inst_k, layout) };
    let end = tile.len();
    cmma::load(&mut matrix, &tile[at as usize / N::value()..end], pitch);
    matrix
}

/// Copies `lines` lines of `line` elements into shared memory in their layout; zero past the edge.
/// `k_last` is true if k is the contiguous axis.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one tile, one edge")]
fn stage<F: Float, N: Size>(
    src: &[Vector<F, N>],
    dst: &mut [Vector<F, N>],
    start: usize,
    stride: usize,
    outer0: u32,
    outer: u32,
    k0: u32,
    depth: u32,
    unit: u32,
    #[comptime] units: usize,
    #[comptime] lines: u32,
    #[comptime] line: u32,
    #[comptime] pitch: u32,
    #[comptime] k_last: bool,
) {
    let lanes = N::value();
    let width = comptime!(lanes as u32);
    let per_line = comptime!(line / width);
    let vectors = comptime!(lines * per_line);
    #[unroll]
    for i in 0..comptime!(vectors.div_ceil(units as u32)) {
        let at = unit + comptime!(i * units as u32);
        if comptime!(vectors % units as u32 == 0) || at < vectors {
            let (major, minor) = (at / per_line, at % per_line * width);
            let (line0, lines_end, minor0, minor_end) = if comptime!(k_last) {
                (outer0, outer, k0, depth)
            } else {
                (k0, depth, outer0, outer)
            };
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if line0 + major < lines_end && minor0 + minor < minor_end {
                let from = start + (line0 + major) as usize * stride + (minor0 + minor) as usize;
                value = src[from / N::value()];
            }
            dst[((major * pitch + minor) / width) as usize] = value;
        }
    }
}
