//! Reads NVIDIA cards through NVML.

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::{Kind, Lack, Quantity, Reading, ThrottleReason, Why};

/// Reads each card that NVML counts, including cards that do not respond.
pub(super) fn readings(nvml: &Nvml) -> Vec<Reading> {
    let count = nvml.device_count().unwrap_or(0);
    (0..count)
        .map(|number| match nvml.device_by_index(number) {
            Ok(card) => of_card(number, &card),
            Err(why) => silent(number, &why),
        })
        .collect()
}

/// Returns an empty reading for a card that does not respond.
fn silent(number: u32, why: &NvmlError) -> Reading {
    let name = format!("NVIDIA card {number}");
    let mut reading = Reading::new(number as usize, Kind::Nvidia, name, String::new());
    reading.lack(&lack(why), &Quantity::ALL);
    reading
}

fn of_card(number: u32, card: &Device<'_>) -> Reading {
    let name = card.name().unwrap_or_else(|_| format!("NVIDIA card {number}"));
    let id = card.uuid().unwrap_or_default();
    let mut reading = Reading::new(number as usize, Kind::Nvidia, name, id);
    let r = &mut reading;
    r.temperature_c = kept(r, Quantity::TemperatureC, card.temperature(TemperatureSensor::Gpu));
    r.power_w = kept(r, Quantity::PowerW, card.power_usage()).map(watts);
    r.power_limit_w = kept(r, Quantity::PowerLimitW, card.enforced_power_limit()).map(watts);
    r.sm_clock_mhz = kept(r, Quantity::SmClockMhz, card.clock_info(Clock::SM));
    r.sm_clock_max_mhz = kept(r, Quantity::SmClockMaxMhz, card.max_clock_info(Clock::SM));
    r.memory_clock_mhz = kept(r, Quantity::MemoryClockMhz, card.clock_info(Clock::Memory));
    match card.memory_info() {
        Ok(memory) => {
            r.memory_used_bytes = Some(memory.total.saturating_sub(memory.free));
            r.memory_total_bytes = Some(memory.total);
        }
        Err(why) => {
            r.lack(&lack(&why), &[Quantity::MemoryUsedBytes, Quantity::MemoryTotalBytes]);
        }
    }
    match card.utilization_rates() {
        Ok(rates) => {
            r.utilisation_percent = Some(rates.gpu.into());
            r.memory_utilisation_percent = Some(rates.memory.into());
        }
        Err(why) => {
            r.lack(&lack(&why), &[Quantity::UtilisationPercent, Quantity::MemoryUtilisationPercent])
        }
    }
    // NVML reports an invalid argument if the fan speed of a card without a fan is queried.
    let fan = match card.num_fans() {
        Ok(0) => Err(NvmlError::NotSupported),
        Ok(_) => card.fan_speed(0),
        Err(why) => Err(why),
    };
    r.fan_percent = kept(r, Quantity::FanPercent, fan);
    r.energy_j = kept(r, Quantity::EnergyJ, card.total_energy_consumption()).map(joules);
    r.throttle_reasons =
        kept(r, Quantity::ThrottleReasons, card.current_throttle_reasons()).map(reasons);
    reading
}

/// Returns the value; on an error records the quantity as missing and returns `None`.
fn kept<T>(reading: &mut Reading, quantity: Quantity, answer: Result<T, NvmlError>) -> Option<T> {
    answer.map_err(|why| reading.lack(&lack(&why), &[quantity])).ok()
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
}

fn joules(millijoules: u64) -> f64 {
    millijoules as f64 / 1e3
}

/// Returns the reasons whose bits are set. Unknown bits of newer drivers are ignored.
fn reasons(bits: ThrottleReasons) -> Vec<ThrottleReason> {
    let bit = |reason| match reason {
        ThrottleReason::Idle => ThrottleReasons::GPU_IDLE,
        ThrottleReason::ApplicationClocks => ThrottleReasons::APPLICATIONS_CLOCKS_SETTING,
        ThrottleReason::PowerCap => ThrottleReasons::SW_POWER_CAP,
        ThrottleReason::HardwareSlowdown => ThrottleReasons::HW_SLOWDOWN,
        ThrottleReason::SyncBoost => ThrottleReasons::SYNC_BOOST,
        ThrottleReason::ThermalSlowdown => ThrottleReasons::SW_THERMAL_SLOWDOWN,
        ThrottleReason::HardwareThermalSlowdown => ThrottleReasons::HW_THERMAL_SLOWDOWN,
        ThrottleReason::PowerBrake => ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
        ThrottleReason::DisplayClocks => ThrottleReasons::DISPLAY_CLOCK_SETTING,
    };
    ThrottleReason::ALL.into_iter().filter(|reason| bits.contains(bit(*reason))).collect()
}

