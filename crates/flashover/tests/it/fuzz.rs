//! Changes parts of model files, adapters and examples at random. The result must be an answer or an error, without
//! panics, hangs or unbounded memory. `cargo xtask fuzz` runs more cases.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use flashover::{EngineOptions, ModelFolder};

use flashover::device::ArchProfile;

use flashover::memory::Workload;

use flashover::train::{Dataset, Training};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseError, TestRunner};
use serde_json::{Value, json};

use crate::{demo, fixture};

/// Changes to a JSON text: first to its values, then to its bytes.
#[derive(Debug, Clone)]
struct Changes {
    values: Vec<(Index, Change)>,
    bytes: Vec<(Index, u8)>,
    /// Position where the text is cut off.
    end: Option<Index>,
}

#[derive(Debug, Clone)]
enum Change {
    Replace(Value),
    Remove,
    /// Replaces the value by another value of the same file.
    Copy(Index),
    /// Nests the value in this number of lists.
    Nest(usize),
    /// Makes a list this number of times as long, up to a megabyte.
    Repeat(usize),
}

fn changes() -> impl Strategy<Value = Changes> {
    let odd = prop::sample::select(vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(3),
        json!(64),
        json!(65536),
        json!(2147483648u64),
        json!(4294967295u64),
        json!(9223372036854775807u64),
        json!(18446744073709551615u64),
        json!(0.5),
        json!(-0.0),
        json!(1e-320),
        json!(1e308),
        json!(""),
        json!("llama"),
        json!("../../x"),
        json!("\u{1F980}\n\0"),
        json!("x".repeat(100_000)),
        json!([]),
        json!({}),
    ]);
    let change = prop_oneof![
        6 => odd.prop_map(Change::Replace),
        2 => Just(Change::Remove),
        2 => any::<Index>().prop_map(Change::Copy),
        1 => prop::sample::select(vec![1, 2, 100, 1000]).prop_map(Change::Nest),
        1 => prop::sample::select(vec![2, 100, 10_000]).prop_map(Change::Repeat),
    ];
    let values = prop::collection::vec((any::<Index>(), change), 0..4);
    let bytes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..3);
    let bytes = prop_oneof![3 => Just(Vec::new()), 1 => bytes];
    let end = prop::option::weighted(0.05, any::<Index>());
    (values, bytes, end).prop_map(|(values, bytes, end)| Changes { values, bytes, end })
}

/// Collects the JSON pointers of a value and all values in it.
fn pointers(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.to_owned());
    let mut below = |name: &str, value: &Value| {
        let name = name.replace('~', "~0").replace('/', "~1");
        pointers(value, &format!("{at}/{name}"), all);
    };
    match value {
        Value::Array(list) => (0..).zip(list).for_each(|(i, own)| below(&i.to_string(), own)),
        Value::Object(fields) => fields.iter().for_each(|(name, own)| below(name, own)),
        _ => {}
    }
}

impl Changes {
    fn apply(&self, text: &str) -> Vec<u8> {
        let mut value: Value = serde_json::from_str(text).expect("a fixture");
        for (at, change) in &self.values {
            let mut all = Vec::new();
            pointers(&value, "", &mut all);
            let pointer = &all[at.index(all.len())];
            let here = value.pointer(pointer).expect("listed").clone();
            let new = match change {
                Change::Replace(new) => new.clone(),
                Change::Copy(from) => {
                    value.pointer(&all[from.index(all.len())]).expect("listed").clone()
                }
                Change::Nest(depth) => (0..*depth).fold(here, |inner, _| json!([inner])),
                Change::Repeat(times) if times * here.to_string().len() > 1 << 20 => here,
                Change::Repeat(times) => match here {
                    Value::Array(list) if list.len() < 1000 => vec![list; *times].concat().into(),
                    other => json!(vec![other; *times]),
                },
                Change::Remove => {
                    let (parent, name) = pointer.rsplit_once('/').unwrap_or_default();
                    if let Some(Value::Object(fields)) = value.pointer_mut(parent) {
                        fields.remove(name);
                    }
                    continue;
                }
            };
            // A deeply nested value is not walked again.
            let nested = matches!(change, Change::Nest(_));
            *value.pointer_mut(pointer).expect("listed") = new;
            if nested {
                break;
            }
        }
        let mut bytes = value.to_string().into_bytes();
        self.damage(&mut bytes);
        bytes
    }

    fn damage(&self, bytes: &mut Vec<u8>) {
        for (at, byte) in &self.bytes {
            let at = at.index(bytes.len().max(1));
            bytes.iter_mut().skip(at).take(1).for_each(|own| *own = *byte);
        }
        if let Some(end) = self.end {
            bytes.truncate(end.index(bytes.len().max(1)));
        }
    }
}

