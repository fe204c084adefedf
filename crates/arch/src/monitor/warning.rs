//! Warnings about a reading, with advice.

use serde::{Deserialize, Serialize};

use super::{Kind, Reading, ThrottleReason};

/// Temperature in degrees Celsius above which a card is hot. The user guides that set this engine's
/// requirements keep cards below it under load, and warn above it.
pub const HOT_C: u32 = 85;

/// Share of used memory above which a device is about to run out. The guides keep 2 GB of 16 to 32 GB
/// free. A caching allocator fills more than that without harm, so this limit is higher.
pub const FULL_SHARE: f64 = 0.95;

/// Utilisation below which a card with work is waiting for the host. The guides expect 85 to 90 % under
/// load; models that decode one token at a time lie between.
pub const LOW_UTILISATION_PERCENT: f64 = 50.0;

/// Smallest share of used memory that indicates a loaded model; contexts of idle programs use less.
pub const IN_USE_SHARE: f64 = 0.05;

/// Smallest share of the highest clock at which a card is not idle.
pub const UP_SHARE: f64 = 0.5;

/// A condition that reduces speed or may end a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{said}\nhint: {advice}")]
pub struct Warning {
    pub kind: WarningKind,
    pub said: String,
    pub advice: String,
}

/// Kind of warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarningKind {
    Heat,
    MemoryPressure,
    LowUtilisation,
    /// Reduced clocks; in JSON only the reason.
    #[serde(untagged)]
    Throttled(ThrottleReason),
}

const COOL: &str = "check fans and filters, let more air through the case, or lower the power \
                    limit: `sudo nvidia-smi -pl WATTS`";

impl Reading {
    /// Returns problems with advice. Missing quantities cause no warnings.
    pub fn warnings(&self) -> Vec<Warning> {
        let mut all = Vec::new();
        let mut warn = |kind, said: String, advice: &str| {
            all.push(Warning { kind, said, advice: advice.to_owned() });
        };
        if let Some(hot) = self.temperature_c.filter(|celsius| *celsius > HOT_C) {
            warn(WarningKind::Heat, format!("{hot} C, over {HOT_C} C"), COOL);
        }
        let reasons = self.throttle_reasons.as_deref().unwrap_or_default();
        for reason in reasons {
            if let Some((said, advice)) = throttled(*reason, reasons) {
                warn(WarningKind::Throttled(*reason), said.to_owned(), advice);
            }
        }
        if let Some(share) = self.memory_share().filter(|share| *share > FULL_SHARE) {
            let advice = match self.kind {
                Kind::Cpu => {
                    "end other programs or load a smaller model, before the system kills one"
                }
                Kind::Nvidia | Kind::Adapter => {
                    "run fewer sequences at once, shorten the context, load the model in 4 bits \
                     (`--quant nf4`), or end other programs on this card: `nvidia-smi` lists them"
                }
            };
            let said = format!("{:.1} % of its memory is in use", share * 100.0);
            warn(WarningKind::MemoryPressure, said, advice);
        }
        if let Some(percent) = self.low_utilisation() {
            warn(
                WarningKind::LowUtilisation,
                format!("kernels run {percent:.0} % of the time, with memory in use and clocks up"),
                "run more sequences at once (`--batch`, `--completions`) or longer prompts; if \
                 that does not help, the host is the bottleneck: launches are not replayed from a \
                 graph, or data loads slowly",
            );
        }
        all
    }

    /// Returns the used share of the memory.
    pub(super) fn memory_share(&self) -> Option<f64> {
        let total = self.memory_total_bytes.filter(|bytes| *bytes > 0)?;
        Some(self.memory_used_bytes? as f64 / total as f64)
    }

    /// Returns the utilisation if it is low although a model is loaded and work runs. An idle card and a
    /// CPU never count: other programs share the CPU.
    fn low_utilisation(&self) -> Option<f64> {
        let percent = self.utilisation_percent?;
        let clocks = f64::from(self.sm_clock_mhz?) / f64::from(self.sm_clock_max_mhz?);
        let idle = self.throttle_reasons.iter().flatten().any(|r| *r == ThrottleReason::Idle);
        let waits = self.kind == Kind::Nvidia
            && !idle
            && percent > 0.0
            && percent < LOW_UTILISATION_PERCENT
            && self.memory_share()? >= IN_USE_SHARE
            && clocks >= UP_SHARE;
        waits.then_some(percent)
    }
}

