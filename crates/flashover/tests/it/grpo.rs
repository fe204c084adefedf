//! Tests of GRPO.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use flashover::grpo::{
    Correction, DrawingReport, Grpo, GrpoError, GrpoOptions, GrpoPrompt, LearningReport, Level,
    ReferencePlace, Report, Rule, Scored, WeightedReward, parse_reward,
};
use flashover::memory::Workload;
use flashover::train::{Adapter, FullOptions, LoraOptions, Schedule, Start, TrainOptions, Trainer};
use flashover::{Engine, EngineOptions, KvFormat, ModelFolder, Request, Sampling};
use serde_json::{Map, Value, json};

use crate::{cpu, demo, fixture};

fn full(folder: impl AsRef<std::path::Path>, learning_rate: f64) -> Trainer {
    let start = Start::Folder(Box::new(ModelFolder::open(folder).expect("a model")));
    let schedule = Schedule::constant(learning_rate);
    let options = FullOptions { schedule, ..FullOptions::default() };
    Trainer::full(&cpu(), start, &EngineOptions::default(), options).expect("dense")
}

fn adapter(name: &str, learning_rate: f64) -> Trainer {
    let engine = Engine::load(&cpu(), fixture(name), &EngineOptions::default());
    let options = TrainOptions {
        lora: LoraOptions { rank: 4, alpha: 8.0, ..LoraOptions::default() },
        schedule: Schedule::constant(learning_rate),
        ..TrainOptions::default()
    };
    Trainer::new(engine.expect("a fixture"), options).expect("a rank that fits")
}

fn small() -> GrpoOptions {
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
    GrpoOptions {
        group: 4,
        max_new_tokens: 6,
        sampling,
        stop_tokens: Some(Vec::new()),
        micro_batch: 3,
        ..GrpoOptions::default()
    }
}

fn prompts() -> Vec<GrpoPrompt> {
    [vec![5, 6, 7], vec![8, 9, 10, 11, 12]]
        .into_iter()
        .enumerate()
        .map(|(at, tokens)| GrpoPrompt { tokens, line: at + 1, ..GrpoPrompt::default() })
        .collect()
}

/// A reward of the tokens alone, as the fixtures have no text.
fn even(own: &Scored<'_>) -> Option<f64> {
    Some(own.tokens.iter().filter(|id| **id % 2 == 0).count() as f64)
}

fn parts(report: Report) -> (DrawingReport, LearningReport) {
    (report.drawing.expect("it was sampled"), report.learning.expect("it was learned"))
}

fn greedy(engine: &Engine) -> Vec<u32> {
    let request = Request { max_new_tokens: Some(8), stop_tokens: Vec::new(), ..engine.request() };
    let all = engine.generate_batch(&[[5, 6, 7]], 1, &request).expect("it answers");
    all[0][0].tokens.iter().map(|token| token.id).collect()
}

/// Each trainer and option takes steps whose numbers are those of one policy: the sampler's probabilities are the trainer's.
#[test]
fn a_policy_draws_what_it_trains() {
    let corrected = Some(Correction { level: Level::Sequence, ..Correction::default() });
    let cases = [
        ("llama", false, small()),
        ("gpt2", true, GrpoOptions { beta: 0.04, updates: 2, ..small() }),
        ("qwen3", true, GrpoOptions { beta: 0.1, reference: ReferencePlace::Host, ..small() }),
        ("llama", false, GrpoOptions { beta: 0.04, correction: corrected, ..small() }),
        ("gemma2", true, GrpoOptions { entropy: 0.01, mask_truncated: false, ..small() }),
    ];
    for (name, all, options) in cases {
        let trainer = if all { full(fixture(name), 1e-3) } else { adapter(name, 1e-3) };
        let updates = options.updates;
        let kl = options.beta != 0.0;
        let mut grpo = Grpo::new(trainer, vec![even.into()], options).expect("valid");
        for batch in 1..=3 {
            let report = grpo.step(&prompts()).expect("it learns");
            assert_eq!(report.batch, batch, "{name}");
            let (drawing, learning) = parts(report);
            assert_eq!(learning.step, batch as usize * updates, "{name}");
            assert_eq!((drawing.longest, drawing.truncated), (6, 1.0));
            let gap = learning.log_ratio.expect("a first update").largest;
            assert!(gap < 1e-5, "{name}, batch {batch}: ln p differs by {gap}");
            assert_eq!(learning.kl.is_some(), kl, "{name}");
            if let Some(kl) = learning.kl {
                assert!(if batch == 1 { kl.abs() < 1e-9 } else { kl > 0.0 }, "{name}: KL {kl}");
            }
            assert!(learning.entropy > Some(0.0) && learning.loss.is_finite(), "{name}");
        }
    }
}

