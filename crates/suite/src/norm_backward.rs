//! Checks the gradients of norms against their reference.

use arch::{Backend, DType, Device};
use cubecl::prelude::CubeElement;
use cubecl::server::Handle;
use kernels::matmul::Precision;
use kernels::norm::NormKind;
use kernels::norm::backward::{
    NormBackward, NormBackwardConfig, NormBackwardOperands, NormBackwardProblem,
};
use reference::{Comparison, Distribution, compare, fill};
use serde_json::{Value, json};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, intact, kernel_error, padded, read, reference_dtype,
    scratch_of, unwritten,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};
use crate::norm::reference_rule;

/// Gradients to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: NormBackwardProblem,
    /// x has a mean of 100.
    pub shifted: bool,
    pub seed: u64,
}

/// Values of one norm.
struct Host {
    x: Vec<f32>,
    weight: Vec<f32>,
    dout: Vec<f32>,
    residual: Option<Vec<f32>>,
    /// dw, then db, before the launch.
    before: [Vec<f32>; 2],
}

impl KernelSuite for NormBackward {
    type Case = EdgeCase;

    const PRECISIONS: &'static [Precision] = &[Precision::F32, Precision::F16, Precision::Bf16];

    fn precision(p: &NormBackwardProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &NormBackwardProblem) -> Params {
        let mut all = params([
            ("rows", p.rows.into()),
            ("width", p.width.into()),
            ("kind", p.kind.name().into()),
            ("dtype", p.dtype.name().into()),
        ]);
        let rules = [("bias", p.bias), ("residual", p.residual), ("accumulate", p.accumulate)];
        insert_rules(&mut all, rules.into_iter().filter_map(|(name, on)| on.then_some(name)));
        all
    }

    fn problem(case: &EdgeCase) -> &NormBackwardProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut all = Self::params(&case.problem);
        insert_rules(&mut all, case.shifted.then_some("shifted"));
        all
    }

    /// Rows in registers and rows that are read twice; widths that vectors do and do not divide; few rows and many.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let mut cases = Vec::new();
        for kind in NormKind::ALL {
            for (i, (rows, width)) in [
                (1, 1),
                (5, 3),
                (9, 64),
                (130, 128),
                (4, 1000),
                (300, 768),
                (3, 4095),
                (17, 5120),
                (2, 20_000),
            ]
            .into_iter()
            .enumerate()
            {
                let of = problem(rows, width, precision.storage(), kind);
                let bias = kind == NormKind::Layer;
                let (residual, accumulate) = (i % 2 == 0, i % 3 == 0);
                let problem = NormBackwardProblem { bias, residual, accumulate, ..of };
                let seed = 34_000 + cases.len() as u64;
                cases.push(EdgeCase { problem, shifted: i % 4 == 1 && width > 64, seed });
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let case = |(i, kind): (usize, NormKind)| EdgeCase {
            problem: NormBackwardProblem {
                bias: true,
                residual: true,
                ..problem(700, 768, precision.storage(), kind)
            },
            shifted: false,
            seed: 34_500 + i as u64,
        };
        NormKind::ALL.into_iter().enumerate().map(case).collect()
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &NormBackwardConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let (width, all) = (p.width as usize, p.elements());
        let make = |len, salt, shift: f32| -> Result<Vec<f32>, CheckError> {
            let values = fill(8 * case.seed + salt, len, Distribution::Normal);
            let values: Vec<f32> = values.iter().map(|x| x + shift).collect();
            Ok(dtype.decode(&dtype.encode(&values))?)
        };
        let sums = |salt| fill(8 * case.seed + salt, width, Distribution::Normal);
        let host = Host {
            x: make(all, 0, if case.shifted { 100.0 } else { 0.0 })?,
            weight: make(width, 1, 0.0)?,
            dout: make(all, 2, 0.0)?,
            residual: p.residual.then(|| make(all, 3, 0.0)).transpose()?,
            before: [sums(4), sums(5)],
        };
        let client = device.client();
        let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
        let scratch = scratch_of::<Self>(device, p, config);
        let run = || {
            let operands = NormBackwardOperands {
                x: upload(&host.x),
                weight: upload(&host.weight),
                dout: upload(&host.dout),
                residual: host.residual.as_deref().map(upload),
                dx: unwritten(device, all * p.dtype.size()),
                dw: guarded(device, f32::as_bytes(&host.before[0])),
                db: p.bias.then(|| guarded(device, f32::as_bytes(&host.before[1]))),
            };
            Self::launch(&Queue::Device(device), p, config, &operands, scratch.as_ref());
            let written = [Some(&operands.dx), Some(&operands.dw), operands.db.as_ref()];
            let results = results(device, p, &operands)?;
            written.into_iter().flatten().try_for_each(|buffer| intact(device, buffer))?;
            Ok::<_, CheckError>(results)
        };
        let got = run()?;
        if run()? != got {
            return Err(kernel_error("two launches differ"));
        }
        scratch.iter().try_for_each(|scratch| intact(device, scratch))?;
        verdict(p, &host, &got)
    }

    /// Runs once more, because the sums before the measured launches are gone.
    fn verify_operands(
        device: &Device,
        p: &NormBackwardProblem,
        operands: &NormBackwardOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let config = Self::baseline(device.profile(), p).map_err(kernel_error)?;
        let dtype = reference_dtype(p.dtype);
        let (width, all) = (p.width as usize, p.elements());
        let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&read(device, handle, len * p.dtype.size())?)?)
        };
        let sums = |handle: Option<&Handle>| -> Result<Vec<f32>, CheckError> {
            match handle {
                Some(handle) => {
                    Ok(reference::DType::F32.decode(&read(device, handle, 4 * width)?)?)
                }
                None => Ok(Vec::new()),
            }
        };
        let host = Host {
            x: load(&operands.x, all)?,
            weight: load(&operands.weight, width)?,
            dout: load(&operands.dout, all)?,
            residual: operands.residual.as_ref().map(|handle| load(handle, all)).transpose()?,
            before: [sums(Some(&operands.dw))?, sums(operands.db.as_ref())?],
        };
        let scratch = Self::scratch(device, p, &config);
        Self::launch(&Queue::Device(device), p, &config, operands, scratch.as_ref());
        verdict(p, &host, &results(device, p, operands)?)
    }

    /// Norms of GPT-2 (32 sequences of 1024 tokens) and of an 8B model (2 of 2048).
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<NormBackwardProblem>> {
        let case = |rows, width, dtype, kind| {
            let of = problem(rows, width, dtype, kind);
            let bias = kind == NormKind::Layer;
            BenchCase::alone(NormBackwardProblem { bias, residual: true, accumulate: true, ..of })
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(512, 768, DType::F32, NormKind::Layer)],
            (_, Scale::Gpu) => vec![
                case(32_768, 768, DType::Bf16, NormKind::Layer),
                case(4096, 4096, DType::Bf16, NormKind::Rms),
                case(32_768, 128, DType::Bf16, NormKind::Rms),
            ],
        }
    }

    fn torch_name(_: &NormBackwardProblem) -> &'static str {
        "torch.compile"
    }

    fn torch(p: &NormBackwardProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "rows": p.rows,
            "width": p.width,
            "kind": p.kind.name(),
            "dtype": p.dtype.name(),
            "residual": p.residual,
        }))
    }

    fn instances() -> Vec<InstanceCase<NormBackwardProblem>> {
        let case = |width, dtype, kind, max_candidates| {
            let of = problem(4096, width, dtype, kind);
            let (bias, residual) = (kind == NormKind::Layer, true);
            let problem = NormBackwardProblem { bias, residual, accumulate: true, ..of };
            InstanceCase { problem, max_candidates, clean: 2 }
        };
        vec![
            case(768, DType::Bf16, NormKind::Layer, usize::MAX),
            case(4096, DType::Bf16, NormKind::Rms, usize::MAX),
            case(2304, DType::F32, NormKind::RmsPlusOne, 2),
            case(4095, DType::F16, NormKind::Layer, 2),
            case(128, DType::Bf16, NormKind::Rms, 2),
        ]
    }
}

