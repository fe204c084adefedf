//! Formats readings in Prometheus' text format 0.0.4: a help line, a type line and one sample per device.

use std::fmt::Write;

use super::{Reading, ThrottleReason};

/// A metric's name, type, help text, and value in base units.
type Metric = (&'static str, &'static str, &'static str, fn(&Reading) -> Option<f64>);

const METRICS: [Metric; 12] = [
    ("temperature_celsius", "gauge", "Temperature of the processor.", |r| {
        r.temperature_c.map(f64::from)
    }),
    ("power_watts", "gauge", "Power draw.", |r| r.power_w),
    ("power_limit_watts", "gauge", "Enforced power limit.", |r| r.power_limit_w),
    ("sm_clock_hertz", "gauge", "Clock of the multiprocessors.", |r| r.sm_clock_mhz.map(hertz)),
    ("sm_clock_max_hertz", "gauge", "Highest clock of the multiprocessors.", |r| {
        r.sm_clock_max_mhz.map(hertz)
    }),
    ("memory_clock_hertz", "gauge", "Clock of the memory.", |r| r.memory_clock_mhz.map(hertz)),
    ("memory_used_bytes", "gauge", "Used memory.", |r| {
        r.memory_used_bytes.map(|bytes| bytes as f64)
    }),
    ("memory_total_bytes", "gauge", "Total memory.", |r| {
        r.memory_total_bytes.map(|bytes| bytes as f64)
    }),
    ("utilisation_ratio", "gauge", "Share of the time with work running.", |r| {
        r.utilisation_percent.map(ratio)
    }),
    (
        "memory_utilisation_ratio",
        "gauge",
        "Share of the time during which memory was read or written.",
        |r| r.memory_utilisation_percent.map(ratio),
    ),
    ("fan_ratio", "gauge", "Speed of the first fan as a share of its maximum.", |r| {
        r.fan_percent.map(|percent| ratio(percent.into()))
    }),
    ("energy_joules_total", "counter", "Energy since the driver was loaded.", |r| r.energy_j),
];

fn hertz(mhz: u32) -> f64 {
    f64::from(mhz) * 1e6
}

fn ratio(percent: f64) -> f64 {
    percent / 100.0
}

/// Formats metrics named `flashover_device_...` in base units. Missing quantities have no sample;
/// `throttled` has one sample per reason, 0 or 1.
pub fn prometheus(readings: &[Reading]) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in METRICS {
        let samples: Vec<String> = readings
            .iter()
            .filter_map(|reading| Some(sample(name, reading, "", value(reading)?)))
            .collect();
        family(&mut text, name, kind, help, &samples);
    }
    let throttled: Vec<String> = readings
        .iter()
        .filter_map(|reading| Some((reading, reading.throttle_reasons.as_ref()?)))
        .flat_map(|(reading, set)| {
            ThrottleReason::ALL.map(|reason| {
                let label = format!(",reason=\"{}\"", reason.name());
                sample("throttled", reading, &label, f64::from(u8::from(set.contains(&reason))))
            })
        })
        .collect();
    family(
        &mut text,
        "throttled",
        "gauge",
        "1 if this reason reduces the clocks, otherwise 0.",
        &throttled,
    );
    text
}

fn family(text: &mut String, name: &str, kind: &str, help: &str, samples: &[String]) {
    if samples.is_empty() {
        return;
    }
    let head =
        format!("# HELP flashover_device_{name} {help}\n# TYPE flashover_device_{name} {kind}\n");
    *text += &head;
    *text += &samples.concat();
}

fn sample(metric: &str, reading: &Reading, more: &str, value: f64) -> String {
    let Reading { index, kind, name, id, .. } = reading;
    let mut line =
        format!("flashover_device_{metric}{{device=\"{index}\",kind=\"{}\"", kind.name());
    write!(line, ",name=\"{}\",id=\"{}\"{more}}} {value}", escaped(name), escaped(id))
        .expect("a string takes all");
    line + "\n"
}

/// Escapes a label's value.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::Kind;

    #[test]
    fn the_text_of_a_card_and_a_cpu() {
        let card = Reading {
            temperature_c: Some(64),
            power_w: Some(643.25),
            power_limit_w: Some(700.0),
            sm_clock_mhz: Some(1755),
            sm_clock_max_mhz: Some(1980),
            memory_clock_mhz: Some(3201),
            memory_used_bytes: Some(75161927680),
            memory_total_bytes: Some(150754820096),
            utilisation_percent: Some(97.0),
            memory_utilisation_percent: Some(45.0),
            fan_percent: Some(30),
            energy_j: Some(1234.567),
            throttle_reasons: Some(vec![ThrottleReason::PowerCap]),
            ..Reading::new(0, Kind::Nvidia, "NVIDIA H200".to_owned(), "GPU-1f".to_owned())
        };
        let cpu = Reading {
            memory_used_bytes: Some(1024),
            memory_total_bytes: Some(4096),
            utilisation_percent: Some(12.5),
            ..Reading::new(1, Kind::Cpu, "a \"C\\PU\"\nof two lines".to_owned(), String::new())
        };
        assert_eq!(prometheus(&[card, cpu]), include_str!("prometheus.txt"));
    }

    #[test]
    fn nothing_told_is_nothing_said() {
        let silent = Reading::new(0, Kind::Adapter, "x".to_owned(), String::new());
        assert_eq!(prometheus(&[silent]), "");
        assert_eq!(prometheus(&[]), "");
    }
}
