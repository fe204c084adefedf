//! Writes the Chrome trace format, for Perfetto and chrome://tracing.
//!
//! Source: "Trace Event Format" (Google, 2016): complete events `X`, counters `C`, metadata `M`; times in
//! microseconds. The categories are those of PyTorch's profiler.

use serde_json::{Value, json};

use crate::{Clock, Launch, Trace};

#[cfg(test)]
mod format;

/// Process numbers of the host and the device. Processes and threads count from 1: Perfetto reserves 0 for the idle
/// process, and has merged threads 0 and 1 (google/perfetto issue 394, thoren-d/tracing-chrome issue 32).
const HOST: u32 = 1;
const DEVICE: u32 = 2;

impl Trace {
    /// Formats the trace as JSON: spans by thread, launches on rows of the device, memory as counters.
    pub fn chrome(&self, device: &str) -> String {
        let mut events =
            vec![named("process_name", HOST, 1, "host"), named("process_name", DEVICE, 1, device)];
        let rows = rows(&self.launches);
        for row in 0..count(rows.iter().copied()) {
            let row = row + 1;
            events.push(named("thread_name", DEVICE, row, &format!("kernels {row}")));
        }
        for thread in 0..count(self.spans.iter().map(|span| span.thread)) {
            events.push(named("thread_name", HOST, thread + 1, &format!("thread {thread}")));
        }
        for span in &self.spans {
            let category = if span.cost.is_some() { "cpu_op" } else { "user_annotation" };
            let mut event = complete(&span.name, category, span.begin_ns, span.end_ns);
            event["pid"] = HOST.into();
            event["tid"] = (span.thread + 1).into();
            if let Some(cost) = span.cost {
                event["args"] = json!({ "flops": cost.flops, "bytes": cost.bytes });
            }
            events.push(event);
        }
        for (launch, row) in self.launches.iter().zip(rows) {
            let mut event = complete(&launch.kernel, "kernel", launch.begin_ns, launch.end_ns);
            event["pid"] = DEVICE.into();
            event["tid"] = (row + 1).into();
            let clock = match launch.clock {
                Clock::Device => "device",
                Clock::Host => "host",
            };
            // Outermost span first.
            let mut spans: Vec<&str> =
                self.outwards(launch.span).map(|at| self.spans[at].name.as_str()).collect();
            spans.reverse();
            event["args"] = json!({ "clock": clock, "of": spans.join(" / ") });
            events.push(event);
        }
        for read in &self.memory {
            events.push(json!({
                "name": "memory", "ph": "C", "pid": DEVICE, "ts": microseconds(read.at_ns),
                "args": { "used": read.used, "kept": read.reserved.saturating_sub(read.used) },
            }));
        }
        json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string()
    }
}

/// Assigns each launch to the first free row. Viewers drop an event that overlaps another on its row. Launches of
/// several queues overlap, and so do times from the host's clock.
fn rows(launches: &[Launch]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..launches.len()).collect();
    order.sort_by_key(|at| launches[*at].begin_ns);
    let (mut rows, mut ends) = (vec![0; launches.len()], Vec::new());
    for at in order {
        let Launch { begin_ns, end_ns, .. } = launches[at];
        // A viewer may truncate to whole microseconds, so adjacent launches could overlap.
        let row = ends.iter().position(|end| *end < begin_ns).unwrap_or(ends.len());
        ends.resize(ends.len().max(row + 1), 0);
        (rows[at], ends[row]) = (row, end_ns);
    }
    rows
}

fn count(numbers: impl Iterator<Item = usize>) -> usize {
    numbers.max().map_or(0, |max| max + 1)
}

fn complete(name: &str, category: &str, begin_ns: u64, end_ns: u64) -> Value {
    let duration = end_ns.saturating_sub(begin_ns);
    json!({
        "name": name, "cat": category, "ph": "X",
        "ts": microseconds(begin_ns), "dur": microseconds(duration),
    })
}

