//! Decode attention over a KV cache.
//!
//! ```text
//! out = softmax(mask(softcap(scale·q·kᵀ)))·v of the newest positions of sequences in a cache
//! q: [batch, heads, seq_q, head_dim]   out as q
//!   for each query i of head h of sequence b:            // at position p = length[b] - seq_q + i
//!     for each position j <= p, at a distance from p below the window:
//!       page, row = b, j   or   table[b, j / block_size], j % block_size
//!       k, v = k_scale·k[page, row], v_scale·v[page, row]  // of head h / (heads / kv_heads); scales of i8
//!       s[j] = scale·Σ_d q[i, d]·k[d];  s[j] = cap·tanh(s[j] / cap)
//!     out[i] = Σ_j exp(s[j] - lse)·v[j]                    lse = log Σ_j exp(s[j])
//! ```
//!
//! A query that sees nothing is 0 with lse -inf. The same loop is evaluated twice: in f64 from the stored
//! values, and as a naive kernel would. The naive one has f32 scores and sums, and rounds weights (times the
//! scale of v) to the format of q; it sets the tolerance.

use std::ops::Range;

use rayon::prelude::*;

use crate::attention::{Attended, HeadStrides, Real, lines_of, sample, size_class, weighted};
use crate::compare::Comparison;
use crate::{DType, Error};

/// Strides of a cache in elements; the head dimension is contiguous. Without a table a sequence is one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheStrides {
    pub page: usize,
    pub head: usize,
    pub seq: usize,
}

/// A decode step.
#[derive(Debug, Clone, PartialEq)]
pub struct Decode {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub head_dim: usize,
    pub q: HeadStrides,
    pub k: CacheStrides,
    pub v: CacheStrides,
    pub scales: CacheStrides,
    pub scale: f64,
    pub softcap: Option<f64>,
    /// Positions at this distance or further are hidden.
    pub window: Option<usize>,
    /// Format of q and of the result.
    pub dtype: DType,
}

/// Contents of a KV cache.
#[derive(Debug, Clone, Copy)]
pub struct Cache<'a> {
    /// Stored values: numbers, or the codes of i8.
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// Number of positions of each sequence, those of the queries included.
    pub lengths: &'a [u32],
    pub table: Option<Table<'a>>,
    /// Scales of k and of v, if the cache is i8.
    pub scales: Option<[&'a [f32]; 2]>,
}

/// Block table: pages of each sequence, `[batch, max_blocks]`.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    pub blocks: &'a [u32],
    pub block_size: usize,
    pub max_blocks: usize,
}

impl Decode {
    /// Returns the indices of all result rows. A row is a query of a head of a sequence, in this order.
    pub fn all(&self) -> Vec<usize> {
        (0..self.batch * self.heads * self.seq_q).collect()
    }

    /// Returns a seeded choice of `count` rows, plus the first and the last.
    pub fn sample(&self, seed: u64, count: usize) -> Vec<usize> {
        sample(seed, count, self.batch * self.heads * self.seq_q)
    }

    /// Computes the exact result for the stored values.
    ///
    /// # Errors
    /// Fails if `kv_heads` does not divide `heads`, or if a position is outside of its tensor.
    pub fn run(&self, rows: &[usize], q: &[f32], cache: &Cache<'_>) -> Result<Attended, Error> {
        self.evaluate::<f64>(rows, q, cache, |v| v, |v| v)
    }

    /// Computes the result of a naive kernel.
    ///
    /// # Errors
    /// As [`Decode::run`].
    pub fn naive(&self, rows: &[usize], q: &[f32], cache: &Cache<'_>) -> Result<Attended, Error> {
        let storage = self.dtype.storage();
        self.evaluate::<f32>(
            rows,
            q,
            cache,
            move |v| storage.round(v.into()) as f32,
            move |v| storage.round(v),
        )
    }

