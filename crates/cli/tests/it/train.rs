//! Tests `flashover train` and the use of its adapters.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use flashover::ModelFolder;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{demo, fixture, flashover, trace_format};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn an_adapter_is_learned_from_a_text_and_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (model, data, output, trace) =
        (demo(), path("data.txt"), path("adapter"), path("trace.json"));
    let model = model.to_str().expect("UTF-8");
    fs::write(&data, "The blue fish sat on the red box. ".repeat(12)).expect("written");
    let args =
        ["train", "--model", model, "--backend", "cpu", "--data", &data, "-c", "24", "-b", "2"];
    let rates = ["--learning-rate", "1e-2", "--lora-rank", "4", "--steps", "6"];
    let out = ["--output", &output, "--held-out", &data, "--profile-trace", &trace];
    let made = flashover(&[&args[..], &rates, &out].concat());
    let said = text(&made.stderr);
    assert!(made.status.success() && made.stdout.is_empty(), "{said}");
    for part in [
        "0 left out; 6 steps, batches of 2 examples\n",
        "\nstep 1 of 6: loss ",
        "\nstep 6 of 6: loss ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let told = said.lines().find_map(|line| line.strip_prefix("held out: loss ")).expect("told");
    let losses: Vec<f64> = told.split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(losses.len() == 2 && losses[1] < losses[0] - 0.5, "{told}");
    let config = fs::read_to_string(folder.path().join("adapter/adapter_config.json"));
    let config: Value = serde_json::from_str(&config.expect("written")).expect("JSON");
    assert_eq!((&config["r"], &config["lora_alpha"]), (&4.into(), &8.0.into()));
    assert_eq!(config["peft_type"], "LORA");
    let rows = trace_format::rows(&fs::read_to_string(&trace).expect("written"));
    let rows = rows.expect("what Perfetto reads");
    let count = |name: &str| rows.values().flatten().filter(|event| event.2 == name).count();
    assert_eq!((count("train step 1"), count("backward 0"), count("optimizer")), (1, 6, 6));
    // Train the adapter further with the preset's precision and batch, then generate with it.
    let more = flashover(
        &[
            &args[..],
            &["--steps", "1", "--adapter", &output, "--output", &output, "--preset", "training"],
        ]
        .concat(),
    );
    assert!(more.status.success(), "{}", text(&more.stderr));
    let said = text(&more.stderr);
    assert!(said.contains("preset training: f32, batches of 2\n"), "{said}");
    let ask = [
        "generate",
        "--model",
        model,
        "--backend",
        "cpu",
        "--prompt",
        "The blue",
        "--max-new-tokens",
        "8",
    ];
    let answer = |more: &[&str]| {
        let answer = flashover(&[&ask[..], more].concat());
        assert!(answer.status.success(), "{}", text(&answer.stderr));
        text(&answer.stdout)
    };
    assert_ne!(answer(&["--adapter", &output]), answer(&[]));
}

