//! How many sequences at once.

/// Sequences that a card holds beside a model, when one takes `multiplier` times the model: what remains, divided; none
/// where the model alone does not fit. A rule of thumb for what nobody has planned: [`crate::Plan`] knows better.
///
/// # Units
/// All in bytes, or all in gigabytes.
///
/// # Panics
/// For a multiplier or a model that is not above 0.
///
/// ```
/// use flashover::memory::optimal_batch_size;
///
/// // 10.5 GB are left beside 3.5 GB of weights; a sequence takes a fifth of them.
/// assert_eq!(optimal_batch_size(3.5, 14.0, 0.2), 15);
/// assert_eq!(optimal_batch_size(15.0, 14.0, 0.2), 0);
/// ```
pub fn optimal_batch_size(model: f64, available: f64, multiplier: f64) -> usize {
    assert!(model > 0.0 && multiplier > 0.0, "a sequence takes something");
    // A rounding error short of a whole one is that one.
    ((available - model) / (model * multiplier) + 1e-9).max(0.0) as usize
}

/// A batch that was found, and what was tried on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchSize {
    /// The best; 0 where not one sequence fits.
    pub batch: usize,
    /// Its rate.
    pub rate: f64,
    /// All that were tried, in order.
    pub tries: Vec<BatchTry>,
}

/// A batch that was tried.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct BatchTry {
    /// Sequences that passed together.
    pub batch: usize,
    /// What it gave a second; none where memory did not suffice.
    pub rate: Option<f64>,
}

/// A gain below this is noise.
const GAIN: f64 = 1.02;
/// So many larger batches in a row that gain nothing are the end: one may be a size that kernels like less than those
/// beside it.
const PATIENCE: usize = 2;

/// Finds the batch with the highest rate by trying: from `start` half as many while memory does not suffice, then a
/// quarter more as long as that fits and one of the last two was faster, up to `most`.
///
/// `rate` runs a batch and gives what it does a second, or none where memory does not suffice: of a model
/// [`Engine::measure`](crate::Engine::measure), where [`GenerateError::is_memory`](crate::GenerateError::is_memory) tells the
/// latter, as `flashover bench --find-batch` does.
///
/// # Errors
/// Those of `rate`.
pub fn find_batch_size<E>(
    start: usize,
    most: usize,
    mut rate: impl FnMut(usize) -> Result<Option<f64>, E>,
) -> Result<BatchSize, E> {
    let mut tries: Vec<BatchTry> = Vec::new();
    let mut run = |batch: usize| -> Result<Option<f64>, E> {
        let rate = rate(batch)?;
        tries.push(BatchTry { batch, rate });
        Ok(rate)
    };
    // The least that did not fit.
    let mut not = None;
    let mut batch = start.clamp(1, most.max(1));
    let mut best = loop {
        match run(batch)? {
            Some(rate) => break (batch, rate),
            None if batch == 1 => return Ok(BatchSize { batch: 0, rate: 0.0, tries }),
            None => {
                not = Some(batch);
                batch /= 2;
            }
        }
    };
    // The last that fitted, and how many before it gained nothing.
    let (mut last, mut idle) = (best.0, 0);
    while idle < PATIENCE {
        let between = not.map_or(usize::MAX, |not| last + (not - last) / 2);
        let more = (last + last.div_ceil(4)).min(most).min(between);
        if more <= last {
            break;
        }
        match run(more)? {
            Some(rate) => {
                last = more;
                idle += 1;
                if rate >= best.1 * GAIN {
                    (best, idle) = ((more, rate), 0);
                }
            }
            None => not = Some(more),
        }
    }
    Ok(BatchSize { batch: best.0, rate: best.1, tries })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// A card that holds so many, and gains up to so many.
    fn found(start: usize, most: usize, holds: usize, gains: usize) -> (usize, Vec<usize>) {
        let rate = |batch: usize| {
            assert!(batch >= 1 && batch <= most.max(1), "{batch}");
            Ok::<_, Infallible>((batch <= holds).then(|| batch.min(gains) as f64))
        };
        let found = find_batch_size(start, most, rate).unwrap_or_else(|never| match never {});
        (found.batch, found.tries.iter().map(|t| t.batch).collect())
    }

    #[test]
    fn it_is_halved_until_it_fits_and_grown_while_that_gains() {
        assert_eq!(found(32, 1000, 10, 1000), (10, vec![32, 16, 8, 10, 13, 11]));
        assert_eq!(found(4, 1000, 1000, 9), (9, vec![4, 5, 7, 9, 12, 15]));
        assert_eq!(found(1, 1, 1000, 1000), (1, vec![1]));
        assert_eq!(found(8, 1000, 0, 1000), (0, vec![8, 4, 2, 1]));
        assert_eq!(found(0, 1000, 1, 1000).0, 1);
        assert_eq!(found(99, 20, 1000, 1000), (20, vec![20]));
    }

    #[test]
    fn one_size_that_is_slow_is_passed_over() {
        let of = |rates: &[(usize, f64)]| {
            let rate = |batch| {
                let known = rates.iter().find(|(own, _)| *own == batch);
                Ok::<_, Infallible>(known.map(|(_, rate)| *rate))
            };
            find_batch_size(4, 1000, rate).unwrap_or_else(|never| match never {}).batch
        };
        assert_eq!(of(&[(4, 4.0), (5, 3.0), (7, 6.0), (9, 6.1), (8, 5.0)]), 7);
        assert_eq!(of(&[(4, 4.0), (5, 3.0), (7, 3.9), (9, 9.0)]), 4, "two in a row");
    }

    #[test]
    fn errors_are_passed_on() {
        assert_eq!(find_batch_size(4, 8, |_| Err::<Option<f64>, _>("broken")), Err("broken"));
    }

    #[test]
    fn the_rule_of_thumb_divides_what_is_left() {
        assert_eq!(optimal_batch_size(2.0, 10.0, 2.0), 2);
        assert_eq!(optimal_batch_size(2.0, 2.0, 2.0), 0);
        assert_eq!(optimal_batch_size(2.0, 1.0, 2.0), 0);
    }
}