/// The policy learns to use a word, in fewer than 200 steps.
#[test]
fn a_reward_is_learned() {
    let folder = ModelFolder::open(demo()).expect("the demo");
    let starts = ["Once upon a time", "The king", "There was", "In the morning"];
    let prompts: Vec<GrpoPrompt> = starts
        .iter()
        .map(|text| GrpoPrompt {
            tokens: folder.encode(text).expect("plain text"),
            text: (*text).to_owned(),
            ..GrpoPrompt::default()
        })
        .collect();
    let has = |own: &Scored<'_>| Some(f64::from(u8::from(own.completion.contains("and"))));
    let options = GrpoOptions { group: 8, max_new_tokens: 8, micro_batch: 32, ..small() };
    let mut grpo = Grpo::new(full(demo(), 1e-4), vec![has.into()], options).expect("valid");
    let mut shares = Vec::new();
    while shares.len() < 200 && shares.last() != Some(&1.0) {
        let report = grpo.step(&prompts).expect("it learns");
        // Of 4096 tokens most are less than the last bit of the sum of all.
        let gap = report.learning.and_then(|own| own.log_ratio).map_or(0.0, |own| own.largest);
        assert!(gap < 1e-5, "ln p differs by {gap}");
        shares.push(report.drawing.and_then(|own| own.reward).expect("each has a score"));
    }
    println!("{shares:?}");
    assert!(shares[0] < 0.5, "{shares:?}");
    assert!(*shares.last().expect("steps") > 0.9, "{shares:?}");
}

/// A run that stops and goes on, also between updates, has the bits of one that does not. The saved model generates what the
/// policy does.
#[test]
fn a_resumed_run_takes_the_same_steps() {
    for (all, place) in [
        (true, ReferencePlace::Device),
        (true, ReferencePlace::Host),
        (false, ReferencePlace::Device),
    ] {
        let options = GrpoOptions { beta: 0.1, updates: 3, reference: place, ..small() };
        let run = json!({ "data": 7 });
        let target = tempfile::tempdir().expect("a folder");
        let of = |trainer| Grpo::new(trainer, vec![even.into()], options.clone()).expect("valid");
        let first = || if all { full(fixture("llama"), 1e-2) } else { adapter("llama", 1e-2) };
        let bits = |grpo: &Grpo| match grpo.trainer().adapter().expect("finite") {
            Some(adapter) => adapter.values().to_vec(),
            None => {
                let mut session = grpo.trainer().engine().session(8).expect("it fits");
                session.logits(&[5, 6, 7]).expect("room")
            }
        };
        let mut whole = of(first());
        for _ in 0..2 {
            whole.step(&prompts()).expect("it learns");
        }

        let mut half = of(first());
        half.step(&prompts()).expect("it learns");
        let mut report = half.draw(&prompts()).expect("it draws");
        assert!(half.update(&mut report).expect("it learns"), "two updates remain");
        let mut folder = Adapter::begin(target.path().join("half")).expect("nobody writes it");
        half.checkpoint_into(&mut folder, &run).expect("it is writable");
        drop((half, folder));

        let trainer = if all {
            full(target.path().join("half"), 1e-2)
        } else {
            let folder = ModelFolder::open(fixture("llama")).expect("a fixture");
            let own = folder.adapter(target.path().join("half")).expect("saved");
            let engine = Engine::load(&cpu(), fixture("llama"), &EngineOptions::default());
            let options =
                TrainOptions { schedule: Schedule::constant(1e-2), ..TrainOptions::default() };
            Trainer::from_adapter(engine.expect("a fixture"), own, options).expect("valid")
        };
        let mut rest = of(trainer);
        let refused = rest.resume(target.path().join("half"), &json!({ "data": 8 }));
        let refused = refused.expect_err("other data").to_string();
        assert!(refused.contains("data: 7 in the saved run, 8 here"), "{refused}");
        rest.resume(target.path().join("half"), &run).expect("the same run");
        assert!(rest.has_updates() && rest.batches() == 2);
        while rest.update(&mut report).expect("it learns") {}
        assert!(bits(&rest) == bits(&whole), "{all} {place:?}: other weights");
        assert_eq!(rest.trainer().done(), 6);
        for grpo in [&mut rest, &mut whole] {
            grpo.step(&prompts()).expect("it learns");
        }
        assert!(bits(&rest) == bits(&whole), "{all} {place:?}: other weights after a batch");

        if all {
            whole.trainer().save(target.path().join("after")).expect("writable");
            let after =
                Engine::load(&cpu(), target.path().join("after"), &EngineOptions::default());
            assert_eq!(greedy(whole.trainer().engine()), greedy(&after.expect("a model")));
        }
    }
}

