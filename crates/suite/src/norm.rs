//! Checks norms against their reference.

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::matmul::Precision;
use kernels::norm::{Norm, NormConfig, NormKind, NormOperands, NormProblem};
use reference::{Distribution, Special, fill, plant};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, launch_twice, padded, read, reference_dtype, unwritten,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};

/// Distribution of x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Normal, with zeros in the last row.
    Normal,
    /// Mean 100: the mean of the squares less the square of the mean loses every digit.
    Shifted,
    /// An infinity in the first row and NaN in the last.
    Special,
}

/// A norm to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: NormProblem,
    pub inputs: Inputs,
    pub seed: u64,
}

/// Values of one norm.
struct Host {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
}

impl KernelSuite for Norm {
    type Case = EdgeCase;

    fn precision(p: &NormProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &NormProblem) -> Params {
        let mut params = params([
            ("rows", p.rows.into()),
            ("width", p.width.into()),
            ("kind", p.kind.name().into()),
            ("dtype", p.dtype.name().into()),
        ]);
        let rules = [("bias", p.bias), ("residual", p.residual)].into_iter();
        insert_rules(&mut params, rules.filter_map(|(name, there)| there.then_some(name)));
        params
    }

    fn problem(case: &EdgeCase) -> &NormProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut params = Self::params(&case.problem);
        if case.inputs != Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        params
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        let mut add = |problem, inputs| {
            let seed = 9000 + cases.len() as u64;
            cases.push(EdgeCase { problem, inputs, seed });
        };
        // Widths that vectors do and do not divide; one row, a few, and more than the cubes take at once.
        for kind in NormKind::ALL {
            for (rows, width) in [
                (1, 1),
                (5, 1),
                (3, 3),
                (9, 64),
                (2, 127),
                (130, 128),
                (4, 1000),
                (1, 4096),
                (3, 4095),
                (2, 4098),
                (17, 5120),
                (2, 14337),
                (2, 40_000),
            ] {
                let p = problem(rows, width, dtype, kind);
                add(p, Inputs::Normal);
                let (bias, residual) = (kind == NormKind::Layer, true);
                add(NormProblem { bias, residual, ..p }, Inputs::Normal);
            }
            for width in [96, 1001, 4096] {
                let p = problem(3, width, dtype, kind);
                add(NormProblem { bias: true, ..p }, Inputs::Normal);
                add(NormProblem { eps: 0.25, residual: true, ..p }, Inputs::Shifted);
                add(p, Inputs::Shifted);
                add(p, Inputs::Special);
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let dtype = precision.storage();
        let mut cases = Vec::new();
        for kind in NormKind::ALL {
            for (rows, width) in [(3, 4096), (70, 333), (2, 9000)] {
                let p = problem(rows, width, dtype, kind);
                let (inputs, seed) = (Inputs::Shifted, 9500 + cases.len() as u64);
                let problem = NormProblem { bias: true, residual: true, ..p };
                cases.push(EdgeCase { problem, inputs, seed });
            }
        }
        cases
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &NormConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let (width, all) = (p.width as usize, p.elements());
        let stored = |values: Vec<f32>| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&dtype.encode(&values))?)
        };
        let make = |len, salt| stored(fill(8 * case.seed + salt, len, Distribution::Normal));
        let mut x = fill(8 * case.seed, all, Distribution::Normal);
        match case.inputs {
            Inputs::Normal => x[all - width..].fill(0.0),
            Inputs::Shifted => x.iter_mut().for_each(|x| *x += 100.0),
            Inputs::Special => {
                let places = [(width / 2, Special::Inf), (all - 1, Special::Nan)];
                plant(&mut x, dtype, &places)?;
            }
        }
        let host = Host {
            x: stored(x)?,
            weight: make(width, 1)?,
            bias: p.bias.then(|| make(width, 2)).transpose()?,
            residual: p.residual.then(|| make(all, 3)).transpose()?,
        };
        let client = device.client();
        let upload = |values: &[f32]| client.create_from_slice(&padded(&dtype.encode(values)));
        let operands = NormOperands {
            x: upload(&host.x),
            weight: upload(&host.weight),
            bias: host.bias.as_deref().map(upload),
            residual: host.residual.as_deref().map(upload),
            out: unwritten(device, all * p.dtype.size()),
        };
        launch_twice::<Norm>(device, p, config, &operands, &[&operands.out])?;
        verdict(device, p, &operands, &host)
    }

    fn verify_operands(
        device: &Device,
        p: &NormProblem,
        operands: &NormOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let dtype = reference_dtype(p.dtype);
        let load = |handle: &Handle, len: usize| -> Result<Vec<f32>, CheckError> {
            Ok(dtype.decode(&read(device, handle, len * p.dtype.size())?)?)
        };
        let part = |handle: &Option<Handle>, len| handle.as_ref().map(|h| load(h, len)).transpose();
        let (width, all) = (p.width as usize, p.elements());
        let host = Host {
            x: load(&operands.x, all)?,
            weight: load(&operands.weight, width)?,
            bias: part(&operands.bias, width)?,
            residual: part(&operands.residual, all)?,
        };
        verdict(device, p, operands, &host)
    }

    /// Rows of an 8B model: decode steps and a prefill.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<NormProblem>> {
        let case = |rows, kind, dtype, residual| {
            let problem = NormProblem { residual, ..problem(rows, 4096, dtype, kind) };
            BenchCase::alone(problem)
        };
        let (f32, bf16) = (DType::F32, DType::Bf16);
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => [1, 512].map(|rows| case(rows, NormKind::Rms, f32, false)).into(),
            (_, Scale::Gpu) => {
                let plain = [1, 16, 512].map(|rows| case(rows, NormKind::Rms, bf16, false));
                // The norm that Gemma adds after a matmul, and a layer norm.
                let others = [1, 512].map(|rows| {
                    let gemma = case(rows, NormKind::RmsPlusOne, bf16, true);
                    [gemma, case(rows, NormKind::Layer, bf16, false)]
                });
                plain.into_iter().chain(others.into_iter().flatten()).collect()
            }
        }
    }

    /// Each kind with and without bias and residual. Rows that units keep in registers, and rows that they read twice.
    /// Widths that vectors do and do not divide.
    fn instances() -> Vec<InstanceCase<NormProblem>> {
        let norm = |width, dtype, kind| problem(16, width, dtype, kind);
        let case =
            |problem, max_candidates| InstanceCase { problem, max_candidates, clean: usize::MAX };
        let mut cases = Vec::new();
        for kind in NormKind::ALL {
            let plain = norm(4096, DType::Bf16, kind);
            let odd = norm(4095, DType::F32, kind);
            cases.push(case(plain, usize::MAX));
            for (p, max_candidates) in [(plain, usize::MAX), (odd, 2)] {
                cases.push(case(NormProblem { bias: true, residual: true, ..p }, max_candidates));
            }
        }
        cases.push(case(norm(4096, DType::F32, NormKind::Rms), 2));
        cases.push(case(norm(4096, DType::F16, NormKind::Rms), 1));
        cases.push(case(norm(100_000, DType::Bf16, NormKind::Layer), 2));
        cases.push(case(norm(128, DType::Bf16, NormKind::Rms), 2));
        cases
    }
}

fn verdict(
    device: &Device,
    p: &NormProblem,
    operands: &NormOperands,
    host: &Host,
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let bytes = read(device, &operands.out, p.elements() * p.dtype.size())?;
    let norm = reference::Norm { rule: reference_rule(p.kind), eps: p.eps.into() };
    let with = reference::NormOperands {
        weight: &host.weight,
        bias: host.bias.as_deref(),
        residual: host.residual.as_deref(),
    };
    let comparison = norm.check(&host.x, with, &dtype.decode(&bytes)?, dtype)?;
    Ok(Verdict { comparison, digest: fnv1a(&bytes) })
}

pub(crate) const fn reference_rule(kind: NormKind) -> reference::NormRule {
    match kind {
        NormKind::Rms => reference::NormRule::Rms,
        NormKind::RmsPlusOne => reference::NormRule::RmsPlusOne,
        NormKind::Layer => reference::NormRule::Layer,
    }
}

fn problem(rows: u32, width: u32, dtype: DType, kind: NormKind) -> NormProblem {
    NormProblem::new(rows, width, dtype, kind, 1e-5).expect("sizes are valid")
}