    /// Compares `rows` of a kernel's result, and of its log-sum-exp if given, with the reference.
    ///
    /// # Shapes
    /// out dense `[batch, heads, seq_q, head_dim]`, lse `[batch, heads, seq_q]`.
    ///
    /// # Errors
    /// As [`Decode::run`]; a result of the wrong length.
    pub fn check(
        &self,
        rows: &[usize],
        q: &[f32],
        cache: &Cache<'_>,
        out: &[f32],
        lse: Option<&[f32]>,
    ) -> Result<Comparison, Error> {
        let len = self.batch * self.heads * self.seq_q;
        for (what, have, need) in
            [("out", out.len(), len * self.head_dim), ("lse", lse.map_or(len, <[f32]>::len), len)]
        {
            if have != need {
                return Err(Error::Length { what, need, have });
            }
        }
        let (exact, naive) = (self.run(rows, q, cache)?, self.naive(rows, q, cache)?);
        let out = lines_of(out, rows, self.head_dim);
        let lse: Option<Vec<f32>> = lse.map(|lse| rows.iter().map(|row| lse[*row]).collect());
        let seen = rows.iter().map(|row| self.seen(*row, cache.lengths).len());
        let classes: Vec<_> = seen.map(size_class).collect();
        exact.compare(&naive, &out, lse.as_deref(), self.dtype, &classes)
    }

    fn evaluate<T: Real>(
        &self,
        rows: &[usize],
        q: &[f32],
        cache: &Cache<'_>,
        weight: impl Fn(T) -> T + Sync,
        result: impl Fn(f64) -> f64 + Sync,
    ) -> Result<Attended, Error> {
        if self.kv_heads == 0 || self.heads % self.kv_heads != 0 {
            return Err(Error::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        if cache.lengths.len() != self.batch {
            let (need, have) = (self.batch, cache.lengths.len());
            return Err(Error::Length { what: "lengths", need, have });
        }
        let len = self.batch * self.heads * self.seq_q;
        if let Some(&index) = rows.iter().find(|row| **row >= len) {
            return Err(Error::OutOfRange { what: "sampled row", index, len });
        }
        let attended: Result<Vec<_>, Error> = rows
            .par_iter()
            .map(|&row| {
                let (out, lse) = self.row(row, q, cache, &weight)?;
                let out: Vec<f64> = out.into_iter().map(|v| result(v.into())).collect();
                Ok((out, lse.into()))
            })
            .collect();
        let (outs, lse): (Vec<_>, Vec<f64>) = attended?.into_iter().unzip();
        Ok(Attended { out: outs.concat(), lse })
    }

    /// Computes the result and log-sum-exp of one query.
    fn row<T: Real>(
        &self,
        row: usize,
        q: &[f32],
        cache: &Cache<'_>,
        weight: impl Fn(T) -> T,
    ) -> Result<(Vec<T>, T), Error> {
        let (i, head, b) =
            (row % self.seq_q, row / self.seq_q % self.heads, row / self.seq_q / self.heads);
        let shared = head / (self.heads / self.kv_heads);
        let q =
            slice("q", q, b * self.q.batch + head * self.q.head + i * self.q.seq, self.head_dim)?;
        let mut scores = Vec::new();
        for j in self.seen(row, cache.lengths) {
            let position = self.position(cache, b, shared, j)?;
            let mut dot = T::from(0.0);
            for (q, k) in q.iter().zip(position.k) {
                dot = dot + T::from(*q) * T::from(*k);
            }
            let mut score = dot * T::from(position.k_scale) * T::near(self.scale);
            if let Some(cap) = self.softcap {
                score = T::near(cap) * (score / T::near(cap)).tanh();
            }
            scores.push((score, T::from(position.v_scale), position.v));
        }
        Ok(weighted(scores, self.head_dim, weight))
    }

    /// Returns the positions that a row sees.
    fn seen(&self, row: usize, lengths: &[u32]) -> Range<usize> {
        let (i, b) = (row % self.seq_q, row / self.seq_q / self.heads);
        // One past the query's own position.
        let end = (lengths[b] as usize + i + 1).saturating_sub(self.seq_q);
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Returns position j of a sequence in one head of the cache.
    fn position<'a>(
        &self,
        cache: &Cache<'a>,
        b: usize,
        head: usize,
        j: usize,
    ) -> Result<Position<'a>, Error> {
        let (page, row) = match cache.table {
            None => (b, j),
            Some(Table { blocks, block_size, max_blocks }) => {
                let (index, len) = (b * max_blocks + j / block_size, blocks.len());
                let block =
                    blocks.get(index).ok_or(Error::OutOfRange { what: "block", index, len })?;
                (*block as usize, j % block_size)
            }
        };
        let at = |s: CacheStrides| page * s.page + head * s.head + row * s.seq;
        let scale = |which: usize| match cache.scales {
            None => Ok(1.0),
            Some(scales) => slice("scales", scales[which], at(self.scales), 1).map(|s| s[0]),
        };
        Ok(Position {
            k: slice("k", cache.k, at(self.k), self.head_dim)?,
            v: slice("v", cache.v, at(self.v), self.head_dim)?,
            k_scale: scale(0)?,
            v_scale: scale(1)?,
        })
    }
}

/// One position of a cache.
struct Position<'a> {
    k: &'a [f32],
    v: &'a [f32],
    k_scale: f32,
    v_scale: f32,
}

