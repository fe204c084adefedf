//! Random changes of values, files and templates.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};

use crate::fuzz::PIECES;

/// Returns a source with one piece changed, which may be a tag.
pub(crate) fn mutated(
    source: &str,
    other: &str,
    cut: usize,
    from: u32,
    len: u32,
    byte: u8,
) -> String {
    let bounds = |source: &str| {
        let edges = ["{%", "{{", "{#", " ", "(", ")", "'", "\n"];
        let edges = edges.iter().flat_map(|edge| source.match_indices(edge).map(|(at, _)| at));
        let mut bounds: Vec<usize> = edges.chain([0, source.len()]).collect();
        bounds.sort_unstable();
        bounds
    };
    let piece = |source: &str| {
        let bounds = bounds(source);
        let start = from as usize % bounds.len();
        let end = (start + 1 + len as usize % 12).min(bounds.len() - 1);
        bounds[start]..bounds[end]
    };
    let at = piece(source);
    match cut {
        0 => {
            let mut bytes = source.as_bytes().to_vec();
            if let Some(old) = bytes.get_mut(at.start + len as usize % 7) {
                *old ^= byte;
            }
            String::from_utf8_lossy(&bytes).into_owned()
        }
        1 => source[..at.start].to_owned() + &source[at.end..],
        2 => source[..at.end].to_owned() + &source[at.start..],
        3 => source[..at.start].to_owned() + &other[piece(other)] + &source[at.end..],
        4 => source[..at.end].to_owned() + &other[piece(other)] + &source[at.end..],
        _ => {
            source[..at.start].to_owned()
                + PIECES[byte as usize % PIECES.len()]
                + &source[at.start..]
        }
    }
}

/// Words that templates and tokenizers use.
const WORDS: [&str; 40] = [
    "",
    "user",
    "assistant",
    "system",
    "tool",
    "role",
    "content",
    "text",
    "type",
    "image",
    "function",
    "name",
    "arguments",
    "tool_calls",
    "parameters",
    "properties",
    "<think>\nhm\n</think>\n\nso",
    "{{ x }}{% generation %}",
    "\u{100000}\u{f0000}",
    "<|begin|>",
    "<s>",
    "\0",
    "é\u{301}",
    "🦀",
    "▁",
    "a\nb\r\n",
    "\"",
    "%s %1000000d",
    "9999999999999999999999",
    "bos_token",
    "extra_special_tokens",
    "added_tokens_decoder",
    "chat_template",
    "(a+)+$",
    "(?=x)*",
    "[",
    "\\p{L}+|\\s",
    "(\\w|\\s)*\\1",
    ".*",
    "x{1000}{1000}",
];

fn word() -> impl Strategy<Value = String> {
    prop_oneof![select(&WORDS[..]).prop_map(str::to_owned), "\\PC{0,8}"]
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        select(vec![0, 1, -1, 2, i64::MAX, i64::MIN, 1 << 31, 1 << 32, 100_000])
            .prop_map(Value::from),
        select(vec![u64::MAX, u64::from(u32::MAX), 419, 424]).prop_map(Value::from),
        select(vec![0.5, -0.0, 1e308, 1e-308, 1.5]).prop_map(Value::from),
        word().prop_map(Value::from),
    ]
}

