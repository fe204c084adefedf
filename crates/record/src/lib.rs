//! JSON lines of a bench run, and options that several programs share.
//!
//! The lines are the only interface between the process that measures and its readers (`report`, scripts). A run
//! prints a stream of [`Line`]s to standard output: one [`Line::Card`], one [`Line::Plan`], then a
//! [`Line::Record`] or [`Line::Skip`] per case. A saved baseline contains only the records, one per line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

mod choice;
mod stats;
pub use choice::{Backend, DTYPES, PROFILES, Policy, Suite, UnknownChoice};
pub use stats::Summary;

/// Schema version, incremented when a field changes meaning; a reader refuses other versions.
pub const SCHEMA: u32 = 1;

/// One line of a run's standard output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[expect(
    clippy::large_enum_variant,
    reason = "lines are printed and dropped, never stored in bulk"
)]
pub enum Line {
    /// The device under test; always first.
    Card(Card),
    /// Number of cases that follow, for a progress bar.
    Plan { cases: usize },
    /// A case is about to run.
    Begin { case: String },
    /// A measured case, or one that failed (no times, `error` set).
    Record(Record),
    /// A case that this device cannot run, with the reason.
    Skip { case: String, reason: String },
    /// One shape checked against the reference by `verify`.
    Check(Check),
}

/// Facts about the device that readers of a figure need.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// `cuda`, `vulkan`, `webgpu` or `cpu`.
    pub backend: String,
    /// Name from the driver.
    pub name: String,
    pub arch_id: String,
    /// Profile that restricts the run, if one was requested.
    pub profile: Option<String>,
    pub driver: Option<String>,
    /// Versions of compilers and runtimes of kernels (CUDA, NVRTC, Vulkan, LLVM), by name.
    pub versions: BTreeMap<String, String>,
    pub memory_bytes: Option<u64>,
    /// Clock speeds, power limit and temperature by name, as far as the device reports them.
    pub clocks: BTreeMap<String, String>,
    pub commit: String,
    pub dirty: bool,
    /// UTC, RFC 3339.
    pub date: String,
    /// Measured rate of device-to-device copies in GB/s, reads plus writes, at the 10th percentile of the times.
    pub copy_gbps: Option<f64>,
    /// Measured matmul rate from registers in TFLOP/s, by precision (`bf16`, `f32`, ...), at the 10th percentile.
    pub peak_tflops: BTreeMap<String, f64>,
}

/// One measured case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub schema: u32,
    /// Name of a kernel, such as `matmul`, or of a ceiling: `copy` or `mma`.
    pub op: String,
    /// Parameters of the op: m, n, k, lhs, rhs, dtype, batch, heads, ...
    pub params: BTreeMap<String, Value>,
    pub backend: String,
    pub arch_id: String,
    pub profile: Option<String>,
    /// Median time of one launch in nanoseconds; `None` if the case failed. Likewise the quantiles below.
    pub median_ns: Option<f64>,
    pub p10_ns: Option<f64>,
    pub p90_ns: Option<f64>,
    /// 95th percentile, only for requests to a model.
    #[serde(default)]
    pub p95_ns: Option<f64>,
    pub samples: usize,
    /// Clock of the times: `device` (timestamps of the device) or `host`.
    pub clock: String,
    pub flops: u64,
    /// Minimum bytes to move: every input read once, every output written once.
    pub bytes: u64,
    pub tflops: Option<f64>,
    pub gbps: Option<f64>,
    /// Achieved share of the tighter of the two measured ceilings of this device. It may exceed 1 if a case
    /// is faster than the copy because it stays in the caches.
    pub share_of_ceiling: Option<f64>,
    /// Bytes in the device's memory pools after a case of a model.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Median nanoseconds of other implementations of the same case in the same run.
    pub peers: BTreeMap<String, f64>,
    /// Clock that timed a peer, if it differs from `clock`.
    #[serde(default)]
    pub peer_clocks: BTreeMap<String, String>,
    /// Largest absolute error against the f64 reference; it must not exceed `tolerance`.
    pub max_err: Option<f64>,
    pub tolerance: Option<f64>,
    pub config: Option<Value>,
    /// Origin of the config: `tuned`, `recorded`, `default`.
    pub config_source: Option<String>,
    /// Reason that the case has no time.
    pub error: Option<String>,
    pub commit: String,
    pub dirty: bool,
    /// UTC, RFC 3339.
    pub date: String,
}

