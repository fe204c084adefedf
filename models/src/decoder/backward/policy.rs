//! The loss of a policy gradient on a device, and its slope by each token's log-probability.
//!
//! The slope is `-∂loss/∂ln p`, which is the weight of a token in cross entropy:
//!
//! ```text
//! clipped:  r · a, or 0 where a bound decides        capped:  min(r, most) · a
//! + beta · weight · (exp d - 1)                      d = ln p_reference - ln p
//! or  beta · weight · r · d                          if the estimate has the factor r
//! or  beta · weight · r · (exp d - 1 - mean (exp d - d - 1))    if the tokens of a completion share it
//! ```
//!
//! See [`Policy`](crate::Policy) for the loss.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ops::training::LossStats;

use crate::policy::{Bound, KlFactor, PolicyRows, PolicyRule};

/// Results that are asked of the learned tokens.
pub(in crate::decoder) enum Objective {
    /// -ln p, weighted alike.
    Likelihood,
    /// ln p and entropy of each, without a gradient.
    Measured {
        temperature: f64,
    },
    Policy(Box<OnDevice>),
}

impl Objective {
    pub(super) fn temperature(&self) -> f32 {
        match self {
            Self::Likelihood => 1.0,
            Self::Measured { temperature } => *temperature as f32,
            Self::Policy(own) => own.rule.temperature as f32,
        }
    }

    pub(super) const fn policy(&self) -> Option<&OnDevice> {
        match self {
            Self::Policy(own) => Some(own),
            _ => None,
        }
    }
}

/// Numbers of the learned tokens, each `[rows]`.
pub(in crate::decoder) struct OnDevice {
    rule: PolicyRule,
    gain: Tensor<1>,
    /// Weight, and ln p of the reference.
    kl: Option<[Tensor<1>; 2]>,
    old: Option<Tensor<1>>,
    entropy: Option<Tensor<1>>,
    spans: Option<Spans>,
}

/// Numbers that the tokens of a completion share, each `[rows]`.
pub(super) struct Shared {
    /// ln r; none if all are 0.
    log_ratio: Option<Tensor<1>>,
    /// Mean of the estimates of the KL divergence.
    kl: Option<Tensor<1>>,
}

/// Rows of each sequence.
struct Spans {
    /// Rows of each sequence, and then the row after the last, `[sequences · longest]`.
    rows: Tensor<1, Int>,
    shape: [usize; 2],
    /// `[sequences, 1]`
    lengths: Tensor<2>,
    /// Sequence of each row.
    of_row: Tensor<1, Int>,
}

impl OnDevice {
    pub(in crate::decoder) fn new(rule: PolicyRule, rows: PolicyRows, device: &Device) -> Self {
        let PolicyRows { gain, kl, old, entropy, spans } = rows;
        let list = |values: Vec<f32>| floats(values, device);
        Self {
            rule,
            gain: list(gain),
            kl: kl.map(|both| both.map(list)),
            old: old.map(list),
            entropy: entropy.map(list),
            spans: spans.map(|lengths| Spans::new(&lengths, device)),
        }
    }

    /// Returns true if slopes need all log-probabilities of a sequence.
    pub(super) const fn shares(&self) -> bool {
        self.spans.is_some()
    }

    /// Returns true if slopes depend on log-probabilities.
    pub(super) const fn varies(&self) -> bool {
        self.old.is_some() || self.kl.is_some()
    }

    /// Returns the weights of the entropies of some rows.
    pub(super) fn entropy_weights(&self, rows: Range<usize>) -> Option<Tensor<1>> {
        self.entropy.as_ref().map(|own| own.clone().slice_dim(0, rows))
    }

    /// Returns the numbers that tokens share, given ln p of all rows; none if they share nothing.
    pub(super) fn shared(&self, log_probability: &Tensor<1>) -> Option<Shared> {
        let spans = self.spans.as_ref()?;
        let kl = self.kl.as_ref().filter(|_| self.rule.kl == KlFactor::Ratio);
        let old = self.old.as_ref();
        Some(Shared {
            log_ratio: old.map(|old| spans.means(log_probability.clone() - old.clone())),
            kl: kl.map(|[_, reference]| {
                spans.means(estimate(reference.clone() - log_probability.clone()))
            }),
        })
    }

