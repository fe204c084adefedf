//! The loss of the last layer's output, and the gradients of the head and the final norm.
//!
//! ```text
//! y = norm(x)                                                      rows that are learned, if they are few
//! for each chunk of rows: logits = y · Wᵀ;  loss, dlogits in place;  dW += dlogitsᵀ · y;  dy = dlogits · W
//! dx = normᵀ(dy)
//! ```
//!
//! Chunks are of equal length: at most the rows that 2³⁰ bytes of logits hold, but at least 4096. Then reading W, and adding to dW, costs less than
//! multiplying.

use burn::tensor::{IndexingUpdateOp, Tensor};
use ops::training::{LossOptions, add_product, cross_entropy};
use ops::{Epilogue, linear, matmul};

use super::{FlatWeights, Gradients, Pass};
use crate::Error;
use crate::names::Slot;

/// Fewest rows of a chunk, if the batch has them.
const ROWS: usize = 4096;
/// Bytes of logits of a chunk, unless it then had fewer rows.
const BYTES: usize = 1 << 30;

impl Pass<'_> {
    /// Returns the loss `[1]`, and the gradient of x `[rows, hidden]`.
    pub(super) fn loss(
        &self,
        flat: &FlatWeights,
        gradients: &Gradients,
        x: Tensor<2>,
        (weight, scale): (f64, Tensor<1>),
    ) -> Result<(Tensor<1>, Tensor<2>), Error> {
        let _part = trace::span(|| "loss");
        let (decoder, batch) = (self.decoder, self.batch);
        let (ctx, config) = (&decoder.ctx, &decoder.config);
        let slot = if config.tie_embeddings { Slot::Embedding } else { Slot::Head };
        let (head, dhead) = (flat.padded(slot)?, gradients.matrix(slot)?);
        let shape = x.dims();
        let learned = match &batch.rows {
            Some(rows) => x.clone().select(0, rows.clone()),
            None => x,
        };
        let y = decoder.norm(&decoder.final_norm, learned.clone(), None)?;
        let count = y.dims()[0];
        let weights = (scale * weight).expand([count]);
        let options = LossOptions {
            vocab: config.vocab,
            softcap: config.logit_softcap.map(|cap| cap as f32),
            temperature: 1.0,
            gradient: true,
        };
        let size = y.dtype().size() * head.dims()[0];
        let chunks = count.div_ceil((BYTES / size).max(ROWS));
        let at_once = count.div_ceil(chunks);
        let (mut loss, mut parts) = (None, Vec::new());
        for from in (0..count).step_by(at_once) {
            let to = (from + at_once).min(count);
            let y = y.clone().slice_dim(0, from..to);
            let logits = linear(ctx, y.clone(), head.clone().transpose(), Epilogue::default())?;
            let targets = batch.targets.clone().slice_dim(0, from..to);
            let weights = weights.clone().slice_dim(0, from..to);
            let stats = cross_entropy(ctx, &logits, targets, weights, options)?;
            let own = -stats.log_probability.sum();
            loss = Some(loss.map_or(own.clone(), |loss: Tensor<1>| loss + own));
            decoder.note_memory();
            add_product(ctx, logits.clone().transpose(), y, &dhead, true)?;
            let dy = matmul(ctx, logits, head.clone(), Epilogue::default())?;
            parts.push(decoder.paced(dy)?);
        }
        let (loss, dy) = (loss.expect("something is learned"), crate::decoder::joined(parts, 0));
        let dx =
            self.norm_backward(&decoder.final_norm, learned, dy, None, Slot::FinalNorm, gradients)?;
        let dx = match &batch.rows {
            None => dx,
            Some(rows) => {
                let dtype = dx.dtype();
                let empty = Tensor::zeros(shape, (&decoder.device, dtype));
                empty.select_assign(0, rows.clone(), dx, IndexingUpdateOp::Add)
            }
        };
        Ok((loss, dx))
    }
}
