//! ```text
//! out = softmax(mask(softcap(scale·q·kᵀ)) + bias)·v
//! q: [batch, heads, seq_q, head_dim]   k, v: [batch, kv_heads, seq_kv, head_dim]   out as q
//!   for each query i of head h:                          // offset = seq_kv - seq_q
//!     s[j] = scale·Σ_d q[i, d]·k[j, d]                   // keys of head h / (heads / kv_heads)
//!     s[j] = cap·tanh(s[j] / cap)
//!     s[j] = -inf  where j > i + offset (causal), j or i outside of the window, mask[i, j]
//!     s[j] += bias[i, j]
//!     out[i] = Σ_j exp(s[j] - lse)·v[j]                  lse = log Σ_j exp(s[j])
//! ```
//!
//! A row without keys is 0, its lse -inf. Evaluated twice by the same loop: in f64 from the stored
//! values, and as a naive kernel would, with f32 scores and sums and weights rounded to the operands'
//! format, which sets the tolerance.
//!
//! Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1.

use rand_chacha::rand_core::Rng;
use rayon::prelude::*;

use crate::compare::{Comparison, compare};
use crate::inputs::stream;
use crate::{DType, Error};

/// How far apart an operand's neighbours lie, in elements; the head dimension is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadStrides {
    pub batch: usize,
    pub head: usize,
    pub seq: usize,
}

impl HeadStrides {
    /// Those of a contiguous `[batch, heads, seq, head_dim]`.
    pub const fn contiguous(heads: usize, seq: usize, head_dim: usize) -> Self {
        Self { batch: heads * seq * head_dim, head: seq * head_dim, seq: head_dim }
    }
}

/// One attention over dense batches.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub head_dim: usize,
    pub q: HeadStrides,
    pub k: HeadStrides,
    pub v: HeadStrides,
    pub scale: f64,
    pub softcap: Option<f64>,
    /// Key j is hidden from query i when j > i + seq_kv - seq_q.
    pub causal: bool,
    /// Keys at this distance and further are hidden.
    pub window: Option<usize>,
    /// Format of operands and result.
    pub dtype: DType,
}

/// What is added to or hidden from the scores, dense `[batch, heads, seq_q, seq_kv]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scores<'a> {
    pub bias: Option<&'a [f32]>,
    /// True hides.
    pub mask: Option<&'a [bool]>,
}

/// Result and log-sum-exp of every query, `[batch, heads, seq_q, head_dim]` and `[batch, heads, seq_q]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

impl Attention {
    /// Contiguous operands, scale 1/√head_dim, nothing masked.
    pub fn contiguous(
        batch: usize,
        [heads, kv_heads]: [usize; 2],
        [seq_q, seq_kv]: [usize; 2],
        head_dim: usize,
        dtype: DType,
    ) -> Self {
        let keys = HeadStrides::contiguous(kv_heads, seq_kv, head_dim);
        Self {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            q: HeadStrides::contiguous(heads, seq_q, head_dim),
            k: keys,
            v: keys,
            scale: 1.0 / (head_dim as f64).sqrt(),
            softcap: None,
            causal: false,
            window: None,
            dtype,
        }
    }

    /// The exact result for the stored operands.
    ///
    /// # Errors
    /// Heads that do not divide, a slice too short.
    pub fn run(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        scores: Scores<'_>,
    ) -> Result<Attended, Error> {
        self.evaluate::<f64>(&self.all(), [q, k, v], scores, |v| v, |v| v)
    }

    /// What a naive kernel computes.
    ///
    /// # Errors
    /// As [`Attention::run`].
    pub fn naive(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        scores: Scores<'_>,
    ) -> Result<Attended, Error> {
        self.naive_rows(&self.all(), [q, k, v], scores)
    }

    fn naive_rows(
        &self,
        rows: &[usize],
        operands: [&[f32]; 3],
        scores: Scores<'_>,
    ) -> Result<Attended, Error> {
        let storage = self.dtype.storage();
        self.evaluate::<f32>(
            rows,
            operands,
            scores,
            move |v| storage.round(v.into()) as f32,
            move |v| storage.round(v),
        )
    }

