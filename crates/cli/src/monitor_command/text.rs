//! Formats readings for people, as JSON lines and as CSV.

use console::{Term, truncate_str};
use flashover::monitor::{Quantity, Reading, Warning, Why};
use serde::Serialize;
use serde_json::Value;

/// Line width in columns if standard output is not a terminal.
pub(super) const WIDTH: usize = 100;

/// A reading with its time and its warnings.
#[derive(Serialize)]
struct Line<'a> {
    time: &'a str,
    #[serde(flatten)]
    reading: &'a Reading,
    warnings: Vec<Warning>,
}

impl<'a> Line<'a> {
    fn new(time: &'a str, reading: &'a Reading) -> Self {
        Self { time, reading, warnings: reading.warnings() }
    }
}

pub(super) fn json(time: &str, readings: &[Reading]) -> serde_json::Result<String> {
    let line = |reading| Ok(serde_json::to_string(&Line::new(time, reading))? + "\n");
    readings.iter().map(line).collect()
}

/// CSV rows of one table. The header precedes the first row.
#[derive(Default)]
pub(super) struct Table {
    begun: bool,
}

impl Table {
    pub(super) fn rows(&mut self, time: &str, readings: &[Reading]) -> anyhow::Result<String> {
        let mut rows = csv::Writer::from_writer(Vec::new());
        for reading in readings {
            let line = serde_json::to_value(Line::new(time, reading))?;
            let fields = || line.as_object().into_iter().flatten();
            if !self.begun {
                rows.write_record(fields().map(|(name, _)| name))?;
                self.begun = true;
            }
            rows.write_record(fields().map(|(_, value)| cell(value)))?;
        }
        Ok(String::from_utf8(rows.into_inner()?)?)
    }
}

/// Formats a value as one cell: a list as its words, a warning as its kind, a lack as its quantities.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(list) => list.iter().map(cell).collect::<Vec<_>>().join(" "),
        Value::Object(fields) => ["kind", "quantities"]
            .iter()
            .find_map(|name| fields.get(*name))
            .map_or_else(String::new, cell),
        other => other.to_string(),
    }
}

/// A terminal on which each sample replaces the previous one.
#[derive(Default)]
pub(super) struct Screen {
    lines: usize,
}

impl Screen {
    pub(super) fn frame(&mut self, time: &str, readings: &[Reading]) -> String {
        let (rows, columns) = Term::stdout().size();
        self.drawn(time, readings, rows.into(), columns.into())
    }

    /// Draws a sample over the previous one and clears the rest of it. Cuts off lines beyond the height of the
    /// terminal, because the cursor cannot return to lines that have scrolled away.
    fn drawn(&mut self, time: &str, readings: &[Reading], rows: usize, columns: usize) -> String {
        let text = blocks(time, readings, columns);
        let mut frame = match self.lines {
            0 => String::new(),
            lines => format!("\x1b[{lines}F"),
        };
        self.lines = 0;
        for line in text.lines().take(rows.saturating_sub(1).max(1)) {
            frame += &truncate_str(line, columns, "");
            frame += "\x1b[K\n";
            self.lines += 1;
        }
        frame + "\x1b[J"
    }
}

/// Formats a sample for people in lines of at most `width` columns, except for longer words.
pub(super) fn blocks(time: &str, readings: &[Reading], width: usize) -> String {
    let mut text = format!("{time}\n");
    for reading in readings {
        let Reading { index, name, kind, .. } = reading;
        text += &format!("{index}  {name} ({})\n", kind.name());
        for (label, value) in measured(reading) {
            text += &wrapped(&format!("   {label:<11}  "), &value, width);
        }
        for lack in &reading.lacks {
            let names: Vec<&str> = lack.quantities.iter().copied().map(Quantity::name).collect();
            let what = format!("{}: {}", names.join(", "), lack.said);
            text += &wrapped(&format!("   {:<11}  ", "unavailable"), &what, width);
            if can_be_helped(lack.why) {
                text += &wrapped("   hint: ", &lack.hint, width);
            }
        }
        for warning in reading.warnings() {
            text += &wrapped("   warning: ", &warning.said, width);
            text += &wrapped("   hint: ", &warning.advice, width);
        }
    }
    text
}

