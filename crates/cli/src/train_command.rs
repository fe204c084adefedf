//! `flashover train`: trains an adapter on examples.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::{env, process};

use anyhow::{anyhow, bail};
use command::OutFile;
use flashover::memory::{Chosen, Preset, Workload};
use flashover::train::{
    AdamWOptions, Adapter, Dataset, LoraOptions, Schedule, StepMetrics, TrainError, TrainOptions,
    Trainer, Training, Trains,
};
use flashover::{EngineOptions, KvFormat};
use report::TrainingStep;
use tune::timing::Stopwatch;

use crate::interrupt::{self, Stopped};
use crate::model_args::{ModelArgs, TraceArgs, Tracing, all_spared, choice, loaded};
use crate::train_speed::RecomputeArg;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Examples: a text, or a .jsonl with {"text"}, {"prompt", "completion"} or {"messages"} on each line
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Examples that are not trained on; prints their loss before and after training
    #[arg(long, value_name = "FILE")]
    held_out: Option<PathBuf>,
    /// Folder for adapter_config.json and adapter_model.safetensors; created if it is absent
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Replace the adapter in the output folder
    #[arg(long)]
    overwrite: bool,
    /// Also save the adapter after every N steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    save_every: Option<u32>,
    /// Write a page with the curves of loss, gradient norm and learning rate
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    model: ModelArgs,
}

/// Batches, steps and the optimizer.
#[derive(clap::Args)]
#[command(next_help_heading = "Training")]
struct TrainingArgs {
    /// Maximum tokens per example; longer ones are cut [default: 512, at most the context of the model]
    #[arg(long, short = 'c', value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Examples per batch [default: 4, or the choice of --preset]
    #[arg(long, short = 'b', value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Choose precision and batch that fit the device, unless --quant and -b are given; the only preset is training
    #[arg(long, value_parser = choice::<Preset>([Preset::Training.name()]), hide_possible_values = true)]
    preset: Option<Preset>,
    /// Batches per step, whose gradients are added
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    accumulate: u32,
    /// Number of steps [default: one epoch]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 2e-4, allow_negative_numbers = true)]
    learning_rate: f64,
    /// Steps of linear warmup from 0 to the learning rate
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    warmup: u32,
    /// Decay the learning rate to 0 along half a cosine
    #[arg(long)]
    cosine: bool,
    /// Weight decay of AdamW
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    weight_decay: f64,
    /// Clip the gradient to this norm; 0 disables clipping
    #[arg(long, alias = "clip", default_value_t = 1.0, allow_negative_numbers = true)]
    max_grad_norm: f64,
    /// Random seed of the adapter's initial values and of the order of examples
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Activations that the backward pass recomputes: fewer take more memory and less time
    #[arg(long, value_enum, default_value = "layers")]
    recompute: RecomputeArg,
}

/// Help of `--kv-cache`: it is an option of the model, but training refuses it.
pub(crate) const KV_CACHE: &str = "Training has no KV cache: int8 is refused";

/// Default maximum of tokens per example.
pub(crate) const USUAL_TO_TRAIN: usize = 512;

/// Shape of the adapter.
#[derive(clap::Args)]
#[command(next_help_heading = "Adapter")]
pub(crate) struct LoraArgs {
    /// Rank of the LoRA matrices A and B [default: 16]
    #[arg(long, value_name = "RANK")]
    lora_rank: Option<usize>,
    /// Alpha: the product of B and A is scaled by alpha / rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", allow_negative_numbers = true)]
    lora_alpha: Option<f64>,
    /// Names of the adapted matrices, such as q_proj,v_proj [default: all matrices of the layers]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    lora_targets: Vec<String>,
}

impl LoraArgs {
    pub(crate) fn options(&self) -> LoraOptions {
        let rank = self.lora_rank.unwrap_or(LoraOptions::default().rank);
        LoraOptions {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            rank_stabilised: false,
            targets: self.lora_targets.clone(),
        }
    }

    /// Returns true if an option was given.
    pub(crate) fn are_given(&self) -> bool {
        self.lora_rank.is_some() || self.lora_alpha.is_some() || !self.lora_targets.is_empty()
    }
}

