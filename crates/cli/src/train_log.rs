//! Progress and log of `flashover train`.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use flashover::bench::Ceilings;
use flashover::memory::{MemoryUsage, Plan};
use flashover::train::StepMetrics;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::model_args::bar;

/// A file of JSON lines. The first failure to write is kept until the end.
pub(crate) struct Log {
    file: BufWriter<File>,
    path: PathBuf,
    /// Measured peak of matmuls, in FLOP/s; none if the backend cannot measure it.
    peak: Option<f64>,
    ended: io::Result<()>,
}

impl Log {
    /// Opens the file. A run that goes on appends to its log.
    pub(crate) fn open(path: &Path, ceilings: Ceilings, goes_on: bool) -> anyhow::Result<Self> {
        let mut options = OpenOptions::new();
        options.create(true).write(true).append(goes_on).truncate(!goes_on);
        let file = options.open(path).with_context(|| {
            format!("cannot write {}\nhint: choose another --log", path.display())
        })?;
        let peak = ceilings.gflops.map(|gflops| gflops * 1e9);
        let (file, path) = (BufWriter::new(file), path.to_owned());
        Ok(Self { file, path, peak, ended: Ok(()) })
    }

    /// Writes a line with the measured peak and the planned memory by part.
    pub(crate) fn planned(&mut self, plan: &Plan) {
        let parts = plan.parts().into_iter().map(|(name, bytes)| (name.to_owned(), bytes.into()));
        self.line(&json!({
            "device": plan.device,
            "peak_tflops": self.peak.map(|peak| peak / 1e12),
            "planned_bytes": parts.collect::<Map<_, _>>(),
            "host_bytes": plan.host_bytes,
        }));
    }

    /// Returns the share of the measured peak; none if it is unknown.
    pub(crate) fn of_peak(&self, flops: u64, seconds: f64) -> Option<f64> {
        self.peak.map(|peak| flops as f64 / seconds / peak)
    }

    pub(crate) fn step(&mut self, metrics: &StepMetrics, seconds: f64, memory: MemoryUsage) {
        let StepMetrics { step, loss, tokens, gradient, learning_rate, skipped, .. } = metrics;
        let of_peak = |flops: u64| self.of_peak(flops, seconds);
        self.line(&json!({
            "step": step,
            "loss": loss,
            "gradient_norm": gradient,
            "learning_rate": learning_rate,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": *tokens as f64 / seconds,
            "model_tflops": metrics.model_flops as f64 / seconds / 1e12,
            "mfu": of_peak(metrics.model_flops),
            "hfu": of_peak(metrics.device_flops),
            "skipped": skipped,
            "used_bytes": memory.used_bytes,
            "reserved_bytes": memory.reserved_bytes,
        }));
    }

    pub(crate) fn held_out(&mut self, step: usize, loss: f64) {
        self.line(&json!({ "step": step, "held_out_loss": loss }));
    }

    /// Writes a line.
    pub(crate) fn line(&mut self, value: &Value) {
        if self.ended.is_ok() {
            self.ended = writeln!(self.file, "{value}").and_then(|()| self.file.flush());
        }
    }

    pub(crate) fn finish(self) -> anyhow::Result<()> {
        let Self { path, ended, .. } = self;
        ended.with_context(|| format!("cannot write {}\nhint: free some space", path.display()))
    }
}

/// Progress of the steps: a bar at a terminal, else a line for each step.
pub(crate) struct Progress {
    steps: usize,
    bar: Option<ProgressBar>,
}

impl Progress {
    pub(crate) fn new(done: usize, steps: usize) -> anyhow::Result<Self> {
        if !io::stderr().is_terminal() {
            return Ok(Self { steps, bar: None });
        }
        let bar = bar("{wide_bar} step {pos} of {len}{msg}, {eta} left")?;
        bar.set_length(steps as u64);
        bar.set_position(done as u64);
        bar.reset_eta();
        Ok(Self { steps, bar: Some(bar) })
    }

    pub(crate) fn step(&self, metrics: &StepMetrics, seconds: f64) {
        let StepMetrics { step, loss, tokens, gradient, learning_rate, skipped, .. } = metrics;
        let rate = *tokens as f64 / seconds;
        let skipped = if *skipped { "; skipped, the gradient left the range of f16" } else { "" };
        match &self.bar {
            Some(bar) => {
                bar.set_position(*step as u64);
                bar.set_message(format!(
                    ": loss {loss:.4}, gradient {gradient:.3}, {rate:.0} tokens/s{skipped}"
                ));
            }
            None => command::note!(
                "step {step} of {}: loss {loss:.4}, gradient {gradient:.3}, rate {learning_rate:.2e}, {}, {rate:.0} \
                 tokens/s{skipped}",
                self.steps,
                command::count(*tokens, "token")
            ),
        }
    }

    /// Prints a line above the bar.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| command::note!("{text}")),
            None => command::note!("{text}"),
        }
    }

    pub(crate) fn finish(&self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}
