//! norm(x)·Wᵀ for few rows of x without storing norm(x): Σ norm(x)ₖ·wₖ = factor · Σ xₖ·gₖ·wₖ
//!
//! ```text
//!   g = weight, or 1 + weight for that kind of norm         factor = 1 / √(Σ x² / k + eps)
//! ```
//!
//! The factor is needed only after the sums, and the loop computes it along with them: the squares
//! of a row are one more sum. This suits paths whose groups of units read few, whole rows of x. It
//! saves a launch and costs one multiply and one multiply-add per element of x. Every group repeats
//! them, next to one multiply-add for each of its rows of W (one to four). Only norms without a
//! mean are supported.

use arch::DType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use tune::Queue;

use crate::rows::{NormKind, norm_weight};
use crate::tile::{fma_pairs, global_address};

/// Device buffers of a norm.
#[derive(Debug, Clone)]
pub struct NormBuffers {
    /// Weight `[k]`, in x's type.
    pub weight: Handle,
    /// Added to the mean of the squares; must be finite and not negative.
    pub eps: f32,
}

impl NormBuffers {
    /// Random buffers for the norm, if there is one, of rows with `k` elements of `dtype`.
    pub(crate) fn noise(
        queue: &Queue,
        norm: Option<NormKind>,
        (k, dtype): (u32, DType),
        seed: u64,
    ) -> Option<Self> {
        norm.map(|_| Self { weight: crate::noise(queue, k as usize, dtype, seed), eps: 1e-5 })
    }
}

/// Weight and factor of a fused norm, in vectors of `N`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NormWeight<F: Float, N: Size> {
    /// `[k / N]`
    weight: Box<[Vector<F, N>]>,
    eps: f32,
    /// 1 / k
    share: f32,
    #[cube(comptime)]
    kind: NormKind,
}

impl<F: Float, N: Size> NormWeightLaunch<F, N> {
    /// Launch arguments of a norm of rows of `k` elements.
    pub(crate) fn from_buffers(
        norm: Option<NormKind>,
        buffers: Option<&NormBuffers>,
        k: u32,
        width: usize,
    ) -> ComptimeOptionArgs<NormWeight<F, N>> {
        assert_eq!(
            norm.is_some(),
            buffers.is_some(),
            "a problem's norm and its weight go together"
        );
        let arg = norm.zip(buffers).map(|(kind, NormBuffers { weight, eps })| {
            // SAFETY: a weight is as long as a row of x.
            let weight = unsafe { BufferArg::from_raw_parts(weight.clone(), k as usize / width) };
            Self::new(weight, *eps, 1.0 / k as f32, kind)
        });
        ComptimeOptionArgs::from(arg)
    }
}

#[cube]
impl<F: Float, N: Size> NormWeight<F, N> {
    /// Returns the address of the weight in global memory.
    pub(crate) fn address(&self) -> u64 {
        global_address(&self.weight)
    }

    /// Returns the weight factors for the elements of vector `at` of a row.
    pub(crate) fn factors(&self, at: usize) -> Array<f32> {
        let vector = self.weight[at];
        let mut factors = Array::<f32>::new(N::value());
        #[unroll]
        for e in 0..N::value() {
            factors[e] = norm_weight::<F>(vector.extract(e), self.kind);
        }
        factors
    }

    /// Returns vector `at` of a row, multiplied by the weight.
    pub(crate) fn weighted(&self, vector: Vector<F, N>, at: usize) -> Array<f32> {
        let mut weighted = self.factors(at);
        #[unroll]
        for e in 0..N::value() {
            weighted[e] *= f32::cast_from(vector.extract(e));
        }
        weighted
    }

    /// Returns the factor for a row's sums; `squares` is its sum of squares.
    pub(crate) fn factor(&self, squares: f32) -> f32 {
        fma(squares, self.share, self.eps).inverse_sqrt()
    }
}

/// Multiplies two bf16 elements of a row by the weight of a norm.
#[cube]
pub(crate) fn weight_pair(pair: u32, weight: u32, #[comptime] kind: NormKind) -> u32 {
    let added = if comptime!(matches!(kind, NormKind::RmsPlusOne)) {
        pair
    } else {
        // Two negative zeros: adding them keeps the sign of a zero product.
        0x8000_8000u32.runtime()
    };
    fma_pairs(pair, weight, added)
}
