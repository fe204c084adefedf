//! Renders the tables of benches/RESULTS.md and of the README.

use record::Record;

use super::format::{millis, peers, percent, rate};
use super::precisions::precisions;
use super::requests::{is_request, requests};
use super::table::{Align, Style, Table};

/// Renders committed records as Markdown: a table of cases, then one of requests. With `by_precision`, renders matmuls
/// with a column per precision instead. Returns `None` if there is nothing to show.
pub fn readme(records: &[Record], by_precision: bool) -> Option<String> {
    let tables = match by_precision {
        true => vec![precisions(records)],
        false => vec![cases(records), requests(records)],
    };
    let shown: Vec<_> = tables
        .iter()
        .filter(|table| !table.rows().is_empty())
        .map(|table| table.render(Style::Markdown))
        .collect();
    (!shown.is_empty()).then(|| shown.join("\n"))
}

/// Renders records of several devices, each with the device's name, as one Markdown table.
pub fn speed(records: &[(Record, &str)]) -> String {
    let mut table = Table::new([
        ("case", Align::Left),
        ("median ms", Align::Right),
        ("rate", Align::Right),
        ("speed vs peers", Align::Left),
        ("device", Align::Left),
        ("date", Align::Left),
    ]);
    for (record, device) in records {
        let date = record.date.split('T').next().unwrap_or_default().to_owned();
        let median = record.median_ns.map(millis).unwrap_or_default();
        table.row([record.case(), median, rate(record), peers(record), (*device).to_owned(), date]);
    }
    table.render(Style::Markdown)
}

/// Table of cases, without requests.
fn cases(records: &[Record]) -> Table {
    let mut table = Table::new([
        ("case", Align::Left),
        ("median ms", Align::Right),
        ("rate", Align::Right),
        ("of measured ceiling", Align::Right),
        ("speed vs peers", Align::Left),
    ]);
    for record in records.iter().filter(|record| !is_request(record)) {
        let Some(median) = record.median_ns else { continue };
        table.row([
            record.case(),
            millis(median),
            rate(record),
            record.share_of_ceiling.map(percent).unwrap_or_default(),
            peers(record),
        ]);
    }
    table.without_empty_columns()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn the_table_of_the_sample_records() {
        insta::assert_snapshot!(readme(&sample::run()[0].records, false).unwrap());
    }

    #[test]
    fn requests_have_a_table_of_their_own() {
        let run = sample::run()[0].records.clone();
        let quick = readme(&run, false).unwrap();
        let documents = readme(&sample::requests(), false).unwrap();
        assert!(quick.starts_with("| case |") && !quick.contains("p95"), "{quick}");
        let names = "| model | precision | prompt | generated | batch | tokens/s | requests/s | p50 ms | p95 ms |";
        assert!(documents.starts_with(names), "{documents}");
        let both = readme(&[sample::requests(), run].concat(), false);
        assert_eq!(both, Some(format!("{quick}\n{documents}")));
    }

    #[test]
    fn matmuls_can_have_a_column_per_precision() {
        let records = ["bf16", "f32", "tf32"].map(|dtype| {
            let mut record = sample::run()[0].records[1].clone();
            record.params.insert("dtype".into(), dtype.into());
            record
        });
        let table = readme(&records, true).unwrap();
        assert!(table.starts_with("| product | f32 ms | tf32 ms | bf16 ms |"), "{table}");
        assert_eq!(readme(&records[..1], true), None);
    }
}
