//! Facts about a processor that decide which kernel configs can run on it.

use std::collections::BTreeSet;
use std::fmt;

use quant::DType;
use serde::{Deserialize, Serialize};

use crate::Backend;

/// One matrix instruction: `acc[m, n] += a[m, k] · b[k, n]`, a and b of type `ab`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MmaShape {
    pub ab: DType,
    pub acc: DType,
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// Cube-scope (workgroup) cooperative matrices; sizes are multiples of `m`, `n` and `k`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CubeMma {
    pub ab: DType,
    pub acc: DType,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    /// Required number of units in the cube; any other number silently gives wrong results.
    pub units: Option<u32>,
}

impl CubeMma {
    /// Returns cube-scope matrices with the granularity of `shape`.
    pub const fn new(shape: MmaShape, units: Option<u32>) -> Self {
        let MmaShape { ab, acc, m, n, k } = shape;
        Self { ab, acc, m, n, k, units }
    }
}

/// Identity of an architecture for tuned results, with `@profile` appended if restricted.
///
/// It consists of the compute capability and the number of multiprocessors (CUDA), of vendor, device and
/// driver version (wgpu), or of part and cores (CPU). It never contains an ordinal or a product name, so
/// two machines with the same card share results.
///
/// Cards that differ only in memory and clocks share an identity: an H100 SXM and an H200 are both
/// `cuda-sm90-132`. A config tuned on one runs on the other but may not be its fastest, and baselines of
/// one are compared with the other. Every run measures its ceilings, so shares of them hold on both.
/// Versions of CUDA's driver and compiler are not part of the identity; a record lists them on its card.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ArchId(pub String);

impl ArchId {
    /// Returns the families of cards whose tuned configs suit this one, its own first.
    ///
    /// On CUDA a family is a compute capability: that of the recorded profile if one restricts the card. Cards
    /// newer than RTX 40 also use the family of RTX 40. Through Vulkan and WebGPU a family is a vendor. A CPU has
    /// none: its configs depend on the part.
    pub fn families(&self) -> Vec<String> {
        let (id, profile) = self.0.split_once('@').unwrap_or((&self.0, ""));
        let mut parts = id.split('-');
        match (parts.next(), parts.next()) {
            (Some("cuda"), Some(sm)) => {
                let own = sm.strip_prefix("sm").and_then(|sm| sm.parse().ok());
                let limit = ArchProfile::recorded(profile).ok().and_then(|p| p.compute_capability);
                let Some(own) = limit.or(own) else { return Vec::new() };
                let older = (own > ADA).then_some(ADA);
                [Some(own), older].into_iter().flatten().map(|sm| format!("sm{sm}")).collect()
            }
            (Some(api @ ("vulkan" | "webgpu")), Some(vendor)) => vec![format!("{api}-{vendor}")],
            _ => Vec::new(),
        }
    }
}

/// Compute capability of RTX 40.
const ADA: u32 = 89;

impl fmt::Display for ArchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Plain facts about one processor, as one backend reports them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchProfile {
    pub id: ArchId,
    pub backend: Backend,
    /// Name from the driver, for display only; no decision depends on it.
    pub name: String,
    /// Name of the recorded profile that restricts this one, if any.
    pub restricted_to: Option<String>,
    /// CUDA compute capability as `major * 10 + minor`.
    pub compute_capability: Option<u32>,
    /// Number of streaming multiprocessors or CPU cores, if the backend reports it.
    pub processors: Option<u32>,
    pub memory_bytes: Option<u64>,
    /// Largest buffer in bytes that a kernel can bind, if less than the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_buffer_bytes: Option<u64>,
    /// Number of iterations, over all loops of a unit, after which the device silently stops loops.
    #[serde(rename = "max_loop_turns", default, skip_serializing_if = "Option::is_none")]
    pub max_loop_iterations: Option<u32>,
    /// Bytes of the last-level cache.
    pub cache_bytes: Option<u64>,
    /// Smallest and largest number of units that run in lock step (warp, subgroup).
    pub plane_size: (u32, u32),
    pub max_shared_bytes: u32,
    pub max_units_per_cube: u32,
    /// Bytes of the widest single load.
    pub load_bytes: u32,
    /// Types that a kernel may compute in or store.
    pub dtypes: BTreeSet<DType>,
    /// Register-level matrix instructions (`mma.sync`).
    pub mma: BTreeSet<MmaShape>,
    /// Plane-scope cooperative matrices.
    pub cmma: BTreeSet<MmaShape>,
    /// Cube-scope cooperative matrices, with the granularity of each size.
    pub cube_mma: BTreeSet<CubeMma>,
    /// Bytes of shared memory that the driver reserves when cube-scope matrices are used.
    pub cube_mma_reserved_bytes: u32,
    /// Asynchronous global-to-shared copies (`cp.async`).
    pub async_copy: bool,
    /// Bulk tensor copies (TMA).
    pub tma: bool,
    /// Thread-block clusters.
    pub clusters: bool,
}

