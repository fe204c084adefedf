//! Compares generation with transformers, and tests sessions, batches and memory.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;

use checkpoint::{Checkpoint, Tensor};
use flashover::bench::SpeedTest;
use flashover::memory::{MemoryBudget, PlanError, Workload};
use flashover::{
    Backend, Completion, Device, Engine, EngineOptions, FinishReason, GenerateError, KvFormat,
    LoadError, ModelFolder, Request, Sampling, Token, WeightFormat,
};

use crate::{cpu, demo, fixture};

fn engine(name: &str) -> Engine {
    Engine::load(&cpu(), fixture(name), &EngineOptions::default()).expect("a fixture")
}

/// Returns the prompt and the greedy tokens from transformers.
fn golden(name: &str) -> [Vec<u32>; 2] {
    let file = Checkpoint::open(fixture(name).join("golden.safetensors")).expect("a fixture");
    ["prompt", "greedy"].map(|name| {
        let Tensor { bytes, .. } = file.tensor(name).expect("make.py writes it");
        let ids = bytes.as_chunks::<8>().0.iter();
        ids.map(|id| u32::try_from(i64::from_le_bytes(*id)).expect("an id")).collect()
    })
}

fn plain(max_new_tokens: usize) -> Request {
    Request {
        sampling: Sampling::default(),
        max_new_tokens: Some(max_new_tokens),
        stop_tokens: Vec::new(),
        stop_sequences: Vec::new(),
    }
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// Runs one generation to its end.
fn alone(engine: &Engine, prompt: &[u32], context: usize, request: &Request) -> Completion {
    let mut session = engine.session(context).expect("not longer than the model's");
    let mut tokens = session.generate(prompt, request).expect("a prompt that fits");
    let made = tokens.by_ref().collect::<Result<Vec<_>, _>>().expect("room");
    assert!(tokens.next().is_none());
    Completion {
        tokens: made,
        stop: None,
        text: None,
        finish_reason: tokens.finish_reason().expect("it ended"),
    }
}

#[test]
fn a_session_ends_where_it_is_told_to() {
    let (engine, [prompt, greedy]) = (engine("llama"), golden("llama"));
    let made = alone(&engine, &prompt, 96, &plain(20));
    assert_eq!(
        (ids(&made.tokens), made.finish_reason),
        (greedy[..20].to_vec(), FinishReason::Length)
    );
    assert!(made.tokens.iter().all(|token| token.logprob < 0.0));
    // Up to the first token with this id, which is not returned.
    let eos = greedy[6];
    let first = greedy.iter().position(|id| *id == eos).expect("it is there");
    let made = alone(&engine, &prompt, 96, &Request { stop_tokens: vec![eos], ..plain(64) });
    assert_eq!(
        (ids(&made.tokens), made.finish_reason),
        (greedy[..first].to_vec(), FinishReason::Eos)
    );
    // The last token is returned although nothing can follow it.
    let made = alone(&engine, &prompt, prompt.len() + 4, &plain(64));
    assert_eq!(
        (ids(&made.tokens), made.finish_reason),
        (greedy[..5].to_vec(), FinishReason::Context)
    );
    // A second generation continues the first.
    let mut session = engine.session(96).expect("short");
    let given: Vec<_> = session.generate(&prompt, &plain(3)).expect("fits").collect();
    assert_eq!((given.len(), session.tokens().len()), (3, prompt.len() + 2));
    let next: Vec<_> = session.generate(&greedy[2..3], &plain(4)).expect("fits").collect();
    let next: Vec<u32> = next.into_iter().map(|token| token.expect("room").id).collect();
    assert_eq!(next, greedy[3..7]);
}

/// Prompts of different lengths with several completions and one seed give the tokens of single runs.
#[test]
fn a_batch_is_what_each_is_alone() {
    let (engine, [prompt, _]) = (engine("llama"), golden("llama"));
    let prompts = [&prompt[..5], &prompt[..], &prompt[..1]];
    let sampling = Sampling { temperature: 1.5, seed: 11, ..Sampling::default() };
    let request = Request { sampling, stop_tokens: vec![3, 17, 29], ..plain(24) };
    let batch = engine.generate_batch(&prompts, 3, &request).expect("fits");
    assert_eq!(batch, engine.generate_batch(&prompts, 3, &request).expect("fits"));
    let mut different = Vec::new();
    for (prompt, answers) in prompts.iter().zip(&batch) {
        let one = alone(&engine, prompt, 96, &request);
        assert_eq!(
            (ids(&answers[0].tokens), answers[0].finish_reason),
            (ids(&one.tokens), one.finish_reason)
        );
        different.extend(answers.iter().map(|answer| ids(&answer.tokens)));
    }
    different.sort();
    different.dedup();
    assert!(different.len() > 6, "a seed is not shared by the answers to a prompt");
    // Without a limit, completions fill the model's context.
    let long = Request { max_new_tokens: None, ..plain(0) };
    let batch = engine.generate_batch(&prompts[..2], 1, &long).expect("fits");
    for (prompt, answers) in prompts.iter().zip(&batch) {
        let context = engine.config().context().expect("llama's has an end");
        assert_eq!(answers[0].tokens.len(), context - prompt.len() + 1);
        assert_eq!(answers[0].finish_reason, FinishReason::Context);
    }
}

/// Each prompt follows the sampling, limit and stops of its own request.
#[test]
fn requests_of_a_batch_are_each_its_own() {
    let (engine, [prompt, _]) = (engine("llama"), golden("llama"));
    let sampled = |seed, max| {
        let sampling = Sampling { temperature: 1.5, seed, ..Sampling::default() };
        Request { sampling, ..plain(max) }
    };
    let requests = [sampled(11, 12), sampled(12, 5), plain(9), sampled(11, 12)];
    let asked: Vec<(&[u32], &Request)> =
        requests.iter().map(|request| (&prompt[..6], request)).collect();
    let each = engine.generate_each(&asked, 2).expect("fits");
    for (answers, request) in each.iter().zip(&requests) {
        let one = alone(&engine, &prompt[..6], 96, request);
        assert_eq!(
            (ids(&answers[0].tokens), answers[0].finish_reason),
            (ids(&one.tokens), one.finish_reason)
        );
    }
    assert_eq!(each[0], each[3]);
    assert_ne!(ids(&each[0][0].tokens)[..5], ids(&each[1][0].tokens)[..]);
    assert!(each.iter().flatten().all(|answer| answer.text.is_none()), "it has no tokenizer");
    let stops = Request { stop_sequences: vec!["x".into()], ..plain(4) };
    let refused = engine.generate_batch(&[[1]], 2, &stops).expect_err("no text");
    assert!(matches!(refused, GenerateError::NoTokenizer(_)), "{refused}");
}

/// Stop sequences end the completions of a batch where they end single ones.
#[test]
fn stops_end_the_answers_of_a_batch() {
    let options = EngineOptions::default();
    let engine = Engine::load(&cpu(), demo(), &options).expect("the demo");
    let prompts: Vec<Vec<u32>> = ["Once upon a time", "The old man", "One day"]
        .iter()
        .map(|prompt| engine.encode(prompt).expect("text"))
        .collect();
    let request = Request { stop_sequences: vec![".".into(), ", and".into()], ..plain(40) };
    let together = engine.generate_batch(&prompts, 1, &request).expect("fits");
    for (prompt, answers) in prompts.iter().zip(&together) {
        let mut session = engine.session(128).expect("fits");
        let mut pieces = session.generate_text(prompt, &request).expect("text");
        let text: String = pieces.by_ref().map(|piece| piece.expect("room")).collect();
        assert_eq!(
            (answers[0].text.as_deref(), Some(answers[0].finish_reason)),
            (Some(&text[..]), pieces.finish_reason())
        );
        assert_eq!(answers[0].tokens.len(), pieces.tokens());
        assert!(!text.contains('.') && !text.contains(", and"), "{text}");
    }
    assert!(
        together.iter().any(|answers| answers[0].finish_reason == FinishReason::Stop),
        "{together:?}"
    );
    // The steps seen by the callback add up to the completions.
    let asked: Vec<(&[u32], &Request)> =
        prompts.iter().map(|prompt| (&prompt[..], &request)).collect();
    let mut told = vec![(Vec::new(), String::new(), None); asked.len()];
    let made = engine.generate_each_with(&asked, 1, |step| {
        let (tokens, text, end) = &mut told[step.prompt];
        assert!(end.is_none(), "something came after the end: {step:?}");
        tokens.extend(step.token);
        text.push_str(step.piece);
        *end = step.finish_reason;
        ControlFlow::Continue(())
    });
    assert_eq!(made.expect("fits"), together);
    for ((tokens, text, end), answers) in told.into_iter().zip(together) {
        let stop = answers[0].stop;
        let finish_reason = end.expect("it has one");
        let told = Completion { tokens, stop, text: Some(text), finish_reason };
        assert_eq!(vec![told], answers);
    }
    let empty = Request { stop_sequences: vec![String::new()], ..plain(4) };
    assert!(matches!(engine.generate_batch(&prompts, 1, &empty), Err(GenerateError::Text(_))));
}

/// A prompt that fills the model's context is shared by its completions, next to a shorter prompt.
#[test]
fn a_prompt_that_fills_the_context_has_answers() {
    let (engine, [prompt, _]) = (engine("llama"), golden("llama"));
    let context = engine.config().context().expect("llama's has an end");
    let full: Vec<u32> = prompt.iter().copied().cycle().take(context).collect();
    let prompts = [&full[..], &prompt[..4]];
    for prompts in [&prompts[..1], &prompts] {
        let answers = engine.generate_batch(prompts, 2, &plain(3)).expect("it fits");
        assert!(answers[0].iter().all(|answer| answer.tokens.len() == 1), "{answers:?}");
        assert_eq!(answers[0][0].finish_reason, FinishReason::Context);
    }
    let none = engine.generate_batch(&[&full[..64]], 2, &plain(0)).expect("it fits");
    assert!(
        none[0]
            .iter()
            .all(|answer| answer.tokens.is_empty() && answer.finish_reason == FinishReason::Length)
    );
}

/// Each thread has its own stream.
#[test]
fn batches_beside_each_other_are_what_each_is_alone() {
    let (engine, [prompt, _]) = (engine("llama"), golden("llama"));
    let sampling = Sampling { temperature: 1.2, seed: 3, ..Sampling::default() };
    let request = Request { sampling, ..plain(16) };
    let prompts = [&prompt[..6], &prompt[..2], &prompt[3..]];
    let batch = |at: usize| {
        engine.generate_batch(&[prompts[at], prompts[(at + 1) % 3]], 2, &request).expect("fits")
    };
    let alone: Vec<_> = (0..3).map(batch).collect();
    let beside: Vec<_> = std::thread::scope(|threads| {
        let all: Vec<_> = (0..3).map(|at| threads.spawn(move || batch(at))).collect();
        all.into_iter().map(|thread| thread.join().expect("it answers")).collect()
    });
    assert_eq!(beside, alone);
}

/// Completions of a prompt longer than a page share its pages of the KV cache.
#[test]
fn answers_that_share_a_prompt_are_what_each_is_alone() {
    let (engine, [prompt, _]) = (engine("llama"), golden("llama"));
    let long: Vec<u32> = prompt.iter().copied().cycle().take(70).collect();
    let sampling = Sampling { temperature: 1.5, seed: 5, ..Sampling::default() };
    let request = Request { sampling, ..plain(20) };
    let together = engine.generate_batch(&[&long[..], &prompt[..4]], 3, &request).expect("fits");
    for (prompt, answers) in [&long[..], &prompt[..4]].into_iter().zip(&together) {
        let one = alone(&engine, prompt, 128, &request);
        assert_eq!(ids(&answers[0].tokens), ids(&one.tokens));
        assert_ne!(ids(&answers[1].tokens), ids(&answers[2].tokens));
    }
}

#[test]
fn a_budget_holds() {
    let device = cpu();
    let load = |budget| {
        let options = EngineOptions { budget, ..EngineOptions::default() };
        Engine::load(&device, fixture("llama"), &options)
    };
    let all = MemoryBudget::default();
    let engine = load(all).expect("a fixture");
    let weights = engine.plan(Workload::new(1, 1)).expect("valid").weights_bytes;
    let below = load(MemoryBudget { limit_bytes: Some(weights - 1), ..all });
    let Err(LoadError::Plan(PlanError::Memory(plan))) = &below else { panic!("{below:?}") };
    assert!(plan.peak_bytes() > weights - 1 && plan.largest_batch == Some(0), "{plan}");
    // The budget fits exactly one sequence of 64 positions: 64 work, and 65 are refused.
    let peak = engine.plan(Workload::new(1, 64)).expect("valid").peak_bytes();
    let small = load(MemoryBudget { limit_bytes: Some(peak), ..all }).expect("it fits");
    let [prompt, _] = golden("llama");
    let mut session = small.session(64).expect("it fits");
    let tokens = session.generate(&prompt[..4], &plain(8)).expect("it answers");
    assert_eq!(tokens.collect::<Result<Vec<_>, _>>().expect("it answers").len(), 8);
    // Next to that session nothing else fits.
    let refused = small.session(1);
    let Err(GenerateError::Plan(PlanError::Memory(plan))) = &refused else { panic!("{refused:?}") };
    assert!(plan.other_bytes > 0 && plan.largest_context == Some(0), "{plan}");
    assert!(
        refused.expect_err("refused").to_string().contains("hint: run fewer of them at once; ")
    );
    drop(session);
    let refused = small.session(65);
    let Err(GenerateError::Plan(PlanError::Memory(plan))) = &refused else { panic!("{refused:?}") };
    assert_eq!(plan.largest_context, Some(64));
    let text = refused.expect_err("refused").to_string();
    assert!(text.contains("with 1 sequence of 65 tokens takes"), "{text}");
    assert!(text.contains("hint: 64 tokens fit"), "{text}");
    let two = small.generate_batch(&[&prompt[..4], &prompt[..5]], 1, &plain(60));
    assert!(matches!(two, Err(GenerateError::Plan(PlanError::Memory(_)))), "{two:?}");
    // Refused requests leave nothing behind, and the engine still works.
    let mut session = small.session(64).expect("it fits");
    let again = session.generate(&prompt[..4], &plain(8)).expect("it answers");
    assert_eq!(again.count(), 8);
}

#[test]
fn a_folder_knows_what_a_request_needs() {
    let [prompt, _] = golden("llama");
    let open = || ModelFolder::open(fixture("llama")).expect("a fixture");
    let (folder, request) = (open(), plain(8));
    let long: Vec<u32> = prompt.iter().copied().cycle().take(66).collect();
    let workload = folder.workload(&[&long], 3, &request);
    // The page that a prompt of 66 tokens fills is shared.
    assert_eq!(workload, Workload { shared: Some(2 * 64), ..Workload::new(3, 74) });
    let engine = Engine::load(&cpu(), fixture("llama"), &EngineOptions::default());
    let engine = engine.expect("a fixture");
    assert_eq!(engine.workload(&[&long], 3, &request), workload);
    let plan = engine.plan(workload.clone()).expect("valid");
    let peak = plan.peak_bytes();
    assert_eq!((plan.largest_batch, plan.largest_context), (None, None));
    // Each sequence has two pages, and one page is shared; another is for rows without a sequence.
    let apart = engine.plan(Workload::new(3, 128)).expect("valid").cache_bytes;
    let angles = engine.plan(Workload::new(1, 128)).expect("valid").cache_bytes * 3 - apart;
    let page = (apart - angles / 2) / 6;
    assert!(plan.cache_bytes.abs_diff(5 * page) < page / 2, "{plan}");
    let load = |limit| {
        let budget = MemoryBudget { limit_bytes: Some(limit), ..MemoryBudget::default() };
        let options =
            EngineOptions { budget, workload: Some(workload.clone()), ..EngineOptions::default() };
        Engine::from_folder(&cpu(), open(), &options, |_| {})
    };
    let enough = load(peak).expect("it fits");
    assert_eq!(enough.generate_batch(&[&long], 3, &request).expect("it fits")[0].len(), 3);
    let less = load(peak - 1).expect_err("it does not fit").to_string();
    assert!(less.contains("hint: use fewer completions or fewer new tokens"), "{less}");
    let options = EngineOptions {
        workload: Some(folder.workload(&[&prompt.repeat(99)], 1, &request)),
        ..EngineOptions::default()
    };
    let context = Engine::from_folder(&cpu(), open(), &options, |_| {})
        .expect_err("longer than the model goes");
    assert!(context.context().is_some(), "{context}");
    assert!(matches!(folder.check(&[]), Err(GenerateError::EmptyPrompt)));
    let token = folder.check(&[1, 99_999]).expect_err("no such token").to_string();
    assert!(token.starts_with("token 99999 is outside"), "{token}");
}

#[test]
fn a_profile_has_all_that_ran() {
    let engine = engine("llama");
    let test = SpeedTest { prompt: 20, generated: 3, depth: 4, batch: 2 };
    let profile = engine.profile(test).expect("it runs");
    let layers = engine.config().layers.len();
    let named = |name: &str| profile.layers.iter().find(|layer| layer.name == name);
    for name in ["embedding", "head", "sampling", "layer 0"] {
        let part = named(name).unwrap_or_else(|| panic!("{name}: {:?}", profile.layers));
        // One prefill and three decode steps.
        assert_eq!(part.passes, 4, "{name}");
        assert!(part.launches >= part.passes && part.total_ns > 0, "{part:?}");
    }
    assert!(named(&format!("layer {}", layers - 1)).is_some());
    let calls = |start: &str| {
        let own = profile.operators.iter().filter(|o| o.name.starts_with(start));
        own.map(|operator| operator.calls).sum::<usize>()
    };
    assert_eq!(calls("attention_decode "), 3 * layers);
    assert_eq!(calls("attention ") + calls("attention_decode "), 4 * layers);
    assert_eq!((calls("norm "), calls("sample ")), (4 * (2 * layers + 1), 4));
    assert!(profile.operators.iter().map(|o| o.share).sum::<f64>() > 0.999);
    assert_eq!(profile.trace.untimed, 0);
    assert!(profile.busy() > 0.0 && profile.busy() < 1.05, "{}", profile.busy());
    assert!(!profile.trace.memory.is_empty());
    let weights: u64 = profile.layers.iter().map(|layer| layer.weight_bytes).sum();
    assert_eq!(weights, engine.weight_bytes());
}

/// RoPE frequencies that change with the length change for each sequence alone.
#[test]
fn stretched_ropes_batch_one_by_one() {
    for name in ["llama_dynamic", "phi3_longrope"] {
        let (engine, [prompt, greedy]) = (engine(name), golden(name));
        let prompts = [&prompt[..], &prompt[..9]];
        let batch = engine.generate_batch(&prompts, 1, &plain(greedy.len())).expect("fits");
        assert_eq!(ids(&batch[0][0].tokens), greedy, "{name}");
        let one = alone(&engine, &prompt[..9], 9 + greedy.len(), &plain(greedy.len()));
        assert_eq!(ids(&batch[1][0].tokens), ids(&one.tokens), "{name}");
        // Lengths on both sides of the change of frequencies, and across it.
        for lengths in [[33, 32], [40, 39]] {
            let prompts = lengths.map(|length| prompt.iter().copied().cycle().take(length));
            let prompts = prompts.map(Iterator::collect::<Vec<u32>>);
            let batch = engine.generate_batch(&prompts, 1, &plain(8)).expect("fits");
            for (prompt, answers) in prompts.iter().zip(&batch) {
                let one = alone(&engine, prompt, prompt.len() + 8, &plain(8));
                assert_eq!(ids(&answers[0].tokens), ids(&one.tokens), "{name} {}", prompt.len());
            }
        }
    }
}

/// The callback cancels a batch that decodes together, and sequences that run one by one.
#[test]
fn answers_stop_where_they_are_told_to() {
    for (name, told) in [("llama", 6), ("llama_dynamic", 4)] {
        let (engine, [prompt, greedy]) = (engine(name), golden(name));
        let (request, mut steps) = (plain(greedy.len()), 0);
        let made = engine.generate_each_with(&[(&prompt, &request)], 3, |_| {
            steps += 1;
            if steps == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let made = made.expect("fits").concat();
        assert_eq!(steps, told, "{name}");
        assert_eq!(made.iter().map(|one| one.tokens.len()).sum::<usize>(), told, "{name}");
        for one in &made {
            assert_eq!(one.finish_reason, FinishReason::Cancelled, "{name}");
            assert!(greedy.starts_with(&ids(&one.tokens)), "{name}");
        }
    }
}

/// A tokenizer may lack ids of the model, between added tokens or after the last; here it lacks a third.
#[test]
fn tokens_that_the_tokenizer_lacks_are_never_sampled() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("llama").join(file), folder.path().join(file)).expect("a fixture");
    }
    let vocab: BTreeMap<String, u32> =
        (0..160).filter(|id| id % 3 != 1).map(|id| (format!("w{id}"), id)).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "w0" },
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("writable");
    let engine = Engine::load(&cpu(), folder.path(), &EngineOptions::default()).expect("a model");
    let [prompt, greedy] = golden("llama");
    let lacks = |id: &u32| id % 3 == 1;
    assert!(greedy.iter().any(lacks), "or the test shows nothing");
    for (temperature, seed) in [(0.0, 0), (2.0, 1), (2.0, 2)] {
        let sampling = Sampling { temperature, seed, ..Sampling::default() };
        let request = Request { sampling, ..plain(64) };
        let made = alone(&engine, &prompt, 96, &request);
        assert!(made.tokens.len() > 40 && !ids(&made.tokens).iter().any(lacks), "{temperature}");
        let batch = engine.generate_batch(&[&prompt, &prompt[..3]], 2, &request).expect("fits");
        let batch: Vec<u32> = batch.concat().iter().flat_map(|one| ids(&one.tokens)).collect();
        assert!(batch.len() > 100 && !batch.iter().any(lacks), "{temperature}");
    }
}

