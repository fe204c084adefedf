//! Search for the best batch size.

/// Estimates the number of sequences that fit next to a model: `(available - model) / (model * multiplier)`, rounded
/// down. Returns 0 if the model alone does not fit. This is a rule of thumb; a [`Plan`](crate::memory::Plan) is more
/// precise.
///
/// # Units
/// `model` and `available` share one unit, such as bytes or gigabytes. `multiplier` is the memory of a sequence as a
/// share of the model's.
///
/// # Panics
/// If `model` or `multiplier` is not above 0.
///
/// ```
/// use flashover::memory::optimal_batch_size;
///
/// // 10.5 GB are left next to 3.5 GB of weights, and a sequence takes a fifth of the weights: 0.7 GB.
/// assert_eq!(optimal_batch_size(3.5, 14.0, 0.2), 15);
/// assert_eq!(optimal_batch_size(15.0, 14.0, 0.2), 0);
/// ```
pub fn optimal_batch_size(model: f64, available: f64, multiplier: f64) -> usize {
    assert!(model > 0.0 && multiplier > 0.0, "a sequence takes something");
    // Rounding errors must not lose a whole sequence.
    ((available - model) / (model * multiplier) + 1e-9).max(0.0) as usize
}

/// Best batch size of [`find_batch_size`], with all measurements.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchSize {
    /// The batch size with the highest rate; 0 if not one sequence fits.
    pub batch: usize,
    /// Rate of that batch, in the unit of the measurement.
    pub rate: f64,
    /// All measurements in order.
    pub tries: Vec<BatchTry>,
}

/// A measured batch size.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct BatchTry {
    /// Number of sequences in the batch.
    pub batch: usize,
    /// Rate of the batch; none if it does not fit in memory.
    pub rate: Option<f64>,
}

/// A gain below this factor is noise.
const GAIN: f64 = 1.02;
/// Number of larger batches in a row without gain that ends the search. A single size may just suit the kernels badly.
const PATIENCE: usize = 2;

/// Finds the batch size with the highest rate by measuring. From `start` it halves the batch until it fits in memory.
/// Then it grows the batch by a quarter, up to `max_batch`, while batches fit and one of the last two raised the rate
/// by 2%.
///
/// `rate` measures a batch and returns its rate per second, or none if the batch does not fit in memory. For a model,
/// use [`Engine::measure`](crate::Engine::measure) and map errors with
/// [`GenerateError::is_memory`](crate::GenerateError::is_memory) to none, as `flashover bench --find-batch` does.
///
/// # Errors
/// The errors of `rate`.
pub fn find_batch_size<E>(
    start: usize,
    max_batch: usize,
    mut rate: impl FnMut(usize) -> Result<Option<f64>, E>,
) -> Result<BatchSize, E> {
    let mut tries: Vec<BatchTry> = Vec::new();
    let mut run = |batch: usize| -> Result<Option<f64>, E> {
        let rate = rate(batch)?;
        tries.push(BatchTry { batch, rate });
        Ok(rate)
    };
    // Smallest batch that did not fit.
    let mut not = None;
    let mut batch = start.clamp(1, max_batch.max(1));
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
    // Largest batch that fitted, and the number of batches since the last gain.
    let (mut last, mut idle) = (best.0, 0);
    while idle < PATIENCE {
        let between = not.map_or(usize::MAX, |not| last + (not - last) / 2);
        let more = (last + last.div_ceil(4)).min(max_batch).min(between);
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

    /// Searches on a card that holds `holds` sequences and whose rate grows up to `gains` sequences.
    fn found(start: usize, max_batch: usize, holds: usize, gains: usize) -> (usize, Vec<usize>) {
        let rate = |batch: usize| {
            assert!(batch >= 1 && batch <= max_batch.max(1), "{batch}");
            Ok::<_, Infallible>((batch <= holds).then(|| batch.min(gains) as f64))
        };
        let found = find_batch_size(start, max_batch, rate).unwrap_or_else(|never| match never {});
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
