//! out[c] (+)= Σ x[r, c]    x: `[rows, stride]`, of which the first `width` columns count; out: `[width]` in f32
//!
//! ```text
//!   for each strip of rows, for each block of columns          // one cube each
//!     for each row of the strip                                // lanes: units of different rows
//!       sum += x[row, column]                                  // a vector of columns per unit
//!     partial[strip, column] = the lanes' sums, added in order
//!   out (+)= the strips' sums, added in order                  // the same kernel over the partial sums
//! ```
//!
//! It gives the gradient of a bias, and finishes the column sums of other kernels. All sums are f32, and the config alone
//! determines their order. A strip has a few hundred rows, so that long sums keep their digits.
//!
//! Cost: one read of x; the partial sums are a few percent of it.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::elem;
use crate::fits::{limits, shape, stores};
use crate::launch::{index_width, launch, vector};

/// The column-sum kernel.
pub struct ColumnSums;

/// A matrix whose columns are summed. End with [`ColumnSumsProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnSumsProblem {
    pub rows: u32,
    pub width: u32,
    /// Elements from one row to the next.
    pub stride: u32,
    /// Type of the matrix.
    pub dtype: DType,
    /// True to add to the result instead of replacing it.
    pub accumulate: bool,
}

/// An invalid matrix.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidColumnSums {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty sum")]
    Empty { axis: &'static str },
    #[error(
        "expected a stride of at least the width {width}, got {stride}\nhint: pass the whole row"
    )]
    Stride { width: u32, stride: u32 },
    #[error("expected f32, f16 or bf16 rows, got {0}\nhint: cast the rows")]
    DType(DType),
}

