//! Gradients of `h = activation(z) · up`, or of `h = activation(z)` without a gate, given dh.
//!
//! ```text
//!   dz  = dh · up · activation'(z)             dup = dh · activation(z)             h = activation(z) · up
//!
//!   silu'(z)      = σ(z) · (1 + z · (1 - σ(z)))
//!   gelu'(z)      = Φ(z) + z · φ(z)                                     Φ and φ of the normal distribution
//!   gelu_tanh'(z) = (1 + t) / 2 + z / 2 · (1 - t²) · √(2/π) · (1 + 3 · 0.044715 z²)      t as in gelu_tanh
//! ```
//!
//! h is computed again for the gradient of the next matrix, so that the forward pass need not keep it. dz may overwrite z,
//! dup may overwrite up, h may overwrite dh: a unit reads an element before it writes it. All matrices are `[rows, width]`
//! with strides of their own, so that z and up may be halves of one matrix. Arithmetic is f32, rounded once.
//!
//! Cost: dh, z and up once; dz, dup and h once. It is bound by memory.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::elem;
use crate::fits::{limits, stores};
use crate::launch::{index_width, launch, vector};
use crate::matmul::{Activation, activation, slope};
use crate::round::{by_hand, rounded};

/// The kernel of an activation's gradients.
pub struct ActivationBackward;

/// Matrices of an activation. End with [`ActivationBackwardProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivationBackwardProblem {
    pub rows: u32,
    pub width: u32,
    /// Elements from one row of z, up, dz and dup to the next; rows of dh and h are contiguous.
    pub stride: u32,
    /// Type of all matrices.
    pub dtype: DType,
    pub activation: Activation,
    /// True if there are up and dup.
    pub gated: bool,
}

/// An invalid problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidActivationBackward {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty activation")]
    Empty { axis: &'static str },
    #[error("expected a stride of at least the width {width}, got {stride}\nhint: pass whole rows")]
    Stride { width: u32, stride: u32 },
    #[error("expected f32, f16 or bf16 matrices, got {0}\nhint: cast them")]
    DType(DType),
}

