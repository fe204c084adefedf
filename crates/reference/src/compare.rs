//! Tolerance rule for every kernel.
//!
//! `max|out - reference| <= 2 * max|naive - reference| + atol`, where `naive` is the same formula in the
//! kernel's own formats with plain loops, and `atol` is four ulps of the output format at the reference's
//! largest magnitude. A kernel's error may thus be twice that of a naive one.
//!
//! Source: the rule of FlashAttention's tests (`hopper/test_flash_attn.py`), with an atol that
//! follows from the format.

use std::collections::BTreeMap;
use std::fmt;

use crate::{DType, Error};

/// Error of an output against the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Largest |out - reference|; NaN or infinite if the output is NaN or infinite in the wrong place.
    pub max_err: f64,
    /// Maximum allowed `max_err`.
    pub tolerance: f64,
    /// Index of `max_err`; None for an empty output.
    pub worst_index: Option<usize>,
    /// Output at that index.
    pub worst_out: f64,
    /// Reference at that index.
    pub worst_reference: f64,
    pub passed: bool,
}

/// Compares `out`, of format `dtype`, with the exact `reference`, given a `naive` evaluation at the same
/// positions.
///
/// - If the reference is finite, NaN fails. An infinity counts as the power of two at which the format
///   overflows, so that it passes only if the reference is nearly that large or larger.
/// - If the reference is NaN or infinite, the output must be NaN or the same infinity.
/// - If `naive` itself breaks these rules, nothing passes.
///
/// # Errors
/// [`Error::Length`] if the three lengths differ.
pub fn compare(
    out: &[f32],
    reference: &[f64],
    naive: &[f64],
    dtype: DType,
) -> Result<Comparison, Error> {
    for (what, have) in [("out", out.len()), ("naive", naive.len())] {
        if have != reference.len() {
            return Err(Error::Length { what, need: reference.len(), have });
        }
    }
    let rule = Rule::new(reference, dtype.storage());
    let (naive_err, _) = rule.worst(naive.iter().copied(), reference);
    let (max_err, worst_index) = rule.worst(out.iter().map(|&v| v.into()), reference);
    let tolerance = if naive_err.is_finite() { 2.0 * naive_err + rule.atol } else { f64::NAN };
    Ok(Comparison {
        max_err,
        tolerance,
        worst_index,
        worst_out: worst_index.map_or(0.0, |i| out[i].into()),
        worst_reference: worst_index.map_or(0.0, |i| reference[i]),
        passed: max_err <= tolerance, // False if either is NaN.
    })
}

/// Rows of a kernel's output with the exact and the naive ones.
///
/// Each class of rows is compared separately. If the magnitude of a row depends on its position, the
/// tolerance of large rows would hide any error in small rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    /// `[lines, width]`
    pub(crate) out: Vec<f32>,
    pub(crate) exact: Vec<f64>,
    pub(crate) naive: Vec<f64>,
    /// Class of each row.
    pub(crate) classes: Vec<u32>,
    /// Format of the output.
    pub(crate) dtype: DType,
}

impl Lines {
    /// Appends rows of the same format and width.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.out.extend(other.out);
        self.exact.extend(other.exact);
        self.naive.extend(other.naive);
        self.classes.extend(other.classes);
        self
    }

    /// Runs [`compare`] on each class. Each class gets at least a quarter of the tolerance of all rows. The
    /// naive error of a few rows is a matter of chance, and rows that are exactly 0 may have none.
    ///
    /// # Errors
    /// As [`compare`].
    pub fn compare(&self) -> Result<Comparison, Error> {
        let Self { out, exact, naive, classes, dtype } = self;
        let whole = compare(out, exact, naive, *dtype)?;
        let width = out.len() / classes.len().max(1);
        let mut of_class: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (line, class) in classes.iter().enumerate() {
            of_class.entry(*class).or_default().extend(line * width..(line + 1) * width);
        }
        let one = |at: Vec<usize>| {
            let (out, exact, naive) = (pick(out, &at), pick(exact, &at), pick(naive, &at));
            let mut comparison = compare(&out, &exact, &naive, *dtype)?;
            comparison.worst_index = comparison.worst_index.map(|i| at[i]);
            comparison.tolerance = comparison.tolerance.max(whole.tolerance / 4.0);
            comparison.passed = comparison.max_err <= comparison.tolerance;
            Ok(comparison)
        };
        let all: Vec<_> = of_class.into_values().map(one).collect::<Result<_, Error>>()?;
        Ok(if all.is_empty() { whole } else { Comparison::worst(all) })
    }
}

