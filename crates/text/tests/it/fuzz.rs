//! Random templates and tokenizers: a text or an error, without a panic, an abort or a hang.
//!
//! `PROPTEST_CASES` sets the number of cases of each test.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use text::{ChatTemplate, Error, Prompt, SpecialTokens, Tokenizer};

use crate::jinja::{clock, published};
use crate::mutated::{edit, messages, mutated, part, value};
use crate::{FIXTURES, fixture};

/// Time limit of a case.
const MAX_TIME: Duration = Duration::from_secs(20);

/// Pieces of templates; most sequences of them are invalid.
pub(crate) const PIECES: [&str; 48] = [
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

fn cases(usual: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig::with_cases(cases.unwrap_or(usual))
}

/// Runs a case, and panics if it takes too long.
pub(crate) fn timed(case: impl FnOnce() + Send + 'static) {
    let (done, end) = mpsc::channel();
    let thread = thread::spawn(move || {
        case();
        done.send(()).ok();
    });
    match end.recv_timeout(MAX_TIME) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it takes over {MAX_TIME:?}"),
        _ => thread.join().expect("it does not panic"),
    }
}

/// Returns the value; an error must have exactly one hint.
pub(crate) fn hinted<T>(result: Result<T, Error>) -> Option<T> {
    if let Err(why) = &result {
        assert_eq!(why.to_string().matches("\nhint: ").count(), 1, "{why}");
    }
    result.ok()
}

/// Renders a prompt without and with its marks.
fn render(template: &ChatTemplate, prompt: &Prompt) {
    let text = hinted(template.render(prompt));
    let marked = hinted(template.render_marked(prompt));
    if let Some(marked) = marked {
        assert_eq!(Some(&marked.text), text.as_ref());
        let mut end = 0;
        for range in marked.generated {
            assert!(end <= range.start && range.start <= range.end, "{range:?}");
            assert!(marked.text.get(range.clone()).is_some(), "{range:?}");
            end = range.end;
        }
    }
}

