//! Checks column sums against their reference.

use arch::{Backend, DType, Device};
use cubecl::prelude::CubeElement;
use kernels::column_sums::{ColumnSums, ColumnSumsConfig, ColumnSumsOperands, ColumnSumsProblem};
use kernels::matmul::Precision;
use reference::{Distribution, compare, fill};
use tune::{Kernel, Queue};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, intact, kernel_error, padded, read, reference_dtype,
    scratch_of,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};

/// Sums to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: ColumnSumsProblem,
    pub seed: u64,
}

impl KernelSuite for ColumnSums {
    type Case = EdgeCase;

    fn precision(p: &ColumnSumsProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &ColumnSumsProblem) -> Params {
        let mut all = params([
            ("rows", p.rows.into()),
            ("width", p.width.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        if p.stride != p.width {
            all.insert("stride".to_owned(), p.stride.into());
        }
        insert_rules(&mut all, p.accumulate.then_some("accumulate"));
        all
    }

    fn problem(case: &EdgeCase) -> &ColumnSumsProblem {
        &case.problem
    }

    /// One strip, several, and a last one that is short; widths that vectors do and do not divide.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let mut cases = Vec::new();
        for (rows, width, stride) in [
            (1, 1, 1),
            (3, 5, 5),
            (256, 64, 64),
            (257, 130, 136),
            (1500, 33, 33),
            (700, 768, 2304),
            (5, 4100, 4100),
        ] {
            for accumulate in [false, true] {
                let problem = problem(rows, width, stride, precision.storage(), accumulate);
                cases.push(EdgeCase { problem, seed: 33_000 + cases.len() as u64 });
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let case = |rows, width, seed| EdgeCase {
            problem: problem(rows, width, width, precision.storage(), true),
            seed,
        };
        vec![case(2000, 100, 33_500), case(300, 1023, 33_501)]
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &ColumnSumsConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let bytes = dtype.encode(&fill(2 * case.seed, p.elements(), Distribution::Normal));
        let before = fill(2 * case.seed + 1, p.width as usize, Distribution::Normal);
        let scratch = scratch_of::<Self>(device, p, config);
        let run = || {
            let operands = ColumnSumsOperands {
                x: guarded(device, &padded(&bytes)),
                out: guarded(device, f32::as_bytes(&before)),
            };
            Self::launch(&Queue::Device(device), p, config, &operands, scratch.as_ref());
            let out = read(device, &operands.out, 4 * p.width as usize)?;
            intact(device, &operands.out)?;
            Ok::<_, CheckError>(out)
        };
        let out = run()?;
        if run()? != out {
            return Err(kernel_error("two launches differ"));
        }
        scratch.iter().try_for_each(|scratch| intact(device, scratch))?;
        verdict(p, &dtype.decode(&bytes)?, &before, &out)
    }

    /// Runs once more, because the sums before the measured launches are gone.
    fn verify_operands(
        device: &Device,
        p: &ColumnSumsProblem,
        operands: &ColumnSumsOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let config = Self::baseline(device.profile(), p).map_err(kernel_error)?;
        let x = read(device, &operands.x, p.elements() * p.dtype.size())?;
        let sums = || read(device, &operands.out, 4 * p.width as usize);
        let before = reference::DType::F32.decode(&sums()?)?;
        let scratch = Self::scratch(device, p, &config);
        Self::launch(&Queue::Device(device), p, &config, operands, scratch.as_ref());
        verdict(p, &reference_dtype(p.dtype).decode(&x)?, &before, &sums()?)
    }

    /// Bias gradients of GPT-2: 32 sequences of 1024 tokens.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<ColumnSumsProblem>> {
        let case = |rows, width, dtype| BenchCase::alone(problem(rows, width, width, dtype, true));
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(512, 768, DType::F32)],
            (_, Scale::Gpu) => [768, 3072].map(|width| case(32_768, width, DType::Bf16)).into(),
        }
    }

    fn instances() -> Vec<InstanceCase<ColumnSumsProblem>> {
        let case = |width, dtype, accumulate, max_candidates| InstanceCase {
            problem: problem(4096, width, width, dtype, accumulate),
            max_candidates,
            clean: usize::MAX,
        };
        vec![
            case(768, DType::Bf16, true, usize::MAX),
            case(768, DType::F32, false, 2),
            case(767, DType::F16, true, 1),
        ]
    }
}

fn problem(
    rows: u32,
    width: u32,
    stride: u32,
    dtype: DType,
    accumulate: bool,
) -> ColumnSumsProblem {
    ColumnSumsProblem { rows, width, stride, dtype, accumulate }.checked().expect("sizes are valid")
}

fn verdict(
    p: &ColumnSumsProblem,
    x: &[f32],
    before: &[f32],
    out: &[u8],
) -> Result<Verdict, CheckError> {
    let (width, stride) = (p.width as usize, p.stride as usize);
    let start = |c: usize| if p.accumulate { before[c] } else { 0.0 };
    let rows = || x.chunks(stride).map(|row| &row[..width]);
    let exact: Vec<f64> = (0..width)
        .map(|c| f64::from(start(c)) + rows().map(|row| f64::from(row[c])).sum::<f64>())
        .collect();
    let naive: Vec<f64> =
        (0..width).map(|c| f64::from(rows().fold(start(c), |sum, row| sum + row[c]))).collect();
    let f32 = reference::DType::F32;
    let comparison = compare(&f32.decode(out)?, &exact, &naive, f32)?;
    Ok(Verdict { comparison, digest: fnv1a(out) })
}
