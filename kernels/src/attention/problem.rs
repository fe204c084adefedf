//! Attention problems: shapes, strides, masks and options.

use arch::DType;
use serde::{Deserialize, Serialize};
use tune::Cost;

/// Attention implementation that a caller can force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Implementation {
    /// Tensor cores; scores stay on chip.
    Flash,
    /// One key at a time, in f32: the reference for the other paths.
    Plain,
}

/// Strides of one tensor in elements; the head dimension is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadStrides {
    /// Distance between batches; ignored when sequences vary in length.
    pub batch: u64,
    pub head: u64,
    pub seq: u64,
}

impl HeadStrides {
    /// Strides of a dense `[batch, heads, seq, head_dim]`.
    pub const fn dense(heads: u32, seq: u32, head_dim: u32) -> Self {
        let head = seq as u64 * head_dim as u64;
        Self { batch: heads as u64 * head, head, seq: head_dim as u64 }
    }
}

/// Strides of a score-shaped tensor in elements; stride 0 broadcasts along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScoreStrides {
    pub batch: u64,
    pub head: u64,
    pub row: u64,
    pub col: u64,
}

/// One attention forward problem. Build it with [`AttentionProblem::dense`], change fields, then
/// call [`AttentionProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AttentionProblem {
    pub batch: u32,
    pub heads: u32,
    /// Number of k and v heads; each serves `heads / kv_heads` neighbouring q heads.
    pub kv_heads: u32,
    /// Queries and keys per sequence; the longest when lengths vary.
    pub seq_q: u32,
    pub seq_kv: u32,
    pub head_dim: u32,
    /// Element type of q, k, v and out.
    pub dtype: DType,
    pub q: HeadStrides,
    pub k: HeadStrides,
    pub v: HeadStrides,
    pub out: HeadStrides,
    /// Factor on q·kᵀ.
    pub scale: f32,
    /// Soft cap: scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Causal mask: query i sees key j when j <= i + seq_kv - seq_q.
    pub causal: bool,
    /// Sliding window: query i sees key j when |i + seq_kv - seq_q - j| < window.
    pub window: Option<u32>,
    /// Strides of a tensor of `dtype` that is added to the scores.
    pub bias: Option<ScoreStrides>,
    /// Strides of a tensor of `mask_dtype`; a nonzero element hides its score.
    pub mask: Option<ScoreStrides>,
    /// U8 or I32.
    pub mask_dtype: DType,
    /// Stores the log-sum-exp of every query: f32 `[batch, heads, seq_q]`, or `[heads, all
    /// queries]` when lengths vary.
    pub lse: bool,
    /// Allows sequences of different lengths. They are packed one after the other in q, k, v and
    /// out, and two buffers of batch + 1 offsets hold their starts.
    pub varlen: bool,
}

/// Options of an attention call: scale, soft cap, masks and implementation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionOptions {
    /// Factor on q·kᵀ; None means 1 / √head_dim.
    pub scale: Option<f32>,
    /// Soft cap: scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Causal mask: query i sees key j when j <= i + seq_kv - seq_q.
    pub causal: bool,
    /// Sliding window: query i sees key j when |i + seq_kv - seq_q - j| < window.
    pub window: Option<u32>,
    /// Implementation to force; None selects the fastest one that supports the problem. A forced
    /// one that does not support it is an error.
    pub implementation: Option<Implementation>,
}

impl AttentionOptions {
    /// Returns `dense` with these options applied.
    #[must_use]
    pub fn on(&self, dense: AttentionProblem) -> AttentionProblem {
        AttentionProblem {
            scale: self.scale.unwrap_or(dense.scale),
            softcap: self.softcap,
            causal: self.causal,
            window: self.window,
            ..dense
        }
    }
}

/// Reason why an attention problem is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidAttention {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty attention")]
    Empty { axis: &'static str },
    #[error(
        "expected a window of at least 1 key, got 0\nhint: omit `window` to attend to all keys"
    )]
    Window,
    #[error(
        "expected a multiple of {kv_heads} KV heads, got {heads} query heads\nhint: use the same \
         number of query heads for every KV head"
    )]
    Heads { heads: u32, kv_heads: u32 },
    #[error(
        "expected {operand} with a stride of at least head_dim, got stride {stride} for head_dim \
         {head_dim}\nhint: pass positions that do not overlap; gaps are allowed"
    )]
    Stride { operand: &'static str, stride: u64, head_dim: u32 },
    #[error("expected a finite softcap above 0, got {0}\nhint: omit `softcap` to disable it")]
    Softcap(f32),
    #[error("expected a finite scale above 0, got {0}\nhint: fold the sign into q")]
    Scale(f32),
    #[error(
        "the backward pass needs the log-sum-exp of the forward pass\nhint: set `lse` on the \
         forward problem"
    )]
    NoLse,
    #[error("expected f32, f16 or bf16 attention operands, got {0}\nhint: cast q, k and v")]
    DType(DType),
    #[error("expected a u8 or i32 mask, got {0}\nhint: cast the mask to u8")]
    MaskDType(DType),
    #[error(
        "attention bias and masks need sequences of one length\nhint: pad the sequences, or call \
         `varlen` without bias and mask"
    )]
    VaryingScores,
}

