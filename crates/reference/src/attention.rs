//! Attention, forward and backward.
//!
//! ```text
//! out = softmax(mask(softcap(scale·q·kᵀ)) + bias)·v
//! q: [batch, heads, seq_q, head_dim]   k, v: [batch, kv_heads, seq_kv, head_dim]   out as q
//!   for each query i of head h:                          // offset = seq_kv - seq_q
//!     s[j] = scale·Σ_d q[i, d]·k[j, d]                   // keys of head h / (heads / kv_heads)
//!     s[j] = cap·tanh(s[j] / cap)
//!     s[j] = -inf  if j > i + offset (causal), j is outside i's window, or mask[i, j]
//!     s[j] += bias[i, j]
//!     out[i] = Σ_j exp(s[j] - lse)·v[j]                  lse = log Σ_j exp(s[j])
//! ```
//!
//! A row without visible keys is 0 with lse -inf. The same loop is evaluated twice: in f64 from the stored
//! values, and as a naive kernel would. The naive one has f32 scores and sums, and rounds weights to the
//! operands' format; it sets the tolerance.
//!
//! ```text
//! p[i, j] = exp(s[i, j] - lse[i])      ds[i, j] = p[i, j]·(dout[i]·v[j] - out[i]·dout[i])·(1 - tanh²)
//! dq[i] = scale·Σ_j ds[i, j]·k[j]      dk[j] = scale·Σ_i ds[i, j]·q[i]      dv[j] = Σ_i p[i, j]·dout[i]
//! ```
//!
//! Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1.

use rand_chacha::rand_core::Rng;
use rayon::prelude::*;

use crate::compare::{Comparison, Lines, compare};
use crate::inputs::stream;
use crate::{DType, Error};

/// Strides of an operand in elements; the head dimension is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadStrides {
    pub batch: usize,
    pub head: usize,
    pub seq: usize,
}

impl HeadStrides {
    /// Strides of a contiguous `[batch, heads, seq, head_dim]`.
    pub const fn contiguous(heads: usize, seq: usize, head_dim: usize) -> Self {
        Self { batch: heads * seq * head_dim, head: seq * head_dim, seq: head_dim }
    }
}

/// An attention problem over dense batches.
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
    /// Keys at this distance or further are hidden.
    pub window: Option<usize>,
    /// Format of operands and result.
    pub dtype: DType,
}

/// Bias and mask of the scores, dense `[batch, heads, seq_q, seq_kv]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scores<'a> {
    pub bias: Option<&'a [f32]>,
    /// True hides the key.
    pub mask: Option<&'a [bool]>,
}

/// Inputs of a backward pass: the result and log-sum-exp of the forward pass, and the gradient of the result.
/// Dense `[batch, heads, seq_q, head_dim]` and `[batch, heads, seq_q]`.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    pub out: &'a [f32],
    pub lse: &'a [f32],
    pub dout: &'a [f32],
}

/// Result `[batch, heads, seq_q, head_dim]` and log-sum-exp `[batch, heads, seq_q]` of every query.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

impl Attention {
    /// Creates a problem with contiguous operands, scale 1/√head_dim and no masking.
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

    /// Computes the exact result for the stored operands.
    ///
    /// # Errors
    /// Fails if `kv_heads` does not divide `heads`, or if a slice is too short.
    pub fn run(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        scores: Scores<'_>,
    ) -> Result<Attended, Error> {
        self.evaluate::<f64>(&self.all(), [q, k, v], scores, |v| v, |v| v)
    }

    /// Computes the result of a naive kernel.
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

    /// Returns the indices of all result rows. A row is a query of a head of a batch, in this order.
    pub fn all(&self) -> Vec<usize> {
        (0..self.batch * self.heads * self.seq_q).collect()
    }

    /// Returns a seeded choice of `count` rows, plus the first and the last.
    pub fn sample(&self, seed: u64, count: usize) -> Vec<usize> {
        sample(seed, count, self.lines()[0])
    }

    /// Returns a seeded choice of `count` rows of dq, and of dk and dv, plus the first and the last of each.
    pub fn sample_gradients(&self, seed: u64, count: usize) -> [Vec<usize>; 2] {
        self.lines().map(|rows| sample(seed, count, rows))
    }

