//! Cases of whole models: prefill, generation, requests (prefill plus generation), and steps of training an adapter.
//!
//! Before a model is timed, its decode steps are compared with its prefill. A sequence of 24 tokens must give the same
//! logits one token at a time and all at once. Other tests compare models with transformers, and the gradients of
//! adapters with torch.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use arch::Device;
use flashover::bench::{SpeedTest, StepShape, TrainTest};
use flashover::memory::PlanError;
use flashover::train::{FullOptions, Recompute, Start, TrainError, Trainer};
use flashover::{Compute, Engine, EngineOptions, GenerateError, LoadError, WeightFormat};
use record::{Card, Line, Record, Summary};
use serde_json::Value;
use suite::{Scale, Suite};
use tune::Policy;

use crate::emit::emit;

/// A model and one test of it.
#[derive(Debug, Clone)]
pub(crate) struct ModelCase {
    model: Model,
    test: Test,
}

#[derive(Debug, Clone, Copy)]
enum Test {
    Speed(SpeedTest),
    Train(TrainTest),
    /// Steps on all weights, with sequences `[batch, context]`.
    Full([usize; 2], Recompute),
}

#[derive(Debug, Clone, PartialEq)]
enum Model {
    /// The demo model of the repository, in this folder.
    Demo(PathBuf, Option<WeightFormat>),
    /// Random weights of a published shape.
    Shape(&'static str, Compute, Option<WeightFormat>),
}

/// Maximum difference of decode steps and prefill, relative to the largest logit. The first is for f32: the limit for a
/// model family against transformers.
///
/// The second is for tf32 (which only prefill uses) and 16-bit types. It is twice the largest error of a fixture
/// against its f32 logits on an H200, 2.5e-2, because both sides are rounded.
const TOLERANCES: [f64; 2] = [1e-4, 0.05];
/// Repetitions of a test, and of a request, whose p95 latency is reported.
const REPETITIONS: [u16; 2] = [5, 20];

impl ModelCase {
    /// Name of the case, such as `prompt model=demo tokens=256` or
    /// `generate bf16 batch=16 depth=512 model=llama-3-8b quant=nf4 tokens=128`.
    pub(crate) fn name(&self) -> String {
        record::case_name(self.op(), &self.params())
    }

    fn op(&self) -> &'static str {
        match self.test {
            Test::Train(_) => "train",
            Test::Full(..) => "train_full",
            Test::Speed(SpeedTest { generated: 0, .. }) => "prompt",
            Test::Speed(SpeedTest { prompt: 0, .. }) => "generate",
            Test::Speed(_) => "request",
        }
    }

    fn params(&self) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::new();
        let mut insert = |name: &str, value: usize| params.insert(name.to_owned(), value.into());
        // Left out of the name if it is the usual level.
        let mut recomputed: Option<Recompute> = None;
        let batch = match self.test {
            Test::Speed(SpeedTest { prompt, generated, depth, batch }) => {
                // Tokens that the rate counts: for a request, the generated ones.
                insert("tokens", if generated > 0 { generated } else { prompt });
                if prompt > 0 && generated > 0 {
                    insert("prompt", prompt);
                }
                if depth > 0 {
                    insert("depth", depth);
                }
                batch
            }
            Test::Train(TrainTest { batch, context, rank, recompute }) => {
                insert("tokens", context);
                insert("rank", rank);
                recomputed = (recompute != Recompute::Layers).then_some(recompute);
                batch
            }
            Test::Full([batch, context], recompute) => {
                insert("tokens", context);
                recomputed = (recompute != Recompute::Nothing).then_some(recompute);
                batch
            }
        };
        if let Some(recompute) = recomputed {
            params.insert("recompute".to_owned(), recompute.name().into());
        }
        let (name, quant) = match &self.model {
            Model::Demo(_, quant) => ("demo", *quant),
            Model::Shape(name, compute, quant) => {
                params.insert("dtype".to_owned(), name_of(*compute).into());
                (*name, *quant)
            }
        };
        params.insert("model".to_owned(), name.into());
        if let Some(quant) = quant {
            params.insert("quant".to_owned(), quant.name().into());
        }
        if batch > 1 {
            params.insert("batch".to_owned(), batch.into());
        }
        params
    }

    fn load(&self, device: &Device, policy: Policy) -> anyhow::Result<Engine> {
        let (device, policy) = (device.clone().into(), Some(policy));
        Ok(match &self.model {
            Model::Demo(folder, quant) => {
                let options = EngineOptions { policy, quant: *quant, ..EngineOptions::default() };
                Engine::load(&device, folder, &options)?
            }
            Model::Shape(shape, compute, quant) => {
                let dtype = Some(*compute);
                let options =
                    EngineOptions { dtype, quant: *quant, policy, ..EngineOptions::default() };
                Engine::random(&device, shape, &options, |_| {})?
            }
        })
    }
}

