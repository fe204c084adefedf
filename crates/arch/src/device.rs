//! Opens devices.

use std::path::PathBuf;

use cubecl::client::Client;
use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};

use crate::cores::allowed_cores;
use crate::facts::{self, AdapterFacts};
use crate::host::HostMemory;
use crate::profile::UnknownProfile;
use crate::{ArchId, ArchProfile, Backend, CubeMma, DType, MmaShape};

/// An open handle to one processor through one backend.
#[derive(Clone)]
pub struct Device {
    client: Client,
    profile: ArchProfile,
    raw: cubecl::Device,
    /// Index of the device among those of its backend.
    ordinal: usize,
}

/// The reason that a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The machine has no such device, or lacks a driver or library that it needs.
    #[error("no {backend} device: {why}\nhint: {how}")]
    Unavailable { backend: Backend, why: String, how: String },
    /// The backend has fewer devices.
    #[error(
        "no {backend} device {ordinal}: this machine has {count}\nhint: pass a device number from \
         0; `flashover doctor` lists the first device of each backend"
    )]
    Ordinal { backend: Backend, ordinal: usize, count: usize },
    /// Another library's device uses a runtime without a backend here.
    #[error(
        "no backend for CubeCL's runtime {runtime}\nhint: open the device with cuda, vulkan, \
         webgpu or cpu"
    )]
    Foreign { runtime: String },
    #[error(transparent)]
    UnknownProfile(#[from] UnknownProfile),
    /// The profile belongs to another backend than the device.
    #[error(
        "profile `{profile}` describes a {of} device, not {backend}\nhint: use it with --backend {of}"
    )]
    ForeignProfile { profile: String, of: Backend, backend: Backend },
}

/// Returns the folder of compiled kernels; `None` if the machine has no cache folder.
pub(crate) fn kernel_cache() -> Option<PathBuf> {
    Some(dirs::cache_dir()?.join("flashover/kernels"))
}

/// Makes CubeCL cache compiled kernels between runs, next to the tuned configs. The key contains this program's build
/// and the kernel's arguments, so stale kernels are never used. All other settings of a user's `cubecl.toml` still
/// apply. Only the first call has an effect.
fn keep_compiled_kernels() {
    let Some(cache) = kernel_cache() else { return };
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    config.environment.path = CacheConfig::Directory(cache);
    // Returns false if the user's program or an earlier device set a config; that one stays.
    CubeClRuntimeConfig::try_set(config);
}

impl Device {
    /// Opens the first device of `backend`.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`] names the missing part and a way to get it.
    pub fn open(backend: Backend) -> Result<Self, OpenError> {
        Self::open_nth(backend, 0)
    }

    /// Opens device `ordinal` of `backend`: cards as CUDA counts them, adapters as wgpu lists them, one CPU.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`] says what is missing and how to get it.
    pub fn open_nth(backend: Backend, ordinal: usize) -> Result<Self, OpenError> {
        keep_compiled_kernels();
        let gone = |why: String| OpenError::Unavailable {
            backend,
            why,
            how: facts::how_to_get(backend).to_owned(),
        };
        if let Some(missing) = facts::missing(backend).into_iter().next() {
            return Err(OpenError::Unavailable { backend, why: missing.what, how: missing.how });
        }
        let adapters = facts::backend_adapters(backend);
        let count = match backend {
            Backend::Cuda => facts::cuda_devices(),
            Backend::Cpu => 1,
            Backend::Vulkan | Backend::WebGpu => adapters.len(),
        };
        // A driver without a card is told apart below, by the backend's own error.
        if ordinal >= count.max(1) {
            return Err(OpenError::Ordinal { backend, ordinal, count });
        }
        let raw = match backend {
            Backend::Cuda => cubecl::Device::cuda(ordinal),
            Backend::Cpu => cubecl::Device::cpu(),
            Backend::Vulkan => {
                let adapter = adapters
                    .get(ordinal)
                    .ok_or_else(|| gone("the Vulkan loader found no hardware driver".to_owned()))?;
                cubecl::Device::vulkan(adapter.kind.clone())
            }
            Backend::WebGpu => {
                let adapter = adapters
                    .get(ordinal)
                    .ok_or_else(|| gone("EGL found no OpenGL ES 3.1 driver".to_owned()))?;
                cubecl::Device::gl(adapter.kind.clone())
            }
        }
        .map_err(|e| gone(format!("{e:?}")))?;
        let client = raw.client();
        if backend == Backend::Vulkan && client.name() != "wgpu<spirv>" {
            return Err(gone(
                "the driver lacks vulkanMemoryModel or bufferDeviceAddress, so SPIR-V kernels \
                 cannot run"
                    .to_owned(),
            ));
        }
        let profile = profile_of(&client, backend, ordinal);
        Ok(Self { client, profile, raw, ordinal })
    }

