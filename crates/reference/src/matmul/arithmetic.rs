//! Sums of products in f64, and with the rounding of kernels.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use rayon::prelude::*;

use crate::DType;
use crate::norm::Norm;

/// An activation function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// x·σ(x).
    Silu,
    /// x·Φ(x), Φ the normal distribution's cumulative function.
    Gelu,
    /// GELU by the tanh formula of Hendrycks and Gimpel (2016).
    GeluTanh,
    /// max(x, 0).
    Relu,
    /// 1 / (1 + exp(-x)).
    Sigmoid,
    /// tanh(x).
    Tanh,
    /// clip(scale·x + shift, 0, 1).
    HardSigmoid {
        /// Slope in the middle.
        scale: f32,
        /// Value at 0.
        shift: f32,
    },
    /// x·clip(x/6 + 1/2, 0, 1).
    HardSwish,
    /// x between two bounds.
    Clip {
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
    },
    /// x, and slope·x below 0.
    LeakyRelu {
        /// Slope below 0.
        slope: f32,
    },
}

/// Arithmetic for the sums of a matmul, f32 or f64.
pub(crate) trait Number:
    Copy
    + Default
    + Send
    + Sync
    + AddAssign
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + From<f32>
    + PartialOrd
{
    fn exp(self) -> Self;
    fn erf(self) -> Self;
    fn tanh(self) -> Self;
    /// Normalises a row. Inexact arithmetic rounds the result with `round`.
    fn normalise(line: &mut [Self], norm: Norm, weight: &[f32], round: &impl Fn(f32) -> Self);
    /// Rounds to a format, if the arithmetic is inexact.
    fn stored(self, dtype: DType) -> Self;
    /// Converts a constant to the nearest value.
    fn near(value: f64) -> Self;
}

impl Number for f32 {
    fn exp(self) -> Self {
        self.exp()
    }
    fn erf(self) -> Self {
        libm::erff(self)
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
    fn stored(self, dtype: DType) -> Self {
        dtype.storage().round(self.into()) as Self
    }
    fn near(value: f64) -> Self {
        value as Self
    }
    fn normalise(line: &mut [Self], norm: Norm, weight: &[f32], round: &impl Fn(f32) -> Self) {
        norm.apply_naively(line, weight, None);
        line.iter_mut().for_each(|x| *x = round(*x));
    }
}

impl Number for f64 {
    fn exp(self) -> Self {
        self.exp()
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
    fn stored(self, _dtype: DType) -> Self {
        self
    }
    fn near(value: f64) -> Self {
        value
    }
    fn normalise(line: &mut [Self], norm: Norm, weight: &[f32], _round: &impl Fn(f32) -> Self) {
        norm.apply(line, weight, None);
    }
}

/// Returns x between two bounds; a NaN stays one.
fn clip<T: Number>(x: T, low: T, high: T) -> T {
    if x < low {
        low
    } else if x > high {
        high
    } else {
        x
    }
}

/// Returns a value where a condition on x holds, else 0; a NaN stays one.
fn step<T: Number>(x: T, holds: bool, value: T) -> T {
    match x.partial_cmp(&x) {
        None => x,
        Some(_) if holds => value,
        Some(_) => T::from(0.0),
    }
}

impl Activation {
    pub(crate) fn apply<T: Number>(self, x: T) -> T {
        let one = T::from(1.0);
        match self {
            Self::Silu => x / (one + (-x).exp()),
            Self::Gelu => x * T::near(0.5) * (one + (x * T::near(0.5_f64.sqrt())).erf()),
            Self::GeluTanh => {
                let root = T::near((2.0 / std::f64::consts::PI).sqrt());
                x * T::near(0.5) * (one + (root * (x + T::near(0.044_715) * x * x * x)).tanh())
            }
            Self::Relu => clip(x, T::from(0.0), T::from(f32::INFINITY)),
            Self::Sigmoid => one / (one + (-x).exp()),
            Self::Tanh => x.tanh(),
            Self::HardSigmoid { scale, shift } => {
                clip(x * T::from(scale) + T::from(shift), T::from(0.0), one)
            }
            Self::HardSwish => x * clip(x * T::near(1.0 / 6.0) + T::near(0.5), T::from(0.0), one),
            Self::Clip { low, high } => clip(x, T::from(low), T::from(high)),
            Self::LeakyRelu { slope } => {
                if x < T::from(0.0) {
                    x * T::from(slope)
                } else {
                    x
                }
            }
        }
    }

    /// Applies the function to one value in f64.
    pub fn exact(self, x: f64) -> f64 {
        self.apply(x)
    }

