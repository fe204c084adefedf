//! JSON of a quantization state, in the format of Python's `json.dumps`.

use std::fmt;

use serde::Deserialize;

use crate::Reason;

/// Largest accepted state in bytes; those of bitsandbytes have some 170 bytes.
pub(crate) const MAX_BYTES: usize = 4096;

/// Quantization state of bitsandbytes, with its order of fields.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) quant_type: String,
    pub(crate) blocksize: usize,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// The three nested fields are either all present or all absent.
    pub(crate) nested_blocksize: Option<usize>,
    pub(crate) nested_dtype: Option<String>,
    pub(crate) nested_offset: Option<f64>,
}

impl State {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Reason> {
        if bytes.len() > MAX_BYTES {
            return Err(Reason::State(format!("{} bytes are too many", bytes.len())));
        }
        let state: Self =
            serde_json::from_slice(bytes).map_err(|why| Reason::State(why.to_string()))?;
        let nested = [
            state.nested_blocksize.is_some(),
            state.nested_dtype.is_some(),
            state.nested_offset.is_some(),
        ];
        if nested.contains(&true) && nested.contains(&false) {
            return Err(Reason::State("some of its nested keys are missing".into()));
        }
        Ok(state)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { quant_type, blocksize, dtype, shape, .. } = self;
        write!(f, r#"{{"quant_type": "{quant_type}", "blocksize": {blocksize}, "#)?;
        write!(f, r#""dtype": "{dtype}", "shape": {shape:?}"#)?;
        if let (Some(size), Some(dtype), Some(offset)) =
            (self.nested_blocksize, &self.nested_dtype, self.nested_offset)
        {
            let offset = Float(offset);
            write!(f, r#", "nested_blocksize": {size}, "nested_dtype": "{dtype}", "#)?;
            write!(f, r#""nested_offset": {offset}"#)?;
        }
        write!(f, "}}")
    }
}

/// A finite number, formatted like Python's `repr`: the shortest digits that round-trip, with an exponent
/// below 1e-4 and from 1e16 on.
struct Float(f64);

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let magnitude = self.0.abs();
        if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
            return write!(f, "{:?}", self.0);
        }
        let text = format!("{:e}", self.0);
        match text.split_once('e') {
            Some((digits, exponent)) => {
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                write!(f, "{digits}e{sign}{exponent:0>2}")
            }
            None => f.write_str(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let floats = include_str!("../fixtures/floats.txt");
        assert!(floats.lines().count() > 50);
        for line in floats.lines() {
            let (bits, text) = line.split_once(' ').expect("bits and text");
            let value = f32::from_bits(u32::from_str_radix(bits, 16).expect("hexadecimal"));
            assert_eq!(Float(value.into()).to_string(), text);
        }
    }

    #[test]
    fn a_state_reads_as_it_is_written() {
        let plain =
            r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [7, 37]}"#;
        let nested = plain.replace(
            '}',
            r#", "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1e-05}"#,
        );
        for text in [plain, &nested] {
            assert_eq!(
                State::parse(text.as_bytes()).map(|state| state.to_string()),
                Ok(text.into())
            );
        }
        for (from, to, word) in [
            ("\"shape\"", "\"forms\"", "unknown field `forms`"),
            (", \"shape\": [7, 37]", "", "missing field `shape`"),
            ("[7, 37]", "null", "invalid type: null"),
            ("[7, 37]", "[7, -37]", "invalid value"),
            ("64", "64.0", "invalid type"),
            ("64", "64, \"blocksize\": 64", "duplicate field"),
            ("1e-05}", "1e-05", "EOF"),
            ("1e-05}", "1e-05} x", "trailing"),
            ("1e-05", "NaN", "expected value"),
            ("1e-05", "1e999", "out of range"),
            ("\"nested_dtype\": \"float32\", ", "", "nested keys are missing"),
        ] {
            assert!(nested.contains(from), "{from}");
            let error = State::parse(nested.replace(from, to).as_bytes()).expect_err(to);
            assert!(error.to_string().contains(word), "{to}: {error}");
        }
        assert!(State::parse(&[b' '; MAX_BYTES + 1]).is_err());
    }
}
