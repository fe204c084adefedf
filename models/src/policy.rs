//! Losses of policy gradients: GRPO and its kin.
//!
//! ```text
//! for each learned token:
//!   a = weight · correction · advantage
//!   ln r = ln p - ln p_old, or the mean of these over the completion            r = 1 if there is no ln p_old
//!   clipped:  -min(min(r, delta) · a, clip(r, 1 - low, 1 + high) · a)
//!   capped:   -min(r, most) · a · ln p                                          the factor of ln p counts as a constant
//!   loss += this + beta · weight · k · (exp d - d - 1) - entropy_weight · entropy   d = ln p_reference - ln p;  k = r, or 1
//! ```
//!
//! The term in d estimates the KL divergence from the reference, and is never negative. Its gradient is that of the divergence only
//! with the factor r, also where r is 1. All p are those of the logits divided by the temperature.
//!
//! Sources: Shao et al., "DeepSeekMath" (2024), for GRPO and the estimate; DeepSeek-AI, "DeepSeek-V3.2"
//! (2025), for its factor; Yu et al., "DAPO" (2025), for two epsilons; MiniMax, "MiniMax-M1"
//! (2025), for the capped ratio (CISPO); Zheng et al., "Group Sequence Policy Optimization" (2025), for ratios of completions; Prime
//! Intellect, "INTELLECT-2" (2025), for delta.

use crate::{Error, Example};

/// Rule of a loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyRule {
    /// Bounds of the ratio.
    pub bound: Bound,
    /// Tokens that share a ratio.
    pub level: Level,
    /// Factor of the KL divergence from the reference.
    pub beta: f64,
    /// Factor of a token in its estimate.
    pub kl: KlFactor,
    /// Divisor of the logits.
    pub temperature: f64,
}

/// Bounds of the ratio of a token's probability to that of the policy that drew it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// A ratio beyond 1 - low or 1 + high earns nothing.
    Clipped {
        /// Distance of the lower bound from 1.
        low: f64,
        /// Distance of the upper bound from 1.
        high: f64,
        /// Largest ratio, also where the advantage is negative.
        delta: Option<f64>,
    },
    /// A ratio counts up to `most`, and is a constant factor of the gradient (CISPO).
    Capped {
        /// Upper bound.
        most: f64,
    },
}

/// Factor of a token in the estimate of the KL divergence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KlFactor {
    /// The ratio, so that the gradient is that of the divergence.
    #[default]
    Ratio,
    /// 1, as in DeepSeekMath.
    One,
}

/// Tokens that share a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    /// Each token has its own.
    #[default]
    Token,
    /// All tokens of a completion.
    Sequence,
}

/// Loss of some sequences, in place of their likelihood.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Rule of all sequences.
    pub rule: PolicyRule,
    /// One per example.
    pub sequences: Vec<PolicySequence>,
}

/// Numbers of one sequence. Lists have a number for each learned token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicySequence {
    /// Worth of the completion next to others of its prompt.
    pub advantage: f64,
    /// Factor of a token's loss, such as 1 / tokens of the step.
    pub weight: f64,
    /// Factor of a token's entropy, which the loss falls by.
    pub entropy_weight: f64,
    /// Factors of the advantage, per token: those of tokens that another distribution drew.
    pub correction: Option<Vec<f32>>,
    /// ln p of the policy that drew the tokens. All sequences of a policy have it, or none.
    pub old: Option<Vec<f32>>,
    /// ln p of the reference, if beta is not 0.
    pub reference: Option<Vec<f32>>,
}

/// Weights of the tokens of a step, and so the name of its loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LossKind {
    /// Each token weighs alike (DAPO).
    #[default]
    Dapo,
    /// Each completion weighs alike, and tokens alike in it (GRPO).
    Grpo,
    /// Each token weighs alike. It differs from [`LossKind::Dapo`] only in trainers that normalise each micro-batch.
    Bnpo,
    /// Each token weighs alike, as if all completions had the greatest length (Dr. GRPO).
    DrGrpo,
    /// Each token weighs alike; ratios are capped (CISPO).
    Cispo,
}

