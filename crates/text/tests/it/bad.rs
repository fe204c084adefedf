//! Files that are not what their names say.

use std::fs;

use text::{ChatTemplate, Error, SpecialTokens, Tokenizer};

use crate::fixture;

/// A message, of which the last line is the only hint.
fn hinted(error: &Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("hint: ") && text.matches("\nhint: ").count() == 1, "{text}");
    text
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let error = Tokenizer::open(folder.path()).expect_err("nothing there");
    assert!(
        matches!(&error, Error::Read { path, .. } if path.ends_with("tokenizer.json")),
        "{error}"
    );
    hinted(&error);
    let whole = fs::read(fixture("bytes/tokenizer.json")).expect("a fixture");
    for bytes in [&whole[..whole.len() / 2], b"{}", b"[1]", b"", b"\xff\xff"] {
        fs::write(folder.path().join("tokenizer.json"), bytes).expect("written");
        let error = Tokenizer::open(folder.path()).expect_err("cut");
        assert!(matches!(error, Error::Tokenizer { .. }), "{error}");
        assert!(hinted(&error).contains("tokenizer.json is no tokenizer: "), "{error}");
    }
}

#[test]
fn a_broken_template_is_refused_by_its_line() {
    for (source, line) in [
        ("{% for m in messages %}", "in line 1"),
        ("a\n{{ m.content", "in line 2"),
        ("\n\n{% nothing %}", "in line 3"),
        ("{{ 'x' | }}", "in line 1"),
    ] {
        let error = ChatTemplate::new(source, SpecialTokens::default()).expect_err(source);
        let text = hinted(&error);
        assert!(matches!(error, Error::Template { .. }), "{text}");
        assert!(text.starts_with("chat template `default` is broken: "), "{text}");
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn a_config_of_another_form_is_refused() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let path = folder.path().join("tokenizer_config.json");
    for text in [
        "{",
        "[]",
        r#"{"chat_template": 7}"#,
        r#"{"chat_template": [{"name": "default"}]}"#,
        r#"{"bos_token": {"text": "<s>"}}"#,
    ] {
        fs::write(&path, text).expect("written");
        let error = ChatTemplate::open(folder.path()).expect_err(text);
        assert!(matches!(&error, Error::Config { path: of, .. } if *of == path), "{text}: {error}");
        hinted(&error);
    }
    fs::write(&path, r#"{"chat_template": null, "bos_token": null, "model_max_length": 1e30}"#)
        .expect("written");
    assert!(ChatTemplate::open(folder.path()).expect("nothing wrong").is_none());
    // Whose file has no bytes of a text at all.
    fs::write(&path, b"\xff").expect("written");
    let error = ChatTemplate::open(folder.path()).expect_err("no text");
    assert!(matches!(error, Error::Read { .. }), "{error}");
    assert!(
        hinted(&error)
            .ends_with("hint: it must be text in UTF-8; take it from where the model is from")
    );
}

#[test]
fn a_link_to_nothing_is_no_absent_file() {
    for name in ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"] {
        let folder = tempfile::tempdir().expect("a folder for the test");
        assert!(ChatTemplate::open(folder.path()).expect("nothing there").is_none());
        let link = folder.path().join(name);
        std::os::unix::fs::symlink("gone", &link).expect("linked");
        let error = ChatTemplate::open(folder.path()).expect_err(name);
        assert!(matches!(&error, Error::Read { path, .. } if *path == link), "{error}");
        hinted(&error);
    }
}
