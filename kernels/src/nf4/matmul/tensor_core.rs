//! Functions of all tensor-core paths: decode codes and nested absmax, store rows.

use cubecl::prelude::*;

use super::Dims;
use crate::matmul::mma::store_quad;
use crate::matmul::{Columns, Finish};
use crate::nf4::{QuantizedPlan, QuantizedValues};
use crate::tile::{CopyPlan, copy_vector, global_address, load_shared, pack_pair, store_shared};

/// Bytes of the codebook of nested absmax.
pub(super) const NESTED_BYTES: u32 = 256 * 4;

/// Loads the first codebook value of nested absmax that a unit writes. An early load hides its latency.
#[cube]
pub(super) fn first_nested<NW: Size>(weight: &QuantizedValues<NW>, unit: u32) -> f32 {
    let mut first = 0.0f32.runtime();
    if comptime!(weight.plan.nested) {
        first = weight.nested_codebook[(unit % 256) as usize];
    }
    first
}

/// Writes the codebook of nested absmax to shared address `to`, if absmax are nested.
#[cube]
pub(super) fn fill_nested<NW: Size>(
    weight: &QuantizedValues<NW>,
    first: f32,
    to: u32,
    unit: u32,
    #[comptime] units: u32,
) {
    if comptime!(weight.plan.nested) {
        if unit < 256 {
            store_shared(to + unit * 4, first, 0u32);
        }
        let mut i = unit + units;
        while i < 256 {
            store_shared(to + i * 4, weight.nested_codebook[i as usize], 0u32);
            i += units;
        }
    }
}

/// Dequantises a nested absmax with the codebook at shared address `codebook`.
#[cube]
pub(super) fn unnest(codebook: u32, byte: u32, scale: f32, offset: f32) -> f32 {
    fma(load_shared(codebook + byte * 4, 0u32), scale, offset)
}

/// Selects bytes: each byte of the result is one of the eight bytes of `a` and `b`, chosen by a half byte of
/// `selector`. If the top bit of the half byte is set, the sign of the chosen byte fills the result byte.
#[cube]
pub(super) fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let out: u32;
    gpu_asm!(
        "prmt.b32 {out}, {a}, {b}, {selector};",
        out = out(_) out,
        a = in(_) u32::cast_from(a),
        b = in(_) u32::cast_from(b),
        selector = in(_) u32::cast_from(selector),
        options(pure, nomem)
    );
    out
}

/// Steps of 64 of k in each of `parts` except the last. They form whole quads, 256 of k each.
pub(super) const fn part_steps(k: u32, parts: u32) -> u32 {
    (k / 256).div_ceil(parts) * 4
}

/// Global addresses from which a unit copies the absmax of a row of the weight.
#[derive(CubeType)]
pub(super) struct AbsmaxFeed {
    /// absmax of the row's first quad, which is 256 of k; nested ones are one byte a step.
    absmax: u64,
    /// Scales and offsets of nested absmax.
    scales: u64,
    /// Quads of the weight before the row.
    quads: u32,
}

#[cube]
impl AbsmaxFeed {
    /// Creates the feed of a unit: unit 16·t + 2·r + h copies the absmax of row r + 8·h of `piece`, which has
    /// 16 rows.
    pub(super) fn new<NW: Size>(
        weight: &QuantizedValues<NW>,
        piece: u32,
        lane: u32,
        k: u32,
        #[comptime] plan: QuantizedPlan,
    ) -> AbsmaxFeed {
        let quads = k / 256;
        let each = comptime!(if plan.nested { 1u32 } else { 4u32 });
        let place = u64::cast_from(piece) * u64::cast_from(quads * comptime!(64 * each))
            + u64::cast_from(lane % 16 * comptime!(4 * each));
        AbsmaxFeed {
            absmax: global_address(&weight.absmax) + place,
            scales: global_address(&weight.scales),
            quads: (piece * 16 + lane % 2 * 8 + lane / 2 % 8) * quads,
        }
    }