impl LossKind {
    /// All kinds, the default one first.
    pub const ALL: [Self; 5] = [Self::Dapo, Self::Grpo, Self::Bnpo, Self::DrGrpo, Self::Cispo];

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dapo => "dapo",
            Self::Grpo => "grpo",
            Self::Bnpo => "bnpo",
            Self::DrGrpo => "dr_grpo",
            Self::Cispo => "cispo",
        }
    }

    /// Returns the weight of each token of completions of these lengths: all those of a step. None is longer than `longest`.
    pub fn weights(self, lengths: &[usize], longest: usize) -> Vec<f64> {
        let count = lengths.len() as f64;
        let tokens = lengths.iter().sum::<usize>().max(1) as f64;
        let weight = |len: &usize| match self {
            Self::Dapo | Self::Bnpo | Self::Cispo => 1.0 / tokens,
            Self::Grpo => 1.0 / ((*len).max(1) as f64 * count),
            Self::DrGrpo => 1.0 / (longest as f64 * count),
        };
        lengths.iter().map(weight).collect()
    }
}

/// Numbers of the learned tokens of a batch, each `[rows]`, in f32. Learned tokens of a sequence are neighbours.
pub(crate) struct PolicyRows {
    /// a
    pub(crate) gain: Vec<f32>,
    /// beta · weight and ln p of the reference, if beta is not 0.
    pub(crate) kl: Option<[Vec<f32>; 2]>,
    pub(crate) old: Option<Vec<f32>>,
    /// Weights of entropies, if one is not 0.
    pub(crate) entropy: Option<Vec<f32>>,
    /// Learned tokens of each sequence, if they share a ratio.
    pub(crate) spans: Option<Vec<usize>>,
}

impl Policy {
    /// # Errors
    /// [`Error::PolicyLength`] for lists of another length than the learned tokens.
    pub(crate) fn rows(&self, examples: &[Example]) -> Result<PolicyRows, Error> {
        let expect = |what, have: usize, need: usize| match have == need {
            true => Ok(()),
            false => Err(Error::PolicyLength { what, have, need }),
        };
        expect("sequences", self.sequences.len(), examples.len())?;
        let PolicyRule { bound, beta, kl: factor, level, .. } = self.rule;
        let lengths: Vec<usize> = examples.iter().map(Example::learned).collect();
        let list = |what, of: fn(&PolicySequence) -> Option<&Vec<f32>>| {
            let mut all = Vec::new();
            for (own, need) in self.sequences.iter().zip(&lengths) {
                let own = of(own).map_or(&[][..], |own| own);
                expect(what, own.len(), *need)?;
                all.extend_from_slice(own);
            }
            Ok::<_, Error>(all)
        };
        let each = |of: &dyn Fn(&PolicySequence) -> f64| {
            let rows = self.sequences.iter().zip(&lengths);
            rows.flat_map(|(own, len)| vec![of(own) as f32; *len]).collect::<Vec<f32>>()
        };
        let mut gain = each(&|own| own.weight * own.advantage);
        if self.sequences.iter().any(|own| own.correction.is_some()) {
            let factors = list("corrections", |own| own.correction.as_ref())?;
            gain.iter_mut().zip(factors).for_each(|(gain, factor)| *gain *= factor);
        }
        let old = self.sequences.iter().any(|own| own.old.is_some());
        let old = old.then(|| list("old log-probabilities", |own| own.old.as_ref())).transpose()?;
        let by_sequence = level == Level::Sequence;
        if by_sequence && matches!(bound, Bound::Clipped { .. }) {
            // Each token of a completion moves the ratio of all: their gains count together.
            let mut rest = &mut gain[..];
            for len in &lengths {
                let (own, others) = rest.split_at_mut(*len);
                let mean = own.iter().map(|gain| f64::from(*gain)).sum::<f64>() / *len as f64;
                own.fill(mean as f32);
                rest = others;
            }
        }
        let kl = (beta != 0.0).then(|| {
            let reference = list("reference log-probabilities", |own| own.reference.as_ref())?;
            Ok::<_, Error>([each(&|own| beta * own.weight), reference])
        });
        let (moves, varies) = (kl.is_some() && factor == KlFactor::Ratio, old.is_some());
        let bonus = self.sequences.iter().any(|own| own.entropy_weight != 0.0);
        Ok(PolicyRows {
            gain,
            kl: kl.transpose()?,
            old,
            entropy: bonus.then(|| each(&|own| own.entropy_weight)),
            spans: (by_sequence && (moves || varies)).then_some(lengths),
        })
    }
}
