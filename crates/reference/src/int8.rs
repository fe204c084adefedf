//! Weights in 8 bits with one absmax a row, and activations rounded to 8 bits.
//!
//! ```text
//! values: [rows, cols]   codes: i8 as values   scb: [rows], bitsandbytes' name for a row's absmax
//!   for each row: scb[row] = max|values[row, ..]|;  code = round(values[row, col]·(127/scb[row]))
//!   values[row, col] ≈ code·scb[row]·(1/127)
//! ```
//!
//! Arithmetic is f32, one rounding an operation; ties go to even. bitsandbytes first rounds weights to f16,
//! so a caller that wants its codes must do the same. Its CUDA kernel divides approximately and may round to
//! the neighbour near a tie, which [`disagreement`] can excuse.
//!
//! Source: Dettmers et al., "LLM.int8()" (2022); bitsandbytes 95f9af3, `kInt8VectorQuant` and
//! `int8_vectorwise_dequant`.

use rayon::prelude::*;

use crate::Error;
use crate::nf4::{around, finite, largest, length, normal};

/// Quantised rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    /// `[rows, cols]`
    pub codes: Vec<i8>,
    /// `[rows]`
    pub scb: Vec<f32>,
}

/// Quantises `[rows, cols]` values; a row of zeros has scb 0 and codes 0. Subnormals count as zero.
///
/// # Errors
/// [`Error::Length`] if there are not rows·cols values; [`Error::NotFinite`] with the first infinity or NaN.
pub fn quantize(values: &[f32], rows: usize, cols: usize) -> Result<Rows, Error> {
    let scb = absmax(values, rows, cols)?;
    let code = |i: usize| round(scaled(values[i], scb[i / cols]));
    let codes = (0..values.len()).into_par_iter().map(code).collect();
    Ok(Rows { codes, scb })
}

/// Dequantises codes.
///
/// # Shapes
/// codes `[rows, cols]`, scb `[rows]`; the result as codes.
///
/// # Errors
/// [`Error::Length`] if the shapes disagree.
pub fn dequantize(codes: &[i8], scb: &[f32], cols: usize) -> Result<Vec<f32>, Error> {
    length("codes", codes.len(), scb.len().saturating_mul(cols))?;
    let value = |i: usize| f32::from(codes[i]) * scb[i / cols] * (1.0 / 127.0);
    Ok((0..codes.len()).into_par_iter().map(value).collect())
}

/// Returns the first element whose code differs by more than an error of `ulps` in the scale explains.
///
/// # Errors
/// As [`quantize`]; [`Error::Length`] if there is not one code for each value.
pub fn disagreement(
    values: &[f32],
    rows: usize,
    cols: usize,
    codes: &[i8],
    ulps: u32,
) -> Result<Option<usize>, Error> {
    let scb = absmax(values, rows, cols)?;
    length("codes", codes.len(), values.len())?;
    Ok((0..values.len()).into_par_iter().find_first(|&i| {
        let x = scaled(values[i], scb[i / cols]);
        around(x, ulps).iter().all(|x| round(*x) != codes[i])
    }))
}

/// Rounds each row to 8 bits and dequantises it. Columns with a magnitude of at least `threshold` are
/// outliers and stay exact; 0 disables outliers.
///
/// # Shapes
/// values and result `[rows, cols]`.
///
/// # Errors
/// [`Error::Length`], [`Error::NotFinite`].
pub fn activations(
    values: &[f32],
    rows: usize,
    cols: usize,
    threshold: f32,
) -> Result<Vec<f32>, Error> {
    let scales = steps(values, rows, cols, threshold)?;
    let outlier_columns = outliers(values, cols, threshold);
    let value = |i: usize| match outlier_columns[i % cols] {
        true => values[i],
        false => {
            (values[i] * inverse(scales[i / cols])).round_ties_even() * (scales[i / cols] / 127.0)
        }
    };
    Ok((0..values.len()).into_par_iter().map(value).collect())
}

/// Returns the indices of values in [`activations`] that an error of `ulps` in the scale would round to
/// another code.
///
/// # Errors
/// As [`activations`].
pub fn undecided(
    values: &[f32],
    rows: usize,
    cols: usize,
    threshold: f32,
    ulps: u32,
) -> Result<Vec<usize>, Error> {
    let scales = steps(values, rows, cols, threshold)?;
    let near = |i: &usize| {
        let all = around(values[*i] * inverse(scales[*i / cols]), ulps);
        all.iter().any(|x| x.round_ties_even() != all[0].round_ties_even())
    };
    Ok((0..values.len()).filter(near).collect())
}

