//! `bench`: measures every chosen backend, prints and saves the result, and compares it with a baseline.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use anyhow::{Context, Result};
use command::OutFile;
use record::{Backend, Policy, Suite};
use serde::Serialize;

use crate::args::{BenchArgs, Format};
use crate::baseline::{Baseline, Comparison};
use crate::devices::{Chosen, Doctor};
use crate::fail::{check, usage};
use crate::process;
use crate::render::{self, Style};
use crate::stream::{self, Column};

/// Refuses mistakes that can be found without a device, so that a caller can do so before it builds the programs.
///
/// # Errors
/// A mistake of the caller. A pipe can be opened only once, so [`bench`] checks it.
pub fn check_bench(args: &BenchArgs) -> Result<()> {
    let [compare, save, html] = [&args.compare, &args.save, &args.html]
        .map(|file| file.as_deref().filter(|file| !is_pipe(file)));
    compare.map(Baseline::read).transpose()?;
    targets(save, html).map(drop)
}

/// Runs `bench`. `check_filter` refuses a filter that selects no case, and `demo` is the folder of the demo model.
///
/// # Errors
/// Mistakes are reported before anything is measured, cases that failed or got slower at the end.
pub fn bench(
    args: &BenchArgs,
    demo: Option<&Path>,
    check_filter: impl FnOnce(&str) -> Result<()>,
) -> Result<()> {
    let baseline = args.compare.as_deref().map(Baseline::read).transpose()?;
    let [save, html] = targets(args.save.as_deref(), args.html.as_deref())?;
    let chosen =
        Doctor::ask(process::own("flashover")?)?.choose(&args.backend, args.require_gpu)?;
    eprintln!("{chosen}");
    chosen.check_profile(args.profile.as_deref())?;
    args.filter.as_deref().map_or(Ok(()), check_filter)?;
    if let Some(baseline) = &baseline {
        baseline.check_devices(&chosen, args.profile.as_deref())?;
    }
    if args.dry_run {
        return Ok(());
    }
    let run = measure(&chosen, args, demo)?;
    deliver(&run, baseline.as_ref(), args, save, html)?;
    match (demo, chosen.devices.first()) {
        (Some(demo), Some(device)) if tells(args) => {
            if let Err(why) = tell(demo, device.backend) {
                eprintln!("warning: the demo model generated no text: {why:#}");
            }
        }
        _ => {}
    }
    Ok(())
}

fn is_pipe(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.file_type().is_fifo())
}

/// Opens the output files. The page must not overwrite the records.
fn targets(save: Option<&Path>, html: Option<&Path>) -> Result<[Option<OutFile>; 2]> {
    let target = |file: Option<&Path>| file.map(OutFile::new).transpose();
    match (target(save)?, target(html)?) {
        (Some(save), Some(html)) if save.is_same(&html) => {
            Err(usage("--save and --html name the same file", "name two files"))
        }
        (save, html) => Ok([save, html]),
    }
}

/// True if the demo model writes a story after the tables.
fn tells(args: &BenchArgs) -> bool {
    args.format == Format::Md
        && args.filter.is_none()
        && matches!(args.suite, Suite::Quick | Suite::All)
}

/// Lets the demo model write a story.
fn tell(demo: &Path, backend: Backend) -> Result<()> {
    let prompt = "Once upon a time";
    command::print(&format!("\nthe demo model on {backend}: {prompt}"))?;
    let mut flashover = process::own("flashover")?;
    flashover.arg("generate").arg("--model").arg(demo);
    flashover.args(["--backend", backend.name(), "--prompt", prompt]);
    let status = flashover.status().context("cannot start flashover")?;
    process::end_of("flashover", status)
}

/// Prints and writes the result, then reports errors: a baseline that does not match must not lose measurements.
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
        file.write(render::page(run, comparison.map(Comparison::table).as_ref()).as_bytes())?;
        eprintln!("wrote {}", path.display());
    }
    match compared {
        Some(Err(refused)) if !now.is_empty() => Err(refused),
        Some(Ok(comparison)) => verdict(run, Some(&comparison)),
        _ => verdict(run, None),
    }
}

/// Writes the records and returns a message. Without records, leaves the file unchanged.
pub(crate) fn keep(file: OutFile, path: &Path, records: &[impl Serialize]) -> Result<String> {
    if records.is_empty() {
        return Ok(format!("no records to save: {} is unchanged", path.display()));
    }
    let lines: Vec<_> = records.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    file.write((lines.join("\n") + "\n").as_bytes())?;
    Ok(format!("saved {} records to {}", records.len(), path.display()))
}

