//! `flashover bench --grpo` and `flashover plan --grpo`: batches of completions that a policy learns from.

use anyhow::{Context, bail};
use flashover::bench::Ceilings;
use flashover::grpo::{Grpo, GrpoOptions, GrpoPlan, GrpoPrompt, Phase, Report, Scored};
use flashover::memory::{Plan, Workload};
use flashover::train::{Training, Trains};
use flashover::{EngineOptions, LoadError, Sampling, WeightFormat};
use serde::Serialize;
use tune::timing::Stopwatch;

use crate::model_args::SubjectArgs;
use crate::train_speed::{self, Train};

/// Prompts of a batch, and completions of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Groups {
    pub(crate) prompts: usize,
    pub(crate) group: usize,
}

/// Parses `16x16`.
pub(crate) fn groups(text: &str) -> Result<Groups, String> {
    let parsed = text.split_once('x').and_then(|(prompts, group)| {
        let number = |text: &str| text.parse::<u16>().ok().filter(|own| *own > 0);
        Some((usize::from(number(prompts)?), usize::from(number(group)?)))
    });
    match parsed {
        Some((prompts, group)) if group >= 2 => Ok(Groups { prompts, group }),
        _ => Err(format!(
            "expected PROMPTSxCOMPLETIONS, got `{text}`\nhint: use, for example, 16x16; a group has 2 completions or more"
        )),
    }
}

/// Arguments of batches that are planned or measured.
#[derive(clap::Args, Clone)]
pub(crate) struct GrpoArgs {
    /// GRPO: prompts of a batch and completions of each, such as 16x16. Trains all weights, with --quant an adapter, unless --train
    /// says otherwise
    #[arg(long, value_name = "PxC", value_parser = groups, group = "learns", conflicts_with_all = ["batch", "accumulate"])]
    pub(crate) grpo: Option<Groups>,
    /// With --grpo, factor of the KL divergence; above 0, --train full has a copy of the weights as its reference
    #[arg(long, default_value_t = 0.0, requires = "grpo")]
    pub(crate) beta: f64,
    /// With --grpo, completions of one forward and backward pass
    #[arg(long, value_name = "N", default_value_t = 16, requires = "grpo")]
    pub(crate) micro_batch: usize,
}

/// Returns the weights that GRPO trains unless --train names them.
pub(crate) fn usual(quant: Option<WeightFormat>) -> Train {
    match quant {
        None => Train::Full,
        Some(_) => Train::Lora,
    }
}

/// Result of a test.
#[derive(Serialize)]
pub(crate) struct Row {
    build_commit: String,
    model: String,
    device: String,
    dtype: String,
    prompts: usize,
    group: usize,
    n_prompt: usize,
    n_gen: usize,
    micro_batch: usize,
    beta: f64,
    trains: &'static str,
    quant: Option<String>,
    recompute: &'static str,
    /// Medians over the repetitions.
    step_ns: f64,
    sample_ns: f64,
    reference_ns: f64,
    learn_ns: f64,
    /// Time of a step in no phase.
    between_ns: f64,
    sample_tokens_per_second: f64,
    learn_tokens_per_second: f64,
    /// Share of the measured peak of the matmul kernels that learning takes, without repeated work.
    mfu: Option<f64>,
    log_ratio_rms: f64,
    reserved_bytes: u64,
    samples_ns: Vec<f64>,
}

