//! 8-bit weights: shared code of their three kernels.

mod dequantize;
mod matmul;
mod quantize;

use arch::{DType, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::int8::{Weight, WeightBuffers};
use reference::int8;
use serde_json::{Value, json};

use crate::case::Scale;
use crate::check::{CheckError, padded, read, weights, zero_first};
use crate::kernel::{Params, params};

/// A problem to verify on seeded inputs.
#[derive(Debug, Clone, Copy)]
pub struct Case<P> {
    pub problem: P,
    pub seed: u64,
}

/// Seeded, quantised weights. The first of several rows is zero. One code is -128: no quantiser writes it, but a file
/// may contain it.
fn seeded(weight: Weight, seed: u64) -> Result<int8::Rows, CheckError> {
    let mut values = weights(seed, weight.len() as usize, weight.k);
    zero_first(&mut values, weight.k as usize);
    let mut rows = int8::quantize(&values, weight.n as usize, weight.k as usize)?;
    let last = rows.codes.len() - 1;
    rows.codes[last - last / 3] = i8::MIN;
    Ok(rows)
}

fn upload(device: &Device, rows: &int8::Rows) -> WeightBuffers {
    let bytes: Vec<u8> = rows.codes.iter().map(|code| code.cast_unsigned()).collect();
    WeightBuffers {
        codes: device.client().create_from_slice(&padded(&bytes)),
        scb: device.client().create_from_slice(f32::as_bytes(&rows.scb)),
    }
}

/// Dequantises a weight's buffers on the host, in f32.
fn values_of(
    device: &Device,
    weight: Weight,
    buffers: &WeightBuffers,
) -> Result<Vec<f32>, CheckError> {
    let codes = read(device, &buffers.codes, weight.len() as usize)?;
    let codes: Vec<i8> = codes.iter().map(|code| code.cast_signed()).collect();
    let scb = floats(device, &buffers.scb, weight.n as usize)?;
    Ok(int8::dequantize(&codes, &scb, weight.k as usize)?)
}

fn floats(device: &Device, handle: &Handle, len: usize) -> Result<Vec<f32>, CheckError> {
    Ok(reference::DType::F32.decode(&read(device, handle, len * 4)?)?)
}

fn weight(n: u32, k: u32) -> Weight {
    Weight::new(n, k).expect("the sizes below are valid")
}

/// Row lengths that are multiples of 16, 8 or 4 bytes, and odd ones; one row and many.
const SHAPES: [(u32, u32); 9] =
    [(1, 1), (7, 13), (37, 41), (24, 200), (5, 12), (40, 1032), (130, 4096), (3, 22_001), (999, 8)];

/// Rows of whole words, and rows that straddle words.
fn instance_weights() -> [Weight; 2] {
    [4096, 41].map(|k| weight(4096, k))
}

/// n, k and dtype of the layer to benchmark.
const fn layer(scale: Scale) -> (u32, u32, DType) {
    match scale {
        Scale::Gpu => (14336, 4096, DType::Bf16),
        Scale::Host => (4096, 4096, DType::F32),
    }
}

fn weight_params(weight: Weight, dtype: DType) -> Params {
    params([("n", weight.n.into()), ("k", weight.k.into()), ("dtype", dtype.name().into())])
}

/// A request to bitsandbytes; `torch.py` runs it if bitsandbytes is installed.
fn request(op: &str, m: u32, w: Weight, dtype: DType) -> Value {
    json!({ "op": op, "m": m, "n": w.n, "k": w.k, "dtype": dtype.name() })
}
