//! Devices of the machine, as `flashover doctor` lists them, and the choice among them.

use std::fmt;
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context, Result};
use record::Backend;
use serde::Deserialize;

use crate::fail::usage;
use crate::process::end_of;

/// Value of `--backend`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// The GPU backends of this machine, or the CPU if it has no GPU.
    Auto,
    /// Every device of this machine.
    All,
    /// These backends, in this order.
    List(Vec<Backend>),
}

impl Selection {
    /// True if the selection may contain this backend.
    pub fn may_include(&self, backend: Backend) -> bool {
        match self {
            Self::All => true,
            Self::Auto => backend != Backend::WebGpu,
            Self::List(list) => list.contains(&backend),
        }
    }
}

impl FromStr for Selection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => return Ok(Self::Auto),
            "all" => return Ok(Self::All),
            _ => {}
        }
        let mut list = Vec::new();
        for name in text.split(',').map(str::trim) {
            if let "auto" | "all" = name {
                return Err(format!(
                    "`{name}` cannot be combined\nhint: use `{name}` alone, or a list of {}",
                    Backend::words()
                ));
            }
            let backend = name.parse().map_err(|_| {
                let all = Backend::words();
                format!("`{name}` is not a backend\nhint: use auto, all, or a list of {all}")
            })?;
            if !list.contains(&backend) {
                list.push(backend);
            }
        }
        Ok(Self::List(list))
    }
}

/// A device, as `flashover doctor` lists it.
#[derive(Debug, Clone, Deserialize)]
pub struct Device {
    pub backend: Backend,
    pub name: String,
    pub arch_id: String,
    /// True if a CPU emulates the GPU, as llvmpipe does.
    pub software: bool,
}

/// A missing installation that would make another device or tool usable.
#[derive(Debug, Clone, Deserialize)]
pub struct Missing {
    pub what: String,
    pub needed_for: String,
    pub how: String,
}

/// Fields of the report of `flashover doctor --json` that this crate uses.
#[derive(Debug, Clone, Deserialize)]
pub struct Doctor {
    pub devices: Vec<Device>,
    pub missing: Vec<Missing>,
}

/// Devices that a command runs on, and the reason for the choice.
#[derive(Debug, Clone)]
pub struct Chosen {
    pub devices: Vec<Device>,
    pub why: &'static str,
}

impl Chosen {
    /// Refuses a profile if no CUDA device is chosen: all profiles describe CUDA cards.
    pub fn check_profile(&self, profile: Option<&str>) -> Result<()> {
        let Some(profile) = profile else { return Ok(()) };
        if self.devices.iter().any(|device| device.backend == Backend::Cuda) {
            return Ok(());
        }
        let here: Vec<_> = self.devices.iter().map(|device| device.backend.name()).collect();
        let what = format!("profile `{profile}` describes a cuda device, not {}", here.join(", "));
        Err(usage(what, "use it with --backend cuda"))
    }
}

impl Doctor {
    /// Runs `flashover doctor` in a separate process, because opening a device takes memory of it.
    ///
    /// # Errors
    /// It does not answer.
    pub fn ask(mut flashover: Command) -> Result<Self> {
        let doctor = flashover.args(["doctor", "--json"]).stderr(Stdio::inherit()).output();
        let output = doctor.context("cannot start flashover")?;
        end_of("flashover", output.status)?;
        serde_json::from_slice(&output.stdout)
            .context("`flashover doctor --json` printed something else")
    }

    /// Returns the first device of a backend, which programs open.
    pub fn device(&self, backend: Backend) -> Option<&Device> {
        self.devices.iter().find(|device| device.backend == backend)
    }

    /// Resolves a selection to devices of this machine.
    ///
    /// # Errors
    /// The machine lacks a requested device; the hint tells how to get it.
    pub fn choose(&self, selection: &Selection, require_gpu: bool) -> Result<Chosen> {
        let present = |wanted: &[Backend]| -> Vec<Device> {
            wanted.iter().filter_map(|backend| self.device(*backend).cloned()).collect()
        };
        let (devices, why) = match selection {
            Selection::All => (present(&Backend::ALL), "every device of this machine"),
            Selection::List(list) => {
                if let Some(absent) = list.iter().find(|b| self.device(**b).is_none()) {
                    return Err(usage(
                        format!("this machine has no device for backend `{absent}`"),
                        self.how_to_get(&[*absent]),
                    ));
                }
                (present(list), "as requested")
            }
            Selection::Auto => {
                let mut gpus = present(&[Backend::Cuda, Backend::Vulkan]);
                gpus.retain(|device| !device.software);
                if gpus.is_empty() {
                    (present(&[Backend::Cpu]), "no GPU found")
                } else {
                    (gpus, "the available GPU backends")
                }
            }
        };
        let gpu = |device: &Device| device.backend != Backend::Cpu && !device.software;
        if require_gpu && !devices.iter().any(gpu) {
            return Err(usage(
                "--require-gpu is set, but no GPU is selected",
                self.how_to_get(&[Backend::Cuda, Backend::Vulkan]),
            ));
        }
        if devices.is_empty() {
            return Err(usage(
                "no device can run kernels on this machine",
                self.how_to_get(&Backend::ALL),
            ));
        }
        Ok(Chosen { devices, why })
    }

