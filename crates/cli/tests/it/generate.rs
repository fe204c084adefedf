//! Tests `flashover generate`, `flashover chat` and `flashover logits`, with expected values from transformers.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use checkpoint::{Checkpoint, Tensor};
use safetensors::tensor::SafeTensors;
use serde_json::json;
use tempfile::TempDir;

use crate::{TWO_WORDS, demo, fixture, flashover};

/// Returns the prompt and the greedy tokens that transformers generated.
fn golden(name: &str) -> [Vec<u32>; 2] {
    let file = Checkpoint::open(fixture(name).join("golden.safetensors")).expect("a fixture");
    ["prompt", "greedy"].map(|name| {
        let Tensor { bytes, .. } = file.tensor(name).expect("make.py writes it");
        let ids = bytes.as_chunks::<8>().0.iter();
        ids.map(|id| u32::try_from(i64::from_le_bytes(*id)).expect("an id")).collect()
    })
}

#[test]
fn the_command_writes_tokens_and_logits() {
    let ([prompt, greedy], folder) = (golden("llama"), tempfile::tempdir().expect("a folder"));
    let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let (model, output) = (fixture("llama"), folder.path().join("out.safetensors"));
    let (model, output) = (model.to_str().expect("UTF-8"), output.to_str().expect("UTF-8"));
    let tokens = list(&prompt);
    let common = ["--model", model, "--backend", "cpu", "--tokens", &tokens];
    let run = |name: &str, more: &[&str]| flashover(&[&[name], &common[..], more].concat());
    let out = run("generate", &["--max-new-tokens", "9", "--ignore-eos", "--temperature", "0"]);
    assert_eq!(String::from_utf8_lossy(&out.stdout), format!("{}\n", list(&greedy[..9])));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        said.contains("9 tokens generated, ") && said.ends_with("max_new_tokens reached\n"),
        "{said}"
    );
    let more = ["--max-new-tokens", "5", "--ignore-eos", "--completions", "2", "--seed", "3"];
    let out = run("generate", &more);
    let want = list(&greedy[..5]);
    assert_eq!(String::from_utf8_lossy(&out.stdout), format!("{want}\n{want}\n"));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    let ends = "completion 0: 5 tokens; max_new_tokens reached\ncompletion 1: 5 tokens; max_new_tokens reached\nloaded in ";
    assert!(said.contains(ends), "{said}");
    // Dynamic RoPE scaling has no fixed maximum context.
    let dynamic = fixture("llama_dynamic");
    let dynamic = dynamic.to_str().expect("UTF-8");
    let args = ["generate", "--model", dynamic, "--backend", "cpu", "--tokens", &tokens];
    let out = flashover(&[&args[..], &["--max-new-tokens", "40", "--ignore-eos"]].concat());
    assert_eq!(String::from_utf8_lossy(&out.stdout).split(',').count(), 40);
    let out = run("logits", &["--output", output]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let [file, golden] = [output.into(), fixture("llama").join("golden.safetensors")]
        .map(|path: PathBuf| Checkpoint::open(path).expect("written"));
    let logits = |file: &Checkpoint| {
        let tensor = file.tensor("logits").expect("there");
        (tensor.shape.clone(), tensor.f32s().expect("f32").into_owned())
    };
    let ((shape, have), (want_shape, want)) = (logits(&file), logits(&golden));
    assert_eq!(shape, want_shape);
    assert!(close(&have, &want));
}

fn close(have: &[f32], want: &[f32]) -> bool {
    have.len() == want.len() && have.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-4)
}

/// A window is independent of earlier windows.
#[test]
fn logits_of_a_window_are_those_of_its_tokens_alone() {
    let model = fixture("llama");
    let model = model.to_str().expect("UTF-8");
    let run = |tokens: &str, more: &[&str]| {
        let args = ["logits", "--model", model, "--backend", "cpu", "--output", "-"];
        let out = flashover(&[&args[..], &["--tokens", tokens], more].concat());
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let file = SafeTensors::deserialize(&out.stdout).expect("safetensors");
        let tensor = file.tensor("logits").expect("there");
        assert_eq!(tensor.shape()[0], tokens.split(',').count());
        let values = tensor.data().as_chunks::<4>().0.iter();
        values.map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>()
    };
    let windows = run("5,6,7,8,9", &["--window", "3"]);
    assert!(close(&windows, &[run("5,6,7", &[]), run("8,9", &[])].concat()));
    let whole = run("5,6,7,8,9", &[]);
    assert!(!close(&windows, &whole), "the whole sees more");
    assert!(close(&run("5,6,7,8,9", &["--window", "9"]), &whole), "a window may be larger");
}

