//! Checks matmuls with an 8-bit weight against matmuls with the dequantised weight.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::int8::{
    Activations, Int8Matmul, Int8MatmulConfig, Int8MatmulOperands, Int8MatmulProblem,
};
use kernels::matmul::{Activation, Epilogue, EpilogueBuffers, Precision};
use reference::{Distribution, fill, int8};
use serde_json::Value;
use tune::Kernel;

use super::{
    Case, SHAPES, instance_weights, layer, request, seeded, upload, values_of, weight,
    weight_params,
};
use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, unwritten,
};
use crate::kernel::{KernelSuite, Params, precision};
use crate::matmul::{all_parts, reference_activation, reference_of, result_dtype};

impl KernelSuite for Int8Matmul {
    type Case = Case<Int8MatmulProblem>;

    fn precision(p: &Int8MatmulProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &Int8MatmulProblem) -> Params {
        let mut params = weight_params(p.weight, p.dtype);
        params.insert("m".to_owned(), p.m.into());
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        if let Some(Activations { threshold }) = p.activations {
            params.insert("x".to_owned(), "i8".into());
            params.insert("threshold".to_owned(), threshold.into());
        }
        params
    }

    fn problem(case: &Self::Case) -> &Int8MatmulProblem {
        &case.problem
    }

