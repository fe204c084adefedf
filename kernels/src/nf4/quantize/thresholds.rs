//! Finds the nearest code of a value by thresholds.

use cubecl::prelude::*;

use super::Codebook;

/// Encodes each element of a vector, as [`encode`].
#[cube]
pub(super) fn encode_vector<N: Size>(
    x: Vector<f32, N>,
    #[comptime] codebook: Codebook,
) -> Vector<u32, N> {
    let mut code = Vector::<u32, N>::new(0u32);
    match comptime!(codebook) {
        Codebook::Nf4 =>
        {
            #[unroll]
            for i in 0..15usize {
                let above = x.greater_than(&Vector::new(comptime!(nf4_above(i)).runtime()));
                code += select_many(above, Vector::new(1u32), Vector::new(0u32));
            }
        }
        Codebook::Fp4 => {
            let size = x.abs();
            #[unroll]
            for i in 0..7usize {
                let (above, this) = comptime!(fp4_above(i));
                let over = size.greater_than(&Vector::new(above.runtime()));
                code = select_many(over, Vector::new(this.runtime()), code);
            }
            let below = x.less_than(&Vector::new(0.0f32));
            code += select_many(below, Vector::new(8u32), Vector::new(0u32));
        }
    }
    code
}

/// Returns the code of a value in -1 to 1: for NF4 the number of thresholds below it, for FP4 the code of the
/// last threshold below it.
#[cube]
pub(super) fn encode(x: f32, #[comptime] codebook: Codebook) -> u32 {
    let mut code = 0u32.runtime();
    match comptime!(codebook) {
        Codebook::Nf4 =>
        {
            #[unroll]
            for i in 0..15usize {
                code += select(x > comptime!(nf4_above(i)), 1u32, 0u32);
            }
        }
        Codebook::Fp4 => {
            let size = f32::abs(x);
            #[unroll]
            for i in 0..7usize {
                let (above, this) = comptime!(fp4_above(i));
                code = select(size > above, this.runtime(), code);
            }
            code += select(x < 0.0, 8u32, 0u32);
        }
    }
    code
}

const fn nf4_above(i: usize) -> f32 {
    NF4_ABOVE[i]
}

const fn fp4_above(i: usize) -> (f32, u32) {
    FP4_ABOVE[i]
}

/// Midpoints of NF4 (bitsandbytes, `dQuantizeNF4`).
pub(super) const NF4_ABOVE: [f32; 15] = [
    -0.848_096_4,
    -0.610_632_9,
    -0.459_995_27,
    -0.339_679_42,
    -0.234_607_4,
    -0.137_911_74,
    -0.045_525_018,
    0.039_790_15,
    0.120_255_25,
    0.203_521_25,
    0.292_013_76,
    0.389_312_54,
    0.501_663_45,
    0.642_786_9,
    0.861_478_45,
];

/// Midpoints of FP4's magnitudes, ascending, and the code above each (bitsandbytes, `dQuantizeFP4`).
pub(super) const FP4_ABOVE: [(f32, u32); 7] = [
    (0.002_604_17, 1),
    (0.085_937_5, 6),
    (0.208_333_33, 7),
    (0.291_666_67, 4),
    (0.416_666_7, 5),
    (0.583_333, 2),
    (0.833_333_3, 3),
];