/// Measures steps after two as warm-up.
pub(crate) fn bench(
    of: &SubjectArgs,
    training: &Training,
    args: &GrpoArgs,
    [prompt, generated]: [usize; 2],
    repetitions: usize,
) -> anyhow::Result<Row> {
    let Some(Groups { prompts, group }) = args.grpo else { bail!("--grpo is missing") };
    let options = GrpoOptions {
        group,
        max_new_tokens: generated,
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        stop_tokens: Some(Vec::new()),
        beta: args.beta,
        micro_batch: args.micro_batch,
        ..GrpoOptions::default()
    };
    options.check()?;
    let trainer = train_speed::trainer(of, training)?;
    let ceilings = Ceilings::measure(trainer.engine())?;
    trainer.engine().clear_cache()?;
    let even = |own: &Scored<'_>| Some(own.tokens.iter().filter(|id| **id % 2 == 0).count() as f64);
    let mut grpo = Grpo::new(trainer, vec![even.into()], options)?;
    let vocab = grpo.trainer().engine().config().vocab;
    let asked = |batch: usize| -> Vec<GrpoPrompt> {
        let of = |at: usize| GrpoPrompt {
            tokens: (0..prompt)
                .map(|place| ((place * 7919 + (at + 31 * batch) * 104_729) % vocab) as u32)
                .collect(),
            ..GrpoPrompt::default()
        };
        (0..prompts).map(of).collect()
    };
    let (mut samples_ns, mut reports) = (Vec::new(), Vec::new());
    for batch in 0..repetitions + 2 {
        let begin = Stopwatch::start();
        let report = grpo.step(&asked(batch))?;
        if batch >= 2 {
            samples_ns.push(begin.elapsed().as_nanos() as f64);
            reports.push(report);
        }
    }
    let gaps: Option<Vec<f64>> =
        reports.iter().map(|own| Some(own.learning.as_ref()?.log_ratio?.rms)).collect();
    let gaps = gaps.context("a batch had nothing to learn from: its rewards are equal")?;
    let median = |of: &dyn Fn(usize) -> f64| {
        let mut all: Vec<f64> = (0..reports.len()).map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let phase = |of: fn(&Report) -> Phase| median(&|at| of(&reports[at]).seconds * 1e9);
    let rate = |of: fn(&Report) -> Phase| median(&|at| of(&reports[at]).rate());
    let learn_ns = phase(|own| own.phases.learn);
    let model = reports[0].phases.learn.model_flops;
    let named =
        |own: &Report| own.phases.named().iter().map(|(_, own)| own.seconds).sum::<f64>() * 1e9;
    let engine = grpo.trainer().engine();
    Ok(Row {
        build_commit: crate::commit(),
        model: of.name(),
        device: engine.device().profile().name.clone(),
        dtype: engine.precision().0,
        prompts,
        group,
        n_prompt: prompt,
        n_gen: generated,
        micro_batch: args.micro_batch,
        beta: args.beta,
        trains: match training.trains {
            Trains::Adapter(_) => "lora",
            Trains::Weights { .. } => "full",
        },
        quant: engine.precision().1,
        recompute: training.recompute.name(),
        step_ns: median(&|at| samples_ns[at]),
        sample_ns: phase(|own| own.phases.sample),
        reference_ns: phase(|own| own.phases.reference),
        learn_ns,
        between_ns: median(&|at| samples_ns[at] - named(&reports[at])),
        sample_tokens_per_second: rate(|own| own.phases.sample),
        learn_tokens_per_second: rate(|own| own.phases.learn),
        mfu: ceilings.gflops.map(|peak| model as f64 / learn_ns / peak),
        log_ratio_rms: median(&|at| gaps[at]),
        reserved_bytes: engine.memory().reserved_bytes,
        samples_ns: samples_ns.clone(),
    })
}

/// Formats a row as a table.
pub(crate) fn table(row: &Row) -> String {
    let mfu = row.mfu.map_or(String::new(), |share| format!("{:.1}%", share * 100.0));
    format!(
        "| model | dtype | trains | batch | tokens | ms/step | sample ms | tokens/s | reference ms | learn ms | tokens/s | MFU | \
         memory GiB |\n\
         | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n\
         | {} | {} | {} | {} x {} | {} + {} | {:.1} | {:.1} | {:.0} | {:.1} | {:.1} | {:.0} | {mfu} | {:.2} |\n",
        row.model,
        row.dtype,
        row.trains,
        row.prompts,
        row.group,
        row.n_prompt,
        row.n_gen,
        row.step_ns / 1e6,
        row.sample_ns / 1e6,
        row.sample_tokens_per_second,
        row.reference_ns / 1e6,
        row.learn_ns / 1e6,
        row.learn_tokens_per_second,
        row.reserved_bytes as f64 / f64::from(1 << 30),
    )
}

/// Plans the phases of a batch of completions of `context` tokens with their prompts.
pub(crate) fn planned(
    args: &GrpoArgs,
    groups: Groups,
    training: &Training,
    context: usize,
    options: &EngineOptions,
    plan: impl Fn(&EngineOptions, Workload) -> Result<Plan, LoadError>,
) -> Result<GrpoPlan, LoadError> {
    let all = groups.prompts.saturating_mul(groups.group);
    let sample = plan(options, Workload { shared: Some(0), ..Workload::new(all, context) })?;
    let micro_batch = args.micro_batch.min(all);
    let training = Some(training.clone());
    let learn = plan(options, Workload { training, ..Workload::new(micro_batch, context) })?;
    let copies = args.beta != 0.0
        && matches!(&learn.workload.training, Some(own) if matches!(own.trains, Trains::Weights { .. }));
    let reference_bytes = if copies { learn.weights_bytes } else { 0 };
    Ok(GrpoPlan { sample, learn, reference_bytes })
}
