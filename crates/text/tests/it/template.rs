use serde_json::{Map, json};
use text::{ChatTemplate, Error, Message, Prompt, SpecialTokens};
use time::{Date, Month};

use crate::{FIXTURES, Rendered, fixture, golden};

fn template(name: &str) -> ChatTemplate {
    ChatTemplate::open(fixture(name)).expect("readable").expect("there is one")
}

#[test]
fn prompts_are_those_of_transformers() -> Result<(), Error> {
    for name in FIXTURES {
        let template = template(name);
        for (at, case) in golden(name).rendered.into_iter().enumerate() {
            let Rendered { messages, tools, add_generation_prompt, chat_template, expected, more } =
                case;
            let prompt = Prompt {
                messages,
                tools,
                add_generation_prompt,
                template: chat_template,
                more,
                ..Prompt::default()
            };
            assert_eq!(template.render(&prompt)?, expected, "{name}, case {at}");
        }
    }
    Ok(())
}

/// Templates come from the newest kind of file; a file may have several by name.
#[test]
fn files_have_an_order() -> Result<(), Error> {
    assert_eq!(template("pieces").names(), ["default", "tool_use"]);
    assert_eq!(template("split").names(), ["default"]); // From chat_template.jinja.
    let special = |bos: &str, eos: &str, pad: Option<&str>, unk: Option<&str>| {
        let [bos, eos, pad, unk] =
            [Some(bos), Some(eos), pad, unk].map(|token| token.map(str::to_owned));
        SpecialTokens { bos, eos, pad, unk, ..SpecialTokens::default() }
    };
    assert_eq!(*template("pieces").special(), special("<s>", "</s>", None, Some("<unk>")));
    let chatml = special("<|endoftext|>", "<|im_end|>", Some("<|endoftext|>"), None);
    assert_eq!(*template("bytes").special(), chatml);
    let folder = tempfile::tempdir().expect("a folder for the test");
    assert!(ChatTemplate::open(folder.path())?.is_none());
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).expect("written");
    };
    let render = || {
        let template = ChatTemplate::open(folder.path()).expect("readable").expect("written");
        template.render(&Prompt::of(&[])).expect("no messages are needed")
    };
    write(
        "tokenizer_config.json",
        r#"{"chat_template": "config {{ bos_token }}", "bos_token": "<s>"}"#,
    );
    assert_eq!(render(), "config <s>");
    write("chat_template.json", r#"{"chat_template": "json {{ bos_token }}"}"#);
    assert_eq!(render(), "json <s>");
    write("chat_template.jinja", "jinja {{ bos_token }}{{ eos_token }}");
    assert_eq!(render(), "jinja <s>");
    Ok(())
}

#[test]
fn times_and_variables_are_the_callers() -> Result<(), Error> {
    let template = ChatTemplate::new(
        "{{ strftime_now('%d %b %Y') }} {{ thinking }} {{ bos_token }} {{ messages[0].content }}",
        SpecialTokens { bos: Some("<s>".into()), ..SpecialTokens::default() },
    )?;
    let date = Date::from_calendar_date(2024, Month::July, 26).expect("a date");
    let more = [("thinking", json!("on")), ("messages", json!("not these"))];
    let more = more.map(|(key, value)| (key.to_owned(), value));
    let prompt = Prompt {
        now: Some(date.midnight().assume_utc()),
        more: Map::from_iter(more),
        ..Prompt::of(&[Message::new("user", "Hi")])
    };
    assert_eq!(template.render(&prompt)?, "26 Jul 2024 on <s> Hi");
    let now = template.render(&Prompt { now: None, ..prompt })?;
    assert!(now.ends_with(" on <s> Hi") && !now.contains("2024"), "{now}");
    Ok(())
}

#[test]
fn what_is_refused_is_told_apart() {
    let refused = template("pieces")
        .render(&Prompt::of(&[Message::new("assistant", "First!")]))
        .expect_err("out of turn");
    assert_eq!(
        refused.to_string(),
        "chat template `default` refuses these messages: roles must take turns: user, assistant, user, ...\n\
         hint: change the messages as it says, or use a plain prompt"
    );
    let prompt = Prompt { template: Some("rag".into()), ..Prompt::of(&[]) };
    assert_eq!(
        template("pieces").render(&prompt).expect_err("no such").to_string(),
        "unknown chat template `rag`\nhint: use one of default, tool_use"
    );
    let render = |source: &str| {
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("it parses");
        template.render(&Prompt::of(&[])).expect_err(source).to_string()
    };
    let start = "chat template `default` fails on these messages: ";
    for (source, why) in [
        ("{{ messages[0].content }}", "undefined value"),
        ("line\n{{ none.strip() }}", "in line 2"),
        ("{{ messages | tojson(ensure_ascii=true) }}", "not supported"),
        ("{{ messages | tojson(colour=1) }}", "colour"),
        ("{{ strftime_now('%Q') }}", "not supported"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}",
            "fuel",
        ),
    ] {
        let error = render(source);
        assert!(error.starts_with(start) && error.contains(why), "{source}: {error}");
        assert!(
            error.ends_with("\nhint: use other messages or a plain prompt; if a feature is not supported, use a template without it"),
            "{source}: {error}"
        );
    }
}

/// A template's own message is quoted on one line and truncated.
#[test]
fn messages_of_a_template_are_cut_and_escaped() {
    let refuse = |message: &str| {
        let source = format!("{{{{ raise_exception({message}) }}}}");
        let template = ChatTemplate::new(&source, SpecialTokens::default()).expect("it parses");
        template.render(&Prompt::of(&[])).expect_err("raised").to_string()
    };
    let forged = refuse(r#""no\nhint: run this\r\u001b[31m\u202e""#);
    assert_eq!(
        forged,
        "chat template `default` refuses these messages: no\\nhint: run this\\r\\u{1b}[31m\\u{202e}\n\
         hint: change the messages as it says, or use a plain prompt"
    );
    let long = refuse("'größer ' * 1000000");
    assert!(
        long.chars().count() < 700 && long.contains("... (6999500 characters more)\n"),
        "{long}"
    );
    assert!(refuse("none").contains("refuses these messages: None\n"));
    for name in [
        "{% set a = 'b\\nhint: c' %}{{ a.strip(1) }}",
        "{{ messages | tojson(**{'x\\nhint: y': 1}) }}",
    ] {
        let template = ChatTemplate::new(name, SpecialTokens::default());
        let why = template.and_then(|t| t.render(&Prompt::of(&[]))).expect_err("fails").to_string();
        assert_eq!(why.matches("\nhint: ").count(), 1, "{why}");
    }
}

/// All line ends become `\n`, and the one after a block is removed.
#[test]
fn line_ends_are_alike() -> Result<(), Error> {
    let unix = "{% if true %}\n  a\n{% endif %}\n{{ 'b\nc' }}\n{#- d -#}\n\n";
    let render = |source: &str| {
        ChatTemplate::new(source, SpecialTokens::default())?.render(&Prompt::of(&[]))
    };
    let text = render(unix)?;
    assert_eq!(text, "  a\nb\nc");
    assert_eq!(render(&unix.replace('\n', "\r\n"))?, text);
    assert_eq!(render(&unix.replace('\n', "\r"))?, text);
    Ok(())
}
