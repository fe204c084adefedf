//! `out = round(residual + gate · activation(sum + bias))`: the epilogue of a matmul.
//!
//! The bias `[n]` has the operands' type; gate and residual `[batch, m, n]` have the result's type.
//! Every part is optional; all arithmetic is f32 until the single rounding. The residual may alias
//! the result: the unit that writes an element also reads it.
//!
//! GELU: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), exact and by its tanh formula.
//! SiLU: `x · σ(x)`, Elfwing et al. (2017); gated as in Shazeer, "GLU Variants Improve Transformer"
//! (2020).

use arch::DType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::Queue;

use crate::tile::quad_transpose;

/// Activation function, applied per element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `x · (1 + erf(x / √2)) / 2`.
    Gelu,
    /// `x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2`.
    GeluTanh,
}

impl Activation {
    pub const ALL: [Self; 3] = [Self::Silu, Self::Gelu, Self::GeluTanh];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
        }
    }
}

/// Parts of the epilogue that a problem uses.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Epilogue {
    /// Adds a vector `[n]` to every row.
    pub bias: bool,
    pub activation: Option<Activation>,
    /// Multiplies by a matrix of the result's shape.
    pub gate: bool,
    /// Adds a matrix of the result's shape.
    pub residual: bool,
}

impl Epilogue {
    /// Names of the parts that are present, in the order `bias silu gate residual`.
    pub fn names(self) -> Vec<&'static str> {
        let flag = |on: bool, name| on.then_some(name);
        [
            flag(self.bias, "bias"),
            self.activation.map(Activation::name),
            flag(self.gate, "gate"),
            flag(self.residual, "residual"),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Device buffers of an epilogue, present for the parts that it uses.
#[derive(Debug, Clone, Default)]
pub struct EpilogueBuffers {
    pub bias: Option<Handle>,
    pub gate: Option<Handle>,
    pub residual: Option<Handle>,
}

impl EpilogueBuffers {
    /// Random buffers for the parts of `epilogue`; `bias` and `out` give length and type.
    pub(crate) fn noise(
        queue: &Queue,
        epilogue: Epilogue,
        bias: (usize, DType),
        out: (usize, DType),
        seed: u64,
    ) -> Self {
        let make = |there: bool, (len, dtype): (usize, DType), salt: u64| {
            there.then(|| crate::noise(queue, len, dtype, seed + salt))
        };
        Self {
            bias: make(epilogue.bias, bias, 0),
            gate: make(epilogue.gate, out, 1),
            residual: make(epilogue.residual, out, 2),
        }
    }
}

/// Epilogue with its buffers; gate and residual in vectors of `N`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Finish<F: Float, E: Float, N: Size> {
    bias: ComptimeOption<Box<[F]>>,
    gate: ComptimeOption<Box<[Vector<E, N>]>>,
    residual: ComptimeOption<Box<[Vector<E, N>]>>,
    /// Parts that are present. Repeated because CubeCL 0.11 caches compiled kernels under a hash
    /// that ignores whether an option is `Some` or `None`.
    #[cube(comptime)]
    epilogue: Epilogue,
}

impl<F: Float, E: Float, N: Size> FinishLaunch<F, E, N> {
    /// Launch arguments of `epilogue`: a bias of `bias` elements, matrices of `vectors` vectors.
    pub(crate) fn from_buffers(
        epilogue: Epilogue,
        buffers: &EpilogueBuffers,
        bias: usize,
        vectors: usize,
    ) -> Self {
        let matrix = |handle: &Option<Handle>| {
            let arg = handle.as_ref().map(|h| {
                // SAFETY: gate and residual have the result's size.
                unsafe { BufferArg::from_raw_parts(h.clone(), vectors) }
            });
            ComptimeOptionArgs::from(arg)
        };
        let bias = buffers.bias.as_ref().map(|h| {
            // SAFETY: the caller gives the length of the bias.
            unsafe { BufferArg::from_raw_parts(h.clone(), bias) }
        });
        Self::new(
            ComptimeOptionArgs::from(bias),
            matrix(&buffers.gate),
            matrix(&buffers.residual),
            epilogue,
        )
    }

