//! Reductions over rows that neighbouring units share, and the scale of a norm.
//!
//! ```text
//!   Rms, RmsPlusOne   mean = 0                factor = 1 / √(Σ x² / width + eps)
//!   Layer             mean = Σ x / width      factor = 1 / √(Σ (x - mean)² / width + eps)
//! ```
//!
//! The deviation takes a second pass, because Σ x² - width·mean² loses all digits if the mean is large. Each
//! unit sums in f32, one accumulator per vector element. A tree reduction over units follows: through the
//! registers of planes if the device has shuffles, else through shared memory.
//!
//! Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); Ba et al., "Layer
//! Normalization" (2016).

use arch::ArchProfile;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use crate::fits::{limits, shape};

/// Formula of a norm for a row x and its weight w.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `x / rms · w`.
    Rms,
    /// `x / rms · (1 + w)`, as in Gemma.
    RmsPlusOne,
    /// `(x - mean) / deviation · w`.
    Layer,
}

impl NormKind {
    pub const ALL: [Self; 3] = [Self::Rms, Self::RmsPlusOne, Self::Layer];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Rms => "rms",
            Self::RmsPlusOne => "rms_plus_one",
            Self::Layer => "layer",
        }
    }
}

/// Compile-time parameters of units that share rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RowPlan {
    /// Units of a cube.
    pub(crate) units: u32,
    /// Units that share a row.
    pub(crate) lanes: u32,
    /// True if planes have 32 units that can read one another's registers.
    shuffles: bool,
}

impl RowPlan {
    pub(crate) fn new(arch: &ArchProfile, units: u32, lanes: u32) -> Self {
        Self { units, lanes, shuffles: arch.inline_ptx() }
    }

    /// Checks that the units of a cube can be split into groups of `lanes`.
    pub(crate) fn check(self, arch: &ArchProfile) -> Result<(), Infeasible> {
        if !self.lanes.is_power_of_two() || !self.units.is_multiple_of(self.lanes) {
            return Err(shape(
                "lanes",
                self.lanes,
                "expected a power of two that divides the units per cube",
            ));
        }
        if self.shuffles && self.lanes > 1 && !self.units.is_multiple_of(32) {
            return Err(shape("units", self.units, "expected a multiple of the plane size"));
        }
        limits(arch, self.units, self.shared_len() as u32 * 4)
    }

    /// Rows that a cube processes at once.
    pub(crate) const fn rows(self) -> u32 {
        self.units / self.lanes
    }

    /// Number of f32 in shared memory that [`row_fold`] needs.
    pub(crate) const fn shared_len(self) -> usize {
        match (self.lanes, self.shuffles) {
            (1, _) | (..=32, true) => 1,
            (_, true) => self.units as usize / 32,
            (_, false) => self.units as usize,
        }
    }
}

/// Reduction of two numbers of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fold {
    Sum,
    /// Maximum of numbers without a sign; NaN wins.
    Largest,
    /// Maximum of signed numbers; of NaN and a number, either.
    Max,
}

#[cube]
fn folded(a: f32, b: f32, #[comptime] fold: Fold) -> f32 {
    comptime!(fold);
    match fold {
        Fold::Sum => a + b,
        Fold::Largest => larger(a, b),
        Fold::Max => max(a, b),
    }
}

/// Returns the larger of two numbers without a sign; NaN is larger than any number. The comparison is on
/// bits, so that it does not depend on how a device treats NaN.
#[cube]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    f32::reinterpret(max(u32::reinterpret(a), u32::reinterpret(b)))
}

/// Returns a number without its sign, NaN included.
#[cube]
pub(crate) fn magnitude(x: f32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) & 0x7fff_ffffu32)
}

/// Sums the values of all units of a row and returns the sum to each. Every unit of the cube must take part.
#[cube]
pub(crate) fn row_sum(value: f32, shared: &mut [f32], #[comptime] plan: RowPlan) -> f32 {
    row_fold(value, shared, Fold::Sum, plan)
}

