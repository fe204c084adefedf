//! `flashover plan`: what a model takes, before it is loaded.

use anyhow::bail;
use clap::ValueEnum;
use flashover::memory::{Plan, PlanError, Preset, Workload};
use flashover::train::{Recompute, Training};
use flashover::{EngineOptions, LoadError};

use crate::model_args::SubjectArgs;
use crate::train_command::{LoraArgs, USUAL_TO_TRAIN};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: SubjectArgs,
    /// Sequences that decode together; without it 1, or what the preset wants and the device has room for
    #[arg(long, short = 'b')]
    batch: Option<usize>,
    /// Positions of each, of prompt and answer; without it 2048, 512 to train, or the preset's, or as many as the model has
    #[arg(long, short = 'c')]
    context: Option<usize>,
    /// Work out precision and batch for code-generation, inference, latency or training
    #[arg(long)]
    preset: Option<Preset>,
    /// Plan for training in place of generating
    #[arg(long, value_enum)]
    train: Option<Train>,
    /// With --train, plan for gradients of several batches that make up a step
    #[arg(long, requires = "train")]
    accumulate: bool,
    /// With --train, keep what a layer computes in place of computing it again
    #[arg(long, requires = "train")]
    keep_activations: bool,
    #[command(flatten)]
    lora: LoraArgs,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

/// What is trained.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Train {
    Lora,
}

/// Positions where nobody says.
const USUAL: usize = 2048;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.train.is_none() && args.lora.are_given() {
        bail!("only training has an adapter to plan\nhint: --train lora");
    }
    // A card that is described need not be there.
    let profile = match args.of.load.described()? {
        Some(profile) => profile,
        None => args.of.load.open()?.profile().clone(),
    };
    let options = args.of.load.options();
    let subject = args.of.subject()?;
    let trains = args.train.is_some() || args.preset == Some(Preset::Training);
    if let Some(other) = args.preset.filter(|preset| trains && *preset != Preset::Training) {
        bail!("preset {other} is not for training\nhint: --preset training, or leave --train out");
    }
    let recompute = if args.keep_activations { Recompute::Nothing } else { Recompute::Layers };
    let training = trains.then(|| Training {
        lora: args.lora.options(),
        accumulates: args.accumulate,
        recompute,
    });
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
        false => bail!("it does not fit: {plan}\nhint: {}", plan.advice()),
    }
}

/// Plans the workload that is asked for; what nobody asks for is the preset's, or usual.
fn planned(
    args: &Args,
    options: &EngineOptions,
    usual: usize,
    plan: impl Fn(&EngineOptions, Workload) -> Result<Plan, LoadError>,
) -> Result<Plan, LoadError> {
    let context = match (args.context, args.preset.map_or(usual, Preset::context)) {
        (Some(context), _) => context,
        // A model may have fewer.
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
    let most = |most: Option<usize>| most.map_or("unknown".to_owned(), |most| most.to_string());
    let workload = &plan.workload;
    let mut lines = vec![
        ("model", format!("{}, {}", plan.model, plan.precision())),
        ("device", plan.device.clone()),
        ("batch", workload.batch.to_string()),
        ("context", workload.context.to_string()),
    ];
    lines.extend(workload.training.as_ref().map(|own| ("rank", own.lora.rank.to_string())));
    let short = |name: &'static str| name.trim_end_matches(" and gradients");
    lines.extend(plan.parts().map(|(name, part)| (short(name), bytes(part))));
    lines.push(("together", bytes(plan.peak_bytes())));
    lines.extend(plan.total_bytes.map(|total| ("of the device", bytes(total))));
    lines.push(("reserve", bytes(plan.reserve_bytes)));
    lines.extend(plan.budget_bytes.map(|budget| ("may be used", bytes(budget))));
    lines.push(("largest batch", most(plan.largest_batch)));
    lines.push(("largest context", most(plan.largest_context)));
    lines.into_iter().map(|(name, value)| format!("{name:<16} {value}\n")).collect()
}

fn bytes(bytes: u64) -> String {
    format!("{:>12.3} GiB", bytes as f64 / f64::from(1 << 30))
}
