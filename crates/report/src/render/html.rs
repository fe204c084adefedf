//! Renders a self-contained page with cards, charts and tables. The template escapes every text.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::chart::{Unit, bars};
use super::format::facts;
use super::roofline::{dtypes, roofline};
use super::table::{Align, Table};
use super::text::{across, tables};
use crate::stream::Column;

pub(super) const STYLE: &str = include_str!("page.css");

/// Renders the page of a run; `comparison`, if there is one, comes first.
pub(crate) fn page(run: &[Column], comparison: Option<&Table>) -> String {
    let date = run.iter().find_map(|column| Some(column.card.as_ref()?.date.as_str()));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "Flashover bench" @if let Some(date) = date { " " (date) } }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "Flashover bench" }
                    @if let Some(date) = date { p { (date) } }
                    nav {
                        @for column in run {
                            a href=(format!("#{}", column.backend)) { (column.backend) }
                        }
                    }
                }
                main {
                    @if let Some(table) = comparison {
                        section { h2 { "Against the baseline" } (grid(table)) }
                    }
                    @for column in run { (section(column)) }
                    @if let Some(table) = across(run) {
                        section { h2 { "Median milliseconds across backends" } (grid(&table)) }
                    }
                }
                footer {
                    "Each case is checked against a reference before it is timed. Ceilings are "
                    "measured on the same device. Times are medians of one launch with the 10th "
                    "and 90th percentile; of requests, medians (p50) and 95th percentiles."
                }
            }
        }
    }
    .into_string()
}

fn section(column: &Column) -> Markup {
    html! {
        section id=(column.backend) {
            h2 {
                (column.backend)
                @if let Some(card) = &column.card { span.device { (card.name) } }
            }
            @if let Some(card) = &column.card {
                dl {
                    @for (name, value) in facts(card).into_iter().skip(1) {
                        div { dt { (name) } dd { (value) } }
                    }
                }
            }
            @if let Some(why) = &column.broken { p.bad { "Incomplete: " (why) } }
            @for unit in Unit::ALL {
                @if let Some(chart) = bars(&column.records, unit) {
                    figure { figcaption { (unit.title()) } div.scroll { (chart) } }
                }
            }
            @if let Some(chart) = column.card.as_ref().and_then(|c| roofline(c, &column.records)) {
                figure {
                    figcaption {
                        "Roofline "
                        @for (colour, dtype) in dtypes(&column.records) {
                            span.legend { i class=(colour) {} (dtype) }
                        }
                    }
                    div.scroll { (chart) }
                }
            }
            @for (title, table) in tables(&column.records) { h3 { (title) } (grid(&table)) }
            (list("Failed", column.failures().collect()))
            (list("Skipped", column.skips.clone()))
        }
    }
}

fn list(title: &str, entries: Vec<(String, String)>) -> Markup {
    html! {
        @if !entries.is_empty() {
            h3 { (title) }
            ul { @for (case, why) in entries { li { b { (case) } ": " (why) } } }
        }
    }
}

pub(super) fn grid(table: &Table) -> Markup {
    // Long text wraps, at a readable minimum width.
    let class = |i: usize, text: &str| match table.columns()[i].1 {
        Align::Left if text.len() > 20 => "left long",
        Align::Left => "left",
        Align::Right => "right",
    };
    html! {
        div.scroll {
            table {
                thead {
                    tr {
                        @for (i, (name, _)) in table.columns().iter().enumerate() {
                            th class=(class(i, name)) { (name) }
                        }
                    }
                }
                tbody {
                    @for row in table.rows() {
                        tr { @for (i, cell) in row.iter().enumerate() { td class=(class(i, cell)) { (cell) } } }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn the_page_of_the_sample_run() {
        insta::assert_snapshot!(page(&sample::run(), None).replace("><", ">\n<"));
    }

    #[test]
    fn text_cannot_break_out_of_its_element() {
        let mut run = sample::run();
        let hostile = "</title><script>alert('x')</script>\" onload=\"y";
        run[0].card.as_mut().unwrap().name = hostile.into();
        run[0].records[1].peers.insert(hostile.into(), 1.0);
        run[0].records[1].op = hostile.into();
        run[0].skips.push((hostile.into(), hostile.into()));
        let page = page(&run, None);
        assert!(!page.contains("<script") && !page.contains("\" onload"), "{page}");
        assert!(page.contains("&lt;script&gt;"));
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = page(&sample::run(), None);
        for reference in ["src=", "http:", "https:", "@import", "url(", "<link", "<script"] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(page.contains("prefers-color-scheme"));
    }
}
