//! Fragments of matrix instructions: their layout in a shared tile, and exchange between units.

use cubecl::prelude::*;

use super::{TileShape, offset_in_tile};

/// Returns the offset of a unit's `ldmatrix` row of the left operand in a tile. The fragment is at row `row`
/// and k = 0 of a `[m, k]` tile, or of a transposed `[k, m]` tile. Fragments a multiple of eight rows further
/// on are at a constant distance. Along the columns the swizzle makes the distance an XOR with the bytes
/// between.
#[cube]
pub(crate) fn lhs_lane(row: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    let chunk = comptime!(shape.chunk() as u32);
    let (r, j) = (lane % 8, lane / 8);
    if comptime!(shape.transposed) {
        offset_in_tile(r + (j / 2) * 8, row + (j % 2) * chunk, shape)
    } else {
        offset_in_tile(row + r + (j % 2) * 8, (j / 2) * chunk, shape)
    }
}

/// As [`lhs_lane`], for two neighbouring 8-column fragments of the right operand at column `col` of an `[n,
/// k]` tile, or of a transposed `[k, n]` tile.
#[cube]
pub(crate) fn rhs_lane(col: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    let chunk = comptime!(shape.chunk() as u32);
    let (r, j) = (lane % 8, lane / 8);
    if comptime!(shape.transposed) {
        offset_in_tile(r + (j % 2) * 8, col + (j / 2) * 8, shape)
    } else {
        offset_in_tile(col + r + (j / 2) * 8, (j % 2) * chunk, shape)
    }
}

/// Returns the offset of a unit's elements of a transposed 4-byte tile, which `ldmatrix` cannot transpose:
/// element `(lane % 4, outer + lane / 4)`. Rows a multiple of four and columns a multiple of 32 further on
/// are at constant distances.
#[cube]
pub(crate) fn gather_lane(outer: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    offset_in_tile(lane % 4, outer + lane / 4, shape)
}

/// Loads the four registers of `ldmatrix` from the rows at `at + far`, where `at` is the stage plus
/// [`lhs_lane`] or [`rhs_lane`]. They are one 16-row fragment of the left operand, or two neighbouring
/// 8-column fragments of the right operand.
#[cube]
pub(crate) fn load_fragments<I: Float>(
    at: u32,
    into: &mut Array<u32>,
    #[comptime] far: u32,
    #[comptime] shape: TileShape,
    #[comptime] rounds_tf32: bool,
) {
    let trans = comptime!(if shape.transposed { ".trans" } else { "" });
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {words}, [{at}+{far}];",
        words = out(_) words,
        at = in(_) at,
        options(explicit_mem, reads_address_space shared)
    );
    #[unroll]
    for i in 0..4usize {
        into[i] = to_instruction::<I>(words.extract(i), shape, rounds_tf32);
    }
}

/// As [`load_fragments`], element by element, for transposed 4-byte tiles. It loads the fragment at `(k,
/// outer)` of the tile at `tile`; register `r` is offset by `registers[r]` = (outer, k). `lanes` are the
/// [`gather_lane`]s of the first columns, eight apart.
#[cube]
pub(crate) fn gather_fragments<I: Float>(
    tile: u32,
    lanes: &Sequence<u32>,
    into: &mut Array<u32>,
    #[comptime] at: (u32, u32),
    #[comptime] shape: TileShape,
    #[comptime] registers: [(u32, u32); 4],
    #[comptime] rounds_tf32: bool,
) {
    #[unroll]
    for r in 0..4usize {
        let (outer, k) = comptime!((at.0 + registers[r].0, at.1 + registers[r].1));
        let far = comptime!(k * shape.row_bytes() + outer / 32 * 128);
        let lane = *lanes.index(comptime!((outer / 8 % 4) as usize));
        let word: u32;
        gpu_asm!(
            "ld.shared.b32 {word}, [{at}+{far}];",
            word = out(_) word,
            at = in(_) tile + lane,
            options(explicit_mem, reads_address_space shared)
        );
        into[r] = to_instruction::<I>(word, shape, rounds_tf32);
    }
}

