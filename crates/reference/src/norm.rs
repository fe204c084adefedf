//! Norms of rows.
//!
//! ```text
//! Rms           x / √(Σ x² / width + eps) · w
//! RmsPlusOne    x / √(Σ x² / width + eps) · (1 + w)
//! Layer         (x - mean) / √(Σ (x - mean)² / width + eps) · w + bias
//! ```
//!
//! All formulas are per row; a residual is added if there is one. Only the final result is rounded.
//!
//! Source: Ba et al., "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer Normalization"
//! (2019); `1 + w` by Gemma Team, "Gemma" (2024).

use rayon::prelude::*;

use crate::{Comparison, DType, Error, compare};

/// Formula of a norm with weight w.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormRule {
    /// x / rms·w
    Rms,
    /// x / rms·(1 + w)
    RmsPlusOne,
    /// (x - mean) / deviation·w + bias
    Layer,
}

/// A norm of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    pub rule: NormRule,
    /// Constant added to the mean square.
    pub eps: f64,
}

/// Operands of a norm next to x.
#[derive(Debug, Clone, Copy)]
pub struct NormOperands<'a> {
    /// `[width]`
    pub weight: &'a [f32],
    /// `[width]`
    pub bias: Option<&'a [f32]>,
    /// `[rows, width]`
    pub residual: Option<&'a [f32]>,
}

impl Norm {
    /// Normalises one row `[width]`.
    pub fn apply(&self, line: &mut [f64], weight: &[f32], bias: Option<&[f32]>) {
        let width = line.len() as f64;
        if self.rule == NormRule::Layer {
            let mean = line.iter().sum::<f64>() / width;
            line.iter_mut().for_each(|x| *x -= mean);
        }
        let square = line.iter().map(|x| x * x).sum::<f64>() / width;
        let size = (square + self.eps).sqrt();
        for (i, x) in line.iter_mut().enumerate() {
            let weight = f64::from(weight[i]);
            let weight = if self.rule == NormRule::RmsPlusOne { 1.0 + weight } else { weight };
            *x = *x / size * weight + bias.map_or(0.0, |bias| bias[i].into());
        }
    }

    /// As [`Norm::apply`], in f32 with sequential sums.
    pub fn apply_naively(&self, line: &mut [f32], weight: &[f32], bias: Option<&[f32]>) {
        let width = line.len() as f32;
        if self.rule == NormRule::Layer {
            let mean = line.iter().fold(0.0, |sum, x| sum + x) / width;
            line.iter_mut().for_each(|x| *x -= mean);
        }
        let square = line.iter().fold(0.0, |sum, x| sum + x * x) / width;
        let size = (square + self.eps as f32).sqrt();
        for (i, x) in line.iter_mut().enumerate() {
            let weight =
                if self.rule == NormRule::RmsPlusOne { 1.0 + weight[i] } else { weight[i] };
            *x = *x / size * weight + bias.map_or(0.0, |bias| bias[i]);
        }
    }

    /// Computes every result, `[rows, width]`.
    ///
    /// # Errors
    /// Fails if an operand does not have the shape that x's `[rows, width]` needs.
    pub fn run(&self, x: &[f32], operands: NormOperands<'_>) -> Result<Vec<f64>, Error> {
        let NormOperands { weight, bias, residual } = operands;
        operands.check(x.len())?;
        let mut out: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        out.par_chunks_mut(weight.len()).for_each(|line| self.apply(line, weight, bias));
        let added = residual.into_iter().flatten();
        out.iter_mut().zip(added).for_each(|(out, r)| *out += f64::from(*r));
        Ok(out)
    }

    /// Computes the result of a naive kernel: in f32, rounded to `dtype` once.
    ///
    /// # Errors
    /// As [`Norm::run`].
    pub fn naive(
        &self,
        x: &[f32],
        operands: NormOperands<'_>,
        dtype: DType,
    ) -> Result<Vec<f64>, Error> {
        let NormOperands { weight, bias, residual } = operands;
        operands.check(x.len())?;
        let mut out = x.to_vec();
        out.par_chunks_mut(weight.len()).for_each(|line| self.apply_naively(line, weight, bias));
        let added = residual.into_iter().flatten();
        out.iter_mut().zip(added).for_each(|(out, r)| *out += r);
        Ok(out.iter().map(|out| dtype.round(f64::from(*out))).collect())
    }

    /// Compares `out`, of format `dtype`, with every result.
    ///
    /// # Errors
    /// As [`Norm::run`]; a result of the wrong length.
    pub fn check(
        &self,
        x: &[f32],
        operands: NormOperands<'_>,
        out: &[f32],
        dtype: DType,
    ) -> Result<Comparison, Error> {
        compare(out, &self.run(x, operands)?, &self.naive(x, operands, dtype)?, dtype)
    }
}