fn pick<T: Copy>(values: &[T], at: &[usize]) -> Vec<T> {
    at.iter().map(|&i| values[i]).collect()
}

impl Comparison {
    /// Compares results that have one right value: `out` must equal `expected` bit for bit. NaN always fails,
    /// and the two zeros differ.
    ///
    /// # Errors
    /// [`Error::Length`] if the two lengths differ.
    pub fn exact(out: &[f32], expected: &[f32]) -> Result<Self, Error> {
        if out.len() != expected.len() {
            return Err(Error::Length { what: "out", need: expected.len(), have: out.len() });
        }
        let wrong = |(o, e): &(&f32, &f32)| o.is_nan() || o.to_bits() != e.to_bits();
        let error = |o: f32, e: f32| if o == e { 0.0 } else { (f64::from(o) - f64::from(e)).abs() };
        let worst = out.iter().zip(expected).enumerate().filter(|(_, pair)| wrong(pair));
        let worst = worst.max_by(|(_, (a, b)), (_, (c, d))| {
            error(**a, **b).total_cmp(&error(**c, **d)) // NaN is above all numbers
        });
        let first = (!out.is_empty()).then_some(0);
        let at = worst.map(|(at, _)| at).or(first);
        let (worst_out, wanted) = at.map_or((0.0, 0.0), |i| (out[i], expected[i]));
        Ok(Self {
            max_err: error(worst_out, wanted),
            tolerance: 0.0,
            worst_index: at,
            worst_out: worst_out.into(),
            worst_reference: wanted.into(),
            passed: worst.is_none(),
        })
    }

    /// Compares results with an absolute tolerance. If the reference is NaN, anything passes.
    ///
    /// # Errors
    /// [`Error::Length`] if the two lengths differ.
    pub fn within(out: &[f32], reference: &[f64], tolerance: f64) -> Result<Self, Error> {
        if out.len() != reference.len() {
            return Err(Error::Length { what: "out", need: reference.len(), have: out.len() });
        }
        let error = |(o, r): (&f32, &f64)| if r.is_nan() { 0.0 } else { (f64::from(*o) - r).abs() };
        let errors = out.iter().zip(reference).map(error).enumerate();
        // NaN is above all numbers.
        let worst = errors.max_by(|(_, a), (_, b)| a.total_cmp(b));
        let at = worst.map(|(at, _)| at);
        let max_err = worst.map_or(0.0, |(_, error)| error);
        Ok(Self {
            max_err,
            tolerance,
            worst_index: at,
            worst_out: at.map_or(0.0, |i| out[i].into()),
            worst_reference: at.map_or(0.0, |i| reference[i]),
            passed: max_err <= tolerance, // False if it is NaN.
        })
    }

    /// Returns the most informative of several comparisons: the first that failed, or the one nearest to its
    /// tolerance.
    ///
    /// # Panics
    /// Panics if `all` is empty.
    pub fn worst(all: Vec<Self>) -> Self {
        let failed = all.iter().find(|c| !c.passed).copied();
        let near = |c: &Self| if c.max_err == 0.0 { 0.0 } else { c.max_err / c.tolerance };
        failed
            .or_else(|| all.into_iter().max_by(|a, b| near(a).total_cmp(&near(b))))
            .expect("something was compared")
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let relation = if self.passed { "within" } else { "exceeds" };
        write!(f, "error {:.3e} {relation} {:.3e}", self.max_err, self.tolerance)?;
        match self.worst_index {
            Some(i) => write!(f, " at {i}: {:e}, exact {:e}", self.worst_out, self.worst_reference),
            None => write!(f, " (nothing to compare)"),
        }
    }
}

struct Rule {
    /// Overflow limit of the output format.
    limit: f64,
    atol: f64,
}

impl Rule {
    fn new(reference: &[f64], dtype: DType) -> Self {
        let limit = dtype.overflow();
        let finite = reference.iter().filter(|r| r.is_finite());
        let largest = finite.fold(0.0f64, |max, r| max.max(r.abs()));
        Self { limit, atol: 4.0 * dtype.ulp_at(largest.min(limit / 2.0)) }
    }

    fn error(&self, out: f64, reference: f64) -> f64 {
        if !reference.is_finite() {
            let same = out == reference || (out.is_nan() && reference.is_nan());
            return if same { 0.0 } else { f64::INFINITY };
        }
        let err = (self.clamp(out) - self.clamp(reference)).abs(); // NaN stays NaN.
        if out.is_infinite() && err > self.atol { f64::INFINITY } else { err }
    }

