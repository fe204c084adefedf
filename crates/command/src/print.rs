//! Prints data to standard output and messages to standard error.

use std::fmt;
use std::io::{self, ErrorKind, Write};

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write to standard output: {0}\nhint: redirect it to a file on a disk with free space"
)]
pub struct PrintError(io::Error);

/// Prints all of `text` at once. A closed pipe, as with `head`, is not an error. `println!` would panic on
/// a closed pipe and on errors.
///
/// # Errors
/// The text cannot be written, such as on a full disk.
pub fn print(text: &str) -> Result<(), PrintError> {
    print_on(text).map(drop)
}

/// Prints like [`print`], for text that continues. Returns false if the reader has closed the pipe.
///
/// # Errors
/// The text cannot be written, such as on a full disk.
pub fn print_on(text: &str) -> Result<bool, PrintError> {
    print_into(&mut io::stdout().lock(), text)
}

/// Prints a text like [`note!`](crate::note). Control characters are escaped, because names and messages may come from
/// untrusted files.
pub fn note_text(text: fmt::Arguments<'_>) {
    note_into(&mut io::stderr().lock(), text);
}

fn note_into(out: &mut impl Write, text: fmt::Arguments<'_>) {
    let mut shown = String::new();
    for c in text.to_string().chars() {
        match c {
            '\n' | '\t' => shown.push(c),
            c if c.is_control() => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown.push('\n');
    // One write, so that other output does not interleave.
    out.write_all(shown.as_bytes()).unwrap_or_default();
}

fn print_into(out: &mut impl Write, text: &str) -> Result<bool, PrintError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(why) if why.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(why) => Err(PrintError(why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_cannot_move_the_cursor() {
        let mut out = Vec::new();
        note_into(&mut out, format_args!("a\x1b[2Jb\r\tü\nhint: c\u{9b}1m"));
        assert_eq!(String::from_utf8(out).expect("text"), "a\\u{1b}[2Jb\\r\tü\nhint: c\\u{9b}1m\n");
    }

    #[test]
    fn a_reader_that_is_gone_is_no_error_and_a_full_disk_is_one() {
        let (reader, mut pipe) = io::pipe().expect("a pipe");
        note_into(&mut pipe, format_args!("text"));
        assert!(print_into(&mut pipe, "text\n").expect("a reader"));
        drop(reader);
        assert!(!print_into(&mut pipe, "text\n").expect("no reader"));
        note_into(&mut pipe, format_args!("a closed pipe causes no panic"));
        let Ok(mut full) = std::fs::OpenOptions::new().write(true).open("/dev/full") else {
            println!("skipped: needs /dev/full");
            return;
        };
        let text = print_into(&mut full, "text\n").expect_err("no room").to_string();
        assert!(text.contains("\nhint: "), "{text}");
    }
}