impl Record {
    /// Makes a record with the facts of `card` and without measurements.
    pub fn new(
        card: &Card,
        op: &str,
        params: BTreeMap<String, Value>,
        flops: u64,
        bytes: u64,
    ) -> Self {
        Self {
            schema: SCHEMA,
            op: op.to_owned(),
            params,
            backend: card.backend.clone(),
            arch_id: card.arch_id.clone(),
            profile: card.profile.clone(),
            median_ns: None,
            p10_ns: None,
            p90_ns: None,
            p95_ns: None,
            samples: 0,
            clock: String::new(),
            flops,
            bytes,
            tflops: None,
            gbps: None,
            share_of_ceiling: None,
            memory_bytes: None,
            peers: BTreeMap::new(),
            peer_clocks: BTreeMap::new(),
            max_err: None,
            tolerance: None,
            config: None,
            config_source: None,
            error: None,
            commit: card.commit.clone(),
            dirty: card.dirty,
            date: card.date.clone(),
        }
    }

    /// Sets the quantiles of `samples_ns` and the rates at the median.
    ///
    /// # Errors
    /// The samples are empty, or one is not finite.
    pub fn set_times(&mut self, samples_ns: &[f64], clock: &str) -> Result<(), String> {
        let Some(Summary { median, p10, p90, samples, .. }) = Summary::from_samples(samples_ns)
        else {
            return Err("the clock returned no finite time".to_owned());
        };
        (self.median_ns, self.p10_ns, self.p90_ns) = (Some(median), Some(p10), Some(p90));
        self.samples = samples;
        self.clock = clock.to_owned();
        // Operations per nanosecond are GFLOP/s, bytes per nanosecond are GB/s.
        self.tflops = (self.flops > 0).then(|| self.flops as f64 / median / 1e3);
        self.gbps = (self.bytes > 0).then(|| self.bytes as f64 / median);
        Ok(())
    }

    /// Sets [`share_of_ceiling`](Self::share_of_ceiling): the time at the tighter ceiling of `card` divided by the
    /// measured time. Vulkan has no measurable register-level ceiling: only bandwidth counts there, and a
    /// compute-bound case has no share.
    pub fn set_share(&mut self, card: &Card, precision: &str) {
        self.share_of_ceiling = self.share(card, precision);
    }

    fn share(&self, card: &Card, precision: &str) -> Option<f64> {
        let median = self.median_ns?;
        let moving = self.bytes as f64 / card.copy_gbps?;
        // A CPU converts every precision to f32 before it multiplies.
        let unit = if card.backend == "cpu" { "f32" } else { precision };
        let computing = match card.peak_tflops.get(unit) {
            Some(peak) => self.flops as f64 / (peak * 1e3),
            None if self.flops > 200 * self.bytes => return None,
            None => 0.0,
        };
        Some(moving.max(computing) / median)
    }

    /// Returns the op and its parameters in a fixed order: `matmul bf16 4096x4096x4096 rhs=col`.
    pub fn case(&self) -> String {
        case_name(&self.op, &self.params)
    }

    /// Returns the known quantiles by name, lowest first, in nanoseconds.
    fn quantiles(&self) -> impl Iterator<Item = (&str, f64)> {
        let all = [
            ("p10_ns", self.p10_ns),
            ("median_ns", self.median_ns),
            ("p90_ns", self.p90_ns),
            ("p95_ns", self.p95_ns),
        ];
        all.into_iter().filter_map(|(name, ns)| Some((name, ns?)))
    }

    /// Returns all times by name, in nanoseconds.
    fn times(&self) -> impl Iterator<Item = (&str, f64)> {
        self.quantiles().chain(self.peers.iter().map(|(name, ns)| (name.as_str(), *ns)))
    }

    /// Returns the key that two records must share to be compared.
    pub fn key(&self) -> Key {
        Key {
            case: self.case(),
            backend: self.backend.clone(),
            arch_id: self.arch_id.clone(),
            profile: self.profile.clone(),
        }
    }
}

/// Identity of a case across runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub case: String,
    pub backend: String,
    pub arch_id: String,
    pub profile: Option<String>,
}