    /// Like [`Attention::check`], only for `rows`; `out` is the whole result.
    ///
    /// # Errors
    /// As [`Attention::check`]; a row out of range.
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
        let out = lines_of(out, rows, self.head_dim);
        exact.compare(&naive, &out, None, self.dtype, &self.sizes(rows))
    }

    /// Compares a kernel's result, and its log-sum-exp if given, with the reference.
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
        exact.compare(&naive, out, lse, self.dtype, &self.sizes(&self.all()))
    }

    /// Returns the size classes of result rows.
    fn sizes(&self, rows: &[usize]) -> Vec<u32> {
        rows.iter().map(|row| size_class(self.keys_seen(row % self.seq_q))).collect()
    }

    /// Returns the size class of a key's gradients. They are sums over the queries that see the key; queries
    /// that see the fewest keys have the most weight.
    fn size_of_key(&self, j: usize) -> u32 {
        let seeing = (0..self.seq_q).filter(|i| self.visible(*i, j));
        seeing.map(|i| size_class(self.keys_seen(i))).min().unwrap_or_default()
    }

    /// Returns the number of keys that query i sees, ignoring the mask.
    fn keys_seen(&self, i: usize) -> usize {
        let last = self.seq_kv as i64 - 1;
        let position = i as i64 + self.seq_kv as i64 - self.seq_q as i64;
        let reach = self.window.map_or(i64::MAX / 2, |window| window as i64 - 1);
        let end = if self.causal { position } else { position.saturating_add(reach) };
        let (begin, end) = ((position - reach).max(0), end.min(last));
        (end - begin + 1).max(0) as usize
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

    /// Computes the result and log-sum-exp of one query.
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
        let values = s
            .into_iter()
            .map(|(j, score)| (score, T::from(1.0), &v[at(self.v, shared, j)..][..self.head_dim]));
        weighted(values.collect(), self.head_dim, weight)
    }

    /// Computes the exact gradients of q, k and v for the stored operands and the saved forward pass.
    ///
    /// # Errors
    /// As [`Attention::run`].
    pub fn gradients(
        &self,
        operands: [&[f32]; 3],
        scores: Scores<'_>,
        saved: Saved<'_>,
    ) -> Result<[Vec<f64>; 3], Error> {
        self.evaluate_gradients::<f64>(&self.every(), operands, scores, saved, |v| v, |v| v)
    }

    /// Compares a kernel's gradients with the reference at `rows`, as in [`Attention::gradient_lines`].
    ///
    /// # Shapes, Errors
    /// As [`Attention::gradient_lines`].
    pub fn check_gradients(
        &self,
        rows: &[Vec<usize>; 2],
        operands: [&[f32]; 3],
        scores: Scores<'_>,
        saved: Saved<'_>,
        results: [&[f32]; 3],
    ) -> Result<Comparison, Error> {
        let lines = self.gradient_lines(rows, operands, scores, saved, results)?;
        let all: Vec<_> = lines.iter().map(Lines::compare).collect::<Result<_, Error>>()?;
        Ok(Comparison::worst(all))
    }

    /// Pairs a kernel's dq, dk and dv with the exact ones at `rows` of dq, and of dk and dv. A row is a query
    /// or a key of a head of a batch.
    ///
    /// # Shapes
    /// dq dense `[batch, heads, seq_q, head_dim]`, dk and dv `[batch, kv_heads, seq_kv, head_dim]`.
    ///
    /// # Errors
    /// As [`Attention::run`]; a result of the wrong length; a row out of range.
    pub fn gradient_lines(
        &self,
        rows: &[Vec<usize>; 2],
        operands: [&[f32]; 3],
        scores: Scores<'_>,
        saved: Saved<'_>,
        results: [&[f32]; 3],
    ) -> Result<[Lines; 3], Error> {
        let storage = self.dtype.storage();
        // Vulkan lets e^x be at least 3 ulp off. A device may err in one direction for all weights, so sums do not
        // average it out.
        let round = move |v: f32| storage.round((v * (1.0 + 3.0 * f32::EPSILON)).into()) as f32;
        let exact = self.evaluate_gradients::<f64>(rows, operands, scores, saved, |v| v, |v| v)?;
        let naive =
            self.evaluate_gradients::<f32>(rows, operands, scores, saved, round, move |v| {
                storage.round(v)
            })?;
        let [of_queries, of_keys] = self.lines();
        for (what, have, lines) in [
            ("dq", results[0].len(), of_queries),
            ("dk", results[1].len(), of_keys),
            ("dv", results[2].len(), of_keys),
        ] {
            let need = lines * self.head_dim;
            if have != need {
                return Err(Error::Length { what, need, have });
            }
        }
        let keys: Vec<_> = rows[1].iter().map(|row| self.size_of_key(row % self.seq_kv)).collect();
        let (mut exact, mut naive) = (exact.into_iter(), naive.into_iter());
        let mut lines = |result: &[f32], rows: &[usize], classes: Vec<u32>| Lines {
            out: lines_of(result, rows, self.head_dim),
            exact: exact.next().expect("of three"),
            naive: naive.next().expect("of three"),
            classes,
            dtype: storage,
        };
        Ok([
            lines(results[0], &rows[0], self.sizes(&rows[0])),
            lines(results[1], &rows[1], keys.clone()),
            lines(results[2], &rows[1], keys),
        ])
    }

    /// Number of rows of dq, and of dk and dv.
    const fn lines(&self) -> [usize; 2] {
        [self.batch * self.heads * self.seq_q, self.batch * self.kv_heads * self.seq_kv]
    }

    /// Returns the indices of all rows of dq, and of dk and dv.
    pub fn every(&self) -> [Vec<usize>; 2] {
        self.lines().map(|count| (0..count).collect())
    }

    fn evaluate_gradients<T: Real>(
        &self,
        rows: &[Vec<usize>; 2],
        operands: [&[f32]; 3],
        scores: Scores<'_>,
        saved: Saved<'_>,
        weight: impl Fn(T) -> T + Sync,
        result: impl Fn(f64) -> f64 + Sync,
    ) -> Result<[Vec<f64>; 3], Error> {
        self.validate(operands, scores)?;
        let [queries, keys] = self.lines();
        for (what, need, have) in [
            ("out", queries * self.head_dim, saved.out.len()),
            ("dout", queries * self.head_dim, saved.dout.len()),
            ("lse", queries, saved.lse.len()),
        ] {
            if have != need {
                return Err(Error::Length { what, need, have });
            }
        }
        for (rows, len) in rows.iter().zip([queries, keys]) {
            if let Some(&index) = rows.iter().find(|row| **row >= len) {
                return Err(Error::OutOfRange { what: "sampled row", index, len });
            }
        }
        let dot = |a: &[f32], b: &[f32]| {
            let products = a.iter().zip(b).map(|(a, b)| T::from(*a) * T::from(*b));
            products.fold(T::from(0.0), |sum, p| sum + p)
        };
        let lines = |of| <[f32]>::par_chunks_exact(of, self.head_dim);
        // Summed in reverse order. If one key has all the weight, its gradient is the difference of two equal
        // sums, which kernels may add in any order.
        let back = |line: &[f32]| line.iter().rev().copied().collect::<Vec<_>>();
        let deltas: Vec<T> = lines(saved.out)
            .zip(lines(saved.dout))
            .map(|(out, dout)| dot(&back(out), &back(dout)))
            .collect();
        let [q, k, v] = operands;
        let at = |s: HeadStrides, b: usize, head: usize, pos: usize| {
            b * s.batch + head * s.head + pos * s.seq
        };
        // Weight and gradient of one score; None if the key is hidden.
        let pair = |b: usize, head: usize, i: usize, j: usize| -> Option<(T, T)> {
            let row = (b * self.heads + head) * self.seq_q + i;
            let score = row * self.seq_kv + j;
            let lse = saved.lse[row];
            let hidden = scores.mask.is_some_and(|mask| mask[score]) || lse == f32::NEG_INFINITY;
            if hidden || !self.visible(i, j) {
                return None;
            }
            let shared = head / (self.heads / self.kv_heads);
            let query = &q[at(self.q, b, head, i)..][..self.head_dim];
            let key = &k[at(self.k, b, shared, j)..][..self.head_dim];
            let value = &v[at(self.v, b, shared, j)..][..self.head_dim];
            let mut s = dot(query, key) * T::near(self.scale);
            let mut slope = T::from(1.0);
            if let Some(cap) = self.softcap {
                let bent = (s / T::near(cap)).tanh();
                s = T::near(cap) * bent;
                slope = T::from(1.0) + -(bent * bent);
            }
            if let Some(bias) = scores.bias {
                s = s + T::from(bias[score]);
            }
            let p = (s + -T::from(lse)).exp();
            let dout = &saved.dout[row * self.head_dim..][..self.head_dim];
            let ds = p * (dot(dout, value) + -deltas[row]) * slope;
            Some((weight(p), weight(ds)))
        };
        let add = |sum: &mut [T], by: T, line: &[f32]| {
            sum.iter_mut().zip(line).for_each(|(sum, v)| *sum = *sum + by * T::from(*v));
        };
        let finish = |sum: Vec<T>, scale: f64| -> Vec<f64> {
            sum.into_iter().map(|v| result((v * T::near(scale)).into())).collect()
        };
        let zeros = || vec![T::from(0.0); self.head_dim];
        let dq: Vec<_> = rows[0]
            .par_iter()
            .map(|row| {
                let (i, head, b) = self.place(*row, self.seq_q, self.heads);
                let shared = head / (self.heads / self.kv_heads);
                let mut sum = zeros();
                for j in 0..self.seq_kv {
                    if let Some((_, ds)) = pair(b, head, i, j) {
                        add(&mut sum, ds, &k[at(self.k, b, shared, j)..][..self.head_dim]);
                    }
                }
                finish(sum, self.scale)
            })
            .collect();
        let (dk, dv): (Vec<_>, Vec<_>) = rows[1]
            .par_iter()
            .map(|row| {
                let (j, shared, b) = self.place(*row, self.seq_kv, self.kv_heads);
                let group = self.heads / self.kv_heads;
                let (mut dk, mut dv) = (zeros(), zeros());
                for head in shared * group..(shared + 1) * group {
                    for i in 0..self.seq_q {
                        if let Some((p, ds)) = pair(b, head, i, j) {
                            add(&mut dk, ds, &q[at(self.q, b, head, i)..][..self.head_dim]);
                            let row = (b * self.heads + head) * self.seq_q + i;
                            add(&mut dv, p, &saved.dout[row * self.head_dim..][..self.head_dim]);
                        }
                    }
                }
                (finish(dk, self.scale), finish(dv, 1.0))
            })
            .unzip();
        Ok([dq.concat(), dk.concat(), dv.concat()])
    }

    /// Position, head and batch of a row.
    const fn place(&self, row: usize, seq: usize, heads: usize) -> (usize, usize, usize) {
        (row % seq, row / seq % heads, row / seq / heads)
    }

    /// Returns whether query i may see key j.
    fn visible(&self, i: usize, j: usize) -> bool {
        // Position of the query among the keys, and its distance from the key.
        let position = i as i64 + self.seq_kv as i64 - self.seq_q as i64;
        let distance = position - j as i64;
        (!self.causal || distance >= 0)
            && self.window.is_none_or(|window| distance.unsigned_abs() < window as u64)
    }
}

