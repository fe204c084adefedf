//! What every program here does alike: refuse a command line with a hint, print data, write a file for
//! its caller.

mod outfile;
mod parse;
mod print;

pub use outfile::{OutFile, OutFileError};
pub use parse::parse;
pub use print::{PrintError, print, print_on};