/// Returns the largest magnitude of each row, without outlier columns.
fn steps(values: &[f32], rows: usize, cols: usize, threshold: f32) -> Result<Vec<f32>, Error> {
    length("values", values.len(), rows.saturating_mul(cols))?;
    finite(values)?;
    let outlier_columns = outliers(values, cols, threshold);
    let of_row = |row: usize| {
        let own = values[row * cols..][..cols].iter().zip(&outlier_columns);
        own.fold(0f32, |top, (value, out)| if *out { top } else { top.max(value.abs()) })
    };
    Ok((0..rows).into_par_iter().map(of_row).collect())
}

fn outliers(values: &[f32], cols: usize, threshold: f32) -> Vec<bool> {
    let mut outlier_columns = vec![false; cols];
    if threshold > 0.0 {
        let far = values.iter().enumerate().filter(|(_, value)| value.abs() >= threshold);
        far.for_each(|(i, _)| outlier_columns[i % cols] = true);
    }
    outlier_columns
}

fn inverse(largest: f32) -> f32 {
    // A smaller scale would have an infinite inverse.
    if largest < 127.0 / f32::MAX { 0.0 } else { 127.0 / largest }
}

fn absmax(values: &[f32], rows: usize, cols: usize) -> Result<Vec<f32>, Error> {
    length("values", values.len(), rows.saturating_mul(cols))?;
    finite(values)?;
    Ok((0..rows).into_par_iter().map(|row| largest(&values[row * cols..][..cols])).collect())
}

fn scaled(v: f32, scb: f32) -> f32 {
    normal(v) * inverse(scb)
}

fn round(x: f32) -> i8 {
    x.round_ties_even() as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_own_scale_and_ties_go_to_even() -> Result<(), Error> {
        let values = [127.0, 0.5, 1.5, -126.5, 0.0, 0.0, 0.0, 0.0, -2.0, 1.0, 0.0, 2.0];
        let rows = quantize(&values, 3, 4)?;
        assert_eq!(rows.scb, [127.0, 0.0, 2.0]);
        assert_eq!(rows.codes, [127, 0, 2, -126, 0, 0, 0, 0, -127, 64, 0, 127]);
        let back = dequantize(&rows.codes, &rows.scb, 4)?;
        assert_eq!(back[..4], [127.0 * 127.0 * (1.0 / 127.0), 0.0, 2.0, -126.0]);
        assert_eq!(back[4..8], [0.0; 4]);
        assert_eq!(disagreement(&values, 3, 4, &rows.codes, 0)?, None);
        let mut other = rows.codes;
        other[1] = 1; // On the other side of a tie.
        assert_eq!(disagreement(&values, 3, 4, &other, 0)?, Some(1));
        assert_eq!(disagreement(&values, 3, 4, &other, 2)?, None);
        other[2] = 3;
        assert_eq!(disagreement(&values, 3, 4, &other, 2)?, Some(2));
        Ok(())
    }

    #[test]
    fn outlier_columns_stay_and_widen_no_step() -> Result<(), Error> {
        let values = [1.27, 0.306, 60.0, -0.5, 0.0, 0.0, -7.0, 0.0];
        let all = activations(&values, 2, 4, 6.0)?;
        let step = 1.27f32 / 127.0;
        assert_eq!(all, [127.0 * step, 31.0 * step, 60.0, -50.0 * step, 0.0, 0.0, -7.0, 0.0]);
        // Without a threshold an outlier column coarsens the others.
        assert_eq!(activations(&values, 2, 4, 0.0)?[1], 60.0 / 127.0);
        assert_eq!(undecided(&[127.0, 0.5, 1.4, 3.0], 1, 4, 0.0, 2)?, [1]);
        assert!(activations(&values, 2, 3, 0.0).is_err());
        Ok(())
    }

    #[test]
    fn the_largest_scales_are_the_smallest_steps() -> Result<(), Error> {
        let values = [65504.0, -65504.0, f32::MIN_POSITIVE / 2.0, 2.0f32.powi(-24)];
        assert_eq!(quantize(&values, 2, 2)?.codes, [127, -127, 0, 127]);
        assert_eq!(quantize(&[1e-37, 0.0, 4e-37, -4e-37], 2, 2)?.codes, [0, 0, 127, -127]);
        Ok(())
    }

    #[test]
    fn what_is_wrong_is_named() {
        let need = |what, need, have| Err(Error::Length { what, need, have });
        assert_eq!(quantize(&[1.0; 5], 2, 3), need("values", 6, 5));
        assert_eq!(quantize(&[], usize::MAX, 3), need("values", usize::MAX, 0));
        assert_eq!(
            quantize(&[0.0, f32::NAN], 1, 2),
            Err(Error::NotFinite { what: "value", index: 1 })
        );
        assert_eq!(dequantize(&[1; 5], &[1.0; 2], 3).err(), need("codes", 6, 5).err());
        assert_eq!(quantize(&[], 3, 0).map(|rows| rows.scb), Ok(vec![0.0; 3]));
    }
}
