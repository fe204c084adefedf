//! Checks activations and their gradients against their reference.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::activation::{
    Activate, ActivateOperands, ActivationBackward, ActivationBackwardOperands, ActivationConfig,
    ActivationProblem,
};
use kernels::matmul::{Activation, Precision};
use reference::{Comparison, Distribution, compare, fill};
use serde_json::{Value, json};
use tune::Kernel;

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, launch_again, launch_in_place, launch_twice, padded, read,
    reference_dtype, unwritten, values,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};
use crate::matmul::reference_activation;

/// Matrices to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: ActivationProblem,
    pub seed: u64,
}

impl KernelSuite for Activate {
    type Case = EdgeCase;

    fn precision(p: &ActivationProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &ActivationProblem) -> Params {
        params_of(p)
    }

    fn problem(case: &EdgeCase) -> &ActivationProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        edge_cases(precision)
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        config_cases(precision)
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &ActivationConfig,
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
        p: &ActivationProblem,
        operands: &ActivateOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let len = p.strided();
        let z = values(device, &operands.z, len, p.dtype)?;
        let up = values(device, operands.up.as_ref().unwrap_or(&operands.z), len, p.dtype)?;
        verdict(p, &z, &up, &read(device, &operands.h, p.elements() * p.dtype.size())?)
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ActivationProblem>> {
        bench_cases(suite, scale)
    }

    fn torch_name(_: &ActivationProblem) -> &'static str {
        "torch.compile"
    }

    fn torch(p: &ActivationProblem) -> Option<Value> {
        Some(torch(Self::NAME, p))
    }

    fn instances() -> Vec<InstanceCase<ActivationProblem>> {
        instances()
    }
}

impl KernelSuite for ActivationBackward {
    type Case = EdgeCase;

    fn precision(p: &ActivationProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &ActivationProblem) -> Params {
        params_of(p)
    }

    fn problem(case: &EdgeCase) -> &ActivationProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        edge_cases(precision)
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        config_cases(precision)
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &ActivationConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        // Values up to about 9, where activations are flat.
        let made = |len, salt, spread: f32| {
            let normal = fill(4 * case.seed + salt, len, Distribution::Normal);
            dtype.encode(&normal.iter().map(|x| x * spread).collect::<Vec<_>>())
        };
        let bytes =
            [made(p.elements(), 0, 1.0), made(p.strided(), 1, 2.5), made(p.strided(), 2, 1.0)];
        let upload = |bytes: &Vec<u8>| guarded(device, &padded(bytes));
        let operands = || ActivationBackwardOperands {
            dh: upload(&bytes[0]),
            z: upload(&bytes[1]),
            up: p.gated.then(|| upload(&bytes[2])),
        };
        let got = launch_in_place::<Self>(device, p, config, operands, writes)?;
        let before: Vec<Vec<f32>> =
            bytes.iter().map(|bytes| dtype.decode(bytes)).collect::<Result<_, _>>()?;
        gradients_verdict(p, &before, &got)
    }

    fn verify_operands(
        device: &Device,
        p: &ActivationProblem,
        operands: &ActivationBackwardOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let up = operands.up.as_ref().unwrap_or(&operands.z);
        let before = [
            values(device, &operands.dh, p.elements(), p.dtype)?,
            values(device, &operands.z, p.strided(), p.dtype)?,
            values(device, up, p.strided(), p.dtype)?,
        ];
        let written = writes(operands);
        let written: Vec<_> = written.iter().collect();
        gradients_verdict(p, &before, &launch_again::<Self>(device, p, operands, &written)?)
    }

    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ActivationProblem>> {
        bench_cases(suite, scale)
    }

    fn torch_name(_: &ActivationProblem) -> &'static str {
        "torch.compile"
    }

    fn torch(p: &ActivationProblem) -> Option<Value> {
        Some(torch(Self::NAME, p))
    }

    fn instances() -> Vec<InstanceCase<ActivationProblem>> {
        instances()
    }
}

