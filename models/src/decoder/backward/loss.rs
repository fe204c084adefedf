//! The loss of the last layer's output, and the gradients of the head and the final norm.
//!
//! ```text
//! y = norm(x)                                                      rows that are learned, if they are few
//! for each chunk of rows: logits = y · Wᵀ;  loss, dlogits in place;  dW += dlogitsᵀ · y;  dy = dlogits · W
//! dx = normᵀ(dy)
//! ```
//!
//! A chunk has the largest power of two of rows whose logits fit in 512 MiB. Reading W and adding to dW costs little:
//! with 128256 tokens and 2048 columns on an H200, chunks of 2048 rows take 0.4% longer than chunks of 4096. But dy needs 2²²
//! elements, which are 128 tiles, to occupy a card: of GPT-2's 768 columns, chunks of 4096 rows take 8% longer than of 8192.

use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Tensor};
use ops::training::{LossOptions, add_product, cross_entropy};
use ops::{Epilogue, linear, matmul};

use super::{Learns, Pass};
use crate::decoder::joined;
use crate::names::Slot;
use crate::{DecoderConfig, Error};

/// Fewest rows of a chunk, and elements of its dy, if the batch has them.
const LEAST: [usize; 2] = [2048, 1 << 22];
/// Bytes of logits of a chunk, unless it then had fewer rows.
const BYTES: usize = 1 << 29;

/// Returns the rows of a chunk, for `count` rows of `hidden` columns and their logits.
fn rows_at_once(count: usize, [hidden, logits]: [usize; 2], dtype: DType) -> usize {
    let least = LEAST[0].max(LEAST[1] / hidden).next_power_of_two();
    let most = BYTES / (logits * dtype.size());
    count.min(least.max(most.checked_ilog2().map_or(0, |log| 1 << log)))
}

impl DecoderConfig {
    /// Returns the number of rows whose logits are live at once during training.
    pub(crate) fn rows_with_loss(&self, rows: usize, dtype: FloatDType) -> usize {
        rows_at_once(rows, [self.hidden, self.vocab], dtype.into())
    }
}

impl Pass<'_> {
    /// Returns the loss `[1]`, and with a weight the gradient of `weight` · `scale` · loss with respect to x `[rows, hidden]`.
    pub(super) fn loss(
        &self,
        x: Tensor<2>,
        weight: Option<(f64, Tensor<1>)>,
    ) -> Result<(Tensor<1>, Option<Tensor<2>>), Error> {
        let _part = trace::span(|| "loss");
        let (decoder, batch) = (self.decoder, self.batch);
        let (ctx, config) = (&decoder.ctx, &decoder.config);
        let slot = if config.tie_embeddings { Slot::Embedding } else { Slot::Head };
        let (head, dhead) = match self.learns {
            Learns::Weights(flat) => {
                let sums = self.gradients.map(|own| own.matrix(flat.parameters(), slot));
                (flat.padded(slot)?, sums.transpose()?)
            }
            Learns::Factors(_) => (decoder.head.dense()?, None),
        };
        let shape = x.dims();
        let learned = match &batch.rows {
            Some(rows) => x.clone().select(0, rows.clone()),
            None => x,
        };
        let y = decoder.norm(&decoder.final_norm, learned.clone(), None)?;
        let count = y.dims()[0];
        let gradient = weight.is_some();
        let weights: Tensor<1> = match weight {
            Some((weight, scale)) => (scale * weight).expand([count]),
            None => Tensor::ones([count], (&decoder.device, DType::F32)),
        };
        let options = LossOptions {
            vocab: config.vocab,
            softcap: config.logit_softcap.map(|cap| cap as f32),
            temperature: 1.0,
            gradient,
        };
        let at_once = rows_at_once(count, [y.dims()[1], head.dims()[0]], y.dtype());
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
            if !gradient {
                continue;
            }
            if let Some(dhead) = &dhead {
                add_product(ctx, logits.clone().transpose(), y, dhead, true)?;
            }
            let dy = matmul(ctx, logits, head.clone(), Epilogue::default())?;
            parts.push(decoder.paced(dy)?);
        }
        let loss = loss.expect("something is learned");
        if !gradient {
            return Ok((loss, None));
        }
        let dy = joined(parts, 0);
        let dx = self.norm_backward(&decoder.final_norm, learned, dy, None, Slot::FinalNorm)?;
        let dx = match &batch.rows {
            None => dx,
            Some(rows) => {
                let dtype = dx.dtype();
                let empty = Tensor::zeros(shape, (&decoder.device, dtype));
                empty.select_assign(0, rows.clone(), dx, IndexingUpdateOp::Add)
            }
        };
        Ok((loss, Some(dx)))
    }
}
