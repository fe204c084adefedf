//! `flashover plan`: estimates the memory that a model needs, without loading it.

use anyhow::bail;
use flashover::grpo::{GrpoOptions, GrpoPlan};
use flashover::memory::{Plan, PlanError, Preset, Workload};
use flashover::train::{Recompute, Training, Trains};
use flashover::{EngineOptions, KvFormat, LoadError};

use crate::grpo_speed::{self, Groups, GrpoArgs};
use crate::model_args::{SubjectArgs, choice};
use crate::train_args::{LoraArgs, USUAL_TO_TRAIN};
use crate::train_speed::{StepArgs, Train};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Sequences that run together [default: 1, or the choice of --preset]
    #[arg(long, short = 'b')]
    batch: Option<usize>,
    /// Tokens per sequence, prompt plus output [default: 2048, for training 512, with --preset its own; at most the
    /// context of the model]
    #[arg(long, short = 'c')]
    context: Option<usize>,
    /// Choose precision and batch for a use, unless --quant and --batch set them: code-generation, inference, latency
    /// or training
    #[arg(long, value_parser = choice::<Preset>(Preset::ALL.map(Preset::name)), hide_possible_values = true)]
    preset: Option<Preset>,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    grpo: GrpoArgs,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    of: SubjectArgs,
}

/// Help of `--profile`, which needs no device here.
pub(crate) const PROFILE: &str =
    "Plan for a published card, such as rtx3060 or l4, instead of a device of this machine";

/// Default context length for generation, in tokens.
const USUAL: usize = 2048;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let groups = args.grpo.grpo;
    if groups.is_some() && args.preset.is_some() {
        bail!("--grpo sets the batch\nhint: leave out --preset");
    }
    if let Some(Groups { group, .. }) = groups {
        let GrpoArgs { beta, micro_batch, .. } = args.grpo;
        GrpoOptions { group, beta, micro_batch, ..GrpoOptions::default() }.check()?;
    }
    if args.steps.train.is_none() && groups.is_none() && args.lora.are_given() {
        bail!("--lora options need a plan for training\nhint: add --train lora");
    }
    if args.lora.are_given() && matches!(args.steps.train, Some(Train::Full)) {
        bail!("--lora options are of --train lora\nhint: leave them out, or use --train lora");
    }
    let draws = groups.is_some();
    if args.steps.train.is_some() && !draws && args.of.load.options().kv != KvFormat::Float {
        bail!("training has no KV cache\nhint: leave out --kv-cache");
    }
    // A recorded profile needs no device.
    let profile = match args.of.load.described()? {
        Some(profile) => profile,
        None => args.of.load.open()?.profile().clone(),
    };
    let options = args.of.load.options();
    let subject = args.of.subject()?;
    let trains = args.steps.train.is_some() || args.preset == Some(Preset::Training);
    if let Some(other) = args.preset.filter(|preset| trains && *preset != Preset::Training) {
        bail!(
            "preset {other} is not for training\nhint: use --preset training, or leave out --train"
        );
    }
    let usual = if groups.is_some() { grpo_speed::usual(options.quant) } else { Train::Lora };
    // Options of LoRA mean an adapter.
    let usual = if args.lora.are_given() { Train::Lora } else { usual };
    let train = args.steps.train.unwrap_or(usual);
    let training =
        args.steps.training(train, args.lora.options(), Recompute::Layers, options.quant)?;
    if let Some(groups) = groups {
        let of = |options: &EngineOptions, workload| subject.plan(&profile, options, workload);
        let context = match args.context {
            Some(context) => context,
            None => match of(&options, Workload::new(1, USUAL)) {
                Ok(_) => USUAL,
                Err(why) => why.context().ok_or(why)?,
            },
        };
        let plan = grpo_speed::planned(&args.grpo, groups, &training, context, &options, of)?;
        return show_grpo(args, groups, &plan);
    }
    let training = trains.then_some(training);
    let usual = if trains { USUAL_TO_TRAIN } else { USUAL };
    let plan = planned(args, &options, usual, |options, workload| {
        let workload = Workload { training: training.clone(), ..workload };
        subject.plan(&profile, options, workload)
    })?;
    command::print(&match args.json {
        true => serde_json::to_string_pretty(&plan)? + "\n",
        false => table(&plan),
    })?;
    match plan.fits() {
        true => Ok(()),
        false if trains => Err(PlanError::Memory(Box::new(plan)).into()),
        false => bail!("the workload does not fit: {plan}\nhint: {}", plan.advice()),
    }
}

