//! Kernels of 4-bit weights against their reference: decoding to the last bit, products as products with
//! the dense weight.

use arch::{DType, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::matmul::{Activation, Epilogue, EpilogueBuffers, NormBuffers};
use kernels::nf4::{
    CodeBook, DequantizeConfig, DequantizeOperands, DequantizeProblem, NestedBuffers,
    Nf4Dequantize, Nf4Matmul, Nf4MatmulConfig, Nf4MatmulOperands, Nf4MatmulProblem, Nf4Quantize,
    Order, QuantizeConfig, QuantizeOperands, QuantizeProblem, Weight, WeightBuffers, join, nest,
    nested_values, reorder, split,
};
use kernels::norm::NormKind;
use reference::{Comparison, Distribution, FourBit, fill, nf4};
use tune::Kernel;

use crate::matmul::{EPS, reference_activation, reference_of, result_dtype, row_norm};
use crate::{
    CheckError, Verdict, fnv1a, kernel_error, launch_twice, padded, read, reference_dtype,
    tells_broken, unwritten, weights, zero_first,
};

/// A product to verify.
#[derive(Debug, Clone, Copy)]
pub struct ProductCase {
    pub problem: Nf4MatmulProblem,
    pub code: FourBit,
    pub seed: u64,
}

/// A dequantisation to verify.
#[derive(Debug, Clone, Copy)]
pub struct DequantizeCase {
    pub problem: DequantizeProblem,
    pub code: FourBit,
    pub seed: u64,
}

impl ProductCase {
    pub const fn code_name(&self) -> &'static str {
        code_name(self.code)
    }
}

impl DequantizeCase {
    pub const fn code_name(&self) -> &'static str {
        code_name(self.code)
    }
}

const fn code_name(code: FourBit) -> &'static str {
    match code {
        FourBit::Nf4 => "nf4",
        FourBit::Fp4 => "fp4",
    }
}

/// A quantisation to verify; where the weight is nested, of its absmax too.
#[derive(Debug, Clone, Copy)]
pub struct QuantizeCase {
    pub problem: QuantizeProblem,
    pub seed: u64,
}

/// Quantises on the device and compares with the reference: absmax to the last bit, codes where a
/// reciprocal wrong by two units in the last place does not excuse them. The error of the verdict is how
/// many of the three parts (absmax, codes, what is nested) are wrong. All outputs are filled with ones
/// first.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check_quantize(
    device: &Device,
    case: &QuantizeCase,
    config: &QuantizeConfig,
) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let (len, block_size) = (p.weight.len() as usize, p.weight.block_size as usize);
    let mut values = fill(case.seed, len, Distribution::Normal);
    zero_first(&mut values, block_size);
    let dtype = reference_dtype(p.dtype);
    let client = device.client();
    let operands = QuantizeOperands {
        values: client.create_from_slice(&padded(&dtype.encode(&values))),
        codes: unwritten(device, p.weight.words() as usize * 4),
        absmax: unwritten(device, p.weight.blocks() as usize * 4),
        flag: client.create_from_slice(&[0; 4]),
    };
    let results = [&operands.codes, &operands.absmax];
    launch_twice::<Nf4Quantize>(device, p, config, &operands, &results)?;
    let verdict = check_quantized(device, p, &operands)?;
    tells_broken(device, dtype, &values, |values, flag| {
        let operands = QuantizeOperands { values, flag, ..operands.clone() };
        Nf4Quantize::launch(device, p, config, &operands, None);
    })?;
    Ok(verdict)
}

