//! Loops over quantised weights, for formats that only say how a block of codes and its scale become values.
//!
//! | loop          | multiplies with       | for                                  | a format says                |
//! |---------------|-----------------------|--------------------------------------|------------------------------|
//! | [`plane`]     | matrices of a plane   | 3 to 256 rows of x, through Vulkan   | [`Coded`]                    |
//! | [`gemv`]      | multiply-adds         | few rows of x, any device            | [`ByteCoded`], codes in bytes |
//! | [`dequantize`] | nothing              | a dense weight                       | [`ByteCoded`]                |

pub(crate) mod dequantize;
pub(crate) mod gemv;
mod plane;

use cubecl::prelude::*;

pub use dequantize::DequantizeConfig;
pub use gemv::GemvConfig;
pub use plane::PlaneConfig;
pub(crate) use plane::{CodedProblem, Dims, PlanePlan, candidates, check, plan, planes};

use crate::cooperative::Word;

/// A weight in codes, `[n, k]`, row after row.
#[cube]
pub(crate) trait Coded: CubeType {
    /// Fills what codes are looked up in, 16 numbers, by the first units of a cube.
    fn fill(this: &Self, book: &mut [f32], unit: u32);

    /// Reads 16 bytes of codes, the vector `vector` of row `row`, into words `4·i` and on, and what they share into
    /// `shared[i]`.
    fn read(
        this: &Self,
        words: &mut Array<u32>,
        shared: &mut Array<f32>,
        row: u32,
        vector: u32,
        k: u32,
        #[comptime] i: usize,
    );

    /// Puts what a vector's codes stand for into words `to` and on of a tile, rounded to bf16 by hand or to F.
    fn decode<F: Float>(
        into: &mut [Word],
        to: u32,
        words: &Array<u32>,
        shared: &Array<f32>,
        book: &[f32],
        #[comptime] i: usize,
        #[comptime] bf16: bool,
    );

    /// Dequantises a sum of products with row `row` of the weight.
    fn dequantize(this: &Self, sum: f32, row: u32, k: u32) -> f32;
}

/// A weight in codes of a byte, `[n, k]`, row after row: `value = weigh(code, block) · row`.
#[cube]
pub(crate) trait ByteCoded<NW: Size>: CubeType {
    /// Number of vectors of codes.
    fn vectors(this: &Self) -> u32;

    /// Reads vector `at` of the codes, [lifted].
    fn codes(this: &Self, at: usize) -> Vector<u32, NW>;

    /// Reads the scale that the codes of vector `at` share, where that is no row's.
    fn block(this: &Self, at: usize) -> f32;

    /// Reads the scale of a row, where rows have one.
    fn row(this: &Self, row: usize) -> f32;

    /// Multiplies a code by its block's scale.
    fn weigh(code: f32, block: f32) -> f32;

    /// Multiplies a weighed code, or a sum of them, by its row's scale.
    fn scaled(sum: f32, row: f32, k: u32) -> f32;
}

/// A word whose codes count from 0 on, as [`code_of`] takes it.
#[cube]
pub(crate) fn lifted<N: Size>(word: Vector<u32, N>) -> Vector<u32, N> {
    word ^ Vector::new(0x8080_8080u32)
}

/// Code `e` of a lifted word's four: the mantissa of 2^23 + 128 + code. A conversion would take a fourth of the rate.
#[cube]
pub(crate) fn code_of(lifted: u32, #[comptime] e: u32) -> f32 {
    let byte = (lifted >> comptime!(8 * e)) & 255u32;
    f32::reinterpret(byte | 0x4b00_0000u32) - 8_388_736.0f32
}

/// Words of a vector that lies in one row of `k` codes of a byte, at most `widest` of them; none where rows are no whole
/// words.
pub(crate) fn together(k: u32, widest: u32) -> Option<u32> {
    [4, 2, 1].into_iter().find(|words| *words <= widest && k % (4 * words) == 0)
}
