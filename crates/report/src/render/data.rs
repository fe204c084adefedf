//! Renders the report as data for scripts.

use anyhow::Result;
use record::{Record, SCHEMA};
use serde_json::{Value, json};

use crate::stream::Column;

/// One JSON object with cards, records, and cases without a record.
pub(crate) fn json(run: &[Column]) -> Result<String> {
    let cards: Vec<_> = run.iter().filter_map(|column| column.card.as_ref()).collect();
    let records: Vec<_> = run.iter().flat_map(|column| &column.records).collect();
    let skipped: Vec<Value> = run
        .iter()
        .flat_map(|column| column.skips.iter().map(move |skip| (column, skip)))
        .map(|(column, (case, reason))| {
            json!({ "backend": column.backend, "case": case, "reason": reason })
        })
        .collect();
    let incomplete: Vec<Value> = run
        .iter()
        .filter_map(|column| {
            Some(json!({ "backend": column.backend, "reason": column.broken.as_ref()? }))
        })
        .collect();
    let all = json!({
        "schema": SCHEMA, "cards": cards, "records": records, "skipped": skipped, "incomplete": incomplete,
    });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

const COLUMNS: [&str; 28] = [
    "case",
    "op",
    "params",
    "backend",
    "arch_id",
    "profile",
    "median_ns",
    "p10_ns",
    "p90_ns",
    "p95_ns",
    "samples",
    "clock",
    "flops",
    "bytes",
    "tflops",
    "gbps",
    "share_of_ceiling",
    "memory_bytes",
    "peers",
    "peer_clocks",
    "max_err",
    "tolerance",
    "config",
    "config_source",
    "error",
    "commit",
    "dirty",
    "date",
];

/// CSV with one line per record, including failed ones. Objects are written as JSON.
pub(crate) fn csv(run: &[Column]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(COLUMNS)?;
    for record in run.iter().flat_map(|column| &column.records) {
        writer.write_record(cells(record)?)?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// Cells of a record, taken by name from its JSON so that both formats agree.
fn cells(record: &Record) -> Result<Vec<String>> {
    let fields = serde_json::to_value(record)?;
    let cell = |name: &&str| match (*name, fields.get(*name)) {
        ("case", _) => record.case(),
        (_, None | Some(Value::Null)) => String::new(),
        (_, Some(Value::String(text))) => text.clone(),
        (_, Some(other)) => other.to_string(),
    };
    Ok(COLUMNS.iter().map(cell).collect())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn csv_of_the_sample_run() {
        insta::assert_snapshot!(csv(&sample::run()).unwrap());
    }

    #[test]
    fn every_csv_column_but_the_case_is_a_field_of_a_record() {
        let record = serde_json::to_value(&sample::run()[0].records[0]).unwrap();
        let fields: Vec<_> = record.as_object().unwrap().keys().collect();
        let unknown: Vec<_> =
            COLUMNS.iter().filter(|c| **c != "case" && !fields.iter().any(|f| f == *c)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        let absent: Vec<_> =
            fields.iter().filter(|f| **f != "schema" && !COLUMNS.contains(&f.as_str())).collect();
        assert!(absent.is_empty(), "{absent:?}");
    }

    #[test]
    fn json_holds_records_that_can_be_read_back() {
        let run = sample::run();
        let value: Value = serde_json::from_str(&json(&run).unwrap()).unwrap();
        let records: Vec<Record> = serde_json::from_value(value["records"].clone()).unwrap();
        assert_eq!(records[0], run[0].records[0]);
        assert_eq!(value["cards"].as_array().unwrap().len(), run.len());
        assert_eq!(value["incomplete"][0]["backend"], "cpu");
    }
}
