//! `flashover plan`: what a model takes, before it is loaded.

use anyhow::bail;
use clap::ValueEnum;
use flashover::{
    ArchProfile, BatchPlan, EngineOptions, LoadError, Plan, Preset, Recompute, TrainPlan,
    TrainWorkload, Workload,
};
use serde::Serialize;

use crate::model_args::{Subject, SubjectArgs};
use crate::train_command::LoraArgs;

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
/// The same of training.
pub(crate) const USUAL_TO_TRAIN: usize = 512;

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
    if args.train.is_some() || args.preset == Some(Preset::Training) {
        return train(args, &profile, &options, &subject);
    }
    let plan = planned(args, &options, USUAL, |options, workload| {
        subject.plan(&profile, options, workload)
    })?;
    command::print(&match args.json {
        true => as_json(&plan, plan.peak_bytes(), plan.fits())?,
        false => table(&plan),
    })?;
    if !plan.fits() {
        bail!("it does not fit: {plan}\nhint: {}", plan.advice());
    }
    Ok(())
}

/// Of the workload that is asked for; what nobody asks for is the preset's, or usual.
fn planned<P: BatchPlan>(
    args: &Args,
    options: &EngineOptions,
    usual: usize,
    plan: impl Fn(&EngineOptions, Workload) -> Result<P, LoadError>,
) -> Result<P, P::Refused> {
    let context = match (args.context, args.preset.map_or(usual, Preset::context)) {
        (Some(context), _) => context,
        // A model may have fewer.
        (None, usual) => match plan(options, Workload::new(1, usual)) {
            Ok(_) => usual,
            Err(why) => why.context().ok_or(why)?,
        },
    };
    match (args.preset, args.batch) {
        (None, batch) => Ok(plan(options, Workload::new(batch.unwrap_or(1), context))?),
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

fn train(
    args: &Args,
    profile: &ArchProfile,
    options: &EngineOptions,
    subject: &Subject<'_>,
) -> anyhow::Result<()> {
    let lora = args.lora.options();
    let recompute = if args.keep_activations { Recompute::Nothing } else { Recompute::Layers };
    let plan = |options: &EngineOptions, Workload { batch, context, .. }| {
        let workload = TrainWorkload { batch, context, accumulates: args.accumulate, recompute };
        match subject {
            Subject::Folder(folder) => {
                TrainPlan::of_folder(profile, folder, options, &lora, workload)
            }
            Subject::Shape(shape) => TrainPlan::of_shape(profile, shape, options, &lora, workload),
        }
    };
    if let Some(other) = args.preset.filter(|preset| *preset != Preset::Training) {
        bail!("preset {other} is not for training\nhint: --preset training, or leave --train out");
    }
    let plan = planned(args, options, USUAL_TO_TRAIN, plan)?;
    command::print(&match args.json {
        true => as_json(&plan, plan.peak_bytes(), plan.fits())?,
        false => train_table(&plan),
    })?;
    match plan.fits() {
        true => Ok(()),
        false => Err(plan.refused().into()),
    }
}

fn train_table(plan: &TrainPlan) -> String {
    let mut lines = vec![
        ("model", format!("{}, {}", plan.model, plan.precision())),
        ("device", plan.device.clone()),
        ("batch", plan.workload.batch.to_string()),
        ("context", plan.workload.context.to_string()),
        ("rank", plan.rank.to_string()),
        ("weights", bytes(plan.weights_bytes)),
        ("adapter", bytes(plan.adapter_bytes)),
        ("optimizer", bytes(plan.optimizer_bytes)),
        ("activations", bytes(plan.passing_bytes)),
        ("together", bytes(plan.peak_bytes())),
    ];
    of_device(&mut lines, plan.total_bytes, plan.reserve_bytes, plan.budget_bytes);
    lines.push(("largest batch", most(plan.largest_batch)));
    lines.push(("largest context", most(plan.largest_context)));
    of_lines(lines)
}

/// What there is, as far as anybody knows.
fn of_device(
    lines: &mut Vec<(&str, String)>,
    total: Option<u64>,
    reserve: u64,
    budget: Option<u64>,
) {
    lines.extend(total.map(|total| ("of the device", bytes(total))));
    lines.push(("reserve", bytes(reserve)));
    lines.extend(budget.map(|budget| ("may be used", bytes(budget))));
}

fn most(most: Option<usize>) -> String {
    most.map_or_else(|| "unknown".to_owned(), |most| most.to_string())
}

fn of_lines(lines: Vec<(&str, String)>) -> String {
    lines.into_iter().map(|(name, value)| format!("{name:<16} {value}\n")).collect()
}

/// The plan's own fields, their sum, and whether it fits.
fn as_json(plan: &impl Serialize, peak_bytes: u64, fits: bool) -> anyhow::Result<String> {
    #[derive(Serialize)]
    struct Whole<'a, P> {
        #[serde(flatten)]
        plan: &'a P,
        peak_bytes: u64,
        fits: bool,
    }
    Ok(serde_json::to_string_pretty(&Whole { plan, peak_bytes, fits })? + "\n")
}

fn table(plan: &Plan) -> String {
    let mut lines = vec![
        ("model", format!("{}, {}", plan.model, plan.precision())),
        ("device", plan.device.clone()),
        ("batch", plan.workload.batch.to_string()),
        ("context", plan.workload.context.to_string()),
        ("weights", bytes(plan.weights_bytes)),
        ("keys and values", bytes(plan.cache_bytes)),
        ("activations", bytes(plan.activations_bytes)),
        ("workspace", bytes(plan.workspace_bytes)),
        ("together", bytes(plan.peak_bytes())),
    ];
    of_device(&mut lines, plan.total_bytes, plan.reserve_bytes, plan.budget_bytes);
    lines.push(("largest batch", most(plan.largest_batch)));
    lines.push(("largest context", most(plan.largest_context)));
    of_lines(lines)
}

fn bytes(bytes: u64) -> String {
    format!("{:>12.3} GiB", bytes as f64 / f64::from(1 << 30))
}
