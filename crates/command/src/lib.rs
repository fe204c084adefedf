//! Common code of all programs: report a bad command line with a hint, print data, write an output file.

mod outfile;
mod parse;
mod print;

pub use outfile::{OutFile, OutFileError};
pub use parse::parse;
pub use print::{PrintError, note_text, print, print_on};

/// Returns the bytes that a user can write to the file system of a path, or of its nearest folder that exists; none if the system
/// does not say.
pub fn free_disk(path: &std::path::Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|path| path.exists())?;
    let of = rustix::fs::statvfs(there).ok()?;
    Some(of.f_bavail.saturating_mul(of.f_frsize))
}

/// Formats a count with its noun: `1 step`, `2 steps`.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Prints a message to standard error, formatted as with `eprintln!`. Unlike `eprintln!` it does not panic if standard
/// error is closed.
#[macro_export]
macro_rules! note {
    ($($text:tt)*) => {
        $crate::note_text(format_args!($($text)*))
    };
}
