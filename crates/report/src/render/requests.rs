//! Table of requests to models: latency, throughput and memory.

use record::Record;
use serde_json::Value;

use super::format::{
    digits, gib, millis, peers, precision, requests_per_second, tokens_per_second,
};
use super::table::{Align, Table};

/// Parameters with their own column.
const COLUMNS: [&str; 6] = ["model", "dtype", "quant", "prompt", "tokens", "batch"];

/// True if the record is a request, not a kernel case.
pub(crate) fn is_request(record: &Record) -> bool {
    record.op == "request"
}

/// One row per measured request: latency, tokens/s and requests/s.
pub(crate) fn requests(records: &[Record]) -> Table {
    let mut table = Table::new([
        ("model", Align::Left),
        ("precision", Align::Left),
        ("prompt", Align::Right),
        ("generated", Align::Right),
        ("batch", Align::Right),
        ("tokens/s", Align::Right),
        ("requests/s", Align::Right),
        ("p50 ms", Align::Right),
        ("p95 ms", Align::Right),
        ("memory GiB", Align::Right),
        ("speed vs peers", Align::Left),
    ]);
    for record in records.iter().filter(|record| is_request(record)) {
        let Some(median) = record.median_ns else { continue };
        let number = |value: Option<f64>| value.map(digits).unwrap_or_default();
        let param = |name| match record.params.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        };
        // Parameters without a column distinguish requests to the same model.
        let mut rest = record.params.clone();
        rest.retain(|name, _| !COLUMNS.contains(&name.as_str()));
        // A record of one sequence has no `batch`.
        let batch = if record.params.contains_key("batch") { param("batch") } else { "1".into() };
        table.row([
            record::case_name(&param("model"), &rest),
            precision(record),
            param("prompt"),
            param("tokens"),
            batch,
            number(tokens_per_second(record)),
            number(requests_per_second(record)),
            millis(median),
            record.p95_ns.map(millis).unwrap_or_default(),
            number(record.memory_bytes.map(gib)),
            peers(record),
        ]);
    }
    table.without_empty_columns()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::super::table::Style;
    use super::*;

    #[test]
    fn requests_have_a_table_of_their_own() {
        // 64 tokens in 33.62 ms; 16 times 64 in 257 ms.
        insta::assert_snapshot!(requests(&sample::requests()).render(Style::Markdown), @r"
        | model | precision | prompt | generated | batch | tokens/s | requests/s | p50 ms | p95 ms | memory GiB |
        | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
        | gpt2 | f32 | 128 | 64 | 1 | 1904 | 29.7 | 33.6 | 34.1 | 0.506 |
        | llama-2-7b | nf4 (bf16) | 128 | 64 | 16 | 3984 | 62.3 | 257 | 259 | 6.23 |
        ");
    }

    #[test]
    fn a_parameter_without_a_column_is_named() {
        let mut records = sample::requests();
        records[0].params.insert("kv".into(), "int8".into());
        assert_eq!(requests(&records).rows()[0][0], "gpt2 kv=int8");
    }

    #[test]
    fn what_is_no_request_or_has_no_time_has_no_row() {
        assert!(requests(&sample::run()[0].records).rows().is_empty());
        let mut failed = sample::requests();
        failed[0].median_ns = None;
        assert_eq!(requests(&failed).rows().len(), 1);
    }
}
