//! Checks the gradients of embeddings against their reference.

use arch::{Backend, DType, Device};
use cubecl::prelude::CubeElement;
use kernels::embed_backward::{
    EmbedBackward, EmbedBackwardConfig, EmbedBackwardOperands, EmbedBackwardProblem, Segments,
};
use kernels::matmul::Precision;
use reference::{Distribution, compare, fill};
use serde_json::{Value, json};
use tune::Kernel;

use crate::case::{BenchCase, InstanceCase, Scale, Suite};
use crate::check::{
    CheckError, Verdict, fnv1a, guarded, launch_again, launch_in_place, padded, read,
    reference_dtype, values,
};
use crate::kernel::{KernelSuite, Params, insert_rules, params, precision};

/// Rows to verify.
#[derive(Debug, Clone)]
pub struct EdgeCase {
    pub problem: EmbedBackwardProblem,
    /// Token of each row.
    pub tokens: Vec<u32>,
    pub seed: u64,
}

impl KernelSuite for EmbedBackward {
    type Case = EdgeCase;

    fn precision(p: &EmbedBackwardProblem) -> Precision {
        precision(p.dtype)
    }

    fn params(p: &EmbedBackwardProblem) -> Params {
        let mut all = params([
            ("rows", p.rows.into()),
            ("hidden", p.hidden.into()),
            ("segments", p.segments.into()),
            ("vocab", p.vocab.into()),
            ("dtype", p.dtype.name().into()),
        ]);
        insert_rules(&mut all, p.accumulate.then_some("accumulate"));
        insert_rules(&mut all, (p.scale != 1.0).then_some("scaled"));
        all
    }

    fn problem(case: &EdgeCase) -> &EmbedBackwardProblem {
        &case.problem
    }

    /// One segment, one per row, and several; the first and the last row of the table.
    fn edge_cases(precision: Precision, _backend: Backend) -> Vec<EdgeCase> {
        let mut cases = Vec::new();
        for (rows, hidden, vocab, distinct) in [
            (1, 1, 1, 1),
            (9, 5, 4, 4),
            (300, 64, 1000, 1),
            (200, 33, 77, 77),
            (500, 768, 50, 13),
            (64, 2050, 64, 64),
        ] {
            for (accumulate, scale) in [(false, 1.0), (true, 27.5)] {
                let token = |row: u32| match row {
                    0 => vocab - 1,
                    row => row.wrapping_mul(0x9e37_79b1) % distinct,
                };
                let tokens: Vec<u32> = (0..rows).map(token).collect();
                let segments = Segments::new(&tokens).ids.len() as u32;
                let dtype = precision.storage();
                let problem = EmbedBackwardProblem {
                    scale,
                    accumulate,
                    ..problem([rows, hidden], [segments, vocab], dtype)
                };
                cases.push(EdgeCase { problem, tokens, seed: 38_000 + cases.len() as u64 });
            }
        }
        cases
    }

    fn config_cases(precision: Precision) -> Vec<EdgeCase> {
        let tokens: Vec<u32> = (0..777).map(|row| row * row % 31).collect();
        let segments = Segments::new(&tokens).ids.len() as u32;
        let problem = problem([777, 260], [segments, 40], precision.storage());
        vec![EdgeCase { problem, tokens, seed: 38_500 }]
    }

    fn verify(
        device: &Device,
        case: &EdgeCase,
        config: &EmbedBackwardConfig,
    ) -> Result<Verdict, CheckError> {
        let p = &case.problem;
        let dtype = reference_dtype(p.dtype);
        let made = |len, salt| fill(2 * case.seed + salt, len, Distribution::Normal);
        let dx = dtype.encode(&made(p.elements(), 0));
        let before = made(p.table(), 1);
        let segments = Segments::new(&case.tokens);
        let client = device.client();
        let words = |words: &[u32]| client.create_from_slice(u32::as_bytes(words));
        let operands = || EmbedBackwardOperands {
            dx: client.create_from_slice(&padded(&dx)),
            order: words(&segments.order),
            starts: words(&segments.starts),
            ids: words(&segments.ids),
            dtable: guarded(device, f32::as_bytes(&before)),
        };
        let writes = |operands: &EmbedBackwardOperands| vec![operands.dtable.clone()];
        let got = launch_in_place::<Self>(device, p, config, operands, writes)?;
        verdict(p, &dtype.decode(&dx)?, &segments, &before, &got[0])
    }

