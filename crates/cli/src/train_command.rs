//! `flashover train`: trains an adapter or all weights on examples.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::{env, fs, process};

use anyhow::{Context, anyhow, bail};
use command::OutFile;
use flashover::bench::Ceilings;
use flashover::memory::{Chosen, Plan, Preset, Workload, free_bytes};
use flashover::train::{
    Adapter, Dataset, FullOptions, LoraOptions, Recompute, Start, StepMetrics, TrainError,
    TrainOptions, Trainer, Training, Trains,
};
use flashover::{Device, Engine, EngineOptions, KvFormat, LoadError, ModelFolder};
use report::TrainingStep;
use serde_json::{Value, json};
use tune::timing::Stopwatch;

use crate::interrupt::{self, Stopped};
use crate::model_args::{Subject, Tracing, all_spared, loaded};
pub(crate) use crate::train_args::Args;
use crate::train_args::USUAL_TO_TRAIN;
use crate::train_log::{Log, Progress};
use crate::train_speed::offloaded;

/// Default number of examples per batch.
const USUAL_BATCH: usize = 4;

/// Model to train.
struct Model {
    /// None for a shape with new weights.
    folder: Option<ModelFolder>,
    /// Adapter to continue.
    adapter: Option<Adapter>,
    training: Training,
}

impl Model {
    fn open(args: &Args) -> anyhow::Result<Self> {
        let full = args.training.full;
        let trains = |lora: &LoraOptions| match full {
            true => Trains::Weights {
                master: !args.training.no_master,
                moments: args.optimizer.optimizer().moments(),
                muon: args.optimizer.optimizer().is_muon(),
            },
            false => Trains::Adapter(lora.clone()),
        };
        // Sizes are chosen with the least memory.
        let recompute = args.training.recompute.map_or(Recompute::Layers, Recompute::from);
        let folder = match (args.of.subject()?, &args.resume) {
            (_, Some(resume)) if full => Some(args.of.load.folder(resume)?),
            (Subject::Folder(folder), _) => Some(args.of.load.folder(&folder)?),
            (Subject::Shape(_), _) if args.training.from_scratch => None,
            (Subject::Shape(shape), _) => bail!(
                "{shape} is a shape without weights\nhint: train it with --full --from-scratch, or name a --model"
            ),
        };
        let adapter = args.adapter.as_ref().or(args.resume.as_ref().filter(|_| !full));
        let adapter = match (adapter, &folder) {
            (Some(adapter), Some(folder)) => Some(folder.adapter(adapter)?),
            _ => None,
        };
        let asked = args.lora.options();
        let lora = adapter.as_ref().map_or(&asked, Adapter::options).clone();
        if args.lora.are_given() && (asked.rank, asked.alpha) != (lora.rank, lora.alpha) {
            let LoraOptions { rank, alpha, .. } = lora;
            bail!(
                "the saved adapter has rank {rank}, alpha {alpha}\nhint: leave out --lora-*, or start a new run"
            );
        }
        let training = Training {
            trains: trains(&lora),
            recompute,
            offload: offloaded(&args.training.offload),
            micro_batches: args.training.accumulate as usize,
        };
        Ok(Self { folder, adapter, training })
    }

    /// Returns the files that training reads.
    fn files(&self) -> Vec<PathBuf> {
        self.folder.as_ref().map(ModelFolder::files).unwrap_or_default()
    }

    fn plan(
        &self,
        args: &Args,
        device: &Device,
        load: &EngineOptions,
        shape: [usize; 2],
    ) -> Result<Plan, LoadError> {
        self.plan_of(args, device, load, shape, self.training.clone())
    }

    fn plan_of(
        &self,
        args: &Args,
        device: &Device,
        load: &EngineOptions,
        [batch, context]: [usize; 2],
        training: Training,
    ) -> Result<Plan, LoadError> {
        let workload = Workload { training: Some(training), ..Workload::new(batch, context) };
        match &self.folder {
            Some(folder) => folder.plan(device.profile(), load, workload),
            None => Plan::of_shape(device.profile(), &args.of.name(), load, workload),
        }
    }

