//! Monitors all devices: temperature, power, clocks, memory, load.
//!
//! NVML reports NVIDIA cards, and `/proc` the host; other graphics adapters only have names. A reading
//! lists the quantities that a device does not report, with the reason. Its
//! [`warnings`](Reading::warnings) tell the user about problems.

mod host;
mod nvml;
mod prometheus;
mod warning;

use std::panic;

use nvml_wrapper::Nvml;
use serde::{Deserialize, Serialize};

pub use prometheus::prometheus;
pub use warning::{
    FULL_SHARE, HOT_C, IN_USE_SHARE, LOW_UTILISATION_PERCENT, UP_SHARE, Warning, WarningKind,
};

use crate::facts::{self, AdapterFacts};
use host::Times;

/// PCI vendor ID of NVIDIA.
const NVIDIA: u32 = 0x10de;

/// A monitor of all devices of this machine.
pub struct Monitor {
    nvml: Option<Nvml>,
    /// Reasons that NVML or the graphics drivers report nothing.
    missing: Vec<Lack>,
    adapters: Vec<AdapterFacts>,
    times: Option<Times>,
}

/// Kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// An NVIDIA card, read through NVML.
    Nvidia,
    /// A graphics adapter that only wgpu reports.
    Adapter,
    /// The host.
    Cpu,
}

impl Kind {
    /// Returns the name used in JSON and in labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvidia => "nvidia",
            Self::Adapter => "adapter",
            Self::Cpu => "cpu",
        }
    }
}

/// The state of one device at one moment. Every quantity that is `None` is listed in `lacks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Position in a sample, the same in every sample: cards in the order of `nvidia-smi`, then adapters, then the CPU.
    pub index: usize,
    pub kind: Kind,
    pub name: String,
    /// UUID of a card, vendor and device IDs of an adapter, or part of a CPU.
    pub id: String,
    pub temperature_c: Option<u32>,
    pub power_w: Option<f64>,
    /// Enforced power limit.
    pub power_limit_w: Option<f64>,
    pub sm_clock_mhz: Option<u32>,
    /// Highest clock of the card.
    pub sm_clock_max_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    /// Bytes that are not free, including memory that the driver reserves; `nvidia-smi` counts that separately.
    pub memory_used_bytes: Option<u64>,
    pub memory_total_bytes: Option<u64>,
    /// Share of the time in which a kernel ran, or in which cores were not idle.
    pub utilisation_percent: Option<f64>,
    /// Share of the time in which memory was read or written.
    pub memory_utilisation_percent: Option<f64>,
    /// Speed of the first fan, relative to its highest.
    pub fan_percent: Option<u32>,
    /// Energy used since the driver was loaded.
    pub energy_j: Option<f64>,
    /// Reasons that clocks are limited.
    pub throttle_reasons: Option<Vec<ThrottleReason>>,
    /// Missing quantities, with reasons.
    pub lacks: Vec<Lack>,
}

/// A quantity of a reading, named like its field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    TemperatureC,
    PowerW,
    PowerLimitW,
    SmClockMhz,
    SmClockMaxMhz,
    MemoryClockMhz,
    MemoryUsedBytes,
    MemoryTotalBytes,
    UtilisationPercent,
    MemoryUtilisationPercent,
    FanPercent,
    EnergyJ,
    ThrottleReasons,
}

impl Quantity {
    /// All quantities, in the order of the fields.
    pub const ALL: [Self; 13] = [
        Self::TemperatureC,
        Self::PowerW,
        Self::PowerLimitW,
        Self::SmClockMhz,
        Self::SmClockMaxMhz,
        Self::MemoryClockMhz,
        Self::MemoryUsedBytes,
        Self::MemoryTotalBytes,
        Self::UtilisationPercent,
        Self::MemoryUtilisationPercent,
        Self::FanPercent,
        Self::EnergyJ,
        Self::ThrottleReasons,
    ];

    /// Returns the name of the field.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TemperatureC => "temperature_c",
            Self::PowerW => "power_w",
            Self::PowerLimitW => "power_limit_w",
            Self::SmClockMhz => "sm_clock_mhz",
            Self::SmClockMaxMhz => "sm_clock_max_mhz",
            Self::MemoryClockMhz => "memory_clock_mhz",
            Self::MemoryUsedBytes => "memory_used_bytes",
            Self::MemoryTotalBytes => "memory_total_bytes",
            Self::UtilisationPercent => "utilisation_percent",
            Self::MemoryUtilisationPercent => "memory_utilisation_percent",
            Self::FanPercent => "fan_percent",
            Self::EnergyJ => "energy_j",
            Self::ThrottleReasons => "throttle_reasons",
        }
    }
}