    /// Issues the copies of step `step`: absmax to `to + far[0]`, scale and offset to `scales_to + far[1]`.
    pub(super) fn copy(
        &self,
        step: u32,
        to: u32,
        scales_to: u32,
        #[comptime] far: [u32; 2],
        #[comptime] plan: QuantizedPlan,
    ) {
        let (one, two) = comptime!((CopyPlan::words(1), CopyPlan::words(2)));
        let quad = step / 4;
        if comptime!(plan.nested) {
            // The four bytes of a quad, one a step.
            copy_vector(self.absmax + u64::cast_from(quad * 64), to, comptime!(far[0]), true, one);
            let group = (self.quads + quad) / comptime!(plan.block_size);
            let from = self.scales + u64::cast_from(group * 8);
            copy_vector(from, scales_to, comptime!(far[1]), true, two);
        } else {
            let from = self.absmax + u64::cast_from(quad * 256 + step % 4 * 4);
            copy_vector(from, to, comptime!(far[0]), true, one);
        }
    }
}

/// Loads the absmax at shared address `at` into both halves of a word. A nested absmax is the byte of step
/// `step`, with scale and offset at `scales`.
#[cube]
pub(super) fn load_absmax(
    at: u32,
    scales: u32,
    nested_codebook: u32,
    step: u32,
    #[comptime] nested: bool,
    #[comptime] bf16: bool,
) -> u32 {
    let size!(NP) = 2usize;
    let word = load_shared(at, 0u32);
    let mut value = f32::cast_from(word);
    if comptime!(nested) {
        // Split-k parts begin at multiples of four steps.
        let byte = (u32::reinterpret(word) >> (step % 4 * 8)) & 255;
        value = unnest(nested_codebook, byte, load_shared(scales, 0u32), load_shared(scales, 4u32));
    }
    pack_pair(Vector::<f32, NP>::new(value), bf16)
}

/// Codebook in halves, split into bytes: `low[i]` and `high[i]` hold the bytes of values 4i to 4i + 3.
#[derive(CubeType)]
pub(super) struct HalfCodebook {
    low: Array<u32>,
    high: Array<u32>,
}

#[cube]
impl HalfCodebook {
    pub(super) fn new(codebook: &[f32], #[comptime] bf16: bool) -> HalfCodebook {
        let size!(NP) = 2usize;
        let mut low = Array::<u32>::new(4usize);
        let mut high = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let mut words = Array::<u32>::new(2usize);
            #[unroll]
            for p in 0..2usize {
                let mut pair = Vector::<f32, NP>::new(0.0f32);
                pair.insert(0usize, codebook[comptime!(4 * i + 2 * p)]);
                pair.insert(1usize, codebook[comptime!(4 * i + 2 * p + 1)]);
                words[p] = pack_pair(pair, bf16);
            }
            low[i] = permute(words[0], words[1], 0x6420u32.runtime());
            high[i] = permute(words[0], words[1], 0x7531u32.runtime());
        }
        HalfCodebook { low, high }
    }
}

/// Decodes bytes `2·bytes` and `2·bytes + 1` of a word of codes, each to a pair of halves times the absmax.
/// `scale` holds the absmax twice.
#[cube]
pub(super) fn decode_pairs(
    word: u32,
    scale: u32,
    codebook: &HalfCodebook,
    #[comptime] bytes: usize,
    #[comptime] bf16: bool,
) -> (u32, u32) {
    let shift = comptime!(16 * bytes as u32);
    let which = (word & 0x7777_7777u32) >> shift;
    // Selector of each code: 0 takes byte 0 of the constant below, 9 takes the sign of its byte 1, spread
    // over the byte.
    let top = word & 0x8888_8888u32;
    let upper = (top | (top >> 3)) >> shift;
    let mask = permute(0x8000u32.runtime(), 0u32.runtime(), upper);
    let low = choose(
        mask,
        permute(codebook.low[0], codebook.low[1], which),
        permute(codebook.low[2], codebook.low[3], which),
    );
    let high = choose(
        mask,
        permute(codebook.high[0], codebook.high[1], which),
        permute(codebook.high[2], codebook.high[3], which),
    );
    // The high half of a byte is the first value of its pair.
    let first = permute(low, high, 0x4051u32.runtime());
    let second = permute(low, high, 0x6273u32.runtime());
    (times(first, scale, bf16), times(second, scale, bf16))
}

/// Takes the bits of `yes` where `mask` is set, else those of `no`.
#[cube]
fn choose(mask: u32, no: u32, yes: u32) -> u32 {
    (mask & yes) | (!mask & no)
}

