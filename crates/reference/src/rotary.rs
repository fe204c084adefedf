//! ```text
//! for each pair i of the first `dims` dimensions of a head, (x, y) = (v[i], v[i + dims/2]):
//!   turn = position·base^(-2i/dims)                                      // radians, before stretching
//!   (x, y) = magnitude·(x·cos(turn) - y·sin(turn), y·cos(turn) + x·sin(turn))
//! ```
//!
//! Source: Su et al., "RoFormer" (2021), section 3.4; the stretches by Chen et al., "Extending Context Window
//! of Large Language Models via Positional Interpolation" (2023), Peng et al., "YaRN" (2023), section 3, and
//! Ding et al., "LongRoPE" (2024); Llama 3.1's by Meta's `apply_scaling`.

use std::f64::consts::PI;

use crate::Error;

/// How a position turns a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    pub base: f64,
    /// Dimensions that turn; the rest of a head stays.
    pub dims: usize,
    pub stretch: Stretch,
    /// What turned dimensions are multiplied by.
    pub magnitude: f64,
}

/// How turns are slowed down, so that a long sequence looks like one of training.
#[derive(Debug, Clone, PartialEq)]
pub enum Stretch {
    None,
    /// All by this factor.
    Linear(f64),
    /// A larger base, once the sequence is longer than `trained`.
    Dynamic {
        factor: f64,
        trained: f64,
    },
    /// By `factor` where a wave is longer than `trained / slow`, not at all below `trained / fast`.
    Llama3 {
        factor: f64,
        slow: f64,
        fast: f64,
        trained: f64,
    },
    /// By `factor` beyond the pair that turns `slow` times over `trained`, not at all up to the pair that
    /// turns `fast` times; these pairs are whole numbers where `whole`.
    Yarn {
        factor: f64,
        fast: f64,
        slow: f64,
        trained: f64,
        whole: bool,
    },
    /// Each pair by a factor of its own, `[dims / 2]`; others once the sequence is longer than `trained`.
    PerPair {
        short: Vec<f64>,
        long: Vec<f64>,
        trained: usize,
    },
}

impl Rotary {
    /// Turns one head `[head_dim]` at `position` of a sequence of `seq`.
    pub fn turn(&self, head: &mut [f64], position: usize, seq: usize) {
        turn_by(head, self.dims, |pair| self.cos_sin(pair, position, seq));
    }

    /// `[positions, dims]`: the cosines of a position's pairs, then their sines, multiplied by the magnitude,
    /// for sequences of `seq`.
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

    /// Radians a position.
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
                // The pair, not rounded, that turns so many times over the trained length.
                let at = |turns: f64| {
                    self.dims as f64 * (trained / (turns * 2.0 * PI)).ln() / (2.0 * self.base.ln())
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

/// Turns the pairs of the first `dims` dimensions of a head, each by its cosine and sine.
pub fn turn_by(head: &mut [f64], dims: usize, cos_sin: impl Fn(usize) -> (f64, f64)) {
    let half = dims / 2;
    for pair in 0..half {
        let (cos, sin) = cos_sin(pair);
        let (x, y) = (head[pair], head[pair + half]);
        head[pair] = x * cos - y * sin;
        head[pair + half] = y * cos + x * sin;
    }
}
