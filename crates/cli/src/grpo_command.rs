//! `flashover grpo`: trains a policy on rewards of its own completions.

use std::path::Path;
use std::time::Duration;

use anyhow::{anyhow, bail};
use command::OutFile;
use flashover::bench::Ceilings;
use flashover::grpo::{
    Grpo, GrpoError, GrpoOptions, Phase, Prompts, Report, WeightedReward, parse_reward,
};
use flashover::memory::Workload;
use flashover::train::{Adapter, FullOptions, SavedRun, Start, TrainOptions, Trainer};
use flashover::{Device, EngineOptions, ModelFolder};
use serde_json::{Value, json};
use tune::timing::Stopwatch;

use crate::grpo_args::Args;
use crate::interrupt::{self, Stopped};
use crate::model_args::{Subject, loaded};
use crate::train_args::Usual;
use crate::train_log::Log;
use crate::train_speed::offloaded;

/// Files that a result has.
const RESULTS: [&str; 4] =
    ["adapter_config.json", "config.json", "model.safetensors", "flashover_run.json"];

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let options = args.options()?;
    options.check()?;
    if args.adapter.is_some() && args.lora.are_given() {
        bail!("--adapter sets rank, alpha and matrices\nhint: leave out --lora-*, or --adapter");
    }
    let timeout = Duration::try_from_secs_f64(args.reward_timeout).ok();
    let Some(timeout) = timeout.filter(|own| !own.is_zero()) else {
        bail!("--reward-timeout is {}\nhint: use a number of seconds above 0", args.reward_timeout);
    };
    let weights = args.reward_weights.len();
    if weights != 0 && weights != args.reward.len() {
        bail!("expected a weight for each of {} rewards, got {weights}", args.reward.len());
    }
    if let Some(wrong) = args.reward_weights.iter().find(|own| !own.is_finite()) {
        bail!("a weight of --reward-weights is {wrong}\nhint: use finite numbers");
    }
    let load = args.of.load.options();
    if args.policy.full && load.quant.is_some() {
        bail!(
            "--full trains dense weights, --quant makes quantised ones\nhint: leave out --quant, or train an adapter without \
             --full"
        );
    }
    let folder = folder(args)?;
    check_output(args)?;
    if let Some(log) = &args.log {
        let own = OutFile::new(log)?;
        for read in folder.files().iter().chain([&args.data]).filter(|read| read.exists()) {
            if own.is_same(&OutFile::new(read)?) {
                bail!(
                    "--log would replace {}, which is read\nhint: choose another --log",
                    read.display()
                );
            }
        }
    }
    let prompts = Prompts::open(&args.data, &folder)?;
    let lengths = lengths(&prompts, &folder, &options)?;
    let device = args.of.load.open()?;
    let run = json!({
        "model": match (&args.resume, args.policy.full) {
            // The folder to resume has other weights than the model that the run began with.
            (Some(resume), true) => SavedRun::open(resume)?.run["model"].clone(),
            _ => folder.fingerprint()?.into(),
        },
        "data": prompts.fingerprint(),
        "positions": args.drawing.positions,
        "full": args.policy.full,
    });
    // Fails before the long work if the folder cannot be written.
    drop(Adapter::begin(&args.output)?);
    let rewards = rewards(args, timeout)?;
    let load = EngineOptions { workload: Some(Workload::new(1, 1)), ..load };
    let trainer = trainer(args, &device, folder, &load, &options)?;
    let ceilings = args.log.as_ref().map(|_| Ceilings::measure(trainer.engine())).transpose()?;
    let mut grpo = Grpo::new(trainer, rewards, options)?;
    grpo.reserve(args.drawing.positions as usize, &lengths)?;
    if let Some(resume) = &args.resume {
        grpo.resume(resume, &run)?;
        command::note!("the run continues after batch {}", grpo.batches());
    }
    let log = args.log.as_deref().zip(ceilings);
    let log = log.map(|(path, ceilings)| Log::open(path, ceilings, args.resume.is_some()));
    let log = log.transpose()?;
    Job { args, prompts, run, log }.train(&mut grpo)
}

/// Returns the folder of the model, or with all weights that of the run to resume.
fn folder(args: &Args) -> anyhow::Result<ModelFolder> {
    let load = &args.of.load;
    match (&args.resume, args.policy.full) {
        (Some(resume), true) => load.folder(resume),
        _ => match args.of.subject()? {
            Subject::Folder(folder) => load.folder(&folder),
            Subject::Shape(shape) => {
                bail!("{shape} is a shape without weights and text\nhint: name a --model")
            }
        },
    }
}