/// Returns the message and the advice for a reason; `None` for intended ones.
fn throttled(
    reason: ThrottleReason,
    all: &[ThrottleReason],
) -> Option<(&'static str, &'static str)> {
    Some(match reason {
        ThrottleReason::Idle
        | ThrottleReason::ApplicationClocks
        | ThrottleReason::DisplayClocks => return None,
        // NVML also sets it next to the bit that gives the cause.
        ThrottleReason::HardwareSlowdown
            if all.contains(&ThrottleReason::HardwareThermalSlowdown)
                || all.contains(&ThrottleReason::PowerBrake) =>
        {
            return None;
        }
        ThrottleReason::PowerCap => (
            "the power limit reduces the clocks",
            "ignore this under a large matmul, or raise the limit if supply and cooling allow it: \
             `nvidia-smi -q -d POWER` prints the range, `sudo nvidia-smi -pl WATTS` sets it",
        ),
        ThrottleReason::HardwareSlowdown => (
            "the card has at least halved its clocks: heat, a power brake or too much current",
            "check cooling, the power supply and its cables; `nvidia-smi -q -d PERFORMANCE` \
             prints details",
        ),
        ThrottleReason::SyncBoost => (
            "another card of the sync boost group reduces the clocks",
            "look for the card of the group that has another reason",
        ),
        ThrottleReason::ThermalSlowdown => {
            ("heat of the card or of its memory reduces the clocks", COOL)
        }
        ThrottleReason::HardwareThermalSlowdown => {
            ("the card has at least halved its clocks because of heat", COOL)
        }
        ThrottleReason::PowerBrake => (
            "the power supply makes the card at least halve its clocks",
            "check that the supply has enough watts and that every power cable of the card is plugged \
             in; in a server, ask for its power budget",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy() -> Reading {
        Reading {
            temperature_c: Some(64),
            sm_clock_mhz: Some(1755),
            sm_clock_max_mhz: Some(1980),
            memory_used_bytes: Some(70 << 30),
            memory_total_bytes: Some(140 << 30),
            utilisation_percent: Some(97.0),
            throttle_reasons: Some(Vec::new()),
            ..Reading::new(0, Kind::Nvidia, "a card".to_owned(), String::new())
        }
    }

    fn kinds(reading: &Reading) -> Vec<WarningKind> {
        let warnings = reading.warnings();
        assert!(warnings.iter().all(|w| w.to_string().contains("\nhint: ")), "{warnings:?}");
        warnings.into_iter().map(|warning| warning.kind).collect()
    }

    #[test]
    fn a_busy_cool_card_is_well() {
        assert_eq!(kinds(&busy()), []);
        let silent = Reading::new(0, Kind::Nvidia, String::new(), String::new());
        assert_eq!(kinds(&silent), [], "what is not told is not assumed");
    }

    #[test]
    fn heat_begins_above_its_threshold() {
        let at = |celsius| kinds(&Reading { temperature_c: Some(celsius), ..busy() });
        assert_eq!((at(HOT_C), at(HOT_C + 1)), (vec![], vec![WarningKind::Heat]));
    }

    #[test]
    fn each_reason_that_costs_speed_is_a_warning() {
        use ThrottleReason::*;
        let of = |reasons: &[ThrottleReason]| {
            kinds(&Reading { throttle_reasons: Some(reasons.to_vec()), ..busy() })
        };
        for reason in [PowerCap, HardwareSlowdown, SyncBoost, ThermalSlowdown, PowerBrake] {
            assert_eq!(of(&[reason]), [WarningKind::Throttled(reason)]);
        }
        for wanted in [Idle, ApplicationClocks, DisplayClocks] {
            assert_eq!(of(&[wanted]), []);
        }
        let brake = [HardwareSlowdown, PowerBrake];
        assert_eq!(of(&brake), [WarningKind::Throttled(PowerBrake)], "said once");
        let heat = [HardwareSlowdown, HardwareThermalSlowdown];
        assert_eq!(of(&heat), [WarningKind::Throttled(HardwareThermalSlowdown)]);
    }

    #[test]
    fn memory_runs_out_above_95_percent_also_on_the_host() {
        for kind in [Kind::Nvidia, Kind::Cpu] {
            let with = |used| {
                let memory_total_bytes = Some(1000);
                kinds(&Reading {
                    kind,
                    memory_used_bytes: Some(used),
                    memory_total_bytes,
                    ..busy()
                })
            };
            assert_eq!((with(950), with(951)), (vec![], vec![WarningKind::MemoryPressure]));
        }
        let none = Reading { memory_total_bytes: Some(0), ..busy() };
        assert_eq!(kinds(&none), []);
    }

    #[test]
    fn little_to_do_is_a_warning_only_for_a_card_at_work() {
        let slow = Reading { utilisation_percent: Some(30.0), ..busy() };
        assert_eq!(kinds(&slow), [WarningKind::LowUtilisation]);
        let idle = Some(vec![ThrottleReason::Idle]);
        for well in [
            Reading { utilisation_percent: Some(50.0), ..busy() },
            Reading { utilisation_percent: Some(0.0), ..busy() },
            Reading { memory_used_bytes: Some(1 << 30), ..slow.clone() },
            Reading { sm_clock_mhz: Some(345), ..slow.clone() },
            Reading { throttle_reasons: idle, ..slow.clone() },
            Reading { kind: Kind::Cpu, ..slow.clone() },
            Reading { sm_clock_max_mhz: None, ..slow.clone() },
        ] {
            assert_eq!(kinds(&well), [], "{well:?}");
        }
    }

    #[test]
    fn kinds_are_words_in_json() {
        let power = WarningKind::Throttled(ThrottleReason::PowerCap);
        for (kind, word) in [(WarningKind::Heat, "heat"), (power, "power_cap")] {
            let json = serde_json::to_value(kind).expect("a name");
            assert_eq!(json, word);
            assert_eq!(serde_json::from_value::<WarningKind>(json).expect("the same"), kind);
        }
    }
}
