//! `cargo xtask`: one entrance to everything that is done with this repository.
//!
//! xtask knows neither Burn nor CubeCL, so it builds in seconds. It sets the machine up, builds the
//! programs `flashover` and `flashover-bench`, runs them as child processes and reads what they
//! print; `record` is all that it shares with them.

mod agreement;
mod bench;
mod bundle;
mod cli;
mod compare;
mod devices;
mod fail;
mod passthrough;
mod place;
mod programs;
mod readme;
mod report;
mod sanitize;
mod setup;
mod stream;
mod test;
mod tidy;
mod verify;

use std::process::ExitCode;

use crate::cli::{Cli, Command};
use anyhow::Result;

fn main() -> ExitCode {
    match run(command::parse::<Cli>().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(fail::report(&error)),
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Bench(args) => bench::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Compare(args) => agreement::run(&args),
        Command::Doctor(rest) => passthrough::doctor(&rest.args),
        Command::Tune(rest) => passthrough::tune(&rest.args),
        Command::Targets(rest) => passthrough::targets(&rest.args),
        Command::Setup => passthrough::setup(),
        Command::Bundle(args) => bundle::run(&args),
        Command::Readme(args) => readme::run(&args),
        Command::Tidy => tidy::run(),
    }
}