/// Returns the offset of a unit's half chunks in a tile: four neighbours along k of row `row + lane / 4`.
/// Rows a multiple of eight further on are at constant distances. Chunks an even number further on are an XOR
/// away.
#[cube]
pub(crate) fn half_chunk_lane(row: u32, lane: u32, #[comptime] shape: TileShape) -> u32 {
    offset_in_tile(row + lane / 4, lane % 4 * 4, shape)
}

/// Loads the registers of a 16 x 16 left fragment in the k order of packed values, from the rows at `at +
/// far` and eight below. `at` is the stage plus [`half_chunk_lane`].
#[cube]
pub(crate) fn load_half_chunks(
    at: u32,
    into: &mut Array<u32>,
    #[comptime] far: u32,
    #[comptime] shape: TileShape,
) {
    #[unroll]
    for half in 0..2usize {
        let far = comptime!(far + 8 * half as u32 * shape.row_bytes());
        let words: Vector<u32, Const<2>>;
        gpu_asm!(
            "ld.shared.v2.b32 {words}, [{at}+{far}];",
            words = out(_) words,
            at = in(_) at,
            options(explicit_mem, reads_address_space shared)
        );
        into[half] = words.extract(0usize);
        into[comptime!(half + 2)] = words.extract(1usize);
    }
}

/// Converts a register to the type of the instruction. f32 is rounded to tf32, by one round-to-nearest-even
/// instruction if `rounds_tf32`. Halves and bytes stay unchanged.
#[cube]
fn to_instruction<I: Float>(
    word: u32,
    #[comptime] shape: TileShape,
    #[comptime] rounds_tf32: bool,
) -> u32 {
    if comptime!(shape.elem < 4) {
        word
    } else if comptime!(rounds_tf32) {
        let rounded: u32;
        gpu_asm!(
            "{{ .reg .f32 f; mov.b32 f, {x}; cvt.rn.tf32.f32 {y}, f; }}",
            y = out(_) rounded,
            x = in(_) u32::cast_from(word),
            options(pure, nomem)
        );
        rounded
    } else {
        u32::reinterpret(I::cast_from(f32::reinterpret(word)))
    }
}

/// Positions of the registers of a 16 x 8 left fragment: (row, k).
pub(crate) const LHS_REGISTERS: [(u32, u32); 4] = [(0, 0), (8, 0), (0, 4), (8, 4)];
/// Positions of the registers of two 8 x 8 right fragments: (column, k).
pub(crate) const RHS_REGISTERS: [(u32, u32); 4] = [(0, 0), (0, 4), (8, 0), (8, 4)];

/// Transposes the 4 x 4 words of four neighbouring units: unit `q` of a quad gives word `j` to unit `j` and
/// receives word `q` of each, in order. The function is its own inverse.
#[cube]
pub(crate) fn quad_transpose(words: &mut Array<u32>, lane: u32) {
    let odd = lane % 2 == 1;
    #[unroll]
    for j in [0usize, 2] {
        let (even_word, odd_word) = (words[j], words[comptime!(j + 1)]);
        let got = plane_shuffle_xor(select(odd, even_word, odd_word), 1);
        words[j] = select(odd, got, even_word);
        words[comptime!(j + 1)] = select(odd, odd_word, got);
    }
    let high = lane % 4 >= 2;
    #[unroll]
    for j in 0..2usize {
        let (low_word, high_word) = (words[j], words[comptime!(j + 2)]);
        let got = plane_shuffle_xor(select(high, low_word, high_word), 2);
        words[j] = select(high, got, low_word);
        words[comptime!(j + 2)] = select(high, high_word, got);
    }
}

/// Transposes the 8 x 8 halves that a plane holds. Unit `4·row + column / 2` holds the pair at an even
/// column.
#[cube]
pub(crate) fn transpose_halves(pair: u32) -> u32 {
    let transposed: u32;
    gpu_asm!(
        "movmatrix.sync.aligned.m8n8.trans.b16 {transposed}, {pair};",
        transposed = out(_) transposed,
        pair = in(_) u32::cast_from(pair),
        options(nomem)
    );
    transposed
}