/// As [`check_quantize`], of what a launch left in `operands`.
///
/// # Errors
/// The launch failed.
pub fn check_quantized(
    device: &Device,
    p: &QuantizeProblem,
    operands: &QuantizeOperands,
) -> Result<Verdict, CheckError> {
    let (len, block_size) = (p.weight.len() as usize, p.weight.block_size as usize);
    let dtype = reference_dtype(p.dtype);
    let values = dtype.decode(&read(device, &operands.values, len * dtype.bytes())?)?;
    let book = match p.book {
        CodeBook::Nf4 => FourBit::Nf4,
        CodeBook::Fp4 => FourBit::Fp4,
    };
    let expected = book.quantize(&values, block_size)?;
    let codes = read(device, &operands.codes, len.div_ceil(2))?;
    let absmax = read(device, &operands.absmax, expected.absmax.len() * 4)?;
    let flag = read(device, &operands.flag, 4)?;
    let mut wrong = vec![reference::DType::F32.decode(&absmax)? != expected.absmax];
    wrong.push(book.disagreement(&values, block_size, &codes, 2)?.is_some());
    // A block of zeros has the code of zero, and after an odd number there is another.
    let zeros = values.iter().take(block_size).all(|v| *v == 0.0);
    wrong.push(
        zeros && codes[..block_size.min(len) / 2] != expected.codes[..block_size.min(len) / 2],
    );
    wrong.push(len % 2 == 1 && codes[len / 2] & 15 != book.encode(0.0));
    wrong.push(flag != [0; 4]);
    wrong.push(book.code_book() != p.book.values() || nested_values() != nf4::dynamic_map());
    if p.weight.nested {
        let offset = nf4::mean(&expected.absmax);
        let (bytes, nested) = nest(device, &operands.absmax, p.weight, offset);
        let bytes = read(device, &bytes, expected.absmax.len())?;
        let scales = read(device, &nested.scales, 8 * p.weight.groups() as usize)?;
        let outer = nf4::nest(&expected.absmax, offset)?;
        let pairs: Vec<f32> = outer.absmax.iter().flat_map(|scale| [*scale, offset]).collect();
        wrong.push(reference::DType::F32.decode(&scales)? != pairs);
        wrong.push(nf4::nested_disagreement(&expected.absmax, offset, &bytes, 2)?.is_some());
    }
    let count = wrong.iter().filter(|wrong| **wrong).count() as f32;
    let comparison = Comparison::exact(&[count], &[0.0])?;
    Ok(Verdict { comparison, digest: fnv1a(&codes) })
}

/// Every block size and type, odd counts, blocks that are not whole, both books, nested and not.
pub fn quantize_cases(dtype: DType) -> Vec<QuantizeCase> {
    let rows = |n, k, block_size, nested| weight(n, k, block_size, nested, Order::Rows);
    let mut weights: Vec<_> = [32, 64, 128, 256, 512, 1024, 2048, 4096]
        .into_iter()
        .flat_map(|size| [rows(24, 200, size, false), rows(40, 512, size, true)])
        .collect();
    weights.extend([
        rows(1, 1, 64, true),
        rows(7, 13, 32, true),
        rows(37, 41, 64, false),
        rows(3, 22000, 64, true),
    ]);
    let books = [CodeBook::Nf4, CodeBook::Fp4];
    let problems = weights
        .into_iter()
        .flat_map(|weight| books.map(|book| QuantizeProblem { weight, dtype, book }));
    (1..).zip(problems).map(|(seed, problem)| QuantizeCase { problem, seed }).collect()
}

/// A quantised weight on the host.
struct Quantized {
    book: [f32; 16],
    codes: Vec<u8>,
    /// As they are decoded, one a block.
    absmax: Vec<f32>,
    nested: Option<(Vec<u8>, Vec<f32>, f32)>,
    /// What the codes mean, in f32.
    values: Vec<f32>,
}

