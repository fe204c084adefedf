//! Roofline chart as SVG: throughput over arithmetic intensity on logarithmic axes, below the ceilings measured on the
//! device.

use maud::{Markup, html};
use record::{Card, Record};

use super::chart::px;
use super::format::{digits, dtype, millis, percent};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 46.0;
/// Height of a line of text, in pixels.
const LINE: f64 = 14.0;

/// Range of an axis in powers of ten.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Axis {
    low: i32,
    high: i32,
}

impl Axis {
    /// Whole decades that contain all values with a margin of 0.15 decades, so that no mark lies on the frame.
    fn around(values: impl Iterator<Item = f64>) -> Option<Self> {
        let logs: Vec<_> = values.filter(|v| *v > 0.0 && v.is_finite()).map(f64::log10).collect();
        let low = logs.iter().copied().reduce(f64::min)?;
        let high = logs.iter().copied().reduce(f64::max)?;
        Some(Self { low: (low - 0.15).floor() as i32, high: (high + 0.15).ceil() as i32 })
    }

    fn share(self, value: f64) -> f64 {
        (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low)
    }

    fn decades(self) -> impl Iterator<Item = f64> {
        (self.low..=self.high).map(|power| 10f64.powi(power))
    }
}

struct Plot {
    x: Axis,
    y: Axis,
}

impl Plot {
    fn at(&self, intensity: f64, tflops: f64) -> (f64, f64) {
        (
            LEFT + self.x.share(intensity) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.y.share(tflops) * (HEIGHT - TOP - BOTTOM),
        )
    }
}

/// Coordinates of a record: operations per byte, and TFLOP/s.
fn point(record: &Record) -> Option<(f64, f64)> {
    let tflops = record.tflops.filter(|t| *t > 0.0)?;
    (record.flops > 0 && record.bytes > 0)
        .then(|| (record.flops as f64 / record.bytes as f64, tflops))
}

/// Chart of one backend; `None` without a measured copy rate, a peak, or a point.
pub(super) fn roofline(card: &Card, records: &[Record]) -> Option<Markup> {
    // GB/s times operations per byte is GFLOP/s.
    let slope = card.copy_gbps.filter(|gbps| *gbps > 0.0)? / 1e3;
    let top = card.peak_tflops.values().copied().reduce(f64::max).filter(|peak| *peak > 0.0)?;
    let points: Vec<_> = records.iter().filter_map(|r| Some((r, point(r)?))).collect();
    if points.is_empty() {
        return None;
    }
    let ridge = top / slope;
    let x = Axis::around(points.iter().map(|(_, p)| p.0).chain([ridge]))?;
    let floor = slope * 10f64.powi(x.low);
    let lowest = points.iter().map(|(_, p)| p.1).fold(floor.max(top / 1e4), f64::min);
    let y = Axis::around(points.iter().map(|(_, p)| p.1).chain([top, lowest]))?;
    let plot = Plot { x, y };
    Some(html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img"
            aria-label="Roofline: TFLOP/s over operations per byte" {
            (grid(&plot))
            (ceilings(&plot, card, slope))
            @for (record, (intensity, tflops)) in &points {
                (dot(&plot, record, *intensity, *tflops))
            }
            @for (y, label) in labels(&plot, card) {
                text.roofname x=(px(WIDTH - RIGHT - 4.0)) y=(px(y - 5.0)) text-anchor="end" {
                    (label) " TFLOP/s"
                }
            }
        }
    })
}

fn grid(plot: &Plot) -> Markup {
    let (left, right, top, bottom) = (px(LEFT), px(WIDTH - RIGHT), px(TOP), px(HEIGHT - BOTTOM));
    let low = (10f64.powi(plot.x.low), 10f64.powi(plot.y.low));
    html! {
        @for decade in plot.x.decades() {
            @let x = px(plot.at(decade, low.1).0);
            line.grid x1=(x) x2=(x) y1=(top) y2=(bottom) {}
            text.tick x=(x) y=(px(HEIGHT - BOTTOM + 16.0)) text-anchor="middle" { (tick(decade)) }
        }
        @for decade in plot.y.decades() {
            @let y = plot.at(low.0, decade).1;
            line.grid x1=(left) x2=(right) y1=(px(y)) y2=(px(y)) {}
            text.tick x=(px(LEFT - 8.0)) y=(px(y + 4.0)) text-anchor="end" { (tick(decade)) }
        }
        text.axis x=(px((LEFT + WIDTH - RIGHT) / 2.0)) y=(px(HEIGHT - 8.0)) text-anchor="middle" {
            "operations per byte"
        }
        text.axis transform=(format!("translate(14 {}) rotate(-90)", px((TOP + HEIGHT - BOTTOM) / 2.0)))
            text-anchor="middle" { "TFLOP/s" }
    }
}

fn tick(decade: f64) -> String {
    if (0.001..=10_000.0).contains(&decade) { decade.to_string() } else { format!("{decade:.0e}") }
}

