//! dtable[id[s]] (+)= scale · Σ dx[r] over the rows r of segment s    dx: `[rows, hidden]`, dtable: `[_, hidden]` in f32
//!
//! ```text
//!   for each segment s, for each block of columns               // one cube
//!     for r in order[starts[s]..starts[s + 1]]                  // lanes: every lanes-th row of the segment
//!       sum += dx[r, column]
//!     dtable[id[s], column] (+)= scale · (the lanes' sums, added in order)
//! ```
//!
//! The gradient of an embedding table: a segment holds the rows that looked up the same token, and its id is the token. With
//! positions as ids it is the gradient of learned positions. The host sorts the tokens, which come from it anyway. One cube
//! owns a row of the table, so there are no atomics and two launches give the same bits. Rows of the table without a segment
//! are not written.
//!
//! Cost: one read of dx, one write of a row per segment, and one read of it to add.
//!
//! Source: the sorted segments of PyTorch's `embedding_dense_backward`.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::elem;
use crate::fits::{limits, stores};
use crate::launch::{index_width, launch, vector};

/// The kernel of an embedding's gradient.
pub struct EmbedBackward;

/// Rows with the segments they belong to. End with [`EmbedBackwardProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EmbedBackwardProblem {
    pub rows: u32,
    pub hidden: u32,
    /// Number of segments, at most one per row.
    pub segments: u32,
    /// Rows of the table.
    pub vocab: u32,
    /// Type of dx.
    pub dtype: DType,
    /// Factor of the sums.
    pub scale: f32,
    /// True to add to the table's gradient instead of replacing it.
    pub accumulate: bool,
}

/// An invalid problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidEmbedBackward {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty embedding")]
    Empty { axis: &'static str },
    #[error(
        "expected at most {rows} segments, one per row, got {segments}\nhint: sort the tokens into \
         segments first"
    )]
    Segments { rows: u32, segments: u32 },
    #[error("expected a finite scale, got {0}\nhint: pass 1 for no scaling")]
    Scale(f32),
    #[error("expected f32, f16 or bf16 rows, got {0}\nhint: cast them")]
    DType(DType),
}

