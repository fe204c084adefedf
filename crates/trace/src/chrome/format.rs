//! Checks a file against the requirements of Perfetto and chrome://tracing, for tests.
//!
//! Source: "Trace Event Format" (Google, 2016). Perfetto also drops events that overlap on one row, and processes and
//! threads with number 0.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// Events (begin, end, name) by row (process, thread). Times in nanoseconds.
pub(crate) type Rows = BTreeMap<(u64, u64), Vec<(u64, u64, String)>>;

/// Returns the complete events of a file by row.
///
/// # Errors
/// An event that a viewer would refuse, drop or show without a name.
pub(crate) fn rows(text: &str) -> Result<Rows, String> {
    let file: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    if !matches!(file["displayTimeUnit"].as_str(), Some("ms" | "ns")) {
        return Err("expected displayTimeUnit ms or ns".to_owned());
    }
    let events = file["traceEvents"].as_array().ok_or("traceEvents is not a list")?;
    let mut rows = Rows::new();
    let mut names = BTreeSet::new();
    let mut counted = BTreeMap::new();
    for event in events {
        let refused = |why: String| format!("{why}: {event}");
        event_of(event, &mut rows, &mut names, &mut counted).map_err(refused)?;
    }
    for (process, thread) in rows.keys() {
        for name in [("process_name", *process, 0), ("thread_name", *process, *thread)] {
            if !names.contains(&name) {
                return Err(format!("no {} for process {process}, thread {thread}", name.0));
            }
        }
    }
    for (row, events) in &mut rows {
        // The outer event comes first if two begin at the same time.
        events.sort_by_key(|(begin, end, _)| (*begin, u64::MAX - end));
        nested(events).map_err(|why| format!("row {row:?}: {why}"))?;
    }
    Ok(rows)
}

type Names = BTreeSet<(&'static str, u64, u64)>;

fn event_of<'a>(
    event: &'a Value,
    rows: &mut Rows,
    names: &mut Names,
    counted: &mut BTreeMap<(u64, &'a str), Vec<&'a String>>,
) -> Result<(), String> {
    let event = event.as_object().ok_or("not an object")?;
    let name = text(event, "name")?;
    let process = number(event, "pid")?;
    match text(event, "ph")? {
        "X" => {
            text(event, "cat")?;
            let (begin, length) = (nanoseconds(event, "ts")?, nanoseconds(event, "dur")?);
            if event.get("args").is_some_and(|args| !args.is_object()) {
                return Err("args is not an object".to_owned());
            }
            let row = rows.entry((process, number(event, "tid")?)).or_default();
            row.push((begin, begin + length, name.to_owned()));
        }
        "C" => {
            nanoseconds(event, "ts")?;
            let series = object(event)?;
            if series.is_empty() || !series.values().all(Value::is_u64) {
                return Err("the args of a counter are not numbers".to_owned());
            }
            let series: Vec<_> = series.keys().collect();
            if *counted.entry((process, name)).or_insert_with(|| series.clone()) != series {
                return Err("a counter changes its series".to_owned());
            }
        }
        "M" => {
            text(object(event)?, "name")?;
            let new = match name {
                "process_name" => names.insert(("process_name", process, 0)),
                "thread_name" => names.insert(("thread_name", process, number(event, "tid")?)),
                _ => return Err("unknown metadata".to_owned()),
            };
            if !new {
                return Err("named twice".to_owned());
            }
        }
        other => return Err(format!("unknown phase {other}")),
    }
    Ok(())
}

/// Checks that the events of a row are nested or sequential.
fn nested(events: &[(u64, u64, String)]) -> Result<(), String> {
    let mut open: Vec<&(u64, u64, String)> = Vec::new();
    for event in events {
        while open.last().is_some_and(|(_, end, _)| *end <= event.0) {
            open.pop();
        }
        if let Some(around) = open.last().filter(|around| around.1 < event.1) {
            return Err(format!("{} ends within {}", around.2, event.2));
        }
        open.push(event);
    }
    Ok(())
}

fn object(event: &Map<String, Value>) -> Result<&Map<String, Value>, String> {
    event.get("args").and_then(Value::as_object).ok_or_else(|| "args is not an object".to_owned())
}

fn text<'a>(event: &'a Map<String, Value>, name: &str) -> Result<&'a str, String> {
    let text = event.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    text.ok_or_else(|| format!("{name} is not a string"))
}

/// Returns the number of a process or a thread; 0 is reserved for the idle process.
fn number(event: &Map<String, Value>, name: &str) -> Result<u64, String> {
    let number = event.get(name).and_then(Value::as_u64).filter(|number| *number > 0);
    number.ok_or_else(|| format!("{name} is not a number above 0"))
}

fn nanoseconds(event: &Map<String, Value>, name: &str) -> Result<u64, String> {
    let us = event.get(name).and_then(Value::as_f64).filter(|us| (0.0..1e15).contains(us));
    us.map(|us| (us * 1e3).round() as u64).ok_or_else(|| format!("{name} is not a time"))
}
