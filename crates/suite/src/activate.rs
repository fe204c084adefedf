//! Checks activations against their reference.

use arch::{Backend, DType, Device};
use kernels::activate::{Activate, ActivateConfig, ActivateOperands, ActivateProblem};
use kernels::matmul::{Activation, Precision};
use reference::{Distribution, compare, fill};
use serde_json::{Value, json};
use tune::Kernel;

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, unwritten, values,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};
use crate::matmul::reference_activation;

/// Elements to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: ActivateProblem,
    pub seed: u64,
}

impl KernelSuite for Activate {
    type Case = EdgeCase;

    fn precision(p: &ActivateProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &ActivateProblem) -> Params {
        let mut all = params([
            ("rows", p.rows.into()),
            ("width", p.width.into()),
            ("activation", p.activation.name().into()),
            ("dtype", p.dtype.name().into()),
        ]);
        if p.stride != p.width {
            all.insert("stride".to_owned(), p.stride.into());
        }
        insert_rules(&mut all, p.gated.then_some("gated"));
        all
    }

    fn problem(case: &EdgeCase) -> &ActivateProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let mut cases = Vec::new();
        for activation in Activation::ALL {
            for (shape, stride) in [([1, 1], 1), ([7, 5], 9), ([32, 128], 256), ([300, 1000], 1000)]
            {
                for gated in [false, true] {
                    let of = problem(shape, precision.storage(), activation, gated);
                    let problem = ActivateProblem { stride, ..of };
                    cases.push(EdgeCase { problem, seed: 39_000 + cases.len() as u64 });
                }
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let problem = problem([100, 96], precision.storage(), Activation::Silu, true);
        vec![EdgeCase { problem, seed: 39_500 }]
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &ActivateConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        // Values up to about 9, where activations are flat.
        let made = |salt, spread: f32| {
            let normal = fill(2 * case.seed + salt, p.strided(), Distribution::Normal);
            dtype.encode(&normal.iter().map(|x| x * spread).collect::<Vec<_>>())
        };
        let (z, up) = (made(0, 2.5), made(1, 1.0));
        let upload = |bytes: &[u8]| device.client().create_from_slice(&padded(bytes));
        let operands = ActivateOperands {
            z: upload(&z),
            up: p.gated.then(|| upload(&up)),
            h: unwritten(device, p.elements() * p.dtype.size()),
        };
        launch_twice::<Self>(device, p, config, &operands, &[&operands.h])?;
        let got = read(device, &operands.h, p.elements() * p.dtype.size())?;
        verdict(p, &dtype.decode(&z)?, &dtype.decode(&up)?, &got)
    }

    fn verify_operands(
        device: &Device,
        p: &ActivateProblem,
        operands: &ActivateOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let len = p.strided();
        let z = values(device, &operands.z, len, p.dtype)?;
        let up = values(device, operands.up.as_ref().unwrap_or(&operands.z), len, p.dtype)?;
        verdict(p, &z, &up, &read(device, &operands.h, p.elements() * p.dtype.size())?)
    }

    /// Feed-forward blocks of GPT-2 (32 sequences of 1024 tokens) and of an 8B model (2 of 2048).
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ActivateProblem>> {
        let case = |len, dtype, activation, gated| {
            BenchCase::alone(problem(len, dtype, activation, gated))
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case([256, 3072], DType::F32, Activation::GeluTanh, false)],
            (_, Scale::Gpu) => vec![
                case([32_768, 3072], DType::Bf16, Activation::GeluTanh, false),
                case([4096, 14_336], DType::Bf16, Activation::Silu, true),
            ],
        }
    }

    fn torch_name(_: &ActivateProblem) -> &'static str {
        "torch.compile"
    }

    fn torch(p: &ActivateProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "elements": p.elements(),
            "activation": p.activation.name(),
            "dtype": p.dtype.name(),
            "gated": p.gated,
        }))
    }

    fn instances() -> Vec<InstanceCase<ActivateProblem>> {
        let case = |shape, dtype, activation, gated| InstanceCase {
            problem: problem(shape, dtype, activation, gated),
            max_candidates: usize::MAX,
            clean: usize::MAX,
        };
        vec![
            case([4096, 3072], DType::Bf16, Activation::GeluTanh, false),
            case([4096, 14_336], DType::Bf16, Activation::Silu, true),
            case([3, 1365], DType::F16, Activation::Gelu, true),
            case([4, 1024], DType::F32, Activation::Silu, false),
        ]
    }
}

fn problem(
    [rows, width]: [u32; 2],
    dtype: DType,
    activation: Activation,
    gated: bool,
) -> ActivateProblem {
    ActivateProblem { rows, width, stride: width, dtype, activation, gated }
        .checked()
        .expect("sizes are valid")
}

fn verdict(p: &ActivateProblem, z: &[f32], up: &[f32], got: &[u8]) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let activation = reference_activation(p.activation);
    let (width, stride) = (p.width as usize, p.stride as usize);
    let place = |at: usize| at / width * stride + at % width;
    let gate = |at: usize| if p.gated { up[place(at)] } else { 1.0 };
    let all = 0..p.elements();
    let exact: Vec<f64> = all
        .clone()
        .map(|at| activation.exact(f64::from(z[place(at)])) * f64::from(gate(at)))
        .collect();
    let naive = all.map(|at| dtype.round(f64::from(activation.naive(z[place(at)]).0 * gate(at))));
    let naive: Vec<f64> = naive.collect();
    let comparison = compare(&dtype.decode(got)?, &exact, &naive, dtype)?;
    Ok(Verdict { comparison, digest: fnv1a(got) })
}