    fn data(&self, args: &Args, path: &Path, context: usize) -> anyhow::Result<Dataset> {
        let Some(folder) = &self.folder else {
            let vocab = Engine::shape(&args.of.name())?.vocab;
            return Ok(Dataset::of_tokens(path, vocab, context)?);
        };
        Ok(Dataset::open(path, folder, context)?)
    }

    /// Loads the model.
    fn trainer(
        self,
        args: &Args,
        device: &Device,
        load: &EngineOptions,
        steps: usize,
    ) -> anyhow::Result<Trainer> {
        let (schedule, optimizer) = args.optimizer.options(&args.training, steps)?;
        let Training { recompute, offload, .. } = self.training;
        let seed = args.training.seed;
        if let Trains::Weights { master, .. } = self.training.trains {
            let start = match self.folder {
                Some(folder) => Start::Folder(Box::new(folder)),
                None => Start::Scratch { shape: args.of.name(), seed },
            };
            let options = FullOptions { schedule, optimizer, master, recompute, offload };
            return Ok(Trainer::full(device, start, load, options)?);
        }
        let lora = args.lora.options();
        let options = TrainOptions { lora, schedule, optimizer, seed, recompute, offload };
        options.check()?;
        let folder = self.folder.context("an adapter needs a model")?;
        let engine = loaded(device, folder, load)?;
        Ok(match self.adapter {
            Some(adapter) => Trainer::from_adapter(engine, adapter, options)?,
            None => Trainer::new(engine, options)?,
        })
    }
}

/// Files that training writes besides its folder.
struct Outputs {
    trace: Option<OutFile>,
    page: Option<OutFile>,
    log: Option<OutFile>,
}

impl Outputs {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let trace = args.trace.file()?;
        let page = args.html.as_deref().map(OutFile::new).transpose()?;
        let log = args.log.as_deref().map(OutFile::new).transpose()?;
        let named = [("--profile-trace", &trace), ("--html", &page), ("--log", &log)];
        for (at, (one, first)) in named.iter().enumerate() {
            for (other, second) in &named[at + 1..] {
                if let (Some(first), Some(second)) = (first, second)
                    && first.is_same(second)
                {
                    bail!("{other} and {one} name the same file\nhint: name two files");
                }
            }
        }
        Ok(Self { trace, page, log })
    }

    fn all(&self) -> impl Iterator<Item = &OutFile> {
        [&self.trace, &self.page, &self.log].into_iter().flatten()
    }
}

