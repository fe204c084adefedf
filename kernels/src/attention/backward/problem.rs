//! What to differentiate.

use serde::{Deserialize, Serialize};
use tune::Cost;

use crate::attention::{AttentionProblem, HeadStrides, InvalidAttention};

/// The gradients of one attention by q, k and v. A bias or mask changes the weights; neither gets a
/// gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BackwardProblem {
    /// The forward pass, which stored its log-sum-exp.
    pub forward: AttentionProblem,
    pub dout: HeadStrides,
    pub dq: HeadStrides,
    pub dk: HeadStrides,
    pub dv: HeadStrides,
}

impl BackwardProblem {
    /// Gradients that lie as what they are the gradients of. Change fields, end with
    /// [`BackwardProblem::checked`].
    ///
    /// # Errors
    /// See [`InvalidAttention`].
    pub fn of(forward: AttentionProblem) -> Result<Self, InvalidAttention> {
        let AttentionProblem { q, k, v, out, .. } = forward;
        Self { forward, dout: out, dq: q, dk: k, dv: v }.checked()
    }

    /// The problem itself, if it means something.
    ///
    /// # Errors
    /// See [`InvalidAttention`].
    pub fn checked(self) -> Result<Self, InvalidAttention> {
        self.forward.checked()?;
        if !self.forward.lse {
            return Err(InvalidAttention::NoLse);
        }
        let head_dim = self.forward.head_dim;
        let operands = [("dout", self.dout), ("dq", self.dq), ("dk", self.dk), ("dv", self.dv)];
        for (operand, HeadStrides { seq: stride, .. }) in operands {
            if stride < u64::from(head_dim) {
                return Err(InvalidAttention::Stride { operand, stride, head_dim });
            }
        }
        Ok(self)
    }

    /// Elements that the buffers of dout, dq, dk and dv must hold; where lengths vary, as if every
    /// sequence had the longest.
    pub fn extents(&self) -> [usize; 4] {
        let p = &self.forward;
        [
            p.reach(self.dout, p.heads, p.seq_q),
            p.reach(self.dq, p.heads, p.seq_q),
            p.reach(self.dk, p.kv_heads, p.seq_kv),
            p.reach(self.dv, p.kv_heads, p.seq_kv),
        ]
    }

    /// The least work: two products forward that are needed again, three more for the gradients, as the
    /// literature counts.
    pub fn cost(&self) -> Cost {
        let forward = self.forward.cost();
        // q, k, v, out and dout in; dq, dk and dv out; the log-sum-exp.
        let p = &self.forward;
        let keys = u64::from(p.batch) * u64::from(p.kv_heads) * u64::from(p.seq_kv);
        let tensors = 4 * (p.rows() + keys) * u64::from(p.head_dim) * p.dtype.size() as u64;
        Cost { flops: forward.flops / 2 * 5, bytes: tensors + p.rows() * 4 }
    }

    /// The widest vector (elements, at most `limit`) that divides every position and the head dimension
    /// of everything that is read.
    pub(crate) fn width(&self, limit: u64) -> usize {
        self.forward.width_with(limit, &[self.forward.out, self.dout])
    }
}
