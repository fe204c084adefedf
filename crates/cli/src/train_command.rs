//! `flashover train`: trains an adapter or all weights on examples.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use command::OutFile;
use flashover::bench::Ceilings;
use flashover::memory::{Plan, Workload};
use flashover::train::{
    Adapter, Dataset, FullOptions, LoraOptions, Recompute, SavedRun, Start, StepMetrics,
    TrainError, TrainOptions, Trainer, Training, Trains,
};
use flashover::{Device, Engine, EngineOptions, KvFormat, LoadError, ModelFolder};
use report::TrainingStep;
use serde_json::{Value, json};
use tune::timing::Stopwatch;

use crate::interrupt::{self, Stopped};
use crate::model_args::{Subject, Tracing, loaded};
pub(crate) use crate::train_args::Args;
use crate::train_log::{Log, Progress};
use crate::train_saves::{
    check_output, check_outputs, keep_last, rescue, resumes_in_place, saved_run, saves_at_once,
};
use crate::train_sizes::{Sizes, context, recompute, sizes};
use crate::train_speed::offloaded;

/// Start of the name of weights that are no file's.
const NEW_WEIGHTS: &str = "new weights of ";

/// Model to train.
pub(crate) struct Model {
    /// None for a shape with new weights.
    pub(crate) folder: Option<ModelFolder>,
    /// Adapter to continue.
    adapter: Option<Adapter>,
    pub(crate) training: Training,
    /// Weights that the run began with.
    origin: Value,
}

impl Model {
    fn open(args: &Args, saved: Option<&SavedRun>) -> anyhow::Result<Self> {
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
        let load = &args.of.load;
        let scratch = |shape: &str| Value::from(format!("{NEW_WEIGHTS}{shape}"));
        let (folder, origin) = match (saved, args.resume.as_deref().filter(|_| full)) {
            (Some(saved), Some(resume)) => {
                let same = |own: &Path| own.canonicalize().ok() == resume.canonicalize().ok();
                let named = args.of.is_named().then(|| args.of.subject()).transpose()?;
                let origin = match named {
                    Some(Subject::Folder(own)) if !same(&own) => {
                        ModelFolder::open(own)?.fingerprint()?.into()
                    }
                    Some(Subject::Shape(shape)) => scratch(shape),
                    _ => saved.run["model"].clone(),
                };
                (Some(load.folder(resume)?), origin)
            }
            _ => match args.of.subject()? {
                Subject::Folder(folder) => {
                    let folder = load.folder(&folder)?;
                    let origin = folder.fingerprint()?.into();
                    (Some(folder), origin)
                }
                Subject::Shape(shape) if args.training.from_scratch => (None, scratch(shape)),
                Subject::Shape(shape) => bail!(
                    "{shape} is a shape without weights\nhint: train it with --full --from-scratch, or name a --model"
                ),
            },
        };
        let adapter = args.adapter.as_ref().or(args.resume.as_ref().filter(|_| !full));
        let adapter = match (adapter, &folder) {
            (Some(adapter), Some(folder)) => Some(folder.adapter(adapter)?),
            _ => None,
        };
        let mut asked = args.lora.options();
        asked.targets.sort();
        let lora = adapter.as_ref().map_or(&asked, Adapter::options).clone();
        let other = (asked.rank, asked.alpha) != (lora.rank, lora.alpha);
        let other_targets = !asked.targets.is_empty() && asked.targets != lora.targets;
        if adapter.is_some() && args.lora.are_given() && (other || other_targets) {
            let LoraOptions { rank, alpha, targets, .. } = lora;
            bail!(
                "the saved adapter has rank {rank}, alpha {alpha} and targets {}\nhint: leave out --lora-*, or start a new \
                 run",
                targets.join(",")
            );
        }
        let training = Training {
            trains: trains(&lora),
            recompute,
            offload: offloaded(&args.training.offload),
            micro_batches: args.training.accumulate as usize,
        };
        Ok(Self { folder, adapter, training, origin })
    }

    /// Returns the files that training reads.
    fn files(&self) -> Vec<PathBuf> {
        self.folder.as_ref().map(ModelFolder::files).unwrap_or_default()
    }

    pub(crate) fn plan(
        &self,
        args: &Args,
        device: &Device,
        load: &EngineOptions,
        shape: [usize; 2],
    ) -> Result<Plan, LoadError> {
        self.plan_of(args, device, load, shape, self.training.clone())
    }