/// Faults of rewards are named, and the other completions are unharmed.
#[test]
fn faults_of_rewards_are_named() {
    let of = |rewards, options| Grpo::new(adapter("llama", 1e-3), rewards, options).expect("valid");
    let calls = AtomicUsize::new(0);
    let sometimes = move |own: &Scored<'_>| match calls.fetch_add(1, Ordering::Relaxed) % 4 {
        0 => Some(f64::NAN),
        1 => None,
        _ => even(own),
    };
    let report = of(vec![sometimes.into()], small()).step(&prompts()).expect("the others count");
    let drawing = report.drawing.expect("it was sampled");
    assert_eq!((report.faults.len(), drawing.rewards[0].scored), (2, 4));
    assert!(report.faults.iter().all(|fault| fault.line > 0));
    assert!(report.faults[0].why.to_string().contains("NaN"), "{:?}", report.faults);

    let exact: WeightedReward = Rule::Exact("answer".to_owned()).into();
    let none = of(vec![exact], small()).step(&prompts()).expect_err("no line has the field");
    let why = none.to_string();
    assert!(why.contains("prompt of line 1: the line has no text or number `answer`"), "{why}");

    // All scores are equal: nothing is learned, and nothing changes.
    let same = |_: &Scored<'_>| Some(1.0);
    let mut grpo = of(vec![same.into()], small());
    let report = grpo.step(&prompts()).expect("it draws");
    let drawing = report.drawing.expect("it was sampled");
    assert_eq!((drawing.equal_groups, drawing.learned, report.learning), (2, 0, None));

    // A batch without a score has no mean.
    let unscored = |_: &Scored<'_>| None;
    let report = of(vec![unscored.into()], small()).step(&prompts()).expect("it draws");
    let drawing = report.drawing.expect("it was sampled");
    assert_eq!((drawing.reward, drawing.rewards[0].mean), (None, None));
}

fn scored<'a>(completion: &'a str, fields: &'a Map<String, Value>) -> Scored<'a> {
    Scored { prompt: "2+2=", completion, tokens: &[1, 2, 3], truncated: false, line: 7, fields }
}

