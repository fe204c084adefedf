//! `verify`: checks every kernel against the reference, and the backends against each other.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;
use std::thread;

use anyhow::Result;
use command::OutFile;
use record::{Backend, Check, Verified};

use crate::args::VerifyArgs;
use crate::bench::{keep, problems};
use crate::devices::{Device, Doctor, Selection};
use crate::fail::{check, usage};
use crate::process;
use crate::render::{self, Align, Style, Table};
use crate::sanitize::Sanitizer;
use crate::stream::{self, Column};

/// Refuses mistakes that can be found without a device, so that a caller can do so before it builds the programs.
///
/// # Errors
/// A mistake of the caller.
pub fn check_verify(args: &VerifyArgs) -> Result<()> {
    if args.sanitizer.is_some() && args.backend != Selection::List(vec![Backend::Cuda]) {
        return Err(usage("compute-sanitizer supports CUDA only", "add --backend cuda"));
    }
    if args.exhaust && args.jobs.get() > 1 {
        return Err(usage(
            "--exhaust fills the memory that parallel processes need",
            "omit --jobs",
        ));
    }
    args.save.as_deref().map(OutFile::new).transpose()?;
    Ok(())
}

/// Runs `verify`, including the small models in the folder `fixtures`.
///
/// # Errors
/// Mistakes are reported before anything is checked, failed checks at the end.
pub fn verify(args: &VerifyArgs, fixtures: Option<&Path>) -> Result<()> {
    check_verify(args)?;
    let save = args.save.as_deref().map(OutFile::new).transpose()?;
    let chosen = Doctor::ask(process::own("flashover")?)?.choose(&args.backend, false)?;
    eprintln!("{chosen}");
    chosen.check_profile(args.profile.as_deref())?;
    let column = |device: &Device| column(device.backend, args, fixtures);
    let run = chosen.devices.iter().map(column).collect::<Result<Vec<_>>>()?;
    command::print(&document(&run, Style::of_stdout()))?;
    if let (Some(file), Some(path)) = (save, &args.save) {
        let rows: Vec<_> = run.iter().flat_map(|column| rows(column, args)).collect();
        eprintln!("{}", keep(file, path, &rows)?);
    }
    verdict(&run)
}

/// Runs `--jobs` processes of the backend, which share its checks.
fn column(backend: Backend, args: &VerifyArgs, fixtures: Option<&Path>) -> Result<Column> {
    let jobs = args.jobs.get();
    let part = |at: usize| {
        let mut command = process::own("flashover-bench")?;
        command.args(["check", "--backend", backend.name()]);
        let with = ["--filter", "--profile"].into_iter().zip([&args.filter, &args.profile]);
        command.args(with.filter_map(|(name, value)| Some([name, value.as_deref()?])).flatten());
        let flags = [("--configs", args.configs), ("--exhaust", args.exhaust)];
        command.args(flags.iter().filter_map(|(name, on)| on.then_some(name)));
        command.args(fixtures.iter().flat_map(|f| [OsStr::new("--fixtures"), f.as_os_str()]));
        let mut name = backend.to_string();
        if jobs > 1 {
            let part = format!("{at}/{jobs}");
            command.args(["--part", &part]);
            name += &format!(" {part}");
        }
        let Some(tool) = args.sanitizer else { return stream::gather(&name, command) };
        let log = tempfile::NamedTempFile::new()?;
        let column = stream::gather(&name, tool.around(&command, log.path())?)?;
        let found = tool.found(log.path())?;
        Ok(Column { broken: column.broken.or(found), ..column })
    };
    let parts = thread::scope(|scope| {
        let running: Vec<_> = (1..=jobs).map(|at| scope.spawn(move || part(at))).collect();
        let ended = running.into_iter().map(|thread| thread.join().expect("no panic"));
        ended.collect::<Result<Vec<_>>>()
    })?;
    let whole = parts.into_iter().reduce(Column::and).expect("one process at least");
    Ok(Column { backend: backend.to_string(), ..whole })
}

