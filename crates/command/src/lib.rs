//! What every program here does alike: refuse a command line with a hint, write a file for its caller.

mod outfile;
mod parse;

pub use outfile::{OutFile, OutFileError};
pub use parse::parse;
