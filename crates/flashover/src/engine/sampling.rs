//! Sampling settings and their random numbers. The numbers depend on seed and place only, so tokens do not depend on
//! other sequences.
//!
//! Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).

use models::GenerationConfig;
use ops::Choice;

use super::error::GenerateError;

/// Settings of sampling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to sample among, with ties of the last; 0 for all.
    pub top_k: usize,
    /// Samples among the most likely tokens that together reach this probability, with ties of the last; 1 for all.
    pub top_p: f32,
    /// Excludes tokens with less than this share of the most likely token's probability; 0 for none.
    pub min_p: f32,
    /// Penalty for tokens that already occurred: divides their logits above 0 and multiplies the others; 1 for none.
    pub repetition_penalty: f32,
    /// Random seed. One seed gives the same tokens, independent of other sequences.
    pub seed: u64,
}

impl Default for Sampling {
    /// Returns greedy sampling: always the most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

/// Place of a token in the random sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Number of tokens before it.
    pub(super) position: usize,
    /// Index of the completion of the prompt.
    pub(super) completion: usize,
}

/// A token with its log probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token {
    /// Id in the vocabulary.
    pub id: u32,
    /// Natural log of the probability: ln softmax(logits)\[id\], before any setting of [`Sampling`] applies.
    pub logprob: f32,
    /// Natural log of the probability in the distribution that it was drawn from: after temperature, filters and penalty. 0 for
    /// the most likely token at temperature 0.
    pub drawn_logprob: f32,
}

impl Sampling {
    /// Returns the settings in generation_config.json, with transformers' defaults.
    pub fn of(generation: &GenerationConfig) -> Self {
        let penalty = generation.repetition_penalty.unwrap_or(1.0) as f32;
        let greedy = Self { repetition_penalty: penalty, ..Self::default() };
        if generation.do_sample != Some(true) {
            return greedy;
        }
        Self {
            temperature: generation.temperature.unwrap_or(1.0) as f32,
            top_k: generation.top_k.unwrap_or(50),
            top_p: generation.top_p.unwrap_or(1.0) as f32,
            min_p: generation.min_p.unwrap_or(0.0) as f32,
            ..greedy
        }
    }

    /// Checks the ranges of the settings.
    ///
    /// # Errors
    /// [`GenerateError::Sampling`] for a number out of range.
    pub fn check(&self) -> Result<(), GenerateError> {
        let share = |value: f32| (0.0..=1.0).contains(&value);
        let wrong = [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0 && self.temperature.is_finite(),
                "0 or more",
            ),
            ("top_p", self.top_p, share(self.top_p), "from 0 to 1"),
            ("min_p", self.min_p, share(self.min_p), "from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
                "above 0",
            ),
        ];
        match wrong.into_iter().find(|(_, _, fits, _)| !fits) {
            Some((name, value, _, range)) => Err(GenerateError::Sampling { name, value, range }),
            None => Ok(()),
        }
    }

    /// Returns the kernel's parameters for a token.
    pub(super) fn choice(&self, place: Place) -> Choice {
        Choice {
            temperature: self.temperature,
            top_k: u32::try_from(self.top_k).unwrap_or(u32::MAX),
            top_p: self.top_p,
            min_p: self.min_p,
            penalty: self.repetition_penalty,
            uniform: uniform(self.seed, place),
        }
    }
}

/// Returns a number from 0 up to, but not including, 1, as a multiple of 2⁻²⁴.
fn uniform(seed: u64, place: Place) -> f32 {
    let counter = [place.position as u32, place.completion as u32, 0, 0];
    let [word, ..] = philox(counter, [seed as u32, (seed >> 32) as u32]);
    (word >> 8) as f32 / (1u32 << 24) as f32
}

/// Runs Philox4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let whole = u64::from(a) * u64::from(b);
        [(whole >> 32) as u32, whole as u32]
    };
    for _ in 0..10 {
        let [high0, low0] = product(0xd251_1f53, counter[0]);
        let [high1, low1] = product(0xcd9e_8d57, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_random123s() {
        // Expected values from Random123's `kat_vectors`.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn a_seed_and_a_place_are_a_number() {
        let of = |seed, position, completion| uniform(seed, Place { position, completion });
        assert_eq!(of(3, 5, 1).to_bits(), of(3, 5, 1).to_bits());
        for other in [of(4, 5, 1), of(3 + (1 << 40), 5, 1), of(3, 6, 1), of(3, 5, 2)] {
            assert!(other != of(3, 5, 1) && (0.0..1.0).contains(&other));
        }
    }

    #[test]
    fn mistakes_are_errors() {
        let ok = Sampling::default();
        for wrong in [
            Sampling { temperature: -1.0, ..ok },
            Sampling { temperature: f32::NAN, ..ok },
            Sampling { top_p: 1.1, ..ok },
            Sampling { min_p: -0.1, ..ok },
            Sampling { repetition_penalty: 0.0, ..ok },
        ] {
            assert!(matches!(wrong.check(), Err(GenerateError::Sampling { .. })), "{wrong:?}");
        }
        assert!(ok.check().is_ok());
    }

    #[test]
    fn a_model_says_how_it_is_sampled() {
        let of = |text| Sampling::of(&GenerationConfig::from_json(text).expect("valid"));
        let greedy = of(r#"{"temperature": 0.6, "repetition_penalty": 1.1}"#);
        assert_eq!(greedy, Sampling { repetition_penalty: 1.1, ..Sampling::default() });
        let sampled = of(r#"{"do_sample": true, "top_p": 0.9}"#);
        let want = Sampling { temperature: 1.0, top_k: 50, top_p: 0.9, ..Sampling::default() };
        assert_eq!(sampled, want);
    }
}
