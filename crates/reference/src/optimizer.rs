//! Optimizer steps.
//!
//! ```text
//! g = factor · gradient
//! m = β₁ m + (1 - β₁) g,  v = β₂ v + (1 - β₂) g²
//! p = (1 - rate · decay) p - rate · (m / c₁) / (√(v / c₂) + eps)        c = 1 - βᵗ
//! ```
//!
//! and the elementwise steps of Muon, before and after the orthogonalisation: see [`Rule`].
//!
//! Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), in the order of `torch.optim.AdamW`.

use crate::{Comparison, DType, Error, compare};

/// Numbers of an AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Factor of the gradients.
    pub factor: f64,
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// 1 - β₁ᵗ
    pub c1: f64,
    /// 1 - β₂ᵗ
    pub c2: f64,
    pub rule: Rule,
}

/// Formulas of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    AdamW,
    /// p = β₁ m + (1 - β₁) g of the new m; v stays.
    Momentum,
    /// p = (1 - rate · decay) p - rate · gradient; m and v stay.
    Descent,
}

/// Parameters with their moments, `[len]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameters<T> {
    pub p: Vec<T>,
    pub m: Vec<T>,
    pub v: Vec<T>,
}

impl AdamW {
    /// Steps all parameters.
    ///
    /// # Errors
    /// Fails if the lists have different lengths.
    pub fn run(
        &self,
        gradient: &[f32],
        before: &Parameters<f64>,
    ) -> Result<Parameters<f64>, Error> {
        check(gradient.len(), before)?;
        let mut after = before.clone();
        for (i, gradient) in gradient.iter().enumerate() {
            let g = self.factor * f64::from(*gradient);
            let m = self.beta1 * before.m[i] + (1.0 - self.beta1) * g;
            let v = self.beta2 * before.v[i] + (1.0 - self.beta2) * g * g;
            let kept = (1.0 - self.learning_rate * self.weight_decay) * before.p[i];
            let size = (v / self.c2).sqrt() + self.eps;
            match self.rule {
                Rule::AdamW => {
                    after.p[i] = kept - self.learning_rate * (m / self.c1) / size;
                    (after.m[i], after.v[i]) = (m, v);
                }
                Rule::Momentum => {
                    (after.p[i], after.m[i]) = (self.beta1 * m + (1.0 - self.beta1) * g, m);
                }
                Rule::Descent => after.p[i] = kept - self.learning_rate * f64::from(*gradient),
            }
        }
        Ok(after)
    }

    /// As [`AdamW::run`], in f32 as a naive kernel computes it.
    ///
    /// # Errors
    /// As [`AdamW::run`].
    pub fn naive(
        &self,
        gradient: &[f32],
        before: &Parameters<f64>,
    ) -> Result<Parameters<f32>, Error> {
        check(gradient.len(), before)?;
        let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect::<Vec<_>>();
        let mut after =
            Parameters { p: narrow(&before.p), m: narrow(&before.m), v: narrow(&before.v) };
        let (beta1, beta2) = (self.beta1 as f32, self.beta2 as f32);
        let rate = self.learning_rate as f32;
        for (i, gradient) in gradient.iter().enumerate() {
            let g = self.factor as f32 * gradient;
            let m = beta1 * after.m[i] + (1.0 - self.beta1) as f32 * g;
            let v = beta2 * after.v[i] + (1.0 - self.beta2) as f32 * g * g;
            let kept = after.p[i] * (1.0 - rate * self.weight_decay as f32);
            let size = (v / self.c2 as f32).sqrt() + self.eps as f32;
            match self.rule {
                Rule::AdamW => {
                    after.p[i] = kept - rate * (m / self.c1 as f32) / size;
                    (after.m[i], after.v[i]) = (m, v);
                }
                Rule::Momentum => {
                    let p = beta1 * m + (1.0 - self.beta1) as f32 * g;
                    (after.p[i], after.m[i]) = (p, m);
                }
                Rule::Descent => after.p[i] = kept - rate * gradient,
            }
        }
        Ok(after)
    }

    /// Compares parameters and moments in f32 with the exact ones; the worst of the three comparisons.
    ///
    /// # Errors
    /// As [`AdamW::run`].
    pub fn check(
        &self,
        gradient: &[f32],
        before: &Parameters<f64>,
        after: &Parameters<f32>,
        dtypes: [DType; 3],
    ) -> Result<Vec<Comparison>, Error> {
        let (exact, naive) = (self.run(gradient, before)?, self.naive(gradient, before)?);
        let one = |got: &[f32], exact: &[f64], naive: &[f32], dtype: DType| {
            let naive: Vec<f64> = naive.iter().map(|x| dtype.round(f64::from(*x))).collect();
            compare(got, exact, &naive, dtype)
        };
        Ok(vec![
            one(&after.p, &exact.p, &naive.p, dtypes[0])?,
            one(&after.m, &exact.m, &naive.m, dtypes[1])?,
            one(&after.v, &exact.v, &naive.v, dtypes[2])?,
        ])
    }
}

fn check<T>(len: usize, of: &Parameters<T>) -> Result<(), Error> {
    for (what, have) in [("p", of.p.len()), ("m", of.m.len()), ("v", of.v.len())] {
        if have != len {
            return Err(Error::Length { what, need: len, have });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two steps with β₁ = 1/2, β₂ = 3/4, rate 1/4, decay 1/2, by hand: g = 2, then -2.
    #[test]
    fn two_steps_are_right() {
        let step = |t: i32| AdamW {
            factor: 2.0,
            learning_rate: 0.25,
            beta1: 0.5,
            beta2: 0.75,
            eps: 0.0,
            weight_decay: 0.5,
            c1: 1.0 - 0.5f64.powi(t),
            c2: 1.0 - 0.75f64.powi(t),
            rule: Rule::AdamW,
        };
        let start = Parameters { p: vec![1.0], m: vec![0.0], v: vec![0.0] };
        let first = step(1).run(&[1.0], &start).expect("lengths agree");
        // m / c₁ = 2 and √(v / c₂) = 2.
        assert_eq!(first, Parameters { p: vec![0.875 - 0.25], m: vec![1.0], v: vec![1.0] });
        let second = step(2).run(&[-1.0], &first).expect("lengths agree");
        assert_eq!((second.m[0], second.v[0]), (-0.5, 1.75));
        let want = 0.875 * 0.625 + 0.25 * (0.5 / 0.75) / (1.75f64 / 0.4375).sqrt();
        assert!((second.p[0] - want).abs() < 1e-15, "{second:?}");
        assert!(step(1).run(&[1.0, 2.0], &start).is_err());
    }
}
