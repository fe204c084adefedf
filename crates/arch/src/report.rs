//! Surveys this machine: all devices, the automatic choice and its reason, and missing parts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{ArchProfile, Backend, Device, OpenError, device, facts};

/// A device that could be opened.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceReport {
    pub backend: Backend,
    pub name: String,
    pub arch_id: String,
    pub memory_bytes: Option<u64>,
    /// True for a software renderer (llvmpipe): a CPU that acts as a GPU.
    pub software: bool,
    /// Versions of the driver and compilers, by name.
    pub versions: BTreeMap<String, String>,
    /// Clocks, power and temperature by name, as far as the driver reports them.
    pub clocks: BTreeMap<String, String>,
    pub profile: ArchProfile,
}

/// A missing requirement of a backend.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MissingReport {
    pub what: String,
    pub needed_for: Backend,
    pub how: String,
}

/// The backend that `auto` chooses on this machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Choice {
    pub backend: Backend,
    pub why: String,
}

/// A survey of the machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    pub devices: Vec<DeviceReport>,
    pub chosen: Option<Choice>,
    pub missing: Vec<MissingReport>,
    /// Cache of compiled kernels; `None` if the system has no cache folder.
    pub kernel_cache: Option<KernelCache>,
}

/// The cache of compiled kernels between runs. A program never uses kernels that another build of it compiled.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelCache {
    pub folder: PathBuf,
    /// Total bytes of its files.
    pub bytes: u64,
}

impl Report {
    /// Returns true if a GPU was found; software renderers do not count.
    pub fn has_gpu(&self) -> bool {
        self.devices.iter().any(is_gpu)
    }
}

fn is_gpu(d: &DeviceReport) -> bool {
    d.backend != Backend::Cpu && !d.software
}

/// Opens every backend once and reports the results.
pub fn survey() -> Report {
    let (devices, missing, kernel_cache) = (Vec::new(), Vec::new(), kernel_cache());
    let mut report = Report { devices, chosen: None, missing, kernel_cache };
    for backend in Backend::ALL {
        match open_or_say_why(backend) {
            Ok(device) => report.devices.push(describe(&device)),
            Err(first) => {
                let known = facts::missing(backend).into_iter().map(|m| (m.what, m.how));
                let mut all: Vec<_> = known.collect();
                if all.is_empty() {
                    all.push(first);
                }
                report.missing.extend(all.into_iter().map(|(what, how)| MissingReport {
                    what,
                    needed_for: backend,
                    how,
                }));
            }
        }
    }
    report.chosen = choose(&report);
    report
}

/// Opens the device that [`survey`] chooses: the first GPU in the order of [`Backend::ALL`], else the CPU.
///
/// # Errors
/// [`OpenError`] of the CPU, where no GPU answers and the CPU does not either.
pub fn open_best() -> Result<Device, OpenError> {
    let gpus = Backend::ALL.into_iter().filter(|backend| *backend != Backend::Cpu);
    let mut opened = gpus.filter_map(|backend| open_or_say_why(backend).ok());
    match opened.find(|device| is_gpu(&describe(device))) {
        Some(device) => Ok(device),
        None => Device::open(Backend::Cpu),
    }
}

fn kernel_cache() -> Option<KernelCache> {
    let folder = device::kernel_cache()?;
    let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let bytes = files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum();
    Some(KernelCache { folder, bytes })
}

/// Chooses the first GPU in the order of [`Backend::ALL`], else the CPU.
fn choose(report: &Report) -> Option<Choice> {
    let gpu = report.devices.iter().find(|d| is_gpu(d));
    let chosen = gpu.or_else(|| report.devices.iter().find(|d| d.backend == Backend::Cpu))?;
    let why = match (gpu, chosen.backend) {
        (Some(d), Backend::Cuda) => format!("{} runs on CUDA, the fastest backend", d.name),
        (Some(d), _) => format!("{} is available, but CUDA is not", d.name),
        (None, _) => "no GPU is available".to_owned(),
    };
    Some(Choice { backend: chosen.backend, why })
}

/// Opens a device, or returns the problem and a hint. CubeCL panics if a driver is broken rather than
/// absent; the survey reports that panic and goes on.
fn open_or_say_why(backend: Backend) -> Result<Device, (String, String)> {
    match std::panic::catch_unwind(|| Device::open(backend)) {
        Ok(Ok(device)) => Ok(device),
        Ok(Err(OpenError::Unavailable { why, how, .. })) => Err((why, how)),
        Ok(Err(other)) => Err((other.to_string(), facts::how_to_get(backend).to_owned())),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let what = format!("the driver failed: {}", text.unwrap_or("no reason given"));
            Err((what, facts::how_to_get(backend).to_owned()))
        }
    }
}

/// Describes one open device.
pub fn describe(device: &Device) -> DeviceReport {
    let profile = device.profile().clone();
    let adapter = facts::backend_adapters(profile.backend).into_iter().nth(device.ordinal());
    let mut versions = BTreeMap::new();
    let mut clocks: BTreeMap<_, _> = match profile.backend {
        Backend::Cuda | Backend::Vulkan => facts::nvml_facts().into_iter().collect(),
        Backend::WebGpu | Backend::Cpu => BTreeMap::new(),
    };
    if let Some(driver) = clocks.remove("driver") {
        versions.insert("driver".to_owned(), driver);
    }
    match (profile.backend, &adapter) {
        (Backend::Cuda, _) => {
            if let Some(nvrtc) = facts::nvrtc_version() {
                versions.insert("nvrtc".to_owned(), nvrtc);
            }
        }
        (Backend::Cpu, _) => {
            versions.insert("compiler".to_owned(), "LLVM JIT".to_owned());
        }
        (_, Some(a)) => {
            versions.insert("driver".to_owned(), a.driver.clone());
        }
        (_, None) => {}
    }
    DeviceReport {
        backend: profile.backend,
        name: adapter.as_ref().map_or_else(|| profile.name.clone(), |a| a.name.clone()),
        arch_id: profile.id.to_string(),
        memory_bytes: profile.memory_bytes,
        software: adapter.is_some_and(|a| a.software),
        versions,
        clocks,
        profile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(backend: Backend, software: bool) -> DeviceReport {
        DeviceReport {
            backend,
            name: backend.to_string(),
            arch_id: String::new(),
            memory_bytes: None,
            software,
            versions: BTreeMap::new(),
            clocks: BTreeMap::new(),
            profile: ArchProfile::recorded("rtx4090").expect("recorded"),
        }
    }

    #[test]
    fn a_software_rasteriser_is_no_gpu() {
        let devices = vec![device(Backend::WebGpu, true), device(Backend::Cpu, false)];
        let report = Report { devices, chosen: None, missing: Vec::new(), kernel_cache: None };
        assert!(!report.has_gpu());
        assert_eq!(choose(&report).expect("the CPU is there").backend, Backend::Cpu);
    }

    #[test]
    fn cuda_comes_before_vulkan() {
        let devices = vec![device(Backend::Vulkan, false), device(Backend::Cpu, false)];
        let mut report = Report { devices, chosen: None, missing: Vec::new(), kernel_cache: None };
        assert_eq!(choose(&report).expect("a GPU is there").backend, Backend::Vulkan);
        report.devices.insert(0, device(Backend::Cuda, false));
        assert_eq!(choose(&report).expect("a GPU is there").backend, Backend::Cuda);
    }
}
