//! Computes differences between two subjects, and perplexity, from logits and tokens.
//!
//! Sums are in f64. A NaN among the logits makes the result NaN, never a small number.

use safetensors::{Dtype, SafeTensors};
use serde::Serialize;

/// Logits after each of several tokens, `[positions, vocab]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Logits {
    vocab: usize,
    values: Vec<f32>,
}

impl Logits {
    /// Makes logits of `[values.len() / vocab, vocab]`.
    ///
    /// # Errors
    /// The shape is wrong, or a logit is not finite; the message names its position.
    pub(super) fn new(vocab: usize, values: Vec<f32>) -> Result<Self, String> {
        if vocab == 0 || values.len() % vocab != 0 {
            return Err(format!("expected rows of {vocab} logits, got {} in total", values.len()));
        }
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(format!("the logits after token {} hold {}", at / vocab, values[at])),
            None => Ok(Self { vocab, values }),
        }
    }

    /// Reads the output of `flashover logits` for `positions` tokens.
    ///
    /// # Errors
    /// As [`Logits::new`]; the file is not in safetensors or has another shape or dtype.
    pub(super) fn read(bytes: &[u8], positions: usize) -> Result<Self, String> {
        let file =
            SafeTensors::deserialize(bytes).map_err(|why| format!("cannot read logits: {why}"))?;
        let tensor = file.tensor("logits").map_err(|why| format!("cannot read logits: {why}"))?;
        let &[rows, vocab] = tensor.shape() else {
            return Err(format!("expected logits [tokens, vocab], got {:?}", tensor.shape()));
        };
        if rows != positions || tensor.dtype() != Dtype::F32 {
            let dtype = tensor.dtype();
            return Err(format!(
                "expected logits of {positions} tokens in F32, got {rows} in {dtype:?}"
            ));
        }
        let values = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        Self::new(vocab, values.collect())
    }

    pub(super) fn positions(&self) -> usize {
        self.values.len() / self.vocab
    }

    pub(super) fn vocab(&self) -> usize {
        self.vocab
    }

    /// Returns the logits after the token at `position`, `[vocab]`.
    fn after(&self, position: usize) -> &[f32] {
        &self.values[position * self.vocab..][..self.vocab]
    }
}

/// Agreement of a subject with the reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Agreement {
    /// Number of greedy tokens before the first that differs from the reference.
    pub(super) equal_tokens: usize,
    /// Number of greedy tokens of the reference.
    pub(super) greedy_tokens: usize,
    pub(super) divergence: Option<Divergence>,
    /// Mean and maximum of KL(reference || here) over positions, in nats.
    pub(super) kl_mean: f64,
    pub(super) kl_max: f64,
    /// Largest difference of two logits, relative to the largest magnitude in the reference.
    pub(super) max_difference: f64,
}

/// The first greedy token that differs. Both sides have the same tokens before it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Divergence {
    pub(super) reference: Choice,
    pub(super) here: Choice,
}

/// The token that one side chose.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Choice {
    pub(super) token: u32,
    pub(super) text: Option<String>,
    /// Logit of this token minus the logit of the other side's token, both from this side.
    pub(super) gap: f32,
}

/// Greedy tokens after a prompt, and the logits after each token of the prompt and of the reference's greedy tokens,
/// except the last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer<'a> {
    pub(super) greedy: &'a [u32],
    pub(super) logits: &'a Logits,
}

/// Compares a subject with the reference. `prompt` is the number of prompt tokens.
///
/// # Errors
/// The shapes of the logits differ.
pub(super) fn agreement(
    prompt: usize,
    reference: Answer<'_>,
    here: Answer<'_>,
) -> Result<Agreement, String> {
    let shape = |answer: Answer<'_>| [answer.logits.positions(), answer.logits.vocab()];
    if shape(reference) != shape(here) {
        return Err(format!(
            "expected logits {1:?} as in the reference, got {0:?}",
            shape(here),
            shape(reference)
        ));
    }
    let equal = reference.greedy.iter().zip(here.greedy).take_while(|(a, b)| a == b).count();
    let divergence = match (reference.greedy.get(equal), here.greedy.get(equal)) {
        (Some(theirs), Some(ours)) => {
            let choice = |answer: Answer<'_>, token: u32, other: u32| {
                let row = answer.logits.after(prompt - 1 + equal);
                let logit = |token: u32| row.get(token as usize).copied().unwrap_or(f32::NAN);
                Choice { token, text: None, gap: logit(token) - logit(other) }
            };
            let (theirs, ours) = (*theirs, *ours);
            Some(Divergence {
                reference: choice(reference, theirs, ours),
                here: choice(here, ours, theirs),
            })
        }
        _ => None,
    };
    let positions = reference.logits.positions();
    let divergences: Vec<f64> =
        (0..positions).map(|at| kl(reference.logits.after(at), here.logits.after(at))).collect();
    Ok(Agreement {
        equal_tokens: equal,
        greedy_tokens: reference.greedy.len(),
        divergence,
        kl_mean: divergences.iter().sum::<f64>() / positions as f64,
        kl_max: largest(divergences),
        max_difference: difference(&reference.logits.values, &here.logits.values),
    })
}