    /// Launch arguments of an empty epilogue.
    pub(crate) fn nothing() -> Self {
        let none = || ComptimeOptionArgs::None;
        Self::new(ComptimeOptionArgs::None, none(), none(), Epilogue::default())
    }
}

/// Columns of a matrix: index of its first bias element, and number of columns.
#[derive(CubeType)]
pub(crate) struct Columns {
    pub(crate) first: usize,
    pub(crate) count: u32,
}

#[cube]
impl<F: Float, E: Float, N: Size> Finish<F, E, N> {
    /// Returns `activation(sum + bias)` for the sums of columns `col..`. Columns past the end use
    /// the last bias element; they are never stored.
    pub(crate) fn activate<W: Size>(
        &self,
        sum: Vector<f32, W>,
        col: u32,
        columns: &Columns,
    ) -> Vector<f32, W> {
        let mut value = self.biased::<W>(sum, col, columns);
        if comptime!(self.epilogue.activation.is_some()) {
            #[unroll]
            for e in 0..W::value() {
                value.insert(e, activation(value.extract(e), self.epilogue.activation));
            }
        }
        value
    }

    /// Returns `sum + bias` for the sums of columns `col..`.
    pub(crate) fn biased<W: Size>(
        &self,
        sum: Vector<f32, W>,
        col: u32,
        columns: &Columns,
    ) -> Vector<f32, W> {
        let mut value = sum;
        #[comptime]
        match &self.bias {
            ComptimeOption::Some(bias) =>
            {
                #[unroll]
                for e in 0..W::value() {
                    let col = min(col + comptime!(e as u32), columns.count - 1);
                    let bias = bias[columns.first + col as usize];
                    value.insert(e, value.extract(e) + f32::cast_from(bias));
                }
            }
            ComptimeOption::None => {}
        }
        value
    }

