//! The program `flashover-bench`, which measures kernels and models. `bench` and `verify` start one process of it per
//! backend, with `run` or `check`. That process prints JSON lines ([`record::Line`]), which the parent turns into
//! tables.

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

/// Measures, verifies and tunes kernels and models.
#[derive(Parser)]
#[command(name = "flashover-bench", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Device to use, and its restriction.
#[derive(clap::Args, Clone)]
struct Target {
    /// Backend to use: cuda, vulkan, webgpu or cpu
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

    /// Opens the device like [`Target::open`]. For a profile of another backend, emits one skipped line and returns
    /// `None`, so that a run over all backends continues.
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
    /// Measure every kernel on the devices of this machine, one `run` process per backend, and print tables
    #[command(args_override_self = true)]
    Bench {
        #[command(flatten)]
        args: BenchArgs,
        /// Folder of the demo model, to measure it too
        #[arg(long, value_name = "DIR")]
        demo: Option<PathBuf>,
    },
    /// Check every kernel against the reference on its edge cases, one `check` process per backend
    Verify {
        #[command(flatten)]
        args: VerifyArgs,
        /// Folder of small models, to verify them too
        #[arg(long, value_name = "DIR")]
        fixtures: Option<PathBuf>,
    },
    /// Check and time the cases of a suite on one device, and print JSON lines
    Run {
        #[command(flatten)]
        target: Target,
        #[arg(long, value_parser = report::suite(), default_value_t = Suite::Quick)]
        suite: Suite,
        /// Run only cases whose name contains this text
        #[arg(long)]
        filter: Option<String>,
        /// Choice of config for untuned shapes
        #[arg(long, value_parser = report::policy(), default_value_t = Policy::Measure)]
        policy: Policy,
        /// Leave out the peers Burn and cubek; Burn's first call of a shape autotunes for up to 40 s on a GPU
        #[arg(long)]
        no_peers: bool,
        /// Also measure torch with this Python, which needs torch, triton and CUDA
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
    /// Check every kernel against the reference on one device, and print JSON lines
    Check {
        #[command(flatten)]
        target: Target,
        #[arg(long)]
        filter: Option<String>,
        /// Check every candidate config, not only the default and the measured ones
        #[arg(long)]
        configs: bool,
        /// Also fill the memory of the card for a moment, to check that a model survives it
        #[arg(long)]
        exhaust: bool,
        /// Folder of small models, to verify them too
        #[arg(long, value_name = "DIR")]
        fixtures: Option<PathBuf>,
        /// Run only every Nth check, beginning with the Ith, such as 2/8, to share the checks among processes
        #[arg(long, value_name = "I/N")]
        part: Option<verify::Part>,
    },
    /// Compile every config and code path for sm_89, sm_90 and sm_120 without a GPU, and report resources
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

/// True if this process was started by that name. A bundle has both programs in one file: they share the
/// backends, which are most of the size.
fn called_as(name: &str) -> bool {
    std::env::args_os()
        .next()
        .is_some_and(|path| Path::new(&path).file_name() == Some(name.as_ref()))
}

/// Shows only errors of the runtimes, on standard error.
const fn log_level() -> log::LevelFilter {
    log::LevelFilter::Error
}
