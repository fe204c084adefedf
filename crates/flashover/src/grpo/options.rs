//! Options of GRPO.

use models::{Bound, KlFactor, Level, LossKind, PolicyRule};
use serde_json::{Map, Value, json};

use super::{GrpoError, Scale};
use crate::engine::Sampling;
use crate::train::TrainError;

/// Options of GRPO. The defaults are those of trl 1.16, except the length of completions and the factor of the KL estimate.
#[derive(Debug, Clone, PartialEq)]
pub struct GrpoOptions {
    /// Completions of each prompt.
    pub group: usize,
    /// Most tokens of a completion.
    pub max_new_tokens: usize,
    /// Distribution that completions are drawn from. Its seed is that of the run.
    pub sampling: Sampling,
    /// Tokens that end a completion, and are learned as part of it. None takes the model's.
    pub stop_tokens: Option<Vec<u32>>,
    /// Weights of the tokens of a step.
    pub loss: LossKind,
    /// Tokens that share a ratio.
    pub level: Level,
    /// Distance of the lower bound of a ratio from 1.
    pub epsilon: f64,
    /// Distance of the upper bound from 1, and for CISPO the bound itself; none for `epsilon`, and for CISPO 5.
    pub epsilon_high: Option<f64>,
    /// Largest ratio where the advantage is negative.
    pub delta: Option<f64>,
    /// Factor of the KL divergence from the reference.
    pub beta: f64,
    /// Factor of a token in its estimate.
    pub kl: KlFactor,
    /// Standard deviation that normalises advantages.
    pub scale: Scale,
    /// Steps of the optimizer on each batch of completions.
    pub updates: usize,
    /// Coefficient of the entropy bonus.
    pub entropy: f64,
    /// True to learn nothing from truncated completions.
    pub mask_truncated: bool,
    /// Correction of tokens for the difference between the distribution that they were drawn from and that which is trained.
    pub correction: Option<Correction>,
    /// Place of the reference, if `beta` is not 0 and all weights are trained.
    pub reference: ReferencePlace,
    /// Batches after which the present weights become the reference; none for never.
    pub renew_reference: Option<usize>,
    /// Completions of a micro-batch: those of one forward and backward pass.
    pub micro_batch: usize,
}

impl Default for GrpoOptions {
    fn default() -> Self {
        Self {
            group: 8,
            max_new_tokens: 128,
            sampling: Sampling { temperature: 1.0, ..Sampling::default() },
            stop_tokens: None,
            loss: LossKind::default(),
            level: Level::default(),
            epsilon: 0.2,
            epsilon_high: None,
            delta: None,
            beta: 0.0,
            kl: KlFactor::default(),
            scale: Scale::default(),
            updates: 1,
            entropy: 0.0,
            mask_truncated: false,
            correction: None,
            reference: ReferencePlace::default(),
            renew_reference: None,
            micro_batch: 8,
        }
    }
}

/// Place of a copy of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReferencePlace {
    /// Device memory, in the dtype of the weights.
    #[default]
    Device,
    /// Host memory. While the reference is computed, the copy takes the place of the weights, which moves them three times.
    Host,
}

/// Correction of advantages by p / q of what was drawn, with q of the sampler and p of the trainer.
///
/// Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Correction {
    /// Tokens that share a factor: each has its own, or all of a completion have the product of theirs.
    pub level: Level,
    /// Largest factor.
    pub most: f64,
    /// True to learn nothing with a larger factor, false to take the largest.
    pub masks: bool,
}

impl Default for Correction {
    fn default() -> Self {
        Self { level: Level::Token, most: 2.0, masks: false }
    }
}

impl Correction {
    /// Returns the factors of a completion's tokens, given ln p and ln q of each.
    pub(super) fn factors(&self, trained: &[f32], drawn: &[f32]) -> Vec<f32> {
        let bounded = |log: f64| match log.exp() {
            factor if factor <= self.most => factor as f32,
            factor if self.masks || factor.is_nan() => 0.0,
            _ => self.most as f32,
        };
        let logs =
            trained.iter().zip(drawn).map(|(own, drawn)| f64::from(*own) - f64::from(*drawn));
        match self.level {
            Level::Token => logs.map(bounded).collect(),
            Level::Sequence => vec![bounded(logs.sum()); trained.len()],
        }
    }
}

impl GrpoOptions {
    /// Returns the rule of the loss.
    pub(super) fn rule(&self) -> PolicyRule {
        let bound = match self.loss {
            LossKind::Cispo => Bound::Capped { most: self.epsilon_high.unwrap_or(5.0) },
            _ => Bound::Clipped {
                low: self.epsilon,
                high: self.epsilon_high.unwrap_or(self.epsilon),
                delta: self.delta,
            },
        };
        PolicyRule {
            bound,
            level: self.level,
            beta: self.beta,
            kl: self.kl,
            temperature: f64::from(self.sampling.temperature),
        }
    }

