//! Formats a comparison as one table with a legend.

use report::{Align, Style, Table, digits, error};

use super::numbers::{Agreement, Choice};
use super::program::{Rate, Speed};
use super::{Report, Row};

pub(super) fn document(report: &Report, style: Style) -> String {
    let mut out = style.escape(&facts(report)) + "\n";
    out += &table(report).render(style);
    out + "\n" + &style.escape(&reading(report))
}

/// Formats the model, the prompt and the text in one line.
fn facts(report: &Report) -> String {
    let Report { model, profile, prompt, text, .. } = report;
    let mut out = model.clone();
    if let Some(profile) = profile {
        out += &format!(", cuda as {profile}");
    }
    out += &format!(": a prompt of {}", tokens(prompt.len()));
    if let Some(text) = text {
        let scored = tokens(text.scored_tokens);
        out +=
            &format!("; perplexity over {scored} of {}, in windows of {}", text.file, text.window);
    }
    out + "\n"
}

fn tokens(count: usize) -> String {
    if count == 1 { "1 token".into() } else { format!("{count} tokens") }
}

/// Builds a table with one column per subject, because several subjects fit side by side on a terminal.
fn table(report: &Report) -> Table {
    let names = report.rows.iter().map(|row| (row.name.clone(), Align::Left));
    let mut table = Table::new([(String::new(), Align::Left)].into_iter().chain(names));
    let compared = report.rows.iter().any(|row| row.agreement.is_some());
    let mut line = |label: &str, of: &dyn Fn(&Row) -> Option<String>| {
        let cells: Vec<_> = report.rows.iter().map(|row| of(row).unwrap_or_default()).collect();
        if cells.iter().any(|cell| !cell.is_empty()) {
            table.row([label.to_owned()].into_iter().chain(cells));
        }
    };
    line("device", &|row| Some(row.device.clone()));
    line("computes in", &|row| Some(precision(row.speed.as_ref()?)));
    line("greedy tokens", &|row| match &row.agreement {
        Some(Agreement { equal_tokens, greedy_tokens, .. }) => {
            Some(format!("{equal_tokens} of {greedy_tokens} equal"))
        }
        None => {
            let led = compared && report.reference.as_ref() == Some(&row.name);
            led.then(|| "reference".into())
        }
    });
    line("first difference", &|row| pair(row, token));
    line("logit gap there", &|row| pair(row, |choice| digits(choice.gap.into())));
    line("KL mean", &|row| Some(error(row.agreement.as_ref()?.kl_mean)));
    line("KL max", &|row| Some(error(row.agreement.as_ref()?.kl_max)));
    line("max difference", &|row| Some(error(row.agreement.as_ref()?.max_difference)));
    line("perplexity", &|row| Some(format!("{:.4}", row.perplexity?)));
    line("prompt tokens/s", &|row| Some(rate(row.speed.as_ref()?.prompt)));
    line("tokens/s", &|row| Some(rate(row.speed.as_ref()?.generate)));
    line("error", &|row| Some(row.failure.as_ref()?.what.clone()));
    table
}

fn precision(speed: &Speed) -> String {
    let quant = speed.quant.as_ref().map(|quant| format!(", {quant}"));
    let kv = if speed.kv == "float" { String::new() } else { format!(", kv {}", speed.kv) };
    format!("{}{}{kv}", speed.compute, quant.unwrap_or_default())
}

fn token(choice: &Choice) -> String {
    let text = choice.text.as_ref().map(|text| format!(" {text:?}"));
    format!("{}{}", choice.token, text.unwrap_or_default())
}

/// Formats both sides of a divergence, the reference first.
fn pair(row: &Row, of: impl Fn(&Choice) -> String) -> Option<String> {
    let parted = row.agreement.as_ref()?.divergence.as_ref()?;
    Some(format!("{} / {}", of(&parted.reference), of(&parted.here)))
}

fn rate(rate: Rate) -> String {
    format!("{} ± {}", digits(rate.mean), digits(rate.deviation))
}

/// Explains the lines of the table, or why some are missing.
fn reading(report: &Report) -> String {
    let Some(name) = &report.reference else { return "No backend has results.\n".into() };
    let mut agreements = report.rows.iter().filter_map(|row| row.agreement.as_ref()).peekable();
    let Some(first) = agreements.peek() else {
        return format!("Only {name} has results, so the comparison is empty.\n");
    };
    let passed = report.prompt.len() + first.greedy_tokens.saturating_sub(1);
    let mut out = String::new();
    if agreements.any(|agreement| agreement.divergence.is_some()) {
        out += &format!(
            "- first difference: token of {name} / of the subject; logit gap: logit of the chosen token \
             minus that of the other side's token, on each side\n"
        );
    }
    out + &format!(
        "- KL mean, KL max: KL({name} || other) in nats; max difference: of two logits, relative to the largest of \
         {name}; both over the {passed} tokens of the prompt and the greedy output of {name}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::numbers::Divergence;
    use super::super::program::Failure;
    use super::super::{Text, tests::row};
    use super::*;

    fn speed(compute: &str, quant: Option<&str>) -> Option<Speed> {
        let rate = |tokens, mean| Rate { tokens, mean, deviation: mean / 64.0 };
        let quant = quant.map(str::to_owned);
        let (prompt, generate) = (rate(4, 25_200.0), rate(64, 431.25));
        let kv = if quant.is_some() { "int8" } else { "float" };
        Some(Speed { compute: compute.into(), quant, kv: kv.into(), prompt, generate })
    }

    fn agreement(equal_tokens: usize, divergence: Option<Divergence>) -> Option<Agreement> {
        let (kl_mean, kl_max, max_difference) = (2.5e-4, 1.0e-3, 0.0125);
        let greedy_tokens = 64;
        Some(Agreement { equal_tokens, greedy_tokens, divergence, kl_mean, kl_max, max_difference })
    }

    fn report(rows: Vec<Row>) -> Report {
        Report {
            model: "models/demo".into(),
            profile: Some("rtx4090".into()),
            prompt: vec![0, 5, 6, 7],
            text: Some(Text { file: "story <1>.txt".into(), scored_tokens: 1021, window: 512 }),
            reference: Some("cuda".into()),
            rows,
        }
    }

    #[test]
    fn every_subject_has_a_column() {
        let choice =
            |token, text: Option<&str>, gap| Choice { token, text: text.map(Into::into), gap };
        let parted = |text: [Option<&str>; 2]| Divergence {
            reference: choice(326, text[0], 0.248),
            here: choice(260, text[1], 0.009_884),
        };
        let failure = Failure { what: "out of memory | 4 GiB".into(), refusal: None };
        let perplexity = Some(8.527_97);
        let report = report(vec![
            Row { perplexity, speed: speed("bf16", None), ..row("cuda") },
            Row {
                agreement: agreement(1, Some(parted([Some(" his"), Some("\n\"")]))),
                perplexity: Some(8.6964),
                speed: speed("bf16", Some("4-bit")),
                ..row("vulkan nf4, kv int8")
            },
            Row {
                agreement: agreement(9, Some(parted([None; 2]))),
                failure: Some(failure),
                ..row("webgpu")
            },
            Row {
                agreement: agreement(64, None),
                perplexity,
                speed: speed("f32", None),
                ..row("cpu")
            },
        ]);
        insta::assert_snapshot!(document(&report, Style::Markdown));
    }

    #[test]
    fn one_backend_has_nothing_to_be_compared_with() {
        let mut report = report(vec![Row { speed: speed("f32", None), ..row("cuda") }]);
        (report.text, report.profile) = (None, None);
        insta::assert_snapshot!(document(&report, Style::Terminal));
    }
}
