//! Plain path of both sides: each unit takes one of its own rows after another and reads the other
//! rows once. Operand roles are those of the tensor-core path. All arithmetic is f32.

use cubecl::prelude::*;

use super::Roles;
use super::flash::Side;
use crate::attention::rows::{dot, load_row, store_row, zero_row};
use crate::attention::scores::{Place, Scores};
use crate::attention::{Dims, Sequences};

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RowsPlan {
    pub(super) side: Side,
    pub(super) head_dim: u32,
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(super) fn rows<F: Float, M: Int, NI: Size, NO: Size>(
    own_1: &[Vector<F, NI>],
    own_2: &[Vector<F, NI>],
    other_1: &[Vector<F, NI>],
    other_2: &[Vector<F, NI>],
    stats: &[Vector<f32, Const<2>>],
    out_1: &mut [Vector<F, NO>],
    out_2: &mut [Vector<F, NO>],
    scores: &Scores<F, M>,
    sequences: &Sequences,
    dims: &Dims,
    roles: &Roles,
    #[comptime] plan: RowsPlan,
) {
    let side = comptime!(plan.side);
    let lanes = NI::value();
    let vectors = comptime!(plan.head_dim as usize / lanes);
    let (longest, own_heads) = if comptime!(side.keys) {
        (dims.seq_kv, dims.heads / dims.group)
    } else {
        (dims.seq_q, dims.heads)
    };
    let total = dims.batch * own_heads * longest;
    let mut task = ABSOLUTE_POS as u32;
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    while task < total {
        let (row, own_head) = (task % longest, task / longest % own_heads);
        let batch = task / longest / own_heads;
        let span = sequences.span(dims, batch);
        let (from_own, own_len, from_other) = if comptime!(side.keys) {
            (span.from_kv, span.seq_kv, span.from_q)
        } else {
            (span.from_q, span.seq_q, span.from_kv)
        };
        if row < own_len {
            let at_1 = roles.own_1.at(from_own + row, batch, own_head) / NI::value();
            let at_2 = roles.own_2.at(from_own + row, batch, own_head) / NI::value();
            let mine_1 = load_row::<F, NI>(own_1, at_1, vectors);
            let mine_2 = load_row::<F, NI>(own_2, at_2, vectors);
            let mut sum_1 = zero_row::<NI>(vectors);
            let mut sum_2 = zero_row::<NI>(vectors);
            let (first, last) = if comptime!(side.keys) {
                scores.seers(&span, row, 1u32.runtime())
            } else {
                scores.range(&span, row, 1u32.runtime())
            };
            let heads = if comptime!(side.keys) { dims.group } else { 1u32.runtime() };
            for h in 0..heads {
                let (head, other_head) = if comptime!(side.keys) {
                    (own_head * dims.group + h, own_head * dims.group + h)
                } else {
                    (own_head, own_head / dims.group)
                };
                for other in first..last {
                    let at_1 =
                        roles.other_1.at(from_other + other, batch, other_head) / NI::value();
                    let at_2 =
                        roles.other_2.at(from_other + other, batch, other_head) / NI::value();
                    let product = dot::<F, NI>(&mine_1, other_1, at_1, vectors);
                    let gradient = dot::<F, NI>(&mine_2, other_2, at_2, vectors);
                    let (query, key) =
                        if comptime!(side.keys) { (other, row) } else { (row, other) };
                    let place = Place { batch, head, row: query, col: key };
                    let score = scores.score(product, &place, &span, dims);
                    // A hidden key has no gradient, but NaN must propagate. (On Vulkan `!=` is
                    // false for NaN.)
                    let hidden = score == scores.hidden;
                    if !hidden {
                        let of_query = stats[dims.lse_at(span.from_q + query, batch, head)];
                        let log2 = score * scores.unit() - of_query.extract(0usize);
                        let weight = (log2 * std::f32::consts::LN_2).exp();
                        let slope = scores.slope_at(product);
                        let change = weight * (gradient - of_query.extract(1usize)) * slope;
                        for d in 0..vectors {
                            let first = Vector::<f32, NI>::cast_from(other_1[at_1 + d]);
                            sum_1[d] = fma(Vector::new(change), first, sum_1[d]);
                            if comptime!(side.second) {
                                let second = Vector::<f32, NI>::cast_from(other_2[at_2 + d]);
                                sum_2[d] = fma(Vector::new(weight), second, sum_2[d]);
                            }
                        }
                    }
                }
            }
            let to = roles.out_1.at(from_own + row, batch, own_head);
            store_row::<F, NI, NO>(out_1, to, &sum_1, scores.scale, vectors);
            if comptime!(side.second) {
                let to = roles.out_2.at(from_own + row, batch, own_head);
                store_row::<F, NI, NO>(out_2, to, &sum_2, 1.0f32.runtime(), vectors);
            }
        }
        task += stride;
    }
}
