//! Fragments of keys, values and scores, from 16-bit or i8 tiles.
//!
//! Registers convert an i8 exactly to a 16-bit float. A word that `ldmatrix` gives a unit holds
//! four neighbours of one key, whereas the instruction expects two pairs eight apart. The sum over
//! the head dimension allows any order, so the queries are loaded in the same order. A word of V,
//! transposed in pairs of bytes, has two columns of two keys. They become rows r and r + 8 of the
//! fragment, and columns 2r and 2r + 1 of the result.

use cubecl::prelude::*;

use super::plan::SplitPlan;
use super::scores::Scores;
use crate::attention::tiles::along;
use crate::tile::{TileShape, load_fragments, load_shared};

/// Issues the loads of batch `batch` from the tile whose fragments start at `from`.
#[cube]
pub(crate) fn load_batch<F: Float>(
    words: &mut Sequence<Array<u32>>,
    from: u32,
    #[comptime] batch: usize,
    #[comptime] shape: TileShape,
    #[comptime] plan: SplitPlan,
) {
    #[unroll]
    for i in 0..comptime!(plan.at_once()) {
        let which = comptime!(batch * plan.at_once() + i);
        let (t, load) = comptime!((which / plan.loads(), which % plan.loads()));
        if comptime!(t < plan.tile_kv() as usize / 16) {
            let (twist, add) = comptime!(along(load as u32));
            let far = comptime!(16 * t as u32 * shape.row_bytes() + add);
            load_fragments::<F>(from ^ twist, words.index_mut(i), far, shape, false);
        }
    }
}

/// Lhs fragment of 16 keys by 16 of the head dimension, from part `part` of a load.
#[cube]
pub(crate) fn keys_of(
    words: &Array<u32>,
    #[comptime] part: usize,
    #[comptime] plan: SplitPlan,
) -> Array<u32> {
    let part = comptime!(part % plan.per_load());
    let mut out = Array::<u32>::new(4usize);
    #[unroll]
    for r in 0..4usize {
        if comptime!(plan.cache.quantized) {
            let word = words[comptime!(2 * part + r % 2)];
            out[r] = widen(word, comptime!([0x4140u32, 0x4140, 0x4342, 0x4342][r]), plan.bf16);
        } else {
            out[r] = words[r];
        }
    }
    out
}

/// Lhs fragment of 16 of the head dimension by 16 keys, from part `part` of a load.
#[cube]
pub(crate) fn values_of(
    words: &Array<u32>,
    #[comptime] part: usize,
    #[comptime] plan: SplitPlan,
) -> Array<u32> {
    let part = comptime!(part % plan.per_load());
    let mut out = Array::<u32>::new(4usize);
    #[unroll]
    for r in 0..4usize {
        if comptime!(plan.cache.quantized) {
            let word = words[comptime!(part + r / 2 * 2)];
            out[r] = widen(word, comptime!([0x4240u32, 0x4341, 0x4240, 0x4341][r]), plan.bf16);
        } else {
            out[r] = words[r];
        }
    }
    out
}

/// Multiplies the scores of every key by the key's scale; scales start at address `at`.
#[cube]
pub(crate) fn multiply_rows<NC: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    at: u32,
    #[comptime] plan: SplitPlan,
) {
    let fragments = comptime!(plan.fragments as usize);
    #[unroll]
    for t in 0..comptime!(plan.tile_kv() as usize / 16) {
        #[unroll]
        for half in 0..2usize {
            let scale = load_shared(at, comptime!((64 * t + 32 * half) as u32));
            #[unroll]
            for f in 0..fragments {
                let fragment = s.index_mut(comptime!(t * fragments + f));
                fragment[half] *= Vector::new(scale);
            }
        }
    }
}

