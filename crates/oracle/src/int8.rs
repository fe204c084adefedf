//! Kernels of 8-bit weights against their reference: decoding to the last bit, products as products with the dense
//! weight.

use arch::{DType, Device};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels::int8::{
    Activations, DequantizeConfig, DequantizeOperands, DequantizeProblem, Int8Dequantize,
    Int8Matmul, Int8MatmulConfig, Int8MatmulOperands, Int8MatmulProblem, Int8Quantize,
    QuantizeConfig, QuantizeOperands, QuantizeProblem, Weight, WeightBuffers,
};
use kernels::matmul::{Activation, Epilogue, EpilogueBuffers};
use reference::{Comparison, Distribution, fill, int8};
use tune::Kernel;

use crate::matmul::{reference_activation, reference_of, result_dtype};
use crate::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, tells_broken,
    unwritten, weights, zero_first,
};

/// A problem to verify on seeded inputs.
#[derive(Debug, Clone, Copy)]
pub struct Case<P> {
    pub problem: P,
    pub seed: u64,
}

/// Quantises on the device and compares with the reference: absmax to the last bit, codes where a scale wrong by two
/// units in the last place does not excuse them. The error of the verdict is how many parts are wrong. All outputs
/// are filled with ones first; of several rows the first is all zeros.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check_quantize(
    device: &Device,
    case: &Case<QuantizeProblem>,
    config: &QuantizeConfig,
) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let mut values = fill(case.seed, p.weight.len() as usize, Distribution::Normal);
    zero_first(&mut values, p.weight.k as usize);
    let client = device.client();
    let operands = QuantizeOperands {
        values: client.create_from_slice(&padded(&reference_dtype(p.dtype).encode(&values))),
        weight: WeightBuffers {
            codes: unwritten(device, p.weight.words() as usize * 4),
            scb: unwritten(device, p.weight.n as usize * 4),
        },
        flag: client.create_from_slice(&[0; 4]),
    };
    let results = [&operands.weight.codes, &operands.weight.scb];
    launch_twice::<Int8Quantize>(device, p, config, &operands, &results)?;
    let verdict = check_quantized(device, p, &operands)?;
    tells_broken(device, reference_dtype(p.dtype), &values, |values, flag| {
        let operands = QuantizeOperands { values, flag, ..operands.clone() };
        Int8Quantize::launch(device, p, config, &operands, None);
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
    let Weight { n, k } = p.weight;
    let (rows, cols, dtype) = (n as usize, k as usize, reference_dtype(p.dtype));
    let values = dtype.decode(&read(device, &operands.values, rows * cols * dtype.bytes())?)?;
    let bytes = read(device, &operands.weight.codes, rows * cols)?;
    let scb = floats(device, &operands.weight.scb, rows)?;
    let codes: Vec<i8> = bytes.iter().map(|code| code.cast_signed()).collect();
    let wrong = [
        scb != int8::quantize(&values, rows, cols)?.scb,
        int8::disagreement(&values, rows, cols, &codes, 2)?.is_some(),
        read(device, &operands.flag, 4)? != [0; 4],
    ];
    let count = wrong.iter().filter(|wrong| **wrong).count() as f32;
    let comparison = Comparison::exact(&[count], &[0.0])?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

/// Quantises on the host, dequantises on the device and compares every bit. The output is filled with NaN first.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check_dequantize(
    device: &Device,
    case: &Case<DequantizeProblem>,
    config: &DequantizeConfig,
) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let operands = DequantizeOperands {
        weight: upload(device, &seeded(p.weight, case.seed)?),
        out: unwritten(device, p.weight.len() as usize * p.out.size()),
    };
    launch_twice::<Int8Dequantize>(device, p, config, &operands, &[&operands.out])?;
    check_dequantized(device, p, &operands)
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
    let expected = dtype.decode(&dtype.encode(&values_of(device, p.weight, &operands.weight)?))?;
    let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
    Ok(Verdict { comparison, digest: fnv1a(&out) })
}