/// Returns the softmax-weighted sum of values, and the log-sum-exp. Each entry is a score, a scale and
/// values. Without visible scores they are 0 and -inf.
pub(crate) fn weighted<T: Real>(
    scores: Vec<(T, T, &[f32])>,
    head_dim: usize,
    weight: impl Fn(T) -> T,
) -> (Vec<T>, T) {
    let minus_inf = T::from(f32::NEG_INFINITY);
    // NaN must win, as in a sum of exponentials.
    let row_max = scores.iter().fold(minus_inf, |m, (s, ..)| if *s <= m { m } else { *s });
    let mut out = vec![T::from(0.0); head_dim];
    if row_max == minus_inf {
        return (out, minus_inf);
    }
    let mut sum = T::from(0.0);
    for (score, scale, values) in scores {
        let p = (score + -row_max).exp();
        sum = sum + p;
        let p = weight(p * scale);
        for (out, v) in out.iter_mut().zip(values) {
            *out = *out + p * T::from(*v);
        }
    }
    out.iter_mut().for_each(|v| *v = *v / sum);
    (out, row_max + sum.ln())
}

/// Returns the size class of a query that sees `keys` keys. A mean of n values falls as 1/√n, so the first
/// rows of causal attention are many times larger than the last. Classes are octaves of n; all n below 32
/// share the lowest.
pub(crate) const fn size_class(keys: usize) -> u32 {
    if keys < 16 { 4 } else { keys.ilog2() }
}