/// Multiplies two pairs of halves.
#[cube]
fn times(a: u32, b: u32, #[comptime] bf16: bool) -> u32 {
    let kind = comptime!(if bf16 { "bf16x2" } else { "f16x2" });
    let out: u32;
    // Adding -0 changes nothing; sm_89 has no bf16 multiply without an addition.
    gpu_asm!(
        "fma.rn.{kind} {out}, {a}, {b}, {zero};",
        out = out(_) out,
        a = in(_) u32::cast_from(a),
        b = in(_) u32::cast_from(b),
        zero = in(_) 0x8000_8000u32.runtime(),
        options(pure, nomem)
    );
    out
}

/// Layout of a unit's sums of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RowPlan {
    /// Number of pairs of neighbouring columns, eight columns apart; a multiple of four.
    pub(super) pairs: usize,
    /// True if the first half of the pairs gates the second half.
    pub(super) glu: bool,
    /// True if the sums are those of a split-k part.
    pub(super) partial: bool,
}

/// Stores a unit's sums of row `row`, from column `col` of y on.
#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
pub(super) fn store_row<F: Float, NC: Size, NO: Size>(
    out: &mut [Vector<F, NO>],
    partials: &mut [f32],
    finish: &Finish<F, F, NO>,
    sums: &Array<Vector<f32, NC>>,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: RowPlan,
) {
    let columns = Columns { first: 0usize.runtime(), count: dims.n };
    if comptime!(plan.partial) {
        store_partials(partials, sums, row, col, lane, dims, plan);
    } else if comptime!(plan.glu) {
        store_gated(out, finish, sums, row, col, lane, &columns, plan);
    } else {
        let line = row as usize * dims.n as usize;
        #[unroll]
        for quad in 0..comptime!(plan.pairs / 4) {
            let mut pairs = Array::<Vector<f32, NC>>::new(4usize);
            #[unroll]
            for j in 0..4usize {
                pairs[j] = sums[comptime!(4 * quad + j)];
            }
            let col = col + comptime!(32 * quad as u32);
            let mine = col + lane % 4 * 8;
            let first = finish.ahead((line + mine as usize) / 8, mine < dims.n);
            store_quad::<F, F, NC, NO>(
                out, finish, &mut pairs, first, line, col, lane, &columns, false,
            );
        }
    }
}

#[cube]
fn store_partials<NC: Size>(
    partials: &mut [f32],
    pairs: &Array<Vector<f32, NC>>,
    row: u32,
    col: u32,
    lane: u32,
    dims: &Dims,
    #[comptime] plan: RowPlan,
) {
    let line = (CUBE_POS_Y * dims.m + row) as usize * dims.n as usize;
    let half = dims.n / 2;
    #[unroll]
    for j in 0..comptime!(plan.pairs) {
        let (near, second) = comptime!(match plan.glu {
            true => (j % (plan.pairs / 2), j >= plan.pairs / 2),
            false => (j, false),
        });
        let mine = col + comptime!(8 * near as u32) + lane % 4 * 2;
        let end = if comptime!(plan.glu) { half } else { dims.n };
        if mine < end {
            let far = if comptime!(second) { half } else { 0u32.runtime() };
            let at = line + (mine + far) as usize;
            partials[at] = pairs[j].extract(0usize);
            partials[at + 1] = pairs[j].extract(1usize);
        }
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "one matrix, one place, one edge")]
fn store_gated<F: Float, NC: Size, NO: Size>(
    out: &mut [Vector<F, NO>],
    finish: &Finish<F, F, NO>,
    pairs: &Array<Vector<f32, NC>>,
    row: u32,
    col: u32,
    lane: u32,
    columns: &Columns,
    #[comptime] plan: RowPlan,
) {
    let half = columns.count / 2;
    #[unroll]
    for j in 0..comptime!(plan.pairs / 2) {
        let mine = col + comptime!(8 * j as u32) + lane % 4 * 2;
        if mine < half {
            let at = (row as usize * half as usize + mine as usize) / 2;
            let sums = (pairs[j], pairs[comptime!(j + plan.pairs / 2)]);
            let value = finish.vector_of_two::<NC>(sums, at, (mine, half + mine), columns);
            out[at] = Vector::cast_from(value);
        }
    }
}
