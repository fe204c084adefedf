//! Reads one child process per backend, line by line. A crash loses only the column of its backend.

use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use record::{Card, Check, Line, Record};

use crate::fail::Fail;
use crate::process::describe;

/// Results of one backend.
#[derive(Debug, Clone, Default)]
pub(crate) struct Column {
    pub(crate) backend: String,
    pub(crate) card: Option<Card>,
    pub(crate) records: Vec<Record>,
    pub(crate) checks: Vec<Check>,
    /// Cases that the device cannot run, with the reason.
    pub(crate) skips: Vec<(String, String)>,
    /// Reason why the column is incomplete.
    pub(crate) broken: Option<String>,
}

impl Column {
    /// Adds the results of another process of the same backend.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.card = self.card.or(other.card);
        self.records.extend(other.records);
        self.checks.extend(other.checks);
        self.skips.extend(other.skips);
        self.broken = match (self.broken, other.broken) {
            (Some(one), Some(two)) => Some(format!("{one}; {two}")),
            (one, two) => one.or(two),
        };
        self
    }

    /// Cases that ran and failed, with the reason.
    pub(crate) fn failures(&self) -> impl Iterator<Item = (String, String)> {
        let records = self.records.iter().filter_map(|r| Some((r.case(), r.error.clone()?)));
        let checks = self.checks.iter().filter(|c| !c.passed).map(|c| (c.case(), why(c)));
        records.chain(checks)
    }

    /// Skipped cases grouped by reason, in order of first occurrence.
    pub(crate) fn skipped(&self) -> Vec<(&str, Vec<&str>)> {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (case, why) in &self.skips {
            match reasons.iter_mut().find(|(reason, _)| reason == why) {
                Some((_, cases)) => cases.push(case),
                None => reasons.push((why, vec![case])),
            }
        }
        reasons
    }
}

/// Joins the details of a failed check.
fn why(check: &Check) -> String {
    let mut parts: Vec<String> = check.error.iter().cloned().collect();
    match (check.max_err, check.tolerance) {
        (Some(err), Some(tolerance)) => {
            parts.push(format!("max error {err:.3e}, tolerance {tolerance:.3e}"));
        }
        _ if parts.is_empty() => parts.push("no error was reported".into()),
        _ => {}
    }
    parts.extend(check.config.iter().map(|config| format!("config {config}")));
    parts.join("; ")
}

/// Runs the command to its end and collects its output.
///
/// # Errors
/// The command cannot be started, or it refuses its input (exit code 2). A crash is not an error; it is stored in
/// [`Column::broken`].
pub(crate) fn gather(backend: &str, mut command: Command) -> Result<Column> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let progress = Progress::new(backend);
    let log = forward_log(&mut child, &progress)?;
    let mut reader = Reader { column: Column::default(), planned: None, running: None, done: 0 };
    reader.column.backend = backend.to_owned();

    let stdout = child.stdout.take().context("the program has no standard output")?;
    let mut garbled = None;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if let Err(why) = reader.line(&line, &progress) {
            garbled.get_or_insert(why);
        }
    }
    let status = child.wait()?;
    progress.finish();
    log.join().map_err(|_| anyhow::anyhow!("the thread that forwards the log panicked"))?;

    if status.code() == Some(2) {
        return Err(Fail::Child(2).into());
    }
    reader.column.broken = garbled.or_else(|| reader.verdict(status));
    Ok(reader.column)
}

/// Adds lines to a column.
struct Reader {
    column: Column,
    planned: Option<usize>,
    /// The case that has begun and not ended.
    running: Option<String>,
    done: usize,
}

impl Reader {
    fn line(&mut self, line: &str, progress: &Progress) -> Result<(), String> {
        if line.trim().is_empty() {
            return Ok(());
        }
        let parsed = serde_json::from_str(line).map_err(|why| {
            format!(
                "program printed a line that is not a record ({why}): {line}\nhint: remove \
                     logging to standard output from cubecl.toml"
            )
        })?;
        match parsed {
            Line::Card(card) => self.column.card = Some(card),
            Line::Plan { cases } => {
                self.planned = Some(cases);
                progress.plan(cases);
            }
            Line::Begin { case } => {
                progress.begin(self.done + 1, &case);
                self.running = Some(case);
            }
            Line::Record(record) => {
                self.column.records.push(record);
                self.end(progress);
            }
            Line::Check(check) => {
                self.column.checks.push(check);
                self.end(progress);
            }
            Line::Skip { case, reason } => {
                self.column.skips.push((case, reason));
                self.end(progress);
            }
        }
        Ok(())
    }

    fn end(&mut self, progress: &Progress) {
        self.running = None;
        self.done += 1;
        progress.end();
    }

