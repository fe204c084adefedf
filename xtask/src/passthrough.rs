//! Commands that set up, build, and hand the rest to a program.

use anyhow::Result;

use crate::fail::usage;
use crate::place::Place;
use crate::programs::Programs;
use crate::setup::{self, Cuda, Wants};

/// `flashover doctor`.
pub(crate) fn doctor(args: &[String]) -> Result<()> {
    let wants = Wants { cuda: Cuda::Installed, gl: false };
    let (programs, _) = Programs::ready(&Place::find()?, wants)?;
    programs.pass_through("flashover", &with_first("doctor", args))
}

/// `flashover-bench tune`.
pub(crate) fn tune(args: &[String]) -> Result<()> {
    let wants = Wants { cuda: Cuda::WithDriver, gl: false };
    let (programs, _) = Programs::ready(&Place::find()?, wants)?;
    programs.pass_through("flashover-bench", &with_first("tune", args))
}

/// `flashover-bench targets`, told where the CUDA tools are.
pub(crate) fn targets(args: &[String]) -> Result<()> {
    let wants = Wants { cuda: Cuda::Always, gl: false };
    let (programs, ready) = Programs::ready(&Place::find()?, wants)?;
    let hint = "`cargo xtask setup` says what is missing and fetches what it can";
    let home = ready.cuda.map_err(|reason| usage(format!("targets {reason}"), hint))?;
    let mut all = vec!["targets".into(), "--cuda-home".into(), home.root.into_os_string()];
    all.extend(args.iter().map(Into::into));
    programs.pass_through("flashover-bench", &all)
}

/// Everything that `test` needs, and nothing more.
pub(crate) fn setup() -> Result<()> {
    let place = Place::find()?;
    place.workspace()?;
    let ready = setup::prepare(&place, Wants { cuda: Cuda::Always, gl: true })?;
    eprintln!("setup: LLVM and compilers are in place");
    match &ready.cuda {
        Ok(home) => eprintln!("setup: CUDA tools are in {}", home.root.display()),
        Err(reason) => eprintln!("setup: CUDA tools are absent: {reason}"),
    }
    match &ready.gl {
        Ok(()) => eprintln!("setup: a GL driver is in place"),
        Err(reason) => eprintln!("setup: no GL driver: {reason}"),
    }
    Ok(())
}

fn with_first(first: &str, args: &[String]) -> Vec<String> {
    [first.to_owned()].into_iter().chain(args.iter().cloned()).collect()
}