/// Summarises the checks of each kernel on a backend.
fn rows(column: &Column, args: &VerifyArgs) -> Vec<Verified> {
    let Some(card) = &column.card else { return Vec::new() };
    let checked = column.checks.iter().map(|check| check.op.as_str());
    let skipped = column
        .skips
        .iter()
        .filter(|(case, _)| case != record::ALL_CASES)
        .filter_map(|(case, _)| op_of(case));
    let ops: BTreeSet<&str> = checked.chain(skipped).collect();
    let row = |op: &str| {
        let Summed { checks, passed, worst } = Summed::from_column(column, op);
        let (worst_used, worst_case) = worst.unzip();
        Verified {
            schema: record::SCHEMA,
            op: op.to_owned(),
            backend: column.backend.clone(),
            arch_id: card.arch_id.clone(),
            profile: card.profile.clone(),
            checks,
            passed,
            skipped: Some(column.skips.iter().filter(|(case, _)| op_of(case) == Some(op)).count()),
            worst_used,
            worst_case,
            configs: args.configs,
            filter: args.filter.clone(),
            sanitizer: args.sanitizer.map(Sanitizer::name),
            broken: column.broken.clone(),
            commit: card.commit.clone(),
            dirty: card.dirty,
            date: card.date.clone(),
        }
    };
    ops.into_iter().map(row).collect()
}

/// Kernel of a case that [`record::case_name`] named.
fn op_of(case: &str) -> Option<&str> {
    case.split(' ').next()
}

/// Fails with exit code 1 if a check failed, a column is incomplete, or a device checked nothing and gave no reason.
/// Fails with 2 if the arguments leave nothing to check on any device.
fn verdict(run: &[Column]) -> Result<()> {
    let mut wrong = problems(run);
    let empty = run.iter().filter(|c| c.checks.is_empty() && c.broken.is_none());
    let (skipped, silent): (Vec<_>, Vec<_>) = empty.partition(|c| !c.skips.is_empty());
    wrong.extend(silent.iter().map(|c| format!("{}: nothing was checked", c.backend)));
    if skipped.len() == run.len() {
        let reasons: Vec<_> =
            skipped.iter().map(|c| format!("{}: {}", c.backend, c.skips[0].1)).collect();
        return Err(usage(
            format!("nothing was checked; {}", reasons.join("; ")),
            "choose another --backend, --filter or --profile; `--backend all` runs every device",
        ));
    }
    if wrong.is_empty() { Ok(()) } else { Err(check(wrong.join("; "))) }
}

/// Renders both tables, then skipped and failed checks.
fn document(run: &[Column], style: Style) -> String {
    let mut out = kernels(run).render(style);
    if let Some(table) = agreement(run) {
        out += "\nCases with bit-identical outputs:\n\n";
        out += &table.render(style);
    }
    out.push('\n');
    for column in run {
        let notes = render::notes(column, style);
        if !notes.is_empty() {
            out += &format!("{}:\n{notes}", column.backend);
        }
    }
    out
}

/// One row per kernel and backend.
fn kernels(run: &[Column]) -> Table {
    let mut table = Table::new([
        ("kernel", Align::Left),
        ("backend", Align::Left),
        ("checks", Align::Right),
        ("passed", Align::Right),
        ("worst error / tolerance", Align::Right),
        ("in case", Align::Left),
    ]);
    let ops: BTreeSet<&str> = run.iter().flat_map(|c| &c.checks).map(|c| c.op.as_str()).collect();
    for op in ops {
        for column in run {
            let Summed { checks, passed, worst } = Summed::from_column(column, op);
            if checks == 0 {
                continue;
            }
            table.row([
                op.to_owned(),
                column.backend.clone(),
                checks.to_string(),
                passed.to_string(),
                worst.as_ref().map(|(share, _)| format!("{share:.2}")).unwrap_or_default(),
                worst.map(|(_, case)| case).unwrap_or_default(),
            ]);
        }
    }
    table
}

/// Summary of the checks of one kernel.
struct Summed {
    checks: usize,
    passed: usize,
    /// Largest fraction of its tolerance that a check used, and its case.
    worst: Option<(f64, String)>,
}

impl Summed {
    fn from_column(column: &Column, op: &str) -> Self {
        let checks: Vec<_> = column.checks.iter().filter(|check| check.op == op).collect();
        let worst = checks
            .iter()
            .filter_map(|check| Some((used(check)?, check.case())))
            .max_by(|a, b| a.0.total_cmp(&b.0));
        let passed = checks.iter().filter(|check| check.passed).count();
        Self { checks: checks.len(), passed, worst }
    }
}

