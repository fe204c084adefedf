//! `cargo xtask bench`: measure on every chosen backend, print, save, compare.

use std::path::Path;

use anyhow::Result;
use command::OutFile;
use serde::Serialize;

use crate::cli::{BenchArgs, Format, Suite, word};
use crate::compare::{Baseline, Comparison};
use crate::devices::{Backend, Chosen, Doctor, Selection};
use crate::fail::{Fail, check, usage};
use crate::place::Place;
use crate::programs::Programs;
use crate::report::{self, Style};
use crate::setup::{self, Cuda, Wants};
use crate::stream::{self, Column};

/// What can be known without the programs is checked before they are built, the rest before anything is
/// measured.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let place = Place::find()?;
    let baseline = args.compare.as_deref().map(Baseline::read).transpose()?;
    let target = |file: &Option<_>| file.as_deref().map(out_file).transpose();
    let (save, html) = (target(&args.save)?, target(&args.html)?);
    check_distinct(save.as_ref(), html.as_ref())?;
    setup::check_drivers(&args.backend)?;
    let (programs, _) = Programs::ready(&place, wants(&args.backend))?;
    let chosen = Doctor::ask(&programs)?.choose(&args.backend, args.require_gpu)?;
    eprintln!("{chosen}");
    chosen.check_profile(args.profile.as_deref())?;
    if let Some(filter) = &args.filter {
        programs.check_filter(&word(args.suite), filter)?;
    }
    if let Some(baseline) = &baseline {
        baseline.check_devices(&chosen, args.profile.as_deref())?;
    }

    if args.dry_run {
        return Ok(());
    }
    let demo = place.workspace().ok().map(|root| root.join("models/demo"));
    let run = measure(&programs, &chosen, args, demo.as_deref())?;
    deliver(&run, baseline.as_ref(), args, save, html)?;
    match (demo, chosen.devices.first()) {
        (Some(demo), Some((backend, _))) if tells(args) => {
            if let Err(why) = tell(&programs, &demo, *backend) {
                eprintln!("warning: the demo model wrote nothing: {why:#}");
            }
        }
        _ => {}
    }
    Ok(())
}

/// Whether a table is followed by what the demo model writes.
fn tells(args: &BenchArgs) -> bool {
    args.format == Format::Md
        && args.filter.is_none()
        && matches!(args.suite, Suite::Quick | Suite::All)
}

/// A story by the demo model.
fn tell(programs: &Programs, demo: &Path, backend: Backend) -> Result<()> {
    let prompt = "Once upon a time";
    command::print(&format!("\nthe demo model on {backend}: {prompt}"))?;
    let (demo, backend) = (demo.display().to_string(), backend.to_string());
    let args = ["generate", "--model", &demo, "--backend", &backend, "--prompt", prompt];
    programs.pass_through("flashover", &args)
}

/// Prints and writes what was measured, then says what is wrong with it: neither a file that cannot be
/// written nor a baseline that does not fit may cost it.
fn deliver(
    run: &[Column],
    baseline: Option<&Baseline>,
    args: &BenchArgs,
    save: Option<OutFile>,
    html: Option<OutFile>,
) -> Result<()> {
    let now: Vec<_> = run.iter().flat_map(|column| column.records.iter().cloned()).collect();
    let compared = baseline.map(|baseline| baseline.compare(&now, args.threshold / 100.0));
    let comparison = compared.as_ref().and_then(|compared| compared.as_ref().ok());
    print(run, comparison, args.format)?;
    if let (Some(file), Some(path)) = (save, &args.save) {
        eprintln!("{}", keep(file, path, &now)?);
    }
    if let (Some(file), Some(path)) = (html, &args.html) {
        file.write(report::page(run, comparison.map(Comparison::table).as_ref()).as_bytes())?;
        eprintln!("wrote {}", path.display());
    }
    match compared {
        Some(Err(refused)) if !now.is_empty() => Err(refused),
        Some(Ok(comparison)) => verdict(run, Some(&comparison)),
        _ => verdict(run, None),
    }
}

/// Writes the records, and says so. Without any the file keeps those that it has.
pub(crate) fn keep(file: OutFile, path: &Path, records: &[impl Serialize]) -> Result<String> {
    if records.is_empty() {
        return Ok(format!("no record to save: {} is left as it is", path.display()));
    }
    let lines: Vec<_> = records.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    file.write((lines.join("\n") + "\n").as_bytes())?;
    Ok(format!("saved {} records to {}", records.len(), path.display()))
}

