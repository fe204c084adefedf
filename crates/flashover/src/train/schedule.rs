//! Learning rate of each step.

use std::f64::consts::PI;

/// Learning rate of each step: linear warm-up, then constant or cosine decay.
///
/// ```
/// use flashover::train::Schedule;
///
/// let schedule = Schedule { learning_rate: 1e-3, warmup: 4, cosine: Some(12) };
/// assert_eq!(schedule.rate(0), 0.25e-3);
/// assert_eq!(schedule.rate(4), 1e-3);
/// assert!((schedule.rate(8) - 0.5e-3).abs() < 1e-12);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Largest learning rate.
    pub learning_rate: f64,
    /// Number of steps of linear warm-up.
    pub warmup: usize,
    /// Number of steps, with the warm-up, after which the cosine decay reaches 0; none for a constant rate.
    pub cosine: Option<usize>,
}

impl Schedule {
    /// Returns a schedule with the same rate at every step.
    pub const fn constant(learning_rate: f64) -> Self {
        Self { learning_rate, warmup: 0, cosine: None }
    }

    /// Returns the learning rate of a step, counted from 0.
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.learning_rate * (step + 1) as f64 / self.warmup as f64;
        }
        let Some(steps) = self.cosine else { return self.learning_rate };
        let falling = steps.saturating_sub(self.warmup).max(1) as f64;
        let passed = ((step - self.warmup) as f64 / falling).min(1.0);
        self.learning_rate * 0.5 * (1.0 + (PI * passed).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_and_fall() {
        let of = |warmup, cosine| Schedule { learning_rate: 2.0, warmup, cosine };
        assert_eq!((of(0, None).rate(0), of(0, None).rate(1000)), (2.0, 2.0));
        assert_eq!(
            (of(2, None).rate(0), of(2, None).rate(1), of(2, None).rate(2)),
            (1.0, 2.0, 2.0)
        );
        let fall = of(0, Some(4));
        assert_eq!(fall.rate(0), 2.0);
        assert!((fall.rate(2) - 1.0).abs() < 1e-12 && fall.rate(4) < 1e-12 && fall.rate(9) < 1e-12);
        // All steps are warm-up.
        assert!(of(8, Some(4)).rate(8).is_finite());
    }
}
