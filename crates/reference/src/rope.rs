//! Heads from the QKV projection to the KV cache: norm, rotation, store.
//!
//! ```text
//! qkv: [batch·seq, (heads + 2·kv_heads)·head_dim]
//! for each token (b, s) and head:
//!   position = start[b] + s
//!   q[b, s, head]        = rotated(norm(query), position)
//!   k[b, head, position] = rotated(norm(key), position)
//!   v[b, head, position] = value
//! ```
//!
//! Cache in i8: scale[b, head, position] = max |head| / 127, and k and v are head / scale, to be rounded to
//! integers. Paged cache: k[page, position % block_size, head], where page = pages[b][position / block_size];
//! v likewise. A position past the cache or the table, or in a page that does not exist, leaves the caches
//! unchanged, and its queries are NaN.

use crate::rotary::rotate_by;
use crate::{Comparison, DType, Error, Norm, compare};

/// Tolerance of an i8 value in its own units: one half for rounding, the rest for its f32 arithmetic.
const BYTE_TOLERANCE: f64 = 0.51;
/// Largest magnitude below which heads have scale 0.
const SMALLEST: f64 = 127.0 / f32::MAX as f64;

/// A RoPE problem.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub slots: Slots,
    /// Number of rotated dimensions, the first of each head.
    pub dims: usize,
    /// Norm of queries and keys.
    pub norm: Option<Norm>,
    /// Format of all tensors except the table and caches in i8.
    pub dtype: DType,
}

/// Memory layout of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slots {
    /// `[batch, kv_heads, capacity, head_dim]`
    Runs { capacity: usize },
    /// `[blocks, block_size, kv_heads, head_dim]`; a sequence has up to `max_blocks` pages.
    Pages { block_size: usize, blocks: usize, max_blocks: usize },
}

/// Operands of a RoPE problem.
#[derive(Debug, Clone, Copy)]
pub struct RopeOperands<'a> {
    pub qkv: &'a [f32],
    /// Number of positions that each sequence already has, `[batch]`.
    pub start: &'a [u32],
    /// `[batch, max_blocks]`, for a paged cache.
    pub pages: &'a [u32],
    /// `[positions, dims]`: cosines, then sines.
    pub table: &'a [f32],
    /// Norm weights of queries and of keys, `[head_dim]`.
    pub weights: Option<[&'a [f32]; 2]>,
    /// Caches before the launch.
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// Scales of k and of v before the launch, in the shape of the caches without the last axis; for caches
    /// in i8.
    pub scales: Option<[&'a [f32]; 2]>,
}

/// Queries `[batch, seq, heads, head_dim]`, and the caches after the launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Projected {
    pub q: Vec<f64>,
    /// In units of their scales, if there are any; NaN if a scale is NaN or infinite.
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub scales: Option<[Vec<f64>; 2]>,
}

/// Results of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Left<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub scales: Option<[&'a [f32]; 2]>,
}

impl Slots {
    /// Maximum number of positions of a sequence.
    const fn capacity(self) -> usize {
        match self {
            Self::Runs { capacity } => capacity,
            Self::Pages { block_size, max_blocks, .. } => block_size * max_blocks,
        }
    }
}

impl Rope {
    /// Computes every result.
    ///
    /// # Errors
    /// Fails if an operand has the wrong length.
    pub fn run(&self, operands: RopeOperands<'_>) -> Result<Projected, Error> {
        self.project(operands, |values, weight, cos_sin| {
            let mut head: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
            if let (Some(norm), Some(weight)) = (&self.norm, weight) {
                norm.apply(&mut head, weight, None);
            }
            if let Some(row) = cos_sin {
                let half = self.dims / 2;
                rotate_by(&mut head, self.dims, |i| (row[i].into(), row[i + half].into()));
            }
            head
        })
    }

