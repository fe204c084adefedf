//! From logits to a token.
//!
//! ```text
//! s = logits, those of tokens that were there divided by the penalty where above 0, else multiplied
//! temperature 0: the largest, the first of equals
//! else p = softmax(s / temperature) of
//!   the top_k largest (and what equals the last of them), of these
//!   the largest that reach top_p together, of these
//!   those of at least min_p times the largest
//! and of p the token where the sum, in the order of ids, first exceeds a uniform number of (seed, position)
//! ```
//!
//! Source: the logits processors of Hugging Face transformers; Salmon et al., "Parallel Random Numbers: As Easy
//! as 1, 2, 3" (2011) for the numbers.

use models::GenerationConfig;

use super::EngineError;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// How many of the likeliest tokens may be drawn; 0 is all.
    pub top_k: usize,
    /// The likeliest tokens that reach this probability together may be drawn; 1 is all.
    pub top_p: f32,
    /// Tokens of less than this share of the likeliest one's probability are not drawn.
    pub min_p: f32,
    /// Logits of tokens that were there are divided by it where above 0, else multiplied; 1 is nothing.
    pub repetition_penalty: f32,
    /// Of the numbers that are drawn with: the same for one seed, whatever runs beside it.
    pub seed: u64,
}

impl Default for Sampling {
    /// The likeliest token, always.
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

/// Where in the sequence of random numbers a token is drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Tokens before it.
    pub(super) position: usize,
    /// Which completion of the prompt.
    pub(super) completion: usize,
}

/// A token, and how likely the model thought it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token {
    pub id: u32,
    /// ln softmax(logits)\[id\], before anything that [`Sampling`] does.
    pub logprob: f32,
}

impl Sampling {
    /// What a model's makers would have, as transformers reads it.
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

    /// # Errors
    /// A number that is out of its range.
    pub(super) fn check(&self) -> Result<(), EngineError> {
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
            Some((name, value, _, range)) => Err(EngineError::Sampling { name, value, range }),
            None => Ok(()),
        }
    }

    /// The token that follows `seen`, the prompt among it.
    pub(super) fn pick(
        &self,
        logits: &[f32],
        seen: &[u32],
        place: Place,
    ) -> Result<Token, EngineError> {
        let not_finite = || EngineError::NotFinite { position: place.position };
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(not_finite());
        }
        let mut scores = logits.to_vec();
        if self.repetition_penalty != 1.0 {
            let mut seen = seen.to_vec();
            seen.sort_unstable();
            seen.dedup();
            for id in seen {
                let score = &mut scores[id as usize];
                *score = match *score > 0.0 {
                    true => *score / self.repetition_penalty,
                    false => *score * self.repetition_penalty,
                };
            }
        }
        // What is impossible may be -inf; the likeliest token may not be infinite.
        if !scores[largest(&scores)].is_finite() {
            return Err(not_finite());
        }
        let id = match self.temperature > 0.0 {
            true => self.draw(&scores, place),
            false => largest(&scores),
        };
        Ok(Token { id: id as u32, logprob: logprob(logits, id) })
    }

    fn draw(&self, scores: &[f32], place: Place) -> usize {
        let top = f64::from(scores[largest(scores)]);
        let weight =
            |id: &usize| ((f64::from(scores[*id]) - top) / f64::from(self.temperature)).exp();
        let mut kept: Vec<usize> = (0..scores.len()).collect();
        let falling = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
        if (1..kept.len()).contains(&self.top_k) {
            let (_, last, _) = kept.select_nth_unstable_by(self.top_k - 1, falling);
            let least = scores[*last];
            kept.retain(|id| scores[*id] >= least);
        }
        if self.top_p < 1.0 {
            kept.sort_unstable_by(falling);
            let total: f64 = kept.iter().map(weight).sum();
            let mut sum = 0.0;
            let enough = kept.iter().position(|id| {
                sum += weight(id);
                sum >= f64::from(self.top_p) * total
            });
            kept.truncate(enough.map_or(kept.len(), |last| last + 1));
        }
        kept.retain(|id| weight(id) >= f64::from(self.min_p));
        kept.sort_unstable();
        let total: f64 = kept.iter().map(weight).sum();
        let mark = uniform(self.seed, place) * total;
        let mut sum = 0.0;
        let found = kept.iter().find(|id| {
            sum += weight(id);
            sum > mark
        });
        // The likeliest is always kept; rounding may leave the sum below the mark.
        *found.or(kept.last()).expect("the likeliest token is kept")
    }
}