/// Converts an error of NVML to a [`Lack`] without quantities.
pub(super) fn lack(error: &NvmlError) -> Lack {
    let (why, said, hint) = match error {
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => (
            Why::NvmlNotFound,
            "NVML (libnvidia-ml.so.1) is not found, so NVIDIA cards report nothing".to_owned(),
            "install the NVIDIA driver, or give a container its `utility` capability; ignore this \
             without an NVIDIA card",
        ),
        NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch => (
            Why::Driver,
            format!("NVML found no matching driver: {error}"),
            "restart the machine after a driver update, and check that `nvidia-smi` lists a card",
        ),
        NvmlError::NoPermission => (
            Why::NoPermission,
            "NVML denies this user permission".to_owned(),
            "run as a user who may open /dev/nvidiactl and /dev/nvidia0, or as root",
        ),
        NvmlError::NotSupported
        | NvmlError::FunctionNotFound
        | NvmlError::FailedToLoadSymbol(_) => (
            Why::NotSupported,
            "the card or its driver does not support it".to_owned(),
            "ignore this; on a card that is split by MIG, ask its host",
        ),
        other => (
            Why::Failed,
            format!("NVML failed: {other}"),
            "look for the cause with `nvidia-smi` and in the kernel's log (`dmesg | grep NVRM`)",
        ),
    };
    Lack { why, quantities: Vec::new(), said, hint: hint.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_have_the_names_of_nvmls_header() {
        let of = |bits| reasons(ThrottleReasons::from_bits_truncate(bits));
        let named = [
            (0x1, ThrottleReason::Idle),
            (0x2, ThrottleReason::ApplicationClocks),
            (0x4, ThrottleReason::PowerCap),
            (0x8, ThrottleReason::HardwareSlowdown),
            (0x10, ThrottleReason::SyncBoost),
            (0x20, ThrottleReason::ThermalSlowdown),
            (0x40, ThrottleReason::HardwareThermalSlowdown),
            (0x80, ThrottleReason::PowerBrake),
            (0x100, ThrottleReason::DisplayClocks),
        ];
        for (bit, reason) in named {
            assert_eq!(of(bit), [reason]);
        }
        assert_eq!(of(0), []);
        assert_eq!(of(0x44), [ThrottleReason::PowerCap, ThrottleReason::HardwareThermalSlowdown]);
        assert_eq!(of(0x1ff), ThrottleReason::ALL);
        assert_eq!(of(1 << 40), [], "of a newer driver");
    }

    #[test]
    fn numbers_become_watts_and_joules() {
        assert_eq!((watts(643_250), joules(1_234_567)), (643.25, 1234.567));
    }

    #[test]
    fn errors_say_why_and_what_to_do() {
        for (error, why) in [
            (NvmlError::LibraryNotFound, Why::NvmlNotFound),
            (NvmlError::DriverNotLoaded, Why::Driver),
            (NvmlError::LibRmVersionMismatch, Why::Driver),
            (NvmlError::NoPermission, Why::NoPermission),
            (NvmlError::NotSupported, Why::NotSupported),
            (NvmlError::FailedToLoadSymbol("x".to_owned()), Why::NotSupported),
            (NvmlError::GpuLost, Why::Failed),
        ] {
            let lack = lack(&error);
            assert_eq!(lack.why, why, "{error}");
            assert!(lack.to_string().contains("\nhint: "), "{lack}");
        }
    }

    #[test]
    fn a_card_that_does_not_answer_has_a_reading_all_the_same() {
        let reading = silent(1, &NvmlError::GpuLost);
        assert_eq!((reading.index, reading.name.as_str()), (1, "NVIDIA card 1"));
        let [lack] = &reading.lacks[..] else { panic!("one reason for all") };
        assert_eq!(lack.quantities, Quantity::ALL);
        assert!(lack.said.contains("fell off the bus"), "{lack}");
    }

    #[test]
    fn one_refused_question_leaves_the_others() {
        let mut reading = Reading::new(0, Kind::Nvidia, String::new(), String::new());
        let refused = |r: &mut _, q| kept::<u32>(r, q, Err(NvmlError::NoPermission));
        assert_eq!(kept(&mut reading, Quantity::TemperatureC, Ok(41)), Some(41));
        assert_eq!(refused(&mut reading, Quantity::PowerW), None);
        assert_eq!(refused(&mut reading, Quantity::EnergyJ), None);
        let absent = kept::<u32>(&mut reading, Quantity::FanPercent, Err(NvmlError::NotSupported));
        assert_eq!(absent, None);
        let lacks: Vec<_> = reading.lacks.iter().map(|l| (l.why, &l.quantities[..])).collect();
        let power = &[Quantity::PowerW, Quantity::EnergyJ][..];
        let fan = &[Quantity::FanPercent][..];
        assert_eq!(lacks, [(Why::NoPermission, power), (Why::NotSupported, fan)]);
    }
}
