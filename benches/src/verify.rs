//! Every kernel over its edge shapes, against the reference.

use kernels::matmul::{Matmul, MatmulConfig, Precision};
use oracle::matmul::{EdgeCase, Inputs, check, config_cases, edge_cases};
use record::{Check, Line};
use tune::Kernel;

use crate::emit::emit;
use crate::{Target, cases, provenance};

/// Verifies every kernel; false when a check failed.
pub(crate) fn verify(target: &Target, filter: Option<&str>, configs: bool) -> anyhow::Result<bool> {
    let Some(device) = target.open_or_skip()? else { return Ok(true) };
    emit(&Line::Card(provenance::card(&device)?))?;
    let mut work: Vec<(EdgeCase, Option<MatmulConfig>)> = Vec::new();
    for precision in Precision::ALL {
        work.extend(edge_cases(precision).into_iter().map(|case| (case, None)));
        if configs {
            for case in config_cases(precision) {
                let candidates = Matmul::candidates(device.profile(), &case.problem);
                work.extend(candidates.into_iter().map(|config| (case, Some(config))));
            }
        }
    }
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
        let first = || Matmul::candidates(device.profile(), &case.problem).first().copied();
        let Some(config) = config.or_else(first) else {
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

fn params(case: &EdgeCase) -> std::collections::BTreeMap<String, serde_json::Value> {
    let mut params = cases::matmul_params(&case.problem);
    let p = &case.problem;
    if matches!(case.inputs, Inputs::Special(_)) {
        params.insert("inputs".to_owned(), "inf+nan".into());
    }
    let dense = kernels::matmul::MatmulProblem::dense(
        1,
        [p.m, p.n, p.k],
        [p.lhs.layout, p.rhs.layout],
        p.precision,
    );
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
