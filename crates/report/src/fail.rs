//! How a command fails, and with which exit code.
//!
//! Any other [`anyhow::Error`], such as a file that cannot be written, exits with 2. Exit code 1 is a check that did
//! not hold.

use std::fmt;

/// A failure that is no defect of the program.
#[derive(Debug)]
pub enum Fail {
    /// The caller asked for something that cannot be done: exit code 2.
    Usage { message: String, hint: String },
    /// As `Usage`, with the hint in the message.
    Refused(String),
    /// A check did not hold, or a program that it needs failed: exit code 1.
    Check(String),
    /// A program that shares our terminal failed and has already said why; its own exit code.
    Child(u8),
}

impl Fail {
    fn code(&self) -> u8 {
        match self {
            Self::Usage { .. } | Self::Refused(_) => 2,
            Self::Check(_) => 1,
            Self::Child(code) => *code,
        }
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage { message, hint } => write!(f, "{message}\nhint: {hint}"),
            Self::Refused(message) | Self::Check(message) => write!(f, "{message}"),
            Self::Child(code) => write!(f, "the program ended with exit code {code}"),
        }
    }
}

impl std::error::Error for Fail {}

/// A caller's mistake, with what to do about it.
pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> anyhow::Error {
    Fail::Usage { message: message.into(), hint: hint.into() }.into()
}

/// A check that did not hold.
pub fn check(message: impl Into<String>) -> anyhow::Error {
    Fail::Check(message.into()).into()
}

/// Prints the error and returns the exit code it stands for.
pub fn report(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<Fail>() {
        Some(Fail::Child(code)) => *code,
        Some(fail) => {
            command::note!("error: {fail}");
            fail.code()
        }
        None => {
            command::note!("error: {error:#}");
            2
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_tell_mistakes_from_failures() {
        assert_eq!(report(&usage("no such suite", "take quick")), 2);
        assert_eq!(report(&check("2 cases are slower")), 1);
        assert_eq!(report(&Fail::Child(3).into()), 3);
        assert_eq!(report(&anyhow::anyhow!("disk full")), 2);
        assert_eq!(report(&usage("x", "y").context("while reading")), 2);
    }

    #[test]
    fn a_hint_stands_on_its_own_line() {
        let text = usage("no such suite", "take quick").to_string();
        assert_eq!(text, "no such suite\nhint: take quick");
    }
}
