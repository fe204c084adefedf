//! Command line of the tune cache.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use arch::{ArchProfile, Device};
use clap::Subcommand;
use suite::{AnyBench, KERNELS, Scale, Suite, TimedConfig};
use tune::{Entry, Merged, Policy, Source, TuneCache, Tuner};

use crate::{Target, cases, provenance};

/// Show, fill or merge the tune cache
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Print every result with the winner, the runner-up and the margin between them
    Show {
        /// Show only keys that contain this text
        #[arg(long)]
        filter: Option<String>,
    },
    /// Measure every case of a suite again
    Run {
        #[command(flatten)]
        target: Target,
        #[arg(long, value_parser = report::suite(), default_value_t = Suite::Quick)]
        suite: Suite,
        #[arg(long)]
        filter: Option<String>,
    },
    /// Time given configs on every case of a suite, without storing results
    Try {
        #[command(flatten)]
        target: Target,
        #[arg(long, value_parser = report::suite(), default_value_t = Suite::Quick)]
        suite: Suite,
        #[arg(long)]
        filter: Option<String>,
        /// File with one config per line, as `tune show` prints them
        #[arg(long)]
        configs: PathBuf,
    },
    /// Merge the results of other cache files; the newer of two results wins
    Merge { files: Vec<PathBuf> },
    /// Print the path of the cache file
    Path,
}

/// Path of this machine's tune cache.
fn cache_path() -> anyhow::Result<PathBuf> {
    tune::default_cache_path()
        .context("this machine has no cache folder\nhint: set FLASHOVER_TUNE_CACHE to a file path")
}

/// Opens this machine's tune cache and reports ignored lines on standard error.
pub(crate) fn open_cache() -> anyhow::Result<TuneCache> {
    let cache = TuneCache::open(&cache_path()?)?;
    cache.warnings().iter().for_each(|w| eprintln!("{w}"));
    Ok(cache)
}

pub(crate) fn run(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Show { filter } => show(&open_cache()?, filter.as_deref()),
        Command::Run { target, suite, filter } => measure(&target, suite, filter.as_deref()),
        Command::Try { target, suite, filter, configs } => {
            try_configs(&target, suite, filter.as_deref(), &configs)
        }
        Command::Merge { files } => {
            merge(&mut open_cache()?, &files, |line| Ok(command::print(line)?))
        }
        Command::Path => {
            command::print(&format!("{}\n", cache_path()?.display()))?;
            Ok(true)
        }
    }
}

fn show(cache: &TuneCache, filter: Option<&str>) -> anyhow::Result<bool> {
    let (mut shown, mut text) = (0, String::new());
    for (entry, source) in cache.entries() {
        let key = entry.key.to_string();
        if filter.is_none_or(|f| key.contains(f)) {
            text += &(describe(&key, entry, source) + "\n");
            if let Some(why) = unused(entry) {
                text += &format!("  not used: {why}\n");
            }
            shown += 1;
        }
    }
    match filter {
        Some(filter) if shown == 0 => bail!(
            "no result matches `{filter}`\nhint: use part of a key such as `{} v{} cuda-sm90-132 \
             [bf16 ..]`, or omit the filter",
            KERNELS[0].name(),
            KERNELS[0].version(),
        ),
        None if shown == 0 => text = "no results\n".to_owned(),
        _ => {}
    }
    command::print(&text)?;
    Ok(true)
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
    let time = entry.median_ns.map(|ns| format!(" {}", us(ns))).unwrap_or_default();
    let mut text = format!("{key}\n  {source}{time}: {}", entry.config);
    if let (Some((ns, config)), Some(own)) = (others.first(), entry.median_ns) {
        let margin = 100.0 * (ns / own - 1.0);
        // A simpler config, which is earlier in the list, wins unless the other one is faster by the margin.
        let why = if *ns < own { ", within the margin" } else { "" };
        text += &format!("\n  next {} ({margin:+.1}%{why}): {config}", us(*ns));
    }
    for t in entry.timings.iter().filter(|t| t.error.is_some()) {
        text += &format!("\n  failed {}: {}", t.config, t.error.as_deref().unwrap_or_default());
    }
    let families = entry.key.arch_id.families();
    if let Some(family) = families.first() {
        text += &format!("\n  inherited by other cards of {family}");
    }
    if !entry.timings.is_empty() {
        text += &format!("\n  {} candidates, {failed} failed", entry.timings.len());
    }
    text + &format!("\n  commit {}, {}", entry.commit, entry.date)
}

/// Reason why this program does not use `entry`; `None` if it does.
fn unused(entry: &Entry) -> Option<String> {
    let Some(kernel) = suite::kernel(&entry.key.kernel) else {
        return Some("unknown kernel".to_owned());
    };
    // Without a recorded profile, an architecture is known only by its id.
    let mut cards = arch::recorded().filter_map(|name| ArchProfile::recorded(name).ok());
    let card = cards.find(|card| card.id == entry.key.arch_id);
    kernel.accepts(entry, card.as_ref()).err()
}

fn measure(target: &Target, suite: Suite, filter: Option<&str>) -> anyhow::Result<bool> {
    let device = target.open()?;
    let mut tuner = tuner(&device)?;
    let mut good = true;
    for case in select(&device, suite, filter)? {
        let outcome = case.tune(&mut tuner);
        good &= outcome.is_ok();
        let text = outcome.map_or_else(|e| e.to_string(), |config| config.to_string());
        command::print(&format!("{}: {text}\n", case.name()))?;
    }
    Ok(good)
}

