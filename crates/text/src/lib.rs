//! Tokenizers, detokenising streams, stop sequences and chat templates, independent of models and GPUs.
//!
//! | module | contents |
//! |---|---|
//! | `tokenizer` | [`Tokenizer`]: converts text to ids and back with a `tokenizer.json` |
//! | `stream` | [`Stream`]: detokenises ids one at a time |
//! | `stop` | [`Stops`]: stop sequences, also across tokens |
//! | `template` | [`ChatTemplate`]: renders messages to a prompt in a model's format |
//! | `folder` | reads files of a model's folder, as text and as JSON |
//! | `marks` | [`Marked`]: a prompt with the ranges that an assistant wrote |
//! | `growth` | limits on the growth of a text in a `tokenizer.json` |
//! | `guard` | limits on the source of a template |
//! | `program` | inserts checks into the instructions of a template |
//! | `metered` | filters and operators that charge steps |
//! | `steps` | limits on the work of a rendering |
//! | `python` | functions and filters of Python that templates use |
//! | `special` | tokens in a folder's files next to its `tokenizer.json` |
//! | `panics` | converts panics of the `tokenizers` crate to errors |
//!
//! ```
//! use text::{Error, Stops};
//!
//! let mut stops = Stops::new(["</answer>"])?;
//! assert_eq!(stops.push("42</ans").text, "42"); // A possible stop sequence is held back.
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

pub use error::{Error, quoted};
pub use marks::Marked;
pub use stop::{Piece, Stops};
pub use stream::Stream;
pub use template::{ChatTemplate, Message, Prompt, SpecialTokens};
pub use tokenizer::Tokenizer;
