//! Ranges of text that an assistant wrote; templates put it between `{% generation %}` and `{% endgeneration %}`.
//!
//! minijinja does not report positions in its output, and captures the output of macros and `{% set %}`. So each edge
//! of a block writes a marker, and the prompt is rendered twice, without and with markers. Markers begin with a nonce
//! that no message can forge. If the second prompt without its markers differs from the first, a filter changed a block
//! or depends on one, and no correct ranges exist.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;

use minijinja::{Environment, State};

/// Variable of the nonce; the name is not a valid identifier, so templates cannot use it.
pub(crate) const NONCE: &str = "generation nonce";

/// Characters after the nonce, for the begin and the end of a block.
const BEGIN: char = '\u{100000}';
const END: char = '\u{100001}';

/// A prompt, and the ranges of it that an assistant wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marked {
    pub text: String,
    /// Byte ranges of the text within `{% generation %}` blocks, in order. An empty block has an empty range; a nested
    /// block has none.
    pub generated: Vec<Range<usize>>,
}

/// Registers the filter that writes an edge if a nonce is set.
pub(crate) fn register(templates: &mut Environment) {
    templates.add_filter("generation_edge", |begins: bool, state: &State| {
        let nonce = state.lookup(NONCE).filter(|nonce| nonce.as_str().is_some());
        nonce.map_or_else(String::new, |nonce| {
            format!("{nonce}{}", if begins { BEGIN } else { END })
        })
    });
}

/// Returns tags that replace the tag at the begin or the end of a block, without their outer brackets. A block is a
/// scope, as in transformers; the inner pair of tags trims white space like the tags of the block.
pub(crate) fn tags(word: &str) -> String {
    let with = word.replace("generation", "with");
    format!("{with} %}}{{{{ {} | generation_edge }}}}{{% {with}", word == "generation")
}

/// Returns random characters of a private-use plane.
pub(crate) fn nonce() -> String {
    let random = RandomState::new().build_hasher().finish();
    let parts = [0, 16, 32, 48].map(|shift| 0xF_0000 | (random >> shift) as u32 & 0xFFFF);
    parts.into_iter().filter_map(char::from_u32).collect()
}

/// Removes the edges from a text. `None` if they do not pair, or if the rest differs from the expected text.
pub(crate) fn marked(with_edges: &str, nonce: &str, expected: String) -> Option<Marked> {
    let mut pieces = with_edges.split(nonce);
    let mut text = pieces.next()?.to_owned();
    let mut generated = Vec::new();
    let mut starts = Vec::new();
    for piece in pieces {
        let edge = piece.chars().next()?;
        match edge {
            BEGIN => starts.push(text.len()),
            _ => {
                let start = starts.pop().filter(|_| edge == END)?;
                if starts.is_empty() {
                    generated.push(start..text.len());
                }
            }
        }
        text.push_str(&piece[edge.len_utf8()..]);
    }
    (starts.is_empty() && text == expected).then_some(Marked { text, generated })
}
