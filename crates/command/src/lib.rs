//! What every program here does alike: refuse a command line with a hint, print data, write a file for
//! its caller.

mod outfile;
mod parse;
mod print;

pub use outfile::{OutFile, OutFileError};
pub use parse::parse;
pub use print::{PrintError, note_text, print, print_on};

/// `1 step`, `2 steps`.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Tells the person at the terminal something, on standard error, formatted as by `eprintln!`. That one panics where
/// standard error is closed; nobody is left to be told then.
#[macro_export]
macro_rules! note {
    ($($text:tt)*) => {
        $crate::note_text(format_args!($($text)*))
    };
}