/// Gradients of a norm with respect to its inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct NormGradients {
    /// `[rows, width]`, with the residual's gradient added.
    pub dx: Vec<f64>,
    /// `[width]`
    pub dw: Vec<f64>,
    /// `[width]`
    pub db: Vec<f64>,
}

impl Norm {
    /// Computes the gradients of x, weight and bias for the upstream gradient dout `[rows, width]`. `residual` is added to
    /// dx.
    ///
    /// # Errors
    /// Fails if an operand does not have the shape that x's `[rows, width]` needs.
    pub fn gradients(
        &self,
        x: &[f32],
        weight: &[f32],
        dout: &[f32],
        residual: Option<&[f32]>,
    ) -> Result<NormGradients, Error> {
        NormOperands { weight, bias: None, residual }.check(x.len())?;
        if dout.len() != x.len() {
            return Err(Error::Length { what: "dout", need: x.len(), have: dout.len() });
        }
        let width = weight.len();
        let mut out = NormGradients { dx: Vec::new(), dw: vec![0.0; width], db: vec![0.0; width] };
        for (x, dout) in x.chunks(width).zip(dout.chunks(width)) {
            let count = width as f64;
            let wide = |values: &[f32]| values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
            let (mut n, dout) = (wide(x), wide(dout));
            let is_layer = self.rule == NormRule::Layer;
            let mean = if is_layer { n.iter().sum::<f64>() / count } else { 0.0 };
            n.iter_mut().for_each(|n| *n -= mean);
            let factor = (n.iter().map(|n| n * n).sum::<f64>() / count + self.eps).sqrt().recip();
            n.iter_mut().for_each(|n| *n *= factor);
            let weight = weight.iter().map(|w| f64::from(*w));
            let plus = if self.rule == NormRule::RmsPlusOne { 1.0 } else { 0.0 };
            let g: Vec<f64> = weight.zip(&dout).map(|(w, dout)| (w + plus) * dout).collect();
            let along = g.iter().zip(&n).map(|(g, n)| g * n).sum::<f64>() / count;
            let total = if is_layer { g.iter().sum::<f64>() / count } else { 0.0 };
            out.dx.extend(g.iter().zip(&n).map(|(g, n)| factor * (g - n * along - total)));
            for i in 0..width {
                out.dw[i] += dout[i] * n[i];
                out.db[i] += dout[i];
            }
        }
        let added = residual.into_iter().flatten();
        out.dx.iter_mut().zip(added).for_each(|(dx, r)| *dx += f64::from(*r));
        Ok(out)
    }

    /// Computes the gradients of a naive kernel: in f32 with sequential sums; dx is rounded to `dtype` once.
    ///
    /// # Errors
    /// As [`Norm::gradients`].
    pub fn naive_gradients(
        &self,
        x: &[f32],
        weight: &[f32],
        dout: &[f32],
        residual: Option<&[f32]>,
        dtype: DType,
    ) -> Result<NormGradients, Error> {
        NormOperands { weight, bias: None, residual }.check(x.len())?;
        let width = weight.len();
        let mut out = NormGradients { dx: Vec::new(), dw: vec![0.0; width], db: vec![0.0; width] };
        for (x, dout) in x.chunks(width).zip(dout.chunks(width)) {
            let count = width as f32;
            let is_layer = self.rule == NormRule::Layer;
            let mean = if is_layer { x.iter().sum::<f32>() / count } else { 0.0 };
            let square = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / count;
            let factor = (square + self.eps as f32).sqrt().recip();
            let n: Vec<f32> = x.iter().map(|x| (x - mean) * factor).collect();
            let plus = if self.rule == NormRule::RmsPlusOne { 1.0 } else { 0.0 };
            let g: Vec<f32> = weight.iter().zip(dout).map(|(w, dout)| (w + plus) * dout).collect();
            let along = g.iter().zip(&n).map(|(g, n)| g * n).sum::<f32>() / count;
            let total = if is_layer { g.iter().sum::<f32>() / count } else { 0.0 };
            out.dx
                .extend(g.iter().zip(&n).map(|(g, n)| f64::from((g - n * along - total) * factor)));
            for i in 0..width {
                out.dw[i] = f64::from(out.dw[i] as f32 + dout[i] * n[i]);
                out.db[i] = f64::from(out.db[i] as f32 + dout[i]);
            }
        }
        let added = residual.into_iter().flatten();
        out.dx.iter_mut().zip(added).for_each(|(dx, r)| *dx += f64::from(*r));
        out.dx.iter_mut().for_each(|dx| *dx = dtype.round(*dx));
        Ok(out)
    }
}