const fn name_of(compute: Compute) -> &'static str {
    match compute {
        Compute::F32 => "f32",
        Compute::Tf32 => "tf32",
        Compute::F16 => "f16",
        Compute::Bf16 => "bf16",
    }
}

/// Selects the cases of `suite` whose name contains `filter`. Cases of the demo model need its folder.
pub(crate) fn select(
    suite: Suite,
    scale: Scale,
    filter: Option<&str>,
    demo: Option<&Path>,
) -> Vec<ModelCase> {
    let after = |model: &Model, depth, [prompt, generated]: [usize; 2], batch| ModelCase {
        model: model.clone(),
        test: Test::Speed(SpeedTest { prompt, generated, depth, batch }),
    };
    let train = |shape, quant, batch, context, recompute| ModelCase {
        model: Model::Shape(shape, Compute::Bf16, quant),
        test: Test::Train(TrainTest { batch, context, rank: 16, recompute }),
    };
    let full = |shape, batch, recompute| ModelCase {
        model: Model::Shape(shape, Compute::Bf16, None),
        test: Test::Full([batch, 1024], recompute),
    };
    let of = |model: &Model, prompt, generated, batch| after(model, 0, [prompt, generated], batch);
    let mut cases = Vec::new();
    if let (Suite::Quick | Suite::All, Some(demo)) = (suite, demo) {
        let demo = Model::Demo(demo.to_owned(), None);
        cases.extend([of(&demo, 256, 0, 1), of(&demo, 0, 64, 1)]);
    }
    if let (Suite::All, Scale::Gpu) = (suite, scale) {
        let (small, large) = ("llama-3.2-1b", "llama-3-8b");
        let formats = WeightFormat::at_load().map(|format| (large, Some(format)));
        for (shape, quant) in [(small, None), (large, None)].into_iter().chain(formats) {
            let model = Model::Shape(shape, Compute::Bf16, quant);
            // The context has as many tokens as the prompt of the first case.
            let steps = |batch| after(&model, 512, [0, 128], batch);
            cases.extend([of(&model, 512, 0, 1), steps(1), steps(16)]);
        }
        let nf4 = Some(WeightFormat::Nf4);
        for (shape, quant) in [(small, None), (large, None), (large, nf4)] {
            cases.push(train(shape, quant, 4, 512, Recompute::Layers));
        }
        cases.push(train(small, None, 4, 512, Recompute::Nothing));
        for recompute in [Recompute::Layers, Recompute::FeedForward] {
            cases.push(train(large, nf4, 2, 2048, recompute));
        }
        cases.push(full("gpt2", 32, Recompute::Nothing));
        cases.push(full("gpt2", 32, Recompute::Layers));
    }
    if suite == Suite::Documents {
        cases.extend(requests(scale, demo).into_iter().flat_map(|(model, batches)| {
            let of = |batch: &usize| of(&model, 128, 64, *batch);
            batches.iter().map(of).collect::<Vec<_>>()
        }));
    }
    cases.retain(|case| filter.is_none_or(|filter| case.name().contains(filter)));
    cases
}

