//! Runs the examples that cargo built next to this test.

use std::process::Command;

fn run(name: &str, args: &[&str]) -> String {
    let own = std::env::current_exe().expect("it runs");
    let built = own.ancestors().nth(2).expect("target/release/deps").join("examples").join(name);
    let ran = Command::new(built).args(args).output().expect("cargo built it");
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{name}: {err}");
    out.into_owned()
}

fn demo() -> String {
    crate::demo().to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_text_is_continued() {
    let text = run("generate", &[&demo(), "Once upon a time"]);
    assert!(text.starts_with("Once upon a time"), "{text}");
    assert!(text.trim_end().ends_with("(32 tokens, Some(Length))"), "{text}");
}

#[test]
fn a_chat_answers_each_message() {
    let text = run("chat", &[&demo(), "The fox", "The hen"]);
    assert_eq!(text.matches(" tokens prefilled, ").count(), 2, "{text}");
    assert!(text.ends_with("4 messages\n"), "{text}");
}

#[test]
fn a_batch_has_several_answers() {
    let text = run("batch", &[&demo()]);
    let answers: Vec<&str> = text.lines().filter(|line| line.contains('|')).collect();
    assert_eq!(answers.len(), 8, "{text}");
    assert!(answers[0].starts_with("Once upon a time|"), "{text}");
    assert!(answers.chunks(2).any(|two| two[0] != two[1]), "two answers are drawn: {text}");
    assert!(text.contains("with 4 sequences of 128 tokens takes"), "{text}");
}

#[test]
fn a_model_is_quantised_and_an_adapter_trained() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let text = run("quantize", &[&demo(), &path("nf4")]);
    assert!(text.starts_with("9") && text.lines().count() >= 3, "{text}");
    std::fs::write(path("text"), "One day a dog ran. ".repeat(40)).expect("written");
    let text = run("fine_tune", &[&demo(), &path("text"), &path("adapter")]);
    let losses: Vec<f64> =
        text.lines().filter_map(|line| line.split_once(": loss ")?.1.parse().ok()).collect();
    assert!(losses.len() == 3 && losses[2] < losses[0], "{text}");
}

#[test]
fn kernels_run_on_tensors_of_burn() {
    let text = run("kernels", &[]);
    assert!(
        text.contains("step 2: loss 0.") && text.contains("attention [1, 8, 128, 64]"),
        "{text}"
    );
    assert_eq!(run("own_model", &[]), "[24, 64]\n");
}

#[test]
fn moves_of_chess_are_learned() {
    let text = run("chess", &[&demo(), "2"]);
    let rewards: Vec<f64> = text
        .lines()
        .filter_map(|line| line.split_once(": reward ")?.1.split(',').next()?.parse().ok())
        .collect();
    // Some moves are legal after the lessons, and some are not.
    assert!(rewards.len() == 2 && rewards.iter().all(|own| (0.2..0.9).contains(own)), "{text}");
}
