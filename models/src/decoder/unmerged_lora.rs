//! Unmerged LoRA of matrices in 4 or 8 bits. Merging would round it to their steps.
//!
//! ```text
//! y = x·Wᵀ + (x·Aᵀ)·Bᵀ     A [columns, k]: the factors of all matrices of a projection, one below the other
//!                          B [n, columns]: s·B of each matrix in its own rows and columns, 0 elsewhere
//! ```
//!
//! It costs two matmuls with few columns, for any number of matrices in a projection.

use burn::tensor::Tensor;
use ops::{Ctx, Epilogue, OpError, linear};

/// A and s·B of a projection, in the compute dtype.
#[derive(Debug, Clone)]
pub(super) struct UnmergedLora {
    /// `[columns, k]`
    pub(super) a: Tensor<2>,
    /// `[n, columns]`
    pub(super) b: Tensor<2>,
}

impl UnmergedLora {
    /// Returns residual + (x·Aᵀ)·Bᵀ, `[rows, n]` for x `[rows, k]`.
    pub(super) fn apply(
        &self,
        ctx: &Ctx,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> Result<Tensor<2>, OpError> {
        let h = linear(ctx, x, self.a.clone().transpose(), Epilogue::default())?;
        linear(ctx, h, self.b.clone().transpose(), Epilogue { residual, ..Epilogue::default() })
    }

    pub(super) fn bytes(&self) -> u64 {
        let of = |t: &Tensor<2>| (t.shape().num_elements() * t.dtype().size()) as u64;
        of(&self.a) + of(&self.b)
    }

    pub(super) fn columns(&self) -> usize {
        self.a.dims()[0]
    }
}
