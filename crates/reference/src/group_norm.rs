//! Norms of groups of channels over all pixels of an image, with channels last.
//!
//! ```text
//! out[n, p, c] = act((1 + scale[n, c]) · ((x[n, p, c] - mean) / √(variance + eps) · w[c] + bias[c]) + shift[n, c])
//! ```
//!
//! Mean and variance are those of the pixels of image n and the channels of c's group. Only the final result is rounded.
//!
//! Source: Wu and He, "Group Normalization" (2018).

use rayon::prelude::*;

use crate::matmul::Activation;
use crate::{Comparison, DType, Error, compare};

/// Sizes of a group norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNorm {
    pub batch: usize,
    /// Pixels of an image.
    pub pixels: usize,
    pub channels: usize,
    pub groups: usize,
    /// Constant added to the variance.
    pub eps: f64,
    pub activation: Option<Activation>,
}

/// Operands of a group norm.
#[derive(Debug, Clone, Copy)]
pub struct GroupNormOperands<'a> {
    /// `[batch, pixels, channels]`
    pub x: &'a [f32],
    /// `[channels]`
    pub weight: &'a [f32],
    /// `[channels]`
    pub bias: &'a [f32],
    /// Scale, then shift: `[batch, 2, channels]`
    pub modulation: Option<&'a [f32]>,
}

impl GroupNorm {
    fn check_lengths(&self, operands: GroupNormOperands<'_>) -> Result<(), Error> {
        let GroupNormOperands { x, weight, bias, modulation } = operands;
        let modulation = modulation.map(|all| ("modulation", 2 * self.batch * self.channels, all));
        let all = self.batch * self.pixels * self.channels;
        let rest =
            [("x", all, x), ("weight", self.channels, weight), ("bias", self.channels, bias)];
        match rest.into_iter().chain(modulation).find(|(_, need, of)| of.len() != *need) {
            None => Ok(()),
            Some((what, need, of)) => Err(Error::Length { what, need, have: of.len() }),
        }
    }

    /// Computes every result, `[batch, pixels, channels]`.
    ///
    /// # Errors
    /// Fails if an operand has the wrong length.
    pub fn run(&self, operands: GroupNormOperands<'_>) -> Result<Vec<f64>, Error> {
        self.check_lengths(operands)?;
        let GroupNormOperands { x, weight, bias, modulation } = operands;
        let mut out: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let each = self.channels / self.groups;
        out.par_chunks_mut(self.pixels * self.channels).enumerate().for_each(|(n, image)| {
            for group in 0..self.groups {
                let own = |image: &[f64], of: &dyn Fn(f64) -> f64| -> f64 {
                    let pixels = image.chunks(self.channels);
                    let sum: f64 = pixels
                        .flat_map(|pixel| &pixel[group * each..(group + 1) * each])
                        .map(|x| of(*x))
                        .sum();
                    sum / (each * self.pixels) as f64
                };
                let mean = own(image, &|x| x);
                let variance = own(image, &|x| (x - mean) * (x - mean));
                let size = (variance + self.eps).sqrt();
                for pixel in image.chunks_mut(self.channels) {
                    for c in group * each..(group + 1) * each {
                        let mut value =
                            (pixel[c] - mean) / size * f64::from(weight[c]) + f64::from(bias[c]);
                        if let Some(modulation) = modulation {
                            let own = &modulation[2 * n * self.channels..];
                            let [scale, shift] = [own[c], own[self.channels + c]].map(f64::from);
                            value = value * (1.0 + scale) + shift;
                        }
                        pixel[c] = self.activation.map_or(value, |act| act.apply(value));
                    }
                }
            }
        });
        Ok(out)
    }

    /// Computes the result of a naive kernel: in f32, rounded to `dtype` once.
    ///
    /// # Errors
    /// As [`GroupNorm::run`].
    pub fn naive(&self, operands: GroupNormOperands<'_>, dtype: DType) -> Result<Vec<f64>, Error> {
        self.check_lengths(operands)?;
        let GroupNormOperands { x, weight, bias, modulation } = operands;
        let mut out = x.to_vec();
        let each = self.channels / self.groups;
        out.par_chunks_mut(self.pixels * self.channels).enumerate().for_each(|(n, image)| {
            for group in 0..self.groups {
                let own = |image: &[f32], of: &dyn Fn(f32) -> f32| -> f32 {
                    let mut sum = 0.0f32;
                    for pixel in image.chunks(self.channels) {
                        for x in &pixel[group * each..(group + 1) * each] {
                            sum += of(*x);
                        }
                    }
                    sum / (each * self.pixels) as f32
                };
                let mean = own(image, &|x| x);
                let variance = own(image, &|x| (x - mean) * (x - mean));
                let size = (variance + self.eps as f32).sqrt();
                for pixel in image.chunks_mut(self.channels) {
                    for c in group * each..(group + 1) * each {
                        let mut value = (pixel[c] - mean) / size * weight[c] + bias[c];
                        if let Some(modulation) = modulation {
                            let own = &modulation[2 * n * self.channels..];
                            value = value * (1.0 + own[c]) + own[self.channels + c];
                        }
                        pixel[c] = self.activation.map_or(value, |act| act.apply(value));
                    }
                }
            }
        });
        Ok(out.iter().map(|out| dtype.round(f64::from(*out))).collect())
    }

    /// Compares `out`, of format `dtype`, with every result.
    ///
    /// # Errors
    /// As [`GroupNorm::run`]; a result of the wrong length.
    pub fn check(
        &self,
        operands: GroupNormOperands<'_>,
        out: &[f32],
        dtype: DType,
    ) -> Result<Comparison, Error> {
        compare(out, &self.run(operands)?, &self.naive(operands, dtype)?, dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two groups of two channels, by hand.
    #[test]
    fn groups_are_normalised_over_pixels_and_channels() {
        let norm = GroupNorm {
            batch: 1,
            pixels: 2,
            channels: 4,
            groups: 2,
            eps: 0.0,
            activation: Some(Activation::Relu),
        };
        let of = GroupNormOperands {
            x: &[1.0, 3.0, 10.0, 10.0, 1.0, 3.0, 10.0, 14.0],
            weight: &[1.0, 2.0, 1.0, 1.0],
            bias: &[2.0, 0.5, 0.0, 0.0],
            modulation: None,
        };
        let root = 3.0f64.sqrt();
        let want = [1.0, 2.5, 0.0, 0.0, 1.0, 2.5, 0.0, root];
        let got = norm.run(of).expect("lengths agree");
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12), "{got:?}");
        let modulation = [1.0, 0.0, 0.0, -0.5, 0.0, 0.0, 3.0, 1.0];
        let of = GroupNormOperands { modulation: Some(&modulation), ..of };
        let want = [2.0, 2.5, 3.0 - 1.0 / root, 1.0 - 0.5 / root];
        let got = norm.run(of).expect("lengths agree");
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12), "{got:?}");
        let naive = norm.naive(of, DType::F32).expect("lengths agree");
        assert!(naive.iter().zip(got).all(|(naive, got)| (naive - got).abs() < 1e-5));
        norm.run(GroupNormOperands { bias: &[0.0; 3], ..of }).expect_err("a bias is missing");
    }
}
