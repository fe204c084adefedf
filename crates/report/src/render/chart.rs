//! Bar chart as SVG: one bar per case, plus one per peer.

use maud::{Markup, html};
use record::Record;

use super::format::{digits, ratio, tokens_per_second};

const WIDTH: f64 = 860.0;
/// Left edge of the bars, in pixels; the names of the series are left of it.
const LEFT: f64 = 90.0;
/// Space right of the longest bar for its value, in pixels.
const RIGHT: f64 = 190.0;
const BAR: f64 = 15.0;
const TITLE: f64 = 20.0;
const GAP: f64 = 12.0;
/// Number of series colours in the style sheet.
const COLOURS: usize = 6;

/// Quantity that a bar shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Tflops,
    Gbps,
    /// For model cases of one op: prompt, generate or request. Each op has its own chart, because their rates differ by
    /// orders of magnitude.
    Tokens(&'static str),
}

impl Unit {
    pub(super) const ALL: [Self; 5] = [
        Self::Tflops,
        Self::Gbps,
        Self::Tokens("prompt"),
        Self::Tokens("generate"),
        Self::Tokens("request"),
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tflops => "TFLOP/s",
            Self::Gbps => "GB/s",
            Self::Tokens(_) => "tokens/s",
        }
    }

    /// Title of the chart.
    pub(super) fn title(self) -> String {
        match self {
            Self::Tokens(op) => format!("{}, {op}, ours and peers", self.name()),
            _ => format!("{}, ours and peers", self.name()),
        }
    }

    /// True if this unit describes the case: tokens for a model, TFLOP/s for arithmetic, GB/s for copies.
    fn describes(self, record: &Record) -> bool {
        match self {
            Self::Tokens(op) => record.op == op,
            _ if tokens_per_second(record).is_some() => false,
            Self::Tflops => record.flops > 0,
            Self::Gbps => record.flops == 0,
        }
    }

    /// Rate of a launch that took `nanos` nanoseconds. Work per nanosecond is giga-work per second.
    fn rate(self, record: &Record, nanos: f64) -> f64 {
        match self {
            Self::Tflops => record.flops as f64 / nanos / 1e3,
            Self::Gbps => record.bytes as f64 / nanos,
            Self::Tokens(_) => {
                tokens_per_second(&Record { median_ns: Some(nanos), ..record.clone() })
                    .unwrap_or_default()
            }
        }
    }
}

struct Bar<'a> {
    series: &'a str,
    colour: usize,
    rate: f64,
    note: String,
}

/// Draws all measured cases in this unit; `None` if there are none.
pub(super) fn bars(records: &[Record], unit: Unit) -> Option<Markup> {
    let measured = |r: &&Record| r.median_ns.is_some_and(|m| m > 0.0) && unit.describes(r);
    let records: Vec<_> = records.iter().filter(measured).collect();
    let mut peers: Vec<&str> =
        records.iter().flat_map(|r| r.peers.keys().map(String::as_str)).collect();
    peers.sort_unstable();
    peers.dedup();
    let groups: Vec<(String, Vec<Bar>)> =
        records.iter().map(|r| (r.case(), group(r, &peers, unit))).collect();
    let longest = groups.iter().flat_map(|(_, bars)| bars).map(|bar| bar.rate).fold(0.0, f64::max);
    if longest <= 0.0 {
        return None;
    }
    let scale = (WIDTH - LEFT - RIGHT) / longest;
    let mut y = 0.0;
    let mut body = Vec::new();
    for (case, bars) in &groups {
        body.push(html! { text.case x="0" y=(px(y + 14.0)) { (case) } });
        y += TITLE;
        for bar in bars {
            body.push(draw(bar, y, scale, unit));
            y += BAR;
        }
        y += GAP;
    }
    Some(html! {
        svg viewBox=(format!("0 0 {WIDTH} {}", px(y))) role="img"
            aria-label=(format!("{}, per case", unit.title())) {
            @for part in body { (part) }
        }
    })
}

/// Our bar, then one bar per peer. A peer has the same colour in every group.
fn group<'a>(record: &'a Record, peers: &[&'a str], unit: Unit) -> Vec<Bar<'a>> {
    let Some(ours) = record.median_ns else { return Vec::new() };
    let own =
        Bar { series: "flashover", colour: 0, rate: unit.rate(record, ours), note: String::new() };
    let others = peers.iter().enumerate().filter_map(|(i, peer)| {
        let theirs = *record.peers.get(*peer)?;
        (theirs > 0.0).then(|| Bar {
            series: peer,
            colour: 1 + i % (COLOURS - 1),
            rate: unit.rate(record, theirs),
            note: format!(" (ours {})", ratio(theirs / ours)),
        })
    });
    [own].into_iter().chain(others).collect()
}

fn draw(bar: &Bar, y: f64, scale: f64, unit: Unit) -> Markup {
    let length = (bar.rate * scale).max(1.0);
    let label = format!("{} {}{}", digits(bar.rate), unit.name(), bar.note);
    html! {
        text.series x=(px(LEFT - 8.0)) y=(px(y + 11.0)) { (bar.series) }
        rect class=(format!("c{}", bar.colour)) x=(px(LEFT)) y=(px(y + 1.0))
            width=(px(length)) height=(px(BAR - 3.0)) rx="2" {
            title { (bar.series) ": " (label) }
        }
        text.value x=(px(LEFT + length + 6.0)) y=(px(y + 11.0)) { (label) }
    }
}

/// Formats a coordinate with one decimal.
pub(super) fn px(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn svg(unit: Unit) -> String {
        bars(&sample::run()[0].records, unit).unwrap().into_string()
    }

    #[test]
    fn arithmetic_and_copies_have_a_chart_each() {
        let (tflops, gbps) = (svg(Unit::Tflops), svg(Unit::Gbps));
        assert!(tflops.contains("matmul bf16 4096x4096x4096") && !tflops.contains("copy"));
        assert!(gbps.contains("copy f32") && !gbps.contains("matmul"));
    }

    #[test]
    fn a_models_cases_are_told_in_tokens() {
        let records = sample::requests();
        assert!(bars(&records, Unit::Tflops).is_none() && bars(&records, Unit::Gbps).is_none());
        assert!(bars(&records, Unit::Tokens("prompt")).is_none());
        let svg = bars(&records, Unit::Tokens("request")).unwrap().into_string();
        assert!(svg.contains(">1904 tokens/s<") && svg.contains(">3984 tokens/s<"), "{svg}");
    }

    #[test]
    fn the_longest_bar_fills_the_width() {
        let widest = px(WIDTH - LEFT - RIGHT);
        assert_eq!(svg(Unit::Tflops).matches(&format!("width=\"{widest}\"")).count(), 1);
    }

    #[test]
    fn a_peer_keeps_its_colour() {
        // The sample has burn for three cases and cubek for one.
        let svg = svg(Unit::Tflops);
        assert_eq!(svg.matches("class=\"c1\"").count(), 3);
        assert_eq!(svg.matches("class=\"c2\"").count(), 1);
    }

    #[test]
    fn nothing_measured_means_no_chart() {
        assert!(bars(&[], Unit::Tflops).is_none());
        let mut record = sample::run()[0].records[0].clone();
        record.median_ns = None;
        assert!(bars(&[record], Unit::Gbps).is_none());
    }
}
