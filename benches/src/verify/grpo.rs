//! Checks GRPO on small models: the probabilities of what is drawn are those of the trainer after each step, so the sampler reads
//! what the optimizer writes, also in replayed graphs; and with all weights the engine generates what the saved model does.

use std::path::Path;

use arch::{ArchProfile, Backend, DType, Device};
use flashover::grpo::{Grpo, GrpoOptions, GrpoPrompt, Scored};
use flashover::train::{FullOptions, LoraOptions, Schedule, Start, TrainOptions, Trainer};
use flashover::{Compute, Engine, EngineOptions, ModelFolder, Request, Sampling};
use reference::Comparison;
use serde_json::json;
use suite::{CheckError, Job, Verdict};

/// Largest difference of ln p in f32.
const EXACT: f64 = 1e-5;
/// Root mean square of the differences in bf16, in nats.
const ROUNDED: f64 = 0.04;
/// Least KL divergence of the policy from its start after the steps, in nats.
const MOVED: f64 = 1e-3;
/// A learning rate that changes probabilities by far more than these, in each step.
const RATE: f64 = 1e-2;

/// One check per model, values that train, and dtype.
pub(super) fn jobs(arch: &ArchProfile, fixtures: &Path) -> Vec<Job> {
    let mut jobs = Vec::new();
    for name in ["llama", "gpt2", "qwen3"] {
        for full in [true, false] {
            for (dtype, compute) in [(DType::F32, Compute::F32), (DType::Bf16, Compute::Bf16)] {
                let trains = if full { "all" } else { "adapter" };
                let params = [
                    ("model", name.to_owned()),
                    ("trains", trains.to_owned()),
                    ("dtype", dtype.to_string()),
                ];
                let folder = fixtures.join(name);
                if !folder.is_dir() {
                    continue;
                }
                let lacks = dtype == DType::Bf16 && arch.backend == Backend::Vulkan;
                jobs.push(Job {
                    op: "grpo",
                    params: params.map(|(key, value)| (key.to_owned(), value.into())).into(),
                    config: match arch.dtypes.contains(&dtype) && !lacks {
                        true => Ok(json!({})),
                        false => Err(format!("training in {dtype} is not supported there")),
                    },
                    programs: None,
                    run: Box::new(move |device| check(device, &folder, full, compute)),
                });
            }
        }
    }
    jobs
}

fn failed(why: impl ToString) -> CheckError {
    CheckError::Kernel(why.to_string())
}

fn trainer(
    device: &flashover::Device,
    folder: &Path,
    full: bool,
    options: &EngineOptions,
) -> Result<Trainer, CheckError> {
    let schedule = Schedule::constant(RATE);
    if full {
        let start = Start::Folder(Box::new(ModelFolder::open(folder).map_err(failed)?));
        let train = FullOptions { schedule, ..FullOptions::default() };
        return Trainer::full(device, start, options, train).map_err(failed);
    }
    let lora = LoraOptions { rank: 8, alpha: 16.0, ..LoraOptions::default() };
    let train = TrainOptions { lora, schedule, ..TrainOptions::default() };
    Trainer::new(Engine::load(device, folder, options).map_err(failed)?, train).map_err(failed)
}

fn check(
    device: &Device,
    folder: &Path,
    full: bool,
    compute: Compute,
) -> Result<Verdict, CheckError> {
    let ours = flashover::Device::from(device.clone());
    let options = EngineOptions { dtype: Some(compute), ..EngineOptions::default() };
    let grpo_options = GrpoOptions {
        group: 6,
        max_new_tokens: 16,
        sampling: Sampling { temperature: 1.0, seed: 7, ..Sampling::default() },
        stop_tokens: Some(Vec::new()),
        beta: 0.01,
        updates: 2,
        micro_batch: 5,
        ..GrpoOptions::default()
    };
    let even = |own: &Scored<'_>| Some(own.tokens.iter().filter(|id| **id % 2 == 0).count() as f64);
    let trainer = trainer(&ours, folder, full, &options)?;
    let mut grpo = Grpo::new(trainer, vec![even.into()], grpo_options).map_err(failed)?;
    let prompt = |length: u32| GrpoPrompt {
        tokens: (0..length).map(|at| (at * 11 + length) % 60).collect(),
        ..GrpoPrompt::default()
    };
    let prompts = [prompt(5), prompt(23), prompt(1)];
    let (mut worst, mut moved) = (0f64, None);
    for _ in 0..4 {
        let report = grpo.step(&prompts).map_err(failed)?;
        let learning = report.learning.ok_or_else(|| failed("nothing was learned"))?;
        let gap = learning.log_ratio.ok_or_else(|| failed("no first update"))?;
        worst = worst.max(if compute == Compute::Bf16 { gap.rms } else { gap.largest });
        if !worst.is_finite() {
            return Err(failed("a log-probability is not finite"));
        }
        moved = learning.kl;
    }
    // If the policy did not move, a sampler with old weights would pass, too.
    if moved.is_none_or(|kl| kl < MOVED) {
        return Err(failed(format!("the policy stays near its start: KL {moved:?}")));
    }
    if device.backend() == Backend::Cuda && !grpo.captured() {
        return Err(failed("no decode step was captured"));
    }
    let engine = grpo.trainer().engine();
    let request = Request { max_new_tokens: Some(12), stop_tokens: Vec::new(), ..engine.request() };
    let request = Request { sampling: Sampling::default(), ..request };
    let greedy = |engine: &Engine| {
        let all = engine.generate_batch(&[[5, 6, 7], [8, 9, 10]], 2, &request).map_err(failed)?;
        let ids = all.iter().flatten().flat_map(|own| own.tokens.iter().map(|token| token.id));
        Ok::<Vec<u32>, CheckError>(ids.collect())
    };
    let tokens = greedy(engine)?;
    if full {
        let saved = tempfile::tempdir().map_err(failed)?;
        grpo.trainer().save(saved.path()).map_err(failed)?;
        let loaded = Engine::load(&ours, saved.path(), &options).map_err(failed)?;
        if greedy(&loaded)? != tokens || greedy(engine)? != tokens {
            return Err(failed("the saved model generates other tokens than the policy"));
        }
    }
    let tolerance = if compute == Compute::Bf16 { ROUNDED } else { EXACT };
    let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    Ok(Verdict {
        comparison: Comparison {
            max_err: worst,
            tolerance,
            worst_index: None,
            worst_out: worst,
            worst_reference: 0.0,
            passed: worst <= tolerance,
        },
        digest: suite::fnv1a(&bytes),
    })
}