/// Runs a product on fresh host inputs and compares every result with the product of x and the dense weight. The
/// output is filled with NaN first.
///
/// # Errors
/// The kernel failed to run; a wrong result is a [`Verdict`], not an error.
pub fn check(
    device: &Device,
    case: &Case<Int8MatmulProblem>,
    config: &Int8MatmulConfig,
) -> Result<Verdict, CheckError> {
    let p = &case.problem;
    let [x_len, _, out_len] = p.dense().extents();
    let client = device.client();
    let make = |len: usize, salt: u64| {
        let values = fill(9 * case.seed + salt, len, Distribution::Normal);
        client.create_from_slice(&padded(&reference_dtype(p.dtype).encode(&values)))
    };
    let Epilogue { bias, gate, residual, .. } = p.epilogue;
    let mut x = fill(9 * case.seed + 1, x_len, Distribution::Normal);
    if let Some(Activations { threshold }) = p.activations {
        // What a device's division may round to another code is none.
        let dtype = reference_dtype(p.dtype);
        x = dtype.decode(&dtype.encode(&x))?;
        let (m, k) = (p.m as usize, p.weight.k as usize);
        for at in int8::undecided(&x, m, k, threshold, 8)? {
            x[at] = 0.0;
        }
    }
    let operands = Int8MatmulOperands {
        x: client.create_from_slice(&padded(&reference_dtype(p.dtype).encode(&x))),
        weight: upload(device, &seeded(p.weight, 9 * case.seed)?),
        out: unwritten(device, out_len * p.dtype.size()),
        epilogue: EpilogueBuffers {
            bias: bias.then(|| make(p.weight.n as usize, 2)),
            gate: gate.then(|| make(out_len, 3)),
            residual: residual.then(|| make(out_len, 4)),
        },
    };
    launch_twice::<Int8Matmul>(device, p, config, &operands, &[&operands.out])?;
    verdict(device, p, &operands, None)
}

/// Compares what a launch left in `operands` with the reference at a seeded sample of positions, reading the inputs
/// back from the device.
///
/// # Errors
/// The launch failed.
pub fn check_operands(
    device: &Device,
    p: &Int8MatmulProblem,
    operands: &Int8MatmulOperands,
    seed: u64,
) -> Result<Verdict, CheckError> {
    verdict(device, p, operands, Some(seed))
}

