//! Limits of the shell on memory and on the size of files.

use std::fs;
use std::process::{Command, Output};

use crate::demo;

/// Runs the command below a limit, for two minutes at most. SIGKILL ends it then, and the exit code is not ours.
fn below(limit: &str, args: &[&str]) -> Output {
    let script = format!("ulimit {limit}; exec timeout --signal=KILL 120 \"$@\"");
    Command::new("bash")
        .args(["-c", &script, "bash", env!("CARGO_BIN_EXE_flashover")])
        .args(args)
        .output()
        .expect("bash runs")
}

#[test]
fn a_memory_limit_ends_with_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (model, data) = (demo(), path("data.txt"));
    let model = model.to_str().expect("UTF-8");
    fs::write(&data, "One day a dog ran. ".repeat(20)).expect("written");
    let (quantized, adapter) = (path("quantized"), path("adapter"));
    let train = ["train", "--data", &data, "-c", "8", "-b", "1", "--steps", "1", "--overwrite"];
    let commands: [Vec<&str>; 3] = [
        vec!["generate", "--prompt", "One day", "--max-new-tokens", "2"],
        vec!["quantize", "--output", &quantized],
        [&train[..], &["--output", &adapter]].concat(),
    ];
    let (mut ended, mut done) = (0, 0);
    for args in &commands {
        for kib in ["300000", "350000", "450000", "600000", "8000000"] {
            let args = [&args[..], &["--backend", "cpu", "--model", model]].concat();
            let out = below(&format!("-v {kib}"), &args);
            let said = String::from_utf8_lossy(&out.stderr);
            match out.status.code() {
                Some(0) => done += 1,
                Some(2) => {
                    assert!(said.contains("a memory limit (ulimit -v)\nhint: "), "{kib}: {said}");
                    ended += 1;
                }
                other => panic!("{args:?} below {kib} KiB: {other:?}: {said}"),
            }
            // quantize refuses a folder that has a model.
            fs::remove_dir_all(&quantized).unwrap_or_default();
        }
    }
    assert!(ended >= 3 && done >= 3, "{ended} ended, {done} done");
}

/// As a full disk. What was learned goes to no other place that is as small, so nothing is kept.
#[test]
fn a_limit_on_files_ends_with_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (model, data) = (demo(), path("data.txt"));
    let model = model.to_str().expect("UTF-8");
    fs::write(&data, "One day a dog ran. ".repeat(20)).expect("written");
    let (quantized, adapter) = (path("quantized"), path("adapter"));
    let train = ["train", "--data", &data, "-c", "8", "-b", "1", "--steps", "1"];
    let commands: [Vec<&str>; 2] =
        [vec!["quantize", "--output", &quantized], [&train[..], &["--output", &adapter]].concat()];
    for args in &commands {
        let args = [&args[..], &["--backend", "cpu", "--model", model]].concat();
        let out = below("-f 64", &args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(
            said.contains("File too large") && said.contains("\nhint: free some space"),
            "{said}"
        );
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "only the data is left");
}
