//! Rotates heads by their positions in place, or back.
//!
//! ```text
//!   for each token r, for each of its first `heads` heads, for each pair (x, y) = (v[i], v[i + dim / 2]):
//!     c, s = table[position[r]][i], table[position[r]][i + dim / 2]
//!     (x, y) = (x · c - y · s, y · c + x · s)              inverse: (x · c + y · s, y · c - x · s)
//! ```
//!
//! The inverse is the transpose: it turns the gradient of rotated heads into that of the heads. With a magnitude factor in
//! the table it is not the inverse of a matrix, but still the gradient. Queries and keys are rotated in the result of their
//! projection `[rows, stride]`, so that nothing is copied; heads after the first `heads`, the values, stay. Arithmetic is f32,
//! rounded once. A position past the table gives NaN.
//!
//! Cost: one read and one write of the rotated dimensions; the heads of a token share its row of the table in the cache.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::elem;
use crate::fits::{limits, stores};
use crate::launch::{index_width, launch, vector};
use crate::round::{by_hand, rounded};

/// The kernel of a rotation in place.
pub struct RopeInPlace;

/// Heads to rotate. End with [`RopeInPlaceProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RopeInPlaceProblem {
    /// Tokens.
    pub rows: u32,
    /// Heads of a token that are rotated, its first ones.
    pub heads: u32,
    pub head_dim: u32,
    /// Elements from one token to the next.
    pub stride: u32,
    /// Rotated dimensions of a head.
    pub dim: u32,
    /// Rows of the table, `dim` each.
    pub positions: u32,
    /// Type of the heads; the table is f32.
    pub dtype: DType,
    /// True to rotate back.
    pub inverse: bool,
}

/// An invalid problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidRopeInPlace {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty rotation")]
    Empty { axis: &'static str },
    #[error(
        "expected an even number of rotated dimensions of at most head_dim {head_dim}, got \
         {dim}\nhint: pass the table of the model's rope"
    )]
    Dim { head_dim: u32, dim: u32 },
    #[error("expected a stride of at least {width}, got {stride}\nhint: pass whole rows")]
    Stride { width: u64, stride: u32 },
    #[error("expected f32, f16 or bf16 heads, got {0}\nhint: cast them")]
    DType(DType),
}

