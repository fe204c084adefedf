//! Every kernel over its edge shapes, against the reference.

use arch::ArchProfile;
use kernels::matmul::{Matmul, MatmulConfig, MatmulProblem, Precision};
use oracle::matmul::{EdgeCase, Inputs, check, config_cases, edge_cases};
use record::{Check, Line};
use tune::{Entry, Kernel, Key, TuneCache};

use crate::emit::emit;
use crate::{Target, cases, provenance, tuning};

/// Verifies every kernel; false when a check failed.
pub(crate) fn verify(target: &Target, filter: Option<&str>, configs: bool) -> anyhow::Result<bool> {
    let Some(device) = target.open_or_skip()? else { return Ok(true) };
    emit(&Line::Card(provenance::card(&device)?))?;
    let mut work = work(device.profile(), &tuning::open_cache()?, configs);
    if let Some(filter) = filter {
        work.retain(|(case, _)| name(case).contains(filter));
        if work.is_empty() {
            anyhow::bail!("no check matches `{filter}`\nhint: names look like `matmul f32 1x1x1`");
        }
    }
    emit(&Line::Plan { cases: work.len() })?;
    let mut good = true;
    for (case, config) in work {
        emit(&Line::Begin { case: name(&case) })?;
        let Some(config) = config else {
            let reason = format!("{} has no {}", device.backend(), case.problem.precision.name());
            emit(&Line::Skip { case: name(&case), reason })?;
            continue;
        };
        let mut line = Check {
            op: "matmul".to_owned(),
            params: params(&case),
            backend: device.backend().to_string(),
            config: Some(serde_json::to_value(config)?),
            max_err: None,
            tolerance: None,
            passed: false,
            error: None,
            digest: None,
        };
        match check(&device, &case, &config) {
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

/// What runs on a device: every edge shape with the config that it gets unmeasured and the one that was
/// measured for it, then fewer shapes with every measured config and, with `configs`, every candidate.
/// A shape that the device cannot serve has no config.
fn work(
    arch: &ArchProfile,
    cache: &TuneCache,
    configs: bool,
) -> Vec<(EdgeCase, Option<MatmulConfig>)> {
    let mut work: Vec<(EdgeCase, Option<MatmulConfig>)> = Vec::new();
    let tuned = tuned(arch, cache);
    for precision in Precision::ALL {
        for case in edge_cases(precision) {
            let first = Matmul::candidates(arch, &case.problem).into_iter().take(1);
            let key = Key::of::<Matmul>(&arch.id, &case.problem);
            let known = tuned.iter().filter(|(of, ..)| **of == key).map(|(.., config)| *config);
            let few = feasible(arch, &case, first.chain(known));
            if few.is_empty() {
                work.push((case, None));
            }
            work.extend(few.into_iter().map(|config| (case, Some(config))));
        }
        for case in config_cases(precision) {
            let known = tuned.iter().filter(|(_, of, _)| *of == precision);
            let others = if configs { Matmul::candidates(arch, &case.problem) } else { Vec::new() };
            let many = feasible(arch, &case, known.map(|(.., config)| *config).chain(others));
            work.extend(many.into_iter().map(|config| (case, Some(config))));
        }
    }
    work
}

/// Those that can run `case`, each once, in their order.
fn feasible(
    arch: &ArchProfile,
    case: &EdgeCase,
    all: impl Iterator<Item = MatmulConfig>,
) -> Vec<MatmulConfig> {
    let mut each = Vec::new();
    for config in all {
        if !each.contains(&config) && Matmul::check(arch, &case.problem, &config).is_ok() {
            each.push(config);
        }
    }
    each
}

/// The configs that were measured best on this architecture, here or before shipping, with the
/// precision of each. One that this version cannot read is named on standard error.
fn tuned<'a>(arch: &ArchProfile, cache: &'a TuneCache) -> Vec<(&'a Key, Precision, MatmulConfig)> {
    let ours = |key: &Key| {
        key.kernel == Matmul::NAME && key.version == Matmul::VERSION && key.arch_id == arch.id
    };
    let read = |entry: &'a Entry| {
        let problem: MatmulProblem = serde_json::from_value(entry.problem.clone())?;
        Ok((&entry.key, problem.precision, serde_json::from_value(entry.config.clone())?))
    };
    let entries = cache.entries().map(|(entry, _)| entry).filter(|entry| ours(&entry.key));
    entries
        .filter_map(|entry| {
            let known: serde_json::Result<_> = read(entry);
            known.inspect_err(|e| eprintln!("{}: ignored: {e}", entry.key)).ok()
        })
        .collect()
}

fn params(case: &EdgeCase) -> std::collections::BTreeMap<String, serde_json::Value> {
    let mut params = cases::matmul_params(&case.problem);
    let p = &case.problem;
    if matches!(case.inputs, Inputs::Special(_)) {
        params.insert("inputs".to_owned(), "inf+nan".into());
    }
    let dense = MatmulProblem::dense(1, [p.m, p.n, p.k], [p.lhs.layout, p.rhs.layout], p.precision);
    if p.batch() == 1 && dense.is_ok_and(|d| d.lhs != p.lhs || d.rhs != p.rhs) {
        params.insert("view".to_owned(), format!("{}+{}", p.lhs.stride, p.lhs.start).into());
    }
    if p.batch() > 1 && (p.batches.lhs.1 == 0 || p.batches.rhs.1 == 0) {
        params.insert("repeat".to_owned(), true.into());
    }
    params
}

fn name(case: &EdgeCase) -> String {
    record::case_name("matmul", &params(case))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_configs_are_verified_where_they_were_measured() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let rtx4090 = ArchProfile::recorded("rtx4090").expect("recorded");
        let arch = h200.restrict("rtx4090", &rtx4090);
        let cache = TuneCache::shipped();
        let shipped = tuned(&arch, &cache);
        assert!(!shipped.is_empty());
        let work = work(&arch, &cache, false);
        for (key, precision, config) in shipped {
            let runs = |(case, run): &(EdgeCase, Option<MatmulConfig>)| {
                case.problem.precision == precision && *run == Some(config)
            };
            assert!(work.iter().any(runs), "{key}: {config:?}");
        }
        assert!(tuned(&rtx4090, &cache).is_empty(), "nothing was measured there");
    }
}