/// Reduces the values of all units of a row and returns the result to each. Every unit of the cube must take
/// part.
#[cube]
pub(crate) fn row_fold(
    value: f32,
    shared: &mut [f32],
    #[comptime] fold: Fold,
    #[comptime] plan: RowPlan,
) -> f32 {
    let lanes = comptime!(plan.lanes);
    let mut all = value;
    if comptime!(lanes > 1 && plan.shuffles) {
        #[unroll]
        for level in 0..comptime!(if lanes > 32 { 5 } else { lanes.ilog2() }) {
            all = folded(all, plane_shuffle_xor(all, comptime!(1u32 << level)), fold);
        }
        if comptime!(lanes > 32) {
            let planes = comptime!(lanes / 32);
            // Units may still read the previous reduction from shared memory.
            sync_cube();
            if UNIT_POS % 32 == 0 {
                shared[(UNIT_POS / 32) as usize] = all;
            }
            sync_cube();
            all = shared[(UNIT_POS / lanes * planes + UNIT_POS % planes) as usize];
            #[unroll]
            for level in 0..comptime!(planes.ilog2()) {
                all = folded(all, plane_shuffle_xor(all, comptime!(1u32 << level)), fold);
            }
        }
    } else if comptime!(lanes > 1) {
        let lane = UNIT_POS % lanes;
        sync_cube();
        shared[UNIT_POS as usize] = all;
        #[unroll]
        for level in 0..comptime!(lanes.ilog2()) {
            sync_cube();
            let apart = comptime!(lanes >> (level + 1));
            if lane < apart {
                let other = shared[(UNIT_POS + apart) as usize];
                let own = shared[UNIT_POS as usize];
                shared[UNIT_POS as usize] = folded(own, other, fold);
            }
        }
        sync_cube();
        all = shared[(UNIT_POS - lane) as usize];
    }
    all
}

/// Mean to subtract from a row, and factor for the difference.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowScale {
    pub(crate) mean: f32,
    pub(crate) factor: f32,
}

/// Computes the scale of the row of `vectors` vectors that starts at vector `from`.
#[cube]
pub(crate) fn row_scale<F: Float, N: Size>(
    x: &[Vector<F, N>],
    from: usize,
    vectors: u32,
    eps: f32,
    shared: &mut [f32],
    #[comptime] kind: NormKind,
    #[comptime] plan: RowPlan,
) -> RowScale {
    let width = N::value();
    let count = f32::cast_from(vectors * comptime!(width as u32));
    let first = UNIT_POS % comptime!(plan.lanes);
    let mut mean = 0.0f32.runtime();
    if comptime!(matches!(kind, NormKind::Layer)) {
        let mut sums = zeros(width);
        let mut at = u32::cast_from(first);
        while at < vectors {
            let vector = x[from + at as usize];
            add(&mut sums, vector);
            at += comptime!(plan.lanes);
        }
        mean = row_sum(total(&sums, width), shared, plan) / count;
    }
    let mut sums = zeros(width);
    let mut at = u32::cast_from(first);
    while at < vectors {
        let vector = x[from + at as usize];
        add_squares(&mut sums, vector, mean);
        at += comptime!(plan.lanes);
    }
    let square = row_sum(total(&sums, width), shared, plan) / count;
    RowScale { mean, factor: (square + eps).inverse_sqrt() }
}

/// Returns an accumulator for each element of a vector.
#[cube]
pub(crate) fn zeros(#[comptime] width: usize) -> Array<f32> {
    let mut sums = Array::<f32>::new(width);
    #[unroll]
    for e in 0..width {
        sums[e] = 0.0f32;
    }
    sums
}

#[cube]
pub(crate) fn add<F: Float, N: Size>(sums: &mut Array<f32>, vector: Vector<F, N>) {
    #[unroll]
    for e in 0..N::value() {
        sums[e] += f32::cast_from(vector.extract(e));
    }
}

/// Adds the squared deviations from `mean`.
#[cube]
pub(crate) fn add_squares<F: Float, N: Size>(
    sums: &mut Array<f32>,
    vector: Vector<F, N>,
    mean: f32,
) {
    #[unroll]
    for e in 0..N::value() {
        let far = f32::cast_from(vector.extract(e)) - mean;
        sums[e] = fma(far, far, sums[e]);
    }
}

/// Returns the sum of `width` accumulators.
#[cube]
pub(crate) fn total(sums: &Array<f32>, #[comptime] width: usize) -> f32 {
    let mut total = sums[0];
    #[unroll]
    for e in 1..width {
        total += sums[e];
    }
    total
}

/// Returns the factor that a norm of this kind uses for a weight.
#[cube]
pub(crate) fn norm_weight<F: Float>(weight: F, #[comptime] kind: NormKind) -> f32 {
    let mut weight = f32::cast_from(weight);
    if comptime!(matches!(kind, NormKind::RmsPlusOne)) {
        weight += 1.0;
    }
    weight
}