/// Result of one verified shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    pub op: String,
    pub params: BTreeMap<String, Value>,
    pub backend: String,
    pub config: Option<Value>,
    pub max_err: Option<f64>,
    pub tolerance: Option<f64>,
    pub passed: bool,
    pub error: Option<String>,
    /// FNV-1a hash of the output bytes, to find backends that agree bit for bit.
    pub digest: Option<String>,
}

impl Check {
    /// Returns the name of the case, like [`Record::case`].
    pub fn case(&self) -> String {
        case_name(&self.op, &self.params)
    }
}

/// Summary of the checks of one kernel on one backend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    pub schema: u32,
    /// A kernel's name, such as `matmul`.
    pub op: String,
    pub backend: String,
    pub arch_id: String,
    pub profile: Option<String>,
    pub checks: usize,
    pub passed: usize,
    /// Number of cases that no config of the device can run; `None` in older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<usize>,
    /// Largest ratio of error to tolerance among the checks; `worst_case` names that check.
    pub worst_used: Option<f64>,
    pub worst_case: Option<String>,
    /// True if every candidate config ran, not only the default and the measured ones.
    pub configs: bool,
    pub filter: Option<String>,
    /// Tool of compute-sanitizer that checked the run. It found nothing unless `broken` says so.
    pub sanitizer: Option<String>,
    /// Reason that the run is incomplete or has sanitizer findings.
    pub broken: Option<String>,
    pub commit: String,
    pub dirty: bool,
    /// UTC, RFC 3339.
    pub date: String,
}

/// Name of the skipped case if the device or a filter leaves no case.
pub const ALL_CASES: &str = "all cases";

/// Formats the name of a case: op, dtype, sizes as `MxNxK`, then the rest as `name=value`.
pub fn case_name(op: &str, params: &BTreeMap<String, Value>) -> String {
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let mut out = op.to_owned();
    if let Some(dtype) = params.get("dtype") {
        out += &format!(" {}", text(dtype));
    }
    let mnk: Vec<_> = ["m", "n", "k"].iter().filter_map(|s| params.get(*s)).map(text).collect();
    if mnk.len() == 3 {
        out += &format!(" {}", mnk.join("x"));
    }
    for (name, value) in params {
        let size = mnk.len() == 3 && matches!(name.as_str(), "m" | "n" | "k");
        if name != "dtype" && !size {
            out += &format!(" {name}={}", text(value));
        }
    }
    out
}

/// The reason that a baseline cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Line number from 1, and the reason.
    #[error("line {0} is not a bench record: {1}")]
    Malformed(usize, String),
    /// Line number from 1, and the schema found there.
    #[error("line {0} has schema {1}, but this version reads schema {SCHEMA}")]
    Foreign(usize, u64),
    /// The file contains no record.
    #[error("the file contains no bench records")]
    Empty,
}

