//! Checks rotations in place against their reference.

use arch::{Backend, DType, Device};
use cubecl::prelude::CubeElement;
use kernels::matmul::Precision;
use kernels::rope::in_place::{
    RopeInPlace, RopeInPlaceConfig, RopeInPlaceOperands, RopeInPlaceProblem,
};
use reference::{Distribution, compare, fill};

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, launch_again, launch_in_place, padded, read,
    reference_dtype, values,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};

/// Heads to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: RopeInPlaceProblem,
    /// Some tokens lie past the table.
    pub past: bool,
    pub seed: u64,
}

impl KernelSuite for RopeInPlace {
    type Case = EdgeCase;

    fn precision(p: &RopeInPlaceProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &RopeInPlaceProblem) -> Params {
        let mut all = params([
            ("rows", p.rows.into()),
            ("heads", p.heads.into()),
            ("head_dim", p.head_dim.into()),
            ("dim", p.dim.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        if p.stride != p.heads * p.head_dim {
            all.insert("stride".to_owned(), p.stride.into());
        }
        insert_rules(&mut all, p.inverse.then_some("inverse"));
        all
    }

    fn problem(case: &EdgeCase) -> &RopeInPlaceProblem {
        &case.problem
    }

    fn case_params(case: &EdgeCase) -> Params {
        let mut all = Self::params(&case.problem);
        insert_rules(&mut all, case.past.then_some("past"));
        all
    }

    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let mut cases = Vec::new();
        for (rows, heads, head_dim, dim, stride, past) in [
            (1, 1, 2, 2, 2, false),
            (5, 3, 6, 4, 24, false),
            (17, 4, 64, 64, 384, true),
            (40, 6, 80, 32, 480, false),
            (9, 2, 128, 128, 256, true),
        ] {
            for inverse in [false, true] {
                let dtype = precision.storage();
                let of = problem(rows, [heads, head_dim, dim], dtype, inverse);
                let problem = RopeInPlaceProblem { stride, ..of };
                cases.push(EdgeCase { problem, past, seed: 37_000 + cases.len() as u64 });
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let problem = problem(33, [3, 64, 64], precision.storage(), true);
        vec![EdgeCase { problem, past: false, seed: 37_500 }]
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &RopeInPlaceConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let made = |len, salt| fill(2 * case.seed + salt, len, Distribution::Normal);
        let heads = dtype.encode(&made(p.elements(), 0));
        let table = made((p.positions * p.dim) as usize, 1);
        let limit = if case.past { p.positions + 3 } else { p.positions };
        let position: Vec<u32> = (0..p.rows).map(|row| row.wrapping_mul(7) % limit).collect();
        let client = device.client();
        let operands = || RopeInPlaceOperands {
            heads: guarded(device, &padded(&heads)),
            position: client.create_from_slice(u32::as_bytes(&position)),
            table: client.create_from_slice(f32::as_bytes(&table)),
        };
        let writes = |operands: &RopeInPlaceOperands| vec![operands.heads.clone()];
        let got = launch_in_place::<Self>(device, p, config, operands, writes)?;
        verdict(p, &dtype.decode(&heads)?, &position, &table, &got[0])
    }

    fn verify_operands(
        device: &Device,
        p: &RopeInPlaceProblem,
        operands: &RopeInPlaceOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let before = values(device, &operands.heads, p.elements(), p.dtype)?;
        let table = values(device, &operands.table, (p.positions * p.dim) as usize, DType::F32)?;
        let position = read(device, &operands.position, 4 * p.rows as usize)?;
        let got = launch_again::<Self>(device, p, operands, &[&operands.heads])?;
        verdict(p, &before, u32::from_bytes(&position), &table, &got[0])
    }

    /// Queries and keys of an 8B model: 2 sequences of 2048 tokens.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<RopeInPlaceProblem>> {
        let case = |rows, heads, stride, dtype| {
            let of = problem(rows, [heads, 128, 128], dtype, true);
            BenchCase::alone(RopeInPlaceProblem { stride, ..of })
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(256, 8, 1024, DType::F32)],
            (_, Scale::Gpu) => vec![case(4096, 40, 6144, DType::Bf16)],
        }
    }

    fn instances() -> Vec<InstanceCase<RopeInPlaceProblem>> {
        let case = |head, dtype, inverse| InstanceCase {
            problem: problem(4096, head, dtype, inverse),
            max_candidates: usize::MAX,
            clean: usize::MAX,
        };
        vec![
            case([40, 128, 128], DType::Bf16, true),
            case([12, 64, 32], DType::F16, false),
            case([8, 80, 80], DType::F32, true),
        ]
    }
}

fn problem(
    rows: u32,
    [heads, head_dim, dim]: [u32; 3],
    dtype: DType,
    inverse: bool,
) -> RopeInPlaceProblem {
    let (stride, positions) = (heads * head_dim, rows.min(2048));
    RopeInPlaceProblem { rows, heads, head_dim, stride, dim, positions, dtype, inverse }
        .checked()
        .expect("sizes are valid")
}

fn verdict(
    p: &RopeInPlaceProblem,
    before: &[f32],
    position: &[u32],
    table: &[f32],
    got: &[u8],
) -> Result<Verdict, CheckError> {
    let dtype = reference_dtype(p.dtype);
    let [heads, head, stride, dim] =
        [p.heads, p.head_dim, p.stride, p.dim].map(|size| size as usize);
    let mut exact: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
    for (row, position) in position.iter().enumerate() {
        let angles = table.chunks(dim).nth(*position as usize);
        for first in (0..heads).map(|own| row * stride + own * head) {
            for pair in 0..dim / 2 {
                let (i, j) = (first + pair, first + pair + dim / 2);
                let (x, y) = (f64::from(before[i]), f64::from(before[j]));
                let [cos, sin] = angles.map_or([f64::NAN; 2], |angles| {
                    [pair, pair + dim / 2].map(|at| f64::from(angles[at]))
                });
                let sin = if p.inverse { -sin } else { sin };
                (exact[i], exact[j]) = (x * cos - y * sin, y * cos + x * sin);
            }
        }
    }
    let naive: Vec<f64> = exact.iter().map(|x| dtype.round(f64::from(*x as f32))).collect();
    let decoded = dtype.decode(&got[..before.len() * p.dtype.size()])?;
    let comparison = compare(&decoded, &exact, &naive, dtype)?;
    Ok(Verdict { comparison, digest: fnv1a(got) })
}