fn verdict(
    device: &Device,
    p: &Int8MatmulProblem,
    operands: &Int8MatmulOperands,
    sample: Option<u64>,
) -> Result<Verdict, CheckError> {
    let dense = p.dense();
    let dtype = result_dtype(&dense);
    let [x_len, _, out_len] = dense.extents();
    let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
        Ok(dtype.decode(&read(device, handle, len * dtype.bytes())?)?)
    };
    let part = |handle: &Option<Handle>, len| handle.as_ref().map(|h| load(h, len)).transpose();
    let bytes = read(device, &operands.out, out_len * dtype.bytes())?;
    let weight = dtype.decode(&dtype.encode(&values_of(device, p.weight, &operands.weight)?))?;
    let bias = part(&operands.epilogue.bias, p.weight.n as usize)?;
    let gate = part(&operands.epilogue.gate, out_len)?;
    let residual = part(&operands.epilogue.residual, out_len)?;
    let epilogue = reference::Epilogue {
        norm: None,
        bias: bias.as_deref(),
        activation: p.epilogue.activation.map(reference_activation),
        up: None,
        gate: gate.as_deref(),
        residual: residual.as_deref(),
    };
    let reference = reference_of(&dense);
    let sample = match sample {
        Some(seed) => reference.sample(seed),
        None => reference.everything(),
    };
    let (mut x, out) = (load(&operands.x, x_len)?, dtype.decode(&bytes)?);
    if let Some(Activations { threshold }) = p.activations {
        x = int8::activations(&x, p.m as usize, p.weight.k as usize, threshold)?;
    }
    let comparison = reference.check(&sample, &x, &weight, epilogue, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

/// Seeded weights, quantised; of several rows the first is all zeros. One code is -128, which no quantiser makes but a
/// file may hold.
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

/// What the codes in a weight's buffers mean, in f32.
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

/// Rows that words divide by 16, 8, 4 bytes and not at all, one and many.
const SHAPES: [(u32, u32); 9] =
    [(1, 1), (7, 13), (37, 41), (24, 200), (5, 12), (40, 1032), (130, 4096), (3, 22_001), (999, 8)];

pub fn quantize_cases(dtype: DType) -> Vec<Case<QuantizeProblem>> {
    let problems = SHAPES.map(|(n, k)| QuantizeProblem { weight: weight(n, k), dtype });
    (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
}

pub fn dequantize_cases(out: DType) -> Vec<Case<DequantizeProblem>> {
    let problems = SHAPES.map(|(n, k)| DequantizeProblem { weight: weight(n, k), out });
    (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
}

/// Products that every config must get right: one row and many, words that divide rows and that straddle them, rows of
/// the weight that no cube divides, every part of an epilogue.
pub fn product_cases(dtype: DType) -> Vec<Case<Int8MatmulProblem>> {
    let product =
        |m, (n, k)| Int8MatmulProblem::new(m, weight(n, k), dtype).expect("there are rows of x");
    let mut problems: Vec<_> =
        SHAPES[..8].iter().zip([1, 3, 2, 9, 4, 1, 17, 1]).map(|(s, m)| product(m, *s)).collect();
    problems.extend([1, 2, 7, 8, 16, 40].map(|m| product(m, (48, 512))));
    problems.extend([1, 5, 33].map(|m| product(m, (131, 136))));
    let all = |activation| Epilogue { bias: true, activation, gate: true, residual: true };
    for epilogue in [
        Epilogue { bias: true, ..Epilogue::default() },
        Epilogue { residual: true, ..Epilogue::default() },
        all(Some(Activation::Silu)),
        all(Some(Activation::Gelu)),
        all(Some(Activation::GeluTanh)),
    ] {
        for (m, shape) in [(3, (48, 512)), (2, (33, 71)), (12, (66, 72)), (20, (66, 320))] {
            problems.push(Int8MatmulProblem { epilogue, ..product(m, shape) });
        }
    }
    // x in 8 bits, with many outlying columns, few and none.
    for threshold in [0.0, 2.5, 3.5] {
        let activations = Some(Activations { threshold });
        for (m, shape) in [(1, (48, 512)), (40, (48, 512)), (9, (37, 41)), (33, (131, 144))] {
            problems.push(Int8MatmulProblem { activations, ..product(m, shape) });
        }
        let epilogue = all(Some(Activation::Silu));
        problems.push(Int8MatmulProblem { activations, epilogue, ..product(12, (66, 80)) });
    }
    (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
}

/// Fewer products for configs that are not the default.
pub fn product_config_cases(dtype: DType) -> Vec<Case<Int8MatmulProblem>> {
    let residual = Epilogue { bias: true, residual: true, ..Epilogue::default() };
    let shapes = [
        (1, (257, 4096)),
        (16, (272, 4096)),
        (8, (144, 1024)),
        (13, (64, 520)),
        (70, (144, 512)),
        (3, (37, 45)),
        // Tiles of 64 of k: parts without a share of their own, planes past the end of the weight, several tiles of x.
        (4, (131, 4096)),
        (30, (40, 64 * 21)),
        (100, (264, 640)),
    ];
    let product = |(m, (n, k))| {
        let plain = Int8MatmulProblem::new(m, weight(n, k), dtype);
        Int8MatmulProblem { epilogue: residual, ..plain.expect("there are rows of x") }
    };
    let activations = Some(Activations { threshold: 3.5 });
    let rounded = [(8, (144, 1024)), (70, (144, 512)), (130, (264, 4096))]
        .map(|sizes| Int8MatmulProblem { activations, ..product(sizes) });
    let problems = shapes.map(product).into_iter().chain(rounded);
    (100..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
}
