//! Checks matmuls with a 4-bit weight against matmuls with the dequantised weight.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::matmul::{Activation, Epilogue, EpilogueBuffers, NormBuffers, Precision};
use kernels::nf4::{
    Nf4Matmul, Nf4MatmulConfig, Nf4MatmulOperands, Nf4MatmulProblem, Order, Weight, WeightBuffers,
    join, split,
};
use kernels::norm::NormKind;
use reference::{Distribution, FourBit, fill};
use serde_json::Value;
use tune::Kernel;

use super::{Quantized, code_name, instance_weights, request, values_of, weight, weight_params};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, kernel_error, launch_twice, padded, read, reference_dtype,
    unwritten,
};
use crate::kernel::{KernelSuite, Params, precision};
use crate::matmul::{EPS, all_parts, reference_activation, reference_of, result_dtype, row_norm};

/// A matmul to verify.
#[derive(Debug, Clone, Copy)]
pub struct MatmulCase {
    pub problem: Nf4MatmulProblem,
    pub code: FourBit,
    pub seed: u64,
}

impl KernelSuite for Nf4Matmul {
    type Case = MatmulCase;

    fn precision(p: &Nf4MatmulProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &Nf4MatmulProblem) -> Params {
        let mut params = weight_params(&p.weight, p.dtype);
        params.insert("m".to_owned(), p.m.into());
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        if p.glu {
            params.insert("glu".to_owned(), true.into());
        }
        if let Some(norm) = p.norm {
            params.insert("norm".to_owned(), norm.name().into());
        }
        params
    }

    fn problem(case: &MatmulCase) -> &Nf4MatmulProblem {
        &case.problem
    }

    fn case_params(case: &MatmulCase) -> Params {
        let mut params = Self::params(&case.problem);
        params.insert("code".to_owned(), code_name(case.code).into());
        params
    }

