//! 4-bit weights for [`dequant`](crate::dequant): `codebook[code] · absmax` in f32, rounded once, as in a dense
//! weight. The 32 codes of a vector share one absmax.
//!
//! Decoding takes one codebook read and about 10 instructions a code.
//!
//! Ladder in us at m = 4 / 16 / 64 / 128 (14336 x 4096 in rows, bf16, H200 through Vulkan; a dense weight
//! with its matmul takes 106 at m = 16, `Gemv` 113 at m = 8):
//!
//! | version                                                                  |  4 | 16 | 64 | 128 |
//! |--------------------------------------------------------------------------|----|----|----|-----|
//! | v1 read while a tile is multiplied                                       | 48 | 45 | 76 | 127 |
//! | v2 v1, read before a tile is decoded, nested book in shared memory (dropped) | 50 | 49 | 75 | 124 |
//!
//! v2 is no faster, so the reads are not the bottleneck. 4 and 16 rows take the same time, so decoding is.

use cubecl::prelude::*;

use crate::cooperative::U32x4;
use crate::dequant::Dequantize;
use crate::nf4::{QuantizedValues, code_shift};
use crate::round::pack_bf16;

#[cube]
impl<NW: Size> Dequantize for QuantizedValues<NW> {
    fn fill(this: &Self, codebook: &mut [f32], unit: u32) {
        if unit < 16 {
            codebook[unit as usize] = this.codebook[unit as usize];
        }
    }

    fn read(
        this: &Self,
        words: &mut Array<u32>,
        shared: &mut Array<f32>,
        row: u32,
        vector: u32,
        k: u32,
        #[comptime] i: usize,
    ) {
        let flat = row * (k / 32) + vector;
        let four = this.codes[flat as usize];
        #[unroll]
        for w in 0..4usize {
            words[comptime!(4 * i + w)] = four.extract(w);
        }
        shared[i] = this.absmax_of_word(4 * flat, row, 4 * vector, k);
    }

    fn decode<F: Float>(
        into: &mut [U32x4],
        to: u32,
        words: &Array<u32>,
        shared: &Array<f32>,
        codebook: &[f32],
        #[comptime] i: usize,
        #[comptime] bf16: bool,
    ) {
        #[unroll]
        for w in 0..4usize {
            let eight = words[comptime!(4 * i + w)];
            let mut word = U32x4::new(0u32);
            #[unroll]
            for part in 0..4usize {
                let (first, second) = comptime!((2 * part as u32, 2 * part as u32 + 1));
                let low = codebook[((eight >> comptime!(code_shift(first))) & 15) as usize];
                let high = codebook[((eight >> comptime!(code_shift(second))) & 15) as usize];
                let (low, high) = (low * shared[i], high * shared[i]);
                if comptime!(bf16) {
                    word.insert(part, pack_bf16(low, high));
                } else {
                    let mut pair = Vector::<F, Const<2>>::new(F::cast_from(low));
                    pair.insert(1usize, F::cast_from(high));
                    word.insert(part, u32::reinterpret(pair));
                }
            }
            into[(to + comptime!(w as u32)) as usize] = word;
        }
    }

    fn dequantize(_this: &Self, sum: f32, _row: u32, _k: u32) -> f32 {
        sum
    }
}
