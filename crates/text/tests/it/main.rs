//! Tests of tiny tokenizers and templates against results from Python.

mod bad;
mod deep;
mod fuzz;
mod jinja;
mod marks;
mod mutated;
mod stream;
mod template;
mod tokenizer;
mod work;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};
use text::Tokenizer;

/// All folders that `fixtures/make.py` writes.
const FIXTURES: [&str; 3] = ["bytes", "pieces", "split"];

/// Contents of `golden.json`.
#[derive(Deserialize)]
struct Golden {
    encoded: Vec<Encoded>,
    rendered: Vec<Rendered>,
}

#[derive(Deserialize)]
struct Encoded {
    text: String,
    ids: Vec<u32>,
    special_ids: Vec<u32>,
    decoded: String,
    decoded_special: String,
}

/// Arguments of `apply_chat_template`, and its result.
#[derive(Deserialize)]
struct Rendered {
    messages: Value,
    tools: Option<Value>,
    #[serde(default)]
    add_generation_prompt: bool,
    chat_template: Option<String>,
    expected: String,
    #[serde(flatten)]
    more: Map<String, Value>,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::open(fixture(name)).expect("a fixture")
}

fn golden(name: &str) -> Golden {
    let text = std::fs::read_to_string(fixture(name).join("golden.json")).expect("a fixture");
    serde_json::from_str(&text).expect("make.py writes it")
}