/// What backends of this selection need on the machine.
pub(crate) fn wants(selection: &Selection) -> Wants {
    let cuda =
        if selection.may_include(Backend::Cuda) { Cuda::WithDriver } else { Cuda::Installed };
    Wants { cuda, gl: selection.may_include(Backend::Webgpu) }
}

/// One process per backend, one after the other so that they do not disturb each other's times.
fn measure(
    programs: &Programs,
    chosen: &Chosen,
    args: &BenchArgs,
    demo: Option<&Path>,
) -> Result<Vec<Column>> {
    let column = |backend: &Backend| {
        let mut command = programs.command("flashover-bench");
        command.args(["run", "--backend", &backend.to_string(), "--suite", &word(args.suite)]);
        let passed =
            [("--filter", &args.filter), ("--profile", &args.profile), ("--torch", &args.torch)];
        for (name, value) in passed {
            if let Some(value) = value {
                command.args([name, value]);
            }
        }
        if let Some(demo) = demo {
            command.arg("--demo").arg(demo);
        }
        if let Some(policy) = args.policy {
            command.args(["--policy", &word(policy)]);
        }
        stream::gather(&backend.to_string(), command)
    };
    chosen.devices.iter().map(|(backend, _)| column(backend)).collect()
}

/// Data goes to standard output; what a format has no place for goes to standard error.
fn print(run: &[Column], comparison: Option<&Comparison>, format: Format) -> Result<()> {
    let style = Style::of_stdout();
    let mut text = match format {
        Format::Md => report::document(run, style),
        Format::Json => report::json(run)?,
        Format::Csv => report::csv(run)?,
    };
    if let Some(comparison) = comparison {
        match format {
            Format::Md => text += &comparison.render(style),
            Format::Json | Format::Csv => eprint!("{}", comparison.render(Style::Terminal)),
        }
    }
    if format == Format::Csv {
        for column in run {
            eprint!("{}", report::notes(column, Style::Terminal));
        }
    }
    Ok(command::print(&text)?)
}

/// One line about everything that went wrong, and exit code 1, if something did.
fn verdict(run: &[Column], comparison: Option<&Comparison>) -> Result<()> {
    let mut wrong = problems(run);
    if run.iter().all(|column| column.records.is_empty()) && wrong.is_empty() {
        let reason =
            |column: &Column| Some(format!("{}: {}", column.backend, column.skips.first()?.1));
        let reasons: Vec<_> = run.iter().filter_map(reason).collect();
        if !reasons.is_empty() {
            return Err(usage(
                format!("nothing was measured; {}", reasons.join("; ")),
                "choose another --backend, --filter or --profile; `--backend all` takes every device",
            ));
        }
        wrong.push("nothing was measured".to_owned());
    }
    if let Some(n) = comparison.map(Comparison::regressions).filter(|n| *n > 0) {
        wrong.push(format!("slower than the baseline: {n}"));
    }
    if wrong.is_empty() { Ok(()) } else { Err(check(wrong.join("; "))) }
}

/// Failed cases and incomplete columns, one sentence each.
pub(crate) fn problems(run: &[Column]) -> Vec<String> {
    let mut wrong = Vec::new();
    for column in run {
        let failed: Vec<_> = column.failures().map(|(case, _)| case).collect();
        match &failed[..] {
            [] => {}
            [case] => wrong.push(format!("{}: {case} failed", column.backend)),
            [case, ..] => wrong.push(format!(
                "{}: {} cases failed, {case} the first",
                column.backend,
                failed.len()
            )),
        }
        if let Some(why) = &column.broken {
            wrong.push(format!("{}: {why}", column.backend));
        }
    }
    wrong
}

/// A file for the result; one that cannot be written is the caller's mistake.
pub(crate) fn out_file(path: &Path) -> Result<OutFile> {
    OutFile::new(path).map_err(|error| Fail::Refused(error.to_string()).into())
}

