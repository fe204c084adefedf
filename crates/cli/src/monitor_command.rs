//! `flashover monitor`: samples the state of every device.

mod text;

use std::io::IsTerminal;
use std::process;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, bail};
use flashover::monitor::{Monitor, Reading, prometheus};
use text::{Screen, Table};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tune::timing::Stopwatch;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds between samples, from 0.01 to 86400
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    #[arg(allow_negative_numbers = true)]
    interval: Duration,
    /// Number of samples [default: until Ctrl-C]
    #[arg(long, value_name = "N", value_parser = count)]
    count: Option<u64>,
    /// Show only the device with this index in the output [default: all devices]
    #[arg(long, value_name = "INDEX")]
    device: Option<usize>,
    /// Print JSON, one line per reading
    #[arg(long, conflicts_with_all = ["csv", "prometheus"])]
    json: bool,
    /// Print CSV: a header, then one line per reading
    #[arg(long, conflicts_with = "prometheus")]
    csv: bool,
    /// Print one sample in the text format of Prometheus
    #[arg(long)]
    prometheus: bool,
}

/// Valid intervals in seconds: from one tick of the kernel's clock to one day.
const SECONDS: std::ops::RangeInclusive<f64> = 0.01..=86400.0;

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| SECONDS.contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        let (min, max) = (SECONDS.start(), SECONDS.end());
        format!(
            "expected an interval, got `{text}`\nhint: use seconds from {min} to {max}, such as 0.5"
        )
    })
}

fn count(text: &str) -> Result<u64, String> {
    let samples = text.parse::<u64>().ok().filter(|samples| *samples > 0);
    samples.ok_or_else(|| {
        format!("expected a number of samples, got `{text}`\nhint: use 1 or more, or omit --count to run until Ctrl-C")
    })
}

/// Delay before the first sample, ten ticks of the kernel's clock, because load is measured over time.
const FIRST: Duration = Duration::from_millis(100);

/// Output format of samples.
enum Shown {
    Live(Screen),
    Blocks,
    Json,
    Csv(Table),
    Prometheus,
}

impl Shown {
    fn from_args(args: &Args) -> Self {
        match (args.json, args.csv, args.prometheus) {
            (true, ..) => Self::Json,
            (_, true, _) => Self::Csv(Table::default()),
            (.., true) => Self::Prometheus,
            _ if std::io::stdout().is_terminal() => Self::Live(Screen::default()),
            _ => Self::Blocks,
        }
    }

    fn text(&mut self, time: &str, readings: &[Reading]) -> anyhow::Result<String> {
        Ok(match self {
            Self::Live(screen) => screen.frame(time, readings),
            Self::Blocks => text::blocks(time, readings, text::WIDTH),
            Self::Json => text::json(time, readings)?,
            Self::Csv(table) => table.rows(time, readings)?,
            Self::Prometheus => prometheus(readings),
        })
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.prometheus && args.count.is_some_and(|count| count > 1) {
        // The format allows the description of a metric only once.
        bail!(
            "--prometheus expects at most one sample\nhint: leave out --count and run the command once per sample"
        );
    }
    let stop = interrupts()?;
    let mut shown = Shown::from_args(args);
    let count = args.count.or(args.prometheus.then_some(1));
    let mut monitor = Monitor::open();
    let (clock, mut due) = (Stopwatch::start(), FIRST);
    let mut samples = 0;
    loop {
        match stop.recv_timeout(due.saturating_sub(clock.elapsed())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        let mut readings = monitor.sample();
        if let Some(index) = args.device {
            if !readings.iter().any(|reading| reading.index == index) {
                let named =
                    readings.iter().map(|Reading { index, name, .. }| format!("{index} is {name}"));
                let known = named.collect::<Vec<_>>().join(", ");
                bail!("unknown device {index}\nhint: {known}");
            }
            readings.retain(|reading| reading.index == index);
        }
        if samples == 0 {
            for lack in monitor.missing() {
                command::note!("note: {lack}");
            }
        }
        let time = OffsetDateTime::now_utc().replace_nanosecond(0)?.format(&Rfc3339)?;
        samples += 1;
        if !command::print_on(&shown.text(&time, &readings)?)? || Some(samples) == count {
            return Ok(());
        }
        // Samples that were missed during a slow one are skipped.
        due = (due + args.interval).max(clock.elapsed());
    }
}

/// Returns a channel that receives Ctrl-C. A second Ctrl-C ends the program, for the case that a driver hangs.
fn interrupts() -> anyhow::Result<Receiver<()>> {
    let (send, receive) = mpsc::sync_channel(1);
    ctrlc::set_handler(move || {
        if send.try_send(()).is_err() {
            process::exit(0);
        }
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(receive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds_within_reason() {
        assert_eq!(interval("0.1"), Ok(Duration::from_millis(100)));
        assert_eq!(interval("86400"), Ok(Duration::from_secs(86400)));
        for bad in ["0", "-1", "NaN", "inf", "1e300", "86401", "0.001", "1s", ""] {
            let said = interval(bad).expect_err(bad);
            assert!(said.contains("\nhint: use seconds from 0.01 to 86400"), "{said}");
        }
    }

    #[test]
    fn counts_are_1_or_more() {
        assert_eq!(count("3"), Ok(3));
        for bad in ["0", "-1", "1.5", "all", ""] {
            let said = count(bad).expect_err(bad);
            assert!(said.contains("\nhint: use 1 or more"), "{said}");
        }
    }
}
