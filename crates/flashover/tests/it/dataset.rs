//! Compares training data with trl's SFTTrainer on the same lines.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flashover::{Engine, EngineOptions, ModelFolder};

use flashover::train::{Dataset, TrainOptions, Trainer};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{cpu, examples};

/// Contents of `golden.json`.
#[derive(Deserialize)]
struct Golden {
    templates: BTreeMap<String, String>,
    tokenizers: BTreeMap<String, Cases>,
}

#[derive(Deserialize)]
struct Cases {
    /// `tokenizer_config.json`.
    config: Value,
    lines: Vec<Case>,
    /// Conversations by name of the template.
    chats: BTreeMap<String, Vec<Case>>,
}

#[derive(Deserialize)]
struct Case {
    line: Value,
    tokens: Vec<u32>,
    from: usize,
    loss: f64,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn golden() -> Golden {
    let text = fs::read_to_string(fixtures().join("golden.json")).expect("a fixture");
    serde_json::from_str(&text).expect("make.py writes it")
}

/// Returns the tiny model with this tokenizer and `tokenizer_config.json`.
fn model(tokenizer: &str, config: &Value) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = |from: PathBuf, name: &str| fs::copy(from, folder.path().join(name)).expect("ours");
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        copy(fixtures().join("model").join(name), name);
    }
    copy(fixtures().join("tokenizers").join(format!("{tokenizer}.json")), "tokenizer.json");
    let config = config.to_string();
    fs::write(folder.path().join("tokenizer_config.json"), config).expect("ours");
    folder
}

fn read(folder: &ModelFolder, name: &str, lines: &[&Value]) -> Dataset {
    let target = tempfile::tempdir().expect("a folder");
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(target.path().join(name), text).expect("ours");
    Dataset::open(target.path().join(name), folder, 256).expect("examples")
}

fn check(name: &str, folder: &ModelFolder, cases: &[Case]) -> Dataset {
    let lines: Vec<&Value> = cases.iter().map(|case| &case.line).collect();
    let data = read(folder, "data.jsonl", &lines);
    assert_eq!((examples(&data).len(), data.cut, data.left_out), (cases.len(), 0, 0), "{name}");
    for (own, Case { line, tokens, from, .. }) in examples(&data).iter().zip(cases) {
        assert_eq!((&own.tokens, own.from), (tokens, *from), "{name}: {line}");
    }
    data
}

/// Covers merges across the boundary of prompt and completion, and lines that already hold BOS or EOS.
#[test]
fn tokens_and_boundaries_are_those_of_trl() {
    let Golden { templates, tokenizers } = golden();
    assert_eq!(tokenizers.len(), 11);
    for (name, cases) in &tokenizers {
        let folder = model(name, &cases.config);
        let open = || ModelFolder::open(folder.path()).expect("a model");
        check(name, &open(), &cases.lines);
        for (template, chats) in &cases.chats {
            let source = &templates[template];
            fs::write(folder.path().join("chat_template.jinja"), source).expect("ours");
            let data = check(&format!("{name}, {template}"), &open(), chats);
            // The prompts of these templates end with text that a finished turn lacks.
            let diverges = ["thinks", "thought"].contains(&template.as_str());
            assert!(!diverges || data.diverged == chats.len(), "{name}, {template}: {data:?}");
        }
    }
}

#[test]
fn losses_are_those_of_trl() {
    let Golden { tokenizers, .. } = golden();
    let cases = &tokenizers["prepended"];
    let folder = model("prepended", &cases.config);
    let data =
        check("prepended", &ModelFolder::open(folder.path()).expect("a model"), &cases.lines);
    let engine = Engine::load(&cpu(), folder.path(), &EngineOptions::default()).expect("a model");
    let mut trainer = Trainer::new(engine, TrainOptions::default()).expect("usual options");
    for (example, Case { line, loss: want, .. }) in examples(&data).iter().zip(&cases.lines) {
        let (loss, tokens) = trainer.loss(std::slice::from_ref(example)).expect("a batch");
        assert!((loss - want).abs() < 1e-4 * want, "{line}: {loss} for {want}");
        assert_eq!(tokens, example.learned());
    }
}

/// The EOS is the tokenizer's if its vocabulary has it, or else the first of generation_config.json.
#[test]
fn examples_end_with_the_eos_of_the_tokenizer() {
    let last = |config: Value, eos: Value| {
        let folder = model("bytes", &config);
        let generation = json!({ "eos_token_id": eos }).to_string();
        fs::write(folder.path().join("generation_config.json"), generation).expect("ours");
        let folder = ModelFolder::open(folder.path()).expect("a model");
        let data = read(&folder, "data.NDJSON", &[&json!({"text": "It is"})]);
        examples(&data)[0].tokens.last().copied()
    };
    assert_eq!(last(json!({"eos_token": "<|end|>"}), json!([0, 1])), Some(2));
    assert_eq!(last(json!({"eos_token": {"content": "<|begin|>"}}), json!(0)), Some(1));
    // As in transformers, a token that tokenizer.json lacks is appended after its own.
    assert_eq!(last(json!({"eos_token": "</s>"}), json!([1, 0])), Some(433));
    assert_eq!(last(json!({}), json!([1, 0])), Some(1));
}

/// Covers a tokenizer that appends EOS to each text, and one that prepends two tokens.
#[test]
fn what_a_tokenizer_adds_is_there_once() {
    let folder = model("bytes", &json!({"eos_token": "<|end|>"}));
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value =
        serde_json::from_slice(&fs::read(&path).expect("ours")).expect("JSON");
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let ids = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    let single =
        json!([special("<|endoftext|>"), special("<|begin|>"), text.clone(), special("<|end|>")]);
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": [text.clone(), {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": ids("<|endoftext|>", 0),
            "<|begin|>": ids("<|begin|>", 1),
            "<|end|>": ids("<|end|>", 2),
        },
    });
    fs::write(&path, tokenizer.to_string()).expect("ours");
    let folder = ModelFolder::open(folder.path()).expect("a model");
    let around = "<|endoftext|><|begin|>";
    let lines = [
        json!({"text": "It is"}),
        json!({"text": format!("{around}It is")}),
        json!({"text": format!("{around}It is<|end|>")}),
        json!({"prompt": "It", "completion": " is"}),
        json!({"prompt": format!("{around}It"), "completion": " is<|end|>"}),
    ];
    let data = read(&folder, "data.jsonl", &lines.iter().collect::<Vec<_>>());
    let whole = folder.encode("It is").expect("text");
    assert!(whole.starts_with(&[0, 1]) && whole.ends_with(&[2]), "{whole:?}");
    let from = folder.encode("It").expect("text").len() - 1;
    for (own, from) in examples(&data).iter().zip([0, 0, 0, from, from]) {
        assert_eq!((&own.tokens, own.from), (&whole, from));
    }
    assert_eq!((examples(&data).len(), data.diverged), (5, 0));
}