/// Applies the rules to the scores of a tile whose first key is `first_key`.
#[cube]
pub(crate) fn finish<NC: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    first_key: u32,
    position: &Array<i32>,
    newest: i32,
    length: u32,
    scores: &Scores,
    #[comptime] plan: SplitPlan,
) {
    let (tile_kv, fragments) = comptime!((plan.tile_kv(), plan.fragments as usize));
    if comptime!(scores.rules.softcap) {
        #[unroll]
        for at in 0..comptime!(tile_kv as usize / 16 * fragments) {
            let fragment = s.index_mut(at);
            #[unroll]
            for half in 0..2usize {
                let mut pair = fragment[half];
                #[unroll]
                for e in 0..2usize {
                    pair.insert(e, scores.score(pair.extract(e)));
                }
                fragment[half] = pair;
            }
        }
    }
    // Mask only tiles that the causal mask or the window cuts.
    let mut cut = (first_key + tile_kv) as i32 > newest + 1;
    if comptime!(scores.rules.window) {
        cut = cut || (first_key as i32) < scores.first(length as i32 - 1);
    }
    if cut {
        #[unroll]
        for at in 0..comptime!(tile_kv as usize / 16 * fragments) {
            let fragment = s.index_mut(at);
            #[unroll]
            for half in 0..2usize {
                let key = (first_key
                    + comptime!((16 * (at / fragments) + 8 * half) as u32)
                    + UNIT_POS_X / 4) as i32;
                let mut pair = fragment[half];
                #[unroll]
                for e in 0..2usize {
                    let position = position[comptime!(2 * (at % fragments) + e)];
                    let seen = key <= position && key >= scores.first(position);
                    pair.insert(e, select(seen, pair.extract(e), f32::NEG_INFINITY));
                }
                fragment[half] = pair;
            }
        }
    }
}

/// Maximum of this unit's scores of its query `r`.
#[cube]
pub(crate) fn top<NC: Size>(
    s: &Sequence<Array<Vector<f32, NC>>>,
    #[comptime] r: usize,
    #[comptime] plan: SplitPlan,
) -> f32 {
    let fragments = comptime!(plan.fragments as usize);
    let (f, e) = comptime!((r / 2, r % 2));
    let mut row_max = max(s.index(f)[0].extract(e), s.index(f)[1].extract(e));
    #[unroll]
    for t in 1..comptime!(plan.tile_kv() as usize / 16) {
        let fragment = s.index(comptime!(t * fragments + f));
        row_max = max(row_max, max(fragment[0].extract(e), fragment[1].extract(e)));
    }
    row_max
}

/// Converts two signed bytes of `word` exactly to 16-bit floats. `selector` places them in the even
/// bytes of `prmt`'s result. The odd bytes become the upper byte of a power of two whose last
/// mantissa bit is worth 1.
///
/// f16: a byte with its sign flipped is 128 too large, and 0x64 above it adds 1024; one subtraction
/// removes both. bf16 has one mantissa bit less. With 0x43 above them, the lower seven bits read as
/// 128 plus their value. The sign bit becomes the exponent's last bit: alone it reads as 128, or as
/// 256 for a negative byte. The difference of the two is the number.
#[cube]
fn widen(word: u32, #[comptime] selector: u32, #[comptime] bf16: bool) -> u32 {
    let pair: u32;
    if comptime!(bf16) {
        gpu_asm!(
            "{{ .reg .b32 t, a, b, one; mov.b32 one, 0x3f803f80; mov.b32 t, 0x43434343;",
            "prmt.b32 t, {word}, t, {selector}; and.b32 a, t, 0xff7fff7f;",
            "and.b32 b, t, 0xff80ff80; or.b32 b, b, 0x80008000;",
            "fma.rn.bf16x2 {pair}, a, one, b; }}",
            pair = out(_) pair,
            word = in(_) u32::cast_from(word),
            options(pure, nomem)
        );
    } else {
        gpu_asm!(
            "{{ .reg .b32 t, m, c; xor.b32 t, {word}, 0x80808080; mov.b32 m, 0x64646464;",
            "prmt.b32 t, t, m, {selector}; mov.b32 c, 0x64806480;",
            "sub.rn.f16x2 {pair}, t, c; }}",
            pair = out(_) pair,
            word = in(_) u32::cast_from(word),
            options(pure, nomem)
        );
    }
    pair
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    /// Repeats the arithmetic of [`super::widen`] for one byte.
    #[test]
    fn every_byte_is_widened_exactly() {
        for byte in i8::MIN..=i8::MAX {
            let bits = u16::from(byte.cast_unsigned());
            let flipped = f16::from_bits(0x6400 | (bits ^ 0x80));
            assert_eq!((flipped - f16::from_bits(0x6480)).to_f32(), f32::from(byte));
            let whole = 0x4300 | bits;
            let (low, sign) = (bf16::from_bits(whole & 0xff7f), bf16::from_bits(whole & 0xff80));
            assert_eq!(f32::from(byte), (low - sign).to_f32());
        }
    }
}
