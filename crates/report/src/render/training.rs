//! Renders a self-contained page of a training: curves of loss, gradient norm and learning rate, and a table of steps.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::chart::px;
use super::format::digits;
use super::html::{STYLE, grid};
use super::table::{Align, Table};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 260.0;
/// Space around the curves for the labels of the axes, in pixels.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const BOTTOM: f64 = 26.0;
const TOP: f64 = 8.0;

/// Most rows of the table and most points of a curve; longer trainings are thinned out.
const ROWS: usize = 200;
const POINTS: usize = 2000;

/// Weight of the last step in the smoothed loss. The first steps have their plain mean.
const SMOOTHING: f64 = 0.1;

/// One optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingStep {
    /// Step number, from 1.
    pub step: usize,
    /// Mean loss per trained token, before the step.
    pub loss: f64,
    /// Norm of the gradient, before clipping.
    pub gradient: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Number of trained tokens.
    pub tokens: usize,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Renders the page. `facts` are names and values at its top, such as the model and the card; `held_out` are steps and the
/// held-out loss after them.
pub fn training(
    facts: &[(&str, String)],
    steps: &[TrainingStep],
    held_out: &[(usize, f64)],
) -> String {
    let points = |value: fn(&TrainingStep) -> f64| -> Vec<(f64, f64)> {
        thinned(steps, POINTS).map(|own| (own.step as f64, value(own))).collect()
    };
    let loss = points(|own| own.loss);
    let held_out: Vec<_> = held_out.iter().map(|(step, loss)| (*step as f64, *loss)).collect();
    let mut mean = 0.0;
    let smooth: Vec<(f64, f64)> = (1u32..)
        .zip(&loss)
        .map(|(count, (step, loss))| {
            mean += SMOOTHING.max(1.0 / f64::from(count)) * (loss - mean);
            (*step, mean)
        })
        .collect();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "Flashover training" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header { h1 { "Flashover training" } }
                main {
                    section {
                        dl { @for (name, value) in facts { div { dt { (name) } dd { (value) } } } }
                        figure {
                            figcaption {
                                "Loss per trained token"
                                span.legend { i.c1 {} "each step" }
                                span.legend { i.c0 {} "moving average" }
                            }
                            div.scroll { (curves(&[(1, &loss), (0, &smooth)], "loss")) }
                        }
                        @if held_out.len() > 1 {
                            figure {
                                figcaption { "Held-out loss per token" }
                                div.scroll { (curves(&[(0, &held_out)], "held-out loss")) }
                            }
                        }
                        figure {
                            figcaption { "Gradient norm before clipping" }
                            div.scroll { (curves(&[(2, &points(|own| own.gradient))], "gradient norm")) }
                        }
                        figure {
                            figcaption { "Learning rate" }
                            div.scroll { (curves(&[(3, &points(|own| own.learning_rate))], "learning rate")) }
                        }
                        h3 { "Steps" }
                        (grid(&table(steps)))
                    }
                }
            }
        }
    }
    .into_string()
}

fn table(steps: &[TrainingStep]) -> Table {
    let names = ["step", "loss", "gradient", "learning rate", "tokens", "tokens/s"];
    let mut table = Table::new(names.map(|name| (name, Align::Right)));
    for own in thinned(steps, ROWS) {
        table.row([
            own.step.to_string(),
            format!("{:.4}", own.loss),
            digits(own.gradient),
            format!("{:.2e}", own.learning_rate),
            own.tokens.to_string(),
            digits(own.tokens as f64 / own.seconds),
        ]);
    }
    table
}

/// Returns evenly spaced steps, at most `max` and the last one.
fn thinned(steps: &[TrainingStep], max: usize) -> impl Iterator<Item = &TrainingStep> {
    let stride = steps.len().div_ceil(max).max(1);
    let last = steps.len().saturating_sub(1);
    steps
        .iter()
        .enumerate()
        .filter(move |(at, _)| at % stride == 0 || *at == last)
        .map(|(_, own)| own)
}

/// Draws curves over a common range, each with a colour of the style sheet. Points that are not finite are left out.
fn curves(all: &[(usize, &[(f64, f64)])], name: &str) -> Markup {
    let finite = || all.iter().flat_map(|(_, points)| *points).filter(|(_, y)| y.is_finite());
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (first, last) = range(&mut finite().map(|(x, _)| *x));
    let (low, high) = range(&mut finite().map(|(_, y)| *y));
    if low > high {
        return html! { p { "no finite value" } };
    }
    // A flat curve gets a range of its own size.
    let (low, high) = if low < high {
        (low, high)
    } else {
        (low - low.abs() / 2.0, high + high.abs() / 2.0 + 1e-9)
    };
    let x = |step: f64| LEFT + (step - first) / (last - first).max(1.0) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(format!("{name} by step")) {
            @for value in ticks(low, high) {
                line.grid x1=(px(LEFT)) x2=(px(WIDTH - RIGHT)) y1=(px(y(value))) y2=(px(y(value))) {}
                text.tick text-anchor="end" x=(px(LEFT - 8.0)) y=(px(y(value) + 4.0)) { (label(value)) }
            }
            @for step in ticks(first, last).into_iter().filter(|step| step.fract() == 0.0) {
                text.tick text-anchor="middle" x=(px(x(step))) y=(px(HEIGHT - 6.0)) { (step) }
            }
            @for (colour, points) in all {
                @let line = points.iter().filter(|(_, value)| value.is_finite());
                @let line: Vec<String> = line.map(|(step, value)| format!("{},{}", px(x(*step)), px(y(*value)))).collect();
                polyline class=(format!("curve c{colour}")) points=(line.join(" ")) {}
                // One point makes no line.
                @if let [(step, value)] = points {
                    circle class=(format!("c{colour}")) cx=(px(x(*step))) cy=(px(y(*value))) r="3" {}
                }
            }
        }
    }
}

fn label(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-2 {
        format!("{value:.1e}")
    } else {
        format!("{}", (value * 1e6).round() / 1e6)
    }
}

/// Returns three to seven multiples of 1, 2 or 5 times a power of ten within a range.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low).max(f64::MIN_POSITIVE) / 4.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|own| own * power).into_iter().find(|own| *own >= rough);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
    (first..=last).map(|at| at as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(count: usize) -> Vec<TrainingStep> {
        let step = |step| TrainingStep {
            step,
            loss: 4.0 / step as f64,
            gradient: 1.0,
            learning_rate: 2e-4,
            tokens: 100,
            seconds: 0.5,
        };
        (1..=count).map(step).collect()
    }

    #[test]
    fn the_page_of_a_training() {
        let page = training(&[("model", "<demo>".to_owned())], &steps(3), &[(0, 3.0), (3, 2.5)]);
        insta::assert_snapshot!(page.replace("><", ">\n<"));
    }

    #[test]
    fn long_trainings_are_thinned_out() {
        let page = training(&[], &steps(100_000), &[]);
        assert!(page.len() < 400_000 && page.contains(">100000<"), "{}", page.len());
        assert!(page.matches("<tr>").count() <= ROWS + 2);
    }

    #[test]
    fn a_diverged_step_and_a_single_one_have_a_page() {
        let mut diverged = steps(4);
        diverged[2].loss = f64::NAN;
        for page in [&diverged[..], &steps(1), &[]].map(|steps| training(&[], steps, &[])) {
            assert!(!page.contains("points=\"NaN") && !page.contains("inf"), "{page}");
        }
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(0.0, 4.0), [0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(ticks(0.7, 4.4), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(ticks(1.0, 1000.0), [500.0, 1000.0]);
    }
}