/// Quantities that are missing for one reason. It displays as the reason and a hint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{said}\nhint: {hint}")]
pub struct Lack {
    pub why: Why,
    pub quantities: Vec<Quantity>,
    pub said: String,
    pub hint: String,
}

/// The reason that a quantity is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// NVML's library is not installed.
    NvmlNotFound,
    /// NVML finds no driver, or one of a different version.
    Driver,
    NoPermission,
    /// The device or its driver does not provide the quantity.
    NotSupported,
    /// The interface to the device cannot query the quantity.
    NotTold,
    /// No time passed since the last sample; load is measured between two samples.
    TooSoon,
    Failed,
}

/// The reason that a card's clocks are limited, as defined by NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThrottleReason {
    /// The card is idle.
    Idle,
    /// Application clocks are set.
    ApplicationClocks,
    /// The power limit is reached.
    PowerCap,
    /// The hardware at least halves its clocks: heat, a power brake or too much current.
    HardwareSlowdown,
    /// Another card of the sync boost group limits the clocks.
    SyncBoost,
    /// The driver keeps the card or its memory below the highest operating temperature.
    ThermalSlowdown,
    /// The hardware at least halves its clocks because of heat.
    HardwareThermalSlowdown,
    /// An external signal, such as from the power supply, asks the card to draw less power.
    PowerBrake,
    /// Display clocks are set.
    DisplayClocks,
}

impl ThrottleReason {
    /// All reasons.
    pub const ALL: [Self; 9] = [
        Self::Idle,
        Self::ApplicationClocks,
        Self::PowerCap,
        Self::HardwareSlowdown,
        Self::SyncBoost,
        Self::ThermalSlowdown,
        Self::HardwareThermalSlowdown,
        Self::PowerBrake,
        Self::DisplayClocks,
    ];

    /// Returns the name used in JSON and in labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ApplicationClocks => "application_clocks",
            Self::PowerCap => "power_cap",
            Self::HardwareSlowdown => "hardware_slowdown",
            Self::SyncBoost => "sync_boost",
            Self::ThermalSlowdown => "thermal_slowdown",
            Self::HardwareThermalSlowdown => "hardware_thermal_slowdown",
            Self::PowerBrake => "power_brake",
            Self::DisplayClocks => "display_clocks",
        }
    }
}

impl Monitor {
    /// Opens NVML and the graphics adapters. Failures are listed in [`missing`](Self::missing); the rest works.
    pub fn open() -> Self {
        let times = Times::now();
        let mut missing = Vec::new();
        let nvml = Nvml::init().map_err(|why| missing.push(nvml::lack(&why))).ok();
        let nvml = nvml.filter(|nvml| {
            nvml.device_count().map_err(|why| missing.push(nvml::lack(&why))).is_ok()
        });
        // wgpu panics if a driver is broken rather than absent.
        let adapters = panic::catch_unwind(facts::hardware_adapters).unwrap_or_else(|_| {
            missing.push(Lack {
                why: Why::Failed,
                quantities: Vec::new(),
                said: "a graphics driver failed while its adapters were listed".to_owned(),
                hint: "find the backend of this driver with `flashover doctor`".to_owned(),
            });
            Vec::new()
        });
        Self { nvml, missing, adapters, times }
    }

    /// Returns the interfaces that report nothing on this machine, with hints.
    pub fn missing(&self) -> &[Lack] {
        &self.missing
    }

    /// Reads all devices. CPU load is measured since the previous sample, or since [`open`](Self::open).
    pub fn sample(&mut self) -> Vec<Reading> {
        let mut readings = Vec::new();
        if let Some(nvml) = &self.nvml {
            readings = nvml::readings(nvml);
        }
        let asked = !readings.is_empty();
        let others = self.adapters.iter().filter(|adapter| !(asked && adapter.vendor == NVIDIA));
        for adapter in others {
            readings.push(of_adapter(readings.len(), adapter, &self.missing));
        }
        let now = Times::now();
        readings.push(host::reading(readings.len(), self.times, now));
        self.times = now.or(self.times);
        readings
    }
}