    fn verify_operands(
        device: &Device,
        p: &EmbedBackwardProblem,
        operands: &EmbedBackwardOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        let dx = values(device, &operands.dx, p.elements(), p.dtype)?;
        let before = values(device, &operands.dtable, p.table(), DType::F32)?;
        let words = |handle, len: u32| -> Result<Vec<u32>, CheckError> {
            Ok(u32::from_bytes(&read(device, handle, 4 * len as usize)?).to_vec())
        };
        let segments = Segments {
            order: words(&operands.order, p.rows)?,
            starts: words(&operands.starts, p.segments + 1)?,
            ids: words(&operands.ids, p.segments)?,
        };
        let got = launch_again::<Self>(device, p, operands, &[&operands.dtable])?;
        verdict(p, &dx, &segments, &before, &got[0])
    }

    /// Tokens of GPT-2: 32 sequences of 1024, of which some 5000 are distinct.
    fn bench_cases(suite: Suite, scale: Scale) -> Vec<BenchCase<EmbedBackwardProblem>> {
        let case = |rows, hidden, segments, vocab, dtype| {
            let of = problem([rows, hidden], [segments, vocab], dtype);
            BenchCase::alone(EmbedBackwardProblem { accumulate: true, ..of })
        };
        match (suite, scale) {
            (Suite::Quick | Suite::Documents, _) => Vec::new(),
            (_, Scale::Host) => vec![case(512, 768, 200, 1000, DType::F32)],
            (_, Scale::Gpu) => vec![case(32_768, 768, 5000, 50_257, DType::Bf16)],
        }
    }

    fn torch(p: &EmbedBackwardProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "rows": p.rows,
            "hidden": p.hidden,
            "segments": p.segments,
            "vocab": p.vocab,
            "dtype": p.dtype.name(),
        }))
    }

    fn instances() -> Vec<InstanceCase<EmbedBackwardProblem>> {
        let case = |hidden, dtype, accumulate, max_candidates| {
            let of = problem([4096, hidden], [1000, 50_257], dtype);
            let problem = EmbedBackwardProblem { accumulate, ..of };
            InstanceCase { problem, max_candidates, clean: usize::MAX }
        };
        vec![
            case(768, DType::Bf16, true, usize::MAX),
            case(4096, DType::F32, false, 2),
            case(767, DType::F16, true, 1),
        ]
    }
}

fn problem(
    [rows, hidden]: [u32; 2],
    [segments, vocab]: [u32; 2],
    dtype: DType,
) -> EmbedBackwardProblem {
    let (scale, accumulate) = (1.0, false);
    EmbedBackwardProblem { rows, hidden, segments, vocab, dtype, scale, accumulate }
        .checked()
        .expect("sizes are valid")
}

/// Compares the whole table: rows without a segment must stay.
fn verdict(
    p: &EmbedBackwardProblem,
    dx: &[f32],
    segments: &Segments,
    before: &[f32],
    got: &[u8],
) -> Result<Verdict, CheckError> {
    let hidden = p.hidden as usize;
    let mut exact: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
    let mut naive = before.to_vec();
    for (segment, id) in segments.ids.iter().enumerate() {
        let own = segments.starts[segment] as usize..segments.starts[segment + 1] as usize;
        let rows = &segments.order[own];
        for column in 0..hidden {
            let to = *id as usize * hidden + column;
            let of = |row: &u32| dx[*row as usize * hidden + column];
            let sum: f64 = rows.iter().map(|row| f64::from(of(row))).sum();
            let start = if p.accumulate { before[to] } else { 0.0 };
            exact[to] = f64::from(start) + f64::from(p.scale) * sum;
            naive[to] = start + p.scale * rows.iter().fold(0.0, |sum, row| sum + of(row));
        }
    }
    let naive: Vec<f64> = naive.iter().map(|x| f64::from(*x)).collect();
    let f32 = reference::DType::F32;
    let comparison = compare(&f32.decode(&got[..4 * p.table()])?, &exact, &naive, f32)?;
    Ok(Verdict { comparison, digest: fnv1a(got) })
}