/// Selects the cases of `suite` for `device`; an empty selection is an error.
fn select(
    device: &Device,
    suite: Suite,
    filter: Option<&str>,
) -> anyhow::Result<Vec<Box<dyn AnyBench>>> {
    let selected = cases::select(suite, Scale::of_device(device), filter)?;
    if selected.is_empty() {
        bail!(
            "no case for this device matches `{}`\nhint: list the cases of a suite with \
             `flashover-bench list`",
            filter.unwrap_or_default()
        );
    }
    Ok(selected)
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

/// Times the configs of `file` on each case; returns false if one of them failed.
fn try_configs(
    target: &Target,
    suite: Suite,
    filter: Option<&str>,
    file: &Path,
) -> anyhow::Result<bool> {
    let text = std::fs::read_to_string(file).map_err(|e| {
        anyhow!("cannot read {}: {e}\nhint: set --configs to a file of configs", file.display())
    })?;
    if text.trim().is_empty() {
        bail!(
            "{} has no configs\nhint: write one config per line, as printed by `tune show`",
            file.display()
        );
    }
    let device = target.open()?;
    let tuner = tuner(&device)?;
    let mut good = true;
    for case in select(&device, suite, filter)? {
        command::print(&format!("{}\n", case.name()))?;
        let timed = case
            .time(&tuner, &text)
            .map_err(|why| anyhow!("{why}\nhint: write configs as printed by `tune show`"))?;
        for TimedConfig { config, cost, outcome } in timed {
            good &= outcome.is_ok();
            let text = match outcome {
                Ok(ns) => format!(
                    "{:9.1} us {:8.2} TFLOP/s {:8.1} GB/s ",
                    ns / 1e3,
                    cost.flops as f64 / ns / 1e3,
                    cost.bytes as f64 / ns
                ),
                Err(why) => why + ":",
            };
            command::print(&format!("  {text} {config}\n"))?;
        }
    }
    Ok(good)
}

/// Merges the results of `files`, and passes one line about each file to `said`.
fn merge(
    cache: &mut TuneCache,
    files: &[PathBuf],
    said: impl Fn(&str) -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    if files.is_empty() {
        bail!("expected one or more cache files, got none\nhint: name the files to merge");
    }
    for file in files {
        let name = file.display().to_string();
        let text = std::fs::read(file).map_err(|e| {
            anyhow!(
                "cannot read {name}: {e}\nhint: name a cache file; `tune path` prints the path of \
                 the current one"
            )
        })?;
        let seen = cache.warnings().len();
        let Merged { results, taken } = cache.merge_text(&text, &name)?;
        let ignored = &cache.warnings()[seen..];
        if results == 0 {
            let why = ignored.first().map(|w| format!(", starting at line {}: {}", w.line, w.why));
            bail!(
                "{name} has no results{}\nhint: name cache files of this version",
                why.unwrap_or_default()
            );
        }
        ignored.iter().for_each(|w| eprintln!("{w}"));
        let older = match results - taken {
            0 => String::new(),
            older => format!(", {older} older than known results"),
        };
        said(&format!("{name}: {taken} results{older}\n"))?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use tune::Measured;

    use super::*;

    #[test]
    fn a_file_without_a_result_is_refused() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let merged = |text: Option<&str>| {
            let file = dir.path().join("tune.jsonl");
            match text {
                Some(text) => std::fs::write(&file, text).expect("written"),
                None => assert!(!file.exists(), "not written yet"),
            }
            merge(&mut TuneCache::shipped(), &[file], |_| Ok(())).map_err(|e| format!("{e:#}"))
        };
        for damaged in [None, Some(""), Some("not JSON\n"), Some("{\"format\":99}\n")] {
            let text = merged(damaged).expect_err("no result in it");
            assert!(text.contains("\nhint: "), "{text}");
        }
        let shipped = TuneCache::shipped();
        let (entry, _) = shipped.entries().next().expect("one is shipped");
        let line = serde_json::to_string(entry).expect("plain data");
        assert_eq!(merged(Some(&format!("not JSON\n{line}\n"))), Ok(true));
    }

    #[test]
    fn what_is_not_used_says_why() {
        let shipped = TuneCache::shipped();
        let (entry, _) = shipped.entries().next().expect("one is shipped");
        assert_eq!(unused(entry), None);
        let old = Entry { key: tune::Key { version: 0, ..entry.key.clone() }, ..entry.clone() };
        assert!(unused(&old).is_some_and(|why| why.contains("version 0")));
        let gone = tune::Key { kernel: "warp".to_owned(), ..entry.key.clone() };
        assert!(unused(&Entry { key: gone, ..entry.clone() }).is_some());
        let mut config = entry.config.clone();
        config.as_object_mut().expect("fields").insert("wings".to_owned(), 2.into());
        let why = unused(&Entry { config, ..entry.clone() }).expect("a field too many");
        assert!(why.ends_with("unknown field `wings`"), "{why}");
    }

    #[test]
    fn a_filter_that_matches_nothing_is_the_callers_mistake() {
        let text = show(&TuneCache::shipped(), Some("warp")).expect_err("no such key").to_string();
        assert!(text.contains("no result matches `warp`\nhint: "), "{text}");
        assert!(show(&TuneCache::default(), None).is_ok(), "nothing is kept yet");
    }

    #[test]
    fn the_runner_up_shows_whether_it_was_faster() {
        let entry = |ns: f64| Entry {
            timings: vec![Measured { config: 1.into(), median_ns: Some(ns), error: None }],
            config: 0.into(),
            median_ns: Some(1000.0),
            ..TuneCache::shipped().entries().next().expect("one is shipped").0.clone()
        };
        let shown = |ns| describe("key", &entry(ns), Source::Tuned);
        assert!(shown(1100.0).contains("next 1.1 us (+10.0%): 1"), "{}", shown(1100.0));
        let close = shown(990.0);
        assert!(close.contains("next 1.0 us (-1.0%, within the margin): 1"), "{close}");
    }
}