impl ArchProfile {
    /// Limits this card to features that `limit` also has, so that configs tuned and tested here run there.
    ///
    /// Compute capability, processor count and cache stay those of the real card, which compiles, runs and
    /// measures the code: operands must exceed its cache.
    pub fn restrict(&self, name: &str, limit: &Self) -> Self {
        fn least<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
            [a, b].into_iter().flatten().min()
        }
        let common = |a: &BTreeSet<MmaShape>, b: &BTreeSet<MmaShape>| a & b;
        Self {
            id: ArchId(format!("{}@{name}", self.id)),
            restricted_to: Some(name.to_owned()),
            max_shared_bytes: self.max_shared_bytes.min(limit.max_shared_bytes),
            max_units_per_cube: self.max_units_per_cube.min(limit.max_units_per_cube),
            load_bytes: self.load_bytes.min(limit.load_bytes),
            memory_bytes: least(self.memory_bytes, limit.memory_bytes),
            max_buffer_bytes: least(self.max_buffer_bytes, limit.max_buffer_bytes),
            max_loop_iterations: least(self.max_loop_iterations, limit.max_loop_iterations),
            dtypes: &self.dtypes & &limit.dtypes,
            mma: common(&self.mma, &limit.mma),
            cmma: common(&self.cmma, &limit.cmma),
            cube_mma: &self.cube_mma & &limit.cube_mma,
            async_copy: self.async_copy && limit.async_copy,
            tma: self.tma && limit.tma,
            clusters: self.clusters && limit.clusters,
            ..self.clone()
        }
    }

    /// Returns the instruction of [`ArchProfile::mma`] with the largest k for inputs `ab` and accumulators `acc`.
    pub fn mma_for(&self, ab: DType, acc: DType) -> Option<MmaShape> {
        self.mma.iter().filter(|s| s.ab == ab && s.acc == acc).max_by_key(|s| s.k).copied()
    }
}

/// A profile name that is not recorded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown profile `{name}`\nhint: use one of {known}")]
pub struct UnknownProfile {
    pub name: String,
    pub known: String,
}

const RECORDED: [(&str, &str); 4] = [
    ("rtx4080", include_str!("../profiles/rtx4080.json")),
    ("rtx4090", include_str!("../profiles/rtx4090.json")),
    ("rtx5090", include_str!("../profiles/rtx5090.json")),
    ("h200", include_str!("../profiles/h200.json")),
];

/// Returns the names of the recorded profiles.
pub fn recorded() -> impl Iterator<Item = &'static str> {
    RECORDED.into_iter().map(|(name, _)| name)
}

impl ArchProfile {
    /// Loads a profile from `crates/arch/profiles` by file name.
    ///
    /// # Errors
    /// [`UnknownProfile`] lists the recorded names.
    pub fn recorded(name: &str) -> Result<Self, UnknownProfile> {
        let found = RECORDED.iter().find(|(own, _)| own.eq_ignore_ascii_case(name));
        let (_, text) = found.ok_or_else(|| UnknownProfile {
            name: name.to_owned(),
            known: recorded().collect::<Vec<_>>().join(", "),
        })?;
        Ok(serde_json::from_str(text).expect("recorded profiles parse: tested below"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_profiles_parse_and_match_the_cards() {
        let mut names: Vec<_> = recorded().collect();
        names.sort_unstable();
        assert_eq!(names, record::PROFILES);
        for (name, processors, shared) in [
            ("rtx4080", 76, 99 << 10),
            ("rtx4090", 128, 99 << 10),
            ("rtx5090", 170, 99 << 10),
            ("h200", 132, 227 << 10),
        ] {
            let p = ArchProfile::recorded(name).expect("listed in RECORDED");
            assert_eq!((p.processors, p.max_shared_bytes), (Some(processors), shared), "{name}");
            assert!(p.mma_for(DType::Bf16, DType::F32).is_some(), "{name}");
        }
        let unknown = ArchProfile::recorded("rtx9090").expect_err("no such card");
        assert!(unknown.to_string().contains("rtx4090"));
    }

    #[test]
    fn families_are_capabilities_and_vendors() {
        let families = |id: &str| ArchId(id.to_owned()).families();
        assert_eq!(families("cuda-sm89-128"), ["sm89"]);
        assert_eq!(families("cuda-sm90-132@rtx4080"), ["sm89"]);
        assert_eq!(families("cuda-sm120-170"), ["sm120", "sm89"]);
        assert_eq!(families("cuda-sm90-132@rtx5090"), ["sm120", "sm89"]);
        assert_eq!(families("cuda-sm86-82"), ["sm86"]);
        assert_eq!(families("vulkan-10de-2335-nvidia.580.159.04"), ["vulkan-10de"]);
        assert!(families("cpu-authenticamd.25.1-2").is_empty());
    }

    #[test]
    fn restriction_takes_the_smaller_of_both() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let r = h200.restrict("rtx4090", &ArchProfile::recorded("rtx4090").expect("recorded"));
        assert_eq!(r.max_shared_bytes, 99 << 10);
        assert!(!r.tma && !r.clusters && r.async_copy);
        assert_eq!(r.processors, Some(132), "the real card runs the code");
        assert_eq!(r.cache_bytes, h200.cache_bytes, "and its cache is what operands outgrow");
        assert!(r.id.0.ends_with("@rtx4090"));
    }

    #[test]
    fn restriction_takes_no_matrix_instruction_that_one_of_both_lacks() {
        let h200 = ArchProfile::recorded("h200").expect("recorded");
        let shape = *h200.cmma.first().expect("it has plane-scope matrices");
        let whole = CubeMma::new(shape, Some(128));
        let wide = ArchProfile { cube_mma: [whole].into(), ..h200.clone() };
        let mut narrow = ArchProfile { memory_bytes: None, ..h200.clone() };
        assert!(narrow.cmma.remove(&shape));
        for (card, limit) in [(&wide, &narrow), (&narrow, &wide)] {
            let r = card.restrict("other", limit);
            assert!(!r.cmma.contains(&shape) && r.cube_mma.is_empty());
            assert_eq!((r.cmma.len() + 1, r.memory_bytes), (h200.cmma.len(), h200.memory_bytes));
        }
    }
}