/// Returns KL(softmax(a) || softmax(b)) in nats.
fn kl(a: &[f32], b: &[f32]) -> f64 {
    let (log_a, log_b) = (log_softmax(a), log_softmax(b));
    let sum: f64 = log_a.iter().zip(&log_b).map(|(a, b)| a.exp() * (a - b)).sum();
    // Rounding may give a value below 0. `max` would hide NaN.
    if sum < 0.0 { 0.0 } else { sum }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let log_sum = log_sum(logits);
    logits.iter().map(|logit| f64::from(*logit) - log_sum).collect()
}

/// Returns ln(sum(exp(logits))).
fn log_sum(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().map(f64::from).fold(f64::NEG_INFINITY, f64::max);
    max + logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln()
}

/// Returns max|a - b| / max|a|.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let apart = largest(a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()));
    let max = largest(a.iter().map(|a| f64::from(*a).abs()));
    if apart == 0.0 { 0.0 } else { apart / max }
}

/// Returns the largest of non-negative values; NaN if one is NaN.
fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |max: f64, value: f64| if value <= max || max.is_nan() { max } else { value };
    values.into_iter().fold(0.0, larger)
}

/// A text split into windows of tokens. Each window runs from an empty KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Windows {
    /// Windows of `size` tokens; the last may be shorter.
    pub(super) list: Vec<Vec<u32>>,
    pub(super) size: usize,
    /// Number of special tokens at the start of each window.
    head: usize,
}

impl Windows {
    /// Splits `ids`, and repeats the tokenizer's leading special tokens in each window. `empty` is the encoding of an
    /// empty text.
    pub(super) fn new(ids: &[u32], empty: &[u32], size: usize) -> Self {
        let head = ids.iter().zip(empty).take_while(|(a, b)| a == b).count();
        let (first, text) = ids.split_at(head);
        let size = size.max(head + 1);
        let mut list: Vec<_> =
            text.chunks(size - head).map(|part| [first, part].concat()).collect();
        // A single token has no predecessor to be predicted from.
        list.retain(|window| window.len() > 1);
        Self { list, size, head }
    }

    /// Counts the tokens that are predicted in the windows of a list.
    pub(super) fn scored(&self, list: &[Vec<u32>]) -> usize {
        list.iter().map(|window| window.len() - self.head.max(1)).sum()
    }