fn check_output(args: &Args) -> anyhow::Result<()> {
    let output = &args.output;
    let same = |other: &Path| {
        let own = output.canonicalize();
        own.is_ok() && own.ok() == other.canonicalize().ok()
    };
    if args.resume.as_deref().is_some_and(same) || args.overwrite {
        return Ok(());
    }
    match RESULTS.into_iter().find(|file| output.join(file).exists()) {
        Some(file) => Err(anyhow!(
            "{} has {file} already\nhint: choose another --output, or add --overwrite",
            output.display()
        )),
        None => Ok(()),
    }
}

/// Returns the tokens of each prompt.
fn lengths(
    prompts: &Prompts,
    folder: &ModelFolder,
    options: &GrpoOptions,
) -> Result<Vec<usize>, GrpoError> {
    let context = folder.config().context().unwrap_or(usize::MAX);
    let room = context.saturating_sub(options.max_new_tokens);
    match prompts.all().iter().find(|own| own.tokens.len() > room) {
        Some(long) => {
            let (line, tokens) = (long.line, long.tokens.len());
            Err(GrpoError::Prompt { line, tokens, room, context })
        }
        None => Ok(prompts.all().iter().map(|own| own.tokens.len()).collect()),
    }
}

fn rewards(args: &Args, timeout: Duration) -> Result<Vec<WeightedReward>, GrpoError> {
    let weights = args.reward_weights.iter().copied().chain(std::iter::repeat(1.0));
    let of = |(text, weight): (&String, f64)| {
        let reward = parse_reward(text, args.workers as usize, timeout)?;
        Ok(WeightedReward { name: text.clone(), reward, weight })
    };
    args.reward.iter().zip(weights).map(of).collect()
}

fn trainer(
    args: &Args,
    device: &Device,
    folder: ModelFolder,
    load: &EngineOptions,
    options: &GrpoOptions,
) -> anyhow::Result<Trainer> {
    let (policy, seed) = (&args.policy, args.drawing.seed);
    let steps = args.drawing.steps as usize * options.updates;
    let usual = if policy.full { Usual::PolicyWeights } else { Usual::PolicyAdapter };
    let (schedule, optimizer) = args.optimizer.options(usual, seed, steps)?;
    let (recompute, offload) = (policy.recompute.into(), offloaded(&policy.offload));
    if policy.full {
        let master = !policy.no_master;
        let full = FullOptions { schedule, optimizer, master, recompute, offload };
        return Ok(Trainer::full(device, Start::Folder(Box::new(folder)), load, full)?);
    }
    let adapter = args.adapter.as_ref().or(args.resume.as_ref());
    let adapter = adapter.map(|own| folder.adapter(own)).transpose()?;
    let lora = args.lora.options();
    let train = TrainOptions { lora, schedule, optimizer, seed, recompute, offload };
    let engine = loaded(device, folder, load)?;
    Ok(match adapter {
        Some(adapter) => Trainer::from_adapter(engine, adapter, train)?,
        None => Trainer::new(engine, train)?,
    })
}

/// A run with everything checked.
struct Job<'a> {
    args: &'a Args,
    prompts: Prompts,
    /// Options that a resumed run must share.
    run: Value,
    log: Option<Log>,
}

