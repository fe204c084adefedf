//! Matmuls with weights of 2, 4 or 8 bits: `MatMulNBits`.
//!
//! ```text
//! w[n, k] = scale[n, k / block] · (code[n, k] - zero[n, k / block])      out = x · wᵀ + bias
//! ```
//!
//! Quantised values of a block are consecutive, the first in the low bits of a byte. The default
//! zero point is the middle of the range.
//!
//! 4-bit weights with one zero point run on our kernels for 4-bit weights, with the range of values
//! as codebook. Other weights are dequantised once on the device.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use burn::tensor::{DType, TensorData};
use ops::checkpoint::Encoded;
use ops::{Block, Ctx, Epilogue, OpError, QuantizedWeight, Scales, Scheme, WeightFormat};

use super::super::fused::{LinearEpilogue, is_ours, project, vector};
use super::super::{Call, Run};
use crate::array::Array;
use crate::devices::Devices;
use crate::graph::{Attribute, Node, Value};

/// Inputs that must be constants, by their index.
const PARTS: [(usize, &str); 3] = [(1, CODES), (2, SCALES), (3, ZEROS)];
const CODES: &str = "flashover codes";
const SCALES: &str = "flashover scales";
const ZEROS: &str = "flashover zeros";
/// Unique number of the matrix in this process.
const NUMBER: &str = "flashover number";

/// Moves the constants of a packed weight from inputs to attributes, so that they are not copied to
/// the device.
pub(crate) fn hold(node: &mut Node, values: &[Value]) {
    if node.op != "com.microsoft::MatMulNBits" {
        return;
    }
    for (place, name) in PARTS {
        let id = node.inputs.get(place).copied().flatten();
        if let Some(data) = id.and_then(|id| values[id].constant.clone()) {
            node.inputs[place] = None;
            node.attributes.insert(name.to_owned(), Attribute::Tensor(data));
        }
    }
    node.attributes.insert(NUMBER.to_owned(), Attribute::Int(next_number()));
}

/// Returns a number that is unique in this process.
pub(crate) fn next_number() -> i64 {
    static READ: AtomicI64 = AtomicI64::new(0);
    READ.fetch_add(1, Ordering::Relaxed)
}

/// A weight on a device.
#[derive(Clone)]
pub(crate) enum Packed {
    Codes(Arc<QuantizedWeight>),
    /// `[k, n]`
    Dense(Arc<Array>),
}

pub(super) fn read(call: &Call<'_>) -> Result<Run, String> {
    let count = |name: &str| {
        let own = call.int(name).and_then(|own| usize::try_from(own).ok()).filter(|own| *own > 0);
        own.ok_or_else(|| format!("expected attribute `{name}` of 1 or more"))
    };
    let (k, n, block) = (count("K")?, count("N")?, count("block_size")?);
    let bits = call.int("bits").unwrap_or(4);
    if ![2, 4, 8].contains(&bits) {
        return Err(format!("expected 2, 4 or 8 bits, got {bits}"));
    }
    if PARTS.iter().any(|(place, _)| call.has_input(*place)) {
        return Err("expected constants as B, scales and zero_points".to_owned());
    }
    if call.has_input(4) {
        return Err("input g_idx is not supported".to_owned());
    }
    let codes = call.tensor(CODES).ok_or("input B is missing")?;
    let scales = call.tensor(SCALES).ok_or("input scales is missing")?;
    let own = Matrix { k, n, block, bits: bits as usize, codes, scales, zeros: call.tensor(ZEROS) };
    own.checked()?;
    let number = call.int(NUMBER).ok_or("the number of the matrix is missing")?;
    let devices = call.devices().clone();
    Ok(Box::new(move |inputs| {
        let (x, bias) = (inputs.get(0)?, inputs.maybe(5));
        let matrix = devices.packed((number, 0, x.dtype()), || {
            let shape = [own.n, own.k];
            Packed::new(&devices, x.dtype(), shape, || own.to_four_bits(), || own.decoded())
        })?;
        let ours = devices.has_kernels();
        Ok(vec![packed_matmul(inputs.ctx, ours, matrix, x, [own.n, own.k], bias)?])
    }))
}

impl Packed {
    /// Copies a weight `[n, k]` to a device: quantised if our kernels support it, dequantised
    /// otherwise.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn new<'a>(
        devices: &Devices,
        dtype: DType,
        shape: [usize; 2],
        codes: impl FnOnce() -> Option<Encoded<'a>>,
        numbers: impl FnOnce() -> Vec<f32>,
    ) -> Result<Self, String> {
        let kernels = devices.has_kernels() && is_ours(dtype);
        if let Some(codes) = kernels.then(codes).flatten() {
            let device = burn::tensor::Device::new(devices.device.clone());
            match QuantizedWeight::from_host(&devices.ctx, &codes, &device) {
                Ok(weight) => return Ok(Self::Codes(Arc::new(weight))),
                // Our kernels do not support this shape.
                Err(OpError::Weight(_)) => {}
                Err(why) => return Err(why.to_string()),
            }
        }
        let weight = Array::from_data(TensorData::new(numbers(), shape), &devices.device);
        Ok(Self::Dense(Arc::new(weight.cast(dtype).permute(&[1, 0]))))
    }
}

