//! Formats numbers and names for people.

use std::collections::BTreeMap;

use quant::WeightFormat;
use record::{Card, Record};
use serde_json::Value;

/// Formats three significant digits. Values from 1e-5 up to 1e9 have no exponent.
pub fn digits(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    if !(1e-5..1e9).contains(&magnitude) {
        return format!("{value:.2e}");
    }
    let before_point = magnitude.log10().floor() as i32 + 1;
    format!("{value:.*}", (3 - before_point).max(0) as usize)
}

/// Formats nanoseconds as milliseconds, without the unit.
pub(crate) fn millis(nanos: f64) -> String {
    digits(nanos / 1e6)
}

/// Formats a fraction as a percentage.
pub(crate) fn percent(share: f64) -> String {
    let value = share * 100.0;
    if value < 10.0 { format!("{value:.1}%") } else { format!("{value:.0}%") }
}

/// Formats the error of a result with two digits; only its order of magnitude matters.
pub fn error(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.1e}") }
}

/// Formats a ratio: `1.62x`.
pub(crate) fn ratio(value: f64) -> String {
    if value < 1e6 { format!("{value:.2}x") } else { digits(value) + "x" }
}

/// Rate that describes the case: tokens/s for a model, TFLOP/s for arithmetic, else GB/s.
pub(crate) fn rate(record: &Record) -> String {
    if let Some(tokens) = tokens_per_second(record) {
        return format!("{} tokens/s", digits(tokens));
    }
    match (record.tflops, record.gbps) {
        (Some(tflops), _) if record.flops > 0 => format!("{} TFLOP/s", digits(tflops)),
        (_, Some(gbps)) => format!("{} GB/s", digits(gbps)),
        _ => String::new(),
    }
}

/// Tokens per second over all sequences; `None` for other cases. A generated token is timed alone, but a prompt, a
/// request or a training step as a whole.
pub(crate) fn tokens_per_second(record: &Record) -> Option<f64> {
    let number = |name| record.params.get(name).and_then(Value::as_f64);
    let batch = number("batch").unwrap_or(1.0);
    let tokens = match record.op.as_str() {
        "generate" => 1.0,
        "prompt" | "request" | "train" => number("tokens")?,
        _ => return None,
    };
    Some(tokens * batch / record.median_ns? * 1e9)
}

/// Completed requests per second, over all sequences.
pub(crate) fn requests_per_second(record: &Record) -> Option<f64> {
    let batch = record.params.get("batch").and_then(Value::as_f64).unwrap_or(1.0);
    (record.op == "request").then_some(batch / record.median_ns? * 1e9)
}

/// Converts bytes to GiB.
pub(crate) fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Formats our speedup over each peer: `1.62x burn, 0.98x cubek`. Adds the clock of the peer if it differs from ours.
pub(crate) fn peers(record: &Record) -> String {
    let Some(median) = record.median_ns else { return String::new() };
    let clock = |name: &String| record.peer_clocks.get(name).map(|c| format!(" ({c} clock)"));
    let of = |(name, nanos): (&String, &f64)| {
        format!("{} {name}{}", ratio(nanos / median), clock(name).unwrap_or_default())
    };
    record.peers.iter().map(of).collect::<Vec<_>>().join(", ")
}

/// Formats a config as `tile_m=128 stages=3`. A value that is not an object is shown as JSON.
pub(crate) fn config(config: Option<&Value>) -> String {
    match config {
        None | Some(Value::Null) => String::new(),
        Some(Value::Object(fields)) => fields
            .iter()
            .map(|(name, value)| match value {
                Value::String(text) => format!("{name}={text}"),
                other => format!("{name}={other}"),
            })
            .collect::<Vec<_>>()
            .join(" "),
        Some(other) => other.to_string(),
    }
}

/// Formats the config and its source.
pub(crate) fn config_and_source(record: &Record) -> String {
    let config = config(record.config.as_ref());
    match &record.config_source {
        Some(source) if config.is_empty() => source.clone(),
        Some(source) => format!("{config} ({source})"),
        None => config,
    }
}

/// Dtype of a case, for its own column.
pub(crate) fn dtype(params: &BTreeMap<String, Value>) -> String {
    params
        .get("dtype")
        .map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned))
        .unwrap_or_default()
}