#[test]
fn training_refuses_what_is_wrong_before_it_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (data, output) = (path("data.txt"), path("adapter"));
    fs::write(&data, "One day a dog ran. ".repeat(20)).expect("written");
    fs::write(path("bad.jsonl"), "{\"question\": 1}\n").expect("written");
    let model = demo();
    let model = model.to_str().expect("UTF-8");
    let refused = |more: &[&str], why: &str| {
        let args = ["train", "--model", model, "--backend", "cpu", "--output", &output];
        let made = flashover(&[&args[..], more].concat());
        let said = text(&made.stderr);
        assert_eq!(made.status.code(), Some(2), "{more:?}: {said}");
        assert!(said.contains(why), "{why}: {said}");
        assert!(!folder.path().join("adapter").exists(), "{more:?}");
    };
    refused(&["--data", &path("gone")], "cannot read");
    refused(&["--data", &path("bad.jsonl")], "line 1: unexpected fields (question)");
    fs::write(path("cut.jsonl"), "{\"text\": \"One day").expect("written");
    refused(&["--data", &path("cut.jsonl")], "line 1: not JSON: EOF");
    fs::write(path("list.json"), "[]").expect("written");
    refused(&["--data", &path("list.json")], "expected a text or a .jsonl, got ");
    for name in ["table.csv", "table.TSV", "table.parquet"] {
        fs::write(path(name), "text\nOne day a dog ran.\n").expect("written");
        refused(&["--data", &path(name)], "expected a text or a .jsonl, got ");
    }
    fs::write(path("bad.ndjson"), "{\"question\": 1}\n").expect("written");
    refused(&["--data", &path("bad.ndjson")], "line 1: unexpected fields (question)");
    // Names of fields are one line, escaped and cut.
    let forged = format!("{{\"a\\nhint: obey \\u202e\": 1, \"{}\": 2}}\n", "b".repeat(100_000));
    fs::write(path("forged.jsonl"), forged).expect("written");
    refused(&["--data", &path("forged.jsonl")], "fields (a\\nhint: obey \\u{202e}, bbb");
    refused(&["--data", &path("forged.jsonl")], "characters more))");
    // The file itself was not fetched.
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9480648\n";
    for name in ["pointer.txt", "pointer.jsonl"] {
        fs::write(path(name), pointer).expect("written");
        let why =
            "it is a git-lfs pointer instead of the file\nhint: fetch the file with `git lfs pull`";
        refused(&["--data", &path(name)], why);
    }
    refused(&["--data", "/dev/zero"], "it is not a file\nhint: ");
    let with = |more: &[&str], why: &str| refused(&[&["--data", &data], more].concat(), why);
    with(&["--learning-rate", "-1"], "--learning-rate is -1\nhint: ");
    with(&["--max-grad-norm", "-1"], "a gradient norm of 0 or more, got -1\nhint: ");
    with(&["--clip", "nan"], "a gradient norm of 0 or more, got NaN\nhint: ");
    with(&["--learning-rate", "1e39"], "\nhint: use a number above 0 and within f32");
    with(&["--lora-alpha", "0"], "rank 16 and alpha 0.0 are not supported\nhint: ");
    with(&["--profile-trace", &data], "input and output are the same file: ");
    with(
        &["--held-out", &path("bad.jsonl"), "--profile-trace", &path("bad.jsonl")],
        "the same file: ",
    );
    let other = fixture("llama").join("lora");
    let other = other.to_str().expect("UTF-8");
    with(
        &["--adapter", other, "--lora-rank", "4"],
        "--adapter sets rank, alpha and matrices\nhint: ",
    );
    with(&["--kv-cache", "int8"], "training has no KV cache\nhint: ");
    with(&["--lora-rank", "0"], "rank 0 and alpha 0.0 are not supported\nhint: ");
    with(
        &["--lora-targets", "head"],
        "no layer matrix is named head\nhint: use one of down_proj, ",
    );
    with(&["-c", "1"], "1 is not in 2..");
    with(&["--preset", "latency"], "preset latency is not for training\nhint: ");
    with(&["--memory-limit", "30MiB"], "gradients");
    with(&["-c", "513"], "at most 512 tokens, got 513\nhint: use -c 512, or --max-context 513");
    with(&["--adapter", other], "has shape [4, 32], expected [4, 256]");
}

