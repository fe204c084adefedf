//! Parses command lines and reports errors with a hint.

use std::env;
use std::ffi::OsString;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Parses the command line as `P`. On an error, prints it with a hint and exits with code 2.
pub fn parse<P: Parser>() -> P {
    P::try_parse().unwrap_or_else(|error| {
        // Help and version were requested and go to standard output.
        if !error.use_stderr() {
            error.exit();
        }
        eprint!("{}", with_hint(&P::command(), env::args_os().skip(1), &error));
        std::process::exit(2)
    })
}

/// Formats clap's error with a hint in place of its pointer to `--help`.
fn with_hint(
    command: &clap::Command,
    args: impl IntoIterator<Item = OsString>,
    error: &clap::Error,
) -> String {
    let text = error.render().to_string();
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return format!(
            "{}\n\nerror: a command is missing\nhint: use one of the commands above\n",
            text.trim_end()
        );
    }
    let text = text.split("\n\nFor more information").next().unwrap_or_default().trim_end();
    // Parsers of our own types provide a hint.
    if text.contains("\nhint: ") {
        return format!("{text}\n");
    }
    let choices =
        [ContextKind::ValidValue, ContextKind::ValidSubcommand].map(|kind| error.get(kind));
    let hint = match (choices.into_iter().flatten().next(), error.get(ContextKind::InvalidArg)) {
        (Some(ContextValue::Strings(known)), _) if !known.is_empty() => {
            format!("use one of {}", known.join(", "))
        }
        (_, Some(ContextValue::String(arg))) if error.kind() == ErrorKind::InvalidValue => {
            format!("pass a non-empty value for `{arg}`")
        }
        _ => format!("see `{} --help`", place(command, args)),
    };
    let text = text.split("\n  [possible values").next().unwrap_or_default();
    format!("{text}\nhint: {hint}\n")
}

/// Returns the command at the start of the arguments, such as `cargo xtask bench`; clap's errors about values omit it.
fn place(mut command: &clap::Command, args: impl IntoIterator<Item = OsString>) -> String {
    let mut place = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    for arg in args {
        let Some(own) = command.find_subcommand(&arg) else { break };
        place = format!("{place} {}", own.get_name());
        command = own;
    }
    place
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Subcommand, ValueEnum};

    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "tool")]
    struct Cli {
        #[command(subcommand)]
        verb: Verb,
    }

    #[derive(Debug, Subcommand)]
    enum Verb {
        Bench {
            #[arg(long, value_enum)]
            suite: Option<Suite>,
            #[arg(long, value_parser = percent)]
            threshold: Option<f64>,
            #[arg(long)]
            save: Option<std::path::PathBuf>,
            #[arg(long)]
            count: Option<usize>,
            #[arg(long)]
            compare: bool,
            #[arg(long, requires = "compare")]
            strict: bool,
        },
        Tune,
    }

    #[derive(Debug, Clone, ValueEnum)]
    enum Suite {
        Quick,
        All,
    }

    fn percent(_: &str) -> Result<f64, String> {
        Err("no number\nhint: a percentage such as 5".to_owned())
    }

    #[test]
    fn every_refusal_ends_with_a_hint() {
        for (args, hint) in [
            (&["bench", "--suite", "fast"][..], "use one of quick, all"),
            (&["bench", "--suite"], "use one of quick, all"),
            (&["bench", "--threshold", "x"], "a percentage such as 5"),
            (&["bench", "--save", ""], "pass a non-empty value for `--save <SAVE>`"),
            (&["bench", "--save"], "pass a non-empty value for `--save <SAVE>`"),
            (&["bench", "--count", "x"], "see `tool bench --help`"),
            (&["bench", "--strict"], "see `tool bench --help`"),
            (&["bench", "--sweet"], "see `tool bench --help`"),
            (&[], "use one of the commands above"),
            (&["nope"], "see `tool --help`"),
        ] {
            let all = ["tool"].iter().chain(args);
            let error = Cli::try_parse_from(all).expect_err("wrong");
            let text = with_hint(&Cli::command(), args.iter().map(OsString::from), &error);
            assert!(text.ends_with(&format!("\nhint: {hint}\n")), "{args:?}: {text}");
            assert_eq!(text.matches("hint: ").count(), 1, "{text}");
        }
    }
}
