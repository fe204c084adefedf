//! Files with wrong contents.

use std::fs;

use serde_json::{Map, Value, json};
use text::{ChatTemplate, Error, SpecialTokens, Tokenizer};

use crate::fuzz::timed;
use crate::{FIXTURES, fixture};

/// Checks that the last line of a message is its only hint, and returns the message.
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
        assert!(hinted(&error).contains("tokenizer.json is not a valid tokenizer: "), "{error}");
    }
}

/// Opens the tokenizer of `bytes` with one part replaced.
fn with(part: &str, value: &Value) -> Result<Tokenizer, Error> {
    let text = fs::read_to_string(fixture("bytes/tokenizer.json")).expect("a fixture");
    let mut json: Value = serde_json::from_str(&text).expect("make.py writes it");
    json[part] = value.clone();
    let file = tempfile::NamedTempFile::new().expect("a file for the test");
    fs::write(file.path(), json.to_string()).expect("written");
    Tokenizer::open(file.path())
}

/// Most of these make the `tokenizers` crate panic, on open or on encoding a text.
#[test]
fn a_damaged_tokenizer_is_refused() {
    let text = fs::read_to_string(fixture("bytes/tokenizer.json")).expect("a fixture");
    let file = tempfile::NamedTempFile::new().expect("a file for the test");
    let (before, decoder) = text.split_once(r#""decoder":{"#).expect("there");
    let damaged = |decoder: &str| format!(r#"{before}"decoder":{{{decoder}"#);
    let semicolon = damaged(&decoder.replacen(r#""trim_offsets":"#, r#""trim_offsets";"#, 1));
    let nested = damaged(&format!(r#""x":{}{},{decoder}"#, "[".repeat(500), "]".repeat(500)));
    for (text, why) in [(semicolon, "expected `:` at line"), (nested, "recursion limit")] {
        fs::write(file.path(), text).expect("written");
        let error = Tokenizer::open(file.path()).expect_err(why);
        assert!(matches!(error, Error::Tokenizer { .. }), "{error}");
        assert!(hinted(&error).contains(why), "{error}");
    }
    let charsmap = |map: &str| json!({ "type": "Precompiled", "precompiled_charsmap": map });
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "[CLS]", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": {},
    });
    let replace = json!({ "type": "Replace", "pattern": { "String": "" }, "content": "x" });
    let replace_all = json!({ "type": "Replace", "pattern": { "Regex": "x*" }, "content": "x" });
    for (part, value, why) in [
        ("normalizer", charsmap("AAAA"), "Cannot parse precompiled_charsmap"),
        ("normalizer", charsmap(""), "Cannot parse precompiled_charsmap"),
        ("normalizer", json!({ "type": "Precompiled" }), "precompiled_charsmap"),
        ("normalizer", replace, "it fails on \"Hello"),
        ("normalizer", replace_all, "it fails on \"Hello"),
        ("post_processor", template, "it fails on \"Hello"),
        ("decoder", json!(7), ""),
        ("pre_tokenizer", json!({ "type": "Nothing" }), ""),
    ] {
        let error = with(part, &value).expect_err(&value.to_string());
        assert!(matches!(error, Error::Tokenizer { .. }), "{value}: {error}");
        assert!(hinted(&error).contains(" is not a valid tokenizer: "), "{value}: {error}");
        assert!(error.to_string().contains(why), "{value}: {error}");
    }
}

/// Stages that replace one letter by many, both for letters of the probe text and for others.
#[test]
fn a_tokenizer_that_multiplies_a_text_is_refused() {
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let chain = |list: &str, stage: Value, stages: usize| json!({ "type": "Sequence", list: vec![stage; stages] });
    let prepend = |len: usize| json!({ "type": "Prepend", "prepend": "x".repeat(len) });
    let regex = |regex: &str| json!({ "type": "Replace", "pattern": { "Regex": regex }, "content": "zzzzzzzzzz" });
    let special = vec![json!({ "SpecialToken": { "id": "x", "type_id": 0 } }); 500];
    let special = json!({
        "type": "TemplateProcessing",
        "single": special,
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "x": { "id": "x", "ids": vec![1; 500], "tokens": vec!["x"; 500] } },
    });
    for (part, value, why) in [
        ("normalizer", chain("normalizers", replace("l", "llllllllll"), 14), "times as many"),
        (
            "normalizer",
            chain("normalizers", replace("日", "日日日日日日日日日日"), 14),
            "times as many",
        ),
        (
            "normalizer",
            chain("normalizers", chain("normalizers", replace("z", "zz"), 40), 2),
            "times as many",
        ),
        ("normalizer", chain("normalizers", regex("[a-z]"), 14), "times as many"),
        ("normalizer", chain("normalizers", json!({ "type": "ByteLevel" }), 100), "times as many"),
        ("normalizer", prepend(50_000_000), "a string of 50000000 bytes, expected at most 256"),
        ("normalizer", chain("normalizers", prepend(200), 1000), "times as many"),
        ("normalizer", chain("normalizers", prepend(1), 5000), "more than 4096 values"),
        ("decoder", chain("decoders", replace("l", "llllllllll"), 14), "times as many"),
        ("decoder", replace("l", &"l".repeat(1_000_000)), "a string of 1000000 bytes"),
        (
            "pre_tokenizer",
            chain(
                "pretokenizers",
                json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }),
                100,
            ),
            "times as many",
        ),
        ("post_processor", chain("processors", special, 1), "times as many"),
        (
            "post_processor",
            json!({
                "type": "TemplateProcessing",
                "single": vec![json!({ "Sequence": { "id": "A", "type_id": 0 } }); 100_000],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
                "special_tokens": {},
            }),
            "more than 4096 values",
        ),
    ] {
        let error = with(part, &value).expect_err(part);
        assert!(matches!(error, Error::Tokenizer { .. }), "{error}");
        assert!(
            hinted(&error).contains(&format!("is not a valid tokenizer: its {part} ")),
            "{error}"
        );
        assert!(error.to_string().contains(why), "{error}");
    }
    for value in [replace(" ", "▁"), chain("normalizers", replace("``", "\""), 30), prepend(8)] {
        with("normalizer", &value).expect("as published ones");
    }
}

/// Tokens and parts of a model with time quadratic in their length.
#[test]
fn a_tokenizer_that_takes_long_is_refused() {
    let added = |content: String| json!([{ "id": 420, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true }]);
    let word = |key: &str, value: Value| json!({ "type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": { "x": 0 }, key: value });
    let unigram = |longest: usize| {
        let pieces: Vec<Value> =
            (1..=longest).map(|len| json!(["a".repeat(len), -(len as f64)])).collect();
        json!({ "type": "Unigram", "unk_id": 0, "vocab": pieces })
    };
    for (part, value, why) in [
        (
            "added_tokens",
            added("ab".repeat(50_000)),
            "a token has 100000 bytes, expected at most 1024",
        ),
        (
            "model",
            word("continuing_subword_prefix", json!("#".repeat(1_000_000))),
            "its model has a string of 1000000 bytes",
        ),
        (
            "model",
            word("max_input_chars_per_word", json!(u64::MAX)),
            "its model reads words of 18446744073709551615 characters",
        ),
        ("model", unigram(300), "its model has a piece of 300 bytes, expected at most 256"),
    ] {
        let error = with(part, &value).expect_err(why);
        assert!(matches!(error, Error::Tokenizer { .. }), "{error}");
        assert!(hinted(&error).contains(why), "{error}");
    }
    with("added_tokens", &added("ab".repeat(500))).expect("long");
    let mut spaces = added("  ".to_owned());
    with("added_tokens", &spaces).expect("as in published files");
    spaces[0]["lstrip"] = true.into();
    let error = with("added_tokens", &spaces).expect_err("quadratic in a text of spaces");
    assert!(hinted(&error).contains("an added token of spaces has lstrip or rstrip"), "{error}");
    timed(move || {
        let tokenizer = with("model", &unigram(256)).expect("as long as it may be");
        tokenizer.encode(&"a".repeat(100_000), false).expect("a long word");
    });
    let folder = tempfile::tempdir().expect("a folder for the test");
    fs::copy(fixture("split/tokenizer.json"), folder.path().join("tokenizer.json"))
        .expect("copied");
    let open = |config: Value| {
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string())
            .expect("written");
        Tokenizer::open(folder.path())
    };
    let error = open(json!({ "bos_token": "ab".repeat(50_000) })).expect_err("a long token");
    assert!(matches!(error, Error::Config { .. }), "{error}");
    assert!(hinted(&error).contains("a token has 100000 bytes, expected at most 1024"), "{error}");
    let tokens = |name: &str, len: usize| {
        (0..100_000).map(|at| format!("{name}{at:len$}")).collect::<Vec<_>>()
    };
    let many: Map<String, Value> = (424..)
        .map(|id: u32| id.to_string())
        .zip(tokens("a", 8).into_iter().map(|content| json!({ "content": content })))
        .collect();
    // Each token is looked up among the others.
    let config = json!({ "extra_special_tokens": tokens("b", 8), "added_tokens_decoder": many });
    assert_eq!(open(config).expect("many tokens").tokens(), 200_424);
    let named: Map<String, Value> =
        tokens("n", 8).into_iter().map(|name| (name.clone(), name.into())).collect();
    assert_eq!(
        open(json!({ "extra_special_tokens": named })).expect("many names").tokens(),
        100_424
    );
    let error = open(json!({ "extra_special_tokens": tokens("b", 50) })).expect_err("more tokens");
    assert!(hinted(&error).contains("its added tokens are too many or too long"), "{error}");
}