/// Copies some rows of a dense result.
pub(crate) fn lines_of(values: &[f32], rows: &[usize], head_dim: usize) -> Vec<f32> {
    rows.iter().flat_map(|row| &values[row * head_dim..][..head_dim]).copied().collect()
}

/// Returns a seeded choice of `count` of `rows` rows, plus the first and the last.
pub(crate) fn sample(seed: u64, count: usize, rows: usize) -> Vec<usize> {
    let mut rng = stream(seed);
    let mut chosen: Vec<_> = (0..count).map(|_| rng.next_u32() as usize % rows).collect();
    chosen.extend([0, rows - 1]);
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

impl Attended {
    /// Compares a kernel's result, and its log-sum-exp if given, with this one, each size class separately.
    pub(crate) fn compare(
        &self,
        naive: &Self,
        out: &[f32],
        lse: Option<&[f32]>,
        dtype: DType,
        classes: &[u32],
    ) -> Result<Comparison, Error> {
        let lines = Lines {
            out: out.to_vec(),
            exact: self.out.clone(),
            naive: naive.out.clone(),
            classes: classes.to_vec(),
            dtype: dtype.storage(),
        };
        let result = lines.compare()?;
        match lse {
            Some(lse) if result.passed => {
                let sums = compare(lse, &self.lse, &naive.lse, DType::F32)?;
                Ok(if sums.passed { result } else { sums })
            }
            _ => Ok(result),
        }
    }
}

/// Arithmetic for attention, f32 or f64.
pub(crate) trait Real:
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