/// Runs `PROPTEST_CASES` cases, or `cases` by default. A case that takes over ten seconds aborts the process.
fn run<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> Result<(), String>) {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    let (alive, watched) = mpsc::channel::<String>();
    let watch = std::thread::spawn(move || {
        let mut case = String::new();
        loop {
            match watched.recv_timeout(Duration::from_secs(10)) {
                Ok(next) => case = next,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("a case takes over 10 seconds: {case:.2000}");
                    process::abort();
                }
            }
        }
    });
    TestRunner::new(config)
        .run(&strategy, |value| {
            alive.send(format!("{value:?}")).expect("it listens");
            test(value).map_err(TestCaseError::fail)
        })
        .unwrap_or_else(|why| panic!("{why}"));
    drop(alive);
    watch.join().expect("it did not fail");
}

/// Fails if the text of an error is too long or does not have exactly one hint.
fn told<T>(answer: Result<T, impl ToString>) -> Result<Option<T>, String> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(why) => {
            let text = why.to_string();
            match text.matches("\nhint: ").count() == 1 && text.len() < 400_000 {
                true => Ok(None),
                false => Err(format!("an error of {} bytes: {text:.4000}", text.len())),
            }
        }
    }
}

/// Returns a copy of a folder with links to all files except `own`.
fn linked(from: &Path, own: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(from).expect("a fixture") {
        let path = entry.expect("readable").path().canonicalize().expect("it is there");
        let name = path.file_name().expect("a file");
        if name != own {
            symlink(&path, folder.path().join(name)).expect("writable");
        }
    }
    folder
}

fn all_models() -> Vec<PathBuf> {
    let entries = fs::read_dir(fixture(".")).expect("fixtures");
    let mut all: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    all.retain(|path| path.join("config.json").exists());
    all.sort();
    all
}

fn files_of_models(name: &str, cases: u32) {
    let all: Vec<_> = all_models().into_iter().filter(|path| path.join(name).exists()).collect();
    assert!(!all.is_empty(), "{name}");
    let folders: Vec<_> = all.iter().map(|path| (linked(path, name), path.join(name))).collect();
    let arch = ArchProfile::recorded("rtx4090").expect("recorded");
    run(cases, (any::<Index>(), changes()), |(at, changes)| {
        let (folder, file) = &folders[at.index(folders.len())];
        let text = fs::read_to_string(file).expect("a fixture");
        fs::write(folder.path().join(name), changes.apply(&text)).expect("writable");
        let Some(model) = told(ModelFolder::open(folder.path()))? else { return Ok(()) };
        for training in [None, Some(Training::default())] {
            let workload = Workload { training, ..Workload::new(3, 100) };
            told(model.plan(&arch, &EngineOptions::default(), workload))?;
        }
        model.context_length(5, &model.request());
        Ok(())
    });
}

#[test]
fn configs() {
    files_of_models("config.json", 400);
}

#[test]
fn generation_configs() {
    files_of_models("generation_config.json", 200);
}

#[test]
fn indices() {
    files_of_models("model.safetensors.index.json", 200);
}

#[test]
fn adapters() {
    let model = ModelFolder::open(fixture("llama")).expect("a fixture");
    let of = fixture("llama").join("lora");
    let read = |name: &str| fs::read(of.join(name)).expect("a fixture");
    let (config, weights) = (read("adapter_config.json"), read("adapter_model.safetensors"));
    let config = String::from_utf8(config).expect("JSON");
    let folder = tempfile::tempdir().expect("a folder");
    run(300, (changes(), changes()), |(changes, damage)| {
        fs::write(folder.path().join("adapter_config.json"), changes.apply(&config))
            .expect("writable");
        let mut weights = weights.clone();
        damage.damage(&mut weights);
        fs::write(folder.path().join("adapter_model.safetensors"), weights).expect("writable");
        told(model.adapter(folder.path())).map(drop)
    });
}

#[test]
fn examples() {
    let model = ModelFolder::open(demo()).expect("the demo");
    let lines = [
        r#"{"text": "Once upon a time\n", "id": 7}"#,
        r#"{"prompt": "Where is the dog?", "completion": " There.", "more": [1, {"a": null}]}"#,
        r#"{"prompt": [{"role": "user", "content": "Who?"}], "completion": [{"role": "assistant", "content": "I"}]}"#,
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}"#,
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("data.jsonl");
    run(400, prop::collection::vec((any::<Index>(), changes()), 1..4), |chosen| {
        let line = |(at, changes): &(Index, Changes)| changes.apply(lines[at.index(lines.len())]);
        let text: Vec<_> = chosen.iter().map(line).collect();
        fs::write(&file, text.join(&b'\n')).expect("writable");
        told(Dataset::open(&file, &model, 64)).map(drop)
    });
}
