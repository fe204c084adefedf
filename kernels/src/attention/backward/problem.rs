//! Attention backward problems: the forward problem and the strides of the gradients.

use serde::{Deserialize, Serialize};
use tune::Cost;

use crate::attention::{AttentionProblem, HeadStrides, InvalidAttention};

/// Gradients of one attention with respect to q, k and v. A bias or mask changes the weights but
/// gets no gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BackwardProblem {
    /// The forward problem; it must store its log-sum-exp.
    pub forward: AttentionProblem,
    pub dout: HeadStrides,
    pub dq: HeadStrides,
    pub dk: HeadStrides,
    pub dv: HeadStrides,
}

impl BackwardProblem {
    /// Problem whose gradients have the strides of their tensors. Change fields, then call
    /// [`BackwardProblem::checked`].
    ///
    /// # Errors
    /// See [`InvalidAttention`].
    pub fn from_forward(forward: AttentionProblem) -> Result<Self, InvalidAttention> {
        let AttentionProblem { q, k, v, out, .. } = forward;
        Self { forward, dout: out, dq: q, dk: k, dv: v }.checked()
    }

    /// Returns the problem if it is valid.
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

    /// Minimum number of elements in the buffers of dout, dq, dk and dv. With varying lengths,
    /// every sequence counts as the longest.
    pub fn extents(&self) -> [usize; 4] {
        let p = &self.forward;
        [
            p.reach(self.dout, p.heads, p.seq_q),
            p.reach(self.dq, p.heads, p.seq_q),
            p.reach(self.dk, p.kv_heads, p.seq_kv),
            p.reach(self.dv, p.kv_heads, p.seq_kv),
        ]
    }

    /// Minimum work: two recomputed forward matmuls and three for the gradients, as in the
    /// literature.
    pub fn cost(&self) -> Cost {
        let forward = self.forward.cost();
        // Reads q, k, v, out, dout and the log-sum-exp; writes dq, dk and dv.
        let p = &self.forward;
        let keys = u64::from(p.batch) * u64::from(p.kv_heads) * u64::from(p.seq_kv);
        let tensors = 4 * (p.rows() + keys) * u64::from(p.head_dim) * p.dtype.size() as u64;
        Cost { flops: forward.flops / 2 * 5, bytes: tensors + p.rows() * 4 }
    }

    /// Widest vector in elements, at most `limit`, that divides all strides of the inputs and the
    /// head dimension.
    pub(crate) fn width(&self, limit: u64) -> usize {
        self.forward.width_with(limit, &[self.forward.out, self.dout])
    }
}