impl Quantized {
    /// Seeded weights, quantised as bitsandbytes does; of several blocks the first is all zeros.
    fn seeded(weight: Weight, code: FourBit, seed: u64) -> Result<Self, CheckError> {
        let (len, block_size) = (weight.len() as usize, weight.block_size as usize);
        let mut values = weights(seed, len, weight.k);
        zero_first(&mut values, block_size);
        let blocks = code.quantize(&values, block_size)?;
        let book = code.code_book();
        let (absmax, nested) = if weight.nested {
            let offset = nf4::mean(&blocks.absmax);
            let outer = nf4::nest(&blocks.absmax, offset)?;
            let absmax = nf4::unnest(&nf4::dynamic_map(), &outer.codes, &outer.absmax, offset)?;
            (absmax, Some((outer.codes, outer.absmax, offset)))
        } else {
            (blocks.absmax, None)
        };
        let values = nf4::dequantize(&book, &blocks.codes, &absmax, block_size, len)?;
        Ok(Self { book, codes: blocks.codes, absmax, nested, values })
    }

    /// The buffers of `weight`, in its order.
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
            book: floats(&self.book),
            nested: self.nested.as_ref().map(|(_, scales, offset)| NestedBuffers {
                book: floats(&nf4::dynamic_map()),
                scales: floats(&scales.iter().flat_map(|s| [*s, *offset]).collect::<Vec<_>>()),
            }),
        };
        reorder(device, rows, &buffers, weight.order)
    }
}

/// Quantises on the host, dequantises on the device and compares every bit. The output is filled with NaN
/// first.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check_dequantize(
    device: &Device,
    case: &DequantizeCase,
    config: &DequantizeConfig,
) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let host = Quantized::seeded(p.weight, case.code, case.seed)?;
    let bytes = p.weight.len() as usize * p.out.size();
    let operands =
        DequantizeOperands { weight: host.upload(device, p.weight), out: unwritten(device, bytes) };
    launch_twice::<Nf4Dequantize>(device, p, config, &operands, &[&operands.out])?;
    let out = read(device, &operands.out, bytes)?;
    let dtype = reference_dtype(p.out);
    let expected = dtype.decode(&dtype.encode(&host.values))?;
    let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
    Ok(Verdict { comparison, digest: fnv1a(&out) })
}

/// Compares what a launch left in `operands` with what their codes mean, all of it.
///
/// # Errors
/// The launch failed.
pub fn check_dequantized(
    device: &Device,
    p: &DequantizeProblem,
    operands: &DequantizeOperands,
) -> Result<Verdict, CheckError> {
    let out = read(device, &operands.out, p.weight.len() as usize * p.out.size())?;
    let dtype = reference_dtype(p.out);
    let values = values_of(device, p.weight, &operands.weight)?;
    let expected = dtype.decode(&dtype.encode(&values))?;
    let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
    Ok(Verdict { comparison, digest: fnv1a(&out) })
}

/// Runs a product on fresh host inputs and compares every result with the product of x and the dense
/// weight. The output is filled with NaN first.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check(
    device: &Device,
    case: &ProductCase,
    config: &Nf4MatmulConfig,
) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let host = Quantized::seeded(p.weight, case.code, 9 * case.seed)?;
    let (dense, dtype) = (p.dense(), reference_dtype(p.dtype));
    let [x_len, _, out_len] = dense.extents();
    let make = |len: usize, salt: u64| -> Result<Vec<f32>, CheckError> {
        let values = fill(9 * case.seed + salt, len, Distribution::Normal);
        Ok(dtype.decode(&dtype.encode(&values))?)
    };
    let Epilogue { bias, gate, residual, .. } = p.epilogue;
    let host = Host {
        x: make(x_len, 1)?,
        values: host.values.clone(),
        bias: bias.then(|| make(p.bias_len(), 2)).transpose()?,
        gate: gate.then(|| make(out_len, 3)).transpose()?,
        residual: residual.then(|| make(out_len, 4)).transpose()?,
        norm: p.norm.map(|_| make(p.weight.k as usize, 5)).transpose()?,
        quantized: Some(host),
    };
    let client = device.client();
    let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
    let part = |values: &Option<Vec<f32>>| values.as_deref().map(upload);
    let quantized = host.quantized.as_ref().expect("made above");
    let operands = Nf4MatmulOperands {
        x: upload(&host.x),
        weight: rejoined(device, p, quantized.upload(device, p.weight))?,
        out: unwritten(device, out_len * p.dtype.size()),
        epilogue: EpilogueBuffers {
            bias: part(&host.bias),
            gate: part(&host.gate),
            residual: part(&host.residual),
        },
        norm: part(&host.norm).map(|weight| NormBuffers { weight, eps: EPS }),
    };
    launch_twice::<Nf4Matmul>(device, p, config, &operands, &[&operands.out])?;
    verdict(device, p, &operands, &host, None)
}

