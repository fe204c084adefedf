//! Tests `flashover monitor` on any machine.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::flashover;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
    command.arg("monitor").args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn json_has_the_cpu_in_every_sample_and_says_what_is_missing() {
    let done = flashover(&["monitor", "--count", "2", "--interval", "0.1", "--json"]);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    let lines: Vec<Value> = String::from_utf8(done.stdout)
        .expect("UTF-8")
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let cpus: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "cpu").collect();
    assert_eq!((cpus.len(), lines.len() % 2), (2, 0), "{lines:?}");
    for cpu in &cpus {
        assert!(cpu["memory_total_bytes"].as_u64().expect("a number") > 0);
        assert!(cpu["lacks"][0]["hint"].is_string() && cpu["time"].is_string());
        let load = cpu["utilisation_percent"].as_f64().expect("0.1 s passed");
        assert!((0.0..=100.0).contains(&load), "{load}");
    }
    let card = lines.iter().any(|line| line["kind"] == "nvidia");
    assert!(card || said.contains("note: NVML") && said.contains("\nhint: "), "{said}");
}

#[test]
fn every_form_is_the_same_reading() {
    let out = |form: &str| {
        let done = flashover(&["monitor", "--count", "1", form]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    let csv = out("--csv");
    assert!(csv.starts_with("time,index,kind,name,id,temperature_c,"), "{csv}");
    assert_eq!(csv.lines().count(), 1 + out("--json").lines().count());
    let metrics = out("--prometheus");
    assert!(metrics.starts_with("# HELP flashover_device_"), "{metrics}");
    assert!(metrics.contains("\nflashover_device_memory_total_bytes{device=\"0\""), "{metrics}");
    let done = flashover(&["monitor", "--count", "2", "--interval", "0.05", "--device", "0"]);
    let blocks = String::from_utf8(done.stdout).expect("UTF-8");
    assert_eq!(blocks.matches("\n0  ").count(), 2, "{blocks}");
    assert!(!blocks.contains("\n1  ") && !blocks.contains('\x1b'), "{blocks}");
}

#[test]
fn ctrl_c_and_a_closed_pipe_end_it_quietly() {
    let begun = |args: &[&str]| {
        let mut child = command(args).spawn().expect("the program starts");
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a first line");
        assert!(line.starts_with('{'), "{line}");
        (child, out)
    };
    let (child, out) = begun(&["--json", "--interval", "3600"]);
    let pid = child.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status().expect("kill is there");
    assert!(sent.success());
    let (closed, pipe) = begun(&["--json", "--interval", "0.01"]);
    drop(pipe);
    for child in [child, closed] {
        let done = child.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(0), "{said}");
        // Mesa's loader prints its own warnings.
        let mut ours = said.lines().filter(|line| !line.contains("XDG_RUNTIME_DIR"));
        assert!(ours.all(|line| !line.contains("error") && !line.contains("panicked")), "{said}");
    }
    drop(out);
}

#[test]
fn senseless_wishes_are_refused_with_a_hint() {
    for (args, word) in [
        (&["--interval", "0"][..], "expected an interval, got"),
        (&["--interval", "-1"], "expected an interval, got"),
        (&["--interval", "NaN"], "expected an interval, got"),
        (&["--interval", "1e9"], "expected an interval, got"),
        (&["--count", "0"], "expected a number of samples, got `0`"),
        (&["--prometheus", "--count", "2"], "--prometheus expects at most one sample"),
        (&["--json", "--csv"], "cannot be used with"),
        (&["--json", "--prometheus"], "cannot be used with"),
        (&["--count", "1", "--device", "4096"], "unknown device 4096\nhint: 0 is "),
    ] {
        let done = command(args).output().expect("the program starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(done.stdout.is_empty() && said.contains(word), "{word:?} is not in {said}");
        assert_eq!(said.matches("\nhint: ").count(), 1, "{said}");
    }
}
