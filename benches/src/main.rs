//! The program that measures. `bench` and `verify` start one process of it per back end, `run` or `check`, which prints
//! JSON lines ([`record::Line`]), and turn the lines into tables.

mod cases;
mod emit;
mod model_cases;
mod provenance;
mod run;
mod targets;
mod torch;
mod tuning;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use arch::{ArchProfile, Backend, Device};
use clap::{Parser, Subcommand};
use record::Line;
use report::{BenchArgs, VerifyArgs};
use suite::Suite;
use tune::Policy;

use crate::emit::emit;

/// Measures, verifies and tunes kernels.
#[derive(Parser)]
#[command(name = "flashover-bench", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Which device, and what it may use.
#[derive(clap::Args, Clone)]
struct Target {
    /// cuda, vulkan, webgpu or cpu
    #[arg(long)]
    backend: Backend,
    /// Restrict the device to a recorded profile, such as rtx4090
    #[arg(long)]
    profile: Option<String>,
}

impl Target {
    fn open(&self) -> anyhow::Result<Device> {
        let device = Device::open(self.backend)?;
        match &self.profile {
            Some(name) => Ok(device.restrict(name)?),
            None => Ok(device),
        }
    }

    /// As [`Target::open`]; for a profile of another backend says so in one skipped line and gives
    /// nothing, so that a run over all back ends goes on.
    fn open_or_skip(&self) -> anyhow::Result<Option<Device>> {
        if let Some(name) = &self.profile {
            let of = ArchProfile::recorded(name)?.backend;
            if of != self.backend {
                let card = provenance::card(&Device::open(self.backend)?)?;
                emit(&Line::Card(card))?;
                emit(&Line::Plan { cases: 1 })?;
                let reason = format!("profile {name} describes a {of} device");
                emit(&Line::Skip { case: record::ALL_CASES.to_owned(), reason })?;
                return Ok(None);
            }
        }
        self.open().map(Some)
    }
}

#[derive(Subcommand)]
enum Command {
    /// Measure every kernel on the devices of this machine, with one process of `run` per back end, and print the table
    #[command(args_override_self = true)]
    Bench {
        #[command(flatten)]
        args: BenchArgs,
        /// Folder of the demo model, to measure it too
        #[arg(long, value_name = "DIR")]
        demo: Option<PathBuf>,
    },
    /// Check every kernel over its edge shapes against the reference, with one process of `check` per back end
    Verify {
        #[command(flatten)]
        args: VerifyArgs,
        /// Folder of small models, to verify them too
        #[arg(long, value_name = "DIR")]
        fixtures: Option<PathBuf>,
    },
    /// Check, then time, the cases of a suite on one device, as JSON lines
    Run {
        #[command(flatten)]
        target: Target,
        #[arg(long, value_parser = report::suite(), default_value_t = Suite::Quick)]
        suite: Suite,
        /// Only cases whose name contains this
        #[arg(long)]
        filter: Option<String>,
        /// What a case without a known config gets
        #[arg(long, value_parser = report::policy(), default_value_t = Policy::Measure)]
        policy: Policy,
        /// Leave out cubek's ops and Burn's, whose first call of a shape tunes for up to 40 s on a GPU
        #[arg(long)]
        no_peers: bool,
        /// Also measure torch, with this Python, which needs torch, triton and CUDA
        #[arg(long, value_name = "PYTHON")]
        torch: Option<String>,
        /// Folder of the demo model, to measure it too
        #[arg(long, value_name = "DIR")]
        demo: Option<PathBuf>,
    },
    /// Print the names of a suite's cases
    List {
        #[arg(long, value_parser = report::suite(), default_value_t = Suite::Quick)]
        suite: Suite,
        #[arg(long)]
        filter: Option<String>,
    },
    /// Check every kernel over its edge shapes on one device, as JSON lines
    Check {
        #[command(flatten)]
        target: Target,
        #[arg(long)]
        filter: Option<String>,
        /// Also check every candidate config, not only the default and the measured ones
        #[arg(long)]
        configs: bool,
        /// Also take all memory of the card for a moment, to check that a model survives it
        #[arg(long)]
        exhaust: bool,
        /// Folder of small models, to verify them too
        #[arg(long, value_name = "DIR")]
        fixtures: Option<PathBuf>,
        /// Only every Nth check, from the Ith on, such as 2/8: several processes share the checks
        #[arg(long, value_name = "I/N")]
        part: Option<verify::Part>,
    },
    /// Compile every config and code path for sm_89, sm_90 and sm_120 without a GPU and report what it uses
    Targets(targets::TargetsArgs),
    /// Show, fill or merge the tune cache
    #[command(subcommand)]
    Tune(tuning::Command),
}

fn main() -> ExitCode {
    if called_as("flashover") {
        return cli::main();
    }
    env_logger::Builder::new().filter_level(log_level()).init();
    let cli = command::parse::<Cli>();
    let outcome = match cli.command {
        Command::Bench { args, demo } => {
            let check_filter = |filter: &str| cases::check_filter(args.suite, filter);
            report::bench(&args, demo.as_deref(), check_filter).map(|()| true)
        }
        Command::Verify { args, fixtures } => {
            report::verify(&args, fixtures.as_deref()).map(|()| true)
        }
        Command::Run { target, suite, filter, policy, no_peers, torch, demo } => {
            let peers = run::Peers { rust: !no_peers, torch };
            let demo = demo.as_deref();
            run::run(&target, suite, filter.as_deref(), policy, &peers, demo)
        }
        Command::List { suite, filter } => cases::list(suite, filter.as_deref()),
        Command::Check { target, filter, configs, exhaust, fixtures, part } => {
            let (filter, fixtures) = (filter.as_deref(), fixtures.as_deref());
            verify::verify(&target, filter, configs, exhaust, fixtures, part)
        }
        Command::Targets(args) => targets::run(&args),
        Command::Tune(command) => tuning::run(command),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => ExitCode::from(report::fail::report(&e)),
    }
}

/// Whether this process was started by that name: a bundle has both programs in one file, since the back ends
/// in it are most of either.
fn called_as(name: &str) -> bool {
    std::env::args_os()
        .next()
        .is_some_and(|path| Path::new(&path).file_name() == Some(name.as_ref()))
}

/// Warnings of the runtimes are for people, on standard error.
const fn log_level() -> log::LevelFilter {
    log::LevelFilter::Error
}
