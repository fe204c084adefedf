//! Tests `flashover tokenize` with the tokenizer of the demo model.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::{demo, fixture, flashover};

fn tokenize(model: &Path, more: &[&str]) -> Output {
    flashover(&[&["tokenize", "--model", model.to_str().expect("UTF-8")], more].concat())
}

fn stdout(out: &Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout.clone()).expect("UTF-8")
}

#[test]
fn a_text_becomes_ids_and_ids_its_parts() {
    let text = "Once upon a time, there was\na \"dragon\".";
    let ids = stdout(&tokenize(&demo(), &["--prompt", text]));
    let tokenizer = flashover::Tokenizer::open(demo()).expect("the demo model has one");
    let want = tokenizer.encode(text, true).expect("a text");
    assert_eq!(ids, want.iter().map(u32::to_string).collect::<Vec<_>>().join(",") + "\n");
    let parts = stdout(&tokenize(&demo(), &["--tokens", ids.trim_end()]));
    let parts: Vec<String> = serde_json::from_str(&parts).expect("JSON");
    assert_eq!((parts.len(), parts[1..].concat().as_str()), (want.len(), text));
    assert_eq!(parts[..3], ["<|endoftext|>", "Once", " upon"]);

    let dash = stdout(&tokenize(&demo(), &["--prompt", "- item"]));
    let want = tokenizer.encode("- item", true).expect("a text");
    assert_eq!(dash, want.iter().map(u32::to_string).collect::<Vec<_>>().join(",") + "\n");

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("text");
    std::fs::write(&file, text).expect("written");
    let file = file.to_str().expect("UTF-8");
    assert_eq!(stdout(&tokenize(&demo(), &["--prompt-file", file])), ids);
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashover"))
        .args(["tokenize", "--model"])
        .arg(demo())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("is read");
    assert_eq!(stdout(&child.wait_with_output().expect("ends")), ids);
}

#[test]
fn what_cannot_be_encoded_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("bytes");
    std::fs::write(&file, [0xff, 0xfe]).expect("written");
    let file = file.to_str().expect("UTF-8");
    let piped = |file: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
        command.args(["tokenize", "--model"]).arg(demo());
        command.stdin(std::fs::File::open(file).expect("there")).output().expect("it starts")
    };
    let broken = folder.path().join("tokenizer.json");
    std::fs::write(broken, "{}").expect("written");
    for (out, want) in [
        (tokenize(&fixture("llama"), &["--prompt", "x"]), "cannot read"),
        (tokenize(folder.path(), &["--prompt", "x"]), "tokenizer.json is not a valid tokenizer: "),
        (piped(file), "cannot read standard input: "),
        (tokenize(&demo(), &["--prompt-file", file]), "cannot read"),
        (tokenize(&demo(), &["--prompt-file", "absent"]), "cannot read absent"),
        (tokenize(&demo(), &["--tokens", "1,x"]), "invalid value 'x'"),
        (tokenize(&demo(), &["--tokens", "1", "--prompt", "x"]), "cannot be used with"),
    ] {
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(out.stdout.is_empty() && said.contains(want), "{want:?} is not in {said}");
        assert_eq!(said.matches("\nhint: ").count(), 1, "{said}");
    }
}