impl ActivationBackwardProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidActivationBackward`].
    pub fn checked(self) -> Result<Self, InvalidActivationBackward> {
        for (axis, size) in [("rows", self.rows), ("width", self.width)] {
            if size == 0 {
                return Err(InvalidActivationBackward::Empty { axis });
            }
        }
        let Self { width, stride, .. } = self;
        if stride < width {
            return Err(InvalidActivationBackward::Stride { width, stride });
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidActivationBackward::DType(other)),
        }
    }

    /// Elements of dh.
    pub const fn elements(&self) -> usize {
        self.rows as usize * self.width as usize
    }

    /// Elements from the first of z to the last.
    pub const fn strided(&self) -> usize {
        (self.rows as usize - 1) * self.stride as usize + self.width as usize
    }

    fn vector(&self, arch: &ArchProfile) -> u32 {
        vector(arch, self.dtype, |v| self.width.is_multiple_of(v) && self.stride.is_multiple_of(v))
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ActivationBackwardConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Device buffers; up and dup exist only with a gate.
#[derive(Debug, Clone)]
pub struct ActivationBackwardOperands {
    /// `[rows, width]`, replaced by h.
    pub dh: Handle,
    /// `[rows, stride]`, replaced by dz.
    pub z: Handle,
    /// `[rows, stride]`, replaced by dup.
    pub up: Option<Handle>,
}

impl Kernel for ActivationBackward {
    type Problem = ActivationBackwardProblem;
    type Config = ActivationBackwardConfig;
    type Operands = ActivationBackwardOperands;

    const NAME: &'static str = "activation_backward";
    const VERSION: u32 = 1;

    fn bucket(p: &ActivationBackwardProblem) -> String {
        let gated = if p.gated { " gated" } else { "" };
        format!("{} {}{gated} {}", p.dtype, p.activation.name(), p.elements().next_power_of_two())
    }

    fn candidates(
        arch: &ArchProfile,
        p: &ActivationBackwardProblem,
    ) -> Vec<ActivationBackwardConfig> {
        Self::baseline(arch, p).into_iter().collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &ActivationBackwardProblem,
        c: &ActivationBackwardConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        limits(arch, c.units, 0)
    }

    fn cost(p: &ActivationBackwardProblem) -> Cost {
        let (all, matrices) = (p.elements() as u64, if p.gated { 6 } else { 4 });
        Cost { flops: 20 * all, bytes: matrices * all * p.dtype.size() as u64 }
    }

    fn baseline(
        arch: &ArchProfile,
        p: &ActivationBackwardProblem,
    ) -> Result<ActivationBackwardConfig, Infeasible> {
        let config = ActivationBackwardConfig { units: arch.cores().unwrap_or(256) };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(
        queue: &Queue,
        p: &ActivationBackwardProblem,
        seed: u64,
    ) -> ActivationBackwardOperands {
        let noise = |len: usize, salt| crate::noise(queue, len, p.dtype, 4 * seed + salt);
        ActivationBackwardOperands {
            dh: noise(p.elements(), 0),
            z: noise(p.strided(), 1),
            up: p.gated.then(|| noise(p.strided(), 2)),
        }
    }

    /// None: a launch reads what it writes.
    fn outputs(_: &ActivationBackwardProblem, _: &ActivationBackwardOperands) -> Vec<Output> {
        Vec::new()
    }

    fn launch(
        queue: &Queue,
        p: &ActivationBackwardProblem,
        c: &ActivationBackwardConfig,
        operands: &ActivationBackwardOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch) as usize;
        let vectors = p.elements() / vector;
        let cubes = crate::cubes(arch, vectors as u64, c.units);
        let plan =
            Plan { activation: p.activation, gated: p.gated, rounds: by_hand(arch, p.dtype) };
        // Without a gate, another buffer is bound, which the kernel does not access.
        let up = operands.up.as_ref().unwrap_or(&operands.z);
        let strided = p.strided() / vector;
        // SAFETY: the lengths follow from the problem, and the kernel accesses vectors below `vectors`.
        unsafe {
            launch!(
                queue,
                backward,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.strided().max(p.elements()) as u64),
                vector,
                BufferArg::from_raw_parts(operands.dh.clone(), vectors),
                BufferArg::from_raw_parts(operands.z.clone(), strided),
                BufferArg::from_raw_parts(up.clone(), strided),
                vectors,
                p.width / vector as u32,
                p.stride / vector as u32,
                plan,
                elem(p.dtype),
            );
        }
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    activation: Activation,
    gated: bool,
    /// True if the kernel rounds results itself before it stores them.
    rounds: bool,
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn backward<F: Float, N: Size>(
    dh: &mut [Vector<F, N>], // [rows, width]
    z: &mut [Vector<F, N>],  // [rows, stride]
    up: &mut [Vector<F, N>], // [rows, stride]
    vectors: usize,
    width: u32,
    stride: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let place = at / width as usize * stride as usize + at % width as usize;
        let (given, value) = (dh[at], z[place]);
        let mut gate = Vector::<F, N>::new(F::from_int(1));
        if comptime!(plan.gated) {
            gate = up[place];
        }
        let mut dz = Vector::<F, N>::new(F::from_int(0));
        let mut dup = Vector::<F, N>::new(F::from_int(0));
        let mut h = Vector::<F, N>::new(F::from_int(0));
        #[unroll]
        for e in 0..N::value() {
            let (d, x) = (f32::cast_from(given.extract(e)), f32::cast_from(value.extract(e)));
            let own = activation(x, comptime!(Some(plan.activation)));
            let bent = slope(x, plan.activation);
            if comptime!(plan.gated) {
                let gate = f32::cast_from(gate.extract(e));
                dz.insert(e, rounded::<F>(d * gate * bent, plan.rounds));
                dup.insert(e, rounded::<F>(d * own, plan.rounds));
                h.insert(e, rounded::<F>(own * gate, plan.rounds));
            } else {
                dz.insert(e, rounded::<F>(d * bent, plan.rounds));
                h.insert(e, rounded::<F>(own, plan.rounds));
            }
        }
        dh[at] = h;
        z[place] = dz;
        if comptime!(plan.gated) {
            up[place] = dup;
        }
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
