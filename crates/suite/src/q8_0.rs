//! Checks Q8_0 weights: quantisation, dequantisation and matmuls.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use half::f16;
use kernels::matmul::{Activation, Epilogue, EpilogueBuffers, Precision};
use kernels::q8_0::{
    DequantizeConfig, DequantizeOperands, DequantizeProblem, Q8_0Dequantize, Q8_0Matmul,
    Q8_0MatmulConfig, Q8_0MatmulOperands, Q8_0MatmulProblem, Q8_0Quantize, QuantizeConfig,
    QuantizeOperands, QuantizeProblem, Weight, WeightBuffers,
};
use reference::q8_0::{self, Blocks};
use reference::{Comparison, Distribution, fill};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, tells_broken,
    unwritten, weights, zero_first,
};
use crate::kernel::{KernelSuite, Params, params, precision};
use crate::matmul::{all_parts, reference_activation, reference_of, result_dtype};

/// A problem to verify on seeded inputs.
#[derive(Debug, Clone, Copy)]
pub struct Case<P> {
    pub problem: P,
    pub seed: u64,
}

/// One block, an odd number of blocks per row, k that is and is not a multiple of 64, one row and many.
const SHAPES: [(u32, u32); 8] =
    [(1, 32), (7, 96), (37, 32), (24, 224), (40, 1024), (130, 4096), (3, 22_016), (999, 64)];

fn weight(n: u32, k: u32) -> Weight {
    Weight::new(n, k).expect("whole blocks")
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

/// Seeded, quantised weights. The first of several blocks is zero, and the scale of the last one is subnormal. One code
/// is -128, which no quantiser writes.
fn seeded(weight: Weight, seed: u64) -> Result<Blocks, CheckError> {
    let mut values = weights(seed, weight.len() as usize, weight.k);
    zero_first(&mut values, q8_0::BLOCK);
    let mut blocks = q8_0::quantize(&values)?;
    if let [_, .., last] = &mut blocks.scales[..] {
        *last = f16::from_bits(0x155);
    }
    let last = blocks.codes.len() - 1;
    blocks.codes[last - last / 3] = i8::MIN;
    Ok(blocks)
}

fn upload(device: &Device, blocks: &Blocks) -> WeightBuffers {
    let codes: Vec<u8> = blocks.codes.iter().map(|code| code.cast_unsigned()).collect();
    let scales: Vec<u8> = blocks.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let client = device.client();
    WeightBuffers {
        codes: client.create_from_slice(&codes),
        scales: client.create_from_slice(&padded(&scales)),
    }
}

fn blocks_of(
    device: &Device,
    weight: Weight,
    buffers: &WeightBuffers,
) -> Result<Blocks, CheckError> {
    let codes = read(device, &buffers.codes, weight.len() as usize)?;
    let scales = read(device, &buffers.scales, 2 * weight.blocks() as usize)?;
    let scales = scales.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes));
    let codes = codes.into_iter().map(|code| code.cast_signed()).collect();
    Ok(Blocks { codes, scales: scales.collect() })
}

/// Dequantises a weight's buffers on the host, rounded to `dtype`.
fn values_of(
    device: &Device,
    weight: Weight,
    buffers: &WeightBuffers,
    dtype: reference::DType,
) -> Result<Vec<f32>, CheckError> {
    let Blocks { codes, scales } = blocks_of(device, weight, buffers)?;
    Ok(dtype.decode(&dtype.encode(&q8_0::dequantize(&codes, &scales)?))?)
}

impl KernelSuite for Q8_0Quantize {
    type Case = Case<QuantizeProblem>;

    fn precision(p: &QuantizeProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &QuantizeProblem) -> Params {
        weight_params(p.weight, p.dtype)
    }