/// Compares what a launch left in `operands` with the reference at a seeded sample of positions,
/// reading the inputs back from the device.
///
/// # Errors
/// The launch failed.
pub fn check_operands(
    device: &Device,
    p: &Nf4MatmulProblem,
    operands: &Nf4MatmulOperands,
    seed: u64,
) -> Result<Verdict, CheckError> {
    let (dense, dtype) = (p.dense(), reference_dtype(p.dtype));
    let [x_len, _, out_len] = dense.extents();
    let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
        Ok(dtype.decode(&read(device, handle, len * dtype.bytes())?)?)
    };
    let part = |handle: &Option<Handle>, len| handle.as_ref().map(|h| load(h, len)).transpose();
    let host = Host {
        x: load(&operands.x, x_len)?,
        values: values_of(device, p.weight, &operands.weight)?,
        bias: part(&operands.epilogue.bias, p.bias_len())?,
        gate: part(&operands.epilogue.gate, out_len)?,
        residual: part(&operands.epilogue.residual, out_len)?,
        norm: operands
            .norm
            .as_ref()
            .map(|norm| load(&norm.weight, p.weight.k as usize))
            .transpose()?,
        quantized: None,
    };
    verdict(device, p, operands, &host, Some(seed))
}

/// The weight of two matrices made of both, where they are weights by themselves.
fn rejoined(
    device: &Device,
    p: &Nf4MatmulProblem,
    buffers: WeightBuffers,
) -> Result<WeightBuffers, CheckError> {
    if !p.glu {
        return Ok(buffers);
    }
    let Ok(halves) = split(device, p.weight, &buffers, &[p.columns(); 2]) else {
        return Ok(buffers);
    };
    let halves: Vec<_> = halves.iter().map(|(weight, buffers)| (*weight, buffers)).collect();
    let (weight, joined) = join(device, &halves).map_err(kernel_error)?;
    if weight != p.weight {
        return Err(kernel_error(format!("{weight:?} was joined of halves of {:?}", p.weight)));
    }
    Ok(joined)
}

/// The inputs of one product, decoded.
struct Host {
    x: Vec<f32>,
    values: Vec<f32>,
    bias: Option<Vec<f32>>,
    gate: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
    norm: Option<Vec<f32>>,
    quantized: Option<Quantized>,
}

