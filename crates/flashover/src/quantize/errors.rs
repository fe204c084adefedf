//! Quantisation errors: the written weights compared with their originals.

use checkpoint::{DType, Weight};
use half::{bf16, f16};
use rayon::prelude::*;

use super::WeightErrors;

/// Values per partial sum. A fixed number makes results independent of the number of cores.
const CHUNK: usize = 1 << 16;

/// Partial sums of the errors.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ErrorSums {
    squared_error: f64,
    squared_norm: f64,
    largest: f64,
}

impl ErrorSums {
    pub(super) fn add(&mut self, other: &Self) {
        self.squared_error += other.squared_error;
        self.squared_norm += other.squared_norm;
        self.largest = self.largest.max(other.largest);
    }

    pub(super) fn errors(&self) -> WeightErrors {
        let relative = (self.squared_error / self.squared_norm).sqrt();
        let zeros = self.squared_norm == 0.0 && self.squared_error == 0.0;
        let relative_error = if zeros { 0.0 } else { relative };
        WeightErrors { relative_error, largest_error: self.largest }
    }
}

/// Compares values of `dtype` with the weight quantised from them; none for a dense weight. The weight is dequantised
/// as in bitsandbytes, in f32, without rounding to the dtype. All other arithmetic is f64.
pub(super) fn compare(values: &[u8], dtype: DType, weight: &Weight<'_>) -> Option<ErrorSums> {
    weight.decoder().map(|decoded| sums(values, dtype, decoded))
}

/// Returns the sums over all values, where `decoded` dequantises one value.
fn sums(values: &[u8], dtype: DType, decoded: impl Fn(usize) -> f32 + Sync) -> ErrorSums {
    let size = dtype.size();
    let chunk = |(chunk, values): (usize, &[u8])| {
        let mut sums = ErrorSums::default();
        for (i, value) in values.chunks_exact(size).enumerate() {
            let value = number(value, dtype);
            let error = value - f64::from(decoded(chunk * CHUNK + i));
            sums.squared_error += error * error;
            sums.squared_norm += value * value;
            sums.largest = sums.largest.max(error.abs());
        }
        sums
    };
    let chunks: Vec<ErrorSums> = values.par_chunks(CHUNK * size).enumerate().map(chunk).collect();
    chunks.iter().fold(ErrorSums::default(), |mut all, sums| {
        all.add(sums);
        all
    })
}

fn number(bytes: &[u8], dtype: DType) -> f64 {
    match (dtype, bytes) {
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).into(),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).into(),
        (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use checkpoint::{Absmax, FourBit, Int8, Layout, Nested, WeightFormat};

    use super::*;

    fn weight(len: usize, codes: Vec<u8>, absmax: Absmax<'static>) -> Weight<'static> {
        let layout = Layout {
            quant_type: WeightFormat::Nf4,
            block_size: 32,
            nested: matches!(absmax, Absmax::Nested(_)),
            dtype: DType::F32,
            shape: vec![1, len],
            storage: DType::U8,
        };
        let quant_map: Vec<f32> = (0..16).map(|i| i as f32 / 8.0 - 1.0).collect();
        let (codes, quant_map) = (codes.into(), quant_map.into());
        Weight::FourBit(FourBit { layout, codes, quant_map, absmax })
    }

    /// Expected by hand: 33 values of code 12 (0.5) with absmax 2, then 6; the originals are 1.5 and 2.
    #[test]
    fn errors_are_those_of_the_decoded_values() {
        let values: Vec<f32> = [[1.5; 32].as_slice(), &[2.0]].concat();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let codes = || [[0xcc; 16].as_slice(), &[0xc0]].concat();
        let nested = Nested {
            codes: vec![1, 3].into(),
            absmax: vec![4.0].into(),
            quant_map: (0..256).map(|i| i as f32 / 2.0).collect(),
            offset: 0.0,
        };
        for absmax in [Absmax::Plain(vec![2.0, 6.0].into()), Absmax::Nested(nested)] {
            let sums = compare(&bytes, DType::F32, &weight(33, codes(), absmax)).expect("codes");
            let WeightErrors { relative_error, largest_error } = sums.errors();
            assert_eq!(largest_error, 1.0);
            assert_eq!(relative_error, (9.0f64 / (32.0 * 2.25 + 4.0)).sqrt());
        }
    }

    /// Expected by hand: codes 127 and -1 in rows of absmax 2 and 254; the originals are 1.5 and -4.
    #[test]
    fn errors_of_8_bits_are_those_of_their_rows() {
        let bytes: Vec<u8> = [1.5f32, -4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let (codes, scb) = (vec![127, 255].into(), vec![2.0, 254.0].into());
        let weight = Weight::Int8(Int8 { shape: [2, 1], codes, scb });
        let errors = compare(&bytes, DType::F32, &weight).expect("codes").errors();
        assert!((errors.largest_error - 2.0).abs() < 1e-6, "{errors:?}");
        let relative = (4.25f64 / 18.25).sqrt();
        assert!((errors.relative_error - relative).abs() < 1e-6, "{errors:?}");
    }

    #[test]
    fn no_error_of_nothing_is_no_nan() {
        let absmax = Absmax::Plain(vec![0.0].into());
        let sums = compare(&[0; 8], DType::F16, &weight(4, vec![0x77; 2], absmax)).expect("codes");
        assert_eq!(sums.errors(), WeightErrors { relative_error: 0.0, largest_error: 0.0 });
    }
}