/// Long enough for kernels on several cores.
#[test]
fn logits_do_not_depend_on_the_number_of_threads() {
    let model = demo();
    let tokens: Vec<String> = (0..200).map(|at| (at * 37 % 4096).to_string()).collect();
    let run = |threads: &str| {
        let model = model.to_str().expect("UTF-8");
        let args = ["logits", "--model", model, "--backend", "cpu", "--output", "-"];
        let out = flashover(
            &[&args[..], &["--tokens", &tokens.join(","), "--threads", threads]].concat(),
        );
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        out
    };
    let (one, many) = (run("1"), run("999"));
    assert!(one.stdout.len() > 200 * 4096 * 4);
    assert!(one.stdout == many.stdout, "other bits");
    let cores = std::thread::available_parallelism().expect("known");
    let note = format!("note: {cores} threads are used: the process may use {cores} cores\n");
    assert_eq!(String::from_utf8_lossy(&many.stderr), note);
}

/// The file helps to find the origin of the NaN.
#[test]
fn logits_that_are_nan_are_written_and_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    fs::copy(fixture("llama").join("config.json"), path("config.json")).expect("copied");
    let mut bytes = fs::read(fixture("llama").join("model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let norm = file.tensor("model.norm.weight").expect("there").data();
    let at = norm.as_ptr() as usize - bytes.as_ptr() as usize;
    // All bits set are NaN in every float format.
    bytes[at..at + 4].fill(0xff);
    fs::write(path("model.safetensors"), bytes).expect("written");
    let (model, output) = (folder.path().to_str().expect("UTF-8"), path("out.safetensors"));
    let output = output.to_str().expect("UTF-8");
    let args = ["logits", "--model", model, "--backend", "cpu", "--tokens", "1,2"];
    let out = flashover(&[&args[..], &["--output", output]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    let told = "error: 320 of 320 logits are NaN, the first after token 0; the file is still written\nhint: ";
    assert!(said.contains(told), "{said}");
    let written = Checkpoint::open(output).expect("written");
    let written = written.tensor("logits").expect("there");
    assert!(written.f32s().expect("f32").iter().all(|logit| logit.is_nan()));
}

/// Copies the demo model and adds a chat template.
pub(crate) fn demo_with(template: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(demo().join(file), folder.path().join(file)).expect("copied");
    }
    fs::write(folder.path().join("chat_template.jinja"), template).expect("written");
    folder
}

/// Runs `flashover chat` on the demo model. Its template refuses system messages and roles that do not alternate.
fn chat(lines: &str, more: &[&str]) -> Output {
    let template = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must take turns') }}{% endif %}{{ m.content }}\n{% endfor %}";
    let folder = demo_with(template);
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashover"))
        .args(["chat", "--backend", "cpu", "--max-new-tokens", "8", "--model"])
        .arg(folder.path())
        .args(more)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A program that fails before it reads has closed the pipe.
    child.stdin.take().expect("piped").write_all(lines.as_bytes()).ok();
    child.wait_with_output().expect("ends")
}

#[test]
fn a_conversation_that_outgrows_its_context_forgets_questions_with_their_answers() {
    let lines = "Once upon a time there was a cat.\n".repeat(6);
    let out = chat(&lines, &["--context", "110", "--ignore-eos"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(
        said.contains("exceeds the context of 110 tokens, its first 2 messages are dropped"),
        "{said}"
    );
    assert_eq!(said.matches("prompt of ").count(), 6, "{said}");
    let out = chat(&lines, &["--system", "Be brief."]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(out.stdout.is_empty() && said.contains("refuses these messages: roles"), "{said}");
}

/// Only chats need a template. A broken one is reported before the model is loaded.
#[test]
fn a_broken_chat_template_stops_chats_alone() {
    let no_end = "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}";
    for (template, why) in [
        ("{% for m in messages %}", "error: chat template `default` is invalid: "),
        (no_end, "error: chat template `default` fails on these messages: "),
    ] {
        let folder = demo_with(template);
        let model = ["--backend", "cpu", "--model", folder.path().to_str().expect("UTF-8")];
        let plain = ["generate", "--prompt", "One day", "--max-new-tokens", "4"];
        let out = flashover(&[&plain[..], &model].concat());
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !out.stdout.is_empty(), "{said}");
        for asked in [&["generate", "--chat", "--prompt", "One day"][..], &["chat"]] {
            // The model does not fit the memory limit, so an attempt to load it would give another error.
            let out = flashover(&[asked, &model, &["--memory-limit", "4096"]].concat());
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(2), "{said}");
            assert!(out.stdout.is_empty() && said.starts_with(why), "{said}");
            assert_eq!(said.matches("\nhint: ").count(), 1, "{said}");
        }
    }
}

/// These templates produce much text in few steps. They are refused before the model is loaded.
#[test]
fn a_template_that_takes_all_memory_is_refused() {
    for template in [
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
    ] {
        let folder = demo_with(template);
        let model = folder.path().to_str().expect("UTF-8");
        let asked = ["generate", "--chat", "--prompt", "x", "--backend", "cpu"];
        let out = flashover(&[&asked[..], &["--model", model]].concat());
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{template}: {said}");
        assert!(said.contains("its values and its text take more than 67108864 steps"), "{said}");
    }
}

#[test]
fn a_message_that_is_too_long_is_dropped_and_the_conversation_goes_on() {
    let long = "Once upon a time there was a cat. ".repeat(40);
    let lines = format!("One day\n{long}\nThe end\n");
    let out = chat(&lines, &["--context", "110", "--ignore-eos"]);
    let said = String::from_utf8_lossy(&out.stderr);
    // Input from a pipe: the caller may not read the notes, so the exit code must tell.
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(
        said.ends_with("1 message dropped because of the context length\nhint: send shorter messages or use a larger --context\n"),
        "{said}"
    );
    assert_eq!(said.matches("warning: message dropped: ").count(), 1, "{said}");
    assert_eq!(said.matches("prompt of ").count(), 2, "{said}");
    // Earlier messages are kept.
    assert!(!said.contains("exceeds the context"), "{said}");
}

/// A tokenizer like that of Llama 2 drops the space at the start of a text.
#[test]
fn answers_of_a_batch_begin_as_one_alone_does() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture("llama").join(file), folder.path().join(file)).expect("copied");
    }
    let space = json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true });
    let vocab: BTreeMap<String, usize> =
        (0..160).map(|id| (format!("\u{2581}w{id}"), id)).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "post_processor": null, "pre_tokenizer": space, "decoder": space,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "\u{2581}w0" }
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    let model = folder.path().to_str().expect("UTF-8");
    let run = |more: &[&str]| {
        let args = ["generate", "--model", model, "--backend", "cpu", "--prompt", "w5 w6"];
        let out =
            flashover(&[&args[..], &["--max-new-tokens", "3", "--ignore-eos"], more].concat());
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).expect("UTF-8")
    };
    let one = run(&[]);
    assert!(one.starts_with(" w"), "{one:?}");
    assert_eq!(run(&["--completions", "2"]), format!("--- 0\n{one}--- 1\n{one}"));
}