/// Encodes and decodes some texts.
fn encode(tokenizer: Tokenizer) {
    for text in ["The quick brown fox", "<|begin|>é\u{301} \0 日本 🦀\r\n\t  <|end|>▁</s>12345", ""]
    {
        for special in [false, true] {
            if let Some(ids) = hinted(tokenizer.encode(text, special)) {
                hinted(tokenizer.decode(&ids, special));
            }
        }
    }
    hinted(tokenizer.decode(&[0, 1, 419, u32::MAX], true));
    assert!(
        tokenizer.ids() <= u32::MAX as usize + 1 && tokenizer.special().len() <= tokenizer.tokens()
    );
    hinted(tokenizer.for_vocab(300));
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn templates_of_any_pieces(at in vec(0..PIECES.len(), 0..60), noise in "\\PC{0,4}") {
        let mut source: String = at.iter().map(|at| PIECES[*at]).collect();
        source.push_str(&noise);
        timed(move || {
            let prompt = Prompt { messages: json!([{ "role": "user", "content": noise }]), ..Prompt::default() };
            if let Some(template) = hinted(ChatTemplate::new(&source, SpecialTokens::default())) {
                render(&template, &prompt);
            }
        });
    }

    /// Complete statements, so that more of them run.
    #[test]
    fn templates_of_any_statements(at in vec((0usize..8, 0usize..6), 0..12)) {
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
        timed(move || {
            if let Some(template) = hinted(ChatTemplate::new(&source, SpecialTokens::default())) {
                render(&template, &Prompt::of(&[]));
            }
        });
    }

    /// Published templates with pieces that are removed, duplicated, or from another template.
    #[test]
    fn templates_that_are_cut(
        at in (any::<usize>(), any::<usize>()),
        cuts in vec((0usize..6, any::<u32>(), any::<u32>(), any::<u8>()), 0..4),
        messages in messages(),
        tools in proptest::option::of(value()),
        add_generation_prompt in any::<bool>(),
    ) {
        let sources = sources();
        let [mut source, other] = [at.0, at.1].map(|at| sources[at % sources.len()].clone());
        for (cut, from, len, byte) in cuts {
            source = mutated(&source, &other, cut, from, len, byte);
        }
        timed(move || {
            if let Some(template) = hinted(ChatTemplate::new(&source, special())) {
                let prompt = Prompt { messages, tools, add_generation_prompt, now: Some(clock()), ..Prompt::default() };
                render(&template, &prompt);
            }
        });
    }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn tokenizers_with_any_values(name in 0..FIXTURES.len(), parts in vec(part(), 0..3), edits in vec(edit(), 0..4)) {
        let mut file = json_of(&fixture(FIXTURES[name]).join("tokenizer.json"));
        parts.into_iter().for_each(|(name, part)| file[name] = part);
        edits.iter().for_each(|edit| edit.change(&mut file));
        timed(move || {
            let path = tempfile::NamedTempFile::new().expect("a file for the test");
            fs::write(path.path(), file.to_string()).expect("written");
            if let Some(tokenizer) = hinted(Tokenizer::open(path.path())) {
                encode(tokenizer);
            }
        });
    }

    /// Files with tokens next to a tokenizer; the tokenizer has them or adds them.
    #[test]
    fn folders_with_any_values(at in any::<usize>(), edits in vec((any::<usize>(), edit()), 1..6), text in value()) {
        let mut folders = folders();
        let at = at % folders.len();
        let mut files: Vec<(String, Value)> = folders.swap_remove(at).into_iter().collect();
        for (at, edit) in &edits {
            let at = at % files.len();
            edit.change(&mut files[at].1);
        }
        timed(move || {
            let folder = tempfile::tempdir().expect("a folder for the test");
            for (name, file) in &files {
                fs::write(folder.path().join(name), file.to_string()).expect("written");
            }
            fs::copy(fixture("split/tokenizer.json"), folder.path().join("tokenizer.json")).expect("copied");
            hinted(SpecialTokens::open(folder.path()));
            if let Some(Some(template)) = hinted(ChatTemplate::open(folder.path())) {
                let messages = json!([{ "role": "user", "content": text }]);
                render(&template, &Prompt { messages, ..Prompt::default() });
            }
            if let Some(tokenizer) = hinted(Tokenizer::open(folder.path())) {
                encode(tokenizer);
            }
        });
    }

    /// Tokenizer files whose values are replaced by other values of the file.
    #[test]
    fn tokenizers_with_other_values(name in 0..FIXTURES.len(), cuts in vec(any::<(u16, u16)>(), 1..4)) {
        let mut file = json_of(&fixture(FIXTURES[name]).join("tokenizer.json"));
        for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"] {
            for (at, from) in &cuts {
                let mut values = 0;
                count(&file[part], &mut values);
                let new = nth(&file[part], &mut (*from as usize % values));
                replace(&mut file[part], &mut (*at as usize % values), &new);
            }
        }
        timed(move || {
            let path = tempfile::NamedTempFile::new().expect("a file for the test");
            fs::write(path.path(), file.to_string()).expect("written");
            if let Some(tokenizer) = hinted(Tokenizer::open(path.path())) {
                encode(tokenizer);
            }
        });
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

fn json_of(path: &Path) -> Value {
    let text = fs::read_to_string(path).expect("a fixture");
    serde_json::from_str(&text).expect("make.py writes it")
}

/// Returns the templates of trl and of the fixtures.
fn sources() -> &'static [String] {
    static SOURCES: OnceLock<Vec<String>> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let own = fs::read_to_string(fixture("split/chat_template.jinja")).expect("a fixture");
        published().templates.into_values().chain([own]).collect()
    })
}

fn special() -> SpecialTokens {
    let [bos, eos] = ["<s>", "</s>"].map(|token| Some(token.to_owned()));
    SpecialTokens { bos, eos, ..SpecialTokens::default() }
}

/// Returns the files of each test folder, by name.
fn folders() -> Vec<Map<String, Value>> {
    let named = json_of(&fixture("templates/folders.json"));
    let mut folders: Vec<Map<String, Value>> = children(&named)
        .into_iter()
        .map(|case| {
            let mut files = case["files"].as_object().cloned().unwrap_or_default();
            files.insert(
                "chat_template.json".to_owned(),
                json!({ "chat_template": case["template"] }),
            );
            files
        })
        .collect();
    for name in FIXTURES {
        let config = json_of(&fixture(name).join("tokenizer_config.json"));
        folders.push(Map::from_iter([("tokenizer_config.json".to_owned(), config)]));
    }
    folders
}
