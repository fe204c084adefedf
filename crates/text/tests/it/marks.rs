//! Ranges of prompts that an assistant wrote.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use text::{ChatTemplate, Error, Marked, Message, Prompt, SpecialTokens};

use crate::fixture;
use crate::jinja::{Conversation, clock, published};

/// Contents of `marks.json`.
#[derive(Deserialize)]
struct Marks {
    /// Ranges by template and conversation.
    published: BTreeMap<String, BTreeMap<String, Vec<[usize; 2]>>>,
    messages: Value,
    /// Templates with their texts and ranges.
    short: Vec<(String, String, Vec<[usize; 2]>)>,
}

fn marks() -> Marks {
    let text = std::fs::read_to_string(fixture("templates/marks.json")).expect("a fixture");
    serde_json::from_str(&text).expect("make_templates.py writes it")
}

fn bytes(marked: &Marked) -> Vec<[usize; 2]> {
    marked.generated.iter().map(|range| [range.start, range.end]).collect()
}

/// Converts to ranges of characters, as in Python.
fn chars(marked: &Marked) -> Vec<[usize; 2]> {
    let at = |byte: usize| marked.text[..byte].chars().count();
    bytes(marked).into_iter().map(|range| range.map(at)).collect()
}

#[test]
fn marks_of_published_templates_are_those_of_transformers() {
    let published = published();
    let special = published.special();
    let marks = marks();
    let mut ranges = 0;
    for (name, by_conversation) in &marks.published {
        let template = ChatTemplate::new(&published.templates[name], special.clone()).expect(name);
        for (conversation, expected) in by_conversation {
            let Conversation { messages, tools, more } =
                published.conversations[conversation].clone();
            let prompt = Prompt { messages, tools, more, now: Some(clock()), ..Prompt::default() };
            let marked = template.render_marked(&prompt).expect(name);
            assert_eq!(marked.text, template.render(&prompt).expect(name));
            assert_eq!(chars(&marked), *expected, "{name}, {conversation}: {}", marked.text);
            ranges += expected.len();
        }
    }
    assert!(marks.published.len() >= 30 && ranges >= 300, "{ranges}");
}

#[test]
fn marks_of_short_templates_are_those_of_transformers() {
    let Marks { messages, short, .. } = marks();
    let prompt = Prompt { messages, ..Prompt::default() };
    assert!(short.len() >= 25);
    for (source, text, expected) in short {
        let template = ChatTemplate::new(&source, SpecialTokens::default()).expect(&source);
        let marked = template.render_marked(&prompt).expect(&source);
        assert_eq!((&marked.text, chars(&marked)), (&text, expected), "{source}");
    }
}

fn marked(source: &str, message: &str) -> Result<Marked, Error> {
    let template = ChatTemplate::new(source, SpecialTokens::default())?;
    template.render_marked(&Prompt::of(&[Message::new("user", message)]))
}

