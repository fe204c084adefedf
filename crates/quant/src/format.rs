//! Formats of quantised weights.
//!
//! ```text
//!   value = codebook[code] · scale(block)     or     code · scale(block)
//! ```

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A format of quantised weights, ordered by the work to dequantise, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightFormat {
    /// 8 bits and one absmax per row, as in bitsandbytes' LLM.int8().
    Int8,
    /// 8 bits and one f16 scale per 32 adjacent elements of a row, as in GGUF's Q8_0.
    Q8_0,
    /// 4 bits that index quantiles of the normal distribution, and one absmax per block (QLoRA).
    Nf4,
    /// 4 bits (one sign, two exponent, one mantissa) and one absmax per block.
    Fp4,
}

/// Elements that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// A row of the weight.
    Row,
    /// This many adjacent elements; a block may span rows.
    Elements(u32),
}

/// Storage of the scales, one per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    F32,
    F16,
    /// A byte that indexes a codebook of 256 values, times one f32 per 256 blocks, plus an offset. bitsandbytes calls
    /// it double quantization.
    Nested,
}

/// One row of the table of formats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FormatInfo {
    /// Name in command lines, records and tables.
    pub name: &'static str,
    /// Name of a loaded model's weights in records; formats with the same bits may share one.
    pub precision_name: &'static str,
    /// Bits per code.
    pub bits: u32,
    /// Default block of elements that share a scale.
    pub block: Block,
    /// Default storage of the scales.
    pub scales: Scales,
    /// Value of each code; without a codebook, codes are signed integers.
    pub codebook: Option<[f32; 16]>,
    /// True if dense weights can be quantised to it at load.
    pub at_load: bool,
    /// True if `flashover quantize` writes it.
    pub in_files: bool,
    /// True if block size and nesting can be chosen.
    pub has_options: bool,
    /// True if the gated half of a feed-forward block is one matmul.
    pub gated: bool,
}

/// A format with its block and its scales: all that is needed to dequantise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scheme {
    pub format: WeightFormat,
    pub block: Block,
    pub scales: Scales,
}

/// Quantiles of the normal distribution; index 7 is zero (bitsandbytes, `get_4bit_type`).
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Magnitudes of FP4 in bitsandbytes' order, then the same values negated; both zeros are positive.
const FP4: [f32; 16] = {
    let magnitudes = [0.0, 0.0625 / 12.0, 8.0 / 12.0, 1.0, 4.0 / 12.0, 0.5, 2.0 / 12.0, 0.25];
    let (mut values, mut i) = ([0.0; 16], 0);
    while i < 8 {
        (values[i], values[i + 8]) = (magnitudes[i], 0.0 - magnitudes[i]);
        i += 1;
    }
    values
};

/// All formats, in listing order.
const TABLE: &[(WeightFormat, FormatInfo)] = &[
    (
        WeightFormat::Nf4,
        FormatInfo {
            name: "nf4",
            precision_name: "4-bit",
            bits: 4,
            block: Block::Elements(64),
            scales: Scales::Nested,
            codebook: Some(NF4),
            at_load: true,
            in_files: true,
            has_options: true,
            gated: true,
        },
    ),
    (
        WeightFormat::Fp4,
        FormatInfo {
            name: "fp4",
            precision_name: "4-bit",
            bits: 4,
            block: Block::Elements(64),
            scales: Scales::Nested,
            codebook: Some(FP4),
            at_load: false,
            in_files: true,
            has_options: true,
            gated: true,
        },
    ),
    (
        WeightFormat::Int8,
        FormatInfo {
            name: "int8",
            precision_name: "int8",
            bits: 8,
            block: Block::Row,
            scales: Scales::F32,
            codebook: None,
            at_load: true,
            in_files: true,
            has_options: false,
            gated: false,
        },
    ),
    (
        WeightFormat::Q8_0,
        FormatInfo {
            name: "q8_0",
            precision_name: "q8_0",
            bits: 8,
            block: Block::Elements(32),
            scales: Scales::F16,
            codebook: None,
            at_load: true,
            in_files: false,
            has_options: false,
            gated: false,
        },
    ),
];