    fn problem(case: &Self::Case) -> &QuantizeProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<Case<QuantizeProblem>> {
        let dtype = precision.storage();
        let problems = SHAPES.map(|(n, k)| QuantizeProblem { weight: weight(n, k), dtype });
        (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<Self::Case> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(3).step_by(4).collect()
    }

    fn verify(
        device: &Device,
        case: &Case<QuantizeProblem>,
        config: &QuantizeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let mut values = fill(case.seed, p.weight.len() as usize, Distribution::Normal);
        zero_first(&mut values, q8_0::BLOCK);
        // Scales that are subnormal in f16, and scales that round to 0.
        values[p.weight.k as usize - 16..][..16].iter_mut().for_each(|value| *value *= 1e-4);
        let client = device.client();
        let operands = QuantizeOperands {
            values: client.create_from_slice(&padded(&reference_dtype(p.dtype).encode(&values))),
            weight: WeightBuffers {
                codes: unwritten(device, p.weight.words() as usize * 4),
                scales: unwritten(device, p.weight.scale_words() as usize * 4),
            },
            flag: client.create_from_slice(&[0; 4]),
        };
        let results = [&operands.weight.codes, &operands.weight.scales];
        launch_twice::<Self>(device, p, config, &operands, &results)?;
        let verdict = Self::verify_operands(device, p, &operands, case.seed)?;
        tells_broken(device, reference_dtype(p.dtype), &values, |values, flag| {
            let operands = QuantizeOperands { values, flag, ..operands.clone() };
            Self::launch(&Queue::Device(device), p, config, &operands, None);
        })?;
        Ok(verdict)
    }

    /// Compares codes and scales. They may differ only if a quotient that is off by two units in the last place
    /// explains it. The error of the verdict is the number of failed parts.
    fn verify_operands(
        device: &Device,
        p: &QuantizeProblem,
        operands: &QuantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let (len, dtype) = (p.weight.len() as usize, reference_dtype(p.dtype));
        let values = dtype.decode(&read(device, &operands.values, len * dtype.bytes())?)?;
        let blocks = blocks_of(device, p.weight, &operands.weight)?;
        let wrong = [
            q8_0::disagreement(&values, &blocks, 2)?.is_some(),
            read(device, &operands.flag, 4)? != [0; 4],
        ];
        let count = wrong.iter().filter(|wrong| **wrong).count() as f32;
        let bytes = read(device, &operands.weight.codes, len)?;
        let comparison = Comparison::exact(&[count], &[0.0])?;
        Ok(Verdict { comparison, digest: fnv1a(&bytes) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<QuantizeProblem>> {
        if matches!(suite, Suite::Quick | Suite::Documents) {
            return Vec::new();
        }
        let (n, k, dtype) = layer(scale);
        vec![BenchCase::alone(QuantizeProblem { weight: weight(n, k), dtype })]
    }

    fn instances() -> Vec<InstanceCase<QuantizeProblem>> {
        let problem = QuantizeProblem { weight: weight(4096, 4096), dtype: DType::Bf16 };
        vec![InstanceCase { problem, max_candidates: 1, clean: 1 }]
    }
}

impl KernelSuite for Q8_0Dequantize {
    type Case = Case<DequantizeProblem>;

    fn precision(p: &DequantizeProblem) -> Precision {
        precision(p.out)
    }

    fn params(p: &DequantizeProblem) -> Params {
        weight_params(p.weight, p.out)
    }

    fn problem(case: &Self::Case) -> &DequantizeProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<Case<DequantizeProblem>> {
        let out = precision.storage();
        let problems = SHAPES.map(|(n, k)| DequantizeProblem { weight: weight(n, k), out });
        (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<Self::Case> {
        Self::edge_cases(precision, Backend::Cpu).into_iter().skip(3).step_by(4).collect()
    }

    fn verify(
        device: &Device,
        case: &Case<DequantizeProblem>,
        config: &DequantizeConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let operands = DequantizeOperands {
            weight: upload(device, &seeded(p.weight, case.seed)?),
            out: unwritten(device, p.weight.len() as usize * p.out.size()),
        };
        launch_twice::<Self>(device, p, config, &operands, &[&operands.out])?;
        Self::verify_operands(device, p, &operands, case.seed)
    }

    fn verify_operands(
        device: &Device,
        p: &DequantizeProblem,
        operands: &DequantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let out = read(device, &operands.out, p.weight.len() as usize * p.out.size())?;
        let dtype = reference_dtype(p.out);
        let expected = values_of(device, p.weight, &operands.weight, dtype)?;
        let comparison = Comparison::exact(&dtype.decode(&out)?, &expected)?;
        Ok(Verdict { comparison, digest: fnv1a(&out) })
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<DequantizeProblem>> {
        if matches!(suite, Suite::Quick | Suite::Documents) {
            return Vec::new();
        }
        let (n, k, out) = layer(scale);
        vec![BenchCase::alone(DequantizeProblem { weight: weight(n, k), out })]
    }

    fn instances() -> Vec<InstanceCase<DequantizeProblem>> {
        let problem = DequantizeProblem { weight: weight(4096, 4096), out: DType::Bf16 };
        vec![InstanceCase { problem, max_candidates: 2, clean: 2 }]
    }
}

impl KernelSuite for Q8_0Matmul {
    type Case = Case<Q8_0MatmulProblem>;

    fn precision(p: &Q8_0MatmulProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &Q8_0MatmulProblem) -> Params {
        let mut params = weight_params(p.weight, p.dtype);
        params.insert("m".to_owned(), p.m.into());
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        params
    }

    fn problem(case: &Self::Case) -> &Q8_0MatmulProblem {
        &case.problem
    }

    /// One row of x and many, row counts of the weight that no cube divides, every part of an epilogue.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<Case<Q8_0MatmulProblem>> {
        let dtype = precision.storage();
        let product = |m, (n, k)| {
            Q8_0MatmulProblem::new(m, weight(n, k), dtype).expect("there are rows of x")
        };
        let rows = [1, 3, 2, 9, 4, 1, 17, 1];
        let mut problems: Vec<_> = SHAPES.iter().zip(rows).map(|(s, m)| product(m, *s)).collect();
        problems.extend([1, 2, 7, 8, 16, 40].map(|m| product(m, (48, 512))));
        problems.extend([1, 5, 33].map(|m| product(m, (131, 160))));
        for epilogue in [
            Epilogue { bias: true, ..Epilogue::default() },
            Epilogue { residual: true, ..Epilogue::default() },
            all_parts(Some(Activation::Silu)),
            all_parts(Some(Activation::Gelu)),
            all_parts(Some(Activation::GeluTanh)),
        ] {
            for (m, shape) in [(3, (48, 512)), (2, (33, 96)), (12, (66, 64)), (20, (66, 320))] {
                problems.push(Q8_0MatmulProblem { epilogue, ..product(m, shape) });
            }
        }
        (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<Case<Q8_0MatmulProblem>> {
        let dtype = precision.storage();
        let residual = Epilogue { bias: true, residual: true, ..Epilogue::default() };
        let shapes = [
            (1, (257, 4096)),
            (16, (272, 4096)),
            (8, (144, 1024)),
            (13, (64, 544)),
            (70, (144, 512)),
            (3, (37, 96)),
            // Tiles of 64 of k: parts without work, planes past the end of the weight, several tiles of x.
            (4, (131, 4096)),
            (30, (40, 64 * 21)),
            (100, (264, 640)),
        ];
        let product = |(m, (n, k))| {
            let plain = Q8_0MatmulProblem::new(m, weight(n, k), dtype);
            Q8_0MatmulProblem { epilogue: residual, ..plain.expect("there are rows of x") }
        };
        let problems = shapes.map(product);
        (100..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn verify(
        device: &Device,
        case: &Case<Q8_0MatmulProblem>,
        config: &Q8_0MatmulConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let [x_len, _, out_len] = p.dense().extents();
        let make = |len: usize, salt: u64| {
            let values = fill(9 * case.seed + salt, len, Distribution::Normal);
            device.client().create_from_slice(&padded(&reference_dtype(p.dtype).encode(&values)))
        };
        let Epilogue { bias, gate, residual, .. } = p.epilogue;
        let operands = Q8_0MatmulOperands {
            x: make(x_len, 1),
            weight: upload(device, &seeded(p.weight, 9 * case.seed)?),
            out: unwritten(device, out_len * p.dtype.size()),
            epilogue: EpilogueBuffers {
                bias: bias.then(|| make(p.weight.n as usize, 2)),
                gate: gate.then(|| make(out_len, 3)),
                residual: residual.then(|| make(out_len, 4)),
                ..EpilogueBuffers::default()
            },
        };
        launch_twice::<Self>(device, p, config, &operands, &[&operands.out])?;
        verdict(device, p, &operands, None)
    }

    fn verify_operands(
        device: &Device,
        p: &Q8_0MatmulProblem,
        operands: &Q8_0MatmulOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        verdict(device, p, operands, Some(seed))
    }

    /// Linear layers of an 8B model.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<Q8_0MatmulProblem>> {
        let (n, k, dtype) = layer(scale);
        let case = |(m, n, k)| {
            let plain = Q8_0MatmulProblem::new(m, weight(n, k), dtype);
            BenchCase::alone(plain.expect("there are rows"))
        };
        match (suite, scale) {
            (Suite::Documents, _) => Vec::new(),
            (Suite::Quick, _) => vec![case((1, n, k))],
            (_, Scale::Host) => [1, 8].map(|m| case((m, n, k))).into(),
            (_, Scale::Gpu) => {
                let rows = [1, 8, 4, 16, 64, 512, 4096].map(|m| case((m, n, k)));
                let layers = [(4096, 4096), (4096, 14336), (6144, 4096)];
                rows.into_iter().chain(layers.map(|(n, k)| case((1, n, k)))).collect()
            }
        }
    }

    /// Every GEMV config for one, two and many rows of x.
    fn instances() -> Vec<InstanceCase<Q8_0MatmulProblem>> {
        let epilogue = all_parts(Some(Activation::Gelu));
        let plain = |m| {
            let problem = Q8_0MatmulProblem::new(m, weight(4096, 4096), DType::Bf16);
            problem.expect("there are rows")
        };
        let cases = [1, 2, 8].map(|m| {
            let (max_candidates, clean) = (if m > 2 { 4 } else { 7 }, 4);
            let all = Q8_0MatmulProblem { epilogue, ..plain(m) };
            [
                InstanceCase { problem: plain(m), max_candidates, clean },
                InstanceCase { problem: all, max_candidates: 1, clean: 1 },
            ]
        });
        cases.into_iter().flatten().collect()
    }
}

fn verdict(
    device: &Device,
    p: &Q8_0MatmulProblem,
    operands: &Q8_0MatmulOperands,
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
    let weight = values_of(device, p.weight, &operands.weight, dtype)?;
    let bias = part(&operands.epilogue.bias, p.weight.n as usize)?;
    let gate = part(&operands.epilogue.gate, out_len)?;
    let residual = part(&operands.epilogue.residual, out_len)?;
    let epilogue = reference::Epilogue {
        norm: None,
        bias: bias.as_deref(),
        activation: p.epilogue.activation.map(reference_activation),
        gate: gate.as_deref(),
        residual: residual.as_deref(),
        ..reference::Epilogue::NONE
    };
    let reference = reference_of(&dense);
    let sample = match sample {
        Some(seed) => reference.sample(seed),
        None => reference.everything(),
    };
    let (x, out) = (load(&operands.x, x_len)?, dtype.decode(&bytes)?);
    let comparison = reference.check(&sample, &x, &weight, epilogue, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}