/// Computes the matmul of x `[.., k]` with a weight `[n, k]`.
///
/// # Errors
/// The device failed; the last dimension of x is not k.
pub(crate) fn packed_matmul(
    ctx: &Ctx,
    ours: bool,
    matrix: Packed,
    x: Array,
    [n, k]: [usize; 2],
    bias: Option<Array>,
) -> Result<Array, String> {
    let mut shape = x.shape();
    if shape.pop() != Some(k) {
        return Err(format!("expected x with a last dimension of {k}, got shape {:?}", x.shape()));
    }
    match matrix {
        Packed::Dense(weight) => {
            let epilogue = LinearEpilogue { bias, ..LinearEpilogue::default() };
            project(ctx, ours, x, (*weight).clone(), epilogue)
        }
        Packed::Codes(weight) => {
            let rows = shape.iter().product();
            let epilogue = Epilogue { bias: bias.map(vector), ..Epilogue::default() };
            let out =
                ops::quantized_linear(ctx, x.reshape(&[rows, k]).tensor::<2>(), &weight, epilogue);
            shape.push(n);
            Ok(Array::from_tensor(out.map_err(|why| why.to_string())?).reshape(&shape))
        }
    }
}

/// A packed weight `[n, k]`.
struct Matrix {
    k: usize,
    n: usize,
    block: usize,
    bits: usize,
    codes: TensorData,
    scales: TensorData,
    zeros: Option<TensorData>,
}

impl Matrix {
    fn blocks(&self) -> usize {
        self.k.div_ceil(self.block)
    }

    /// Bytes of the packed zero points of a row.
    fn row(&self) -> usize {
        (self.blocks() * self.bits).div_ceil(8)
    }

    fn checked(&self) -> Result<(), String> {
        let Self { k, n, block, bits, codes, scales, zeros } = self;
        let blocks = n * self.blocks();
        let zeros = zeros.as_ref().is_none_or(|own| match own.dtype() {
            DType::U8 => own.as_bytes().len() == n * self.row(),
            _ => own.num_elements() == blocks,
        });
        match codes.as_bytes().len() == blocks * block * bits / 8
            && scales.num_elements() == blocks
            && zeros
        {
            true => Ok(()),
            false => {
                Err(format!("B, scales or zero_points do not have the size of a weight [{n}, {k}]"))
            }
        }
    }

    /// Returns the quantised value at an index.
    fn code(&self, bytes: &[u8], at: usize) -> f32 {
        let byte = bytes[at * self.bits / 8];
        let mask = if self.bits == 8 { 255 } else { (1u8 << self.bits) - 1 };
        f32::from((byte >> (at * self.bits % 8)) & mask)
    }

    /// Returns the zero point of each block.
    fn each_zero(&self) -> Vec<f32> {
        let blocks = self.blocks();
        match &self.zeros {
            None => vec![(1 << (self.bits - 1)) as f32; self.n * blocks],
            // Packed zero points are aligned to bytes per row; others are one number each.
            Some(own) if own.dtype() == DType::U8 => {
                let of_row = |row: &[u8]| (0..blocks).map(|at| self.code(row, at)).collect();
                own.as_bytes()
                    .chunks(self.row())
                    .flat_map(|row| -> Vec<f32> { of_row(row) })
                    .collect()
            }
            Some(own) => own.iter::<f32>().collect(),
        }
    }

    /// Returns the weight in the format of our kernels; None if they do not support it.
    fn to_four_bits(&self) -> Option<Encoded<'static>> {
        let zeros = self.each_zero();
        let zero = *zeros.first()?;
        let block = u32::try_from(self.block).ok()?;
        let whole =
            self.k % self.block == 0 && block.is_power_of_two() && (32..=4096).contains(&block);
        if self.bits != 4 || !whole || zeros.iter().any(|own| *own != zero) {
            return None;
        }
        // Our format has the first value in the high bits, and a codebook of numbers up to 1.
        let codes = self.codes.as_bytes().iter().map(|own| own.rotate_left(4)).collect();
        let book = (0..16u8).flat_map(|code| ((f32::from(code) - zero) / 8.0).to_le_bytes());
        let absmax = self.scales.iter::<f32>().flat_map(|own| (8.0 * own).to_le_bytes());
        let buffers: [Vec<u8>; 3] = [codes, absmax.collect(), book.collect()];
        Some(Encoded {
            scheme: Scheme {
                format: WeightFormat::Nf4,
                block: Block::Elements(block),
                scales: Scales::F32,
            },
            dtype: arch::DType::F32,
            shape: vec![self.n, self.k],
            buffers: buffers.map(Cow::Owned).into(),
        })
    }

    /// Returns the dequantised weight `[n, k]`.
    fn decoded(&self) -> Vec<f32> {
        let (scales, zeros) = (self.scales.iter::<f32>().collect::<Vec<_>>(), self.each_zero());
        let (blocks, each) = (self.blocks(), self.block * self.bits / 8);
        let mut out = Vec::with_capacity(self.n * self.k);
        for line in 0..self.n {
            for at in 0..self.k {
                let own = line * blocks + at / self.block;
                let bytes = &self.codes.as_bytes()[own * each..(own + 1) * each];
                out.push(scales[own] * (self.code(bytes, at % self.block) - zeros[own]));
            }
        }
        out
    }
}