fn params_of(p: &ActivationProblem) -> Params {
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

fn edge_cases(precision: Precision) -> Vec<EdgeCase> {
    let mut cases = Vec::new();
    for activation in Activation::ALL {
        for (shape, stride) in [([1, 1], 1), ([7, 5], 9), ([33, 64], 128), ([300, 1000], 1000)] {
            for gated in [false, true] {
                let of = problem(shape, precision.storage(), activation, gated);
                let problem = ActivationProblem { stride, ..of };
                cases.push(EdgeCase { problem, seed: 36_000 + cases.len() as u64 });
            }
        }
    }
    cases
}

fn config_cases(precision: Precision) -> Vec<EdgeCase> {
    let problem = problem([100, 96], precision.storage(), Activation::Silu, true);
    vec![EdgeCase { problem, seed: 36_500 }]
}

/// Feed-forward blocks of GPT-2 (32 sequences of 1024 tokens) and of an 8B model (2 of 2048).
fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ActivationProblem>> {
    let case = |shape, dtype, activation, gated| {
        BenchCase::alone(problem(shape, dtype, activation, gated))
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

fn torch(op: &str, p: &ActivationProblem) -> Value {
    json!({
        "op": op,
        "rows": p.rows,
        "width": p.width,
        "activation": p.activation.name(),
        "dtype": p.dtype.name(),
        "gated": p.gated,
    })
}

fn instances() -> Vec<InstanceCase<ActivationProblem>> {
    let case = |shape, dtype, activation, gated| InstanceCase {
        problem: problem(shape, dtype, activation, gated),
        max_candidates: usize::MAX,
        clean: usize::MAX,
    };
    vec![
        case([4096, 3072], DType::Bf16, Activation::GeluTanh, false),
        case([4096, 14_336], DType::Bf16, Activation::Silu, true),
        case([4096, 4095], DType::F16, Activation::Gelu, true),
        case([4096, 768], DType::F32, Activation::Silu, true),
    ]
}

fn problem(
    [rows, width]: [u32; 2],
    dtype: DType,
    activation: Activation,
    gated: bool,
) -> ActivationProblem {
    ActivationProblem { rows, width, stride: width, dtype, activation, gated }
        .checked()
        .expect("sizes are valid")
}

fn verdict(
    p: &ActivationProblem,
    z: &[f32],
    up: &[f32],
    got: &[u8],
) -> Result<Verdict, CheckError> {
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

fn writes(operands: &ActivationBackwardOperands) -> Vec<Handle> {
    let all = [Some(&operands.dh), Some(&operands.z), operands.up.as_ref()];
    all.into_iter().flatten().cloned().collect()
}

/// Compares h, dz and dup; gaps between rows must stay.
fn gradients_verdict(
    p: &ActivationProblem,
    before: &[Vec<f32>],
    got: &[Vec<u8>],
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let activation = reference_activation(p.activation);
    let (width, stride) = (p.width as usize, p.stride as usize);
    let [dh, z, up] = before else { unreachable!("three matrices") };
    let widened = |own: &Vec<f32>| own.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let mut exact: Vec<Vec<f64>> = before.iter().map(widened).collect();
    let mut naive = exact.clone();
    for (at, dh) in dh.iter().enumerate() {
        let place = at / width * stride + at % width;
        let (dh, z) = (*dh, z[place]);
        let up = if p.gated { up[place] } else { 1.0 };
        let (own, bent) = activation.naive(z);
        naive[0][at] = dtype.round(f64::from(own * up));
        naive[1][place] = dtype.round(f64::from(dh * up * bent));
        naive[2][place] = dtype.round(f64::from(dh * own));
        let [dh, z, up] = [dh, z, up].map(f64::from);
        exact[0][at] = activation.exact(z) * up;
        exact[1][place] = dh * up * activation.slope(z);
        exact[2][place] = dh * activation.exact(z);
    }
    let mut all = Vec::new();
    for ((got, exact), naive) in got.iter().zip(&exact).zip(&naive) {
        let got = dtype.decode(&got[..exact.len() * p.dtype.size()])?;
        all.push(compare(&got, exact, naive, dtype)?);
    }
    Ok(Verdict { comparison: Comparison::worst(all), digest: fnv1a(&got.concat()) })
}
