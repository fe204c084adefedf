//! Offsets of concatenated parts: sequences of a packed attention, groups of rows of a matmul.

use std::ops::Range;
use std::sync::Arc;

use cubecl::client::Client;
use cubecl::server::Handle;

use crate::OpError;

/// Offsets of the rows of each group: see [`grouped_matmul`](crate::grouped_matmul).
///
/// ```
/// use ops::Groups;
///
/// let groups = Groups::new(&[0, 3, 3, 8])?; // 3 rows, none, and 5
/// assert_eq!(groups.count(), 3);
/// assert!(Groups::new(&[0, 3, 2]).is_err());
/// # Ok::<(), ops::OpError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Groups(Arc<[u32]>);

impl Groups {
    /// Creates groups from cumulative offsets, one more than groups. They start at 0, end at the number of
    /// rows, and never decrease. A group may be empty.
    ///
    /// # Errors
    /// [`OpError::Offsets`].
    pub fn new(offsets: &[u32]) -> Result<Self, OpError> {
        checked_offsets("rows", offsets)?;
        Ok(Self(offsets.into()))
    }

    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.0.len() - 1
    }

    pub(crate) fn offsets(&self) -> &[u32] {
        &self.0
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
    }
}

/// Returns an error unless `offsets` describe at least one part, start at 0 and never decrease.
pub(crate) fn checked_offsets(what: &'static str, offsets: &[u32]) -> Result<(), OpError> {
    let refused = |why: String| Err(OpError::Offsets { what, why });
    match offsets {
        [] | [_] => return refused("got fewer than two offsets".to_owned()),
        [0, ..] => {}
        [first, ..] => return refused(format!("got {first} as the first offset, expected 0")),
    }
    match (1..offsets.len()).find(|at| offsets[*at] < offsets[at - 1]) {
        Some(at) => refused(format!("offset {} precedes {}", offsets[at - 1], offsets[at])),
        None => Ok(()),
    }
}

/// Uploads `words` to a buffer.
pub(crate) fn u32_buffer(client: &Client, words: &[u32]) -> Handle {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    client.create_from_slice(&bytes)
}