/// Sizes of a step.
struct Sizes {
    batch: usize,
    accumulate: usize,
    steps: usize,
    context: usize,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.adapter.is_some() && args.lora.are_given() {
        bail!("--adapter sets rank, alpha and matrices\nhint: leave out --lora-*, or --adapter");
    }
    let load = args.of.load.options();
    if load.kv != KvFormat::Float {
        bail!("training has no KV cache\nhint: leave out --kv-cache");
    }
    if args.training.full && load.quant.is_some() {
        bail!(
            "--full trains dense weights, --quant makes quantised ones\nhint: leave out --quant, or train an adapter without --full"
        );
    }
    let outputs = Outputs::new(args)?;
    let mut model = Model::open(args)?;
    let output = &args.output;
    let what = if args.training.full { "model" } else { "adapter" };
    let examples = [Some(&args.data), args.held_out.as_ref()].into_iter().flatten().cloned();
    let read: Vec<PathBuf> = model.files().into_iter().chain(examples).collect();
    let continued = args.adapter.iter().chain(&args.resume).flat_map(Adapter::files);
    for file in outputs.all() {
        let written = Adapter::files(output);
        all_spared(read.iter().cloned().chain(continued.clone()).chain(written), file)?;
    }
    let real = output.canonicalize().ok();
    let same = |own: &PathBuf| real.is_some() && own.canonicalize().ok() == real;
    let resumes = args.resume.as_ref().is_some_and(same);
    let own = model.files().into_iter().filter_map(|file| file.parent().map(Path::to_owned));
    if !resumes && own.into_iter().any(|own| same(&own)) {
        bail!("{} is the model's own folder\nhint: choose another --output", output.display());
    }
    let context = context(args, &model)?;
    let device = args.of.load.open()?;
    let data = model.data(args, &args.data, context)?;
    let held_out = args.held_out.as_ref();
    let held_out = held_out.map(|file| model.data(args, file, context)).transpose()?;
    let longest = held_out.iter().map(Dataset::longest).fold(data.longest(), usize::max).max(1);
    let (load, sizes) = sizes(args, &model, &device, &data, [longest, context])?;
    let Sizes { batch, accumulate, steps, .. } = sizes;
    model.training.micro_batches = accumulate;
    if args.training.recompute.is_none() && !model.training.offload.by_layer() {
        model.training.recompute = recompute(args, &model, &device, &load, [batch, longest])?;
    }
    args.optimizer.options(&args.training, steps)?;
    let taken = match args.training.full {
        true => output.join("config.json").exists(),
        false => Adapter::files(output).into_iter().any(|file| file.exists()),
    };
    if taken && !args.overwrite && !resumes && !args.adapter.as_ref().is_some_and(same) {
        let hint = "hint: replace it with --overwrite, or choose another --output";
        match args.training.full {
            true => bail!("{} has a model\n{hint}", output.display()),
            false => bail!("{} has an adapter\n{hint}", output.display()),
        }
    }
    let plan = model.plan(args, &device, &load, [batch, longest])?.fitting()?;
    let state = args.save_every.is_some() || args.resume.is_some();
    let saves = 1 + args.keep.map_or(0, u64::from);
    let need = saves.saturating_mul(plan.save_bytes(state));
    if let Some(free) = command::free_disk(output).filter(|free| *free < need) {
        bail!(
            "{} takes {need} bytes to save, but {free} are free there\nhint: free some space, choose another --output, or \
             a smaller --keep",
            output.display()
        );
    }
    let unwritable = |why| {
        anyhow!(
            "cannot write into {}: {why}\nhint: choose an --output folder that you can write",
            output.display()
        )
    };
    let parent = output.parent().filter(|parent| *parent != Path::new(""));
    parent.map_or(Ok(()), fs::create_dir_all).map_err(unwritable)?;
    if output.is_dir() && !resumes {
        for file in Adapter::files(output) {
            all_spared(read.iter().cloned(), &OutFile::new(&file)?)?;
        }
    }
    // Fails before the long work if the folder cannot be written; a signal while the model loads leaves nothing.
    drop(Adapter::begin(output)?);
    let run = json!({
        "data": data.fingerprint()?,
        "context": sizes.context,
        "batch": batch,
        "accumulate": accumulate,
        "order": order(args),
    });
    let workload =
        Workload { training: Some(model.training.clone()), ..Workload::new(batch, longest) };
    let load = EngineOptions { workload: Some(Workload::new(1, 1)), ..load };
    let continues = model.adapter.is_some() && args.resume.is_none();
    let level = model.training.recompute;
    let mut trainer = model.trainer(args, &device, &load, steps)?;
    if continues {
        command::note!(
            "note: training continues from the adapter; AdamW and the schedule start from their beginning"
        );
    }
    // Before memory is reserved, because it takes some.
    let ceilings = args.log.as_ref().map(|_| Ceilings::measure(trainer.engine())).transpose()?;
    trainer.reserve(&workload)?;
    if let Some(resume) = &args.resume {
        trainer.resume(resume, &run)?;
        command::note!("the run continues after {}", command::count(trainer.done(), "step"));
    }
    command::note!(
        "{}, {} of them cut, {} left out; {}, batches of {}{}",
        command::count(data.len(), "example"),
        data.cut,
        data.left_out,
        command::count(steps, "step"),
        command::count(batch, "example"),
        if accumulate > 1 { format!(", {accumulate} per step") } else { String::new() },
    );
    if args.training.recompute.is_none() {
        command::note!("recomputed in the backward pass: {}", level.name());
    }
    if data.diverged > 0 {
        command::note!(
            "note: in {} the tokens of the prompt change when the completion follows; the changed ones are trained on, too",
            command::count(data.diverged, "example")
        );
    }
    let log = args.log.as_deref().zip(ceilings);
    let log = log.map(|(path, ceilings)| Log::create(path, ceilings, &plan)).transpose()?;
    let job = Job { args, what, data, held_out, sizes, run, log };
    job.train(&device, trainer, outputs)
}

