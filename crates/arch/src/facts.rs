//! Facts from the drivers that CubeCL does not report, and the parts that a machine lacks.

use std::fs;

use cubecl::device::WgpuDeviceKind;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use crate::Backend;

/// A requirement of a backend that this machine lacks.
pub(crate) struct Missing {
    pub(crate) what: String,
    pub(crate) how: String,
}

/// One graphics adapter, as wgpu reports it.
#[derive(Debug, Clone)]
pub(crate) struct AdapterFacts {
    pub(crate) kind: WgpuDeviceKind,
    pub(crate) software: bool,
    pub(crate) name: String,
    pub(crate) vendor: u32,
    pub(crate) device: u32,
    pub(crate) driver: String,
}

impl AdapterFacts {
    /// Returns the driver's name and version, reduced to letters, digits and dots. Words for OpenGL's
    /// profile, which precede Mesa's version, are dropped.
    pub(crate) fn driver_slug(&self) -> String {
        const KINDS: [&str; 6] = ["", "OpenGL", "ES", "Core", "Compatibility", "Profile"];
        let words = self.driver.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
        let kept: Vec<_> = words.filter(|w| !KINDS.contains(w)).take(3).collect();
        if kept.is_empty() { "driver".to_owned() } else { kept.join(".").to_lowercase() }
    }
}

/// Returns true if this program was built with a backend.
const fn is_built(backend: Backend) -> bool {
    match backend {
        Backend::Cuda => cfg!(feature = "cuda"),
        Backend::Vulkan | Backend::WebGpu => cfg!(feature = "vulkan"),
        Backend::Cpu => cfg!(feature = "cpu"),
    }
}

/// Adapters that `backend` opens, in order: hardware for Vulkan, hardware before software for WebGPU.
pub(crate) fn backend_adapters(backend: Backend) -> Vec<AdapterFacts> {
    match backend {
        Backend::Vulkan => {
            let mut found = adapters(backend);
            found.retain(|a| !a.software);
            found
        }
        Backend::WebGpu => adapters(backend),
        Backend::Cuda | Backend::Cpu => Vec::new(),
    }
}

/// Returns the graphics adapters that are not software: Vulkan's, or OpenGL's if Vulkan has none.
pub(crate) fn hardware_adapters() -> Vec<AdapterFacts> {
    let hardware = |backend| {
        let mut found = adapters(backend);
        found.retain(|a| !a.software);
        found
    };
    let found = hardware(Backend::Vulkan);
    if found.is_empty() { hardware(Backend::WebGpu) } else { found }
}

#[cfg(not(feature = "vulkan"))]
const fn adapters(_: Backend) -> Vec<AdapterFacts> {
    Vec::new()
}

/// Returns all adapters of the graphics API of a backend, hardware first.
#[cfg(feature = "vulkan")]
fn adapters(backend: Backend) -> Vec<AdapterFacts> {
    let api = if backend == Backend::Vulkan { wgpu::Backends::VULKAN } else { wgpu::Backends::GL };
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = api;
    let instance = wgpu::Instance::new(descriptor);
    let found = cubecl::future::block_on(instance.enumerate_adapters(api));
    let mut counts = [0usize; 4];
    let mut next = |slot: usize| {
        counts[slot] += 1;
        counts[slot] - 1
    };
    let mut facts: Vec<_> = found
        .iter()
        .map(wgpu::Adapter::get_info)
        .map(|info| {
            let kind = match info.device_type {
                wgpu::DeviceType::DiscreteGpu => WgpuDeviceKind::DiscreteGpu(next(0)),
                wgpu::DeviceType::IntegratedGpu => WgpuDeviceKind::IntegratedGpu(next(1)),
                wgpu::DeviceType::VirtualGpu => WgpuDeviceKind::VirtualGpu(next(2)),
                wgpu::DeviceType::Other => WgpuDeviceKind::Other(next(3)),
                wgpu::DeviceType::Cpu => WgpuDeviceKind::Cpu,
            };
            let renderer = info.name.to_lowercase();
            AdapterFacts {
                software: info.device_type == wgpu::DeviceType::Cpu
                    || ["llvmpipe", "softpipe", "lavapipe", "swiftshader"]
                        .iter()
                        .any(|s| renderer.contains(s)),
                kind,
                name: info.name,
                vendor: info.vendor,
                device: info.device,
                driver: format!("{} {}", info.driver, info.driver_info),
            }
        })
        .collect();
    facts.sort_by_key(|a| a.software);
    facts
}

