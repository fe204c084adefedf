//! Instructions on pairs and fragments in registers.

use cubecl::prelude::*;

/// Returns `a · b + c` for two pairs of bf16, each rounded once.
#[cube]
pub(crate) fn fma_pairs(a: u32, b: u32, c: u32) -> u32 {
    let pair: u32;
    gpu_asm!(
        "fma.rn.bf16x2 {pair}, {a}, {b}, {c};",
        pair = out(_) pair,
        a = in(_) u32::cast_from(a),
        b = in(_) u32::cast_from(b),
        c = in(_) u32::cast_from(c),
        options(pure, nomem)
    );
    pair
}

/// Returns `len` words of a fragment from word `from` on, in the type of the instruction.
#[cube]
pub(crate) fn typed<I: Float, NF: Size>(
    words: &Array<u32>,
    #[comptime] from: usize,
    #[comptime] len: usize,
) -> Array<Vector<I, NF>> {
    let mut out = Array::<Vector<I, NF>>::new(len);
    #[unroll]
    for i in 0..len {
        out[i] = Vector::reinterpret(words[comptime!(from + i)]);
    }
    out
}

/// Computes `sums += left · right` in f16 for a 16 x 16 fragment and the 16 x 8 fragment that starts at word
/// `from`.
#[cube]
pub(crate) fn multiply_halves(
    left: &Array<u32>,
    right: &Array<u32>,
    #[comptime] from: usize,
    sums: &mut Array<u32>,
) {
    let out: Vector<u32, Const<2>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {out}, {{{a}, {b}, {c}, {d}}}, {{{e}, {f}}}, {{{g}, {h}}};",
        out = out(_) out,
        a = in(_) u32::cast_from(left[0]),
        b = in(_) u32::cast_from(left[1]),
        c = in(_) u32::cast_from(left[2]),
        d = in(_) u32::cast_from(left[3]),
        e = in(_) u32::cast_from(right[from]),
        f = in(_) u32::cast_from(right[comptime!(from + 1)]),
        g = in(_) u32::cast_from(sums[0]),
        h = in(_) u32::cast_from(sums[1]),
        options(nomem)
    );
    sums[0] = out.extract(0usize);
    sums[1] = out.extract(1usize);
}

/// Computes `sums += left · right` in i8 for a 16 x 32 fragment and the 32 x 8 fragment that starts at word
/// `from`.
#[cube]
pub(crate) fn multiply_bytes(
    left: &Array<u32>,
    right: &Array<u32>,
    #[comptime] from: usize,
    sums: &mut Array<u32>,
) {
    let out: Vector<u32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {out}, {{{a}, {b}, {c}, {d}}}, {{{e}, {f}}}, {{{g}, {h}, {i}, {j}}};",
        out = out(_) out,
        a = in(_) u32::cast_from(left[0]),
        b = in(_) u32::cast_from(left[1]),
        c = in(_) u32::cast_from(left[2]),
        d = in(_) u32::cast_from(left[3]),
        e = in(_) u32::cast_from(right[from]),
        f = in(_) u32::cast_from(right[comptime!(from + 1)]),
        g = in(_) u32::cast_from(sums[0]),
        h = in(_) u32::cast_from(sums[1]),
        i = in(_) u32::cast_from(sums[2]),
        j = in(_) u32::cast_from(sums[3]),
        options(nomem)
    );
    #[unroll]
    for i in 0..4usize {
        sums[i] = out.extract(i);
    }
}

/// Returns 2 to the power x, to 2 ulps; 0 below 2^-126.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
    y
}

/// Returns 1 / x, to 1 ulp.
#[cube]
pub(crate) fn reciprocal(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("rcp.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) x, options(pure, nomem));
    y
}

/// Rounds two numbers to half precision and packs them, the first in the low half of the word.
#[cube]
pub(crate) fn pack_pair<N: Size>(pair: Vector<f32, N>, #[comptime] bf16: bool) -> u32 {
    let (low, high) = (pair.extract(0usize), pair.extract(1usize));
    let kind = comptime!(if bf16 { "bf16x2" } else { "f16x2" });
    let word: u32;
    gpu_asm!(
        "cvt.rn.{kind}.f32 {word}, {high}, {low};",
        word = out(_) word,
        high = in(_) high,
        low = in(_) low,
        options(pure, nomem)
    );
    word
}
