//! Products with matrices of int8, which a pass makes.
//!
//! ```text
//! out[.., n] = scale[n] · Σ_k x[.., k] · code[k, n] + bias[n]
//! ```
//!
//! Integers `a - zero` are multiplied as f32, in parts of K whose sums are less than 2^24 and so exact.

use std::borrow::Cow;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use ops::checkpoint::Encoded;
use ops::{OpError, QuantizedWeight, WeightFormat};

use super::fused::is_ours;
use super::microsoft::packed::{Packed, multiplied};
use super::quant::shifted;
use super::{Call, Inputs, Read, Run, next_number};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Read {
    (call.op() == "flashover::Int8").then(|| product(call))
}

/// Depth of a product of integers that is exact in f32: 512 · 255 · 128 < 2^24.
const EXACT: usize = 512;

fn product(call: &Call<'_>) -> Result<Run, String> {
    let codes = call.tensor("codes").ok_or("it has no codes")?;
    let scales = call.tensor("scales").ok_or("it has no scales")?;
    let number = call.int("number").ok_or("it has no number")?;
    let (turned, whole) = (call.flag("turned"), call.flag("integer"));
    let own = Matrix::new(&codes, &scales, turned)?;
    let (devices, ours) = (call.devices().clone(), call.has_kernels());
    let parts = if whole { own.parts(EXACT) } else { vec![own] };
    let multiply = move |inputs: &Inputs<'_>, own: &Matrix, number: i64, x: Array| {
        let matrix = devices.packed((number, x.dtype()), || {
            if ours && is_ours(x.dtype()) {
                let device = burn::tensor::Device::new(devices.device.clone());
                match QuantizedWeight::from_host(&devices.ctx, &own.encoded(), &device) {
                    Ok(weight) => return Ok(Packed::Codes(Arc::new(weight))),
                    // A shape that the kernels do not have.
                    Err(OpError::Weight(_)) => {}
                    Err(why) => return Err(why.to_string()),
                }
            }
            let weight = TensorData::new(own.decoded(), [own.n, own.k]);
            let weight = Array::from_data(weight, &x.device()).cast(x.dtype());
            Ok(Packed::Dense(Arc::new(weight.permute(&[1, 0]))))
        })?;
        let bias = inputs.maybe(2);
        multiplied(inputs.ctx, ours, matrix, x, [own.n, own.k], bias)
    };
    if !whole {
        return Ok(Box::new(move |inputs| {
            Ok(vec![multiply(inputs, &parts[0], number, inputs.get(0)?)?])
        }));
    }
    let numbers: Vec<i64> = (1..parts.len()).map(|_| next_number()).collect();
    let numbers = [vec![number], numbers].concat();
    Ok(Box::new(move |inputs| {
        let x = shifted(inputs.get(0)?, inputs.maybe(1), true)?.cast(DType::F32);
        let (last, mut from, mut sum) = (x.rank() - 1, 0, None::<Array>);
        for (own, number) in parts.iter().zip(&numbers) {
            let part = x.clone().narrow(last, from, from + own.k);
            let made = multiply(inputs, own, *number, part)?.cast(DType::I32);
            sum = Some(match sum {
                Some(sum) => sum.plus(made),
                None => made,
            });
            from += own.k;
        }
        Ok(vec![sum.ok_or("the matrix has no rows")?])
    }))
}

/// Codes `[n, k]` with a scale of each row.
struct Matrix {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Matrix {
    fn new(codes: &TensorData, scales: &TensorData, turned: bool) -> Result<Self, String> {
        let [rows, columns] =
            codes.shape().to_vec()[..].try_into().map_err(|_| "its codes are no matrix")?;
        let bytes = codes.as_bytes();
        let (n, k) = if turned { (rows, columns) } else { (columns, rows) };
        let codes = match turned {
            true => bytes.to_vec(),
            false => (0..n).flat_map(|n| (0..k).map(move |k| bytes[k * columns + n])).collect(),
        };
        let scales: Vec<f32> = scales.iter().collect();
        let scales = match scales[..] {
            [one] => vec![one; n],
            _ if scales.len() == n => scales,
            _ => return Err(format!("it has {} scales for {n} columns", scales.len())),
        };
        Ok(Self { n, k, codes, scales })
    }

    /// Splits the matrix along K.
    fn parts(&self, depth: usize) -> Vec<Self> {
        let part = |from: usize| {
            let to = self.k.min(from + depth);
            let rows = self.codes.chunks(self.k);
            let codes = rows.flat_map(|row| &row[from..to]).copied().collect();
            Self { n: self.n, k: to - from, codes, scales: self.scales.clone() }
        };
        (0..self.k).step_by(depth).map(part).collect()
    }

    /// Returns the matrix in the format of our kernels, whose scale is a 127th of the largest number of a row.
    fn encoded(&self) -> Encoded<'_> {
        let most = self.scales.iter().flat_map(|own| (127.0 * own).to_le_bytes()).collect();
        Encoded {
            scheme: WeightFormat::Int8.into(),
            dtype: arch::DType::F32,
            shape: vec![self.n, self.k],
            buffers: vec![Cow::Borrowed(&self.codes), Cow::Owned(most)],
        }
    }

    /// Returns the numbers `[n, k]`.
    fn decoded(&self) -> Vec<f32> {
        let rows = self.codes.chunks(self.k.max(1)).zip(&self.scales);
        rows.flat_map(|(row, scale)| {
            row.iter().map(move |own| f32::from(own.cast_signed()) * scale)
        })
        .collect()
    }
}
