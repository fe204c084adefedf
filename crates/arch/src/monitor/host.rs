//! Reads the host through Linux's `/proc`.

use std::fs;

use super::{Kind, Lack, Quantity, Reading, Why};
use crate::facts;
use crate::host::HostMemory;

/// Quantities that `/proc` does not provide.
const UNTOLD: [Quantity; 10] = [
    Quantity::TemperatureC,
    Quantity::PowerW,
    Quantity::PowerLimitW,
    Quantity::SmClockMhz,
    Quantity::SmClockMaxMhz,
    Quantity::MemoryClockMhz,
    Quantity::MemoryUtilisationPercent,
    Quantity::FanPercent,
    Quantity::EnergyJ,
    Quantity::ThrottleReasons,
];

/// Ticks of all cores since the machine started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    pub(super) fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. Later
    /// numbers are already part of user and nice.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Option<Vec<u64>> =
            line.split_whitespace().take(8).map(|word| word.parse().ok()).collect();
        let ticks = ticks.filter(|ticks| ticks.len() >= 4)?;
        let waiting = ticks.get(4).copied().unwrap_or(0);
        Some(Self { idle: ticks[3] + waiting, all: ticks.iter().sum() })
    }

    /// Returns the percentage of non-idle ticks since `before`; `None` if no tick passed.
    fn busy_since(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|ticks| *ticks > 0)?;
        // On Linux the iowait counter can decrease.
        let idle = self.idle.saturating_sub(before.idle).min(all);
        Some((all - idle) as f64 / all as f64 * 100.0)
    }
}

pub(super) fn reading(index: usize, before: Option<Times>, now: Option<Times>) -> Reading {
    let cpu = facts::cpu();
    let mut reading = Reading::new(index, Kind::Cpu, cpu.name, cpu.part);
    reading.lack(
        &lack(
            Why::NotTold,
            "/proc does not report it for a CPU",
            "use `sensors` of lm-sensors, or `turbostat`",
        ),
        &UNTOLD,
    );
    reading.utilisation_percent = before.zip(now).and_then(|(before, now)| now.busy_since(before));
    if reading.utilisation_percent.is_none() {
        let lack = match now {
            Some(_) => lack(
                Why::TooSoon,
                "load is measured between two samples, but no time has passed",
                "sample again after at least 10 ms",
            ),
            None => unread("/proc/stat"),
        };
        reading.lack(&lack, &[Quantity::UtilisationPercent]);
    }
    let memory = fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_of(&text));
    match memory {
        Some((used, total)) => {
            reading.memory_used_bytes = Some(used);
            reading.memory_total_bytes = Some(total);
        }
        None => reading.lack(
            &unread("/proc/meminfo"),
            &[Quantity::MemoryUsedBytes, Quantity::MemoryTotalBytes],
        ),
    }
    reading
}

fn lack(why: Why, said: &str, hint: &str) -> Lack {
    Lack { why, quantities: Vec::new(), said: said.to_owned(), hint: hint.to_owned() }
}

fn unread(file: &str) -> Lack {
    lack(Why::Failed, &format!("cannot read {file}"), "run on Linux with /proc mounted")
}

/// Returns the bytes that are not available, and the total.
fn memory_of(meminfo: &str) -> Option<(u64, u64)> {
    let HostMemory { total, free } = HostMemory::parse(meminfo)?;
    Some((total.saturating_sub(free), total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_what_was_between_two_texts() {
        let of = |text: &str| Times::parse(text).expect("a line of all cores");
        let before = of("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 100 0 50 800 50 0 0 0 7 0\n");
        let after = of("cpu  130 10 60 840 60 0 0 0 9 0\n");
        assert_eq!(before, Times { idle: 850, all: 1000 });
        assert_eq!(after.busy_since(before), Some(50.0));
        assert_eq!(before.busy_since(before), None, "no tick passed");
        assert_eq!(before.busy_since(after), None, "no clock goes back");
        let waited = of("cpu  200 0 50 800 40 0 0 0 0 0\n");
        assert_eq!(waited.busy_since(before), Some(100.0), "iowait went back");
        for bad in ["", "cpu0 1 2 3 4", "cpu  1 2 3", "cpu  1 2 x 4"] {
            assert_eq!(Times::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn memory_in_use_is_what_is_not_available() {
        let text = "MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    600 kB\n";
        assert_eq!(memory_of(text), Some((400 * 1024, 1000 * 1024)));
        assert_eq!(memory_of("MemTotal: 1000 kB\n"), None, "an old kernel");
    }

    #[test]
    fn a_sample_that_comes_too_soon_says_so() {
        let times = Some(Times { idle: 1, all: 2 });
        for (before, now, why) in
            [(times, times, Why::TooSoon), (None, times, Why::TooSoon), (times, None, Why::Failed)]
        {
            let reading = reading(0, before, now);
            let mut lacks = reading.lacks.iter();
            let lack = lacks.find(|l| l.quantities.contains(&Quantity::UtilisationPercent));
            assert_eq!(lack.expect("it is not there").why, why);
        }
    }
}
