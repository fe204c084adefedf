//! Tests of training.

use std::ops::ControlFlow;
use std::path::Path;

use checkpoint::Checkpoint;
use flashover::train::{
    AdamWOptions, Adapter, Dataset, DatasetError, Example, FullOptions, LoraOptions, Moments,
    MuonOptions, Offload, Recompute, Schedule, Start, TrainError, TrainOptions, Trainer,
};
use flashover::{Completion, Compute, Engine, EngineOptions, GenerateError, ModelFolder, Request};
use models::Weights;
use serde_json::json;

use crate::{cpu, demo, examples, fixture};

fn load(name: &str) -> Engine {
    Engine::load(&cpu(), fixture(name), &EngineOptions::default()).expect("a fixture")
}

fn options(rank: usize, learning_rate: f64) -> TrainOptions {
    TrainOptions {
        lora: LoraOptions { rank, alpha: 2.0 * rank as f64, ..LoraOptions::default() },
        schedule: Schedule::constant(learning_rate),
        ..TrainOptions::default()
    }
}

fn adamw(mut options: TrainOptions, change: impl Fn(&mut AdamWOptions)) -> TrainOptions {
    change(&mut options.optimizer);
    options
}

/// Runs six steps of AdamW with clipped gradients and compares them with PyTorch and PEFT.
#[test]
fn losses_are_those_of_peft() {
    for name in ["llama", "gpt2", "qwen2"] {
        let folder = fixture(name).join("lora");
        let file = Checkpoint::open(folder.join("golden.safetensors")).expect("lora.py writes it");
        let numbers = |of: &str| {
            file.tensor(of).expect("lora.py writes it").f32s().expect("f32").into_owned()
        };
        let ids = |of: &str| -> Vec<u32> {
            let tensor = file.tensor(of).expect("lora.py writes it");
            tensor
                .bytes
                .as_chunks::<8>()
                .0
                .iter()
                .map(|id| i64::from_le_bytes(*id) as u32)
                .collect()
        };
        let (tokens, lengths, from) = (ids("tokens"), ids("lengths"), ids("from"));
        let example = |row: usize| Example {
            tokens: tokens[24 * row..24 * row + lengths[row] as usize].to_vec(),
            from: from[row] as usize,
        };
        let weights = Weights::open(fixture(name)).expect("a fixture");
        let adapter = Adapter::open(&folder, &weights).expect("PEFT wrote it");
        let options = adamw(options(4, 1e-2), |own| own.weight_decay = 0.01);
        // Two micro-batches equal one batch, and recomputation equals kept activations.
        for (batches, recompute) in [
            (vec![vec![example(0), example(1)]], Recompute::Layers),
            (vec![vec![example(0)], vec![example(1)]], Recompute::Nothing),
        ] {
            let options = TrainOptions { recompute, ..options.clone() };
            let trainer = Trainer::from_adapter(load(name), adapter.clone(), options);
            let mut trainer = trainer.expect("options that mean something");
            for (step, want) in numbers("losses").into_iter().enumerate() {
                let metrics = trainer.step(&batches).expect("a batch");
                let gap = (metrics.loss - f64::from(want)).abs();
                assert!(gap < 2e-3, "{name}, step {step}: {} for {want}", metrics.loss);
                assert_eq!((metrics.step, metrics.tokens, metrics.skipped), (step + 1, 35, false));
            }
        }
    }
}

/// The saved adapter has the trained values, and a model loaded with it gives the trained tokens.
#[test]
fn an_adapter_is_learned_saved_and_loaded() {
    let engine = load("llama");
    let example = Example { tokens: vec![5, 40, 41, 42], from: 0 };
    let mut trainer = Trainer::new(engine, options(4, 2e-2)).expect("a rank that fits");
    let batch = vec![vec![example.clone()]];
    let first = trainer.loss(&batch[0]).expect("a batch");
    for _ in 0..40 {
        trainer.step(&batch).expect("a batch");
    }
    // The frozen output projection bounds the logits, so no adapter gets a loss below 0.19. A loss below 0.23 puts all
    // three tokens above a probability of one half.
    let (last, tokens) = trainer.loss(&batch[0]).expect("a batch");
    assert!(first.0 > 4.0 && last < 0.23 && tokens == 3, "{first:?} {last}");
    let target = tempfile::tempdir().expect("a folder");
    trainer.save(target.path()).expect("it is empty");
    let open = || ModelFolder::open(fixture("llama")).expect("a fixture");
    let read = open().adapter(target.path()).expect("just written");
    assert_eq!(read.values(), trainer.adapter().expect("numbers").expect("an adapter").values());
    let folder = open().with_adapter(target.path()).expect("just written");
    let adapted =
        Engine::from_folder(&cpu(), folder, &EngineOptions::default(), |_| {}).expect("dense");
    let logits = adapted.session(8).expect("fits").logits(&example.tokens[..3]).expect("room");
    for (row, want) in logits.chunks(adapted.config().vocab).zip(&example.tokens[1..]) {
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a vocabulary");
        assert_eq!(best as u32, *want);
    }
}