/// Python writes these names of numbers, which JSON lacks. Strings keep them.
#[test]
fn names_of_numbers_are_read() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let write =
        |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("written");
    fs::copy(fixture("split/tokenizer.json"), folder.path().join("tokenizer.json"))
        .expect("copied");
    write("config.json", r#"{"model_type": "llama", "limit": [0.0, Infinity, -Infinity, NaN]}"#);
    write(
        "tokenizer_config.json",
        r#"{"model_max_length": Infinity, "bos_token": "<\\\"Infinity", "eos_token": "NaN"}"#,
    );
    let tokenizer = Tokenizer::open(folder.path()).expect("as Python writes it");
    assert!(tokenizer.id("<\\\"Infinity").is_some() && tokenizer.id("NaN").is_some());
    write("tokenizer_config.json", r#"{"model_max_length": Infinite}"#);
    let error = Tokenizer::open(folder.path()).expect_err("no name of a number");
    assert!(matches!(error, Error::Config { .. }), "{error}");
}

#[test]
fn pointers_of_git_lfs_are_named() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17209920\n";
    let write =
        |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("written");
    let named = |error: Error| {
        assert!(matches!(error, Error::Read { .. }), "{error}");
        let why = "it is a git-lfs pointer instead of the file\nhint: fetch it with `git lfs pull`";
        assert!(hinted(&error).contains(why), "{error}");
    };
    write("tokenizer.json", pointer);
    named(Tokenizer::open(folder.path()).expect_err("a pointer"));
    fs::copy(fixture("split/tokenizer.json"), folder.path().join("tokenizer.json"))
        .expect("copied");
    write("tokenizer_config.json", pointer);
    named(Tokenizer::open(folder.path()).expect_err("a pointer"));
    write("tokenizer_config.json", "{}");
    write("chat_template.jinja", pointer);
    named(ChatTemplate::open(folder.path()).expect_err("a pointer"));
}