/// Returns true if the user can fix the cause.
const fn can_be_helped(why: Why) -> bool {
    matches!(why, Why::NvmlNotFound | Why::Driver | Why::NoPermission | Why::Failed)
}

/// Lists the names and values of the known quantities.
fn measured(reading: &Reading) -> Vec<(&'static str, String)> {
    let r = reading;
    let of = |have: Option<String>, max: Option<String>, unit: &str| {
        let have = have?;
        Some(max.map_or_else(|| format!("{have} {unit}"), |max| format!("{have} of {max} {unit}")))
    };
    let whole = |watts: Option<f64>| watts.map(|watts| format!("{watts:.0}"));
    let gib = |bytes: Option<u64>| bytes.map(|b| format!("{:.1}", b as f64 / f64::from(1 << 30)));
    let mhz = |mhz: Option<u32>| mhz.map(|mhz| mhz.to_string());
    let percent = |name: &str, share: Option<f64>| share.map(|share| format!("{name}{share:.0} %"));
    let clocks = of(mhz(r.sm_clock_mhz), mhz(r.sm_clock_max_mhz), "MHz");
    let memory_clock = r.memory_clock_mhz.map(|mhz| format!("memory {mhz} MHz"));
    let load = percent("", r.utilisation_percent);
    let memory_load = percent("memory busy ", r.memory_utilisation_percent);
    let reasons = r.throttle_reasons.as_ref().filter(|reasons| !reasons.is_empty());
    let reasons = reasons.map(|all| all.iter().map(|r| r.name()).collect::<Vec<_>>().join(", "));
    let rows = [
        ("utilisation", joined(load, memory_load)),
        ("memory", of(gib(r.memory_used_bytes), gib(r.memory_total_bytes), "GiB")),
        ("power", of(whole(r.power_w), whole(r.power_limit_w), "W")),
        ("energy", r.energy_j.map(|joules| format!("{:.1} kJ", joules / 1e3))),
        ("temperature", r.temperature_c.map(|celsius| format!("{celsius} C"))),
        ("fan", r.fan_percent.map(|percent| format!("{percent} %"))),
        ("clocks", joined(clocks, memory_clock)),
        ("limited by", reasons),
    ];
    rows.into_iter().filter_map(|(label, value)| Some((label, value?))).collect()
}

fn joined(one: Option<String>, two: Option<String>) -> Option<String> {
    let both: Vec<String> = [one, two].into_iter().flatten().collect();
    (!both.is_empty()).then(|| both.join(", "))
}

