//! Packed GEMM for CPUs: one unit per core, vector registers, no shared memory, no barriers.
//!
//! A unit owns a block of C, held in f32 on its stack. For each slice of k it packs its panel of B
//! into `[block_k, block_n]` once, whatever B's layout. It then multiplies every row group of A by
//! the panel. This is Goto's scheme, with the panel sized for the L1 cache.
//!
//! Floor: the multiply-adds of all cores. In a step of k, each load of a panel vector must feed
//! `rows` of them, and each load of A `block_n / vector`. That requires many accumulators.
//! Registers hold 16 vectors with AVX2 (32 with AVX-512): accumulators, a line of the panel and an
//! element of A.
//!
//! Ladder, GFLOP/s at 1024^3 f32 on cpu-authenticamd.25.1-2, two AVX2 cores of a shared machine.
//! Its limit with operands in registers was 95 right after the runs, and 163 to 173 an hour later.
//! Medians of three runs of `tune try`, B column-major / row-major:
//!
//! | version                                                    | col | row |
//! |------------------------------------------------------------|-----|-----|
//! | v1 accumulators of one vector per row, blocks of 64 rows   | 21  | 22  |
//! | v2 v1, two vectors                                         | 36  | 39  |
//! | v3 v2, 4 rows at once: 8 accumulators                      | 59  | 75  |
//! | v4 v2, 8 rows: 16 accumulators, which spill (right for AVX-512) | 43 | 49 |
//! | v5 4 rows of 3 vectors, 12 accumulators, panels 128 deep, blocks of 128 rows | 65 | 85 |
//! | v6 3 rows of 3 vectors, panels 512 deep, blocks of 126     | 88  | 93  |
//!
//! Slower than v5: panels 32 deep (54, 83), which load and store the accumulators every 32 steps;
//! blocks of 8 rows (20, 41), each of which packs its own panel. On another machine, packing a
//! column-major B line by line took 27.6 ms, column by column 18.2. Lines a power of two apart
//! evict each other from the cache.

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::dims::Dims;
use super::epilogue::Finish;
use super::path::{Grid, Path, check_vector};
use super::problem::{Layout, MatmulProblem};
use super::window::Gather;
use crate::fits::shape;

/// Block sizes of the packed GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PackedConfig {
    /// Block of C per unit.
    pub block_m: u32,
    pub block_n: u32,
    /// Depth of the packed panel in k.
    pub block_k: u32,
    /// Rows that are multiplied at once; they take `rows * block_n / vector` vector registers.
    pub rows: u32,
    /// f32 elements per vector register.
    pub vector: u32,
    /// Units, one per core.
    pub units: u32,
}

impl PackedConfig {
    /// Bytes on the stack of a unit.
    const fn stack_bytes(self) -> u32 {
        (self.block_m + self.block_k) * self.block_n * 4
    }

    /// Returns the comptime parameters of the kernel instance.
    pub(super) fn plan(&self, problem: &MatmulProblem) -> PackedPlan {
        PackedPlan {
            config: *self,
            lhs_along_k: problem.lhs.layout == Layout::Row,
            rhs_along_k: problem.rhs.layout == Layout::Col,
        }
    }
}

impl Path for PackedConfig {
    fn candidates(arch: &ArchProfile, _problem: &MatmulProblem) -> Vec<Self> {
        let Some(units) = arch.cores() else { return Vec::new() };
        let vector = (arch.load_bytes / 4).clamp(4, 16);
        let config = |block_m, vectors, block_k, rows| {
            let block_n = vectors * vector;
            Self { block_m, block_n, block_k, rows, vector, units }
        };
        // Registers hold the accumulators, a line of the panel and an element of A: 32 with
        // AVX-512, 16 otherwise. With 16, 4 rows of 3 vectors take 2.1 ms for 512 x 512 x 512 on
        // two cores of a Zen 3. 8 rows of 2, which spill, take 4.9 ms.
        let large = match vector {
            16 => vec![config(64, 2, 256, 8), config(64, 4, 128, 4)],
            _ => vec![config(128, 3, 128, 4), config(126, 3, 512, 3), config(252, 2, 512, 6)],
        };
        let small = [
            config(64, 2, 256, 4),
            config(32, 2, 256, 4),
            config(16, 2, 256, 4),
            config(8, 2, 512, 8),
            config(4, 4, 256, 4),
            config(1, 4, 256, 1),
        ];
        large.into_iter().chain(small).collect()
    }