/// Panics that the probe text on open does not trigger.
#[test]
fn a_panic_at_a_later_text_is_an_error() {
    let replace = json!({ "type": "Replace", "pattern": { "Regex": "(?=q)" }, "content": "x" });
    let tokenizer = with("normalizer", &replace).expect("no q is tried");
    let plain = tokenizer.encode("no such letter", false).expect("encoded");
    let error = tokenizer.encode("quick", false).expect_err("an empty match");
    assert!(matches!(error, Error::Encode(_)), "{error}");
    hinted(&error);
    assert_eq!(tokenizer.encode("no such letter", false).expect("as before"), plain);
}

/// A file with changed bytes gives an error or a tokenizer, and no panic.
#[test]
fn bytes_that_flip_give_an_error_or_a_tokenizer() {
    let file = tempfile::NamedTempFile::new().expect("a file for the test");
    for name in FIXTURES {
        let whole = fs::read(fixture(name).join("tokenizer.json")).expect("a fixture");
        for at in (0..whole.len()).step_by(61) {
            let mut bytes = whole.clone();
            bytes[at] = b"\";0x}]"[at % 6];
            fs::write(file.path(), bytes).expect("written");
            if let Ok(tokenizer) = Tokenizer::open(file.path()) {
                let ids = tokenizer.encode("The quick brown fox", true).unwrap_or_default();
                tokenizer.decode(&ids, false).map_err(|why| hinted(&why)).ok();
            }
        }
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
        assert!(text.starts_with("chat template `default` is invalid: "), "{text}");
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
    // The file is not UTF-8.
    fs::write(&path, b"\xff").expect("written");
    let error = ChatTemplate::open(folder.path()).expect_err("no text");
    assert!(matches!(error, Error::Read { .. }), "{error}");
    assert!(hinted(&error).ends_with("from the source of the model; it must be UTF-8 text"));
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