    /// Computes the results of a naive kernel: in f32, rounded once.
    ///
    /// # Errors
    /// As [`Rope::run`].
    pub fn naive(&self, operands: RopeOperands<'_>) -> Result<Projected, Error> {
        self.project(operands, |values, weight, cos_sin| {
            let mut head = values.to_vec();
            if let (Some(norm), Some(weight)) = (&self.norm, weight) {
                norm.apply_naively(&mut head, weight, None);
            }
            if let Some(row) = cos_sin {
                let half = self.dims / 2;
                for i in 0..half {
                    let (x, y, cos, sin) = (head[i], head[i + half], row[i], row[i + half]);
                    head[i] = x * cos - y * sin;
                    head[i + half] = y * cos + x * sin;
                }
            }
            head.iter().map(|v| self.dtype.round(f64::from(*v))).collect()
        })
    }

    /// Compares the queries and caches of a kernel with every result.
    ///
    /// # Errors
    /// As [`Rope::run`]; results of the wrong length.
    pub fn check(&self, operands: RopeOperands<'_>, left: Left<'_>) -> Result<Comparison, Error> {
        let (exact, naive) = (self.run(operands)?, self.naive(operands)?);
        let mut each = vec![compare(left.q, &exact.q, &naive.q, self.dtype)?];
        let caches = [(left.k, &exact.k, &naive.k), (left.v, &exact.v, &naive.v)];
        match (left.scales, &exact.scales, &naive.scales) {
            (Some(left), Some(exact), Some(naive)) => {
                for (left, (exact, naive)) in left.into_iter().zip(exact.iter().zip(naive)) {
                    each.push(compare(left, exact, naive, DType::F32)?);
                }
                for (left, exact, _) in caches {
                    each.push(Comparison::within(left, exact, BYTE_TOLERANCE)?);
                }
            }
            _ => {
                for (left, exact, naive) in caches {
                    each.push(compare(left, exact, naive, self.dtype)?);
                }
            }
        }
        Ok(Comparison::worst(each))
    }

    /// Writes heads to their destinations. `head` computes a head from its values, its norm weight and its
    /// row of the table; only queries and keys have the last two.
    fn project(
        &self,
        operands: RopeOperands<'_>,
        head: impl Fn(&[f32], Option<&[f32]>, Option<&[f32]>) -> Vec<f64>,
    ) -> Result<Projected, Error> {
        let RopeOperands { qkv, start, table, weights, .. } = operands;
        let Self { seq, heads, kv_heads, head_dim, dims, .. } = *self;
        self.check_lengths(operands)?;
        let wide = |values: &[f32]| values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let (mut k, mut v) = (wide(operands.k), wide(operands.v));
        let mut scales = operands.scales.map(|scales| scales.map(wide));
        let mut q = vec![f64::NAN; self.batch * seq * heads * head_dim];
        let all = heads + 2 * kv_heads;
        for (index, values) in qkv.chunks(head_dim).enumerate() {
            let (token, which) = (index / all, index % all);
            let (b, position) = (token / seq, start[token / seq] as usize + token % seq);
            let row = match dims {
                0 => None,
                _ => table.chunks(dims).nth(position),
            };
            let Some(place) = self.place(operands.pages, b, position) else { continue };
            if dims > 0 && row.is_none() {
                continue;
            }
            let slot = |head: usize| place(head) * head_dim;
            let weight = |of: usize| weights.map(|weights| weights[of]);
            let (out, at, mut made, of) = if which < heads {
                (&mut q, (token * heads + which) * head_dim, head(values, weight(0), row), None)
            } else if which < heads + kv_heads {
                (&mut k, slot(which - heads), head(values, weight(1), row), Some(0))
            } else {
                (&mut v, slot(which - heads - kv_heads), head(values, None, None), Some(1))
            };
            if let (Some(of), Some(scales)) = (of, &mut scales) {
                scales[of][at / head_dim] = in_units(&mut made);
            }
            out[at..at + head_dim].copy_from_slice(&made);
        }
        Ok(Projected { q, k, v, scales })
    }