    /// Returns the derivative at one value.
    pub(super) fn derivative<T: Number>(self, x: T) -> T {
        let (one, half) = (T::from(1.0), T::near(0.5));
        match self {
            Self::Silu => {
                let share = one / (one + (-x).exp());
                share * (one + x * (one - share))
            }
            Self::Gelu => {
                let root = T::near((2.0 * std::f64::consts::PI).sqrt());
                let density = (-x * x * half).exp() / root;
                half * (one + (x * T::near(0.5_f64.sqrt())).erf()) + x * density
            }
            Self::GeluTanh => {
                let root = T::near((2.0 / std::f64::consts::PI).sqrt());
                let tanh = (root * (x + T::near(0.044_715) * x * x * x)).tanh();
                let inner = root * (one + T::near(3.0 * 0.044_715) * x * x);
                half * (one + tanh) + half * x * (one - tanh * tanh) * inner
            }
            Self::Relu => step(x, x > T::from(0.0), one),
            Self::Sigmoid => {
                let share = one / (one + (-x).exp());
                share * (one - share)
            }
            Self::Tanh => one - x.tanh() * x.tanh(),
            Self::HardSigmoid { scale, shift } => {
                let line = x * T::from(scale) + T::from(shift);
                step(x, line > T::from(0.0) && line < one, T::from(scale))
            }
            Self::HardSwish if x <= T::from(-3.0) => T::from(0.0),
            Self::HardSwish if x >= T::from(3.0) => one,
            Self::HardSwish => x * T::near(1.0 / 3.0) + half,
            Self::Clip { low, high } => step(x, x > T::from(low) && x < T::from(high), one),
            Self::LeakyRelu { slope } => {
                step(x, x > T::from(0.0), one - T::from(slope)) + T::from(slope)
            }
        }
    }

    /// Returns the derivative at one value in f64.
    pub fn slope(self, x: f64) -> f64 {
        self.derivative(x)
    }

    /// Returns the function and its derivative at one value as a naive kernel computes them, in f32. The error function of a
    /// kernel is accurate to 2e-7, which counts as the naive kernel's error.
    pub fn naive(self, x: f32) -> (f32, f32) {
        let off = if self == Self::Gelu { 2e-7 } else { 0.0 };
        (self.apply(x) + off * x, self.derivative(x) + off)
    }
}

/// Copies data[outer + inner] to a contiguous matrix [outer, inner].
pub(super) fn gather<T: Number>(
    data: &[f32],
    outer: &[usize],
    inner: &[usize],
    read: impl Fn(f32) -> T + Sync,
) -> Vec<T> {
    let mut out = vec![T::default(); outer.len() * inner.len()];
    out.par_chunks_mut(inner.len().max(1)).zip(outer).for_each(|(out, &base)| {
        for (out, &offset) in out.iter_mut().zip(inner) {
            *out = read(data[base + offset]);
        }
    });
    out
}

/// Multiplies [rows, k] by [k, cols], contiguous. Each sum runs over k in order; the blocks only group sums
/// that are computed together. `keep` is applied to a sum after each product.
pub(super) fn multiply<T: Number>(
    lhs: &[T],
    rhs: &[T],
    [rows, k, cols]: [usize; 3],
    keep: impl Fn(T) -> T + Sync,
) -> Vec<T> {
    const ROWS: usize = 16;
    const COLS: usize = 128;
    let mut out = vec![T::default(); rows * cols];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_mut(ROWS * cols).enumerate().for_each(|(i, out)| {
        for first in (0..cols).step_by(COLS) {
            let width = COLS.min(cols - first);
            let mut sums = [[T::default(); COLS]; ROWS];
            for p in 0..k {
                let rhs = &rhs[p * cols + first..][..width];
                for (row, sums) in sums.iter_mut().enumerate().take(out.len() / cols) {
                    let lhs = lhs[(i * ROWS + row) * k + p];
                    for (sum, &rhs) in sums.iter_mut().zip(rhs) {
                        *sum = keep(*sum + lhs * rhs);
                    }
                }
            }
            for (out, sums) in out.chunks_mut(cols).zip(&sums) {
                out[first..][..width].copy_from_slice(&sums[..width]);
            }
        }
    });
    out
}

/// As [`multiply`], with sixteen products at once: their exact sum is added, and the total is truncated to
/// f32.
pub(super) fn multiply_in_blocks(
    lhs: &[f32],
    rhs: &[f32],
    [rows, k, cols]: [usize; 3],
) -> Vec<f32> {
    let mut out = vec![0.0; rows * cols];
    out.par_chunks_mut(cols.max(1)).enumerate().for_each(|(row, out)| {
        let mut block = vec![0f64; cols];
        for first in (0..k).step_by(16) {
            block.fill(0.0);
            for p in first..k.min(first + 16) {
                let lhs = f64::from(lhs[row * k + p]);
                for (sum, rhs) in block.iter_mut().zip(&rhs[p * cols..][..cols]) {
                    *sum += lhs * f64::from(*rhs);
                }
            }
            for (out, block) in out.iter_mut().zip(&block) {
                *out = truncate(f64::from(*out) + block);
            }
        }
    });
    out
}

/// Rounds `x` to f32 towards 0.
fn truncate(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near).abs() > x.abs() && near.is_finite() {
        f32::from_bits(near.to_bits() - 1)
    } else {
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_the_limit_of_differences() {
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            for x in [-6.0, -1.3, -0.1, 0.0, 0.4, 2.0, 9.0] {
                let step = 1e-5;
                let rise = activation.exact(x + step) - activation.exact(x - step);
                let (want, got) = (rise / (2.0 * step), activation.slope(x));
                assert!((want - got).abs() < 1e-9, "{activation:?} at {x}: {got}, {want}");
            }
        }
    }
}
