//! Compares memory use on the device with the plan. This test runs alone in its process, because all threads share
//! pools.

use std::path::{Path, PathBuf};

use flashover::bench::trace::{Memory, Recording};
use flashover::memory::{MemoryBudget, MemoryUsage, Plan, PlanError, Workload};
use flashover::train::{
    Adapter, Example, LoraOptions, Recompute, TrainError, TrainOptions, Trainer,
};
use flashover::{
    Backend, Device, Engine, EngineOptions, GenerateError, ModelFolder, Request, Sampling,
    WeightFormat,
};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

/// Returns the peak bytes of live buffers and of pages while `prompt` tokens are prefilled and `generated` decoded.
fn peaks(engine: &Engine, prompt: usize, generated: usize) -> [u64; 2] {
    let tokens: Vec<u32> = (0..prompt as u32).map(|id| id * 7 % 1000).collect();
    let request = Request {
        sampling: Sampling::default(),
        max_new_tokens: Some(generated),
        stop_tokens: Vec::new(),
        stop_sequences: Vec::new(),
    };
    let recording = Recording::start().expect("the only one");
    let mut session = engine.session(prompt + generated).expect("it fits");
    let count = session.generate(&tokens, &request).expect("it answers").count();
    let memory = recording.finish().memory;
    assert_eq!((count, memory.len()), (generated, generated));
    let max = |part: fn(&Memory) -> u64| memory.iter().map(part).max();
    [max(|read| read.used), max(|read| read.reserved)].map(|max| max.expect("read"))
}

fn gap(have: u64, planned: u64) -> f64 {
    have as f64 / planned as f64 - 1.0
}

/// Returns the peak bytes of live buffers while one prompt is prefilled once for several completions.
fn peak_of_answers(engine: &Engine, prompt: &[u32], answers: usize, request: &Request) -> u64 {
    let recording = Recording::start().expect("the only one");
    let all = engine.generate_batch(&[prompt], answers, request).expect("it fits");
    assert_eq!(all[0].len(), answers);
    let memory = recording.finish().memory;
    memory.iter().map(|read| read.used).max().expect("read")
}

#[test]
fn a_plan_is_what_is_taken_and_what_is_refused_leaves_nothing() {
    let device = Device::open(Backend::Cpu).expect("the CPU runtime needs nothing");
    let folder = model("demo");
    for quant in [None, Some(WeightFormat::Nf4)] {
        let options = EngineOptions { quant, ..EngineOptions::default() };
        let engine = Engine::load(&device, &folder, &options).expect("the demo");
        engine.clear_cache().expect("nothing is captured");
        let loaded = engine.memory();
        let plan = engine.plan(Workload::new(1, 320)).expect("valid");
        let weights = gap(loaded.used_bytes, plan.weights_bytes);
        println!("{quant:?}: weights {weights:+.4} of the plan, {loaded:?}");
        assert!(weights.abs() < 0.05, "{weights}: {loaded:?} {plan}");
        let [used, reserved] = peaks(&engine, 256, 64);
        println!(
            "{quant:?}: alive {:+.4}, held {:+.4}",
            gap(used, plan.peak_bytes()),
            gap(reserved, plan.peak_bytes())
        );
        assert!(gap(used, plan.peak_bytes()) < 0.05, "{used} {plan}");
        // Pages are rounded up to whole MiB, and activations take one page.
        let held = reserved.saturating_sub(2 << 20);
        assert!(gap(held, plan.peak_bytes()) < 0.05, "{reserved} {plan}");
        assert!(gap(reserved, plan.peak_bytes()) > -0.05, "{reserved} {plan}");
        // Consecutive sessions of different lengths do not accumulate memory.
        let mut max = 0;
        for length in 300..320 {
            let session = engine.session(length).expect("it fits");
            max = max.max(engine.memory().reserved_bytes);
            drop(session);
        }
        let two = plan.peak_bytes() + (plan.peak_bytes() - plan.weights_bytes) + (16 << 20);
        assert!(max < two, "{max} of {two}: {plan}");
        // Completions that share a prompt have whole pages of their own.
        engine.clear_cache().expect("nothing is captured");
        let prompt: Vec<u32> = (0..70).map(|id| id * 7 % 1000).collect();
        let request = Request {
            sampling: Sampling::default(),
            max_new_tokens: Some(3),
            stop_tokens: Vec::new(),
            stop_sequences: Vec::new(),
        };
        let answers = engine.plan(engine.workload(&[&prompt], 60, &request)).expect("valid");
        let used = peak_of_answers(&engine, &prompt, 60, &request);
        // Between steps no activations are alive.
        let over = gap(used, answers.weights_bytes + answers.cache_bytes);
        println!("{quant:?}: 60 answers {over:+.4}");
        assert!(over.abs() < 0.05, "{used} {answers}");
        // A refused session leaves the device unchanged, and the model still works.
        engine.clear_cache().expect("nothing is captured");
        let before = engine.memory().used_bytes;
        let limit_bytes = Some(plan.peak_bytes());
        let budget = MemoryBudget { limit_bytes, ..MemoryBudget::default() };
        let small = Engine::load(&device, &folder, &EngineOptions { budget, ..options.clone() });
        let small = small.expect("it fits");
        small.clear_cache().expect("nothing is captured");
        let loaded = small.memory().used_bytes;
        for _ in 0..3 {
            let refused = small.session(512);
            assert!(
                matches!(refused, Err(GenerateError::Plan(PlanError::Memory(_)))),
                "{refused:?}"
            );
            assert!(small.memory().used_bytes <= loaded);
        }
        let [used, _] = peaks(&small, 256, 64);
        assert!(used - before <= plan.peak_bytes(), "{used} {before} {plan}");
        small.clear_cache().expect("nothing is captured");
        assert!(small.memory().used_bytes <= loaded, "a session that ended holds nothing");
        together(&small, &plan, before);
        drop(small);
        engine.clear_cache().expect("nothing is captured");
        assert!(engine.memory().used_bytes <= before, "nor does a model");
    }
    training(&device);
    adapted(&device);
    going(&device);
}

