use std::fs;

use serde::Deserialize;
use serde_json::{Map, Value};
use text::{ChatTemplate, Error, Prompt, Tokenizer};

use crate::{FIXTURES, fixture, golden, tokenizer};

#[test]
fn ids_and_texts_are_those_of_python() -> Result<(), Error> {
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        for case in golden(name).encoded {
            let text = &case.text;
            assert_eq!(tokenizer.encode(text, false)?, case.ids, "{name}: {text:?}");
            assert_eq!(tokenizer.encode(text, true)?, case.special_ids, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&case.special_ids, false)?, case.decoded, "{name}");
            assert_eq!(tokenizer.decode(&case.special_ids, true)?, case.decoded_special, "{name}");
        }
    }
    Ok(())
}

/// The tokenizer file of `bytes` truncates texts to four tokens and pads them to eight.
#[test]
fn nothing_is_cut_or_padded() -> Result<(), Error> {
    let tokenizer = Tokenizer::open(fixture("bytes/tokenizer.json"))?;
    assert!(tokenizer.encode("one two three four five six", true)?.len() > 8);
    assert!(tokenizer.encode("", true)?.is_empty());
    Ok(())
}

#[test]
fn tokens_have_names() {
    let split = tokenizer("split");
    let id = split.id("<|head|>").expect("a special token");
    assert_eq!(split.token(id).as_deref(), Some("<|head|>"));
    assert_eq!((split.id("<|nothing|>"), split.token(9999)), (None, None));
    let special = split.special();
    assert_eq!(special.get("<|head|>"), Some(&id));
    assert!(special.len() == 3 && !special.contains_key("<think>"), "{special:?}");
}

/// Ids of a padded vocabulary without a token, at any position.
#[test]
fn ids_of_no_token_are_replacement_characters() -> Result<(), Error> {
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        let [no, none] = [tokenizer.tokens() as u32, u32::MAX];
        let dog = tokenizer.encode("dog", false)?;
        for special in [false, true] {
            let decode = |ids: &[&[u32]]| tokenizer.decode(&ids.concat(), special);
            assert_eq!(decode(&[&[no]])?, "\u{FFFD}", "{name}");
            assert_eq!(decode(&[&dog, &[no, none]])?, "dog\u{FFFD}\u{FFFD}", "{name}");
            let before = decode(&[&[no], &dog])?;
            assert_eq!(before.replace(' ', ""), "\u{FFFD}dog", "{name}");
        }
    }
    Ok(())
}

/// The model's vocabulary may be padded, and the tokenizer may have added tokens that the model lacks.
#[test]
fn a_tokenizer_fits_a_model_or_not() -> Result<(), Error> {
    let fits = |vocab| tokenizer("split").for_vocab(vocab);
    assert_eq!(tokenizer("split").tokens(), 424); // 420, and 4 that were added.
    for (vocab, ids, missing) in [(424, 424, 0), (420, 420, 0), (512, 424, 88), (4096, 424, 3672)] {
        let tokenizer = fits(vocab)?;
        assert_eq!((tokenizer.ids(), tokenizer.missing().len()), (ids, missing), "{vocab}");
        assert!(tokenizer.has(ids as u32 - 1) && !tokenizer.has(424));
    }
    assert!(tokenizer("split").missing().is_empty());
    for vocab in [0, 419] {
        let error = fits(vocab).expect_err("of another model").to_string();
        let message = format!(
            "the tokenizer has 424 tokens with ids up to 419, but the model has a vocabulary of {vocab}\n\
             hint: use the tokenizer.json from the folder of the weights"
        );
        assert_eq!(error, message);
    }
    let small = fits(422)?;
    assert_eq!(small.encode("<|begin|>a", false)?.len(), 2);
    let error = small.encode("a<think>", false).expect_err("token 423");
    assert_eq!(
        error.to_string(),
        "the text has token 423, \"<think>\", which is outside the model's vocabulary of 422\n\
         hint: remove it from the text, or use the tokenizer.json from the folder of the weights"
    );
    Ok(())
}

/// A case of `folders.json`.
#[derive(Deserialize)]
struct Named {
    tokenizer: String,
    files: Map<String, Value>,
    template: String,
    text: String,
    named: String,
    ids: Vec<u32>,
    special_ids: Vec<u32>,
    shown: String,
}

/// Tokens from special_tokens_map.json, added_tokens.json, and all keys of tokenizer_config.json; settings of
/// transformers' tokenizer class.
#[test]
fn tokens_of_other_files_are_those_of_transformers() -> Result<(), Error> {
    let text = fs::read_to_string(fixture("templates/folders.json")).expect("a fixture");
    let cases: Vec<Named> = serde_json::from_str(&text).expect("make_templates.py writes it");
    for (at, case) in cases.into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder for the test");
        let to = |name: &str| folder.path().join(name);
        let file = fixture(&format!("{}/tokenizer.json", case.tokenizer));
        fs::copy(file, to("tokenizer.json")).expect("copied");
        fs::write(to("chat_template.jinja"), &case.template).expect("written");
        for (name, file) in &case.files {
            fs::write(to(name), file.to_string()).expect("written");
        }
        let template = ChatTemplate::open(folder.path())?.expect("written");
        assert_eq!(template.render(&Prompt::of(&[]))?, case.named, "case {at}");
        let tokenizer = Tokenizer::open(folder.path())?;
        assert_eq!(tokenizer.encode(&case.text, false)?, case.ids, "case {at}");
        assert_eq!(tokenizer.encode(&case.text, true)?, case.special_ids, "case {at}");
        assert_eq!(tokenizer.decode(&case.ids, false)?, case.shown, "case {at}");
    }
    Ok(())
}
