//! Plain path for CPUs and any GPU: each unit takes one query after another and reads its keys
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
//! All arithmetic is f32. It uses no shared memory and no barriers; other paths are compared with
//! it.

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::scores::{Place, Scores};
use super::{Dims, Sequences};

/// Units of the plain path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowsConfig {
    /// Units per cube.
    pub units: u32,
}

impl RowsConfig {
    /// Config for `arch`: all cores of a CPU, or 64 units on a GPU.
    pub(super) fn new(arch: &ArchProfile) -> Self {
        Self { units: arch.cores().unwrap_or(64) }
    }

    /// Cubes for `rows` rows: 1 on a CPU, else at most 65,535, so that a unit may take several rows.
    pub(super) fn cubes(self, arch: &ArchProfile, rows: u64) -> CubeCount {
        let cubes = match arch.cores() {
            Some(_) => 1,
            None => rows.div_ceil(u64::from(self.units)).min(65_535) as u32,
        };
        CubeCount::Static(cubes, 1, 1)
    }

    /// Widest vector of f32 that the device loads at once, in elements.
    pub(super) fn widest(arch: &ArchProfile) -> u64 {
        u64::from(arch.load_bytes / 4).clamp(1, 16)
    }
}

/// Comptime parameters of one kernel instance.
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
        let span = sequences.span(dims, batch);
        if row < span.seq_q {
            let kv_head = head / dims.group;
            let from_q = dims.q.at(span.from_q + row, batch, head) / NI::value();
            let query = load_row::<F, NI>(q, from_q, vectors);
            let mut acc = zero_row::<NI>(vectors);
            let mut row_max = scores.hidden;
            let mut sum = 0.0f32.runtime();
            let (first, last) = scores.range(&span, row, 1u32.runtime());
            for col in first..last {
                let from_k = dims.k.at(span.from_kv + col, batch, kv_head) / NI::value();
                let from_v = dims.v.at(span.from_kv + col, batch, kv_head) / NI::value();
                let dot = dot::<F, NI>(&query, k, from_k, vectors);
                let place = Place { batch, head, row, col };
                let score = scores.score(dot, &place, &span, dims) * scores.unit();
                let log2 = std::f32::consts::LN_2;
                // A hidden key adds nothing, but NaN must propagate. (On Vulkan `!=` is false for
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
                        acc[d] = fma(Vector::new(weight), value, scaled);
                    }
                }
            }
            let quotient = select(sum == 0.0, 0.0, 1.0 / sum);
            let to = dims.out.at(span.from_q + row, batch, head);
            store_row::<F, NI, NO>(out, to, &acc, quotient, vectors);
            if comptime!(scores.rules.lse) {
                let at = dims.lse_at(span.from_q + row, batch, head);
                let log = row_max * std::f32::consts::LN_2 + sum.ln();
                lse[at] = select(sum == 0.0, scores.hidden, log);
            }
        }
        task += stride;
    }
}

/// Loads a row from vector `at` on, as f32.
#[cube]
pub(super) fn load_row<F: Float, N: Size>(
    from: &[Vector<F, N>],
    at: usize,
    #[comptime] vectors: usize,
) -> Array<Vector<f32, N>> {
    let mut row = Array::<Vector<f32, N>>::new(vectors);
    for d in 0..vectors {
        row[d] = Vector::cast_from(from[at + d]);
    }
    row
}

/// Returns a row of zeros.
#[cube]
pub(super) fn zero_row<N: Size>(#[comptime] vectors: usize) -> Array<Vector<f32, N>> {
    let mut row = Array::<Vector<f32, N>>::new(vectors);
    for d in 0..vectors {
        row[d] = Vector::new(0.0f32);
    }
    row
}

/// Dot product of a row with the row of `other` at vector `at`.
#[cube]
pub(super) fn dot<C: Numeric, N: Size>(
    own: &Array<Vector<f32, N>>,
    other: &[Vector<C, N>],
    at: usize,
    #[comptime] vectors: usize,
) -> f32 {
    let mut products = Vector::<f32, N>::new(0.0f32);
    for d in 0..vectors {
        products = fma(own[d], Vector::cast_from(other[at + d]), products);
    }
    let mut dot = 0.0f32.runtime();
    #[unroll]
    for e in 0..N::value() {
        dot += products.extract(e);
    }
    dot
}

/// Stores a row times `scale`, from element `to` on.
#[cube]
pub(super) fn store_row<F: Float, N: Size, NO: Size>(
    out: &mut [Vector<F, NO>],
    to: usize,
    row: &Array<Vector<f32, N>>,
    scale: f32,
    #[comptime] vectors: usize,
) {
    for d in 0..vectors {
        let value = row[d] * Vector::new(scale);
        #[unroll]
        for e in 0..N::value() {
            out[to + d * N::value() + e] = Vector::new(F::cast_from(value.extract(e)));
        }
    }
}