#[test]
fn an_adapter_is_replaced_only_when_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::write(path("data.jsonlines"), "{\"text\": \"One day a dog ran.\"}\n").expect("written");
    fs::write(path("lines.txt"), "{\"text\": \"One day a dog ran.\"}\n").expect("written");
    let (model, output) = (demo(), path("adapter"));
    let model = model.to_str().expect("UTF-8");
    let args =
        ["train", "--model", model, "--backend", "cpu", "-c", "8", "-b", "1", "--steps", "1"];
    let trained = |more: &[&str]| {
        let made = flashover(&[&args[..], &["--output", &output], more].concat());
        (made.status.code(), text(&made.stderr))
    };
    let (code, said) = trained(&["--data", &path("data.jsonlines")]);
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("looks like JSON lines"), "{said}");
    let weights = fs::read(Path::new(&output).join("adapter_model.safetensors")).expect("saved");
    let (code, said) = trained(&["--data", &path("lines.txt")]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("has an adapter\nhint: replace it with --overwrite"), "{said}");
    assert_eq!(fs::read(Path::new(&output).join("adapter_model.safetensors")).ok(), Some(weights));
    let (code, said) = trained(&["--data", &path("lines.txt"), "--overwrite"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("looks like JSON lines but is read as plain text"), "{said}");
    // An adapter that goes on replaces itself.
    let (code, said) = trained(&["--data", &path("lines.txt"), "--adapter", &output]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn what_was_learned_before_a_failure_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (model, data, output) = (demo(), path("data.txt"), path("adapter"));
    fs::write(&data, "One day a dog ran. ".repeat(4)).expect("written");
    let run = |more: &[&str]| {
        let model = model.to_str().expect("UTF-8");
        let args = ["train", "--model", model, "--backend", "cpu", "--data", &data, "-c", "8"];
        let made = flashover(&[&args[..], &["-b", "1", "--output", &output], more].concat());
        (made.status.code(), text(&made.stderr))
    };
    let (code, said) = run(&["--learning-rate", "3e37", "--warmup", "20", "--steps", "20"]);
    assert!(code == Some(2) && said.contains("not finite at step 2\nhint: "), "{said}");
    assert!(said.contains("\nthe adapter after 1 step is in "), "{said}");
    assert!(folder.path().join("adapter/adapter_model.safetensors").exists());
    // If one file cannot be written, none is.
    let config = folder.path().join("adapter/adapter_config.json");
    let weights = fs::read(folder.path().join("adapter/adapter_model.safetensors")).expect("there");
    fs::remove_file(&config).expect("written before");
    fs::create_dir(&config).expect("nothing is there");
    let (code, said) = run(&["--steps", "1", "--overwrite"]);
    assert!(code == Some(2) && said.contains("adapter_config.json is a folder"), "{said}");
    let kept = fs::read(folder.path().join("adapter/adapter_model.safetensors")).expect("there");
    assert_eq!(weights, kept);
}

/// Starts a training that saves every two steps and runs until it is stopped.
fn training(data: &str, output: &str) -> (Child, Lines<BufReader<ChildStderr>>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashover"))
        .args(["train", "--backend", "cpu", "-c", "8", "-b", "1", "--steps", "100000"])
        .args(["--overwrite", "--save-every", "2", "--data", data, "--output", output, "--model"])
        .arg(demo())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let said = BufReader::new(child.stderr.take().expect("piped")).lines();
    (child, said)
}

fn stopped(child: &mut Child, said: Lines<BufReader<ChildStderr>>) -> String {
    let id = Pid::from_raw(child.id().try_into().expect("a process id"));
    kill(id, Signal::SIGINT).expect("it runs");
    let said: Vec<String> = said.map_while(Result::ok).collect();
    child.wait().expect("it ends");
    said.join("\n")
}

#[test]
fn steps_are_saved_and_one_process_trains_into_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (data, output) = (path("data.txt"), path("adapter"));
    fs::write(&data, "One day a dog ran. ".repeat(4)).expect("written");
    let (mut child, mut said) = training(&data, &output);
    let saved = |line: String| line == "the adapter after step 4 is saved";
    assert!(said.by_ref().map_while(Result::ok).any(saved));
    assert!(Path::new(&output).join("adapter_model.safetensors").exists());
    let (mut second, also) = training(&data, &output);
    let also: Vec<String> = also.map_while(Result::ok).collect();
    let also = also.join("\n");
    assert!(also.contains("another process is writing it") && !also.contains("step 1"), "{also}");
    assert_eq!(second.wait().expect("it ends").code(), Some(2));
    let said = stopped(&mut child, said);
    assert!(said.contains("the adapter is in"), "{said}");
    let left = fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 2, "the data and the adapter");
}