    fn sizes(&self) -> Vec<(&'static str, u32)> {
        vec![
            ("block_m", self.block_m),
            ("block_n", self.block_n),
            ("block_k", self.block_k),
            ("rows", self.rows),
            ("vector", self.vector),
            ("units", self.units),
        ]
    }

    fn check(&self, arch: &ArchProfile, problem: &MatmulProblem) -> Result<(), Infeasible> {
        check_vector(arch, problem, self.vector)?;
        if self.rows > 16 || self.rows * self.block_n / self.vector > 32 {
            return Err(shape("rows", self.rows, "more accumulators than vector registers"));
        }
        for (name, size, of) in
            [("block_m", self.block_m, self.rows), ("block_n", self.block_n, self.vector)]
        {
            if size % of != 0 {
                return Err(shape(name, size, "expected a multiple of the register block"));
            }
        }
        if self.block_k % self.vector != 0 {
            return Err(shape("block_k", self.block_k, "expected a multiple of the vector size"));
        }
        if self.stack_bytes() > 256 << 10 {
            return Err(shape(
                "block_k",
                self.block_k,
                "the packed panel exceeds the stack of a unit, 256 KiB",
            ));
        }
        Ok(())
    }

    fn gathers(&self) -> bool {
        true
    }

    fn tile(&self) -> (u32, u32) {
        (self.block_m, self.block_n)
    }

    fn tile_k(&self) -> u32 {
        self.block_k
    }

    /// Compiling a packed kernel takes 1.5 s of a CPU in every process. Counts as the multiplies of
    /// that time, spread over a hundred uses.
    fn compile_cost(&self, problem: &MatmulProblem) -> f64 {
        7.5e8 / f64::from(problem.k)
    }

    fn grid(&self, _arch: &ArchProfile, problem: &MatmulProblem) -> Grid {
        let [_, rhs, out] = problem.widths(u64::from(self.vector));
        let all_or_one = |width: usize| if width == self.vector as usize { width } else { 1 };
        Grid {
            widths: [1, all_or_one(rhs), all_or_one(out), 1],
            per_cube: self.units,
            ..Grid::new(self.tile(), (self.units, 1))
        }
    }
}

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PackedPlan {
    pub(crate) config: PackedConfig,
    /// True if k is the contiguous axis of the operand.
    pub(crate) lhs_along_k: bool,
    pub(crate) rhs_along_k: bool,
}