#[test]
fn a_broken_chat_template_is_an_error_of_chats_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(demo().join(file), folder.path().join(file)).expect("copied");
    }
    let template = folder.path().join("chat_template.jinja");
    fs::write(&template, "{% for m in messages %}").expect("written");
    let opened = ModelFolder::open(folder.path()).expect("plain prompts need no template");
    assert!(!opened.encode("One day").expect("a plain prompt").is_empty());
    for _ in 0..2 {
        let refused = opened.encode_chat(&[]).expect_err("broken").to_string();
        assert!(refused.starts_with("chat template `default` is invalid: "), "{refused}");
        assert_eq!(refused.matches("\nhint: ").count(), 1, "{refused}");
    }
    // A template is kept once it was opened.
    fs::write(&template, "One day").expect("written");
    let tokens = opened.encode_chat(&[]).expect("no messages are needed");
    fs::write(&template, "{% for m in messages %}").expect("written");
    assert_eq!(opened.encode_chat(&[]).expect("as before"), tokens);
}

#[test]
fn what_cannot_answer_says_why() {
    let engine = engine("llama");
    let mut session = engine.session(8).expect("short");
    let mut fails = |prompt: &[u32], request: &Request| {
        session.generate(prompt, request).map(|_| ()).expect_err("a mistake")
    };
    assert!(matches!(fails(&[], &plain(1)), GenerateError::EmptyPrompt));
    let full = fails(&[1; 9], &plain(1));
    assert!(
        full.to_string().starts_with("expected at most 8 tokens in the cache, got 9"),
        "{full}"
    );
    let hot = Sampling { temperature: -1.0, ..Sampling::default() };
    let hot = fails(&[1], &Request { sampling: hot, ..plain(1) });
    assert!(hot.to_string().starts_with("temperature is -1\nhint: "), "{hot}");
    assert!(matches!(engine.encode("text"), Err(GenerateError::NoTokenizer(_))));
    assert!(matches!(engine.encode_chat(&[]), Err(GenerateError::NoTokenizer(_))));
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(demo().join(file), folder.path().join(file)).expect("copied");
    }
    let bare = ModelFolder::open(folder.path()).expect("the demo without its template");
    assert!(matches!(bare.encode_chat(&[]), Err(GenerateError::NoTemplate(_))));
    let long = engine.config().max_seq + 1;
    let long = engine.session(long).expect_err("longer than the model").to_string();
    assert!(long.contains("expected at most "), "{long}");
}