/// Models and batch sizes for the tables of the documents, in every precision.
fn requests(scale: Scale, demo: Option<&Path>) -> Vec<(Model, &'static [usize])> {
    use Compute::{Bf16, F32, Tf32};
    let (four, eight) = (Some(WeightFormat::Nf4), Some(WeightFormat::Int8));
    match (scale, demo) {
        (Scale::Gpu, _) => {
            let shape = |name, compute, quant| Model::Shape(name, compute, quant);
            vec![
                (shape("gpt2", F32, None), &[1, 16]),
                (shape("gpt2", Bf16, None), &[1, 16]),
                (shape("llama-3.2-1b", F32, None), &[1, 16]),
                (shape("llama-3.2-1b", Tf32, None), &[1, 16]),
                (shape("llama-3.2-1b", Bf16, None), &[1, 16]),
                (shape("llama-3.2-1b", Bf16, eight), &[1, 16]),
                (shape("llama-3.2-1b", Bf16, four), &[1, 16]),
                (shape("llama-2-7b", F32, None), &[1]),
                (shape("llama-2-7b", Tf32, None), &[1]),
                (shape("llama-2-7b", Bf16, None), &[1, 4, 16]),
                (shape("llama-2-7b", Bf16, eight), &[1, 4, 16]),
                (shape("llama-2-7b", Bf16, four), &[1, 4, 16]),
                (shape("llama-2-13b", Bf16, None), &[2, 16]),
                (shape("llama-2-13b", Bf16, four), &[1, 4, 16]),
            ]
        }
        (Scale::Host, Some(demo)) => {
            let of = |quant| Model::Demo(demo.to_owned(), quant);
            vec![(of(None), &[1, 4]), (of(eight), &[1]), (of(four), &[1])]
        }
        (Scale::Host, None) => Vec::new(),
    }
}

/// Measures cases; returns false if one failed. Each model runs on its own thread, because memory pools belong to a
/// thread. The pages of a pool are as large as its largest allocation, so a shared pool would distort the memory of the
/// next model.
pub(crate) fn run(
    device: &Device,
    card: &Card,
    policy: Policy,
    cases: &[ModelCase],
) -> anyhow::Result<bool> {
    let mut good = true;
    for cases in cases.chunk_by(|a, b| a.model == b.model) {
        let all =
            thread::scope(|scope| scope.spawn(|| run_model(device, card, policy, cases)).join());
        good &= all.unwrap_or_else(|panic| resume_unwind(panic))?;
    }
    Ok(good)
}

/// Measures steps on all weights.
fn measure_full(
    device: &Device,
    policy: Policy,
    case: &ModelCase,
    record: &mut Record,
) -> anyhow::Result<()> {
    let (Test::Full(shape, recompute), Model::Shape(name, compute, _)) = (case.test, &case.model)
    else {
        anyhow::bail!("{} does not train all weights", case.name());
    };
    let engine =
        EngineOptions { dtype: Some(*compute), policy: Some(policy), ..EngineOptions::default() };
    let start = Start::Scratch { shape: (*name).to_owned(), seed: 0 };
    let options = FullOptions { recompute, ..FullOptions::default() };
    let mut trainer = Trainer::full(&device.clone().into(), start, &engine, options)?;
    // Runs the test once, so that memory for tuning is not counted.
    let [batch, context] = shape;
    let shape = StepShape { micro_batches: 1, batch, context };
    trainer.measure(shape, 1)?;
    trainer.engine().clear_cache()?;
    let speed = trainer.measure(shape, REPETITIONS[0].into())?;
    let Some(summary) = Summary::from_samples(&speed.samples_ns) else {
        anyhow::bail!("the clock returned no finite time");
    };
    let Summary { median, p10, p90, p95, samples } = summary;
    (record.median_ns, record.p10_ns, record.p90_ns) = (Some(median), Some(p10), Some(p90));
    (record.p95_ns, record.samples, record.clock) = (Some(p95), samples, "host".to_owned());
    record.memory_bytes = Some(trainer.engine().memory().reserved_bytes);
    record.flops = speed.flops;
    record.tflops = Some(speed.flops as f64 / median / 1e3);
    Ok(())
}