fn verdict(
    device: &Device,
    p: &Nf4MatmulProblem,
    operands: &Nf4MatmulOperands,
    host: &Host,
    sample: Option<u64>,
) -> Result<Verdict, CheckError> {
    let dense = p.dense();
    let dtype = result_dtype(&dense);
    let bytes = read(device, &operands.out, dense.extents()[2] * dtype.bytes())?;
    let out = dtype.decode(&bytes)?;
    let weight = dtype.decode(&dtype.encode(&host.values))?;
    let reference = reference_of(&dense);
    // Of two matrices the upper half of the rows is the one that gates.
    let (weight, up) = weight.split_at(if p.glu { weight.len() / 2 } else { weight.len() });
    let (bias, up_bias) = match host.bias.as_deref().map(|bias| bias.split_at(p.columns() as usize))
    {
        Some((bias, up_bias)) => (Some(bias), Some(up_bias)),
        None => (None, None),
    };
    let epilogue = reference::Epilogue {
        norm: row_norm(p.norm, operands.norm.as_ref(), host.norm.as_deref()),
        bias,
        activation: p.epilogue.activation.map(reference_activation),
        up: p.glu.then_some(reference::Up { rhs: up, bias: up_bias }),
        gate: host.gate.as_deref(),
        residual: host.residual.as_deref(),
    };
    let sample = match sample {
        Some(seed) => reference.sample(seed),
        None => reference.everything(),
    };
    let comparison = reference.check(&sample, &host.x, weight, epilogue, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

/// What the codes in a weight's buffers mean, in f32.
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
            let book = floats(&nested.book, 256)?;
            let scales = floats(&nested.scales, 2 * rows.groups() as usize)?;
            let book: [f32; 256] = book.try_into().expect("256 were read");
            // Each group has an offset of its own.
            let groups = codes.chunks(256).zip(scales.chunks_exact(2));
            let each = groups.map(|(codes, s)| nf4::unnest(&book, codes, &s[..1], s[1]));
            each.collect::<Result<Vec<_>, _>>()?.concat()
        }
        None => floats(&buffers.absmax, blocks)?,
    };
    let book: [f32; 16] = floats(&buffers.book, 16)?.try_into().expect("16 were read");
    let codes = read(device, &buffers.codes, weight.len().div_ceil(2) as usize)?;
    let (block_size, len) = (weight.block_size as usize, weight.len() as usize);
    Ok(nf4::dequantize(&book, &codes, &absmax, block_size, len)?)
}

fn weight(n: u32, k: u32, block_size: u32, nested: bool, order: Order) -> Weight {
    let rows = Weight::new(n, k, block_size, nested).expect("the sizes below are valid");
    rows.ordered(order).expect("tiles below are whole")
}

/// Every block size, nested and not, in both orders; odd counts, blocks that straddle rows, a last block
/// and a last group of blocks that are not whole; both code books.
pub fn dequantize_cases(out: DType) -> Vec<DequantizeCase> {
    let mut weights = Vec::new();
    for nested in [false, true] {
        for block_size in [32, 64, 128, 256, 512, 1024, 2048, 4096] {
            weights.push(weight(24, 200, block_size, nested, Order::Rows));
            if block_size >= 64 {
                weights.push(weight(48, 512, block_size, nested, Order::Tiles));
            }
        }
        weights.extend([
            weight(1, 1, 64, nested, Order::Rows),
            weight(7, 13, 32, nested, Order::Rows),
            weight(37, 41, 64, nested, Order::Rows),
            weight(3, 22000, 64, nested, Order::Rows),
            weight(160, 768, 64, nested, Order::Tiles),
        ]);
    }
    let problems = weights.into_iter().map(|weight| DequantizeProblem { weight, out });
    (1..)
        .zip(problems)
        .map(|(seed, problem)| {
            let code = if seed % 4 == 3 { FourBit::Fp4 } else { FourBit::Nf4 };
            DequantizeCase { problem, code, seed }
        })
        .collect()
}