/// Saves into a folder of the step inside of the output folder, and removes all but the last `keep` up to this step.
fn keep_last(
    trainer: &mut Trainer,
    output: &Path,
    keep: usize,
    run: &Value,
) -> Result<(), TrainError> {
    const PREFIX: &str = "step-";
    let done = trainer.done();
    let own = output.join(format!("{PREFIX}{done:06}"));
    let reading = |why| folder_error(output, why);
    fs::create_dir_all(output).map_err(reading)?;
    trainer.checkpoint_into(&mut Adapter::begin(&own)?, run)?;
    let mut all = Vec::new();
    for entry in fs::read_dir(output).map_err(reading)? {
        let path = entry.map_err(reading)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let step = name.strip_prefix(PREFIX).and_then(|step| step.parse::<usize>().ok());
        // Later ones are of another run.
        all.extend(step.filter(|step| *step <= done).map(|step| (step, path)));
    }
    all.sort();
    for (_, old) in &all[..all.len().saturating_sub(keep)] {
        fs::remove_dir_all(old).map_err(|why| folder_error(old, why))?;
    }
    Ok(())
}

fn folder_error(path: &Path, why: io::Error) -> TrainError {
    TrainError::Folder { path: path.to_owned(), why }
}

/// Returns the seed of the order of examples; none for that of the file.
fn order(args: &Args) -> Option<u64> {
    (!args.training.in_order).then_some(args.training.seed)
}

/// Returns the maximum tokens per example.
fn context(args: &Args, model: &Model) -> anyhow::Result<usize> {
    let max = match &model.folder {
        Some(folder) => folder.config().context(),
        None => Engine::shape(&args.of.name())?.context(),
    };
    let max = max.unwrap_or(usize::MAX);
    let usual = USUAL_TO_TRAIN.min(max);
    let context = args.training.context.map_or(usual, |context| context as usize);
    if context > max {
        bail!(
            "expected a context of at most {max} tokens, got {context}\n\
             hint: use -c {max}, or --max-context {context} to extend the context"
        );
    }
    Ok(context)
}

