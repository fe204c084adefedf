//! Cross-entropy loss of rows of logits, and its gradient.
//!
//! ```text
//! z = softcap · tanh(logits / softcap), or logits;  y = z / temperature
//! lse = ln Σ exp y;  p = exp(y - lse)
//! entropy = -Σ p · ln p;  loss = -weight · (y[target] - lse) - entropy_weight · entropy
//! gradient = (weight · (p - (v == target)) + entropy_weight · p · (ln p + entropy)) / temperature · (1 - (z / softcap)²)
//! ```
//!
//! All formulas are per row. Loss, log-probability and gradient are 0 if the target is ignored.

use rayon::prelude::*;

use crate::{Comparison, DType, Error, compare};

/// Cross-entropy problem: rows of logits with targets and weights.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy<'a> {
    /// `[rows, vocab]`
    pub logits: &'a [f32],
    pub vocab: usize,
    /// `[rows]`; None ignores the row.
    pub targets: &'a [Option<u32>],
    /// `[rows]`
    pub weights: &'a [f32],
    /// `[rows]`; None without an entropy bonus.
    pub entropy_weights: Option<&'a [f32]>,
    pub softcap: Option<f64>,
    pub temperature: f64,
}

/// Results of one row.
struct RowLoss {
    /// Loss, log-probability, entropy, log-sum-exp.
    stats: [f64; 4],
    /// `[vocab]`
    gradient: Vec<f64>,
}

/// Arithmetic of a row: f64, or f32 as in a naive kernel.
trait Arithmetic: Copy {
    fn round(x: f64) -> f64;
    fn tanh(x: f64) -> f64;
}

#[derive(Clone, Copy)]
struct Exact;

#[derive(Clone, Copy)]
struct Naive;

impl Arithmetic for Exact {
    fn round(x: f64) -> f64 {
        x
    }

    fn tanh(x: f64) -> f64 {
        x.tanh()
    }
}

impl Arithmetic for Naive {
    fn round(x: f64) -> f64 {
        f64::from(x as f32)
    }

    /// Uses one exponential.
    fn tanh(x: f64) -> f64 {
        let (r, tail) = (Self::round, Self::round((-2.0 * x.abs()).exp()));
        r(r(1.0 - tail) / r(1.0 + tail)).copysign(x)
    }
}

