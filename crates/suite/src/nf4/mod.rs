//! 4-bit weights: shared code of their three kernels.

mod dequantize;
mod matmul;
mod quantize;

use arch::{DType, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::nf4::{NestedBuffers, Order, Weight, WeightBuffers, reorder};
use reference::{FourBit, nf4};
use serde_json::{Value, json};

pub use self::dequantize::DequantizeCase;
pub use self::matmul::MatmulCase;
pub use self::quantize::QuantizeCase;
use crate::check::{CheckError, padded, read, weights, zero_first};
use crate::kernel::{Params, params};

fn weight_params(w: &Weight, dtype: DType) -> Params {
    let mut params = params([
        ("n", w.n.into()),
        ("k", w.k.into()),
        ("block_size", w.block_size.into()),
        ("order", w.order.name().into()),
        ("dtype", dtype.name().into()),
    ]);
    if w.nested {
        params.insert("nested".to_owned(), true.into());
    }
    params
}

/// A request to bitsandbytes; `torch.py` runs it if bitsandbytes is installed.
fn request(op: &str, m: u32, w: &Weight, dtype: DType) -> Value {
    json!({
        "op": op,
        "m": m,
        "n": w.n,
        "k": w.k,
        "block_size": w.block_size,
        "nested": w.nested,
        "dtype": dtype.name(),
    })
}

/// Weights with different decoding code: the order of codes and the form of absmax vary.
fn instance_weights() -> [Weight; 4] {
    let nested =
        [(Order::Tiles, true), (Order::Tiles, false), (Order::Rows, true), (Order::Rows, false)];
    nested.map(|(order, nested)| weight(4096, 4096, 64, nested, order))
}

const fn code_name(code: FourBit) -> &'static str {
    match code {
        FourBit::Nf4 => "nf4",
        FourBit::Fp4 => "fp4",
    }
}

/// A quantised weight on the host.
struct Quantized {
    codebook: [f32; 16],
    codes: Vec<u8>,
    /// Decoded scales, one per block.
    absmax: Vec<f32>,
    nested: Option<(Vec<u8>, Vec<f32>, f32)>,
    /// Dequantised weights.
    values: Vec<f32>,
}

impl Quantized {
    /// Seeded weights, quantised as bitsandbytes does. The first of several blocks is zero.
    fn seeded(weight: Weight, code: FourBit, seed: u64) -> Result<Self, CheckError> {
        let (len, block_size) = (weight.len() as usize, weight.block_size as usize);
        let mut values = weights(seed, len, weight.k);
        zero_first(&mut values, block_size);
        let blocks = code.quantize(&values, block_size)?;
        let codebook = code.codebook();
        let (absmax, nested) = if weight.nested {
            let offset = nf4::mean(&blocks.absmax);
            let outer = nf4::nest(&blocks.absmax, offset)?;
            let absmax = nf4::unnest(&nf4::dynamic_map(), &outer.codes, &outer.absmax, offset)?;
            (absmax, Some((outer.codes, outer.absmax, offset)))
        } else {
            (blocks.absmax, None)
        };
        let values = nf4::dequantize(&codebook, &blocks.codes, &absmax, block_size, len)?;
        Ok(Self { codebook, codes: blocks.codes, absmax, nested, values })
    }

    /// Uploads the buffers of `weight`, in its order.
    fn upload(&self, device: &Device, weight: Weight) -> WeightBuffers {
        let client = device.client();
        let bytes = |bytes: &[u8]| client.create_from_slice(&padded(bytes));
        let floats = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
        let rows = Weight { order: Order::Rows, ..weight };
        let buffers = WeightBuffers {
            codes: bytes(&self.codes),
            absmax: match &self.nested {
                Some((codes, ..)) => bytes(codes),
                None => floats(&self.absmax),
            },
            codebook: floats(&self.codebook),
            nested: self.nested.as_ref().map(|(_, scales, offset)| NestedBuffers {
                codebook: floats(&nf4::dynamic_map()),
                scales: floats(&scales.iter().flat_map(|s| [*s, *offset]).collect::<Vec<_>>()),
            }),
        };
        reorder(device, rows, &buffers, weight.order)
    }
}

/// Dequantises a weight's buffers on the host, in f32.
fn values_of(
    device: &Device,
    weight: Weight,
    buffers: &WeightBuffers,
) -> Result<Vec<f32>, CheckError> {
    let rows = Weight { order: Order::Rows, ..weight };
    let buffers = reorder(device, weight, buffers, Order::Rows);
    let floats = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
        Ok(reference::DType::F32.decode(&read(device, handle, len * 4)?)?)
    };
    let blocks = rows.blocks() as usize;
    let absmax = match &buffers.nested {
        Some(nested) => {
            let codes = read(device, &buffers.absmax, blocks)?;
            let codebook = floats(&nested.codebook, 256)?;
            let scales = floats(&nested.scales, 2 * rows.groups() as usize)?;
            let codebook: [f32; 256] = codebook.try_into().expect("256 were read");
            // Each group has its own offset.
            let groups = codes.chunks(256).zip(scales.chunks_exact(2));
            let each = groups.map(|(codes, s)| nf4::unnest(&codebook, codes, &s[..1], s[1]));
            each.collect::<Result<Vec<_>, _>>()?.concat()
        }
        None => floats(&buffers.absmax, blocks)?,
    };
    let codebook: [f32; 16] = floats(&buffers.codebook, 16)?.try_into().expect("16 were read");
    let codes = read(device, &buffers.codes, weight.len().div_ceil(2) as usize)?;
    let (block_size, len) = (weight.block_size as usize, weight.len() as usize);
    Ok(nf4::dequantize(&codebook, &codes, &absmax, block_size, len)?)
}

fn weight(n: u32, k: u32, block_size: u32, nested: bool, order: Order) -> Weight {
    let rows = Weight::new(n, k, block_size, nested).expect("the sizes below are valid");
    rows.ordered(order).expect("tiles below are whole")
}