#[test]
fn memory_that_cannot_suffice_is_said_before_loading() {
    let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
    let have = device.profile().memory_bytes.expect("Linux tells");
    let folder = tempfile::tempdir().expect("a folder");
    // A sparse file of a model 100 times as large as the memory.
    let hidden = 4096u64;
    let vocab = have * 100 / (2 * hidden);
    let mut config: serde_json::Value = serde_json::from_str(
        &fs::read_to_string(fixture("llama").join("config.json")).expect("there"),
    )
    .expect("JSON");
    for (field, value) in [("hidden_size", hidden), ("vocab_size", vocab), ("num_hidden_layers", 1)]
    {
        config[field] = value.into();
    }
    config["tie_word_embeddings"] = true.into();
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let shapes = models::DecoderConfig::open(folder.path()).expect("valid").params();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for param in shapes {
        let bytes = 2 * param.stored.iter().product::<usize>();
        let tensor = serde_json::json!({
            "dtype": "BF16", "shape": param.stored, "data_offsets": [end, end + bytes],
        });
        header.insert(format!("model.{}", param.name), tensor);
        end += bytes;
    }
    let header = serde_json::Value::Object(header).to_string();
    let path = folder.path().join("model.safetensors");
    let begin = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(&path, &begin).expect("written");
    let file = fs::OpenOptions::new().write(true).open(&path).expect("there");
    if let Err(why) = file.set_len(begin.len() as u64 + end as u64) {
        println!(
            "skipped: memory_that_cannot_suffice_is_said_before_loading: needs sparse files: {why}"
        );
        return;
    }
    let error = Engine::load(&device, folder.path(), &EngineOptions::default());
    assert!(
        matches!(&error, Err(LoadError::Plan(PlanError::Memory(plan))) if plan.weights_bytes > have),
        "{error:?}"
    );
}

