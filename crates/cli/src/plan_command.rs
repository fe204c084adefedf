//! `flashover plan`: what a model takes, before it is loaded.

use anyhow::bail;
use flashover::{EngineOptions, Plan, Preset, Workload};

use crate::model_args::SubjectArgs;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: SubjectArgs,
    /// Sequences that decode together
    #[arg(long, short = 'b', default_value_t = 1, conflicts_with = "preset")]
    batch: usize,
    /// Positions of each, of prompt and answer; without it 2048, or as many as the model has
    #[arg(long, short = 'c', conflicts_with = "preset")]
    context: Option<usize>,
    /// Work out precision and batch for code-generation, inference or latency
    #[arg(long)]
    preset: Option<Preset>,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

/// Positions where nobody says.
const USUAL: usize = 2048;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    // A card that is described need not be there.
    let profile = match args.of.load.described()? {
        Some(profile) => profile,
        None => args.of.load.open()?.profile().clone(),
    };
    let workload = |context| Workload::new(args.batch, context);
    let options = args.of.load.options();
    let subject = args.of.subject()?;
    let plan = |options: &EngineOptions, workload| subject.plan(&profile, options, workload);
    let plan = match args.preset {
        Some(preset) => preset.choose(&options, plan)?.plan,
        None => match plan(&options, workload(args.context.unwrap_or(USUAL))) {
            Err(why) if args.context.is_none() => {
                plan(&options, workload(why.context().ok_or(why)?))?
            }
            planned => planned?,
        },
    };
    command::print(&match args.json {
        true => serde_json::to_string_pretty(&plan)? + "\n",
        false => table(&plan),
    })?;
    if !plan.fits() {
        bail!("it does not fit: {plan}\nhint: {}", plan.advice());
    }
    Ok(())
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
    if let (Some(total), Some(budget)) = (plan.total_bytes, plan.budget_bytes) {
        lines.push(("of the device", bytes(total)));
        lines.push(("may be used", bytes(budget)));
    }
    let most = |most: Option<usize>| most.map_or_else(|| "unknown".to_owned(), |m| m.to_string());
    lines.push(("largest batch", most(plan.largest_batch)));
    lines.push(("largest context", most(plan.largest_context)));
    let line = |(name, value): (&str, String)| format!("{name:<16} {value}\n");
    lines.into_iter().map(line).collect()
}

fn bytes(bytes: u64) -> String {
    format!("{:>12.3} GiB", bytes as f64 / f64::from(1 << 30))
}
