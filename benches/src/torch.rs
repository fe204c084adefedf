//! Measures torch on the same cases and card, in a Python process that waits between our measurements.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;

/// A running Python with torch.
pub(crate) struct Torch {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

#[derive(Deserialize)]
struct Answer {
    version: Option<String>,
    ns: Option<f64>,
    error: Option<String>,
}

impl Torch {
    /// Starts `python`, which must have torch, triton and a CUDA device.
    ///
    /// # Errors
    /// `python` cannot be started or lacks a requirement.
    pub(crate) fn start(python: &str) -> anyhow::Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", include_str!("torch.py")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| anyhow!("cannot start `{python}`: {e}\nhint: set --torch to a Python"))?;
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut torch = Self { child, input, output };
        match torch.answer()? {
            Answer { version: Some(version), .. } => eprintln!("also measuring torch {version}"),
            Answer { error, .. } => bail!(
                "`{python}` cannot measure torch: {}\nhint: install torch, triton and CUDA for it",
                error.unwrap_or_default()
            ),
        }
        Ok(torch)
    }

    /// Times torch on `sets` sets of operands of `case`. Returns the median in nanoseconds.
    ///
    /// # Errors
    /// The process has ended, or torch failed.
    pub(crate) fn measure(&mut self, mut case: Value, sets: usize) -> anyhow::Result<f64> {
        case["sets"] = sets.into();
        writeln!(self.input, "{case}").context("the torch process ended")?;
        match self.answer()? {
            Answer { ns: Some(ns), .. } => Ok(ns),
            Answer { error, .. } => bail!("torch: {}", error.unwrap_or_default()),
        }
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("the torch process ended")?;
        serde_json::from_str(&line)
            .with_context(|| format!("unexpected line from the torch process: `{}`", line.trim()))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // A drop cannot report an error, and the process may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