    /// Returns the cache head for each head of a position; None if the position is not stored.
    fn place(
        &self,
        pages: &[u32],
        b: usize,
        position: usize,
    ) -> Option<impl Fn(usize) -> usize + use<>> {
        let (kv_heads, capacity) = (self.kv_heads, self.slots.capacity());
        if position >= capacity {
            return None;
        }
        let (first, step) = match self.slots {
            Slots::Runs { .. } => (b * kv_heads * capacity + position, capacity),
            Slots::Pages { block_size, blocks, max_blocks } => {
                let page = pages[b * max_blocks + position / block_size] as usize;
                if page >= blocks {
                    return None;
                }
                ((page * block_size + position % block_size) * kv_heads, 1)
            }
        };
        Some(move |head| first + head * step)
    }

    fn check_lengths(&self, operands: RopeOperands<'_>) -> Result<(), Error> {
        let RopeOperands { qkv, start, pages, table, weights, k, v, scales } = operands;
        let Self { batch, seq, heads, kv_heads, head_dim, slots, dims, .. } = *self;
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(Error::Heads { heads, kv_heads });
        }
        if dims > head_dim {
            return Err(Error::OutOfRange { what: "rotary dimension", index: dims, len: head_dim });
        }
        let (positions, blocks) = match slots {
            Slots::Runs { capacity } => (batch * capacity, 0),
            Slots::Pages { block_size, blocks, max_blocks } => {
                (blocks * block_size, batch * max_blocks)
            }
        };
        let cache = positions * kv_heads * head_dim;
        let rows = table.len() - table.len() % dims.max(1);
        let [k_scales, v_scales] = scales.map_or([cache / head_dim; 2], |s| s.map(<[f32]>::len));
        let [q_weight, k_weight] = weights.map_or([head_dim; 2], |w| w.map(<[f32]>::len));
        for (what, have, need) in [
            ("qkv", qkv.len(), batch * seq * (heads + 2 * kv_heads) * head_dim),
            ("start", start.len(), batch),
            ("pages", pages.len(), blocks),
            ("table", table.len(), rows),
            ("k", k.len(), cache),
            ("v", v.len(), cache),
            ("key scales", k_scales, cache / head_dim),
            ("value scales", v_scales, cache / head_dim),
            ("query weight", q_weight, head_dim),
            ("key weight", k_weight, head_dim),
        ] {
            if have != need {
                return Err(Error::Length { what, need, have });
            }
        }
        Ok(())
    }
}