/// Reads a baseline: one record per line, blank lines allowed.
///
/// # Errors
/// The first line that is not a valid record of this [`SCHEMA`], or a file without records.
pub fn read_baseline(text: &str) -> Result<Vec<Record>, ReadError> {
    let mut records = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let value: Value =
            serde_json::from_str(line).map_err(|e| ReadError::Malformed(i + 1, e.to_string()))?;
        match value.get("schema").and_then(Value::as_u64) {
            Some(found) if found == u64::from(SCHEMA) => {}
            Some(found) => return Err(ReadError::Foreign(i + 1, found)),
            None => return Err(ReadError::Malformed(i + 1, "no `schema` field".into())),
        }
        let record: Record = serde_json::from_value(value)
            .map_err(|e| ReadError::Malformed(i + 1, e.to_string()))?;
        if let Some((name, ns)) = record.times().find(|(_, ns)| !(ns.is_finite() && *ns > 0.0)) {
            return Err(ReadError::Malformed(
                i + 1,
                format!("expected a finite time above 0 for {name}, got {ns}"),
            ));
        }
        if !record.quantiles().is_sorted_by_key(|(_, ns)| ns) {
            let said: Vec<_> =
                record.quantiles().map(|(name, ns)| format!("{name} {ns}")).collect();
            let why = format!("{} are not in ascending order", said.join(", "));
            return Err(ReadError::Malformed(i + 1, why));
        }
        records.push(record);
    }
    if records.is_empty() { Err(ReadError::Empty) } else { Ok(records) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_names_put_sizes_first() {
        let params = BTreeMap::from([
            ("m".into(), 8.into()),
            ("n".into(), 16.into()),
            ("k".into(), 4.into()),
            ("dtype".into(), "bf16".into()),
            ("rhs".into(), "col".into()),
        ]);
        assert_eq!(case_name("matmul", &params), "matmul bf16 8x16x4 rhs=col");
    }

    fn card() -> Card {
        Card {
            backend: "cuda".to_owned(),
            name: "card".to_owned(),
            arch_id: "cuda-sm90-132".to_owned(),
            profile: None,
            driver: None,
            versions: BTreeMap::new(),
            memory_bytes: None,
            clocks: BTreeMap::new(),
            commit: "c".to_owned(),
            dirty: false,
            date: "d".to_owned(),
            copy_gbps: Some(100.0),
            peak_tflops: BTreeMap::from([("bf16".to_owned(), 10.0)]),
        }
    }

    #[test]
    fn a_share_is_of_the_tighter_ceiling() {
        let share = |bytes, flops| {
            let mut record = Record::new(&card(), "matmul", BTreeMap::new(), flops, bytes);
            record.median_ns = Some(100.0);
            record.set_share(&card(), "bf16");
            record.share_of_ceiling
        };
        // 50 ns of memory time and 10 ns of compute, then the reverse.
        assert_eq!(share(5_000, 100_000), Some(0.5));
        assert_eq!(share(1_000, 500_000), Some(0.5));
    }

    #[test]
    fn times_without_a_finite_sample_are_refused() {
        let mut record = Record::new(&card(), "copy", BTreeMap::new(), 0, 1000);
        record.set_times(&[f64::NAN], "host").expect_err("no time");
        assert_eq!(record.median_ns, None);
        record.set_times(&[1.0, 1.0, 9.0, 10.0, 30.0], "host").expect("finite");
        assert_eq!((record.gbps, record.tflops), (Some(1000.0 / 9.0), None));
    }

    #[test]
    fn foreign_and_broken_baselines_are_named_by_line() {
        assert!(matches!(read_baseline("\n\n"), Err(ReadError::Empty)));
        assert!(matches!(read_baseline("\n{"), Err(ReadError::Malformed(2, _))));
        assert!(matches!(read_baseline("{\"schema\":99}"), Err(ReadError::Foreign(1, 99))));
        let text = read_baseline("{\"schema\":4294967297}").expect_err("foreign").to_string();
        assert!(text.contains("has schema 4294967297"), "{text}");
        assert!(matches!(read_baseline("{\"a\":1}"), Err(ReadError::Malformed(1, _))));
    }

    #[test]
    fn a_time_that_cannot_be_is_refused() {
        let line = |times: &str| {
            format!(
                r#"{{"schema":{SCHEMA},"op":"copy","params":{{}},"backend":"cpu","arch_id":"x",{times},
                "samples":5,"clock":"host","flops":0,"bytes":8,"commit":"c","dirty":false,"date":"d"}}"#
            )
            .replace('\n', " ")
        };
        let read = |times: &str| read_baseline(&line(times)).map_err(|e| e.to_string());
        let good = r#""median_ns":2.0,"p10_ns":1.0,"p90_ns":3.0,"peers":{"torch":2.0}"#;
        assert!(read(good).is_ok(), "{:?}", read(good));
        assert!(read(r#""median_ns":null,"peers":{}"#).is_ok(), "a case that failed has no time");
        let crossed = read(&good.replace("3.0", "1.5")).expect_err("p90 below the median");
        assert!(crossed.ends_with("are not in ascending order"), "{crossed}");
        let late = |p95: &str| read(&format!(r#"{good},"p95_ns":{p95}"#));
        assert!(late("3.5").is_ok());
        let crossed = late("2.5").expect_err("p95 below p90");
        assert!(crossed.ends_with("p90_ns 3, p95_ns 2.5 are not in ascending order"), "{crossed}");
        for (from, to, name) in [
            (r#""median_ns":2.0"#, r#""median_ns":-2.0"#, "median_ns, got -2"),
            (r#""p10_ns":1.0"#, r#""p10_ns":0.0"#, "p10_ns, got 0"),
            (r#""torch":2.0"#, r#""torch":-1.5"#, "torch, got -1.5"),
        ] {
            let error = read(&good.replace(from, to)).expect_err("no such time");
            assert!(error.ends_with(&format!("above 0 for {name}")), "{error}");
        }
    }
}
