//! Any template and any tokenizer: a text or an error, without a panic, an abort or a hang.

use std::fs;

use proptest::prelude::*;
use serde_json::{Value, json};
use text::{ChatTemplate, Prompt, SpecialTokens, Tokenizer};

use crate::{FIXTURES, fixture};

/// Pieces of templates, of which most orders are none.
const PIECES: [&str; 48] = [
    "{{ ",
    " }}",
    "{% ",
    " %}",
    "{%- ",
    " -%}",
    "{# ",
    " #}",
    "set ",
    "ns",
    "x",
    ".a",
    " = ",
    "namespace()",
    "for ",
    " in ",
    "endfor",
    "if ",
    "else",
    "elif ",
    "endif",
    "macro ",
    "m(x, y=1)",
    "endmacro",
    "call ",
    "endcall",
    "generation",
    "endgeneration",
    "recursive",
    "loop(x)",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    ", ",
    ":",
    "+",
    "-",
    "~",
    " | tojson",
    " | list",
    "'text'",
    "1",
    "messages",
    "raise_exception(x)",
    "\r\n",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn templates_of_any_pieces(at in proptest::collection::vec(0..PIECES.len(), 0..60), noise in "\\PC{0,4}") {
        let mut source: String = at.iter().map(|at| PIECES[*at]).collect();
        source.push_str(&noise);
        let template = ChatTemplate::new(&source, SpecialTokens::default());
        let prompt = Prompt { messages: json!([{ "role": "user", "content": noise }]), ..Prompt::default() };
        if let Err(why) = template.and_then(|template| template.render(&prompt)) {
            prop_assert_eq!(why.to_string().matches("\nhint: ").count(), 1);
        }
    }

    /// Statements that are whole, so that more of them run.
    #[test]
    fn templates_of_any_statements(at in proptest::collection::vec((0usize..8, 0usize..6), 0..12)) {
        let values = ["ns", "[ns.a]", "ns.a", "[ns.a, ns.a]", "messages", "{'k': ns.a}"];
        let mut source = "{% set ns = namespace(a=1) %}".to_owned();
        for (statement, value) in at {
            let value = values[value];
            source = match statement {
                0 => format!("{source}{{% set ns.a = {value} %}}"),
                1 => format!("{source}{{{{ {value} }}}}"),
                2 => format!("{source}{{{{ {value} | tojson }}}}"),
                3 => format!("{source}{{% for x in {value} %}}{{{{ x }}}}{{% endfor %}}"),
                4 => format!("{{% for i in range(9) %}}{source}{{% endfor %}}"),
                5 => format!("{{% macro m(x) %}}{source}{{% endmacro %}}{{{{ m({value}) }}}}"),
                6 => format!("{source}{{% set ns = namespace(a={value}) %}}"),
                _ => format!("{{% generation %}}{source}{{% endgeneration %}}"),
            };
        }
        let template = ChatTemplate::new(&source, SpecialTokens::default());
        template.and_then(|template| template.render(&Prompt::of(&[]))).ok();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Values of a file that are others of it, or none.
    #[test]
    fn tokenizers_with_other_values(name in 0..FIXTURES.len(), cuts in proptest::collection::vec(any::<(u16, u16)>(), 1..4)) {
        let text = fs::read_to_string(fixture(FIXTURES[name]).join("tokenizer.json")).expect("a fixture");
        let mut file: Value = serde_json::from_str(&text).expect("make.py writes it");
        for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"] {
            for (at, from) in &cuts {
                let mut values = 0;
                count(&file[part], &mut values);
                let new = nth(&file[part], &mut (*from as usize % values));
                replace(&mut file[part], &mut (*at as usize % values), &new);
            }
        }
        let path = tempfile::NamedTempFile::new().expect("a file for the test");
        fs::write(path.path(), file.to_string()).expect("written");
        if let Ok(tokenizer) = Tokenizer::open(path.path()) {
            let ids = tokenizer.encode("The quick brown fox", true).unwrap_or_default();
            tokenizer.decode(&ids, false).ok();
        }
    }
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(values) => values.iter().collect(),
        Value::Object(values) => values.values().collect(),
        _ => Vec::new(),
    }
}

fn count(value: &Value, values: &mut usize) {
    *values += 1;
    children(value).into_iter().for_each(|value| count(value, values));
}

fn nth(value: &Value, at: &mut usize) -> Value {
    if *at == 0 {
        return value.clone();
    }
    for value in children(value) {
        *at -= 1;
        let mut values = 0;
        count(value, &mut values);
        if *at < values {
            return nth(value, at);
        }
        *at -= values - 1;
    }
    Value::Null
}

fn replace(value: &mut Value, at: &mut usize, new: &Value) {
    if *at == 0 {
        *value = new.clone();
    }
    let rest: Vec<&mut Value> = match value {
        Value::Array(values) => values.iter_mut().collect(),
        Value::Object(values) => values.values_mut().collect(),
        _ => Vec::new(),
    };
    for value in rest {
        *at = at.wrapping_sub(1);
        replace(value, at, new);
    }
}
