//! What the paths on tensor cores share in decoding codes and nested absmax.

use cubecl::prelude::*;

use crate::nf4::Codes;
use crate::tile::{load_shared, store_shared};

/// Bytes of the book of nested absmax.
pub(super) const NESTED_BYTES: u32 = 256 * 4;

/// The value of the book of nested absmax that a unit writes first; asked for early, it is there by then.
#[cube]
pub(super) fn first_nested<NW: Size>(weight: &Codes<NW>, unit: u32) -> f32 {
    let mut first = 0.0f32.runtime();
    if comptime!(weight.plan.nested) {
        first = weight.nested_book[(unit % 256) as usize];
    }
    first
}

/// Writes the book of nested absmax, where there is one, to shared address `to`.
#[cube]
pub(super) fn fill_nested<NW: Size>(
    weight: &Codes<NW>,
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
            store_shared(to + i * 4, weight.nested_book[i as usize], 0u32);
            i += units;
        }
    }
}

/// A nested absmax: what its byte means in the book at shared address `book`, scaled and shifted.
#[cube]
pub(super) fn unnest(book: u32, byte: u32, scale: f32, offset: f32) -> f32 {
    fma(load_shared(book + byte * 4, 0u32), scale, offset)
}

/// Each byte of the result is the one of the eight of `a` and `b` that its half byte of `selector` names;
/// with the top bit set, that one's sign all over.
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