impl WeightFormat {
    /// Returns all formats in listing order.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        TABLE.iter().map(|(format, _)| *format)
    }

    /// Returns the formats that dense weights can be quantised to at load.
    pub fn at_load() -> impl Iterator<Item = Self> {
        Self::all().filter(|format| format.info().at_load)
    }

    /// Returns the formats that `flashover quantize` writes.
    pub fn in_files() -> impl Iterator<Item = Self> {
        Self::all().filter(|format| format.info().in_files)
    }

    /// Lists names of formats for a help text: `nf4, fp4 or int8`.
    pub fn alternatives(formats: impl Iterator<Item = Self>) -> String {
        let names: Vec<_> = formats.map(Self::name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
            None => String::new(),
        }
    }

    /// Returns the first format of [`WeightFormat::at_load`] with `bits` bits per code.
    pub fn with_bits(bits: u32) -> Option<Self> {
        Self::at_load().find(|format| format.bits() == bits)
    }

    /// Returns the formats of [`WeightFormat::with_bits`] with fewer than `bits` bits, most bits first.
    pub fn smaller_than(bits: u32) -> impl Iterator<Item = Self> {
        (1..bits).rev().filter_map(Self::with_bits)
    }

    /// Returns the format's row of the table.
    pub fn info(self) -> &'static FormatInfo {
        let row = TABLE.iter().find(|(format, _)| *format == self);
        row.map(|(_, info)| info).expect("every format has a row: a test iterates them")
    }

    /// Returns the name in command lines, records and tables.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// Returns the bits per code.
    pub fn bits(self) -> u32 {
        self.info().bits
    }

    /// Returns the format with its default block and scales.
    pub fn scheme(self) -> Scheme {
        let FormatInfo { block, scales, .. } = *self.info();
        Scheme { format: self, block, scales }
    }
}

impl Scheme {
    /// Returns true if the scales themselves are quantised.
    pub fn nested(self) -> bool {
        self.scales == Scales::Nested
    }

    /// Returns the bytes of a weight `[n, k]`: codes, and one scale per block. Codebooks are not counted, nor is the
    /// second level of nested scales (4 bytes per 16384 elements).
    pub fn bytes(self, [n, k]: [usize; 2]) -> u128 {
        let (n, k) = (n as u128, k as u128);
        let blocks = match self.block {
            Block::Row => n,
            Block::Elements(elements) => (n * k).div_ceil(u128::from(elements)),
        };
        let scale = match self.scales {
            Scales::F32 => 4,
            Scales::F16 => 2,
            Scales::Nested => 1,
        };
        (n * k * u128::from(self.format.bits())).div_ceil(8) + blocks * scale
    }
}

impl From<WeightFormat> for Scheme {
    fn from(format: WeightFormat) -> Self {
        format.scheme()
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Self::all().find(|format| format.name() == name).ok_or(())
    }
}

impl Serialize for WeightFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_agree_with_their_formats() {
        for format in WeightFormat::all() {
            assert_eq!(format.name().parse(), Ok(format));
            let FormatInfo { bits, codebook, .. } = format.info();
            assert_eq!(codebook.is_some(), *bits == 4, "{format}");
            if let Some(values) = codebook {
                let max = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
                assert_eq!(max, 1.0, "{format}");
            }
        }
    }

    #[test]
    fn names_are_listed_as_alternatives() {
        assert_eq!(WeightFormat::alternatives(WeightFormat::in_files()), "nf4, fp4 or int8");
        assert_eq!(WeightFormat::alternatives([WeightFormat::Nf4].into_iter()), "nf4");
    }

    #[test]
    fn bytes_are_codes_and_scales() {
        let of = |format: WeightFormat| format.scheme().bytes([14_336, 4096]);
        let values = 14_336 * 4096;
        assert_eq!(of(WeightFormat::Nf4), values / 2 + values / 64);
        assert_eq!(of(WeightFormat::Int8), values + 4 * 14_336);
        assert_eq!(of(WeightFormat::Q8_0), values + values / 16);
        let plain = Scheme { scales: Scales::F32, ..WeightFormat::Nf4.scheme() };
        assert_eq!(plain.bytes([1, 65]), 33 + 2 * 4);
    }

    #[test]
    fn smaller_formats_are_one_for_each_number_of_bits() {
        use WeightFormat::{Int8, Nf4};
        let smaller = |bits| WeightFormat::smaller_than(bits).collect::<Vec<_>>();
        assert_eq!(smaller(16), [Int8, Nf4]);
        assert_eq!(smaller(Int8.bits()), [Nf4]);
        assert_eq!(smaller(Nf4.bits()), []);
    }
}