#[test]
fn rewards_of_rules_and_commands() {
    let Value::Object(fields) = json!({ "answer": " 4 ", "n": 3, "long": "x".repeat(1 << 18) })
    else {
        unreachable!()
    };
    let reward = |text: &str| parse_reward(text, 2, Duration::from_secs(20)).expect("a reward");
    let score = |text: &str, completion: &str| {
        reward(text).score(&scored(completion, &fields)).expect("it scores")
    };
    assert_eq!((score("exact", "4\n"), score("exact", "5")), (Some(1.0), Some(0.0)));
    assert_eq!((score("exact:n", "3"), score("exact:n", "4")), (Some(1.0), Some(0.0)));
    assert_eq!((score("regex:^a.c$", "abc"), score("regex:^a.c$", "abcd")), (Some(1.0), Some(0.0)));
    assert_eq!((score("length:3", ""), score("length:2", "")), (Some(1.0), Some(0.5)));
    assert_eq!((score("json", "[1]"), score("json", "[1")), (Some(1.0), Some(0.0)));
    for wrong in ["", "exactly", "regex", "regex:(", "length:0", "length:x", "cmd:", "json:1"] {
        let why = parse_reward(wrong, 1, Duration::from_secs(1)).err().expect("no reward");
        assert!(matches!(why, GrpoError::Reward { .. }), "{wrong}: {why}");
    }
    // It answers with the line's number, and with the completion's length in characters.
    let length = r#"sed -u 's/.*"completion":"\([^"]*\)".*/{"reward": \1}/'"#;
    let command = reward(&format!("cmd:{length}"));
    let completions: Vec<String> = (0..20).map(|at| at.to_string()).collect();
    let all: Vec<_> = completions.iter().map(|own| scored(own, &fields)).collect();
    let scores: Vec<_> =
        command.score_all(&all).into_iter().map(|own| own.expect("a number")).collect();
    assert_eq!(scores, (0..20).map(|at| Some(f64::from(at))).collect::<Vec<_>>());

    let faults = |command: &str, timeout| {
        let command = parse_reward(command, 1, timeout).expect("it starts");
        let all = ["1", "null", "x", "2"].map(|own| scored(own, &fields));
        let shown = |score: Result<Option<f64>, _>| match score {
            Ok(score) => format!("{score:?}"),
            Err(why) => format!("{why}"),
        };
        command.score_all(&all).into_iter().map(shown).collect::<Vec<_>>()
    };
    let some = faults(&format!("cmd:{length}"), Duration::from_secs(20));
    assert_eq!((&*some[0], &*some[1], &*some[3]), ("Some(1.0)", "None", "Some(2.0)"));
    assert!(some[2].contains(r#"got {"reward": x}"#), "{some:?}");
    // It ends after one line, and is restarted.
    let dead = faults("cmd:read line; echo 1.5; exit 4", Duration::from_secs(20));
    assert_eq!((&*dead[0], &*dead[2]), ("Some(1.5)", "Some(1.5)"));
    assert!(dead[1].contains("the command ended: exit status: 4"), "{dead:?}");
    // It does not even read: the long field fills its input.
    let late = faults("cmd:sleep 60", Duration::from_millis(50));
    assert!(late.iter().all(|own| own == "the command gave no reward within 50ms"), "{late:?}");
    let none = faults("cmd:exit 3", Duration::from_secs(20));
    assert!(none.iter().all(|own| own.contains("exit status: 3")), "{none:?}");
    // Lines that answer nothing do not become the scores of others.
    let begins =
        faults("cmd:echo loading; while read line; do echo 1; done", Duration::from_secs(20));
    assert!(begins.iter().all(|own| own.ends_with("loading")), "{begins:?}");
    let twice = "cmd:while read line; do printf '1\\n2\\n'; done";
    let twice = faults(twice, Duration::from_secs(20));
    assert!(twice.iter().all(|own| own == "Some(1.0)" || own.ends_with("got also 2")), "{twice:?}");
    assert!(twice[1].ends_with("got also 2"), "{twice:?}");
    let other = faults(
        r#"cmd:while read line; do echo '{"id": 1, "reward": 5}'; done"#,
        Duration::from_secs(20),
    );
    assert!(other[0].contains("got also") && other[1] == "Some(5.0)", "{other:?}");
}

/// A renewed reference is the policy itself: the divergence is 0 again, and grows from there.
#[test]
fn a_reference_is_renewed() {
    for reference in [ReferencePlace::Device, ReferencePlace::Host] {
        let options = GrpoOptions { beta: 0.1, reference, renew_reference: Some(2), ..small() };
        let trainer = full(fixture("llama"), 1e-3);
        let mut grpo = Grpo::new(trainer, vec![even.into()], options).expect("valid");
        let mut kl = || parts(grpo.step(&prompts()).expect("it learns")).1.kl.expect("a reference");
        let all = [kl(), kl(), kl(), kl()];
        assert!(all[0] < 1e-9 && all[2] < 1e-9, "{all:?}");
        assert!(all[1] > 1e-7 && all[3] > 1e-7, "{all:?}");
    }
}

#[test]
fn truncated_completions_are_masked() {
    let options = GrpoOptions { mask_truncated: true, ..small() };
    let trainer = adapter("llama", 1e-3);
    let mut grpo = Grpo::new(trainer, vec![even.into()], options).expect("valid");
    // Without stop tokens all completions are as long as they may be.
    let report = grpo.step(&prompts()).expect("it samples");
    let drawing = report.drawing.expect("it was sampled");
    assert_eq!((drawing.truncated, drawing.learned, report.learning), (1.0, 0, None));
    assert_eq!(grpo.trainer().done(), 0);
}

#[test]
fn a_copied_reference_counts_in_the_budget() {
    let held = |reference| {
        let options = GrpoOptions { beta: 0.1, reference, ..small() };
        let trainer = full(fixture("llama"), 1e-3);
        let grpo = Grpo::new(trainer, vec![even.into()], options).expect("valid");
        let plan = grpo.trainer().engine().plan(Workload::new(1, 1)).expect("valid");
        (plan.other_bytes, plan.weights_bytes)
    };
    let (device, weights) = held(ReferencePlace::Device);
    assert_eq!(device, held(ReferencePlace::Host).0 + weights);
}

#[test]
fn options_that_mean_nothing_are_refused() {
    let refused = |options: GrpoOptions| {
        Grpo::new(adapter("llama", 1e-3), vec![even.into()], options)
            .err()
            .expect("refused")
            .to_string()
    };
    let group = refused(GrpoOptions { group: 1, ..small() });
    assert!(group.starts_with("--group is 1\nhint: use a number from 2 to 65536"), "{group}");
    let high = refused(GrpoOptions { epsilon_high: Some(0.1), ..small() });
    assert!(high.starts_with("--epsilon-high is 0.1"), "{high}");
    let renewed = refused(GrpoOptions { renew_reference: Some(2), beta: 0.1, ..small() });
    assert!(renewed.contains("renew the reference of an adapter"), "{renewed}");
    let options = EngineOptions { kv: KvFormat::Int8, ..EngineOptions::default() };
    let engine = Engine::load(&cpu(), fixture("llama"), &options).expect("a fixture");
    let trainer = Trainer::new(engine, TrainOptions::default()).expect("valid");
    let bytes = Grpo::new(trainer, vec![even.into()], small()).err().expect("refused").to_string();
    assert!(bytes.contains("add --correction"), "{bytes}");

    let mut grpo = Grpo::new(adapter("llama", 1e-3), vec![even.into()], small()).expect("valid");
    assert!(matches!(grpo.step(&[]), Err(GrpoError::Empty)));
    let context = grpo.trainer().engine().config().context().expect("it has one");
    let tokens = vec![5; context - 5];
    let long = GrpoPrompt { tokens, line: 9, ..GrpoPrompt::default() };
    let long = grpo.step(&[prompts().remove(0), long]).expect_err("too long").to_string();
    assert!(long.contains("the prompt of line 9 has"), "{long}");
}