/// The first of the largest.
fn largest(scores: &[f32]) -> usize {
    (1..scores.len()).fold(0, |top, id| if scores[id] > scores[top] { id } else { top })
}

fn logprob(logits: &[f32], id: usize) -> f32 {
    let top = f64::from(logits[largest(logits)]);
    let total: f64 = logits.iter().map(|logit| (f64::from(*logit) - top).exp()).sum();
    (f64::from(logits[id]) - top - total.ln()) as f32
}

/// From 0 up to, not including, 1.
fn uniform(seed: u64, place: Place) -> f64 {
    let counter = [place.position as u32, place.completion as u32, 0, 0];
    let [low, high, ..] = philox(counter, [seed as u32, (seed >> 32) as u32]);
    (u64::from(high) << 32 | u64::from(low)).wrapping_shr(11) as f64 / (1u64 << 53) as f64
}

/// Philox4x32-10.
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

    fn at(position: usize) -> Place {
        Place { position, completion: 0 }
    }

    /// Which of the tokens are drawn, and how often, in 4000 positions.
    fn drawn(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for position in 0..4000 {
            let token = sampling.pick(logits, &[], at(position)).expect("numbers");
            counts[token.id as usize] += 1.0 / 4000.0;
        }
        counts
    }

    #[test]
    fn the_numbers_are_random123s() {
        // Of its file `kat_vectors`.
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
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        let logits = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln);
        let near = |have: Vec<f64>, want: [f64; 4]| {
            let far = have.iter().zip(want).any(|(have, want)| (have - want).abs() > 0.03);
            assert!(!far, "{have:?}, not {want:?}");
        };
        let one = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        near(drawn(one, &logits), [0.1, 0.2, 0.3, 0.4]);
        // Squares, to a sum of 1.
        near(drawn(Sampling { temperature: 0.5, ..one }, &logits), [0.033, 0.133, 0.3, 0.533]);
        near(drawn(Sampling { top_k: 2, ..one }, &logits), [0.0, 0.0, 0.429, 0.571]);
        near(drawn(Sampling { top_p: 0.6, ..one }, &logits), [0.0, 0.0, 0.429, 0.571]);
        near(drawn(Sampling { top_p: 0.0, ..one }, &logits), [0.0, 0.0, 0.0, 1.0]);
        near(drawn(Sampling { min_p: 0.45, ..one }, &logits), [0.0, 0.222, 0.333, 0.444]);
        near(drawn(Sampling { min_p: 1.0, ..one }, &logits), [0.0, 0.0, 0.0, 1.0]);
        // Equals stay together, as in transformers.
        near(drawn(Sampling { top_k: 1, ..one }, &[1.0, 1.0, 0.0, 0.0]), [0.5, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest_and_knows_its_probability() {
        let token = Sampling::default().pick(&[1.0, 2.0, 2.0, 0.0], &[], at(0)).expect("numbers");
        let want = 2.0 - (1f64.exp() + 2.0 * 2f64.exp() + 1.0).ln();
        assert_eq!(token.id, 1);
        assert!((f64::from(token.logprob) - want).abs() < 1e-6);
    }

    #[test]
    fn what_was_there_is_less_likely() {
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let id = |logits: &[f32], seen: &[u32]| penalty.pick(logits, seen, at(0)).expect("n").id;
        assert_eq!(id(&[1.5, 2.0, -1.0], &[]), 1);
        assert_eq!(id(&[1.5, 2.0, -1.0], &[1, 1]), 0);
        assert_eq!(id(&[-1.5, -1.0, -3.0], &[1]), 0);
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
            assert!(matches!(wrong.check(), Err(EngineError::Sampling { .. })), "{wrong:?}");
        }
        assert!(ok.check().is_ok());
        let hot = Sampling { temperature: 1.0, min_p: 0.05, ..ok };
        let [inf, none] = [f32::INFINITY, f32::NEG_INFINITY];
        for wrong in [[0.0, inf], [none, none]] {
            for sampling in [ok, hot] {
                let picked = sampling.pick(&wrong, &[], at(3));
                assert!(matches!(picked, Err(EngineError::NotFinite { .. })), "{picked:?}");
            }
        }
        assert_eq!(hot.pick(&[none, 1.0], &[], at(0)).expect("one is possible").id, 1);
        let steep = Sampling { repetition_penalty: 1e-40, ..hot };
        assert!(matches!(steep.pick(&[1.0, 0.5], &[0], at(3)), Err(EngineError::NotFinite { .. })));
        let nan = ok.pick(&[0.0, f32::NAN], &[], at(3));
        assert!(matches!(nan, Err(EngineError::NotFinite { position: 3 })));
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
