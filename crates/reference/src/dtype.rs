//! Number formats: rounding of stored values and of tensor-core operands.

use std::fmt;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::Error;

/// Format of a tensor's values, or of a kernel's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    F32,
    /// Stored as `f32`; a tensor core reads each operand rounded to 10 mantissa bits.
    Tf32,
    F16,
    Bf16,
}

/// An IEEE 754 binary format.
struct Format {
    mantissa_bits: i32,
    /// Exponent of the smallest normal value.
    min_exponent: i32,
    /// Exponent of the largest finite value.
    max_exponent: i32,
}

impl DType {
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Every format, widest first.
    pub const ALL: [Self; 4] = [Self::F32, Self::Tf32, Self::F16, Self::Bf16];

    /// Format in memory: [`DType::F32`] for [`DType::Tf32`], else the format itself.
    pub fn storage(self) -> Self {
        if self == Self::Tf32 { Self::F32 } else { self }
    }

    /// Bytes of one stored value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::Tf32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Rounds `x` to the nearest value of this format, ties to even. Values past the largest become infinity.
    ///
    /// [`DType::Tf32`] rounds to `f32` as a store does, then to 10 mantissa bits with ties away
    /// from zero.
    ///
    /// Source: PTX ISA, `cvt.rna.tf32.f32`.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Self::F32 => f64::from(x as f32),
            Self::Tf32 => self.format().round(Self::F32.round(x), f64::round),
            Self::F16 | Self::Bf16 => self.format().round(x, f64::round_ties_even),
        }
    }

    /// Spacing of the values of this format around `magnitude`. At a power of two it is the spacing of the
    /// upper binade; near zero it is the smallest denormal.
    pub fn ulp_at(self, magnitude: f64) -> f64 {
        if magnitude.is_finite() { self.format().spacing(magnitude) } else { magnitude.abs() }
    }

    /// Smallest power of two above the largest finite value, at which infinity begins.
    pub fn overflow(self) -> f64 {
        exp2(self.format().max_exponent + 1)
    }

    /// Encodes values to bytes, little endian.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        fn pack<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
            let mut out = vec![0; values.len() * N];
            let (chunks, _) = out.as_chunks_mut::<N>();
            chunks.par_iter_mut().zip(values).for_each(|(out, &v)| *out = bytes(v));
            out
        }
        match self {
            Self::F32 | Self::Tf32 => pack(values, f32::to_le_bytes),
            Self::F16 => pack(values, |v| f16::from_f32(v).to_le_bytes()),
            Self::Bf16 => pack(values, |v| bf16::from_f32(v).to_le_bytes()),
        }
    }

    /// Decodes bytes, the inverse of [`DType::encode`]; every stored value is exact in `f32`.
    ///
    /// # Errors
    /// [`Error::Bytes`] if the bytes end within a value.
    pub fn decode(self, bytes: &[u8]) -> Result<Vec<f32>, Error> {
        fn unpack<const N: usize>(
            bytes: &[u8],
            value: impl Fn([u8; N]) -> f32 + Sync,
        ) -> Option<Vec<f32>> {
            let (chunks, rest) = bytes.as_chunks::<N>();
            rest.is_empty().then(|| chunks.par_iter().map(|&c| value(c)).collect())
        }
        match self {
            Self::F32 | Self::Tf32 => unpack(bytes, f32::from_le_bytes),
            Self::F16 => unpack(bytes, |c| f16::from_le_bytes(c).to_f32()),
            Self::Bf16 => unpack(bytes, |c| bf16::from_le_bytes(c).to_f32()),
        }
        .ok_or(Error::Bytes { dtype: self.name(), bytes: bytes.len() })
    }

    fn format(self) -> Format {
        let [mantissa_bits, min_exponent, max_exponent] = match self {
            Self::F32 => [23, -126, 127],
            Self::Tf32 => [10, -126, 127],
            Self::F16 => [10, -14, 15],
            Self::Bf16 => [7, -126, 127],
        };
        Format { mantissa_bits, min_exponent, max_exponent }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Format {
    fn spacing(&self, x: f64) -> f64 {
        exp2(exponent(x).max(self.min_exponent) - self.mantissa_bits)
    }

    /// Scaling by a power of two is exact, so that rounding to an integer is the only rounding.
    fn round(&self, x: f64, to_integer: impl Fn(f64) -> f64) -> f64 {
        if !x.is_finite() {
            return x;
        }
        let spacing = self.spacing(x);
        let rounded = to_integer(x / spacing) * spacing;
        if rounded.abs() < exp2(self.max_exponent + 1) {
            rounded
        } else {
            f64::INFINITY.copysign(x)
        }
    }
}

/// Returns floor(log2|x|) of a normal `x`; -1023 for zero and denormals of `f64`.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// Returns 2^e exactly, for e in -1022..=1023.
fn exp2(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Does the bit operations of `cvt.rna.tf32.f32`: add half of the dropped part, then truncate.
    fn tf32_by_bits(x: f32) -> f32 {
        f32::from_bits((x.to_bits() + 0x1000) & !0x1fff)
    }

    #[test]
    fn every_16_bit_value_rounds_to_itself_and_survives_bytes() -> Result<(), Error> {
        for bits in 0..=u16::MAX {
            for (dtype, value) in [
                (DType::F16, f16::from_bits(bits).to_f32()),
                (DType::Bf16, bf16::from_bits(bits).to_f32()),
            ] {
                if value.is_nan() {
                    assert!(dtype.round(f64::NAN).is_nan());
                    continue;
                }
                assert_eq!(dtype.round(value.into()) as f32, value, "{dtype} {bits:#x}");
                let bytes = dtype.encode(&[value]);
                assert_eq!(bytes, bits.to_le_bytes(), "{dtype} {bits:#x}");
                assert_eq!(dtype.decode(&bytes)?[0].to_bits(), value.to_bits());
            }
        }
        Ok(())
    }

    #[test]
    fn ties_and_limits() {
        let ulp = exp2(-10);
        assert_eq!(DType::F16.round(1.0 + ulp / 2.0), 1.0, "tie to even");
        assert_eq!(DType::F16.round(1.0 + ulp * 1.5), 1.0 + 2.0 * ulp, "tie to even");
        assert_eq!(DType::Tf32.round(1.0 + ulp / 2.0), 1.0 + ulp, "tie away");
        assert_eq!(DType::Tf32.round(-1.0 - ulp / 2.0), -1.0 - ulp, "tie away");
        assert_eq!(DType::F16.round(65504.0 + 15.9), 65504.0);
        assert_eq!(DType::F16.round(-65520.0), f64::NEG_INFINITY);
        assert_eq!(DType::F16.round(exp2(-25)), 0.0, "half the smallest denormal");
        assert_eq!(DType::F16.round(exp2(-25) * 1.01), exp2(-24));
        assert_eq!(DType::Tf32.round(f32::MAX.into()), f64::INFINITY);
        // Between two f32 values: the store rounds first and creates the tie.
        assert_eq!(DType::Tf32.round(1.0 + ulp / 2.0 - exp2(-40)), 1.0 + ulp);
        for dtype in DType::ALL {
            assert!(dtype.round(-0.0).is_sign_negative() && dtype.round(-1e-300) == 0.0);
            assert_eq!(dtype.round(f64::INFINITY), f64::INFINITY);
            assert_eq!(dtype.round(1e300), f64::INFINITY);
        }
    }

    #[test]
    fn ulps() {
        for (dtype, at_one, at_1000, denormal) in [
            (DType::F32, exp2(-23), exp2(-14), exp2(-149)),
            (DType::Tf32, exp2(-10), 0.5, exp2(-136)),
            (DType::F16, exp2(-10), 0.5, exp2(-24)),
            (DType::Bf16, exp2(-7), 4.0, exp2(-133)),
        ] {
            assert_eq!(dtype.ulp_at(1.0), at_one);
            assert_eq!(dtype.ulp_at(-1000.0), at_1000);
            assert_eq!(dtype.ulp_at(0.0), denormal);
            assert!(dtype.ulp_at(f64::NAN).is_nan());
        }
        assert_eq!(f32::EPSILON as f64, DType::F32.ulp_at(1.0));
        assert_eq!(DType::F16.overflow(), 65536.0);
    }

    #[test]
    fn torn_bytes_are_refused() {
        assert_eq!(DType::F16.decode(&[0; 3]), Err(Error::Bytes { dtype: "f16", bytes: 3 }));
        assert_eq!(DType::Tf32.decode(&1.5f32.to_le_bytes()), Ok(vec![1.5]));
    }

    proptest! {
        #[test]
        fn rounding_agrees_with_other_implementations(bits: u32, x in -1e5..1e5f64) {
            for x in [f32::from_bits(bits), x as f32].into_iter().filter(|x| !x.is_nan()) {
                let wide = f64::from(x);
                prop_assert_eq!(DType::F16.round(wide) as f32, f16::from_f32(x).to_f32());
                prop_assert_eq!(DType::Bf16.round(wide) as f32, bf16::from_f32(x).to_f32());
                if x.is_finite() {
                    prop_assert_eq!(DType::Tf32.round(wide) as f32, tf32_by_bits(x));
                }
            }
            let scaled = x * f64::from(f32::from_bits(bits));
            if scaled.is_finite() {
                prop_assert_eq!(DType::F32.round(scaled), f64::from(scaled as f32));
            }
        }

        #[test]
        fn rounding_is_within_half_an_ulp(x in -6e4..6e4f64) {
            for dtype in DType::ALL {
                let half = dtype.ulp_at(x) / 2.0 + DType::F32.ulp_at(x);
                prop_assert!((dtype.round(x) - x).abs() <= half);
            }
        }
    }
}