/// Fraction of its tolerance that a check used. An exact result uses 0, even if the tolerance is 0.
fn used(check: &Check) -> Option<f64> {
    match (check.max_err, check.tolerance) {
        (Some(err), Some(tolerance)) => Some(if err == 0.0 { 0.0 } else { err / tolerance }),
        // A check that did not finish ranks above any error.
        _ => (!check.passed).then_some(f64::INFINITY),
    }
}

/// One row per pair of backends; `None` with fewer than two. A backend may check a case with several configs. Two
/// backends agree on a case if an output of one equals an output of the other.
fn agreement(run: &[Column]) -> Option<Table> {
    let digests: Vec<BTreeMap<String, BTreeSet<&str>>> = run
        .iter()
        .map(|column| {
            let mut of_case: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
            for check in &column.checks {
                if let Some(digest) = &check.digest {
                    of_case.entry(check.case()).or_default().insert(digest);
                }
            }
            of_case
        })
        .collect();
    let mut table = Table::new([
        ("backends", Align::Left),
        ("common cases", Align::Right),
        ("equal", Align::Right),
    ]);
    for a in 0..run.len() {
        for b in a + 1..run.len() {
            let common: Vec<_> = digests[a]
                .iter()
                .filter_map(|(case, ours)| Some((ours, digests[b].get(case)?)))
                .collect();
            let equal = common.iter().filter(|(ours, theirs)| !ours.is_disjoint(theirs)).count();
            table.row([
                format!("{} and {}", run[a].backend, run[b].backend),
                common.len().to_string(),
                equal.to_string(),
            ]);
        }
    }
    (!table.rows().is_empty()).then_some(table)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::tests::Only;

    fn column(backend: &str, checks: &[(u32, f64, &str)]) -> Column {
        let checks = checks
            .iter()
            .map(|(m, err, digest)| Check {
                op: "matmul".into(),
                params: [("m", *m), ("n", 2), ("k", 3)].map(|(n, v)| (n.into(), v.into())).into(),
                backend: backend.into(),
                config: None,
                max_err: Some(*err),
                tolerance: Some(0.5),
                passed: *err <= 0.5,
                error: None,
                digest: Some((*digest).into()),
            })
            .collect();
        Column { backend: backend.into(), checks, ..Column::default() }
    }

    #[test]
    fn memory_is_exhausted_by_one_process_alone() {
        let line = ["verify", "--exhaust", "--jobs", "2"];
        let args = Only::<VerifyArgs>::try_parse_from(line).unwrap().args;
        let error = check_verify(&args).unwrap_err();
        assert!(error.to_string().starts_with("--exhaust fills the memory"), "{error}");
    }

    #[test]
    fn both_tables_and_every_failure_are_shown() {
        let run = [
            column("cuda", &[(1, 0.0, "aa"), (2, 0.4, "bb"), (3, 0.2, "cc")]),
            column(
                "cpu",
                &[(1, 0.0, "aa"), (2, 0.1, "b0"), (2, 0.1, "bb"), (3, 0.9, "c0"), (4, 0.0, "d")],
            ),
        ];
        insta::assert_snapshot!(document(&run, Style::Markdown));
        let error = verdict(&run).unwrap_err();
        assert_eq!(error.to_string(), "cpu: matmul 3x2x3 failed");
    }

    #[test]
    fn an_empty_column_does_not_pass() {
        assert!(verdict(&[column("cuda", &[(1, 0.0, "aa")])]).is_ok());
        let error = verdict(&[column("cuda", &[])]).unwrap_err();
        assert_eq!(error.to_string(), "cuda: nothing was checked");
    }

    #[test]
    fn a_choice_that_leaves_nothing_to_check_is_the_callers_error() {
        let reason = "profile rtx4090 describes a cuda device";
        let skips = vec![(record::ALL_CASES.to_owned(), reason.to_owned())];
        let skipped = Column { skips, ..column("cpu", &[]) };
        let error = verdict(std::slice::from_ref(&skipped)).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(crate::fail::report(&error), 2);
        assert!(verdict(&[column("cuda", &[(1, 0.0, "aa")]), skipped]).is_ok());
    }

    #[test]
    fn one_backend_agrees_with_nobody() {
        assert!(agreement(&[column("cuda", &[(1, 0.0, "aa")])]).is_none());
    }
}
