//! Dequantises codes of a byte: out = round(scale_by_block(code, block) · row)    out: `[n, k]` in f16, bf16 or f32
//!
//! ```text
//!   for each vector of words                            // one unit, several vectors in flight
//!     b = scale of its block; s = scale of its row
//!     out[4 · word ..] = round(scale_by_block(code, b) · s)  // one vector store
//! ```
//!
//! Cost: one byte read and one element written, 3 bytes an element in bf16. If 4 does not divide k, a word
//! spans two rows, and elements are decoded one by one.

use arch::{ArchProfile, DType};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};
use tune::Infeasible;

use super::{DequantizeBytes, code_of, together};
use crate::fits::{limits, shape, stores};
use crate::round::{by_hand, round_to_bf16};

/// Launch shape of a dequantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DequantizeConfig {
    /// Units of a cube.
    pub units: u32,
    /// Vectors that a unit decodes in one iteration.
    pub vectors: u32,
}

impl DequantizeConfig {
    /// Returns candidate configs, which [`check`](Self::check) may reject.
    pub(crate) fn candidates(arch: &ArchProfile) -> Vec<Self> {
        let gpu = [[256, 2], [256, 4], [128, 4], [512, 2], [256, 1], [256, 8]];
        let cores = arch.cores().map(|cores| [[cores, 1]]);
        let all = cores.as_ref().map_or(&gpu[..], |cores| &cores[..]);
        all.iter().map(|[units, vectors]| Self { units: *units, vectors: *vectors }).collect()
    }

    pub(crate) fn check(&self, arch: &ArchProfile, out: DType) -> Result<(), Infeasible> {
        stores(arch, [out])?;
        if !(1..=16).contains(&self.vectors) {
            return Err(shape("vectors", self.vectors, "expected 1 to 16 vectors per unit"));
        }
        limits(arch, self.units, 0)
    }

    /// Returns the baseline config.
    pub(crate) fn baseline(arch: &ArchProfile) -> Self {
        Self { units: arch.cores().unwrap_or(64), vectors: 1 }
    }

    /// Number of cubes for `vectors` vectors of codes.
    pub(crate) fn cubes(&self, arch: &ArchProfile, vectors: usize) -> CubeCount {
        let cubes = crate::cubes(arch, vectors as u64, self.units * self.vectors);
        CubeCount::Static(cubes, 1, 1)
    }

    pub(crate) fn plan(&self, arch: &ArchProfile, out: DType) -> DequantizePlan {
        DequantizePlan { units: self.units, vectors: self.vectors, rounds: by_hand(arch, out) }
    }
}

/// Returns two vector widths for rows of `k` codes: words of codes and elements of the result. The result
/// vector is 16 bytes if it lies in one row.
pub(crate) fn widths(k: u32, out: DType) -> [usize; 2] {
    match together(k, 4 / out.size() as u32) {
        Some(words) => [words as usize, 4 * words as usize],
        None => [1, 1],
    }
}

/// Compile-time parameters of one kernel instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DequantizePlan {
    units: u32,
    vectors: u32,
    /// True if the kernel rounds to bf16 itself before it stores.
    rounds: bool,
}

#[cube]
pub(crate) fn decode<W: DequantizeBytes<NW>, E: Float, NW: Size, NO: Size>(
    weight: &W,
    out: &mut [Vector<E, NO>],
    k: u32,
    #[comptime] plan: DequantizePlan,
) {
    let (words, width) = (NW::value(), NO::value());
    let vectors = W::vectors(weight);
    let mut first = CUBE_POS_X * comptime!(plan.units * plan.vectors) + UNIT_POS;
    while first < vectors {
        #[unroll]
        for i in 0..plan.vectors {
            let at = first + comptime!(i * plan.units);
            if at < vectors {
                let vector = W::codes(weight, at as usize);
                let block = W::block(weight, at as usize);
                if comptime!(width > 1) {
                    let row = W::row(weight, (at / (k / comptime!(4 * words as u32))) as usize);
                    let mut values = Vector::<E, NO>::new(E::from_int(0));
                    #[unroll]
                    for e in 0..width {
                        let word = vector.extract(comptime!(e / 4));
                        let code = code_of(word, comptime!(e as u32 % 4));
                        let value = W::scale_by_row(W::scale_by_block(code, block), row, k);
                        values.insert(e, E::cast_from(rounded(value, plan)));
                    }
                    out[at as usize] = values;
                } else {
                    #[unroll]
                    for e in 0..4u32 {
                        let i = at as usize * 4 + comptime!(e as usize);
                        if i < out.len() {
                            let row = W::row(weight, i / k as usize);
                            let code = code_of(vector.extract(0usize), e);
                            let value = W::scale_by_row(W::scale_by_block(code, block), row, k);
                            out[i] = Vector::new(E::cast_from(rounded(value, plan)));
                        }
                    }
                }
            }
        }
        first += CUBE_COUNT_X * comptime!(plan.units * plan.vectors);
    }
}

#[cube]
fn rounded(value: f32, #[comptime] plan: DequantizePlan) -> f32 {
    if comptime!(plan.rounds) { round_to_bf16(value) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_lie_in_one_row() {
        assert_eq!(widths(4096, DType::Bf16), [2, 8]);
        assert_eq!(widths(4096, DType::F32), [1, 4]);
        assert_eq!(widths(12, DType::F16), [1, 4]);
        assert_eq!(widths(41, DType::F16), [1, 1]);
    }
}