/// Returns a reading with the adapter's name, and the reason that the rest is missing. For an NVIDIA card the reason is
/// the failure of NVML.
fn of_adapter(index: usize, adapter: &AdapterFacts, missing: &[Lack]) -> Reading {
    let id = format!("{:04x}:{:04x}", adapter.vendor, adapter.device);
    let mut reading = Reading::new(index, Kind::Adapter, adapter.name.clone(), id);
    let nvml = missing.first().filter(|_| adapter.vendor == NVIDIA).cloned();
    let lack = nvml.unwrap_or_else(|| Lack {
        why: Why::NotTold,
        quantities: Vec::new(),
        said: "wgpu reports the name of an adapter, but no measurements".to_owned(),
        hint: "use the vendor's own tool, such as rocm-smi or intel_gpu_top".to_owned(),
    });
    reading.lack(&lack, &Quantity::ALL);
    reading
}

impl Reading {
    const fn new(index: usize, kind: Kind, name: String, id: String) -> Self {
        Self {
            index,
            kind,
            name,
            id,
            temperature_c: None,
            power_w: None,
            power_limit_w: None,
            sm_clock_mhz: None,
            sm_clock_max_mhz: None,
            memory_clock_mhz: None,
            memory_used_bytes: None,
            memory_total_bytes: None,
            utilisation_percent: None,
            memory_utilisation_percent: None,
            fan_percent: None,
            energy_j: None,
            throttle_reasons: None,
            lacks: Vec::new(),
        }
    }

    /// Records that `quantities` are missing, together with others of the same reason.
    fn lack(&mut self, lack: &Lack, quantities: &[Quantity]) {
        let same = |l: &&mut Lack| l.why == lack.why && l.said == lack.said;
        match self.lacks.iter_mut().find(same) {
            Some(known) => known.quantities.extend(quantities),
            None => {
                self.lacks.push(Lack { quantities: quantities.to_vec(), ..lack.clone() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::device::WgpuDeviceKind;

    use super::*;

    #[test]
    fn names_are_those_of_the_fields() {
        let reading = Reading::new(0, Kind::Cpu, String::new(), String::new());
        let json = serde_json::to_value(&reading).expect("plain fields");
        let fields: Vec<&String> = json.as_object().expect("an object").keys().collect();
        let names: Vec<&str> = Quantity::ALL.into_iter().map(Quantity::name).collect();
        assert_eq!(fields[4..fields.len() - 1], names);
        for quantity in Quantity::ALL {
            assert_eq!(serde_json::to_value(quantity).expect("a name"), quantity.name());
        }
        for reason in ThrottleReason::ALL {
            assert_eq!(serde_json::to_value(reason).expect("a name"), reason.name());
        }
        for kind in [Kind::Nvidia, Kind::Adapter, Kind::Cpu] {
            assert_eq!(serde_json::to_value(kind).expect("a name"), kind.name());
        }
        let back: Reading = serde_json::from_value(json).expect("the same fields");
        assert_eq!(back, reading);
    }

    #[test]
    fn every_device_says_what_it_lacks() {
        let mut monitor = Monitor::open();
        let readings = monitor.sample();
        assert!(readings.iter().enumerate().all(|(at, reading)| reading.index == at));
        assert_eq!(readings.iter().filter(|r| r.kind == Kind::Cpu).count(), 1);
        for reading in readings {
            let lacking: Vec<_> = reading.lacks.iter().flat_map(|l| &l.quantities).collect();
            let json = serde_json::to_value(&reading).expect("plain fields");
            for quantity in Quantity::ALL {
                let absent = json[quantity.name()].is_null();
                assert_eq!(absent, lacking.contains(&&quantity), "{quantity:?} of {reading:?}");
            }
            assert!(reading.lacks.iter().all(|l| !l.said.is_empty() && !l.hint.is_empty()));
        }
        assert!(monitor.missing().iter().all(|lack| lack.to_string().contains("\nhint: ")));
    }

    #[test]
    fn an_adapter_lacks_all_and_says_whether_nvml_would_help() {
        let missing = [nvml::lack(&nvml_wrapper::error::NvmlError::NoPermission)];
        for (vendor, why) in [(NVIDIA, Why::NoPermission), (0x1002, Why::NotTold)] {
            let adapter = AdapterFacts {
                kind: WgpuDeviceKind::DiscreteGpu(0),
                software: false,
                name: "a card".to_owned(),
                vendor,
                device: 0x2684,
                driver: String::new(),
            };
            let reading = of_adapter(3, &adapter, &missing);
            assert_eq!((reading.index, reading.name.as_str()), (3, "a card"));
            assert_eq!(reading.id, format!("{vendor:04x}:2684"));
            let [lack] = &reading.lacks[..] else { panic!("one reason for all") };
            assert_eq!((lack.why, &lack.quantities[..]), (why, &Quantity::ALL[..]));
        }
    }
}
