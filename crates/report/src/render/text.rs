//! Renders the report as text: one section per backend, then a comparison of the backends.

use std::collections::BTreeMap;
use std::fmt::Write;

use record::Record;

use super::format::{
    config_and_source, digits, dtype, error, facts, gib, millis, peers, percent, shape,
    tokens_per_second,
};
use super::precisions::precisions;
use super::requests::{is_request, requests};
use super::table::{Align, Style, Table};
use crate::stream::Column;

/// Renders all results of a run.
pub(crate) fn document(run: &[Column], style: Style) -> String {
    let mut out = String::new();
    for column in run {
        section(&mut out, column, style);
    }
    if let Some(table) = across(run) {
        out += &heading("Median milliseconds across backends", style);
        out += &table.render(style);
    }
    out
}

fn heading(text: &str, style: Style) -> String {
    let text = style.escape(text);
    match style {
        Style::Markdown => format!("## {text}\n\n"),
        Style::Terminal => format!("\n{text}\n{}\n", "=".repeat(text.chars().count())),
    }
}

fn section(out: &mut String, column: &Column, style: Style) {
    let name = column.card.as_ref().map_or("no device", |card| card.name.as_str());
    *out += &heading(&format!("{}: {name}", column.backend), style);
    if let Some(card) = &column.card {
        let mark = if style == Style::Markdown { "- " } else { "  " };
        for (name, value) in facts(card).into_iter().skip(1) {
            *out += &format!("{mark}{name}: {}\n", style.escape(&value));
        }
        out.push('\n');
    }
    for (title, table) in tables(&column.records) {
        *out += &format!("{title}:\n\n{}\n", table.render(style));
    }
    *out += &notes(column, style);
}

/// Tables of measurements with their titles. Tables without rows are left out.
pub(crate) fn tables(records: &[Record]) -> Vec<(&'static str, Table)> {
    let all = [
        ("Cases", cases(records)),
        ("Requests", requests(records)),
        ("Products by precision", precisions(records)),
    ];
    all.into_iter().filter(|(_, table)| !table.rows().is_empty()).collect()
}

/// One row per measured case, without requests.
fn cases(records: &[Record]) -> Table {
    let mut table = Table::new([
        ("case", Align::Left),
        ("dtype", Align::Left),
        ("median ms (p10-p90)", Align::Right),
        ("TFLOP/s", Align::Right),
        ("GB/s", Align::Right),
        ("of ceiling", Align::Right),
        ("tokens/s", Align::Right),
        ("memory GiB", Align::Right),
        ("speed vs peers", Align::Left),
        ("config", Align::Left),
        ("max error", Align::Right),
    ]);
    for record in records.iter().filter(|record| !is_request(record)) {
        let Some(median) = record.median_ns else { continue };
        let number = |value: Option<f64>| value.map(digits).unwrap_or_default();
        table.row([
            shape(record),
            dtype(&record.params),
            format!("{}{}", millis(median), band(record)),
            number(record.tflops.filter(|_| record.flops > 0)),
            number(record.gbps),
            record.share_of_ceiling.map(percent).unwrap_or_default(),
            number(tokens_per_second(record)),
            number(record.memory_bytes.map(gib)),
            peers(record),
            config_and_source(record),
            record.max_err.map(error).unwrap_or_default(),
        ]);
    }
    table.without_empty_columns()
}

fn band(record: &Record) -> String {
    match (record.p10_ns, record.p90_ns) {
        (Some(p10), Some(p90)) => format!(" ({}-{})", millis(p10), millis(p90)),
        _ => String::new(),
    }
}

/// Lists cases without a row: skipped ones by reason, then failed ones, then the reason why the column is incomplete.
/// Failures come last, so that a long log ends with them.
pub(crate) fn notes(column: &Column, style: Style) -> String {
    let mut out = String::new();
    let mut list = |title: &str, entries: Vec<String>| {
        if !entries.is_empty() {
            out += &format!("{title}:\n\n");
            for entry in entries {
                let _ = writeln!(out, "- {}", style.escape(&entry).replace('\n', "\n  "));
            }
            out.push('\n');
        }
    };
    let skipped = |(why, cases): (&str, Vec<&str>)| match cases[..] {
        [case] => format!("{case}: {why}"),
        _ => format!("{} cases, {} the first: {why}", cases.len(), cases[0]),
    };
    list("Skipped", column.skipped().into_iter().map(skipped).collect());
    list("Failed", column.failures().map(|(case, why)| format!("{case}: {why}")).collect());
    list(
        "Incomplete",
        column.broken.iter().map(|why| format!("{}: {why}", column.backend)).collect(),
    );
    out
}

/// Table of medians for cases that several backends ran.
pub(crate) fn across(run: &[Column]) -> Option<Table> {
    let mut cases: BTreeMap<String, BTreeMap<usize, f64>> = BTreeMap::new();
    let mut order = Vec::new();
    for (i, column) in run.iter().enumerate() {
        for record in &column.records {
            let Some(median) = record.median_ns else { continue };
            let case = record.case();
            if !cases.contains_key(&case) {
                order.push(case.clone());
            }
            cases.entry(case).or_default().insert(i, median);
        }
    }
    order.retain(|case| cases[case].len() > 1);
    if order.is_empty() {
        return None;
    }
    let backends = run.iter().map(|column| (column.backend.clone(), Align::Right));
    let mut table = Table::new([("case".to_owned(), Align::Left)].into_iter().chain(backends));
    for case in order {
        let medians = &cases[&case];
        let cells = (0..run.len()).map(|i| medians.get(&i).map(|m| millis(*m)).unwrap_or_default());
        table.row([case.clone()].into_iter().chain(cells));
    }
    Some(table.without_empty_columns())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn the_markdown_report_of_the_sample_run() {
        insta::assert_snapshot!(document(&sample::run(), Style::Markdown));
    }

    #[test]
    fn the_terminal_report_of_the_sample_run() {
        insta::assert_snapshot!(document(&sample::run()[1..], Style::Terminal));
    }

    #[test]
    fn one_backend_alone_has_nothing_to_compare() {
        assert!(across(&sample::run()[..1]).is_none());
    }
}
