//! Runs `flashover` on one model, in one process per measurement, so that a crash loses only one subject.

use std::process::{Command, Output, Stdio};

use anyhow::Result;
use flashover::Backend;
use report::{CompareArgs, describe};
use serde::{Deserialize, Serialize};

use super::numbers::Logits;
use super::subject::Subject;

/// Repetitions of a speed test, after one warm-up run.
const REPETITIONS: &str = "3";

/// A model with the load options that all subjects share.
pub(super) struct Model<'a> {
    /// Returns a command that starts `flashover`.
    pub(super) flashover: &'a dyn Fn() -> Result<Command>,
    pub(super) args: &'a CompareArgs,
}

/// Reason that a subject has no result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Failure {
    /// The reason in one line.
    pub(super) what: String,
    /// The whole message with its hint, if the program refused its input.
    pub(super) refusal: Option<String>,
}

impl From<String> for Failure {
    fn from(what: String) -> Self {
        Self { what, refusal: None }
    }
}

/// Speed of a subject and its precision.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Speed {
    pub(super) compute: String,
    pub(super) quant: Option<String>,
    /// Format of the KV cache.
    pub(super) kv: String,
    pub(super) prompt: Rate,
    pub(super) generate: Rate,
}

/// Tokens per second of a test.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Rate {
    pub(super) tokens: usize,
    pub(super) mean: f64,
    pub(super) deviation: f64,
}

impl Model<'_> {
    /// Generates greedy tokens after a prompt.
    pub(super) fn greedy(&self, on: Subject, prompt: &[u32]) -> Result<Vec<u32>, Failure> {
        let max = self.args.max_new_tokens.to_string();
        let greedy = ["--temperature", "0", "--repetition-penalty", "1", "--ignore-eos"];
        let tokens = ["--max-new-tokens", &max, "--tokens", &list(prompt)];
        let output = self.run(on, "generate", &[&greedy[..], &tokens].concat())?;
        for line in String::from_utf8_lossy(&output.stderr).lines() {
            command::note!("{on}: {line}");
        }
        let printed = String::from_utf8_lossy(&output.stdout);
        Ok(ids(&printed).map_err(|why| format!("cannot parse the output of generate: {why}"))?)
    }

    /// Computes the logits after each token. Each window starts from an empty KV cache.
    pub(super) fn logits(
        &self,
        on: Subject,
        tokens: &[u32],
        window: usize,
    ) -> Result<Logits, Failure> {
        let (list, window) = (list(tokens), window.to_string());
        let args = ["--tokens", &list, "--window", &window, "--output", "/dev/stdout"];
        let output = self.run(on, "logits", &args)?;
        Ok(Logits::read(&output.stdout, tokens.len())?)
    }

    /// Measures the prefill of `prompt` tokens and the decode of `generated` tokens.
    pub(super) fn speed(
        &self,
        on: Subject,
        prompt: usize,
        generated: usize,
    ) -> Result<Speed, Failure> {
        let (prompt, generated) = (prompt.to_string(), generated.to_string());
        let tests = ["-p", &prompt, "-n", &generated, "-r", REPETITIONS, "--format", "json"];
        let output = self.run(on, "bench", &tests)?;
        Ok(speed(&output.stdout)
            .map_err(|why| format!("cannot parse the output of bench: {why}"))?)
    }

    fn run(&self, on: Subject, name: &str, more: &[&str]) -> Result<Output, Failure> {
        let mut command = (self.flashover)().map_err(|why| format!("{why:#}"))?;
        command.arg(name).arg("--model").arg(self.args.model());
        command.args(["--backend", on.backend.name(), "--kv-cache", on.kv]);
        let profile = self.args.profile.as_deref().filter(|_| on.backend == Backend::Cuda);
        let options = [
            ("--dtype", self.args.dtype.as_deref()),
            ("--quant", Some(on.quant).filter(|quant| *quant != "none")),
            ("--profile", profile),
        ];
        command.args(options.iter().filter_map(|(name, value)| Some([*name, (*value)?])).flatten());
        let output = command.args(more).stdin(Stdio::null()).output();
        let output = output.map_err(|why| format!("cannot start flashover: {why}"))?;
        if output.status.success() {
            return Ok(output);
        }
        let log = String::from_utf8_lossy(&output.stderr);
        let end = format!("flashover {name} {}", describe(output.status));
        let failure = failure(&log, output.status.code(), &end);
        if failure.refusal.is_none() {
            command::note!("{on}: {end}\n{}", log.trim_end());
        }
        Err(failure)
    }
}