impl Job<'_> {
    fn train(mut self, grpo: &mut Grpo) -> anyhow::Result<()> {
        let args = self.args;
        let _listening = interrupt::listen_and_save()?;
        let mut folder = Adapter::begin(&args.output)?;
        let what = if args.policy.full { "model" } else { "adapter" };
        let (first, drawn) = (grpo.trainer().done(), grpo.batches());
        let steps = u64::from(args.drawing.steps);
        let begin = Stopwatch::start();
        let mut ended = Ok(());
        while ended.is_ok() && !interrupt::came() && (grpo.batches() < steps || grpo.has_updates())
        {
            ended = self.batch(grpo);
            let between = grpo.batches() < steps && ended.is_ok() && !grpo.has_updates();
            if between
                && args.save_every.is_some_and(|every| grpo.batches().is_multiple_of(every.into()))
            {
                match grpo.checkpoint_into(&mut folder, &self.run) {
                    Ok(()) => command::note!("the {what} after batch {} is saved", grpo.batches()),
                    Err(why) => command::note!("warning: the {what} is not saved: {why}"),
                }
            }
        }
        // Also after an error. Without a step, an earlier result stays, but a run that goes on draws other completions.
        let goes_on = args.save_every.is_some() || args.resume.is_some();
        if grpo.trainer().done() > first || (goes_on && grpo.batches() > drawn) {
            let saved = match goes_on {
                true => grpo.checkpoint_into(&mut folder, &self.run),
                false => grpo.trainer().save_into(&mut folder).map_err(GrpoError::from),
            };
            if ended.is_err() && saved.is_ok() {
                command::note!(
                    "the {what} after batch {} is in {}",
                    grpo.batches(),
                    args.output.display()
                );
            }
            ended = ended.and(saved);
        }
        let logged = self.log.map_or(Ok(()), Log::finish);
        ended?;
        logged?;
        if interrupt::came() {
            let text = match grpo.trainer().done() > first {
                true => format!(
                    "stopped after batch {}; the {what} is in {}",
                    grpo.batches(),
                    args.output.display()
                ),
                false => "stopped before the first step; nothing is saved".to_owned(),
            };
            return Err(Stopped(text).into());
        }
        match grpo.trainer().done() > first {
            true => command::note!(
                "{} in {:.1} s; the {what} is in {}",
                command::count(grpo.trainer().done() - first, "step"),
                begin.elapsed().as_secs_f64(),
                args.output.display()
            ),
            false => command::note!("nothing was learned, and nothing is saved"),
        }
        Ok(())
    }

    /// Draws a batch, unless updates remain, and takes its updates.
    fn batch(&mut self, grpo: &mut Grpo) -> Result<(), GrpoError> {
        let begin = Stopwatch::start();
        let mut report = match grpo.has_updates() {
            true => Report::resumed(grpo.batches()),
            false => {
                let count = self.args.drawing.positions as usize;
                grpo.draw(&self.prompts.batch(grpo.batches(), count))?
            }
        };
        while !interrupt::came() && grpo.update(&mut report)? {}
        let seconds = begin.elapsed().as_secs_f64();
        self.note(&report, seconds);
        if let Some(log) = &mut self.log {
            let memory = grpo.trainer().engine().memory();
            let mut line = serde_json::to_value(&report).expect("numbers and texts");
            line["seconds"] = seconds.into();
            for (name, own) in
                report.phases.named().into_iter().filter(|(_, own)| own.seconds > 0.0)
            {
                let to = &mut line["phases"][name];
                to["tokens_per_second"] = own.rate().into();
                to["mfu"] = log.of_peak(own.model_flops, own.seconds).into();
                to["hfu"] = log.of_peak(own.device_flops, own.seconds).into();
            }
            line["used_bytes"] = memory.used_bytes.into();
            line["reserved_bytes"] = memory.reserved_bytes.into();
            log.line(&line);
        }
        Ok(())
    }

    fn note(&self, report: &Report, seconds: f64) {
        let phases = report.phases;
        let each = phases.named().into_iter().skip(1).filter(|(_, own)| own.seconds > 0.0);
        let each: String = each.map(|(name, own)| format!(", {name} {:.3}", own.seconds)).collect();
        let mut text = format!("batch {} of {}", report.batch, self.args.drawing.steps);
        let mut add = |part: String| text.push_str(&part);
        if let Some(own) = &report.drawing {
            let reward = own.reward.zip(own.reward_deviation);
            add(match reward {
                Some((mean, deviation)) => format!(": reward {mean:.4} ± {deviation:.4}"),
                None => ": no reward".to_owned(),
            });
            let groups = command::count(own.equal_groups, "equal group");
            let truncated = own.truncated * 100.0;
            add(format!(", {:.1} tokens, {truncated:.0}% truncated, {groups}", own.length));
        }
        if let Some(own) = &report.learning {
            add(own.kl.map_or_else(String::new, |kl| format!(", KL {kl:.5}")));
            add(own.entropy.map_or_else(String::new, |own| format!(", entropy {own:.3}")));
            add(format!(", gradient {:.3}", own.gradient));
        }
        add(format!("; {seconds:.2} s"));
        if phases.sample.seconds > 0.0 {
            let Phase { seconds, .. } = phases.sample;
            add(format!(": sample {seconds:.3} ({:.0} tokens/s)", phases.sample.rate()));
        }
        command::note!("{text}{each}");
    }
}