/// The output folder disappears during training, as a stand-in for a full disk. The adapter is written elsewhere.
#[test]
fn an_adapter_that_its_folder_does_not_take_is_rescued() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (data, output) = (path("data.txt"), path("adapter"));
    fs::write(&data, "One day a dog ran. ".repeat(4)).expect("written");
    let (mut child, mut said) = training(&data, &output);
    let step = |line: String| line.starts_with("step 3 of ");
    assert!(said.by_ref().map_while(Result::ok).any(step));
    fs::rename(&output, path("moved")).expect("it was saved");
    let not_saved = |line: String| line.starts_with("warning: the adapter is not saved: ");
    assert!(said.by_ref().map_while(Result::ok).any(not_saved));
    let said = stopped(&mut child, said);
    let rescued = path("adapter.rescued");
    assert!(said.contains(&format!("is in {rescued}")) && said.contains("error: "), "{said}");
    assert_eq!(child.wait().expect("it ended").code(), Some(2));
    let model = ModelFolder::open(demo()).expect("the demo");
    model.adapter(&rescued).expect("whole");
}

#[test]
fn a_plan_says_what_training_takes() {
    let plan = |more: &[&str]| {
        let args = ["plan", "--shape", "llama-3-8b", "--profile", "rtx4080", "--train", "lora"];
        flashover(&[&args[..], more].concat())
    };
    let made = plan(&["--quant", "nf4", "--batch", "4"]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    for line in [
        "\nrank             16\n",
        "\nadapter                 0.156 GiB\n",
        "\noptimizer               0.312 GiB\n",
    ] {
        assert!(text(&made.stdout).contains(line), "{line}: {}", text(&made.stdout));
    }
    let json = plan(&["--quant", "nf4", "--lora-rank", "64", "--json"]);
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!((&json["rank"], &json["workload"]["recompute"]), (&64.into(), &"layers".into()));
    assert_eq!(json["trained_bytes"], 4u64 * 4 * 41_943_040);
    assert_eq!(json["gradients_bytes"], json["trained_bytes"]);
    let dense = plan(&[]);
    assert_eq!(dense.status.code(), Some(2));
    assert!(text(&dense.stderr).contains("; nf4 (--quant nf4) takes "), "{}", text(&dense.stderr));
    let args =
        ["plan", "--shape", "llama-3-8b", "--profile", "rtx4080", "--preset", "training", "--json"];
    let chosen: Value = serde_json::from_slice(&flashover(&args).stdout).expect("JSON");
    assert_eq!(
        (&chosen["matrices"], &chosen["workload"]["batch"]),
        (&"four_bit".into(), &8.into())
    );
    let no_training =
        flashover(&["plan", "--shape", "llama-3-8b", "--profile", "rtx4080", "--lora-rank", "4"]);
    let said = text(&no_training.stderr);
    assert!(
        no_training.status.code() == Some(2) && said.contains("hint: add --train lora"),
        "{said}"
    );
    let wrong = plan(&["--preset", "latency"]);
    assert!(text(&wrong.stderr).contains("preset latency is not for training\nhint: "));
}

#[test]
fn an_adapter_does_not_go_into_the_models_own_folder() {
    let model = demo();
    let model = model.to_str().expect("UTF-8");
    let args = ["train", "--model", model, "--backend", "cpu", "--data", "x", "--output", model];
    let out = flashover(&args);
    let said = text(&out.stderr);
    assert!(
        out.status.code() == Some(2) && said.contains("the model's own folder\nhint: "),
        "{said}"
    );
}

fn train(args: &[&str]) -> Output {
    flashover(&[&["train", "--backend", "cpu", "-b", "2", "-c", "32"], args].concat())
}

/// Six steps at once equal three, and three more after a resumption; the saved model generates.
#[test]
fn all_weights_are_trained_and_a_run_is_resumed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (model, data, a, b) = (demo(), path("data.txt"), path("a"), path("b"));
    fs::write(&data, "One day a dog ran to a big red ball. ".repeat(30)).expect("written");
    let model = model.to_str().expect("UTF-8");
    let full = |more: &[&str]| {
        let made = train(&[&["--full", "--model", model, "--data", &data], more].concat());
        assert_eq!(made.status.code(), Some(0), "{more:?}: {}", text(&made.stderr));
        text(&made.stderr)
    };
    let log = path("log.jsonl");
    let every = ["--save-every", "3"];
    full(&[&["--output", &a, "--steps", "6", "--log", &log], &every[..]].concat());
    full(&[&["--output", &b, "--steps", "3"], &every[..]].concat());
    let said = full(&["--output", &b, "--resume", &b, "--steps", "6"]);
    assert!(said.contains("the run continues after 3 steps"), "{said}");
    for file in ["model.safetensors", "flashover_run.safetensors", "config.json"] {
        let read = |folder: &str| fs::read(Path::new(folder).join(file)).expect("written");
        assert!(read(&a) == read(&b), "{file}");
    }
    let lines = fs::read_to_string(&log).expect("written");
    let lines: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 7);
    assert!(lines[0]["planned_bytes"]["gradients"].as_u64() > Some(0), "{}", lines[0]);
    let loss = |at: usize| lines[at]["loss"].as_f64().expect("a loss");
    assert!(loss(6) < loss(1), "{lines:?}");
    let flops = |name: &str| lines[1][name].as_f64().expect("a share");
    assert!(
        0.0 < flops("mfu") && flops("mfu") <= flops("hfu") && flops("hfu") < 1.0,
        "{}",
        lines[1]
    );
    let args = ["generate", "--model", &a, "--backend", "cpu", "--prompt", "One day"];
    let made = flashover(&[&args[..], &["--max-new-tokens", "4"]].concat());
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    // Each save in a folder of its own, of which the last stay.
    let kept = path("kept");
    let other = Path::new(&kept).join("step-000900");
    fs::create_dir_all(&other).expect("a folder of another run");
    // What is not a run of ours stays.
    fs::create_dir_all(Path::new(&kept).join("step-000001")).expect("a folder of the user");
    fs::write(Path::new(&kept).join("step-000001/thesis"), "mine").expect("written");
    let said = full(&["--output", &kept, "--steps", "5", "--save-every", "1", "--keep", "2"]);
    assert!(said.contains("warning: the model is not saved: cannot keep saves in "), "{said}");
    let names =
        fs::read_dir(&kept).expect("written").map(|entry| entry.expect("listed").file_name());
    let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    assert_eq!(names, ["step-000001", "step-000003", "step-000004", "step-000900"]);
    let fourth = Path::new(&kept).join("step-000004");
    full(&[
        "--output",
        &path("fifth"),
        "--resume",
        fourth.to_str().expect("UTF-8"),
        "--steps",
        "5",
    ]);
    for file in ["model.safetensors", "flashover_run.safetensors"] {
        let read = |folder: &str| fs::read(Path::new(folder).join(file)).expect("written");
        assert!(read(&kept) == read(&path("fifth")), "{file}");
    }
    // State in host memory takes the same steps.
    full(&[
        "--output",
        &path("offloaded"),
        "--steps",
        "5",
        "--save-every",
        "1",
        "--offload",
        "optimizer",
    ]);
    let weights =
        |folder: &str| fs::read(Path::new(folder).join("model.safetensors")).expect("written");
    assert!(weights(&kept) == weights(&path("offloaded")));
    full(&["--output", &path("muon"), "--steps", "2", "--optimizer", "muon"]);
    let refused = |more: &[&str], why: &str| {
        let made = train(&[&["--data", &data, "--output", &path("c")], more].concat());
        let said = text(&made.stderr);
        assert_eq!(made.status.code(), Some(2), "{more:?}: {said}");
        assert!(said.contains(why), "{why}: {said}");
        assert!(!folder.path().join("c").exists(), "{more:?}");
    };
    let own = ["--full", "--model", model];
    let with = |more: &[&str], why: &str| refused(&[&own[..], more].concat(), why);
    with(&["--quant", "nf4"], "--full trains dense weights");
    let resume = ["--resume", &b, "--steps", "9"];
    let resumed = |more: &[&str], why: &str| with(&[&resume[..], more].concat(), why);
    resumed(&["--learning-rate", "1e-3"], "learning-rate: 0.00002 in the saved run, 0.001 here");
    resumed(&["--accumulate", "2"], "accumulate: 1 in the saved run, 2 here");
    resumed(&["--in-order"], "in-order: false in the saved run, true here");
    resumed(&["--optimizer", "adamw8"], "optimizer: ");
    resumed(&["--offload", "gradients"], "offload: \"no gradients\" in the saved run");
    with(&["--resume", &b], "has taken 6 steps already, of 6\nhint: use a larger --steps");
    with(&["--resume", model], "has no training run");
    with(&["--beta2", "1"], "--beta2 is 1");
    with(&["--optimizer", "muon", "--momentum", "1"], "--momentum is 1");
    with(&["--momentum", "0.9"], "--momentum is of Muon\nhint: ");
    with(&["--learning-rate", "1e-60"], "--learning-rate is ");
    with(&["--learning-rate", "0.5", "--weight-decay", "3"], "--weight-decay is 3\nhint: ");
    with(&["--decay-steps", "3"], "--decay-steps is of --schedule wsd");
    with(&["--schedule", "wsd"], "--schedule wsd needs the steps of its decay");
    with(&["--floor", "0.1"], "--floor needs a schedule that decays");
    with(&["--no-master"], "f32 weights have no master weights");
    with(&["--from-scratch"], "--from-scratch makes new weights\nhint: name a --shape");
    refused(&["--full"], "no model is named\nhint: ");
    with(&["--optimizer", "muon", "--offload", "optimizer"], "cannot offload Muon");
    with(&["--offload", "gradients", "--recompute", "nothing"], "while less than whole layers");
    refused(
        &["--model", model, "--offload", "optimizer"],
        "cannot offload optimizer or gradients of an adapter",
    );
    refused(&["--model", model, "--optimizer", "muon"], "Muon trains whole matrices");
    with(&["--keep", "2"], "--save-every");
    let (adapter, lora) = (path("adapter"), ["--model", model, "--lora-rank"]);
    let two = ["4", "--steps", "2", "--save-every", "1", "--data", &data, "--output", &adapter];
    let made = train(&[&lora[..], &two].concat());
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let eight = ["8", "--resume", &adapter];
    refused(&[&lora[..], &eight].concat(), "the saved adapter has rank 4, alpha 8");
    with(&["--tokens-per-step", "100"], "a multiple of 32 tokens per step, those of an example");
    with(
        &["--tokens-per-step", "96"],
        "a multiple of 64 tokens per step, 2 examples of 32, got 96",
    );
    with(&["--memory-limit", "30MiB"], "training all weights of");
    refused(&["--shape", "gpt2"], "gpt2 is a shape without weights");
    let tokens = path("tokens.bin");
    let few: Vec<u8> = (1..101u16).flat_map(u16::to_le_bytes).collect();
    fs::write(&tokens, few).expect("written");
    let not_tokens = ["--shape", "gpt2", "--full", "--from-scratch"];
    refused(&not_tokens, "data.txt is not a .bin\nhint: ");
    let quantised = fixture("llama_nf4");
    let quantised = ["--full", "--model", quantised.to_str().expect("UTF-8")];
    let made = train(&[&quantised[..], &["--data", &tokens, "--output", &path("c")]].concat());
    let said = text(&made.stderr);
    assert!(made.status.code() == Some(2) && said.contains("quantised"), "{said}");
    fs::write(&tokens, [0xff; 200]).expect("written");
    let scratch = ["--shape", "gpt2", "--full", "--from-scratch", "--data", &tokens];
    let made = train(&[&scratch[..], &["--output", &path("c")]].concat());
    let said = text(&made.stderr);
    assert!(said.contains("token 65535 at position 0 is past the vocabulary of 50257"), "{said}");
}