#[cube]
pub(crate) fn multiply<F: Float, E: Float, NL: Size, NR: Size, NO: Size>(
    lhs: &[Vector<F, NL>],
    rhs: &[Vector<F, NR>],
    out: &mut [Vector<E, NO>],
    finish: &Finish<F, E, NO>,
    window: &ComptimeOption<Gather<F, NL>>,
    dims: &Dims,
    #[comptime] plan: PackedPlan,
) {
    let config = comptime!(plan.config);
    let (block_m, block_n) = comptime!((config.block_m, config.block_n));
    let (block_k, rows) = comptime!((config.block_k, config.rows as usize));
    let size!(W) = config.vector as usize;
    let vectors = comptime!((block_n / config.vector) as usize);
    let out_width = NO::value();

    let blocks_n = dims.n.div_ceil(block_n);
    let blocks_m = dims.m.div_ceil(block_m);
    let block = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    let (row_start, row_end) = dims.rows(CUBE_POS_Y);
    let row0 = row_start + block / blocks_n * block_m;
    // A group has fewer blocks than the whole of lhs.
    if block < blocks_m * blocks_n && row0 < row_end {
        let col0 = block % blocks_n * block_n;
        let (lhs_start, rhs_start, out_start) = dims.batch(CUBE_POS_Y as usize);
        let height = min(row_end - row0, block_m);

        let mut sums = Array::<Vector<f32, W>>::new(comptime!(block_m as usize * vectors));
        for i in 0..comptime!(block_m as usize * vectors) {
            sums[i] = Vector::new(0.0f32);
        }
        let mut panel = Array::<Vector<f32, W>>::new(comptime!(block_k as usize * vectors));

        let mut k0 = 0u32;
        while k0 < dims.k {
            let depth = min(dims.k - k0, block_k);
            if comptime!(plan.rhs_along_k) {
                #[unroll]
                for j in 0..vectors {
                    let col = col0 + comptime!(j as u32 * config.vector);
                    pack_lines::<F, NR, W>(
                        rhs, &mut panel, rhs_start, dims, k0, depth, col, j, vectors,
                    );
                }
            } else {
                for kk in 0..depth {
                    #[unroll]
                    for j in 0..vectors {
                        let col = col0 + comptime!(j as u32 * config.vector);
                        panel[kk as usize * vectors + j] = pack::<F, NR, W>(
                            rhs,
                            rhs_start,
                            dims.rhs_stride,
                            k0 + kk,
                            col,
                            dims.n,
                            config.vector,
                        );
                    }
                }
            }
            let mut row = 0u32;
            while row < height {
                row_group::<F, NL, W>(
                    lhs, window, &panel, &mut sums, lhs_start, dims, row0, row_end, row, k0, depth,
                    plan, rows, vectors,
                );
                row += comptime!(rows as u32);
            }
            k0 += block_k;
        }

        for row in 0..height {
            let line = out_start + (row0 + row) as usize * dims.out_stride;
            let columns = dims.columns(CUBE_POS_Y, row0 + row);
            #[unroll]
            for j in 0..vectors {
                let col = col0 + comptime!(j as u32 * config.vector);
                let sum = sums[row as usize * vectors + j];
                if comptime!(out_width == config.vector as usize) {
                    if col < dims.n {
                        let at = (line + col as usize) / NO::value();
                        let value = finish.vector::<W>(sum, at, col, &columns);
                        out[at] = Vector::cast_from(value);
                    }
                } else {
                    #[unroll]
                    for e in 0..W::value() {
                        let col = col + comptime!(e as u32);
                        if col < dims.n {
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

/// Loads one vector of a row-major B at depth `k` and columns `col..`, zero past `n`.
#[cube]
fn pack<F: Float, N: Size, W: Size>(
    rhs: &[Vector<F, N>],
    start: usize,
    stride: usize,
    k: u32,
    col: u32,
    n: u32,
    #[comptime] vector: u32,
) -> Vector<f32, W> {
    let mut value = Vector::<f32, W>::new(0.0f32);
    let line = start + k as usize * stride;
    let width = N::value();
    if comptime!(width == vector as usize) {
        if col < n {
            value = Vector::cast_from(rhs[(line + col as usize) / N::value()]);
        }
    } else {
        #[unroll]
        for e in 0..W::value() {
            let col = col + comptime!(e as u32);
            if col < n {
                value.insert(e, f32::cast_from(rhs[line + col as usize].extract(0usize)));
            }
        }
    }
    value
}

/// Packs vector `j` of every line of the panel from a column-major B.
///
/// Packs one column after the other: lines of all columns, a power of two apart, would evict each
/// other from the cache. Columns past `n` repeat the last; they are never stored.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one operand, one panel")]
fn pack_lines<F: Float, N: Size, W: Size>(
    rhs: &[Vector<F, N>],
    panel: &mut Array<Vector<f32, W>>,
    start: usize,
    dims: &Dims,
    k0: u32,
    depth: u32,
    col: u32,
    #[comptime] j: usize,
    #[comptime] vectors: usize,
) {
    let width = N::value();
    #[unroll]
    for e in 0..W::value() {
        let col = min(col + comptime!(e as u32), dims.n - 1) as usize;
        let from = (start + col * dims.rhs_stride + k0 as usize) / N::value();
        for step in 0..depth as usize / width {
            let values = rhs[from + step];
            #[unroll]
            for i in 0..width {
                let at = (step * width + i) * vectors + j;
                let mut line = panel[at];
                line.insert(e, f32::cast_from(values.extract(i)));
                panel[at] = line;
            }
        }
    }
}

/// Computes `sums[row.., ..] += A[row0 + row.., k0..] · panel` for one group of rows. Rows past the
/// end of A repeat its last row; they are never stored.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one operand, one panel, one block")]
fn row_group<F: Float, N: Size, W: Size>(
    lhs: &[Vector<F, N>],
    window: &ComptimeOption<Gather<F, N>>,
    panel: &Array<Vector<f32, W>>,
    sums: &mut Array<Vector<f32, W>>,
    start: usize,
    dims: &Dims,
    row0: u32,
    row_end: u32,
    row: u32,
    k0: u32,
    depth: u32,
    #[comptime] plan: PackedPlan,
    #[comptime] rows: usize,
    #[comptime] vectors: usize,
) {
    let mut acc = Array::<Vector<f32, W>>::new(comptime!(rows * vectors));
    let mut from = Array::<usize>::new(rows);
    #[unroll]
    for r in 0..rows {
        let line = min(row0 + row + comptime!(r as u32), row_end - 1) as usize;
        from[r] = if comptime!(plan.lhs_along_k) {
            start + line * dims.lhs_stride + k0 as usize
        } else {
            start + k0 as usize * dims.lhs_stride + line
        };
        #[unroll]
        for j in 0..vectors {
            acc[comptime!(r * vectors + j)] = sums[(row as usize + r) * vectors + j];
        }
    }
    let mut step = 1usize;
    if comptime!(!plan.lhs_along_k) {
        step = dims.lhs_stride;
    }
    let block_k = comptime!(plan.config.block_k as usize);
    // Windows are gathered first, `[rows, block_k]`.
    let gathered = comptime!(if dims.windows { rows * block_k } else { 1 });
    let mut lines = Array::<f32>::new(gathered);
    #[comptime]
    match window {
        ComptimeOption::Some(gather) =>
        {
            #[unroll]
            for r in 0..rows {
                let line = row0 + row + comptime!(r as u32);
                let at = comptime!(r * block_k);
                gather_line::<F, N>(lhs, gather, &mut lines, at, start, line, row_end, k0, depth);
            }
        }
        ComptimeOption::None => {}
    }
    for kk in 0..depth as usize {
        #[unroll]
        for r in 0..rows {
            let a = if comptime!(dims.windows) {
                lines[comptime!(r * block_k) + kk]
            } else {
                f32::cast_from(lhs[from[r] + kk * step].extract(0usize))
            };
            #[unroll]
            for j in 0..vectors {
                let at = comptime!(r * vectors + j);
                acc[at] = fma(Vector::new(a), panel[kk * vectors + j], acc[at]);
            }
        }
    }
    #[unroll]
    for r in 0..rows {
        #[unroll]
        for j in 0..vectors {
            sums[(row as usize + r) * vectors + j] = acc[comptime!(r * vectors + j)];
        }
    }
}

/// Gathers `depth` elements of a window from depth `k0` on into `lines`, from element `to` on.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one window, one place")]
fn gather_line<F: Float, N: Size>(
    image: &[Vector<F, N>],
    gather: &Gather<F, N>,
    lines: &mut Array<f32>,
    #[comptime] to: usize,
    start: usize,
    row: u32,
    row_end: u32,
    k0: u32,
    depth: u32,
) {
    let corner = gather.corner(row, row_end);
    let mut tap = gather.tap(k0);
    let mut done = 0u32;
    while done < depth {
        let pixel = gather.pixel(&corner, &tap);
        let run = min(gather.channels - tap.channel, depth - done);
        for i in 0..run {
            let value = gather.vector(image, start, pixel, tap.channel + i);
            lines[to + (done + i) as usize] = f32::cast_from(value.extract(0usize));
        }
        done += run;
        let next = gather.after(&tap, run);
        tap.row = next.row;
        tap.col = next.col;
        tap.channel = next.channel;
    }
}