impl NormOperands<'_> {
    fn check(&self, len: usize) -> Result<(), Error> {
        let width = self.weight.len();
        if width == 0 || len % width != 0 {
            return Err(Error::Length { what: "weight", need: len, have: width });
        }
        let length = |what, have: Option<&[f32]>, need| match have {
            Some(have) if have.len() != need => Err(Error::Length { what, need, have: have.len() }),
            _ => Ok(()),
        };
        length("bias", self.bias, width)?;
        length("residual", self.residual, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rule: NormRule, x: &[f32], operands: NormOperands<'_>) -> Vec<f64> {
        Norm { rule, eps: 1.0 }.run(x, operands).expect("lengths agree")
    }

    #[test]
    fn rules_are_those_of_the_papers() {
        // Rows with mean squares 15 and 0, plus eps.
        let x = [3.0, 5.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0f32];
        let x = x.map(|x| x * (15.0f32 / 16.5).sqrt());
        let weight = [1.0, 2.0, 0.5, -1.0f32];
        let plain = NormOperands { weight: &weight, bias: None, residual: None };
        let close = |got: &[f64], want: &[f64]| {
            assert_eq!(got.len(), want.len());
            got.iter().zip(want).for_each(|(g, w)| assert!((g - w).abs() < 1e-6, "{got:?}"));
        };
        let unit = (15.0f64 / 16.5).sqrt() / 4.0;
        let rms = [3.0, 10.0, 2.0, -4.0, 0.0, 0.0, 0.0, 0.0].map(|v| v * unit);
        close(&run(NormRule::Rms, &x, plain), &rms);
        let plus = [6.0, 15.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0].map(|v| v * unit);
        close(&run(NormRule::RmsPlusOne, &x, plain), &plus);
        // Around the mean: -1, 1, 0, 0 with a mean square of 1/2, plus eps.
        let x = [-1.0, 1.0, 0.0, 0.0, 7.0, 7.0, 7.0, 7.0f32];
        let (bias, residual) = ([0.25f32; 4], [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0f32]);
        let all = NormOperands { bias: Some(&bias), residual: Some(&residual), ..plain };
        let unit = 1.0 / 1.5f64.sqrt();
        let want = [0.25 - unit, 0.25 + 2.0 * unit, 0.25, 0.25, 1.25, 2.25, 3.25, 4.25];
        close(&run(NormRule::Layer, &x, all), &want);
    }

    /// The gradients are those of finite differences.
    #[test]
    fn gradients_are_slopes() {
        let (rows, width) = (3, 5);
        let fill = |seed, len| crate::fill(seed, len, crate::Distribution::Normal);
        let (x, w, dout) = (fill(1, rows * width), fill(2, width), fill(3, rows * width));
        for rule in [NormRule::Rms, NormRule::RmsPlusOne, NormRule::Layer] {
            let norm = Norm { rule, eps: 0.1 };
            let loss = |x: &[f32], w: &[f32]| -> f64 {
                let of = NormOperands { weight: w, bias: None, residual: None };
                let out = norm.run(x, of).expect("lengths agree");
                out.iter().zip(&dout).map(|(out, dout)| out * f64::from(*dout)).sum()
            };
            let got = norm.gradients(&x, &w, &dout, None).expect("lengths agree");
            let slope = |values: &[f32], i: usize, of: &dyn Fn(&[f32]) -> f64| {
                let h = 1.0 / 1024.0;
                let at = |by: f32| {
                    let mut values = values.to_vec();
                    values[i] += by;
                    (of(&values), f64::from(values[i]))
                };
                let ((low, from), (high, to)) = (at(-h), at(h));
                (high - low) / (to - from)
            };
            for i in 0..x.len() {
                let want = slope(&x, i, &|x| loss(x, &w));
                assert!((got.dx[i] - want).abs() < 1e-4, "{rule:?} dx {i}: {} {want}", got.dx[i]);
            }
            for i in 0..w.len() {
                let want = slope(&w, i, &|w| loss(&x, w));
                assert!((got.dw[i] - want).abs() < 1e-4, "{rule:?} dw {i}");
                let sum: f64 = dout.iter().skip(i).step_by(width).map(|d| f64::from(*d)).sum();
                assert!((got.db[i] - sum).abs() < 1e-9);
            }
            let near = norm.naive_gradients(&x, &w, &dout, Some(&x), DType::F32);
            let added = norm.gradients(&x, &w, &dout, Some(&x)).expect("lengths agree");
            let near = near.expect("lengths agree");
            assert!(near.dx.iter().zip(&added.dx).all(|(a, b)| (a - b).abs() < 1e-5));
        }
    }

    #[test]
    fn lengths_that_contradict_are_refused() {
        let norm = Norm { rule: NormRule::Rms, eps: 0.0 };
        let of = |weight, bias, residual| {
            norm.run(&[1.0; 6], NormOperands { weight, bias, residual }).is_ok()
        };
        assert!(of(&[1.0; 3], Some(&[0.0; 3]), Some(&[0.0; 6])));
        assert!(!of(&[1.0; 4], None, None) && !of(&[], None, None));
        assert!(!of(&[1.0; 3], Some(&[0.0; 2]), None));
        assert!(!of(&[1.0; 3], None, Some(&[0.0; 3])));
    }
}