/// Runs one process per backend, one at a time so that they do not disturb each other's times.
fn measure(chosen: &Chosen, args: &BenchArgs, demo: Option<&Path>) -> Result<Vec<Column>> {
    let column = |backend: Backend| {
        let mut command = process::own("flashover-bench")?;
        command.args(["run", "--backend", backend.name(), "--suite", args.suite.name()]);
        let passed = [
            ("--filter", args.filter.as_deref()),
            ("--profile", args.profile.as_deref()),
            ("--torch", args.torch.as_deref()),
            ("--policy", args.policy.map(Policy::name)),
        ];
        command.args(passed.into_iter().filter_map(|(name, value)| Some([name, value?])).flatten());
        if let Some(demo) = demo {
            command.arg("--demo").arg(demo);
        }
        stream::gather(backend.name(), command)
    };
    chosen.devices.iter().map(|device| column(device.backend)).collect()
}

/// Prints the data to standard output, and to standard error what the format cannot hold.
fn print(run: &[Column], comparison: Option<&Comparison>, format: Format) -> Result<()> {
    let style = Style::of_stdout();
    let mut text = match format {
        Format::Md => render::document(run, style),
        Format::Json => render::json(run)?,
        Format::Csv => render::csv(run)?,
    };
    if let Some(comparison) = comparison {
        match format {
            Format::Md => text += &comparison.render(style),
            Format::Json | Format::Csv => eprint!("{}", comparison.render(Style::Terminal)),
        }
    }
    if format == Format::Csv {
        for column in run {
            eprint!("{}", render::notes(column, Style::Terminal));
        }
    }
    Ok(command::print(&text)?)
}

/// Returns an error with one line about all failures.
fn verdict(run: &[Column], comparison: Option<&Comparison>) -> Result<()> {
    let mut wrong = problems(run);
    if run.iter().all(|column| column.records.is_empty()) && wrong.is_empty() {
        let reason =
            |column: &Column| Some(format!("{}: {}", column.backend, column.skips.first()?.1));
        let reasons: Vec<_> = run.iter().filter_map(reason).collect();
        if !reasons.is_empty() {
            return Err(usage(
                format!("nothing was measured; {}", reasons.join("; ")),
                "choose another --backend, --filter or --profile; `--backend all` runs every device",
            ));
        }
        wrong.push("nothing was measured".to_owned());
    }
    if let Some(n) = comparison.map(Comparison::regressions).filter(|n| *n > 0) {
        wrong.push(format!("slower than the baseline: {n}"));
    }
    if wrong.is_empty() { Ok(()) } else { Err(check(wrong.join("; "))) }
}

/// Describes failed cases and incomplete columns, one sentence each.
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

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use clap::Parser;
    use record::Record;

    use super::*;
    use crate::args::tests::Only;
    use crate::render::sample;

    #[test]
    fn a_run_without_a_record_leaves_the_file_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keep.jsonl");
        let kept = |records: &[Record]| keep(OutFile::new(&path).unwrap(), &path, records).unwrap();
        assert_eq!(kept(&[]), format!("no records to save: {} is unchanged", path.display()));
        assert!(!path.exists(), "nor is it made");
        assert!(kept(&sample::run()[0].records).starts_with("saved "));
        let text = fs::read_to_string(&path).unwrap();
        kept(&[]);
        assert!(!text.is_empty() && fs::read_to_string(&path).unwrap() == text);
    }

    #[test]
    fn records_and_page_take_two_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let check = |save: &Path, html: &Path| targets(Some(save), Some(html)).map(drop);
        for second in ["./x", "absent/x", "."] {
            let error = check(&path("x"), &path(second)).unwrap_err();
            assert!(error.to_string().contains("\nhint: "), "{error}");
            assert_eq!(crate::fail::report(&error), 2);
        }
        assert!(check(&path("x"), &path("y")).is_ok());
        let null = Path::new("/dev/null");
        assert!(check(null, null).is_ok(), "keeps neither");
    }

    #[test]
    fn a_pipe_is_left_to_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let args = |option: &str| {
            let line = ["bench".into(), option.into(), pipe.clone().into_os_string()];
            Only::<BenchArgs>::try_parse_from(line).unwrap().args
        };
        // Opening a pipe would wait for the other end.
        check_bench(&args("--compare")).unwrap();
        check_bench(&args("--save")).unwrap();
    }

    #[test]
    fn a_baseline_that_does_not_fit_costs_nothing_that_was_measured() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut other = sample::run()[0].records[0].clone();
        other.params.insert("other".into(), 1.into());
        fs::write(path("base"), serde_json::to_string(&other).unwrap()).unwrap();
        let baseline = Baseline::read(&path("base")).unwrap();
        let words = ["bench", "--format", "csv", "--save"];
        let paths = [path("save"), "--html".into(), path("html")];
        let line = words.iter().map(OsString::from).chain(paths.map(PathBuf::into_os_string));
        let args = Only::<BenchArgs>::try_parse_from(line).unwrap().args;
        let file = |name| Some(OutFile::new(&path(name)).unwrap());
        let run = &sample::run()[..1];
        let error = deliver(run, Some(&baseline), &args, file("save"), file("html")).unwrap_err();
        assert!(error.to_string().contains("no case in common"), "{error}");
        assert_eq!(crate::fail::report(&error), 2);
        let saved = fs::read_to_string(path("save")).unwrap();
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
}
