//! Ropes against the reference, an independent implementation of the same papers.

use models::{Rope, Scaling};
use proptest::prelude::*;

use crate::{FIXTURES, open};
use suite::decoder::rotary;

/// Frequencies of the fixtures' ropes equal the reference's, and are fixed up to `fixed_until`.
#[test]
fn a_rope_in_models_turns_as_the_reference_does() {
    for name in FIXTURES {
        for rope in &open(name).config().ropes {
            for seq in [1, 24, 32, 33, 88] {
                let frequencies = rope.frequencies(seq);
                for (pair, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = ((seq - 1) as f64 * frequency).sin_cos();
                    let [x, y] = rotated_frequency(rope, pair, seq - 1, seq);
                    let m = rope.attention_factor;
                    let gap = (x - m * cos).abs() + (y - m * sin).abs();
                    assert!(gap < 1e-9, "{name}: pair {pair} of {seq}: {gap}");
                }
                let fixed = rope.fixed_until().is_none_or(|until| seq <= until);
                assert_eq!(fixed, frequencies == rope.frequencies(1), "{name} at {seq}");
            }
        }
    }
}

/// Returns cosine and sine of a pair, from the reference's rotation.
fn rotated_frequency(rope: &Rope, pair: usize, position: usize, seq: usize) -> [f64; 2] {
    let mut head = vec![0.0; rope.dim];
    head[..rope.dim / 2].fill(1.0);
    rotary(rope).rotate(&mut head, position, seq);
    [head[pair], head[pair + rope.dim / 2]]
}

fn scaling() -> impl Strategy<Value = Scaling> {
    // As many short lengths as long ones; at short ones the bounds of blends reach the ends of a head.
    let original = (1.0..12.0f64).prop_map(|bits| bits.exp2() as usize);
    let factor = 1.0..40.0f64;
    let factors = |min| proptest::collection::vec(min..20.0f64, 8);
    prop_oneof![
        Just(Scaling::None),
        factor.clone().prop_map(|factor| Scaling::Linear { factor }),
        (factor.clone(), original.clone())
            .prop_map(|(factor, max_seq)| Scaling::Dynamic { factor, max_seq }),
        (factor.clone(), 0.5..3.0f64, 0.1..8.0f64, original.clone()).prop_map(
            |(factor, low_freq_factor, more, original_max_seq)| Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor: low_freq_factor + more,
                original_max_seq,
            }
        ),
        (factor, 2.0..64.0f64, 0.2..2.0f64, original.clone(), any::<bool>()).prop_map(
            |(factor, beta_fast, beta_slow, original_max_seq, truncate)| Scaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_seq,
                truncate,
            }
        ),
        (factors(0.5), factors(1.0), original).prop_map(|(short, long, original_max_seq)| {
            Scaling::LongRope { short, long, original_max_seq }
        }),
    ]
}

proptest! {
    /// Both implementations agree far outside the range of the fixtures.
    #[test]
    fn any_rope_turns_as_the_reference_does(
        scaling in scaling(),
        theta in (2.0..20.0f64).prop_map(f64::exp2),
        attention_factor in 0.5..2.0f64,
        seq in 1usize..6000,
    ) {
        let rope = Rope { theta, dim: 16, scaling, attention_factor, context: None };
        let position = seq - 1;
        for (pair, frequency) in rope.frequencies(seq).into_iter().enumerate() {
            let [x, y] = rotated_frequency(&rope, pair, position, seq);
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            prop_assert!((x - attention_factor * cos).abs() < 1e-8, "pair {pair}");
            prop_assert!((y - attention_factor * sin).abs() < 1e-8, "pair {pair}");
        }
    }
}
