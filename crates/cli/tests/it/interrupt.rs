//! Tests the effect of signals and of a closed pipe.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::generate::demo_with;
use crate::{demo, trace_format};

/// Starts a long generation with a trace in `folder`.
fn writing(folder: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_flashover"))
        .args(["generate", "--backend", "cpu", "--prompt", "Once upon a time", "--ignore-eos"])
        .args(["--max-new-tokens", "480", "--model"])
        .arg(demo())
        .arg("--profile-trace")
        .arg(folder.join("trace.json"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

fn send(signal: Signal, to: &Child) {
    let id = Pid::from_raw(to.id().try_into().expect("a process id"));
    kill(id, signal).expect("it runs");
}

fn traced(folder: &Path) {
    let trace = std::fs::read_to_string(folder.join("trace.json")).expect("a trace");
    trace_format::rows(&trace).expect("what Perfetto reads");
}

#[test]
fn ctrl_c_ends_an_answer_and_its_trace_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = writing(folder.path());
    let mut begun = [0; 8];
    child.stdout.as_mut().expect("piped").read_exact(&mut begun).expect("some text");
    send(Signal::SIGINT, &child);
    let out = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(said.contains(" tokens/s in decode; stopped\n"), "{said}");
    traced(folder.path());
}

/// Reading a mapped file past its shortened end raises SIGBUS.
#[test]
fn a_file_that_is_shortened_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = writing(folder.path());
    let mut begun = [0; 8];
    child.stdout.as_mut().expect("piped").read_exact(&mut begun).expect("some text");
    send(Signal::SIGBUS, &child);
    let out = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(135), "{said}");
    assert!(said.contains("error: a file changed while it was read\nhint: "), "{said}");
}

/// Nothing is there before the first step, neither the folder nor its lock.
#[test]
fn a_signal_before_the_first_step_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data.txt");
    std::fs::write(&data, "One day a dog ran. ".repeat(20_000)).expect("written");
    for (signal, wait) in [(Signal::SIGTERM, 150), (Signal::SIGTERM, 1000), (Signal::SIGINT, 2500)]
    {
        let mut child = Command::new(env!("CARGO_BIN_EXE_flashover"))
            .args(["train", "--backend", "cpu", "-c", "64", "-b", "4", "--steps", "1", "--model"])
            .arg(demo())
            .arg("--data")
            .arg(&data)
            .arg("--held-out")
            .arg(&data)
            .arg("--output")
            .arg(folder.path().join("adapter"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        thread::sleep(Duration::from_millis(wait));
        send(signal, &child);
        let status = child.wait().expect("it ends");
        assert!(!status.success(), "{status}");
        let entries = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(entries, 1, "only the data, after {wait} ms");
    }
}

/// A step may have billions of micro-batches.
#[test]
fn ctrl_c_ends_a_step_between_its_micro_batches() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data.txt");
    std::fs::write(&data, "One day a dog ran. ".repeat(20)).expect("written");
    for accumulate in ["1000000", "4294967295"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_flashover"))
            .args(["train", "--backend", "cpu", "-c", "8", "-b", "1", "--accumulate", accumulate])
            .arg("--model")
            .arg(demo())
            .arg("--data")
            .arg(&data)
            .arg("--output")
            .arg(folder.path().join("adapter"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut said =
            BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
        let begun = said.find(|line| {
            line.contains(&format!("; 1 step, batches of 1 example, {accumulate} batches per step"))
        });
        assert!(begun.is_some(), "{accumulate}");
        // After two seconds it handles signals and is within the step.
        thread::sleep(Duration::from_secs(2));
        send(Signal::SIGINT, &child);
        let said: Vec<String> = said.collect();
        assert_eq!(child.wait().expect("it ends").code(), Some(130), "{said:?}");
        let stopped = "stopped before the first step; nothing is saved";
        assert!(said.iter().any(|line| line.contains(stopped)), "{said:?}");
    }
}

#[test]
fn a_reader_that_goes_away_leaves_a_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = writing(folder.path());
    let mut begun = [0; 8];
    let mut pipe = child.stdout.take().expect("piped");
    pipe.read_exact(&mut begun).expect("some text");
    // Standard error is closed too.
    drop((pipe, child.stderr.take()));
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    traced(folder.path());
}

#[test]
fn ctrl_c_ends_an_answer_of_a_chat_and_the_chat_goes_on() {
    let folder = demo_with("{% for m in messages %}{{ m.content }} {% endfor %}");
    // A shell lets background processes and their children ignore Ctrl-C.
    let mut child = Command::new("env")
        .args(["--default-signal=INT", env!("CARGO_BIN_EXE_flashover")])
        .args(["chat", "--backend", "cpu", "--ignore-eos", "--model"])
        .arg(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut lines = child.stdin.take().expect("piped");
    let mut text = child.stdout.take().expect("piped");
    let mut said = BufReader::new(child.stderr.take().expect("piped")).lines();
    let (pieces, written) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut piece = [0; 256];
        while text.read(&mut piece).expect("a pipe") > 0 && pieces.send(()).is_ok() {}
    });
    for prompt in ["Once upon a time\n", "One day\n"] {
        lines.write_all(prompt.as_bytes()).expect("it reads");
        written.recv().expect("some text");
        send(Signal::SIGINT, &child);
        let line = said.next().expect("it says how fast it was").expect("UTF-8");
        assert!(line.ends_with("; stopped"), "{line}");
        // Drain the pieces that were written before the signal.
        while written.recv_timeout(Duration::from_millis(500)).is_ok() {}
    }
    // Between completions, Ctrl-C ends the program.
    send(Signal::SIGINT, &child);
    let status = child.wait().expect("it ends");
    assert_eq!(status.signal(), Some(2), "{status}");
    reader.join().expect("no panic");
}