    /// One row of x and many; weight rows that are and are not whole words; row counts that no cube divides; every part
    /// of an epilogue.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<Case<Int8MatmulProblem>> {
        let dtype = precision.storage();
        let product = |m, (n, k)| {
            Int8MatmulProblem::new(m, weight(n, k), dtype).expect("there are rows of x")
        };
        let mut problems: Vec<_> = SHAPES[..8]
            .iter()
            .zip([1, 3, 2, 9, 4, 1, 17, 1])
            .map(|(s, m)| product(m, *s))
            .collect();
        problems.extend([1, 2, 7, 8, 16, 40].map(|m| product(m, (48, 512))));
        problems.extend([1, 5, 33].map(|m| product(m, (131, 136))));
        for epilogue in [
            Epilogue { bias: true, ..Epilogue::default() },
            Epilogue { residual: true, ..Epilogue::default() },
            all_parts(Some(Activation::Silu)),
            all_parts(Some(Activation::Gelu)),
            all_parts(Some(Activation::GeluTanh)),
        ] {
            for (m, shape) in [(3, (48, 512)), (2, (33, 71)), (12, (66, 72)), (20, (66, 320))] {
                problems.push(Int8MatmulProblem { epilogue, ..product(m, shape) });
            }
        }
        // x in 8 bits, with many outlier columns, few and none.
        for threshold in [0.0, 2.5, 3.5] {
            let activations = Some(Activations { threshold });
            for (m, shape) in [(1, (48, 512)), (40, (48, 512)), (9, (37, 41)), (33, (131, 144))] {
                problems.push(Int8MatmulProblem { activations, ..product(m, shape) });
            }
            let epilogue = all_parts(Some(Activation::Silu));
            problems.push(Int8MatmulProblem { activations, epilogue, ..product(12, (66, 80)) });
        }
        (1..).zip(problems).map(|(seed, problem)| Case { problem, seed }).collect()
    }

    fn config_cases(precision: Precision) -> Vec<Case<Int8MatmulProblem>> {
        let dtype = precision.storage();
        let residual = Epilogue { bias: true, residual: true, ..Epilogue::default() };
        let shapes = [
            (1, (257, 4096)),
            (16, (272, 4096)),
            (8, (144, 1024)),
            (13, (64, 520)),
            (70, (144, 512)),
            (3, (37, 45)),
            // Tiles of 64 of k: parts without work, planes past the end of the weight, several tiles of x.
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

    fn verify(
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
            // Zeros the values that a device's division may round to another code.
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
                ..EpilogueBuffers::default()
            },
        };
        launch_twice::<Int8Matmul>(device, p, config, &operands, &[&operands.out])?;
        verdict(device, p, &operands, None)
    }

    fn verify_operands(
        device: &Device,
        p: &Int8MatmulProblem,
        operands: &Int8MatmulOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        verdict(device, p, operands, Some(seed))
    }

    /// Linear layers of an 8B model.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<Int8MatmulProblem>> {
        let (n, k, dtype) = layer(scale);
        let case = |(m, n, k), activations| {
            let plain = Int8MatmulProblem::new(m, weight(n, k), dtype).expect("there are rows");
            BenchCase::alone(Int8MatmulProblem { activations, ..plain })
        };
        let plain = |sizes| case(sizes, None);
        match (suite, scale) {
            (Suite::Documents, Scale::Host) => Vec::new(),
            (Suite::Documents, Scale::Gpu) => {
                [4096, 8192].map(|size| plain((size, size, size))).into()
            }
            (Suite::Quick, _) => vec![plain((1, n, k))],
            (_, Scale::Host) => [1, 8].map(|m| plain((m, n, k))).into(),
            (_, Scale::Gpu) => {
                let rows = [1, 8, 4, 16, 64, 512, 4096].map(|m| plain((m, n, k)));
                let layers = [(4096, 4096), (4096, 14336), (6144, 4096), (32000, 4096)];
                let layers = layers.map(|(n, k)| plain((1, n, k)));
                // x in 8 bits, except for the outlier columns that bitsandbytes keeps in full precision.
                let activations = Some(Activations { threshold: 6.0 });
                let rounded = [8, 16, 64, 512, 4096].map(|m| case((m, n, k), activations));
                rows.into_iter().chain(layers).chain(rounded).collect()
            }
        }
    }

    /// Every GEMV config for one, two and many rows of x, and the tensor core paths. The `Dense` path runs matmul's
    /// kernel, which has its own instances.
    fn instances() -> Vec<InstanceCase<Int8MatmulProblem>> {
        let all = all_parts(Some(Activation::Gelu));
        let mut cases = Vec::new();
        for weight in instance_weights() {
            for m in [1, 2, 8] {
                let plain = Int8MatmulProblem::new(m, weight, DType::Bf16).expect("there are rows");
                cases.push(InstanceCase { problem: plain, max_candidates: 20, clean: 20 });
                let problem = Int8MatmulProblem { epilogue: all, ..plain };
                cases.push(InstanceCase { problem, max_candidates: 1, clean: 1 });
            }
        }
        // Codes converted to 16-bit floats, for enough rows to fill the tiles.
        for (m, dtype) in [(64, DType::F16), (64, DType::Bf16), (512, DType::Bf16)] {
            let weight = weight(4096, 4096);
            let plain = Int8MatmulProblem::new(m, weight, dtype).expect("there are rows");
            cases.push(InstanceCase { problem: plain, max_candidates: 8, clean: 8 });
        }
        // x in 8 bits, with and without outlier columns.
        for (m, threshold) in [(16, 6.0), (512, 0.0), (512, 6.0)] {
            let weight = weight(4096, 4096);
            let plain = Int8MatmulProblem::new(m, weight, DType::Bf16).expect("there are rows");
            let activations = Some(Activations { threshold });
            cases.push(InstanceCase {
                problem: Int8MatmulProblem { activations, ..plain },
                max_candidates: 6,
                clean: 6,
            });
        }
        cases
    }

    /// bitsandbytes always rounds x to 8 bits.
    fn torch_name(_: &Self::Problem) -> &'static str {
        "bitsandbytes"
    }

    fn torch(p: &Int8MatmulProblem) -> Option<Value> {
        let mut case = request(Self::NAME, p.m, p.weight, p.dtype);
        case["threshold"] = p.activations.map_or(0.0, |x| x.threshold).into();
        Some(case)
    }
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
        gate: gate.as_deref(),
        residual: residual.as_deref(),
        ..reference::Epilogue::NONE
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