/// Products that every config must get right: one row and many, whole tiles and none, blocks that straddle
/// rows, k in parts, every part of an epilogue.
pub fn product_cases(dtype: DType) -> Vec<ProductCase> {
    let product = |m, weight| Nf4MatmulProblem::new(m, weight, dtype).expect("there are rows");
    let mut problems = Vec::new();
    for m in [1, 2, 7, 8, 9, 16, 17, 40] {
        for nested in [false, true] {
            problems.push(product(m, weight(48, 512, 64, nested, Order::Tiles)));
            problems.push(product(m, weight(40, 136, 64, nested, Order::Rows)));
        }
    }
    for (m, weight) in [
        (1, weight(1, 1, 64, false, Order::Rows)),
        (3, weight(7, 13, 32, true, Order::Rows)),
        (5, weight(37, 41, 64, true, Order::Rows)),
        (2, weight(129, 328, 128, true, Order::Rows)),
        (1, weight(16, 256, 64, true, Order::Tiles)),
        // One tile a cube is not enough: rows of the weight past every processor's second tile.
        (1, weight(16 * 300, 256, 64, true, Order::Tiles)),
        (11, weight(16 * 290, 256, 4096, false, Order::Tiles)),
        // Planes without a share, and parts.
        (4, weight(32, 256 * 11, 64, true, Order::Tiles)),
        (8, weight(64, 256 * 17, 128, true, Order::Tiles)),
        (16, weight(64, 256 * 21, 256, false, Order::Tiles)),
        // Rows enough for the tiles of many: whole ones, ragged ones, parts.
        (256, weight(128, 512, 64, true, Order::Tiles)),
        (256, weight(128, 256, 64, true, Order::Tiles)),
        (130, weight(16 * 13, 256, 128, false, Order::Tiles)),
        (300, weight(16 * 3, 256 * 9, 64, true, Order::Tiles)),
    ] {
        problems.push(product(m, weight));
    }
    let all = |activation| Epilogue { bias: true, activation, gate: true, residual: true };
    let epilogues = [
        Epilogue { bias: true, ..Epilogue::default() },
        Epilogue { residual: true, ..Epilogue::default() },
        all(Some(Activation::Silu)),
        all(Some(Activation::Gelu)),
        all(Some(Activation::GeluTanh)),
    ];
    for epilogue in epilogues {
        for (m, weight) in [
            (3, weight(48, 512, 64, true, Order::Tiles)),
            (2, weight(32, 256 * 18, 64, true, Order::Tiles)),
            (4, weight(33, 72, 64, true, Order::Rows)),
            (129, weight(16 * 9, 512, 64, true, Order::Tiles)),
            (129, weight(16 * 9, 256, 64, true, Order::Tiles)),
        ] {
            problems.push(Nf4MatmulProblem { epilogue, ..product(m, weight) });
        }
    }
    // Two matrices that gate one another: one tile of each, more than a cube takes at once, k in parts, halves
    // of 64 that no plane of the tiled paths divides evenly, and none in tiles.
    for (m, weight) in [
        (1, weight(32, 256, 64, true, Order::Tiles)),
        (5, weight(16 * 300, 512, 64, true, Order::Tiles)),
        (12, weight(32 * 9, 256 * 3, 64, false, Order::Tiles)),
        (8, weight(64, 256 * 18, 64, true, Order::Tiles)),
        (40, weight(32 * 13, 512, 128, true, Order::Tiles)),
        (270, weight(32 * 7, 256 * 3, 64, true, Order::Tiles)),
        (270, weight(32 * 7, 256, 64, true, Order::Tiles)),
        (3, weight(2, 1, 64, false, Order::Rows)),
        (2, weight(130, 136, 64, true, Order::Rows)),
    ] {
        let plain = product(m, weight);
        for epilogue in [
            Epilogue { activation: Some(Activation::Silu), ..Epilogue::default() },
            all(Some(Activation::GeluTanh)),
        ] {
            let gated = plain.gated_by_half().expect("halves are whole");
            problems.push(Nf4MatmulProblem { epilogue, ..gated });
        }
    }
    problems.extend(normed(dtype));
    (1..)
        .zip(problems)
        .map(|(seed, problem)| {
            let code = if seed % 5 == 4 { FourBit::Fp4 } else { FourBit::Nf4 };
            ProductCase { problem, code, seed }
        })
        .collect()
}

