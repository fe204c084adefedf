//! Rotary position embeddings and their scaling for long contexts.
//!
//! ```text
//! for each pair i of the first `dims` dimensions of a head, (x, y) = (v[i], v[i + dims/2]):
//!   angle = position·base^(-2i/dims)                                     // radians, before scaling
//!   (x, y) = magnitude·(x·cos(angle) - y·sin(angle), y·cos(angle) + x·sin(angle))
//! ```
//!
//! Source: Su et al., "RoFormer" (2021), section 3.4. Scaling: Chen et al., "Extending Context Window of
//! Large Language Models via Positional Interpolation" (2023), Peng et al., "YaRN" (2023), section 3, and
//! Ding et al., "LongRoPE" (2024); Llama 3.1's by Meta's `apply_scaling`.

use std::f64::consts::PI;

use crate::Error;

/// Rotation of a head by its position.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    pub base: f64,
    /// Number of rotated dimensions; the others stay unchanged.
    pub dims: usize,
    pub stretch: Stretch,
    /// Factor of the rotated dimensions.
    pub magnitude: f64,
}

/// RoPE scaling: lowers frequencies, so that a long sequence resembles the training sequences.
#[derive(Debug, Clone, PartialEq)]
pub enum Stretch {
    None,
    /// Divides all frequencies by this factor.
    Linear(f64),
    /// Uses a larger base once the sequence is longer than `trained`.
    Dynamic {
        factor: f64,
        trained: f64,
    },
    /// Divides by `factor` if the wavelength is longer than `trained / slow`, and not at all below `trained /
    /// fast`.
    Llama3 {
        factor: f64,
        slow: f64,
        fast: f64,
        trained: f64,
    },
    /// Divides by `factor` beyond the pair with `slow` rotations over `trained`, and not at all up to the
    /// pair with `fast` rotations. These pairs are rounded to whole numbers if `whole`.
    Yarn {
        factor: f64,
        fast: f64,
        slow: f64,
        trained: f64,
        whole: bool,
    },
    /// Divides each pair by its own factor, `[dims / 2]`: `short`, or `long` once the sequence is longer than
    /// `trained`.
    PerPair {
        short: Vec<f64>,
        long: Vec<f64>,
        trained: usize,
    },
}

impl Rotary {
    /// Rotates one head `[head_dim]` at `position` of a sequence of `seq` positions.
    pub fn rotate(&self, head: &mut [f64], position: usize, seq: usize) {
        rotate_by(head, self.dims, |pair| self.cos_sin(pair, position, seq));
    }

    /// Returns `[positions, dims]`: the cosines of a position's pairs, then their sines, multiplied by the
    /// magnitude, for sequences of `seq` positions.
    pub fn table(&self, positions: usize, seq: usize) -> Vec<f64> {
        let pairs = self.dims / 2;
        let row = |position| {
            let each = move |pair| self.cos_sin(pair, position, seq);
            (0..pairs).map(move |i| each(i).0).chain((0..pairs).map(move |i| each(i).1))
        };
        (0..positions).flat_map(row).collect()
    }

    fn cos_sin(&self, pair: usize, position: usize, seq: usize) -> (f64, f64) {
        let (sin, cos) = (position as f64 * self.speed(pair, seq)).sin_cos();
        (self.magnitude * cos, self.magnitude * sin)
    }

    pub(crate) fn check(&self, head_dim: usize) -> Result<(), Error> {
        if self.dims > head_dim {
            let what = "rotary dimension";
            return Err(Error::OutOfRange { what, index: self.dims, len: head_dim });
        }
        let Stretch::PerPair { short, long, .. } = &self.stretch else { return Ok(()) };
        let need = self.dims / 2;
        match [short, long].into_iter().find(|factors| factors.len() != need) {
            Some(factors) => {
                Err(Error::Length { what: "rotary factors", need, have: factors.len() })
            }
            None => Ok(()),
        }
    }

    /// Returns the frequency of a pair in radians per position.
    fn speed(&self, pair: usize, seq: usize) -> f64 {
        let exponent = 2.0 * pair as f64 / self.dims as f64;
        let plain = 1.0 / self.base.powf(exponent);
        match &self.stretch {
            Stretch::None => plain,
            Stretch::Linear(factor) => plain / factor,
            Stretch::Dynamic { factor, trained } => {
                let ratio = (seq as f64).max(*trained) / trained;
                let dims = self.dims as f64;
                let growth = (factor * ratio - factor + 1.0).powf(dims / (dims - 2.0));
                1.0 / (self.base * growth).powf(exponent)
            }
            Stretch::Llama3 { factor, slow, fast, trained } => {
                let wave = 2.0 * PI / plain;
                if wave < trained / fast {
                    plain
                } else if wave > trained / slow {
                    plain / factor
                } else {
                    let smooth = (trained / wave - slow) / (fast - slow);
                    (1.0 - smooth) * plain / factor + smooth * plain
                }
            }
            Stretch::Yarn { factor, fast, slow, trained, whole } => {
                // Fractional index of the pair with this number of rotations over the trained length.
                let at = |rotations: f64| {
                    self.dims as f64 * (trained / (rotations * 2.0 * PI)).ln()
                        / (2.0 * self.base.ln())
                };
                let (mut first, mut last) = (at(*fast), at(*slow));
                if *whole {
                    (first, last) = (first.floor(), last.ceil());
                }
                let first = first.max(0.0);
                let last = last.min(self.dims as f64 - 1.0);
                let width = if first == last { 0.001 } else { last - first };
                let ramp = ((pair as f64 - first) / width).clamp(0.0, 1.0);
                plain / factor * ramp + plain * (1.0 - ramp)
            }
            Stretch::PerPair { short, long, trained } => {
                let factors = if seq > *trained { long } else { short };
                plain / factors[pair]
            }
        }
    }
}

/// Rotates the pairs of the first `dims` dimensions of a head, each by its cosine and sine.
pub fn rotate_by(head: &mut [f64], dims: usize, cos_sin: impl Fn(usize) -> (f64, f64)) {
    let half = dims / 2;
    for pair in 0..half {
        let (cos, sin) = cos_sin(pair);
        let (x, y) = (head[pair], head[pair + half]);
        head[pair] = x * cos - y * sin;
        head[pair + half] = y * cos + x * sin;
    }
}