impl CrossEntropy<'_> {
    fn row<A: Arithmetic>(&self, row: usize) -> RowLoss {
        let r = A::round;
        let logits = self.logits[row * self.vocab..][..self.vocab].iter().map(|x| f64::from(*x));
        let z: Vec<f64> = match self.softcap {
            Some(cap) => logits.map(|x| r(cap * A::tanh(r(x / cap)))).collect(),
            None => logits.collect(),
        };
        let y: Vec<f64> = z.iter().map(|z| r(z / self.temperature)).collect();
        let row_max = y.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let row_max = if row_max == f64::NEG_INFINITY { 0.0 } else { row_max };
        let weights: Vec<f64> = y.iter().map(|y| r(r(y - row_max).exp())).collect();
        let total = weights.iter().fold(0.0, |sum, w| r(sum + w));
        let moments = weights.iter().zip(&y);
        let moments = moments.filter(|(w, _)| **w != 0.0).map(|(w, y)| r(w * r(y - row_max)));
        let moment = moments.fold(0.0, |sum, m| r(sum + m));
        let log = r(total.ln());
        let mut stats = [0.0, 0.0, r(log - r(moment / total)), r(row_max + log)];
        let Some(target) = self.targets[row] else {
            return RowLoss { stats, gradient: vec![0.0; self.vocab] };
        };
        let weight = f64::from(self.weights[row]);
        stats[1] = y.get(target as usize).map_or(f64::NAN, |y| r(r(y - row_max) - log));
        let bonus = self.entropy_weights.map_or(0.0, |own| f64::from(own[row]));
        stats[0] = r(r(-weight * stats[1]) - r(bonus * stats[2]));
        let scale = if stats[1].is_nan() { f64::NAN } else { r(weight / self.temperature) };
        let slope = |(v, w): (usize, &f64)| {
            let p = r(w / total);
            let mut slope = r(scale * r(p - f64::from(u8::from(v == target as usize))));
            if bonus != 0.0 && *w != 0.0 {
                let log = r(r(r(y[v] - row_max) - log) + stats[2]);
                slope = r(slope + r(r(bonus / self.temperature) * r(p * log)));
            }
            self.softcap.map_or(slope, |cap| r(slope * r(1.0 - r(z[v] / cap).powi(2))))
        };
        RowLoss { stats, gradient: weights.iter().enumerate().map(slope).collect() }
    }

    fn rows<A: Arithmetic>(&self) -> Vec<RowLoss> {
        (0..self.targets.len()).into_par_iter().map(|row| self.row::<A>(row)).collect()
    }

    /// Compares stats `[4, rows]`, and a gradient `[rows, vocab]` of format `dtype` if there is one, with the
    /// reference. Each of the four stats is compared separately.
    ///
    /// # Errors
    /// Fails if the lengths are inconsistent.
    pub fn check(
        &self,
        stats: &[f32],
        gradient: Option<&[f32]>,
        dtype: DType,
    ) -> Result<Comparison, Error> {
        let rows = self.targets.len();
        for (what, need, have) in [
            ("logits", rows * self.vocab, self.logits.len()),
            ("weights", rows, self.weights.len()),
            ("entropy weights", rows, self.entropy_weights.map_or(rows, <[f32]>::len)),
            ("stats", 4 * rows, stats.len()),
        ] {
            if need != have {
                return Err(Error::Length { what, need, have });
            }
        }
        let (exact, naive) = (self.rows::<Exact>(), self.rows::<Naive>());
        let pick = |of: &[RowLoss], stat: usize| of.iter().map(|row| row.stats[stat]).collect();
        let mut all = Vec::new();
        for (stat, out) in stats.chunks(rows.max(1)).enumerate() {
            let (exact, naive): (Vec<_>, Vec<_>) = (pick(&exact, stat), pick(&naive, stat));
            all.push(compare(out, &exact, &naive, DType::F32)?);
        }
        if let Some(gradient) = gradient {
            let flat = |of: Vec<RowLoss>| of.into_iter().flat_map(|row| row.gradient);
            let naive: Vec<f64> = flat(naive).map(|slope| dtype.round(slope)).collect();
            all.push(compare(gradient, &flat(exact).collect::<Vec<_>>(), &naive, dtype)?);
        }
        Ok(Comparison::worst(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows, the second ignored.
    const ROWS: CrossEntropy<'_> = CrossEntropy {
        logits: &[0.5, -1.0, 2.0, 1.0, 1.0, 1.0],
        vocab: 3,
        targets: &[Some(1), None],
        weights: &[0.25, 3.0],
        entropy_weights: Some(&[0.5, 2.0]),
        softcap: Some(3.0),
        temperature: 0.7,
    };

    fn loss(logits: &[f32]) -> f64 {
        CrossEntropy { logits, ..ROWS }.row::<Exact>(0).stats[0]
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let row = ROWS.row::<Exact>(0);
        for v in 0..3 {
            let step = 1.0 / 1024.0;
            let moved = |by: f32| {
                let mut logits = ROWS.logits.to_vec();
                logits[v] += by;
                loss(&logits)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
            assert!((slope - row.gradient[v]).abs() < 1e-6, "{v}: {slope} {}", row.gradient[v]);
        }
    }

    #[test]
    fn stats_are_those_of_the_softmax() {
        let plain = CrossEntropy { softcap: None, temperature: 1.0, entropy_weights: None, ..ROWS };
        let logits = [0.1f32, 0.2, 0.7, 0.5, 0.25, 0.25].map(f32::ln);
        let rows = CrossEntropy { logits: &logits, ..plain }.rows::<Exact>();
        let close = |have: [f64; 4], want: [f64; 4]| {
            let far = have.iter().zip(want).any(|(have, want)| (have - want).abs() > 1e-6);
            assert!(!far, "{have:?}, not {want:?}");
        };
        let entropy = |p: [f64; 3]| -p.iter().map(|p| p * p.ln()).sum::<f64>();
        let log = 0.2f64.ln();
        close(rows[0].stats, [-0.25 * log, log, entropy([0.1, 0.2, 0.7]), 0.0]);
        close(rows[1].stats, [0.0, 0.0, entropy([0.5, 0.25, 0.25]), 0.0]);
        assert_eq!(rows[1].gradient, [0.0; 3]);
    }

    #[test]
    fn wrong_results_do_not_pass() -> Result<(), Error> {
        let rows = ROWS.rows::<Exact>();
        let stats: Vec<f32> =
            (0..4).flat_map(|stat| rows.iter().map(move |row| row.stats[stat] as f32)).collect();
        let gradient: Vec<f32> =
            rows.iter().flat_map(|row| row.gradient.iter().map(|g| *g as f32)).collect();
        assert!(ROWS.check(&stats, Some(&gradient), DType::F32)?.passed);
        for at in 0..stats.len() {
            for wrong in [stats[at] + 1e-4, f32::NAN] {
                let mut stats = stats.clone();
                stats[at] = wrong;
                assert!(!ROWS.check(&stats, None, DType::F32)?.passed, "{at} {wrong}");
            }
        }
        for at in 0..gradient.len() {
            let mut gradient = gradient.clone();
            gradient[at] += 1e-4;
            assert!(!ROWS.check(&stats, Some(&gradient), DType::F32)?.passed, "{at}");
        }
        assert!(ROWS.check(&stats[1..], None, DType::F32).is_err());
        let past = CrossEntropy { targets: &[Some(3), None], ..ROWS }.row::<Exact>(0);
        assert!(past.stats[1].is_nan() && past.gradient.iter().all(|g| g.is_nan()));
        Ok(())
    }
}
