//! Matmuls with int8 weights, which the pass `int8` creates.
//!
//! ```text
//! out[.., n] = scale[n] · Σ_k x[.., k] · code[k, n] + bias[n]
//! ```
//!
//! Integer matmuls run in f32 on `a - zero`, split along k so that partial sums stay below 2^24 and
//! are exact. A GPU rounds dequantised codes, so there a partial sum near 2^24 may be off by one.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{DType, TensorData};
use ops::WeightFormat;
use ops::checkpoint::Encoded;

use super::microsoft::packed::{Packed, packed_matmul};
use super::quant::{EXACT, round, shifted};
use super::{Call, Inputs, Read, Run};
use crate::array::Array;

pub(super) fn read(call: &Call<'_>) -> Read {
    (call.op() == "flashover::Int8").then(|| matmul(call))
}

fn matmul(call: &Call<'_>) -> Result<Run, String> {
    let codes = call.tensor("codes").ok_or("the codes are missing")?;
    let scales = call.tensor("scales").ok_or("the scales are missing")?;
    let number = call.int("number").ok_or("the number of the matrix is missing")?;
    let (transposed, whole) = (call.flag("transposed"), call.flag("integer"));
    let [rows, columns] = codes.shape().to_vec()[..] else {
        return Err("expected codes of rank 2".to_owned());
    };
    let [n, k] = if transposed { [rows, columns] } else { [columns, rows] };
    if ![1, n].contains(&scales.num_elements()) {
        return Err(format!("expected 1 or {n} scales, got {}", scales.num_elements()));
    }
    let devices = call.devices().clone();
    // Matmul of x with the part of the matrix that starts at an index of k.
    let multiply = move |inputs: &Inputs<'_>, from: usize, x: Array| {
        let depth = *x.shape().last().unwrap_or(&0);
        let matrix = devices.packed((number, from, x.dtype()), || {
            let own = Matrix::new(&codes, &scales, transposed, from..from + depth);
            Packed::new(&devices, x.dtype(), [n, depth], || Some(own.encoded()), || own.decoded())
        })?;
        let (ours, bias) = (devices.has_kernels(), inputs.maybe(2));
        packed_matmul(inputs.ctx, ours, matrix, x, [n, depth], bias)
    };
    Ok(Box::new(move |inputs| {
        let x = inputs.get(0)?;
        if x.shape().last() != Some(&k) {
            return Err(format!(
                "expected x with a last dimension of {k}, got shape {:?}",
                x.shape()
            ));
        }
        if !whole {
            return Ok(vec![multiply(inputs, 0, x)?]);
        }
        let x = shifted(x, inputs.maybe(1), true)?.cast(DType::F32);
        let part = |from: usize| {
            let rows = x.clone().narrow(x.rank() - 1, from, k.min(from + EXACT));
            Ok::<_, String>(round(multiply(inputs, from, rows)?).cast(DType::I32))
        };
        let first = part(0)?;
        let rest = (0..k).step_by(EXACT).skip(1);
        Ok(vec![rest.map(part).try_fold(first, |sum, own| own.map(|own| sum.plus(own)))?])
    }))
}

/// Quantised values `[n, k]` with one scale per row.
struct Matrix {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Matrix {
    /// Takes a range of k from values `[k, n]`, or `[n, k]` if transposed.
    fn new(codes: &TensorData, scales: &TensorData, transposed: bool, part: Range<usize>) -> Self {
        let (bytes, columns) = (codes.as_bytes(), codes.shape()[1]);
        let n = codes.shape()[usize::from(!transposed)];
        let place = |n: usize, k: usize| if transposed { n * columns + k } else { k * columns + n };
        let each = (0..n).flat_map(|n| part.clone().map(move |k| (n, k)));
        let codes = each.map(|(n, k)| bytes[place(n, k)]).collect();
        let scales: Vec<f32> = scales.iter().collect();
        let scales = scales.into_iter().cycle().take(n).collect();
        Self { n, k: part.len(), codes, scales }
    }

    /// Returns the matrix in the format of our kernels, whose absmax of a row is 127 times its
    /// scale.
    fn encoded(&self) -> Encoded<'_> {
        let most = self.scales.iter().flat_map(|own| (127.0 * own).to_le_bytes()).collect();
        Encoded {
            scheme: WeightFormat::Int8.into(),
            dtype: arch::DType::F32,
            shape: vec![self.n, self.k],
            buffers: vec![Cow::Borrowed(&self.codes), Cow::Owned(most)],
        }
    }

    /// Returns the dequantised matrix `[n, k]`.
    fn decoded(&self) -> Vec<f32> {
        let rows = self.codes.chunks(self.k.max(1)).zip(&self.scales);
        rows.flat_map(|(row, scale)| {
            row.iter().map(move |own| f32::from(own.cast_signed()) * scale)
        })
        .collect()
    }
}
