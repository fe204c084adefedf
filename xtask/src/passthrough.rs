//! Commands that set up, build, and forward their arguments to a program.

use std::env;
use std::ffi::OsString;

use anyhow::Result;
use record::Backend;
use report::fail::usage;
use report::{BenchArgs, CompareArgs, Device, Doctor, Selection, VerifyArgs};

use crate::conformance;
use crate::place::Place;
use crate::programs::Programs;
use crate::setup::{self, Cuda, Wants};

/// Runs `flashover-bench bench` with the folder of the demo model.
pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    let place = Place::find()?;
    report::check_bench(args)?;
    let demo = place.workspace().ok().map(|root| root.join("models/demo").into());
    pass_on(&place, &args.backend, "flashover-bench", "bench", demo.map(|dir| ("--demo", dir)))
}

/// Runs `flashover-bench verify` with the folder of the small models, then the tests of ONNX on each backend.
pub(crate) fn verify(args: &VerifyArgs) -> Result<()> {
    let place = Place::find()?;
    report::check_verify(args)?;
    let fixtures = place.fixtures().map(|dir| ("--fixtures", dir.into()));
    pass_on(&place, &args.backend, "flashover-bench", "verify", fixtures)?;
    if args.filter.is_some() || args.sanitizer.is_some() {
        return Ok(());
    }
    let (programs, ready) =
        Programs::ready(&place, Wants { node_tests: true, ..wants(&args.backend) })?;
    let folder = match ready.node_tests {
        Ok(folder) => folder,
        Err(reason) => {
            return command::print(&format!("onnx: skipped: {reason}\n")).map_err(Into::into);
        }
    };
    let chosen = Doctor::ask(programs.command("flashover"))?.choose(&args.backend, false)?;
    // Of WebGPU there is no list.
    let listed = |own: &&Device| own.backend != Backend::WebGpu;
    for device in chosen.devices.iter().filter(listed) {
        let profile = args.profile.as_deref().filter(|_| device.backend == Backend::Cuda);
        let counts = conformance::check(&programs, &folder, device.backend, profile)?;
        command::print(&format!("onnx on {}: {counts}\n", device.backend))?;
    }
    Ok(())
}

/// Runs `flashover compare`.
pub(crate) fn compare(args: &CompareArgs) -> Result<()> {
    let place = Place::find()?;
    if args.onnx.is_none() {
        args.check_files()?;
    }
    pass_on(&place, &args.backend, "flashover", "compare", None)
}

/// Sets up, builds, and runs `command` of the program with the arguments of this process. The caller has already
/// rejected mistakes in them.
fn pass_on(
    place: &Place,
    selection: &Selection,
    program: &str,
    command: &str,
    option: Option<(&str, OsString)>,
) -> Result<()> {
    setup::check_drivers(selection)?;
    let (programs, _) = Programs::ready(place, wants(selection))?;
    let mut all = vec![command.into()];
    all.extend(option.into_iter().flat_map(|(name, value)| [name.into(), value]));
    all.extend(env::args_os().skip(2));
    programs.pass_through(program, &all)
}

/// Requirements of the selected backends.
fn wants(selection: &Selection) -> Wants {
    let cuda =
        if selection.may_include(Backend::Cuda) { Cuda::WithDriver } else { Cuda::Installed };
    Wants { cuda, gl: selection.may_include(Backend::WebGpu), node_tests: false }
}

/// Runs `flashover doctor`.
pub(crate) fn doctor(args: &[String]) -> Result<()> {
    let wants = Wants { cuda: Cuda::Installed, gl: false, node_tests: false };
    let (programs, _) = Programs::ready(&Place::find()?, wants)?;
    programs.pass_through("flashover", &with_first("doctor", args))
}

/// Runs `flashover-bench tune`.
pub(crate) fn tune(args: &[String]) -> Result<()> {
    let wants = Wants { cuda: Cuda::WithDriver, gl: false, node_tests: false };
    let (programs, _) = Programs::ready(&Place::find()?, wants)?;
    programs.pass_through("flashover-bench", &with_first("tune", args))
}

/// Runs `flashover-bench targets` with the folder of the CUDA tools.
pub(crate) fn targets(args: &[String]) -> Result<()> {
    let wants = Wants { cuda: Cuda::Always, gl: false, node_tests: false };
    let (programs, ready) = Programs::ready(&Place::find()?, wants)?;
    let hint = "run `cargo xtask setup`, which downloads tools or names the missing ones";
    let home = ready.cuda.map_err(|reason| usage(format!("targets {reason}"), hint))?;
    let mut all = vec!["targets".into(), "--cuda-home".into(), home.root.into_os_string()];
    all.extend(args.iter().map(Into::into));
    programs.pass_through("flashover-bench", &all)
}

/// Sets up only the requirements of `test`.
pub(crate) fn setup() -> Result<()> {
    let place = Place::find()?;
    place.workspace()?;
    let ready = setup::prepare(&place, Wants { cuda: Cuda::Always, gl: true, node_tests: true })?;
    eprintln!("setup: LLVM and compilers are installed");
    match &ready.cuda {
        Ok(home) => eprintln!("setup: CUDA tools are in {}", home.root.display()),
        Err(reason) => eprintln!("setup: CUDA tools are missing: {reason}"),
    }
    match &ready.gl {
        Ok(()) => eprintln!("setup: a GL driver is installed"),
        Err(reason) => eprintln!("setup: no GL driver: {reason}"),
    }
    match &ready.node_tests {
        Ok(folder) => eprintln!("setup: tests of ONNX are in {}", folder.display()),
        Err(reason) => eprintln!("setup: no tests of ONNX: {reason}"),
    }
    Ok(())
}

fn with_first(first: &str, args: &[String]) -> Vec<String> {
    [first.to_owned()].into_iter().chain(args.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_says_what_it_needs() {
        let wants = |text: &str| wants(&text.parse().unwrap());
        assert!(wants("all").gl && !wants("auto").gl && wants("webgpu").gl);
        assert_eq!(wants("auto").cuda, Cuda::WithDriver);
        assert_eq!(wants("cpu").cuda, Cuda::Installed);
    }
}