    /// One row and many, whole and ragged tiles, blocks that straddle rows, split-k, every part of an epilogue.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<MatmulCase> {
        let dtype = precision.storage();
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
            // More than one tile per cube: weight rows past every processor's second tile.
            (1, weight(16 * 300, 256, 64, true, Order::Tiles)),
            (11, weight(16 * 290, 256, 4096, false, Order::Tiles)),
            // Planes without work, and split-k.
            (4, weight(32, 256 * 11, 64, true, Order::Tiles)),
            (8, weight(64, 256 * 17, 128, true, Order::Tiles)),
            (16, weight(64, 256 * 21, 256, false, Order::Tiles)),
            // Rows enough for the tiled paths: whole tiles, ragged tiles, split-k.
            (256, weight(128, 512, 64, true, Order::Tiles)),
            (256, weight(128, 256, 64, true, Order::Tiles)),
            (130, weight(16 * 13, 256, 128, false, Order::Tiles)),
            (300, weight(16 * 3, 256 * 9, 64, true, Order::Tiles)),
        ] {
            problems.push(product(m, weight));
        }
        let epilogues = [
            Epilogue { bias: true, ..Epilogue::default() },
            Epilogue { residual: true, ..Epilogue::default() },
            all_parts(Some(Activation::Silu)),
            all_parts(Some(Activation::Gelu)),
            all_parts(Some(Activation::GeluTanh)),
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
        // Gated weights: one tile of each half, more than a cube takes at once, split-k. Also halves of 64 that no
        // plane of the tiled paths divides evenly, and weights in rows.
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
                all_parts(Some(Activation::GeluTanh)),
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
                MatmulCase { problem, code, seed }
            })
            .collect()
    }

    fn config_cases(precision: Precision) -> Vec<MatmulCase> {
        let dtype = precision.storage();
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
            // Tiles of 64 of k in rows: parts without work, larger and smaller blocks, planes past the end of the
            // weight and of either half, several tiles of x.
            product(2, weight(131, 4096, 64, true, Order::Rows)),
            product(16, weight(4096, 64, 32, false, Order::Rows)),
            product(30, weight(40, 64 * 21, 256, true, Order::Rows)),
            product(100, weight(264, 640, 64, true, Order::Rows)),
            gated(7, weight(130, 1024, 64, true, Order::Rows)),
            gated(50, weight(2 * 152, 512, 32, true, Order::Rows)),
        ];
        let all = all_parts(Some(Activation::GeluTanh));
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
        let case = |(seed, problem)| MatmulCase { problem, code: FourBit::Nf4, seed };
        (100..).zip(problems).map(case).collect()
    }

    fn verify(
        device: &Device,
        case: &MatmulCase,
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
                ..EpilogueBuffers::default()
            },
            norm: part(&host.norm).map(|weight| NormBuffers { weight, eps: EPS }),
        };
        launch_twice::<Nf4Matmul>(device, p, config, &operands, &[&operands.out])?;
        verdict(device, p, &operands, &host, None)
    }

    fn verify_operands(
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

    /// Linear layers of an 8B model in blocks of 64 with nested absmax.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<Nf4MatmulProblem>> {
        let product = |m, n, k, order, dtype| {
            Nf4MatmulProblem::new(m, weight(n, k, 64, true, order), dtype).expect("there are rows")
        };
        let tiles = |m, n, k, dtype| product(m, n, k, Order::Tiles, dtype);
        let gated = |m, n, k, dtype| {
            let gated = tiles(m, n, k, dtype).gated_by_half().expect("halves are whole");
            let silu = Epilogue { activation: Some(Activation::Silu), ..Epilogue::default() };
            Nf4MatmulProblem { epilogue: silu, ..gated }
        };
        let normed = |p| Nf4MatmulProblem { norm: Some(NormKind::Rms), ..p };
        let (f32, bf16) = (DType::F32, DType::Bf16);
        let more = suite != Suite::Quick;
        let mut problems = Vec::new();
        match (suite, scale) {
            (Suite::Documents, Scale::Host) => {}
            (Suite::Documents, Scale::Gpu) => {
                problems.extend([4096, 8192].map(|size| tiles(size, size, size, bf16)));
            }
            (_, Scale::Host) => {
                problems.push(tiles(1, 4096, 4096, f32));
                if more {
                    problems.push(tiles(8, 4096, 4096, f32));
                    problems.push(tiles(64, 4096, 4096, f32));
                    problems.push(gated(1, 8192, 4096, f32));
                }
                problems.push(product(1, 4096, 4096, Order::Rows, f32));
            }
            (_, Scale::Gpu) => {
                problems.extend([1, 8, 16, 512].map(|m| tiles(m, 14336, 4096, bf16)));
                problems.push(tiles(1, 4096, 4096, bf16));
                if more {
                    problems.extend([4, 32, 64, 128, 4096].map(|m| tiles(m, 14336, 4096, bf16)));
                    for m in [1, 8] {
                        for (n, k) in [(4096, 14336), (11008, 4096), (4096, 11008), (1024, 4096)] {
                            problems.push(tiles(m, n, k, bf16));
                        }
                    }
                    problems.push(tiles(1, 32000, 4096, bf16));
                    // Fused query, key and value with grouped heads; then fused gate and up.
                    problems.push(tiles(1, 6144, 4096, bf16));
                    problems.push(tiles(8, 4096, 4096, bf16));
                    problems.push(tiles(1, 14336, 4096, DType::F16));
                    problems.extend([1, 8, 16, 512].map(|m| gated(m, 28672, 4096, bf16)));
                    for m in [1, 8] {
                        problems.push(normed(tiles(m, 6144, 4096, bf16)));
                        problems.push(normed(gated(m, 28672, 4096, bf16)));
                    }
                }
                // Order for backends without matrix instructions.
                let rows = |m, n, k| product(m, n, k, Order::Rows, bf16);
                problems.push(rows(1, 14336, 4096));
                if more {
                    problems.extend([2, 4, 8, 16, 32, 64, 128, 256].map(|m| rows(m, 14336, 4096)));
                    for (n, k) in [(4096, 14336), (4096, 4096), (6144, 4096)] {
                        problems.push(rows(16, n, k));
                    }
                    problems.extend(
                        [4, 16].map(|m| {
                            rows(m, 28672, 4096).gated_by_half().expect("halves are whole")
                        }),
                    );
                }
            }
        }
        problems.into_iter().map(BenchCase::alone).collect()
    }

    /// Rows of x in one fragment and in two, split-k, GEMV.
    fn instances() -> Vec<InstanceCase<Nf4MatmulProblem>> {
        let of = instance_weights();
        let product =
            |m, weight| Nf4MatmulProblem::new(m, weight, DType::Bf16).expect("there are rows");
        let all = all_parts(Some(Activation::Gelu));
        let mut cases = Vec::new();
        for weight in of {
            // Tiles: the streaming configs only, because GEMV code differs between the orders only in its loads.
            let max_candidates = if weight.order == Order::Tiles { 4 } else { 7 };
            for m in [1, 16] {
                cases.push(InstanceCase { problem: product(m, weight), max_candidates, clean: 1 });
            }
            for m in [1, 512] {
                let problem = Nf4MatmulProblem { epilogue: all, ..product(m, weight) };
                cases.push(InstanceCase { problem, max_candidates: 1, clean: 1 });
            }
        }
        let weight = Weight { k: 14336, ..of[0] };
        cases.push(InstanceCase { problem: product(8, weight), max_candidates: 4, clean: 1 });
        for m in [64, 500] {
            cases.push(InstanceCase { problem: product(m, of[0]), max_candidates: 6, clean: 1 });
        }
        let half = Nf4MatmulProblem { dtype: DType::F16, ..product(1, of[0]) };
        cases.push(InstanceCase { problem: half, max_candidates: 1, clean: 1 });
        // Gated weights.
        let silu = Epilogue { activation: Some(Activation::Silu), ..Epilogue::default() };
        for (m, weight, max_candidates) in [(1, of[0], 2), (1, weight, 1), (16, of[0], 2)]
            .into_iter()
            .chain([(64, of[0], 4), (1, of[2], 2)])
        {
            let gated = product(m, weight).gated_by_half().expect("halves are whole");
            let problem = Nf4MatmulProblem { epilogue: silu, ..gated };
            cases.push(InstanceCase { problem, max_candidates, clean: 1 });
            let problem = Nf4MatmulProblem { norm: Some(NormKind::Rms), ..problem };
            cases.push(InstanceCase { problem, max_candidates, clean: 1 });
        }
        for (m, weight) in [(1, of[0]), (8, of[0]), (1, of[2])] {
            let norm = Some(NormKind::RmsPlusOne);
            let problem = Nf4MatmulProblem { norm, ..product(m, weight) };
            cases.push(InstanceCase { problem, max_candidates: 2, clean: 1 });
        }
        cases
    }

    fn torch_name(_: &Self::Problem) -> &'static str {
        "bitsandbytes"
    }

    fn torch(p: &Nf4MatmulProblem) -> Option<Value> {
        if p.norm.is_some() {
            return None;
        }
        let mut case = request(Self::NAME, p.m, &p.weight, p.dtype);
        case["glu"] = p.glu.into();
        Some(case)
    }
}

/// Splits a gated weight into its halves and joins them again, if each half is a valid weight. Returns other weights
/// unchanged.
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
        return Err(kernel_error(format!("{weight:?} was joined from halves of {:?}", p.weight)));
    }
    Ok(joined)
}

/// Decoded inputs of one matmul.
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
    // The first half of a gated weight's rows is the gate, the second is up.
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
        ..reference::Epilogue::NONE
    };
    let sample = match sample {
        Some(seed) => reference.sample(seed),
        None => reference.everything(),
    };
    let comparison = reference.check(&sample, &host.x, weight, epilogue, &out)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

/// Matmuls that normalise the rows of x: the fewest and the most rows, one tile and several, planes without work, both
/// kinds, gated weights, and sizes that words do not divide.
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