impl AttentionProblem {
    /// Problem on dense `[batch, heads, seq, head_dim]` operands, with scale 1/√head_dim and no
    /// masks.
    ///
    /// # Errors
    /// See [`InvalidAttention`].
    pub fn dense(
        batch: u32,
        [heads, kv_heads]: [u32; 2],
        [seq_q, seq_kv]: [u32; 2],
        head_dim: u32,
        dtype: DType,
    ) -> Result<Self, InvalidAttention> {
        let (queries, keys) = (
            HeadStrides::dense(heads, seq_q, head_dim),
            HeadStrides::dense(kv_heads, seq_kv, head_dim),
        );
        Self {
            batch,
            heads,
            kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            dtype,
            q: queries,
            k: keys,
            v: keys,
            out: queries,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: None,
            causal: false,
            window: None,
            bias: None,
            mask: None,
            mask_dtype: DType::U8,
            lse: false,
            varlen: false,
        }
        .checked()
    }

    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidAttention`].
    pub fn checked(self) -> Result<Self, InvalidAttention> {
        let sizes = [
            ("batch", self.batch),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("seq_q", self.seq_q),
            ("seq_kv", self.seq_kv),
            ("head_dim", self.head_dim),
        ];
        if let Some((axis, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(InvalidAttention::Empty { axis });
        }
        if self.window == Some(0) {
            return Err(InvalidAttention::Window);
        }
        let Self { heads, kv_heads, head_dim, .. } = self;
        if heads % kv_heads != 0 {
            return Err(InvalidAttention::Heads { heads, kv_heads });
        }
        let operands = [("q", self.q), ("k", self.k), ("v", self.v), ("out", self.out)];
        for (operand, HeadStrides { seq: stride, .. }) in operands {
            if stride < u64::from(head_dim) {
                return Err(InvalidAttention::Stride { operand, stride, head_dim });
            }
        }
        // Written so that NaN fails.
        if let Some(cap) = self.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(InvalidAttention::Softcap(cap));
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err(InvalidAttention::Scale(self.scale));
        }
        if !matches!(self.dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Err(InvalidAttention::DType(self.dtype));
        }
        if self.mask.is_some() && !matches!(self.mask_dtype, DType::U8 | DType::I32) {
            return Err(InvalidAttention::MaskDType(self.mask_dtype));
        }
        if self.varlen && (self.bias.is_some() || self.mask.is_some()) {
            return Err(InvalidAttention::VaryingScores);
        }
        Ok(self)
    }

    /// Minimum number of elements in the buffers of q, k, v and out. With varying lengths, every
    /// sequence counts as the longest.
    pub fn extents(&self) -> [usize; 4] {
        let Self { heads, kv_heads, seq_q, seq_kv, .. } = *self;
        [
            self.reach(self.q, heads, seq_q),
            self.reach(self.k, kv_heads, seq_kv),
            self.reach(self.v, kv_heads, seq_kv),
            self.reach(self.out, heads, seq_q),
        ]
    }

    /// Minimum number of elements in a buffer with strides `s`.
    pub(super) fn reach(&self, s: HeadStrides, heads: u32, seq: u32) -> usize {
        let batch = if self.varlen { u64::from(seq) * s.seq } else { s.batch };
        (u64::from(self.batch - 1) * batch
            + u64::from(heads - 1) * s.head
            + u64::from(seq - 1) * s.seq
            + u64::from(self.head_dim)) as usize
    }

    /// Minimum number of elements in the buffer of a bias or mask.
    pub fn score_extent(&self, s: ScoreStrides) -> usize {
        let steps = [
            (self.batch, s.batch),
            (self.heads, s.head),
            (self.seq_q, s.row),
            (self.seq_kv, s.col),
        ];
        steps.iter().map(|(size, step)| u64::from(size - 1) * step).sum::<u64>() as usize + 1
    }

    /// Number of output rows: queries of all heads and batches.
    pub fn rows(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.heads) * u64::from(self.seq_q)
    }

    /// Number of visible (query, key) pairs over all heads and batches, by causal mask and window
    /// only.
    pub fn pairs(&self) -> u64 {
        let (seq_q, seq_kv) = (i64::from(self.seq_q), i64::from(self.seq_kv));
        let visible = |i: i64| {
            let position = i + seq_kv - seq_q;
            let window = i64::from(self.window.unwrap_or(u32::MAX));
            let from = (position - window + 1).max(0);
            let end = if self.causal { position + 1 } else { position.saturating_add(window) };
            (end.min(seq_kv) - from).max(0) as u64
        };
        let pairs: u64 = (0..seq_q).map(visible).sum();
        pairs * u64::from(self.batch) * u64::from(self.heads)
    }

    /// Minimum work: both matmuls over the visible pairs.
    pub fn cost(&self) -> Cost {
        let Self { batch, heads, kv_heads, seq_q, seq_kv, head_dim, .. } = *self;
        let [queries, keys] = [(heads, seq_q), (kv_heads, seq_kv)]
            .map(|(h, s)| u64::from(batch) * u64::from(h) * u64::from(s) * u64::from(head_dim));
        Cost {
            flops: 4 * self.pairs() * u64::from(head_dim),
            bytes: 2 * (queries + keys) * self.dtype.size() as u64,
        }
    }

    /// Widest vector in elements, at most `limit`, that divides all strides of q, k and v and the
    /// head dimension.
    pub(crate) fn width(&self, limit: u64) -> usize {
        self.width_with(limit, &[])
    }

    /// Like [`AttentionProblem::width`], but the vector must divide the strides of `others` too.
    pub(crate) fn width_with(&self, limit: u64, others: &[HeadStrides]) -> usize {
        let all = [self.q, self.k, self.v].into_iter().chain(others.iter().copied());
        let facts = all.flat_map(|s| {
            // Packed sequences start at any position.
            [if self.varlen { s.seq } else { s.batch }, s.head, s.seq]
        });
        let facts: Vec<_> = facts.chain([u64::from(self.head_dim)]).collect();
        let mut width = limit;
        while facts.iter().any(|f| f % width != 0) {
            width /= 2;
        }
        width as usize
    }

    /// Cache key of the tuner. It holds everything that changes the kernel; sizes are rounded so
    /// that similar problems share a config.
    pub(crate) fn bucket(&self) -> String {
        let mut key = format!(
            "{} d{} w{} q{} kv{} g{} b{}",
            self.dtype,
            self.head_dim,
            self.width(16 / self.dtype.size() as u64),
            self.seq_q.next_power_of_two(),
            self.seq_kv.next_power_of_two(),
            self.heads / self.kv_heads,
            (u64::from(self.batch) * u64::from(self.heads)).next_power_of_two(),
        );
        self.rules().into_iter().for_each(|rule| key += &format!(" {rule}"));
        key
    }

    /// Names of the score rules and other options that change the kernel.
    pub fn rules(&self) -> Vec<&'static str> {
        [
            (self.causal, "causal"),
            (self.window.is_some(), "window"),
            (self.softcap.is_some(), "softcap"),
            (self.bias.is_some(), "bias"),
            (self.mask.is_some(), "mask"),
            (self.lse, "lse"),
            (self.varlen, "varlen"),
        ]
        .into_iter()
        .filter_map(|(on, name)| on.then_some(name))
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(seq_q: u32, seq_kv: u32) -> AttentionProblem {
        AttentionProblem::dense(2, [4, 2], [seq_q, seq_kv], 16, DType::F32).expect("valid")
    }

    #[test]
    fn visible_pairs_are_counted() {
        let p = problem(5, 5);
        assert_eq!(p.pairs(), 8 * 25);
        assert_eq!(AttentionProblem { causal: true, ..p }.pairs(), 8 * 15);
        // Two keys each, except one for the first query.
        let window = AttentionProblem { causal: true, window: Some(2), ..p };
        assert_eq!(window.pairs(), 8 * 9);
        assert_eq!(AttentionProblem { window: Some(2), ..p }.pairs(), 8 * 13);
        // More queries than keys: the first two see nothing.
        assert_eq!(AttentionProblem { causal: true, ..problem(5, 3) }.pairs(), 8 * 6);
        assert_eq!(AttentionProblem { causal: true, ..problem(3, 5) }.pairs(), 8 * 12);
    }

    #[test]
    fn mistakes_are_named() {
        let p = problem(5, 5);
        let bad = |p: AttentionProblem| p.checked().expect_err("a mistake").to_string();
        assert!(bad(AttentionProblem { kv_heads: 3, ..p }).contains("4 query heads"));
        assert!(
            bad(AttentionProblem { seq_kv: 0, ..p })
                .contains("expected seq_kv of at least 1, got 0")
        );
        for wrong in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
            assert!(bad(AttentionProblem { softcap: Some(wrong), ..p }).contains("above 0"));
            assert!(bad(AttentionProblem { scale: wrong, ..p }).contains("above 0"));
        }
        assert!(bad(AttentionProblem { dtype: DType::I8, ..p }).contains("i8"));
        let mut short = p;
        short.k.seq = 15;
        assert!(bad(short).contains("k with a stride of at least head_dim, got stride 15 "));
    }

    #[test]
    fn vectors_divide_every_position() {
        let p = AttentionProblem::dense(1, [1, 1], [8, 8], 80, DType::F16).expect("valid");
        assert_eq!(p.width(8), 8);
        let mut odd = p;
        odd.k.seq = 84;
        assert_eq!(odd.width(8), 4);
    }
}
