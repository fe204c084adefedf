//! Checks the gradients of activations against their reference.

use arch::{Backend, DType, Device};
use kernels::activation_backward::{
    ActivationBackward, ActivationBackwardConfig, ActivationBackwardOperands,
    ActivationBackwardProblem,
};
use kernels::matmul::{Activation, Precision};
use reference::{Comparison, Distribution, compare, fill};
use serde_json::{Value, json};
use tune::Kernel;

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, launch_again, launch_in_place, padded, reference_dtype,
    values,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};
use crate::matmul::reference_activation;

/// Gradients to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: ActivationBackwardProblem,
    pub seed: u64,
}

impl KernelSuite for ActivationBackward {
    type Case = EdgeCase;

    fn precision(p: &ActivationBackwardProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &ActivationBackwardProblem) -> Params {
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

    fn problem(case: &EdgeCase) -> &ActivationBackwardProblem {
        &case.problem
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let mut cases = Vec::new();
        for activation in Activation::ALL {
            for (rows, width, stride) in [(1, 1, 1), (7, 5, 9), (33, 64, 128), (300, 1000, 1000)] {
                for gated in [false, true] {
                    let of = problem(rows, width, precision.storage(), activation);
                    let problem = ActivationBackwardProblem { stride, gated, ..of };
                    cases.push(EdgeCase { problem, seed: 36_000 + cases.len() as u64 });
                }
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let of = problem(100, 96, precision.storage(), Activation::Silu);
        let problem = ActivationBackwardProblem { gated: true, ..of };
        vec![EdgeCase { problem, seed: 36_500 }]
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &ActivationBackwardConfig,
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
        verdict(p, &before, &got)
    }

    fn verify_operands(
        device: &Device,
        p: &ActivationBackwardProblem,
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
        verdict(p, &before, &launch_again::<Self>(device, p, operands, &written)?)
    }

    /// Feed-forward blocks of GPT-2 (32 sequences of 1024 tokens) and of an 8B model (2 of 2048).
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ActivationBackwardProblem>> {
        let case = |rows, width, dtype, activation, gated| {
            let of = problem(rows, width, dtype, activation);
            BenchCase::alone(ActivationBackwardProblem { gated, ..of })
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(256, 3072, DType::F32, Activation::GeluTanh, false)],
            (_, Scale::Gpu) => vec![
                case(32_768, 3072, DType::Bf16, Activation::GeluTanh, false),
                case(4096, 14_336, DType::Bf16, Activation::Silu, true),
            ],
        }
    }

    fn torch_name(_: &ActivationBackwardProblem) -> &'static str {
        "torch.compile"
    }

    fn torch(p: &ActivationBackwardProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "rows": p.rows,
            "width": p.width,
            "activation": p.activation.name(),
            "dtype": p.dtype.name(),
            "gated": p.gated,
        }))
    }

    fn instances() -> Vec<InstanceCase<ActivationBackwardProblem>> {
        let case = |width, dtype, activation, gated| {
            let of = problem(4096, width, dtype, activation);
            let problem = ActivationBackwardProblem { gated, ..of };
            InstanceCase { problem, max_candidates: usize::MAX, clean: usize::MAX }
        };
        vec![
            case(3072, DType::Bf16, Activation::GeluTanh, false),
            case(14_336, DType::Bf16, Activation::Silu, true),
            case(4095, DType::F16, Activation::Gelu, true),
            case(768, DType::F32, Activation::Silu, true),
        ]
    }
}

fn problem(
    rows: u32,
    width: u32,
    dtype: DType,
    activation: Activation,
) -> ActivationBackwardProblem {
    ActivationBackwardProblem { rows, width, stride: width, dtype, activation, gated: false }
        .checked()
        .expect("sizes are valid")
}

fn writes(operands: &ActivationBackwardOperands) -> Vec<cubecl::server::Handle> {
    let all = [Some(&operands.dh), Some(&operands.z), operands.up.as_ref()];
    all.into_iter().flatten().cloned().collect()
}

/// Compares h, dz and dup; gaps between rows must stay.
fn verdict(
    p: &ActivationBackwardProblem,
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