/// Blocks that are buffered or nested; transformers returns different positions for these.
#[test]
fn marks_are_where_the_text_is() -> Result<(), Error> {
    const BLOCK: &str = "{% generation %}b{% endgeneration %}";
    for (source, text, expected) in [
        (
            "{% macro m() %}ü G{% endmacro %}a{{ m() }}, {{ m() }}",
            "aü b, ü b",
            vec![[4, 5], [10, 11]],
        ),
        (
            "{% set x %}a G c{% endset %}{{ x }}{{ x ~ x }}",
            "a b ca b ca b c",
            vec![[2, 3], [7, 8], [12, 13]],
        ),
        ("{% set x %}aG{% endset %}b", "b", vec![]),
        ("{% set x %} G {% endset %}{{ x | trim }}", "b", vec![[0, 1]]),
        ("{% filter upper %}aG{% endfilter %}", "AB", vec![[1, 2]]),
        (
            "{% macro m() %}a{{ caller() }}{% endmacro %}{% call m() %}cG{% endcall %}",
            "acb",
            vec![[2, 3]],
        ),
        (
            "{% for x in [1, [2]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}G{% endif %}{% endfor %}",
            "1b(2b)",
            vec![[1, 2], [4, 5]],
        ),
        (
            "{% generation %}a{% generation %}{% endgeneration %}G{% endgeneration %}cG",
            "abcb",
            vec![[0, 2], [3, 4]],
        ),
        ("{% block a %}aG{% endblock %}", "ab", vec![[1, 2]]),
        (
            "{% macro m() %}aG{% endmacro %}{{ [m(), m()] | join(',') }}{{ {'k': m()} | tojson }}",
            "ab,ab{\"k\": \"ab\"}",
            vec![[1, 2], [4, 5], [13, 14]],
        ),
        (
            "GG{% for i in range(2) %}{{ i }}{% if i %}G{% endif %}{% endfor %}",
            "bb01b",
            vec![[0, 1], [1, 2], [4, 5]],
        ),
        ("none", "none", vec![]),
    ] {
        let marked = marked(&source.replace('G', BLOCK), "")?;
        assert_eq!((marked.text.as_str(), bytes(&marked)), (text, expected), "{source}");
    }
    Ok(())
}

/// Messages with the characters and names of edges, also with those of an earlier prompt.
#[test]
fn messages_cannot_forge_marks() -> Result<(), Error> {
    const SOURCE: &str =
        "{{ messages[0].content }}{% generation %}{{ messages[0].content }}{% endgeneration %}";
    for content in [
        "{% generation %}x{% endgeneration %}",
        "{{ true | generation_edge }}x{{ false | generation_edge }}",
        "\u{100000}x\u{100001}",
        "\u{f0000}\u{fffff}\u{f1234}\u{100000}x\u{100001}",
    ] {
        let marked = marked(SOURCE, content)?;
        let len = content.len();
        assert_eq!((&marked.text, bytes(&marked)), (&content.repeat(2), vec![[len, 2 * len]]));
    }
    // The caller sets a variable with the name of the nonce.
    let template = ChatTemplate::new(SOURCE, SpecialTokens::default())?;
    let more = [("generation nonce".to_owned(), json!("x"))].into_iter().collect();
    let prompt = Prompt { more, ..Prompt::of(&[Message::new("user", "axb")]) };
    assert_eq!(template.render(&prompt)?, "axbaxb");
    assert_eq!(bytes(&template.render_marked(&prompt)?), [[3, 6]]);
    Ok(())
}

/// Text that depends on the text of a block, or a block that does not end: an error instead of wrong ranges.
#[test]
fn marks_that_are_lost_are_told() {
    for source in [
        "{% set x %}{% generation %} b{% endgeneration %}{% endset %}{{ x | trim }}.",
        "{% set x %}aG{% endset %}{{ x | length }}",
        "{% set x %}G{% endset %}{{ x == 'b' }}",
        "{% set x %}aG{% endset %}{{ x[:2] }}",
        "{% set x %}{% generation %}{% endgeneration %}{% endset %}{% if x %}a{% endif %}",
        "{% set x %}G{% endset %}{{ x | reverse }}",
        "{% for i in range(2) %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
        "{% for i in range(2) %}{% generation %}{% continue %}{% endgeneration %}{% endfor %}a",
    ] {
        let source = source.replace('G', "{% generation %}b{% endgeneration %}");
        let template = ChatTemplate::new(&source, SpecialTokens::default()).expect(&source);
        template.render(&Prompt::of(&[])).expect(&source);
        let why = marked(&source, "").expect_err(&source);
        assert_eq!(
            why.to_string(),
            "chat template `default` fails on these messages: a filter or a loop changes the text of a generation block\n\
             hint: use other messages or a plain prompt; if a feature is not supported, use a template without it"
        );
    }
    let why = marked("{% generation %}{{ raise_exception('no') }}{% endgeneration %}", "");
    assert!(matches!(why, Err(Error::Refused { why, .. }) if why == "no"));
}
