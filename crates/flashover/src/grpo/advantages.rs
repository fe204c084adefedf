//! GRPO: advantages of completions over the others of their prompt.
//!
//! ```text
//! reward = Σ over functions that scored the completion: weight · score
//! advantage = reward - mean of the group                        the completions of one prompt
//!   divided by deviation + 1e-4                                 deviation of the group, or of the batch, or not divided
//! ```
//!
//! A deviation is that of a sample: the sum of squares is divided by one less than the count (Bessel's correction).
//!
//! Source: Shao et al., "DeepSeekMath" (2024); Liu et al., "Understanding R1-Zero-Like Training" (2025), for no division.

/// Deviation that divides advantages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// Deviation among the completions of the same prompt.
    #[default]
    Group,
    /// Deviation among all completions of the step.
    Batch,
    /// None: advantages are differences of rewards.
    None,
}

/// Added to a deviation, so that none divides by 0.
const LEAST: f64 = 1e-4;

/// Advantages of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// Advantage of each completion, the groups one after the other; none if no function scored it.
    pub values: Vec<Option<f64>>,
    /// Reward of each completion.
    pub rewards: Vec<Option<f64>>,
    /// Number of groups whose rewards are all equal: they have no gradient.
    pub equal_groups: usize,
}

impl Advantages {
    /// Returns the advantages of completions in groups of `group`. `scores` has, for each completion, a score for each function, or
    /// none if it did not score it; `weights` has one per function.
    ///
    /// # Panics
    /// Panics if a completion has another number of scores than there are weights.
    pub fn new(scores: &[Vec<Option<f64>>], weights: &[f64], group: usize, scale: Scale) -> Self {
        let reward = |scores: &Vec<Option<f64>>| {
            assert_eq!(scores.len(), weights.len(), "a score, or none, for each function");
            let parts =
                scores.iter().zip(weights).filter_map(|(score, weight)| Some((*score)? * weight));
            scores.iter().any(Option::is_some).then(|| parts.sum::<f64>())
        };
        let rewards: Vec<Option<f64>> = scores.iter().map(reward).collect();
        let batch = deviation(&rewards);
        let mut equal_groups = 0;
        let values = rewards.chunks(group).flat_map(|rewards| {
            let (mean, own) = (mean(rewards), deviation(rewards));
            equal_groups += usize::from(own == 0.0);
            let divisor = match scale {
                Scale::Group => own + LEAST,
                Scale::Batch => batch + LEAST,
                Scale::None => 1.0,
            };
            let value = move |reward: &Option<f64>| reward.map(|reward| (reward - mean) / divisor);
            rewards.iter().map(value).collect::<Vec<_>>()
        });
        Self { values: values.collect(), rewards: rewards.clone(), equal_groups }
    }
}

/// Returns the mean; of equal values, exactly that value.
fn mean(values: &[Option<f64>]) -> f64 {
    let values: Vec<f64> = values.iter().flatten().copied().collect();
    match values.first() {
        Some(first) if values.iter().all(|own| own == first) => *first,
        _ => values.iter().sum::<f64>() / values.len().max(1) as f64,
    }
}

/// Returns the deviation of a sample; 0 for fewer than two values.
fn deviation(values: &[Option<f64>]) -> f64 {
    let (mean, count) = (mean(values), values.iter().flatten().count());
    let squares: f64 = values.iter().flatten().map(|value| (value - mean).powi(2)).sum();
    if count < 2 { 0.0 } else { (squares / (count - 1) as f64).sqrt() }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// Advantages that `models/fixtures/grpo.py` writes.
    #[derive(Deserialize)]
    struct Golden {
        advantages: Vec<Table>,
    }

    #[derive(Deserialize)]
    struct Table {
        /// `[functions][completions]`
        rewards: Vec<Vec<Option<f64>>>,
        weights: Vec<f64>,
        scale: String,
        advantages: Vec<f64>,
    }

    const GROUP: usize = 4;

    #[test]
    fn advantages_are_those_of_trl() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fixtures/grpo.json");
        let text = std::fs::read_to_string(path).expect("grpo.py writes it");
        let golden: Golden = serde_json::from_str(&text).expect("as grpo.py writes it");
        assert_eq!(golden.advantages.len(), 9);
        for Table { rewards, weights, scale, advantages } in golden.advantages {
            let scale = match &*scale {
                "group" => Scale::Group,
                "batch" => Scale::Batch,
                _ => Scale::None,
            };
            let scores: Vec<Vec<Option<f64>>> =
                (0..2 * GROUP).map(|at| rewards.iter().map(|own| own[at]).collect()).collect();
            let made = Advantages::new(&scores, &weights, GROUP, scale);
            for (at, (have, want)) in made.values.iter().zip(&advantages).enumerate() {
                // trl computes in f32, and counts completions without a score as 0.
                let have = have.unwrap_or(0.0);
                assert!(
                    (have - want).abs() < 1e-6 * want.abs().max(1.0),
                    "{at}: {have} for {want}"
                );
            }
            assert_eq!(made.equal_groups, 0);
        }
    }

    #[test]
    fn a_completion_without_a_score_counts_nowhere() {
        let scores = |all: &[Option<f64>]| all.iter().map(|own| vec![*own]).collect::<Vec<_>>();
        let some = scores(&[Some(1.0), None, Some(3.0), Some(2.0), Some(2.0), None]);
        let made = Advantages::new(&some, &[2.0], 3, Scale::None);
        let want = [Some(-2.0), None, Some(2.0), Some(0.0), Some(0.0), None];
        assert_eq!(made.values, want);
        assert_eq!(made.rewards[..3], [Some(2.0), None, Some(6.0)]);
        assert_eq!(made.equal_groups, 1);
        // The sum of these has a rounding error.
        let equal = Advantages::new(&scores(&[Some(0.1); 3]), &[1.0], 3, Scale::Group);
        assert_eq!((equal.values, equal.equal_groups), (vec![Some(0.0); 3], 1));
        let none = Advantages::new(&scores(&[None; 3]), &[1.0], 3, Scale::Group);
        assert_eq!((none.values, none.equal_groups), (vec![None; 3], 1));
    }
}
