//! `cargo xtask bench`: measure on every chosen backend, print, save, compare.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::cli::{BenchArgs, Format, word};
use crate::compare::{Baseline, Comparison};
use crate::devices::{Backend, Chosen, Doctor, Selection};
use crate::fail::{check, usage};
use crate::place::Place;
use crate::programs::Programs;
use crate::report::{self, Style};
use crate::setup::{Cuda, Wants};
use crate::stream::{self, Column};

/// Everything cheap is checked before the programs are built.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let place = Place::find()?;
    let baseline = args.compare.as_deref().map(Baseline::read).transpose()?;
    for file in args.save.iter().chain(&args.html) {
        check_target(file)?;
    }
    let (programs, _) = Programs::ready(&place, wants(&args.backend))?;
    let chosen = Doctor::ask(&programs)?.choose(&args.backend, args.require_gpu)?;
    eprintln!("{chosen}");
    if let Some(filter) = &args.filter {
        programs.check_filter(&word(args.suite), filter)?;
    }
    if let Some(baseline) = &baseline {
        baseline.check_devices(&chosen, args.profile.as_deref())?;
    }

    let run = measure(&programs, &chosen, args)?;
    let now: Vec<_> = run.iter().flat_map(|column| column.records.iter().cloned()).collect();
    // A file that cannot be written must not cost what was measured.
    let comparison =
        baseline.map(|baseline| baseline.compare(&now, args.threshold / 100.0)).transpose()?;
    print(&run, comparison.as_ref(), args.format)?;
    if let Some(file) = &args.save {
        let lines: Vec<_> = now.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        write_atomically(file, &(lines.join("\n") + "\n"))?;
        eprintln!("saved {} records to {}", now.len(), file.display());
    }
    if let Some(file) = &args.html {
        write_atomically(
            file,
            &report::page(&run, comparison.as_ref().map(Comparison::table).as_ref()),
        )?;
        eprintln!("wrote {}", file.display());
    }
    verdict(&run, comparison.as_ref())
}

/// What backends of this selection need on the machine.
pub(crate) fn wants(selection: &Selection) -> Wants {
    let cuda =
        if selection.may_include(Backend::Cuda) { Cuda::WithDriver } else { Cuda::Installed };
    Wants { cuda, gl: selection.may_include(Backend::Webgpu) }
}

/// One process per backend, one after the other so that they do not disturb each other's times.
fn measure(programs: &Programs, chosen: &Chosen, args: &BenchArgs) -> Result<Vec<Column>> {
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
    print_all(&text)
}

/// Prints, and ends quietly when the reader has gone away, as `head` does.
pub(crate) fn print_all(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
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
        match column.failures().count() {
            0 => {}
            1 => wrong.push(format!("{}: 1 case failed", column.backend)),
            n => wrong.push(format!("{}: {n} cases failed", column.backend)),
        }
        if let Some(why) = &column.broken {
            wrong.push(format!("{}: {why}", column.backend));
        }
    }
    wrong
}

/// Refuses a file that could not be written after the run.
fn check_target(file: &Path) -> Result<()> {
    if file.is_dir() {
        return Err(usage(format!("{} is a folder", file.display()), "name a file"));
    }
    let parent = folder_of(file);
    if !parent.is_dir() {
        return Err(usage(
            format!(
                "{} cannot be written: there is no folder {}",
                file.display(),
                parent.display()
            ),
            format!("make it with `mkdir -p {}`", parent.display()),
        ));
    }
    Ok(())
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes beside the target and renames, so that no half-written file is ever seen.
pub(crate) fn write_atomically(file: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let write = || -> std::io::Result<()> {
        let mut temporary = tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o644))
            .tempfile_in(folder_of(file))?;
        temporary.write_all(text.as_bytes())?;
        temporary.as_file().sync_all()?;
        temporary.persist(file).map_err(|error| error.error)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn an_impossible_target_is_refused_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let code = |file: &Path| crate::fail::report(&check_target(file).unwrap_err());
        assert_eq!(code(dir.path()), 2);
        assert_eq!(code(&dir.path().join("absent/x.jsonl")), 2);
        assert!(check_target(&dir.path().join("x.jsonl")).is_ok());
        assert!(check_target(Path::new("x.jsonl")).is_ok());
    }

    #[test]
    fn writing_replaces_the_whole_file_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.jsonl");
        write_atomically(&file, "a longer first version").unwrap();
        write_atomically(&file, "second").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "second");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn failures_and_crashes_end_the_command_with_1() {
        let error = verdict(&sample::run(), None).unwrap_err();
        assert_eq!(crate::fail::report(&error), 1);
        let text = error.to_string();
        assert!(text.contains("cpu: 1 case failed; cpu: program ended by signal 9"), "{text}");
        assert!(verdict(&sample::run()[..1], None).is_ok());
    }

    #[test]
    fn a_choice_that_leaves_nothing_to_measure_is_the_callers_error() {
        let column = |skips: &[(&str, &str)]| Column {
            backend: "cpu".into(),
            skips: skips.iter().map(|(case, why)| ((*case).into(), (*why).into())).collect(),
            ..Column::default()
        };
        let skipped = column(&[("all cases", "no case for this device matches `x`")]);
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
