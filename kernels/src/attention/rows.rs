//! The plain path, for the CPU and for any GPU: a unit takes one query after another and reads its keys
//! once.
//!
//! ```text
//!   for each query of each head                         // one unit
//!     for each key that it may see
//!       s = rules(q · k)                                // vectors along the head dimension
//!       m' = max(m, s); l = l·exp(m - m') + exp(s - m'); acc = acc·exp(m - m') + exp(s - m')·v
//!     out = acc / l
//! ```
//!
//! Everything is f32. No shared memory, no barrier: what others are compared with.

use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::scores::{Place, Scores};
use super::{Dims, Sequences};

/// How the plain path is spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowsConfig {
    /// Units of a cube.
    pub units: u32,
}

/// Comptime facts of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RowsPlan {
    pub(crate) head_dim: u32,
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "operands, results and comptime facts")]
pub(crate) fn rows<F: Float, M: Int, NI: Size, NO: Size>(
    q: &[Vector<F, NI>],
    k: &[Vector<F, NI>],
    v: &[Vector<F, NI>],
    out: &mut [Vector<F, NO>],
    lse: &mut [f32],
    scores: &Scores<F, M>,
    sequences: &Sequences,
    dims: &Dims,
    #[comptime] plan: RowsPlan,
) {
    let lanes = NI::value();
    let vectors = comptime!(plan.head_dim as usize / lanes);
    let total = dims.batch * dims.heads * dims.seq_q;
    let mut task = ABSOLUTE_POS as u32;
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    while task < total {
        let (row, head) = (task % dims.seq_q, task / dims.seq_q % dims.heads);
        let batch = task / dims.seq_q / dims.heads;
        let span = sequences.of(dims, batch);
        if row < span.seq_q {
            let kv_head = head / dims.group;
            let from_q = dims.q.at(span.from_q + row, batch, head) / NI::value();
            let mut query = Array::<Vector<f32, NI>>::new(vectors);
            let mut acc = Array::<Vector<f32, NI>>::new(vectors);
            for d in 0..vectors {
                query[d] = Vector::cast_from(q[from_q + d]);
                acc[d] = Vector::new(0.0f32);
            }
            let mut most = scores.hidden;
            let mut sum = 0.0f32.runtime();
            let (first, last) = scores.range(&span, row, 1u32.runtime());
            for col in first..last {
                let from_k = dims.k.at(span.from_kv + col, batch, kv_head) / NI::value();
                let from_v = dims.v.at(span.from_kv + col, batch, kv_head) / NI::value();
                let mut products = Vector::<f32, NI>::new(0.0f32);
                for d in 0..vectors {
                    products = fma(query[d], Vector::cast_from(k[from_k + d]), products);
                }
                let mut dot = 0.0f32.runtime();
                #[unroll]
                for e in 0..NI::value() {
                    dot += products.extract(e);
                }
                let place = Place { batch, head, row, col };
                let score = scores.of(dot, &place, &span, dims) * scores.unit();
                let log2 = std::f32::consts::LN_2;
                // A hidden key adds nothing; a NaN goes through.
                if score != scores.hidden {
                    let grown = max(most, score);
                    let factor = ((most - grown) * log2).exp();
                    let weight = ((score - grown) * log2).exp();
                    most = grown;
                    sum = sum * factor + weight;
                    for d in 0..vectors {
                        let value = Vector::<f32, NI>::cast_from(v[from_v + d]);
                        let scaled = acc[d] * Vector::new(factor);
                        acc[d] = fma(Vector::new(weight), value, scaled);
                    }
                }
            }
            let quotient = select(sum == 0.0, 0.0, 1.0 / sum);
            let to = dims.out.at(span.from_q + row, batch, head);
            for d in 0..vectors {
                let value = acc[d] * Vector::new(quotient);
                #[unroll]
                for e in 0..NI::value() {
                    out[to + d * NI::value() + e] = Vector::new(F::cast_from(value.extract(e)));
                }
            }
            if comptime!(scores.rules.lse) {
                let at = dims.lse_at(span.from_q + row, batch, head);
                let log = most * std::f32::consts::LN_2 + sum.ln();
                lse[at] = select(sum == 0.0, scores.hidden, log);
            }
        }
        task += stride;
    }
}
