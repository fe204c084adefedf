//! Data on standard output.

use std::fmt;
use std::io::{self, ErrorKind, Write};

/// Standard output takes nothing more.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}\nhint: direct it to a file on a disk that has room")]
pub struct PrintError(io::Error);

/// Prints `text`, all of it at once, and quietly not at all when the reader has gone away, as `head`
/// does. `println!` would panic in both cases that are told apart here.
///
/// # Errors
/// Such as a full disk.
pub fn print(text: &str) -> Result<(), PrintError> {
    print_on(text).map(drop)
}

/// As [`print`], for text that goes on: whether the reader is still there.
///
/// # Errors
/// Such as a full disk.
pub fn print_on(text: &str) -> Result<bool, PrintError> {
    print_into(&mut io::stdout().lock(), text)
}

/// As [`note!`](crate::note), of a text. What would move the cursor or change the terminal is shown escaped: names and
/// messages come out of other people's files.
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
    // In one piece, whatever else is written there.
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
        note_into(&mut pipe, format_args!("nobody hears it, and nothing panics"));
        let Ok(mut full) = std::fs::OpenOptions::new().write(true).open("/dev/full") else {
            println!("skipped: needs /dev/full");
            return;
        };
        let text = print_into(&mut full, "text\n").expect_err("no room").to_string();
        assert!(text.contains("\nhint: "), "{text}");
    }
}
