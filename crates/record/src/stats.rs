//! Median and spread of samples.

/// Order statistics of timing samples, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    pub median: f64,
    pub p10: f64,
    pub p90: f64,
    pub p95: f64,
    pub samples: usize,
}

impl Summary {
    /// Summarises `samples`; `None` if there are none or one is not finite.
    pub fn from_samples(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|s| !s.is_finite()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 0.5),
            p10: quantile(&sorted, 0.1),
            p90: quantile(&sorted, 0.9),
            p95: quantile(&sorted, 0.95),
            samples: sorted.len(),
        })
    }
}

/// Returns quantile `q`, interpolated linearly between the two nearest ranks.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        let s = Summary::from_samples(&[4.0, 1.0, 3.0, 2.0]).expect("finite samples");
        assert_eq!((s.median, s.samples), (2.5, 4));
        assert!((s.p10 - 1.3).abs() < 1e-12 && (s.p90 - 3.7).abs() < 1e-12);
        assert_eq!(Summary::from_samples(&[]), None);
        assert_eq!(Summary::from_samples(&[1.0, f64::NAN]), None);
    }
}