impl EmbedBackwardProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidEmbedBackward`].
    pub fn checked(self) -> Result<Self, InvalidEmbedBackward> {
        let Self { rows, hidden, segments, vocab, scale, .. } = self;
        for (axis, size) in
            [("rows", rows), ("hidden", hidden), ("segments", segments), ("vocab", vocab)]
        {
            if size == 0 {
                return Err(InvalidEmbedBackward::Empty { axis });
            }
        }
        if segments > rows {
            return Err(InvalidEmbedBackward::Segments { rows, segments });
        }
        if !scale.is_finite() {
            return Err(InvalidEmbedBackward::Scale(scale));
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidEmbedBackward::DType(other)),
        }
    }

    /// Elements of dx.
    pub const fn elements(&self) -> usize {
        self.rows as usize * self.hidden as usize
    }

    /// Elements of the table's gradient.
    pub const fn table(&self) -> usize {
        self.vocab as usize * self.hidden as usize
    }

    fn vector(&self, arch: &ArchProfile) -> u32 {
        // The sums of a vector are f32, of at most 16 bytes.
        vector(arch, DType::F32, |v| self.hidden.is_multiple_of(v))
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EmbedBackwardConfig {
    /// Vectors of columns of a cube.
    pub columns: u32,
    /// Units that share a column.
    pub lanes: u32,
}

/// Device buffers.
#[derive(Debug, Clone)]
pub struct EmbedBackwardOperands {
    /// `[rows, hidden]`
    pub dx: Handle,
    /// u32 `[rows]`: the rows of dx, sorted by segment.
    pub order: Handle,
    /// u32 `[segments + 1]`: the first place in `order` of each segment, and `rows`.
    pub starts: Handle,
    /// u32 `[segments]`: the row of the table of each segment; all differ.
    pub ids: Handle,
    /// f32 `[vocab, hidden]`
    pub dtable: Handle,
}

/// Rows sorted by what they looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// Rows, sorted by segment and ascending within one.
    pub order: Vec<u32>,
    /// First place in `order` of each segment, and the number of rows.
    pub starts: Vec<u32>,
    /// Row of the table of each segment, ascending.
    pub ids: Vec<u32>,
}

impl Segments {
    /// Sorts rows by the ids they looked up.
    pub fn new(looked_up: &[u32]) -> Self {
        let mut order: Vec<u32> = (0..looked_up.len() as u32).collect();
        order.sort_by_key(|row| looked_up[*row as usize]);
        let (mut starts, mut ids) = (Vec::new(), Vec::new());
        for (at, row) in order.iter().enumerate() {
            let id = looked_up[*row as usize];
            if ids.last() != Some(&id) {
                starts.push(at as u32);
                ids.push(id);
            }
        }
        starts.push(order.len() as u32);
        Self { order, starts, ids }
    }
}

impl Kernel for EmbedBackward {
    type Problem = EmbedBackwardProblem;
    type Config = EmbedBackwardConfig;
    type Operands = EmbedBackwardOperands;

    const NAME: &'static str = "embed_backward";
    const VERSION: u32 = 1;

    fn bucket(p: &EmbedBackwardProblem) -> String {
        let rows = p.rows.next_power_of_two();
        format!("{} {} rows {rows}", p.dtype, p.hidden)
    }

    fn candidates(arch: &ArchProfile, p: &EmbedBackwardProblem) -> Vec<EmbedBackwardConfig> {
        if arch.cores().is_some() {
            return Self::baseline(arch, p).into_iter().collect();
        }
        let shapes = [(32, 8), (32, 16), (64, 4), (32, 4), (64, 16)];
        let configs = shapes.map(|(columns, lanes)| EmbedBackwardConfig { columns, lanes });
        configs.into_iter().filter(|config| Self::check(arch, p, config).is_ok()).collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &EmbedBackwardProblem,
        c: &EmbedBackwardConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype, DType::F32])?;
        limits(arch, c.columns * c.lanes, 4 * p.vector(arch) * c.columns * c.lanes)
    }

    fn cost(p: &EmbedBackwardProblem) -> Cost {
        let (all, written) = (p.elements() as u64, u64::from(p.segments) * u64::from(p.hidden));
        let passes = if p.accumulate { 2 } else { 1 };
        Cost { flops: all, bytes: all * p.dtype.size() as u64 + 4 * passes * written }
    }

    fn baseline(
        arch: &ArchProfile,
        p: &EmbedBackwardProblem,
    ) -> Result<EmbedBackwardConfig, Infeasible> {
        let (columns, lanes) = arch.cores().map_or((32, 8), |cores| (cores, 1));
        let config = EmbedBackwardConfig { columns, lanes };
        Self::check(arch, p, &config).map(|()| config)
    }

    /// Ids as frequent as tokens of a text: the number of a segment's rows falls with its id.
    fn operands(queue: &Queue, p: &EmbedBackwardProblem, seed: u64) -> EmbedBackwardOperands {
        let skewed = |row: u32| {
            let share = f64::from(row.wrapping_mul(0x9e37_79b1)) / 2f64.powi(32);
            (share * share * f64::from(p.segments)) as u32
        };
        // The first rows give each segment one row.
        let looked_up: Vec<u32> =
            (0..p.rows).map(|row| if row < p.segments { row } else { skewed(row) }).collect();
        let Segments { order, starts, ids } = Segments::new(&looked_up);
        let apart = (p.vocab / p.segments).max(1);
        let ids: Vec<u32> = ids.iter().map(|id| id * apart).collect();
        let words = |words: &[u32]| queue.upload(u32::as_bytes(words));
        EmbedBackwardOperands {
            dx: crate::noise(queue, p.elements(), p.dtype, 2 * seed),
            order: words(&order),
            starts: words(&starts),
            ids: words(&ids),
            dtable: crate::noise(queue, p.table(), DType::F32, 2 * seed + 1),
        }
    }

    /// None: most rows are not written, and a launch may add to the others.
    fn outputs(_: &EmbedBackwardProblem, _: &EmbedBackwardOperands) -> Vec<Output> {
        Vec::new()
    }

    fn launch(
        queue: &Queue,
        p: &EmbedBackwardProblem,
        c: &EmbedBackwardConfig,
        operands: &EmbedBackwardOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch) as usize;
        let vectors = p.hidden / vector as u32;
        let blocks = vectors.div_ceil(c.columns);
        let parts = u64::from(blocks) * u64::from(p.segments);
        // SAFETY: the lengths follow from the problem. The kernel bounds the rows and ids that it reads from buffers.
        unsafe {
            launch!(
                queue,
                add_segments,
                CubeCount::Static(crate::cubes(arch, parts, 1), 1, 1),
                CubeDim::new_1d(c.columns * c.lanes),
                index_width(p.elements().max(p.table()) as u64),
                vector,
                BufferArg::from_raw_parts(operands.dx.clone(), p.elements() / vector),
                BufferArg::from_raw_parts(operands.order.clone(), p.rows as usize),
                BufferArg::from_raw_parts(operands.starts.clone(), p.segments as usize + 1),
                BufferArg::from_raw_parts(operands.ids.clone(), p.segments as usize),
                BufferArg::from_raw_parts(operands.dtable.clone(), p.table() / vector),
                p.rows,
                p.vocab,
                vectors,
                blocks,
                parts as u32,
                p.scale,
                Plan { columns: c.columns, lanes: c.lanes, accumulate: p.accumulate },
                elem(p.dtype),
            );
        }
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    columns: u32,
    lanes: u32,
    accumulate: bool,
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn add_segments<F: Float, N: Size>(
    dx: &[Vector<F, N>],           // [rows, vectors]
    order: &[u32],                 // [rows]
    starts: &[u32],                // [segments + 1]
    ids: &[u32],                   // [segments]
    dtable: &mut [Vector<f32, N>], // [vocab, vectors]
    rows: u32,
    vocab: u32,
    vectors: u32,
    blocks: u32,
    parts: u32,
    scale: f32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, lanes) = comptime!((plan.columns, plan.lanes));
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!((columns * lanes) as usize));
    let (lane, column) = (UNIT_POS / columns, UNIT_POS % columns);
    let mut part = CUBE_POS_X;
    while part < parts {
        let (segment, block) = ((part / blocks) as usize, part % blocks);
        let at = block * columns + column;
        let inside = at < vectors;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut place = starts[segment] + lane;
        let end = min(starts[segment + 1], rows);
        while place < end && inside {
            let row = min(order[place as usize], rows - 1);
            sum += Vector::cast_from(dx[row as usize * vectors as usize + at as usize]);
            place += lanes;
        }
        shared[UNIT_POS as usize] = sum;
        sync_cube();
        let id = ids[segment];
        if lane == 0 && inside && id < vocab {
            let mut total = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for other in 0..lanes {
                total += shared[(other * columns + column) as usize];
            }
            total *= Vector::new(scale);
            let to = id as usize * vectors as usize + at as usize;
            if comptime!(plan.accumulate) {
                total += dtable[to];
            }
            dtable[to] = total;
        }
        sync_cube();
        part += CUBE_COUNT_X;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_into_segments() {
        let Segments { order, starts, ids } = Segments::new(&[7, 2, 7, 7, 0]);
        assert_eq!(order, [4, 1, 0, 2, 3]);
        assert_eq!((starts, ids), (vec![0, 1, 2, 5], vec![0, 2, 7]));
    }
}