/// Default number of examples per batch.
const USUAL_BATCH: usize = 4;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.model.adapter().is_some() && args.lora.are_given() {
        bail!("--adapter sets rank, alpha and matrices\nhint: leave out --lora-*, or --adapter");
    }
    if args.model.options().kv != KvFormat::Float {
        bail!("training has no KV cache\nhint: leave out --kv-cache");
    }
    let file = args.trace.file()?;
    let page = args.html.as_deref().map(OutFile::new).transpose()?;
    if let (Some(page), Some(trace)) = (&page, &file)
        && page.is_same(trace)
    {
        bail!("--html and --profile-trace name the same file\nhint: name two files");
    }
    let (folder, adapter) = args.model.open_apart()?;
    let output = &args.output;
    let examples = [Some(&args.data), args.held_out.as_ref()].into_iter().flatten().cloned();
    let read: Vec<PathBuf> = folder.files().into_iter().chain(examples).collect();
    let continued = args.model.adapter().into_iter().flat_map(Adapter::files);
    for file in [&file, &page].into_iter().flatten() {
        all_spared(
            read.iter().cloned().chain(continued.clone()).chain(Adapter::files(output)),
            file,
        )?;
    }
    let unwritable = |why| {
        anyhow!(
            "cannot write into {}: {why}\nhint: choose an --output folder that you can write",
            output.display()
        )
    };
    let own = folder.files().into_iter().filter_map(|file| file.parent()?.canonicalize().ok());
    if output.canonicalize().is_ok_and(|output| own.into_iter().any(|own| own == output)) {
        bail!("{} is the model's own folder\nhint: choose another --output", output.display());
    }
    let max_context = folder.config().context().unwrap_or(usize::MAX);
    let context =
        args.training.context.map_or(USUAL_TO_TRAIN.min(max_context), |context| context as usize);
    if context > max_context {
        bail!(
            "expected a context of at most {max_context} tokens, got {context}\n\
             hint: use -c {max_context}, or --max-context {context} to extend the context"
        );
    }
    let accumulate = args.training.accumulate as usize;
    let recompute = args.training.recompute.into();
    let lora = match &adapter {
        Some(adapter) => adapter.options().clone(),
        None => args.lora.options(),
    };
    let device = args.model.device()?;
    let training = Some(Training { trains: Trains::Adapter(lora.clone()), recompute });
    let workload =
        |batch, context| Workload { training: training.clone(), ..Workload::new(batch, context) };
    let plan = |load: &EngineOptions, workload| folder.plan(device.profile(), load, workload);
    let asked = args.training.batch.map(|batch| batch as usize);
    if let Some(other) = args.training.preset.filter(|preset| *preset != Preset::Training) {
        bail!("preset {other} is not for training\nhint: use --preset training, or leave it out");
    }
    let data = Dataset::open(&args.data, &folder, context)?;
    let held_out = args.held_out.as_ref();
    let held_out = held_out.map(|file| Dataset::open(file, &folder, context)).transpose()?;
    let longest = data.examples.iter().chain(held_out.iter().flat_map(|own| &own.examples));
    let longest = longest.map(|own| own.tokens.len()).max().unwrap_or(1);
    let chosen = match (args.training.preset, asked) {
        (None, _) => None,
        (Some(preset), Some(batch)) => {
            Some(preset.precision(&args.model.options(), |o| plan(o, workload(batch, longest)))?)
        }
        (Some(preset), None) => Some(
            preset.choose(&args.model.options(), |o, of| plan(o, workload(of.batch, longest)))?,
        ),
    };
    let (load, batch) = match chosen {
        None => (args.model.options(), asked.unwrap_or(USUAL_BATCH)),
        Some(Chosen { options, plan }) => {
            let batch = plan.workload.batch;
            command::note!("preset training: {}, batches of {batch}", plan.precision());
            (options, batch)
        }
    };
    let steps = match args.training.steps {
        Some(steps) => steps as usize,
        None => data.examples.len().div_ceil(batch * accumulate),
    };
    if args.training.max_grad_norm.is_nan() || args.training.max_grad_norm < 0.0 {
        bail!(
            "expected a gradient norm of 0 or more, got {}\nhint: use --max-grad-norm 1, or 0 to disable clipping",
            args.training.max_grad_norm
        );
    }
    let options = TrainOptions {
        lora: lora.clone(),
        schedule: Schedule {
            learning_rate: args.training.learning_rate,
            warmup: args.training.warmup as usize,
            cosine: args.training.cosine.then_some(steps),
        },
        optimizer: AdamWOptions {
            weight_decay: args.training.weight_decay,
            max_grad_norm: (args.training.max_grad_norm > 0.0)
                .then_some(args.training.max_grad_norm),
            ..TrainOptions::default().optimizer
        },
        seed: args.training.seed,
        recompute,
    };
    options.check()?;
    let same = |own: &PathBuf| own.canonicalize().ok() == output.canonicalize().ok();
    let replaced = Adapter::files(output).into_iter().any(|file| file.exists());
    if replaced && !args.overwrite && !args.model.adapter().is_some_and(same) {
        bail!(
            "{} has an adapter\nhint: replace it with --overwrite, or choose another --output",
            output.display()
        );
    }
    let workload = workload(batch, longest);
    plan(&load, workload.clone())?.fitting()?;
    let parent = output.parent().filter(|parent| *parent != Path::new(""));
    parent.map_or(Ok(()), std::fs::create_dir_all).map_err(unwritable)?;
    if output.is_dir() {
        for file in Adapter::files(output) {
            all_spared(read.iter().cloned(), &OutFile::new(&file)?)?;
        }
    }
    // Fails before the long work if the folder cannot be written; a signal while the model loads leaves nothing.
    drop(Adapter::begin(output)?);
    let load = EngineOptions { workload: Some(Workload::new(1, 1)), ..load };
    let engine = loaded(&device, folder, &load)?;
    let mut trainer = match adapter {
        Some(adapter) => Trainer::from_adapter(engine, adapter, options)?,
        None => Trainer::new(engine, options)?,
    };
    if args.model.adapter().is_some() {
        command::note!(
            "note: training continues from the adapter; AdamW and the schedule start from their beginning"
        );
    }
    trainer.reserve(&workload)?;
    command::note!(
        "{}, {} of them cut, {} left out; {}, batches of {}{}",
        command::count(data.examples.len(), "example"),
        data.cut,
        data.left_out,
        command::count(steps, "step"),
        command::count(batch, "example"),
        if accumulate > 1 { format!(", {accumulate} per step") } else { String::new() },
    );
    if data.diverged > 0 {
        command::note!(
            "note: in {} the tokens of the prompt change when the completion follows; the changed ones are trained on, too",
            command::count(data.diverged, "example")
        );
    }
    let _listening = interrupt::listen_and_save()?;
    // From here on, other processes cannot write the folder.
    let mut adapter_folder = Adapter::begin(output)?;
    let before = loss(&mut trainer, held_out.as_ref(), batch)?;
    let tracing = Tracing::start(file, trainer.engine())?;
    let (begin, mut learned, mut taken) = (Stopwatch::start(), 0, Vec::new());
    let mut ended = Ok(());
    let save_every = args.save_every.map_or(usize::MAX, |steps| steps as usize);
    while ended.is_ok() && trainer.done() < steps && !interrupt::came() {
        let step = Stopwatch::start();
        let batches = data.micro_batches(trainer.done(), batch, accumulate, args.training.seed);
        ended = trainer.step_while(batches, || !interrupt::came()).map(|metrics| {
            if let Some(metrics) = metrics {
                learned += metrics.tokens;
                let seconds = step.elapsed().as_secs_f64();
                told(&metrics, steps, seconds);
                let StepMetrics { step, loss, tokens, gradient, learning_rate, .. } = metrics;
                taken.push(TrainingStep { step, loss, gradient, learning_rate, tokens, seconds });
            }
        });
        let between = trainer.done() > 0 && trainer.done() < steps;
        if ended.is_ok() && between && trainer.done().is_multiple_of(save_every) {
            // A failed save is tried again after as many steps, and in the end.
            match trainer.save_into(&mut adapter_folder) {
                Ok(()) => command::note!("the adapter after step {} is saved", trainer.done()),
                Err(why) => command::note!("warning: the adapter is not saved: {why}"),
            }
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    // Saves before anything else can fail, and also after an error. Without a step, an earlier adapter stays.
    if trainer.done() > 0 {
        let saved = trainer.save_into(&mut adapter_folder);
        let saved = saved.or_else(|why| rescue(&trainer, output, why));
        if ended.is_err() && saved.is_ok() {
            let (done, output) = (trainer.done(), output.display());
            let steps = command::count(done, "step");
            command::note!("the adapter after {steps} is in {output}");
        }
        ended = ended.and(saved);
    }
    let traced = tracing.finish(trainer.engine());
    let after = if ended.is_ok() { loss(&mut trainer, held_out.as_ref(), batch)? } else { None };
    let mut facts = vec![
        ("model", trainer.engine().folder().display().to_string()),
        ("data", args.data.display().to_string()),
        ("device", format!("{} ({})", device.profile().name, device.backend())),
        ("adapter", format!("rank {}, alpha {}", lora.rank, lora.alpha)),
        ("batch", format!("{batch} x {accumulate} of at most {context} tokens")),
    ];
    facts.extend(before.map(|loss| ("held out, before", format!("loss {loss:.4}"))));
    facts.extend(after.map(|loss| ("held out, after", format!("loss {loss:.4}"))));
    if trainer.done() < steps {
        facts.push(("stopped", format!("after {} of {steps} steps", trainer.done())));
    }
    let shown = page.map_or(Ok(()), |page| page.write(report::training(&facts, &taken).as_bytes()));
    ended?;
    if trainer.done() > 0 && (traced.is_err() || shown.is_err()) {
        command::note!("the adapter is in {}", output.display());
    }
    traced?;
    shown?;
    if interrupt::came() && trainer.done() == 0 {
        return Err(Stopped("stopped before the first step; nothing is saved".to_owned()).into());
    }
    if interrupt::came() {
        let (done, output) = (trainer.done(), output.display());
        let steps = command::count(done, "step");
        return Err(Stopped(format!("stopped after {steps}; the adapter is in {output}")).into());
    }
    if let (Some(before), Some(after)) = (before, after) {
        command::note!("held out: loss {before:.4} before, {after:.4} after");
    }
    command::note!(
        "{} in {seconds:.1} s, {:.0} trained tokens/s; the adapter is in {}",
        command::count(trainer.done(), "step"),
        learned as f64 / seconds,
        output.display()
    );
    Ok(())
}

/// Saves an adapter elsewhere after its folder could not be written: into a folder that the user names at a terminal,
/// otherwise next to the output folder or into the folder for temporary files. Returns the error `why` unless the user
/// named a folder.
fn rescue(trainer: &Trainer, output: &Path, why: TrainError) -> Result<(), TrainError> {
    if !matches!(why, TrainError::Model(_)) {
        return Err(why);
    }
    let steps = command::count(trainer.done(), "step");
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        command::note!("{why}");
        loop {
            command::note!(
                "type another folder for the adapter after {steps}, or nothing to discard it:"
            );
            let mut line = String::new();
            // An unreadable answer counts as none.
            let read = io::stdin().read_line(&mut line).unwrap_or(0);
            let folder = line.trim();
            if read == 0 || folder.is_empty() {
                break;
            }
            match trainer.save(folder) {
                Ok(()) => {
                    command::note!("the adapter after {steps} is in {folder}");
                    return Ok(());
                }
                Err(why) => command::note!("{why}"),
            }
        }
        return Err(why);
    }
    let mut beside = output.as_os_str().to_owned();
    beside.push(".rescued");
    let temporary = env::temp_dir().join(format!("flashover-adapter-{}", process::id()));
    for folder in [PathBuf::from(beside), temporary] {
        match trainer.save(&folder) {
            Ok(()) => {
                command::note!("the adapter after {steps} is in {}", folder.display());
                break;
            }
            Err(why) => command::note!("warning: the adapter is not saved: {why}"),
        }
    }
    Err(why)
}

fn told(metrics: &StepMetrics, steps: usize, seconds: f64) {
    let StepMetrics { step, loss, tokens, gradient, learning_rate, skipped } = metrics;
    let rate = *tokens as f64 / seconds;
    let skipped = if *skipped { "; skipped, the gradient left the range of f16" } else { "" };
    command::note!(
        "step {step} of {steps}: loss {loss:.4}, gradient {gradient:.3}, rate {learning_rate:.2e}, {tokens} tokens, \
         {rate:.0} tokens/s{skipped}"
    );
}

/// Returns the mean loss over the tokens of held-out examples; none after a signal.
fn loss(trainer: &mut Trainer, of: Option<&Dataset>, batch: usize) -> anyhow::Result<Option<f64>> {
    let Some(of) = of else { return Ok(None) };
    let (mut sum, mut all) = (0.0, 0);
    for part in of.examples.chunks(batch) {
        if interrupt::came() {
            return Ok(None);
        }
        let (loss, tokens) = trainer.loss(part)?;
        sum += loss * tokens as f64;
        all += tokens;
    }
    Ok(Some(sum / all as f64))
}