    /// Every row of the result: a query of a head of a batch, in order.
    pub fn all(&self) -> Vec<usize> {
        (0..self.batch * self.heads * self.seq_q).collect()
    }

    /// A seeded choice of `count` rows, and the first and the last.
    pub fn sample(&self, seed: u64, count: usize) -> Vec<usize> {
        let rows = self.batch * self.heads * self.seq_q;
        let mut rng = stream(seed);
        let mut chosen: Vec<_> = (0..count).map(|_| rng.next_u32() as usize % rows).collect();
        chosen.extend([0, rows - 1]);
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    /// [`Attention::check`] of some rows only; `out` is the whole result.
    ///
    /// # Errors
    /// As [`Attention::check`]; a row that there is not.
    pub fn check_rows(
        &self,
        rows: &[usize],
        operands: [&[f32]; 3],
        scores: Scores<'_>,
        out: &[f32],
    ) -> Result<Comparison, Error> {
        let len = self.batch * self.heads * self.seq_q;
        if let Some(&index) = rows.iter().find(|row| **row >= len) {
            return Err(Error::OutOfRange { what: "sampled row", index, len });
        }
        if out.len() != len * self.head_dim {
            let (need, have) = (len * self.head_dim, out.len());
            return Err(Error::Length { what: "out", need, have });
        }
        let exact = self.evaluate::<f64>(rows, operands, scores, |v| v, |v| v)?;
        let naive = self.naive_rows(rows, operands, scores)?;
        let line = |row: &usize| &out[row * self.head_dim..][..self.head_dim];
        let out: Vec<f32> = rows.iter().flat_map(line).copied().collect();
        compare(&out, &exact.out, &naive.out, self.dtype.storage())
    }

    /// Compares a kernel's result (and its log-sum-exp, where it gives one) with the reference.
    ///
    /// # Shapes
    /// out dense `[batch, heads, seq_q, head_dim]`, lse `[batch, heads, seq_q]`.
    ///
    /// # Errors
    /// As [`Attention::run`]; a result of the wrong length.
    pub fn check(
        &self,
        [q, k, v]: [&[f32]; 3],
        scores: Scores<'_>,
        out: &[f32],
        lse: Option<&[f32]>,
    ) -> Result<Comparison, Error> {
        let (exact, naive) = (self.run(q, k, v, scores)?, self.naive(q, k, v, scores)?);
        for (what, have, need) in [
            ("out", out.len(), exact.out.len()),
            ("lse", lse.map_or(exact.lse.len(), <[f32]>::len), exact.lse.len()),
        ] {
            if have != need {
                return Err(Error::Length { what, need, have });
            }
        }
        let result = compare(out, &exact.out, &naive.out, self.dtype.storage())?;
        match lse {
            Some(lse) if result.passed => {
                let sums = compare(lse, &exact.lse, &naive.lse, DType::F32)?;
                Ok(if sums.passed { result } else { sums })
            }
            _ => Ok(result),
        }
    }

    fn validate(&self, [q, k, v]: [&[f32]; 3], scores: Scores<'_>) -> Result<(), Error> {
        let reach = |s: HeadStrides, heads: usize, seq: usize| match self.batch * heads * seq {
            0 => 0,
            _ => {
                (self.batch - 1) * s.batch
                    + (heads - 1) * s.head
                    + (seq - 1) * s.seq
                    + self.head_dim
            }
        };
        let pairs = self.batch * self.heads * self.seq_q * self.seq_kv;
        for (what, need, have) in [
            ("q", reach(self.q, self.heads, self.seq_q), q.len()),
            ("k", reach(self.k, self.kv_heads, self.seq_kv), k.len()),
            ("v", reach(self.v, self.kv_heads, self.seq_kv), v.len()),
            ("bias", pairs, scores.bias.map_or(pairs, <[f32]>::len)),
            ("mask", pairs, scores.mask.map_or(pairs, <[bool]>::len)),
        ] {
            if have < need {
                return Err(Error::Length { what, need, have });
            }
        }
        match self.kv_heads {
            0 => Err(Error::Heads { heads: self.heads, kv_heads: 0 }),
            kv_heads if self.heads % kv_heads != 0 => {
                Err(Error::Heads { heads: self.heads, kv_heads })
            }
            _ => Ok(()),
        }
    }

    fn evaluate<T: Real>(
        &self,
        rows: &[usize],
        operands: [&[f32]; 3],
        scores: Scores<'_>,
        weight: impl Fn(T) -> T + Sync,
        result: impl Fn(f64) -> f64 + Sync,
    ) -> Result<Attended, Error> {
        self.validate(operands, scores)?;
        let (outs, lse): (Vec<_>, Vec<_>) = rows
            .par_iter()
            .map(|&row| {
                let (out, lse) = self.row(row, operands, scores, &weight);
                (out.into_iter().map(|v| result(v.into())).collect::<Vec<f64>>(), lse.into())
            })
            .unzip();
        Ok(Attended { out: outs.concat(), lse })
    }

    /// One query: its result and its log-sum-exp.
    fn row<T: Real>(
        &self,
        row: usize,
        [q, k, v]: [&[f32]; 3],
        scores: Scores<'_>,
        weight: impl Fn(T) -> T,
    ) -> (Vec<T>, T) {
        let (i, head, b) =
            (row % self.seq_q, row / self.seq_q % self.heads, row / self.seq_q / self.heads);
        let shared = head / (self.heads / self.kv_heads);
        let at =
            |s: HeadStrides, head: usize, pos: usize| b * s.batch + head * s.head + pos * s.seq;
        let q = &q[at(self.q, head, i)..][..self.head_dim];
        let mut s: Vec<(usize, T)> = Vec::new();
        for j in (0..self.seq_kv).filter(|&j| self.visible(i, j)) {
            let pair = row * self.seq_kv + j;
            if scores.mask.is_some_and(|mask| mask[pair]) {
                continue;
            }
            let k = &k[at(self.k, shared, j)..][..self.head_dim];
            let mut dot = T::from(0.0);
            for (q, k) in q.iter().zip(k) {
                dot = dot + T::from(*q) * T::from(*k);
            }
            let mut score = dot * T::near(self.scale);
            if let Some(cap) = self.softcap {
                score = T::near(cap) * (score / T::near(cap)).tanh();
            }
            if let Some(bias) = scores.bias {
                score = score + T::from(bias[pair]);
            }
            s.push((j, score));
        }
        let minus_inf = T::from(f32::NEG_INFINITY);
        // NaN wins, as it does in a sum of exponentials.
        let most = s.iter().fold(minus_inf, |m, (_, s)| if *s <= m { m } else { *s });
        let mut out = vec![T::from(0.0); self.head_dim];
        if most == minus_inf {
            return (out, minus_inf);
        }
        let mut sum = T::from(0.0);
        for (j, score) in s {
            let p = (score + -most).exp();
            sum = sum + p;
            let p = weight(p);
            let v = &v[at(self.v, shared, j)..][..self.head_dim];
            for (out, v) in out.iter_mut().zip(v) {
                *out = *out + p * T::from(*v);
            }
        }
        out.iter_mut().for_each(|v| *v = *v / sum);
        (out, most + sum.ln())
    }

    /// Whether query i may see key j.
    fn visible(&self, i: usize, j: usize) -> bool {
        // Position of the query among the keys, and the distance from it.
        let position = i as i64 + self.seq_kv as i64 - self.seq_q as i64;
        let distance = position - j as i64;
        (!self.causal || distance >= 0)
            && self.window.is_none_or(|window| distance.unsigned_abs() < window as u64)
    }
}

/// Arithmetic that an attention is computed in.
trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + From<f32>
    + Into<f64>
    + std::ops::Add<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
{
    fn near(value: f64) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
}

macro_rules! real {
    ($ty:ty) => {
        impl Real for $ty {
            fn near(value: f64) -> Self {
                value as Self
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln(self) -> Self {
                self.ln()
            }
            fn tanh(self) -> Self {
                self.tanh()
            }
        }
    };
}
real!(f32);
real!(f64);
