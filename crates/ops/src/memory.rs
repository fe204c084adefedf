//! Device memory of op calls, in bytes. Each op has a function for its memory next to it, such as
//! [`linear_memory`](crate::linear_memory). A model adds them up in the order of its calls.
//!
//! These functions compute with shapes and a [`MemoryProfile`] only, so that they work for absent cards. Sums
//! have 128 bits, because a configuration may hold absurd sizes.

use arch::{ArchProfile, Backend};
use burn::tensor::{DType, FloatDType};
use kernels::quantized;
use quant::WeightFormat;

use crate::call::float_of;

/// Properties of a device that decide how much memory ops take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryProfile {
    /// True if decode steps are captured as graphs.
    pub captures: bool,
    /// Number of multiprocessors, which split-k fills; 0 if k is never split.
    pub processors: u32,
    /// Most rows of a matmul that reads quantised codes directly; more rows may take a dense copy of the
    /// weight.
    pub max_fused_rows: u32,
}

impl MemoryProfile {
    /// The profile with the least memory per layer, in which logits take the largest share: no split-k, and
    /// no dense copy for up to 128 rows.
    pub const LEAST: Self = Self { captures: false, processors: 0, max_fused_rows: 128 };

    /// Returns the profile of a device for the compute dtype `dtype` and the weight format `format`; none for
    /// dense weights.
    pub fn new(profile: &ArchProfile, dtype: FloatDType, format: Option<WeightFormat>) -> Self {
        // Vulkan does not report the number of multiprocessors.
        const USUAL_PROCESSORS: u32 = 128;
        let dtype = float_of(dtype.into()).unwrap_or(arch::DType::F32);
        let captures = profile.backend != Backend::Cpu;
        Self {
            captures,
            processors: if captures { profile.processors.unwrap_or(USUAL_PROCESSORS) } else { 0 },
            max_fused_rows: format
                .map_or(0, |format| quantized::max_fused_rows(profile, format, dtype)),
        }
    }
}

/// Bytes of one op call, without its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpMemory {
    /// Result.
    pub result: u128,
    /// Tensors that are freed before the call returns.
    pub temporary: u128,
    /// f32 accumulators of one split of k; 0 if k is not split.
    pub partial_sums: u128,
    /// Largest number of splits of k.
    pub splits: u128,
    /// Dense copy of a quantised weight, in the forward and the backward pass.
    pub dense_weight: u128,
    /// Operands and intermediates saved for the backward pass.
    pub saved: u128,
}

impl OpMemory {
    /// Returns the peak bytes during the call, without a dense weight.
    pub const fn peak(&self) -> u128 {
        self.result + self.temporary + self.splits * self.partial_sums
    }

    /// Returns the bytes that a captured graph keeps. For split-k these are two splits, because steps have
    /// few rows.
    pub const fn in_graph(&self) -> u128 {
        self.result + self.temporary + 2 * self.partial_sums + self.dense_weight
    }
}

/// Live bytes over a sequence of op calls.
#[derive(Debug, Clone, Copy, Default)]
pub struct Liveness {
    live: u128,
    /// Peak of live bytes so far, without dense weights.
    pub peak: u128,
    /// Largest dense weight so far: calls reuse its memory.
    pub dense_weight: u128,
    /// Bytes that a graph of all calls so far keeps.
    pub in_graph: u128,
}

impl Liveness {
    /// Adds a tensor that no op of this crate allocates, and returns its bytes.
    pub fn add(&mut self, bytes: u128) -> u128 {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
        bytes
    }

    /// Adds a call, and returns the bytes of its result, which stays live.
    pub fn call(&mut self, op: OpMemory) -> u128 {
        self.peak = self.peak.max(self.live + op.peak());
        self.dense_weight = self.dense_weight.max(op.dense_weight);
        self.in_graph += op.in_graph();
        self.live += op.result;
        op.result
    }

    /// Subtracts tensors that are freed.
    pub fn free(&mut self, bytes: u128) {
        self.live -= bytes;
    }
}

/// Page of a CubeCL pool for buffers of at most [`SMALL`] bytes (`AdaptiveMemory`, 0.11.3).
const SMALL_PAGE: u128 = 8 << 20;
const SMALL: u128 = 64 << 10;
/// Alignment of buffers on every device.
const ALIGNED: u128 = 512;

/// Returns the bytes that pools hold beyond their contents: `transient` bytes in one page, and `buffers`
/// separate allocations.
pub const fn pool_overhead(transient: u128, buffers: u128) -> u128 {
    SMALL_PAGE + page_slack(transient) + ALIGNED * buffers
}

/// Bytes of a captured graph besides its nodes' tensors: a page of small buffers, and 45 to 91 KB that wgpu
/// stages.
pub const GRAPH_OVERHEAD: u128 = SMALL_PAGE + (128 << 10);

/// Returns the bytes of a page beyond its request: it adds a MiB, rounds up to whole MiB, and has at least 2
/// MiB.
const fn page_slack(bytes: u128) -> u128 {
    const MIB: u128 = 1 << 20;
    if bytes <= SMALL {
        return 0;
    }
    let page = (bytes + MIB).next_multiple_of(MIB);
    let page = if page < 2 * MIB { 2 * MIB } else { page };
    page - bytes
}

/// Returns the bytes of `values` elements of a dtype.
pub(crate) fn bytes_of(values: u128, dtype: FloatDType) -> u128 {
    values * DType::from(dtype).size() as u128
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole() {
        let mib = 1 << 20;
        // Small buffers share a separate page.
        assert_eq!((page_slack(0), page_slack(SMALL)), (0, 0));
        assert_eq!(page_slack(SMALL + 1), 2 * mib - SMALL - 1);
        assert_eq!([mib, mib + 1, 5 * mib].map(page_slack), [mib, 2 * mib - 1, mib]);
    }

    #[test]
    fn what_is_freed_makes_place_and_a_graph_frees_nothing() {
        let op =
            OpMemory { result: 8, temporary: 2, partial_sums: 3, splits: 4, ..OpMemory::default() };
        let mut live = Liveness::default();
        let x = live.add(5);
        let first = live.call(op);
        assert_eq!((first, live.peak), (8, 5 + 8 + 2 + 4 * 3));
        live.free(first);
        live.call(OpMemory { dense_weight: 7, ..op });
        assert_eq!((live.peak, live.dense_weight), (27, 7));
        live.free(x);
        assert_eq!(live.in_graph, 2 * (8 + 2 + 2 * 3) + 7);
    }

    #[test]
    fn facts_follow_the_profile() {
        let card = ArchProfile::recorded("rtx4090").expect("recorded");
        let of = |dtype| MemoryProfile::new(&card, dtype, Some(WeightFormat::Nf4));
        let half = of(FloatDType::BF16);
        assert!(half.captures && half.processors == card.processors.expect("CUDA reports it"));
        // f32 has no path on tensor cores.
        assert_eq!((half.max_fused_rows, of(FloatDType::F32).max_fused_rows), (128, 8));
        let host = ArchProfile { backend: Backend::Cpu, ..card };
        assert_eq!(MemoryProfile::new(&host, FloatDType::F32, None).processors, 0);
    }
}
