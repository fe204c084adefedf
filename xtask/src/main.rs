//! `cargo xtask`: the single entry point for all work on this repository.
//!
//! xtask does not depend on Burn or CubeCL, so it builds in seconds. It sets up the machine, builds the programs
//! `flashover` and `flashover-bench`, and forwards its arguments to them. The crate `report` holds the command lines
//! that they share.

mod bundle;
mod cli;
mod conformance;
mod fuzz;
mod passthrough;
mod place;
mod programs;
mod readme;
mod setup;
mod test;
mod tidy;

use std::process::ExitCode;

use crate::cli::{Cli, Command};
use anyhow::Result;

fn main() -> ExitCode {
    match run(command::parse::<Cli>().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(report::fail::report(&error)),
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Bench(args) => passthrough::bench(&args),
        Command::Test(args) => test::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Verify(args) => passthrough::verify(&args),
        Command::Compare(args) => passthrough::compare(&args),
        Command::Doctor(rest) => passthrough::doctor(&rest.args),
        Command::Tune(rest) => passthrough::tune(&rest.args),
        Command::Targets(rest) => passthrough::targets(&rest.args),
        Command::Setup => passthrough::setup(),
        Command::Bundle(args) => bundle::run(&args),
        Command::Readme(args) => readme::run(&args),
        Command::Tidy => tidy::run(),
    }
}