    pub(crate) fn plan_of(
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

    /// Returns the options of training all weights.
    fn full_options(&self, args: &Args, steps: usize) -> anyhow::Result<FullOptions> {
        let (schedule, optimizer) =
            args.optimizer.options(args.training.usual(), args.training.seed, steps)?;
        let Training { recompute, offload, .. } = self.training;
        Ok(FullOptions {
            schedule,
            optimizer,
            master: !args.training.no_master,
            recompute,
            offload,
        })
    }

    /// Returns the options of training an adapter.
    fn adapter_options(&self, args: &Args, steps: usize) -> anyhow::Result<TrainOptions> {
        let (schedule, optimizer) =
            args.optimizer.options(args.training.usual(), args.training.seed, steps)?;
        let Training { recompute, offload, .. } = self.training;
        let (lora, seed) = (args.lora.options(), args.training.seed);
        Ok(TrainOptions { lora, schedule, optimizer, seed, recompute, offload })
    }

    /// Refuses options out of range, before data is read.
    fn check(&self, args: &Args) -> anyhow::Result<()> {
        let any = args.optimizer.decay_steps().max(1);
        match args.training.full {
            true => self.full_options(args, any)?.check()?,
            false => self.adapter_options(args, any)?.check()?,
        }
        Ok(())
    }

    /// Loads the model.
    fn trainer(
        self,
        args: &Args,
        device: &Device,
        load: &EngineOptions,
        steps: usize,
    ) -> anyhow::Result<Trainer> {
        if args.training.full {
            let options = self.full_options(args, steps)?;
            let start = match self.folder {
                Some(folder) => Start::Folder(Box::new(folder)),
                None => Start::Scratch { shape: args.of.name(), seed: args.training.seed },
            };
            return Ok(Trainer::full(device, start, load, options)?);
        }
        let options = self.adapter_options(args, steps)?;
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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.adapter.is_some() && args.lora.are_given() {
        bail!("--adapter sets rank, alpha and matrices\nhint: leave out --lora-*, or --adapter");
    }
    let load = args.of.load.options();
    if load.kv != KvFormat::Float {
        bail!("training has no KV cache\nhint: leave out --kv-cache");
    }
    if args.training.from_scratch && args.of.shape().is_none() {
        bail!("--from-scratch makes new weights\nhint: name a --shape, and no --model");
    }
    if args.training.full && load.quant.is_some() {
        bail!(
            "--full trains dense weights, --quant makes quantised ones\nhint: leave out --quant, or train an adapter without --full"
        );
    }
    let outputs = Outputs::new(args)?;
    let saved = saved_run(args)?;
    let new =
        saved.as_ref().and_then(|saved| saved.run["model"].as_str()?.strip_prefix(NEW_WEIGHTS));
    if let Some(shape) = new.filter(|_| !args.training.from_scratch) {
        bail!("the run began with new weights\nhint: add --full --from-scratch --shape {shape}");
    }
    let mut model = Model::open(args, saved.as_ref())?;
    model.check(args)?;
    let output = &args.output;
    let what = if args.training.full { "model" } else { "adapter" };
    check_outputs(args, model.folder.as_ref(), outputs.all())?;
    let real = output.canonicalize().ok();
    let same = |own: &PathBuf| real.is_some() && own.canonicalize().ok() == real;
    let resumes = resumes_in_place(args);
    let own = model.files().into_iter().filter_map(|file| file.parent().map(Path::to_owned));
    if !resumes && own.into_iter().any(|own| same(&own)) {
        bail!("{} is the model's own folder\nhint: choose another --output", output.display());
    }
    let context = context(args, &model)?;
    if !args.overwrite && !args.adapter.as_ref().is_some_and(same) {
        check_output(args, model.folder.as_ref(), saved.as_ref())?;
    }
    let device = args.of.load.open()?;
    let data = model.data(args, &args.data, context)?;
    let held_out = args.held_out.as_ref();
    let held_out = held_out.map(|file| model.data(args, file, context)).transpose()?;
    check_data(&data, held_out.as_ref())?;
    let longest = held_out.iter().map(Dataset::longest).fold(data.longest(), usize::max).max(1);
    let (load, sizes) = sizes(args, &model, &device, &data, ([longest, context], saved.as_ref()))?;
    let Sizes { batch, accumulate, steps, .. } = sizes;
    model.training.micro_batches = accumulate;
    if args.training.recompute.is_none() && !model.training.offload.by_layer() {
        model.training.recompute = recompute(args, &model, &device, &load, [batch, longest])?;
    }
    if let Some(saved) = saved.as_ref().filter(|saved| saved.done >= steps) {
        bail!(
            "the run has taken {} already, of {steps}\nhint: use a larger --steps",
            command::count(saved.done, "step")
        );
    }
    let plan = model.plan(args, &device, &load, [batch, longest])?.fitting()?;
    if args.training.no_master && !matches!(&*plan.dtype, "bf16" | "f16") {
        bail!(
            "{} weights have no master weights\nhint: leave out --no-master, or add --dtype bf16",
            plan.dtype
        );
    }
    let state = args.save_every.is_some() || args.resume.is_some();
    let need = saves_at_once(args).saturating_mul(plan.save_bytes(state));
    if let Some(free) = command::free_disk(output).filter(|free| *free < need) {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        bail!(
            "saves take {} MiB in {}, but {} MiB are free there\nhint: free some space, or choose another --output{}",
            mib(need),
            output.display(),
            mib(free),
            if args.keep.is_some() { " or a smaller --keep" } else { "" }
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
    if args.keep.is_some() {
        // The lock is then on the folder itself.
        fs::create_dir_all(output).map_err(unwritable)?;
    }
    if output.is_dir() && !resumes && !args.training.full {
        for file in Adapter::files(output) {
            OutFile::new(&file)?;
        }
    }
    // Fails before the long work if the folder cannot be written; a signal while the model loads leaves nothing.
    drop(Adapter::begin(output)?);
    let run = json!({
        "model": model.origin,
        "data": data.fingerprint()?,
        "context": sizes.context,
        "batch": batch,
        "accumulate": accumulate,
        "in-order": args.training.in_order,
        "seed": args.training.seed,
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
        if accumulate > 1 { format!(", {accumulate} batches per step") } else { String::new() },
    );
    if args.optimizer.warmup() >= steps {
        command::note!(
            "note: the warmup is longer than the run, which never reaches the learning rate"
        );
    }
    if batch.saturating_mul(accumulate) > data.len() {
        command::note!(
            "note: a step has {} examples, more than the data: it repeats them",
            batch.saturating_mul(accumulate)
        );
    }
    if args.training.recompute.is_none() {
        let level = if level == Recompute::Nothing { "none" } else { level.name() };
        command::note!("activation recomputation: {level}");
    }
    if data.diverged > 0 {
        command::note!(
            "note: in {} the tokens of the prompt change when the completion follows; the changed ones are trained on, too",
            command::count(data.diverged, "example")
        );
    }
    let log = args.log.as_deref().zip(ceilings);
    let log = log.map(|(path, ceilings)| {
        let mut log = Log::open(path, ceilings, args.resume.is_some())?;
        log.planned(&plan);
        Ok::<_, anyhow::Error>(log)
    });
    let log = log.transpose()?;
    let job = Job { args, what, data, held_out, sizes, run, log };
    job.train(&device, trainer, outputs)
}

/// Refuses held-out files that are trained on, and names files whose names say that they are held out.
fn check_data(data: &Dataset, held_out: Option<&Dataset>) -> anyhow::Result<()> {
    let real = |path: &Path| path.canonicalize().ok();
    let own: Vec<_> = data.files().into_iter().map(real).collect();
    let held_out = held_out.map(Dataset::files).unwrap_or_default();
    if data.files().len() > 1
        && let Some(both) = held_out.into_iter().find(|path| own.contains(&real(path)))
    {
        bail!(
            "{} is held out, and trained on as part of the --data folder\nhint: move it out of that folder",
            both.display()
        );
    }
    let name = |path: &&Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let names: Vec<_> = data.files().iter().map(name).collect();
    if names.len() > 1
        && let Some(other) = names.iter().find(|name| name.contains("val") || name.contains("test"))
    {
        command::note!(
            "note: trains on all {} files of the folder, {other} among them",
            names.len()
        );
    }
    Ok(())
}

/// Returns the seed of the order of examples; none for that of the file.
fn order(args: &Args) -> Option<u64> {
    (!args.training.in_order).then_some(args.training.seed)
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
            let run = (args.save_every.is_some() || args.resume.is_some()).then_some(run);
            let saved = match run {
                Some(run) => trainer.checkpoint_into(&mut folder, run),
                None => trainer.save_into(&mut folder),
            };
            let saved = saved.or_else(|why| rescue(&mut trainer, what, output, run, why));
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