    /// Returns `residual + gate · value`, with vector `at` of both.
    pub(crate) fn join<W: Size>(&self, value: Vector<f32, W>, at: usize) -> Vector<f32, W> {
        let mut out = value;
        #[comptime]
        match &self.gate {
            ComptimeOption::Some(gate) => out *= Vector::cast_from(gate[at]),
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.residual {
            ComptimeOption::Some(residual) => out += Vector::cast_from(residual[at]),
            ComptimeOption::None => {}
        }
        out
    }

    /// Returns the result of one sum, at element `at` and column `col`; for `N` = 1.
    pub(crate) fn one(&self, sum: f32, at: usize, col: u32, columns: &Columns) -> f32 {
        let value = activation(self.biased_one(sum, col, columns), self.epilogue.activation);
        self.join_one(value, at)
    }

    /// Returns the result of a GLU: the gate sum in column `cols.0`, the up sum in `cols.1`; for
    /// `N` = 1.
    pub(crate) fn one_of_two(
        &self,
        sums: (f32, f32),
        at: usize,
        cols: (u32, u32),
        columns: &Columns,
    ) -> f32 {
        let gate = activation(self.biased_one(sums.0, cols.0, columns), self.epilogue.activation);
        self.join_one(gate * self.biased_one(sums.1, cols.1, columns), at)
    }

    fn biased_one(&self, sum: f32, col: u32, columns: &Columns) -> f32 {
        let mut value = sum;
        #[comptime]
        match &self.bias {
            ComptimeOption::Some(bias) => {
                value += f32::cast_from(bias[columns.first + col as usize]);
            }
            ComptimeOption::None => {}
        }
        value
    }

    fn join_one(&self, value: f32, at: usize) -> f32 {
        let mut value = value;
        #[comptime]
        match &self.gate {
            ComptimeOption::Some(gate) => value *= f32::cast_from(gate[at].extract(0usize)),
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.residual {
            ComptimeOption::Some(residual) => {
                value += f32::cast_from(residual[at].extract(0usize));
            }
            ComptimeOption::None => {}
        }
        value
    }
}

#[cube]
impl<F: Float, E: Float, N: Size> Finish<F, E, N> {
    /// Computes `residual + gate · value` for the four pairs that a unit of a quad holds of 32
    /// columns of a row. `at` is the unit's 16-byte vector; units that are not `inside` read
    /// nothing. The matrices are applied one after the other, so that they can share registers.
    pub(crate) fn join_quad<W: Size>(
        &self,
        values: &mut Array<Vector<f32, W>>,
        at: usize,
        inside: bool,
        lane: u32,
    ) {
        #[comptime]
        match &self.gate {
            ComptimeOption::Some(gate) => {
                let words = load_transposed::<E, N>(gate, at, inside, lane);
                #[unroll]
                for j in 0..4usize {
                    values[j] *= pair::<E, W>(&words, j);
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.residual {
            ComptimeOption::Some(residual) => {
                let words = load_transposed::<E, N>(residual, at, inside, lane);
                #[unroll]
                for j in 0..4usize {
                    values[j] += pair::<E, W>(&words, j);
                }
            }
            ComptimeOption::None => {}
        }
    }
}

#[cube]
fn pair<E: Float, W: Size>(words: &Array<u32>, #[comptime] j: usize) -> Vector<f32, W> {
    Vector::cast_from(Vector::<E, W>::reinterpret(words[j]))
}

/// Loads vector `at` of `matrix` and exchanges its words between the units of a quad.
#[cube]
fn load_transposed<E: Float, N: Size>(
    matrix: &[Vector<E, N>],
    at: usize,
    inside: bool,
    lane: u32,
) -> Array<u32> {
    let mut vector = Vector::<u32, Const<4>>::new(0u32);
    if inside {
        vector = Vector::reinterpret(matrix[at]);
    }
    let mut words = Array::<u32>::new(4usize);
    #[unroll]
    for j in 0..4usize {
        words[j] = vector.extract(j);
    }
    quad_transpose(&mut words, lane);
    words
}

/// Applies an activation.
#[cube]
pub(crate) fn activation(x: f32, #[comptime] activation: Option<Activation>) -> f32 {
    match comptime!(activation) {
        None => x,
        Some(Activation::Silu) => x / (1.0 + (-x).exp()),
        Some(Activation::Gelu) => x * 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        Some(Activation::GeluTanh) => gelu_tanh(x),
    }
}

/// (1 + tanh(u)) / 2 is the logistic function of 2u, with u = √(2/π) · (x + 0.044715 x³).
#[cube]
fn gelu_tanh(x: f32) -> f32 {
    let twice = (x * x * x * 0.044_715f32 + x) * 1.595_769f32;
    x / (1.0f32 + (-twice).exp())
}

/// Returns the derivative of an activation.
#[cube]
pub(crate) fn slope(x: f32, #[comptime] activation: Activation) -> f32 {
    match comptime!(Some(activation)) {
        None => x,
        Some(Activation::Silu) => silu_slope(x),
        Some(Activation::Gelu) => gelu_slope(x),
        Some(Activation::GeluTanh) => gelu_tanh_slope(x),
    }
}

#[cube]
fn silu_slope(x: f32) -> f32 {
    let share = 1.0f32 / (1.0f32 + (-x).exp());
    share * (1.0f32 + x * (1.0f32 - share))
}

#[cube]
fn gelu_slope(x: f32) -> f32 {
    // φ(x) = exp(-x² / 2) / √(2π)
    let density = (x * x * -0.5f32).exp() * 0.398_942_3f32;
    (erf(x * std::f32::consts::FRAC_1_SQRT_2) + 1.0f32) * 0.5f32 + x * density
}

/// With u = √(2/π) · (x + 0.044715 x³) and the logistic function σ: gelu_tanh(x) = x · σ(2u), and the derivative is
/// σ + x · σ · (1 - σ) · 2u'. Unlike 1 - tanh², this loses no digits.
#[cube]
fn gelu_tanh_slope(x: f32) -> f32 {
    let twice = (x * x * x * 0.044_715f32 + x) * 1.595_769f32;
    let below = (-twice.abs()).exp();
    let share = 1.0f32 / (1.0f32 + below);
    let inner = (x * x * 0.134_145f32 + 1.0f32) * 1.595_769f32;
    select(twice >= 0.0f32, share, below * share) + x * inner * below * share * share
}

/// Error function, accurate to 2e-7 (Abramowitz and Stegun, 7.1.26). CUDA's own, accurate to an
/// ulp, takes more registers: tiles of 128 x 256 spill 16 bytes (sm_89).
#[cube]
fn erf(x: f32) -> f32 {
    let size = max(x, -x);
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let odd = (1.061_405_4 * t - 1.453_152) * t + 1.421_413_7;
    let tail = ((odd * t - 0.284_496_74) * t + 0.254_829_6) * t * (-size * size).exp();
    select(x < 0.0, tail - 1.0, 1.0 - tail)
}
