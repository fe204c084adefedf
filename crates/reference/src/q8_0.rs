//! Weights in Q8_0: 8 bits with one f16 scale for 32.
//!
//! ```text
//! values: [rows, k], k whole blocks of 32   codes: i8 as values   scales: f16, one a block
//!   for each block: d = max|values|/127;  code = round(value·(1/d));  scale = f16(d)
//!   value ≈ code·scale
//! ```
//!
//! Arithmetic is f32, one rounding an operation; codes on a tie go away from 0, scales to even. A block of
//! zeros has scale 0 and codes 0. Devices that divide approximately may round to the neighbour next to a tie,
//! which [`disagreement`] can excuse.
//!
//! Source: ggml, `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of `ggml-quants.c`.

use half::f16;
use rayon::prelude::*;

use crate::Error;
use crate::nf4::{around, finite, length};

/// Elements of a block.
pub const BLOCK: usize = 32;

/// Quantised blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Blocks {
    /// One code a value.
    pub codes: Vec<i8>,
    /// One scale a block.
    pub scales: Vec<f16>,
}

/// Quantises whole blocks of values.
///
/// # Errors
/// [`Error::Length`] if the last block is not whole; [`Error::NotFinite`] with the first infinity or NaN, or
/// with the first block whose scale overflows f16.
pub fn quantize(values: &[f32]) -> Result<Blocks, Error> {
    let steps = steps(values)?;
    let scales: Vec<f16> = steps.iter().copied().map(f16::from_f32).collect();
    if let Some(index) = scales.iter().position(|scale| !scale.is_finite()) {
        return Err(Error::NotFinite { what: "scale", index });
    }
    let code = |i: usize| round(values[i] * inverse(steps[i / BLOCK]));
    Ok(Blocks { codes: (0..values.len()).into_par_iter().map(code).collect(), scales })
}

/// Dequantises codes.
///
/// # Errors
/// [`Error::Length`] if there is not one scale for 32 codes.
pub fn dequantize(codes: &[i8], scales: &[f16]) -> Result<Vec<f32>, Error> {
    length("codes", codes.len(), scales.len() * BLOCK)?;
    let value = |i: usize| f32::from(codes[i]) * scales[i / BLOCK].to_f32();
    Ok((0..codes.len()).into_par_iter().map(value).collect())
}

/// Returns the first element whose code, or whose block's scale, differs by more than an error of `ulps` in
/// the quotient explains.
///
/// # Errors
/// As [`quantize`]; [`Error::Length`] if there is not one code a value and one scale a block.
pub fn disagreement(values: &[f32], blocks: &Blocks, ulps: u32) -> Result<Option<usize>, Error> {
    let steps = steps(values)?;
    length("codes", blocks.codes.len(), values.len())?;
    length("scales", blocks.scales.len(), steps.len())?;
    Ok((0..values.len()).into_par_iter().find_first(|&i| {
        let step = steps[i / BLOCK];
        let scales = around(step, ulps).map(f16::from_f32);
        let codes = around(values[i] * inverse(step), ulps).map(round);
        !scales.contains(&blocks.scales[i / BLOCK]) || !codes.contains(&blocks.codes[i])
    }))
}

/// Returns the largest magnitude of each block, divided by 127.
fn steps(values: &[f32]) -> Result<Vec<f32>, Error> {
    length("values", values.len(), values.len().next_multiple_of(BLOCK))?;
    finite(values)?;
    let step = |block: &[f32]| block.iter().fold(0f32, |max, v| max.max(v.abs())) / 127.0;
    Ok(values.par_chunks(BLOCK).map(step).collect())
}

fn inverse(step: f32) -> f32 {
    // A smaller scale would have an infinite inverse.
    if step < f32::MIN_POSITIVE { 0.0 } else { 1.0 / step }
}

fn round(x: f32) -> i8 {
    x.round() as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(first: &[f32]) -> Vec<f32> {
        first.iter().copied().chain([0.0; BLOCK]).take(BLOCK).collect()
    }

    #[test]
    fn blocks_have_their_own_scale_and_ties_go_away_from_zero() -> Result<(), Error> {
        let values = [block(&[127.0, 0.5, -1.5, 126.4]), block(&[]), block(&[-0.1, 0.05])].concat();
        let made = quantize(&values)?;
        assert_eq!(made.scales, [1.0, 0.0, 0.1 / 127.0].map(f16::from_f32));
        assert_eq!(made.codes[..4], [127, 1, -2, 126]);
        assert_eq!(made.codes[32..64], [0; 32]);
        assert_eq!(made.codes[64..67], [-127, 64, 0]);
        let back = dequantize(&made.codes, &made.scales)?;
        assert_eq!(back[..4], [127.0, 1.0, -2.0, 126.0]);
        assert_eq!(back[64], -127.0 * f16::from_f32(0.1 / 127.0).to_f32());
        assert_eq!(disagreement(&values, &made, 0)?, None);
        let mut other = made.clone();
        other.codes[1] = 0; // On the other side of a tie.
        assert_eq!(disagreement(&values, &other, 0)?, Some(1));
        assert_eq!(disagreement(&values, &other, 2)?, None);
        let mut other = made;
        other.scales[2] = f16::from_bits(other.scales[2].to_bits() + 1);
        assert_eq!(disagreement(&values, &other, 2)?, Some(64));
        Ok(())
    }

    #[test]
    fn what_is_wrong_is_named() {
        let short = Error::Length { what: "values", need: 64, have: 33 };
        assert_eq!(quantize(&[1.0; 33]), Err(short));
        let large = Error::NotFinite { what: "scale", index: 0 };
        assert_eq!(quantize(&block(&[1e9])), Err(large));
        let nan = Error::NotFinite { what: "value", index: 1 };
        assert_eq!(quantize(&block(&[0.0, f32::NAN])), Err(nan));
        let few = Error::Length { what: "codes", need: 32, have: 5 };
        assert_eq!(dequantize(&[1; 5], &[f16::ONE]), Err(few));
    }
}
