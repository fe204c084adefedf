//! Chooses the sizes of a step of `flashover train`: examples per batch, batches per step, steps, recomputation.

use anyhow::bail;
use flashover::memory::{Chosen, Plan, Preset, free_bytes};
use flashover::train::{Dataset, Recompute, SavedRun, Training};
use flashover::{Device, Engine, EngineOptions};

use crate::train_args::{Args, USUAL_TO_TRAIN};
use crate::train_command::Model;

/// Default number of examples per batch.
const USUAL_BATCH: usize = 4;

/// Sizes of a step.
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) accumulate: usize,
    pub(crate) steps: usize,
    pub(crate) context: usize,
}

/// Returns the maximum tokens per example.
pub(crate) fn context(args: &Args, model: &Model) -> anyhow::Result<usize> {
    let max = match &model.folder {
        Some(folder) => folder.config().context(),
        None => Engine::shape(&args.of.name())?.context(),
    };
    let max = max.unwrap_or(usize::MAX);
    let usual = USUAL_TO_TRAIN.min(max);
    let context = args.training.context.map_or(usual, |context| context as usize);
    if context > max {
        let learned = model.folder.as_ref().is_some_and(|own| own.config().learned_positions);
        let more = format!(", or --max-context {context} to extend the context");
        bail!(
            "expected a context of at most {max} tokens, got {context}\nhint: use -c {max}{}",
            if learned || model.folder.is_none() { "" } else { &more }
        );
    }
    Ok(context)
}

/// Chooses precision, batch and steps.
pub(crate) fn sizes(
    args: &Args,
    model: &Model,
    device: &Device,
    data: &Dataset,
    ([longest, context], saved): ([usize; 2], Option<&SavedRun>),
) -> anyhow::Result<(EngineOptions, Sizes)> {
    let load = args.of.load.options();
    if let Some(other) = args.training.preset.filter(|preset| *preset != Preset::Training) {
        bail!("preset {other} is not for training\nhint: use --preset training, or leave it out");
    }
    let asked = args.training.batch.map(|batch| batch as usize);
    // A choice by free memory could differ from that of the saved run.
    let before = || saved?.run["batch"].as_u64()?.try_into().ok();
    let asked = asked.or_else(before);
    let plan = |load: &EngineOptions, batch| model.plan(args, device, load, [batch, longest]);
    let chosen = match (args.training.preset, asked) {
        (None, _) => None,
        (Some(preset), Some(batch)) => Some(preset.precision(&load, |o| plan(o, batch))?),
        (Some(preset), None) => Some(preset.choose(&load, |o, of| plan(o, of.batch))?),
    };
    let tokens = args.training.tokens_per_step;
    if let Some(tokens) = tokens.filter(|tokens| !tokens.is_multiple_of(context as u64)) {
        let next = tokens.next_multiple_of(context as u64);
        bail!(
            "expected a multiple of {context} tokens per step, those of an example, got {tokens}\n\
             hint: use --tokens-per-step {next}, or another -c"
        );
    }
    let (load, batch) = match chosen {
        None => {
            let usual = |tokens| match tokens {
                None => Ok(USUAL_BATCH),
                Some(tokens) => micro_batch(args, model, device, &load, (tokens, longest, context)),
            };
            let batch = asked.map_or_else(|| usual(tokens), Ok)?;
            (load, batch)
        }
        Some(Chosen { options, plan }) => {
            let batch = plan.workload.batch;
            command::note!("preset training: {}, batches of {batch}", plan.precision());
            (options, batch)
        }
    };
    let accumulate = match tokens {
        None => args.training.accumulate as usize,
        Some(tokens) => {
            let own = (batch * context) as u64;
            if !tokens.is_multiple_of(own) {
                bail!(
                    "expected a multiple of {own} tokens per step, {} of {context}, got {tokens}\n\
                     hint: use --tokens-per-step {}, or another -b",
                    command::count(batch, "example"),
                    tokens.div_ceil(own) * own
                );
            }
            (tokens / own) as usize
        }
    };
    let steps = match args.training.steps {
        Some(steps) => steps as usize,
        None => data.len().div_ceil(batch * accumulate),
    };
    Ok((load, Sizes { batch, accumulate, steps, context }))
}

/// Returns true if a plan fits in the memory that is free now.
fn fits(device: &Device, plan: &Plan) -> bool {
    plan.fits() && free_bytes(device).is_none_or(|free| plan.peak_bytes() <= free)
}

/// Returns the largest batch that divides the sequences of a step and fits, of at most 65,536 tokens.
fn micro_batch(
    args: &Args,
    model: &Model,
    device: &Device,
    load: &EngineOptions,
    (tokens, longest, context): (u64, usize, usize),
) -> anyhow::Result<usize> {
    const MOST: usize = 1 << 16;
    let sequences = usize::try_from(tokens)? / context;
    for batch in (1..=sequences.min((MOST / context).max(1))).rev() {
        if sequences % batch == 0
            && fits(device, &model.plan(args, device, load, [batch, longest])?)
        {
            command::note!("batches of {}", command::count(batch, "example"));
            return Ok(batch);
        }
    }
    Ok(1)
}

/// Returns the level with the most memory that fits.
pub(crate) fn recompute(
    args: &Args,
    model: &Model,
    device: &Device,
    load: &EngineOptions,
    shape: [usize; 2],
) -> anyhow::Result<Recompute> {
    for level in Recompute::ALL.into_iter().rev() {
        let training = Training { recompute: level, ..model.training.clone() };
        if fits(device, &model.plan_of(args, device, load, shape, training)?) {
            return Ok(level);
        }
    }
    Ok(Recompute::Layers)
}