fn problem(rows: u32, width: u32, dtype: DType, kind: NormKind) -> NormBackwardProblem {
    let (bias, residual, accumulate) = (false, false, false);
    NormBackwardProblem { rows, width, dtype, kind, eps: 1e-5, bias, residual, accumulate }
        .checked()
        .expect("sizes are valid")
}

/// Returns the bytes of dx, dw and db.
fn results(
    device: &Device,
    p: &NormBackwardProblem,
    operands: &NormBackwardOperands,
) -> Result<[Vec<u8>; 3], CheckError> {
    let sums = 4 * p.width as usize;
    Ok([
        read(device, &operands.dx, p.elements() * p.dtype.size())?,
        read(device, &operands.dw, sums)?,
        operands.db.as_ref().map_or(Ok(Vec::new()), |db| read(device, db, sums))?,
    ])
}

fn verdict(
    p: &NormBackwardProblem,
    host: &Host,
    got: &[Vec<u8>; 3],
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let f32 = reference::DType::F32;
    let norm = reference::Norm { rule: reference_rule(p.kind), eps: p.eps.into() };
    let Host { x, weight, dout, residual, before } = host;
    let exact = norm.gradients(x, weight, dout, residual.as_deref())?;
    let naive = norm.naive_gradients(x, weight, dout, residual.as_deref(), dtype)?;
    let sums = |sums: Vec<f64>, before: &[f32]| -> Vec<f64> {
        let before = before.iter().map(|x| if p.accumulate { f64::from(*x) } else { 0.0 });
        sums.iter().zip(before).map(|(sum, before)| sum + before).collect()
    };
    let mut all = vec![compare(&dtype.decode(&got[0])?, &exact.dx, &naive.dx, dtype)?];
    let of_sums = [(exact.dw, naive.dw, 1), (exact.db, naive.db, 2)];
    for (exact, naive, at) in of_sums.into_iter().take(if p.bias { 2 } else { 1 }) {
        let (exact, naive) = (sums(exact, &before[at - 1]), sums(naive, &before[at - 1]));
        all.push(compare(&f32.decode(&got[at])?, &exact, &naive, f32)?);
    }
    Ok(Verdict { comparison: Comparison::worst(all), digest: fnv1a(&got.concat()) })
}