/// Chooses precision, batch and steps.
fn sizes(
    args: &Args,
    model: &Model,
    device: &Device,
    data: &Dataset,
    [longest, context]: [usize; 2],
) -> anyhow::Result<(EngineOptions, Sizes)> {
    let load = args.of.load.options();
    if let Some(other) = args.training.preset.filter(|preset| *preset != Preset::Training) {
        bail!("preset {other} is not for training\nhint: use --preset training, or leave it out");
    }
    let asked = args.training.batch.map(|batch| batch as usize);
    let plan = |load: &EngineOptions, batch| model.plan(args, device, load, [batch, longest]);
    let chosen = match (args.training.preset, asked) {
        (None, _) => None,
        (Some(preset), Some(batch)) => Some(preset.precision(&load, |o| plan(o, batch))?),
        (Some(preset), None) => Some(preset.choose(&load, |o, of| plan(o, of.batch))?),
    };
    let tokens = args.training.tokens_per_step;
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
                    "expected a multiple of {own} tokens per step, {batch} examples of {context}, got {tokens}\n\
                     hint: use --tokens-per-step {}, or another -b",
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
fn recompute(
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

/// A run with everything checked.
struct Job<'a> {
    args: &'a Args,
    /// Name of the result: adapter or model.
    what: &'static str,
    data: Dataset,
    held_out: Option<Dataset>,
    sizes: Sizes,
    /// Options that a resumed run must share.
    run: Value,
    log: Option<Log>,
}

impl Job<'_> {
    fn train(self, device: &Device, mut trainer: Trainer, outputs: Outputs) -> anyhow::Result<()> {
        let Self { args, what, ref data, ref held_out, ref sizes, ref run, mut log } = self;
        let Sizes { batch, accumulate, steps, context } = *sizes;
        let (output, held_out) = (&args.output, held_out.as_ref());
        let _listening = interrupt::listen_and_save()?;
        // From here on, other processes cannot write the folder.
        let mut folder = Adapter::begin(output)?;
        let before = loss(&mut trainer, held_out, batch)?;
        let tracing = Tracing::start(outputs.trace, trainer.engine())?;
        let progress = Progress::new(trainer.done(), steps)?;
        let (begin, mut learned, mut taken) = (Stopwatch::start(), 0, Vec::new());
        let mut curve: Vec<_> = before.map(|loss| (trainer.done(), loss)).into_iter().collect();
        let (mut ended, first) = (Ok(()), trainer.done());
        let every = |steps: Option<u32>| steps.map_or(usize::MAX, |steps| steps as usize);
        while ended.is_ok() && trainer.done() < steps && !interrupt::came() {
            let step = Stopwatch::start();
            let batches = data.micro_batches(trainer.done(), batch, accumulate, order(args));
            let metrics = trainer.step_while(batches, || !interrupt::came());
            let seconds = step.elapsed().as_secs_f64();
            ended = metrics.map(|metrics| {
                let Some(metrics) = metrics else { return };
                learned += metrics.tokens;
                progress.step(&metrics, seconds);
                let StepMetrics { step, loss, tokens, gradient, learning_rate, .. } = metrics;
                taken.push(TrainingStep { step, loss, gradient, learning_rate, tokens, seconds });
                if let Some(log) = &mut log {
                    log.step(&metrics, seconds, trainer.engine().memory());
                }
            });
            let done = trainer.done();
            let between = done > first && done < steps && ended.is_ok();
            if between && done.is_multiple_of(every(args.eval_every)) {
                ended = loss(&mut trainer, held_out, batch).map(|loss| {
                    let Some(loss) = loss else { return };
                    progress.note(&format!("held out after step {done}: loss {loss:.4}"));
                    curve.push((done, loss));
                    log.iter_mut().for_each(|log| log.held_out(done, loss));
                });
            }
            if between && done.is_multiple_of(every(args.save_every)) {
                // A failed save is tried again after as many steps, and in the end.
                let saved = match args.keep {
                    None => trainer.checkpoint_into(&mut folder, run),
                    Some(keep) => keep_last(&mut trainer, output, keep as usize, run),
                };
                progress.note(&match saved {
                    Ok(()) => format!("the {what} after step {done} is saved"),
                    Err(why) => format!("warning: the {what} is not saved: {why}"),
                });
            }
        }
        progress.finish();
        let seconds = begin.elapsed().as_secs_f64();
        // Saves before anything else can fail, and also after an error. Without a step, an earlier result stays.
        if trainer.done() > first {
            let saved = match args.save_every.is_some() || args.resume.is_some() {
                true => trainer.checkpoint_into(&mut folder, run),
                false => trainer.save_into(&mut folder),
            };
            let saved = saved.or_else(|why| rescue(&trainer, what, output, why));
            if ended.is_err() && saved.is_ok() {
                let (done, output) = (trainer.done(), output.display());
                let steps = command::count(done, "step");
                command::note!("the {what} after {steps} is in {output}");
            }
            ended = ended.and(saved);
        }
        let traced = tracing.finish(trainer.engine());
        let after = if ended.is_ok() { loss(&mut trainer, held_out, batch)? } else { None };
        let mut facts = vec![
            ("model", trainer.engine().folder().display().to_string()),
            ("data", args.data.display().to_string()),
            ("device", format!("{} ({})", device.profile().name, device.backend())),
            ("trained", trained(&trainer)?),
            ("batch", format!("{batch} x {accumulate} of at most {context} tokens")),
        ];
        facts.extend(before.map(|loss| ("held out, before", format!("loss {loss:.4}"))));
        facts.extend(after.map(|loss| ("held out, after", format!("loss {loss:.4}"))));
        if trainer.done() < steps {
            facts.push(("stopped", format!("after {} of {steps} steps", trainer.done())));
        }
        let page = outputs.page;
        curve.extend(after.map(|loss| (trainer.done(), loss)));
        let shown = page
            .map_or(Ok(()), |page| page.write(report::training(&facts, &taken, &curve).as_bytes()));
        let logged = log.map_or(Ok(()), Log::finish);
        ended?;
        if trainer.done() > first && (traced.is_err() || shown.is_err() || logged.is_err()) {
            command::note!("the {what} is in {}", output.display());
        }
        traced?;
        shown?;
        logged?;
        if interrupt::came() && trainer.done() == first {
            let text = "stopped before the first step; nothing is saved".to_owned();
            return Err(Stopped(text).into());
        }
        if interrupt::came() {
            let (done, output) = (trainer.done(), output.display());
            let steps = command::count(done, "step");
            return Err(Stopped(format!("stopped after {steps}; the {what} is in {output}")).into());
        }
        if let (Some(before), Some(after)) = (before, after) {
            command::note!("held out: loss {before:.4} before, {after:.4} after");
        }
        command::note!(
            "{} in {seconds:.1} s, {:.0} trained tokens/s; the {what} is in {}",
            command::count(trainer.done() - first, "step"),
            learned as f64 / seconds,
            output.display()
        );
        Ok(())
    }
}