/// Rows of x that are normalised by the product: as few and as many as there are, one tile and several, planes without
/// a share, both kinds, two matrices that gate one another, and what words do not divide.
fn normed(dtype: DType) -> Vec<Nf4MatmulProblem> {
    let product = |m, weight| Nf4MatmulProblem::new(m, weight, dtype).expect("there are rows");
    let mut problems = Vec::new();
    for (i, (m, weight)) in [
        (1, weight(96, 4096, 64, true, Order::Tiles)),
        (8, weight(16 * 300, 256, 64, false, Order::Tiles)),
        (3, weight(32, 256 * 11, 64, true, Order::Tiles)),
        (16, weight(64, 1024, 64, true, Order::Tiles)),
        (1, weight(64, 512, 128, true, Order::Rows)),
        (5, weight(130, 136, 64, true, Order::Rows)),
        (2, weight(6, 13, 32, false, Order::Rows)),
    ]
    .into_iter()
    .enumerate()
    {
        let norm = Some([NormKind::Rms, NormKind::RmsPlusOne][i % 2]);
        let plain = product(m, weight);
        let gated = plain.gated_by_half().expect("halves are whole");
        let (activation, bias) = (Some(Activation::Silu), true);
        let epilogue = Epilogue { activation, bias, ..Epilogue::default() };
        problems.push(Nf4MatmulProblem { norm, ..plain });
        problems.push(Nf4MatmulProblem { norm, epilogue, ..gated });
    }
    problems
}

/// Fewer products for configs that are not the default.
pub fn product_config_cases(dtype: DType) -> Vec<ProductCase> {
    let product = |m, weight| Nf4MatmulProblem::new(m, weight, dtype).expect("there are rows");
    let gated = |m, weight| {
        let gated = product(m, weight).gated_by_half().expect("halves are whole");
        let activation = Some(Activation::Silu);
        Nf4MatmulProblem {
            epilogue: Epilogue { bias: true, activation, ..gated.epilogue },
            ..gated
        }
    };
    let mut problems = vec![
        product(1, weight(48, 4096, 64, true, Order::Tiles)),
        product(8, weight(16 * 140, 1024, 64, false, Order::Tiles)),
        product(13, weight(64, 256 * 19, 64, true, Order::Tiles)),
        product(70, weight(144, 512, 64, true, Order::Tiles)),
        product(200, weight(16 * 17, 768, 64, true, Order::Tiles)),
        product(256, weight(16 * 8, 1024, 64, true, Order::Tiles)),
        product(5, weight(131, 200, 64, true, Order::Rows)),
        gated(1, weight(96, 4096, 64, true, Order::Tiles)),
        gated(11, weight(64, 2048, 64, false, Order::Tiles)),
        gated(70, weight(288, 512, 64, true, Order::Tiles)),
        gated(200, weight(288, 512, 64, false, Order::Tiles)),
        gated(5, weight(130, 200, 64, true, Order::Rows)),
        // Tiles of 64 of k in rows: parts without a share of their own, blocks that are larger and smaller, planes past
        // the end of the weight and of either half, several tiles of x.
        product(2, weight(131, 4096, 64, true, Order::Rows)),
        product(16, weight(4096, 64, 32, false, Order::Rows)),
        product(30, weight(40, 64 * 21, 256, true, Order::Rows)),
        product(100, weight(264, 640, 64, true, Order::Rows)),
        gated(7, weight(130, 1024, 64, true, Order::Rows)),
        gated(50, weight(2 * 152, 512, 32, true, Order::Rows)),
    ];
    let all =
        Epilogue { bias: true, activation: Some(Activation::GeluTanh), gate: true, residual: true };
    for (m, weight) in [
        (9, weight(72, 1024, 64, true, Order::Rows)),
        (160, weight(32 * 5, 256, 64, true, Order::Tiles)),
        (20, weight(48, 64 * 5, 128, false, Order::Rows)),
    ] {
        problems.push(Nf4MatmulProblem { epilogue: all, ..product(m, weight) });
        let gated = product(m, weight).gated_by_half().expect("halves are whole");
        problems.push(Nf4MatmulProblem { epilogue: all, ..gated });
    }
    problems.extend(normed(dtype));
    let case = |(seed, problem)| ProductCase { problem, code: FourBit::Nf4, seed };
    (100..).zip(problems).map(case).collect()
}