#[test]
fn weights_in_4_and_8_bits_answer() {
    let [prompt, _] = golden("llama");
    let logits = |engine: &Engine| {
        engine.session(prompt.len()).expect("short").logits(&prompt).expect("fits")
    };
    let dense = logits(&engine("llama"));
    let mut distances = Vec::new();
    for (quant, name) in [(WeightFormat::Int8, "int8"), (WeightFormat::Nf4, "4-bit")] {
        let options = EngineOptions { quant: Some(quant), ..EngineOptions::default() };
        let small = Engine::load(&cpu(), fixture("llama"), &options).expect("a fixture");
        assert_eq!(small.precision().1.as_deref(), Some(name));
        let small = logits(&small);
        assert_eq!(small.len(), dense.len());
        let square = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
        distances.push(small.iter().zip(&dense).map(square).sum::<f64>());
    }
    // A NaN would fail both comparisons.
    assert!(0.0 < distances[0] && distances[0] < distances[1], "{distances:?}");
}

#[test]
fn weights_in_4_bits_do_not_become_8() {
    let options = EngineOptions { quant: Some(WeightFormat::Int8), ..EngineOptions::default() };
    for name in ["llama_nf4", "phi3_nf4", "gpt2_nf4"] {
        let refused = Engine::load(&cpu(), fixture(name), &options);
        assert!(matches!(refused, Err(LoadError::FourBits(_))), "{name}: {refused:?}");
    }
}