#[test]
fn a_models_own_files_are_not_written_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture("llama").join(file), path(file)).expect("copied");
    }
    std::os::unix::fs::symlink("model.safetensors", path("link")).expect("linked");
    let model = folder.path().to_str().expect("UTF-8");
    for (command, flag, file) in [
        ("logits", "--output", "model.safetensors"),
        ("logits", "--output", "link"),
        ("generate", "--profile-trace", "config.json"),
    ] {
        let (target, before) = (path(file), fs::read(path(file)).expect("there"));
        let target = target.to_str().expect("UTF-8");
        let args = [command, "--model", model, "--backend", "cpu", "--tokens", "1,2", flag, target];
        let out = flashover(&args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{file}: {said}");
        assert!(said.contains("input and output are the same file: "), "{file}: {said}");
        assert_eq!(fs::read(path(file)).expect("there"), before, "{file}");
    }
}

#[test]
fn a_tune_cache_that_cannot_be_read_is_told_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("file/tune.jsonl");
    fs::write(folder.path().join("file"), "").expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashover"));
    command.args(["generate", "--backend", "cpu", "--tokens", "1", "--model"]);
    let out = command.arg(fixture("llama")).env("FLASHOVER_TUNE_CACHE", &cache).output();
    let out = out.expect("the program starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.starts_with(&format!("error: tune cache {}: ", cache.display())), "{said}");
    assert_eq!(
        (said.matches("tune cache").count(), said.matches("\nhint: ").count()),
        (1, 1),
        "{said}"
    );
}