    /// Reason why the column is incomplete, given the exit status of the process.
    fn verdict(&self, status: std::process::ExitStatus) -> Option<String> {
        let failed = self.column.failures().next().is_some();
        let explained = status.success() || (status.code() == Some(1) && failed);
        if !explained {
            let place = match &self.running {
                Some(case) => format!("in case {case}"),
                None => format!("after {} cases", self.done),
            };
            return Some(format!("program {} {place}", describe(status)));
        }
        match (&self.column.card, self.planned) {
            (None, _) => Some("program ended before it named its device".into()),
            (_, None) => Some("program ended before it reported the number of cases".into()),
            (_, Some(planned)) if planned != self.done => {
                Some(format!("program ended after {} of {planned} cases", self.done))
            }
            _ => None,
        }
    }
}

/// Forwards the log of the child without tearing the progress bar.
fn forward_log(child: &mut Child, progress: &Progress) -> Result<thread::JoinHandle<()>> {
    let stderr = child.stderr.take().context("the program has no standard error")?;
    let progress = progress.clone();
    Ok(thread::spawn(move || copy_log(stderr, &progress)))
}

/// Stops at the end of the stream or at the first read error. After an error the child loses its reader, which its exit
/// status then shows.
fn copy_log(stderr: impl Read, progress: &Progress) {
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        progress.log(&String::from_utf8_lossy(&line));
    }
}

/// Progress on standard error: a bar on a terminal, plain lines elsewhere.
#[derive(Clone)]
struct Progress {
    backend: String,
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new(backend: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(
                "{prefix:>7} [{bar:24}] {pos}/{len} {elapsed:>4} {wide_msg}",
            )
            .expect("the template is well formed");
            let bar = ProgressBar::new(1).with_style(style).with_prefix(backend.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar.set_message("starting");
            bar
        });
        Self { backend: backend.to_owned(), bar }
    }

    fn plan(&self, cases: usize) {
        match &self.bar {
            Some(bar) => bar.set_length(cases as u64),
            None => eprintln!("{}: {cases} cases", self.backend),
        }
    }

    fn begin(&self, number: usize, case: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(case.to_owned()),
            None => eprintln!("{} {number}: {case}", self.backend),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    fn log(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    /// Runs `gather` on a shell script that first prints these lines.
    fn run(lines: &[Line], then: &str) -> Result<Column> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text: Vec<_> = lines.iter().map(|l| serde_json::to_string(l).unwrap()).collect();
        std::fs::write(file.path(), text.join("\n") + "\n").unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("cat '{}'; {then}", file.path().display())]);
        gather("cuda", command)
    }

    fn lines() -> Vec<Line> {
        let run = sample::run();
        let column = &run[0];
        let record = column.records[0].clone();
        vec![
            Line::Card(column.card.clone().unwrap()),
            Line::Plan { cases: 2 },
            Line::Begin { case: record.case() },
            Line::Record(record),
            Line::Begin { case: "matmul f16 1x1x1".into() },
        ]
    }

    #[test]
    fn a_crash_names_its_case_and_keeps_what_was_measured() {
        let column = run(&lines(), "kill -SEGV $$").unwrap();
        assert_eq!(column.records.len(), 1);
        let why = "program ended by signal 11 (segmentation fault) in case matmul f16 1x1x1";
        assert_eq!(column.broken.as_deref(), Some(why));
    }

    #[test]
    fn a_complete_run_is_not_broken() {
        let mut lines = lines();
        lines.push(Line::Skip { case: "matmul f16 1x1x1".into(), reason: "no f16".into() });
        let column = run(&lines, "echo log >&2").unwrap();
        assert_eq!(column.broken, None);
        assert_eq!(column.skips, [("matmul f16 1x1x1".into(), "no f16".into())]);
    }

    #[test]
    fn exit_code_1_is_explained_by_a_failed_case_only() {
        let mut lines = lines();
        let Line::Record(mut failed) = lines[3].clone() else { panic!("not a record") };
        failed.error = Some("wrong result".into());
        lines.push(Line::Record(failed));
        assert_eq!(run(&lines, "exit 1").unwrap().broken, None);
        lines.pop();
        lines.push(Line::Skip { case: "x".into(), reason: "y".into() });
        let broken = run(&lines, "exit 1").unwrap().broken.unwrap();
        assert_eq!(broken, "program ended with exit code 1 after 2 cases");
    }

    #[test]
    fn a_run_that_stops_early_is_broken() {
        let broken = run(&lines(), "exit 0").unwrap().broken.unwrap();
        assert_eq!(broken, "program ended after 1 of 2 cases");
        let broken = run(&[], "exit 0").unwrap().broken.unwrap();
        assert_eq!(broken, "program ended before it named its device");
    }

    #[test]
    fn other_output_is_reported() {
        let broken = run(&lines(), "echo hello").unwrap().broken.unwrap();
        assert!(broken.contains("not a record") && broken.contains("hello\nhint: "), "{broken}");
    }

    #[test]
    fn refused_input_ends_the_whole_command() {
        let error = run(&[], "exit 2").unwrap_err();
        assert_eq!(crate::fail::report(&error), 2);
    }
}