    /// Returns the options that change a run, by their names on the command line.
    pub(super) fn named(&self) -> Map<String, Value> {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed } = self.sampling;
        let correction = self
            .correction
            .map(|own| json!([format!("{:?}", own.level).to_lowercase(), own.most, own.masks]));
        let options = json!({
            "group": self.group,
            "max-new-tokens": self.max_new_tokens,
            "temperature": temperature,
            "top-k": top_k,
            "top-p": top_p,
            "min-p": min_p,
            "repetition-penalty": repetition_penalty,
            "seed": seed,
            "stop-tokens": self.stop_tokens,
            "loss": self.loss.name(),
            "ratio": format!("{:?}", self.level).to_lowercase(),
            "epsilon": self.epsilon,
            "epsilon-high": self.epsilon_high,
            "delta": self.delta,
            "beta": self.beta,
            "kl": format!("{:?}", self.kl).to_lowercase(),
            "scale": format!("{:?}", self.scale).to_lowercase(),
            "updates": self.updates,
            "entropy": self.entropy,
            "mask-truncated": self.mask_truncated,
            "correction": correction,
            "reference": format!("{:?}", self.reference).to_lowercase(),
            "renew-reference": self.renew_reference,
            "micro-batch": self.micro_batch,
        });
        match options {
            Value::Object(options) => options,
            _ => unreachable!("an object"),
        }
    }

    /// Returns true if ratios need the log-probabilities before the first update.
    pub(super) fn needs_old(&self) -> bool {
        self.updates > 1 || self.correction.is_some()
    }

    /// # Errors
    /// [`TrainError::Option`] and [`GenerateError::Sampling`](crate::GenerateError::Sampling) for a number out of range.
    pub fn check(&self) -> Result<(), GrpoError> {
        const ABOVE: &str = "above 0";
        const MOST: usize = 65_536;
        let finite = |value: f64| (value as f32).is_finite();
        let above = |value: f64| finite(value) && value > 0.0;
        let least = |value: f64| finite(value) && value >= 0.0;
        let temperature = f64::from(self.sampling.temperature);
        let count = |value: usize| value as f64;
        let clips = self.loss != LossKind::Cispo;
        let high = self.epsilon_high.unwrap_or(if clips { self.epsilon } else { 5.0 });
        let (delta, most) =
            (self.delta.unwrap_or(2.0), self.correction.map_or(2.0, |own| own.most));
        let renew = self.renew_reference.unwrap_or(1);
        let rules = [
            (
                "group",
                count(self.group),
                (2..=MOST).contains(&self.group),
                "from 2 to 65536: a completion is compared with others of its prompt",
            ),
            (
                "max-new-tokens",
                count(self.max_new_tokens),
                (1..=1 << 30).contains(&self.max_new_tokens),
                "from 1 to 2^30",
            ),
            ("temperature", temperature, above(temperature), ABOVE),
            ("epsilon", self.epsilon, (0.0..1.0).contains(&self.epsilon), "from 0 to below 1"),
            (
                "epsilon-high",
                high,
                finite(high) && (!clips || high >= self.epsilon),
                "of --epsilon or more",
            ),
            ("epsilon-high", high, high > 0.0 || clips, ABOVE),
            (
                "delta",
                delta,
                finite(delta) && delta > 1.0 + high.min(self.epsilon),
                "above 1 + --epsilon",
            ),
            ("beta", self.beta, least(self.beta), "of 0 or more"),
            ("entropy", self.entropy, finite(self.entropy), "within f32"),
            ("updates", count(self.updates), (1..=MOST).contains(&self.updates), "from 1 to 65536"),
            ("correction-max", most, above(most), ABOVE),
            ("renew-reference", count(renew), renew >= 1, "of 1 or more"),
            ("micro-batch", count(self.micro_batch), self.micro_batch >= 1, "of 1 or more"),
        ];
        self.sampling.check()?;
        match rules.into_iter().find(|(_, _, valid, _)| !valid) {
            Some((name, value, _, range)) => Err(TrainError::Option { name, value, range }.into()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corrections_are_bounded_ratios() {
        let ln = f32::ln;
        let trained = [ln(0.5), ln(0.6), ln(0.1), f32::NAN];
        let drawn = [ln(0.25), ln(0.1), ln(0.4), ln(0.5)];
        let of = |level, masks| Correction { level, most: 2.5, masks }.factors(&trained, &drawn);
        let near = |have: &[f32], want: &[f32]| {
            assert!(
                have.iter().zip(want).all(|(have, want)| (have - want).abs() < 1e-6),
                "{have:?}"
            );
        };
        near(&of(Level::Token, false), &[2.0, 2.5, 0.25, 0.0]);
        near(&of(Level::Token, true), &[2.0, 0.0, 0.25, 0.0]);
        // The product of all is 2 * 6 * 0.25 = 3.
        let three = |masks| {
            let correction = Correction { level: Level::Sequence, most: 2.5, masks };
            correction.factors(&trained[..3], &drawn[..3])
        };
        near(&three(false), &[2.5; 3]);
        near(&three(true), &[0.0; 3]);
        near(&of(Level::Sequence, false), &[0.0; 4]);
    }
}