impl ColumnSumsProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidColumnSums`].
    pub fn checked(self) -> Result<Self, InvalidColumnSums> {
        for (axis, size) in [("rows", self.rows), ("width", self.width)] {
            if size == 0 {
                return Err(InvalidColumnSums::Empty { axis });
            }
        }
        let Self { width, stride, .. } = self;
        if stride < width {
            return Err(InvalidColumnSums::Stride { width, stride });
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidColumnSums::DType(other)),
        }
    }

    /// Elements of x, gaps between rows included.
    pub const fn elements(&self) -> usize {
        (self.rows as usize - 1) * self.stride as usize + self.width as usize
    }

    fn vector(&self, arch: &ArchProfile) -> u32 {
        // The sums of a vector are f32, of at most 16 bytes.
        vector(arch, DType::F32, |v| self.width.is_multiple_of(v) && self.stride.is_multiple_of(v))
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ColumnSumsConfig {
    /// Vectors of columns of a cube.
    pub columns: u32,
    /// Units that share a column.
    pub lanes: u32,
    /// Rows of a strip.
    pub strip: u32,
}

impl ColumnSumsConfig {
    pub(crate) const fn strips(self, rows: u32) -> u32 {
        rows.div_ceil(self.strip)
    }
}

/// Device buffers.
#[derive(Debug, Clone)]
pub struct ColumnSumsOperands {
    /// `[rows, stride]`
    pub x: Handle,
    /// f32 `[width]`
    pub out: Handle,
}

impl Kernel for ColumnSums {
    type Problem = ColumnSumsProblem;
    type Config = ColumnSumsConfig;
    type Operands = ColumnSumsOperands;

    const NAME: &'static str = "column_sums";
    const VERSION: u32 = 1;

    fn bucket(p: &ColumnSumsProblem) -> String {
        let rows = p.rows.next_power_of_two();
        format!("{} {} rows {rows}", p.dtype, p.width.next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &ColumnSumsProblem) -> Vec<ColumnSumsConfig> {
        if arch.cores().is_some() {
            return Self::baseline(arch, p).into_iter().collect();
        }
        let mut configs = Vec::new();
        for strip in [256, 512, 128, 1024] {
            for (columns, lanes) in [(32, 8), (32, 16), (64, 8), (16, 16)] {
                let config = ColumnSumsConfig { columns, lanes, strip };
                if Self::check(arch, p, &config).is_ok() {
                    configs.push(config);
                }
            }
        }
        configs
    }

    fn check(
        arch: &ArchProfile,
        p: &ColumnSumsProblem,
        c: &ColumnSumsConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype, DType::F32])?;
        if c.strip == 0 || c.strips(p.rows) > 65_535 {
            return Err(shape("strip", c.strip, "expected at most 65535 strips"));
        }
        limits(arch, c.columns * c.lanes, 4 * p.vector(arch) * c.columns * c.lanes)
    }

    fn cost(p: &ColumnSumsProblem) -> Cost {
        let all = u64::from(p.rows) * u64::from(p.width);
        Cost { flops: all, bytes: all * p.dtype.size() as u64 + 4 * u64::from(p.width) }
    }

    fn baseline(arch: &ArchProfile, p: &ColumnSumsProblem) -> Result<ColumnSumsConfig, Infeasible> {
        let (columns, lanes) = arch.cores().map_or((32, 8), |cores| (cores, 1));
        let strip = p.rows.div_ceil(65_535).max(256);
        let config = ColumnSumsConfig { columns, lanes, strip };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &ColumnSumsProblem, seed: u64) -> ColumnSumsOperands {
        ColumnSumsOperands {
            x: crate::noise(queue, p.elements(), p.dtype, 2 * seed),
            out: crate::noise(queue, p.width as usize, DType::F32, 2 * seed + 1),
        }
    }

    /// None if a launch adds to what it writes.
    fn outputs(p: &ColumnSumsProblem, operands: &ColumnSumsOperands) -> Vec<Output> {
        let (handle, len) = (operands.out.clone(), p.width as usize);
        let output = Output { handle, dtype: DType::F32, len, tolerance: 1e-5 };
        (!p.accumulate).then_some(output).into_iter().collect()
    }

    fn scratch_bytes(p: &ColumnSumsProblem, c: &ColumnSumsConfig) -> u64 {
        match c.strips(p.rows) {
            1 => 0,
            strips => 4 * u64::from(strips) * u64::from(p.width),
        }
    }

    fn launch(
        queue: &Queue,
        p: &ColumnSumsProblem,
        c: &ColumnSumsConfig,
        operands: &ColumnSumsOperands,
        scratch: Option<&Handle>,
    ) {
        let Some(partials) = scratch else {
            return launch_sums(queue, p, *c, &operands.x, &operands.out);
        };
        launch_sums(
            queue,
            &ColumnSumsProblem { accumulate: false, ..*p },
            *c,
            &operands.x,
            partials,
        );
        let rest =
            ColumnSumsProblem { rows: c.strips(p.rows), stride: p.width, dtype: DType::F32, ..*p };
        add_partials(queue, &rest, partials, &operands.out);
    }
}

/// Enqueues the sum of partial sums `[rows, stride]` in f32, with one cube per block of columns.
pub(crate) fn add_partials(queue: &Queue, p: &ColumnSumsProblem, partials: &Handle, out: &Handle) {
    let (columns, lanes) = queue.profile().cores().map_or((16, 16), |cores| (cores, 1));
    launch_sums(queue, p, ColumnSumsConfig { columns, lanes, strip: p.rows }, partials, out);
}

/// Enqueues the sums of strips, into `[strips, width]`.
fn launch_sums(
    queue: &Queue,
    p: &ColumnSumsProblem,
    c: ColumnSumsConfig,
    x: &Handle,
    out: &Handle,
) {
    let vector = p.vector(queue.profile()) as usize;
    let (columns, strips) = (p.width / vector as u32, c.strips(p.rows));
    let cubes = crate::cubes(queue.profile(), columns.into(), c.columns);
    let plan = Plan { columns: c.columns, lanes: c.lanes, accumulate: p.accumulate };
    // SAFETY: the lengths follow from the problem, and the kernel checks its indices.
    unsafe {
        launch!(
            queue,
            sums,
            CubeCount::Static(cubes, strips, 1),
            CubeDim::new_1d(c.columns * c.lanes),
            index_width(p.elements() as u64),
            vector,
            BufferArg::from_raw_parts(x.clone(), p.elements() / vector),
            BufferArg::from_raw_parts(out.clone(), (columns * strips) as usize),
            SizesLaunch::new(p.rows, columns, p.stride / vector as u32, c.strip),
            plan,
            elem(p.dtype),
        );
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    columns: u32,
    lanes: u32,
    accumulate: bool,
}

/// Sizes of the matrix; columns and stride in vectors, the strip in rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    columns: u32,
    stride: u32,
    strip: u32,
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn sums<F: Float, N: Size>(
    x: &[Vector<F, N>],         // [rows, stride]
    out: &mut [Vector<f32, N>], // [strips, columns]
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, lanes) = comptime!((plan.columns, plan.lanes));
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!((columns * lanes) as usize));
    let (own, lane) = (UNIT_POS % columns, UNIT_POS / columns);
    let first_row = CUBE_POS_Y * sizes.strip;
    let last_row = min(first_row + sizes.strip, sizes.rows);
    let mut first = CUBE_POS_X * columns;
    while first < sizes.columns {
        let column = first + own;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        if column < sizes.columns {
            let mut row = first_row + lane;
            while row < last_row {
                sum += Vector::cast_from(x[row as usize * sizes.stride as usize + column as usize]);
                row += lanes;
            }
        }
        if comptime!(lanes > 1) {
            // Units may still read the previous columns.
            sync_cube();
            shared[UNIT_POS as usize] = sum;
            sync_cube();
            if lane == 0 {
                for l in 1..lanes {
                    sum += shared[(l * columns + own) as usize];
                }
            }
        }
        if lane == 0 && column < sizes.columns {
            let at = CUBE_POS_Y as usize * sizes.columns as usize + column as usize;
            if comptime!(plan.accumulate) {
                sum += out[at];
            }
            out[at] = sum;
        }
        first += CUBE_COUNT_X * columns;
    }
}
