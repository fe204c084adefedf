//! The Chrome trace format, which Perfetto and chrome://tracing open.
//!
//! Source: "Trace Event Format" (Google, 2016): complete events `X`, counters `C`, metadata `M`; times in
//! microseconds. Categories are those of PyTorch's profiler.

use serde_json::{Value, json};

use crate::{Clock, Trace};

/// The host, and the device.
const HOST: u32 = 0;
const DEVICE: u32 = 1;

impl Trace {
    /// The trace as JSON: spans by thread, launches on the device's row, memory as counters.
    pub fn chrome(&self, device: &str) -> String {
        let mut events = vec![
            named("process_name", HOST, None, "host"),
            named("process_name", DEVICE, None, device),
            named("thread_name", DEVICE, Some(0), "kernels"),
        ];
        let threads = self.spans.iter().map(|span| span.thread + 1).max().unwrap_or(0);
        for thread in 0..threads {
            events.push(named("thread_name", HOST, Some(thread), &format!("thread {thread}")));
        }
        for span in &self.spans {
            let category = if span.cost.is_some() { "cpu_op" } else { "user_annotation" };
            let mut event = complete(&span.name, category, span.begin_ns, span.end_ns);
            event["pid"] = HOST.into();
            event["tid"] = span.thread.into();
            if let Some(cost) = span.cost {
                event["args"] = json!({ "flops": cost.flops, "bytes": cost.bytes });
            }
            events.push(event);
        }
        for launch in &self.launches {
            let mut event = complete(&launch.kernel, "kernel", launch.begin_ns, launch.end_ns);
            event["pid"] = DEVICE.into();
            event["tid"] = 0.into();
            let clock = match launch.clock {
                Clock::Device => "device",
                Clock::Host => "host",
            };
            // From the outermost span inwards.
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

fn complete(name: &str, category: &str, begin_ns: u64, end_ns: u64) -> Value {
    let duration = end_ns.saturating_sub(begin_ns);
    json!({
        "name": name, "cat": category, "ph": "X",
        "ts": microseconds(begin_ns), "dur": microseconds(duration),
    })
}

fn named(kind: &str, pid: u32, tid: Option<usize>, name: &str) -> Value {
    json!({ "name": kind, "ph": "M", "pid": pid, "tid": tid.unwrap_or(0), "args": { "name": name } })
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use tune::Cost;

    use super::*;
    use crate::{Launch, Memory, Span};

    #[test]
    fn every_event_has_what_the_format_asks_for() {
        let span = |name: &str, parent, cost| Span {
            name: name.to_owned(),
            parent,
            thread: 0,
            begin_ns: 1500,
            end_ns: 4000,
            cost,
        };
        let trace = Trace {
            spans: vec![
                span("layer \"0\"", None, None),
                span("matmul", Some(0), Some(Cost { flops: 8, bytes: 6 })),
            ],
            launches: vec![Launch {
                kernel: "product".to_owned(),
                span: Some(1),
                begin_ns: 2000,
                end_ns: 3500,
                clock: Clock::Device,
            }],
            memory: vec![Memory { at_ns: 3000, used: 5, reserved: 7 }],
            untimed: 0,
        };
        let parsed: Value = serde_json::from_str(&trace.chrome("card")).expect("JSON");
        let events = parsed["traceEvents"].as_array().expect("a list");
        let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
        let [layer, product, kernel] = of("X")[..] else { panic!("{events:?}") };
        assert_eq!(
            (&layer["name"], &layer["ts"], &layer["dur"]),
            (&json!("layer \"0\""), &json!(1.5), &json!(2.5))
        );
        assert_eq!(
            (&product["cat"], &product["args"]),
            (&json!("cpu_op"), &json!({ "flops": 8, "bytes": 6 }))
        );
        assert_eq!(kernel["args"]["of"], "layer \"0\" / matmul");
        assert_eq!((&kernel["pid"], &kernel["cat"]), (&json!(1), &json!("kernel")));
        assert_eq!(of("C")[0]["args"], json!({ "used": 5, "kept": 2 }));
        assert_eq!(of("M").len(), 4);
    }
}
