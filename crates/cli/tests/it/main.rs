//! Tests the `flashover` command on the CPU.

mod generate;
mod grpo;
mod hub;
mod interrupt;
mod kills;
mod limits;
mod monitor;
mod plan;
mod quantize;
#[path = "../../../hub/tests/it/server.rs"]
mod server;
mod tokenize;
#[path = "../../../trace/src/chrome/format.rs"]
mod trace_format;
mod train;
mod train_saves;
mod unet;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flashover::{Backend, Device, Policy};

use flashover::host::{HostTensor, MatmulOptions, matmul};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

fn cpu() -> Device {
    Device::open(Backend::Cpu).expect("the CPU runtime needs nothing")
}

/// Returns a tensor of small integers, so that every product and sum is exact in f32.
fn integers(shape: &[usize], salt: usize) -> HostTensor {
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|i| ((i * 7 + salt * 3) % 11) as f32 - 5.0).collect();
    HostTensor::from_f32(shape, &values).expect("as many values as the shape holds")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fixtures").join(name)
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// A tokenizer with two words. The id of the second exceeds the vocabulary of every fixture.
const TWO_WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 99999}, "unk_token": "a"}}"#;

fn flashover(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashover")).args(args).output().expect("the program starts")
}

fn write(path: &Path, tensors: &[(&str, &HostTensor)]) {
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, t)| {
            let view = TensorView::new(Dtype::F32, t.shape().to_vec(), t.bytes());
            (*name, view.expect("bytes fill the shape"))
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).expect("serialises"))
        .expect("written");
}

#[test]
fn op_reads_and_writes_safetensors() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let (input, output) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let (lhs, rhs) = (integers(&[5, 3], 1), integers(&[3, 4], 2));
    write(&input, &[("lhs", &lhs), ("rhs", &rhs)]);
    let paths = [input.to_str().expect("UTF-8"), output.to_str().expect("UTF-8")];
    let args = ["op", "matmul", "--input", paths[0], "--output", paths[1], "--backend", "cpu"];
    let done = flashover(&args);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let bytes = std::fs::read(&output).expect("written");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode();
    assert_eq!(mode(&output), mode(&input), "as any other new file");
    let expected = matmul(&cpu(), &lhs, &rhs, None, &MatmulOptions::default(), Policy::Default);
    let expected = expected.expect("shapes agree");
    assert_eq!(file.tensor("out").expect("named out").data(), expected.bytes());
}

#[test]
fn op_writes_through_links_and_into_devices() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| dir.path().join(name);
    write(&path("in"), &[("lhs", &integers(&[5, 3], 1)), ("rhs", &integers(&[3, 4], 2))]);
    std::os::unix::fs::symlink("file", path("link")).expect("linked");
    for output in [path("link"), "/dev/null".into()] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
        command.args(["op", "matmul", "--backend", "cpu", "--input"]).arg(path("in"));
        let done = command.arg("--output").arg(&output).output().expect("starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    assert!(path("link").is_symlink() && path("file").is_file());
    assert!(!Path::new("/dev/null").is_file(), "still a device");
}

#[test]
fn what_op_measures_is_remembered() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| dir.path().join(name);
    let (lhs, rhs) = (integers(&[5, 3], 1), integers(&[3, 4], 2));
    write(&path("in"), &[("lhs", &lhs), ("rhs", &rhs)]);
    let op = |policy: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
        command.args(["op", "matmul", "--backend", "cpu", "--policy", policy]);
        command.arg("--input").arg(path("in")).arg("--output").arg(path("out"));
        command.env("FLASHOVER_TUNE_CACHE", path("tune.jsonl")).output().expect("starts")
    };
    assert_eq!(op("frozen").status.code(), Some(2), "nothing is known yet");
    assert!(op("measure").status.success());
    let cache = std::fs::read_to_string(path("tune.jsonl")).expect("measuring writes the cache");
    assert_eq!(cache.lines().count(), 1, "{cache}");
    assert!(op("frozen").status.success(), "now it is known");
}

#[test]
fn bad_calls_exit_with_2_a_hint_and_no_file() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let (input, output) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    write(&input, &[("lhs", &integers(&[5, 3], 1)), ("rhs", &integers(&[4, 4], 2))]);
    std::fs::write(dir.path().join("junk"), b"not tensors").expect("written");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (input, out, junk) = (path("in.safetensors"), path("out.safetensors"), path("junk"));
    let op = |name: &str, input: &str, backend: &str, set: &str| {
        let mut args = vec!["op", name, "--input", input, "--output", &out, "--backend", backend];
        if !set.is_empty() {
            args.extend(["--set", set]);
        }
        flashover(&args)
    };
    let to = |output: &str| {
        let args = ["op", "matmul", "--input", &input, "--output", output, "--backend", "cpu"];
        flashover(&args)
    };
    for (done, word) in [
        (to(&path("")), "is a folder"),
        (to(&path("absent/out")), " does not exist\nhint: create it"),
        (op("matmul", &input, "cpu", ""), "lhs and rhs with the same k"),
        (op("matmul", &junk, "cpu", ""), "not a safetensors file"),
        (op("matmul", "absent", "cpu", ""), "cannot read"),
        (op("matmul", &input, "tpu", ""), "unknown backend"),
        (op("fft", &input, "cpu", ""), "unknown op"),
        (op("conv", &input, "cpu", ""), "unknown input `lhs`\nhint: the op takes x, weight"),
        (op("matmul", &input, "cpu", "rhs=diagonal"), "`rhs` does not take `diagonal`"),
        (op("matmul", &input, "cpu", "depth=1"), "unknown setting"),
        (op("matmul", &input, "cpu", "rhs"), "NAME=VALUE"),
        (flashover(&[]), "\n\nerror: a command is missing\nhint: "),
        (flashover(&["conv"]), "unrecognized subcommand"),
        (flashover(&["op", "matmul"]), "--input <FILE>"),
    ] {
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{text}");
        assert!(text.contains(word), "{word}: {text}");
        assert!(text.contains("\nhint: "), "{text}");
        assert!(!text.contains("panicked"), "{text}");
    }
    assert!(!output.exists(), "nothing half-written");
}

#[test]
fn an_output_that_takes_nothing_is_no_panic() {
    let doctor = |to: std::process::Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
        command.args(["doctor", "--json"]).stdout(to).stderr(std::process::Stdio::piped());
        command.output().expect("the program starts")
    };
    let (reader, pipe) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert!(doctor(pipe.into()).status.success(), "the reader has gone away");
    if let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") {
        let done = doctor(full.into());
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{text}");
        assert!(text.contains("\nhint: "), "{text}");
    }
}

#[test]
fn compare_starts_itself() {
    let model = fixture("llama");
    let model = model.to_str().expect("UTF-8");
    let args = ["compare", "--model", model, "--backend", "cpu", "--max-new-tokens", "2"];
    let compare =
        |tokens| flashover(&[&args[..], &["--format", "json", "--tokens", tokens]].concat());
    let done = compare("1,2,3");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!([&report["reference"], &report["rows"][0]["name"]], ["cpu", "cpu"]);
    let refused = compare("9999999");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("\nhint: "), "{text}");
}

#[test]
fn doctor_speaks_json() {
    let done = flashover(&["doctor", "--json"]);
    assert!(done.status.success());
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
    let devices = report["devices"].as_array().expect("a list");
    assert!(devices.iter().any(|d| d["backend"] == "cpu"));
    assert!(report["chosen"]["why"].is_string());
    assert!(report["kernel_cache"]["bytes"].is_u64(), "{report}");
}