    /// Returns the sum of the negative log-likelihoods of these tokens in nats. `logits` follow each token of `list`.
    pub(super) fn negative_log_likelihood(&self, list: &[Vec<u32>], logits: &Logits) -> f64 {
        let (mut sum, mut begin) = (0.0, 0);
        for window in list {
            for (at, token) in window.iter().enumerate().skip(self.head.max(1)) {
                let row = logits.after(begin + at - 1);
                let logit = row.get(*token as usize).copied().unwrap_or(f32::NAN);
                sum += log_sum(row) - f64::from(logit);
            }
            begin += window.len();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LN_2: f64 = std::f64::consts::LN_2;

    fn logits(vocab: usize, values: &[f32]) -> Logits {
        Logits::new(vocab, values.to_vec()).unwrap()
    }

    fn near(have: f64, want: f64) -> bool {
        (have - want).abs() < 1e-7
    }

    /// Returns logits with these probabilities.
    fn logs(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn kl_is_that_of_the_definition() {
        let (half, quarter) = (logs(&[0.5, 0.5]), logs(&[0.25, 0.75]));
        assert!(near(kl(&half, &quarter), 0.5 * LN_2 + 0.5 * (2.0_f64 / 3.0).ln()));
        assert!(near(kl(&quarter, &half), 0.25 * 0.5_f64.ln() + 0.75 * 1.5_f64.ln()));
        let shifted: Vec<f32> = quarter.iter().map(|logit| logit + 1000.0).collect();
        assert!(kl(&quarter, &shifted) < 1e-4, "no sum overflows");
        assert_eq!(kl(&half, &half), 0.0);
        assert!(kl(&[0.0, f32::NAN], &half).is_nan() && kl(&half, &[f32::INFINITY, 0.0]).is_nan());
    }

    #[test]
    fn a_difference_is_relative_and_nan_is_never_the_smaller() {
        assert_eq!(difference(&[2.0, -8.0, 1.0], &[3.0, -8.0, 3.0]), 0.25);
        assert_eq!(difference(&[0.0, 0.0], &[0.0, 0.0]), 0.0);
        assert!(difference(&[f32::NAN, 1.0], &[1.0, 1.0]).is_nan());
        assert!(difference(&[1.0, 1.0], &[f32::NAN, 1.0]).is_nan());
        assert!(largest([1.0, f64::NAN, 3.0]).is_nan());
    }

    /// The prompt has two tokens. The second of three greedy tokens differs, and its logits are row 2.
    #[test]
    fn the_first_difference_has_the_gap_of_either_side() {
        let theirs = logits(3, &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 5.0, 4.5, 0.0, 0.0, 1.0, 2.0]);
        let ours = logits(3, &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 4.0, 4.25, 0.0, 0.0, 1.0, 2.0]);
        let answer = |greedy, logits| Answer { greedy, logits };
        let have = agreement(2, answer(&[2, 0, 2], &theirs), answer(&[2, 1, 1], &ours)).unwrap();
        let choice = |token, gap| Choice { token, text: None, gap };
        let parted = Divergence { reference: choice(0, 0.5), here: choice(1, 0.25) };
        assert_eq!((have.equal_tokens, have.greedy_tokens), (1, 3));
        assert_eq!(have.divergence, Some(parted));
        assert_eq!(have.max_difference, 0.2);
        let apart = kl(&[5.0, 4.5, 0.0], &[4.0, 4.25, 0.0]);
        assert_eq!((have.kl_max, have.kl_mean), (apart, apart / 4.0), "one of four positions");
        assert!(apart > 0.05);

        let same = agreement(2, answer(&[2, 0, 2], &theirs), answer(&[2, 0, 2], &theirs)).unwrap();
        assert_eq!((same.equal_tokens, same.divergence, same.kl_max), (3, None, 0.0));
        let short = agreement(2, answer(&[2, 0, 2], &theirs), answer(&[2], &theirs)).unwrap();
        assert_eq!((short.equal_tokens, short.divergence), (1, None), "nothing to set against");
        let other = logits(4, &[0.0; 12]);
        let error = agreement(2, answer(&[2], &theirs), answer(&[2], &other)).unwrap_err();
        assert_eq!(error, "expected logits [4, 3] as in the reference, got [3, 4]");
    }

    #[test]
    fn windows_begin_as_a_text_does() {
        let ids: Vec<u32> = (10..17).collect();
        let plain = Windows::new(&ids, &[], 3);
        assert_eq!(
            plain.list,
            [vec![10, 11, 12], vec![13, 14, 15]],
            "one token alone says nothing"
        );
        assert_eq!(plain.scored(&plain.list), 4);
        let led = Windows::new(&[&[1], &ids[..4]].concat(), &[1, 2], 3);
        assert_eq!(led.list, [vec![1, 10, 11], vec![1, 12, 13]]);
        assert_eq!(led.scored(&led.list), 4, "all but what is not the text's");
        assert!(Windows::new(&[1], &[1], 3).list.is_empty());
    }

    /// The three tokens have probabilities 1/2, 1/8 and 1/4, so perplexity is 4.
    #[test]
    fn negative_log_likelihood_is_of_the_token_that_comes() {
        let list = Windows::new(&[1, 0, 1, 0], &[1], 3);
        assert_eq!(list.list, [vec![1, 0, 1], vec![1, 0]]);
        let rows = [[0.5, 0.5], [0.875, 0.125], [0.9, 0.1], [0.25, 0.75], [0.9, 0.1]];
        let values: Vec<f32> = rows.iter().flat_map(|row| logs(row)).collect();
        let sum = list.negative_log_likelihood(&list.list, &logits(2, &values));
        assert!(near((sum / list.scored(&list.list) as f64).exp(), 4.0), "{sum}");
        let outside = Windows::new(&[0, 7], &[], 3);
        assert!(outside.negative_log_likelihood(&outside.list, &logits(2, &values[..4])).is_nan());
    }

    #[test]
    fn logits_are_read_and_those_that_are_none_refused() {
        let file = |shape: &[usize], values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let view = safetensors::tensor::TensorView::new(Dtype::F32, shape.to_vec(), &bytes);
            safetensors::serialize([("logits", view.unwrap())], None).unwrap()
        };
        let values = [1.0, 2.0, 3.0, -4.0];
        assert_eq!(Logits::read(&file(&[2, 2], &values), 2), Ok(logits(2, &values)));
        for (bytes, want) in [
            (file(&[2, 2], &[1.0, 2.0, f32::NAN, 4.0]), "the logits after token 1 hold NaN"),
            (file(&[2, 2], &[f32::NEG_INFINITY, 2.0, 1.0, 4.0]), "after token 0 hold -inf"),
            (file(&[1, 4], &values), "expected logits of 2 tokens in F32, got 1 in F32"),
            (file(&[4], &values), "expected logits [tokens, vocab], got [4]"),
            (b"none".to_vec(), "cannot read logits: "),
        ] {
            let error = Logits::read(&bytes, 2).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }
}
