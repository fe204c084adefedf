//! Where what lies one after the other begins: sequences of a packed attention, groups of rows of a product.

use cubecl::client::Client;
use cubecl::server::Handle;

use crate::OpError;

/// Fails unless `offsets` are of one part at least, begin at 0 and never fall.
pub(crate) fn checked_offsets(what: &'static str, offsets: &[u32]) -> Result<(), OpError> {
    let refused = |why: String| Err(OpError::Offsets { what, why });
    match offsets {
        [] | [_] => return refused("are of nothing".to_owned()),
        [0, ..] => {}
        [first, ..] => return refused(format!("begin at {first}, not at 0")),
    }
    match (1..offsets.len()).find(|at| offsets[*at] < offsets[at - 1]) {
        Some(at) => refused(format!("fall from {} to {}", offsets[at - 1], offsets[at])),
        None => Ok(()),
    }
}

/// `words` in a buffer.
pub(crate) fn words_on(client: &Client, words: &[u32]) -> Handle {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    client.create_from_slice(&bytes)
}