/// Returns `len` values from `start` on, or an error if they are out of range.
fn slice<'a>(
    what: &'static str,
    values: &'a [f32],
    start: usize,
    len: usize,
) -> Result<&'a [f32], Error> {
    let (need, have) = (start + len, values.len());
    values.get(start..need).ok_or(Error::Length { what, need, have })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Distribution, Scores, fill};

    fn decode(seq_q: usize) -> Decode {
        let (heads, capacity, head_dim) = (4, 12, 8);
        let cache =
            CacheStrides { page: 2 * capacity * head_dim, head: capacity * head_dim, seq: 8 };
        Decode {
            batch: 1,
            heads,
            kv_heads: 2,
            seq_q,
            head_dim,
            q: HeadStrides::contiguous(heads, seq_q, head_dim),
            k: cache,
            v: cache,
            scales: CacheStrides { page: 24, head: 12, seq: 1 },
            scale: 0.5,
            softcap: Some(2.0),
            window: Some(5),
            dtype: DType::F32,
        }
    }

    fn operands() -> [Vec<f32>; 3] {
        [(1, 3 * 32), (2, 24 * 8), (3, 24 * 8)]
            .map(|(seed, len)| fill(seed, len, Distribution::Normal))
    }

    #[test]
    fn a_full_cache_is_causal_attention() -> Result<(), Error> {
        let (d, [q, k, v]) = (decode(3), operands());
        let cache = Cache { k: &k, v: &v, lengths: &[12], table: None, scales: None };
        let plain = Attention::contiguous(1, [4, 2], [3, 12], 8, DType::F32);
        let attention = Attention {
            scale: d.scale,
            softcap: d.softcap,
            window: d.window,
            causal: true,
            ..plain
        };
        let want = attention.run(&q, &k, &v, Scores::default())?;
        assert_eq!(d.run(&d.all(), &q, &cache)?, want);
        Ok(())
    }

    #[test]
    fn pages_and_scales_are_another_way_to_store_the_same() -> Result<(), Error> {
        let (d, [q, k, v]) = (decode(2), operands());
        let whole = Cache { k: &k, v: &v, lengths: &[7], table: None, scales: None };
        let want = d.run(&d.all(), &q, &whole)?;
        // Pages of four rows, in reverse order; values halved, scales doubled.
        let pages = |values: &[f32]| -> Vec<f32> {
            let row = |at: usize| {
                let (page, head, row) = (at / 8, at / 4 % 2, at % 4);
                let from = (head * 12 + (2 - page) * 4 + row) * 8;
                values[from..from + 8].iter().map(|v| v / 2.0)
            };
            (0..24).flat_map(row).collect()
        };
        let (k, v, twos) = (pages(&k), pages(&v), vec![2.0; 24]);
        let cache = CacheStrides { page: 64, head: 32, seq: 8 };
        let scales = CacheStrides { page: 8, head: 4, seq: 1 };
        let paged = Decode { k: cache, v: cache, scales, ..d };
        let table = Table { blocks: &[2, 1, 0], block_size: 4, max_blocks: 3 };
        let cache =
            Cache { k: &k, v: &v, lengths: &[7], table: Some(table), scales: Some([&twos, &twos]) };
        assert_eq!(paged.run(&paged.all(), &q, &cache)?, want);
        Ok(())
    }

    #[test]
    fn queries_before_the_start_see_nothing() -> Result<(), Error> {
        let (d, [q, k, v]) = (decode(3), operands());
        let cache = Cache { k: &k, v: &v, lengths: &[1], table: None, scales: None };
        let got = d.run(&[0, 1, 2], &q, &cache)?;
        assert_eq!(got.out[..16], [0.0; 16]);
        assert_eq!(got.lse[1], f64::NEG_INFINITY);
        // The last query sees only its own position.
        let own: Vec<f64> = v[..8].iter().map(|v| f64::from(*v)).collect();
        assert_eq!(got.out[16..], own);
        Ok(())
    }
}