/// Runs the cases of one model.
fn run_model(
    device: &Device,
    card: &Card,
    policy: Policy,
    cases: &[ModelCase],
) -> anyhow::Result<bool> {
    let (mut good, mut loaded) = (true, None);
    for case in cases {
        emit(&Line::Begin { case: case.name() })?;
        let mut record = Record::new(card, case.op(), case.params(), 0, 0);
        let measured = match (case.test, &loaded) {
            (Test::Full(..), _) => {
                loaded = None;
                measure_full(device, policy, case, &mut record)
            }
            (_, Some(engine)) => measure(card, engine, case, &mut record),
            (_, None) => case
                .load(device, policy)
                .and_then(|engine| measure(card, loaded.insert(engine), case, &mut record)),
        };
        if let Err(why) = measured {
            // A case that does not fit the card is skipped, not failed.
            if too_large(&why) {
                emit(&Line::Skip { case: case.name(), reason: format!("{why:#}") })?;
                continue;
            }
            record.error = Some(format!("{why:#}"));
        }
        good &= record.error.is_none();
        emit(&Line::Record(record))?;
    }
    Ok(good)
}

/// Returns true if the memory plan found the card too small.
fn too_large(why: &anyhow::Error) -> bool {
    let plan = match (why.downcast_ref(), why.downcast_ref(), why.downcast_ref()) {
        (Some(LoadError::Plan(why)), _, _)
        | (_, Some(GenerateError::Plan(why)), _)
        | (_, _, Some(TrainError::Plan(why))) => Some(why),
        _ => None,
    };
    matches!(plan, Some(PlanError::Memory(_)))
}

fn measure(
    card: &Card,
    engine: &Engine,
    case: &ModelCase,
    record: &mut Record,
) -> anyhow::Result<()> {
    let (dtype, _) = engine.precision();
    record.params.insert("dtype".to_owned(), dtype.clone().into());
    let (gap, tolerance) = (steps_and_prompt(engine)?, TOLERANCES[usize::from(dtype != "f32")]);
    (record.max_err, record.tolerance) = (Some(gap), Some(tolerance));
    if gap.is_nan() || gap > tolerance {
        record.error = Some(format!(
            "decode steps differ from prefill by {gap:.1e} of the largest logit, expected at most \
             {tolerance:.1e}"
        ));
        return Ok(());
    }
    // Runs the test once, so that memory for tuning and for earlier shapes is not counted.
    timed(engine, case.test, 1)?;
    engine.clear_cache()?;
    let requests = case.op() == "request";
    let repetitions = REPETITIONS[usize::from(requests)].into();
    let (samples, flops, bytes, parts) = timed(engine, case.test, repetitions)?;
    let samples: Vec<f64> = samples.iter().map(|ns| ns / parts).collect();
    let Some(Summary { median, p10, p90, p95, samples }) = Summary::from_samples(&samples) else {
        record.error = Some("the clock returned no finite time".to_owned());
        return Ok(());
    };
    (record.median_ns, record.p10_ns, record.p90_ns) = (Some(median), Some(p10), Some(p90));
    (record.samples, record.clock) = (samples, "host".to_owned());
    record.memory_bytes = Some(engine.memory().reserved_bytes);
    record.flops = flops / parts as u64;
    if requests || case.op() == "train" {
        // A request mixes prefill and decode steps, and a training step mixes passes, so neither has a bandwidth.
        record.p95_ns = Some(p95);
        record.tflops = Some(record.flops as f64 / median / 1e3);
        return Ok(());
    }
    record.bytes = bytes;
    record.tflops = Some(record.flops as f64 / median / 1e3);
    record.gbps = Some(record.bytes as f64 / median);
    record.set_share(card, &dtype);
    Ok(())
}