/// Number of iterations after which the driver of the device `name` stops loops. Mesa's llvmpipe counts the iterations
/// of a program and leaves every loop at the limit (`LP_MAX_TGSI_LOOP_ITERATIONS` of `lp_bld_limits.h`).
pub(crate) fn max_loop_iterations(name: &str) -> Option<u32> {
    name.to_lowercase().contains("llvmpipe").then_some(65_535)
}

/// Returns the libraries and headers that `backend` needs and this machine lacks.
pub(crate) fn missing(backend: Backend) -> Vec<Missing> {
    let absent = |names: &[&str]| !names.iter().any(|n| has_library(n));
    let mut out = Vec::new();
    let mut need = |gone: bool, what: &str, how: &str| {
        if gone {
            out.push(Missing { what: what.to_owned(), how: how.to_owned() });
        }
    };
    if !is_built(backend) {
        let feature = if backend == Backend::WebGpu { Backend::Vulkan } else { backend };
        need(
            true,
            &format!("backend `{backend}` is not compiled in"),
            &format!("enable the feature `{feature}` of the crate `flashover`"),
        );
        return out;
    }
    match backend {
        Backend::Cuda => {
            need(
                absent(&["libcuda.so.1"]),
                "the NVIDIA driver (libcuda.so.1) is not installed",
                "install NVIDIA driver 580 or newer, which NVRTC 13 needs",
            );
            need(
                nvrtc_version().is_none(),
                "NVRTC (libnvrtc.so), which compiles kernels, is not found",
                "run through `cargo xtask`, which fetches it, or install the CUDA toolkit and set \
                 CUDA_PATH",
            );
            need(
                cuda_headers().is_none(),
                "the CUDA headers (cuda_fp16.h) are not found",
                "run through `cargo xtask`, which fetches them, or set CUDA_PATH to a CUDA toolkit",
            );
        }
        Backend::Vulkan => need(
            absent(&["libvulkan.so.1"]),
            "the Vulkan loader (libvulkan.so.1) is not installed",
            "install the package libvulkan1 and the driver of your card",
        ),
        Backend::WebGpu => need(
            absent(&["libEGL.so.1"]),
            "EGL (libEGL.so.1) is not installed",
            "install the packages libegl1 and libgl1-mesa-dri",
        ),
        Backend::Cpu => {}
    }
    out
}

/// Returns a hint for a machine that has the libraries of `backend` but no driver.
pub(crate) const fn how_to_get(backend: Backend) -> &'static str {
    match backend {
        Backend::Cuda => "check that `nvidia-smi` lists a card",
        Backend::Vulkan => "install the Vulkan driver of your card; software Vulkan is not used",
        Backend::WebGpu => "install the packages libegl1, libgles2 and libgl1-mesa-dri",
        Backend::Cpu => "report this as a bug: the CPU backend needs no driver",
    }
}

fn has_library(name: &str) -> bool {
    // SAFETY: loading a system library runs its initialisers. The backends load these drivers in any
    // case, and the handle is dropped at once.
    unsafe { libloading::Library::new(name).is_ok() }
}

/// Returns the version of the NVRTC library that would compile kernels.
pub(crate) fn nvrtc_version() -> Option<String> {
    // SAFETY: only tries to load each candidate name.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both out-parameters outlive the call.
    let status = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    (status == cudarc::nvrtc::sys::nvrtcResult::NVRTC_SUCCESS).then(|| format!("{major}.{minor}"))
}

/// Returns the folder whose `include` holds the CUDA headers; it searches the same places as CubeCL.
pub(crate) fn cuda_headers() -> Option<String> {
    let roots = std::env::var("CUDA_PATH").into_iter();
    let known = ["/usr/local/cuda", "/opt/cuda", "/usr"].map(str::to_owned);
    roots.chain(known).find(|r| fs::exists(format!("{r}/include/cuda_fp16.h")).unwrap_or(false))
}

/// Number of CUDA devices that this process sees.
pub(crate) fn cuda_devices() -> usize {
    use cudarc::driver::result;
    result::init().and_then(|()| result::device::get_count()).map_or(0, |count| count as usize)
}

/// Bytes of L2 of a CUDA device.
pub(crate) fn cuda_l2_bytes(ordinal: usize) -> Option<u64> {
    use cudarc::driver::result::device;
    use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let own = device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: `own` is a valid device handle, and the attribute only reads.
    let bytes = unsafe { device::get_attribute(own, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) }.ok()?;
    u64::try_from(bytes).ok().filter(|b| *b > 0)
}