#[test]
fn options_that_mean_nothing_are_refused() {
    let engine = load("llama");
    let refused = |options| match Trainer::new(engine.clone(), options) {
        Ok(_) => panic!("it was taken"),
        Err(why) => why.to_string(),
    };
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(refused(options(4, rate)).starts_with("--learning-rate is "), "{rate}");
    }
    let with = |change: fn(&mut AdamWOptions)| refused(adamw(options(4, 1e-3), change));
    assert!(with(|own| own.weight_decay = -0.1).contains("--weight-decay is -0.1"));
    assert!(with(|own| own.max_grad_norm = Some(0.0)).contains("--max-grad-norm is 0"));
    assert!(
        with(|own| own.beta1 = 1.0).contains("--beta1 is 1\nhint: use a number from 0 to below 1")
    );
    assert!(with(|own| own.beta2 = f64::NAN).contains("--beta2 is NaN"));
    assert!(with(|own| own.eps = 1e-60).contains("--eps is 0.0000"));
    assert!(refused(options(0, 1e-3)).contains("rank 0"));
    let mut trainer = Trainer::new(engine.clone(), options(4, 1e-3)).expect("valid");
    assert!(matches!(trainer.step(&[]), Err(TrainError::Model(_))));
    let before = trainer.adapter().expect("numbers").expect("an adapter");
    // With an excessive learning rate the next step diverges.
    let mut wild = Trainer::from_adapter(engine, before, options(4, 1e30)).expect("finite");
    let batch = vec![vec![Example { tokens: vec![5, 6, 7], from: 0 }]];
    wild.step(&batch).expect("the first step has a finite loss");
    let diverged = wild.step(&batch).expect_err("it diverged");
    assert!(matches!(diverged, TrainError::Diverged { step: 2 }), "{diverged}");
}

#[test]
fn examples_come_from_files() {
    let folder = ModelFolder::open(demo()).expect("the demo");
    let target = tempfile::tempdir().expect("a folder");
    let open = |name: &str, text: &str, context| {
        let path = target.path().join(name);
        std::fs::write(&path, text).expect("it is ours");
        Dataset::open(&path, &folder, context)
    };
    let eos = folder.request().stop_tokens[0];
    let lines =
        "{\"text\": \"One day\"}\n\n{\"prompt\": \"One day\", \"completion\": \" a dog ran\"}\n";
    let data = open("a.jsonl", lines, 64).expect("examples");
    let [plain, pair] = &examples(&data)[..] else { panic!("{data:?}") };
    let prompt = folder.encode("One day").expect("text");
    assert_eq!((plain.from, &plain.tokens[..prompt.len()]), (0, &prompt[..]));
    assert_eq!((pair.from, pair.tokens.last()), (prompt.len(), Some(&eos)));
    assert!(pair.tokens.len() > prompt.len() + 2 && plain.tokens.last() == Some(&eos));
    // Long examples are cut, and count only if a target token is left.
    let data = open("b.jsonl", lines, prompt.len()).expect("examples");
    assert_eq!((examples(&data).len(), data.cut, data.left_out), (1, 1, 1));
    let text = "Once upon a time there was a little dog. ".repeat(9);
    let data = open("c.txt", &text, 16).expect("examples");
    let all: Vec<u32> = examples(&data).iter().flat_map(|own| own.tokens.clone()).collect();
    assert_eq!(all, folder.encode(&text).expect("text"));
    assert!(examples(&data).iter().all(|own| own.tokens.len() <= 16 && own.from == 0));
    for (text, why) in [
        ("{\"text\": 3}", "line 1: `text` is not a string"),
        ("{\"text\": \"a\"}\n{\"question\": \"a\"}", "line 2: unexpected fields (question)"),
        ("not json", "line 1: not JSON: "),
        ("[]", "line 1: expected a JSON object"),
        ("", "has a target token within 64 tokens"),
    ] {
        let refused = open("bad.jsonl", text, 64).expect_err(text).to_string();
        assert!(refused.contains(why) && refused.contains("\nhint: "), "{refused}");
    }
    let message =
        |role: &str| format!("{{\"messages\": [{{\"role\": \"{role}\", \"content\": \"Hi\"}}]}}");
    for role in ["user", "system", "model"] {
        let why = open("chat.jsonl", &message(role), 64).expect_err(role).to_string();
        assert!(why.contains("expected the last message from the assistant"), "{why}");
    }
    let answer = open("chat.jsonl", &message("assistant"), 64).expect("the demo has a template");
    assert_eq!(examples(&answer).len(), 1);
    let gone = Dataset::open(target.path().join("gone"), &folder, 64).expect_err("gone");
    assert!(matches!(gone, DatasetError::Read { .. }), "{gone}");
}