/// A value of any shape.
pub(crate) fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..5).prop_map(Value::from),
            vec((word(), inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Alternating messages, some with contents or further fields of any shape; or a value that is not a list of messages.
pub(crate) fn messages() -> impl Strategy<Value = Value> {
    let content = prop_oneof![6 => word().prop_map(Value::from), 2 => value()];
    let more = vec((word(), value()), 0..3);
    let message = (0..12usize, word(), content, more).prop_map(|(role, other, content, more)| {
        let role = ["system", "tool", other.as_str()].get(role).map(|role| (*role).to_owned());
        (role, content, more)
    });
    let turns = vec(message, 0..6).prop_map(|turns| {
        let message = |(at, (role, content, more)): (usize, (Option<String>, Value, Vec<_>))| {
            let role = role.unwrap_or_else(|| ["user", "assistant"][at % 2].to_owned());
            let pairs = [("role".to_owned(), Value::from(role)), ("content".to_owned(), content)];
            Value::Object(more.into_iter().chain(pairs).collect::<Map<_, _>>())
        };
        turns.into_iter().enumerate().map(message).collect()
    });
    prop_oneof![8 => turns, 1 => value()]
}

/// An edit of a value: the index of the child at each level, the kind of change, and a new value.
#[derive(Debug, Clone)]
pub(crate) struct Edit {
    path: Vec<u16>,
    what: usize,
    new: Value,
}

pub(crate) fn edit() -> impl Strategy<Value = Edit> {
    let new = prop_oneof![8 => scalar(), 2 => value(), 2 => select(all_parts())];
    (vec(any::<u16>(), 1..8), 0usize..8, new).prop_map(|(path, what, new)| Edit { path, what, new })
}

impl Edit {
    pub(crate) fn change(&self, value: &mut Value) {
        self.change_at(value, &self.path);
    }

    fn change_at(&self, value: &mut Value, path: &[u16]) {
        let Some((step, rest)) = path.split_first() else { return self.change_here(value) };
        let step = usize::from(*step);
        match value {
            Value::Array(items) if !items.is_empty() => {
                let at = step % items.len();
                self.change_at(&mut items[at], rest);
            }
            Value::Object(pairs) if !pairs.is_empty() => {
                let at = step % pairs.len();
                pairs
                    .values_mut()
                    .nth(at)
                    .into_iter()
                    .for_each(|value| self.change_at(value, rest));
            }
            _ => self.change_here(value),
        }
    }

    /// Changes a value. Most changes keep its type, so that more of a file is read.
    fn change_here(&self, value: &mut Value) {
        let new = self.new.clone();
        match (self.what, &mut *value) {
            (0, value) => *value = new,
            (1, Value::Array(items)) => items.clear(),
            (2, Value::Array(items)) if items.len() < 500 => {
                *items = vec![items.clone(); 100].concat();
            }
            (3, Value::Array(items)) => items.push(new),
            (4, Value::Array(items)) => items.extend_from_within(..items.len().min(500)),
            (_, Value::Array(items)) => items.reverse(),
            (1, Value::Object(pairs)) => pairs.clear(),
            (2, Value::Object(pairs)) => drop(pairs.insert("type".to_owned(), new)),
            (3, Value::Object(pairs)) => pairs.retain(|key, _| key.len() % 2 == 0),
            (4, Value::Object(pairs)) => {
                let pair = pairs.iter().next().map(|(_, value)| value.clone());
                pairs.extend(pair.map(|pair| (new.to_string(), pair)));
            }
            (1, Value::String(text)) if text.len() < 5000 => *text = text.repeat(300),
            (2, Value::String(text)) => text.clear(),
            (3, Value::String(text)) => text.push_str(new.as_str().unwrap_or("▁")),
            (_, Value::String(text)) => *text = new.as_str().unwrap_or("e").to_owned(),
            (1, Value::Number(number)) => *value = Value::from(number.to_string()),
            (2, Value::Number(number)) => {
                *value = Value::from(number.as_u64().map_or(0, |n| n + 1))
            }
            (_, Value::Number(_)) => *value = if new.is_number() { new } else { json!(u32::MAX) },
            (_, Value::Bool(is)) => *is = !*is,
            (_, Value::Null) => *value = new,
            _ => {}
        }
    }
}

/// A part of a `tokenizer.json` with its name: one of all kinds, or a sequence of several.
pub(crate) fn part() -> impl Strategy<Value = (&'static str, Value)> {
    (0..PARTS, vec(any::<usize>(), 1..5)).prop_map(|(part, at)| {
        let (name, list, all) = parts().swap_remove(part);
        let mut chosen: Vec<Value> = at.iter().map(|at| all[at % all.len()].clone()).collect();
        let value = match chosen.len() {
            _ if list.is_empty() => chosen.swap_remove(0),
            1 => chosen.swap_remove(0),
            _ => json!({ "type": "Sequence", list: chosen }),
        };
        (name, value)
    })
}

fn all_parts() -> Vec<Value> {
    parts().into_iter().flat_map(|(_, _, all)| all).collect()
}

const PARTS: usize = 6;

/// Returns for each part its name, the name of its list, and examples.
fn parts() -> Vec<(&'static str, &'static str, Vec<Value>)> {
    let string = json!({ "String": "o" });
    let regex = json!({ "Regex": "o?|(?=u)" });
    let vocab = json!({ "[UNK]": 0, "the": 1, "##e": 2, "T": 3, "h": 4, "##o": 5 });
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true });
    let replace = json!({ "type": "Replace", "pattern": string, "content": "oo" });
    let normalizers = vec![
        json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true }),
        json!({ "type": "Strip", "strip_left": true, "strip_right": true }),
        json!({ "type": "StripAccents" }),
        json!({ "type": "NFKD" }),
        json!({ "type": "NFC" }),
        json!({ "type": "Nmt" }),
        json!({ "type": "Lowercase" }),
        json!({ "type": "Prepend", "prepend": "▁" }),
        json!({ "type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAA=" }),
        json!({ "type": "Replace", "pattern": regex, "content": "" }),
        byte_level.clone(),
        replace.clone(),
    ];
    let pre_tokenizers = vec![
        json!({ "type": "BertPreTokenizer" }),
        json!({ "type": "Whitespace" }),
        json!({ "type": "WhitespaceSplit" }),
        json!({ "type": "Punctuation", "behavior": "MergedWithNext" }),
        json!({ "type": "Digits", "individual_digits": true }),
        json!({ "type": "Split", "pattern": regex, "behavior": "Removed", "invert": true }),
        json!({ "type": "Split", "pattern": string, "behavior": "MergedWithPrevious", "invert": false }),
        json!({ "type": "CharDelimiterSplit", "delimiter": "o" }),
        json!({ "type": "UnicodeScripts" }),
        json!({ "type": "FixedLength", "length": 3 }),
        byte_level.clone(),
        metaspace.clone(),
    ];
    let post_processors = vec![
        json!({ "type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1] }),
        json!({ "type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": true, "add_prefix_space": false }),
        json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "x", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 1 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "x": { "id": "x", "ids": [u32::MAX, 0], "tokens": ["x", "y"] } },
        }),
        byte_level.clone(),
    ];
    let decoders = vec![
        json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }),
        json!({ "type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true }),
        json!({ "type": "BPEDecoder", "suffix": "</w>" }),
        json!({ "type": "Strip", "content": "e", "start": 1, "stop": 3 }),
        json!({ "type": "Fuse" }),
        json!({ "type": "ByteFallback" }),
        byte_level,
        metaspace,
        replace,
    ];
    let models = vec![
        json!({ "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab }),
        json!({ "type": "WordLevel", "unk_token": "[UNK]", "vocab": vocab }),
        json!({ "type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["o", -1.5], ["▁th", -1e308]], "byte_fallback": false }),
        json!({ "type": "Unigram", "unk_id": null, "vocab": [["o", -1.5], ["q", 2.5]], "byte_fallback": true }),
        json!({ "type": "BPE", "unk_token": "x", "byte_fallback": true, "dropout": 0.5, "vocab": { "T": 0, "h": 1, "Th": 2 }, "merges": [["T", "h"]] }),
        json!({ "type": "BPE", "unk_token": "T", "fuse_unk": true, "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "vocab": { "T": 0, "##h": 1, "Th": 2 }, "merges": ["T ##h"] }),
    ];
    let added = json!({ "id": 7, "content": "o", "single_word": true, "lstrip": true, "rstrip": true, "normalized": true, "special": true });
    vec![
        ("normalizer", "normalizers", normalizers),
        ("pre_tokenizer", "pretokenizers", pre_tokenizers),
        ("post_processor", "processors", post_processors),
        ("decoder", "decoders", decoders),
        ("model", "", models),
        ("added_tokens", "", vec![json!([added]), json!([])]),
    ]
}
