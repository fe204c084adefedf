//! Kills whole commands. Their output must be complete or absent, and the next run must remove leftovers.
//!
//! `FLASHOVER_KILLS` is the number of kills of each test, if it is set.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use flashover::ModelFolder;

use crate::{demo, flashover};

/// Longest time from the first write of a command to its kill.
const MAX_MS: u64 = 1000;

fn kills() -> u64 {
    std::env::var("FLASHOVER_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(6)
}

fn start(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("the program starts")
}

/// Kills a child at most [`MAX_MS`] after `written` returns true. The delay differs with `kill`, the number of the
/// kill.
fn kill(mut child: Child, written: impl Fn() -> bool, kill: u64) {
    for _ in 0..60_000 {
        if written() {
            break;
        }
        sleep(Duration::from_millis(1));
    }
    sleep(Duration::from_micros(kill * 618_034 % 1_000_000 * MAX_MS / 1000));
    child.kill().expect("it is ours");
    child.wait().expect("it is dead");
}

fn entries(folder: &Path) -> usize {
    fs::read_dir(folder).expect("a folder").count()
}

#[test]
fn a_killed_training_leaves_a_whole_adapter() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (model, data, output) = (demo(), path("data.txt"), path("adapter"));
    fs::write(&data, "One day a dog ran. ".repeat(4)).expect("written");
    let model = model.to_str().expect("UTF-8");
    let args =
        ["train", "--backend", "cpu", "-c", "8", "-b", "1", "--save-every", "1", "--overwrite"];
    let args = [&args[..], &["--model", model, "--data", &data, "--output", &output]].concat();
    let opened = ModelFolder::open(model).expect("the demo");
    let config = Path::new(&output).join("adapter_config.json");
    for round in 0..kills() {
        // From the second round on, the folder exists before the start.
        let child = start(&[&args[..], &["--steps", "100000"]].concat());
        kill(child, || config.exists(), round);
        opened.adapter(&output).expect("whole");
        assert!(
            entries(folder.path()) <= 3,
            "the data, the adapter and one that was being written"
        );
    }
    let done = flashover(&[&args[..], &["--steps", "1"]].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(entries(folder.path()), 2, "what a kill leaves is cleared");
}

#[test]
fn a_killed_quantize_leaves_a_whole_model_or_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, output) = (demo(), folder.path().join("out"));
    let [from, to] = [&model, &output].map(|path| path.to_str().expect("UTF-8"));
    let args = ["quantize", "--backend", "cpu", "--model", from, "--output", to];
    let (mut whole, mut none) = (0, 0);
    for round in 0..kills() {
        kill(start(&args), || entries(folder.path()) > 0, round);
        match output.exists() {
            true => {
                ModelFolder::open(&output).expect("whole");
                let config = fs::read_to_string(output.join("config.json")).expect("there");
                assert!(config.contains("quantization_config"), "{config}");
                fs::remove_dir_all(&output).expect("ours");
                whole += 1;
            }
            false => none += 1,
        }
        assert!(entries(folder.path()) <= 1, "one that was being written");
    }
    println!("{whole} whole, {none} not there");
    assert!(none > 0, "kills come before the end too");
    let done = flashover(&args);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(entries(folder.path()), 1, "what a kill leaves is cleared");
}
