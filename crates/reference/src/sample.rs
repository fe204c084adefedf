//! Samples a token from logits.
//!
//! Scores are the logits; those of seen tokens are divided by the penalty if above 0, else multiplied by it.
//! With a temperature the weights are `exp((s - max s) / temperature)`. Three filters follow in order: the
//! top_k largest, the largest that together reach top_p of the sum, and those of at least min_p. Each keeps
//! ties with the last kept token. Weights are added column by column, where a column is every 1024th group of
//! four tokens, in the order of ids.

use crate::{Comparison, DType, Error, compare};

/// A row of logits and its sampling settings.
#[derive(Debug, Clone, Copy)]
pub struct Sampler<'a> {
    pub logits: &'a [f32],
    pub seen: &'a [u32],
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// 0 keeps all.
    pub top_k: usize,
    pub top_p: f64,
    pub min_p: f64,
    pub penalty: f64,
    /// Random number in [0, 1).
    pub uniform: f64,
}

impl Sampler<'_> {
    fn scores(&self) -> Vec<f64> {
        let mut scores: Vec<f64> = self.logits.iter().map(|v| f64::from(*v)).collect();
        let mut seen = self.seen.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            let score = &mut scores[id as usize];
            *score = if *score > 0.0 { *score / self.penalty } else { *score * self.penalty };
        }
        scores
    }

    /// Returns whether a token exists: no logit is NaN, and the largest is finite.
    pub fn finite(&self) -> bool {
        let largest = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let logits: Vec<f64> = self.logits.iter().map(|v| f64::from(*v)).collect();
        !logits.iter().any(|v| v.is_nan())
            && largest(&logits) < f64::INFINITY
            && largest(&self.scores()).is_finite()
    }

    /// Returns the tokens that may be drawn and their weights, in the order of summation. Without a
    /// temperature it is the first of the largest.
    pub fn kept(&self) -> Vec<(u32, f64)> {
        let scores = self.scores();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if self.temperature <= 0.0 {
            let first = scores.iter().position(|s| *s == top).unwrap_or(0);
            return vec![(first as u32, 1.0)];
        }
        let weights: Vec<f64> =
            scores.iter().map(|s| ((s - top) / self.temperature).exp()).collect();
        let mut sorted = weights.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let mut least = 0.0f64;
        if (1..sorted.len()).contains(&self.top_k) {
            least = sorted[self.top_k - 1];
        }
        if self.top_p < 1.0 {
            let of: Vec<f64> = sorted.iter().copied().filter(|w| *w >= least).collect();
            let need = self.top_p * of.iter().sum::<f64>();
            let mut sum = 0.0;
            let reach = of.iter().position(|w| {
                sum += w;
                sum >= need
            });
            least = least.max(reach.map_or(0.0, |at| of[at]));
        }
        least = least.max(self.min_p);
        let mut kept: Vec<(u32, f64)> =
            (0u32..).zip(weights).filter(|(_, weight)| *weight > 0.0 && *weight >= least).collect();
        kept.sort_by_key(|(id, _)| (id / 4 % 1024, *id));
        kept
    }

    /// Returns the token that `uniform` selects.
    pub fn token(&self) -> u32 {
        let kept = self.kept();
        let mark = self.uniform * kept.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let found = kept.iter().find(|(_, weight)| {
            sum += weight;
            sum > mark
        });
        found.or(kept.last()).map_or(0, |(id, _)| *id)
    }

    /// Returns ln softmax(logits)\[token\].
    pub fn logprob(&self, token: u32) -> f64 {
        let logits = || self.logits.iter().map(|v| f64::from(*v));
        let top = logits().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits().map(|v| (v - top).exp()).sum();
        f64::from(self.logits[token as usize]) - top - sum.ln()
    }

    /// Returns the log-probability of `token` in the distribution that it is drawn from.
    pub fn drawn_logprob(&self, token: u32) -> f64 {
        let kept = self.kept();
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let own = kept.iter().find(|(id, _)| *id == token);
        own.map_or(f64::NEG_INFINITY, |(_, weight)| (weight / total).ln())
    }

    /// Returns the distance of `uniform` from the range that selects `token`, as a fraction of the total. It
    /// is 1 for a token that may not be drawn.
    fn miss(&self, token: u32) -> f64 {
        let kept = self.kept();
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let Some(at) = kept.iter().position(|(id, _)| *id == token) else { return 1.0 };
        let before: f64 = kept[..at].iter().map(|(_, weight)| weight).sum::<f64>() / total;
        let after = before + kept[at].1 / total;
        (before - self.uniform).max(self.uniform - after).max(0.0)
    }

    /// Compares the tokens and both log-probabilities of a kernel with `rows`. A row without a valid token must
    /// set the flag.
    ///
    /// # Errors
    /// Fails if there are not four numbers a row.
    pub fn check(rows: &[Sampler<'_>], out: &[f32]) -> Result<Comparison, Error> {
        if out.len() != 4 * rows.len() {
            return Err(Error::Length { what: "out", need: 4 * rows.len(), have: out.len() });
        }
        let (mut have, mut exact, mut naive) = (Vec::new(), Vec::new(), Vec::new());
        for (row, out) in rows.iter().zip(out.chunks(4)) {
            let (token, logprob, drawn, flag) = (out[0], out[1], out[2], out[3]);
            let finite = row.finite();
            have.push(flag);
            exact.push(if finite { 0.0 } else { 1.0 });
            naive.push(if finite { 0.0 } else { 1.0 });
            if !finite {
                continue;
            }
            let known = token >= 0.0 && (token as usize) < row.logits.len() && token.fract() == 0.0;
            let token = if known { token as u32 } else { 0 };
            // f32 sums in another order differ in the last bits.
            have.extend([if known { row.miss(token) as f32 } else { 1.0 }, logprob, drawn]);
            let (logprob, drawn) = (row.logprob(token), row.drawn_logprob(token));
            // f32 sums may reach top_p a token earlier or later.
            let moved = [-1e-4, 1e-4].map(|by| {
                let moved = Sampler { top_p: row.top_p + by, ..*row }.drawn_logprob(token);
                if row.top_p < 1.0 && moved.is_finite() { (moved - drawn).abs() } else { 0.0 }
            });
            let spread = moved[0].max(moved[1]);
            exact.extend([0.0, logprob, drawn]);
            naive.extend([1e-5, logprob + 1e-5, drawn + 1e-5 + spread]);
        }
        compare(&have, &exact, &naive, DType::F32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(logits: &[f32]) -> Sampler<'_> {
        Sampler {
            logits,
            seen: &[],
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            penalty: 1.0,
            uniform: 0.0,
        }
    }

    #[test]
    fn tokens_are_kept_as_the_rules_say() {
        let logits = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln);
        let shares = |sample: Sampler<'_>| {
            let kept = sample.kept();
            let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
            let mut shares = [0.0; 4];
            kept.iter().for_each(|(id, weight)| shares[*id as usize] = weight / total);
            shares
        };
        let near = |sample: Sampler<'_>, want: [f64; 4]| {
            let have = shares(sample);
            let far = have.iter().zip(want).any(|(have, want)| (have - want).abs() > 1e-3);
            assert!(!far, "{have:?}, not {want:?}");
        };
        let one = sampler(&logits);
        near(one, [0.1, 0.2, 0.3, 0.4]);
        // Squares, normalised to a sum of 1.
        near(Sampler { temperature: 0.5, ..one }, [0.0333, 0.1333, 0.3, 0.5333]);
        near(Sampler { top_k: 2, ..one }, [0.0, 0.0, 0.4286, 0.5714]);
        near(Sampler { top_p: 0.6, ..one }, [0.0, 0.0, 0.4286, 0.5714]);
        near(Sampler { top_p: 0.0, ..one }, [0.0, 0.0, 0.0, 1.0]);
        near(Sampler { min_p: 0.45, ..one }, [0.0, 0.2222, 0.3333, 0.4444]);
        near(Sampler { min_p: 1.0, ..one }, [0.0, 0.0, 0.0, 1.0]);
        near(Sampler { top_k: 3, top_p: 0.7, ..one }, [0.0, 0.0, 0.4286, 0.5714]);
        // Ties stay together, as in transformers.
        near(Sampler { top_k: 1, ..sampler(&[1.0, 1.0, 0.0, 0.0]) }, [0.5, 0.5, 0.0, 0.0]);
        // Half as likely, with logits on both sides of 0.
        let punished =
            Sampler { seen: &[0, 3, 3], penalty: 2.0, ..sampler(&[1.0, 0.5, 0.5, -1.0]) };
        near(punished, [0.3245, 0.3245, 0.3245, 0.0266]);
    }

    #[test]
    fn numbers_fall_on_tokens() {
        let logits = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln);
        for (uniform, token) in [(0.05, 0), (0.15, 1), (0.35, 2), (0.65, 3), (0.999_999, 3)] {
            assert_eq!(Sampler { uniform, ..sampler(&logits) }.token(), token);
        }
        let greedy = Sampler { temperature: 0.0, ..sampler(&[0.0, 2.0, 2.0]) };
        assert_eq!(greedy.token(), 1, "the first of equals");
        assert!((greedy.logprob(1) + (2.0 + (-2f64).exp()).ln()).abs() < 1e-12);
        // Groups of four in 1024 columns: token 4096 is added before token 4.
        let long = vec![0.0f32; 4100];
        let ids: Vec<u32> = sampler(&long).kept().iter().map(|(id, _)| *id).collect();
        assert_eq!(ids[..9], [0, 1, 2, 3, 4096, 4097, 4098, 4099, 4]);
    }

    #[test]
    fn wrong_tokens_do_not_pass() -> Result<(), Error> {
        let logits = [0.1f32, 0.2, 0.3, 0.4].map(f32::ln);
        let row = Sampler { uniform: 0.35, top_k: 3, ..sampler(&logits) };
        let passes = |out: [f32; 4]| Ok::<_, Error>(Sampler::check(&[row], &out)?.passed);
        let logprob = |id: usize| row.logprob(id as u32) as f32;
        let drawn = (0.3f32 / 0.9).ln();
        assert!(passes([2.0, logprob(2), drawn, 0.0])?);
        for wrong in [
            [1.0, logprob(1), (0.2f32 / 0.9).ln(), 0.0],
            [2.0, logprob(2) + 1e-3, drawn, 0.0],
            [2.0, logprob(2), drawn + 1e-3, 0.0],
            [2.0, logprob(2), logprob(2), 0.0],
            [2.0, f32::NAN, drawn, 0.0],
            [2.0, logprob(2), f32::NAN, 0.0],
            [2.0, logprob(2), drawn, 1.0],
            [4.0, logprob(3), drawn, 0.0],
            [2.5, logprob(2), drawn, 0.0],
        ] {
            assert!(!passes(wrong)?, "{wrong:?}");
        }
        let none = Sampler { logits: &[f32::NAN, 0.0], ..row };
        assert!(Sampler::check(&[none], &[0.0, 0.0, 0.0, 1.0])?.passed);
        assert!(!Sampler::check(&[none], &[1.0, 0.0, 0.0, 0.0])?.passed);
        assert!(Sampler::check(&[row], &[0.0; 2]).is_err());
        Ok(())
    }
}
