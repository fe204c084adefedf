//! Tests `flashover grpo`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{demo, flashover};

/// Writes prompts, and returns their path.
fn prompts(dir: &Path) -> String {
    let path = dir.join("prompts.jsonl");
    let starts = ["Once upon a time", "The king", "There was", "In the morning"];
    let line = |start: &&str| format!("{{\"prompt\": \"{start}\", \"answer\": \" and\"}}\n");
    fs::write(&path, starts.iter().map(line).collect::<String>()).expect("written");
    path.display().to_string()
}

fn run(args: &[&str], more: &[&str]) -> (bool, String) {
    let done = flashover(&[&["grpo", "--backend", "cpu"], args, more].concat());
    (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
fn a_policy_is_trained_saved_and_resumed() {
    let dir = tempfile::tempdir().expect("a folder");
    let (data, model) = (prompts(dir.path()), demo().display().to_string());
    let at = |name: &str| dir.path().join(name).display().to_string();
    let words = "cmd:while read line; do case $line in *'\"completion\":\"'*e*'\",\"tokens\"'*) echo 1;; *) echo '{\"reward\": 0}';; esac; done";
    let common = [
        "--model",
        &model,
        "--data",
        &data,
        "--reward",
        words,
        "--reward",
        "length:4",
        "--reward-weights",
        "1,0.5",
        "--positions",
        "2",
        "--group",
        "4",
        "--max-new-tokens",
        "6",
        "--learning-rate",
        "1e-4",
        "--save-every",
        "1",
    ];
    for kind in [&["--full", "--beta", "0.04"][..], &["--lora-rank", "4"][..]] {
        let (whole, half, log) = (at("whole"), at("half"), at("log.jsonl"));
        let own = [kind, &["--overwrite"]].concat();
        let of = |output: &str, steps: &str, more: &[&str]| {
            let output = ["--output", output, "--steps", steps];
            run(&common, &[&own, &output[..], more].concat())
        };
        let (done, text) = of(&whole, "3", &["--log", &log]);
        assert!(done && text.contains("batch 3 of 3: reward"), "{text}");
        let lines = fs::read_to_string(&log).expect("written");
        let lines: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[2]["batch"], &lines[2]["truncated"]), (&3.into(), &1.0.into()));
        assert_eq!(lines[0]["rewards"][1]["mean"], 0.5, "6 tokens of 4");
        assert!(lines.iter().any(|line| line["gradient"].as_f64() > Some(0.0)), "{text}");
        assert!(lines[0]["log_ratio"]["largest"].as_f64() < Some(1e-4), "{}", lines[0]);
        assert!(lines[0]["samples"][0]["completion"].is_string());

        let (done, text) = of(&half, "2", &[]);
        assert!(done, "{text}");
        let other = dir.path().join("other.jsonl");
        fs::write(&other, "{\"prompt\": \"A dog\"}\n").expect("written");
        let other = other.display().to_string();
        let mut asked = common;
        asked[3] = &other;
        let (done, text) = run(
            &asked,
            &[&own, &["--output", &half, "--steps", "3", "--resume", &half][..]].concat(),
        );
        assert!(!done && text.contains("data: "), "{kind:?}: other data: {text}");
        if kind[0] == "--full" {
            let reference = Path::new(&half).join("flashover_reference.bin");
            let whole = fs::read(&reference).expect("it is saved");
            for damaged in [&whole[..1000], &[&[whole[0] ^ 1], &whole[1..]].concat()] {
                fs::write(&reference, damaged).expect("written");
                let (done, text) = of(&half, "3", &["--resume", &half]);
                assert!(!done && text.contains("it is damaged, or of another save"), "{text}");
            }
            fs::write(&reference, whole).expect("written");
        }
        // An adapter's folder has no model.
        let (done, text) = of(&half, "3", &["--resume", &half]);
        assert!(done && text.contains("the run continues after batch 2"), "{text}");
        let file =
            if kind[0] == "--full" { "model.safetensors" } else { "adapter_model.safetensors" };
        let read = |folder: &str| fs::read(Path::new(folder).join(file)).expect("saved");
        assert!(read(&half) == read(&whole), "{kind:?}: other weights");
    }
}

#[test]
fn mistakes_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let (data, model) = (prompts(dir.path()), demo().display().to_string());
    let output = dir.path().join("out").display().to_string();
    let common = ["--model", &model, "--output", &output];
    let refused = |more: &[&str], want: &str| {
        let (done, text) = run(&common, more);
        assert!(!done && text.contains(want), "{more:?}: {text}");
    };
    let good = ["--data", &data, "--reward", "json"];
    let with = |more: &[&'static str]| [&good[..], more].concat();
    refused(&["--data", &data, "--reward", "jsn"], "expected a reward, got `jsn`");
    refused(&with(&["--group", "1"]), "--group is 1");
    refused(&with(&["--epsilon-high", "0.1"]), "--epsilon-high is 0.1");
    refused(&with(&["--reward-weights", "1,2"]), "expected a weight for each of 1 rewards, got 2");
    refused(&["--data", &data, "--reward", "json", "--log", &data], "--log would replace");
    refused(&with(&["--renew-reference", "2"]), "--renew-reference needs a reference");
    refused(&with(&["--kv-cache", "int8"]), "add --correction");
    refused(&with(&["--max-new-tokens", "511"]), "the prompt of line 1 has");
    refused(&with(&["--adapter", "/nowhere"]), "/nowhere");
    let broken = dir.path().join("broken.jsonl");
    fs::write(&broken, "{\"prompt\": \"a\"}\n{\"prompt\": 3}\n").expect("written");
    let broken = broken.display().to_string();
    refused(&["--data", &broken, "--reward", "json"], "line 2: `prompt` is no text");
    refused(&["--data", "/nowhere.jsonl", "--reward", "json"], "/nowhere.jsonl");
    let dead = with(&[]);
    let dead = [&dead[..2], &["--reward", "cmd:exit 3", "--steps", "1"]].concat();
    refused(
        &dead,
        "the first fault is of cmd:exit 3 for the prompt of line 1: the command ended: exit status: 3",
    );
    assert!(!Path::new(&output).join("adapter_config.json").exists());
}
