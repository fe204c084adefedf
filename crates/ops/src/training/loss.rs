//! Cross entropy of logits, with its gradient in place.

use burn::tensor::{DType, Int, Tensor};
use kernels::cross_entropy::{
    CrossEntropy, CrossEntropyOperands, CrossEntropyProblem, Gradient, STATS,
};

use crate::call::{as_int32, empty_like, float_of, same_dtype, same_shape, size_of};
use crate::cube::{dense, float, written};
use crate::{Ctx, OpError};

/// Rules of a loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossOptions {
    /// Number of logits of a row; the columns after them are padding.
    pub vocab: usize,
    /// Soft cap of the logits.
    pub softcap: Option<f32>,
    /// Divisor of the logits, after the soft cap.
    pub temperature: f32,
    /// True to overwrite the logits with their gradient.
    pub gradient: bool,
}

/// Loss, log-probability of the target, entropy and log-sum-exp of each row, each `[rows]` in f32.
#[derive(Debug, Clone)]
pub struct LossStats {
    /// -weight · ln p(target) - entropy weight · entropy
    pub loss: Tensor<1>,
    /// ln p(target)
    pub log_probability: Tensor<1>,
    /// Entropy of the row, in nats.
    pub entropy: Tensor<1>,
    /// Log-sum-exp of the logits.
    pub log_sum_exp: Tensor<1>,
}

/// Computes `loss[r] = -weights[r] · ln softmax(logits[r])[targets[r]] - entropy_weights[r] · entropy(softmax(logits[r]))`. If asked, overwrites the logits **in place** with the
/// gradient of the losses' sum; its padding is 0. A row whose target is [`IGNORED`](super::IGNORED) has loss and gradient 0.
///
/// # Shapes
/// logits `[rows, stride]`, dense, with at least `vocab` columns; targets `[rows]`, I32 or U32; weights and entropy weights `[rows]` in
/// f32.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`], [`OpError::CrossEntropy`] for invalid operands;
/// [`OpError::Device`], [`OpError::NoGradient`], [`OpError::Tune`].
pub fn cross_entropy(
    ctx: &Ctx,
    logits: &Tensor<2>,
    targets: Tensor<1, Int>,
    weights: Tensor<1>,
    entropy_weights: Option<Tensor<1>>,
    options: LossOptions,
) -> Result<LossStats, OpError> {
    let LossOptions { vocab, softcap, temperature, gradient } = options;
    let [rows, stride] = logits.dims();
    same_shape("targets", &targets.dims(), &[rows])?;
    for (what, weights) in
        [("weights", Some(&weights)), ("entropy weights", entropy_weights.as_ref())]
    {
        let Some(weights) = weights else { continue };
        same_shape(what, &weights.dims(), &[rows])?;
        same_dtype(what, weights.dtype(), DType::F32)?;
    }
    let problem = CrossEntropyProblem {
        rows: size_of(rows)?,
        vocab: size_of(vocab)?,
        stride: size_of(stride)?,
        dtype: float_of(logits.dtype())?,
        softcap,
        temperature,
        gradient: if gradient { Gradient::InPlace } else { Gradient::None },
        entropy: entropy_weights.is_some(),
    }
    .checked()?;
    let logits = written("the logits", logits, &[rows, stride], logits.dtype())?;
    let stats = empty_like(&logits, [STATS, rows], arch::DType::F32);
    let operands = CrossEntropyOperands {
        logits: logits.handle.clone(),
        targets: dense(as_int32(targets))?.handle,
        weights: dense(weights)?.handle,
        entropy_weights: entropy_weights.map(dense).transpose()?.map(|own| own.handle),
        gradient: None,
        stats: stats.handle.clone(),
    };
    ctx.run::<CrossEntropy>(&logits, &problem, &operands)?;
    let stats: Tensor<2> = float(stats);
    let row = |at: usize| stats.clone().slice_dim(0, at..at + 1).reshape([rows]);
    Ok(LossStats { loss: row(0), log_probability: row(1), entropy: row(2), log_sum_exp: row(3) })
}