    /// Returns the slopes of some rows, without those of entropies. `log_probability` is theirs, if slopes depend on it; `shared`
    /// is of all rows.
    pub(super) fn slopes(
        &self,
        rows: Range<usize>,
        log_probability: Option<&Tensor<1>>,
        shared: Option<&Shared>,
    ) -> Tensor<1> {
        let part = |of: &Tensor<1>| of.clone().slice_dim(0, rows.clone());
        let gain = part(&self.gain);
        let Some(log_probability) = log_probability else { return gain };
        let ratio = self.ratio(rows.clone(), log_probability, shared);
        let slope = match (ratio.clone(), self.rule.bound) {
            (None, _) => gain,
            (Some(ratio), Bound::Capped { most }) => ratio.clamp_max(most) * gain,
            (Some(ratio), Bound::Clipped { low, high, delta }) => {
                let bounded = ratio.clone().clamp(1.0 - low, 1.0 + high) * gain.clone();
                // NaN is never above, so that it stays.
                let decides = (ratio.clone() * gain.clone()).greater(bounded);
                let free = ratio.clone().mask_fill(decides, 0.0);
                let free = match delta {
                    Some(delta) => free.mask_fill(ratio.greater_elem(delta), 0.0),
                    None => free,
                };
                free * gain
            }
        };
        let Some([weight, reference]) = &self.kl else { return slope };
        let far = part(reference) - log_probability.clone();
        let own = match (self.rule.kl, shared.and_then(|own| own.kl.as_ref())) {
            (KlFactor::One, _) => return slope + part(weight) * (far.exp() - 1.0),
            (KlFactor::Ratio, None) => far,
            (KlFactor::Ratio, Some(mean)) => far.exp() - 1.0 - part(mean),
        };
        let own = part(weight) * own;
        slope + ratio.map_or(own.clone(), |ratio| ratio * own)
    }

    /// Returns the loss of some rows, `[1]`.
    pub(super) fn loss(
        &self,
        rows: Range<usize>,
        stats: &LossStats,
        shared: Option<&Shared>,
    ) -> Tensor<1> {
        let part = |of: &Tensor<1>| of.clone().slice_dim(0, rows.clone());
        let (gain, log_probability) = (part(&self.gain), &stats.log_probability);
        let ratio = self.ratio(rows.clone(), log_probability, shared);
        let ratio = ratio.unwrap_or_else(|| gain.ones_like());
        let mut each = match self.rule.bound {
            Bound::Capped { most } => {
                (ratio.clone().clamp_max(most) * gain * log_probability.clone()).neg()
            }
            Bound::Clipped { low, high, delta } => {
                let bounded = ratio.clone().clamp(1.0 - low, 1.0 + high);
                let free = ratio.clone();
                let free = delta.map_or(free.clone(), |delta| free.clamp_max(delta));
                (free * gain.clone()).min_pair(bounded * gain).neg()
            }
        };
        if let Some([weight, reference]) = &self.kl {
            let far = part(reference) - log_probability.clone();
            let own = part(weight) * estimate(far);
            each = each + if self.rule.kl == KlFactor::Ratio { ratio * own } else { own };
        }
        if let Some(weight) = &self.entropy {
            each = each - part(weight) * stats.entropy.clone();
        }
        each.sum()
    }

    /// Returns the ratios of some rows; none if all are 1.
    fn ratio(
        &self,
        rows: Range<usize>,
        log_probability: &Tensor<1>,
        shared: Option<&Shared>,
    ) -> Option<Tensor<1>> {
        let part = |of: &Tensor<1>| of.clone().slice_dim(0, rows.clone());
        let log_ratio = match (shared, &self.old) {
            (Some(shared), _) => part(shared.log_ratio.as_ref()?),
            (None, Some(old)) => log_probability.clone() - part(old),
            (None, None) => return None,
        };
        Some(log_ratio.exp())
    }
}

/// Returns the estimates of the KL divergence, given ln p_reference - ln p.
fn estimate(far: Tensor<1>) -> Tensor<1> {
    far.clone().exp() - far - 1.0
}

impl Spans {
    fn new(lengths: &[usize], device: &Device) -> Self {
        let (longest, count) = (lengths.iter().copied().max().unwrap_or(0), lengths.len());
        let all: usize = lengths.iter().sum();
        let (mut rows, mut of_row, mut first) = (Vec::new(), Vec::new(), 0);
        for (sequence, len) in lengths.iter().enumerate() {
            rows.extend((0..longest).map(|at| if at < *len { first + at } else { all } as i32));
            of_row.extend(vec![sequence as i32; *len]);
            first += len;
        }
        let words = |words: Vec<i32>| {
            let len = words.len();
            Tensor::from_data(TensorData::new(words, [len]), (device, DType::I32))
        };
        let each = floats(lengths.iter().map(|len| *len as f32).collect(), device);
        let lengths = each.reshape([count, 1]);
        Self { rows: words(rows), shape: [count, longest], lengths, of_row: words(of_row) }
    }

    /// Returns the mean of each row's sequence. The order of sums is fixed.
    fn means(&self, values: Tensor<1>) -> Tensor<1> {
        let zero = Tensor::zeros([1], (&values.device(), DType::F32));
        let apart = Tensor::cat(vec![values, zero], 0).select(0, self.rows.clone());
        let sums = apart.reshape(self.shape).sum_dim(1);
        let [sequences, _] = self.shape;
        (sums / self.lengths.clone()).reshape([sequences]).select(0, self.of_row.clone())
    }
}

fn floats(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
}
