//! Config of the tensor-core path, and the comptime parameters of an instance.

use serde::{Deserialize, Serialize};

use super::cache::CachePlan;
use super::problem::DecodeProblem;
use crate::tile::{CopyPlan, TileShape};

/// Tile sizes and splits of the tensor-core path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SplitConfig {
    /// Planes per cube.
    pub planes: u32,
    /// Keys per tile.
    pub tile_kv: u32,
    /// K and V tiles in a plane's ring.
    pub stages: u32,
    /// Cubes that share the keys of one cache head of a sequence.
    pub splits: u32,
}

impl SplitConfig {
    pub(crate) const MAX_SPLITS: u32 = 256;

    pub(crate) const fn units(self) -> u32 {
        32 * self.planes
    }
}

/// Queries per fragment: the instruction's columns.
const COLUMNS: u32 = 8;

/// Comptime parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SplitPlan {
    pub(crate) planes: u32,
    pub(crate) stages: u32,
    pub(crate) head_dim: u32,
    pub(crate) seq_q: u32,
    pub(crate) bf16: bool,
    /// Cubes that share the queries of a cache head.
    pub(crate) chunks: u32,
    /// Fragments of eight queries per cube.
    pub(crate) fragments: u32,
    pub(crate) cache: CachePlan,
    /// Copies of a K tile; V uses the same layout.
    pub(crate) tile: CopyPlan,
    /// True if a sequence is split over cubes.
    pub(crate) has_splits: bool,
    /// True if the length that the host knows is probably the one on the device.
    pub(crate) foreseen: bool,
    pub(super) shared_bytes: u32,
}

impl SplitPlan {
    pub(crate) fn new(config: SplitConfig, problem: &DecodeProblem) -> Self {
        let elem = problem.cache.size() as u32;
        let cols = pitch(problem.head_dim * elem) / elem;
        let shape = TileShape::new(config.tile_kv, cols, false, elem as usize);
        let tile = CopyPlan { shape, width: 16 / elem as usize, units: 32, exact: false };
        let mut plan = Self {
            planes: config.planes,
            stages: config.stages,
            head_dim: problem.head_dim,
            seq_q: problem.seq_q,
            chunks: problem.shared_rows().div_ceil(Self::rows_of(problem)),
            bf16: problem.dtype == arch::DType::Bf16,
            fragments: Self::rows_of(problem) / COLUMNS,
            cache: CachePlan::new(problem),
            tile,
            has_splits: config.splits > 1,
            foreseen: problem.batch == 1,
            shared_bytes: 0,
        };
        plan.shared_bytes = (plan.planes * plan.ring_bytes()).max(plan.merge_bytes());
        plan
    }

    /// Queries per cube: all that share a cache head, as far as their accumulators fit in
    /// registers.
    pub(crate) fn rows_of(problem: &DecodeProblem) -> u32 {
        let wanted = problem.shared_rows().div_ceil(COLUMNS);
        // At head_dim 192, two fragments come to 230 by this estimate and spill 16 bytes (sm_89).
        let fits = |fragments: u32| registers_of(problem.head_dim, 16, fragments) <= 224;
        let max_fragments = [4, 2].into_iter().find(|f| fits(*f)).unwrap_or(1);
        COLUMNS * wanted.next_power_of_two().min(max_fragments)
    }

    /// Queries per cube.
    pub(crate) const fn rows(self) -> u32 {
        COLUMNS * self.fragments
    }

    pub(crate) const fn tile_kv(self) -> u32 {
        self.tile.shape.rows as u32
    }

    /// V as the lhs of vᵀ · pᵀ: its rows are the summed axis.
    pub(super) const fn values(self) -> TileShape {
        TileShape { transposed: true, ..self.tile.shape }
    }

    /// Bytes of the scales of K, or of V, of one tile.
    pub(crate) const fn scale_bytes(self) -> u32 {
        if self.cache.quantized { 4 * self.tile_kv() } else { 0 }
    }

    /// Bytes per stage: K, V, scales of K, scales of V.
    pub(super) const fn stage_bytes(self) -> u32 {
        2 * (self.tile.shape.bytes() + self.scale_bytes())
    }

    pub(super) const fn ring_bytes(self) -> u32 {
        self.stages * self.stage_bytes()
    }

    /// Floats between accumulator rows in shared memory. The padding puts rows of a store in
    /// different banks.
    pub(crate) const fn sums_pitch(self) -> u32 {
        self.head_dim + 4
    }

    /// Bytes for merging planes in shared memory: m and l of every row of every plane, then the
    /// accumulators.
    pub(super) const fn merge_bytes(self) -> u32 {
        self.planes * self.rows() * (8 + 4 * self.sums_pitch())
    }

    pub(crate) const fn shared_bytes(self) -> u32 {
        self.shared_bytes
    }

    pub(crate) const fn registers(self) -> u32 {
        registers_of(self.head_dim, self.tile_kv(), self.fragments)
    }

    /// Fragments per load of 32 bytes of a row.
    pub(crate) const fn per_load(self) -> usize {
        2 / self.tile.shape.elem
    }

    /// Steps of 16 elements along the head dimension.
    pub(super) const fn steps(self) -> usize {
        self.head_dim as usize / 16
    }

    /// Loads along the head dimension; the last may reach past the end.
    pub(crate) const fn loads(self) -> usize {
        self.steps().div_ceil(self.per_load())
    }

    /// Loads in flight before the first is multiplied.
    pub(crate) const fn at_once(self) -> usize {
        loads_at_once(self.fragments) as usize
    }

    /// Block of 16 keys and step along the head dimension that part `at` of a batch of loads holds.
    pub(super) const fn place(self, batch: usize, at: usize) -> (usize, usize) {
        let load = batch * self.at_once() + at / self.per_load();
        let step = load % self.loads() * self.per_load() + at % self.per_load();
        (load / self.loads(), step)
    }
}

/// Bytes per row of a shared tile, padded to whole swizzle periods.
const fn pitch(bytes: u32) -> u32 {
    match bytes {
        0..=32 => 32,
        33..=64 => 64,
        _ => bytes.next_multiple_of(128),
    }
}

/// More loads if there is little arithmetic to hide them.
const fn loads_at_once(fragments: u32) -> u32 {
    if fragments == 1 { 8 } else { 4 }
}

/// Estimated registers per unit: accumulators and queries, scores, batched loads, addresses.
const fn registers_of(head_dim: u32, tile_kv: u32, fragments: u32) -> u32 {
    fragments * (head_dim / 16 * 6 + tile_kv / 16 * 4 + 4) + 4 * loads_at_once(fragments) + 54
}