fn example(seed: u32) -> Example {
    Example { tokens: (0..12).map(|at| (at * 7 + seed * 13) % 60).collect(), from: 0 }
}

/// Takes steps on examples that depend on the step alone.
fn steps(trainer: &mut Trainer, until: usize) {
    while trainer.done() < until {
        let seed = trainer.done() as u32;
        trainer.step(&[vec![example(seed)], vec![example(seed + 1)]]).expect("a batch");
    }
}

fn weights(folder: &Path) -> Vec<u8> {
    let there = |file: &&&str| folder.join(file).exists();
    let files = ["model.safetensors", "adapter_model.safetensors"];
    let file = files.iter().find(there).expect("saved");
    std::fs::read(folder.join(file)).expect("saved")
}

/// Runs `until` steps at once, then half of them, saves, and resumes with a new trainer; all bits are the same.
fn resumed(start: impl Fn(&Path) -> Trainer, from: &Path) {
    let (run, target) = (json!({ "data": 7, "epoch": 1 }), tempfile::tempdir().expect("a folder"));
    let at = |name: &str| target.path().join(name);
    let save = |trainer: &mut Trainer, name: &str| {
        let mut folder = Adapter::begin(at(name)).expect("nobody else writes it");
        trainer.checkpoint_into(&mut folder, &run).expect("it is writable");
    };
    let mut whole = start(from);
    steps(&mut whole, 6);
    save(&mut whole, "whole");
    let mut half = start(from);
    steps(&mut half, 3);
    save(&mut half, "half");
    drop(half);
    let mut rest = start(&at("half"));
    rest.resume(at("half"), &run).expect("the same options");
    assert_eq!(rest.done(), 3);
    steps(&mut rest, 6);
    save(&mut rest, "rest");
    assert!(weights(&at("whole")) == weights(&at("rest")), "other weights");
    let state =
        |name: &str| std::fs::read(at(name).join("flashover_run.safetensors")).expect("saved");
    assert!(state("whole") == state("rest"), "other state");
    assert!(weights(&at("whole")) != weights(&at("half")));
    // Other data.
    let refused =
        rest.resume(at("half"), &json!({ "data": 8, "epoch": 1 })).expect_err("other data");
    assert!(refused.to_string().contains("data: 7 in the saved run, 8 here"), "{refused}");
}

#[test]
fn a_resumed_run_takes_the_same_steps() {
    for moments in Moments::ALL {
        let optimizer = AdamWOptions { moments, ..AdamWOptions::default() };
        let schedule = Schedule { warmup: 2, ..Schedule::constant(1e-3) };
        let all = Offload { optimizer: true, gradients: true, inputs: true };
        for (name, offload) in
            [("gpt2", Offload::default()), ("phi3", Offload::default()), ("phi3", all)]
        {
            let recompute = if offload == all { Recompute::Layers } else { Recompute::Nothing };
            let options =
                FullOptions { schedule, optimizer, offload, recompute, ..FullOptions::default() };
            let full = |folder: &Path| {
                let start = Start::Folder(Box::new(ModelFolder::open(folder).expect("a model")));
                Trainer::full(&cpu(), start, &EngineOptions::default(), options.clone())
                    .expect("dense")
            };
            resumed(full, &fixture(name));
        }
        let adapted = |folder: &Path| {
            let offload = Offload { inputs: true, ..Offload::default() };
            let options = TrainOptions { optimizer, offload, ..options(4, 1e-2) };
            let base = ModelFolder::open(fixture("llama")).expect("a fixture");
            match folder.join("adapter_config.json").exists() {
                true => {
                    let adapter = base.adapter(folder).expect("just saved");
                    Trainer::from_adapter(load("llama"), adapter, options).expect("valid")
                }
                false => Trainer::new(load("llama"), options).expect("valid"),
            }
        };
        resumed(adapted, &fixture("llama"));
    }
}

/// Weights in 16 bits: rounded stochastically, next to a master, and with the loss scale of f16.
#[test]
fn resumed_runs_in_16_bits_take_the_same_steps() {
    for (dtype, master) in [(Compute::Bf16, false), (Compute::Bf16, true), (Compute::F16, true)] {
        for name in ["gpt2", "llama"] {
            let schedule = Schedule::constant(1e-3);
            let options = FullOptions { schedule, master, ..FullOptions::default() };
            let engine = EngineOptions { dtype: Some(dtype), ..EngineOptions::default() };
            let full = |folder: &Path| {
                let start = Start::Folder(Box::new(ModelFolder::open(folder).expect("a model")));
                Trainer::full(&cpu(), start, &engine, options.clone()).expect("dense")
            };
            resumed(full, &fixture(name));
        }
    }
    let muon = Some(MuonOptions::default());
    let optimizer = AdamWOptions { muon, ..AdamWOptions::default() };
    let options = FullOptions { optimizer, ..FullOptions::default() };
    let full = |folder: &Path| {
        let start = Start::Folder(Box::new(ModelFolder::open(folder).expect("a model")));
        Trainer::full(&cpu(), start, &EngineOptions::default(), options.clone()).expect("dense")
    };
    resumed(full, &fixture("gpt2"));
}

