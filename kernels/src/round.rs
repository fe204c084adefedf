//! Rounding at the end of f32 arithmetic, to the nearest with ties to even, and quantisation to bytes.

use arch::{ArchProfile, DType};
use cubecl::prelude::*;

/// Returns whether a kernel must round numbers itself before it stores them as `dtype`.
pub(crate) fn by_hand(arch: &ArchProfile, dtype: DType) -> bool {
    dtype == DType::Bf16 && arch.truncates_bf16()
}

/// Rounds to the nearest value of `F`. NaN stays NaN.
#[cube]
pub(crate) fn rounded<F: Float>(x: f32, #[comptime] by_hand: bool) -> F {
    let mut x = x;
    if comptime!(by_hand) {
        let bits = u32::reinterpret(x);
        // A carry out of a NaN's mantissa would turn it into a number.
        let nan = (bits & 0x7fff_ffffu32) > 0x7f80_0000u32;
        x = select(nan, f32::reinterpret(bits | 0x7fc0_0000u32), round_to_bf16(x));
    }
    F::cast_from(x)
}

/// Rounds to the nearest bf16 value, ties to even. `x` must not be NaN.
#[cube]
pub(crate) fn round_to_bf16(x: f32) -> f32 {
    let bits = u32::reinterpret(x);
    f32::reinterpret((bits + 0x7fffu32 + ((bits >> 16) & 1)) & 0xffff_0000u32)
}

/// Packs two numbers into a word of bf16, the first in its low half. Ties round away from 0, which costs one
/// addition instead of three for ties to even. Neither number may be NaN.
#[cube]
pub(crate) fn pack_bf16(low: f32, high: f32) -> u32 {
    let low = u32::reinterpret(low) + 0x8000u32;
    let high = u32::reinterpret(high) + 0x8000u32;
    (low >> 16) | (high & 0xffff_0000u32)
}

/// Rounds to the nearest integer, ties to even: the mantissa of 1.5 · 2^23 + x. The magnitude of `x` must be
/// far below 2^22.
#[cube]
pub(crate) fn nearest(x: f32) -> i32 {
    i32::reinterpret(x + 12_582_912.0f32) - 0x4b40_0000i32
}

/// Largest magnitude below which numbers in 8 bits get scale 0, because the inverse scale would overflow.
pub(crate) const LEAST: f32 = 127.0 / f32::MAX;
