//! Errors of commands, and their exit codes.

use std::fmt::Display;

use anyhow::anyhow;

/// A failure with its own exit code. Any other error, such as a mistake of the caller, exits with 2.
#[derive(Debug, thiserror::Error)]
pub enum Fail {
    /// A check failed, or a program that it needs failed: exit code 1.
    #[error("{0}")]
    Check(String),
    /// A program on our terminal failed and has already reported why. Holds its exit code.
    #[error("the program ended with exit code {0}")]
    Child(u8),
}

/// Returns an error for a mistake of the caller, with a hint.
pub fn usage(message: impl Display, hint: impl Display) -> anyhow::Error {
    anyhow!("{message}\nhint: {hint}")
}

/// Returns an error for a failed check.
pub fn check(message: impl Into<String>) -> anyhow::Error {
    Fail::Check(message.into()).into()
}

/// Prints the error and returns its exit code.
pub fn report(error: &anyhow::Error) -> u8 {
    let fail = error.downcast_ref();
    if let Some(Fail::Child(code)) = fail {
        return *code;
    }
    command::note!("error: {error:#}");
    if fail.is_some() { 1 } else { 2 }
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
