//! Sizes of a launch, and the block of C of each cube.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::epilogue::Columns;
use super::problem::{BatchSlice, MatmulProblem};

/// Sizes and strides of one launch, in elements.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Dims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    /// Distance between rows, or between columns if those are contiguous.
    pub(crate) lhs_stride: usize,
    pub(crate) rhs_stride: usize,
    pub(crate) out_stride: usize,
    /// First element of this launch's first batch.
    pub(crate) lhs_start: usize,
    pub(crate) rhs_start: usize,
    pub(crate) out_start: usize,
    /// Distance between batches; 0 broadcasts the operand.
    pub(crate) lhs_batch: usize,
    pub(crate) rhs_batch: usize,
    pub(crate) out_batch: usize,
    /// Batches in this launch.
    pub(crate) batches: u32,
    /// Number of splits of k, and k tiles per split, except the last.
    pub(crate) parts: u32,
    pub(crate) part_tiles: u32,
    /// First row of each group, then the end of the last group.
    offsets: ComptimeOption<Box<[u32]>>,
    /// True if there are offsets; repeated for the kernel's hash, see [`Finish`](super::Finish).
    #[cube(comptime)]
    pub(crate) grouped: bool,
    /// True if batches are neighbouring columns of the result.
    #[cube(comptime)]
    pub(crate) interleaved: bool,
    /// Rows that share a row of the bias; 0 for one row of all.
    period: u32,
    bias_pitch: u32,
    /// True with a period; repeated for the hash, too.
    #[cube(comptime)]
    pub(crate) periodic: bool,
    /// True if rows of lhs are windows of an image; repeated for the hash, too.
    #[cube(comptime)]
    pub(crate) windows: bool,
}

#[cube]
impl Dims {
    /// Returns the first elements of batch `batch` in lhs, rhs and out.
    pub(crate) fn batch(&self, batch: usize) -> (usize, usize, usize) {
        (
            self.lhs_start + batch * self.lhs_batch,
            self.rhs_start + batch * self.rhs_batch,
            self.out_start + batch * self.out_batch,
        )
    }

    /// Returns the first row of batch `batch` in lhs and out, and one past its last.
    pub(crate) fn rows(&self, batch: u32) -> (u32, u32) {
        let mut rows = (0u32.runtime(), self.m);
        #[comptime]
        match &self.offsets {
            ComptimeOption::Some(offsets) => {
                let first = min(offsets[batch as usize], self.m);
                rows = (first, min(offsets[batch as usize + 1], self.m));
            }
            ComptimeOption::None => {}
        }
        rows
    }

    /// Returns the columns of row `row` of batch `batch`.
    pub(crate) fn columns(&self, batch: u32, row: u32) -> Columns {
        let first = if comptime!(self.grouped || self.interleaved) {
            batch as usize * self.n as usize
        } else if comptime!(self.periodic) {
            (row / self.period) as usize * self.bias_pitch as usize
        } else {
            0usize.runtime()
        };
        Columns { first, count: self.n }
    }
}

impl BatchSlice {
    /// Launch arguments; `rows` holds the offsets of a grouped problem.
    pub(crate) fn dims(
        &self,
        p: &MatmulProblem,
        parts: u32,
        part_tiles: u32,
        rows: Option<&Handle>,
    ) -> DimsLaunch {
        let offsets = rows.map(|rows| {
            // SAFETY: the buffer holds one offset more than there are groups.
            unsafe { BufferArg::from_raw_parts(rows.clone(), p.batches.inner as usize + 1) }
        });
        DimsLaunch::new(
            p.m,
            p.n,
            p.k,
            p.lhs.stride as usize,
            p.rhs.stride as usize,
            p.n as usize * if p.interleaved { p.batches.inner as usize } else { 1 },
            (p.lhs.start + self.lhs.0) as usize,
            (p.rhs.start + self.rhs.0) as usize,
            self.out.0 as usize,
            self.lhs.1 as usize,
            self.rhs.1 as usize,
            self.out.1 as usize,
            self.count,
            parts,
            part_tiles,
            ComptimeOptionArgs::from(offsets),
            p.grouped,
            p.interleaved,
            p.period,
            p.bias_pitch,
            p.period > 0,
            p.window.is_some(),
        )
    }
}

/// Returns the block of C that this cube computes.
///
/// Blocks that exceed one grid dimension are spread over two; cubes past the last block repeat it.
#[cube]
pub(crate) fn own_block(
    dims: &Dims,
    #[comptime] tile_m: u32,
    #[comptime] tile_n: u32,
) -> (u32, u32) {
    let last = dims.m.div_ceil(tile_m) * dims.n.div_ceil(tile_n) - 1;
    let id = min(CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X, last);
    block_of(dims.m.div_ceil(tile_m), dims.n.div_ceil(tile_n), id)
}

/// Returns row and column of block `id` of C, which has `rows` by `cols` blocks.
///
/// Blocks run down eight block rows before they move one to the right. The cubes of a wave thus
/// share rows of A and columns of B in L2.
#[cube]
pub(crate) fn block_of(rows: u32, cols: u32, id: u32) -> (u32, u32) {
    let group = comptime!(8u32);
    let per_group = group * cols;
    let first = id / per_group * group;
    let in_group = id % per_group;
    let height = min(rows - first, group);
    (first + in_group % height, in_group / height)
}
