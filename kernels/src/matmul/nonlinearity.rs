//! Activations of a layer, and their derivatives, for one number.
//!
//! GELU: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), exact and by its tanh formula.
//! SiLU: `x · σ(x)`, Elfwing et al. (2017).

use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use crate::tile::{exp2, reciprocal};

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
    /// `max(x, 0)`.
    Relu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `tanh(x)`.
    Tanh,
    /// `clip(scale · x + shift, 0, 1)`.
    HardSigmoid { scale: Constant, shift: Constant },
    /// `x · clip(x / 6 + 1/2, 0, 1)`.
    HardSwish,
    /// `min(max(x, low), high)`.
    Clip { low: Constant, high: Constant },
    /// x, and `slope · x` below 0.
    LeakyRelu { slope: Constant },
}

/// A number that a kernel is compiled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Constant(u32);

impl Constant {
    pub const fn new(value: f32) -> Self {
        Self(value.to_bits())
    }

    pub const fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl Activation {
    /// Activations of the feed-forward blocks of language models.
    pub const SMOOTH: [Self; 3] = [Self::Silu, Self::Gelu, Self::GeluTanh];
    /// All of them, with the usual constants.
    pub const ALL: [Self; 10] = [
        Self::Silu,
        Self::Gelu,
        Self::GeluTanh,
        Self::Relu,
        Self::Sigmoid,
        Self::Tanh,
        Self::HardSigmoid { scale: Constant::new(0.2), shift: Constant::new(0.5) },
        Self::HardSwish,
        Self::Clip { low: Constant::new(0.0), high: Constant::new(6.0) },
        Self::LeakyRelu { slope: Constant::new(0.01) },
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
            Self::Sigmoid => "sigmoid",
            Self::Tanh => "tanh",
            Self::HardSigmoid { .. } => "hard_sigmoid",
            Self::HardSwish => "hard_swish",
            Self::Clip { .. } => "clip",
            Self::LeakyRelu { .. } => "leaky_relu",
        }
    }

    pub(super) const fn name_of_slope(self) -> &'static str {
        match self {
            Self::Silu => "silu_slope",
            Self::Gelu => "gelu_slope",
            Self::GeluTanh => "gelu_tanh_slope",
            Self::Relu => "relu_slope",
            Self::Sigmoid => "sigmoid_slope",
            Self::Tanh => "tanh_slope",
            Self::HardSigmoid { .. } => "hard_sigmoid_slope",
            Self::HardSwish => "hard_swish_slope",
            Self::Clip { .. } => "clip_slope",
            Self::LeakyRelu { .. } => "leaky_relu_slope",
        }
    }
}

/// Arithmetic of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Arithmetic {
    /// Exponentials and quotients of the language of the kernel.
    Plain,
    /// Single instructions of PTX, to 2 ulps, for results that are rounded to 16 bits: on an H200 the exact quotients took half of
    /// the time of the epilogue. The error function stays exact, because tiles of 128 x 256 would spill 40 bytes (sm_89).
    Ptx,
}

/// Applies an activation.
#[cube]
pub(crate) fn activation(
    x: f32,
    #[comptime] activation: Option<Activation>,
    #[comptime] by: Arithmetic,
) -> f32 {
    match comptime!(activation) {
        None => x,
        Some(Activation::Silu) => x * inverse(1.0 + exp(-x, by), by),
        Some(Activation::Gelu) => x * 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        Some(Activation::GeluTanh) => gelu_tanh(x, by),
        Some(Activation::Relu) => clipped(x, 0.0f32, f32::INFINITY),
        Some(Activation::Sigmoid) => inverse(1.0f32 + exp(-x, by), by),
        Some(Activation::Tanh) => x.tanh(),
        Some(Activation::HardSigmoid { scale, shift }) => {
            let line = x * comptime!(scale.value()) + comptime!(shift.value());
            clipped(line, 0.0f32, 1.0f32)
        }
        Some(Activation::HardSwish) => {
            x * clipped(x * comptime!(1.0f32 / 6.0) + 0.5f32, 0.0f32, 1.0f32)
        }
        Some(Activation::Clip { low, high }) => {
            clipped(x, comptime!(low.value()), comptime!(high.value()))
        }
        Some(Activation::LeakyRelu { slope }) => {
            select(x < 0.0f32, x * comptime!(slope.value()), x)
        }
    }
}

