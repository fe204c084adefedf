//! Text on its way to a model and back: it knows no model and no GPU.
//!
//! | module | what it holds |
//! |---|---|
//! | `tokenizer` | [`Tokenizer`]: text to ids and back, by a `tokenizer.json` |
//! | `stream` | [`Stream`]: text of ids that come one at a time |
//! | `stop` | [`Stops`]: strings that end a text, wherever tokens cut them |
//! | `template` | [`ChatTemplate`]: messages to a prompt, as a model was trained on |
//! | `folder` | files of a model's folder, as text and as JSON |
//! | `marks` | [`Marked`]: which parts of a prompt an assistant wrote |
//! | `growth` | bounds of how a `tokenizer.json` may multiply a text |
//! | `guard` | bounds of the source of a template |
//! | `program` | instructions of a template, with checks in them |
//! | `metered` | filters and operators that take steps |
//! | `steps` | bounds of the work that a rendering may do |
//! | `python` | what templates expect of Python |
//! | `special` | tokens that a folder names next to its `tokenizer.json` |
//! | `panics` | panics of the `tokenizers` crate as errors |
//!
//! ```
//! use text::{Error, Stops};
//!
//! let mut stops = Stops::new(["</answer>"])?;
//! assert_eq!(stops.push("42</ans").text, "42"); // What may be a stop is held back.
//! let piece = stops.push("wer> and more");
//! assert_eq!((piece.text.as_str(), piece.stop), ("", Some(0)));
//! # Ok::<(), Error>(())
//! ```

mod error;
mod folder;
mod growth;
mod guard;
mod marks;
mod metered;
mod panics;
mod program;
mod python;
mod special;
mod steps;
mod stop;
mod stream;
mod template;
mod tokenizer;

pub use error::Error;
pub use marks::Marked;
pub use stop::{Piece, Stops};
pub use stream::Stream;
pub use template::{ChatTemplate, Message, Prompt, SpecialTokens};
pub use tokenizer::Tokenizer;