/// Describes what is trained.
fn trained(trainer: &Trainer) -> anyhow::Result<String> {
    Ok(match trainer.adapter()? {
        Some(adapter) => {
            let LoraOptions { rank, alpha, .. } = adapter.options();
            format!("adapter of rank {rank}, alpha {alpha}")
        }
        None => "all weights".to_owned(),
    })
}

/// Saves elsewhere after the output folder could not be written: into a folder that the user names at a terminal,
/// otherwise next to the output folder or into the folder for temporary files. Returns the error `why` unless the user
/// named a folder.
fn rescue(trainer: &Trainer, what: &str, output: &Path, why: TrainError) -> Result<(), TrainError> {
    if !matches!(why, TrainError::Model(_)) {
        return Err(why);
    }
    let steps = command::count(trainer.done(), "step");
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        command::note!("{why}");
        loop {
            command::note!(
                "type another folder for the {what} after {steps}, or nothing to discard it:"
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
                    command::note!("the {what} after {steps} is in {folder}");
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
                command::note!("the {what} after {steps} is in {}", folder.display());
                break;
            }
            Err(why) => command::note!("warning: the {what} is not saved: {why}"),
        }
    }
    Err(why)
}

/// Returns the mean loss over the tokens of held-out examples; none after a signal.
fn loss(
    trainer: &mut Trainer,
    of: Option<&Dataset>,
    batch: usize,
) -> Result<Option<f64>, TrainError> {
    let Some(of) = of else { return Ok(None) };
    let (mut sum, mut all) = (0.0, 0);
    for first in (0..of.len()).step_by(batch) {
        if interrupt::came() {
            return Ok(None);
        }
        let part = (first..of.len().min(first + batch)).map(|index| of.get(index));
        let (loss, tokens) = trainer.loss(&part.collect::<Result<Vec<_>, _>>()?)?;
        sum += loss * tokens as f64;
        all += tokens;
    }
    Ok(Some(sum / all as f64))
}