/// Wraps `text` after `head`. Continuation lines are indented to the start of `text`.
fn wrapped(head: &str, text: &str, width: usize) -> String {
    let indent = head.chars().count();
    let (mut out, mut column) = (head.to_owned(), indent);
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent && column + 1 + length > width {
            out += &format!("\n{:indent$}", "");
            column = indent;
        } else if column > indent {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += length;
    }
    out.trim_end().to_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: &str = "2026-11-22T10:00:00Z";

    /// Readings of a hot card at its power limit and of a CPU.
    fn readings() -> Vec<Reading> {
        let lack = |why: &str, quantities: &[&str], said: &str| serde_json::json!({ "why": why, "quantities": quantities, "said": said, "hint": "none" });
        let card = serde_json::json!({
            "index": 0, "kind": "nvidia", "name": "NVIDIA H200, \"SXM\"", "id": "GPU-1f",
            "temperature_c": 88, "power_w": 698.6, "power_limit_w": 700.0,
            "sm_clock_mhz": 1755, "sm_clock_max_mhz": 1980, "memory_clock_mhz": 3201,
            "memory_used_bytes": 75161927680u64, "memory_total_bytes": 150754820096u64,
            "utilisation_percent": 97.0, "memory_utilisation_percent": 45.0,
            "energy_j": 1234.567, "throttle_reasons": ["power_cap"],
            "lacks": [lack("not_supported", &["fan_percent"], "the card does not have it")],
        });
        let cpu = serde_json::json!({
            "index": 1, "kind": "cpu", "name": "a CPU", "id": "",
            "memory_used_bytes": 1u64 << 30, "memory_total_bytes": 4u64 << 30,
            "utilisation_percent": 12.5,
            "lacks": [lack("not_told", &["temperature_c", "power_w"], "/proc does not tell")],
        });
        serde_json::from_value(Value::Array(vec![card, cpu])).expect("readings")
    }

    #[test]
    fn people_get_a_block_a_device() {
        let text = blocks(TIME, &readings(), 72);
        assert!(text.lines().all(|line| line.chars().count() <= 72), "{text}");
        assert_eq!(text, include_str!("blocks.txt"));
    }

    #[test]
    fn what_can_be_helped_has_its_hint() {
        let mut cpu = readings().remove(1);
        let hint = "\n   hint: none\n";
        assert!(!blocks(TIME, &[cpu.clone()], WIDTH).contains(hint));
        cpu.lacks[0].why = Why::NoPermission;
        assert!(blocks(TIME, &[cpu], WIDTH).ends_with(hint));
    }

    #[test]
    fn json_is_a_line_a_reading_with_time_and_warnings() {
        let text = json(TIME, &readings()).expect("plain fields");
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let [card, cpu] = &lines[..] else { panic!("two readings") };
        assert_eq!((&card["time"], &card["temperature_c"]), (&TIME.into(), &88.into()));
        assert_eq!(card["warnings"][0]["kind"], "heat");
        assert_eq!(card["warnings"][1]["kind"], "power_cap");
        assert_eq!(cpu["lacks"][0]["quantities"][1], "power_w");
        assert!(cpu["power_w"].is_null() && cpu["warnings"] == serde_json::json!([]));
    }

    #[test]
    fn csv_has_its_columns_once_and_as_many_cells() {
        let mut table = Table::default();
        let rows = |table: &mut Table| table.rows(TIME, &readings()).expect("plain fields");
        let text = rows(&mut table) + &rows(&mut table);
        let mut file = csv::Reader::from_reader(text.as_bytes());
        let columns = file.headers().expect("a first line").clone();
        let records: Vec<csv::StringRecord> =
            file.records().collect::<Result<_, _>>().expect("as many cells as columns");
        assert_eq!((columns.get(0), records.len()), (Some("time"), 4));
        let at = |record: usize, name: &str| {
            let column = columns.iter().position(|column| column == name);
            &records[record][column.expect(name)]
        };
        assert_eq!((at(0, "name"), at(0, "temperature_c")), ("NVIDIA H200, \"SXM\"", "88"));
        assert_eq!((at(2, "warnings"), at(2, "throttle_reasons")), ("heat power_cap", "power_cap"));
        assert_eq!((at(3, "power_w"), at(3, "lacks")), ("", "temperature_c power_w"));
    }

    #[test]
    fn a_frame_replaces_the_last_one_and_fits_the_terminal() {
        let mut screen = Screen::default();
        let first = screen.drawn(TIME, &readings(), 6, 20);
        assert!(first.starts_with(TIME) && first.ends_with("\n\x1b[J"), "{first:?}");
        assert_eq!(first.matches('\n').count(), 5, "a row is left for the cursor");
        let text = first.replace("\x1b[K", "").replace("\x1b[J", "");
        assert!(text.lines().all(|line| line.chars().count() <= 20), "{text}");
        let second = screen.drawn(TIME, &readings()[1..], 50, 72);
        assert!(second.starts_with("\x1b[5F2026-"), "{second:?}");
    }
}
