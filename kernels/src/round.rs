//! The one rounding at the end of f32 arithmetic, to the nearest, ties to even; and to bytes.

use arch::{ArchProfile, DType};
use cubecl::prelude::*;

/// Returns whether a kernel rounds numbers itself before it stores them as `dtype`.
pub(crate) fn by_hand(arch: &ArchProfile, dtype: DType) -> bool {
    dtype == DType::Bf16 && arch.truncates_bf16()
}

/// The nearest number that `F` holds; NaN stays NaN.
#[cube]
pub(crate) fn rounded<F: Float>(x: f32, #[comptime] by_hand: bool) -> F {
    let mut x = x;
    if comptime!(by_hand) {
        let bits = u32::reinterpret(x);
        // A carry out of a NaN's mantissa would make it a number.
        let nan = (bits & 0x7fff_ffffu32) > 0x7f80_0000u32;
        x = select(nan, f32::reinterpret(bits | 0x7fc0_0000u32), round_to_bf16(x));
    }
    F::cast_from(x)
}

/// The nearest number that bf16 holds, the even one of two; `x` is not NaN.
#[cube]
pub(crate) fn round_to_bf16(x: f32) -> f32 {
    let bits = u32::reinterpret(x);
    f32::reinterpret((bits + 0x7fffu32 + ((bits >> 16) & 1)) & 0xffff_0000u32)
}

/// Two numbers as a word of bf16, the first in its low half: the nearest, and halfway the one further from 0, which costs an
/// addition where ties to even cost three. Neither is NaN.
#[cube]
pub(crate) fn pack_bf16(low: f32, high: f32) -> u32 {
    let low = u32::reinterpret(low) + 0x8000u32;
    let high = u32::reinterpret(high) + 0x8000u32;
    (low >> 16) | (high & 0xffff_0000u32)
}

/// The integer nearest to a number that is far below 2^22, the even one of two: the mantissa of 1.5 · 2^23 + x.
#[cube]
pub(crate) fn nearest(x: f32) -> i32 {
    i32::reinterpret(x + 12_582_912.0f32) - 0x4b40_0000i32
}

/// Numbers in 8 bits whose largest magnitude is smaller have scale 0: its inverse would be none.
pub(crate) const LEAST: f32 = 127.0 / f32::MAX;