    /// Instructions to install parts that these backends lack; all missing parts if none match.
    fn how_to_get(&self, backends: &[Backend]) -> String {
        let line = |m: &Missing| format!("{}: {}: {}", m.needed_for, m.what, m.how);
        let about: Vec<_> = self
            .missing
            .iter()
            .filter(|m| backends.iter().any(|b| m.needed_for.contains(&b.to_string())))
            .map(line)
            .collect();
        if !about.is_empty() {
            return about.join("\n      ");
        }
        let all: Vec<_> = self.missing.iter().map(line).collect();
        if all.is_empty() {
            "list every device with `cargo xtask doctor`".into()
        } else {
            all.join("\n      ")
        }
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list: Vec<_> = self
            .devices
            .iter()
            .map(|device| format!("{} ({})", device.backend, device.name))
            .collect();
        write!(f, "running on {}: {}", list.join(", "), self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doctor(devices: &[(&str, bool)]) -> Doctor {
        let devices: Vec<_> = devices
            .iter()
            .map(|(backend, software)| {
                serde_json::json!({
                    "backend": backend, "name": format!("{backend} card"), "arch_id": format!("{backend}-x"),
                    "memory_bytes": 1, "software": software,
                })
            })
            .collect();
        let report = serde_json::json!({
            "devices": devices,
            "chosen": { "backend": "cpu", "why": "test" },
            "missing": [
                { "what": "the driver is not installed", "needed_for": "cuda", "how": "install it" },
            ],
        });
        serde_json::from_value(report).unwrap()
    }

    fn chosen(doctor: &Doctor, selection: &str) -> Result<Vec<String>> {
        let chosen = doctor.choose(&selection.parse().unwrap(), false)?;
        Ok(chosen.devices.iter().map(|device| device.backend.to_string()).collect())
    }

    #[test]
    fn auto_takes_real_gpus_and_else_the_cpu() {
        let with_gpu =
            doctor(&[("cuda", false), ("vulkan", false), ("webgpu", false), ("cpu", false)]);
        assert_eq!(chosen(&with_gpu, "auto").unwrap(), ["cuda", "vulkan"]);
        let without = doctor(&[("vulkan", true), ("webgpu", true), ("cpu", false)]);
        assert_eq!(chosen(&without, "auto").unwrap(), ["cpu"]);
        assert_eq!(chosen(&without, "all").unwrap(), ["vulkan", "webgpu", "cpu"]);
    }

    #[test]
    fn a_named_backend_that_is_absent_is_the_callers_error() {
        let error = chosen(&doctor(&[("cpu", false)]), "cpu,cuda").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("`cuda`")
                && text.ends_with("\nhint: cuda: the driver is not installed: install it")
        );
        assert_eq!(crate::fail::report(&error), 2);
    }

    #[test]
    fn a_profile_without_cuda_is_the_callers_error() {
        let check = |backend| {
            let chosen = doctor(&[(backend, false)]).choose(&Selection::All, false).unwrap();
            chosen.check_profile(Some("rtx4090"))
        };
        assert!(check("cuda").is_ok());
        assert_eq!(crate::fail::report(&check("cpu").unwrap_err()), 2);
    }

    #[test]
    fn software_does_not_satisfy_require_gpu() {
        let soft = doctor(&[("vulkan", true), ("cpu", false)]);
        assert!(soft.choose(&Selection::All, true).is_err());
        assert!(soft.choose(&Selection::All, false).is_ok());
        assert!(doctor(&[("cuda", false)]).choose(&Selection::Auto, true).is_ok());
    }

    #[test]
    fn a_list_keeps_its_order_and_drops_repeats() {
        let list: Selection = "cpu, cuda,cpu".parse().unwrap();
        assert_eq!(list, Selection::List(vec![Backend::Cpu, Backend::Cuda]));
        assert!("cpu,".parse::<Selection>().is_err());
        assert!("auto,cpu".parse::<Selection>().unwrap_err().contains("`auto` cannot be combined"));
        assert!("".parse::<Selection>().unwrap_err().contains("hint:"));
    }
}