/// Clips x to bounds that may be infinite; a NaN stays one, unlike with `min` and `max`.
#[cube]
fn clipped(x: f32, #[comptime] low: f32, #[comptime] high: f32) -> f32 {
    let mut value = x;
    // WGSL has no infinite constants.
    if comptime!(high.is_finite()) {
        value = select(x > high, high.runtime(), value);
    }
    if comptime!(low.is_finite()) {
        value = select(x < low, low.runtime(), value);
    }
    value
}

/// (1 + tanh(u)) / 2 is the logistic function of 2u, with u = √(2/π) · (x + 0.044715 x³).
#[cube]
fn gelu_tanh(x: f32, #[comptime] by: Arithmetic) -> f32 {
    let twice = (x * x * x * 0.044_715f32 + x) * 1.595_769f32;
    x * inverse(1.0f32 + exp(-twice, by), by)
}

/// Returns the derivative of an activation.
#[cube]
pub(crate) fn slope(x: f32, #[comptime] activation: Activation, #[comptime] by: Arithmetic) -> f32 {
    match comptime!(Some(activation)) {
        None => x,
        Some(Activation::Silu) => silu_slope(x, by),
        Some(Activation::Gelu) => gelu_slope(x),
        Some(Activation::GeluTanh) => gelu_tanh_slope(x, by),
        Some(Activation::Relu) => select(x > 0.0f32, 1.0f32.runtime(), nothing(x)),
        Some(Activation::Sigmoid) => {
            let share = inverse(1.0f32 + exp(-x, by), by);
            share * (1.0f32 - share)
        }
        Some(Activation::Tanh) => {
            let value = x.tanh();
            1.0f32 - value * value
        }
        Some(Activation::HardSigmoid { scale, shift }) => {
            let line = x * comptime!(scale.value()) + comptime!(shift.value());
            let inside = line > 0.0f32 && line < 1.0f32;
            select(inside, comptime!(scale.value()).runtime(), nothing(x))
        }
        Some(Activation::HardSwish) => {
            let inside = x * comptime!(1.0f32 / 3.0) + 0.5f32;
            let above = select(x >= 3.0f32, 1.0f32.runtime(), inside);
            select(x <= -3.0f32, 0.0f32.runtime(), above)
        }
        Some(Activation::Clip { low, high }) => {
            // Equal to x where it is not clipped.
            let value = clipped(x, comptime!(low.value()), comptime!(high.value()));
            let inside = value == x && value != bound(low) && value != bound(high);
            select(inside, 1.0f32.runtime(), nothing(x))
        }
        Some(Activation::LeakyRelu { slope }) => {
            select(x > 0.0f32, 1.0f32.runtime(), comptime!(slope.value()) + nothing(x))
        }
    }
}

/// Returns a bound, or a large number in place of an infinite one.
#[cube]
fn bound(#[comptime] constant: Constant) -> f32 {
    let value = comptime!(constant.value().clamp(f32::MIN, f32::MAX));
    value.runtime()
}

/// Returns 0; a NaN stays one.
#[cube]
fn nothing(x: f32) -> f32 {
    select(x < 1.0f32 || x >= 1.0f32, 0.0f32.runtime(), x)
}

#[cube]
fn silu_slope(x: f32, #[comptime] by: Arithmetic) -> f32 {
    let share = inverse(1.0f32 + exp(-x, by), by);
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
fn gelu_tanh_slope(x: f32, #[comptime] by: Arithmetic) -> f32 {
    let twice = (x * x * x * 0.044_715f32 + x) * 1.595_769f32;
    let below = exp(-twice.abs(), by);
    let share = inverse(1.0f32 + below, by);
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

#[cube]
fn exp(x: f32, #[comptime] by: Arithmetic) -> f32 {
    match comptime!(by) {
        Arithmetic::Plain => x.exp(),
        Arithmetic::Ptx => exp2(x * std::f32::consts::LOG2_E),
    }
}

#[cube]
fn inverse(x: f32, #[comptime] by: Arithmetic) -> f32 {
    match comptime!(by) {
        Arithmetic::Plain => 1.0 / x,
        Arithmetic::Ptx => reciprocal(x),
    }
}
