//! The tune cache from the command line.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use arch::Device;
use clap::Subcommand;
use kernels::matmul::{Matmul, MatmulConfig};
use tune::{Entry, Policy, Source, TuneCache, Tuner};

use crate::cases::{self, Scale, Suite};
use crate::{Target, provenance};

/// Show, fill or merge the tune cache
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Print every result: winner, runner-up and the margin between them
    Show {
        /// Only keys that contain this
        #[arg(long)]
        filter: Option<String>,
    },
    /// Measure every case of a suite again
    Run {
        #[command(flatten)]
        target: Target,
        #[arg(long, default_value = "quick")]
        suite: Suite,
        #[arg(long)]
        filter: Option<String>,
    },
    /// Time configs of your own on every case of a suite, and remember nothing
    Try {
        #[command(flatten)]
        target: Target,
        #[arg(long, default_value = "quick")]
        suite: Suite,
        #[arg(long)]
        filter: Option<String>,
        /// One config a line, as `tune show` prints them
        #[arg(long)]
        configs: PathBuf,
    },
    /// Take over the results of other cache files; the newer of two wins
    Merge { files: Vec<PathBuf> },
    /// Print the path of the cache file
    Path,
}

/// Where results of this machine are kept.
fn cache_path() -> anyhow::Result<PathBuf> {
    tune::default_cache_path()
        .context("this machine has no cache folder\nhint: set FLASHOVER_TUNE_CACHE to a file path")
}

/// The cache of this machine; ignored lines are reported on standard error.
pub(crate) fn open_cache() -> anyhow::Result<TuneCache> {
    let cache = TuneCache::open(&cache_path()?)?;
    cache.warnings().iter().for_each(|w| eprintln!("{w}"));
    Ok(cache)
}

pub(crate) fn run(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Show { filter } => show(filter.as_deref()),
        Command::Run { target, suite, filter } => measure(&target, suite, filter.as_deref()),
        Command::Try { target, suite, filter, configs } => {
            try_configs(&target, suite, filter.as_deref(), &configs)
        }
        Command::Merge { files } => merge(&files),
        Command::Path => {
            println!("{}", cache_path()?.display());
            Ok(true)
        }
    }
}

fn show(filter: Option<&str>) -> anyhow::Result<bool> {
    let cache = open_cache()?;
    let (mut shown, mut text) = (0, String::new());
    for (entry, source) in cache.entries() {
        let key = entry.key.to_string();
        if filter.is_none_or(|f| key.contains(f)) {
            text += &(describe(&key, entry, source) + "\n");
            shown += 1;
        }
    }
    if shown == 0 {
        text =
            format!("no result{}\n", filter.map(|f| format!(" matches `{f}`")).unwrap_or_default());
    }
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader has gone away, as `head` does.
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(true),
    }
}

fn describe(key: &str, entry: &Entry, source: Source) -> String {
    let us = |ns: f64| format!("{:.1} us", ns / 1e3);
    let mut others: Vec<_> = entry
        .timings
        .iter()
        .filter(|t| t.config != entry.config)
        .filter_map(|t| Some((t.median_ns?, &t.config)))
        .collect();
    others.sort_by(|a, b| a.0.total_cmp(&b.0));
    let failed = entry.timings.iter().filter(|t| t.error.is_some()).count();
    let mut text = format!("{key}\n  {source} {}: {}", us(entry.median_ns), entry.config);
    if let Some((ns, config)) = others.first() {
        let margin = 100.0 * (ns / entry.median_ns - 1.0);
        text += &format!("\n  next {} (+{margin:.1}%): {config}", us(*ns));
    }
    for t in entry.timings.iter().filter(|t| t.error.is_some()) {
        text += &format!("\n  failed {}: {}", t.config, t.error.as_deref().unwrap_or_default());
    }
    text + &format!(
        "\n  {} candidates, {failed} failed; commit {}, {}",
        entry.timings.len(),
        entry.commit,
        entry.date
    )
}

fn measure(target: &Target, suite: Suite, filter: Option<&str>) -> anyhow::Result<bool> {
    let device = target.open()?;
    let mut tuner = tuner(&device)?;
    let mut good = true;
    for case in cases::select(suite, scale(&device), filter)? {
        match tuner.measure::<Matmul>(&case.problem) {
            Ok(config) => println!("{}: {}", case.name(), serde_json::to_string(&config)?),
            Err(e) => {
                println!("{}: {e}", case.name());
                good = false;
            }
        }
    }
    Ok(good)
}

fn scale(device: &Device) -> Scale {
    match device.backend() {
        arch::Backend::Cpu | arch::Backend::WebGpu => Scale::Host,
        _ => Scale::Gpu,
    }
}

fn tuner(device: &Device) -> anyhow::Result<Tuner<'_>> {
    Ok(Tuner {
        device,
        cache: open_cache()?,
        policy: Policy::Measure,
        commit: provenance::COMMIT.to_owned(),
        date: provenance::now()?,
    })
}

/// Times the configs of `file` on each case; false when one of them failed.
fn try_configs(
    target: &Target,
    suite: Suite,
    filter: Option<&str>,
    file: &Path,
) -> anyhow::Result<bool> {
    let text = std::fs::read_to_string(file).with_context(|| {
        format!("cannot read {}\nhint: --configs takes a file of configs", file.display())
    })?;
    let configs: Vec<MatmulConfig> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            serde_json::from_str(line).with_context(|| {
                format!("no config: {line}\nhint: `tune show` prints configs as they are read")
            })
        })
        .collect::<anyhow::Result<_>>()?;
    let device = target.open()?;
    let tuner = tuner(&device)?;
    let mut good = true;
    for case in cases::select(suite, scale(&device), filter)? {
        println!("{}", case.name());
        let cost = case.problem.cost();
        for (config, outcome) in tuner.time::<Matmul>(&case.problem, configs.clone()) {
            let config = serde_json::to_string(&config)?;
            match outcome {
                Ok(ns) => println!(
                    "  {:9.1} us {:7.1} TFLOP/s {:7.0} GB/s  {config}",
                    ns / 1e3,
                    cost.flops as f64 / ns / 1e3,
                    cost.bytes as f64 / ns
                ),
                Err(why) => {
                    println!("  {why}: {config}");
                    good = false;
                }
            }
        }
    }
    Ok(good)
}

fn merge(files: &[PathBuf]) -> anyhow::Result<bool> {
    if files.is_empty() {
        anyhow::bail!("nothing to merge\nhint: name one or more cache files");
    }
    let mut cache = open_cache()?;
    let seen = cache.warnings().len();
    for file in files {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let taken = cache.merge_text(&text, &file.display().to_string())?;
        println!("{}: {taken} results", file.display());
    }
    cache.warnings().iter().skip(seen).for_each(|w| eprintln!("{w}"));
    Ok(true)
}
