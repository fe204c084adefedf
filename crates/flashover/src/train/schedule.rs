//! Learning rate of each step.

use std::f64::consts::PI;

use serde::Serialize;

/// Learning rate of each step: linear warm-up, then a decay.
///
/// ```
/// use flashover::train::{Decay, Schedule};
///
/// let schedule = Schedule { warmup: 4, decay: Decay::Cosine, steps: 12, ..Schedule::constant(1e-3) };
/// assert_eq!(schedule.rate(0), 0.25e-3);
/// assert_eq!(schedule.rate(4), 1e-3);
/// assert!((schedule.rate(8) - 0.5e-3).abs() < 1e-12);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Schedule {
    /// Largest learning rate.
    pub learning_rate: f64,
    /// Number of steps of linear warm-up.
    pub warmup: usize,
    /// Course of the rate after the warm-up.
    pub decay: Decay,
    /// Number of steps, with the warm-up, after which the decay ends.
    pub steps: usize,
    /// Rate at the end of the decay, as a share of the largest, from 0 to 1.
    pub floor: f64,
}

/// Course of a learning rate after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// The same rate at every step.
    Constant,
    /// Half a cosine.
    Cosine,
    /// A line.
    Linear,
    /// Constant, then a line over the last steps (warm-up, stable, decay; Hu et al., 2024, arXiv:2404.06395).
    Stable {
        /// Number of steps of the line.
        last: usize,
    },
}

impl Schedule {
    /// Returns a schedule with the same rate at every step.
    pub const fn constant(learning_rate: f64) -> Self {
        Self { learning_rate, warmup: 0, decay: Decay::Constant, steps: 0, floor: 0.0 }
    }

    /// Returns the learning rate of a step, counted from 0.
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.learning_rate * (step + 1) as f64 / self.warmup as f64;
        }
        let first = match self.decay {
            Decay::Stable { last } => self.steps.saturating_sub(last).max(self.warmup),
            _ => self.warmup,
        };
        let falling = self.steps.saturating_sub(first).max(1) as f64;
        let passed = (step.saturating_sub(first) as f64 / falling).min(1.0);
        let share = match self.decay {
            Decay::Constant => return self.learning_rate,
            Decay::Cosine => 0.5 * (1.0 + (PI * passed).cos()),
            Decay::Linear | Decay::Stable { .. } => 1.0 - passed,
        };
        self.learning_rate * (self.floor + (1.0 - self.floor) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_and_fall() {
        let of = |warmup, decay, steps, floor| Schedule {
            warmup,
            decay,
            steps,
            floor,
            ..Schedule::constant(2.0)
        };
        let constant = of(2, Decay::Constant, 0, 0.0);
        assert_eq!([0, 1, 2, 1000].map(|step| constant.rate(step)), [1.0, 2.0, 2.0, 2.0]);
        let close = |schedule: Schedule, want: &[f64]| {
            for (step, want) in want.iter().enumerate() {
                let rate = schedule.rate(step);
                assert!((rate - want).abs() < 1e-12, "{schedule:?} {step}: {rate} for {want}");
            }
        };
        let half = 2.0 * 0.5 * (1.0 + (PI / 4.0).cos());
        close(of(0, Decay::Cosine, 4, 0.0), &[2.0, half, 1.0, 2.0 - half, 0.0, 0.0]);
        close(of(1, Decay::Cosine, 3, 0.1), &[2.0, 2.0, 1.1, 0.2, 0.2]);
        close(of(0, Decay::Linear, 4, 0.0), &[2.0, 1.5, 1.0, 0.5, 0.0, 0.0]);
        close(of(1, Decay::Stable { last: 2 }, 6, 0.0), &[2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 0.0]);
        // All steps are warm-up.
        assert!(of(8, Decay::Cosine, 4, 0.0).rate(8).is_finite());
    }
}