/// Compute dtype of a matmul or model; with quantised weights, their format first: `nf4 (bf16)`.
pub(crate) fn precision(record: &Record) -> String {
    let dtype = dtype(&record.params);
    let weights = match record.op.as_str() {
        op if op.parse::<WeightFormat>().is_ok() => Some(op),
        _ => record.params.get("quant").and_then(Value::as_str),
    };
    match weights {
        Some(weights) => format!("{weights} ({dtype})"),
        None => dtype,
    }
}

/// Name of the case without its dtype.
pub(crate) fn shape(record: &Record) -> String {
    let mut params = record.params.clone();
    params.remove("dtype");
    record::case_name(&record.op, &params)
}

/// Facts about a device that are needed to read its figures, as (name, value).
pub(crate) fn facts(card: &Card) -> Vec<(&'static str, String)> {
    let pairs = |map: &BTreeMap<String, String>| {
        map.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
    };
    let peaks: Vec<_> =
        card.peak_tflops.iter().map(|(name, peak)| format!("{name} {}", digits(*peak))).collect();
    let dirty = if card.dirty { " with local changes" } else { "" };
    let all = [
        ("device", Some(card.name.clone())),
        ("arch_id", Some(card.arch_id.clone())),
        ("profile", card.profile.clone()),
        ("memory", card.memory_bytes.map(|b| format!("{:.1} GiB", gib(b)))),
        ("driver", card.driver.clone()),
        ("versions", Some(pairs(&card.versions))),
        ("clocks", Some(pairs(&card.clocks))),
        ("measured copy", card.copy_gbps.map(|gbps| format!("{} GB/s", digits(gbps)))),
        ("measured peak TFLOP/s", Some(peaks.join(", "))),
        ("commit", Some(format!("{}{dirty}", card.commit))),
        ("date", Some(card.date.clone())),
    ];
    all.into_iter()
        .filter_map(|(name, value)| Some((name, value.filter(|v| !v.is_empty())?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits() {
        let shown: Vec<_> = [1234.5, 99.94, 9.994, 0.5, 0.0123, 0.00012, 0.0000012, 0.0]
            .map(digits)
            .into_iter()
            .collect();
        assert_eq!(shown, ["1234", "99.9", "9.99", "0.500", "0.0123", "0.000120", "1.20e-6", "0"]);
        assert_eq!(digits(f64::NAN), "NaN");
        assert_eq!((digits(1e294), ratio(1e300)), ("1.00e294".into(), "1.00e300x".into()));
        assert_eq!((digits(123_456_789.0), ratio(1.625)), ("123456789".into(), "1.62x".into()));
    }

    #[test]
    fn models_have_tokens_a_second() {
        let record = |op: &str, median: f64| {
            let mut record = crate::render::sample::run()[0].records[0].clone();
            record.op = op.to_owned();
            record.params = [("tokens", 512), ("batch", 2)]
                .map(|(name, value)| (name.to_owned(), value.into()))
                .into();
            record.median_ns = Some(median);
            record
        };
        assert_eq!(rate(&record("prompt", 1e9)), "1024 tokens/s");
        assert_eq!(rate(&record("generate", 1e8)), "20.0 tokens/s");
    }

    #[test]
    fn milliseconds_come_from_nanoseconds() {
        assert_eq!(millis(1_500_000.0), "1.50");
    }

    #[test]
    fn shares_are_percentages() {
        assert_eq!((percent(0.7149).as_str(), percent(0.0123).as_str()), ("71%", "1.2%"));
    }

    #[test]
    fn a_peer_names_its_clock_where_it_was_not_ours() {
        let mut record = super::super::sample::run()[0].records[1].clone();
        record.peer_clocks.insert("burn".into(), "host".into());
        assert_eq!(peers(&record), "1.62x burn (host clock), 0.98x cubek");
    }

    #[test]
    fn configs_read_as_words() {
        let value = serde_json::json!({ "tile_m": 128, "path": "mma" });
        assert_eq!(config(Some(&value)), "tile_m=128 path=mma");
        assert_eq!(config(Some(&serde_json::json!([1]))), "[1]");
        assert_eq!(config(None), "");
    }
}