#[test]
fn a_config_is_a_shape_to_begin_with() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (tokens, output, config) = (path("tokens.bin"), path("run"), demo().join("config.json"));
    let values: Vec<u8> = (0..400u16).flat_map(|at| (at * 7 % 4096).to_le_bytes()).collect();
    fs::write(&tokens, values).expect("written");
    let with = |shape: &str| {
        let own = ["--full", "--from-scratch", "--shape", shape, "--data", &tokens];
        train(&[&own[..], &["--steps", "1", "--output", &output]].concat())
    };
    let made = with(config.to_str().expect("UTF-8"));
    assert!(made.status.success(), "{}", text(&made.stderr));
    let read = |path: &Path| -> Value {
        serde_json::from_str(&fs::read_to_string(path).expect("written")).expect("JSON")
    };
    let (given, made) = (read(&config), read(&Path::new(&output).join("config.json")));
    assert_eq!((&made["hidden_size"], &made["dtype"]), (&given["hidden_size"], &"float32".into()));
    let plan = flashover(&["plan", "--model", &output, "--backend", "cpu"]);
    assert!(plan.status.success(), "{}", text(&plan.stderr));

    let wrong = path("wrong.json");
    fs::write(&wrong, r#"{"model_type": "bert"}"#).expect("written");
    for (shape, why) in [(&wrong, "bert"), (&path("absent.json"), "absent.json")] {
        let made = with(shape);
        let said = text(&made.stderr);
        assert!(!made.status.success() && said.contains(why) && said.contains("hint: "), "{said}");
    }
}