/// Prints the plan of GRPO, and fails if it does not fit.
fn show_grpo(args: &Args, groups: Groups, plan: &GrpoPlan) -> anyhow::Result<()> {
    let learn = &plan.learn;
    let mut lines = vec![
        ("model", format!("{}, {}", learn.model, learn.precision())),
        ("device", learn.device.clone()),
        ("batch", format!("{} x {}", groups.prompts, groups.group)),
        ("micro-batch", learn.workload.batch.to_string()),
        ("context", learn.workload.context.to_string()),
    ];
    lines.extend(plan.parts().into_iter().map(|(name, part)| (name, bytes(part))));
    lines.push(("total", bytes(plan.peak_bytes())));
    lines.extend(learn.budget_bytes.map(|budget| ("budget", bytes(budget))));
    command::print(&match args.json {
        true => serde_json::to_string_pretty(plan)? + "\n",
        false => lines.into_iter().map(|(name, value)| format!("{name:<16} {value}\n")).collect(),
    })?;
    match plan.fits() {
        true => Ok(()),
        false => bail!(
            "the batch does not fit\nhint: use fewer prompts or completions (--grpo), a smaller --micro-batch or -c, or --quant \
             nf4"
        ),
    }
}

/// Plans the requested workload. Values that are not requested come from the preset, else the context is `usual` and
/// the batch is 1.
fn planned(
    args: &Args,
    options: &EngineOptions,
    usual: usize,
    plan: impl Fn(&EngineOptions, Workload) -> Result<Plan, LoadError>,
) -> Result<Plan, LoadError> {
    let context = match (args.context, args.preset.map_or(usual, Preset::context)) {
        (Some(context), _) => context,
        // The context of the model may be shorter.
        (None, usual) => match plan(options, Workload::new(1, usual)) {
            Ok(_) => usual,
            Err(why) => why.context().ok_or(why)?,
        },
    };
    match (args.preset, args.batch) {
        (None, batch) => plan(options, Workload::new(batch.unwrap_or(1), context)),
        (Some(preset), Some(batch)) => {
            let chosen = preset.precision(options, |o| plan(o, Workload::new(batch, context)));
            chosen.map(|chosen| chosen.plan)
        }
        (Some(preset), None) => {
            let chosen = preset.choose(options, |o, of| plan(o, Workload::new(of.batch, context)));
            chosen.map(|chosen| chosen.plan)
        }
    }
}

fn table(plan: &Plan) -> String {
    let max = |max: Option<usize>| max.map_or("unknown".to_owned(), |max| max.to_string());
    let workload = &plan.workload;
    let mut lines = vec![
        ("model", format!("{}, {}", plan.model, plan.precision())),
        ("device", plan.device.clone()),
        ("batch", workload.batch.to_string()),
        ("context", workload.context.to_string()),
    ];
    if let Some(Training { trains: Trains::Adapter(lora), .. }) = &workload.training {
        lines.push(("rank", lora.rank.to_string()));
    }
    if let Some(Training { recompute, .. }) = &workload.training {
        lines.push(("recomputation", recompute.name().to_owned()));
    }
    lines.extend(plan.parts().into_iter().map(|(name, part)| (name, bytes(part))));
    lines.push(("total", bytes(plan.peak_bytes())));
    if plan.host_bytes > 0 {
        lines.push(("host memory", bytes(plan.host_bytes)));
    }
    lines.extend(plan.total_bytes.map(|total| ("device memory", bytes(total))));
    lines.push(("reserve", bytes(plan.reserve_bytes)));
    lines.extend(plan.budget_bytes.map(|budget| ("budget", bytes(budget))));
    lines.push(("largest batch", max(plan.largest_batch)));
    lines.push(("largest context", max(plan.largest_context)));
    lines.into_iter().map(|(name, value)| format!("{name:<16} {value}\n")).collect()
}

fn bytes(bytes: u64) -> String {
    format!("{:>12.3} GiB", bytes as f64 / f64::from(1 << 30))
}
