//! `flashover profile`: reports the time of a model by operator and by layer.

use std::path::PathBuf;

use anyhow::bail;
use clap::ValueEnum;
use command::OutFile;
use flashover::bench::trace::{Operator, Trace};
use flashover::bench::{Ceilings, Profile, SpeedTest, StepShape};
use flashover::train::{LoraOptions, Recompute};
use serde_json::json;

use crate::interrupt;
use crate::model_args::SubjectArgs;
use crate::train_speed::{self, StepArgs, Train};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prompt tokens
    #[arg(short = 'p', long, default_value_t = 128)]
    n_prompt: usize,
    /// Tokens to generate after the prompt
    #[arg(short = 'n', long, default_value_t = 16)]
    n_gen: usize,
    /// Tokens already in the KV cache
    #[arg(short = 'd', long, default_value_t = 0)]
    n_depth: usize,
    /// Sequences that run together
    #[arg(short = 'b', long, default_value_t = 1)]
    batch: usize,
    #[command(flatten)]
    steps: StepArgs,
    /// Also write a trace of every span, kernel launch and memory reading, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Output format
    #[arg(long, default_value = "md")]
    format: Format,
    #[command(flatten)]
    of: SubjectArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// Markdown tables
    Md,
    /// One JSON object
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(train) = args.steps.train {
        return run_steps(args, train);
    }
    let test = SpeedTest {
        prompt: args.n_prompt,
        generated: args.n_gen,
        depth: args.n_depth,
        batch: args.batch,
    };
    if test.tokens() == 0 {
        bail!("no tokens to profile\nhint: set -p or -n, and --batch, above 0");
    }
    let file = args.trace.as_deref().map(OutFile::new).transpose()?;
    let device = args.of.load.open()?;
    args.of.check(&device, &[test])?;
    let engine = args.of.engine(&device, file.as_ref())?;
    let ceilings = Ceilings::measure(&engine)?;
    let _listening = interrupt::listen()?;
    let profile = engine.profile(test)?;
    command::print(&match args.format {
        Format::Md => shown(&profile, &ceilings),
        Format::Json => as_json(&profile, &ceilings)?,
    })?;
    if let Some(file) = file {
        file.write(profile.trace.chrome(&device.profile().name).as_bytes())?;
    }
    Ok(interrupt::check("stopped after all measurements")?)
}

/// Profiles a training step.
fn run_steps(args: &Args, train: Train) -> anyhow::Result<()> {
    let training = args.steps.training(
        train,
        LoraOptions::default(),
        Recompute::Nothing,
        args.of.load.options().quant,
    )?;
    let Args { batch, n_prompt: context, .. } = *args;
    let shape = StepShape { micro_batches: training.micro_batches, batch, context };
    let file = args.trace.as_deref().map(OutFile::new).transpose()?;
    let mut trainer = train_speed::trainer(&args.of, &training)?;
    let ceilings = Ceilings::measure(trainer.engine())?;
    let (wall_ns, trace) = train_speed::record(&mut trainer, shape)?;
    let operators = trace.operators();
    command::print(&match args.format {
        Format::Md => {
            let busy = trace.busy_ns() as f64 / wall_ns * 100.0;
            let time = milliseconds(wall_ns as u64);
            format!("a training step took {time} ms, {busy:.1}% of it in kernels\n")
                + &operators_table(&operators, &trace, &ceilings)
        }
        Format::Json => {
            let value = json!({
                "wall_ns": wall_ns,
                "untimed": trace.untimed,
                "ceilings": ceilings,
                "operators": operators,
            });
            serde_json::to_string_pretty(&value)? + "\n"
        }
    })?;
    if let Some(file) = file {
        file.write(trace.chrome(&trainer.engine().device().profile().name).as_bytes())?;
    }
    Ok(())
}

fn shown(profile: &Profile, ceilings: &Ceilings) -> String {
    let SpeedTest { prompt, generated, .. } = profile.test;
    let mut out = format!(
        "prefill of {prompt} tokens and decode of {generated} took {} ms, {:.1}% of it in kernels\n",
        milliseconds(profile.wall_ns as u64),
        profile.busy() * 100.0
    );
    out += &operators_table(&profile.operators, &profile.trace, ceilings);
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    out += "\n| part | forwards | launches | total ms | share | weights MiB | KV cache MiB |\n\
            | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    let mib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
    let memory = profile.memory;
    for layer in &profile.layers {
        out += &format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            layer.name,
            layer.passes,
            layer.launches,
            milliseconds(layer.total_ns),
            percent(layer.share),
            mib(layer.weight_bytes),
            mib(layer.cache_bytes),
        );
    }
    out += &format!(
        "\nmemory: {} MiB in use of {} MiB reserved, {} free; peak {} MiB\n",
        mib(memory.used_bytes),
        mib(memory.reserved_bytes),
        percent(memory.fragmentation()),
        mib(memory.peak_bytes)
    );
    out
}

/// Formats the time of each operator.
pub(crate) fn operators_table(
    operators: &[Operator],
    trace: &Trace,
    ceilings: &Ceilings,
) -> String {
    let mut out = String::new();
    if trace.untimed > 0 {
        out += &format!("{} launches were not timed\n", trace.untimed);
    }
    out += "\n| operator | calls | launches | total ms | mean us | share | TFLOP/s | GB/s | of ceiling |\n\
            | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    let number = |value: Option<f64>| value.map_or_else(String::new, digits);
    let percent = |share: Option<f64>| {
        share.map_or_else(String::new, |share| format!("{:.1}%", share * 100.0))
    };
    for operator in operators {
        out += &format!(
            "| {} | {} | {} | {} | {:.1} | {} | {} | {} | {} |\n",
            operator.name,
            operator.calls,
            operator.launches,
            milliseconds(operator.total_ns),
            operator.mean_ns() / 1e3,
            percent(Some(operator.share)),
            number(operator.gflops().map(|rate| rate / 1e3)),
            number(operator.gbps()),
            percent(operator.share_of_ceiling(ceilings.gflops, ceilings.gbps)),
        );
    }
    out
}

/// Formats three significant digits, or all digits before the point if they are more.
fn digits(value: f64) -> String {
    let places = match value > 0.0 {
        true => 2 - value.log10().floor() as i32,
        false => 0,
    };
    format!("{value:.*}", places.max(0) as usize)
}

pub(crate) fn milliseconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}

fn as_json(profile: &Profile, ceilings: &Ceilings) -> anyhow::Result<String> {
    let operators = profile.operators.iter().map(|operator| {
        let share = operator.share_of_ceiling(ceilings.gflops, ceilings.gbps);
        let mut value = serde_json::to_value(operator)?;
        value["share_of_ceiling"] = share.into();
        Ok(value)
    });
    let value = json!({
        "test": profile.test,
        "wall_ns": profile.wall_ns,
        "busy": profile.busy(),
        "untimed": profile.trace.untimed,
        "ceilings": ceilings,
        "operators": operators.collect::<anyhow::Result<Vec<_>>>()?,
        "layers": profile.layers,
        "memory": profile.memory,
        "fragmentation": profile.memory.fragmentation(),
    });
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_rates_keep_their_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.000_012_34, "0.0000123"),
            (0.25, "0.250"),
            (3.456, "3.46"),
            (59.51, "59.5"),
            (100.0, "100"),
            (4321.4, "4321"),
        ] {
            assert_eq!(digits(value), text);
        }
    }
}
