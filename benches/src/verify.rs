//! Checks every kernel and model against the reference.

mod grpo;
mod memory;
mod models;
mod unets;

use std::fs;
use std::path::Path;
use std::str::FromStr;

use anyhow::Context;
use record::{Check, Line};
use suite::{Job, KERNELS};

use crate::emit::emit;
use crate::{Target, provenance, tuning};

/// Every `of`th check, beginning with index `from`. The first part gets all checks that need gigabytes, so
/// that a card holds only one of them at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    from: usize,
    of: usize,
}

impl Part {
    fn select(self, jobs: Vec<Job>) -> Vec<Job> {
        let (large, small): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| job.params.contains_key("extent"));
        let mine = small.into_iter().skip(self.from).step_by(self.of);
        if self.from == 0 { mine.chain(large).collect() } else { mine.collect() }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (from, of) = text.split_once('/')?;
            Some((from.parse::<usize>().ok()?, of.parse().ok()?))
        };
        match read() {
            Some((from, of)) if (1..=of).contains(&from) => Ok(Self { from: from - 1, of }),
            _ => Err(format!(
                "`{text}` is not a part\nhint: use a part such as 2/8, the second of eight"
            )),
        }
    }
}

/// Verifies every kernel, the models in `fixtures`, and the behaviour of a model at its memory limit. With `exhaust`, a
/// check fills the memory of the card. Returns false if a check failed.
pub(crate) fn verify(
    target: &Target,
    filter: Option<&str>,
    configs: bool,
    exhaust: bool,
    fixtures: Option<&Path>,
    part: Option<Part>,
) -> anyhow::Result<bool> {
    let Some(device) = target.open_or_skip()? else { return Ok(true) };
    emit(&Line::Card(provenance::card(&device)?))?;
    let cache = tuning::open_cache()?;
    let kernels = KERNELS.iter();
    let mut jobs: Vec<Job> =
        kernels.flat_map(|kernel| kernel.checks(device.profile(), &cache, configs)).collect();
    jobs.extend(memory::jobs(&device, exhaust));
    if let Some(fixtures) = fixtures {
        jobs.extend(models::jobs(device.profile(), fixtures)?);
        jobs.extend(unets::jobs(device.profile(), fixtures)?);
        jobs.extend(grpo::jobs(device.profile(), fixtures));
    }
    if let Some(filter) = filter {
        jobs.retain(|job| job.matches(filter));
        if jobs.is_empty() {
            anyhow::bail!(
                "no check matches `{filter}`\nhint: use part of a name such as `matmul f32 1x1x1`, or `train` for all kernels of training"
            );
        }
    }
    if let Some(part) = part {
        jobs = part.select(jobs);
    }
    emit(&Line::Plan { cases: jobs.len() })?;
    let programs: Vec<_> = jobs.iter().filter_map(|job| job.programs.as_ref()).collect();
    precompile::compile(&device, programs.len(), |i| programs[i](&device));
    let mut good = true;
    for job in jobs {
        emit(&Line::Begin { case: job.name() })?;
        let config = match job.config.clone() {
            Ok(config) => config,
            Err(reason) => {
                emit(&Line::Skip { case: job.name(), reason })?;
                continue;
            }
        };
        let mut line = Check {
            op: job.op.to_owned(),
            params: job.params.clone(),
            backend: device.backend().to_string(),
            config: Some(config),
            max_err: None,
            tolerance: None,
            passed: false,
            error: None,
            digest: None,
        };
        match (job.run)(&device) {
            Ok(verdict) => {
                line.max_err = Some(verdict.comparison.max_err);
                line.tolerance = Some(verdict.comparison.tolerance);
                line.passed = verdict.comparison.passed;
                line.digest = Some(format!("{:016x}", verdict.digest));
                if !line.passed {
                    line.error = Some(verdict.comparison.to_string());
                }
            }
            Err(e) => line.error = Some(e.to_string()),
        }
        good &= line.passed;
        emit(&Line::Check(line))?;
    }
    Ok(good)
}

/// Returns the names of the folders in `of` that have `file`, in order.
fn folders(of: &Path, file: &str) -> anyhow::Result<Vec<String>> {
    let (shown, hint) = (of.display(), "hint: use the folder models/fixtures");
    let mut names = Vec::new();
    for entry in fs::read_dir(of).with_context(|| format!("cannot read {shown}\n{hint}"))? {
        let entry = entry?;
        if entry.path().join(file).is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    anyhow::ensure!(!names.is_empty(), "no folder in {shown} has {file}\n{hint}");
    Ok(names)
}

#[cfg(test)]
mod tests {
    use arch::ArchProfile;
    use tune::TuneCache;

    use super::*;

    #[test]
    fn parts_are_counted_from_one() {
        assert_eq!("2/8".parse(), Ok(Part { from: 1, of: 8 }));
        for bad in ["", "2", "0/8", "9/8", "1/0", "a/8", "-1/8"] {
            bad.parse::<Part>().expect_err(bad);
        }
    }

    #[test]
    fn parts_are_the_whole_and_the_large_checks_are_together() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let all = || -> Vec<Job> {
            let cache = TuneCache::default();
            KERNELS.iter().flat_map(|kernel| kernel.checks(&h200, &cache, false)).collect()
        };
        let names = |jobs: Vec<Job>| jobs.iter().map(Job::name).collect::<Vec<_>>();
        let mut shared = Vec::new();
        for from in 0..3 {
            let mine = names(Part { from, of: 3 }.select(all()));
            assert_eq!(mine.iter().any(|name| name.contains("extent=")), from == 0);
            shared.extend(mine);
        }
        let mut whole = names(all());
        assert!(!whole.is_empty());
        shared.sort_unstable();
        whole.sort_unstable();
        assert_eq!(shared, whole);
    }
}