/// The plan includes an unmerged adapter of 4-bit weights, before and after loading.
fn adapted(device: &Device) {
    let options = EngineOptions { quant: Some(WeightFormat::Nf4), ..EngineOptions::default() };
    let folder = tempfile::tempdir().expect("a folder");
    let lora = LoraOptions { rank: 64, ..LoraOptions::default() };
    let base = ModelFolder::open(model("demo")).expect("the demo");
    let adapter = Adapter::new(base.config(), lora, 1).expect("a rank that fits");
    let mut output = Adapter::begin(folder.path()).expect("nobody else writes it");
    adapter.write(&mut output, base.config(), "demo").expect("it is empty");
    let workload = Workload::new(1, 320);
    let without = base.plan(device.profile(), &options, workload.clone()).expect("valid");
    let adapted = base.with_adapter(folder.path()).expect("of this model");
    let planned = adapted.plan(device.profile(), &options, workload.clone()).expect("valid");
    let before = MemoryUsage::read(device).used_bytes;
    let engine = Engine::from_folder(device, adapted, &options, |_| {}).expect("it fits");
    engine.clear_cache().expect("nothing is captured");
    let plan = engine.plan(workload).expect("valid");
    assert_eq!(plan, planned);
    // The adapter has at least 64 values for each row and each column of a matrix.
    assert!(plan.weights_bytes > without.weights_bytes * 3 / 2, "{plan} {without}");
    let weights = gap(engine.memory().used_bytes - before, plan.weights_bytes);
    let [used, _] = peaks(&engine, 256, 64);
    let alive = gap(used - before, plan.peak_bytes());
    println!("adapted: weights {weights:+.4}, alive {alive:+.4}");
    assert!(weights.abs() < 0.05 && alive < 0.05, "{weights} {alive} {plan}");
}

