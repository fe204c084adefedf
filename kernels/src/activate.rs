//! `h = activation(z) · up`, or `h = activation(z)` without a gate.
//!
//! z and up are `[rows, width]` with a stride of their own, so that they may be halves of one matrix; h is contiguous. It is the part of a matmul's epilogue that training runs apart, because the
//! gradients need z. Arithmetic is f32, rounded once.
//!
//! Cost: z and up once, h once. It is bound by memory.

use arch::{ArchProfile, DType};
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::{elem, rounding};
use crate::fits::{limits, stores};
use crate::launch::{index_width, launch, vector};
use crate::matmul::{Activation, activation};
use crate::round::{by_hand, rounded};

/// The activation kernel.
pub struct Activate;

/// Elements to activate. End with [`ActivateProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivateProblem {
    pub rows: u32,
    pub width: u32,
    /// Elements from one row of z and up to the next.
    pub stride: u32,
    /// Type of all matrices.
    pub dtype: DType,
    pub activation: Activation,
    /// True if there is an up.
    pub gated: bool,
}

/// An invalid problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidActivate {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty activation")]
    Empty { axis: &'static str },
    #[error("expected a stride of at least the width {width}, got {stride}\nhint: pass whole rows")]
    Stride { width: u32, stride: u32 },
    #[error("expected f32, f16 or bf16 matrices, got {0}\nhint: cast them")]
    DType(DType),
}

impl ActivateProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidActivate`].
    pub fn checked(self) -> Result<Self, InvalidActivate> {
        let Self { rows, width, stride, .. } = self;
        for (axis, size) in [("rows", rows), ("width", width)] {
            if size == 0 {
                return Err(InvalidActivate::Empty { axis });
            }
        }
        if stride < width {
            return Err(InvalidActivate::Stride { width, stride });
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidActivate::DType(other)),
        }
    }

    /// Elements of h.
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
pub struct ActivateConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Device buffers; up exists only with a gate.
#[derive(Debug, Clone)]
pub struct ActivateOperands {
    pub z: Handle,
    pub up: Option<Handle>,
    pub h: Handle,
}

impl Kernel for Activate {
    type Problem = ActivateProblem;
    type Config = ActivateConfig;
    type Operands = ActivateOperands;

    const NAME: &'static str = "activate";
    const VERSION: u32 = 1;

    fn bucket(p: &ActivateProblem) -> String {
        let gated = if p.gated { " gated" } else { "" };
        format!("{} {}{gated} {}", p.dtype, p.activation.name(), p.elements().next_power_of_two())
    }

    fn candidates(arch: &ArchProfile, p: &ActivateProblem) -> Vec<ActivateConfig> {
        Self::baseline(arch, p).into_iter().collect()
    }

    fn check(
        arch: &ArchProfile,
        p: &ActivateProblem,
        c: &ActivateConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        limits(arch, c.units, 0)
    }

    fn cost(p: &ActivateProblem) -> Cost {
        let (all, matrices) = (p.elements() as u64, if p.gated { 3 } else { 2 });
        Cost { flops: 10 * all, bytes: matrices * all * p.dtype.size() as u64 }
    }

    fn baseline(arch: &ArchProfile, p: &ActivateProblem) -> Result<ActivateConfig, Infeasible> {
        let config = ActivateConfig { units: arch.cores().unwrap_or(256) };
        Self::check(arch, p, &config).map(|()| config)
    }

    fn operands(queue: &Queue, p: &ActivateProblem, seed: u64) -> ActivateOperands {
        let noise = |salt| crate::noise(queue, p.strided(), p.dtype, 2 * seed + salt);
        ActivateOperands {
            z: noise(0),
            up: p.gated.then(|| noise(1)),
            h: queue.empty((p.elements() * p.dtype.size()).next_multiple_of(4)),
        }
    }

    fn outputs(p: &ActivateProblem, operands: &ActivateOperands) -> Vec<Output> {
        let (handle, len) = (operands.h.clone(), p.elements());
        vec![Output { handle, dtype: p.dtype, len, tolerance: rounding(p.dtype).max(1e-5) }]
    }

    fn launch(
        queue: &Queue,
        p: &ActivateProblem,
        c: &ActivateConfig,
        operands: &ActivateOperands,
        _scratch: Option<&Handle>,
    ) {
        let arch = queue.profile();
        let vector = p.vector(arch) as usize;
        let (vectors, strided) = (p.elements() / vector, p.strided() / vector);
        let cubes = crate::cubes(arch, vectors as u64, c.units);
        let plan =
            Plan { activation: p.activation, gated: p.gated, rounds: by_hand(arch, p.dtype) };
        // Without a gate, another buffer is bound, which the kernel does not read.
        let up = operands.up.as_ref().unwrap_or(&operands.z);
        // SAFETY: the lengths follow from the problem, and the kernel accesses vectors below `vectors`.
        unsafe {
            launch!(
                queue,
                activate,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(c.units),
                index_width(p.strided().max(p.elements()) as u64),
                vector,
                BufferArg::from_raw_parts(operands.z.clone(), strided),
                BufferArg::from_raw_parts(up.clone(), strided),
                BufferArg::from_raw_parts(operands.h.clone(), vectors),
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
fn activate<F: Float, N: Size>(
    z: &[Vector<F, N>],     // [rows, stride]
    up: &[Vector<F, N>],    // [rows, stride]
    h: &mut [Vector<F, N>], // [rows, width]
    vectors: usize,
    width: u32,
    stride: u32,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let mut at = ABSOLUTE_POS;
    while at < vectors {
        let place = at / width as usize * stride as usize + at % width as usize;
        let value = z[place];
        let mut gate = Vector::<F, N>::new(F::from_int(1));
        if comptime!(plan.gated) {
            gate = up[place];
        }
        let mut out = Vector::<F, N>::new(F::from_int(0));
        #[unroll]
        for e in 0..N::value() {
            let own =
                activation(f32::cast_from(value.extract(e)), comptime!(Some(plan.activation)));
            if comptime!(plan.gated) {
                out.insert(e, rounded::<F>(own * f32::cast_from(gate.extract(e)), plan.rounds));
            } else {
                out.insert(e, rounded::<F>(own, plan.rounds));
            }
        }
        h[at] = out;
        at += CUBE_COUNT * CUBE_DIM as usize;
    }
}