/// The page would replace the records.
fn check_distinct(save: Option<&OutFile>, html: Option<&OutFile>) -> Result<()> {
    match (save, html) {
        (Some(save), Some(html)) if save.is_same(html) => {
            Err(usage("--save and --html name one file", "name two"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use clap::Parser;
    use record::Record;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::report::sample;

    #[test]
    fn an_impossible_target_is_refused_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let code = |file: &Path| crate::fail::report(&out_file(file).unwrap_err());
        assert_eq!(code(dir.path()), 2);
        assert_eq!(code(&dir.path().join("absent/x.jsonl")), 2);
        assert!(out_file(&dir.path().join("x.jsonl")).is_ok());
    }

    #[test]
    fn a_run_without_a_record_leaves_the_file_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keep.jsonl");
        let kept = |records: &[Record]| keep(out_file(&path).unwrap(), &path, records).unwrap();
        assert_eq!(kept(&[]), format!("no record to save: {} is left as it is", path.display()));
        assert!(!path.exists(), "nor is it made");
        assert!(kept(&sample::run()[0].records).starts_with("saved "));
        let text = std::fs::read_to_string(&path).unwrap();
        kept(&[]);
        assert!(!text.is_empty() && std::fs::read_to_string(&path).unwrap() == text);
    }

    #[test]
    fn records_and_page_take_two_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| out_file(&dir.path().join(name)).unwrap();
        let error = check_distinct(Some(&path("x")), Some(&path("./x"))).unwrap_err();
        assert_eq!(crate::fail::report(&error), 2);
        assert!(check_distinct(Some(&path("x")), Some(&path("y"))).is_ok());
        let null = || out_file(Path::new("/dev/null")).unwrap();
        assert!(check_distinct(Some(&null()), Some(&null())).is_ok(), "keeps neither");
    }

    #[test]
    fn a_baseline_that_does_not_fit_costs_nothing_that_was_measured() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut other = sample::run()[0].records[0].clone();
        other.params.insert("other".into(), 1.into());
        std::fs::write(path("base"), serde_json::to_string(&other).unwrap()).unwrap();
        let baseline = Baseline::read(&path("base")).unwrap();
        let words = ["xtask", "bench", "--format", "csv", "--save"];
        let paths = [path("save"), "--html".into(), path("html")];
        let line = words.iter().map(OsString::from).chain(paths.map(PathBuf::into_os_string));
        let Command::Bench(args) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not bench")
        };
        let file = |name| Some(out_file(&path(name)).unwrap());
        let run = &sample::run()[..1];
        let error = deliver(run, Some(&baseline), &args, file("save"), file("html")).unwrap_err();
        assert!(error.to_string().contains("no case in common"), "{error}");
        assert_eq!(crate::fail::report(&error), 2);
        let saved = std::fs::read_to_string(path("save")).unwrap();
        assert_eq!(saved.lines().count(), run[0].records.len());
        assert!(path("html").exists());
    }

    #[test]
    fn failures_and_crashes_end_the_command_with_1() {
        let error = verdict(&sample::run(), None).unwrap_err();
        assert_eq!(crate::fail::report(&error), 1);
        let text = error.to_string();
        assert!(text.contains("rhs=row failed; cpu: program ended by signal 9"), "{text}");
        assert!(verdict(&sample::run()[..1], None).is_ok());
    }

    #[test]
    fn a_choice_that_leaves_nothing_to_measure_is_the_callers_error() {
        let column = |skips: &[(&str, &str)]| Column {
            backend: "cpu".into(),
            skips: skips.iter().map(|(case, why)| ((*case).into(), (*why).into())).collect(),
            ..Column::default()
        };
        let skipped = column(&[(record::ALL_CASES, "no case for this device matches `x`")]);
        let error = verdict(std::slice::from_ref(&skipped), None).unwrap_err();
        assert!(error.to_string().contains("cpu: no case for this device"), "{error}");
        assert_eq!(crate::fail::report(&error), 2);
        assert_eq!(crate::fail::report(&verdict(&[column(&[])], None).unwrap_err()), 1);
        let both = [sample::run().swap_remove(0), skipped];
        assert!(verdict(&both, None).is_ok(), "another backend has such cases");
    }

    #[test]
    fn a_selection_says_what_it_needs() {
        let wants = |text: &str| wants(&text.parse().unwrap());
        assert!(wants("all").gl && !wants("auto").gl && wants("webgpu").gl);
        assert_eq!(wants("auto").cuda, Cuda::WithDriver);
        assert_eq!(wants("cpu").cuda, Cuda::Installed);
    }
}