/// A saved model is the one that was trained, in all families.
#[test]
fn a_saved_model_has_the_trained_weights() {
    for name in ["gemma2", "gemma3", "gpt2", "gpt2_bare", "llama", "llama3_tied", "phi3", "qwen2"] {
        let start = Start::Folder(Box::new(ModelFolder::open(fixture(name)).expect("a fixture")));
        let options = FullOptions { schedule: Schedule::constant(1e-2), ..FullOptions::default() };
        let mut trainer =
            Trainer::full(&cpu(), start, &EngineOptions::default(), options).expect("dense");
        let target = tempfile::tempdir().expect("a folder");
        let logits =
            |engine: &Engine| engine.session(8).expect("fits").logits(&[5, 6, 7, 8]).expect("room");
        trainer.save(target.path().join("before")).expect("writable");
        let before = Engine::load(&cpu(), target.path().join("before"), &EngineOptions::default());
        assert!(logits(&load(name)) == logits(&before.expect("a model")), "{name}: before");
        steps(&mut trainer, 2);
        trainer.save(target.path().join("after")).expect("writable");
        let after = Engine::load(&cpu(), target.path().join("after"), &EngineOptions::default())
            .expect("a model");
        assert!(logits(trainer.engine()) == logits(&after), "{name}: after");
        assert!(logits(&load(name)) != logits(&after), "{name}: nothing was trained");
    }
}

/// After a step of all weights the engine generates what the saved model does, older sessions are refused, and so is a step
/// while others generate.
#[test]
fn a_step_makes_older_sessions_stale() {
    let start = Start::Folder(Box::new(ModelFolder::open(fixture("llama")).expect("a fixture")));
    let options = FullOptions { schedule: Schedule::constant(1e-2), ..FullOptions::default() };
    let mut trainer =
        Trainer::full(&cpu(), start, &EngineOptions::default(), options).expect("dense");
    let engine = trainer.engine().clone();
    let request = Request { max_new_tokens: Some(8), stop_tokens: Vec::new(), ..engine.request() };
    let prompts = [vec![5, 6, 7], vec![8, 9, 10, 11, 12]];
    let of = |engine: &Engine| {
        let all = engine.generate_batch(&prompts, 2, &request).expect("it answers");
        let ids = |own: &Completion| own.tokens.iter().map(|token| token.id).collect::<Vec<_>>();
        all.iter().flatten().map(ids).collect::<Vec<_>>()
    };
    let before = of(&engine);
    let mut session = engine.session(64).expect("it fits");
    let mut tokens = session.generate(&prompts[0], &request).expect("it answers");
    assert_eq!(tokens.next().expect("a token").expect("finite").id, before[0][0]);
    tokens.next().expect("a token").expect("finite");
    steps(&mut trainer, 3);
    assert_eq!(engine.version(), 3);
    // The iterator has computed no token in advance, so its next one is of the new weights.
    let stale = tokens.next().expect("an error");
    assert!(matches!(stale, Err(GenerateError::Stale { session: 0, weights: 3 })), "{stale:?}");
    assert!(tokens.next().is_none());
    let stale = session.logits(&[1]).expect_err("its keys are old");
    assert!(stale.to_string().contains("hint: start a new session after a step"), "{stale}");
    session.clear();
    session.logits(&[1]).expect("an empty session has no keys");

    let target = tempfile::tempdir().expect("a folder");
    trainer.save(target.path().join("after")).expect("writable");
    let after = Engine::load(&cpu(), target.path().join("after"), &EngineOptions::default());
    let after = of(&after.expect("a model"));
    assert!(of(&engine) == after && after != before, "other weights generate");

    let asked: Vec<(&[u32], &Request)> = prompts.iter().map(|own| (&own[..], &request)).collect();
    let mut refused = 0;
    let answers = engine.generate_each_with(&asked, 1, |_| {
        let busy = trainer.step(&[vec![example(1)]]);
        assert!(matches!(busy, Err(TrainError::Busy)), "{busy:?}");
        refused += 1;
        ControlFlow::Continue(())
    });
    assert_eq!((answers.expect("it answers").len(), refused), (2, 16));
    assert_eq!((trainer.done(), engine.version()), (3, 3));
    steps(&mut trainer, 4);
}