    /// Wraps a device that another library, such as Burn, has opened. Hidden like `client` and `raw`, because its
    /// signature contains a type of CubeCL.
    ///
    /// # Errors
    /// [`OpenError::Foreign`] if the runtime has no backend here.
    #[doc(hidden)]
    pub fn from_raw(raw: cubecl::Device) -> Result<Self, OpenError> {
        let client = raw.client();
        let backend = match client.name() {
            "cuda" => Backend::Cuda,
            "wgpu<spirv>" => Backend::Vulkan,
            "wgpu<wgsl>" => Backend::WebGpu,
            "cpu" => Backend::Cpu,
            other => return Err(OpenError::Foreign { runtime: other.to_owned() }),
        };
        let ordinal = match &raw {
            cubecl::Device::Cuda(device) => device.index,
            // Those of other backends that Burn opens are the first.
            _ => 0,
        };
        let profile = profile_of(&client, backend, ordinal);
        Ok(Self { client, profile, raw, ordinal })
    }

    /// Returns this device limited to the recorded profile `name`.
    ///
    /// # Errors
    /// The profile is unknown or belongs to another backend.
    pub fn restrict(&self, name: &str) -> Result<Self, OpenError> {
        let limit = ArchProfile::recorded(name)?;
        if limit.backend != self.profile.backend {
            return Err(OpenError::ForeignProfile {
                profile: name.to_owned(),
                of: limit.backend,
                backend: self.profile.backend,
            });
        }
        Ok(Self { profile: self.profile.restrict(name, &limit), ..self.clone() })
    }

    /// Returns CubeCL's client, which allocates and launches.
    #[doc(hidden)]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the facts about this device.
    pub fn profile(&self) -> &ArchProfile {
        &self.profile
    }

    /// Returns the backend that opened this device.
    pub fn backend(&self) -> Backend {
        self.profile.backend
    }

    /// Index of this device among those of its backend.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// UUID of a CUDA device, as [`Reading::id`](crate::monitor::Reading) has it; none on other backends.
    pub fn uuid(&self) -> Option<String> {
        (self.backend() == Backend::Cuda).then(|| facts::cuda_uuid(self.ordinal))?
    }

    /// The same device in CubeCL's terms, for sharing it with Burn.
    #[doc(hidden)]
    pub fn raw(&self) -> &cubecl::Device {
        &self.raw
    }
}

