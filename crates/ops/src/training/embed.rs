//! Gradients of embeddings.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kernels::embed_backward::{
    EmbedBackward, EmbedBackwardOperands, EmbedBackwardProblem, Segments,
};

use crate::call::{float_of, size_of};
use crate::cube::{cube, dense, written};
use crate::{Ctx, OpError};

/// Rows of a batch on the device, sorted by the row of a table that they looked up.
#[derive(Debug, Clone)]
pub struct RowSegments {
    order: Tensor<1, Int>,
    starts: Tensor<1, Int>,
    ids: Tensor<1, Int>,
}

impl RowSegments {
    /// Sorts rows by the ids that they looked up, such as tokens, and uploads the result.
    pub fn new(looked_up: &[u32], device: &Device) -> Self {
        let Segments { order, starts, ids } = Segments::new(looked_up);
        let upload = |words: Vec<u32>| {
            let len = words.len();
            let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
            Tensor::from_data(TensorData::new(words, [len]), (device, DType::I32))
        };
        Self { order: upload(order), starts: upload(starts), ids: upload(ids) }
    }

    /// Returns the number of rows of the table that were looked up.
    pub fn count(&self) -> usize {
        self.ids.dims()[0]
    }
}

/// Adds `scale · dx[r]` to the row of the table's gradient that r looked up, **in place**. Rows that no r looked up stay. Two
/// calls give the same bits.
///
/// # Shapes
/// dx `[rows, hidden]`; dtable `[vocab, hidden]` in f32, dense.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`], [`OpError::EmbedBackward`] for invalid operands;
/// [`OpError::Device`], [`OpError::NoGradient`], [`OpError::Tune`].
pub fn embed_backward(
    ctx: &Ctx,
    dx: Tensor<2>,
    segments: &RowSegments,
    dtable: &Tensor<2>,
    scale: f32,
) -> Result<(), OpError> {
    let ([rows, hidden], [vocab, _]) = (dx.dims(), dtable.dims());
    crate::call::same_shape("the segments", &segments.order.dims(), &[rows])?;
    let problem = EmbedBackwardProblem {
        rows: size_of(rows)?,
        hidden: size_of(hidden)?,
        segments: size_of(segments.count())?,
        vocab: size_of(vocab)?,
        dtype: float_of(dx.dtype())?,
        scale,
        accumulate: true,
    }
    .checked()?;
    let dtable = written("the table's gradient", dtable, &[vocab, hidden], DType::F32)?;
    let words = |words: &Tensor<1, Int>| Ok::<_, OpError>(cube(words.clone())?.handle);
    let operands = EmbedBackwardOperands {
        dx: dense(dx)?.handle,
        order: words(&segments.order)?,
        starts: words(&segments.starts)?,
        ids: words(&segments.ids)?,
        dtable: dtable.handle.clone(),
    };
    ctx.run::<EmbedBackward>(&dtable, &problem, &operands)
}