impl RopeInPlaceProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidRopeInPlace`].
    pub fn checked(self) -> Result<Self, InvalidRopeInPlace> {
        let Self { rows, heads, head_dim, stride, dim, positions, .. } = self;
        for (axis, size) in
            [("rows", rows), ("heads", heads), ("dimensions", dim), ("positions", positions)]
        {
            if size == 0 {
                return Err(InvalidRopeInPlace::Empty { axis });
            }
        }
        if dim % 2 == 1 || dim > head_dim {
            return Err(InvalidRopeInPlace::Dim { head_dim, dim });
        }
        let width = u64::from(heads) * u64::from(head_dim);
        if u64::from(stride) < width {
            return Err(InvalidRopeInPlace::Stride { width, stride });
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidRopeInPlace::DType(other)),
        }
    }

    /// Elements from the first head to the end of the last.
    pub const fn elements(&self) -> usize {
        let last = self.heads as usize * self.head_dim as usize;
        (self.rows as usize - 1) * self.stride as usize + last
    }

    fn vector(&self, arch: &ArchProfile) -> u32 {
        let whole = [self.dim / 2, self.head_dim, self.stride];
        // A vector of the table is f32, of at most 16 bytes.
        vector(arch, DType::F32, |v| whole.iter().all(|size| size.is_multiple_of(v)))
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RopeInPlaceConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Device buffers.
#[derive(Debug, Clone)]
pub struct RopeInPlaceOperands {
    /// `[rows, stride]`, rotated in place.
    pub heads: Handle,
    /// u32 `[rows]`
    pub position: Handle,
    /// f32 `[positions, dim]`: cosines, then sines.
    pub table: Handle,
}

impl Kernel for RopeInPlace {
    type Problem = RopeInPlaceProblem;
    type Config = RopeInPlaceConfig;
    type Operands = RopeInPlaceOperands;

    const NAME: &'static str = "rope_in_place";
    const VERSION: u32 = 1;

    fn bucket(p: &RopeInPlaceProblem) -> String {
        let rows = p.rows.next_power_of_two();
        format!("{} {} d{} rope{} rows {rows}", p.dtype, p.heads, p.head_dim, p.dim)
    }

    fn candidates(arch: &ArchProfile, p: &RopeInPlaceProblem) -> Vec<RopeInPlaceConfig> {
        Self::baseline(arch, p).into_iter().collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &RopeInPlaceProblem,
        c: &RopeInPlaceConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype, DType::F32])?;
        limits(arch, c.units, 0)
    }

    fn cost(p: &RopeInPlaceProblem) -> Cost {
        let pairs = u64::from(p.rows) * u64::from(p.heads) * u64::from(p.dim / 2);
        let table = 4 * u64::from(p.rows) * u64::from(p.dim + 1);
        Cost { flops: 6 * pairs, bytes: 4 * pairs * p.dtype.size() as u64 + table }
    }

    fn baseline(
        arch: &ArchProfile,
        p: &RopeInPlaceProblem,
    ) -> Result<RopeInPlaceConfig, Infeasible> {
        let config = RopeInPlaceConfig { units: arch.cores().unwrap_or(256) };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &RopeInPlaceProblem, seed: u64) -> RopeInPlaceOperands {
        let position: Vec<u32> = (0..p.rows).map(|row| row % p.positions).collect();
        let table = p.positions as usize * p.dim as usize;
        RopeInPlaceOperands {
            heads: crate::noise(queue, p.elements(), p.dtype, 2 * seed),
            position: queue.upload(u32::as_bytes(&position)),
            table: crate::noise(queue, table, DType::F32, 2 * seed + 1),
        }
    }

    /// None: a launch reads what it writes.
    fn outputs(_: &RopeInPlaceProblem, _: &RopeInPlaceOperands) -> Vec<Output> {
        Vec::new()
    }

    fn launch(
        queue: &Queue,
        p: &RopeInPlaceProblem,
        c: &RopeInPlaceConfig,
        operands: &RopeInPlaceOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch);
        let half = p.dim / 2 / vector;
        let pairs = p.rows as usize * p.heads as usize * half as usize;
        let table = (p.positions * (p.dim / vector)) as usize;
        // SAFETY: the lengths follow from the problem. The kernel accesses pairs below `pairs`, and bounds a position by the
        // table.
        unsafe {
            launch!(
                queue,
                rotate,
                CubeCount::Static(crate::cubes(arch, pairs as u64, c.units), 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.elements().max(pairs) as u64),
                vector as usize,
                BufferArg::from_raw_parts(operands.heads.clone(), p.elements() / vector as usize),
                BufferArg::from_raw_parts(operands.position.clone(), p.rows as usize),
                BufferArg::from_raw_parts(operands.table.clone(), table),
                pairs,
                half,
                p.heads,
                p.head_dim / vector,
                p.stride / vector,
                p.positions,
                Plan { inverse: p.inverse, rounds: by_hand(arch, p.dtype) },
                elem(p.dtype),
            );
        }
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    inverse: bool,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn rotate<F: Float, N: Size>(
    values: &mut [Vector<F, N>], // [rows, stride]
    position: &[u32],            // [rows]
    table: &[Vector<f32, N>],    // [positions, 2 · half]
    pairs: usize,
    half: u32,
    heads: u32,
    head: u32,
    stride: u32,
    positions: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < pairs {
        let pair = u32::cast_from(at % half as usize);
        let all = at / half as usize;
        let (row, own) = (all / heads as usize, u32::cast_from(all % heads as usize));
        let first = row * stride as usize + (own * head + pair) as usize;
        let second = first + half as usize;
        let place = position[row];
        let from = (min(place, positions - 1) * 2 * half + pair) as usize;
        let (cos, sin) = (table[from], table[from + half as usize]);
        let (x, y) = (values[first], values[second]);
        let mut left = Vector::<F, N>::new(F::from_int(0));
        let mut right = Vector::<F, N>::new(F::from_int(0));
        #[unroll]
        for e in 0..N::value() {
            let (mut c, mut s) = (cos.extract(e), sin.extract(e));
            if place >= positions {
                c = f32::reinterpret(place | 0x7fc0_0000u32);
            }
            if comptime!(plan.inverse) {
                s = -s;
            }
            let (x, y) = (f32::cast_from(x.extract(e)), f32::cast_from(y.extract(e)));
            left.insert(e, rounded::<F>(x * c - y * s, plan.rounds));
            right.insert(e, rounded::<F>(y * c + x * s, plan.rounds));
        }
        values[first] = left;
        values[second] = right;
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