    fn clamp(&self, x: f64) -> f64 {
        x.clamp(-self.limit, self.limit)
    }

    /// Returns the largest error and its first index; NaN is larger than all numbers.
    fn worst(&self, out: impl Iterator<Item = f64>, reference: &[f64]) -> (f64, Option<usize>) {
        let errors = out.zip(reference).map(|(out, &r)| self.error(out, r)).enumerate();
        errors.fold((0.0, None), |(max, at), (i, err)| {
            let worse = at.is_none() || err > max || (err.is_nan() && !max.is_nan());
            if worse { (err, Some(i)) } else { (max, at) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;

    /// Compares one output with one reference, next to an exact neighbour of magnitude one.
    fn passes(out: f32, reference: f64, naive: f64, dtype: DType) -> bool {
        let comparison =
            compare(&[1.0, out], &[1.0, reference], &[1.0, naive], dtype).expect("lengths agree");
        assert!(!comparison.passed || comparison.max_err <= comparison.tolerance);
        comparison.passed
    }

    #[test]
    fn exact_is_exact() {
        let exact = |out: &[f32], expected: &[f32]| {
            let c = Comparison::exact(out, expected).expect("lengths agree");
            (c.passed, c.worst_index)
        };
        assert_eq!(exact(&[], &[]), (true, None));
        assert_eq!(exact(&[1.0, -0.0], &[1.0, -0.0]), (true, Some(0)));
        assert_eq!(exact(&[1.0, -0.0], &[1.0, 0.0]), (false, Some(1)));
        assert_eq!(exact(&[1.0, 1.0 + f32::EPSILON, 1.0], &[1.0; 3]), (false, Some(1)));
        assert_eq!(exact(&[f32::NAN, 3.0], &[f32::NAN, 1.0]), (false, Some(0)));
        assert!(Comparison::exact(&[1.0], &[]).is_err());
    }

    #[test]
    fn within_is_as_far_as_it_says() {
        let within = |out: &[f32], reference: &[f64]| {
            let c = Comparison::within(out, reference, 0.5).expect("lengths agree");
            (c.passed, c.worst_index)
        };
        assert_eq!(within(&[], &[]), (true, None));
        assert_eq!(within(&[1.0, 2.5, 9.0], &[1.25, 2.0, NAN]), (true, Some(1)));
        assert_eq!(within(&[1.0, 2.5], &[1.6, 2.0]), (false, Some(0)));
        assert_eq!(within(&[1.0, f32::NAN], &[1.6, 2.0]), (false, Some(1)));
        assert!(Comparison::within(&[1.0], &[], 0.5).is_err());
    }

    #[test]
    fn a_failure_is_the_worst_of_several() {
        let of = |max_err, tolerance, passed| Comparison {
            max_err,
            tolerance,
            worst_index: None,
            worst_out: 0.0,
            worst_reference: 0.0,
            passed,
        };
        let (exact, near) = (of(0.0, 0.0, true), of(0.9, 1.0, true));
        assert_eq!(Comparison::worst(vec![near, exact, of(0.1, 1.0, true)]), near);
        let failed = of(0.5, 0.2, false);
        assert_eq!(Comparison::worst(vec![near, failed, of(9.0, 1.0, false)]), failed);
        assert!(Comparison::worst(vec![near, of(f64::NAN, 1.0, false)]).max_err.is_nan());
    }

    #[test]
    fn twice_the_naive_error_and_four_ulps() -> Result<(), Error> {
        let ulp = DType::Bf16.ulp_at(1.0);
        let reference = [1.0, -1.5, 0.25];
        let naive = [1.0, -1.5 + ulp, 0.25];
        let at =
            |err: f64| compare(&[(1.0 + err) as f32, -1.5, 0.25], &reference, &naive, DType::Bf16);
        let limit = at(6.0 * ulp)?;
        assert_eq!(
            limit,
            Comparison {
                max_err: 6.0 * ulp,
                tolerance: 6.0 * ulp,
                worst_index: Some(0),
                worst_out: 1.0 + 6.0 * ulp,
                worst_reference: 1.0,
                passed: true
            }
        );
        assert!(!at(6.01 * ulp)?.passed);
        assert!(!at(-6.01 * ulp)?.passed);
        Ok(())
    }

    #[test]
    fn a_class_has_a_tolerance_of_its_own() -> Result<(), Error> {
        let right = [8.0, 8.0, 0.25, 0.25, 8.0, 8.0];
        let of = |out: &[f32], classes: &[u32]| Lines {
            out: out.to_vec(),
            exact: right.to_vec(),
            naive: right.to_vec(),
            classes: classes.to_vec(),
            dtype: DType::Bf16,
        };
        let small = [8.0, 8.0, 0.25, 0.35, 8.0, 8.0];
        assert!(of(&small, &[0; 3]).compare()?.passed, "four ulps of 8 are 0.25");
        let apart = of(&small, &[0, 1, 0]).compare()?;
        assert_eq!((apart.passed, apart.worst_index), (false, Some(3)));
        let near = of(&[8.0, 8.0, 0.25, 0.3, 8.0, 8.0], &[0, 1, 0]).compare()?;
        assert_eq!((near.passed, near.tolerance), (true, 0.0625), "a quarter");
        let large = of(&[8.0, 8.0, 0.25, 0.25, 8.0, 9.0], &[0, 1, 0]).compare()?;
        assert_eq!((large.passed, large.worst_index), (false, Some(5)));
        let both =
            of(&right.map(|v| v as f32), &[0, 1, 0]).and(of(&small, &[0, 1, 0])).compare()?;
        assert_eq!((both.passed, both.worst_index), (false, Some(9)));
        let none = Lines {
            out: vec![],
            exact: vec![],
            naive: vec![],
            classes: vec![],
            dtype: DType::Bf16,
        };
        assert!(none.compare()?.passed);
        Ok(())
    }

    #[test]
    fn the_output_of_a_tf32_kernel_is_f32() -> Result<(), Error> {
        let one = [1.0];
        let comparison = compare(&[1.0], &one, &one, DType::Tf32)?;
        assert_eq!(comparison.tolerance, 4.0 * DType::F32.ulp_at(1.0));
        Ok(())
    }

    #[test]
    fn nan_fails_wherever_it_is_not_the_answer() -> Result<(), Error> {
        for dtype in DType::ALL {
            assert!(!passes(f32::NAN, 0.5, 0.5, dtype));
            assert!(!passes(f32::NAN, INF, INF, dtype));
            assert!(!passes(0.5, NAN, NAN, dtype));
            assert!(!passes(f32::INFINITY, NAN, NAN, dtype));
            assert!(passes(f32::NAN, NAN, NAN, dtype));
            // A naive evaluation that breaks down excuses nothing.
            assert!(!passes(0.5, 0.5, NAN, dtype));
            assert!(!passes(0.5, 0.5, INF, dtype));
        }
        let all = [NAN, 2.0, NAN];
        let nan = compare(&[f32::NAN, f32::NAN, 7.0], &all, &all, DType::F32)?;
        assert!(nan.max_err.is_nan() && nan.worst_index == Some(1));
        Ok(())
    }

    #[test]
    fn infinities_must_match() {
        for dtype in DType::ALL {
            assert!(passes(f32::INFINITY, INF, INF, dtype));
            assert!(!passes(f32::NEG_INFINITY, INF, INF, dtype));
            assert!(!passes(f32::MAX, INF, INF, dtype));
            assert!(!passes(f32::INFINITY, 2.0, 2.0, dtype));
        }
    }

    #[test]
    fn overflow_of_the_output_format_is_right() {
        assert!(passes(f32::INFINITY, 70_000.0, INF, DType::F16));
        assert!(passes(f32::NEG_INFINITY, -1e9, -INF, DType::F16));
        assert!(!passes(f32::NEG_INFINITY, 70_000.0, INF, DType::F16));
        assert!(!passes(f32::INFINITY, 60_000.0, 60_000.0, DType::F16));
        assert!(!passes(1000.0, 70_000.0, INF, DType::F16));
        assert!(passes(65_504.0, 65_530.0, INF, DType::F16), "one ulp below infinity");
        // A value that overflows f16 is an ordinary value in f32.
        assert!(!passes(f32::INFINITY, 70_000.0, 70_000.0, DType::F32));
    }

    #[test]
    fn lengths_must_agree_and_nothing_passes() -> Result<(), Error> {
        assert_eq!(
            compare(&[1.0], &[1.0, 2.0], &[1.0, 2.0], DType::F32),
            Err(Error::Length { what: "out", need: 2, have: 1 })
        );
        let empty = compare(&[], &[], &[], DType::F32)?;
        assert!(empty.passed && empty.worst_index.is_none());
        Ok(())
    }

    #[test]
    fn reads_as_a_sentence() -> Result<(), Error> {
        let bad = compare(&[2.0], &[1.0], &[1.0], DType::F32)?;
        assert_eq!(bad.to_string(), "error 1.000e0 exceeds 4.768e-7 at 0: 2e0, exact 1e0");
        Ok(())
    }
}
