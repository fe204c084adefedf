//! Products with matrices in 2, 4 or 8 bits: `MatMulNBits`.
//!
//! ```text
//! w[n, k] = scale[n, k / block] · (code[n, k] - zero[n, k / block])      out = x · wᵀ + bias
//! ```
//!
//! Codes of one block follow each other, the first in the low bits of its byte. Without zero points all are the middle of the range.

use burn::tensor::{DType, TensorData};

use super::super::linear::product;
use super::super::{Call, Run};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Result<Run, String> {
    let count = |name: &str| {
        let own = call.int(name).and_then(|own| usize::try_from(own).ok()).filter(|own| *own > 0);
        own.ok_or_else(|| format!("it has no {name}"))
    };
    let (k, n, block) = (count("K")?, count("N")?, count("block_size")?);
    let bits = call.int("bits").unwrap_or(4);
    if ![2, 4, 8].contains(&bits) {
        return Err(format!("codes of {bits} bits are not supported"));
    }
    if call.is_given(1) || call.is_given(2) || call.is_given(3) || call.is_given(4) {
        return Err("a packed matrix that is no constant is not supported".to_owned());
    }
    let shape = Packed { k, n, block, bits: bits as usize };
    Ok(Box::new(move |inputs| {
        let x = inputs.get(0)?;
        if inputs.maybe(4).is_some() {
            return Err("blocks by an index are not supported".to_owned());
        }
        let zeros = inputs.maybe(3).map(|own| own.to_data()).transpose()?;
        let weight = shape.decoded(&inputs.get(1)?.to_data()?, inputs.get(2)?.floats()?, zeros)?;
        let weight = Array::from_data(TensorData::new(weight, [n, k]), &x.device());
        let out = product(inputs.ctx, x.clone(), weight.cast(x.dtype()).permute(&[1, 0]))?;
        Ok(vec![match inputs.maybe(5) {
            Some(bias) => out.plus(bias),
            None => out,
        }])
    }))
}

/// Sizes of a packed matrix.
#[derive(Clone, Copy)]
struct Packed {
    k: usize,
    n: usize,
    block: usize,
    bits: usize,
}

impl Packed {
    /// Returns the numbers `[n, k]`.
    fn decoded(
        self,
        codes: &TensorData,
        scales: Vec<f64>,
        zeros: Option<TensorData>,
    ) -> Result<Vec<f32>, String> {
        let Self { k, n, block, bits } = self;
        let (blocks, each) = (k.div_ceil(block), block * bits / 8);
        let (codes, middle) = (codes.as_bytes(), (1 << (bits - 1)) as f32);
        if codes.len() != n * blocks * each || scales.len() != n * blocks {
            return Err(format!("its codes or scales do not make [{n}, {k}]"));
        }
        let code = |bytes: &[u8], at: usize| {
            let byte = bytes[at * bits / 8];
            let mask = if bits == 8 { 255 } else { (1u8 << bits) - 1 };
            f32::from((byte >> (at * bits % 8)) & mask)
        };
        // Packed zero points begin a byte with each row; others are numbers.
        let row = (blocks * bits).div_ceil(8);
        let numbers = match &zeros {
            Some(own) if own.dtype() != DType::U8 => Some(own.iter::<f32>().collect::<Vec<_>>()),
            _ => None,
        };
        let zero = |line: usize, at: usize| match (&numbers, &zeros) {
            (Some(numbers), _) => numbers.get(line * blocks + at).copied().unwrap_or(middle),
            (None, Some(own)) => code(&own.as_bytes()[line * row..], at),
            (None, None) => middle,
        };
        let mut out = Vec::with_capacity(n * k);
        for line in 0..n {
            for at in 0..k {
                let own = line * blocks + at / block;
                let bytes = &codes[own * each..(own + 1) * each];
                out.push(scales[own] as f32 * (code(bytes, at % block) - zero(line, at / block)));
            }
        }
        Ok(out)
    }
}