/// A killed process leaves a whole save, also when it is killed while it saves, and its run goes on to the same bits.
#[test]
fn a_killed_run_goes_on_to_the_same_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (data, model) = (path("data.txt"), demo());
    fs::write(&data, "One day a cat saw a small green box. ".repeat(30)).expect("written");
    let model = model.to_str().expect("UTF-8");
    let own = ["train", "--full", "--model", model, "--backend", "cpu", "--data", &data];
    let size = ["-c", "16", "-b", "1", "--optimizer", "adamw8", "--save-every", "1"];
    let (whole, killed) = (path("whole"), path("killed"));
    let own = [&own[..], &size, &["--steps", "9", "--output"]].concat();
    let resume = [&own[..], &[&killed, "--resume", &killed]].concat();
    let made = flashover(&[&own[..], &[&whole]].concat());
    assert!(made.status.success(), "{}", text(&made.stderr));
    // Once after a save, once in the middle of one.
    for saves in [1, 4] {
        let first = [&own[..], &[&killed]].concat();
        let args = if saves == 1 { &first } else { &resume };
        let mut child = Command::new(env!("CARGO_BIN_EXE_flashover"))
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut said = BufReader::new(child.stderr.take().expect("piped")).lines();
        let wanted = format!("step {saves} of 9: loss");
        let begun = said.by_ref().map_while(Result::ok).find(|line| line.contains(&wanted));
        assert!(begun.is_some(), "{saves}");
        if saves == 1 {
            let saved = said.map_while(Result::ok).find(|line| line.contains("is saved"));
            assert!(saved.is_some());
        }
        child.kill().expect("it runs");
        child.wait().expect("it ends");
    }
    let made = flashover(&resume);
    let said = text(&made.stderr);
    assert!(made.status.success() && said.contains("the run continues after"), "{said}");
    for file in ["model.safetensors", "flashover_run.safetensors"] {
        let read = |folder: &str| fs::read(Path::new(folder).join(file)).expect("written");
        assert!(read(&whole) == read(&killed), "{file}");
    }
}
