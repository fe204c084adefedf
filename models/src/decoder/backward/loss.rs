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

use std::ops::Range;

use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Tensor};
use ops::training::{LossOptions, LossStats, add_product, cross_entropy};
use ops::{Epilogue, linear, matmul};

use super::{Learns, Objective, Pass};
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

/// Loss of a batch.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Sum over the learned tokens, `[1]` in f32.
    pub sum: Tensor<1>,
    /// Number of learned tokens.
    pub tokens: usize,
    /// Numbers of the learned tokens, in order; none for a likelihood, which needs only the sum.
    pub stats: Option<TokenStats>,
}

/// Numbers of learned tokens, each `[tokens]` in f32.
#[derive(Debug, Clone)]
pub struct TokenStats {
    /// ln p
    pub log_probability: Tensor<1>,
    /// Entropy of the distribution, in nats.
    pub entropy: Tensor<1>,
}

/// The output projection, and the final norm's output.
struct Head<'a, 'b> {
    pass: &'b Pass<'a>,
    /// `[vocab, hidden]`
    weight: Tensor<2>,
    /// `[rows, hidden]`
    y: Tensor<2>,
    options: LossOptions,
}

impl Head<'_, '_> {
    fn logits(&self, rows: Range<usize>) -> Result<Tensor<2>, Error> {
        let (y, weight) = (self.y.clone().slice_dim(0, rows), self.weight.clone());
        Ok(linear(&self.pass.decoder.ctx, y, weight.transpose(), Epilogue::default())?)
    }

    /// Returns the numbers of some rows, and overwrites the logits with their gradient if there are weights.
    fn stats(
        &self,
        rows: Range<usize>,
        logits: &Tensor<2>,
        weights: Option<[Option<Tensor<1>>; 2]>,
    ) -> Result<LossStats, Error> {
        let gradient = weights.is_some();
        let [weights, entropy_weights] = weights.unwrap_or_default();
        let device = &self.pass.decoder.device;
        let weights = weights.unwrap_or_else(|| Tensor::ones([rows.len()], (device, DType::F32)));
        let targets = self.pass.batch.targets.clone().slice_dim(0, rows);
        let options = LossOptions { gradient, ..self.options };
        let ctx = &self.pass.decoder.ctx;
        Ok(cross_entropy(ctx, logits, targets, weights, entropy_weights, options)?)
    }
}

impl Pass<'_> {
    /// Returns the loss, and with a weight the gradient of `weight` · `scale` · loss with respect to x `[rows, hidden]`.
    pub(super) fn loss(
        &self,
        x: Tensor<2>,
        weight: Option<(f64, Tensor<1>)>,
    ) -> Result<(Loss, Option<Tensor<2>>), Error> {
        let _part = trace::span(|| "loss");
        let (decoder, batch) = (self.decoder, self.batch);
        let (ctx, config) = (&decoder.ctx, &decoder.config);
        let slot = if config.tie_embeddings { Slot::Embedding } else { Slot::Head };
        let (head, dhead) = match self.learns {
            Learns::Weights(flat) => {
                let sums = self.gradients.map(|own| own.matrix(flat.parameters(), slot));
                (flat.padded(slot)?, sums.transpose()?)
            }
            Learns::Factors(_) | Learns::Nothing => (decoder.head.dense()?, None),
        };
        let shape = x.dims();
        let learned = match &batch.rows {
            Some(rows) => x.clone().select(0, rows.clone()),
            None => x,
        };
        let y = decoder.norm(&decoder.final_norm, learned.clone(), None)?;
        let count = y.dims()[0];
        let factor = weight.map(|(weight, scale)| scale * weight);
        let gradient = factor.is_some();
        let options = LossOptions {
            vocab: config.vocab,
            softcap: config.logit_softcap.map(|cap| cap as f32),
            temperature: batch.objective.temperature(),
            gradient,
        };
        let at_once = rows_at_once(count, [y.dims()[1], head.dims()[0]], y.dtype());
        let chunks = || (0..count).step_by(at_once).map(|from| from..(from + at_once).min(count));
        let head = Head { pass: self, weight: head, y, options };
        let policy = batch.objective.policy();
        let (mut known, mut shared) = (None, None);
        if let Some(policy) = policy.filter(|policy| policy.shares()) {
            let each = chunks().map(|rows| {
                let logits = head.logits(rows.clone())?;
                Ok(head.stats(rows, &logits, None)?.log_probability)
            });
            let all = joined(each.collect::<Result<_, Error>>()?, 0);
            shared = policy.shared(&all);
            known = Some(all);
        }
        let (mut sum, mut parts, mut stats) = (None, Vec::new(), Vec::new());
        for rows in chunks() {
            let logits = head.logits(rows.clone())?;
            let weights = match (&factor, policy) {
                (None, _) => None,
                (Some(factor), None) => Some([Some(factor.clone().expand([rows.len()])), None]),
                (Some(factor), Some(policy)) => {
                    let before = match &known {
                        Some(all) => Some(all.clone().slice_dim(0, rows.clone())),
                        None if policy.varies() => {
                            Some(head.stats(rows.clone(), &logits, None)?.log_probability)
                        }
                        None => None,
                    };
                    let scaled = |own: Tensor<1>| own * factor.clone();
                    let slopes = policy.slopes(rows.clone(), before.as_ref(), shared.as_ref());
                    let entropy = policy.entropy_weights(rows.clone());
                    Some([Some(scaled(slopes)), entropy.map(scaled)])
                }
            };
            let gradient = weights.is_some();
            let own = head.stats(rows.clone(), &logits, weights)?;
            let loss = match policy {
                Some(policy) => policy.loss(rows.clone(), &own, shared.as_ref()),
                None => -own.log_probability.clone().sum(),
            };
            sum = Some(sum.map_or(loss.clone(), |sum: Tensor<1>| sum + loss));
            if !matches!(batch.objective, Objective::Likelihood) {
                stats.push([own.log_probability, own.entropy]);
            }
            decoder.note_memory();
            if !gradient {
                continue;
            }
            if let Some(dhead) = &dhead {
                let y = head.y.clone().slice_dim(0, rows);
                add_product(ctx, logits.clone().transpose(), y, dhead, true)?;
            }
            let dy = matmul(ctx, logits, head.weight.clone(), Epilogue::default())?;
            parts.push(decoder.paced(dy)?);
        }
        let stats = (!stats.is_empty()).then(|| {
            let (log_probability, entropy): (Vec<_>, Vec<_>) = stats
                .into_iter()
                .map(|[log_probability, entropy]| (log_probability, entropy))
                .unzip();
            TokenStats { log_probability: joined(log_probability, 0), entropy: joined(entropy, 0) }
        });
        let sum = sum.expect("something is learned");
        let loss = Loss { sum, tokens: batch.count, stats };
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
