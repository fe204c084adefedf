//! Offsets of packed sequences.

use crate::OpError;
use crate::offsets::checked_offsets;

/// Offsets of packed sequences among the queries and among the keys.
///
/// ```
/// use ops::Packing;
///
/// let packing = Packing::new(&[0, 3, 5], &[0, 7, 9])?; // 3 queries over 7 keys, and 2 over 2
/// assert_eq!(packing.sequences(), 2);
/// assert!(Packing::new(&[0, 5, 3], &[0, 7, 9]).is_err());
/// # Ok::<(), ops::OpError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    pub(super) q: Vec<u32>,
    pub(super) kv: Vec<u32>,
}

impl Packing {
    /// Creates a packing from cumulative offsets, one more than sequences. They start at 0, end at the number
    /// of queries or keys, and never decrease. A sequence may be empty.
    ///
    /// # Errors
    /// [`OpError::Offsets`].
    pub fn new(q: &[u32], kv: &[u32]) -> Result<Self, OpError> {
        checked_offsets("queries", q)?;
        checked_offsets("keys", kv)?;
        if q.len() != kv.len() {
            let why = format!(
                "got {} sequences, expected {} as in the offsets of queries",
                kv.len() - 1,
                q.len() - 1
            );
            return Err(OpError::Offsets { what: "keys", why });
        }
        Ok(Self { q: q.to_vec(), kv: kv.to_vec() })
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.q.len() - 1
    }

    pub(super) fn covers(
        &self,
        what: &'static str,
        offsets: &[u32],
        have: usize,
    ) -> Result<(), OpError> {
        match offsets.last() {
            Some(last) if *last as usize == have => Ok(()),
            last => {
                let last = last.copied().unwrap_or_default();
                Err(OpError::Offsets {
                    what,
                    why: format!("got {last} as the last offset, expected {have}"),
                })
            }
        }
    }
}

/// Returns the length of the longest sequence, at least 1: a problem has no empty axis.
pub(super) fn longest(offsets: &[u32]) -> u32 {
    offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default().max(1)
}