/// Every refusal is an error with one hint, exit code 2 and an empty standard output.
#[test]
fn the_command_refuses_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = |name: &str, change: &dyn Fn(&Path)| {
        let to = folder.path().join(name);
        fs::create_dir(&to).expect("made");
        let entries = fs::read_dir(fixture("llama")).expect("there");
        let paths = entries.map(|entry| entry.expect("readable").path());
        // The adapter is in a subfolder, which is not copied.
        for from in paths.filter(|path| path.is_file()) {
            fs::copy(&from, to.join(from.file_name().expect("a file"))).expect("copied");
        }
        change(&to);
        to
    };
    let family = copy("family", &|to| {
        fs::write(to.join("config.json"), r#"{"model_type": "rwkv"}"#).expect("written");
    });
    let cut = copy("cut", &|to| {
        let path = to.join("model.safetensors");
        let bytes = fs::read(&path).expect("there");
        fs::write(&path, &bytes[..bytes.len() - 8]).expect("written");
    });
    let tokenizer = copy("tokenizer", &|to| {
        fs::write(to.join("tokenizer.json"), TWO_WORDS).expect("written");
    });
    let eos = copy("eos", &|to| {
        let text = r#"{"eos_token_id": [2, 160]}"#;
        fs::write(to.join("generation_config.json"), text).expect("written");
    });
    let beams = copy("beams", &|to| {
        let text = r#"{"num_beams": 4}"#;
        fs::write(to.join("generation_config.json"), text).expect("written");
    });
    let linked = copy("linked", &|to| {
        std::os::unix::fs::symlink("gone", to.join("tokenizer.json")).expect("linked");
    });
    let shards = copy("shards", &|to| {
        let index = "model.safetensors.index.json";
        fs::copy(fixture("llama_sharded").join(index), to.join(index)).expect("copied");
        fs::remove_file(to.join("model.safetensors")).expect("there");
    });
    let bare = copy("bare", &|to| fs::remove_file(to.join("model.safetensors")).expect("there"));
    let (none, good) = (folder.path().join("none"), fixture("llama"));
    let refused = |model: &Path, more: &[&str], want: &str| {
        let model = model.to_str().expect("UTF-8");
        let out = flashover(&[&["generate", "--model", model, "--backend", "cpu"], more].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(out.stdout.is_empty() && said.starts_with("error: "), "{said}");
        assert!(said.contains(want), "{want:?} is not in {said}");
        assert_eq!(said.matches("\nhint: ").count(), 1, "{said}");
    };
    let one = ["--tokens", "1,2"];
    refused(&none, &one, "hint: pass a Hugging Face folder with config.json");
    refused(&bare, &one, "hint: pass a Hugging Face folder with config.json");
    refused(&shards, &one, "which does not exist\nhint: download all shards");
    refused(&family, &one, "\nhint: use a model of one of these families");
    refused(&cut, &one, "\nhint: download the file again; it is truncated or damaged");
    refused(&tokenizer, &one, "but the model has a vocabulary of");
    // An EOS token outside of the vocabulary cannot be sampled; the model is accepted with a warning.
    let path = eos.to_str().expect("UTF-8");
    let out = flashover(&["plan", "--model", path, "--backend", "cpu"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let more = ["--max-new-tokens", "2"];
    let args = [&["generate", "--model", path, "--backend", "cpu"], &one[..], &more].concat();
    let out = flashover(&args);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("eos_token_id 160 is outside the vocabulary of 160 tokens"), "{said}");
    refused(&beams, &one, "`num_beams` is 4, which is not supported; expected 1\nhint: ");
    refused(
        &good,
        &["--tokens", "1,x"],
        "expected a token id, got `x`\nhint: write a list such as 1,2,3",
    );
    refused(&good, &["--tokens", "1, 2", "--adapter", "/none"], "hint: pass a PEFT folder with");
    refused(&linked, &one, "linked/tokenizer.json: No such file");
    // Texts may start with a dash, like options.
    for text in
        [&["--prompt", "- item"][..], &["--prompt", "-x"], &["--prompt", "x", "--stop", "--"]]
    {
        refused(&good, text, "has no tokenizer.json\nhint: ");
    }
    refused(&good, &["--prompt", "x"], "has no tokenizer.json\nhint: ");
    refused(
        &good,
        &["--prompt-file", "/dev/zero"],
        "/dev/zero: the text is larger than 64 MiB\nhint: ",
    );
    refused(&good, &["--tokens", "1,99999"], "token 99999 is outside the vocabulary");
    refused(&good, &["--tokens", &["1"; 600].join(",")], "expected at most 128 tokens, got ");
    refused(
        &fixture("gpt2"),
        &["--tokens", "1", "--max-context", "9999"],
        "learned position embeddings",
    );
    // RoPE works at any position; a warning tells that the model was trained on fewer.
    let long = ["1"; 600].join(",");
    let path = good.to_str().expect("UTF-8");
    let args = ["generate", "--model", path, "--backend", "cpu", "--tokens", &long];
    let out = flashover(&[&args[..], &["--max-new-tokens", "1", "--max-context", "700"]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("warning: the model has a context of 128 tokens"), "{said}");
    refused(
        &good,
        &["--tokens", "1", "--completions", "9", "--memory-limit", "1MiB"],
        "with 9 sequences of",
    );
    refused(&good, &["--tokens", "1", "--temperature", "1", "--top-p", "2"], "top_p is 2");
    refused(&good, &["--tokens", "1", "--temperature", "-1"], "temperature is -1\nhint: ");
    refused(
        &good,
        &["--tokens", "1", "--repetition-penalty", "-0.5"],
        "repetition_penalty is -0.5",
    );
    refused(&good, &["--tokens", "1", "--top-k", "-1"], "expected an integer, got `-1`");
    refused(&good, &["--tokens", "1", "--memory-fraction", "-1"], "is -1\nhint: use a number");
    refused(
        &good,
        &["--tokens", "1", "--temperature", "0", "--top-k", "3"],
        "--top-k has no effect",
    );
    refused(&good, &["--tokens", "1", "--stop", "x"], "cannot be used with");
    refused(&good, &["--tokens", "1", "--dtype", "f8"], "unknown dtype `f8`");
    refused(&good, &["--tokens", "1", "--quant", "q4"], "unknown quantisation `q4`");
    let format = "unknown KV cache format `q8_0`";
    refused(&good, &["--tokens", "1", "--kv-cache", "q8_0"], format);
}

/// A pipe in place of a file is refused, because reading it could block forever.
#[test]
fn pipes_are_no_files_of_a_model() {
    for name in ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"] {
        let folder = tempfile::tempdir().expect("a folder");
        for entry in fs::read_dir(demo()).expect("the demo") {
            let entry = entry.expect("readable");
            if entry.file_name() != name && entry.path().is_file() {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("copied");
            }
        }
        let pipe = folder.path().join(name);
        let made = Command::new("mkfifo").arg(&pipe).status().expect("coreutils");
        assert!(made.success());
        let model = folder.path().to_str().expect("UTF-8");
        let out = flashover(&["generate", "--model", model, "--backend", "cpu", "--prompt", "A"]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{name}: {said}");
        assert!(said.contains(name) && said.contains("hint: "), "{name}: {said}");
    }
}