/// Draws the slanted memory roof up to each flat compute roof.
fn ceilings(plot: &Plot, card: &Card, slope: f64) -> Markup {
    let end = 10f64.powi(plot.x.high);
    let top = card.peak_tflops.values().copied().fold(0.0, f64::max);
    let begin = 10f64.powi(plot.x.low).max(10f64.powi(plot.y.low) / slope);
    let (x1, y1) = plot.at(begin, begin * slope);
    let (x2, y2) = plot.at(top / slope, top);
    html! {
        line.roof x1=(px(x1)) y1=(px(y1)) x2=(px(x2)) y2=(px(y2)) {
            title { "measured copy rate: " (digits(slope * 1e3)) " GB/s" }
        }
        @for (name, peak) in card.peak_tflops.iter().filter(|(_, p)| **p >= 10f64.powi(plot.y.low)) {
            @let (x1, y) = plot.at((peak / slope).max(begin), *peak);
            @let (x2, _) = plot.at(end, *peak);
            line.roof x1=(px(x1)) y1=(px(y)) x2=(px(x2)) y2=(px(y)) {
                title { "measured " (name) " rate: " (digits(*peak)) " TFLOP/s" }
            }
        }
    }
}

/// Labels with name and rate of the flat roofs, at the height of the roof. Roofs closer together than a line of text
/// share the label of the highest.
fn labels(plot: &Plot, card: &Card) -> Vec<(f64, String)> {
    let mut roofs: Vec<_> =
        card.peak_tflops.iter().filter(|(_, p)| **p >= 10f64.powi(plot.y.low)).collect();
    roofs.sort_by(|a, b| b.1.total_cmp(a.1));
    let mut labels: Vec<(f64, String)> = Vec::new();
    for (name, peak) in roofs {
        let (_, y) = plot.at(1.0, *peak);
        let roof = format!("{name} {}", digits(*peak));
        match labels.last_mut() {
            Some((above, label)) if y - *above < LINE => *label += &format!(", {roof}"),
            _ => labels.push((y, roof)),
        }
    }
    labels
}

fn dot(plot: &Plot, record: &Record, intensity: f64, tflops: f64) -> Markup {
    let (x, y) = plot.at(intensity, tflops);
    let share = record.share_of_ceiling.map(|s| format!(", {} of ceiling", percent(s)));
    let median = record.median_ns.map(|m| format!(", {} ms", millis(m)));
    html! {
        circle class=(format!("dot {}", colour(&dtype(&record.params)))) cx=(px(x)) cy=(px(y)) r="4.5" {
            title {
                (record.case()) ": " (digits(tflops)) " TFLOP/s"
                (median.unwrap_or_default()) (share.unwrap_or_default())
            }
        }
    }
}

/// Colour of a dtype, the same on every page.
fn colour(dtype: &str) -> &'static str {
    match dtype {
        "bf16" => "c0",
        "f16" => "c1",
        "tf32" => "c2",
        "f32" => "c3",
        "f64" => "c4",
        _ => "c5",
    }
}

/// Colours ([`colour`]) and names of the dtypes in the chart, for the legend.
pub(super) fn dtypes(records: &[Record]) -> Vec<(&'static str, String)> {
    let mut names: Vec<_> =
        records.iter().filter(|r| point(r).is_some()).map(|r| dtype(&r.params)).collect();
    names.sort();
    names.dedup();
    names.into_iter().map(|name| (colour(&name), name)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn axes_end_on_decades_with_room() {
        let axis = Axis::around([2.0, 500.0].into_iter()).unwrap();
        assert_eq!(axis, Axis { low: 0, high: 3 });
        assert_eq!(Axis::around([1.0, 1000.0].into_iter()).unwrap(), Axis { low: -1, high: 4 });
        assert!(Axis::around([0.0, f64::NAN].into_iter()).is_none());
        assert!((axis.share(10.0) - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn every_case_with_arithmetic_is_a_point_inside_the_frame() {
        let run = sample::run();
        let svg = roofline(run[0].card.as_ref().unwrap(), &run[0].records).unwrap().into_string();
        let centres: Vec<f64> = svg
            .split("cy=\"")
            .skip(1)
            .map(|rest| rest.split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(centres.len(), 3);
        assert!(centres.iter().all(|y| (TOP..=HEIGHT - BOTTOM).contains(y)), "{centres:?}");
    }

    #[test]
    fn roofs_that_nearly_meet_share_a_label() {
        let mut card = sample::run()[0].card.clone().unwrap();
        card.peak_tflops.insert("f16".into(), 800.0);
        let plot = Plot { x: Axis { low: -1, high: 4 }, y: Axis { low: -1, high: 3 } };
        let labels: Vec<_> = labels(&plot, &card).into_iter().map(|(_, label)| label).collect();
        assert_eq!(labels, ["f16 800, bf16 790", "f32 58.0"]);
    }

    #[test]
    fn without_a_measured_ceiling_there_is_no_roof() {
        let run = sample::run();
        let mut card = run[0].card.clone().unwrap();
        card.copy_gbps = None;
        assert!(roofline(&card, &run[0].records).is_none());
    }
}
