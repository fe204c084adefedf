//! Embedding lookup: `out[t] = table[token[t]]·scale + learned[position[t]]`
//!
//! The product is rounded before positions are added, as in the models. A token or a position out of range
//! gives NaN.

use crate::{Comparison, DType, Error, compare};

/// An embedding problem. Tables are `[rows, hidden]`.
#[derive(Debug, Clone, Copy)]
pub struct Embed<'a> {
    pub hidden: usize,
    pub table: &'a [f32],
    pub scale: f64,
    /// Learned positions, and the position of each token.
    pub learned: Option<(&'a [f32], &'a [u32])>,
    /// Format of tables and results.
    pub dtype: DType,
}

impl Embed<'_> {
    /// Computes the rows of `tokens`, `[tokens, hidden]`. The only rounding is between the product and the
    /// sum.
    ///
    /// # Errors
    /// Fails if a table is not whole rows, or if there is not one position per token.
    pub fn run(&self, tokens: &[u32]) -> Result<Vec<f64>, Error> {
        self.check_lengths(tokens)?;
        let mut out = Vec::with_capacity(tokens.len() * self.hidden);
        for (t, token) in tokens.iter().enumerate() {
            let row = |table: &[f32], at: u32| {
                let row = table.chunks(self.hidden).nth(at as usize);
                row.map(|row| row.iter().map(|v| f64::from(*v)).collect::<Vec<_>>())
            };
            let found = row(self.table, *token).map(|mut row| {
                row.iter_mut().for_each(|v| *v *= self.scale);
                row
            });
            let made = match (found, self.learned) {
                (found, None) => found,
                (found, Some((learned, positions))) => {
                    found.zip(row(learned, positions[t])).map(|(row, added)| {
                        let rounded = row.iter().map(|v| self.dtype.round(*v));
                        rounded.zip(added).map(|(v, added)| v + added).collect()
                    })
                }
            };
            out.extend(made.unwrap_or_else(|| vec![f64::NAN; self.hidden]));
        }
        Ok(out)
    }

    /// Compares `out` with the rows of `tokens`. The only error of a naive kernel is the final rounding.
    ///
    /// # Errors
    /// As [`Embed::run`]; a result of the wrong length.
    pub fn check(&self, tokens: &[u32], out: &[f32]) -> Result<Comparison, Error> {
        let exact = self.run(tokens)?;
        let naive: Vec<f64> = exact.iter().map(|v| self.dtype.round(*v)).collect();
        compare(out, &exact, &naive, self.dtype)
    }

    fn check_lengths(&self, tokens: &[u32]) -> Result<(), Error> {
        let (learned, positions) = self.learned.unwrap_or((&[], &[]));
        for (what, have) in [("table", self.table.len()), ("positions", learned.len())] {
            if self.hidden == 0 || have % self.hidden != 0 {
                return Err(Error::Length { what, need: self.hidden, have });
            }
        }
        match self.learned {
            Some(_) if positions.len() != tokens.len() => {
                let (need, have) = (tokens.len(), positions.len());
                Err(Error::Length { what: "positions of tokens", need, have })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_looked_up_scaled_and_added_to() -> Result<(), Error> {
        let table = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0f32];
        let learned = [0.5, 0.25, -1.0, -2.0f32];
        let plain =
            Embed { hidden: 2, table: &table, scale: 1.0, learned: None, dtype: DType::Bf16 };
        assert_eq!(plain.run(&[2, 0, 2])?, [5.0, 6.0, 1.0, 2.0, 5.0, 6.0]);
        let both = Embed { scale: 3.0, learned: Some((&learned, &[1, 0])), ..plain };
        assert_eq!(both.run(&[1, 0])?, [8.0, 10.0, 3.5, 6.25]);
        // 3.01·1 is not a bf16 value; it is rounded to its neighbour before 0.25 is added.
        let rounds = Embed { scale: 1.505, learned: Some((&learned, &[0])), ..plain };
        assert_eq!(rounds.run(&[0])?[1], 3.015625 + 0.25);
        let missing = Embed { learned: Some((&learned, &[0, 2])), ..plain }.run(&[3, 0])?;
        assert!(missing.iter().all(|v| v.is_nan()), "{missing:?}");
        assert!(Embed { hidden: 4, ..plain }.run(&[0]).is_err());
        assert!(both.run(&[0]).is_err(), "two positions for one token");
        Ok(())
    }
}
