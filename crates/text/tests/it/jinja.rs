//! Published templates and single expressions, compared with Python.

use std::collections::BTreeMap;
use std::fs::File;

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::{Map, Value};
use text::{ChatTemplate, Error, Prompt, SpecialTokens};
use time::{Date, Month, OffsetDateTime};

use crate::fixture;

/// Contents of `trl.json.gz`.
#[derive(Deserialize)]
pub(crate) struct Published {
    special: BTreeMap<String, String>,
    pub(crate) conversations: BTreeMap<String, Conversation>,
    pub(crate) templates: BTreeMap<String, String>,
    prompts: BTreeMap<String, Vec<Expected>>,
}

#[derive(Deserialize, Clone)]
pub(crate) struct Conversation {
    pub(crate) messages: Value,
    pub(crate) tools: Option<Value>,
    #[serde(flatten)]
    pub(crate) more: Map<String, Value>,
}

/// A prompt, or the message that the template raised, or neither for any other error.
#[derive(Deserialize)]
struct Expected {
    conversation: String,
    add_generation_prompt: bool,
    prompt: Option<String>,
    raised: Option<String>,
}

/// Contents of `jinja.json`.
#[derive(Deserialize)]
struct Expressions {
    variables: Map<String, Value>,
    cases: Vec<(String, Option<String>)>,
}

impl Published {
    pub(crate) fn special(&self) -> SpecialTokens {
        let token = |name: &str| self.special.get(name).cloned();
        SpecialTokens {
            bos: token("bos_token"),
            eos: token("eos_token"),
            pad: token("pad_token"),
            unk: token("unk_token"),
            ..SpecialTokens::default()
        }
    }
}

pub(crate) fn published() -> Published {
    let file = File::open(fixture("templates/trl.json.gz")).expect("a fixture");
    serde_json::from_reader(GzDecoder::new(file)).expect("make_templates.py writes it")
}

/// Returns the time at which `make_templates.py` renders.
pub(crate) fn clock() -> OffsetDateTime {
    let date = Date::from_calendar_date(2026, Month::March, 7).expect("a date");
    date.midnight().assume_utc()
}

#[test]
fn published_templates_render_as_in_transformers() {
    let published = published();
    let special = published.special();
    let mut differ = Vec::new();
    for (name, source) in &published.templates {
        let template = ChatTemplate::new(source, special.clone()).expect(name);
        for case in &published.prompts[name] {
            let Conversation { messages, tools, more } =
                published.conversations[&case.conversation].clone();
            let prompt = Prompt {
                messages,
                tools,
                more,
                add_generation_prompt: case.add_generation_prompt,
                now: Some(clock()),
                ..Prompt::default()
            };
            let same = match (template.render(&prompt), &case.prompt, &case.raised) {
                (Ok(prompt), Some(expected), None) => prompt == *expected,
                (Err(Error::Refused { why, .. }), None, Some(raised)) => why == *raised,
                (Err(Error::Render { .. }), None, None) => true,
                _ => false,
            };
            if !same {
                let got = template.render(&prompt);
                differ.push(format!("{name}, {}: {got:?}\n  {:?}", case.conversation, case.prompt));
            }
        }
    }
    assert!(differ.is_empty(), "{} differ:\n{}", differ.len(), differ.join("\n"));
}

#[test]
fn expressions_have_the_values_of_jinja() {
    let text = std::fs::read_to_string(fixture("templates/jinja.json")).expect("a fixture");
    let Expressions { variables, cases } =
        serde_json::from_str(&text).expect("make_templates.py writes it");
    let prompt = Prompt { more: variables, ..Prompt::default() };
    let mut differ = Vec::new();
    for (source, expected) in &cases {
        let template = ChatTemplate::new(source, SpecialTokens::default());
        let got = template.and_then(|template| template.render(&prompt));
        if got.as_ref().ok() != expected.as_ref() {
            let got = got.map_err(|why| why.to_string());
            differ.push(format!("{source}: expected {expected:?}, got {got:?}"));
        }
    }
    assert!(
        differ.is_empty(),
        "{} of {} differ:\n{}",
        differ.len(),
        cases.len(),
        differ.join("\n")
    );
}