/// Divides a head by its scale, and returns the scale.
fn in_units(head: &mut [f64]) -> f64 {
    let not_a_number = head.iter().any(|v| v.is_nan());
    let max = head.iter().fold(0.0f64, |max, v| max.max(v.abs()));
    let scale = match max {
        _ if not_a_number => f64::NAN,
        max if max < SMALLEST => 0.0,
        max => max / 127.0,
    };
    let unit = |v: f64| match scale {
        0.0 => 0.0,
        scale if scale.is_finite() => v / scale,
        _ => f64::NAN,
    };
    head.iter_mut().for_each(|v| *v = unit(*v));
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Distribution, NormRule, Rotary, Stretch, fill};

    const ROPE: Rope = Rope {
        batch: 2,
        seq: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 6,
        slots: Slots::Runs { capacity: 5 },
        dims: 4,
        norm: Some(Norm { rule: NormRule::RmsPlusOne, eps: 0.1 }),
        dtype: DType::F32,
    };

    #[test]
    fn heads_are_normalised_rotated_and_go_where_the_cache_has_them() -> Result<(), Error> {
        let rotary = Rotary { base: 100.0, dims: 4, stretch: Stretch::None, magnitude: 1.5 };
        let table: Vec<f32> = rotary.table(5, 5).iter().map(|v| *v as f32).collect();
        let qkv = fill(1, 4 * 4 * 6, Distribution::Normal);
        let [weight, other] = [2, 3].map(|seed| fill(seed, 6, Distribution::Normal));
        let (k, v) = (vec![7.0f32; 2 * 5 * 6], vec![8.0f32; 2 * 5 * 6]);
        let operands = RopeOperands {
            qkv: &qkv,
            // The last position of the second sequence is past the cache.
            start: &[1, 4],
            pages: &[],
            table: &table,
            weights: Some([&weight, &other]),
            k: &k,
            v: &v,
            scales: None,
        };
        let got = ROPE.run(operands)?;
        // Expected values from the functions of a decoder.
        let head = |token: usize, which: usize, weight: &[f32], position: usize| {
            let from = (token * 4 + which) * 6;
            let mut head: Vec<f64> = qkv[from..from + 6].iter().map(|v| f64::from(*v)).collect();
            ROPE.norm.expect("there is one").apply(&mut head, weight, None);
            rotary.rotate(&mut head, position, 5);
            head
        };
        let close = |got: &[f64], want: &[f64]| {
            got.iter()
                .zip(want)
                .for_each(|(g, w)| assert!((g - w).abs() < 1e-6, "{got:?} {want:?}"));
        };
        for (token, position) in [(0, 1), (1, 2), (2, 4)] {
            for which in [0, 1] {
                let want = head(token, which, &weight, position);
                close(&got.q[(token * 2 + which) * 6..][..6], &want);
            }
            let slot = (token / 2 * 5 + position) * 6;
            close(&got.k[slot..][..6], &head(token, 2, &other, position));
            let value: Vec<f64> =
                qkv[(token * 4 + 3) * 6..][..6].iter().map(|v| f64::from(*v)).collect();
            assert_eq!(got.v[slot..][..6], value);
        }
        assert!(got.q[3 * 12..].iter().all(|q| q.is_nan()), "no place, no query");
        assert_eq!(got.k.iter().filter(|k| **k != 7.0).count(), 3 * 6);
        assert_eq!(got.v.iter().filter(|v| **v != 8.0).count(), 3 * 6);
        let results: [Vec<f32>; 3] =
            [&got.q, &got.k, &got.v].map(|values| values.iter().map(|v| *v as f32).collect());
        let [q, mut k, v] = results;
        assert!(ROPE.check(operands, Left { q: &q, k: &k, v: &v, scales: None })?.passed);
        k[0] = 7.5;
        let written = ROPE.check(operands, Left { q: &q, k: &k, v: &v, scales: None })?;
        assert!(!written.passed, "written where nothing was to be");
        Ok(())
    }

    #[test]
    fn bytes_stand_for_what_a_float_cache_has() -> Result<(), Error> {
        let mut qkv = fill(1, 4 * 4 * 6, Distribution::Normal);
        // The second token has a key of zeros, and a value with infinity.
        qkv[4 * 6 + 12..][..6].fill(0.0);
        qkv[4 * 6 + 20] = f32::INFINITY;
        let rope = Rope { dims: 0, norm: None, ..ROPE };
        let (cache, before) = ([7.0f32; 2 * 5 * 6], [0.5f32; 2 * 5]);
        let float = RopeOperands {
            qkv: &qkv,
            start: &[1, 0],
            pages: &[],
            table: &[],
            weights: None,
            k: &cache,
            v: &cache,
            scales: None,
        };
        let bytes = RopeOperands { scales: Some([&before; 2]), ..float };
        let (float, got) = (rope.run(float)?, rope.run(bytes)?);
        let scales = got.scales.clone().expect("there are bytes");
        for (at, head) in got.k.chunks(6).enumerate() {
            let (scale, whole) = (scales[0][at], &float.k[at * 6..][..6]);
            let written = [1, 2, 5, 6].contains(&at);
            let max = head.iter().fold(0.0f64, |max, v| max.max(v.abs()));
            match at {
                2 => assert!(scale == 0.0 && head == [0.0; 6], "{head:?}"),
                _ if written => assert!((max - 127.0).abs() < 1e-9, "{head:?}"),
                _ => assert!(scale == 0.5 && head == [7.0; 6], "{head:?}"),
            }
            let near = |(v, w): (&f64, &f64)| !written || (v * scale - w).abs() < 1e-9;
            assert!(head.iter().zip(whole).all(near), "{head:?} {scale} {whole:?}");
        }
        assert!(scales[1][2].is_infinite() && got.v[12..18].iter().all(|v| v.is_nan()));
        let rounded = |v: &[f64]| v.iter().map(|v| v.round_ties_even() as f32).collect::<Vec<_>>();
        let narrow = |v: &[f64]| v.iter().map(|v| *v as f32).collect::<Vec<_>>();
        let (q, mut k, v) = (narrow(&got.q), rounded(&got.k), rounded(&got.v));
        let scales = scales.map(|scales| narrow(&scales));
        let scales = Some(scales.each_ref().map(|scales| &scales[..]));
        let check = |k: &[f32]| rope.check(bytes, Left { q: &q, k, v: &v, scales });
        assert!(check(&k)?.passed);
        k[6] += 1.0;
        assert!(!check(&k)?.passed, "a byte beside the nearest");
        Ok(())
    }

    #[test]
    fn pages_hold_what_runs_do() -> Result<(), Error> {
        let rotary = Rotary { base: 100.0, dims: 4, stretch: Stretch::None, magnitude: 1.0 };
        let table: Vec<f32> = rotary.table(8, 8).iter().map(|v| *v as f32).collect();
        let qkv = fill(1, 4 * 4 * 6, Distribution::Normal);
        let weight = [1.0; 6];
        let cache = [7.0f32; 5 * 2 * 6];
        let of = |slots, pages, len: usize| {
            let (k, v, start) = (&cache[..len], &cache[..len], &[1, 3]);
            let weights = Some([&weight[..], &weight[..]]);
            let table = &table[..];
            let operands =
                RopeOperands { qkv: &qkv, start, pages, table, weights, k, v, scales: None };
            Rope { slots, ..ROPE }.run(operands)
        };
        let runs = of(Slots::Runs { capacity: 4 }, &[], 48)?;
        // The first page of the second sequence does not exist, but none of its positions needs it.
        let slots = Slots::Pages { block_size: 2, blocks: 5, max_blocks: 2 };
        let pages = of(slots, &[4, 0, 9, 2], 60)?;
        let rows = |cache: &[f64], at: [usize; 4]| at.map(|at| cache[at * 6..][..6].to_vec());
        // Positions 1 and 2 of the first sequence, 3 of the second; all others are unchanged.
        for (run, page) in [(&runs.k, &pages.k), (&runs.v, &pages.v)] {
            assert_eq!(rows(run, [1, 2, 7, 0]), rows(page, [9, 0, 5, 1]));
            assert_eq!(page.iter().filter(|value| **value != 7.0).count(), 3 * 6);
        }
        let same = runs.q.iter().zip(&pages.q).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{:?} {:?}", runs.q, pages.q);
        let lost = of(slots, &[4, 9, 0, 2], 60)?;
        assert!(lost.q[12..24].iter().all(|q| q.is_nan()), "of a page that there is not");
        assert_eq!(lost.k.iter().filter(|value| **value != 7.0).count(), 2 * 6);
        Ok(())
    }

    #[test]
    fn lengths_that_contradict_are_refused() {
        let (qkv, cache) = ([1.0; 96], [0.0; 60]);
        let of = |start, table| {
            let weights = Some([&qkv[..6], &qkv[..6]]);
            let (qkv, k, v) = (&qkv[..], &cache[..], &cache[..]);
            let scales = Some([&cache[..10]; 2]);
            ROPE.run(RopeOperands { qkv, start, pages: &[], table, weights, k, v, scales })
        };
        assert!(of(&[0, 0], &[0.0; 8]).is_ok());
        assert!(of(&[0], &[0.0; 8]).is_err());
        assert!(of(&[0, 0], &[0.0; 9]).is_err());
    }
}
