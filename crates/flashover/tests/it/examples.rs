//! The examples, as cargo built them beside this test.

use std::path::Path;
use std::process::Command;

fn run(name: &str, args: &[&str]) -> String {
    let own = std::env::current_exe().expect("it runs");
    let built = own.ancestors().nth(2).expect("target/release/deps").join("examples").join(name);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let ran = Command::new(built).arg(demo).args(args).output().expect("cargo built it");
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{err}");
    out.into_owned()
}

#[test]
fn examples_end_in_text() {
    let text = run("generate", &["Once upon a time"]);
    assert!(text.starts_with("Once upon a time"), "{text}");
    assert!(text.trim_end().ends_with("(32 tokens, Some(Length))"), "{text}");
    let text = run("batches", &[]);
    let answers: Vec<&str> = text.lines().filter(|line| line.contains('|')).collect();
    assert_eq!(answers.len(), 8, "{text}");
    assert!(answers[0].starts_with("Once upon a time|"), "{text}");
    assert!(answers.chunks(2).any(|two| two[0] != two[1]), "two answers are drawn: {text}");
    assert!(text.contains("with 4 sequences of 128 positions takes"), "{text}");
}