/// Runs a test, and returns its samples in nanoseconds, the operations and bytes of one, and the launches that it counts as.
fn timed(
    engine: &Engine,
    test: Test,
    repetitions: usize,
) -> anyhow::Result<(Vec<f64>, u64, u64, f64)> {
    Ok(match test {
        Test::Full(..) => anyhow::bail!("training of all weights needs weights of its own"),
        Test::Train(test) => {
            let speed = engine.measure_training(test, repetitions)?;
            (speed.samples_ns, speed.flops, 0, 1.0)
        }
        Test::Speed(test) => {
            let speed = engine.measure(test, repetitions)?;
            // Each generated token is a launch. A prompt is prefilled in one launch, and a request is timed as a whole.
            let request = test.prompt > 0 && test.generated > 0;
            let parts = if request { 1.0 } else { test.generated.max(1) as f64 };
            (speed.samples_ns, speed.flops, speed.bytes_per_step, parts)
        }
    })
}

/// Difference between the logits of 24 tokens one at a time and all at once, relative to the largest logit.
fn steps_and_prompt(engine: &Engine) -> anyhow::Result<f64> {
    let vocab = engine.config().vocab;
    let tokens: Vec<u32> = (0..24).map(|at| (at * 7919 % vocab) as u32).collect();
    let together = engine.session(tokens.len())?.logits(&tokens)?;
    let mut session = engine.session(tokens.len())?;
    let mut apart = Vec::with_capacity(together.len());
    for token in &tokens {
        apart.extend(session.logits(&[*token])?);
    }
    let max = largest(together.iter().map(|logit| f64::from(logit.abs())));
    let gaps = together.iter().zip(&apart).map(|(a, b)| f64::from((a - b).abs()) / max);
    Ok(largest(gaps))
}

/// Maximum of non-negative values; NaN if one of them is NaN.
fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    let larger = |max: f64, value: f64| if value <= max || max.is_nan() { max } else { value };
    values.into_iter().fold(0.0, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_nan_is_enough() {
        assert!(largest([1e-7, f64::NAN, 1e-7]).is_nan());
        assert!(largest([f64::NAN]).is_nan() && largest([1e-7, f64::NAN]).is_nan());
        assert_eq!((largest([]), largest([2.0, 3.0, 1.0])), (0.0, 3.0));
    }

    #[test]
    fn suites_have_their_models() {
        let demo = Some(Path::new("models/demo"));
        let names = |suite, scale, demo| -> Vec<_> {
            select(suite, scale, None, demo).iter().map(ModelCase::name).collect()
        };
        let own = ["prompt model=demo tokens=256", "generate model=demo tokens=64"];
        assert_eq!(names(Suite::Quick, Scale::Host, demo), own);
        assert!(names(Suite::Quick, Scale::Gpu, None).is_empty());
        assert!(names(Suite::Kernels, Scale::Gpu, demo).is_empty());
        let all = names(Suite::All, Scale::Gpu, demo);
        let batch = "generate bf16 batch=16 depth=512 model=llama-3-8b quant=nf4 tokens=128";
        assert!(
            all.starts_with(&own.map(str::to_owned)) && all.contains(&batch.to_owned()),
            "{all:?}"
        );
        let some = select(Suite::All, Scale::Gpu, Some("quant=nf4"), demo);
        assert_eq!(some.len(), 6);
        let requests = names(Suite::Documents, Scale::Gpu, None);
        let seven = "request bf16 batch=4 model=llama-2-7b prompt=128 quant=nf4 tokens=64";
        assert!(requests.contains(&seven.to_owned()), "{requests:?}");
        let own = names(Suite::Documents, Scale::Host, demo);
        assert_eq!(own[0], "request model=demo prompt=128 tokens=64");
        assert_eq!((own.len(), names(Suite::Documents, Scale::Host, None).len()), (4, 0));
    }

    #[test]
    fn the_demos_steps_are_its_prompt() {
        let device = Device::open(arch::Backend::Cpu).expect("the CPU runtime needs nothing");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let case = select(Suite::Quick, Scale::Host, Some("generate"), Some(&folder)).remove(0);
        let engine = case.load(&device, Policy::Default).expect("a folder of ours");
        let gap = steps_and_prompt(&engine).expect("24 tokens fit");
        assert!(gap < 1e-4, "{gap:e}");
    }
}
