//! What every program here does alike: write a file for its caller.

mod outfile;

pub use outfile::{OutFile, OutFileError};