fn named(kind: &str, pid: u32, tid: usize, name: &str) -> Value {
    json!({ "name": kind, "ph": "M", "pid": pid, "tid": tid, "args": { "name": name } })
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use tune::Cost;

    use super::*;
    use crate::{Memory, Span};

    fn span(name: &str, parent: Option<usize>, thread: usize, times: [u64; 2]) -> Span {
        let [begin_ns, end_ns] = times;
        Span { name: name.to_owned(), parent, thread, begin_ns, end_ns, cost: None }
    }

    fn launch(kernel: &str, span: Option<usize>, times: [u64; 2]) -> Launch {
        let [begin_ns, end_ns] = times;
        Launch { kernel: kernel.to_owned(), span, begin_ns, end_ns, clock: Clock::Device }
    }

    /// Two threads and three launches. Two launches overlap, and the last one is listed first.
    fn trace() -> Trace {
        let cost = Some(Cost { flops: 8, bytes: 6 });
        Trace {
            spans: vec![
                span("layer \"0\"", None, 0, [1500, 4000]),
                Span { cost, ..span("matmul", Some(0), 0, [1500, 3900]) },
                span("layer 1", None, 1, [1600, 4100]),
            ],
            launches: vec![
                launch("late", Some(2), [3700, 4500]),
                launch("product", Some(1), [2000, 3500]),
                launch("add_parts", Some(1), [3500, 3800]),
            ],
            memory: vec![
                Memory { at_ns: 3000, used: 5, reserved: 7 },
                Memory { at_ns: 4000, used: 6, reserved: 6 },
            ],
            untimed: 0,
        }
    }

    #[test]
    fn spans_launches_and_memory_are_told() {
        let parsed: Value = serde_json::from_str(&trace().chrome("card")).expect("JSON");
        let events = parsed["traceEvents"].as_array().expect("a list");
        let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
        let [layer, product, _, _, kernel, _] = of("X")[..] else { panic!("{events:?}") };
        assert_eq!(
            (&layer["name"], &layer["ts"], &layer["dur"]),
            (&json!("layer \"0\""), &json!(1.5), &json!(2.5))
        );
        assert_eq!(
            (&product["cat"], &product["args"]),
            (&json!("cpu_op"), &json!({ "flops": 8, "bytes": 6 }))
        );
        assert_eq!(kernel["args"]["of"], "layer \"0\" / matmul");
        assert_eq!((&kernel["pid"], &kernel["cat"]), (&json!(2), &json!("kernel")));
        assert_eq!(of("C")[0]["args"], json!({ "used": 5, "kept": 2 }));
    }

    #[test]
    fn a_viewer_shows_every_event_on_a_row_with_a_name() {
        let rows = format::rows(&trace().chrome("card")).expect("as the format asks for");
        let names = |row: (u64, u64)| -> Vec<&str> {
            rows[&row].iter().map(|(_, _, name)| name.as_str()).collect()
        };
        assert_eq!(names((1, 1)), ["layer \"0\"", "matmul"], "the outer one first");
        assert_eq!(names((1, 2)), ["layer 1"]);
        // `add_parts` begins when `product` ends and overlaps `late`.
        assert_eq!((names((2, 1)), names((2, 2))), (vec!["product", "late"], vec!["add_parts"]));
        assert_eq!(rows.len(), 4);
        assert!(format::rows(&Trace::default().chrome("card")).expect("no event").is_empty());
    }

    #[test]
    fn a_broken_file_is_told_from_a_good_one() {
        let good: Value = serde_json::from_str(&trace().chrome("card")).expect("JSON");
        let find = |phase: &str, name: &str| {
            let events = good["traceEvents"].as_array().expect("a list");
            events.iter().position(|e| e["ph"] == phase && e["name"] == name).expect("there")
        };
        let refused = |phase: &str, name: &str, field: &str, value: Value, why: &str| {
            let mut broken = good.clone();
            broken["traceEvents"][find(phase, name)][field] = value;
            let error = format::rows(&broken.to_string()).expect_err(why);
            assert!(error.contains(why), "{error}");
        };
        for field in ["name", "cat", "ph"] {
            refused("X", "matmul", field, json!(""), &format!("{field} is not a string"));
        }
        refused("X", "matmul", "ts", Value::Null, "ts is not a time");
        refused("X", "matmul", "dur", json!("2.4"), "dur is not a time");
        refused("X", "matmul", "dur", json!(-1), "dur is not a time");
        refused("X", "matmul", "args", json!([8, 6]), "args is not an object");
        refused("X", "matmul", "ph", json!("B"), "unknown phase B");
        refused("X", "matmul", "pid", json!(0), "pid is not a number above 0");
        refused("X", "matmul", "tid", json!("main"), "tid is not a number above 0");
        refused("X", "matmul", "tid", json!(9), "no thread_name for process 1, thread 9");
        refused("X", "matmul", "ts", json!(1.7), "layer \"0\" ends within matmul");
        refused("X", "late", "tid", json!(2), "add_parts ends within late");
        refused("C", "memory", "args", json!({}), "the args of a counter are not numbers");
        refused(
            "C",
            "memory",
            "args",
            json!({ "used": "5" }),
            "the args of a counter are not numbers",
        );
        refused("C", "memory", "args", json!({ "used": 5 }), "changes its series");
        refused("C", "memory", "ts", json!("3"), "ts is not a time");
        refused("M", "process_name", "args", json!({}), "name is not a string");
        refused("M", "process_name", "pid", json!(2), "named twice");
        refused("M", "thread_name", "name", json!("thread"), "unknown metadata");
    }
}
