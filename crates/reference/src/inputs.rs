//! Seeded inputs: the same values on every machine, and in every version of this crate.
//!
//! Values come from the ChaCha8 stream by integer arithmetic and one correctly rounded
//! multiplication, never by a library's distributions or its `ln` and `cos`, which may change.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rayon::prelude::*;

use crate::{DType, Error};

/// Distribution of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Distribution {
    /// Mean 0, deviation 1, within ±8: a 64-coin binomial smoothed by a uniform. Its distribution
    /// function stays within 0.003 of the normal one.
    #[default]
    Normal,
    /// Uniform over [-1, 1].
    Uniform,
}

/// A special value that kernels often get wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Inf,
    NegInf,
    Nan,
    NegZero,
    /// Half of the format's smallest normal value.
    Denormal,
}

/// Values per task. Each task seeks its own position in the stream, so that the values do not depend on it.
const CHUNK: usize = 1 << 12;

/// Returns `len` values drawn from `distribution`. None is zero, and a longer fill starts with the shorter
/// one.
pub fn fill(seed: u64, len: usize, distribution: Distribution) -> Vec<f32> {
    match distribution {
        Distribution::Normal => draw(seed, len, normal),
        Distribution::Uniform => draw(seed, len, |[word]| uniform(word) as f32),
    }
}

/// Overwrites `values` at the given positions; the denormal is one of `dtype`.
///
/// # Errors
/// [`Error::OutOfRange`] if a position is past the end; nothing is written then.
pub fn plant(values: &mut [f32], dtype: DType, places: &[(usize, Special)]) -> Result<(), Error> {
    let len = values.len();
    if let Some(&(index, _)) = places.iter().find(|(index, _)| *index >= len) {
        return Err(Error::OutOfRange { what: "place", index, len });
    }
    for &(index, special) in places {
        values[index] = special.value(dtype);
    }
    Ok(())
}

impl Special {
    /// Returns the value, exact in `dtype`.
    pub fn value(self, dtype: DType) -> f32 {
        match self {
            Self::Inf => f32::INFINITY,
            Self::NegInf => f32::NEG_INFINITY,
            Self::Nan => f32::NAN,
            Self::NegZero => -0.0,
            Self::Denormal if dtype == DType::F16 => f32::from_bits((127 - 15) << 23), // 2^-15
            Self::Denormal => f32::MIN_POSITIVE / 2.0,
        }
    }
}

/// Returns the stream of a seed, which is the first eight bytes of the key.
pub(crate) fn stream(seed: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Draws one value from every `N` words of the stream.
fn draw<const N: usize>(seed: u64, len: usize, value: impl Fn([u32; N]) -> f32 + Sync) -> Vec<f32> {
    let mut values = vec![0.0; len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(i, chunk)| {
        let mut rng = stream(seed);
        rng.set_word_pos((i * CHUNK * N) as u128);
        let mut bytes = vec![0; chunk.len() * N * 4];
        rng.fill_bytes(&mut bytes);
        let (words, _) = bytes.as_chunks::<4>();
        for (v, words) in chunk.iter_mut().zip(words.as_chunks().0) {
            *v = value(words.map(u32::from_le_bytes));
        }
    });
    values
}

/// Returns an odd multiple of 2^-32 in (-1, 1): never zero, and symmetric.
fn uniform(word: u32) -> f64 {
    let odd = 2 * i64::from(word) + 1 - (1 << 32);
    odd as f64 / (1u64 << 32) as f64
}

fn normal([coins, more_coins, word]: [u32; 3]) -> f32 {
    /// 1 / sqrt(16 + 1/12): the variance of the coins, plus that of a uniform of width one.
    const SCALE: f64 = 0.249_351_490_477_014_83;
    let heads = coins.count_ones() + more_coins.count_ones();
    ((f64::from(heads) - 32.0 + uniform(word) / 2.0) * SCALE) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_chacha8() {
        // First words of the published keystream for an all-zero key and nonce (eSTREAM set 1).
        let mut rng = stream(0);
        for word in [0x2fef_003e, 0xd640_5f89, 0xe8b8_5b7f, 0xa1a5_091f_u32] {
            assert_eq!(rng.next_u32(), word);
        }
    }
}
