//! Activations with or without a gate, and their gradients, as kernels of their own.
//!
//! A matmul applies an activation in its epilogue. Training runs it apart, because the gradients need its input z.
//!
//! | kernel | reads | writes |
//! |---|---|---|
//! | [`Activate`] | z, up | h = activation(z) · up |
//! | [`ActivationBackward`] | dh, z, up | h, dz, dup in their places |
//!
//! z and up are `[rows, stride]`, of which the first `width` columns count, so that they may be halves of one matrix; h and dh are
//! `[rows, width]`. Without a gate there is no up. Arithmetic is f32, rounded once. Both kernels are bound by memory, with one
//! config.

mod backward;
mod forward;

use arch::{ArchProfile, DType};
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use crate::fits::{limits, stores};
use crate::launch::vector;
use crate::matmul::Activation;
use crate::round::by_hand;

pub use backward::{ActivationBackward, ActivationBackwardOperands};
pub use forward::{Activate, ActivateOperands};

/// Matrices of an activation. End with [`ActivationProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivationProblem {
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
pub enum InvalidActivation {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty activation")]
    Empty { axis: &'static str },
    #[error("expected a stride of at least the width {width}, got {stride}\nhint: pass whole rows")]
    Stride { width: u32, stride: u32 },
    #[error("expected f32, f16 or bf16 matrices, got {0}\nhint: cast them")]
    DType(DType),
}

impl ActivationProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidActivation`].
    pub fn checked(self) -> Result<Self, InvalidActivation> {
        let Self { rows, width, stride, .. } = self;
        for (axis, size) in [("rows", rows), ("width", width)] {
            if size == 0 {
                return Err(InvalidActivation::Empty { axis });
            }
        }
        if stride < width {
            return Err(InvalidActivation::Stride { width, stride });
        }
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidActivation::DType(other)),
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

    fn bucket(&self) -> String {
        let gated = if self.gated { " gated" } else { "" };
        let elements = self.elements().next_power_of_two();
        format!("{} {}{gated} {elements}", self.dtype, self.activation.name())
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ActivationConfig {
    /// Units of a cube.
    pub units: u32,
}

impl ActivationConfig {
    fn check(self, arch: &ArchProfile, p: &ActivationProblem) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        limits(arch, self.units, 0)
    }

    fn baseline(arch: &ArchProfile, p: &ActivationProblem) -> Result<Self, Infeasible> {
        let config = Self { units: arch.cores().unwrap_or(256) };
        config.check(arch, p).map(|()| config)
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

impl Plan {
    fn new(arch: &ArchProfile, p: &ActivationProblem) -> Self {
        Self { activation: p.activation, gated: p.gated, rounds: by_hand(arch, p.dtype) }
    }
}