/// Extracts the text after `error: ` from a log. Without one, uses `end`, the description of the exit status.
fn failure(log: &str, code: Option<i32>, end: &str) -> Failure {
    let first = log.strip_prefix("error: ");
    let Some(said) = first.or_else(|| Some(log.split_once("\nerror: ")?.1)) else {
        return end.to_owned().into();
    };
    Failure {
        what: said.lines().next().unwrap_or_default().to_owned(),
        refusal: (code == Some(2)).then(|| said.trim_end().to_owned()),
    }
}

/// Reads the rows of the prefill test and of the decode test.
fn speed(printed: &[u8]) -> serde_json::Result<Speed> {
    #[derive(Deserialize)]
    struct Row {
        compute: String,
        quant: Option<String>,
        kv: String,
        n_prompt: usize,
        n_gen: usize,
        avg_ts: f64,
        stddev_ts: f64,
    }
    let [prompt, generate]: [Row; 2] = serde_json::from_slice(printed)?;
    let rate = |row: &Row, tokens| Rate { tokens, mean: row.avg_ts, deviation: row.stddev_ts };
    Ok(Speed {
        prompt: rate(&prompt, prompt.n_prompt),
        generate: rate(&generate, generate.n_gen),
        compute: generate.compute,
        quant: generate.quant,
        kv: generate.kv,
    })
}

/// Formats ids as `1,2,3`.
fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Parses ids that [`list`] formatted. An empty line contains no ids.
fn ids(printed: &str) -> Result<Vec<u32>, String> {
    let parts = printed.trim().split(',').filter(|part| !part.is_empty());
    parts.map(|id| id.parse().map_err(|_| format!("expected a token id, got `{id}`"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_the_first_line_of_an_error() {
        let refused = "[WARN x] error: none yet\nerror: no f16\nhint: f32\n";
        let said = failure(refused, Some(2), "ended with exit code 2");
        let want = Failure { what: "no f16".into(), refusal: Some("no f16\nhint: f32".into()) };
        assert_eq!(said, want);
        let died = failure("loading\n", None, "ended by signal 9 (killed)");
        assert_eq!(died, String::from("ended by signal 9 (killed)").into());
        assert_eq!(failure("error: disk\n", Some(1), "").refusal, None, "no refusal");
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        assert_eq!(ids(&(list(&[1, 22, 3]) + "\n")), Ok(vec![1, 22, 3]));
        assert_eq!(ids("\n"), Ok(vec![]));
        assert_eq!(ids("1,Once").unwrap_err(), "expected a token id, got `Once`");
    }

    #[test]
    fn speeds_are_those_of_the_two_tests() {
        let row = |prompt: u32, generated: u32, rate: f64| {
            serde_json::json!({ "compute": "bf16", "quant": "4-bit", "kv": "int8", "n_prompt": prompt,
                "n_gen": generated, "avg_ts": rate, "stddev_ts": 0.5, "mfu": null })
        };
        let both = serde_json::json!([row(4, 0, 300.0), row(0, 64, 20.0)]);
        let have = speed(both.to_string().as_bytes()).unwrap();
        let rate = |tokens, mean| Rate { tokens, mean, deviation: 0.5 };
        assert_eq!((have.prompt, have.generate), (rate(4, 300.0), rate(64, 20.0)));
        assert_eq!((have.compute.as_str(), have.quant.as_deref()), ("bf16", Some("4-bit")));
        assert!(speed(b"[]").is_err());
        let broken = serde_json::json!([row(4, 0, 1.0), row(0, 64, f64::NAN)]);
        assert!(speed(broken.to_string().as_bytes()).is_err(), "no rate is no speed");
    }
}
