//! Marks of the text that an assistant wrote, which templates put between `{% generation %}` and
//! `{% endgeneration %}`.
//!
//! minijinja tells no position of its output, and captures what a macro or `{% set %}` writes. So each edge of a block
//! writes a string, and the prompt is rendered twice: without these strings, and with them. They begin with a nonce,
//! which no message can forge. Where the second prompt less its edges is not the first, a filter changed a block or
//! depends on one, and there are no right ranges.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;

use minijinja::{Environment, State};

/// Name of the nonce among the variables: none that a template can write.
pub(crate) const NONCE: &str = "generation nonce";

/// Characters after the nonce that tell the two edges apart.
const BEGIN: char = '\u{100000}';
const END: char = '\u{100001}';

/// A prompt, and which parts of it an assistant wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marked {
    pub text: String,
    /// Ranges of bytes of the text within `{% generation %}` blocks, in order. An empty block has an empty range, and
    /// a block within a block none of its own.
    pub generated: Vec<Range<usize>>,
}

/// Registers the filter that writes an edge where there is a nonce.
pub(crate) fn register(templates: &mut Environment) {
    templates.add_filter("generation_edge", |begins: bool, state: &State| {
        let nonce = state.lookup(NONCE).filter(|nonce| nonce.as_str().is_some());
        nonce.map_or_else(String::new, |nonce| {
            format!("{nonce}{}", if begins { BEGIN } else { END })
        })
    });
}

/// Returns tags in place of one that begins or ends a block, less their outer brackets. A block is a scope, as in
/// transformers; the inner pair of tags trims what those of the block trim.
pub(crate) fn tags(word: &str) -> String {
    let with = word.replace("generation", "with");
    format!("{with} %}}{{{{ {} | generation_edge }}}}{{% {with}", word == "generation")
}

/// Returns random characters of a plane that no script uses.
pub(crate) fn nonce() -> String {
    let random = RandomState::new().build_hasher().finish();
    let parts = [0, 16, 32, 48].map(|shift| 0xF_0000 | (random >> shift) as u32 & 0xFFFF);
    parts.into_iter().filter_map(char::from_u32).collect()
}

/// Takes the edges out of a text; none where they do not pair, or leave another text than the expected one.
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