fn profile_of(client: &Client, backend: Backend, ordinal: usize) -> ArchProfile {
    let properties = client.properties();
    let (hw, features) = (&properties.hardware, &properties.features);
    let adapter = match backend {
        Backend::Vulkan | Backend::WebGpu => {
            facts::backend_adapters(backend).into_iter().nth(ordinal)
        }
        Backend::Cuda | Backend::Cpu => None,
    };
    let compute_capability = match backend {
        Backend::Cuda => properties.identity.fingerprint.trim_start_matches("ptx_sm").parse().ok(),
        _ => None,
    };
    let processors = match backend {
        Backend::Cpu => hw.num_cpu_cores.map(allowed_cores),
        _ => hw.num_streaming_multiprocessors.or(hw.num_cpu_cores),
    };
    let tf32 = features.matmul.mma.iter().any(|c| dtype_of(c.a_type) == Some(DType::Tf32));
    let mut stored: std::collections::BTreeSet<_> = ELEMENTS
        .into_iter()
        .filter(|(dtype, elem)| {
            let usage = properties.type_usage(*elem);
            *dtype != DType::Tf32 && usage.contains(cubecl::features::TypeUsage::Buffer)
        })
        .map(|(dtype, _)| dtype)
        .filter(|d| (backend, *d) != (Backend::Cpu, DType::Bf16) || crate::bf16::rounds())
        .collect();
    if tf32 {
        stored.insert(DType::Tf32);
    }
    let shapes = |set: &std::collections::BTreeSet<cubecl::features::MmaConfig>| {
        set.iter()
            .filter(|c| c.a_type == c.b_type)
            .filter_map(|c| {
                let (ab, acc) = (dtype_of(c.a_type)?, dtype_of(c.cd_type)?);
                Some(MmaShape { ab, acc, m: c.m, n: c.n, k: c.k })
            })
            .collect::<std::collections::BTreeSet<_>>()
    };
    let mut mma = shapes(&features.matmul.mma);
    // Every card with this instruction also has it with f16 accumulators; CubeCL 0.11 lists only f32.
    let halves = MmaShape { ab: DType::F16, acc: DType::F32, m: 16, n: 8, k: 16 };
    if mma.contains(&halves) {
        mma.insert(MmaShape { acc: DType::F16, ..halves });
    }
    let cube_mma = features
        .matmul
        .cube_mma
        .iter()
        .filter(|c| c.a_type == c.b_type)
        .filter_map(|c| {
            let (ab, acc) = (dtype_of(c.a_type)?, dtype_of(c.cd_type)?);
            let (m, n, k) = (c.m_granularity, c.n_granularity, c.k_granularity);
            Some(CubeMma { ab, acc, m, n, k, units: c.units_per_block })
        })
        .collect();
    ArchProfile {
        id: arch_id(backend, compute_capability, processors, adapter.as_ref()),
        backend,
        name: match backend {
            Backend::Cpu => facts::cpu().name,
            _ => properties.identity.name.clone(),
        },
        restricted_to: None,
        compute_capability,
        processors,
        memory_bytes: properties.memory.max_memory().or_else(|| match backend {
            Backend::Cpu => HostMemory::now().map(|memory| memory.total),
            _ => None,
        }),
        max_buffer_bytes: match backend {
            Backend::WebGpu => Some(properties.memory.max_page_size),
            _ => None,
        },
        max_loop_iterations: facts::max_loop_iterations(&properties.identity.name),
        cache_bytes: match backend {
            Backend::Cuda => facts::cuda_l2_bytes(ordinal),
            _ => hw.last_level_cache_size.map(|b| b as u64),
        },
        plane_size: (hw.plane_size_min, hw.plane_size_max),
        max_shared_bytes: hw.max_shared_memory_size as u32,
        max_units_per_cube: hw.max_units_per_cube,
        load_bytes: hw.load_width / 8,
        dtypes: stored,
        mma,
        cmma: shapes(&features.matmul.cmma),
        cube_mma,
        cube_mma_reserved_bytes: hw.cube_mma_reserved_shared_memory as u32,
        async_copy: features.copy_async,
        tma: !features.tma.is_empty(),
        clusters: features.cube_cluster,
    }
}

fn arch_id(
    backend: Backend,
    compute_capability: Option<u32>,
    processors: Option<u32>,
    adapter: Option<&AdapterFacts>,
) -> ArchId {
    let count = processors.map_or_else(|| "n".to_owned(), |p| p.to_string());
    ArchId(match (backend, adapter) {
        (Backend::Cuda, _) => {
            let cc = compute_capability.map_or_else(|| "xx".to_owned(), |c| c.to_string());
            format!("cuda-sm{cc}-{count}")
        }
        (Backend::Cpu, _) => format!("cpu-{}-{count}", facts::cpu().part),
        (_, Some(a)) => format!("{backend}-{:04x}-{:04x}-{}", a.vendor, a.device, a.driver_slug()),
        (_, None) => format!("{backend}-unknown"),
    })
}

/// Element types that kernels compute in or store.
const ELEMENTS: [(DType, ElemType); 7] = [
    (DType::F32, ElemType::Float(FloatKind::F32)),
    (DType::Tf32, ElemType::Float(FloatKind::TF32)),
    (DType::F16, ElemType::Float(FloatKind::F16)),
    (DType::Bf16, ElemType::Float(FloatKind::BF16)),
    (DType::I8, ElemType::Int(IntKind::I8)),
    (DType::U8, ElemType::UInt(UIntKind::U8)),
    (DType::I32, ElemType::Int(IntKind::I32)),
];

fn dtype_of(elem: ElemType) -> Option<DType> {
    ELEMENTS.into_iter().find(|(_, own)| *own == elem).map(|(dtype, _)| dtype)
}