/// UUID of a CUDA device, as NVML writes it: `GPU-` and 32 digits in five groups.
pub(crate) fn cuda_uuid(ordinal: usize) -> Option<String> {
    use cudarc::driver::result::device;
    let own = device::get(i32::try_from(ordinal).ok()?).ok()?;
    Some(uuid_text(device::get_uuid(own).ok()?.bytes.map(|byte| byte as u8)))
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let digits = |range: std::ops::Range<usize>| -> String {
        bytes[range].iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let groups = [0..4, 4..6, 6..8, 8..10, 10..16].map(digits);
    format!("GPU-{}", groups.join("-"))
}

/// A processor of the host.
pub(crate) struct Cpu {
    pub(crate) name: String,
    /// Vendor, family and model numbers: `genuineintel.6.143`.
    pub(crate) part: String,
}

/// Describes the first core in `/proc/cpuinfo`.
pub(crate) fn cpu() -> Cpu {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu_from(&text)
}

fn cpu_from(cpuinfo: &str) -> Cpu {
    let field = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|l| l.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    let numbers = [
        field("vendor_id").or_else(|| field("CPU implementer")),
        field("cpu family").or_else(|| field("CPU architecture")),
        field("model").or_else(|| field("CPU part")),
    ];
    let part: Vec<_> = numbers.into_iter().flatten().map(|s| s.to_lowercase()).collect();
    Cpu {
        name: field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        part: if part.is_empty() { std::env::consts::ARCH.to_owned() } else { part.join(".") },
    }
}

/// Returns the energy in millijoules that the NVIDIA card of this name used since its driver was loaded. `None` if NVML
/// does not report it, or lists several cards of that name.
pub fn energy_millijoules(name: &str) -> Option<u64> {
    let nvml = Nvml::init().ok()?;
    let cards = (0..nvml.device_count().ok()?).filter_map(|index| nvml.device_by_index(index).ok());
    let mut own = cards.filter(|card| card.name().is_ok_and(|own| own == name));
    let (card, None) = (own.next()?, own.next()) else { return None };
    card.total_energy_consumption().ok()
}

/// Returns NVML's facts about the first card, as pairs of name and value.
pub(crate) fn nvml_facts() -> Vec<(String, String)> {
    let Ok(nvml) = Nvml::init() else { return Vec::new() };
    let mut out = Vec::new();
    if let Ok(driver) = nvml.sys_driver_version() {
        out.push(("driver".to_owned(), driver));
    }
    let Ok(card) = nvml.device_by_index(0) else { return out };
    let mhz = |clock| card.clock_info(clock).map(|c| format!("{c} MHz"));
    let watts = |mw: u32| format!("{} W", mw / 1000);
    let facts = [
        ("sm clock", mhz(Clock::SM)),
        ("memory clock", mhz(Clock::Memory)),
        ("max sm clock", card.max_clock_info(Clock::SM).map(|c| format!("{c} MHz"))),
        ("power", card.power_usage().map(watts)),
        ("power limit", card.enforced_power_limit().map(watts)),
        ("temperature", card.temperature(TemperatureSensor::Gpu).map(|t| format!("{t} C"))),
    ];
    out.extend(facts.into_iter().filter_map(|(name, v)| Some((name.to_owned(), v.ok()?))));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let bytes: [u8; 16] = std::array::from_fn(|at| 0xf0 + at as u8);
        assert_eq!(uuid_text(bytes), "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
    }

    #[test]
    fn the_drivers_version_is_part_of_its_slug() {
        for (driver, slug) in [
            (" 4.5 (Core Profile) Mesa 22.3.6", "4.5.mesa.22.3.6"),
            (" OpenGL ES 3.2 Mesa 25.0.7", "3.2.mesa.25.0.7"),
            ("NVIDIA 580.159.04", "nvidia.580.159.04"),
            ("radv Mesa 22.3.6", "radv.mesa.22.3.6"),
            ("", "driver"),
        ] {
            let kind = WgpuDeviceKind::Cpu;
            let (name, driver) = (String::new(), driver.to_owned());
            let facts = AdapterFacts { kind, software: true, name, vendor: 0, device: 0, driver };
            assert_eq!(facts.driver_slug(), slug);
        }
    }

    #[test]
    fn cpu_part_comes_from_the_numbers() {
        let intel = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n\
                     model name\t: Intel(R) Xeon(R)\n";
        let cpu = cpu_from(intel);
        assert_eq!(
            (cpu.part.as_str(), cpu.name.as_str()),
            ("genuineintel.6.143", "Intel(R) Xeon(R)")
        );
        assert_eq!(cpu_from("").part, std::env::consts::ARCH);
    }
}
