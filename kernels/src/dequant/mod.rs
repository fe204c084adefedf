//! Loops over quantised weights. A format only defines how a block of codes and its scale become values.
//!
//! | loop           | multiplies with       | used for                             | trait of the format                 |
//! |----------------|-----------------------|--------------------------------------|-------------------------------------|
//! | [`subgroup`]   | matrices of a plane   | 3 to 256 rows of x, through Vulkan   | [`Dequantize`]                      |
//! | [`gemv`]       | multiply-adds         | few rows of x, any device            | [`DequantizeBytes`], codes in bytes |
//! | [`dequantize`] | no matmul             | a dense weight                       | [`DequantizeBytes`]                 |

pub(crate) mod dequantize;
pub(crate) mod gemv;
mod subgroup;

use cubecl::prelude::*;

pub use dequantize::DequantizeConfig;
pub use gemv::GemvConfig;
pub use subgroup::SubgroupConfig;
pub(crate) use subgroup::{
    Dims, SubgroupPlan, SubgroupProblem, candidates, check, plan, subgroup_matmul,
};

use crate::cooperative::U32x4;

/// A quantised weight `[n, k]`, row-major.
#[cube]
pub(crate) trait Dequantize: CubeType {
    /// Fills the codebook, 16 numbers, with the first units of a cube.
    fn fill(this: &Self, codebook: &mut [f32], unit: u32);

    /// Reads 16 bytes of codes, vector `vector` of row `row`, into words `4·i` to `4·i + 3`. Their shared
    /// scale goes to `shared[i]`.
    fn read(
        this: &Self,
        words: &mut Array<u32>,
        shared: &mut Array<f32>,
        row: u32,
        vector: u32,
        k: u32,
        #[comptime] i: usize,
    );

    /// Dequantises a vector into a tile, from word `to` on. Values are rounded to bf16 by hand or converted
    /// to F.
    fn decode<F: Float>(
        into: &mut [U32x4],
        to: u32,
        words: &Array<u32>,
        shared: &Array<f32>,
        codebook: &[f32],
        #[comptime] i: usize,
        #[comptime] bf16: bool,
    );

    /// Applies the scale of row `row` to a sum of products.
    fn dequantize(this: &Self, sum: f32, row: u32, k: u32) -> f32;
}

/// A quantised weight `[n, k]` with one code per byte, row-major: `value = scale_by_block(code, block) · row`.
#[cube]
pub(crate) trait DequantizeBytes<NW: Size>: CubeType {
    /// Number of vectors of codes.
    fn vectors(this: &Self) -> u32;

    /// Reads vector `at` of the codes, [lifted].
    fn codes(this: &Self, at: usize) -> Vector<u32, NW>;

    /// Reads the scale of the block that holds vector `at`, if blocks have scales.
    fn block(this: &Self, at: usize) -> f32;

    /// Reads the scale of a row, if rows have scales.
    fn row(this: &Self, row: usize) -> f32;

    /// Multiplies a code by the scale of its block.
    fn scale_by_block(code: f32, block: f32) -> f32;

    /// Multiplies a block-scaled code, or a sum of them, by the scale of its row.
    fn scale_by_row(sum: f32, row: f32, k: u32) -> f32;
}

/// Adds 128 to each code of a word, as [`code_of`] expects.
#[cube]
pub(crate) fn lifted<N: Size>(word: Vector<u32, N>) -> Vector<u32, N> {
    word ^ Vector::new(0x8080_8080u32)
}

/// Returns code `e` of a lifted word: the mantissa of 2^23 + 128 + code, minus the offset. A conversion
/// instruction runs at a quarter of the rate.
#[cube]
pub(crate) fn code_of(lifted: u32, #[comptime] e: u32) -> f32 {
    let byte = (lifted >> comptime!(8 * e)) & 255u32;
    f32::reinterpret(byte | 0x4b00_0000u32) - 8_388_736.0f32
}

/// Number of words of a vector that lies in one row of `k` codes, at most `widest`. None if a row is not
/// whole words.
pub(crate) fn together(k: u32, widest: u32) -> Option<u32> {
    [4, 2, 1].into_iter().find(|words| *words <= widest && k % (4 * words) == 0)
}