#[test]
fn keys_and_values_in_8_bits_answer() {
    let [prompt, _] = golden("llama");
    let options = EngineOptions { kv: KvFormat::Int8, ..EngineOptions::default() };
    let bytes = Engine::load(&cpu(), fixture("llama"), &options).expect("a fixture");
    assert_eq!(bytes.kv_format(), KvFormat::Int8);
    let [float, bytes] = [engine("llama"), bytes].map(|engine| {
        let logits = engine.session(prompt.len()).expect("short").logits(&prompt).expect("fits");
        // Two completions share a prompt of whole pages.
        let long: Vec<u32> = prompt.iter().copied().cycle().take(66).collect();
        let one = alone(&engine, &long, 96, &plain(9));
        let batch = engine.generate_batch(&[&long], 2, &plain(9)).expect("fits");
        assert!(batch[0].iter().all(|answer| ids(&answer.tokens) == ids(&one.tokens)));
        let workload = Workload::new(1, prompt.len());
        (logits, engine.plan(workload).expect("valid").cache_bytes)
    });
    let largest = float.0.iter().fold(0f32, |top, logit| top.max(logit.abs()));
    let gap = float.0.iter().zip(&bytes.0).map(|(a, b)| (a - b).abs());
    let gap = gap.max_by(f32::total_cmp).expect("logits") / largest;
    assert!(0.0 < gap && gap < 0.05, "{gap}");
    assert!(bytes.1 < float.1, "{} for {}", bytes.1, float.1);
}
