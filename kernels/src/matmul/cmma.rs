//! The cooperative-matrix paths of Vulkan.
//!
//! Cube scope (`VK_NV_cooperative_matrix2`): a cube names a tile, the driver moves and multiplies it;
//! tensor layouts clamp the edges. On an H200 f16 8192^3 runs at 249 TFLOP/s, 4096^3 at 232, where it had 142 (records of
//! Vulkan in benches/baselines). Steps between, timed once by `tune try`, 8192^3: 209 where the tiles divide the problem and
//! the driver is told so, and sees that starts and strides are multiples of 8; 248 with four tiles of k in a round of the
//! loop, 47 with eight; another alignment declared on the loads changes nothing. Results leave as they are: buffers read
//! inside of a cube-scope element-wise operation make CubeCL 0.11's SPIR-V compiler panic, so what has an epilogue goes by
//! plane scope, or has k cut into parts, whose sums are finished where they are added. Few rows are cut so too, so that
//! enough of B is under way. Plane scope (`VK_KHR_cooperative_matrix`, and `wmma` on CUDA):
//! tiles are staged in shared memory by hand, and results leave through shared memory because a matrix cannot be indexed.

use cubecl::cmma::{self, Cube, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::dims::{Dims, own_block};
use super::epilogue::Finish;

/// Tile of the cube-scope path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CubeConfig {
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Units in a cube.
    pub units: u32,
    /// Tiles of k in each round of the loop, among which the driver may reorder.
    pub unroll: u32,
    /// Parts that k is cut into, each the work of another cube.
    #[serde(default = "one")]
    pub parts: u32,
}

const fn one() -> u32 {
    1
}

impl CubeConfig {
    /// Tiles of k in each part but the last.
    pub(crate) const fn part_tiles(self, k: u32) -> u32 {
        k.div_ceil(self.tile_k).div_ceil(self.parts)
    }
}

/// Comptime facts of one cube-scope instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CubePlan {
    /// With one part, so that instances differ by `partial` alone.
    pub(crate) config: CubeConfig,
    /// The tiles divide rows, columns and k: nothing is clamped.
    pub(crate) exact: [bool; 3],
    /// Some batch begins past the start of its buffers.
    pub(crate) starts: bool,
    /// Sums go to the workspace.
    pub(crate) partial: bool,
    /// Elements that each operand's starts and stride are multiples of, for the driver to see.
    pub(crate) multiples: [usize; 2],
    /// Whether the contiguous axis is the operand's second.
    pub(crate) lhs_rows: bool,
    pub(crate) rhs_rows: bool,
}

#[cube]
pub(crate) fn multiply_cube<F: Float, E: Float, NL: Size, NR: Size, NO: Size, NP: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    partials: &mut [Vector<f32, NP>],
    dims: &Dims,
    #[comptime] plan: CubePlan,
) {
    let CubeConfig { tile_m, tile_n, tile_k, unroll, .. } = comptime!(plan.config);
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
    // A view forgets where the slice that it is made of begins (CubeCL 0.11.3, `__extract_list`), so a batch begins so
    // far along the contiguous axis.
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

pub(super) const fn layout_of(rows: bool) -> MatrixLayout {
    if rows { MatrixLayout::RowMajor } else { MatrixLayout::ColMajor }
}

const fn clamp_of(exact: bool) -> TensorClampMode {
    if exact { TensorClampMode::Undefined } else { TensorClampMode::Constant(0) }
}

/// `value`, a multiple of the power of two `of`, so that a compiler sees that it is one.
#[cube]
fn known_multiple(value: usize, #[comptime] of: usize) -> usize {
    if comptime!(of > 1) { value / of * of } else { value }
}

/// Tile sizes of the plane-scope path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlaneConfig {
    pub tile_m: u32,
    pub tile_n: u32,
    pub tile_k: u32,
    /// Grid of planes that share the tile.
    pub planes_m: u32,
    pub planes_n: u32,
}

impl PlaneConfig {
    /// Shared lines are padded by 16 bytes, against bank conflicts.
    pub(crate) const fn pad(elem: usize) -> u32 {
        16 / elem as u32
    }

    /// Bytes of the two operand tiles and of one 16 x 16 result a plane.
    pub(crate) const fn shared_bytes(self, lhs_rows: bool, rhs_rows: bool, elem: usize) -> u32 {
        let Self { tile_m, tile_n, tile_k, planes_m, planes_n } = self;
        let pad = Self::pad(elem);
        let lhs = if lhs_rows { tile_m * (tile_k + pad) } else { tile_k * (tile_m + pad) };
        let rhs = if rhs_rows { tile_k * (tile_n + pad) } else { tile_n * (tile_k + pad) };
        (lhs + rhs) * elem as u32 + planes_m * planes_n * 256 * 4
    }
}

/// Comptime facts of one plane-scope instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PlanePlan {
    pub(crate) config: PlaneConfig,
    /// Units of a plane.
    pub(crate) plane: u32,
    /// Depth of the instruction, 16 x 16 in rows and columns.
    pub(crate) inst_k: u32,
    pub(crate) elem: usize,
    pub(crate) lhs_rows: bool,
    pub(crate) rhs_rows: bool,
}

#[cube]
pub(crate) fn multiply_planes<F: Float, E: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    dims: &Dims,
    #[comptime] plan: PlanePlan,
) {
    let PlaneConfig { tile_m, tile_n, tile_k, planes_m, planes_n } = comptime!(plan.config);
    let units = comptime!((planes_m * planes_n * plan.plane) as usize);
    let (part_m, part_n) = comptime!((tile_m / planes_m, tile_n / planes_n));
    let (frags_m, frags_n) = comptime!((part_m as usize / 16, part_n as usize / 16));
    let pad = comptime!(PlaneConfig::pad(plan.elem));
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
    let columns = dims.columns(CUBE_POS_Y);
    let (row0, col0) = (row_start + block_m * tile_m, block_n * tile_n);
    if comptime!(dims.grouped) && row0 >= row_end {
        // The grid has as many blocks for a group as the whole of lhs has.
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
                    let value = finish.one(shared_out[(own + e) as usize], at, col, &columns);
                    out[at] = Vector::new(E::cast_from(value));
                }
                e += plan.plane;
            }
            sync_cube();
        }
    }
}

/// One operand fragment at element `at` of a shared tile.
#[cube]
fn fragment<F: Float, N: Size>(
    tile: &[Vector<F, N>],
    at: u32,
    #[comptime] ident: MatrixIdent,
    #[comptime] inst_k: usize,
    #[comptime] layout: MatrixLayout,
    #[comptime] pitch: u32,
) -> Matrix<F> {
    // SAFETY: loaded in the next line.
    let mut matrix = unsafe { Matrix::<F>::uninitialized(ident, 16usize, 16usize, inst_k, layout) };
    let end = tile.len();
    cmma::load(&mut matrix, &tile[at as usize / N::value()..end], pitch);
    matrix
}

/// Brings `lines` lines of `line` elements into shared memory as they lie; zero past the edge.
/// `k_last` says that k is the contiguous axis.
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