/// A budget for one session of 320 positions fits several shorter sessions, limited by their KV caches. Dropping a
/// session frees its memory.
fn together(small: &Engine, plan: &Plan, before: u64) {
    let request = Request {
        sampling: Sampling::default(),
        max_new_tokens: Some(3),
        stop_tokens: Vec::new(),
        stop_sequences: Vec::new(),
    };
    let alone = small.plan(Workload::new(1, 150)).expect("valid");
    let room = plan.peak_bytes() - (alone.peak_bytes() - alone.cache_bytes);
    let mut live: Vec<_> = (0..room / alone.cache_bytes)
        .map(|_| small.session(150).expect("as many as there is room for"))
        .collect();
    assert!((2..6).contains(&live.len()), "{}", live.len());
    let beside = small.plan(Workload::new(1, 150)).expect("valid");
    assert_eq!(beside.other_bytes, live.len() as u64 * alone.cache_bytes);
    assert!(!beside.fits(), "{beside}");
    for refused in [
        small.session(150).err(),
        small.generate_batch(&[[1u32, 2, 3].repeat(40)], 2, &request).err(),
    ] {
        let said = refused.expect("no room").to_string();
        assert!(said.contains("other sessions, batches or trainers hold"), "{said}");
        assert!(said.contains("hint: run fewer of them at once; "), "{said}");
    }
    assert!(
        Trainer::new(small.clone(), TrainOptions::default())
            .expect("nothing is on the device")
            .step(&[vec![Example { tokens: vec![1, 2, 3], from: 0 }]])
            .is_err_and(|why| matches!(why, TrainError::Plan(PlanError::Memory(_))))
    );
    // Refused sessions take no memory, and live sessions still work.
    assert_eq!(live[0].generate(&[1, 2, 3], &request).expect("it answers").count(), 3);
    let own = small.memory().used_bytes - before;
    assert!(own <= plan.peak_bytes(), "{own} {plan}");
    drop(live);
    let whole = small.plan(Workload::new(1, 320)).expect("valid");
    assert!(whole.fits() && whole.other_bytes == 0, "{whole}");
    drop(small.session(320).expect("alone again"));
}

/// A dropped model returns its pages.
fn going(device: &Device) {
    let before = MemoryUsage::read(device).reserved_bytes;
    let engine = Engine::load(device, model("demo"), &EngineOptions::default()).expect("the demo");
    let [_, held] = peaks(&engine, 64, 8);
    assert!(held > before + engine.weight_bytes() / 2, "{held} {before}");
    drop(engine);
    let after = MemoryUsage::read(device);
    assert!(after.reserved_bytes <= before, "{after:?} {before}");
    assert!(after.peak_bytes >= held, "{after:?} {held}");
}

/// Training steps take the planned memory. A batch over the budget is refused, and the trainer still works.
fn training(device: &Device) {
    let example = |seed: u32, len: u32| Example {
        tokens: (0..len).map(|at| (at * 7 + seed * 13) % 1000).collect(),
        from: 0,
    };
    let batch = |sequences| vec![(0..sequences).map(|seed| example(seed, 256)).collect::<Vec<_>>()];
    // Small buffers in a large page keep the page after the model is dropped, so the smallest pages come first.
    for (quant, recompute) in [
        (None, Recompute::Nothing),
        (None, Recompute::Layers),
        (Some(WeightFormat::Nf4), Recompute::Layers),
    ] {
        let load = |budget| {
            let options = EngineOptions { quant, budget, ..EngineOptions::default() };
            let engine = Engine::load(device, model("demo"), &options).expect("the demo");
            let options = TrainOptions { recompute, ..TrainOptions::default() };
            Trainer::new(engine, options).expect("a rank that fits")
        };
        let mut trainer = load(MemoryBudget::default());
        let plan = trainer.plan(&batch(4)).expect("short");
        let mut held = 0;
        // Without an earlier model, smaller batches leave no pages behind.
        let grows: &[u32] = if quant.is_some() { &[1, 2, 4, 4] } else { &[4, 4] };
        for sequences in grows {
            trainer.step(&batch(*sequences)).expect("it fits");
            held = held.max(trainer.engine().memory().reserved_bytes);
        }
        println!("{quant:?} {recompute:?}: held {:+.4}", gap(held, plan.peak_bytes()));
        // Two pools round up to a page each: small buffers and large ones.
        let max = gap(held.saturating_sub(8 << 20), plan.peak_bytes());
        assert!(max < 0.05 && gap(held, plan.peak_bytes()) > -0.05, "{max}: {plan}");
        drop(trainer);
        let limit_bytes = Some(plan.peak_bytes());
        let mut small = load(MemoryBudget { limit_bytes, ..MemoryBudget::default() });
        for _ in 0..2 {
            let refused = small.step(&batch(5)).expect_err("it does not fit");
            assert!(matches!(refused, TrainError::Plan(PlanError::Memory(_))), "{refused}");
            assert!(refused.to_string().contains("hint: a batch of 4 fits"), "{refused}");
        }
        assert_eq!(small.done(), 0);
        assert_eq!(small.step(&batch(4)).expect("it fits").step, 1);
    }
}
