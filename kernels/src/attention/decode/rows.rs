//! Plain path for CPUs and any GPU: each unit takes one query after another and reads its keys
//! once.
//!
//! ```text
//!   for each query of each head                         // one unit
//!     for each position that it sees
//!       s = rules(q · k)                                // vectors along the head dimension
//!       m' = max(m, s); l = l·exp(m - m') + exp(s - m'); acc = acc·exp(m - m') + exp(s - m')·v
//!     out = acc / l
//! ```
//!
//! All arithmetic is f32. It uses no shared memory and no barriers; other paths are compared with
//! it.

use cubecl::prelude::*;

use super::cache::{Cache, CachePlan, Dims};
use super::scores::Scores;
use crate::attention::rows::{dot, load_row, store_row, zero_row};

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RowsPlan {
    pub(crate) head_dim: u32,
    pub(crate) cache: CachePlan,
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(crate) fn rows<F: Float, C: Numeric, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<C, NI>],
    v: &[Vector<C, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    cache: &Cache,
    scores: &Scores,
    dims: &Dims,
    #[comptime] plan: RowsPlan,
) {
    let lanes = NI::value();
    let vectors = comptime!(plan.head_dim as usize / lanes);
    let total = dims.batch * dims.heads * dims.seq_q;
    let mut task = ABSOLUTE_POS as u32;
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    while task < total {
        let (i, head) = (task % dims.seq_q, task / dims.seq_q % dims.heads);
        let batch = task / dims.seq_q / dims.heads;
        let kv_head = head / dims.group;
        let from_q = dims.q.at(i, batch, head) / NI::value();
        let query = load_row::<F, NI>(q, from_q, vectors);
        let mut acc = zero_row::<NI>(vectors);
        let mut row_max = scores.hidden;
        let mut sum = 0.0f32.runtime();
        // A query before the start of a short sequence sees nothing.
        let position = (cache.length(dims, batch) + i) as i32 - dims.seq_q as i32;
        let mut key = scores.first(position);
        while key <= position {
            let (page, row) = cache.place(dims, batch, key as u32, plan.cache);
            let from_k = dims.k.at(page, kv_head, row) / NI::value();
            let from_v = dims.v.at(page, kv_head, row) / NI::value();
            let dot = dot::<C, NI>(&query, k, from_k, vectors);
            let (k_scale, v_scale) = cache.scales(dims, page, kv_head, row);
            let score = scores.score(dot * k_scale) * scores.unit();
            let log2 = std::f32::consts::LN_2;
            // A score of -inf adds nothing, but NaN must propagate. (On Vulkan `!=` is false for
            // NaN.)
            let hidden = score == scores.hidden;
            if !hidden {
                let grown = max(row_max, score);
                let factor = ((row_max - grown) * log2).exp();
                let weight = ((score - grown) * log2).exp();
                row_max = grown;
                sum = sum * factor + weight;
                for d in 0..vectors {
                    let value = Vector::<f32, NI>::cast_from(v[from_v + d]);
                    let scaled = acc[d] * Vector::new(factor);
                    acc[d] = fma(Vector::new(weight * v_scale), value, scaled);
                }
            }
            key += 1;
        }
        let quotient = select(sum == 0.0, 0.0, 1.0 / sum);
        let to = dims.out.at(i, batch, head);
        store_row::<F, NI, NO>(out, to, &acc, quotient, vectors);
        if comptime!(scores.rules.lse) {
            let log = row_max * std::f32::consts::LN_2 + sum.ln();
            lse[task as usize] = select(sum == 0.0, scores.hidden, log);
        }
        task += stride;
    }
}
